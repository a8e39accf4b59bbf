// The descriptors of the PrepareAndFinalize across ranks: what they can serve.
#include "layer/rank_transports.h"
#include "core/check.h"
#include "layer/rank_exchange.h"
#include "moe/backend.h"
#include "quant/quantize.h"

namespace fusedmoe {
namespace layer {

Support supports_parallel(const ParallelConfig& parallel) {
  try {
    parallel.validate();
  } catch (const Error& error) {
    return Support::no(Reason::kParallelConfig, error.what());
  }
  return Support::yes();
}

Support supports_rows(const MoeConfig& config) {
  if (!core::is_activation_dtype(config.dtype)) {
    return Support::no(Reason::kDType,
                       core::format("{}: hidden states are f32, bf16 or f16", name(config.dtype)));
  }
  if (config.batch_invariant && batch_dependent(config.scheme)) {
    return Support::no(
        Reason::kBatchInvariance,
        core::format("{}: one activation scale for all rows of a batch", name(config.scheme)));
  }
  if (config.apply_router_weight_on_input && config.topk != 1) {
    return Support::no(Reason::kRouterWeightOnInput,
                       core::format("topk {}: only for topk = 1", config.topk));
  }
  return supports_parallel(config.parallel);
}

Support supports_dispatch_dtype(const MoeConfig& config) {
  if (!config.dispatch_dtype) return Support::yes();
  const DType wanted = *config.dispatch_dtype;
  const std::optional<QuantKey>& key = config.scheme.activations;
  const auto no = [&](Reason reason, std::string_view why) {
    return Support::no(reason, core::format("dispatch_dtype {}: {}", name(wanted), why));
  };
  if (wanted == config.dtype) {
    if (!batch_dependent(config.scheme)) return Support::yes();
    return no(
        Reason::kQuantScheme,
        "the tensor's dynamic scale is made of the sender's rows, so they must be quantized before "
        "they travel");
  }
  if (!key || wanted != key->value) {
    return no(
        Reason::kDType,
        core::format("experts of {} read rows of {}{}", name(config.scheme), name(config.dtype),
                     key ? core::format(" or {}", name(key->value)) : std::string()));
  }
  if (key->global_scale) {
    return no(
        Reason::kQuantScheme,
        "each expert scales rows by a factor of its own, so a row cannot be quantized before its "
        "expert is known");
  }
  if (!config.device.is_cpu() && !core::has_cuda_quantizer(*key)) {
    return no(Reason::kQuantScheme, "rows of this format are quantized on the cpu only");
  }
  return Support::yes();
}

/// What holds for both.
namespace {

Support supports_exchange(const MoeConfig& config) {
  if (Support support = supports_rows(config); !support) return support;
  const auto ranks = static_cast<int>(config.parallel.num_ranks());
  if (!config.device.is_cpu() && ranks > core::kMostRanksOnCuda) {
    return Support::no(Reason::kParallelConfig,
                       core::format("{} ranks: at most {} on cuda", ranks, core::kMostRanksOnCuda));
  }
  if (config.parallel.needs_dispatch()) return supports_dispatch_dtype(config);
  return Support::no(Reason::kParallelConfig, "every rank has all tokens: nothing to send");
}

Support supports_all2all(const MoeConfig& config) {
  if (config.monolithic) {
    return Support::no(Reason::kRoutingMethod,
                       "monolithic: ids decide where rows go before the experts; "
                       "allgather_reducescatter serves them");
  }
  if (config.parallel.ep_size > 1) return Support::yes();
  return Support::no(Reason::kParallelConfig,
                     "ep_size 1: every rank holds slices of all experts, so all need all rows");
}

Support supports_allgather(const MoeConfig& config) {
  if (config.combine != CombineMode::kPerSlot) return Support::yes();
  if (config.monolithic) {
    return Support::no(Reason::kRoutingMethod,
                       "monolithic: per_slot needs a row for each slot before the experts");
  }
  const ParallelConfig& parallel = config.parallel;
  const bool whole = static_cast<int>(parallel.gather_group().size()) == parallel.num_ranks();
  if (parallel.ep_size > 1 && whole) return Support::yes();
  return Support::no(Reason::kParallelConfig,
                     "per_slot: the slots of a token are computed on ranks that do not see it");
}

class AcrossRanks final : public PrepareFinalizeDescriptor {
 public:
  explicit AcrossRanks(bool allgather) : allgather_(allgather) {}
  std::string_view name() const override {
    return allgather_ ? "allgather_reducescatter" : "all2all";
  }
  ActivationFormat activation_format() const override { return ActivationFormat::kStandard; }
  bool accepts(WeightAndReduce kind) const override { return kind == WeightAndReduce::kNoOp; }
  Support supports(const MoeConfig& config) const override {
    if (Support support = supports_exchange(config); !support) return support;
    return allgather_ ? supports_allgather(config) : supports_all2all(config);
  }
  std::shared_ptr<const PrepareAndFinalize> create(const MoeConfig& config,
                                                   const Context& context) const override {
    check_rank_options(*this, config, context);
    return std::make_shared<RankExchange>(*this, config, context, allgather_);
  }

 private:
  const bool allgather_;
};

void check_communicator(const Communicator& communicator, const MoeConfig& config) {
  const ParallelConfig& parallel = config.parallel;
  FUSEDMOE_CHECK(
      communicator.size() == parallel.num_ranks() && communicator.rank() == parallel.rank(),
      "ranks.communicator", core::format("rank {} of {}", communicator.rank(), communicator.size()),
      core::format("rank {} of {}, as parallel says", parallel.rank(), parallel.num_ranks()));
  FUSEDMOE_CHECK_FAULT(communicator.device() == config.device, kDevice, "ranks.communicator",
                       core::format("on {}", to_string(communicator.device())),
                       core::format("on {}", to_string(config.device)));
}

}  // namespace

void check_rank_options(const PrepareFinalizeDescriptor& transport, const MoeConfig& config,
                        const Context& context) {
  const RankOptions& ranks = context.ranks;
  const ParallelConfig& parallel = config.parallel;
  FUSEDMOE_CHECK_FAULT(ranks.communicator, kNull, "ranks.communicator", "null",
                       core::format("of {} ranks", parallel.num_ranks()));
  check_communicator(*ranks.communicator, config);
  const bool to_all = &transport != &all2all();
  if (ranks.drop_rows && ranks.receive_capacity == 0) {
    throw Error::invalid("ranks.drop_rows", "ranks.drop_rows needs ranks.receive_capacity");
  }
  if (ranks.drop_rows && config.batch_invariant) {
    throw Error::conflict("ranks.drop_rows", "batch_invariant",
                          "what is dropped depends on the other rows of the batch");
  }
  if (ranks.drop_rows && !to_all && !parallel.sequence_parallel && parallel.group_size() > 1) {
    throw Error::conflict("ranks.drop_rows", "all2all",
                          "ranks with the same tokens would drop different rows; "
                          "allgather_reducescatter serves them");
  }
  const DType dtype = ranks.combine_dtype.value_or(config.dtype);
  FUSEDMOE_CHECK_FAULT(dtype == DType::kF32 || dtype == config.dtype, kDType, "ranks.combine_dtype",
                       std::string(name(dtype)), core::format("f32 or {}", name(config.dtype)));
}

}  // namespace layer

const PrepareFinalizeDescriptor& all2all() {
  static const layer::AcrossRanks descriptor(false);
  return descriptor;
}

const PrepareFinalizeDescriptor& allgather_reducescatter() {
  static const layer::AcrossRanks descriptor(true);
  return descriptor;
}

}  // namespace fusedmoe
