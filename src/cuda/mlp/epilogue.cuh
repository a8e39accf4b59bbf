// The epilogue of the fused MLP kernel: accumulators -> scale, bias, activation -> rows.
//
// wgmma and mma.sync leave a thread the accumulators of two neighbouring tokens for weight rows r
// and r + 8, of a gated w13 gate and up of one feature. There they become results. Rows of the
// operands' elements then pass through shared memory, as threads next to each other hold features
// of one token only 8 apart. How results become elements is the epilogue's own policy,
// Operands::Output.
#pragma once

#include "cuda/device/cp_async.cuh"
#include "cuda/device/matrices.cuh"
#include "cuda/mlp/work_tile.cuh"
#include "cuda/rows/activation.cuh"
#include "cuda/rows/row_transform.cuh"

namespace fusedmoe::cuda {

// Tokens are finished a chunk at a time, 8 together as wgmma has them. Of each 8, a thread has
// numbers (row r, token t), (r, t + 1), (r + 8, t), (r + 8, t + 1).
template <typename K>
inline constexpr int kEights = K::kChunkTokens / 8;
template <typename K>
inline constexpr int kChunks = K::kMaxTokens / K::kChunkTokens;
template <typename K>
using Chunk = float[4 * kEights<K>];
/// As the tensor cores leave them.
template <typename K>
using Sums = typename K::Sum[4 * kEights<K>];

/// Row blocks that a warpgroup stores, at most, and the first of a tile.
template <typename K>
inline constexpr int kStoredRowBlocks = K::kStoredRowBlocks;
template <typename K>
__device__ inline int first_row_block(const WorkTile& tile, const WarpgroupCoords<K>& coords) {
  return tile.row_block + coords.row_group() * K::kRowBlocks;
}
/// Weight row r of a thread in its row block.
template <typename K>
__device__ inline int weight_row(const WarpgroupCoords<K>& coords) {
  return coords.thread() / 32 * 16 + coords.thread() % 32 / 4;
}

/// What a thread's accumulators are multiplied by, and what is added in each row block for r and
/// r + 8.
template <typename K>
struct ScaleAndBias {
  float scale[kStoredRowBlocks<K>][2];
  float bias[kStoredRowBlocks<K>][2] = {};
};

/// Calls function(b, place of row r in scales and biases) for the thread's row blocks b.
template <typename K, typename Function>
__device__ __forceinline__ void for_rows(const GemmParams& gemm, const WorkTile& tile,
                                         const WarpgroupCoords<K>& coords,
                                         const Function& function) {
  const int first = first_row_block(tile, coords);
#pragma unroll
  for (int b = 0; b < kStoredRowBlocks<K>; ++b) {
    if (first + b >= gemm.row_blocks) return;
    const auto block = static_cast<std::int64_t>(tile.expert) * gemm.row_blocks + first + b;
    function(b, block * kBlockRows + weight_row(coords));
  }
}

/// To the L2, during the main loop: there are no registers to keep them in.
template <typename K>
__device__ inline void prefetch_scale_and_bias(const GemmParams& gemm, const WorkTile& tile,
                                               const WarpgroupCoords<K>& coords) {
  if (!gemm.scales && !gemm.bias) return;
  for_rows(gemm, tile, coords, [&](int, std::int64_t row) {
    if (gemm.scales) prefetch_l2(gemm.scales + row);
    if (gemm.bias) prefetch_l2(gemm.bias + row);
  });
}

template <typename K>
__device__ inline ScaleAndBias<K> read_scale_and_bias(const GemmParams& gemm, const WorkTile& tile,
                                                      const WarpgroupCoords<K>& coords) {
  ScaleAndBias<K> factors;
#pragma unroll
  for (int b = 0; b < kStoredRowBlocks<K>; ++b) factors.scale[b][0] = factors.scale[b][1] = 1;
  for_rows(gemm, tile, coords, [&](int b, std::int64_t row) {
    if (gemm.scales) {
      factors.scale[b][0] = gemm.scales[row];
      factors.scale[b][1] = gemm.scales[row + 8];
    }
    if (gemm.bias && tile.split == 0) {
      factors.bias[b][0] = gemm.bias[row];
      factors.bias[b][1] = gemm.bias[row + 8];
    }
  });
  return factors;
}

/// A named barrier, across which the compiler also moves no accesses. CUTLASS leaves 8 of the 16 to
/// others; its own function knows no GPU before Hopper.
__device__ inline void sync_threads(int count, int barrier) {
  constexpr int kFirst = 8;
  asm volatile("bar.sync %0, %1;" ::"r"(kFirst + barrier), "r"(count) : "memory");
}
/// The named barrier of a storing warpgroup.
template <typename K>
__device__ inline void sync_warpgroup(const WarpgroupCoords<K>& coords) {
  static_assert(K::kRowGroups <= 8);
  sync_threads(128, coords.row_group());
}

/// Accumulators of a chunk by its number, chunks of the first row block before those of the next.
/// Registers have no index, so it is looked for among [kBegin, kEnd).
template <typename K, int kBegin = 0, int kEnd = K::kRowBlocks* kChunks<K>>
__device__ __forceinline__ void read_accumulators(const typename K::Accumulators& accumulators,
                                                  int chunk, Sums<K>& sums) {
  if constexpr (kEnd - kBegin > 1) {
    constexpr int kMiddle = (kBegin + kEnd) / 2;
    if (chunk < kMiddle) {
      read_accumulators<K, kBegin, kMiddle>(accumulators, chunk, sums);
    } else {
      read_accumulators<K, kMiddle, kEnd>(accumulators, chunk, sums);
    }
  } else {
    constexpr int kBlock = kBegin / kChunks<K>, kFirst = kBegin % kChunks<K> * 4 * kEights<K>;
#pragma unroll
    for (int i = 0; i < 4 * kEights<K>; ++i) sums[i] = accumulators[kBlock][kFirst + i];
  }
}

/// The same of those that were published: partial accumulators of all K groups, added in order.
template <typename K>
__device__ inline void read_partials(const SharedMemory<K>& shared, int chunk, Sums<K>& sums) {
  const int first = chunk % kChunks<K> * 4 * kEights<K>;
  const auto* partials = &shared.partials[chunk / kChunks<K> * K::kKGroups];
#pragma unroll
  for (int k = 0; k < K::kKGroups; ++k) {
#pragma unroll
    for (int i = 0; i < 4 * kEights<K>; ++i) {
      const auto partial = partials[k][first + i][WarpgroupCoords<K>::thread()];
      sums[i] = k == 0 ? partial : sums[i] + partial;
    }
  }
}

/// Of row block b.
template <typename K>
__device__ __forceinline__ void scale_and_add(const ScaleAndBias<K>& factors, int b,
                                              Chunk<K>& values) {
  float scale[2] = {factors.scale[0][0], factors.scale[0][1]};
  float bias[2] = {factors.bias[0][0], factors.bias[0][1]};
#pragma unroll
  for (int i = 1; i < kStoredRowBlocks<K>; ++i) {  // registers have no index
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = b == i ? factors.scale[i][r] : scale[r];
      bias[r] = b == i ? factors.bias[i][r] : bias[r];
    }
  }
#pragma unroll
  for (int i = 0; i < 4 * kEights<K>; ++i) {
    values[i] = values[i] * scale[i % 4 / 2] + bias[i % 4 / 2];
  }
}

