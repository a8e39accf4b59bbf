// Layers on the processes of an MPI job: every process runs the same cases, and each compares its
// own output with what one rank computes.
#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <thread>
#include <utility>

#include "dropping_ranks.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/wait_hook.h"
#include "golden_ranks.h"
#include "leaks.h"
#include "mpi/flow.h"
#include "mpi/left_behind.h"

namespace {
int mpi_communicators = 0;  // that were made and not freed
}

// Instead of MPI's own, which these call.
extern "C" int MPI_Comm_idup(MPI_Comm comm, MPI_Comm* made, MPI_Request* request) {
  ++mpi_communicators;
  return PMPI_Comm_idup(comm, made, request);
}
extern "C" int MPI_Comm_free(MPI_Comm* comm) {
  --mpi_communicators;
  return PMPI_Comm_free(comm);
}

// As between hosts, pieces of messages are in flight in other numbers.
extern "C" int MPI_Get_processor_name(char* name, int* length) {
  if (!std::getenv("FUSEDMOE_TEST_MESSAGES")) return PMPI_Get_processor_name(name, length);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const std::string host = "host " + std::to_string(rank % 2);
  host.copy(name, host.size() + 1);
  name[host.size()] = '\0';
  *length = static_cast<int>(host.size());
  return MPI_SUCCESS;
}

