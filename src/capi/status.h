// The edge of the C interface: exceptions become statuses, structs are read and written up to the
// size that the caller's version of them has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "fusedmoe.h"
#include "fusedmoe/error.h"

namespace fusedmoe::capi {

/// Keeps what the exception in flight says for fusedmoe_last_error(); returns its status.
fusedmoe_status keep_current_exception() noexcept;

/// Calls `body`; what it throws becomes a status.
template <typename Body>
fusedmoe_status guarded(Body&& body) noexcept {
  try {
    body();
    return FUSEDMOE_OK;
  } catch (...) {
    return keep_current_exception();
  }
}

/// Throws Error unless the pointer is given; returns what it points to.
template <typename T>
T& given(T* pointer, const char* name) {
  if (!pointer) throw Error(name, "NULL", "given", Fault::kNull);
  return *pointer;
}

/// Throws Error unless `struct_size` can be that of a struct of `known` bytes or a newer version.
void check_struct_size(std::size_t struct_size, std::size_t known, const char* name);
/// The same, and where the struct is newer, what this library does not know must be 0.
void check_unknown_members(const void* data, std::size_t struct_size, std::size_t known,
                           const char* name);

/// The caller's struct; members that its version lacks are 0. NULL: all are.
template <typename T>
T read_struct(const T* in, const char* name) {
  static_assert(std::is_trivially_copyable_v<T> && offsetof(T, struct_size) == 0);
  T result{};
  if (!in) return result;
  check_unknown_members(in, in->struct_size, sizeof(T), name);
  std::memcpy(&result, in, std::min(in->struct_size, sizeof(T)));
  return result;
}

/// The same where NULL is an error.
template <typename T>
T read_given_struct(const T* in, const char* name) {
  return read_struct(&given(in, name), name);
}

/// Fills what the caller's version of the struct has.
template <typename T>
void write_struct(T* out, T values, const char* name) {
  static_assert(std::is_trivially_copyable_v<T> && offsetof(T, struct_size) == 0);
  const std::size_t size = given(out, name).struct_size;
  check_struct_size(size, sizeof(T), name);
  values.struct_size = size;
  std::memcpy(out, &values, std::min(size, sizeof(T)));
}

}  // namespace fusedmoe::capi
