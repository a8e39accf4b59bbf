// The epilogue of the grouped GEMM kernel: sums -> scale, bias, activation -> rows.
#pragma once

#include <cuda_bf16.h>

#include "cuda/activation.cuh"
#include "cuda/gemm/tile.cuh"

namespace fusedmoe::cuda {

template <typename Weights, TileConfig kTile>
struct Store : GemmTypes<Weights, kTile> {
  using Base = GemmTypes<Weights, kTile>;
  using typename Base::Config;
  using typename Base::Place;
  using typename Base::Shared;
  using typename Base::Sums;

  struct Pair {
    float x, y;
  };

  /// Two neighbouring rows of one token, summed over the K groups.
  __device__ static Pair read_sums(const Shared& shared, const Place& place, int token, int row) {
    Pair sum{0, 0};
#pragma unroll
    for (int k = 0; k < kTile.k_groups; ++k) {
      const auto part = *reinterpret_cast<const float2*>(
          &shared.sums[place.row_group * kTile.k_groups + k][token][row]);
      sum.x += part.x;
      sum.y += part.y;
    }
    return sum;
  }

  __device__ static Pair read_pair(const float* bias, int row) {
    if (!bias) return {0, 0};
    const auto pair = *reinterpret_cast<const float2*>(bias + row);
    return {pair.x, pair.y};
  }

  __device__ static void write_pair(const GemmPhase& phase, std::int64_t index, float x, float y) {
    if (phase.out_f32) {
      *reinterpret_cast<float2*>(static_cast<float*>(phase.out) + index) = make_float2(x, y);
    } else {
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(phase.out) + index) =
          __floats2bfloat162_rn(x, y);
    }
  }

  /// Tokens [first, first + count) of a row block, from the sums in shared memory.
  __device__ static void store_rows(const Shared& shared, const GroupedGemm& p, const Item& item,
                                    const Place& place, int row_block, int first, int count) {
    const GemmPhase& phase = p.phases[item.phase];
    const float scale = phase.scales ? phase.scales[item.expert] : 1.0f;
    const float* bias =
        phase.bias && item.split == 0
            ? phase.bias + (static_cast<std::int64_t>(item.expert) * phase.row_blocks + row_block) *
                               kRecordRows
            : nullptr;
    const int thread = place.k_group * 128 + place.thread;
    const std::int64_t out = item.split * phase.split_pitch +
                             static_cast<std::int64_t>(item.first_row + first) * phase.out_pitch;
    if (phase.epilogue == Epilogue::kStore) {
      const int row = thread % 32 * 2;
      const int column = row_block * kRecordRows + row;
      if (column >= phase.width) return;
      const bool activated = item.phase == 0 && p.num_phases == 2;
      const Pair b = read_pair(bias, row);
      for (int token = thread / 32; token < count; token += Config::kGroupThreads / 32) {
        Pair v = read_sums(shared, place, token, row);
        v = {v.x * scale + b.x, v.y * scale + b.y};
        if (activated) {
          v = {activate_gate(p.activation, v.x), activate_gate(p.activation, v.y)};
        }
        write_pair(phase, out + token * phase.out_pitch + column, v.x, v.y);
      }
      return;
    }
    const int pair = thread % 16;
    const int row = pair / 4 * 16 + pair % 4 * 2;  // of gate; up is 8 further on
    const int column = row_block * (kRecordRows / 2) + pair * 2;
    if (column >= phase.width) return;
    const Pair gate_bias = read_pair(bias, row), up_bias = read_pair(bias, row + 8);
    for (int token = thread / 16; token < count; token += Config::kGroupThreads / 16) {
      const Pair g = read_sums(shared, place, token, row);
      const Pair u = read_sums(shared, place, token, row + 8);
      const Pair gate{g.x * scale + gate_bias.x, g.y * scale + gate_bias.y};
      const Pair up{u.x * scale + up_bias.x, u.y * scale + up_bias.y};
      const std::int64_t index = out + token * phase.out_pitch + column;
      if (phase.epilogue == Epilogue::kActivate) {
        write_pair(phase, index, activate(p.activation, gate.x, up.x),
                   activate(p.activation, gate.y, up.y));
      } else {
        write_pair(phase, index, gate.x, gate.y);
        write_pair(phase, index + phase.width, up.x, up.y);
      }
    }
  }

  static constexpr int kChunks = kTile.max_tokens / Config::kStoreTokens;

  /// Chunk kChunk of the sums, which holds kStoreTokens columns of a row block, to shared memory.
  template <int kChunk>
  __device__ __forceinline__ static void spread_chunk(Shared& shared, const Place& place,
                                                      const Sums& sums) {
    auto& buffer = shared.sums[place.warpgroup];
    const int warp = place.thread / 32, lane = place.thread % 32;
    const int row = warp * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < Config::kStoreTokens; n += 8) {
      const float* block =
          &sums[kChunk / kChunks][(kChunk % kChunks * Config::kStoreTokens + n) / 2];
      const int token = n + lane % 4 * 2;
      buffer[token][row] = block[0];
      buffer[token + 1][row] = block[1];
      buffer[token][row + 8] = block[2];
      buffer[token + 1][row + 8] = block[3];
    }
  }

  /// The same by number: registers have no index.
  template <int kChunk = 0>
  __device__ __forceinline__ static void spread(Shared& shared, const Place& place,
                                                const Sums& sums, int chunk) {
    if constexpr (kChunk < kTile.row_blocks * kChunks) {
      if (chunk == kChunk) {
        spread_chunk<kChunk>(shared, place, sums);
      } else {
        spread<kChunk + 1>(shared, place, sums, chunk);
      }
    }
  }

  /// Sums -> shared memory -> output, kStoreTokens at a time. The threads of a row group share
  /// the work; those of other row groups do not wait. One copy of the code for all chunks: the
  /// kernel is as large as the instruction cache.
  __device__ static void store_tile(Shared& shared, const GroupedGemm& p, const Item& item,
                                    const Place& place, const Sums& sums) {
    const auto sync_group = [&] {
      cutlass::arch::NamedBarrier::sync(Config::kGroupThreads, 1 + place.row_group);
    };
    const int first_row_block = item.row_block + place.row_group * kTile.row_blocks;
    const int row_blocks = min(kTile.row_blocks, p.phases[item.phase].row_blocks - first_row_block);
#pragma unroll 1
    for (int b = 0; b < row_blocks; ++b) {
#pragma unroll 1
      for (int first = 0; first < item.num_tokens; first += Config::kStoreTokens) {
        spread(shared, place, sums, b * kChunks + first / Config::kStoreTokens);
        sync_group();
        store_rows(shared, p, item, place, first_row_block + b, first,
                   min(Config::kStoreTokens, item.num_tokens - first));
        sync_group();
      }
      if (item.phase == 0 && p.num_phases == 2 && place.k_group == 0 && place.thread == 0) {
        __threadfence();
        atomicAdd(p.counters + 1 + item.counter, 1);
      }
    }
  }
};

}  // namespace fusedmoe::cuda
