// The choice of kernel configurations for the experts of a GPU, on the host: no GPU is needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>

#include "cuda/experts/experts.h"
#include "cuda/experts/planner.h"
#include "cuda/sm80/family.h"
#include "cuda/sm90/family.h"
#include "cuda/sm90/kernel_set.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/error.h"

namespace fusedmoe::cuda::gemm_plan_test {

const WeightFormat& format_named(std::string_view name) {
  for (const WeightFormat& format : weight_formats()) {
    if (format.name == name) return format;
  }
  throw Error("format", std::string(name), "in the table");
}

/// The tiles that the formats share.
std::span<const TileShape> tile_shapes() {
  return sm90::kTiles16Bit;
}

/// Standard format.
MlpShape shape_of(std::int64_t hidden, std::int64_t intermediate, std::int64_t num_experts,
                  std::int64_t topk, std::int64_t num_tokens, std::string_view format = "bf16") {
  return {.family = &sm90_family(),
          .format = &format_named(format),
          .num_tokens = num_tokens,
          .topk = topk,
          .num_local_experts = num_experts,
          .hidden = hidden,
          .intermediate = intermediate};
}

/// Three of them fit a multiprocessor of an H200, two one of an A100, one or two others.
TEST(Sm80PlanTest, ManyTokensOfDecodedWeightsTakeWideTilesOnEveryGpu) {
  MlpShape shape = shape_of(2880, 2880, 128, 4, 8192, "mxfp4");
  shape.family = &sm80_family();
  for (const int kib : {228, 164, 100}) {
    shape.multiprocessor_shared_bytes = kib << 10;
    EXPECT_EQ(choose_config(shape).tile.max_tokens, 64) << kib;
  }
}

TEST(NamedCapabilityTest, StandsForAGpuThatMayBeAnother) {
  MoeConfig config;
  EXPECT_TRUE(plans_for(config, 132) && plans_for(config, 114));
  config.compute_capability = 90;
  EXPECT_TRUE(plans_for(config, 132));
  EXPECT_FALSE(plans_for(config, 114));
}

/// A layer in every format that the family has, and for all kinds of experts.
void add_shapes(const MlpShape& layer, std::vector<MlpShape>& shapes) {
  for (const WeightFormat& format : weight_formats()) {
    if (layer.family->tiles(format).empty()) continue;
    for (const int kind : {0, 1, 2, 3, 4}) {
      if (kind == 4 && !format.k_scales) continue;
      MlpShape shape = layer;
      shape.format = &format;
      shape.batched = kind == 1;
      shape.batch_invariant = kind == 2;
      shape.unfused = kind == 3;
      shape.stores_groups = kind == 4;
      if (shape.batched) shape.topk = 1;
      shapes.push_back(shape);
    }
  }
}

std::vector<MlpShape> published_shapes(std::int64_t num_tokens,
                                       const KernelFamily& family = sm90_family()) {
  std::vector<MlpShape> shapes;
  for (const std::string& name : model_preset_names()) {
    const ModelConfig model = parse_model_config(model_preset(name));
    MlpShape layer = shape_of(model.hidden, model.intermediate, model.router.num_experts,
                              model.router.topk, num_tokens);
    layer.family = &family;
    add_shapes(layer, shapes);
  }
  return shapes;
}

std::vector<std::int64_t> numbers_of_tokens() {
  std::vector<std::int64_t> tokens;
  for (std::int64_t n = 1; n <= 1 << 19; n *= 2) {
    for (const std::int64_t near : {n - 1, n, n + 1, n + n / 3}) {
      if (near > 0) tokens.push_back(near);
    }
  }
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

TEST(GemmPlanTest, NamesAreUniqueAndFound) {
  std::set<std::string> names;
  for (const KernelConfig& config : sm90_family().configs()) {
    const std::string name = to_string(config);
    EXPECT_TRUE(names.insert(name).second) << name;
    const int found = find_config(sm90_family(), name);
    ASSERT_GE(found, 0) << name;
    EXPECT_EQ(sm90_family().configs()[static_cast<std::size_t>(found)], config) << name;
  }
  // Tiles of all formats, with 1, 2 and 4 splits and rows in 32 or 16 bits.
  for (const WeightFormat& format : weight_formats()) {
    for (const TileShape& tile : sm90::kernel_set(format).tiles) {
      EXPECT_TRUE(names.contains(to_string(KernelConfig{tile, 4, false}))) << to_string(tile);
    }
  }
  const std::string name = to_string(KernelConfig{tile_shapes().front(), 1, true});
  for (const std::string& other : {std::string(), std::string("1x1k1 splits 1 f32"), name + " ",
                                   " " + name, name.substr(0, name.size() - 1), name.substr(1),
                                   std::string("-") + name, std::string("cpu")}) {
    EXPECT_EQ(find_config(sm90_family(), other), -1) << other;
  }
}

TEST(GemmPlanTest, ChosenPlanIsValidForEverySize) {
  for (const std::int64_t num_tokens : numbers_of_tokens()) {
    std::vector<MlpShape> shapes = published_shapes(num_tokens);
    add_shapes(shape_of(7168, 2048, 1, 1, num_tokens), shapes);
    add_shapes(shape_of(2880, 2880, 2, 1, num_tokens), shapes);
    add_shapes(shape_of(2048, 192, 128, 8, num_tokens), shapes);
    add_shapes(shape_of(64, 64, 1, 1, num_tokens), shapes);
    add_shapes(shape_of(64, 64, 4, 0, num_tokens), shapes);
    for (const MlpShape& shape : shapes) {
      const ConfigList configs = valid_configs(shape);
      ASSERT_GT(configs.size(), 0u);
      const KernelConfig chosen = choose_config(shape);
      EXPECT_NE(std::find(configs.begin(), configs.end(), chosen), configs.end())
          << to_string(chosen);
      EXPECT_EQ(choose_config(shape), chosen);
      const KernelConfig largest = largest_config(shape);
      for (const KernelConfig& config : configs) {
        EXPECT_LE(largest.tile.max_tokens, config.tile.max_tokens);
        EXPECT_GE(largest.splits, config.splits);
        EXPECT_GE(largest.rows_f32, config.rows_f32);
        EXPECT_TRUE(valid(shape, config)) << to_string(config);
        EXPECT_EQ(std::count(configs.begin(), configs.end(), config), 1) << to_string(config);
        if (shape.batched || shape.batch_invariant) {
          EXPECT_EQ(config.splits, 1);
          EXPECT_FALSE(config.rows_f32);
        }
        if (shape.batch_invariant) {
          EXPECT_EQ(config.tile.k_groups, 1);
          EXPECT_FALSE(sm90::kernel_set(*shape.format).mma_sync_tokens > 0 &&
                       config.tile.has_epilogue_warpgroup())
              << "another instruction than in wider tiles";
        }
      }
    }
  }
}

TEST(GemmPlanTest, OfKernelsForEveryGpuTooTheChosenPlanIsValidForEverySize) {
  const KernelFamily& family = sm80_family();
  std::set<std::size_t> all_chosen;  // places in configs()
  for (const std::int64_t num_tokens : numbers_of_tokens()) {
    for (const MlpShape& shape : published_shapes(num_tokens, family)) {
      const KernelConfig chosen = choose_config(shape), largest = largest_config(shape);
      EXPECT_TRUE(valid(shape, chosen)) << to_string(chosen);
      EXPECT_LE(largest.tile.max_tokens, chosen.tile.max_tokens);
      const auto found = std::find(family.configs().begin(), family.configs().end(), chosen);
      ASSERT_NE(found, family.configs().end()) << to_string(chosen);
      all_chosen.insert(static_cast<std::size_t>(found - family.configs().begin()));
      EXPECT_TRUE(!shape.batch_invariant || chosen.tile.k_groups == 1 || shape.format->int8_rows);
    }
  }
  for (const std::size_t i : all_chosen) {  // which writes all names, so not for every size
    EXPECT_EQ(find_config(family, to_string(family.configs()[i])), static_cast<int>(i));
  }
  MlpShape shape = shape_of(2880, 2880, 128, 4, 8, "mxfp4");
  shape.family = &family;
  EXPECT_EQ(to_string(choose_config(shape)), "128x16k1s4d2r2 splits 1 f32");
  shape.num_tokens = 8192;
  EXPECT_EQ(to_string(choose_config(shape)), "128x64k1s4r2 splits 1 bf16");
}

TEST(GemmPlanTest, NothingToDoHasAValidPlanToo) {
  for (const MlpShape& shape : {shape_of(2880, 2880, 32, 4, 0), shape_of(2880, 2880, 32, 0, 4)}) {
    EXPECT_TRUE(valid(shape, choose_config(shape)));
  }
}

TEST(GemmPlanTest, MoreTokensOfPublishedModelsNeverGetNarrowerTiles) {
  std::vector<int> widest(published_shapes(1).size(), 0);
  for (const std::int64_t num_tokens : numbers_of_tokens()) {
    const std::vector<MlpShape> shapes = published_shapes(num_tokens);
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      // Without K groups a few tokens may have tiles of many tokens and few weight rows.
      if (shapes[i].batch_invariant) continue;
      const int width = choose_config(shapes[i]).tile.max_tokens;
      EXPECT_GE(width, widest[i]) << num_tokens << " tokens";
      widest[i] = width;
    }
  }
  const std::vector<MlpShape> shapes = published_shapes(1);
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    if (shapes[i].batch_invariant) continue;
    EXPECT_EQ(widest[i], sm90::kernel_set(*shapes[i].format).tiles.back().max_tokens);
  }
}

