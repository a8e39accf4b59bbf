// Ranks that are threads of one process. A message is an address in a mailbox, one for each ordered
// pair of ranks; the receiver copies from there or reads there, and the sender waits until it has.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>

#include "comm/place.h"
#include "comm/text_board.h"
#include "core/check.h"
#include "core/device_runtime.h"
#include "core/parallel.h"
#include "core/thread_team.h"

namespace fusedmoe {
namespace comm {

void TextBoard::post(const std::string& name, std::string_view text) {
  {
    const std::lock_guard lock(mutex_);
    texts_.try_emplace(name, text);
  }
  posted_.notify_all();
}

std::optional<std::string> TextBoard::read(const std::string& name,
                                           std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto there = [&] { return texts_.contains(name); };
  if (!posted_.wait_for(lock, timeout, there)) return std::nullopt;
  return texts_.at(name);
}

std::uint64_t TextBoard::drop(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = texts_.find(name);
  if (found == texts_.end()) return 0;
  const std::uint64_t bytes = name.size() + found->second.size();
  texts_.erase(found);
  return bytes;
}

namespace {

using Clock = std::chrono::steady_clock;

// Ranks come to a step within microseconds of each other, or after their experts have run. Waking
// a thread that sleeps costs tens of microseconds.
constexpr std::chrono::microseconds kSpin{50}, kYield{2000};

/// Of memory that is lent: a number of bytes that no message has.
constexpr std::size_t kLent = static_cast<std::size_t>(-1);

/// A message, and what its sender calls the exchange; empty where the layer compares steps itself.
struct Published : Message {
  std::string what;
};

/// What all ranks of the process share.
class Mailboxes {
 public:
  struct Mailbox {
    std::deque<Published> messages;  // that were not yet read
    bool reading = false;            // the first one is being read
  };

  explicit Mailboxes(int size)
      : size_(size),
        spins_(size <= core::allowed_cores()),
        boxes_(static_cast<std::size_t>(size) * size),
        cores_(static_cast<std::size_t>(size)) {}

  void publish(int from, std::span<const Message> messages, std::string_view what) {
    cores_[from].store(sched_getcpu(), std::memory_order_relaxed);
    const std::lock_guard lock(mutex_);
    for (const Message& message : messages) {
      if (message.bytes == 0) continue;
      box(from, message.peer).messages.push_back({message, std::string(what)});
    }
    notify();
  }

  /// Takes the next message of each peer in `messages`, which are of different peers or one alone,
  /// and calls read(their addresses). The senders wait until it returns. Reading begins only when
  /// all of these messages are there. Until then a sender may give up and withdraw its message.
  /// Throws Error where a sender calls the exchange something else than `what`.
  template <typename Read>
  void receive(int to, std::span<const Message> messages, std::string_view what, Waiting& waiting,
               const Read& read) {
    std::vector<const void*> sources;
    std::unique_lock lock(mutex_);
    const auto is_there = [&](const Message& message) {
      return !box(message.peer, to).messages.empty();
    };
    // Again from the first: while one is awaited, another can be withdrawn.
    while (!std::all_of(messages.begin(), messages.end(), is_there)) {
      for (const Message& message : messages) {
        wait(lock, waiting, message.peer, [&] { return is_there(message); });
      }
    }
    for (const Message& message : messages) {
      const Published& source = box(message.peer, to).messages.front();
      if (source.what != what) {
        throw Error::communication(core::format("rank {} is at the {}, but rank {} is at the {}",
                                                to, what, message.peer, source.what));
      }
      FUSEDMOE_CHECK(source.bytes == message.bytes, "message",
                     core::format("{} from rank {}", describe(source.bytes), message.peer),
                     describe(message.bytes));
      sources.push_back(source.data);
    }
    for (const Message& message : messages) box(message.peer, to).reading = true;
    const auto end_reading = [&](bool done) {
      lock.lock();
      for (const Message& message : messages) {
        Mailbox& mailbox = box(message.peer, to);
        if (done) mailbox.messages.pop_front();
        mailbox.reading = false;
      }
      notify();
    };
    lock.unlock();
    try {
      read(sources);
    } catch (...) {
      end_reading(false);
      throw;
    }
    end_reading(true);
  }

  /// Returns when all that `from` has published is read.
  void wait_until_read(int from, Waiting& waiting) {
    std::unique_lock lock(mutex_);
    for (int to = 0; to < size_; ++to) {
      wait(lock, waiting, to, [&] { return box(from, to).messages.empty(); });
    }
  }

  /// Forgets what `from` has published, whose memory is about to go. Waits for who reads it.
  void withdraw(int from) {
    std::unique_lock lock(mutex_);
    for (int to = 0; to < size_; ++to) {
      Mailbox& mailbox = box(from, to);
      changed_.wait(lock, [&] { return !mailbox.reading; });
      mailbox.messages.clear();
    }
  }

 private:
  static std::string describe(std::size_t bytes) {
    return bytes == kLent ? "memory that is lent" : core::format("{} bytes", bytes);
  }
  Mailbox& box(int from, int to) { return boxes_[static_cast<std::size_t>(from) * size_ + to]; }

  /// With the lock held.
  void notify() {
    changes_.fetch_add(1, std::memory_order_release);
    changed_.notify_all();
  }

