// What the tests of malformed calls share: views that do not fit, and the expected Error.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

#include "fusedmoe/tensor.h"

namespace fusedmoe::testing {

/// A device that no machine has.
inline const Device kCuda{DeviceKind::kCuda, 999};

/// The same memory, seen from byte `offset` on.
inline TensorView shifted(const TensorView& view, std::ptrdiff_t offset) {
  return TensorView(view.as<char>() + offset, view.dtype(), view.shape());
}
inline TensorView on_cuda(const TensorView& view) {
  return TensorView(view.data(), view.dtype(), view.shape(), kCuda);
}
/// Of this shape, on the same memory, which must be large enough.
inline TensorView reshaped(const TensorView& view, Shape shape) {
  return TensorView(view.data(), view.dtype(), shape);
}
inline TensorView retyped(const TensorView& view, DType dtype) {
  return TensorView(view.data(), dtype, view.shape());
}
inline TensorView transposed(const TensorView& view) {
  return reshaped(view, {view.size(1), view.size(0)}).transpose(0, 1);
}

/// Fills the output, runs a call that must fail, and looks.
inline void expect_error(const std::string& argument, const TensorView& output,
                         const std::function<void()>& call) {
  std::memset(output.data(), 0x3c, static_cast<std::size_t>(output.nbytes()));
  try {
    call();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), argument) << error.what();
    EXPECT_NE(std::string(error.what()).find(argument), std::string::npos);
  }
  for (std::int64_t i = 0; i < output.nbytes(); ++i) {
    ASSERT_EQ(output.as<const unsigned char>()[i], 0x3c) << "output was touched";
  }
}

}  // namespace fusedmoe::testing
