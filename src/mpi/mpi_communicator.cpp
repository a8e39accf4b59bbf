// Ranks that are processes of an MPI job. In a library of its own, fusedmoe::mpi, because MPI's
// binary interface differs between implementations: whoever links it has chosen one. It uses the
// public interface alone.
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fusedmoe/comm.h"
#include "fusedmoe/error.h"

namespace fusedmoe {
namespace {

/// Ends MPI with the process, where nobody else began it.
struct Session {
  bool ours = false;
  ~Session() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (ours && !finalized) MPI_Finalize();
  }
};

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int size = 0;
  MPI_Error_string(code, text.data(), &size);
  throw Error::communication(std::string(what) + ": " + text.data());
}

void initialize() {
  static Session session;
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized) return;
  int provided = 0;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  session.ours = true;
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
  explicit MpiData(MPI_Comm parent) : siblings_(children_of(parent)), number_(siblings_->made++) {
    // A communicator of its own, so that messages of others do not meet ours.
    check(MPI_Comm_dup(parent, &comm_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    siblings_->in_use.push_back(number_);
    try {
      free_failed();
    } catch (...) {
      aborted_ = true;
      leave();
      throw;
    }
  }
  ~MpiData() override { leave(); }

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::string_view name() const override { return "mpi"; }
  bool is_byte_stream() const override { return true; }
  void abort() noexcept override { aborted_ = true; }

  /// All that goes to a peer, or comes from it, is one message of MPI's, whose datatype says where
  /// its blocks lie.
  void exchange(std::span<const Message> sends, std::span<const Message> receives, Stream,
                Waiting& waiting) override {
    requests_.clear();
    transfers_.clear();
    try {
      start(receives, true);
      start(sends, false);
      wait(waiting);
    } catch (...) {
      cancel();
      throw;
    }
  }

 private:
  struct Transfer {
    int peer;
    MPI_Count bytes;
    bool receive;
  };

  void start(std::span<const Message> messages, bool receive) {
    sorted_.assign(messages.begin(), messages.end());
    std::stable_sort(sorted_.begin(), sorted_.end(),
                     [](const Message& a, const Message& b) { return a.peer < b.peer; });
    for (auto begin = sorted_.begin(); begin != sorted_.end();) {
      const auto end = std::find_if(begin, sorted_.end(),
                                    [&](const Message& each) { return each.peer != begin->peer; });
      start_with({begin, end}, receive);
      begin = end;
    }
  }

  /// The messages of one peer.
  void start_with(std::span<const Message> messages, bool receive) {
    constexpr std::size_t kMost = std::size_t{1} << 30;  // MPI counts with an int
    lengths_.clear();
    addresses_.clear();
    Transfer transfer{messages.front().peer, 0, receive};
    for (const Message& message : messages) {
      auto* data = static_cast<char*>(message.data);
      for (std::size_t left = message.bytes; left > 0;) {
        const std::size_t bytes = std::min(left, kMost);
        lengths_.push_back(static_cast<int>(bytes));
        check(MPI_Get_address(data, &addresses_.emplace_back()), "MPI_Get_address");
        data += bytes;
        left -= bytes;
      }
      transfer.bytes += static_cast<MPI_Count>(message.bytes);
    }
    if (transfer.bytes == 0) return;
    MPI_Datatype blocks = MPI_DATATYPE_NULL;
    check(MPI_Type_create_hindexed(static_cast<int>(lengths_.size()), lengths_.data(),
                                   addresses_.data(), MPI_BYTE, &blocks),
          "MPI_Type_create_hindexed");
    transfers_.push_back(transfer);
    MPI_Request* request = &requests_.emplace_back(MPI_REQUEST_NULL);
    const int peer = transfer.peer;
    int code = MPI_Type_commit(&blocks);
    if (code == MPI_SUCCESS) {
      code = receive ? MPI_Irecv(MPI_BOTTOM, 1, blocks, peer, 0, comm_, request)
                     : MPI_Isend(MPI_BOTTOM, 1, blocks, peer, 0, comm_, request);
    }
    MPI_Type_free(&blocks);  // MPI keeps it until the transfer has ended
    check(code, receive ? "MPI_Irecv" : "MPI_Isend");
  }

  void wait(Waiting& waiting) {
    for (std::size_t done = 0, tries = 0; done < requests_.size(); ++tries) {
      bool moved = false;
      for (std::size_t i = 0; i < requests_.size(); ++i) {
        if (requests_[i] == MPI_REQUEST_NULL) continue;
        int complete = 0;
        MPI_Status status{};
        const int code = MPI_Test(&requests_[i], &complete, &status);
        if (!complete && code == MPI_SUCCESS) continue;
        check_size(code, transfers_[i], status);
        ++done;
        moved = true;
      }
      if (moved || tries % 64 != 0) continue;
      waiting.check(late());
      sched_yield();
    }
  }

  static void check_size(int code, const Transfer& transfer, MPI_Status& status) {
    int error_class = MPI_SUCCESS;
    if (code != MPI_SUCCESS) MPI_Error_class(code, &error_class);
    if (error_class == MPI_ERR_TRUNCATE) throw wrong_size(transfer, "more bytes");
    check(code, "MPI_Test");
    MPI_Count bytes = transfer.bytes;
    if (transfer.receive && status.MPI_SOURCE == transfer.peer) {
      check(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x");
    }
    if (bytes != transfer.bytes) throw wrong_size(transfer, std::to_string(bytes) + " bytes");
  }

  static Error wrong_size(const Transfer& transfer, const std::string& got) {
    return {"message", got + " from rank " + std::to_string(transfer.peer),
            std::to_string(transfer.bytes) + " bytes"};
  }

  std::vector<int> late() const {
    std::vector<int> ranks;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      const bool known = std::count(ranks.begin(), ranks.end(), transfers_[i].peer) > 0;
      if (requests_[i] != MPI_REQUEST_NULL && !known) ranks.push_back(transfers_[i].peer);
    }
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

  /// Receives must not write any more; a send that nobody takes stays behind.
  void cancel() noexcept {
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      if (transfers_[i].receive) {
        MPI_Cancel(&requests_[i]);
        MPI_Wait(&requests_[i], MPI_STATUS_IGNORE);
      } else {
        MPI_Request_free(&requests_[i]);
      }
    }
  }

  /// Frees the communicator, or leaves that to a sibling.
  void leave() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    std::erase(siblings_->in_use, number_);
    if (finalized) return;
    if (aborted_) {
      // Freeing is collective, and another rank may still send: the next one does it.
      siblings_->failed.emplace_back(number_, comm_);
    } else {
      MPI_Comm_free(&comm_);
    }
  }

  /// Frees the siblings that failed and that no rank uses any more. MPI keeps what it needs until
  /// operations that are still pending have ended.
  void free_failed() {
    std::vector<int> in_use = siblings_->in_use, theirs;
    const std::vector<int> mine = in_use;
    for (int step = 1; step < size_; ++step) {
      const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
      int count = static_cast<int>(mine.size()), their_count = 0;
      check(MPI_Sendrecv(&count, 1, MPI_INT, to, 0, &their_count, 1, MPI_INT, from, 0, comm_,
                         MPI_STATUS_IGNORE),
            "MPI_Sendrecv");
      theirs.resize(static_cast<std::size_t>(their_count));
      check(MPI_Sendrecv(mine.data(), count, MPI_INT, to, 0, theirs.data(), their_count, MPI_INT,
                         from, 0, comm_, MPI_STATUS_IGNORE),
            "MPI_Sendrecv");
      in_use.insert(in_use.end(), theirs.begin(), theirs.end());
    }
    std::sort(siblings_->failed.begin(), siblings_->failed.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    std::erase_if(siblings_->failed, [&](auto& each) {
      if (std::count(in_use.begin(), in_use.end(), each.first) > 0) return false;
      MPI_Comm_free(&each.second);
      return true;
    });
  }

  const std::shared_ptr<Children> siblings_;
  const int number_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  bool aborted_ = false;
  std::vector<MPI_Request> requests_;
  std::vector<Transfer> transfers_;  // one for each request
  // Scratch of start().
  std::vector<Message> sorted_;
  std::vector<int> lengths_;
  std::vector<MPI_Aint> addresses_;
};

/// One text of every rank.
std::vector<std::string> gather(MPI_Comm comm, int size, const std::string& mine) {
  const int bytes = static_cast<int>(mine.size());
  std::vector<int> sizes(static_cast<std::size_t>(size)), begins(sizes.size());
  check(MPI_Allgather(&bytes, 1, MPI_INT, sizes.data(), 1, MPI_INT, comm), "MPI_Allgather");
  int total = 0;
  for (std::size_t r = 0; r < sizes.size(); ++r) {
    begins[r] = total;
    total += sizes[r];
  }
  std::string all(static_cast<std::size_t>(total), '\0');
  check(MPI_Allgatherv(mine.data(), bytes, MPI_CHAR, all.data(), sizes.data(), begins.data(),
                       MPI_CHAR, comm),
        "MPI_Allgatherv");
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < sizes.size(); ++r) texts.push_back(all.substr(begins[r], sizes[r]));
  return texts;
}

}  // namespace

std::shared_ptr<Communicator> make_mpi_communicator(std::optional<int> fortran_handle,
                                                    CommunicatorOptions options) {
  initialize();
  const MPI_Comm comm = fortran_handle ? MPI_Comm_f2c(*fortran_handle) : MPI_COMM_WORLD;
  const auto data = std::make_shared<MpiData>(comm);
  const auto gather_texts = [&](const std::string& text) {
    return gather(comm, data->size(), text);
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
