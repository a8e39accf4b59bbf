// Experts that move between ranks: which go where, and how they come there, as they are packed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "fusedmoe/experts.h"

namespace fusedmoe::layer {

/// The logical experts of each rank, by their local indices.
using Holdings = std::vector<std::vector<std::int32_t>>;
Holdings holdings_of(const ExpertPlacement& placement);

/// The expert that a rank is to have at a local index, and where it is now.
struct Transfer {
  std::int32_t expert;
  int to;
  std::int64_t to_index;
  int from;  // -1: no rank has it
  std::int64_t from_index;
};
/// One transfer for each expert that a rank is to have: rank by rank, in the order of local
/// indices. It comes from the rank itself if that has the expert, else from the ranks that have
/// it, by turns.
std::vector<Transfer> transfers(const Holdings& held, const Holdings& wanted);

/// An expert that has come, for a local index of this rank.
struct Arrival {
  std::int64_t index;
  std::shared_ptr<const PackedWeights> expert;
};
using Receive = std::function<void(Arrival)>;
/// Makes a block on the communicator's device, (n) u8 of at least so many bytes.
using MakeRoom = std::function<Tensor(std::int64_t bytes)>;
/// Collective: brings the experts that some rank has, a few of each rank at a time. `packed` is
/// what this rank has, of the layout (PackedWeights::expert_layout()) that the others have. What
/// arrives lies in blocks of `make_room`, all experts of a time in one. If a rank cannot do its
/// part, or `receive` throws, all throw an Error with its text.
void bring(Communicator& communicator, const Experts& experts, const PackedWeights& packed,
           std::span<const Transfer> transfers, const MakeRoom& make_room, const Receive& receive,
           std::string_view what);

}  // namespace fusedmoe::layer