/// One scale for each token of a chunk, where rows were quantized so.
template <typename K>
struct TokenScales {
  float scales[kEights<K>][2];

  /// Of the tokens from `first` on.
  __device__ __forceinline__ void read(const GemmParams& gemm, const WorkTile& tile,
                                       const WarpgroupCoords<K>& coords, int first) {
#pragma unroll
    for (int n = 0; n < kEights<K>; ++n) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int token = min(first + 8 * n + coords.thread() % 4 * 2 + t, tile.num_tokens - 1);
        scales[n][t] = gemm.token_scales[tile.first_row + token];
      }
    }
  }
  __device__ __forceinline__ void apply(Chunk<K>& values) const {
#pragma unroll
    for (int i = 0; i < 4 * kEights<K>; ++i) values[i] *= scales[i / 4][i % 2];
  }
};

/// The last GEMM's results times the router weights of their rows, where the caller asks for it.
template <typename K>
__device__ __forceinline__ void apply_router_weights(const FusedMlpParams& p, const WorkTile& tile,
                                                     const WarpgroupCoords<K>& coords, int first,
                                                     Chunk<K>& values) {
  if (!p.topk_weights || tile.gemm + 1 < p.num_gemms) return;
#pragma unroll
  for (int n = 0; n < kEights<K>; ++n) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      // Without a branch, so that the loads of all tokens are on their way at once.
      const int token = min(first + 8 * n + coords.thread() % 4 * 2 + t, tile.num_tokens - 1);
      const float weight = p.topk_weights[p.row_slots[tile.first_row + token]];
      values[4 * n + t] *= weight;
      values[4 * n + 2 + t] *= weight;
    }
  }
}