TEST(GemmPlanTest, PublishedModelsGetThePlansThatWereFastest) {
  const auto config = [](const MlpShape& shape) { return to_string(choose_config(shape)); };
  const auto gpt_oss_20b = [&](std::int64_t num_tokens) {
    return config(shape_of(2880, 2880, 32, 4, num_tokens, "mxfp4"));
  };
  EXPECT_EQ(gpt_oss_20b(1), "64x16k4c1 splits 2 f32");
  EXPECT_EQ(gpt_oss_20b(6), "64x16k4c1 splits 1 f32");
  EXPECT_EQ(gpt_oss_20b(8), "256x32k1c1 splits 1 f32");
  EXPECT_EQ(gpt_oss_20b(128), "256x32k1c1 splits 1 f32");
  EXPECT_EQ(gpt_oss_20b(160), "256x64k1c1 splits 1 f32");
  EXPECT_EQ(gpt_oss_20b(8192), "128x288k1c2 splits 1 bf16");
  const auto mixtral = [&](std::int64_t num_tokens) {
    return config(shape_of(4096, 14336, 8, 2, num_tokens));
  };
  EXPECT_EQ(mixtral(16), "64x16k4c1 splits 1 f32");
  EXPECT_EQ(mixtral(512), "256x144k1c1r2 splits 2 f32") << "128 tiles of GEMM 2";
  EXPECT_EQ(mixtral(1024), "128x288k1c2 splits 1 bf16");
  EXPECT_EQ(config(shape_of(4096, 14336, 8, 2, 512, "fp8")), "256x128k1c2t splits 2 f32")
      << "few tiles of GEMM 2";
  const auto qwen3_30b = [&](std::int64_t num_tokens, bool stores_groups) {
    MlpShape shape = shape_of(2048, 768, 128, 8, num_tokens, "fp8");
    shape.stores_groups = stores_groups;
    return config(shape);
  };
  EXPECT_EQ(qwen3_30b(8, false), "64x16k4c1 splits 1 f32");
  EXPECT_EQ(qwen3_30b(8, true), "256x32k1c1 splits 1 f32");
  EXPECT_EQ(qwen3_30b(1024, false), "256x128k1c1t splits 1 bf16");
  EXPECT_EQ(qwen3_30b(1024, true), "256x128k1c1t splits 1 bf16");
  EXPECT_EQ(qwen3_30b(8192, true), "256x128k1c1t splits 1 bf16");
  MlpShape deepseek_v3 = shape_of(7168, 2048, 256, 8, 1, "fp8");
  EXPECT_EQ(config(deepseek_v3), "64x16k4c1 splits 1 f32");
  deepseek_v3.stores_groups = true;
  EXPECT_EQ(config(deepseek_v3), "64x16k4c1 splits 1 f32") << "a tile each would be too few";
  const auto by_token = [&](std::int64_t hidden, std::int64_t intermediate, std::int64_t experts,
                            std::int64_t topk, std::int64_t num_tokens) {
    return config(shape_of(hidden, intermediate, experts, topk, num_tokens, "fp8_rows"));
  };
  EXPECT_EQ(by_token(2048, 768, 128, 8, 16), "64x16k4c1 splits 1 f32");
  EXPECT_EQ(by_token(2048, 768, 128, 8, 32), "256x32k1c1 splits 1 f32");
  EXPECT_EQ(by_token(2048, 768, 128, 8, 128), "256x32k1c1 splits 1 f32");
  EXPECT_EQ(by_token(4096, 1536, 128, 8, 8), "64x16k4c1 splits 1 f32");
  EXPECT_EQ(by_token(4096, 1536, 128, 8, 32), "256x32k1c1 splits 1 f32");
  EXPECT_EQ(by_token(4096, 14336, 8, 2, 32), "64x16k4c1 splits 1 f32");
  const auto w4a8 = [&](std::int64_t num_tokens) {
    return config(shape_of(2048, 768, 128, 8, num_tokens, "w4a8"));
  };
  EXPECT_EQ(w4a8(256), "256x64k1c1 splits 1 f32");
  EXPECT_EQ(w4a8(768), "256x64k1c1 splits 1 bf16");
}