  /// Returns when condition() is true: spins first, unless the peer needs this core; then offers
  /// the core to others, then sleeps.
  template <typename Condition>
  void wait(std::unique_lock<std::mutex>& lock, Waiting& waiting, int peer,
            const Condition& condition) {
    const Clock::time_point begin = Clock::now();
    const bool alone = cores_[peer].load(std::memory_order_relaxed) != sched_getcpu();
    while (spins_ && !condition()) {
      const std::uint64_t seen = changes_.load(std::memory_order_acquire);
      lock.unlock();
      Clock::duration passed{};
      while (changes_.load(std::memory_order_acquire) == seen && passed < kYield) {
        passed = Clock::now() - begin;
        alone&& passed < kSpin ? core::pause() : static_cast<void>(sched_yield());
      }
      lock.lock();
      if (passed >= kYield) break;
    }
    constexpr std::chrono::milliseconds kStep{10};
    while (!changed_.wait_for(lock, kStep, condition)) {
      lock.unlock();
      waiting.check({&peer, 1});
      lock.lock();
    }
  }

  const int size_;
  const bool spins_;  // each rank has a core
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::uint64_t> changes_{0};
  std::vector<Mailbox> boxes_;           // [from][to]
  std::vector<std::atomic<int>> cores_;  // where each rank ran when it published last
};

/// On a GPU, too: ranks then share it, or read each other's, and the host waits for every copy.
class ThreadData final : public DataPlane {
 public:
  ThreadData(int rank, Device device, std::shared_ptr<Mailboxes> mailboxes)
      : rank_(rank), device_(device), mailboxes_(std::move(mailboxes)) {}

  std::string_view name() const override { return "threads"; }
  Device device() const override { return device_; }
  void exchange(std::span<const Message> sends, std::span<const Message> receives, Stream stream,
                Waiting& waiting) override {
    const core::DeviceRuntime& runtime = core::runtime_of(device_);
    if (!device_.is_cpu()) runtime.synchronize(stream);  // what is sent is there
    transfer(sends, waiting, [&] {
      for (const Message& message : receives) {
        if (message.bytes == 0) continue;
        mailboxes_->receive(
            rank_, {&message, 1}, compared(waiting), waiting,
            [&](std::span<const void* const> from) { copy(from.front(), message, stream); });
      }
    });
  }

  bool can_lend() const override { return device_.is_cpu(); }
  void lend(const void* mine, std::span<const int> peers, const Reader& read,
            Waiting& waiting) override {
    std::vector<Message> others;
    for (const int peer : peers) {
      if (peer != rank_) others.push_back({peer, const_cast<void*>(mine), kLent});
    }
    transfer(others, waiting, [&] {
      mailboxes_->receive(rank_, others, "", waiting, [&](std::span<const void* const> from) {
        std::vector<const void*> all;
        std::size_t next = 0;
        for (const int peer : peers) all.push_back(peer == rank_ ? mine : from[next++]);
        read(all);
      });
    });
  }

 private:
  /// On a GPU the layer compares no steps with fixed sizes.
  std::string_view compared(const Waiting& waiting) const {
    return device_.is_cpu() ? std::string_view() : waiting.what();
  }

  /// Publishes, receives, and waits for those who read what this rank has published: its memory
  /// may go when this returns or throws.
  template <typename Receive>
  void transfer(std::span<const Message> published, Waiting& waiting, const Receive& receive) {
    try {
      mailboxes_->publish(rank_, published, compared(waiting));
      receive();
      mailboxes_->wait_until_read(rank_, waiting);
    } catch (...) {
      mailboxes_->withdraw(rank_);
      throw;
    }
  }

  void copy(const void* source, const Message& message, Stream stream) const {
    if (device_.is_cpu()) {
      const auto bytes = static_cast<std::int64_t>(message.bytes);
      core::parallel_ranges(core::executor_of(stream), bytes, bytes >= kParallelBytes,
                            [&](std::int64_t begin, std::int64_t end) {
                              std::memcpy(static_cast<char*>(message.data) + begin,
                                          static_cast<const char*>(source) + begin,
                                          static_cast<std::size_t>(end - begin));
                            });
    } else {
      const core::DeviceRuntime& runtime = core::runtime_of(device_);
      runtime.copy(message.data, source, message.bytes, stream);
      runtime.synchronize(stream);
    }
  }

  static constexpr std::int64_t kParallelBytes = 1 << 17;  // worth waking threads
  const int rank_;
  const Device device_;
  const std::shared_ptr<Mailboxes> mailboxes_;
};

}  // namespace
}  // namespace comm

std::shared_ptr<ControlPlane> make_thread_control_plane() {
  return std::make_shared<comm::TextBoard>();
}

std::vector<std::shared_ptr<DataPlane>> make_thread_data_planes(int size, Device device) {
  constexpr int kMostThreads = 1024;
  FUSEDMOE_CHECK(size >= 1 && size <= kMostThreads, "size", core::to_string(size),
                 core::format("from 1 to {}", kMostThreads));
  const auto mailboxes = std::make_shared<comm::Mailboxes>(size);
  std::vector<std::shared_ptr<DataPlane>> result;
  result.reserve(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    result.push_back(std::make_shared<comm::ThreadData>(rank, device, mailboxes));
  }
  return result;
}

std::vector<std::shared_ptr<Communicator>> make_thread_communicators(int size,
                                                                     CommunicatorOptions options) {
  const auto planes = make_thread_data_planes(size, options.device);
  const auto control = std::make_shared<comm::TextBoard>();
  // Making a communicator waits for the others, so the first texts of all are posted before.
  std::vector<std::shared_ptr<Communicator>> result;
  result.reserve(planes.size());
  for (int rank = 0; rank < size; ++rank) {
    control->post(core::format("g0/{}", rank), "=" + comm::describe_place(options));
  }
  for (int rank = 0; rank < size; ++rank) {
    result.push_back(std::make_shared<Communicator>(rank, size, control, planes[rank], options));
  }
  return result;
}

}  // namespace fusedmoe
