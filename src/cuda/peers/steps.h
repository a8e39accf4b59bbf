// The kernels of a step through the memory that the GPUs of a host map: the calls of PeerMemory.
// They wait for other ranks, never without end; where a rank has given up they do nothing.
#pragma once

#include "cuda/peers/protocol.h"
#include "moe/peer_memory.h"

namespace fusedmoe::cuda {

/// What all kernels of a rank get.
struct PeerContext {
  Peers peers;
  Patience patience;
  FailureRecord* record = nullptr;
  int lanes = 1;  ///< see PeerMemory::share_gpu()
};

/// `follows_route`: the launch before is the router's (is_route_kernel()), which writes ids and
/// weights.
void publish_rows(const PeerContext& context, const PeerStep& step, const PublishedRows& rows,
                  bool follows_route, Stream stream);
/// Where the host reads how many slots name an expert of this rank.
struct SlotCount {
  /// Pinned: the slots, and in the upper half `number`. Null: nowhere.
  std::uint64_t* word = nullptr;
  std::uint32_t number = 0;  ///< of this count
};
/// `overlap_previous`: the launch before is publish_rows() of the same step.
void pull_rows(const PeerContext& context, const PeerStep& step, const PulledRows& rows,
               const SlotCount& count, bool overlap_previous, Stream stream);
void leave_rows(const LeftRows& rows, const RowTargets& targets, Stream stream);
void tell_results(const PeerContext& context, const PeerStep& step, Stream stream);
/// What sum_results() follows: other work, behind which tell_results() was; tell_results() of the
/// same step; or the experts, which only it then tells of.
enum class SumFollows { kOther, kTelling, kExperts };
void sum_results(const PeerContext& context, const PeerStep& step, const PeerSum& sum,
                 SumFollows follows, Stream stream);

/// What a launch of sum_parts() does. kNext adds a piece that the launch right before has told.
enum class SumPhases { kTell, kAdd, kAll, kNext };
/// Behind a kernel of ours. A piece of a sum, of kMostSumBytes at most. `tokens_behind`: whose rows
/// follow in the memory of parts.partial. Who adds this piece also tells the next one.
void sum_parts(const PeerContext& context, const PeerParts& parts, std::int64_t tokens_behind,
               SumPhases phases, Stream stream);

/// The blocks as a rank maps them.
struct MappedBlocks {
  BlockHead* heads[kMostPeers] = {};
  int rank = 0, size = 1;
};
/// Writes down in the own block which mark each block has.
void read_marks(const MappedBlocks& blocks, Stream stream);
/// For timing: reads so many bytes of an arena, from its beginning again where it is shorter; both
/// are multiples of kReadBytes. `sink` may be written.
inline constexpr std::size_t kReadBytes = std::size_t{128} << 10;  // of a block at a time
void read_arena(const ArenaHead& arena, std::size_t arena_bytes, std::size_t bytes,
                std::uint32_t* sink, Stream stream);
/// And one word, so many times, always when it has come.
void read_words(const ArenaHead& arena, int times, std::uint32_t* sink, Stream stream);

/// Loads the kernels above on the current device now: a kernel that is loaded later may wait for
/// those that run. read_marks() is not among them: it has run when the blocks were mapped.
void load_step_kernels();
/// Loads the kernels of sum_results(), and of sum_parts(); load_step_kernels() calls them.
void load_sum_kernels();
void load_parts_kernels();

}  // namespace fusedmoe::cuda
