// Quantization of one row of activations, as prepare and the experts do it; see
// fusedmoe/quant.h for the formats.
#pragma once

#include <cstdint>
#include <optional>

#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::core {

/// Whether quantize() knows the key.
bool has_quantizer(const QuantKey& key);

/// Whether values are int8 or int16.
bool is_integer(const QuantKey& key);

/// Scales of one row of `count` elements: 1 or one per group.
std::int64_t scales_per_row(const QuantKey& key, std::int64_t count);

/// x[0 .. count) to codes (of key.value; e2m1 packed) and scales_per_row scales of key.scale.
/// `scale`: of the tensor for keys per tensor, dynamic or not (then scales is not written); the
/// global scale (multiplier) of NVFP4; ignored otherwise. The CPU's kernels have the same with
/// instructions of their level (cpu::Kernels).
void quantize_row(const float* x, std::int64_t count, const QuantKey& key, float scale,
                  std::uint8_t* codes, void* scales);

/// What quantize() writes.
struct QuantizedViews {
  TensorView values, scales;
};
/// fusedmoe::quantize() on the threads of an executor.
void quantize(Executor& executor, const TensorView& x, const QuantKey& key,
              std::optional<float> scale, const QuantizedViews& out);

/// The inverse: out (rows, cols), f32, bf16 or f16, = rnd(code * scale), the product rounded to f32
/// first; f16 saturates. Quantizing `out` with the key again gives the same values (code * scale),
/// of f16 but for what is subnormal there. All but NVFP4.
void dequantize(Executor& executor, const QuantizedViews& in, const QuantKey& key,
                const TensorView& out);

/// Whether rows can be quantized and dequantized on CUDA, too (cuda/rows/quantize_rows.cu).
bool has_cuda_quantizer(const QuantKey& key);

/// Largest magnitude; NaN counts as 0.
float amax(const float* x, std::int64_t count);

/// The dynamic scale of a tensor (e4m3 per tensor) whose largest magnitude is `amax`.
float tensor_scale(float amax);

/// The global scale (multiplier of the block scales) of an NVFP4 tensor whose largest magnitude is
/// `amax`; 1 where that would have no reciprocal.
float nvfp4_global_scale(float amax);

/// What the integers of one of llama.cpp's blocks reach.
struct BlockFormat {
  QuantKey key;
  float codes;   ///< the largest code of the file, from 0 on
  float middle;  ///< the one that stands for 0 where there are no zero points
  float scales;  ///< the largest scale or zero point
  int shift;     ///< from a code of the file to that of WeightMatrix
};
/// Null for a key that is none of theirs.
const BlockFormat* find_block_format(const QuantKey& key);

/// Where the scales of one of llama.cpp's blocks go: one or two f16 factors, and one byte for each
/// group.
struct BlockScales {
  std::uint16_t* factors;
  std::uint8_t* scales;
  std::uint8_t* zero_points;  ///< of keys that have them
};

/// Quantizes up to a block of weights of one row: a byte for each code.
void quantize_block(const float* x, std::int64_t count, const QuantKey& key, std::uint8_t* codes,
                    const BlockScales& out);

/// The IQ4 code whose integer is nearest to `value`; of two the one nearer to 0.
std::uint8_t iq4_code(float value);

}  // namespace fusedmoe::core
