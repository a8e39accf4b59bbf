// Ranks that are threads of one process. A message is an address in a mailbox, one for each ordered
// pair of ranks; the receiver copies from there, and the sender waits until it has.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>

#include "comm/place.h"
#include "comm/text_board.h"
#include "core/check.h"
#include "core/device_runtime.h"

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

namespace {

/// What all ranks of the process share.
class Mailboxes {
 public:
  struct Mailbox {
    std::deque<Message> messages;  // that were published and not yet copied
    bool reading = false;          // the first one is being copied
  };

  explicit Mailboxes(int size) : size_(size), boxes_(static_cast<std::size_t>(size) * size) {}

  void publish(int from, std::span<const Message> messages) {
    {
      const std::lock_guard lock(mutex_);
      for (const Message& message : messages) {
        if (message.bytes > 0) box(from, message.peer).messages.push_back(message);
      }
    }
    changed_.notify_all();
  }

  /// Takes the next message of message.peer: copy(source, message) copies it, and waits.
  template <typename Copy>
  void receive(int to, const Message& message, Waiting& waiting, const Copy& copy) {
    Mailbox& mailbox = box(message.peer, to);
    std::unique_lock lock(mutex_);
    wait(lock, waiting, message.peer, [&] { return !mailbox.messages.empty(); });
    const Message source = mailbox.messages.front();
    FUSEDMOE_CHECK(source.bytes == message.bytes, "message",
                   core::format("{} bytes from rank {}", source.bytes, message.peer),
                   core::format("{} bytes", message.bytes));
    mailbox.reading = true;
    lock.unlock();
    copy(source.data, message);
    lock.lock();
    mailbox.messages.pop_front();
    mailbox.reading = false;
    lock.unlock();
    changed_.notify_all();
  }

  /// Returns when all that `from` has published is copied.
  void wait_until_copied(int from, Waiting& waiting) {
    std::unique_lock lock(mutex_);
    for (int to = 0; to < size_; ++to) {
      wait(lock, waiting, to, [&] { return box(from, to).messages.empty(); });
    }
  }

  /// Forgets what `from` has published, whose memory is about to go. Waits for a copy that runs.
  void withdraw(int from) {
    std::unique_lock lock(mutex_);
    for (int to = 0; to < size_; ++to) {
      Mailbox& mailbox = box(from, to);
      changed_.wait(lock, [&] { return !mailbox.reading; });
      mailbox.messages.clear();
    }
  }

 private:
  Mailbox& box(int from, int to) { return boxes_[static_cast<std::size_t>(from) * size_ + to]; }

  template <typename Condition>
  void wait(std::unique_lock<std::mutex>& lock, Waiting& waiting, int peer,
            const Condition& condition) {
    constexpr std::chrono::milliseconds kStep{10};
    while (!changed_.wait_for(lock, kStep, condition)) {
      lock.unlock();
      waiting.check({&peer, 1});
      lock.lock();
    }
  }

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Mailbox> boxes_;  // [from][to]
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
    mailboxes_->publish(rank_, sends);
    const auto copy = [&](const void* source, const Message& message) {
      if (device_.is_cpu()) {
        std::memcpy(message.data, source, message.bytes);
      } else {
        runtime.copy(message.data, source, message.bytes, stream);
        runtime.synchronize(stream);
      }
    };
    try {
      for (const Message& message : receives) {
        if (message.bytes > 0) mailboxes_->receive(rank_, message, waiting, copy);
      }
      mailboxes_->wait_until_copied(rank_, waiting);
    } catch (...) {
      mailboxes_->withdraw(rank_);
      throw;
    }
  }

 private:
  const int rank_;
  const Device device_;
  const std::shared_ptr<Mailboxes> mailboxes_;
};

}  // namespace
}  // namespace comm

std::shared_ptr<ControlPlane> make_thread_control_plane() {
  return std::make_shared<comm::TextBoard>();
}

std::vector<std::shared_ptr<Communicator>> make_thread_communicators(int size,
                                                                     CommunicatorOptions options) {
  FUSEDMOE_CHECK(size >= 1, "size", core::to_string(size), "at least 1");
  const auto control = std::make_shared<comm::TextBoard>();
  const auto mailboxes = std::make_shared<comm::Mailboxes>(size);
  // Making a communicator waits for the others, so the first texts of all are posted before.
  std::vector<std::shared_ptr<Communicator>> result;
  for (int rank = 0; rank < size; ++rank) {
    control->post(core::format("g0/{}", rank), "=" + comm::describe_place(options.device));
  }
  for (int rank = 0; rank < size; ++rank) {
    result.push_back(std::make_shared<Communicator>(
        rank, size, control, std::make_shared<comm::ThreadData>(rank, options.device, mailboxes),
        options));
  }
  return result;
}

}  // namespace fusedmoe