template <typename K>
using StagedRows = typename K::Output::Element[K::kChunkTokens][K::kStagedPitch];

/// Features of gate and up -> `rows` of the activated ones, from `feature` on.
template <typename K>
__device__ inline void stage_activated(const ResolvedActivation& activation,
                                       const WarpgroupCoords<K>& coords, const Chunk<K>& values,
                                       int feature, StagedRows<K>& rows) {
  const int warp = coords.thread() / 32, lane = coords.thread() % 32;
  std::uint32_t pairs[kEights<K>];
  call_for_gated(activation, [&](const ResolvedActivation& known) {
#pragma unroll
    for (int n = 0; n < kEights<K>; ++n) {
      const float* v = &values[4 * n];
      pairs[n] = K::Output::round(activate(known, v[0], v[2]), activate(known, v[1], v[3]));
    }
  });
#pragma unroll
  for (int n = 0; n < kEights<K>; n += 2) {
    store_transposed(&rows[8 * n + lane % 16][feature + warp * 8], pairs[n], pairs[n + 1]);
  }
}

/// Weight rows r and r + 8 -> `rows`, features `distance` apart.
template <typename K>
__device__ inline void stage_both(const WarpgroupCoords<K>& coords, const Chunk<K>& values,
                                  int feature, int distance, StagedRows<K>& rows) {
  const int lane = coords.thread() % 32;
#pragma unroll
  for (int n = 0; n < kEights<K>; ++n) {
    const float* v = &values[4 * n];
    store_transposed(&rows[8 * n + lane % 8][feature + lane / 8 % 2 * distance],
                     K::Output::round(v[0], v[1]), K::Output::round(v[2], v[3]));
  }
}

/// Whether the warpgroup writes staged rows together, as values are quantized in groups that
/// several warps have staged. Else a warp writes what it has staged, and need not wait for others.
template <typename K>
inline constexpr bool kWritesTogether = K::Output::kQuantizes;

/// Between staging rows and writing them, and before the next are staged.
template <typename K>
__device__ __forceinline__ void sync_staged(const WarpgroupCoords<K>& coords) {
  if constexpr (kWritesTogether<K>) {
    sync_warpgroup(coords);
  } else {
    __syncwarp();
  }
}

template <typename K>
inline constexpr bool kHasCodedRows = K::Operands::kFormat.coded_rows();
/// Bytes of an element that the GEMM stores, unless they are in fp32.
template <typename K>
__device__ __forceinline__ int out_bytes(const GemmParams& gemm) {
  return K::kStoresCodes && gemm.out_e4m3 ? 1 : int{sizeof(typename K::Output::Element)};
}

