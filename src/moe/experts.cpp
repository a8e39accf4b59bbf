// Names, reason codes and workspace sizes of the experts interface.
#include "fusedmoe/experts.h"

#include <algorithm>

#include "core/format.h"
#include "core/parallel.h"
#include "core/workspace.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "moe/check_args.h"

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
    case WeightAndReduce::kDelegate:
      return "delegate";
  }
  return "unknown";
}

std::string_view name(CombineMode mode) {
  return mode == CombineMode::kPerSlot ? "per_slot" : "per_rank";
}

CombineMode parse_combine_mode(std::string_view text) {
  for (const CombineMode mode : {CombineMode::kPerRank, CombineMode::kPerSlot}) {
    if (name(mode) == text) return mode;
  }
  throw Error::unknown_name("combine", text, "per_rank, per_slot");
}

MoeConfig moe_config(const ExpertWeights& weights, std::int64_t topk, DType dtype, Device device) {
  MoeConfig config;
  config.num_experts = config.num_local_experts = weights.num_experts();
  config.topk = topk;
  config.hidden = weights.hidden;
  config.intermediate = weights.intermediate;
  config.dtype = dtype;
  config.scheme = weights.scheme;
  config.activation = weights.activation;
  config.activation_params = weights.activation_params;
  config.has_bias = weights.has_bias();
  config.device = device;
  return config;
}

bool ExpertsDescriptor::expects_unquantized_inputs(const QuantScheme& scheme) const {
  return !scheme.activations || scheme.activations->value == DType::kE2M1;
}

bool ExpertsDescriptor::takes_quantized_inputs(const QuantScheme&) const {
  return false;
}

WeightAndReduce ExpertsDescriptor::weight_and_reduce(ActivationFormat format) const {
  return format == ActivationFormat::kBatchedExperts ? WeightAndReduce::kDelegate
                                                     : WeightAndReduce::kNoOp;
}

Experts::Experts(const ExpertsDescriptor& descriptor, MoeConfig config, Context context)
    : descriptor_(descriptor), config_(config), context_(std::move(context)) {
  core::check_num_threads(context_.num_threads);
  if (context_.num_threads == 0) context_.num_threads = num_threads();
}

std::vector<std::string> Experts::kernel_configs(const ProblemSize&) const {
  return {};
}

int Experts::find_kernel_config(std::string_view) const {
  return -1;
}

std::int64_t ExpertsDescriptor::packed_bytes(const MoeConfig&) const {
  return 0;
}

PackedParts PackedWeights::parts() const {
  throw Error::unsupported(
      Reason::kOperation, "packed",
      core::format("{} has no layout of its own to keep", info_.implementation));
}

namespace {

Error no_moving(std::string_view implementation) {
  return Error::unsupported(Reason::kOperation, "moving experts",
                            core::format("{} cannot move experts between ranks", implementation));
}

}  // namespace

std::string PackedWeights::expert_layout() const {
  throw no_moving(info_.implementation);
}
std::shared_ptr<PackedWeights> PackedWeights::extract_expert(std::int64_t) const {
  throw no_moving(info_.implementation);
}
void PackedWeights::replace_expert(std::int64_t, const PackedWeights&) {
  throw no_moving(info_.implementation);
}
std::shared_ptr<PackedWeights> Experts::make_room(const PackedWeights&) const {
  throw no_moving(descriptor_.name());
}

PackedParts Experts::expert_parts(const PackedWeights& packed, std::int64_t expert) const {
  return packed.extract_expert(expert)->parts();
}

void Experts::replace_expert(PackedWeights& packed, std::int64_t expert, const PackedWeights& one,
                             Stream) const {
  packed.replace_expert(expert, one);
}

std::shared_ptr<PackedWeights> Experts::from_parts(PackedWeights::Info, const PackedParts&) const {
  throw Error::unsupported(Reason::kOperation, "experts",
                           core::format("{} has no layout of its own to read", descriptor_.name()));
}

ExpertWeights Experts::unpack(const PackedWeights&, std::int64_t) const {
  throw Error::unsupported(Reason::kOperation, "experts",
                           core::format("{} cannot unpack weights", descriptor_.name()));
}

void Experts::repack(const ExpertWeights&, std::int64_t, PackedWeights&) const {
  throw Error::unsupported(Reason::kOperation, "experts",
                           core::format("{} cannot repack weights", descriptor_.name()));
}

void Experts::apply(const ForwardArgs& args) const {
  core::check_experts_args(*this, args);
  const CurrentDevice current(args.stream.device);
  run(args);
}

std::size_t WorkspaceSizes::common_bytes() const {
  // A plan without an output shape has no output, not one element.
  const std::int64_t elements = output_shape.rank() ? output_shape.numel() : 0;
  return std::max(workspace13_bytes, static_cast<std::size_t>(bytes(output_dtype, elements)));
}

}  // namespace fusedmoe
