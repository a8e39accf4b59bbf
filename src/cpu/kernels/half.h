// f16 codes to float and back, in the way the compiler does fastest; the same bits in every way but
// the payload of a NaN. Included by isa_*.cpp only.
#pragma once

#include <cstdint>
#include <cstring>

#include "fusedmoe/quant.h"

namespace fusedmoe::cpu {
namespace {

// GCC 12 has _Float16 in C++ on x86 alone; ARM has had __fp16 all along.
#if defined(__ARM_FP16_FORMAT_IEEE)
using Half = __fp16;
#define FUSEDMOE_HAS_HALF
#elif defined(__FLT16_MANT_DIG__) && (defined(__x86_64__) || defined(__clang__) || __GNUC__ >= 13)
using Half = _Float16;
#define FUSEDMOE_HAS_HALF
#endif

#ifdef FUSEDMOE_HAS_HALF
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
#else  // Clang before 15, GCC before 13 on other processors
inline float load_half(std::uint16_t code) {
  return f16_to_f32(code);
}
inline std::uint16_t store_half(float value) {
  return f32_to_f16(value);
}
#endif

}  // namespace
}  // namespace fusedmoe::cpu
