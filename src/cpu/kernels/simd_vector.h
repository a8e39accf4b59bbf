// What the instruction-set policies share, written with GCC vector extensions: they differ in the
// vector width and in the operations that they replace by instructions of their own. Included by
// isa_*.cpp only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/kernels/half.h"

namespace fusedmoe::cpu {
namespace {

template <int kLanes>
struct VectorTypes {
  typedef float F __attribute__((vector_size(kLanes * 4)));
  typedef std::int32_t I __attribute__((vector_size(kLanes * 4)));
  typedef std::uint32_t U __attribute__((vector_size(kLanes * 4)));
  typedef float Unaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
  typedef std::int32_t UnalignedI __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
};

template <int kLanes>
struct SimdVector {
  using F = typename VectorTypes<kLanes>::F;
  using I = typename VectorTypes<kLanes>::I;
  static constexpr int kWidth = kLanes;

  static F load(const float* p) {
    return *reinterpret_cast<const typename VectorTypes<kLanes>::Unaligned*>(p);
  }
  static void store(float* p, F value) {
    *reinterpret_cast<typename VectorTypes<kLanes>::Unaligned*>(p) = value;
  }
  static F set1(float value) { return F{} + value; }
  /// b where either is not a number.
  static F min(F a, F b) { return a < b ? a : b; }
  static F max(F a, F b) { return a > b ? a : b; }
  /// Whether a > b in any lane.
  static bool any_greater(F a, F b) {
    const I greater = a > b;
    bool any = false;
    for (int i = 0; i < kLanes; ++i) any |= greater[i] != 0;
    return any;
  }
  /// To the nearest integer, ties to even; |x| < 2^22.
  static F round(F x) {
    const F magic = set1(12582912.0f);  // 1.5 * 2^23
    return (x + magic) - magic;
  }
  /// x * 2^n for integral n in [-126, 127]; 2^128 counts as infinity.
  static F scale_by_power_of_two(F x, F n) {
    const I bits = (__builtin_convertvector(n, I) + 127) << 23;
    return x * reinterpret_cast<F>(bits);
  }

  // ---- 32-bit words, and values of fewer bits widened to them ----

  static I set1_words(std::int32_t value) { return I{} + value; }
  static I load_words(const std::byte* p) {
    return *reinterpret_cast<const typename VectorTypes<kLanes>::UnalignedI*>(p);
  }
  static void store_words(std::byte* p, I words) {
    *reinterpret_cast<typename VectorTypes<kLanes>::UnalignedI*>(p) = words;
  }
  static I load_u8(const std::byte* p) {
    I result;
    for (int i = 0; i < kLanes; ++i) result[i] = static_cast<std::uint8_t>(p[i]);
    return result;
  }
  static I load_u16(const std::byte* p) {
    std::uint16_t codes[kLanes];
    std::memcpy(codes, p, sizeof(codes));
    I result;
    for (int i = 0; i < kLanes; ++i) result[i] = codes[i];
    return result;
  }
  static F load_f16(const std::byte* p) {
    F result;
    for (int i = 0; i < kLanes; ++i) {
      std::uint16_t code;
      std::memcpy(&code, p + 2 * i, 2);
      result[i] = load_half(code);
    }
    return result;
  }
  static F load_bf16(const std::byte* p) { return as_float(load_u16(p) << 16); }
  /// Modulo 2^32, as for four bytes whose sums fit: a signed addition must not overflow.
  static I add(I a, I b) {
    using U = typename VectorTypes<kLanes>::U;
    return (I)((U)a + (U)b);
  }
  static I subtract(I a, I b) {
    using U = typename VectorTypes<kLanes>::U;
    return (I)((U)a - (U)b);
  }
  static F as_float(I bits) { return reinterpret_cast<F>(bits); }
  static F to_float(I integers) { return __builtin_convertvector(integers, F); }
  /// In each lane: if_true where the condition's bits are all set, if_false where none is.
  static I select(I condition, I if_true, I if_false) {
    return (condition & if_true) | (~condition & if_false);
  }

  /// Rounds to nearest even; NaN stays NaN.
  static void to_bf16(std::uint16_t* codes, F value) {
    const I bits = reinterpret_cast<I>(value);
    const I rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const I quiet = (bits >> 16) | 0x40;
    const I code = value == value ? rounded : quiet;
    for (int i = 0; i < kLanes; ++i) codes[i] = static_cast<std::uint16_t>(code[i]);
  }
  static void to_f16(std::uint16_t* codes, F value) {
    for (int i = 0; i < kLanes; ++i) codes[i] = store_half(value[i]);
  }
};

}  // namespace
}  // namespace fusedmoe::cpu
