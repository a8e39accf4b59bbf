// The epilogue of tiles with tokens as rows (token_rows.cuh). A thread finishes its accumulators in
// registers, of all tokens of the tile at a time: so it waits once for what it loads, and once for
// the other row group where they quantize groups together. Lanes that have nothing to store leave
// no loop: ptxas would no longer know that warps are whole, and take the main loop's descriptors to
// uniform registers anew for each instruction.
#pragma once

#include "cuda/device/matrices.cuh"
#include "cuda/mlp/epilogue_groups.cuh"
#include "cuda/sm90/token_rows.cuh"

namespace fusedmoe::cuda::sm90 {

/// To the L2, during the main loop.
template <typename K>
__device__ inline void prefetch_column_factors(const GemmParams& gemm, const WorkTile& tile) {
  constexpr unsigned kFloats = 8;  // of a sector
  const TileThread<K> thread;
  if (thread.index >= K::kColumns / kFloats) return;
  const auto block =
      static_cast<std::int64_t>(tile.expert) * gemm.row_blocks + thread.first_row_block(tile);
  const std::int64_t column = block * kBlockRows + thread.index * kFloats;
  if (column >= (tile.expert + std::int64_t{1}) * gemm.row_blocks * kBlockRows) return;
  if (gemm.scales) prefetch_l2(gemm.scales + column);
  if (gemm.bias) prefetch_l2(gemm.bias + column);
}

/// A thread's values of 64 tokens. Of each slice of 8 weight rows it has (t, r), (t, r + 1),
/// (t + 8, r) and (t + 8, r + 1).
template <typename K>
using TokenBlock = float[K::kAccumulators];

/// Whether a tile has tokens in a block of 64.
__device__ __forceinline__ bool has_tokens(const WorkTile& tile, int block) {
  return block == 0 || block * kBlockRows < tile.num_tokens;
}

/// A number for each of a thread's columns of a row group, `otherwise` where there is no array.
template <typename K>
struct ColumnFactors {
  float2 of_slices[kGroupSlices<K>];

  __device__ __forceinline__ void load(const float* array, const GemmParams& gemm,
                                       const WorkTile& tile, int first_block, float otherwise) {
    const bool is_there = array != nullptr;
#pragma unroll
    for (int b = 0; b < K::kRowBlocks; ++b) {
      const int row_block = min(first_block + b, gemm.row_blocks - 1);
      const auto* from = reinterpret_cast<const float2*>(
          array +
          (static_cast<std::int64_t>(tile.expert) * gemm.row_blocks + row_block) * kBlockRows);
      from += threadIdx.x % 4;
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
        float2& factor = of_slices[b * kSlices + s];
        factor = make_float2(otherwise, otherwise);
        if (is_there) factor = from[4 * s];
      }
    }
  }
};

/// accumulators -> results: times the scales of tokens and weight rows, plus the bias, where there
/// are any. All are loaded before the first is used, as they are far away.
template <typename K>
__device__ __forceinline__ void finish_accumulators(const GemmParams& gemm, const WorkTile& tile,
                                                    int first_block,
                                                    typename K::Accumulators& accumulators) {
  const bool has_token_scales = gemm.token_scales && gemm.token_scale_pitch == 0;
  const bool has_bias = gemm.bias && tile.split == 0, has_columns = gemm.scales || has_bias;
  if (!has_token_scales && !has_columns) return;
  float of_tokens[K::kTokenBlocks][2];
  const int last = tile.num_tokens - 1, first_token = TileThread<K>().token();
#pragma unroll
  for (int t = 0; t < 2 * K::kTokenBlocks; ++t) {
    const int token = min(first_token + t / 2 * kBlockRows + t % 2 * 8, last);
    if (has_token_scales) of_tokens[t / 2][t % 2] = gemm.token_scales[tile.first_row + token];
  }
  ColumnFactors<K> scales, biases;
  scales.load(gemm.scales, gemm, tile, first_block, 1);
  biases.load(has_bias ? gemm.bias : nullptr, gemm, tile, first_block, 0);
#pragma unroll
  for (int b = 0; b < K::kTokenBlocks; ++b) {
    if (!has_tokens(tile, b)) break;
    if (has_token_scales) {
#pragma unroll
      for (int i = 0; i < K::kAccumulators; ++i) accumulators[b][i] *= of_tokens[b][i % 4 / 2];
    }
    if (!has_columns) continue;
#pragma unroll
    for (int i = 0; i < K::kAccumulators; ++i) {
      const float2 scale = scales.of_slices[i / 4], bias = biases.of_slices[i / 4];
      float& value = accumulators[b][i];
      value = i % 2 == 0 ? value * scale.x + bias.x : value * scale.y + bias.y;
    }
  }
}

