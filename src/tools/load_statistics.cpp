#include "tools/load_statistics.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/check.h"
#include "fusedmoe/router.h"

namespace fusedmoe {

LoadStatistics load_statistics(const TensorView& topk_ids, std::int64_t num_experts) {
  core::check_tensor(topk_ids, "topk_ids", DType::kI32, {-1, -1});
  FUSEDMOE_CHECK(num_experts >= 1 && topk_ids.size(1) <= num_experts, "num_experts",
                 core::to_string(num_experts), "at least 1 and the columns of topk_ids");
  const std::int64_t num_tokens = topk_ids.size(0), topk = topk_ids.size(1);
  std::vector<std::int32_t> rows(static_cast<std::size_t>(num_experts));
  const auto* ids = topk_ids.as<const std::int32_t>();
  for (std::int64_t i = 0; i < topk_ids.numel(); ++i) {
    if (ids[i] == -1) continue;
    FUSEDMOE_CHECK(ids[i] >= 0 && ids[i] < num_experts, "topk_ids",
                   core::format("{} at [{}, {}]", ids[i], i / topk, i % topk),
                   core::format("-1 or in [0, {})", num_experts));
    ++rows[static_cast<std::size_t>(ids[i])];
  }
  return load_statistics(TensorView(rows.data(), DType::kI32, {num_experts}), num_tokens, topk);
}

LoadStatistics load_statistics(const TensorView& expert_load, std::int64_t num_tokens,
                               std::int64_t topk) {
  core::check_tensor(expert_load, "expert_load", DType::kI32, {-1});
  const auto* counts = expert_load.as<const std::int32_t>();
  LoadStatistics load;
  load.num_tokens = num_tokens;
  load.topk = topk;
  load.rows_per_expert.assign(counts, counts + expert_load.numel());
  for (const std::int64_t rows : load.rows_per_expert) {
    load.rows += rows;
    load.most = std::max(load.most, rows);
    load.distinct_experts += rows > 0;
  }
  const auto experts = static_cast<double>(load.num_experts());
  if (load.rows > 0) {
    load.balance = static_cast<double>(load.most) * experts / static_cast<double>(load.rows);
  }
  const double missed = std::pow(1 - static_cast<double>(topk) / experts, num_tokens);
  load.expected_distinct_experts = experts * (1 - missed);
  return load;
}

double shared_with_previous(const TensorView& topk_ids, std::int64_t num_experts) {
  const std::int64_t num_tokens = topk_ids.size(0), words = (num_experts + 31) / 32;
  if (num_tokens < 2) return 0;
  const Tensor bitmatrix = Tensor::empty({num_tokens, words}, DType::kI32);
  build_bitmatrix(topk_ids, {}, num_experts, bitmatrix);
  const auto* bits = bitmatrix.as<const std::uint32_t>();
  std::int64_t shared = 0;
  for (std::int64_t i = words; i < num_tokens * words; ++i) {
    shared += std::popcount(bits[i] & bits[i - words]);
  }
  return static_cast<double>(shared) / static_cast<double>(num_tokens - 1);
}

}  // namespace fusedmoe
