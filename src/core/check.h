// Argument checks that end in Error, with values.
#pragma once

#include "core/format.h"

#include <string>

#include "fusedmoe/tensor.h"

/// Throws Error(argument, was, must_be) unless the condition holds. The texts are evaluated only
/// then, so they may call core::format freely.
#define FUSEDMOE_CHECK(condition, argument, was, must_be) \
  do {                                                    \
    if (!(condition)) {                                   \
      throw ::fusedmoe::Error(argument, was, must_be);    \
    }                                                     \
  } while (false)

namespace fusedmoe::core {

/// "f32 [2, 3]", or "undefined".
std::string describe(const TensorView& view);

/// Throws Error unless the view is defined, of this dtype, contiguous, and of this shape, where -1
/// in `shape` stands for any extent.
void check_tensor(const TensorView& view, const char* argument, DType dtype, const Shape& shape);

/// True if the memory of two contiguous views overlaps.
bool overlap(const TensorView& a, const TensorView& b);

}  // namespace fusedmoe::core
