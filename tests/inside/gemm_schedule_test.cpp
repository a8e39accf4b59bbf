// The order of work tiles of the fused MLP kernel, enumerated on the host: every tile of every
// expert exactly once, nothing for an expert without rows, and splits that cover K.
#include "cuda/mlp/schedule.h"
#include "cuda/sm80/kernel_set.h"
#include "cuda/sm90/tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/mlp/fused_mlp.h"
#include "testing/cases.h"

namespace fusedmoe::cuda::gemm_schedule_test {

struct ScheduleCase {
  std::string name;
  std::vector<std::int32_t> rows;  // of each expert
};

std::vector<std::int32_t> prefix_of(const std::vector<std::int32_t>& rows, int max_tokens) {
  std::vector<std::int32_t> prefix{0};
  for (const std::int32_t count : rows) {
    prefix.push_back(prefix.back() + num_token_tiles(count, max_tokens));
  }
  return prefix;
}

std::vector<ScheduleCase> schedule_cases() {
  std::vector<ScheduleCase> cases;
  cases.push_back({"OneRow", {1}});
  cases.push_back({"NoRows", {0, 0, 0}});
  cases.push_back({"EdgesOfTiles", {1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 255, 256, 257, 513}});
  cases.push_back({"AllOnTheLast", std::vector<std::int32_t>(127, 0)});
  cases.back().rows.push_back(20000);
  cases.push_back({"AllOnTheFirst", std::vector<std::int32_t>(128, 0)});
  cases.back().rows.front() = 20000;
  cases.push_back({"EverySecondEmpty", {}});
  for (int e = 0; e < 300; ++e) cases.back().rows.push_back(e % 2 ? 0 : e);
  testing::Random random(3);
  cases.push_back({"MostExperts", {}});
  for (int e = 0; e < kMaxExperts; ++e) {
    cases.back().rows.push_back(static_cast<std::int32_t>(random.below(40)));
  }
  cases.push_back({"Zipf", {}});
  for (int e = 0; e < 256; ++e) cases.back().rows.push_back(3000 / (e + 1));
  return cases;
}

/// One or two GEMMs, without and with a row pass.
std::vector<TileOrder> tile_orders() {
  const GemmTiles first{5, 1}, second{3, 4};
  std::vector<TileOrder> orders;
  for (const GemmTiles& last : {GemmTiles{}, second}) {
    orders.push_back({{first, last}});
    for (const int pass_tiles : {1, 3}) orders.push_back({{first, last}, pass_tiles});
  }
  return orders;
}

class GemmScheduleTest : public ::testing::TestWithParam<ScheduleCase> {};

TEST_P(GemmScheduleTest, EveryTileOnceInAnOrderThatSharesWeights) {
  const std::vector<std::int32_t>& rows = GetParam().rows;
  const int num_experts = static_cast<int>(rows.size());
  constexpr int kSteps[] = {0, kRowPass, 1};
  for (const TileShape& tile : sm90::kTiles16Bit) {
    const auto prefix = prefix_of(rows, tile.max_tokens);
    for (const TileOrder& order : tile_orders()) {
      const GemmTiles shapes[3] = {order.gemms[0], order.gemms[1], {order.pass_tiles, 1}};
      // Times each tile came, by GEMM (or pass), token tile of all experts, row tile and split.
      std::vector<std::vector<int>> seen(3);
      std::size_t tiles_in_all = 0;
      for (const int gemm : kSteps) {
        const int per_tile = shapes[gemm].per_token_tile();
        seen[gemm].resize(static_cast<std::size_t>(prefix.back()) * per_tile);
        tiles_in_all += seen[gemm].size();
      }
      int experts[3] = {};  // that came last
      int step = 0;         // place in kSteps
      for (int i = 0; i < static_cast<int>(tiles_in_all); ++i) {
        const TileCoords found = find_tile(i, order, prefix.data(), num_experts);
        ASSERT_GE(found.gemm, 0);
        while (step < 3 && kSteps[step] != found.gemm) ++step;
        ASSERT_LT(step, 3) << "back to an earlier step";
        ASSERT_GE(found.expert, experts[found.gemm]) << "back to an earlier expert";
        experts[found.gemm] = found.expert;
        ASSERT_LT(found.expert, num_experts);
        ASSERT_GT(rows[found.expert], 0);
        const GemmTiles& shape = shapes[found.gemm];
        const int tiles = prefix[found.expert + 1] - prefix[found.expert];
        ASSERT_TRUE(found.token_tile >= 0 && found.token_tile < tiles);
        ASSERT_TRUE(found.row_tile >= 0 && found.row_tile < shape.row_tiles);
        ASSERT_TRUE(found.split >= 0 && found.split < shape.splits);
        const int token_tile = prefix[found.expert] + found.token_tile;
        const int row_tile = token_tile * shape.row_tiles + found.row_tile;
        ++seen[found.gemm][row_tile * shape.splits + found.split];
      }
      for (const auto& counts : seen) {
        EXPECT_TRUE(std::all_of(counts.begin(), counts.end(), [](int n) { return n == 1; }));
      }
      for (const int behind : {0, 1, 1000000}) {
        const int index = static_cast<int>(tiles_in_all) + behind;
        EXPECT_EQ(find_tile(index, order, prefix.data(), num_experts).gemm, -1);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GemmScheduleTest, ::testing::ValuesIn(schedule_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(GemmScheduleTest, TokenTilesCutAnExpertsRowsEvenly) {
  std::vector<TileShape> tiles_of_rows(std::begin(sm90::kTiles16Bit), std::end(sm90::kTiles16Bit));
  tiles_of_rows.insert(tiles_of_rows.end(), std::begin(sm90::kTilesFp8), std::end(sm90::kTilesFp8));
  for (const WeightFormat* format : {&formats::kBf16, &formats::kMxfp4Bf16, &formats::kInt8Bf16,
                                     &formats::kFp8, &formats::kW4a8}) {
    for (const sm80::Fp8 fp8 : {sm80::Fp8::kAsF16, sm80::Fp8::kNative}) {
      const auto tiles = sm80::kernel_set(*format, fp8).tiles;
      tiles_of_rows.insert(tiles_of_rows.end(), tiles.begin(), tiles.end());
    }
  }
  for (const TileShape& tile : tiles_of_rows) {
    const int step = tile.token_step();
    EXPECT_EQ(tile.max_tokens % step, 0);
    for (int rows = 1; rows <= 5 * tile.max_tokens + 1; ++rows) {
      const int tiles = num_token_tiles(rows, tile.max_tokens);
      const int size = token_tile_size(rows, tiles, step);
      ASSERT_LE(size, tile.max_tokens) << rows;
      ASSERT_EQ(size % step, 0) << rows;
      ASSERT_GE(tiles * size, rows) << "rows are left out";
      ASSERT_GT(rows - (tiles - 1) * size, 0) << rows << ": the last tile is empty";
      ASSERT_LT(size - (rows + tiles - 1) / tiles, step) << rows << ": uneven";
    }
    EXPECT_EQ(num_token_tiles(0, tile.max_tokens), 0);
  }
}

TEST(GemmScheduleTest, SplitsCoverKInOrder) {
  for (int k_blocks = 1; k_blocks < 130; ++k_blocks) {
    for (const int splits : {1, 2, 4}) {
      EXPECT_EQ(split_begin(k_blocks, splits, 0), 0);
      EXPECT_EQ(split_begin(k_blocks, splits, splits), k_blocks);
      for (int split = 0; split < splits; ++split) {
        const int length =
            split_begin(k_blocks, splits, split + 1) - split_begin(k_blocks, splits, split);
        EXPECT_GE(length, k_blocks / splits);
        EXPECT_LE(length, (k_blocks + splits - 1) / splits);
      }
    }
  }
}

/// As join_group.cuh counts: a token tile has a counter for every kBlocksOfGroup row blocks.
TEST(GemmScheduleTest, EveryGroupOfFeaturesHasACounter) {
  const TileShape& tile = sm90::kTilesFp8[0];
  ASSERT_TRUE(tile.has_parts_of_groups());
  for (const ScheduleCase& c : schedule_cases()) {
    SCOPED_TRACE(c.name);
    const std::int64_t token_tiles = prefix_of(c.rows, tile.max_tokens).back();
    const auto rows = std::accumulate(c.rows.begin(), c.rows.end(), std::int64_t{0});
    const auto experts = static_cast<std::int64_t>(c.rows.size());
    for (std::int64_t width = 1; width <= 600; ++width) {
      const std::int64_t row_blocks = block_grid(width, 128, true, 128).row_blocks;
      ASSERT_GE(num_group_counters(tile, rows, experts, width),
                token_tiles * ceil_div(row_blocks, kBlocksOfGroup));
    }
  }
}

TEST(GemmScheduleTest, LargestProblem) {
  // 300,000 tokens x 8 slots in tiles of 16, all on one expert; 1024 row tiles, then 112 in 4
  // splits.
  constexpr int tiles = 300000 * 8 / 16;
  const std::vector<std::int32_t> prefix{0, 0, tiles, tiles};
  const TileOrder order{{{1024, 1}, {112, 4}}};
  constexpr int first = tiles * 1024, second = tiles * 112 * 4;
  const TileCoords last = find_tile(first - 1, order, prefix.data(), 3);
  EXPECT_EQ(last.gemm, 0);
  EXPECT_EQ(last.expert, 1);
  EXPECT_EQ(last.token_tile, tiles - 1);
  EXPECT_EQ(last.row_tile, 1023);
  const TileCoords end = find_tile(first + second - 1, order, prefix.data(), 3);
  EXPECT_EQ(end.gemm, 1);
  EXPECT_EQ(end.token_tile, tiles - 1);
  EXPECT_EQ(end.row_tile, 111);
  EXPECT_EQ(end.split, 3);
  EXPECT_EQ(find_tile(first + second, order, prefix.data(), 3).gemm, -1);
}

}  // namespace fusedmoe::cuda::gemm_schedule_test
