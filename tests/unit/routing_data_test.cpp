// Routing data: counts, offsets, the stable permutation and its inverse, and the bitmatrix.
#include "fusedmoe/router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "fusedmoe/tensor.h"
#include "testing/cases.h"

namespace fusedmoe::routing_data_test {

using Ints = std::vector<std::int32_t>;

Ints values(const TensorView& view) {
  const auto* data = view.as<const std::int32_t>();
  return {data, data + view.numel()};
}

/// Routing data in a buffer of exactly the promised size, poisoned.
struct Built {
  Ints num_tokens, offsets, to_slot, to_row;

  Built(const Ints& ids, std::int64_t topk, const Ints& map, std::int64_t num_local_experts) {
    const std::int64_t num_tokens_in = topk ? std::ssize(ids) / topk : 0;
    const TensorView map_view =
        map.empty() ? TensorView() : TensorView(map.data(), DType::kI32, {std::ssize(map)});
    const std::size_t bytes = routing_data_bytes(num_tokens_in, topk, num_local_experts);
    EXPECT_EQ(bytes % 4, 0U);
    std::vector<std::int32_t> memory(bytes / 4, 0x7f7f7f7f);
    const RoutingData data =
        build_routing_data(TensorView(ids.data(), DType::kI32, {num_tokens_in, topk}), map_view,
                           num_local_experts, memory.data(), bytes);
    num_tokens = values(data.expert_num_tokens);
    offsets = values(data.expert_offsets);
    to_slot = values(data.permuted_to_slot);
    to_row = values(data.slot_to_permuted);
  }
};

TEST(RoutingDataTest, ExampleOfTheSpecification) {
  // ids 1..4 of the moe_align example, counted from 0.
  const Built built({1, 2, 3, 0, 1, 3, 0, 2, 3, 0, 1, 2}, 3, {}, 4);
  EXPECT_EQ(built.num_tokens, (Ints{3, 3, 3, 3}));
  EXPECT_EQ(built.offsets, (Ints{0, 3, 6, 9, 12}));
  EXPECT_EQ(built.to_slot, (Ints{3, 6, 9, 0, 4, 10, 1, 7, 11, 2, 5, 8}));
  EXPECT_EQ(built.to_row, (Ints{3, 6, 9, 0, 4, 10, 1, 7, 11, 2, 5, 8}));
}

TEST(RoutingDataTest, PrefixSumsOfAHistogramWithAnEmptyExpert) {
  Ints ids;
  for (auto [id, count] : {std::pair{0, 15}, {1, 17}, {3, 127}}) ids.insert(ids.end(), count, id);
  const Built built(ids, 1, {}, 4);
  EXPECT_EQ(built.num_tokens, (Ints{15, 17, 0, 127}));
  EXPECT_EQ(built.offsets, (Ints{0, 15, 32, 32, 159}));
}

TEST(RoutingDataTest, DuplicatesGiveOneRowEachAndNegativeIdsNone) {
  const Built built({2, 2, -1, 0, 2, -1}, 3, {}, 3);
  EXPECT_EQ(built.num_tokens, (Ints{1, 0, 3}));
  EXPECT_EQ(built.offsets, (Ints{0, 1, 1, 4}));
  EXPECT_EQ(built.to_slot, (Ints{3, 0, 1, 4, -1, -1}));
  EXPECT_EQ(built.to_row, (Ints{1, 2, -1, 0, 3, -1}));
}

TEST(RoutingDataTest, IdsOutsideTheMapNeverReadIt) {
  const Ints map = {1, -1, 0};
  const Built built({2, 1, 0, 3, -1, -2, 1 << 30, 2}, 2, map, 2);
  EXPECT_EQ(built.num_tokens, (Ints{2, 1}));
  EXPECT_EQ(built.to_slot, (Ints{0, 7, 2, -1, -1, -1, -1, -1}));
}

TEST(RoutingDataTest, WithoutAMapIdsBeyondTheExpertsHaveNoRow) {
  const Built built({0, 1, 2, 5}, 1, {}, 2);
  EXPECT_EQ(built.to_row, (Ints{0, 1, -1, -1}));
}

TEST(RoutingDataTest, NoTokensAndNoSlots) {
  const Built none({}, 2, {}, 3);
  EXPECT_EQ(none.offsets, (Ints{0, 0, 0, 0}));
  const Built remote({0, 1, 1, 0}, 2, {-1, -1, 0}, 1);
  EXPECT_EQ(remote.offsets, (Ints{0, 0}));
  EXPECT_EQ(remote.to_row, (Ints{-1, -1, -1, -1}));
  EXPECT_EQ(remote.to_slot, (Ints{-1, -1, -1, -1}));
}

TEST(RoutingDataTest, RandomIdsHaveTheStatedProperties) {
  testing::Random random(1);
  for (int round = 0; round < 200; ++round) {
    const std::int64_t experts = 1 + random.below(70), topk = 1 + random.below(6);
    const std::int64_t tokens = random.below(40), local = 1 + random.below(experts);
    Ints ids(static_cast<std::size_t>(tokens * topk)), map;
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random.below(experts + 2)) - 1;
    const bool has_map = round % 3 != 0;
    for (std::int64_t e = 0; has_map && e < experts; ++e) {
      map.push_back(static_cast<std::int32_t>(random.below(local + 1)) - 1);
    }
    SCOPED_TRACE(round);
    const Built built(ids, topk, map, local);

    Ints expected_slots;
    for (std::int32_t e = 0; e < local; ++e) {
      EXPECT_EQ(built.offsets[e], std::ssize(expected_slots));
      for (std::int32_t f = 0; f < std::ssize(ids); ++f) {
        const bool valid = ids[f] >= 0 && ids[f] < (has_map ? experts : local);
        if (valid && (has_map ? map[ids[f]] : ids[f]) == e) expected_slots.push_back(f);
      }
      EXPECT_EQ(built.num_tokens[e], std::ssize(expected_slots) - built.offsets[e]);
    }
    EXPECT_EQ(built.offsets.back(), std::ssize(expected_slots));
    Ints expected_rows(ids.size(), -1);
    for (std::size_t row = 0; row < expected_slots.size(); ++row) {
      expected_rows[expected_slots[row]] = static_cast<std::int32_t>(row);
    }
    expected_slots.resize(ids.size(), -1);
    EXPECT_EQ(built.to_slot, expected_slots);
    EXPECT_EQ(built.to_row, expected_rows);
  }
}

