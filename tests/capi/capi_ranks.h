// Helpers of the tests of ranks through the C interface: a layer on two of them, and on one.
#pragma once

#include <thread>

#include "capi_test.h"
#include "testing/compare.h"

namespace fusedmoe::testing {

inline constexpr std::int64_t kTokens = 6;
inline constexpr int kRanks = 2;

template <typename Function>
void on_two_threads(const Function& function) {
  std::thread other([&] { function(1); });
  function(0);
  other.join();
}

inline fusedmoe_communicator_options patient() {
  auto options = sized<fusedmoe_communicator_options>();
  options.timeout_ms = 60000;
  return options;
}

/// Rank 0 has two thirds of the tokens; together they are those of one rank.
inline Tensor forward(const TinyLayer& tiny, int rank, fusedmoe_communicator* communicator) {
  TinyLayer mine;
  mine.options = tiny.options;
  mine.options.communicator = communicator;
  mine.options.max_tokens_per_rank = kTokens;
  mine.options.combine = 2;
  mine.options.placement =
      R"({"num_experts": 4, "num_ranks": 2, "physical_to_logical": [0, 1, 2, 3],
          "rank_of": [0, 1, 1, 1]})";
  const auto layer = mine.create();
  const std::int64_t begin = rank == 0 ? 0 : 4, end = rank == 0 ? 4 : kTokens;
  const Tensor x = TinyLayer::filled({kTokens, TinyLayer::kHidden}, 7);
  Tensor output = Tensor::zeros({end - begin, TinyLayer::kHidden}, DType::kF32);
  auto args = sized<fusedmoe_forward_args>();
  Scratch scratch(layer.get(), kTokens, args);
  args.hidden_states = to_c(x.slice(0, begin, end));
  args.output = to_c(output);
  args.max_tokens = 4;
  EXPECT_OK(fusedmoe_layer_forward(layer.get(), &args));
  auto info = sized<fusedmoe_layer_info>();
  EXPECT_OK(fusedmoe_layer_get_info(layer.get(), &info));
  EXPECT_EQ(info.num_local_experts, rank == 0 ? 1 : 3);
  return output;
}

/// What one rank gives for all tokens.
inline Tensor forward_alone(const TinyLayer& tiny) {
  const auto alone = tiny.create();
  const Tensor x = TinyLayer::filled({kTokens, TinyLayer::kHidden}, 7);
  const Tensor output = Tensor::zeros(x.shape(), DType::kF32);
  auto args = sized<fusedmoe_forward_args>();
  Scratch scratch(alone.get(), kTokens, args);
  args.hidden_states = to_c(x);
  args.output = to_c(output);
  EXPECT_OK(fusedmoe_layer_forward(alone.get(), &args));
  return output;
}

inline void expect_as_one_rank(fusedmoe_communicator* const (&communicators)[kRanks],
                               const char* backend) {
  TinyLayer tiny;
  const Tensor expected = forward_alone(tiny);
  on_two_threads([&](int rank) {
    auto info = sized<fusedmoe_communicator_info>();
    EXPECT_OK(fusedmoe_communicator_get_info(communicators[rank], &info));
    EXPECT_EQ(info.rank, rank);
    EXPECT_EQ(info.size, kRanks);
    EXPECT_STREQ(info.backend, backend);
    EXPECT_OK(fusedmoe_communicator_barrier(communicators[rank]));
    const Tensor output = forward(tiny, rank, communicators[rank]);
    EXPECT_TRUE(
        bitwise_equal(output, expected.slice(0, rank == 0 ? 0 : 4, rank == 0 ? 4 : kTokens)));
  });
}

}  // namespace fusedmoe::testing