/// Rounds values of the slices from `begin` on to 16 bits and stages them in a warp's rows.
template <typename K, int kCount>
__device__ __forceinline__ void stage_slices(typename K::Output::Element (*staged)[K::kStagedPitch],
                                             int lane, const float (&values)[kCount], int begin) {
  __syncwarp();  // those before are written
#pragma unroll
  for (int s = 0; s < K::kStagedFeatures / 8; s += 2) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int of_slice = 4 * (begin + s) + 2 * i;
      pairs[i] = K::Output::round(values[of_slice], values[of_slice + 1]);
    }
    store_matrices(&staged[lane % 16][(s + lane / 16) * 8], pairs);
  }
  __syncwarp();
}

/// Rounds values of some slices to 16 bits and writes them to `out`, from `first_feature` on. With
/// `is_gate_up` even slices are gate's features and odd ones up's. Features from the row's width on
/// are left out.
template <typename K, int kCount>
__device__ __forceinline__ void write_slices(SharedMemory<K>& shared, const GemmParams& gemm,
                                             const WorkTile& tile, int first_token,
                                             const float (&values)[kCount], int first_feature,
                                             bool is_gate_up) {
  using Element = typename K::Output::Element;
  constexpr int kWarpTokens = 16, kUnits = K::kStagedFeatures / 8, kTokensAtOnce = 32 / kUnits;
  const TileThread<K> thread;
  const int lane = thread.lane(), unit = lane % kUnits;
  auto* staged = &shared.rows[thread.row_group][thread.warp_token()];
  const int first = first_token + thread.warp_token() + lane / kUnits;
  char* out = static_cast<char*>(gemm.out) +
              (tile.split * gemm.split_pitch + (tile.first_row + first) * gemm.out_pitch) *
                  out_bytes<K>(gemm);
#pragma unroll
  for (int begin = 0; begin < kCount / 4; begin += kUnits) {
    stage_slices<K>(staged, lane, values, begin);
    const int slice = begin + unit;
    const int feature = first_feature + (is_gate_up ? slice / 2 : slice) * 8;
    const int tokens = feature < gemm.width ? tile.num_tokens - first : 0;
    const int column = feature + (is_gate_up && slice % 2 == 1 ? gemm.width : 0);
#pragma unroll
    for (int t = 0; t < kWarpTokens; t += kTokensAtOnce) {
      const uint4 raw = *reinterpret_cast<const uint4*>(&staged[t + lane / kUnits][unit * 8]);
      if (t < tokens) {
        write_staged<K>(gemm, raw, out + (t * gemm.out_pitch + column) * out_bytes<K>(gemm));
      }
    }
  }
}

/// The same in fp32, from registers; nothing is gate's or up's.
template <typename K>
__device__ __forceinline__ void write_slices_f32(const GemmParams& gemm, const WorkTile& tile,
                                                 int first_token, const TokenBlock<K>& values,
                                                 int first_feature) {
  const TileThread<K> thread;
  const int feature = first_feature + thread.lane() % 4 * 2;
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const int token = first_token + thread.token() + 8 * t;
    const int width = token < tile.num_tokens ? gemm.width : 0;
    std::int64_t row = tile.first_row + min(token, tile.num_tokens - 1);
    if (gemm.out_rows) row = gemm.out_rows[row];
    float* out = static_cast<float*>(gemm.out) + tile.split * gemm.split_pitch +
                 row * gemm.out_pitch + feature;
#pragma unroll
    for (int s = 0; s < kGroupSlices<K>; ++s) {
      if (feature + 8 * s < width) {
        *reinterpret_cast<float2*>(out + 8 * s) =
            make_float2(values[4 * s + 2 * t], values[4 * s + 2 * t + 1]);
      }
    }
  }
}

/// The activated values of a thread, rounded. A thread has two tokens, t and t + 8, of each block
/// of 64. Of each token it holds one unit for each row block: 8 features, two of each of four
/// slices.
template <typename K>
struct ActivatedUnits {
  static constexpr int kTokens = 2 * K::kTokenBlocks, kUnits = K::kRowBlocks;
  static_assert(kGroupSlices<K> / 2 == 4 * kUnits);
  uint4 units[kTokens][kUnits];

  __device__ __forceinline__ explicit ActivatedUnits(const typename K::Accumulators& activated) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = &activated[t / 2][4 * (4 * u + i) + 2 * (t % 2)];
          words[i] = K::Output::round(pair[0], pair[1]);
        }
        units[t][u] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
};

/// As read_values(), of bf16. By bits, as ptxas would otherwise take pairs apart that are still
/// needed whole.
__device__ __forceinline__ void read_units(const uint4& unit, UnitValues& values) {
  const std::uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] = make_float2(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & ~0xFFFFU));
  }
}

