// What the watch of NCCL says of the labels of two ranks. One GPU suffices: the host writes what
// else the device does.
#include "cuda/nccl/labels.h"

#include <gtest/gtest.h>

#include "cuda_test.h"

namespace fusedmoe::testing {
namespace {

using cuda::Label;
using cuda::Labels;

Label label(const char* what, std::uint64_t bytes) {
  Label result(what);
  result.bytes = bytes;
  return result;
}

Labels::Pairs pairs(const char* what, std::uint64_t bytes) {
  return {{Label(what), label(what, bytes)}, {Label(what), label(what, bytes)}};
}

TEST(CudaNcclLabelsTest, ADifferenceNamesBothSides) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  Labels labels(0, 2, kGpu);
  Label noise;
  noise.what.fill('\xff');
  const std::string begin =
      "rank 0 is at the sum of step 5 of layer 3 and expects 64 bytes from rank 1, ";
  const std::pair<Label, std::string> cases[] = {
      {label("sum of step 5 of layer 3", 64), ""},
      {label("sum of step 5 of layer 4", 64),
       begin + "but rank 1 is at the sum of step 5 of layer 4 and sends 64"},
      {label("sum of step 5 of layer 3", 32),
       begin + "but rank 1 is at the sum of step 5 of layer 3 and sends 32"},
      {noise, begin + "but rank 1 is at something else and sends 0"}};
  for (const auto& [received, difference] : cases) {
    Labels::Slot& slot = labels.take(pairs("sum of step 5 of layer 3", 64), false);
    EXPECT_EQ(labels.difference(slot), "") << "before anything has come";
    slot.received[1] = received;
    EXPECT_EQ(labels.difference(slot), difference);
    labels.give_back(slot);
  }
}

TEST(CudaNcclLabelsTest, EqualExchangesOfGraphsShareASlot) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  Labels labels(0, 2, kGpu);
  Labels::Slot& first = labels.take(pairs("sum of layer 3", 64), true);
  for (int i = 0; i < 200; ++i) {  // more than are made at a time
    EXPECT_NE(&labels.take(pairs("sum of layer 3", 64), false), &first);
  }
  EXPECT_EQ(&labels.take(pairs("sum of layer 3", 64), true), &first);
  Labels::Slot& other = labels.take(pairs("sum of layer 4", 64), true);
  EXPECT_NE(&other, &first);
  EXPECT_EQ(labels.difference_of_recorded(), "");
  other.received[1] = first.received[1];
  EXPECT_EQ(
      labels.difference_of_recorded(),
      "rank 0 is at the sum of layer 4 and expects 64 bytes from rank 1, but rank 1 is at the "
      "sum of layer 3 and sends 64");
}

}  // namespace
}  // namespace fusedmoe::testing
