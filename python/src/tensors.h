// Arrays of Python as views, and tensors of the library as arrays. Nothing is copied.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fusedmoe/modular_kernel.h"
#include "gil.h"

namespace fusedmoe::python {

namespace nb = nanobind;

/// What a call uses the memory of; it lives until the call ends. Destroyed with the GIL held.
struct Kept {
  std::vector<std::pair<std::string, nb::object>> objects;  ///< with the arguments' names
  std::vector<nb::ndarray<nb::ro>> arrays;
  std::vector<std::shared_ptr<void>> memory;
};
/// Keeps the memory itself too, whatever becomes of the objects: PyTorch's may get another.
void hold_memory(Kept& kept);

/// View of anything with DLPack or a buffer, of a Tensor of ours, or undefined for None.
TensorView view_of(nb::handle array, const char* name, Kept& kept);
/// The same where the call writes: not of read-only memory.
TensorView output_view_of(nb::handle array, const char* name, Kept& kept);
/// The same as a tensor without an owner.
Tensor tensor_of(nb::handle array, const char* name, Kept& kept);

/// dict[key], or None.
nb::object item(const nb::dict& dict, const char* key);
/// dict[key] as a T, or `otherwise` where it is missing or None.
template <typename T>
T get(const nb::dict& dict, const char* key, T otherwise) {
  const nb::object value = item(dict, key);
  if (!value.is_none() && !nb::try_cast(value, otherwise)) {
    if (std::is_integral_v<T> && !std::is_same_v<T, bool> && nb::isinstance<nb::int_>(value)) {
      throw Error(key, nb::cast<std::string>(nb::str(value)),
                  std::is_unsigned_v<T> ? "a whole number from 0" : "a smaller number");
    }
    constexpr const char* kKind = std::is_same_v<T, bool>       ? "True or False"
                                  : std::is_integral_v<T>       ? "a whole number"
                                  : std::is_floating_point_v<T> ? "a number"
                                                                : "a text";
    throw Error(key, "of type " + nb::cast<std::string>(value.type().attr("__name__")), kKind);
  }
  return otherwise;
}

/// Element type by its short name. Throws Error.
DType dtype_of(const std::string& name, const char* argument);
/// Scratch memory from a Python function that takes the number of bytes and returns an array of u8.
/// Called without the GIL.
Workspace scratch_from(nb::handle function, std::size_t bytes, Device device, Kept& kept);
/// A stream handle of the device, on the CPU one of openmp_stream(); none: the default stream.
std::optional<Stream> stream_of(std::optional<std::uintptr_t> handle, Device device);

/// True for what openmp_stream() of the Python module returned.
bool is_openmp_stream(std::uintptr_t handle);

}  // namespace fusedmoe::python
