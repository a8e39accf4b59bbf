// Names, reason codes and workspace sizes of the experts interface.
#include "fusedmoe/experts.h"

#include <algorithm>

#include "core/format.h"
#include "core/workspace.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

std::string_view name(ActivationFormat format) {
  switch (format) {
    case ActivationFormat::kStandard:
      return "standard";
    case ActivationFormat::kBatchedExperts:
      return "batched_experts";
  }
  return "unknown";
}

std::string_view name(WeightAndReduce kind) {
  switch (kind) {
    case WeightAndReduce::kNoOp:
      return "no_op";
    case WeightAndReduce::kContiguous:
      return "contiguous";
    case WeightAndReduce::kNaiveBatched:
      return "naive_batched";
    case WeightAndReduce::kDelegate:
      return "delegate";
  }
  return "unknown";
}

ProblemSize ProblemSize::of(const MoeConfig& config, std::int64_t num_tokens) {
  return {num_tokens,   config.topk,  config.num_local_experts, config.hidden, config.intermediate,
          config.dtype, config.scheme};
}

ProblemSize ProblemSize::of(const PackedWeights::Info& weights, std::int64_t num_tokens,
                            std::int64_t topk, DType dtype) {
  return {num_tokens,           topk,  weights.num_experts, weights.hidden,
          weights.intermediate, dtype, weights.scheme};
}

bool Experts::expects_unquantized_inputs(const QuantScheme& scheme) const {
  return !scheme.activations || scheme.activations->value == DType::kE2M1;
}

std::vector<std::string> Experts::tile_plans(const ProblemSize&, Device) const {
  return {};
}

ExpertWeights Experts::unpack(const PackedWeights&, std::int64_t) const {
  throw Error::unsupported(Reason::kOperation, "experts",
                           core::format("{} cannot unpack weights", name()));
}

void Experts::repack(const ExpertWeights&, std::int64_t, PackedWeights&) const {
  throw Error::unsupported(Reason::kOperation, "experts",
                           core::format("{} cannot repack weights", name()));
}

std::size_t WorkspacePlan::common_bytes() const {
  // A plan without an output shape has no output, not one element.
  const std::int64_t elements = output_shape.rank() ? output_shape.numel() : 0;
  return std::max(workspace13_bytes, static_cast<std::size_t>(bytes(output_dtype, elements)));
}

std::size_t WorkspacePlan::total_bytes() const {
  return core::round_up_workspace(common_bytes()) + core::round_up_workspace(workspace2_bytes);
}

}  // namespace fusedmoe
