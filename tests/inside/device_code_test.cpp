// Which code of a build a GPU runs, by the compute capability alone.
#include "cuda/device/device_code.h"

#include <gtest/gtest.h>

#include "cuda/device/limits.h"
#include "cuda/experts/planner.h"
#include "cuda/sm80/family.h"

namespace fusedmoe::cuda::device_code_test {

std::string code(std::string_view architectures, int capability) {
  const std::optional<DeviceCode> found = code_for(architectures, capability);
  return found ? to_string(*found) : "";
}

TEST(DeviceCodeTest, MachineCodeRunsOnItsMajorVersionAndPtxOnAllLater) {
  constexpr std::string_view kWheel = "80-real 90a-real 120-real 80-virtual";
  struct Case {
    int capability;
    const char* code;
  };
  for (const Case& each :
       {Case{75, ""}, Case{80, "machine code for 8.0"}, Case{86, "machine code for 8.0"},
        Case{87, "machine code for 8.0"}, Case{89, "machine code for 8.0"},
        Case{90, "machine code for 9.0"}, Case{100, "PTX for 8.0"}, Case{103, "PTX for 8.0"},
        Case{110, "PTX for 8.0"}, Case{120, "machine code for 12.0"},
        Case{121, "machine code for 12.0"}}) {
    EXPECT_EQ(code(kWheel, each.capability), each.code) << each.capability;
  }
  EXPECT_EQ(code("80-real 89-real 80-virtual", 89), "machine code for 8.9") << "the latest";
  EXPECT_EQ(code("80-real 89-real 80-virtual", 86), "machine code for 8.0") << "no later one";
  EXPECT_EQ(code("80-real 90a-real", 100), "") << "no PTX";
  EXPECT_EQ(code("90a-virtual", 100), "") << "PTX of one GPU alone";
  EXPECT_EQ(code("90a-real", 91), "") << "machine code of one GPU alone";
  EXPECT_EQ(code("", 90), "");
}

TEST(DeviceCodeTest, EveryGpuHasCodeOfItsKernels) {
  for (const int capability : {80, 86, 87, 89, 100, 103, 110, 120, 121}) {
    EXPECT_TRUE(code_for(sm80_family().architectures(), capability)) << capability;
  }
  EXPECT_EQ(code(sm89_family().architectures(), 89), "machine code for 8.9");
  EXPECT_EQ(code("89-real 120-real", 121), "machine code for 12.0") << "sm89 in a wheel";
  for (const int capability : {89, 120, 121}) EXPECT_TRUE(sm89_family().runs_on(capability));
  for (const int capability : {86, 90, 100, 103, 110}) {
    EXPECT_FALSE(sm89_family().runs_on(capability)) << capability;
  }
}

TEST(DeviceLimitsTest, RowsInF32StayInASmallL2) {
  ASSERT_EQ(limits_of_capability(90).l2_bytes, std::int64_t{60} << 20);
  MlpShape shape;
  shape.topk = 4;
  shape.hidden = 2048;
  const std::int64_t row_bytes = shape.topk * shape.hidden * 4;
  EXPECT_EQ(max_tokens_f32(shape), (std::int64_t{16} << 20) / row_bytes);
  shape.l2_bytes = limits_of_capability(86).l2_bytes;
  EXPECT_EQ(max_tokens_f32(shape), (std::int64_t{2} << 20) / row_bytes);
}

}  // namespace fusedmoe::cuda::device_code_test