/// E4M3 codes of the activated values, codes_of(t, values) of each unit -> rows. A warp stages them
/// with two features of each of two slices in 32 bits.
template <typename K, typename CodesOf>
__device__ __forceinline__ void write_codes(SharedMemory<K>& shared, const GemmParams& gemm,
                                            const WorkTile& tile, int first_feature,
                                            const ActivatedUnits<K>& rows,
                                            const CodesOf& codes_of) {
  constexpr int kBytes = kGroupSlices<K> / 2 * 8;  // of a token
  static_assert(kBytes == 64 && K::kTokenBlocks == 2 && K::kStagedPitch * 2 >= 2 * kBytes);
  const TileThread<K> thread;
  const int lane = thread.lane();
  auto* staged = &shared.rows[thread.row_group][thread.warp_token()];
  const auto at = [&](int token, int byte) {
    return reinterpret_cast<std::uint8_t*>(&staged[token]) + byte;
  };
  __syncwarp();  // those before are written
#pragma unroll
  for (int b = 0; b < K::kTokenBlocks; ++b) {
#pragma unroll
    for (int u = 0; u < ActivatedUnits<K>::kUnits; ++u) {
      UnitValues values[2];
      uint2 codes[2];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        read_units(rows.units[2 * b + t][u], values[t]);
        codes[t] = codes_of(2 * b + t, values[t]);
      }
      const std::uint32_t words[4] = {codes[0].x, codes[1].x, codes[0].y, codes[1].y};
      store_matrices(at(lane % 16, b * kBytes + (2 * u + lane / 16) * kUnitBytes), words);
    }
  }
  __syncwarp();
  constexpr int kLanes = 2 * kBytes / kUnitBytes, kTokensAtOnce = 32 / kLanes;
  const int byte = lane % kLanes * kUnitBytes, feature = first_feature + byte % kBytes;
  const int token = byte / kBytes * kBlockRows + thread.warp_token() + lane / kLanes;
  const int tokens = feature < gemm.width ? tile.num_tokens - token : 0;
  char* out = static_cast<char*>(gemm.out) + (tile.first_row + token) * gemm.out_pitch + feature;
#pragma unroll
  for (int t = 0; t < 16; t += kTokensAtOnce) {
    const uint4 raw = *reinterpret_cast<const uint4*>(at(lane / kLanes + t, byte));
    const uint4 codes =
        make_uint4(__byte_perm(raw.x, raw.y, 0x5410), __byte_perm(raw.z, raw.w, 0x5410),
                   __byte_perm(raw.x, raw.y, 0x7632), __byte_perm(raw.z, raw.w, 0x7632));
    if (t < tokens) *reinterpret_cast<uint4*>(out + t * gemm.out_pitch) = codes;
  }
}

/// As store_groups(). The four lanes with a token's features make one scale each of four tokens.
template <typename K>
__device__ __forceinline__ void write_groups(SharedMemory<K>& shared, const GemmParams& gemm,
                                             const WorkTile& tile, int first_feature, int turn,
                                             const ActivatedUnits<K>& rows) {
  constexpr int kLanes = 4, kTokens = ActivatedUnits<K>::kTokens;
  static_assert(kTokens == kLanes && K::Operands::kRowDType == DType::kBF16);
  const TileThread<K> thread;
  float amax[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    amax[t] = 0;
#pragma unroll
    for (int u = 0; u < ActivatedUnits<K>::kUnits; ++u) {
      __nv_bfloat162 largest(0.0F, 0.0F);
      take_larger(rows.units[t][u], largest);
      // Behind the last row block values are anything.
      if (thread.first_row_block(tile) + u < gemm.row_blocks) {
        amax[t] = fmaxf(amax[t], larger(largest));
      }
    }
  }
  const int own = thread.lane() % kLanes;
  const int token = thread.token() + own / 2 * kBlockRows + own % 2 * 8;
  const float group_amax = exchange_amax(shared, WarpgroupCoords<K>{thread.row_group}, turn, token,
                                         largest_of_lanes<kLanes>(amax));
  const float own_scale = core::e4m3_group_scale(group_amax, gemm.out_power_of_two);
  const float own_inverse = 1.0F / own_scale;
  if (thread.row_group == 0 && token < tile.num_tokens && tile.row_block < gemm.row_blocks) {
    gemm.out_scales[tile.row_block / kBlocksOfGroup * gemm.out_scale_pitch + tile.first_row +
                    token] = own_scale;
  }
  write_codes(shared, gemm, tile, first_feature, rows, [&](int t, UnitValues& values) {
    const float scale = __shfl_sync(~0U, own_scale, t, kLanes);
    const float inverse = __shfl_sync(~0U, own_inverse, t, kLanes);
    return divide_to_fp8(values, scale, inverse);
  });
}