namespace fusedmoe {
namespace {

using testing::bitwise_equal;
using testing::Case;
using testing::compare;
using testing::forward_exactly;
using testing::kPatient;
using testing::make_layer_weights;
using testing::one_rank_options;
using testing::random_tensor;
using testing::rank_options;
using testing::RankCase;

constexpr std::int64_t kTokens = 9;

/// Ranks share memory, unless the environment says that all goes in messages.
bool shares() {
  return !std::getenv("FUSEDMOE_TEST_MESSAGES");
}

std::shared_ptr<Communicator> make_ranks(std::chrono::milliseconds timeout = kPatient) {
  return make_mpi_communicator({}, {.timeout = timeout, .shared_memory = shares()});
}

/// One for all cases: MPI starts once.
const std::shared_ptr<Communicator>& world() {
  static const std::shared_ptr<Communicator> communicator = make_ranks();
  return communicator;
}

TEST(MpiTest, RanksFindEachOther) {
  EXPECT_EQ(world()->backend(), "mpi");
  EXPECT_EQ(static_cast<int>(world()->ranks_of_host().size()), world()->size());
  const std::vector<std::string> texts = world()->gather(std::to_string(world()->rank()), "test");
  for (int r = 0; r < world()->size(); ++r) EXPECT_EQ(texts[r], std::to_string(r));
}

TEST(MpiTest, ProcessesOfAHostShareMemory) {
  if (world()->size() == 1) GTEST_SKIP() << "nobody to share it with";
  EXPECT_FALSE(world()->can_lend());
  ASSERT_EQ(world()->share_memory(), shares());
  if (!shares()) return;
  auto* block = static_cast<int*>(world()->take_shared(sizeof(int)));
  EXPECT_TRUE(world()->is_shared(block));
  *block = 10 + world()->rank();
  const auto read = [&](std::span<const void* const> lent) {
    for (int r = 0; r < world()->size(); ++r) EXPECT_EQ(*static_cast<const int*>(lent[r]), 10 + r);
  };
  world()->lend("numbers", block, read, "a test");
  const int elsewhere = 0;  // where the others cannot read it
  EXPECT_THROW(world()->lend("numbers", &elsewhere, read, "a test"), Error);
  world()->give_back_shared(block);
  void* const next = world()->take_shared(1);
  EXPECT_EQ(next, block);
  world()->give_back_shared(next);
}

/// Blocks lie one behind the other, so one that is taken in the middle of a forward shows where the
/// forward's ends. Blocks are whole pages.
TEST(MpiTest, SharedBytesAreWhatAForwardTakes) {
  constexpr std::int64_t kMost = 100;
  constexpr std::size_t kPage = 4096;
  Case spec{.num_experts = 7, .topk = 3, .hidden = 128, .intermediate = 128};
  const LayerWeights weights = make_layer_weights({spec});
  RankCase how{.size = world()->size()};
  EXPECT_EQ(MoeLayer(weights, one_rank_options(how, DType::kBF16)).shared_bytes(kMost), 0U);
  if (world()->size() == 1) GTEST_SKIP() << "nobody to share memory with";
  for (const char* transport : {"all2all", "allgather_reducescatter"}) {
    for (const int mode : {0, 1, 2}) {  // per rank; with fixed sizes; per slot
      SCOPED_TRACE(std::string(transport) + " " + std::to_string(mode));
      how.transport = transport;
      how.fixed_sizes = mode == 1;
      how.combine = mode == 2 ? CombineMode::kPerSlot : CombineMode::kPerRank;
      LayerOptions options = rank_options(how, DType::kBF16, kMost, world());
      options.hooks = true;
      const MoeLayer layer(weights, options);
      EXPECT_EQ(layer.shared_bytes(kMost) > 0, shares());
      std::size_t taken = 0, calls = 0;
      const auto page = [] {
        void* const block = world()->take_shared(1);
        world()->give_back_shared(block);
        return static_cast<const char*>(block);
      };
      const char* const begin = shares() ? page() : nullptr;
      ExpertsHooks hooks;
      hooks.after_gemm1 = [&](const HookArgs&) {
        ++calls;
        if (shares()) taken = static_cast<std::size_t>(page() - begin);
      };
      // This rank has as many tokens as there can be, or fewer.
      for (const auto& [most, tokens] :
           {std::pair(kTokens, kTokens), std::pair(kMost, kMost), std::pair(kMost, kTokens)}) {
        const testing::Scratch scratch(layer, most, how.fixed_sizes);
        const Tensor x = random_tensor(DType::kBF16, {tokens, 128}, 1, 40 + world()->rank());
        const Tensor output = Tensor::empty(x.shape(), x.dtype());
        ForwardOptions forward_options;
        forward_options.hooks = &hooks;
        forward_options.max_tokens = most;
        forward_options.fixed_sizes = how.fixed_sizes;
        layer.forward(x, output, scratch.workspace, forward_options);
        const std::size_t pages = (layer.shared_bytes(most) + kPage - 1) / kPage;
        if (tokens == most && shares()) {
          EXPECT_EQ(taken, pages * kPage) << most;
        }
        EXPECT_LE(taken, pages * kPage) << most;
      }
      EXPECT_EQ(calls, 3U);
    }
  }
}

TEST(MpiTest, LayersGiveTheOutputOfOneRank) {
  for (const char* scheme : {"bf16", "mxfp4_w4a16", "fp8_block", "nvfp4", "w4a8"}) {
    for (const char* transport : {"all2all", "allgather_reducescatter"}) {
      for (const bool invariant : {false, true}) {
        SCOPED_TRACE(std::string(scheme) + " " + transport);
        Case spec;
        spec.num_experts = 7;
        spec.topk = 3;
        spec.hidden = spec.intermediate = 128;
        spec.scheme = parse_scheme(scheme);
        const LayerWeights weights = make_layer_weights({spec});
        const RankCase how{.size = world()->size(),
                           .transport = transport,
                           .placement = ExpertPlacement::linear(7, world()->size(), 2),
                           .batch_invariant = invariant};
        const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
        const MoeLayer layer(weights, rank_options(how, DType::kBF16, kTokens, world()));
        const int rank = world()->rank();
        for (const std::int64_t tokens : {std::int64_t{rank == 1 ? 0 : kTokens - rank}, kTokens}) {
          const Tensor x = random_tensor(DType::kBF16, {tokens, 128}, 1, 40 + rank);
          const Tensor output = forward_exactly(layer, x, kTokens);
          const Tensor expected = forward_exactly(alone, x, 0);
          if (invariant) {
            EXPECT_TRUE(bitwise_equal(output, expected));
          } else {
            EXPECT_LE(compare(output, expected).max_norm_relative, 2e-2);
          }
        }
      }
    }
  }
}

TEST(MpiTest, DispatchDtypeChangesNoBit) {
  const int rank = world()->rank();
  for (const auto& [scheme, activations] :
       {std::pair("fp8_block", DType::kE4M3), std::pair("mxfp4:ocp", DType::kE2M1)}) {
    for (const char* transport : {"all2all", "allgather_reducescatter"}) {
      SCOPED_TRACE(std::string(scheme) + " " + transport);
      Case spec{.num_experts = 7, .topk = 3, .hidden = 128, .intermediate = 128};
      spec.scheme = parse_scheme(scheme);
      const LayerWeights weights = make_layer_weights({spec});
      RankCase how{.size = world()->size(), .transport = transport, .batch_invariant = true};
      const Tensor x = random_tensor(DType::kBF16, {rank == 1 ? 0 : kTokens, 128}, 1, 40 + rank);
      const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
      const Tensor expected = forward_exactly(alone, x, 0);
      for (const DType dtype : {DType::kBF16, activations}) {
        how.dispatch_dtype = dtype;
        const MoeLayer layer(weights, rank_options(how, DType::kBF16, kTokens, world()));
        EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, kTokens), expected)) << name(dtype);
      }
    }
  }
}

