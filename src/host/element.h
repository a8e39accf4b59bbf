// The three dtypes of activations, as types: how one element is read and written.
#pragma once

#include <bit>
#include <cstdint>

#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::core {

struct F32Element {
  using Storage = float;
  static float load(Storage value) { return value; }
  static Storage store(float value) { return value; }
};

struct BF16Element {
  using Storage = std::uint16_t;
  // Inline, so that loops over a row vectorize.
  static float load(Storage code) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16);
  }
  static Storage store(float value) { return f32_to_bf16(value); }
};

struct F16Element {
  using Storage = std::uint16_t;
  static float load(Storage code) { return f16_to_f32(code); }
  static Storage store(float value) { return f32_to_f16(value); }
};

/// Calls function(Element{}) for an activation dtype.
template <typename Function>
void dispatch_element(DType dtype, const Function& function) {
  if (dtype == DType::kF32) {
    function(F32Element{});
  } else if (dtype == DType::kBF16) {
    function(BF16Element{});
  } else {
    function(F16Element{});
  }
}

/// Elements below which a loop over rows is not worth waking the threads.
inline constexpr std::int64_t kParallelElements = 32768;

}  // namespace fusedmoe::core
