// How the ranks of a communicator come to map each other's GPU memory: all of them or none. What a
// rank has told when it joined says whether it may and wants to. Then it tells where its arena is
// found, and then whether it could map those of the others.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "comm/communicator_impl.h"
#include "comm/descriptors.h"
#include "comm/peer_watch.h"
#include "core/check.h"
#include "core/exception_text.h"

namespace fusedmoe {
namespace {

constexpr std::string_view kWhat = "mapping GPU memory";

/// What a rank says of itself.
struct Offer {
  std::uint64_t mark = 0;
  std::string address;  // of its socket

  std::string text() const { return core::to_string(mark) + " " + address; }
  static Offer parse(std::string_view text) {
    Offer offer;
    const char* end = text.data() + text.size();
    const auto [stop, problem] = std::from_chars(text.data(), end, offer.mark);
    if (problem != std::errc() || stop == end || *stop != ' ') {
      throw Error::communication("a rank has told no arena");
    }
    offer.address = std::string(stop + 1, end);
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
  if (!impl.peers && impl.without_peers.empty()) impl.without_peers = impl.no_peer_memory();
  if (!impl.peers && !impl.without_peers.empty()) return impl.without_peers;
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
        "this layer needs {} bytes of memory that the GPUs map, but layers of {} have run, and "
        "graphs hold addresses in them: make the largest layer first, or call map_peers() of the "
        "communicator before any has run",
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

/// What goes wrong names whose memory this rank cannot have. Whether its GPU could read the other's
/// says nothing here: a process may not see that GPU and map its memory all the same.
void Communicator::Impl::map_arena(int owner, const std::function<void()>& map) const {
  try {
    map();
  } catch (const Error& error) {
    throw Error::communication(core::format(
        "its GPU cannot map the memory of the GPU of rank {}: {}", global(owner), error.what()));
  }
}

std::string Communicator::Impl::map_arenas(Communicator& communicator, std::size_t bytes,
                                           std::shared_ptr<PeerMemory>& made) {
  // Half of the time: a rank that waits for a descriptor in vain must tell the others so while they
  // still listen, and they listen for options.timeout.
  const auto deadline = comm::SocketClock::now() + options.timeout / 2;
  std::unique_ptr<comm::DescriptorSocket> socket;
  std::vector<int> names;
  for (int r = 0; r < size; ++r) names.push_back(global(r));
  const auto offered = offer(communicator, [&] {
    made = PeerMemory::make({options.device, rank, size, names, options.timeout}, bytes);
    socket = std::make_unique<comm::DescriptorSocket>();
    return Offer{made->mark(), socket->address()}.text();
  });
  if (const auto* reason = std::get_if<std::string>(&offered)) return *reason;
  std::vector<std::uint64_t> marks;
  const auto mapped = offer(communicator, [&]() -> std::string {
    std::map<int, std::string> elsewhere;  // ranks of other processes
    for (int r = 0; r < size; ++r) {
      const Offer theirs = Offer::parse(std::get<std::vector<std::string>>(offered)[r]);
      marks.push_back(theirs.mark);
      map_arena(r, [&] {
        if (!made->map(r, theirs.mark)) elsewhere.emplace(r, theirs.address);
      });
    }
    const comm::Socket own(made->descriptor());
    for (const auto& [r, theirs] :
         socket->exchange(rank, own.get(), elsewhere, deadline, [&] { communicator.check(); })) {
      map_arena(r, [&] { made->map_descriptor(r, theirs.get()); });
    }
    return {};
  });
  if (const auto* reason = std::get_if<std::string>(&mapped)) return *reason;
  // When all have mapped all: kernels read from here on.
  const auto checked = offer(communicator, [&]() -> std::string {
    made->check_marks(marks);
    made->time_links();
    return comm::slow_link(made->links(), rank, names);
  });
  if (const auto* reason = std::get_if<std::string>(&checked)) return *reason;
  slow_peers.clear();
  for (const std::string& text : std::get<std::vector<std::string>>(checked)) {
    if (slow_peers.empty()) slow_peers = text;
  }
  return {};
}

const std::string& Communicator::slow_peers() const {
  return impl_->slow_peers;
}

const std::shared_ptr<PeerMemory>& Communicator::peers() const {
  return impl_->peers;
}

}  // namespace fusedmoe
