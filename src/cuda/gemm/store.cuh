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

  /// Row blocks that a warpgroup stores, at most, and the first of an item.
  static constexpr int kRowBlocks =
      Config::kHasEpilogueWarpgroup ? kTile.row_groups : kTile.row_blocks;
  __device__ static int first_row_block(const Item& item, const Place& place) {
    return item.row_block + place.row_group() * kTile.row_blocks;
  }

  /// What a thread's sums of each row block are multiplied by, and what is added for r and r + 8.
  struct ScaleAndBias {
    float scale = 1;
    float bias[kRowBlocks][2] = {};
  };

  /// Calls function(b, address of the bias of row r) for the thread's row blocks b that have one.
  template <typename Function>
  __device__ __forceinline__ static void for_biases(const GemmPhase& phase, const Item& item,
                                                    const Place& place, const Function& function) {
    if (!phase.bias || item.split > 0) return;
    const int first = first_row_block(item, place);
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
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
    asm volatile("" ::: "memory");  // as arrive() and wait()
    cutlass::arch::NamedBarrier::sync(128, Base::warpgroup_barrier(place));
    asm volatile("" ::: "memory");
  }

  /// Sums of a chunk by its number, chunks of the first row block before those of the next.
  /// Registers have no index.
  template <int kChunk = 0>
  __device__ __forceinline__ static void read_sums(const Sums& sums, int chunk, Chunk& values) {
    if constexpr (kChunk < kTile.row_blocks * kChunks) {
      if (chunk != kChunk) {
        read_sums<kChunk + 1>(sums, chunk, values);
        return;
      }
      constexpr int kBlock = kChunk / kChunks, kFirst = kChunk % kChunks * 4 * kEights;
#pragma unroll
      for (int i = 0; i < 4 * kEights; ++i) values[i] = sums[kBlock][kFirst + i];
    }
  }
  /// The same of those left to the epilogue warpgroup: of all K groups, in their order.
  __device__ static void read_parts(const Shared& shared, int chunk, Chunk& values) {
    const int first = chunk % kChunks * 4 * kEights;
    const auto* parts = &shared.parts[chunk / kChunks * kTile.k_groups];
#pragma unroll
    for (int k = 0; k < kTile.k_groups; ++k) {
#pragma unroll
      for (int i = 0; i < 4 * kEights; ++i) {
        const float sum = parts[k][first + i][Place::thread()];
        values[i] = k == 0 ? sum : values[i] + sum;
      }
    }
  }

  /// Of row block b.
  __device__ __forceinline__ static void scale_and_add(const ScaleAndBias& factors, int b,
                                                       Chunk& values) {
    float bias[2] = {factors.bias[0][0], factors.bias[0][1]};
#pragma unroll
    for (int i = 1; i < kRowBlocks; ++i) {  // registers have no index
      bias[0] = b == i ? factors.bias[i][0] : bias[0];
      bias[1] = b == i ? factors.bias[i][1] : bias[1];
    }
#pragma unroll
    for (int i = 0; i < 4 * kEights; ++i) values[i] = values[i] * factors.scale + bias[i % 4 / 2];
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
                                   const Item& item, int first, const Chunk& values) {
    const int feature = row_block * kRecordRows + weight_row(place);
    const bool has_feature = feature < phase.width, has_next = feature + 8 < phase.width;
    float* out = static_cast<float*>(phase.out) + item.split * phase.split_pitch + feature;
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int token = first + 8 * n + place.thread() % 4 * 2 + t;
        if (token >= item.num_tokens) return;
        std::int64_t row = item.first_row + token;
        if (phase.out_rows) row = phase.out_rows[row];
        if (has_feature) out[row * phase.out_pitch] = values[4 * n + t];
        if (has_next) out[row * phase.out_pitch + 8] = values[4 * n + 2 + t];
      }
    }
  }

  /// What `read` gives for each chunk -> rows. One copy of the code for all chunks: the kernel is
  /// as large as the instruction cache.
  template <typename Read>
  __device__ __forceinline__ static void store_rows(Shared& shared, const GroupedGemm& p,
                                                    const Item& item, const Place& place,
                                                    const ScaleAndBias& factors, const Read& read) {
    const GemmPhase& phase = p.phases[item.phase];
    const bool inner = item.phase == 0 && p.num_phases == 2;  // GEMM 2 reads it
    const int first_block = first_row_block(item, place);
    const int row_blocks = min(kRowBlocks, phase.row_blocks - first_block);
    const int warp_row = place.thread() / 32 * 16;
    Rows& rows = shared.rows[place.row_group()];
#pragma unroll 1
    for (int b = 0; b < row_blocks; ++b) {
#pragma unroll 1
      for (int first = 0; first < item.num_tokens; first += kTokens) {
        Chunk values;
        read(b * kChunks + first / kTokens, values);
        scale_and_add(factors, b, values);
        if (phase.out_f32) {
          write_f32(phase, place, first_block + b, item, first, values);
          continue;
        }
        const std::int64_t out =
            item.split * phase.split_pitch +
            static_cast<std::int64_t>(item.first_row + first) * phase.out_pitch;
        const int count = min(kTokens, item.num_tokens - first);
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
        write_rows(phase, place, first_block + b, out, count, rows);
      }
    }
    sync_warpgroup(place);  // all is written
  }

  /// The warpgroup's own sums, before it goes on to the next tile.
  __device__ static void store_tile(Shared& shared, const GroupedGemm& p, const Item& item,
                                    const Place& place, const Sums& sums) {
    const ScaleAndBias factors = read_scale_and_bias(p.phases[item.phase], item, place);
    store_rows(shared, p, item, place, factors,
               [&](int chunk, Chunk& values) { read_sums(sums, chunk, values); });
  }

  /// A multiplying warpgroup's sums, to the epilogue warpgroup. `phase`: of the tile before.
  __device__ static void hand_over(Shared& shared, const Item& item, const Place& place,
                                   const Sums& sums, std::uint32_t phase) {
    const int num_tokens = item.num_tokens;
    wait(&shared.parts_free, phase);
#pragma unroll
    for (int i = 0; i < Config::kPartSums; ++i) {
      if (i / 4 * 8 >= num_tokens) break;
      shared.parts[place.warpgroup][i][place.thread()] = sums[0][i];
    }
    arrive(&shared.parts_full);
  }

  /// The epilogue warpgroup's part.
  __device__ static void run_epilogue(Shared& shared, const GroupedGemm& p, const Item& item,
                                      std::uint32_t phase) {
    const Place place{0};
    const ScaleAndBias factors = read_scale_and_bias(p.phases[item.phase], item, place);
    if (p.topk_ids) cudaGridDependencySynchronize();
    if (const std::int32_t* rows = p.phases[item.phase].out_rows) {  // brings them to the L1
      int row;
      asm volatile("ld.global.s32 %0, [%1];" : "=r"(row) : "l"(rows + item.first_row));
    }
    wait(&shared.parts_full, phase);
    store_rows(shared, p, item, place, factors,
               [&](int chunk, Chunk& values) { read_parts(shared, chunk, values); });
    arrive(&shared.parts_free);
  }
};

}  // namespace fusedmoe::cuda
