// Ranks as threads, for the tests of everything that runs on several.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fusedmoe/comm.h"

namespace fusedmoe::testing {

/// Element r is rank r's.
using Communicators = std::vector<std::shared_ptr<Communicator>>;

/// Long enough for a loaded machine, where nothing goes wrong.
inline constexpr std::chrono::milliseconds kPatient{60000};
/// Within which all ranks have the Error of one that has failed or was killed. Sanitizers, and
/// qemu, make what runs until then some ten times slower, beside other tests that take the cores.
#ifdef FUSEDMOE_TESTS_ARE_SLOW
inline constexpr std::chrono::seconds kAtOnce{10};
#else
inline constexpr std::chrono::seconds kAtOnce{1};
#endif
/// Where a rank waits for what never comes.
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

/// Deadlines that a rank is expected to miss. The first is short; on a loaded machine it may pass
/// before the ranks have come to the step in question, and then they try the next.
inline constexpr std::chrono::milliseconds kDeadlines[] = {std::chrono::milliseconds(150),
                                                           std::chrono::milliseconds(1500),
                                                           std::chrono::milliseconds(15000)};
/// What ranks then throw: "<late> within 0.15 s".
inline std::string within(const std::string& late, std::chrono::milliseconds timeout) {
  std::ostringstream text;
  text << late << " within " << static_cast<double>(timeout.count()) / 1000 << " s";
  return text.str();
}

/// Expects that each of `ranks` throws that, at most 1 s after the deadline. attempt(timeout): what
/// the ranks have thrown.
inline void expect_late(
    const std::string& late, const std::vector<int>& ranks,
    const std::function<std::vector<std::string>(std::chrono::milliseconds timeout)>& attempt) {
  for (const std::chrono::milliseconds timeout : kDeadlines) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::string> errors;
    std::string found;
    try {
      errors = attempt(timeout);
    } catch (const std::exception& error) {
      found = std::string("the ranks did not meet: ") + error.what();
    }
    const auto took = std::chrono::steady_clock::now() - begin;
    if (found.empty() && took > timeout + std::chrono::seconds(1)) found = "more than 1 s later";
    for (const int rank : ranks) {
      if (!found.empty()) break;
      const std::string& error = errors[static_cast<std::size_t>(rank)];
      if (error != within(late, timeout)) found = "rank " + std::to_string(rank) + ": " + error;
    }
    if (found.empty()) return;
    if (timeout == std::end(kDeadlines)[-1]) ADD_FAILURE() << late << ", expected; " << found;
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

/// The same, but what goes from one rank to another in an exchange is one sequence of bytes, as
/// over MPI.
class Sequences final : public DataPlane {
 public:
  Sequences(int size, std::shared_ptr<DataPlane> plane) : size_(size), plane_(std::move(plane)) {}
  std::string_view name() const override { return plane_->name(); }
  bool is_byte_stream() const override { return true; }
  void exchange(std::span<const Message> sends, std::span<const Message> receives, Stream stream,
                Waiting& waiting) override {
    std::vector<std::string> out(size_), in(size_);
    for (const Message& each : sends) {
      out[each.peer].append(static_cast<const char*>(each.data), each.bytes);
    }
    for (const Message& each : receives) in[each.peer].resize(in[each.peer].size() + each.bytes);
    std::vector<Message> whole_out, whole_in;
    for (int peer = 0; peer < size_; ++peer) {
      whole_out.push_back({peer, out[peer].data(), out[peer].size()});
      whole_in.push_back({peer, in[peer].data(), in[peer].size()});
    }
    plane_->exchange(whole_out, whole_in, stream, waiting);
    std::vector<std::size_t> next(size_);
    for (const Message& each : receives) {
      in[each.peer].copy(static_cast<char*>(each.data), each.bytes, next[each.peer]);
      next[each.peer] += each.bytes;
    }
  }
  void abort() noexcept override { plane_->abort(); }

 private:
  const int size_;
  const std::shared_ptr<DataPlane> plane_;
};

/// Ranks that are threads and cannot exchange bytes.
inline Communicators communicators_without_data(int size,
                                                const CommunicatorOptions& options = {kPatient}) {
  const auto control = make_thread_control_plane();
  Communicators result(static_cast<std::size_t>(size));
  run_ranks(size, [&](int rank) {
    result[rank] = std::make_shared<Communicator>(rank, size, control, nullptr, options);
  });
  return result;
}

/// Ranks that are threads, which lend each other their memory or send messages; `cut`: these are
/// sequences.
inline Communicators make_communicators(int size, bool lend, const CommunicatorOptions& options,
                                        bool cut = false) {
  if (lend) return make_thread_communicators(size, options);
  const auto control = make_thread_control_plane();
  const auto planes = make_thread_data_planes(size);
  Communicators result(planes.size());
  const auto errors = errors_of_ranks(size, [&](int rank) {
    std::shared_ptr<DataPlane> plane = std::make_shared<MessagesOnly>(planes[rank]);
    if (cut) plane = std::make_shared<Sequences>(size, std::move(plane));
    result[rank] = std::make_shared<Communicator>(rank, size, control, std::move(plane), options);
  });
  for (const std::string& error : errors) {
    if (!error.empty()) throw std::runtime_error(error);
  }
  return result;
}

}  // namespace fusedmoe::testing
