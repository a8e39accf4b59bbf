#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>

#include "fusedmoe/formats.h"
#include "support.h"

namespace fusedmoe::cli {

std::vector<std::int64_t> expert_load(const TensorView& topk_ids, std::int64_t num_experts) {
  std::vector<std::int64_t> load(static_cast<std::size_t>(num_experts));
  const auto* ids = topk_ids.as<const std::int32_t>();
  for (std::int64_t i = 0; i < topk_ids.numel(); ++i) {
    if (ids[i] >= 0 && ids[i] < num_experts) ++load[static_cast<std::size_t>(ids[i])];
  }
  return load;
}

std::string load_chart(const std::vector<std::int64_t>& load) {
  constexpr std::size_t kMostBars = 64, kBusiest = 32;
  constexpr std::int64_t kWidth = 50;
  std::vector<std::size_t> shown(load.size());
  std::iota(shown.begin(), shown.end(), std::size_t{0});
  if (shown.size() > kMostBars) {
    std::stable_sort(shown.begin(), shown.end(),
                     [&](std::size_t a, std::size_t b) { return load[a] > load[b]; });
    shown.resize(kBusiest);
  }
  const std::int64_t most = load.empty() ? 0 : *std::max_element(load.begin(), load.end());
  const std::int64_t rows = std::accumulate(load.begin(), load.end(), std::int64_t{0});
  const auto hit = std::count_if(load.begin(), load.end(), [](auto rows) { return rows > 0; });

  std::string chart;
  for (const std::size_t expert : shown) {
    const std::int64_t bar = most ? (load[expert] * kWidth + most - 1) / most : 0;
    chart += fmt::format("expert {:4} {:4} {:#<{}}\n", expert, load[expert], "", bar);
  }
  const double mean =
      load.empty() ? 0 : static_cast<double>(rows) / static_cast<double>(load.size());
  chart +=
      fmt::format("{} rows on {} of {} experts; the busiest has {}, {:.2f} times the mean\n", rows,
                  hit, load.size(), most, mean > 0 ? static_cast<double>(most) / mean : 0);
  return chart;
}

namespace {

/// bf16 and f16 round the activations between the GEMMs and the output to 8 and 11 significant
/// bits: some 2^-8 and 2^-11 of a value each, and several such roundings add up. In f32 only the
/// order of the sums differs.
double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 1e-5;
    case DType::kF16:
      return 2e-3;
    default:
      return 1e-2;
  }
}

/// Rows `rows` of a contiguous (n, columns) tensor, as f32 or i32 as they are.
Tensor gather(const TensorView& from, const std::vector<std::int64_t>& rows) {
  Tensor result =
      Tensor::empty({static_cast<std::int64_t>(rows.size()), from.size(1)}, from.dtype());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const TensorView row = from.select(0, rows[i]);
    std::memcpy(result.select(0, static_cast<std::int64_t>(i)).data(), row.data(),
                static_cast<std::size_t>(row.nbytes()));
  }
  return result;
}

Tensor to_f32(const TensorView& from) {
  Tensor result = Tensor::empty(from.shape(), DType::kF32);
  convert(from, result);
  return result;
}

std::multiset<std::int32_t> ids_of_row(const TensorView& topk_ids, std::int64_t row) {
  const auto* ids = topk_ids.select(0, row).as<const std::int32_t>();
  return {ids, ids + topk_ids.size(1)};
}

}  // namespace

bool RowCheck::passed() const {
  return rows_routed_differently == 0 && !difference.nonfinite_mismatch &&
         difference.max_norm_relative <= tolerance;
}

std::string RowCheck::text() const {
  std::string text = fmt::format(
      "{} of {} rows against reference in f32: largest difference {:.2e} of the "
      "largest value, tolerance {:.0e}: {}",
      rows, num_tokens, difference.max_norm_relative, tolerance, passed() ? "passed" : "FAILED");
  if (difference.nonfinite_mismatch) text += "; NaN or infinity where the other has none";
  if (rows_routed_differently) {
    text += fmt::format("; {} rows chose other experts", rows_routed_differently);
  }
  return text;
}

RowCheck check_rows(const LayerWeights& weights, const TensorView& x, const TensorView& output,
                    const TensorView& topk_ids, std::int64_t count) {
  RowCheck check;
  check.num_tokens = x.size(0);
  check.rows = std::min(count, check.num_tokens);
  check.tolerance = tolerance(x.dtype());
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < check.rows; ++i) {
    const std::int64_t last = check.num_tokens - 1;
    rows.push_back(check.rows > 1 ? i * last / (check.rows - 1) : 0);
  }
  if (rows.empty()) return check;

  const MoeLayer reference(weights, {.dtype = DType::kF32, .require = "reference"});
  const Tensor sample = to_f32(gather(x, rows));
  const Tensor expected = Tensor::empty(sample.shape(), DType::kF32);
  const Tensor expected_ids = Tensor::empty({check.rows, topk_ids.size(1)}, DType::kI32);
  const std::size_t bytes = reference.workspace_bytes(check.rows);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  reference.forward(sample, expected, {workspace.data(), bytes}, {.topk_ids = expected_ids});

  check.difference = testing::compare(to_f32(gather(output, rows)), expected);
  for (std::int64_t i = 0; i < check.rows; ++i) {
    if (ids_of_row(topk_ids, rows[static_cast<std::size_t>(i)]) != ids_of_row(expected_ids, i)) {
      ++check.rows_routed_differently;
    }
  }
  return check;
}

}  // namespace fusedmoe::cli
