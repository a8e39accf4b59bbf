// Which of the ways that rows travel a step takes: a step itself does not know them.
#include <algorithm>

#include "core/format.h"
#include "layer/device_messages.h"
#include "layer/host_messages.h"
#include "layer/peer_rows.h"
#include "layer/row_choice.h"
#include "layer/rows_in_place.h"

namespace fusedmoe::layer {

std::unique_ptr<RankStep> RankStep::make(const RankRules& rules, const StepSizes& sizes,
                                         void* memory) {
  switch (sizes.way) {
    case RowWay::kInPlace:
      return std::make_unique<RowsInPlace>(rules, sizes, memory);
    case RowWay::kHostMessages:
      return std::make_unique<HostMessages>(rules, sizes, memory);
    case RowWay::kDeviceMessages:
      return std::make_unique<DeviceMessages>(rules, sizes, memory);
    case RowWay::kPeerMemory:
      return std::make_unique<PeerRows>(rules, sizes, memory);
  }
  return nullptr;
}

std::size_t RankStep::workspace_bytes(const RankRules& rules, const ProblemSize& caller,
                                      const Preparation& read) {
  const auto bytes = [&](const ProblemSize& problem) {
    return make(rules, StepSizes(rules, problem, read), nullptr)->bytes();
  };
  std::size_t most = bytes(caller);
  const auto serve_fewer = [&](std::int64_t from) {
    if (from <= 1) return;
    ProblemSize fewer = caller;
    fewer.num_tokens = std::min(caller.num_tokens, from - 1);
    fewer.max_tokens = std::min(std::max(caller.max_tokens, caller.num_tokens), from - 1);
    most = std::max(most, bytes(fewer));
  };
  if (rules.may_quantize(read)) serve_fewer(rules.quantized_from);
  if (read.from_sources) serve_fewer(rules.beside_from);
  return most;
}

std::string RankRules::rows_travel(const Preparation& read) const {
  const std::string_view plane = group->backend();
  const std::string then = sums.needed() ? "; sums: " + sums.travel() : "";
  switch (way) {
    case RowWay::kInPlace:
      return "read in place" + then;
    case RowWay::kHostMessages:
      return core::format("messages over {}{}", plane, then);
    case RowWay::kDeviceMessages:
      return core::format("messages over {}: {}{}", plane, no_peer_memory, then);
    case RowWay::kPeerMemory: {
      std::string text = peer_memory_of(*group);
      if (peer_tokens < max_tokens_per_rank) {
        text += core::format(
            " up to {} tokens, then messages over {}, which are predicted to be faster",
            peer_tokens, plane);
      }
      if (may_quantize(read)) {
        text += core::format("; quantized from {} tokens on", quantized_from);
      }
      if (beside_from > 0 && read.from_sources) {
        text += core::format("; beside the experts from {} tokens on", beside_from);
      }
      if (!no_messages.empty()) text += "; " + no_messages;
      return text;
    }
  }
  return {};
}

/// The same on all ranks, but for beside_from: they have agreed on what it depends on.
std::string RankRules::map_peers(MoeConfig config, const RankOptions& options) {
  const RowPath messages = allgather ? RowPath::kAllgather : RowPath::kAll2all;
  std::string why = without_peer_memory(config, options, messages);
  if (!why.empty()) return why;
  const auto connect = [&] {
    group->connect("messages are predicted to be faster, but cannot be sent");
  };
  RowChoice choice{config.combine, max_tokens_per_rank};
  if (leaves_choice(config, options, messages)) {
    choice = may_send(options)
                 ? choose_rows(rank_costs(), config, options, placement, messages, connect)
                 : choose_rows(rank_costs(), config, options, placement, std::nullopt);
  }
  if (choice.peer_tokens == 0) return "they are predicted to be faster";
  config.combine = choice.combine;
  why = group->map_peers(PeerRows::arena_bytes(config, options, size));
  if (!why.empty()) return why;
  combine = choice.combine;
  if (per_slot()) combine_dtype = DType::kF32;
  peer_tokens = choice.peer_tokens;
  RankOptions by_peers = options;
  by_peers.max_tokens_per_rank = peer_tokens;
  quantized_from = least_quantized(rank_costs(), config, by_peers, placement);
  beside_from = least_beside_experts(rank_costs(), config, by_peers, placement);
  no_messages = choice.no_messages;
  return {};
}

}  // namespace fusedmoe::layer
