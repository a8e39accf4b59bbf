// Which tiles sm80 and sm89 have, and how many stages of them a launch takes.
#include <gtest/gtest.h>

#include <map>
#include <string>

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

}  // namespace fusedmoe::cuda::sm80_tiles_test
