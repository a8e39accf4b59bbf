#include "cuda/experts/planner.h"

#include <algorithm>
#include <span>
#include <utility>

#include "cuda/formats/weight_formats.h"
#include "fusedmoe/runtime.h"
#include "moe/routed_experts.h"
#include "moe/tuned_configs.h"

namespace fusedmoe::cuda {

Planner::Planner(const MoeConfig& config, const Context& context, const KernelFamily& family,
                 const DeviceLimits& device)
    : config_(config),
      family_(family),
      format_(*find_weight_format(config.scheme, config.dtype)),
      rows_(config, format_, family),
      variant_(variant_of(config)),
      device_(device),
      one_token_(config, format_, rows_, device) {
  // Tuned configurations are for one number of tokens: rows would depend on their batch.
  if (!context.tuned || config.batch_invariant) return;
  TunedConfig layer;
  layer.device = device_name(config.device);
  layer.experts = family.name();
  layer.scheme = name(config.scheme);
  layer.hidden = config.hidden;
  layer.intermediate = config.intermediate;
  layer.num_local_experts = config.num_local_experts;
  layer.topk = batched() ? 1 : config.topk;
  for (const TunedConfig& tuned : context.tuned->of_layer(layer)) {
    if (const int found = find_config(family, tuned.config); found >= 0) {
      tuned_.push_back({tuned.num_tokens, family.configs()[static_cast<std::size_t>(found)]});
    }
  }
}

WorkspaceSizes Planner::workspace_sizes(const ProblemSize& problem) const {
  WorkspaceSizes sizes = core::output_sizes(config_, problem);
  if (batched()) sizes.output_dtype = problem.dtype;
  if (problem.num_tokens == 0) return sizes;
  // Room for any configuration, for these and for fewer tokens: rows in f32 take more, and so may
  // one token.
  const std::int64_t most_f32 = max_tokens_f32(shape_of(problem));
  for (const std::int64_t num_tokens :
       {problem.num_tokens, std::min(problem.num_tokens, most_f32), std::int64_t{1}}) {
    if (num_tokens == 0) continue;
    ProblemSize smaller = problem;
    smaller.num_tokens = num_tokens;
    const Scratch scratch = scratch_of(smaller, largest_config(shape_of(smaller)), nullptr);
    sizes.workspace2_bytes = std::max(sizes.workspace2_bytes, scratch.bytes);
  }
  return sizes;
}

MlpShape Planner::shape_of(const ProblemSize& problem) const {
  MlpShape shape;
  shape.family = &family_;
  shape.format = &format_;
  shape.batched = batched();
  shape.unfused = variant_ == Variant::kUnfused;
  const auto stores_groups = [&](const TileShape& tile) { return rows_.stores_groups(tile); };
  const auto tiles = family_.tiles(format_);
  shape.stores_groups = std::any_of(tiles.begin(), tiles.end(), stores_groups);
  shape.batch_invariant = variant_ == Variant::kBatchInvariant;
  shape.has_one_token = one_token_.supports(problem);
  shape.num_tokens = problem.num_tokens;
  shape.topk = batched() ? 1 : problem.topk;
  // expected_rows counts rows of local experts; the heuristic wants tokens: rows / topk.
  if (problem.expected_rows > 0) {
    const std::int64_t share = batched() ? problem.num_local_experts : problem.topk;
    shape.expected_tokens = std::max<std::int64_t>(1, problem.expected_rows / share);
  }
  shape.num_local_experts = problem.num_local_experts;
  shape.num_experts = config_.num_experts;
  shape.hidden = problem.hidden;
  shape.intermediate = problem.intermediate;
  shape.gated = is_gated(config_.activation);
  shape.multiprocessors = device_.multiprocessors;
  shape.l2_bytes = device_.l2_bytes;
  shape.multiprocessor_shared_bytes = device_.multiprocessor_shared_bytes;
  return shape;
}

KernelConfig Planner::config_for(const ProblemSize& problem, int requested, bool in_tiles) const {
  MlpShape shape = shape_of(problem);
  if (in_tiles) shape.has_one_token = false;
  const auto configs = family_.configs();
  if (requested >= 0 && requested < static_cast<int>(configs.size())) {
    const KernelConfig& config = configs[static_cast<std::size_t>(requested)];
    if (valid(shape, config)) return config;
  }
  // `tune` timed layers whose experts are all local; the batched format at its capacity.
  const std::int64_t num_tokens = batched() ? problem.num_tokens : likely_tokens(shape);
  const TunedTokens* tuned = nearest(std::span<const TunedTokens>(tuned_), num_tokens,
                                     [&](const TunedTokens& t) { return valid(shape, t.config); });
  return tuned ? tuned->config : choose_config(shape);
}

std::vector<std::string> Planner::kernel_configs(const ProblemSize& problem) const {
  if (problem.num_tokens == 0) return {};
  std::vector<std::string> names{to_string(config_for(problem, -1))};
  for (const KernelConfig& config : valid_configs(shape_of(problem))) {
    if (std::string name = to_string(config); name != names.front()) {
      names.push_back(std::move(name));
    }
  }
  return names;
}

KernelConfig choose_config(const MlpShape& shape) {
  return prefers_one_token(shape) ? kOneToken : shape.family->choose(shape);
}

}  // namespace fusedmoe::cuda
