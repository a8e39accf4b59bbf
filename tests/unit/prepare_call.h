// prepare and finalize called by themselves.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>

#include "fake_experts.h"
#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::testing {

struct PrepareCall {
  Tensor hidden_states, topk_ids, topk_weights, expert_map;
  std::int64_t num_local_experts = 4;
  Preparation preparation;
  Tensor workspace;

  ProblemSize problem() const {
    ProblemSize problem;
    problem.num_tokens = topk_ids.size(0);
    problem.topk = topk_ids.size(1);
    problem.num_local_experts = num_local_experts;
    problem.hidden = hidden_states.size(1);
    problem.dtype = hidden_states.dtype();
    return problem;
  }

  static std::shared_ptr<const PackedWeights> packed(std::int64_t experts, std::int64_t hidden) {
    return FakeExperts::pack_sizes(experts, hidden);
  }

  /// The arguments behind prepare.
  ForwardArgs prepare(const PrepareFinalizeDescriptor& descriptor) {
    const auto object = descriptor.create({}, {});
    const auto size =
        static_cast<std::int64_t>(object->sizes(problem(), preparation).workspace_bytes);
    workspace = Tensor::empty({size}, DType::kU8);
    std::memset(workspace.data(), 0xff, static_cast<std::size_t>(size));
    const auto weights = packed(num_local_experts, hidden_states.size(1));
    ForwardArgs args;
    args.weights = weights.get();
    args.hidden_states = hidden_states;
    args.topk_ids = topk_ids;
    args.topk_weights = topk_weights;
    args.expert_map = expert_map;
    args.preparation = preparation;
    args.prepare_workspace = workspace.data();
    object->start_prepare(args);
    object->finish_prepare(args);
    args.weights = nullptr;  // gone with this function
    return args;
  }

  Tensor finalize(const PrepareFinalizeDescriptor& descriptor, const TensorView& fused_output,
                  WeightAndReduce kind) const {
    const auto object = descriptor.create({}, {});
    const auto weights = packed(num_local_experts, fused_output.size(fused_output.rank() - 1));
    Tensor output = Tensor::empty({topk_ids.size(0), fused_output.size(fused_output.rank() - 1)},
                                  fused_output.dtype());
    fill_nan(output);
    ForwardArgs args;
    args.weights = weights.get();
    args.output = output;
    args.fused_output = fused_output;
    args.topk_ids = topk_ids;
    args.topk_weights = topk_weights;
    args.expert_map = expert_map;
    args.preparation = preparation;
    args.weight_and_reduce = kind;
    args.prepare_workspace = workspace.data();
    object->start_finalize(args);
    object->finish_finalize(args);
    return output;
  }
};

}  // namespace fusedmoe::testing