TEST(RoutingDataTest, BitmatrixHasOneBitPerChosenExpert) {
  const Ints ids = {0, 31, 32, 64, 64, -1, 2, 7, -1, -1, -1, -1};
  Ints bits(3 * 3, 0x7f7f7f7f);
  build_bitmatrix(TensorView(ids.data(), DType::kI32, {3, 4}), {}, 65,
                  TensorView(bits.data(), DType::kI32, {3, 3}));
  EXPECT_EQ(bits, (Ints{static_cast<std::int32_t>(0x80000001u), 1, 1, 0x84, 0, 1, 0, 0, 0}));
}

TEST(RoutingDataTest, BitmatrixFollowsTheMap) {
  const Ints ids = {0, 1, 2, 9}, map = {-1, 3, 0};
  Ints bits(2);
  build_bitmatrix(TensorView(ids.data(), DType::kI32, {2, 2}),
                  TensorView(map.data(), DType::kI32, {3}), 4,
                  TensorView(bits.data(), DType::kI32, {2, 1}));
  EXPECT_EQ(bits, (Ints{8, 1}));
}

TEST(RoutingDataTest, BadArgumentsAreNamed) {
  const Tensor ids = Tensor::zeros({2, 2}, DType::kI32);
  Ints memory(64);
  const auto fault = [&](const TensorView& topk_ids, const TensorView& map, std::int64_t experts,
                         void* data, std::size_t bytes) {
    try {
      build_routing_data(topk_ids, map, experts, data, bytes);
    } catch (const Error& error) {
      return error.argument();
    }
    return std::string();
  };
  const std::size_t bytes = routing_data_bytes(2, 2, 3);
  EXPECT_EQ(fault(ids, {}, 3, memory.data(), bytes), "");
  EXPECT_EQ(fault({}, {}, 3, memory.data(), bytes), "topk_ids");
  EXPECT_EQ(fault(Tensor::zeros({2, 2}, DType::kI64), {}, 3, memory.data(), bytes), "topk_ids");
  EXPECT_EQ(fault(Tensor::zeros({4}, DType::kI32), {}, 3, memory.data(), bytes), "topk_ids");
  EXPECT_EQ(fault(ids.transpose(0, 1), {}, 3, memory.data(), bytes), "topk_ids");
  EXPECT_EQ(fault(ids, Tensor::zeros({3}, DType::kI64), 3, memory.data(), bytes), "expert_map");
  EXPECT_EQ(fault(ids, {}, 0, memory.data(), bytes), "num_local_experts");
  EXPECT_EQ(fault(ids, {}, 3, memory.data(), bytes - 1), "memory_bytes");
  EXPECT_EQ(fault(ids, {}, 3, nullptr, bytes), "memory");
  EXPECT_EQ(fault(ids, {}, 3, reinterpret_cast<char*>(memory.data()) + 1, bytes), "memory");
  EXPECT_THROW(build_bitmatrix(ids, {}, 33, Tensor::zeros({2, 1}, DType::kI32)), Error);
  EXPECT_THROW(routing_data_bytes(-1, 2, 3), Error);
}

}  // namespace fusedmoe::routing_data_test