TEST(MpiTest, GoldenVectorsOfEveryFamily) {
  for (const std::string& name : testing::golden_names()) {
    for (const char* transport : {"all2all", "allgather_reducescatter"}) {
      for (const CombineMode combine : {CombineMode::kPerRank, CombineMode::kPerSlot}) {
        const RankCase how{.size = world()->size(), .transport = transport, .combine = combine};
        testing::expect_golden_on_rank(name, how, DType::kBF16, world());
      }
    }
  }
}

TEST(MpiTest, RowsThatDoNotFitAreDropped) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    testing::DropProblem(world()->size(), seed).expect_on_rank(world());
  }
}

TEST(MpiTest, TensorParallelRanksAddTheirSlices) {
  const LayerWeights weights = make_layer_weights({Case{.intermediate = 256}});
  const RankCase how{.size = world()->size(),
                     .transport = "no_ep",
                     .deployment = Deployment{.tp_size = world()->size()}};
  const LayerOptions options = rank_options(how, DType::kBF16, 0, world());
  const MoeLayer layer(local_weights(weights, options.parallel), options);
  const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
  const Tensor x = random_tensor(DType::kBF16, {5, 64}, 1, 4);
  EXPECT_LE(compare(layer.forward(x), alone.forward(x)).max_norm_relative, 2e-2);
}

TEST(MpiTest, WhatDiffersIsNamed) {
  if (world()->size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  LayerWeights weights = make_layer_weights({});
  if (world()->rank() == 1) weights.router.topk = 3;
  try {
    const MoeLayer layer(weights, rank_options({}, DType::kBF16, kTokens, world()));
    ADD_FAILURE() << "ranks differ";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("topk"), std::string::npos) << error.what();
  }
}

/// A failed communicator is freed when the next one is made.
TEST(MpiTest, AHundredFailuresLeakNothing) {
  if (world()->size() == 1) GTEST_SKIP() << "nothing travels";
  const int before = mpi_communicators;
  testing::expect_no_leaks([&](int round) {
    const auto mine = make_ranks();
    EXPECT_LE(mpi_communicators, before + 1) << round;
    const MoeLayer layer(make_layer_weights({}), rank_options({}, DType::kBF16, kTokens, mine));
    const Tensor x = random_tensor(DType::kBF16, {2, 64}, 1, 3);
    forward_exactly(layer, x, kTokens);
    if (mine->rank() == round % mine->size()) return mine->abort("once more");
    try {
      forward_exactly(layer, x, kTokens);
      ADD_FAILURE() << "a rank has failed";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("once more"), std::string::npos) << error.what();
    }
  });
  const auto last = make_ranks();
  EXPECT_EQ(mpi_communicators, before + 1);
}

/// What a rank reads of one that has failed stays readable; who waits for it learns why.
TEST(MpiTest, AFailedRankIsNamedToThoseWhoWaitForItsMemory) {
  if (world()->size() == 1 || !shares()) GTEST_SKIP() << "nothing is lent";
  const auto mine = make_ranks();
  ASSERT_TRUE(mine->share_memory());
  auto* block = static_cast<int*>(mine->take_shared(sizeof(int)));
  if (mine->rank() == 1) {
    mine->abort("no more");
    EXPECT_THROW(mine->take_shared(1), Error);
  } else {
    try {
      mine->lend(
          "numbers", block, [](std::span<const void* const>) {}, "a test");
      ADD_FAILURE() << "a rank has failed";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "rank 1: no more");
    }
  }
  world()->barrier();
}

