// Ranks that are processes of an MPI job. In a library of its own, fusedmoe::mpi, because MPI's
// binary interface differs between implementations: whoever links it has chosen one. It uses the
// public interface alone.
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <string>

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

class MpiData final : public DataPlane {
 public:
  explicit MpiData(MPI_Comm parent) {
    // A communicator of its own, so that messages of others do not meet ours.
    check(MPI_Comm_dup(parent, &comm_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }
  ~MpiData() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    // Freeing is collective: not where ranks have failed.
    if (!finalized && !aborted_) MPI_Comm_free(&comm_);
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::string_view name() const override { return "mpi"; }
  void abort() noexcept override { aborted_ = true; }

  void exchange(std::span<const Message> sends, std::span<const Message> receives, Stream,
                Waiting& waiting) override {
    requests_.clear();
    parts_.clear();
    try {
      for (const Message& message : receives) start(message, true);
      for (const Message& message : sends) start(message, false);
      wait(waiting);
    } catch (...) {
      cancel();
      throw;
    }
  }

 private:
  struct Part {
    int peer;
    int bytes;
    bool receive;
  };

  /// In parts, because MPI counts with an int.
  void start(const Message& message, bool receive) {
    constexpr std::size_t kMost = std::size_t{1} << 30;
    auto* data = static_cast<char*>(message.data);
    for (std::size_t left = message.bytes; left > 0;) {
      const int bytes = static_cast<int>(std::min(left, kMost));
      requests_.emplace_back();
      parts_.push_back({message.peer, bytes, receive});
      check(receive ? MPI_Irecv(data, bytes, MPI_BYTE, message.peer, 0, comm_, &requests_.back())
                    : MPI_Isend(data, bytes, MPI_BYTE, message.peer, 0, comm_, &requests_.back()),
            receive ? "MPI_Irecv" : "MPI_Isend");
      data += bytes;
      left -= static_cast<std::size_t>(bytes);
    }
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
        check_size(code, parts_[i], status);
        ++done;
        moved = true;
      }
      if (moved || tries % 64 != 0) continue;
      waiting.check(late());
      sched_yield();
    }
  }

  static void check_size(int code, const Part& part, MPI_Status& status) {
    int error_class = MPI_SUCCESS;
    if (code != MPI_SUCCESS) MPI_Error_class(code, &error_class);
    if (error_class == MPI_ERR_TRUNCATE) throw wrong_size(part, "more bytes");
    check(code, "MPI_Test");
    int bytes = part.bytes;
    if (part.receive && status.MPI_SOURCE == part.peer) MPI_Get_count(&status, MPI_BYTE, &bytes);
    if (bytes != part.bytes) throw wrong_size(part, std::to_string(bytes) + " bytes");
  }

  static Error wrong_size(const Part& part, const std::string& got) {
    return {"message", got + " from rank " + std::to_string(part.peer),
            std::to_string(part.bytes) + " bytes"};
  }

  std::vector<int> late() const {
    std::vector<int> ranks;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      const bool known = std::count(ranks.begin(), ranks.end(), parts_[i].peer) > 0;
      if (requests_[i] != MPI_REQUEST_NULL && !known) ranks.push_back(parts_[i].peer);
    }
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

  /// Receives must not write any more; a send that nobody takes stays behind.
  void cancel() noexcept {
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      if (parts_[i].receive) {
        MPI_Cancel(&requests_[i]);
        MPI_Wait(&requests_[i], MPI_STATUS_IGNORE);
      } else {
        MPI_Request_free(&requests_[i]);
      }
    }
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  bool aborted_ = false;
  std::vector<MPI_Request> requests_;
  std::vector<Part> parts_;
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
