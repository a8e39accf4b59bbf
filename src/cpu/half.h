// f16 codes to float and back, in the way the compiler does fastest; the same bits in every way but
// the payload of a NaN. Included by isa_*.cpp only.
#pragma once

#include <cstdint>
#include <cstring>

#include "fusedmoe/quant.h"

namespace fusedmoe::cpu {
namespace {

#if defined(__aarch64__) || defined(__FLT16_MANT_DIG__)
#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif
inline float load_half(std::uint16_t code) {
  Half half;
  std::memcpy(&half, &code, 2);
  return static_cast<float>(half);
}
inline std::uint16_t store_half(float value) {
  const auto half = static_cast<Half>(value);
  std::uint16_t code;
  std::memcpy(&code, &half, 2);
  return code;
}
#else  // Clang before 15 has no _Float16 on most processors
inline float load_half(std::uint16_t code) {
  return f16_to_f32(code);
}
inline std::uint16_t store_half(float value) {
  return f32_to_f16(value);
}
#endif

}  // namespace
}  // namespace fusedmoe::cpu
