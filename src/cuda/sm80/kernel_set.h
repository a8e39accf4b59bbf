// Which kernels there are of mma.sync of each weight format: a row of the table is a policy's tile
// shapes.
#pragma once

#include <array>
#include <span>

#include "cuda/formats/weight_formats.h"
#include "cuda/mlp/kernel_config.h"
#include "cuda/sm80/tiles.h"

namespace fusedmoe::cuda::sm80 {

inline constexpr std::array kKernelSets = {
    KernelSet{&formats::kBf16, kTilesAsIs},
    KernelSet{&formats::kF16, kTilesAsIs},
    KernelSet{&formats::kFp8, kTilesFp8},
    KernelSet{&formats::kFp8Rows, kTilesFp8},
    KernelSet{&formats::kFp8F16, kTilesFp8},
    KernelSet{&formats::kInt8Rows, kTilesAsIs},
    KernelSet{&formats::kInt8RowsF16, kTilesAsIs},
    KernelSet{&formats::kW4a8, kTilesDecodedFp8},
    KernelSet{&formats::kMxfp4Fp8, kTilesDecodedFp8},
    KernelSet{&formats::kMxfp4Bf16, kTiles4Bit},
    KernelSet{&formats::kMxfp4Quantized, kTiles4Bit},
    KernelSet{&formats::kMxfp4F16, kTiles4Bit},
    KernelSet{&formats::kNvfp4Bf16, kTiles4Bit},
    KernelSet{&formats::kNvfp4F16, kTiles4Bit},
    KernelSet{&formats::kInt4Symmetric, kTiles4Bit},
    KernelSet{&formats::kInt4G32Symmetric, kTiles4Bit},
    KernelSet{&formats::kInt4Bf16, kTiles4Bit},
    KernelSet{&formats::kInt4F16, kTiles4Bit},
    KernelSet{&formats::kInt4G32Bf16, kTiles4Bit},
    KernelSet{&formats::kInt4G32F16, kTiles4Bit},
    KernelSet{&formats::kInt8Bf16, kTiles8Bit},
    KernelSet{&formats::kInt8F16, kTiles8Bit},
    KernelSet{&formats::kDecodedE4m3, kTiles8Bit},
    KernelSet{&formats::kScaledE4m3, kTiles8Bit},
};

/// Those that multiply FP8 as it is; other formats have no kernels besides the above. The sums of a
/// K block are apart from those of all before it, which leaves no registers for 128 tokens.
inline constexpr std::span kTilesFp8AsIs = std::span(kTilesAsIs).first<4>();
inline constexpr std::array kNativeFp8Sets = {
    KernelSet{&formats::kFp8, kTilesFp8AsIs, Fp8::kNative},
    KernelSet{&formats::kFp8Rows, kTilesFp8AsIs, Fp8::kNative},
    KernelSet{&formats::kFp8F16, kTilesFp8AsIs, Fp8::kNative},
    KernelSet{&formats::kW4a8, kTiles8Bit, Fp8::kNative},
    KernelSet{&formats::kMxfp4Fp8, kTiles8Bit, Fp8::kNative},
};

/// Without tiles where there are no kernels of the format.
constexpr KernelSet kernel_set(const WeightFormat& format, Fp8 fp8) {
  return fp8 == Fp8::kNative ? row_of_format(kNativeFp8Sets, format)
                             : row_of_format(kKernelSets, format);
}

}  // namespace fusedmoe::cuda::sm80
