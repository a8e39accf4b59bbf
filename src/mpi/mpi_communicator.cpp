// Ranks that are processes of an MPI job. In a library of its own, fusedmoe::mpi, because MPI's
// binary interface differs between implementations: whoever links it has chosen one. It uses the
// public interface alone.
//
// MPI may read and write the memory of a message until it says that the message has ended, and it
// may never say so where a peer has stopped. So it gets no memory of callers, only pieces of ours,
// and everything is asked for without waiting. What MPI does not let go stays here.
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fusedmoe/comm.h"
#include "fusedmoe/error.h"
#include "fusedmoe/wait_hook.h"
#include "mpi/flow.h"
#include "mpi/left_behind.h"

namespace fusedmoe {
namespace {

using Clock = std::chrono::steady_clock;
using mpi::Flow;
using mpi::LeftBehind;
using mpi::Operation;
using mpi::Piece;
using mpi::world_ranks;

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int size = 0;
  MPI_Error_string(code, text.data(), &size);
  throw Error::communication(std::string(what) + ": " + text.data());
}

/// Lives as long as the process.
LeftBehind& left_behind() {
  static auto& operations = *new LeftBehind;
  return operations;
}

/// Ends MPI with the process, where nobody else began it. Not where that would wait for a peer that
/// has stopped.
struct Session {
  bool ours = false;
  ~Session() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (ours && !finalized && !left_behind().waits_for_peer()) MPI_Finalize();
  }
};

void initialize() {
  static Session session;
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized) return;
  int provided = 0;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  session.ours = true;
}

/// Waits for a collective operation of joining.
void finish(Operation operation, MPI_Comm comm, Clock::time_point deadline) {
  constexpr std::chrono::milliseconds kBetweenCalls{20};  // of the wait hook
  Clock::time_point next_call = Clock::now() + kBetweenCalls;
  try {
    for (int ended = 0, tries = 1; !ended; ++tries) {
      check(MPI_Test(&operation.request, &ended, MPI_STATUS_IGNORE), "MPI_Test");
      if (ended || tries % 64 != 0) continue;
      const auto now = Clock::now();
      if (now >= deadline) {
        throw Error::communication("joining over MPI: not all ranks have arrived in time");
      }
      if (now >= next_call) {
        call_wait_hook();
        next_call = now + kBetweenCalls;
      }
      sched_yield();
    }
  } catch (...) {
    left_behind().add(std::move(operation), world_ranks(comm));
    throw;
  }
}

/// One text of every rank.
std::vector<std::string> gather(MPI_Comm comm, int size, const std::string& mine,
                                Clock::time_point deadline) {
  struct Texts {
    std::string mine, all;
    int bytes = 0;
    std::vector<int> sizes, begins;
  };
  const auto texts = std::make_shared<Texts>();
  texts->mine = mine;
  texts->bytes = static_cast<int>(mine.size());
  texts->sizes.resize(static_cast<std::size_t>(size));
  Operation sizes{MPI_REQUEST_NULL, texts};
  check(MPI_Iallgather(&texts->bytes, 1, MPI_INT, texts->sizes.data(), 1, MPI_INT, comm,
                       &sizes.request),
        "MPI_Iallgather");
  finish(std::move(sizes), comm, deadline);
  int total = 0;
  for (const int bytes : texts->sizes) {
    texts->begins.push_back(total);
    total += bytes;
  }
  texts->all.resize(static_cast<std::size_t>(total));
  Operation all{MPI_REQUEST_NULL, texts};
  check(MPI_Iallgatherv(texts->mine.data(), texts->bytes, MPI_CHAR, texts->all.data(),
                        texts->sizes.data(), texts->begins.data(), MPI_CHAR, comm, &all.request),
        "MPI_Iallgatherv");
  finish(std::move(all), comm, deadline);
  std::vector<std::string> result;
  for (std::size_t r = 0; r < texts->sizes.size(); ++r) {
    result.push_back(texts->all.substr(texts->begins[r], texts->sizes[r]));
  }
  return result;
}

/// The communicators of MPI that were made from one, by their numbers, which are the same on all
/// ranks.
struct Children {
  int made = 0;
  std::vector<int> in_use;
  std::vector<std::pair<int, MPI_Comm>> failed;  // and are no longer in use here
};

/// Kept as an attribute of the parent, so that it ends with it.
std::shared_ptr<Children> children_of(MPI_Comm parent) {
  using Held = std::shared_ptr<Children>;
  static const int key = [] {
    const auto forget = [](MPI_Comm, int, void* held, void*) {
      delete static_cast<Held*>(held);
      return MPI_SUCCESS;
    };
    int made = MPI_KEYVAL_INVALID;
    check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, +forget, &made, nullptr),
          "MPI_Comm_create_keyval");
    return made;
  }();
  Held* held = nullptr;
  int found = 0;
  check(MPI_Comm_get_attr(parent, key, &held, &found), "MPI_Comm_get_attr");
  if (found) return *held;
  auto mine = std::make_unique<Held>(std::make_shared<Children>());
  check(MPI_Comm_set_attr(parent, key, mine.get()), "MPI_Comm_set_attr");
  return *mine.release();
}

