// Argument checks that end in Error, with values.
#pragma once

#include "core/format.h"

#include <string>
#include <string_view>

#include "fusedmoe/tensor.h"

/// Throws Error(argument, was, must_be), an invalid value, unless the condition holds. The texts
/// are evaluated only then, so they may call core::format freely.
#define FUSEDMOE_CHECK(condition, argument, was, must_be) \
  FUSEDMOE_CHECK_FAULT(condition, kValue, argument, was, must_be)

/// The same for another Fault, for example kShape.
#define FUSEDMOE_CHECK_FAULT(condition, fault, argument, was, must_be)                        \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      throw ::fusedmoe::Error(std::string(argument), was, must_be, ::fusedmoe::Fault::fault); \
    }                                                                                         \
  } while (false)

/// The same for what a file holds: `part` names the file and the place in it.
#define FUSEDMOE_CHECK_FILE(condition, part, was, must_be)    \
  do {                                                        \
    if (!(condition)) {                                       \
      throw ::fusedmoe::Error::malformed(part, was, must_be); \
    }                                                         \
  } while (false)

/// The same for what nothing here can serve, for the Reason.
#define FUSEDMOE_CHECK_SUPPORTED(condition, reason, argument, was, must_be)                     \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      throw ::fusedmoe::Error::unsupported(::fusedmoe::Reason::reason, argument, was, must_be); \
    }                                                                                           \
  } while (false)

/// Throws an I/O error of the file at `path`; `message` is the whole sentence.
#define FUSEDMOE_CHECK_IO(condition, path, message) \
  do {                                              \
    if (!(condition)) {                             \
      throw ::fusedmoe::Error::io(path, message);   \
    }                                               \
  } while (false)

namespace fusedmoe::core {

/// "f32 [2, 3]", or "undefined".
std::string describe(const TensorView& view);

/// f32, bf16 or f16: what hidden states may be.
bool is_activation_dtype(DType dtype);

/// Each throws Error with the fault that it finds first: undefined, dtype, shape, strides.

/// Defined, of this dtype, contiguous, and of this shape, where -1 stands for any extent.
void check_tensor(const TensorView& view, std::string_view argument, DType dtype,
                  const Shape& shape);
/// The same for a matrix whose rows may have a stride of at least their length.
void check_rows(const TensorView& view, std::string_view argument, DType dtype, const Shape& shape);
/// Defined and f32, bf16 or f16.
void check_activation_dtype(const TensorView& view, std::string_view argument);
void check_device(const TensorView& view, std::string_view argument, Device device);
void check_contiguous(const TensorView& view, std::string_view argument);
/// The address is a multiple of `alignment`.
void check_aligned(const void* data, std::string_view argument, std::size_t alignment);

/// True if the memory of two views overlaps. The gaps between rows with a stride are part of it,
/// but for two matrices of one stride, whose columns are compared.
bool overlap(const TensorView& a, const TensorView& b);

}  // namespace fusedmoe::core