TEST(GemmPlanTest, FewTilesAreSplitUntilTheyFillTheMultiprocessors) {
  const auto splits = [](std::int64_t hidden, std::int64_t intermediate, std::int64_t topk) {
    return choose_config(shape_of(hidden, intermediate, 16, topk, 1)).splits;
  };
  EXPECT_EQ(splits(5120, 8192, 1), 4) << "80 tiles, 320 units (llama4-scout)";
  EXPECT_EQ(splits(4096, 8192, 2), 2) << "128 tiles, 256 units";
  EXPECT_EQ(splits(2048, 8192, 8), 1) << "256 tiles";
  EXPECT_EQ(splits(512, 2048, 8), 4) << "at most";
  EXPECT_EQ(splits(512, 1024, 8), 2) << "of at least 8 blocks of K";
  EXPECT_EQ(splits(512, 576, 8), 1);
}

TEST(GemmPlanTest, OneExpertFillsARoundOfMultiprocessors) {
  constexpr std::int64_t kHidden = 7168, kIntermediate = 2048;
  for (const std::int64_t num_tokens : {256, 512}) {
    const KernelConfig config = choose_config(shape_of(kHidden, kIntermediate, 1, 1, num_tokens));
    const std::int64_t tiles =
        ceil_div(2 * kIntermediate, config.tile.tile_row_blocks() * kBlockRows) *
        ceil_div(num_tokens, config.tile.max_tokens);
    EXPECT_EQ(tiles, 128) << num_tokens << " tokens: " << to_string(config);
    EXPECT_EQ(config.splits, 1);
  }
  for (const std::int64_t num_tokens : {1, 16, 64}) {
    EXPECT_EQ(choose_config(shape_of(kHidden, kIntermediate, 1, 1, num_tokens)).tile,
              tile_shapes().front());
  }
}

