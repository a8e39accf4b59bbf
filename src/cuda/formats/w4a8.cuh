// Operands of INT4 weights with E4M3 scales per 128 of K, and FP8 activations: a weight is
// e4m3((code - 8) * scale), looked up in registers, and is the tensor cores' operand A, in
// registers.
#pragma once

#include <cuda_fp8.h>

#include "cuda/device/e4m3_convert.cuh"
#include "cuda/formats/activations.cuh"
#include "cuda/formats/codes.h"
#include "cuda/formats/packed_block.h"
#include "cuda/formats/w4a8_table.h"

namespace fusedmoe::cuda {

/// Base of the policies of 4-bit weights that are decoded to E4M3, with FP8 activations and one
/// scale for each token row.
struct DecodedFp8Operands {
  using Activation = __nv_fp8_e4m3;
  using Output = RoundedOutput<__nv_bfloat16>;
  static constexpr DType kRowDType = DType::kBF16;
  static constexpr int kInstructionK = 32;
  using Layout = W4a8Codes;
  static constexpr int kBlockK = 128;
  static constexpr int kCodeBytes = kBlockRows * kBlockK / 2;
  /// K blocks between promotions: 512 of K. vLLM's kernels for these formats never promote.
  static constexpr int kPromotedBlocks = 4;
  /// Whether K blocks have scales, by which promoted sums are multiplied.
  static constexpr bool kHasKScales = false;
  using Tables = NoTables;
  static constexpr bool kDecodes = true;

  /// A thread's code words of half a packed block, two steps: of row g and g + 8, then of the next
  /// step.
  template <typename Block>
  __device__ static uint4 words(const Block& block, int thread, int half) {
    return block.template read<uint4>((half * 128 + thread) * 16);
  }
  /// Where the scales of a thread's two rows lie, `bytes` for each row.
  __device__ static int scales_offset(int thread, int bytes) {
    return kCodeBytes + (thread / 32 * 8 + thread % 32 / 4) * 2 * bytes;
  }
};

/// The codes of a block are followed by its scales: for each w and g (codes.h) the E4M3 scales of
/// the rows g and g + 8 of warp w.
struct W4a8Operands : DecodedFp8Operands {
  static constexpr const WeightFormat& kFormat = formats::kW4a8;
  static constexpr int kGroupK = 128, kGroups = 1;
  static constexpr PackedBlock kBlock{kCodeBytes + kBlockRows, kBlockK};
  static constexpr int kFixedExponent = 0;

  /// By the E4M3 codes of scales.
  struct Tables {
    W4a8Table of_scale[256];

    __device__ void make(int thread, int num_threads) {
      for (int i = thread; i < 256; i += num_threads) of_scale[i] = table(i);
    }
    /// 1 to 8 times a scale, rounded.
    __device__ static W4a8Table table(int scale) {
      const float value = __low2float(from_e4m3(scale));
      std::uint32_t words[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t codes = to_e4m3(value * (2.0F * i + 1), value * (2.0F * i + 2));
        words[i / 2] = i % 2 == 0 ? codes : words[i / 2] | codes << 16;
      }
      return W4a8Table::of_multiples(words[0], words[1]);
    }
  };

  /// The E4M3 codes of a thread's two rows.
  using Scales = std::uint32_t;
  template <typename Block>
  __device__ static Scales load_scales(const Block& block, int thread) {
    return block.template read<std::uint16_t>(scales_offset(thread, 1));
  }
  /// Where a thread of 128 finds its words and the tables of its rows. It reads them when it
  /// decodes the words: no registers are left to keep them in.
  struct Codes {
    StagedBlock block;
    int thread;
    const W4a8Table *row, *next;
  };
  __device__ static Codes load(const StagedBlock& block, int thread, const Tables& tables) {
    const Scales both = load_scales(block, thread);
    return {block, thread, &tables.of_scale[both & 0xFF], &tables.of_scale[both >> 8]};
  }
  /// -> the register operands of a step of 32 of K; `of_half`: the words of its half of the block.
  __device__ static void decode_step(const Codes& codes, const uint4& of_half, int step,
                                     std::uint32_t (&a)[4]) {
    decode_step(of_half, *codes.row, *codes.next, step, a);
  }
  /// -> those of both steps of a half.
  __device__ static void decode(const uint4& of_half, Scales both, const Tables& tables,
                                int /*half*/, std::uint32_t (&a)[2][4]) {
    for (int step = 0; step < 2; ++step) {
      decode_step(of_half, tables.of_scale[both & 0xFF], tables.of_scale[both >> 8], step, a[step]);
    }
  }

 private:
  __device__ static void decode_step(const uint4& of_half, const W4a8Table& row,
                                     const W4a8Table& next, int step, std::uint32_t (&a)[4]) {
    row.decode(step % 2 == 0 ? of_half.x : of_half.z, a[0], a[2]);
    next.decode(step % 2 == 0 ? of_half.y : of_half.w, a[1], a[3]);
  }
};

}  // namespace fusedmoe::cuda
