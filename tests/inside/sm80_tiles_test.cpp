// Which tiles sm80 and sm89 have, and how many stages of them a launch takes.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "cuda/formats/weight_formats.h"
#include "cuda/mlp/kernel_choice.h"
#include "cuda/sm80/family.h"
#include "cuda/sm80/kernel_set.h"

namespace fusedmoe::cuda::sm80_tiles_test {

TEST(Sm80TilesTest, EveryFormatHasKernels) {
  for (const WeightFormat& format : weight_formats()) {
    EXPECT_FALSE(sm80_family().tiles(format).empty()) << format.name;
    EXPECT_EQ(sm89_family().tiles(format).empty(), !format.fp8_rows) << format.name;
  }
}

TEST(Sm80TilesTest, ALaunchTakesFewerStagesWhereTwoBlocksThenFitAMultiprocessor) {
  constexpr std::int64_t kBeside = 6 << 10, kReserved = 1 << 10, kSmall = 100 << 10;
  std::map<std::string, int> stages;
  for (const sm80::Fp8 fp8 : {sm80::Fp8::kAsF16, sm80::Fp8::kNative}) {
    for (const WeightFormat& format : weight_formats()) {
      const sm80::KernelSet set = sm80::kernel_set(format, fp8);
      for (const TileShape& tile : set.tiles) {
        for (const std::int64_t bytes : {164 << 10, 228 << 10}) {
          EXPECT_EQ(sm80::ring_stages(tile, set, kBeside, bytes), tile.stages);
        }
        const int few = sm80::ring_stages(tile, set, kBeside, kSmall);
        const auto two_blocks = [&](int count) {
          return 2 * (kBeside + kReserved + count * sm80::stage_bytes(tile, set));
        };
        const char* native = fp8 == sm80::Fp8::kNative ? "native " : "";
        stages[native + std::string(format.name) + " " + to_string(tile)] = few;
        if (few == tile.stages) continue;
        EXPECT_GE(few, 2);
        EXPECT_LE(two_blocks(few), kSmall);
        EXPECT_GT(two_blocks(few + 1), kSmall);
      }
    }
  }
  EXPECT_EQ(stages["mxfp4 128x16k1s4d2r2"], 3);
  EXPECT_EQ(stages["bf16 128x16k1s4r2"], 2);
  EXPECT_EQ(stages["bf16 128x128k1s2r2"], 2);
  EXPECT_EQ(stages["native fp8 128x32k1s3r2"], 2);
  EXPECT_EQ(stages["native w4a8 128x64k1s4r2"], 2);
}

TEST(Sm80TilesTest, EightWarpsForManyTokensWhereAMultiprocessorHasRoomForOneBlock) {
  for (const WeightFormat* format : {&formats::kBf16, &formats::kInt8Rows, &formats::kFp8}) {
    SCOPED_TRACE(format->name);
    MlpShape shape;
    shape.family = &sm80_family();
    shape.format = format;
    shape.topk = 8;
    shape.num_local_experts = 128;
    shape.hidden = 2048;
    shape.intermediate = 768;
    const auto warps = [&](std::int64_t tokens, std::int64_t shared_bytes) {
      shape.num_tokens = tokens;
      shape.multiprocessor_shared_bytes = shared_bytes;
      return 4 * sm80_family().choose(shape).tile.warpgroups();
    };
    EXPECT_EQ(warps(8192, 100 << 10), 8);
    EXPECT_EQ(warps(8192, 164 << 10), 4);
    EXPECT_EQ(warps(8192, 228 << 10), 4);
    EXPECT_EQ(warps(128, 100 << 10), 4);
  }
}

}  // namespace fusedmoe::cuda::sm80_tiles_test