class MpiData final : public DataPlane {
 public:
  MpiData(MPI_Comm parent, Clock::time_point deadline)
      : siblings_(children_of(parent)), number_(siblings_->made++) {
    // A communicator of its own, so that messages of others do not meet ours.
    const auto made = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
    Operation duplicate{MPI_REQUEST_NULL, made};
    check(MPI_Comm_idup(parent, made.get(), &duplicate.request), "MPI_Comm_idup");
    finish(std::move(duplicate), parent, deadline);
    comm_ = *made;
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    world_ranks_ = world_ranks(comm_);
    siblings_->in_use.push_back(number_);
    try {
      choose_windows(deadline);
      free_failed(deadline);
      left_behind().ranks_have_met(world_ranks_);
    } catch (...) {
      dead_ = true;
      leave();
      throw;
    }
  }
  ~MpiData() override { leave(); }

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::string_view name() const override { return "mpi"; }
  bool is_byte_stream() const override { return true; }
  void abort() noexcept override { dead_ = true; }

  void exchange(std::span<const Message> sends, std::span<const Message> receives, Stream,
                Waiting& waiting) override {
    if (dead_) throw Error::communication("this communicator of MPI has failed");
    flows_.clear();
    try {
      add_flows(receives, receives_, true);
      add_flows(sends, sends_, false);
      move(waiting);
    } catch (...) {
      leave_behind();
      throw;
    }
  }

 private:
  /// On one host cores copy all that goes to a peer: one piece at a time stays in their caches. On
  /// other hosts the next pieces are on their way while one is copied.
  void choose_windows(Clock::time_point deadline) {
    std::array<char, MPI_MAX_PROCESSOR_NAME> name{};
    int length = 0;
    check(MPI_Get_processor_name(name.data(), &length), "MPI_Get_processor_name");
    const std::vector<std::string> hosts = gather(comm_, size_, name.data(), deadline);
    for (const std::string& host : hosts) windows_.push_back(host == hosts[rank_] ? 1 : 4);
  }

