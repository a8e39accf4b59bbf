// What a Communicator holds, for the files that implement it: communicator.cpp, which needs the
// control plane alone, and communicator_steps.cpp, whose steps move bytes.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <variant>

#include "comm/poll.h"
#include "comm/shared_memory.h"
#include "fusedmoe/comm.h"
#include "moe/peer_memory.h"

namespace fusedmoe {

namespace comm {
class PeerWatch;
/// Says so where a rank reads another's memory at an absurd rate; empty: it does not. `names`: the
/// numbers of the ranks to print.
std::string slow_link(std::span<const PeerLink> links, int rank, std::span<const int> names);
}  // namespace comm

struct Communicator::Impl {
  using Clock = std::chrono::steady_clock;
  class Watch;
  int rank, size;
  std::shared_ptr<ControlPlane> control;
  std::shared_ptr<DataPlane> data;
  std::shared_ptr<comm::SharedMemory> shared;
  bool asked_to_share = false;
  CommunicatorOptions options;
  std::string prefix;        // of names in the control plane
  std::vector<int> members;  // of what was split off: rank here -> rank of the whole
  std::vector<int> host_ranks;
  std::vector<bool> access;          // size x size
  std::vector<std::string> devices;  // of each rank, by names that all hosts have
  std::vector<std::string> wishes;   // of each rank, for peer memory: "maybe", "yes", "no"
  std::uint64_t gathers = 0, splits = 0, steps = 0, layers = 0;
  /// Names of this rank's texts that are forgotten when all ranks have ended another gather.
  struct ReadTexts {
    std::mutex mutex;
    std::vector<std::string> names;
  };
  std::shared_ptr<ReadTexts> read_texts = std::make_shared<ReadTexts>();
  std::shared_ptr<ReadTexts> read_texts_of_whole;  // of what this was split off

  Impl();
  ~Impl();

  std::shared_ptr<PeerMemory> peers;
  PeerBytes of_layers;        // the most that any layer has asked for
  std::string without_peers;  // why there are none, once asked
  std::string slow_peers;     // who reads at an absurd rate, the same on all ranks

  mutable std::mutex mutex;
  mutable std::string failure;                                             // once known
  std::map<std::vector<int>, std::shared_ptr<Communicator>> shared_parts;  // by their members
  std::map<int, std::shared_ptr<Communicator>> lanes;                      // by their numbers
  std::unique_ptr<comm::PeerWatch> peer_watch;  // the last to be made, the first to end

  /// The rank's number in the whole communicator, which both planes and all errors use.
  int global(int r) const { return members.empty() ? r : members[r]; }
  std::string find_failure() const;
  std::string why_gave_up() const;
  std::string end(const std::string& reason);
  [[noreturn]] void fail(std::string_view what, std::span<const int> late);
  std::string read(const std::string& name, Clock::time_point deadline);
  void call_hook();
  std::vector<std::string> gather_marked(const std::string& text, std::string_view what);
  void describe_hosts(Communicator& communicator);
  std::string no_peer_memory() const;
  std::string cannot_map();
  std::variant<std::vector<std::string>, std::string> offer(
      Communicator& communicator, const std::function<std::string()>& part) const;
  void map_block(int owner, const std::function<void()>& map) const;
  PeerGroup peer_group() const;
  std::string map_blocks(Communicator& communicator, const std::function<std::size_t()>& bytes,
                         std::shared_ptr<PeerBlocks>& made);
  std::string map_arenas(Communicator& communicator, std::size_t bytes,
                         std::shared_ptr<PeerMemory>& made);
  /// The peers of messages as the data plane numbers them.
  std::vector<Message> outside(std::span<const Message> messages) const;
  /// Calls step(waiting) of the data plane; what it throws ends the communicator on all ranks.
  template <typename Step>
  void run(Communicator& communicator, std::string_view what, const Step& step);
};

}  // namespace fusedmoe
