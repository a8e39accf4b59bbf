// What the GPU tests share: they skip where there is no usable GPU, and say why.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "testing/compare.h"

namespace fusedmoe::testing {

inline const Device kGpu{DeviceKind::kCuda, 0};

/// The experts that a run of the tests is about: those of FUSEDMOE_TEST_EXPERTS, by default sm90.
inline std::string experts_under_test() {
  const char* name = std::getenv("FUSEDMOE_TEST_EXPERTS");
  return name ? name : "sm90";
}
inline const Device kHost{};

#define FUSEDMOE_SKIP_WITHOUT_GPU()                                        \
  do {                                                                     \
    const std::string problem = device_problem(::fusedmoe::testing::kGpu); \
    if (!problem.empty()) GTEST_SKIP() << problem;                         \
  } while (false)

/// Suites derive from it.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override { FUSEDMOE_SKIP_WITHOUT_GPU(); }
};
template <typename Param>
class CudaTestWith : public ::testing::TestWithParam<Param> {
 protected:
  void SetUp() override { FUSEDMOE_SKIP_WITHOUT_GPU(); }
};

inline Tensor to_gpu(const Tensor& tensor) {
  return to_device(tensor, kGpu);
}
inline Tensor to_host(const Tensor& tensor) {
  return to_device(tensor, kHost);
}

}  // namespace fusedmoe::testing
