#include "layer/expert_moves.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/waited_stream.h"
#include "core/workspace.h"
#include "fusedmoe/runtime.h"
#include "moe/experts_args.h"
#include "moe/peer_blocks.h"

namespace fusedmoe::layer {

Holdings holdings_of(const ExpertPlacement& placement) {
  Holdings holdings(static_cast<std::size_t>(placement.num_ranks()));
  for (std::size_t p = 0; p < placement.rank_of().size(); ++p) {
    holdings[placement.rank_of()[p]].push_back(placement.physical_to_logical()[p]);
  }
  return holdings;
}

std::vector<Transfer> transfers(const Holdings& held, const Holdings& wanted) {
  struct Copy {
    int rank;
    std::int64_t index;
  };
  std::map<std::int32_t, std::vector<Copy>> copies;  // of each expert
  for (std::size_t r = 0; r < held.size(); ++r) {
    for (std::size_t i = 0; i < held[r].size(); ++i) {
      copies[held[r][i]].push_back({static_cast<int>(r), static_cast<std::int64_t>(i)});
    }
  }
  std::map<std::int32_t, std::size_t> turns;
  const auto source_of = [&](std::int32_t expert, int rank) {
    const std::vector<Copy>& all = copies[expert];
    for (const Copy& copy : all) {
      if (copy.rank == rank) return copy;
    }
    return all.empty() ? Copy{-1, -1} : all[turns[expert]++ % all.size()];
  };
  std::vector<Transfer> result;
  for (std::size_t r = 0; r < wanted.size(); ++r) {
    for (std::size_t i = 0; i < wanted[r].size(); ++i) {
      const auto [from, from_index] = source_of(wanted[r][i], static_cast<int>(r));
      result.push_back(
          {wanted[r][i], static_cast<int>(r), static_cast<std::int64_t>(i), from, from_index});
    }
  }
  return result;
}

namespace {

using Json = nlohmann::json;

/// {"tiles": ["u8", 4096], ...}: what the parts of an expert are, for the rank that gets them.
Json describe(const PackedParts& parts) {
  Json description = Json::object();
  for (const auto& [name, tensor] : parts) {
    Json& part = description[name] = Json::array({std::string(fusedmoe::name(tensor.dtype()))});
    for (int d = 0; d < tensor.rank(); ++d) part.push_back(tensor.size(d));
  }
  return description;
}

/// Room for such parts in a block. With a cutter that only counts they are undefined.
PackedParts cut_parts(const Json& description, core::WorkspaceCutter& cutter,
                      const std::shared_ptr<const void>& block, Device device) {
  PackedParts parts;
  for (const auto& [name, part] : description.items()) {
    std::vector<std::int64_t> extents;
    for (std::size_t i = 1; i < part.size(); ++i) extents.push_back(part[i].get<std::int64_t>());
    const DType dtype = parse_dtype(part[0].get<std::string>()).value();
    parts[name] = Tensor(cutter.take(dtype, Shape(extents), device), block);
  }
  return parts;
}

/// Experts by their local indices, which are texts as JSON has them.
using Leaving = std::map<std::string, PackedParts>;

/// The experts of a rank that leave it, once for all ranks that get one.
Leaving leaving_of(std::span<const Transfer> transfers, const Experts& experts,
                   const PackedWeights& packed, int rank) {
  Leaving leaving;
  for (const Transfer& each : transfers) {
    if (each.from != rank) continue;
    PackedParts& parts = leaving[core::to_string(each.from_index)];
    if (parts.empty()) parts = experts.expert_parts(packed, each.from_index);
  }
  return leaving;
}

Json describe(const Leaving& leaving) {
  Json description = Json::object();
  for (const auto& [index, parts] : leaving) description[index] = describe(parts);
  return description;
}

/// Where they lie in a block, one behind the other.
Leaving cut_leaving(const Json& description, core::WorkspaceCutter cutter,
                    const std::shared_ptr<const void>& block, Device device) {
  cutter.take(PeerBlocks::kHeadBytes);
  Leaving leaving;
  for (const auto& [index, parts] : description.items()) {
    leaving[index] = cut_parts(parts, cutter, block, device);
  }
  return leaving;
}

void copy_parts(const PackedParts& from, const PackedParts& to, Stream stream) {
  for (const auto& [name, tensor] : to) copy(from.at(name), tensor, stream);
}

void add_messages(std::vector<Message>& messages, int peer, const PackedParts& parts) {
  for (const auto& [name, tensor] : parts) {
    messages.push_back({peer, tensor.data(), static_cast<std::size_t>(tensor.nbytes())});
  }
}

/// Experts of a rank that leave it at a time: copies of them take memory.
constexpr std::size_t kLeaveTogether = 8;

bool are_sent(std::span<const Transfer> transfers) {
  const auto is_sent = [](const Transfer& each) { return each.from >= 0 && each.from != each.to; };
  return std::ranges::any_of(transfers, is_sent);
}

/// The transfers in parts that travel together.
std::vector<std::vector<Transfer>> rounds_of(std::span<const Transfer> transfers) {
  std::vector<std::vector<Transfer>> rounds;
  std::map<int, std::size_t> leaving;
  for (const Transfer& each : transfers) {
    if (each.from < 0) continue;
    const std::size_t round = leaving[each.from]++ / kLeaveTogether;
    if (round == rounds.size()) rounds.emplace_back();
    rounds[round].push_back(each);
  }
  return rounds;
}

/// Bytes of a block for what leaves a rank.
std::size_t bytes_of(const Leaving& leaving) {
  core::WorkspaceCutter counted(nullptr);
  counted.take(PeerBlocks::kHeadBytes);
  for (const auto& [index, parts] : leaving) cut_parts(describe(parts), counted, {}, {});
  return counted.used();
}

/// What the ranks of a move share, and how its experts come to this one.
class Move {
 public:
  Move(Communicator& communicator, const Experts& experts, const PackedWeights& packed,
       const MakeRoom& make_room, const Receive& receive, std::string_view what)
      : communicator_(communicator),
        experts_(experts),
        packed_(packed),
        make_room_(make_room),
        receive_(receive),
        what_(what) {}