TEST(GemmPlanTest, ShortKHasNoTimeForAnEpilogueWarpgroupOrClusters) {
  const auto tile = [](std::int64_t intermediate, std::int64_t num_tokens,
                       std::string_view format = "bf16") {
    return choose_config(shape_of(2048, intermediate, 128, 8, num_tokens, format)).tile;
  };
  EXPECT_TRUE(tile(256, 8).has_epilogue_warpgroup());
  EXPECT_FALSE(tile(256, 32).has_epilogue_warpgroup()) << "enough tiles without K groups";
  EXPECT_TRUE(tile(768, 64).has_epilogue_warpgroup());
  EXPECT_TRUE(tile(384, 64, "mxfp4").has_epilogue_warpgroup());
  EXPECT_FALSE(tile(384, 256, "mxfp4").has_epilogue_warpgroup())
      << "20 rows take longer than 6 blocks of K";
  EXPECT_EQ(tile(192, 8192).cluster, 1);
  EXPECT_EQ(tile(768, 8192).cluster, 2);
}

TEST(GemmPlanTest, InvalidPlansAreRefused) {
  MlpShape shape = published_shapes(8).front();
  const TileShape tile = tile_shapes().front();
  ASSERT_TRUE(valid(shape, {tile, 4, true}));
  EXPECT_FALSE(valid(shape, {tile, 3, true}));
  EXPECT_FALSE(valid(shape, {tile, 2, false})) << "partial sums in bf16";
  EXPECT_FALSE(valid(shape, {TileShape{24, 1, 1, 1}, 1, true})) << "not compiled";
  MlpShape invariant = shape;
  invariant.batch_invariant = true;
  const TileShape tile_apart = tile_shapes()[1];
  ASSERT_TRUE(tile_apart.has_epilogue_warpgroup() && tile_apart.k_groups == 1);
  for (const WeightFormat& format : weight_formats()) {
    if (sm90::kernel_set(format).tiles.empty()) continue;
    invariant.format = &format;
    EXPECT_EQ(valid(invariant, {tile_apart, 1, false}),
              sm90::kernel_set(format).mma_sync_tokens == 0);
  }
  shape.num_tokens = max_tokens_f32(shape);
  EXPECT_TRUE(valid(shape, {tile, 1, true}));
  ++shape.num_tokens;
  EXPECT_FALSE(valid(shape, {tile, 1, true}));
  EXPECT_TRUE(valid(shape, {tile, 1, false}));
}

TEST(GemmPlanTest, MultiprocessorsDecideHowManyTilesAreFew) {
  // 80 tiles of GEMM 2 are split until there are one and a half for each multiprocessor.
  MlpShape shape = shape_of(5120, 8192, 16, 1, 1);
  ASSERT_EQ(shape.multiprocessors, 132);
  EXPECT_EQ(choose_config(shape).splits, 4);
  shape.multiprocessors = 78;
  EXPECT_EQ(choose_config(shape).splits, 2);
  shape.multiprocessors = 40;
  EXPECT_EQ(choose_config(shape).splits, 1);
}

