#include "run/row_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>

#include "fusedmoe/quant.h"
#include "run/code_bound.h"
#include "support.h"

namespace fusedmoe::cli {

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

Tensor converted(const TensorView& from, DType dtype) {
  Tensor result = Tensor::empty(from.shape(), dtype);
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
         rows_beyond == rows_within_codes && rows_beyond <= most_beyond;
}

std::string RowCheck::text() const {
  std::string text = fmt::format(
      "{} of {} rows against reference in {}: largest difference {:.2e} of the "
      "largest value, tolerance {:.0e}{}: {}",
      rows, num_tokens, name(dtype), difference.max_norm_relative, tolerance,
      rows_within_codes == 0
          ? ""
          : fmt::format(", and up to {:.0e} in {} rows where codes of activations differ",
                        tolerance_with_codes, rows_within_codes),
      passed() ? "passed" : "FAILED");
  if (difference.nonfinite_mismatch) text += "; NaN or infinity where the other has none";
  if (rows_within_codes > 0 && rows_beyond > most_beyond) {
    text +=
        fmt::format("; {} rows are beyond the tolerance, more than the {} whose codes may differ",
                    rows_beyond, most_beyond);
  }
  if (rows_routed_differently) {
    text += fmt::format("; {} rows chose other experts", rows_routed_differently);
  }
  return text;
}

namespace {

/// Activations that are quantized must have been rounded as in the layer: then its dtype. Otherwise
/// f32, which shows all of the layer's roundings.
DType reference_dtype(const LayerWeights& weights, DType dtype) {
  const bool quantized =
      weights.experts.scheme.activations ||
      (weights.shared_experts && weights.shared_experts->weights.scheme.activations);
  return quantized ? dtype : DType::kF32;
}

template <typename Predicate>
bool any_scheme(const LayerWeights& weights, const Predicate& predicate) {
  return predicate(weights.experts.scheme) ||
         (weights.shared_experts && predicate(weights.shared_experts->weights.scheme));
}

/// Whether ranks compute a dynamic scale of what GEMM 2 reads from parts of the rows that the
/// reference computes it from: a scale of all rows from their own rows, and one of a row, where
/// they have slices of the experts, from their slice.
bool has_scales_of_ranks(const QuantScheme& scheme, const ParallelConfig& parallel) {
  if (parallel.num_ranks() == 1 || !scheme.activations || !scheme.activations->dynamic)
    return false;
  return batch_dependent(scheme) || (parallel.tp_size > 1 && scheme.activations->group.cols < 0);
}

/// `count` of num_tokens rows, spread evenly.
std::vector<std::int64_t> spread_rows(std::int64_t count, std::int64_t num_tokens) {
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < count; ++i) {
    rows.push_back(count > 1 ? i * (num_tokens - 1) / (count - 1) : 0);
  }
  return rows;
}

/// Which rows of `actual` are further from those of `expected` than the tolerance, and whether
/// codes that differ explain it. `bounds`: of each row of `expected`.
template <typename Bounds>
void compare_rows(const TensorView& actual, const TensorView& expected, const Bounds& bounds,
                  RowCheck& check) {
  const std::int64_t columns = expected.size(1);
  double largest = 0;
  for (std::int64_t i = 0; i < expected.numel(); ++i) {
    largest = std::max(largest, std::abs(double{expected.as<const float>()[i]}));
  }
  std::vector<double> codes;
  for (std::int64_t row = 0; row < expected.size(0); ++row) {
    double difference = 0;
    for (std::int64_t i = row * columns; i < (row + 1) * columns; ++i) {
      difference = std::max(difference, std::abs(double{actual.as<const float>()[i]} -
                                                 double{expected.as<const float>()[i]}));
    }
    if (difference <= check.tolerance * largest) continue;
    ++check.rows_beyond;
    if (codes.empty()) codes = bounds();
    const double allowed = check.tolerance * largest + codes[static_cast<std::size_t>(row)];
    if (difference > allowed) continue;
    ++check.rows_within_codes;
    check.tolerance_with_codes = std::max(check.tolerance_with_codes, allowed / largest);
  }
}

struct ReferenceRun {
  Tensor output, topk_ids;
};
ReferenceRun run_reference(const LayerWeights& weights, const TensorView& x, const Routing& routing,
                           const CheckedRun& as) {
  const MoeLayer reference(weights,
                           {.dtype = x.dtype(), .require = "reference", .hooks = as.hooks});
  const std::int64_t num_tokens = x.size(0);
  ReferenceRun run{Tensor::empty(x.shape(), x.dtype()),
                   Tensor::empty({num_tokens, reference.config().topk}, DType::kI32)};
  const std::size_t bytes = reference.workspace_bytes(num_tokens);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  if (as.replayed) {
    reference.forward_routed(x, routing, run.output, {workspace.data(), bytes});
  } else {
    reference.forward(x, run.output, {workspace.data(), bytes}, {.topk_ids = run.topk_ids});
  }
  return run;
}

}  // namespace

RowCheck check_rows(const LayerWeights& weights, const TensorView& x, const TensorView& output,
                    const CheckedRun& run) {
  RowCheck check;
  check.num_tokens = x.size(0);
  check.rows = std::min(run.count, check.num_tokens);
  constexpr double kOtherScales = 0.1;  // a code of e4m3 is up to 1/16 off
  const bool scales_of_ranks = any_scheme(weights, [&](const QuantScheme& scheme) {
    return has_scales_of_ranks(scheme, run.parallel);
  });
  check.tolerance =
      scales_of_ranks ? std::max(kOtherScales, tolerance(x.dtype())) : tolerance(x.dtype());
  check.dtype = reference_dtype(weights, x.dtype());
  if (check.rows == 0) return check;
  const std::vector<std::int64_t> rows = spread_rows(check.rows, check.num_tokens);
  // Rows that depend on their batch are computed in it.
  const std::vector<std::int64_t> run_rows =
      any_scheme(weights, batch_dependent) ? spread_rows(check.num_tokens, check.num_tokens) : rows;
  const Tensor its_x = converted(gather(x, run_rows), check.dtype);
  const Tensor its_ids = gather(run.routing.topk_ids, run_rows);
  const Tensor its_weights = gather(run.routing.topk_weights, run_rows);
  const Routing routing{its_ids, its_weights};
  const ReferenceRun expected = run_reference(weights, its_x, routing, run);
  std::vector<std::int64_t> expected_rows = rows;
  if (run_rows.size() == rows.size()) std::iota(expected_rows.begin(), expected_rows.end(), 0);

  const Tensor got = converted(gather(output, rows), DType::kF32);
  const Tensor wanted = converted(gather(expected.output, expected_rows), DType::kF32);
  check.difference = testing::compare(got, wanted);
  check.most_beyond = most_rows_with_other_codes(weights, check.rows);
  compare_rows(
      got, wanted,
      [&] {
        const auto all = bounds_of_one_code(weights, its_x, routing);
        std::vector<double> of_rows;
        of_rows.reserve(expected_rows.size());
        for (const std::int64_t row : expected_rows) {
          of_rows.push_back(all[static_cast<std::size_t>(row)]);
        }
        return of_rows;
      },
      check);
  for (std::size_t i = 0; i < rows.size() && !run.replayed; ++i) {
    if (ids_of_row(run.routing.topk_ids, rows[i]) !=
        ids_of_row(expected.topk_ids, expected_rows[i])) {
      ++check.rows_routed_differently;
    }
  }
  return check;
}

}  // namespace fusedmoe::cli
