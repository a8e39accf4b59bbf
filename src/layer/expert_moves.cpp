#include "layer/expert_moves.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/workspace.h"
#include "fusedmoe/runtime.h"
#include "moe/experts_args.h"

namespace fusedmoe::layer {

Holdings holdings_of(const ExpertPlacement& placement) {
  Holdings holdings(static_cast<std::size_t>(placement.num_ranks()));
  for (std::size_t p = 0; p < placement.rank_of().size(); ++p) {
    holdings[placement.rank_of()[p]].push_back(placement.physical_to_logical()[p]);
  }
  return holdings;
}

std::vector<Transfer> transfers(const Holdings& held, const Holdings& wanted) {
  struct Place {
    int rank;
    std::int64_t place;
  };
  std::map<std::int32_t, std::vector<Place>> places;
  for (std::size_t r = 0; r < held.size(); ++r) {
    for (std::size_t i = 0; i < held[r].size(); ++i) {
      places[held[r][i]].push_back({static_cast<int>(r), static_cast<std::int64_t>(i)});
    }
  }
  std::map<std::int32_t, std::size_t> turns;
  const auto source_of = [&](std::int32_t expert, int rank) {
    const std::vector<Place>& all = places[expert];
    for (const Place& place : all) {
      if (place.rank == rank) return place;
    }
    return all.empty() ? Place{-1, -1} : all[turns[expert]++ % all.size()];
  };
  std::vector<Transfer> result;
  for (std::size_t r = 0; r < wanted.size(); ++r) {
    for (std::size_t i = 0; i < wanted[r].size(); ++i) {
      const auto [from, from_place] = source_of(wanted[r][i], static_cast<int>(r));
      result.push_back(
          {wanted[r][i], static_cast<int>(r), static_cast<std::int64_t>(i), from, from_place});
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
PackedParts cut_parts(const Json& description, core::WorkspaceCutter& cutter, const Tensor& block,
                      Device device) {
  PackedParts parts;
  for (const auto& [name, part] : description.items()) {
    std::vector<std::int64_t> extents;
    for (std::size_t i = 1; i < part.size(); ++i) extents.push_back(part[i].get<std::int64_t>());
    const DType dtype = parse_dtype(part[0].get<std::string>()).value();
    parts[name] = Tensor(cutter.take(dtype, Shape(extents), device), block.owner());
  }
  return parts;
}

/// An expert of this rank, copied to where the data plane takes it from.
PackedParts copy_parts(const PackedWeights& packed, std::int64_t place, Device device) {
  PackedParts parts = packed.extract_expert(place)->parts();
  for (auto& [name, tensor] : parts) tensor = to_device(tensor, device);
  return parts;
}

void add_messages(std::vector<Message>& messages, int peer, const PackedParts& parts) {
  for (const auto& [name, tensor] : parts) {
    messages.push_back({peer, tensor.data(), static_cast<std::size_t>(tensor.nbytes())});
  }
}

/// What leaves this rank and what arrives, while it travels.
struct Travelling {
  std::map<std::int64_t, PackedParts> leaving;  // by their places
  std::vector<std::pair<Transfer, PackedParts>> arriving;
  std::vector<Message> sends, receives;

  /// Cuts room for what arrives out of one block. `described`: of each rank, what leaves it.
  void cut_room(const std::vector<Json>& described, std::span<const Transfer> transfers, int rank,
                Device device, const MakeRoom& make_room) {
    std::vector<std::pair<Transfer, const Json*>> parts;
    std::vector<std::size_t> next(described.size());
    core::WorkspaceCutter counted(nullptr);
    for (const Transfer& each : transfers) {
      const Json& its = described[each.from].at(next[each.from]++);
      if (each.to != rank) continue;
      parts.emplace_back(each, &its);
      cut_parts(its, counted, {}, device);
    }
    if (parts.empty()) return;
    const Tensor block = make_room(static_cast<std::int64_t>(counted.used()));
    core::WorkspaceCutter cutter(block.data());
    for (const auto& [transfer, its] : parts) {
      arriving.emplace_back(transfer, cut_parts(*its, cutter, block, device));
      if (transfer.from != rank) add_messages(receives, transfer.from, arriving.back().second);
    }
  }
  /// What arrives from this rank itself.
  void copy_own(Stream stream) const {
    for (const auto& [transfer, parts] : arriving) {
      if (transfer.from != transfer.to) continue;
      const PackedParts& own = leaving.at(transfer.from_place);
      for (const auto& [name, tensor] : parts) copy(own.at(name), tensor, stream);
    }
  }
};

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

/// Until nothing is under way to memory that somebody else may get next.
void wait_in_any_case(Stream stream) noexcept {
  try {
    synchronize(stream);
  } catch (const Error&) {
    // A kernel of the program has failed: none runs any more.
  }
}

void bring_round(Communicator& communicator, const Experts& experts, const PackedWeights& packed,
                 std::span<const Transfer> transfers, const MakeRoom& make_room,
                 const Receive& receive, std::string_view what) {
  const int rank = communicator.rank();
  const Device device = communicator.device();
  Travelling travelling;
  Json leaving = Json::array();
  const auto copy = [&] {
    for (const Transfer& each : transfers) {
      if (each.from != rank) continue;
      PackedParts& parts = travelling.leaving[each.from_place];
      if (parts.empty()) parts = copy_parts(packed, each.from_place, device);
      leaving.push_back(describe(parts));
      if (each.to != rank) add_messages(travelling.sends, each.to, parts);
    }
  };
  communicator.together(copy, what);
  const std::vector<std::string> texts = communicator.gather(leaving.dump(), what);
  std::optional<OwnedStream> stream;
  const auto get_ready = [&] {
    std::vector<Json> described;
    described.reserve(texts.size());
    for (const std::string& text : texts) described.push_back(Json::parse(text));
    travelling.cut_room(described, transfers, rank, device, make_room);
    stream.emplace(device);
    travelling.copy_own(*stream);
  };
  try {
    communicator.together(get_ready, what);
    if (are_sent(transfers)) {
      communicator.exchange(travelling.sends, travelling.receives, *stream, what);
    }
    synchronize(*stream);
  } catch (...) {
    if (stream) wait_in_any_case(*stream);
    throw;
  }
  communicator.check();  // aborted transfers of a GPU end, too
  const auto assemble = [&] {
    for (const auto& [transfer, parts] : travelling.arriving) {
      receive({transfer.place, experts.from_parts(core::info_of_one(packed.info()), parts)});
    }
  };
  communicator.together(assemble, what);
}

}  // namespace

void bring(Communicator& communicator, const Experts& experts, const PackedWeights& packed,
           std::span<const Transfer> transfers, const MakeRoom& make_room, const Receive& receive,
           std::string_view what) {
  if (are_sent(transfers)) communicator.connect("experts that go to other ranks");
  for (const std::vector<Transfer>& round : rounds_of(transfers)) {
    bring_round(communicator, experts, packed, round, make_room, receive, what);
  }
}

}  // namespace fusedmoe::layer
