#include "tools/load_statistics.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace fusedmoe {

LoadStatistics load_statistics(const TensorView& topk_ids, std::int64_t num_experts) {
  core::check_tensor(topk_ids, "topk_ids", DType::kI32, {-1, -1});
  FUSEDMOE_CHECK(num_experts >= 1 && topk_ids.size(1) <= num_experts, "num_experts",
                 core::to_string(num_experts), "at least 1 and the columns of topk_ids");
  LoadStatistics load;
  load.num_tokens = topk_ids.size(0);
  load.topk = topk_ids.size(1);
  load.rows_per_expert.resize(static_cast<std::size_t>(num_experts));
  const auto* ids = topk_ids.as<const std::int32_t>();
  for (std::int64_t i = 0; i < topk_ids.numel(); ++i) {
    if (ids[i] == -1) continue;
    FUSEDMOE_CHECK(ids[i] >= 0 && ids[i] < num_experts, "topk_ids",
                   core::format("{} at [{}, {}]", ids[i], i / load.topk, i % load.topk),
                   core::format("-1 or in [0, {})", num_experts));
    ++load.rows_per_expert[static_cast<std::size_t>(ids[i])];
  }
  for (const std::int64_t rows : load.rows_per_expert) {
    load.rows += rows;
    load.most = std::max(load.most, rows);
    load.distinct_experts += rows > 0;
  }
  const auto experts = static_cast<double>(num_experts);
  if (load.rows > 0) {
    load.balance = static_cast<double>(load.most) * experts / static_cast<double>(load.rows);
  }
  const double missed = std::pow(1 - static_cast<double>(load.topk) / experts, load.num_tokens);
  load.expected_distinct_experts = experts * (1 - missed);
  return load;
}

}  // namespace fusedmoe