TEST(MpiTest, LongMessagesArriveWhole) {
  const int size = world()->size(), rank = world()->rank();
  constexpr std::size_t kPiece = mpi::Piece::kMost;  // the first has 8 bytes of its own
  for (const std::size_t bytes : {std::size_t{1}, kPiece - 8, kPiece, (std::size_t{5} << 20) + 3}) {
    // One stream, which the sender cuts in two, and the receiver in three.
    std::vector<std::string> out, in(size, std::string(bytes, ' '));
    std::vector<Message> sends, receives;
    for (int peer = 0; peer < size; ++peer) {
      out.push_back(std::string(bytes, static_cast<char>('a' + rank)));
      out.back().back() = static_cast<char>('A' + peer);
    }
    const auto add = [](std::vector<Message>& messages, int peer, std::string& text, int parts) {
      const std::size_t part = text.size() / parts;
      for (int i = 0; i < parts; ++i) {
        messages.push_back({peer, &text[i * part], i + 1 < parts ? part : text.size() - i * part});
      }
    };
    for (int peer = size; peer-- > 0;) {
      add(sends, peer, out[peer], 2);
      add(receives, peer, in[peer], 3);
    }
    world()->exchange(sends, receives, {}, "long messages");
    for (int peer = 0; peer < size; ++peer) {
      std::string expected(bytes, static_cast<char>('a' + peer));
      expected.back() = static_cast<char>('A' + rank);
      EXPECT_TRUE(in[peer] == expected) << bytes << " bytes from rank " << peer;
    }
  }
}

TEST(MpiTest, AnotherNumberOfBytesIsAnErrorOfAll) {
  if (world()->size() == 1) GTEST_SKIP() << "nothing travels";
  for (const auto& [fewer, more] : {std::pair(4, 8), std::pair(8, 1 << 20)}) {
    const auto mine = make_ranks();
    std::string out(1 << 20, 'x'), in(1 << 20, ' '), error;
    const int rank = mine->rank(), bytes = rank == 0 ? fewer : more;
    const Message send{1 - rank, out.data(), static_cast<std::size_t>(bytes)};
    const Message receive{1 - rank, in.data(), static_cast<std::size_t>(bytes)};
    try {
      if (rank < 2) mine->exchange({&send, 1}, {&receive, 1}, {}, "rows");
    } catch (const Error& each) {
      error = each.what();
    }
    const std::vector<std::string> errors = world()->gather(error, "a test");
    EXPECT_NE(errors[0].find("message: was"), std::string::npos) << errors[0];
    EXPECT_EQ(errors[0], errors[1]);
  }
}

TEST(MpiTest, ATimeoutThatNoClockCanTellIsRefusedBeforeJoining) {
  using std::chrono::milliseconds;
  for (const milliseconds timeout : {milliseconds(0), milliseconds(-1), milliseconds::max()}) {
    try {
      make_ranks(timeout);
      ADD_FAILURE() << timeout.count();
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), "timeout: was " + std::to_string(timeout.count()) +
                                  " ms; must be positive, at most a year");
    }
  }
}

bool others_may_join = false;

/// The others join when rank 0's hook was called, which waits for them.
TEST(MpiTest, JoiningCallsTheWaitHook) {
  if (world()->size() == 1) GTEST_SKIP() << "nobody to wait for";
  if (world()->rank() == 0) {
    set_wait_hook([] {
      if (!std::exchange(others_may_join, true)) world()->barrier();
    });
  } else {
    world()->barrier();
  }
  make_ranks()->barrier();
  set_wait_hook(nullptr);
}