TEST(GemmPlanTest, ExpertsOfOtherRanksTakeTheirShareOfTheTokens) {
  for (MlpShape shape : published_shapes(1024)) {
    const KernelConfig alone = choose_config(shape);
    shape.num_experts = shape.num_local_experts;
    EXPECT_EQ(choose_config(shape), alone) << "all are local";
    shape.num_experts = 8 * shape.num_local_experts;
    MlpShape share = shape;
    share.num_experts = 0;
    share.expected_tokens = 128;
    if (!shape.batched) {
      EXPECT_EQ(likely_tokens(shape), 128);
      EXPECT_EQ(choose_config(shape), choose_config(share));
    } else {
      EXPECT_EQ(choose_config(shape), alone) << "the capacity is each local expert's";
    }
    shape.num_tokens = 1;
    EXPECT_EQ(likely_tokens(shape), 1);
  }
}

TEST(GemmPlanTest, ExpectedTokensChooseWithinTheCapacity) {
  for (const std::int64_t capacity : {64, 512, 8192}) {
    for (const MlpShape& known : published_shapes(capacity)) {
      MlpShape shape = known;
      // What is assumed of each, said explicitly.
      shape.expected_tokens = shape.batched ? capacity / 4 : capacity;
      EXPECT_EQ(choose_config(shape), choose_config(known));
      shape.expected_tokens = 4 * capacity;
      MlpShape full = known;
      full.expected_tokens = capacity;
      EXPECT_EQ(choose_config(shape), choose_config(full)) << "more than there is room for";
      shape.expected_tokens = 8;
      EXPECT_TRUE(valid(shape, choose_config(shape)));
      if (known.batch_invariant) continue;
      EXPECT_LE(choose_config(shape).tile.max_tokens, choose_config(full).tile.max_tokens);
    }
  }
}

TEST(GemmPlanTest, OneTokenOfFewWeightsHasAKernelOfItsOwn) {
  const auto chosen = [](MlpShape shape) {
    shape.has_one_token = true;
    return to_string(choose_config(shape));
  };
  EXPECT_EQ(chosen(shape_of(2048, 768, 128, 8, 1, "fp8")), "one token");
  EXPECT_EQ(chosen(shape_of(2048, 768, 128, 8, 1)), "one token");
  EXPECT_EQ(chosen(shape_of(5120, 8192, 16, 1, 1, "fp8")), "one token");
  EXPECT_EQ(chosen(shape_of(4096, 1536, 128, 8, 1, "fp8")), "one token") << "144 MiB";
  EXPECT_NE(chosen(shape_of(2048, 768, 128, 8, 2, "fp8")), "one token") << "two tokens";
  EXPECT_NE(chosen(shape_of(4096, 14336, 8, 2, 1, "fp8")), "one token") << "many weights";
  EXPECT_NE(chosen(shape_of(2880, 2880, 32, 4, 1, "mxfp4")), "one token")
      << "180 slices of 16 outputs leave a third of 132 multiprocessors without work";
  MlpShape not_gated = shape_of(2048, 1856, 128, 8, 1);
  EXPECT_NE(chosen(not_gated), "one token") << "174 MiB";
  not_gated.gated = false;
  EXPECT_NE(chosen(not_gated), "one token") << "116 MiB";
  not_gated.topk = 5;
  EXPECT_EQ(chosen(not_gated), "one token") << "73 MiB";
  not_gated.gated = true;
  EXPECT_NE(chosen(not_gated), "one token") << "109 MiB";
  EXPECT_NE(to_string(choose_config(shape_of(2048, 768, 128, 8, 1, "fp8"))), "one token")
      << "no room for it";
}

TEST(GemmPlanTest, WhereTheKernelOfOneTokenIsNotPreferredTilesAreChosenAsWithoutIt) {
  for (MlpShape shape : published_shapes(1)) {
    if (shape.batched || shape.unfused || shape.batch_invariant) continue;
    const KernelConfig without = choose_config(shape);
    EXPECT_FALSE(without.one_token);
    shape.has_one_token = true;
    const KernelConfig chosen = choose_config(shape);
    EXPECT_TRUE(chosen.one_token || chosen == without) << to_string(chosen);
    shape.topk *= 1000;  // too many weights for it
    shape.num_local_experts *= 1000;
    EXPECT_FALSE(choose_config(shape).one_token);
  }
}

}  // namespace fusedmoe::cuda::gemm_plan_test