  void add_flows(std::span<const Message> messages, std::vector<Message>& sorted, bool receive) {
    sorted.assign(messages.begin(), messages.end());
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const Message& a, const Message& b) { return a.peer < b.peer; });
    for (auto begin = sorted.begin(); begin != sorted.end();) {
      const auto end = std::find_if(begin, sorted.end(),
                                    [&](const Message& each) { return each.peer != begin->peer; });
      Flow flow{begin->peer, receive, windows_[begin->peer], {begin, end}};
      for (const Message& message : flow.messages) flow.bytes += message.bytes;
      begin = end;
      if (flow.bytes == 0) continue;
      flows_.push_back(std::move(flow));
      fill(flows_.back());
    }
  }

  /// Gives MPI as many pieces as it may have.
  void fill(Flow& flow) {
    while (flow.pieces.size() < flow.window && flow.begun < flow.all_bytes()) begin_piece(flow);
  }

  void begin_piece(Flow& flow) {
    const bool first = flow.begun == 0;
    const auto bytes = std::min<std::uint64_t>(flow.all_bytes() - flow.begun, Piece::kMost);
    Piece& piece = flow.pieces.emplace_back(take_piece());
    piece.bytes = static_cast<std::size_t>(bytes);
    if (flow.receive) {
      // The first may be longer than it should: then its header says so.
      const auto room = static_cast<int>(first ? Piece::kMost : piece.bytes);
      check(MPI_Irecv(piece.memory.get(), room, MPI_BYTE, flow.peer, 0, comm_, &piece.request),
            "MPI_Irecv");
    } else {
      char* to = piece.memory.get();
      if (first) {
        std::memcpy(to, &flow.bytes, sizeof flow.bytes);
        to += sizeof flow.bytes;
      }
      flow.advance(piece.bytes - (to - piece.memory.get()),
                   [&](const char* from, std::size_t part) {
                     std::memcpy(to, from, part);
                     to += part;
                   });
      check(MPI_Isend(piece.memory.get(), static_cast<int>(piece.bytes), MPI_BYTE, flow.peer, 0,
                      comm_, &piece.request),
            "MPI_Isend");
    }
    flow.begun += piece.bytes;
  }

  void move(Waiting& waiting) {
    for (std::size_t tries = 0;; ++tries) {
      bool moved = false, done = true;
      for (Flow& flow : flows_) {
        while (!flow.pieces.empty() && has_ended(flow)) moved = true;
        done &= flow.done();
      }
      if (done) return;
      if (moved) waiting.moved();
      if (moved || tries % 64 != 0) continue;
      waiting.check(late());
      sched_yield();
    }
  }

  /// Whether the first piece of a flow has ended; then the next begins.
  bool has_ended(Flow& flow) {
    Piece& piece = flow.pieces.front();
    int ended = 0, got = static_cast<int>(piece.bytes);
    MPI_Status status{};
    const int code = MPI_Test(&piece.request, &ended, &status);
    if (code == MPI_SUCCESS && !ended) return false;
    check(code, "MPI_Test");
    if (flow.receive) {
      check(MPI_Get_count(&status, MPI_BYTE, &got), "MPI_Get_count");
      take(flow, piece, static_cast<std::size_t>(got));
    }
    flow.copied += piece.bytes;
    free_pieces_.push_back(std::move(piece));
    flow.pieces.pop_front();
    fill(flow);
    return true;
  }

  /// Copies what has come.
  static void take(Flow& flow, const Piece& piece, std::size_t got) {
    const char* from = piece.memory.get();
    std::uint64_t sent = flow.bytes;
    if (flow.copied == 0 && got >= sizeof sent) {
      std::memcpy(&sent, from, sizeof sent);
      from += sizeof sent;
    }
    if (sent != flow.bytes || got != piece.bytes) {
      throw Error("message", std::to_string(sent) + " bytes from rank " + std::to_string(flow.peer),
                  std::to_string(flow.bytes) + " bytes");
    }
    flow.advance(got - (from - piece.memory.get()), [&](char* to, std::size_t part) {
      std::memcpy(to, from, part);
      from += part;
    });
  }

  Piece take_piece() {
    if (free_pieces_.empty()) return {std::shared_ptr<char[]>(new char[Piece::kMost])};
    Piece piece = std::move(free_pieces_.back());
    free_pieces_.pop_back();
    return piece;
  }

  std::vector<int> late() const {
    std::vector<int> ranks;
    for (const Flow& flow : flows_) {
      if (!flow.done() && std::count(ranks.begin(), ranks.end(), flow.peer) == 0) {
        ranks.push_back(flow.peer);
      }
    }
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

  /// The exchange has failed: nobody takes what MPI has. It may not know that for long.
  void leave_behind() noexcept {
    dead_ = true;
    for (Flow& flow : flows_) {
      for (Piece& piece : flow.pieces) {
        if (piece.request == MPI_REQUEST_NULL) continue;
        if (flow.receive) MPI_Cancel(&piece.request);  // or lets it come, if it is on its way
        left_behind().add({piece.request, std::move(piece.memory)}, {world_ranks_[flow.peer]});
      }
    }
    flows_.clear();
  }

  /// Frees the communicator, or leaves that to a sibling.
  void leave() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    std::erase(siblings_->in_use, number_);
    if (finalized) return;
    if (dead_) {
      // Freeing is collective, and another rank may still send: the next one does it.
      siblings_->failed.emplace_back(number_, comm_);
    } else {
      MPI_Comm_free(&comm_);
    }
  }

  /// Frees the siblings that failed and that no rank uses any more. MPI keeps what it needs until
  /// operations that are still pending have ended.
  void free_failed(Clock::time_point deadline) {
    std::string mine = " ";
    for (const int number : siblings_->in_use) mine += std::to_string(number) + " ";
    const std::vector<std::string> in_use = gather(comm_, size_, mine, deadline);
    std::sort(siblings_->failed.begin(), siblings_->failed.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    std::erase_if(siblings_->failed, [&](auto& each) {
      const std::string number = " " + std::to_string(each.first) + " ";
      const bool used = std::any_of(in_use.begin(), in_use.end(), [&](const std::string& numbers) {
        return numbers.find(number) != std::string::npos;
      });
      if (!used) MPI_Comm_free(&each.second);
      return !used;
    });
  }

  const std::shared_ptr<Children> siblings_;
  const int number_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  std::vector<int> world_ranks_;  // of each rank of comm_
  std::atomic<bool> dead_{false};
  std::vector<std::size_t> windows_;  // of flows to and from each rank
  std::vector<Flow> flows_;
  std::vector<Message> sends_, receives_;  // by peer; flows look at them
  std::vector<Piece> free_pieces_;
};

}  // namespace

std::shared_ptr<Communicator> make_mpi_communicator(std::optional<int> fortran_handle,
                                                    CommunicatorOptions options) {
  constexpr std::chrono::milliseconds kYear = std::chrono::hours(24 * 365);
  if (options.timeout.count() <= 0 || options.timeout > kYear) {
    throw Error("timeout", std::to_string(options.timeout.count()) + " ms",
                "positive, at most a year");
  }
  initialize();
  const auto deadline = Clock::now() + options.timeout;
  const MPI_Comm comm = fortran_handle ? MPI_Comm_f2c(*fortran_handle) : MPI_COMM_WORLD;
  const auto data = std::make_shared<MpiData>(comm, deadline);
  const auto gather_texts = [&](const std::string& text) {
    return gather(comm, data->size(), text, deadline);
  };
  const auto control =
      make_control_plane(data->rank(), data->size(), gather_texts, options.timeout);
  return std::make_shared<Communicator>(data->rank(), data->size(), control, data, options);
}

std::string mpi_summary() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int size = 0;
  MPI_Get_library_version(text.data(), &size);
  const std::string line(text.data(), static_cast<std::size_t>(size));
  return line.substr(0, line.find_first_of(",\n"));
}

}  // namespace fusedmoe
