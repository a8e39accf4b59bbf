// What operands of one activation element type share, and the epilogue's policy for it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "cuda/formats/weight_formats.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// What is known of an element: its dtype, and how two fp32 results are rounded to a pair.
template <typename Element>
struct ElementTraits;
template <>
struct ElementTraits<__nv_bfloat16> {
  static constexpr DType kDType = DType::kBF16;
  __device__ static __nv_bfloat162 round(float low, float high) {
    return __floats2bfloat162_rn(low, high);
  }
};
template <>
struct ElementTraits<__half> {
  static constexpr DType kDType = DType::kF16;
  __device__ static __half2 round(float low, float high) { return __floats2half2_rn(low, high); }
};

template <>
struct ElementTraits<__nv_fp8_e4m3> {
  static constexpr DType kDType = DType::kE4M3;
};

/// The epilogue's policy for results that leave as 16-bit elements. An output quantizer is another
/// such policy.
template <typename ElementT>
struct RoundedOutput {
  using Element = ElementT;
  /// Whether GEMM 2 applies router weights before it rounds: f16 overflows at 65504, where the
  /// weighted result may be finite.
  static constexpr bool kWeightsRows = ElementTraits<Element>::kDType == DType::kF16;
  static constexpr bool kQuantizes = false;
  /// Two results.
  __device__ static std::uint32_t round(float low, float high) {
    const auto pair = ElementTraits<Element>::round(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
};

/// The same where the rows that leave GEMM 1 may be quantized and decoded again (RowQuantizer).
template <typename ElementT>
struct QuantizedOutput : RoundedOutput<ElementT> {
  static constexpr bool kQuantizes = true;
};

/// A policy whose decoder needs no tables. Others have tables in shared memory: the threads of a
/// thread block make them once.
struct NoTables {
  __device__ void make(int /*thread*/, int /*num_threads*/) {}
};

/// Base of the policies of operands with 16-bit activations.
template <typename Element>
struct Operands16Bit {
  using Activation = Element;
  using Output = RoundedOutput<Element>;
  static constexpr DType kRowDType = ElementTraits<Element>::kDType;
  static constexpr int kInstructionK = 16;  ///< of one instruction
  static constexpr int kBlockK = 64;        ///< activations of a K block are 128 bytes
  /// Whether K blocks have scales, by which promoted sums are multiplied.
  static constexpr bool kHasKScales = false;
  using Tables = NoTables;
};

/// Base of those whose weights are decoded in registers. Activations that were quantized are
/// decoded again to bf16, which holds them exactly.
template <typename Element, int kCodeBits, bool kQuantizesBf16 = false>
struct DecodedOperands : Operands16Bit<Element> {
  using Output = std::conditional_t<kQuantizesBf16 && std::is_same_v<Element, __nv_bfloat16>,
                                    QuantizedOutput<Element>, RoundedOutput<Element>>;
  static constexpr bool kDecodes = true;
  /// Decoded weights are to be multiplied by 2 to the power of it.
  static constexpr int kFixedExponent = 0;
};

}  // namespace fusedmoe::cuda