/// Activates gate and up, whose slices alternate, in place: activated value i overwrites value i,
/// which no later one reads, as gate is at least i.
template <typename K>
__device__ __forceinline__ void activate_accumulators(const FusedMlpParams& p, const WorkTile& tile,
                                                      typename K::Accumulators& accumulators) {
  call_for_gated(p.activation, [&](const ResolvedActivation& known) {
#pragma unroll
    for (int b = 0; b < K::kTokenBlocks; ++b) {
      if (!has_tokens(tile, b)) break;
#pragma unroll
      for (int i = 0; i < K::kAccumulators / 2; ++i) {
        const int gate = i / 4 * 8 + i % 4;
        accumulators[b][i] = activate(known, accumulators[b][gate], accumulators[b][gate + 4]);
      }
    }
  });
}

/// The same of an activation that is not gated. One copy of the code handles all blocks of 64
/// tokens: they move on until they are back in their places.
template <typename K>
__device__ __forceinline__ void activate_gates(const FusedMlpParams& p,
                                               typename K::Accumulators& accumulators) {
  static_assert(K::kTokenBlocks == 2);
#pragma unroll 1
  for (int b = 0; b < K::kTokenBlocks; ++b) {
    call_for_not_gated(p.activation, [&](const ResolvedActivation& known) {
#pragma unroll
      for (float& value : accumulators[0]) value = activate_gate(known, value);
    });
#pragma unroll
    for (int i = 0; i < K::kAccumulators; ++i) {
      const float value = accumulators[0][i];
      accumulators[0][i] = accumulators[1][i];
      accumulators[1][i] = value;
    }
  }
}

template <typename K>
__device__ __forceinline__ void store_activated(SharedMemory<K>& shared, const FusedMlpParams& p,
                                                const WorkTile& tile, int first_feature, int turn,
                                                typename K::Accumulators& accumulators) {
  const GemmParams& gemm = p.gemms[tile.gemm];
  activate_accumulators<K>(p, tile, accumulators);
  if constexpr (K::kStoresGroups || K::kStoresCodes) {
    if (K::kStoresGroups ? gemm.out_scales != nullptr : gemm.out_e4m3) {
      const ActivatedUnits<K> rows(accumulators);
      if constexpr (K::kStoresGroups) {
        write_groups(shared, gemm, tile, first_feature, turn, rows);
      } else {
        write_codes(shared, gemm, tile, first_feature, rows, [&](int, UnitValues& values) {
          return multiply_to_fp8(values, gemm.out_factor);
        });
      }
      return;
    }
  }
#pragma unroll
  for (int b = 0; b < K::kTokenBlocks; ++b) {
    if (has_tokens(tile, b)) {
      const auto& activated =
          reinterpret_cast<const float(&)[K::kAccumulators / 2]>(accumulators[b]);
      write_slices(shared, gemm, tile, b * kBlockRows, activated, first_feature, false);
    }
  }
}

/// As store_tile(). `turn` alternates from tile to tile.
template <typename K>
__device__ inline void store_token_rows(SharedMemory<K>& shared, const FusedMlpParams& p,
                                        const WorkTile& tile, int turn,
                                        typename K::Accumulators& accumulators) {
  static_assert(!K::Output::kQuantizes && !K::Output::kWeightsRows);
  const GemmParams& gemm = p.gemms[tile.gemm];
  const int first_block = TileThread<K>().first_row_block(tile);
  const int first_row = first_block * kBlockRows;
  finish_accumulators<K>(gemm, tile, first_block, accumulators);
  if (gemm.epilogue == Epilogue::kActivate) {
    return store_activated(shared, p, tile, first_row / 2, turn, accumulators);
  }
  if (gemm.out_f32) {
#pragma unroll
    for (int b = 0; b < K::kTokenBlocks; ++b) {
      if (has_tokens(tile, b)) {
        write_slices_f32<K>(gemm, tile, b * kBlockRows, accumulators[b], first_row);
      }
    }
    return;
  }
  if (gemm.epilogue == Epilogue::kActivateGate) activate_gates<K>(p, accumulators);
  const bool is_gate_up = gemm.epilogue == Epilogue::kStoreGateUp;
#pragma unroll
  for (int b = 0; b < K::kTokenBlocks; ++b) {
    if (has_tokens(tile, b)) {
      write_slices(shared, gemm, tile, b * kBlockRows, accumulators[b],
                   is_gate_up ? first_row / 2 : first_row, is_gate_up);
    }
  }
}

}  // namespace fusedmoe::cuda::sm90
