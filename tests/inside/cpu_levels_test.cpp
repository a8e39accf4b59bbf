#include "cpu/levels.h"

#include <gtest/gtest.h>

#include <string>

namespace fusedmoe::cpu::cpu_levels_test {

std::string order(const Processor& processor) {
  std::string text;
  for (const std::string_view name : level_names(processor)) text += std::string(name) + " ";
  return text;
}

// The processor that runs this test has one order, so the others are asked for.
TEST(CpuLevelsTest, EachProcessorHasItsOrder) {
  const Processor haswell{.avx2 = true, .intel = true};
  EXPECT_EQ(order({}), "generic ");
  EXPECT_EQ(order(haswell), "avx2 generic ");

  Processor alder_lake = haswell;
  alder_lake.avx_vnni = true;
  EXPECT_EQ(order(alder_lake), "avx2_vnni avx2 generic ");

  Processor cascade_lake = haswell;
  cascade_lake.avx512 = cascade_lake.avx512_vnni = true;
  EXPECT_EQ(order(cascade_lake), "avx512_vnni avx512 avx2 generic ");

  Processor zen4 = cascade_lake;
  zen4.avx512_bf16 = true;
  zen4.intel = false;
  zen4.zen3_or_4 = true;
  EXPECT_EQ(order(zen4), "avx512_bf16 avx512_vnni avx512 avx2 generic ");

  // bf16 products are slower than fp32 ones there.
  Processor virtual_xeon = cascade_lake;
  virtual_xeon.avx512_bf16 = true;
  EXPECT_EQ(order(virtual_xeon), "avx512_vnni avx512_bf16 avx512 avx2 generic ");

  Processor sapphire_rapids = virtual_xeon;
  sapphire_rapids.amx = sapphire_rapids.avx_vnni = true;
  EXPECT_EQ(order(sapphire_rapids), "amx avx512_vnni avx512_bf16 avx512 avx2_vnni avx2 generic ");

  const Processor graviton3{
      .neon = true, .neon_dotprod = true, .neon_i8mm = true, .neon_bf16 = true};
  EXPECT_EQ(order(graviton3), "neon_bf16 neon_i8mm neon_dotprod neon generic ");
}

TEST(CpuLevelsTest, ALevelNeedsThoseThatItStartsFrom) {
  EXPECT_EQ(order({.avx_vnni = true, .avx512 = true, .avx512_vnni = true, .amx = true}),
            "generic ");
  EXPECT_EQ(order({.avx2 = true, .avx512_vnni = true, .avx512_bf16 = true}), "avx2 generic ");
  EXPECT_EQ(order({.neon = true, .neon_i8mm = true, .neon_bf16 = true}), "neon generic ");
}

TEST(CpuLevelsTest, OnlyZen4ReadsTilesSideBySide) {
  EXPECT_TRUE(prefers_side_by_side({.zen3_or_4 = true}));
  EXPECT_FALSE(prefers_side_by_side({.intel = true}));
}

TEST(CpuLevelsTest, TheTablesAreInThatOrder) {
  std::string text;
  for (const Kernels* table : levels()) text += std::string(table->name) + " ";
  EXPECT_EQ(text, order(processor()));
}

}  // namespace fusedmoe::cpu::cpu_levels_test
