// The epilogue of the fused MLP kernel: accumulators -> scale, bias, activation -> rows.
//
// wgmma leaves a thread the accumulators of two neighbouring tokens for weight rows r and r + 8, of
// a gated w13 gate and up of one feature. There they become results. Rows of the operands' elements
// then pass through shared memory, as threads next to each other hold features of one token only 8
// apart. How results become elements is the epilogue's own policy, Operands::Output.
#pragma once

#include "cuda/activation.cuh"
#include "cuda/device/prefetch.cuh"
#include "cuda/device/stmatrix.cuh"
#include "cuda/gemm/kernel.cuh"
#include "cuda/rows/row_quantizer.cuh"

namespace fusedmoe::cuda {

// Tokens are finished a chunk at a time, 8 together as wgmma has them. Of each 8, a thread has
// numbers (row r, token t), (r, t + 1), (r + 8, t), (r + 8, t + 1).
template <typename K>
inline constexpr int kEights = K::kChunkTokens / 8;
template <typename K>
inline constexpr int kChunks = K::kMaxTokens / K::kChunkTokens;
template <typename K>
using Chunk = float[4 * kEights<K>];

/// Row blocks that a warpgroup stores, at most, and the first of a tile.
template <typename K>
inline constexpr int kStoredRowBlocks = K::kHasEpilogueWarpgroup ? K::kRowGroups : K::kRowBlocks;
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

/// By the named barrier of a storing warpgroup. CUTLASS leaves 8 of the 16 to others.
template <typename K>
__device__ inline void sync_warpgroup(const WarpgroupCoords<K>& coords) {
  static_assert(K::kRowGroups <= 8);
  asm volatile("" ::: "memory");  // as arrive() and wait()
  cutlass::arch::NamedBarrier::sync(128, coords.row_group());
  asm volatile("" ::: "memory");
}

/// Accumulators of a chunk by its number, chunks of the first row block before those of the next.
/// Registers have no index.
template <typename K, int kChunk = 0>
__device__ __forceinline__ void read_accumulators(const typename K::Accumulators& accumulators,
                                                  int chunk, Chunk<K>& values) {
  if constexpr (kChunk < K::kRowBlocks * kChunks<K>) {
    if (chunk != kChunk) {
      read_accumulators<K, kChunk + 1>(accumulators, chunk, values);
      return;
    }
    constexpr int kBlock = kChunk / kChunks<K>, kFirst = kChunk % kChunks<K> * 4 * kEights<K>;
#pragma unroll
    for (int i = 0; i < 4 * kEights<K>; ++i) values[i] = accumulators[kBlock][kFirst + i];
  }
}

/// The same of those that were published: partial accumulators of all K groups, added in order.
template <typename K>
__device__ inline void read_partials(const SharedMemory<K>& shared, int chunk, Chunk<K>& values) {
  const int first = chunk % kChunks<K> * 4 * kEights<K>;
  const auto* partials = &shared.partials[chunk / kChunks<K> * K::kKGroups];
#pragma unroll
  for (int k = 0; k < K::kKGroups; ++k) {
#pragma unroll
    for (int i = 0; i < 4 * kEights<K>; ++i) {
      const float partial = partials[k][first + i][WarpgroupCoords<K>::thread()];
      values[i] = k == 0 ? partial : values[i] + partial;
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

/// Accumulators of rows that were quantized with one scale each, times these.
template <typename K>
__device__ __forceinline__ void apply_token_scales(const GemmParams& gemm, const WorkTile& tile,
                                                   const WarpgroupCoords<K>& coords, int first,
                                                   Chunk<K>& values) {
  if (!gemm.token_scales || gemm.token_scale_pitch > 0) return;
#pragma unroll
  for (int n = 0; n < kEights<K>; ++n) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int token = min(first + 8 * n + coords.thread() % 4 * 2 + t, tile.num_tokens - 1);
      const float scale = gemm.token_scales[tile.first_row + token];
      values[4 * n + t] *= scale;
      values[4 * n + 2 + t] *= scale;
    }
  }
}

/// GEMM 2's results times the router weights of their rows, where the caller asks for it.
template <typename K>
__device__ __forceinline__ void apply_router_weights(const FusedMlpParams& p, const WorkTile& tile,
                                                     const WarpgroupCoords<K>& coords, int first,
                                                     Chunk<K>& values) {
  if (!p.topk_weights || tile.gemm == 0) return;
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

/// Features of gate and up -> `rows` of the activated ones.
template <typename K>
__device__ inline void stage_activated(const ResolvedActivation& activation,
                                       const WarpgroupCoords<K>& coords, const Chunk<K>& values,
                                       StagedRows<K>& rows) {
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
    store_transposed(&rows[8 * n + lane % 16][warp * 8], pairs[n], pairs[n + 1]);
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

/// `rows` of one row block -> tokens [first, first + count) of the output, 16 bytes at a time.
template <typename K>
__device__ inline void write_rows(const GemmParams& gemm, const WarpgroupCoords<K>& coords,
                                  int row_block, std::int64_t first, int count,
                                  const StagedRows<K>& rows, const RowQuantizer& quantizer,
                                  int expert) {
  const int units_log2 = gemm.epilogue == Epilogue::kActivate ? 2 : 3;  // of 8 features
  auto* out = static_cast<typename K::Output::Element*>(gemm.out) + first;
  const int units = count << units_log2;
  for (int i = coords.thread(); i < units; i += 128) {
    const int token = i >> units_log2;
    int unit = i & ((1 << units_log2) - 1);
    auto value = *reinterpret_cast<const uint4*>(&rows[token][unit * 8]);
    if constexpr (K::Output::kQuantizes) {
      // Neighbouring lanes have the units of a group, which are all there or none.
      if (quantizer.kind != RowQuantizer::Kind::kNone) {
        const int lanes = min(32, units - i / 32 * 32);
        value = quantize_and_decode(quantizer, expert, value, ~0U >> (32 - lanes));
      }
    }
    int begin = 0;
    int column = row_block << (units_log2 + 3);
    if (gemm.epilogue == Epilogue::kStoreGateUp) {
      begin = unit / 4 * gemm.width;
      column = row_block * (kBlockRows / 2);
      unit %= 4;
    }
    column += unit * 8;
    if (column < gemm.width) {
      *reinterpret_cast<uint4*>(out + token * gemm.out_pitch + begin + column) = value;
    }
  }
}

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
  const int first_block = first_row_block(tile, coords);
  const int row_blocks = min(kStoredRowBlocks<K>, gemm.row_blocks - first_block);
  const int warp_row = coords.thread() / 32 * 16;
  StagedRows<K>& rows = shared.rows[coords.row_group()];
#pragma unroll 1
  for (int b = 0; b < row_blocks; ++b) {
#pragma unroll 1
    for (int first = 0; first < tile.num_tokens; first += K::kChunkTokens) {
      Chunk<K> values;
      read(b * kChunks<K> + first / K::kChunkTokens, values);
      if constexpr (K::kPromotes) apply_token_scales<K>(gemm, tile, coords, first, values);
      scale_and_add<K>(factors, b, values);
      if (gemm.out_f32) {
        write_f32<K>(gemm, coords, first_block + b, tile, first, values);
        continue;
      }
      if constexpr (K::Output::kWeightsRows) {
        apply_router_weights<K>(p, tile, coords, first, values);
      }
      const std::int64_t out = tile.split * gemm.split_pitch +
                               static_cast<std::int64_t>(tile.first_row + first) * gemm.out_pitch;
      const int count = min(K::kChunkTokens, tile.num_tokens - first);
      sync_warpgroup(coords);  // the rows before are written
      if (gemm.epilogue == Epilogue::kActivate) {
        stage_activated<K>(p.activation, coords, values, rows);
      } else if (gemm.epilogue == Epilogue::kStoreGateUp) {
        stage_both<K>(coords, values, warp_row / 2, kBlockRows / 2, rows);
      } else {
        if (gemm.epilogue == Epilogue::kActivateGate) {
          call_for_not_gated(p.activation, [&](const ResolvedActivation& known) {
#pragma unroll
            for (float& value : values) value = activate_gate(known, value);
          });
        }
        stage_both<K>(coords, values, warp_row, 8, rows);
      }
      sync_warpgroup(coords);
      write_rows<K>(gemm, coords, first_block + b, out, count, rows,
                    inner ? p.quantizer : RowQuantizer{}, tile.expert);
    }
  }
  sync_warpgroup(coords);  // all is written
}

/// The warpgroup's own accumulators, before it goes on to the next tile.
template <typename K>
__device__ inline void store_tile(SharedMemory<K>& shared, const FusedMlpParams& p,
                                  const WorkTile& tile, const WarpgroupCoords<K>& coords,
                                  const typename K::Accumulators& accumulators) {
  const ScaleAndBias<K> factors = read_scale_and_bias(p.gemms[tile.gemm], tile, coords);
  store_rows(shared, p, tile, coords, factors, [&](int chunk, Chunk<K>& values) {
    read_accumulators<K>(accumulators, chunk, values);
  });
}

/// A multiplying warpgroup's accumulators, for the epilogue warpgroup. `phase`: of the tile before.
template <typename K>
__device__ inline void publish_accumulators(SharedMemory<K>& shared, const WorkTile& tile,
                                            const WarpgroupCoords<K>& coords,
                                            const typename K::Accumulators& accumulators,
                                            std::uint32_t phase) {
  const int num_tokens = tile.num_tokens;
  wait(&shared.partials_free, phase);
#pragma unroll
  for (int i = 0; i < K::kPartialAccumulators; ++i) {
    if (i / 4 * 8 >= num_tokens) break;
    shared.partials[coords.warpgroup][i][coords.thread()] = accumulators[0][i];
  }
  arrive(&shared.partials_full);
}

/// The epilogue warpgroup's work on one tile.
template <typename K>
__device__ inline void store_published_tile(SharedMemory<K>& shared, const FusedMlpParams& p,
                                            const WorkTile& tile, std::uint32_t phase) {
  const WarpgroupCoords<K> coords{0};
  const ScaleAndBias<K> factors = read_scale_and_bias(p.gemms[tile.gemm], tile, coords);
  if (p.topk_ids) cudaGridDependencySynchronize();
  if (const std::int32_t* rows = p.gemms[tile.gemm].out_rows) {  // brings them to the L1
    int row;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(row) : "l"(rows + tile.first_row));
  }
  wait(&shared.partials_full, phase);
  store_rows(shared, p, tile, coords, factors,
             [&](int chunk, Chunk<K>& values) { read_partials(shared, chunk, values); });
  arrive(&shared.partials_free);
}

}  // namespace fusedmoe::cuda