  /// Collective: lets the ranks copy from each other's memory, or else connects them.
  void prepare(std::span<const std::vector<Transfer>> rounds) {
    const auto most_bytes = [&] {
      std::size_t most = 0;
      for (const std::vector<Transfer>& round : rounds) {
        most = std::max(most, bytes_of(leaving_of(round, experts_, packed_, rank_)));
      }
      return most;
    };
    const std::string why = communicator_.map_blocks(most_bytes, blocks_);
    if (blocks_) return;
    communicator_.connect(core::format("experts that go to other ranks ({})", why));
  }

  /// Collective: experts that travel together.
  void bring(std::span<const Transfer> transfers) const {
    Leaving here, leaving;
    Arriving arriving;
    std::optional<core::WaitedStream> stream;  // made last, goes first
    const auto put_out = [&] {
      stream.emplace(device_);
      leaving = here = leaving_of(transfers, experts_, packed_, rank_);
      if (device_.is_cpu()) return;
      leaving = room_for(here);
      for (const auto& [index, parts] : leaving) copy_parts(here.at(index), parts, *stream);
      synchronize(*stream);
    };
    communicator_.together(put_out, what_);
    const std::vector<std::string> texts = communicator_.gather(describe(leaving).dump(), what_);
    const auto take_in = [&] {
      const std::map<int, Json> described = sources_of(transfers, texts);
      if (described.empty()) return;
      arriving = make_arriving(transfers, described);
      for (const auto& [each, parts] : arriving) {
        if (each.from == rank_) copy_parts(expert_of(each, leaving), parts, *stream);
      }
      if (blocks_) copy_lent(arriving, described, *stream);
    };
    communicator_.together(take_in, what_);
    if (!blocks_) exchange(transfers, leaving, arriving, *stream);
    const auto assemble = [&] {
      const PackedWeights::Info info = core::info_of_one(packed_.info());
      for (const auto& [each, parts] : arriving) {
        receive_({each.to_index, experts_.from_parts(info, parts)});
      }
    };
    communicator_.together(assemble, what_);
  }

 private:
  using Arriving = std::vector<std::pair<Transfer, PackedParts>>;

