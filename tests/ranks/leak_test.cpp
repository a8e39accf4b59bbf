// A hundred rounds of make, fail, make again leave nothing behind. mpi_test does the same over MPI;
// built with the preset asan this test also looks for memory that nobody owns.
#include "leaks.h"

#include "rank_layers.h"

namespace fusedmoe::leak_test {

using testing::Communicators;
using testing::errors_of_ranks;
using testing::expect_no_leaks;
using testing::forward_exactly;
using testing::kPatient;
using testing::make_communicators;
using testing::make_hidden_states;
using testing::make_layer_weights;
using testing::rank_options;
using testing::RankCase;

constexpr std::int64_t kTokens = 4;
constexpr int kRanks = 2;

/// Makes a layer and runs it; then the ranks fail in one of three ways.
void run_and_fail(const std::shared_ptr<Communicator>& communicator, int way) {
  const int rank = communicator->rank();
  const RankCase how{.size = kRanks, .transport = way % 2 ? "all2all" : "allgather_reducescatter"};
  const LayerWeights weights = make_layer_weights({});
  LayerOptions options = rank_options(how, DType::kBF16, kTokens, communicator);
  const MoeLayer layer(weights, options);
  const Tensor x = make_hidden_states(DType::kBF16, kTokens + 1, 64);
  const std::int64_t tokens = way % 3 == 1 && rank == 1 ? kTokens + 1 : 1;  // too many
  forward_exactly(layer, x.slice(0, 0, 1), kTokens);
  communicator->split(rank)->barrier();
  if (way % 3 == 2) options.ranks.receive_capacity = 5 + rank;
  if (way % 3 == 2) return static_cast<void>(MoeLayer(weights, options));
  if (way % 3 == 0 && rank == 1) return communicator->abort("once more");
  forward_exactly(layer, x.slice(0, 0, tokens), kTokens);
}

void expect_failure(const std::vector<std::string>& errors, int way) {
  const char* reasons[] = {"once more", "must be at most 4", "differ in receive_capacity"};
  EXPECT_NE(errors[0].find(reasons[way % 3]), std::string::npos) << errors[0];
}

TEST(LeakTest, Threads) {
  for (const bool lend : {true, false}) {
    expect_no_leaks([&](int round) {
      const Communicators comms = make_communicators(kRanks, lend, {kPatient});
      expect_failure(errors_of_ranks(kRanks, [&](int rank) { run_and_fail(comms[rank], round); }),
                     round);
    });
  }
}

TEST(LeakTest, Tcp) {
  expect_no_leaks([&](int round) {
    const Communicators engine = make_thread_communicators(kRanks, {kPatient});
    const auto errors = errors_of_ranks(kRanks, [&](int rank) {
      const auto gather = [&](const std::string& text) {
        return engine[rank]->gather(text, "engine");
      };
      const auto control = make_control_plane(rank, kRanks, gather, kPatient);
      run_and_fail(make_communicator(rank, kRanks, control, {kPatient}), round);
    });
    expect_failure(errors, round);
  });
}

/// One rank gives up before it has joined.
TEST(LeakTest, JoiningOverTcp) {
  expect_no_leaks([&](int) {
    const Communicators engine = make_thread_communicators(kRanks, {kPatient});
    const auto errors = errors_of_ranks(kRanks, [&](int rank) {
      const auto gather = [&](const std::string& text) {
        return engine[rank]->gather(text, "engine");
      };
      const auto control = make_control_plane(rank, kRanks, gather);
      if (rank == 1) return control->post("failure", "rank 1: no memory left");
      make_tcp_data_plane(rank, kRanks, control, kPatient);
    });
    EXPECT_EQ(errors[0], "rank 1: no memory left");
  });
}

}  // namespace fusedmoe::leak_test