/// Writes a staged unit of 8 features: as it is, or as codes.
template <typename K>
__device__ __forceinline__ void write_staged(const GemmParams& gemm, const uint4& unit, char* out) {
  if constexpr (K::kStoresCodes) {
    if (gemm.out_e4m3) {
      UnitValues values;
      read_values(K::Operands::kRowDType == DType::kF16, unit, values);
      *reinterpret_cast<uint2*>(out) = multiply_to_fp8(values, gemm.out_factor);
      return;
    }
  }
  *reinterpret_cast<uint4*>(out) = unit;
}

/// A thread's share of the staged rows of a row block on their way out: of some tokens 16 bytes, a
/// unit of 8 features.
template <typename K>
class RowWriter {
 public:
  using Element = typename K::Output::Element;

  __device__ __forceinline__ RowWriter(const GemmParams& gemm, const WorkTile& tile,
                                       const WarpgroupCoords<K>& coords, int row_block,
                                       int first_token)
      : gemm_(&gemm) {
    const bool activates = gemm.epilogue == Epilogue::kActivate;
    const bool is_gate_up = gemm.epilogue == Epilogue::kStoreGateUp;
    const int writer = coords.thread() % kWriters, warp = coords.thread() / 32;
    token_ = writer >> units_log2();
    unit_ = writer & ((1 << units_log2()) - 1);
    if constexpr (!kWritesTogether<K>) {
      unit_ = is_gate_up ? unit_ * 4 + warp : (warp << units_log2()) + unit_;
    }
    int column = row_block * kBlockRows + unit_ * 8;
    if (activates || is_gate_up) column = row_block * (kBlockRows / 2) + unit_ % 4 * 8;
    is_inside_ = column < gemm.width;
    if (is_gate_up) column += unit_ / 4 * gemm.width;
    out_ = static_cast<char*>(gemm.out) +
           (tile.split * gemm.split_pitch +
            (tile.first_row + first_token + token_) * gemm.out_pitch + column) *
               out_bytes<K>(gemm);
  }

  /// The next `count` tokens, which `rows` has.
  __device__ __forceinline__ void write(const StagedRows<K>& rows, int count,
                                        const RowQuantizer& quantizer, int expert) {
    const int tokens = kWriters >> units_log2();
    const Element* from = &rows[token_][unit_ * 8];
    char* out = out_;
    const std::int64_t pitch = gemm_->out_pitch * out_bytes<K>(*gemm_);
    for (int first = 0; first < count; first += tokens) {
      const bool has_token = first + token_ < count;
      const unsigned mask = kWritesTogether<K> ? __ballot_sync(~0U, has_token) : 0;
      if (has_token) {
        auto value = *reinterpret_cast<const uint4*>(from);
        if constexpr (kWritesTogether<K>) {
          // Neighbouring lanes have the units of a group, which are all there or none.
          if (quantizer.kind != RowQuantizer::Kind::kNone) {
            value = quantize_and_decode(quantizer, expert, value, mask);
          }
        }
        if (is_inside_) write_staged<K>(*gemm_, value, out);
      }
      from += tokens * K::kStagedPitch;
      out += tokens * pitch;
    }
    out_ += K::kChunkTokens * pitch;
  }

 private:
  static constexpr int kWriters = kWritesTogether<K> ? 128 : 32;
  /// Units of a token that the writers have.
  __device__ __forceinline__ int units_log2() const {
    const bool activates = gemm_->epilogue == Epilogue::kActivate;
    return kWritesTogether<K> ? (activates ? 2 : 3) : (activates ? 0 : 1);
  }

  const GemmParams* gemm_;
  char* out_;  // of the thread's first token
  int token_, unit_;
  bool is_inside_;
};

