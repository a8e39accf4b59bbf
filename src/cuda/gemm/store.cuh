// The epilogue of the grouped GEMM kernel: sums -> scale, bias, activation -> rows.
//
// wgmma leaves a thread the sums of two neighbouring tokens for weight rows r and r + 8, of a gated
// w13 gate and up of one feature. There they become results. Rows of 16 bits then pass through
// shared memory, as threads next to each other hold features of one token only 8 apart.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/activation.cuh"
#include "cuda/device/prefetch.cuh"
#include "cuda/device/stmatrix.cuh"
#include "cuda/gemm/tile.cuh"

namespace fusedmoe::cuda {

template <typename Weights, TileConfig kTile>
struct Store : GemmTypes<Weights, kTile> {
  using Base = GemmTypes<Weights, kTile>;
  using typename Base::Config;
  using typename Base::Place;
  using typename Base::Shared;
  using typename Base::Sums;

  // Tokens are finished a chunk at a time, 8 together as wgmma has them. Of each 8, a thread has
  // numbers (row r, token t), (r, t + 1), (r + 8, t), (r + 8, t + 1).
  static constexpr int kTokens = Config::kStoreTokens;
  static constexpr int kEights = kTokens / 8;
  static constexpr int kChunks = kTile.max_tokens / kTokens;
  using Chunk = float[4 * kEights];

  /// Weight row r of a thread in its row block.
  __device__ static int weight_row(const Place& place) {
    return place.thread() / 32 * 16 + place.thread() % 32 / 4;
  }

  /// What a thread's sums of each row block are multiplied by, and what is added for r and r + 8.
  struct ScaleAndBias {
    float scale = 1;
    float bias[kTile.row_blocks][2] = {};
  };

  /// Calls function(b, address of the bias of row r) for the thread's row blocks b that have one.
  template <typename Function>
  __device__ __forceinline__ static void for_biases(const GemmPhase& phase, const Item& item,
                                                    const Place& place, const Function& function) {
    if (!phase.bias || item.split > 0) return;
    const int first = item.row_block + place.row_group() * kTile.row_blocks;
#pragma unroll
    for (int b = 0; b < kTile.row_blocks; ++b) {
      if (first + b >= phase.row_blocks) return;
      const auto block = static_cast<std::int64_t>(item.expert) * phase.row_blocks + first + b;
      function(b, phase.bias + block * kRecordRows + weight_row(place));
    }
  }

  /// To the L2, while the sums are made: there are no registers to keep them in.
  __device__ static void prefetch_scale_and_bias(const GemmPhase& phase, const Item& item,
                                                 const Place& place) {
    if (phase.scales) prefetch_l2(phase.scales + item.expert);
    for_biases(phase, item, place, [](int, const float* bias) { prefetch_l2(bias); });
  }

  __device__ static ScaleAndBias read_scale_and_bias(const GemmPhase& phase, const Item& item,
                                                     const Place& place) {
    ScaleAndBias factors;
    if (phase.scales) factors.scale = phase.scales[item.expert];
    for_biases(phase, item, place, [&](int b, const float* bias) {
      factors.bias[b][0] = bias[0];
      factors.bias[b][1] = bias[8];
    });
    return factors;
  }

  __device__ static void sync_warpgroup(const Place& place) {
    cutlass::arch::NamedBarrier::sync(128, Base::warpgroup_barrier(place));
  }
  __device__ static void sync_row_group(const Place& place) {
    cutlass::arch::NamedBarrier::sync(128 * kTile.k_groups, Base::row_group_barrier(place));
  }

  /// The sums of a row group to its first K group, in their order.
  __device__ static void add_k_groups(Shared& shared, const Item& item, const Place& place,
                                      Sums& sums) {
    const int first_part = place.row_group() * Config::kOtherKGroups;
    if (place.k_group() > 0) {
#pragma unroll
      for (int i = 0; i < Config::kPartSums; ++i) {
        if (i / 4 * 8 >= item.num_tokens) break;
        shared.parts[first_part + place.k_group() - 1][i][place.thread()] = sums[0][i];
      }
    }
    sync_row_group(place);
    if (place.k_group() == 0) {
#pragma unroll
      for (int i = 0; i < Config::kPartSums; ++i) {
        if (i / 4 * 8 >= item.num_tokens) break;
#pragma unroll
        for (int k = 0; k < Config::kOtherKGroups; ++k) {
          sums[0][i] += shared.parts[first_part + k][i][place.thread()];
        }
      }
    }
    sync_row_group(place);
  }

  /// Scaled and biased sums of a chunk by its number, chunks of the first row block before those of
  /// the next: registers have no index.
  template <int kChunk = 0>
  __device__ __forceinline__ static void read_chunk(const Sums& sums, const ScaleAndBias& factors,
                                                    int chunk, Chunk& values) {
    if constexpr (kChunk < kTile.row_blocks * kChunks) {
      if (chunk != kChunk) {
        read_chunk<kChunk + 1>(sums, factors, chunk, values);
        return;
      }
      constexpr int kBlock = kChunk / kChunks, kFirst = kChunk % kChunks * 4 * kEights;
#pragma unroll
      for (int i = 0; i < 4 * kEights; ++i) {
        values[i] = sums[kBlock][kFirst + i] * factors.scale + factors.bias[kBlock][i % 4 / 2];
      }
    }
  }

  /// Two results, rounded.
  __device__ static std::uint32_t round(float low, float high) {
    const auto pair = [&] {
      if constexpr (std::is_same_v<typename Weights::Element, __half>) {
        return __floats2half2_rn(low, high);
      } else {
        return __floats2bfloat162_rn(low, high);
      }
    }();
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }

  using Rows = std::uint16_t[Config::kStoreTokens][Config::kStorePitch];

  /// Features of gate and up -> `rows` of the activated ones.
  __device__ static void put_activated(const ResolvedActivation& activation, const Place& place,
                                       const Chunk& values, Rows& rows) {
    const int warp = place.thread() / 32, lane = place.thread() % 32;
    std::uint32_t pairs[kEights];
    call_for_gated(activation, [&](const ResolvedActivation& known) {
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        const float* v = &values[4 * n];
        pairs[n] = round(activate(known, v[0], v[2]), activate(known, v[1], v[3]));
      }
    });
#pragma unroll
    for (int n = 0; n < kEights; n += 2) {
      store_transposed(&rows[8 * n + lane % 16][warp * 8], pairs[n], pairs[n + 1]);
    }
  }

  /// Weight rows r and r + 8 -> `rows`, features `distance` apart.
  __device__ static void put_both(const Place& place, const Chunk& values, int feature,
                                  int distance, Rows& rows) {
    const int lane = place.thread() % 32;
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const float* v = &values[4 * n];
      store_transposed(&rows[8 * n + lane % 8][feature + lane / 8 % 2 * distance],
                       round(v[0], v[1]), round(v[2], v[3]));
    }
  }

  /// `rows` of one row block -> tokens [first, first + count) of the output, 16 bytes at a time.
  __device__ static void write_rows(const GemmPhase& phase, const Place& place, int row_block,
                                    std::int64_t first, int count, const Rows& rows) {
    const int units_log2 = phase.epilogue == Epilogue::kActivate ? 2 : 3;  // of 8 features
    auto* out = static_cast<std::uint16_t*>(phase.out) + first;
    for (int i = place.thread(); i < count << units_log2; i += 128) {
      const int token = i >> units_log2;
      int unit = i & ((1 << units_log2) - 1);
      const auto value = *reinterpret_cast<const uint4*>(&rows[token][unit * 8]);
      int begin = 0;
      int column = row_block << (units_log2 + 3);
      if (phase.epilogue == Epilogue::kStoreGateUp) {
        begin = unit / 4 * phase.width;
        column = row_block * (kRecordRows / 2);
        unit %= 4;
      }
      column += unit * 8;
      if (column < phase.width) {
        *reinterpret_cast<uint4*>(out + token * phase.out_pitch + begin + column) = value;
      }
    }
  }

  /// The same of rows in f32, from registers: eight features of a token are a sector of memory.
  __device__ static void write_f32(const GemmPhase& phase, const Place& place, int row_block,
                                   std::int64_t first, int count, const Chunk& values) {
    const int row = row_block * kRecordRows + weight_row(place);
    const bool has_row = row < phase.width, has_next = row + 8 < phase.width;
    const int token = place.thread() % 4 * 2;
    float* out = static_cast<float*>(phase.out) + first + token * phase.out_pitch + row;
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        if (8 * n + token + t >= count) return;
        if (has_row) out[t * phase.out_pitch] = values[4 * n + t];
        if (has_next) out[t * phase.out_pitch + 8] = values[4 * n + 2 + t];
      }
      out += 8 * phase.out_pitch;
    }
  }

  /// One copy of the code for all chunks: the kernel is as large as the instruction cache.
  __device__ static void store_tile(Shared& shared, const GroupedGemm& p, const Item& item,
                                    const Place& place, Sums& sums) {
    const GemmPhase& phase = p.phases[item.phase];
    const ScaleAndBias factors = read_scale_and_bias(phase, item, place);
    if constexpr (kTile.k_groups > 1) {
      add_k_groups(shared, item, place, sums);
      if (place.k_group() > 0) return;
    }
    const bool inner = item.phase == 0 && p.num_phases == 2;  // GEMM 2 waits for it
    const int first_row_block = item.row_block + place.row_group() * kTile.row_blocks;
    const int row_blocks = min(kTile.row_blocks, phase.row_blocks - first_row_block);
    const int warp_row = place.thread() / 32 * 16;
    Rows& rows = shared.rows[place.row_group()];
#pragma unroll 1
    for (int b = 0; b < row_blocks; ++b) {
#pragma unroll 1
      for (int first = 0; first < item.num_tokens; first += kTokens) {
        Chunk values;
        read_chunk(sums, factors, b * kChunks + first / kTokens, values);
        const std::int64_t out =
            item.split * phase.split_pitch +
            static_cast<std::int64_t>(item.first_row + first) * phase.out_pitch;
        const int count = min(kTokens, item.num_tokens - first);
        if (phase.out_f32) {
          write_f32(phase, place, first_row_block + b, out, count, values);
          continue;
        }
        sync_warpgroup(place);  // the rows before are written
        if (phase.epilogue == Epilogue::kActivate) {
          put_activated(p.activation, place, values, rows);
        } else if (phase.epilogue == Epilogue::kStoreGateUp) {
          put_both(place, values, warp_row / 2, kRecordRows / 2, rows);
        } else {
          if (inner) {
            call_for_not_gated(p.activation, [&](const ResolvedActivation& known) {
#pragma unroll
              for (float& value : values) value = activate_gate(known, value);
            });
          }
          put_both(place, values, warp_row, 8, rows);
        }
        sync_warpgroup(place);
        write_rows(phase, place, first_row_block + b, out, count, rows);
      }
    }
    sync_warpgroup(place);  // all is written
    if (inner && row_blocks > 0 && place.thread() == 0) {
      // The warpgroup's rows become visible with it: the barrier ordered them before.
      asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p.counters + 1 + item.counter),
                   "r"(row_blocks)
                   : "memory");
    }
  }
};

}  // namespace fusedmoe::cuda
