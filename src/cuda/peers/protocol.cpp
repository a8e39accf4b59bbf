#include "cuda/peers/protocol.h"

#include "core/format.h"
#include "cuda/peers/sum_layout.h"
#include "moe/peer_memory.h"

namespace fusedmoe::cuda {
namespace {

int name_of(int rank, std::span<const int> names) {
  return names.empty() ? rank : names[static_cast<std::size_t>(rank)];
}

/// "rank 3", "ranks 0, 3"
std::string ranks(std::uint32_t bits, std::span<const int> names) {
  std::string list;
  int count = 0;
  for (int rank = 0; rank < kMostPeers; ++rank) {
    if ((bits >> rank & 1) == 0) continue;
    list += (count++ > 0 ? ", " : "") + core::to_string(name_of(rank, names));
  }
  return (count == 1 ? "rank " : "ranks ") + list;
}

/// What the other rank has otherwise: "layer 4, it layer 5; at most 8 tokens, it at most 16
/// tokens".
std::string differences(const FailureRecord& record) {
  std::string text;
  const auto add = [&](const char* before, std::uint32_t mine, std::uint32_t theirs,
                       const char* behind) {
    if (mine == theirs) return;
    if (!text.empty()) text += "; ";
    text += core::format("{}{}{}, it {}{}{}", before, mine, behind, before, theirs, behind);
  };
  add("step ", record.step, record.their_step, "");
  add("layer ", record.mine.layer, record.theirs.layer, "");
  add(record.mine.topk == 0 ? "" : "at most ", record.mine.most_tokens, record.theirs.most_tokens,
      " tokens");
  add("top-", record.mine.topk, record.theirs.topk, "");
  add("rows of ", record.mine.row_bytes, record.theirs.row_bytes, " bytes");
  add("placement ", record.mine.placement, record.theirs.placement, "");
  return text;
}

}  // namespace

std::string to_string(const FailureRecord& record, int rank, const Patience& patience,
                      std::span<const int> names) {
  rank = name_of(rank, names);
  constexpr const char* kNames[kRounds] = {"dispatch", "return", "sum", "totals"};
  const std::string where =
      core::format("the {} of layer {}", kNames[record.round], record.mine.layer);
  if (record.different != 0) {
    return core::format("{} does not match rank {} in {}: rank {} has {}",
                        ranks(record.different, names), rank, where, rank, differences(record));
  }
  if (record.late != 0) {
    return core::format("rank {} waited {} ms for {} in {}", rank, patience.nanoseconds / 1000000,
                        ranks(record.late, names), where);
  }
  return core::format("rank {} was told to end {}", rank, where);
}

}  // namespace fusedmoe::cuda

namespace fusedmoe {

int PeerMemory::most_ranks() {
  return cuda::kMostPeers;
}
std::size_t PeerMemory::head_bytes() {
  return cuda::kSumsEnd;
}
std::int64_t PeerMemory::most_sum_row_bytes() {
  return cuda::kMostSumRowBytes;
}

}  // namespace fusedmoe
