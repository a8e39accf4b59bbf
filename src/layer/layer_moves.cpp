// Experts of a layer that move: between ranks while it serves, and to the survivors of a failure.
#include <algorithm>
#include <atomic>
#include <iterator>
#include <sstream>
#include <utility>

#include "core/check.h"
#include "core/device_runtime.h"
#include "core/exception_text.h"
#include "core/waited_stream.h"
#include "fusedmoe/runtime.h"
#include "layer/agreement.h"
#include "layer/layer_impl.h"
#include "layer/rank_transports.h"
#include "moe/experts_args.h"
#include "moe/placement.h"

namespace fusedmoe {
namespace {

constexpr std::string_view kMoving = "moving experts", kRebinding = "binding a layer to new ranks";

/// How the ranks that are left share the layer: those that have the same tokens still do.
ParallelConfig parallel_on(const Communicator& communicator, const ParallelConfig& before) {
  const int size = communicator.size(), group = before.group_size();
  if (size == 1) return {};
  ParallelConfig parallel = before;
  parallel.ep_size = size;
  parallel.ep_rank = communicator.rank();
  if (before.dp_size > 1) {
    FUSEDMOE_CHECK(size % group == 0, "communicator", core::format("of {} ranks", size),
                   core::format("of a multiple of {}, which have the same tokens", group));
    parallel.dp_size = size / group;
  }
  parallel.validate();
  return parallel;
}

/// Collective: which experts every rank has, by their local indices.
layer::Holdings gather_holdings(Communicator& communicator, const std::vector<std::int32_t>& own) {
  layer::Holdings held;
  for (const std::string& text : communicator.gather(core::join(own, " "), kRebinding)) {
    std::istringstream numbers(text);
    held.emplace_back(std::istream_iterator<std::int32_t>(numbers),
                      std::istream_iterator<std::int32_t>());
  }
  return held;
}

/// Throws Error where this rank is to have an expert that is nowhere.
void check_found(const layer::Holdings& held, const layer::Holdings& wanted, int rank,
                 const ExpertSource& lost) {
  for (const layer::Transfer& each : layer::transfers(held, wanted)) {
    if (each.from >= 0 || each.to != rank || lost) continue;
    throw Error::invalid("placement",
                         core::format("placement has expert {}, which none of these ranks has, and "
                                      "nobody gives its weights",
                                      each.expert));
  }
}

ExpertWeights ask_for(const ExpertSource& lost, std::int32_t expert,
                      const PackedWeights::Info& packed) {
  ExpertWeights weights = lost(expert);
  FUSEDMOE_CHECK(weights.num_experts() == 1, core::format("lost({})", expert),
                 core::format("{} experts", weights.num_experts()), "the weights of one");
  if (packed.a1_scale || packed.a2_scale) {
    layer::set_input_scales(weights, {packed.a1_scale.value_or(0), packed.a2_scale.value_or(0)});
  }
  return weights;
}

/// That start_move() is at work.
class Bringing {
 public:
  explicit Bringing(std::atomic<bool>& flag) : is_first(!flag.exchange(true)), flag_(flag) {}
  ~Bringing() {
    if (is_first) flag_ = false;
  }
  Bringing(const Bringing&) = delete;
  Bringing& operator=(const Bringing&) = delete;

  const bool is_first;

