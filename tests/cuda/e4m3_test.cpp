// E4M3 by hand, for GPUs without instructions for it, beside those instructions.
#include "e4m3_differences.h"

#include "cuda_test.h"

namespace fusedmoe::testing {
namespace {

TEST(CudaE4m3Test, ByHandAllIsAsByInstructions) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  if (!can_count_e4m3_differences()) GTEST_SKIP() << "no machine code for this GPU";
  const E4m3Differences differences = count_e4m3_differences();
  EXPECT_EQ(differences.of_f32, 0U);
  EXPECT_EQ(differences.of_f16, 0U);
  EXPECT_EQ(differences.of_codes, 0U);
}

}  // namespace
}  // namespace fusedmoe::testing
