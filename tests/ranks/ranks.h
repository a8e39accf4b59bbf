// Ranks as threads, for the tests of everything that runs on several.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fusedmoe/comm.h"

namespace fusedmoe::testing {

/// Long enough for a loaded machine, where nothing goes wrong.
inline constexpr std::chrono::milliseconds kPatient{60000};
/// Where a rank is expected to miss.
inline constexpr std::chrono::milliseconds kImpatient{150};

/// Calls function(rank) on so many threads; element r is what rank r has thrown, "" for nothing.
inline std::vector<std::string> errors_of_ranks(int size,
                                                const std::function<void(int rank)>& function) {
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        function(rank);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

/// The same, where no rank may throw.
inline void run_ranks(int size, const std::function<void(int rank)>& function) {
  const std::vector<std::string> errors = errors_of_ranks(size, function);
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(errors[static_cast<std::size_t>(rank)], "") << "rank " << rank;
  }
}

/// Every rank sends rank * 100 + peer to every peer, with itself.
inline void exchange_numbers(Communicator& comm) {
  const int size = comm.size();
  std::vector<int> out(size), in(size, -1);
  std::vector<Message> sends, receives;
  for (int peer = 0; peer < size; ++peer) {
    out[peer] = comm.rank() * 100 + peer;
    sends.push_back({peer, &out[peer], sizeof(int)});
    receives.push_back({peer, &in[peer], sizeof(int)});
  }
  comm.exchange(sends, receives, {}, "numbers");
  for (int peer = 0; peer < size; ++peer) EXPECT_EQ(in[peer], peer * 100 + comm.rank());
}

/// A data plane whose ranks do not lend their memory: all goes in messages, as between processes.
class MessagesOnly final : public DataPlane {
 public:
  explicit MessagesOnly(std::shared_ptr<DataPlane> plane) : plane_(std::move(plane)) {}
  std::string_view name() const override { return plane_->name(); }
  Device device() const override { return plane_->device(); }
  void exchange(std::span<const Message> sends, std::span<const Message> receives, Stream stream,
                Waiting& waiting) override {
    plane_->exchange(sends, receives, stream, waiting);
  }
  void abort() noexcept override { plane_->abort(); }

 private:
  std::shared_ptr<DataPlane> plane_;
};

/// Ranks that are threads, which lend each other their memory or send messages.
inline std::vector<std::shared_ptr<Communicator>> make_communicators(
    int size, bool lend, const CommunicatorOptions& options) {
  if (lend) return make_thread_communicators(size, options);
  const auto control = make_thread_control_plane();
  const auto planes = make_thread_data_planes(size);
  std::vector<std::shared_ptr<Communicator>> result(planes.size());
  run_ranks(size, [&](int rank) {
    auto plane = std::make_shared<MessagesOnly>(planes[rank]);
    result[rank] = std::make_shared<Communicator>(rank, size, control, std::move(plane), options);
  });
  return result;
}

}  // namespace fusedmoe::testing
