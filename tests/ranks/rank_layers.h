// A layer on several ranks and the same layer on one, for comparison.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "../unit/layer_problem.h"
#include "fusedmoe/layer.h"
#include "ranks.h"
#include "testing/compare.h"

namespace fusedmoe::testing {

/// What the tests of transports go through: each with memory that is lent, and with messages.
struct Way {
  const char* transport;
  bool lend;
};
inline constexpr Way kWays[] = {{"all2all", true},
                                {"allgather_reducescatter", true},
                                {"all2all", false},
                                {"allgather_reducescatter", false}};
inline std::string name_of(const ::testing::TestParamInfo<Way>& info) {
  return std::string(info.param.transport) + (info.param.lend ? "_lending" : "_messages");
}

/// Six experts, which three ranks share evenly.
inline LayerWeights small_weights() {
  return make_layer_weights({Case{.num_experts = 6}});
}

/// How a layer runs on ranks.
struct RankCase {
  int size = 2;
  std::string transport = "all2all";
  bool lend = true;  ///< ranks read each other's memory; else they send messages
  bool cut = false;  ///< messages are sequences of bytes, so that rows need not be packed
  std::optional<ExpertPlacement> placement = {};
  std::optional<CombineMode> combine = {};
  std::optional<DType> dispatch_dtype = {};
  bool batch_invariant = false;
  bool fixed_sizes = false;
  bool monolithic = false;
  ReplicaChoice replica_choice = ReplicaChoice::kHash;
  std::string experts = "cpu";
  ParallelConfig parallel = {};  ///< of rank 0; default: expert parallelism
  std::optional<Deployment> deployment = {};
};

inline LayerOptions one_rank_options(const RankCase& how, DType dtype) {
  LayerOptions options;
  options.dtype = dtype;
  options.batch_invariant = how.batch_invariant;
  options.require = how.experts;
  options.num_threads = 1;
  return options;
}

inline LayerOptions rank_options(const RankCase& how, DType dtype, std::int64_t max_tokens,
                                 const std::shared_ptr<Communicator>& communicator) {
  LayerOptions options = one_rank_options(how, dtype);
  options.require += "+" + how.transport;
  options.monolithic = how.monolithic;
  options.ranks.communicator = communicator;
  options.ranks.placement = how.placement;
  options.ranks.combine = how.combine;
  options.ranks.dispatch_dtype = how.dispatch_dtype;
  options.ranks.replica_choice = how.replica_choice;
  options.ranks.max_tokens_per_rank = max_tokens;
  if (how.deployment) {
    Deployment deployment = *how.deployment;
    deployment.rank = communicator->rank();
    options.parallel = ParallelConfig::of(deployment);
  }
  return options;
}

/// A forward with a workspace of exactly the size that the layer asks for, everything poisoned.
/// `dropped`, if given, becomes the number of dropped rows.
inline Tensor forward_exactly(const MoeLayer& layer, const TensorView& x, std::int64_t most,
                              const Routing* routing = nullptr, std::int32_t* dropped = nullptr,
                              bool fixed_sizes = false) {
  const std::size_t bytes = layer.workspace_bytes(std::max(most, x.size(0)), fixed_sizes);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  const Tensor output = Tensor::empty(x.shape(), x.dtype());
  poison(workspace);
  poison(output);
  ForwardOptions options;
  options.max_tokens = most;
  options.fixed_sizes = fixed_sizes;
  if (dropped) options.dropped_rows = TensorView(dropped, DType::kI32, {1});
  if (routing) {
    layer.forward_routed(x, *routing, output, {workspace.data(), bytes}, options);
  } else {
    layer.forward(x, output, {workspace.data(), bytes}, options);
  }
  return output;
}
/// The same with the sizes of a case.
inline Tensor forward_exactly(const RankCase& how, const MoeLayer& layer, const TensorView& x,
                              std::int64_t most, const Routing* routing = nullptr) {
  return forward_exactly(layer, x, most, routing, nullptr, how.fixed_sizes);
}

}  // namespace fusedmoe::testing