/// Others that meet say nothing about a rank that may have stopped.
TEST(MpiTest, WhatIsLeftBehindWaitsForItsOwnPeers) {
  world();
  EXPECT_EQ(mpi::world_ranks(MPI_COMM_SELF), std::vector<int>{world()->rank()});
  mpi::LeftBehind left;
  int number = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Irecv(&number, 1, MPI_INT, 0, 0, MPI_COMM_SELF, &request);
  left.add({request, nullptr}, {1, 3});
  const std::vector<int> one{0, 1, 2}, other{0, 3};
  EXPECT_TRUE(left.waits_for_peer());
  left.ranks_have_met(one);
  EXPECT_TRUE(left.waits_for_peer());
  left.ranks_have_met(other);
  EXPECT_FALSE(left.waits_for_peer());
  MPI_Send(&number, 1, MPI_INT, 0, 0, MPI_COMM_SELF);
  left.ranks_have_met(one);
}

/// Rank 1 is stopped while bytes move between it and rank 0, again and again. Rank 0 gives up at
/// its deadline, and from then on MPI may no longer touch what it was given.
TEST(MpiTest, APeerThatStopsInAnExchangeHoldsNoMemory) {
  if (world()->size() == 1) GTEST_SKIP() << "nobody to stop";
  constexpr std::size_t kBytes = 8 << 20;
  const std::vector<std::string> processes = world()->gather(std::to_string(getpid()), "a test");
  const auto mine = make_ranks(std::chrono::seconds(5));
  const int rank = mine->rank();
  std::string out(kBytes, 'x'), in(kBytes, ' '), error;
  const pid_t peer = std::stoi(processes[rank == 0 ? 1 : 0]);
  std::thread stops;
  std::atomic<bool> over{false};
  if (rank == 0) {
    stops = std::thread([&] {
      const volatile char& first = in.front();
      while (first != 'x' && !over) std::this_thread::yield();
      if (!over) kill(peer, SIGSTOP);
    });
  }
  const Message send{1 - rank, out.data(), kBytes}, receive{1 - rank, in.data(), kBytes};
  try {
    for (int step = 0; rank < 2 && step < 100000; ++step) {
      mine->exchange({&send, 1}, {&receive, 1}, {}, "rows");
    }
  } catch (const Error& each) {
    error = each.what();
  }
  if (rank == 0) {
    over = true;
    stops.join();
    std::fill(out.begin(), out.end(), 'y');
    std::fill(in.begin(), in.end(), 'z');
    kill(peer, SIGCONT);
    EXPECT_EQ(error, "rows: rank 1 did not arrive within 5 s");
    EXPECT_THROW(mine->exchange({&send, 1}, {}, {}, "rows"), Error) << "it is dead";
  }
  const std::vector<std::string> errors = world()->gather(error, "a test");
  EXPECT_EQ(errors[1], errors[0]);
  make_ranks()->barrier();  // MPI goes on meanwhile
  testing::exchange_numbers(*world());
  if (rank == 0) {
    EXPECT_TRUE(in == std::string(kBytes, 'z'));
  }
}

/// The last case: MPI keeps what was sent to rank 1, and nobody takes it.
TEST(MpiTest, ZAMissingRankIsNamedWithinTheDeadline) {
  if (world()->size() == 1) GTEST_SKIP() << "nobody to miss";
  for (const std::chrono::milliseconds timeout : testing::kDeadlines) {
    const auto begin = std::chrono::steady_clock::now();
    std::string error;
    std::shared_ptr<Communicator> mine;
    try {
      mine = make_ranks(timeout);
      int number = 0, other = 0;
      const Message send{1, &number, sizeof number}, receive{1, &other, sizeof other};
      if (mine->rank() != 1) mine->exchange({&send, 1}, {&receive, 1}, {}, "a step");
    } catch (const Error& each) {
      error = each.what();
    }
    const auto took = std::chrono::steady_clock::now() - begin;
    if (took > timeout + std::chrono::seconds(2)) error += ", more than 2 s later";
    // Nobody leaves before the others have seen it, and all try a longer deadline or none.
    std::vector<std::string> errors = world()->gather(error, "a test");
    errors.erase(errors.begin() + 1);
    const std::string expected = testing::within("a step: rank 1 did not arrive", timeout);
    const bool all = std::count(errors.begin(), errors.end(), expected) == world()->size() - 1;
    if (all) return;
    if (timeout == std::end(testing::kDeadlines)[-1]) ADD_FAILURE() << errors[0];
  }
}

}  // namespace
}  // namespace fusedmoe