/// The same of rows in f32, from registers: eight features of a token are a sector of memory.
template <typename K>
__device__ inline void write_f32(const GemmParams& gemm, const WarpgroupCoords<K>& coords,
                                 int row_block, const WorkTile& tile, int first,
                                 const Chunk<K>& values) {
  const int feature = row_block * kBlockRows + weight_row(coords);
  const bool has_feature = feature < gemm.width, has_next = feature + 8 < gemm.width;
  float* out = static_cast<float*>(gemm.out) + tile.split * gemm.split_pitch + feature;
#pragma unroll
  for (int n = 0; n < kEights<K>; ++n) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int token = first + 8 * n + coords.thread() % 4 * 2 + t;
      if (token >= tile.num_tokens) return;
      std::int64_t row = tile.first_row + token;
      if (gemm.out_rows) row = gemm.out_rows[row];
      if (has_feature) out[row * gemm.out_pitch] = values[4 * n + t];
      if (has_next) out[row * gemm.out_pitch + 8] = values[4 * n + 2 + t];
    }
  }
}

/// What `read` gives for each chunk -> rows. One copy of the code for all chunks: the kernel is as
/// large as the instruction cache.
template <typename K, typename Read>
__device__ __forceinline__ void store_rows(SharedMemory<K>& shared, const FusedMlpParams& p,
                                           const WorkTile& tile, const WarpgroupCoords<K>& coords,
                                           const ScaleAndBias<K>& factors, const Read& read) {
  const GemmParams& gemm = p.gemms[tile.gemm];
  const bool inner = tile.gemm == 0 && p.num_gemms == 2;  // GEMM 2 reads it
  const bool has_token_scales =
      kHasCodedRows<K> && gemm.token_scales && gemm.token_scale_pitch == 0;
  const bool out_f32 = gemm.out_f32;
  const Epilogue epilogue = gemm.epilogue;
  const int first_block = first_row_block(tile, coords), num_tokens = tile.num_tokens;
  const int row_blocks = min(kStoredRowBlocks<K>, gemm.row_blocks - first_block);
  const int warp_row = coords.thread() / 32 * 16;
  StagedRows<K>& rows = shared.rows[coords.row_group()];
#pragma unroll 1
  for (int b = 0; b < row_blocks; ++b) {
    RowWriter<K> writer(gemm, tile, coords, first_block + b, 0);
    TokenScales<K> token_scales;
    if (has_token_scales && K::kReadsScalesAhead) token_scales.read(gemm, tile, coords, 0);
#pragma unroll 1
    for (int first = 0; first < num_tokens; first += K::kChunkTokens) {
      Chunk<K> values;
      read(b * kChunks<K> + first / K::kChunkTokens, values);
      if (has_token_scales && !K::kReadsScalesAhead) token_scales.read(gemm, tile, coords, first);
      if (has_token_scales) token_scales.apply(values);
      scale_and_add<K>(factors, b, values);
      if (!out_f32) sync_staged(coords);  // the rows before are written
      // Ahead, as they are far away. But not before the first use of `factors`: the hardware would
      // wait for both.
      if (has_token_scales && K::kReadsScalesAhead) {
        token_scales.read(gemm, tile, coords, first + K::kChunkTokens);
      }
      if (out_f32) {
        write_f32<K>(gemm, coords, first_block + b, tile, first, values);
        continue;
      }
      if constexpr (K::Output::kWeightsRows) {
        apply_router_weights<K>(p, tile, coords, first, values);
      }
      if (epilogue == Epilogue::kActivate) {
        stage_activated<K>(p.activation, coords, values, 0, rows);
      } else if (epilogue == Epilogue::kStoreGateUp) {
        stage_both<K>(coords, values, warp_row / 2, kBlockRows / 2, rows);
      } else {
        if (epilogue == Epilogue::kActivateGate) {
          call_for_not_gated(p.activation, [&](const ResolvedActivation& known) {
#pragma unroll
            for (float& value : values) value = activate_gate(known, value);
          });
        }
        stage_both<K>(coords, values, warp_row, 8, rows);
      }
      sync_staged(coords);
      if constexpr (K::kRowBlocks > 1) {  // no registers are left to keep it in
        writer = RowWriter<K>(gemm, tile, coords, first_block + b, first);
      }
      writer.write(rows, min(K::kChunkTokens, num_tokens - first),
                   inner ? p.quantizer : RowQuantizer{}, tile.expert);
    }
  }
}

}  // namespace fusedmoe::cuda
