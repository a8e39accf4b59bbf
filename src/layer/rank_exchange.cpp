#include "layer/rank_exchange.h"

#include "core/check.h"

namespace fusedmoe::layer {
namespace {

RankStep& step_of(const ForwardArgs& args) {
  return static_cast<RankStep&>(*args.step);
}

}  // namespace

TransportSizes RankExchange::sizes(const ProblemSize& caller,
                                   const Preparation& preparation) const {
  const StepSizes step(rules_, caller, preparation);
  TransportSizes sizes{caller, caller};
  sizes.experts.num_tokens = step.capacity * (rules_.per_slot() ? caller.topk : 1);
  sizes.experts.max_tokens = 0;
  if (rules_.per_slot()) sizes.experts.topk = 1;
  sizes.experts.max_rows = step.max_rows;
  sizes.experts.output_dtype = rules_.combine_dtype;
  sizes.output_elsewhere = rules_.shared || step.to_targets;
  const std::size_t bytes = RankStep::workspace_bytes(rules_, caller, preparation);
  (rules_.shared ? sizes.shared_bytes : sizes.workspace_bytes) = bytes;
  return sizes;
}

/// A step keeps its shared memory: another rank may still read it.
void RankExchange::abandon(std::string_view reason) const noexcept {
  busy_.clear();
  rules_.group->abort(reason);
}

void RankExchange::check(const StepSizes& sizes) const {
  const std::int64_t most = rules_.max_tokens_per_rank;
  FUSEDMOE_CHECK_FAULT(most == 0 || sizes.max_tokens <= most, kShape, "hidden_states",
                       core::format("{} tokens", sizes.max_tokens),
                       core::format("at most max_tokens_per_rank, {}", most));
  if (!sizes.fixed) return;
  if (rules_.per_slot() && sizes.way != RowWay::kPeerMemory) {
    throw Error::conflict("fixed_sizes", "combine per_slot",
                          "the host must know how many rows come; a stream that is captured "
                          "implies fixed sizes");
  }
  if (rules_.num_logits > 0) {
    throw Error::conflict("fixed_sizes", "monolithic experts",
                          "they would route the rows that nobody fills");
  }
}

void RankExchange::do_start_prepare(ForwardArgs& args, const TransportSizes& sizes) const {
  StepSizes step(rules_, sizes.caller, args.preparation);
  check(step);
  std::optional<QuantKey>& quant = step.sent.quant;
  if (quant && !quant->dynamic) step.sent.scale = args.weights->info().a1_scale;
  if (busy_.test_and_set()) {
    throw Error::communication("a layer across ranks runs one forward at a time");
  }
  void* memory =
      rules_.shared ? rules_.group->take_shared(sizes.shared_bytes) : args.prepare_workspace;
  auto made = RankStep::make(rules_, step, memory);
  made->start_prepare(args);
  args.step = std::move(made);
}

void RankExchange::do_finish_prepare(ForwardArgs& args) const {
  step_of(args).finish_prepare(args);
}

void RankExchange::do_start_finalize(const ForwardArgs& args) const {
  step_of(args).start_finalize(args);
}

void RankExchange::do_finish_finalize(const ForwardArgs& args) const {
  RankStep& step = step_of(args);
  step.finish_finalize(args);
  if (rules_.shared) rules_.group->give_back_shared(step.memory());
  busy_.clear();
}

}  // namespace fusedmoe::layer