 private:
  std::atomic<bool>& flag_;
};

}  // namespace

void MoeLayer::Impl::check_shares_experts(const char* call) const {
  if (placement) return;
  throw Error::unsupported(
      Reason::kParallelConfig, call,
      core::format("{} needs a layer whose experts are shared by ranks with a communicator", call));
}

void MoeLayer::Impl::check_not_bringing(const char* call) const {
  if (!is_bringing) return;
  throw Error::invalid(call, core::format("{} comes while start_move() brings experts", call));
}

void MoeLayer::Impl::check_between_forwards(const char* call) const {
  if (running == 0) return;
  throw Error::invalid("step", core::format("{} comes between two forwards, but a step has begun "
                                            "and not ended",
                                            call));
}

std::optional<ExpertPlacement> MoeLayer::placement() const {
  return impl().placement;
}

void MoeLayer::start_move(const ExpertPlacement& wanted) {
  Impl& impl = this->impl();
  impl.check_shares_experts("start_move()");
  FUSEDMOE_CHECK_FAULT(impl.communicator, kNull, "communicator", "of one rank", "of several");
  impl.start_move(wanted, *impl.communicator, [&] { impl.check_between_forwards("start_move()"); });
}

void MoeLayer::start_move(const ExpertPlacement& wanted, Communicator& over) {
  Impl& impl = this->impl();
  impl.check_shares_experts("start_move()");
  const auto check_ranks = [&] {
    const Communicator* ranks = impl.communicator.get();
    FUSEDMOE_CHECK(ranks && over.size() == ranks->size() && over.rank() == ranks->rank(), "over",
                   core::format("rank {} of {}", over.rank(), over.size()),
                   "the same rank of as many as the layer's communicator has");
    FUSEDMOE_CHECK(ranks != &over, "over", "the layer's communicator", "another one");
    FUSEDMOE_CHECK_FAULT(over.device() == ranks->device(), kDevice, "over",
                         core::format("on {}", to_string(over.device())),
                         core::format("on {}", to_string(ranks->device())));
  };
  impl.start_move(wanted, over, check_ranks);
}

/// Collective over `ranks`, after `check` on each of them.
void MoeLayer::Impl::start_move(const ExpertPlacement& wanted, Communicator& ranks,
                                const std::function<void()>& check) {
  const Bringing bringing(is_bringing);
  if (bringing.is_first) move.reset();
  layer::agree(ranks, [&]() -> layer::Facts {
    if (!bringing.is_first) check_not_bringing("start_move()");
    check();
    core::check_same_counts(*placement, wanted);
    core::check_writable(packed->info());
    return {{"layer", core::to_string(kernel.prepare_finalize().layer())},
            {"number of moves", core::to_string(moves)},
            {"packed weights", packed->expert_layout()},
            {"placement", wanted.json()}};
  });
  const layer::Holdings held = layer::holdings_of(*placement);
  std::vector<layer::Transfer> moving = layer::transfers(held, layer::holdings_of(wanted));
  std::erase_if(moving, [&](const layer::Transfer& each) {
    return held[each.to][each.to_index] == each.expert;
  });
  if (!staging) staging = layer::Staging::of(config.device);
  std::vector<layer::Arrival> arrivals;
  const auto keep = [&](layer::Arrival expert) { arrivals.push_back(std::move(expert)); };
  const auto make_room = [&](std::int64_t bytes) { return staging->take(bytes); };
  layer::bring(ranks, kernel.experts(), *packed, moving, make_room, keep, kMoving);
  move = {wanted, wanted.expert_map(options.parallel.ep_rank), std::move(arrivals)};
}

/// Frees no memory and takes none on the device, whose forwards would wait for that.
void MoeLayer::commit_move() {
  Impl& impl = this->impl();
  impl.check_not_bringing("commit_move()");
  if (!impl.move) {
    throw Error::invalid(
        "commit_move()",
        "commit_move() has nothing to commit: no start_move() has ended well since "
        "the last one");
  }
  impl.check_between_forwards("commit_move()");
  impl.ending_ranks([&] {
    const Device device = impl.config.device;
    core::runtime_of(device).synchronize_device(device);  // forwards read what is overwritten now
    const Impl::Move move = *std::exchange(impl.move, std::nullopt);
    impl.is_torn = true;
    const auto move_on = [&](const ModularKernel& kernel) {
      kernel.prepare_finalize().move_experts(move.placement, impl.stream);
    };
    try {
      // Ahead of the experts: a copy from memory that is not pinned waits for the stream.
      copy(move.expert_map, impl.expert_map, impl.stream);
      move_on(impl.kernel);
      if (impl.monolithic) move_on(*impl.monolithic);
      for (const Impl::Lane& lane : impl.other_lanes) {
        move_on(lane.kernel);
        if (lane.monolithic) move_on(*lane.monolithic);
      }
      for (const layer::Arrival& each : move.arrivals) {
        impl.kernel.experts().replace_expert(*impl.packed, each.index, *each.expert, impl.stream);
      }
    } catch (...) {
      core::drain(impl.stream);  // from memory that other moves get next
      throw;
    }
    synchronize(impl.stream);
    impl.placement = move.placement;
    ++impl.moves;
    impl.is_torn = false;
  });
}

/// The same layer on the ranks of another communicator.
MoeLayer::Impl::Rebinding MoeLayer::Impl::rebinding(std::shared_ptr<Communicator> ranks,
                                                    const ExpertPlacement& wanted) const {
  check_not_bringing("rebind()");
  check_between_forwards("rebind()");
  if (is_torn) {
    throw Error::invalid(
        "rebind()",
        "rebind() of a layer whose commit_move() has failed, which left experts of "
        "two placements: make the layer again");
  }
  core::placement_of(wanted, config.num_experts, ranks->size());
  Rebinding next{options, config, {}};
  next.config.parallel = next.options.parallel = parallel_on(*ranks, config.parallel);
  const auto held = static_cast<std::int64_t>(wanted.local_experts(ranks->rank()).size());
  next.config.num_local_experts = std::max<std::int64_t>(held, 1);
  next.options.ranks.communicator = std::move(ranks);
  next.options.ranks.placement = wanted;
  const bool travel = next.config.parallel.needs_dispatch();
  if (!travel) {
    next.config.combine = CombineMode::kPerRank;
    next.config.dispatch_dtype.reset();
  }
  next.selection = select(
      next.config, travel ? selection.pair() : core::format("{}+no_ep", selection.experts->name()));
  if (layer::across_ranks(next.options)) {
    layer::check_rank_options(*next.selection.prepare_finalize, next.config,
                              {.ranks = next.options.ranks});
  }
  return next;
}

/// Collective: fills the packed weights from those of `before` on all ranks, and from `lost`.
void MoeLayer::Impl::fill(const Impl& before, const layer::Holdings& held,
                          const ExpertSource& lost) {
  Communicator& ranks = *options.ranks.communicator;
  const int rank = ranks.rank();
  const layer::Holdings wanted = layer::holdings_of(*placement);
  std::vector<layer::Transfer> transfers = layer::transfers(held, wanted);
  const Experts& experts = kernel.experts();
  const auto put_own = [&] {
    packed = experts.make_room(*before.packed);
    for (const layer::Transfer& each : transfers) {
      if (each.to != rank) continue;
      if (each.from == rank) {
        packed->replace_expert(each.to_index, *before.packed->extract_expert(each.from_index));
      } else if (each.from < 0) {
        experts.repack(ask_for(lost, each.expert, packed->info()), each.to_index, *packed);
      }
    }
    // A rank without experts keeps one that no token reaches.
    if (wanted[rank].empty()) packed->replace_expert(0, *before.packed->extract_expert(0));
  };
  ranks.together(put_own, kRebinding);
  const auto put = [&](const layer::Arrival& each) {
    packed->replace_expert(each.index, *each.expert);
  };
  std::erase_if(transfers, [](const layer::Transfer& each) { return each.from == each.to; });
  const auto make_room = [&](std::int64_t bytes) {
    return Tensor::empty({bytes}, DType::kU8, config.device);
  };
  layer::bring(ranks, experts, *before.packed, transfers, make_room, put, kRebinding);
}

void MoeLayer::rebind(std::shared_ptr<Communicator> communicator, const ExpertPlacement& wanted,
                      const ExpertSource& lost) {
  Impl& before = impl();
  FUSEDMOE_CHECK_FAULT(communicator, kNull, "communicator", "null", "given");
  before.check_shares_experts("rebind()");
  Impl::Rebinding made;
  layer::agree(*communicator, [&]() -> layer::Facts {
    made = before.rebinding(communicator, wanted);
    return {{"layer", core::to_string(before.kernel.prepare_finalize().layer())},
            {"pair", made.selection.pair()},
            {"packed weights", before.packed->expert_layout()},
            {"placement", wanted.json()}};
  });
  const layer::Holdings held = gather_holdings(
      *communicator, before.placement->local_experts(before.options.parallel.ep_rank));
  communicator->together(
      [&] { check_found(held, layer::holdings_of(wanted), communicator->rank(), lost); },
      kRebinding);
  std::unique_ptr<Impl> next;
  try {
    next = std::make_unique<Impl>(before, made);
  } catch (...) {
    communicator->abort(core::current_exception_text());
    throw;
  }
  next->fill(before, held, lost);
  impl_ = std::move(next);
}

}  // namespace fusedmoe