  static const PackedParts& expert_of(const Transfer& transfer, const Leaving& leaving) {
    return leaving.at(core::to_string(transfer.from_index));
  }
  /// Copies experts from the blocks of other ranks to this rank, and waits for the copies. When all
  /// ranks have waited, their blocks are filled again.
  void copy_lent(const Arriving& arriving, const std::map<int, Json>& described,
                 Stream stream) const {
    for (const auto& [each, parts] : arriving) {
      if (each.from == rank_) continue;
      copy_parts(expert_of(each, lent_by(each.from, described.at(each.from))), parts, stream);
    }
    synchronize(stream);
  }
  /// Collective: sends what goes to other ranks, and gets what comes, as messages. Waits.
  void exchange(std::span<const Transfer> transfers, const Leaving& leaving,
                const Arriving& arriving, Stream stream) const {
    std::vector<Message> sends, receives;
    for (const Transfer& each : transfers) {
      if (each.from != rank_ || each.to == rank_) continue;
      add_messages(sends, each.to, expert_of(each, leaving));
    }
    for (const auto& [each, parts] : arriving) {
      if (each.from != rank_) add_messages(receives, each.from, parts);
    }
    if (are_sent(transfers)) communicator_.exchange(sends, receives, stream, what_);
    synchronize(stream);
    communicator_.check();  // aborted transfers of a GPU end, too
  }
  /// By rank, of those that send this one an expert: its description of the experts that leave it.
  std::map<int, Json> sources_of(std::span<const Transfer> transfers,
                                 std::span<const std::string> texts) const {
    std::map<int, Json> described;
    for (const Transfer& each : transfers) {
      if (each.to != rank_ || described.contains(each.from)) continue;
      described.emplace(each.from, Json::parse(texts[each.from]));
    }
    return described;
  }
  /// For copies of them, in the block that this rank lends, or in one of its own.
  Leaving room_for(const Leaving& leaving) const {
    const Json description = describe(leaving);
    if (blocks_) return lent_by(rank_, description);
    if (leaving.empty()) return {};
    const Tensor block = make_room_(static_cast<std::int64_t>(bytes_of(leaving)));
    return cut_leaving(description, core::WorkspaceCutter(block.data()), block.owner(), device_);
  }
  /// What leaves a rank, in its block.
  Leaving lent_by(int rank, const Json& description) const {
    return cut_leaving(description, core::WorkspaceCutter(blocks_->begin(rank)), blocks_, device_);
  }
  /// Room for what comes to this rank, in one block.
  Arriving make_arriving(std::span<const Transfer> transfers,
                         const std::map<int, Json>& described) const {
    Arriving arriving;
    const auto cut = [&](core::WorkspaceCutter cutter, const std::shared_ptr<const void>& block) {
      arriving.clear();
      for (const Transfer& each : transfers) {
        if (each.to != rank_) continue;
        const Json& parts = described.at(each.from).at(core::to_string(each.from_index));
        arriving.emplace_back(each, cut_parts(parts, cutter, block, device_));
      }
      return static_cast<std::int64_t>(cutter.used());
    };
    const Tensor block = make_room_(cut(core::WorkspaceCutter(nullptr), {}));
    cut(core::WorkspaceCutter(block.data()), block.owner());
    return arriving;
  }

  Communicator& communicator_;
  const Experts& experts_;
  const PackedWeights& packed_;
  const MakeRoom& make_room_;
  const Receive& receive_;
  const std::string_view what_;
  const int rank_ = communicator_.rank();
  const Device device_ = communicator_.device();
  std::shared_ptr<PeerBlocks> blocks_;  // null: what goes to other ranks is sent
};

}  // namespace

void bring(Communicator& communicator, const Experts& experts, const PackedWeights& packed,
           std::span<const Transfer> transfers, const MakeRoom& make_room, const Receive& receive,
           std::string_view what) {
  const std::vector<std::vector<Transfer>> rounds = rounds_of(transfers);
  Move move(communicator, experts, packed, make_room, receive, what);
  if (are_sent(transfers)) move.prepare(rounds);
  for (const std::vector<Transfer>& round : rounds) move.bring(round);
}

}  // namespace fusedmoe::layer
