// How the ranks of a communicator come to map each other's GPU memory: all of them or none. What a
// rank has told when it joined says whether it may and wants to. Then it tells where its block is
// found, then whether it could map those of the others, then whether it reads what they hold.
#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

#include "comm/communicator_impl.h"
#include "comm/descriptors.h"
#include "comm/peer_watch.h"
#include "core/ceil_div.h"
#include "core/check.h"
#include "core/exception_text.h"

namespace fusedmoe {
namespace {

constexpr std::string_view kWhat = "mapping GPU memory";

/// What a rank says of its block.
struct Offer {
  std::uint64_t mark = 0;
  std::size_t bytes = 0;
  std::string address;  // of its socket

  std::string text() const { return core::format("{} {} {}", mark, bytes, address); }
  static Offer parse(const std::string& text) {
    Offer offer;
    std::istringstream words(text);
    if (!(words >> offer.mark >> offer.bytes >> offer.address)) {
      throw Error::communication("a rank has told no block");
    }
    return offer;
  }
};

}  // namespace

std::string comm::slow_link(std::span<const PeerLink> links, int rank, std::span<const int> names) {
  constexpr double kLeast = 2e9;  // bytes/s: over four lanes of PCIe 3.0 it is more
  const auto by_rate = [](const PeerLink& a, const PeerLink& b) {
    return a.bytes_per_second < b.bytes_per_second;
  };
  const auto slowest = std::min_element(links.begin(), links.end(), by_rate);
  if (slowest->bytes_per_second >= kLeast) return {};
  return core::format("rank {} reads the memory of rank {} at {} MB/s; below {} something is wrong",
                      names[rank], names[slowest - links.begin()],
                      std::lround(slowest->bytes_per_second / 1e6), std::lround(kLeast / 1e6));
}

/// Why a rank cannot take part, or does not want to, as far as all know without trying.
std::string Communicator::Impl::no_peer_memory() const {
  if (options.device.is_cpu()) return "the ranks are on CPUs";
  if (host_ranks.size() != static_cast<std::size_t>(size)) return "the ranks are on several hosts";
  for (int r = 0; r < size; ++r) {
    if (wishes[r] == "no") return core::format("rank {}: peer_memory is false", global(r));
    for (int other = 0; wishes[r] == "maybe" && other < size; ++other) {
      if (other == r || devices[other] != devices[r]) continue;
      return core::format("rank {}: it shares its GPU with rank {}", global(r), global(other));
    }
  }
  return {};
}

/// The same, or why an earlier try has failed. Empty: nothing is known against it.
std::string Communicator::Impl::cannot_map() {
  if (peers) return {};
  if (without_peers.empty()) without_peers = no_peer_memory();
  return without_peers;
}

/// Runs a part of the set-up on every rank. Returns what each has told, or the first reason why one
/// cannot go on.
std::variant<std::vector<std::string>, std::string> Communicator::Impl::offer(
    Communicator& communicator, const std::function<std::string()>& part) const {
  std::string mine;
  try {
    mine = "=" + part();
  } catch (...) {
    mine = "!" + core::current_exception_text();
  }
  std::vector<std::string> texts = communicator.gather(mine, kWhat);
  for (int r = 0; r < size; ++r) {
    if (texts[r].starts_with('!')) {
      return core::format("rank {}: {}", global(r), texts[r].substr(1));
    }
    texts[r].erase(0, 1);
  }
  return texts;
}

std::string Communicator::map_peers(std::size_t bytes) {
  Impl& impl = *impl_;
  if (std::string why = impl.cannot_map(); !why.empty()) return why;
  // Before any returns for what it has already: the others would wait for it.
  const std::vector<std::string> asked = gather(core::to_string(bytes), kWhat);
  for (int r = 1; r < impl.size; ++r) {
    if (asked[r] == asked[0]) continue;
    throw Error::communication(core::format("{}: rank {} asks for {} bytes, but rank {} for {}",
                                            kWhat, impl.global(0), asked[0], impl.global(r),
                                            asked[r]));
  }
  if (impl.peers && impl.peers->bytes() >= bytes) return {};
  if (!impl.without_peers.empty()) return impl.without_peers;
  const bool used = impl.peers && impl.peers->is_used();
  const std::vector<std::string> states = gather(used ? "used" : "new", kWhat);
  if (std::count(states.begin(), states.end(), "used") > 0) {
    return core::format(
        "with this layer {} bytes of memory that the GPUs map are needed, but layers of {} have "
        "run, and graphs hold addresses in them: make all layers before one runs, or call "
        "map_peers() of the communicator before",
        bytes, impl.peers->bytes());
  }
  std::shared_ptr<PeerMemory> made;
  const std::string reason = impl.map_arenas(*this, bytes, made);
  if (!reason.empty()) return impl.without_peers = reason;
  if (impl.peers) made->share_gpu(impl.peers->lanes());
  impl.peer_watch.reset();
  {
    const std::lock_guard lock(impl.mutex);
    impl.peers.swap(made);  // the old one, which waits for its GPU, ends behind the lock
  }
  impl.peer_watch = std::make_unique<comm::PeerWatch>(
      impl.peers, [&impl] { return !impl.find_failure().empty(); });
  return {};
}

std::string Communicator::map_peers(const PeerBytes& layer) {
  const PeerBytes most{std::max(layer.published, impl_->of_layers.published),
                       std::max(layer.results, impl_->of_layers.results)};
  std::string why = map_peers(most.all());
  if (why.empty()) impl_->of_layers = most;
  return why;
}

/// What goes wrong names whose memory this rank cannot have. Whether its GPU could read the other's
/// says nothing here: a process may not see that GPU and map its memory all the same.
void Communicator::Impl::map_block(int owner, const std::function<void()>& map) const {
  try {
    map();
  } catch (const Error& error) {
    throw Error::communication(core::format(
        "its GPU cannot map the memory of the GPU of rank {}: {}", global(owner), error.what()));
  }
}

PeerGroup Communicator::Impl::peer_group() const {
  PeerGroup group{options.device, rank, size, {}};
  for (int r = 0; r < size; ++r) group.names.push_back(global(r));
  return group;
}

/// Makes a block of each rank, each of its own size, and maps them all.
std::string Communicator::Impl::map_blocks(Communicator& communicator,
                                           const std::function<std::size_t()>& bytes,
                                           std::shared_ptr<PeerBlocks>& made) {
  std::unique_ptr<comm::DescriptorSocket> socket;
  const auto offered = offer(communicator, [&] {
    made = PeerBlocks::make(peer_group(), bytes());
    socket = std::make_unique<comm::DescriptorSocket>();
    return Offer{made->mark(), made->bytes(), socket->address()}.text();
  });
  if (const auto* reason = std::get_if<std::string>(&offered)) return *reason;
  const auto mapped = offer(communicator, [&]() -> std::string {
    // Half of the time: a rank that waits for a descriptor in vain must tell the others so while
    // they still listen, and they listen for options.timeout.
    const auto deadline = comm::SocketClock::now() + options.timeout / 2;
    std::map<int, Offer> others;
    std::map<int, std::string> elsewhere;  // ranks of other processes
    for (int r = 0; r < size; ++r) {
      const Offer& theirs = others[r] =
          Offer::parse(std::get<std::vector<std::string>>(offered)[r]);
      map_block(r, [&] {
        if (!made->map(r, theirs.mark)) elsewhere.emplace(r, theirs.address);
      });
    }
    const comm::Socket own(made->descriptor());
    for (const auto& each :
         socket->exchange(rank, own.get(), elsewhere, deadline, [&] { communicator.check(); })) {
      const int owner = each.first;
      map_block(owner, [&] {
        made->map_descriptor(owner, others[owner].mark, each.second.get(), others[owner].bytes);
      });
    }
    return {};
  });
  if (const auto* reason = std::get_if<std::string>(&mapped)) return *reason;
  // When all have mapped all: kernels read from here on.
  const auto checked = offer(communicator, [&]() -> std::string {
    made->check_marks();
    return {};
  });
  const auto* reason = std::get_if<std::string>(&checked);
  return reason ? *reason : std::string();
}

std::string Communicator::Impl::map_arenas(Communicator& communicator, std::size_t bytes,
                                           std::shared_ptr<PeerMemory>& made) {
  // GPUs lend memory in such pieces anyway, and a layer that needs a little more finds it.
  bytes = static_cast<std::size_t>(
      core::round_up(static_cast<std::int64_t>(bytes), std::int64_t{2} << 20));
  std::shared_ptr<PeerBlocks> arenas;
  std::string reason = map_blocks(
      communicator, [&] { return bytes; }, arenas);
  if (!reason.empty()) return reason;
  const auto timed = offer(communicator, [&]() -> std::string {
    const PeerGroup group = peer_group();
    made = PeerMemory::make(group, options.timeout, arenas, bytes);
    made->time_links();
    return comm::slow_link(made->links(), rank, group.names);
  });
  if (const auto* why = std::get_if<std::string>(&timed)) return *why;
  slow_peers.clear();
  for (const std::string& text : std::get<std::vector<std::string>>(timed)) {
    if (slow_peers.empty()) slow_peers = text;
  }
  return {};
}

std::string Communicator::map_blocks(const std::function<std::size_t()>& bytes,
                                     std::shared_ptr<PeerBlocks>& blocks) {
  Impl& impl = *impl_;
  if (std::string why = impl.cannot_map(); !why.empty()) return why;
  std::shared_ptr<PeerBlocks> made;
  std::string reason = impl.map_blocks(*this, bytes, made);
  if (reason.empty()) blocks = std::move(made);
  return reason;
}

const std::string& Communicator::slow_peers() const {
  return impl_->slow_peers;
}

const std::shared_ptr<PeerMemory>& Communicator::peers() const {
  return impl_->peers;
}

}  // namespace fusedmoe
