// The epilogue of tiles whose weights are decoded to FP8 and that have no epilogue warpgroup. No
// other work runs at the same time, so a thread finishes all its accumulators in registers, side by
// side: it waits once for what it loads, and its instructions hide each other's latencies.
#pragma once

#include "cuda/device/matrices.cuh"
#include "cuda/mlp/epilogue.cuh"
#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/tile_thread.cuh"

namespace fusedmoe::cuda::sm90 {

/// Whether tiles are stored so. With four multiplying warpgroups a thread has too few registers.
template <typename K>
inline constexpr bool kStoresSideBySide =
    !K::kHasEpilogueWarpgroup && K::kWarpgroups == 2 && K::kPromotes && K::Operands::kDecodes;

/// Tokens that are stored side by side; one copy of the code for all.
template <typename K>
inline constexpr int kSideBySideTokens = K::kMaxTokens > 96 ? K::kMaxTokens / 2 : K::kMaxTokens;

/// accumulators -> results: times the scales of tokens and of weight rows, plus the bias.
template <typename K>
__device__ __forceinline__ void finish_side_by_side(const GemmParams& gemm, const WorkTile& tile,
                                                    const WarpgroupCoords<K>& coords, int thread,
                                                    typename K::Accumulators& accumulators) {
  constexpr int kTokenEights = K::kMaxTokens / 8;
  const bool has_token_scales = gemm.token_scales && gemm.token_scale_pitch == 0;
  float of_tokens[kTokenEights][2];
  const int first = thread % 4 * 2, left = has_token_scales ? tile.num_tokens - first : 0;
  const float* token_scales = gemm.token_scales + tile.first_row + first;
#pragma unroll
  for (int n = 0; n < kTokenEights; ++n) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      of_tokens[n][t] = 0;
      if (8 * n + t < left) of_tokens[n][t] = token_scales[8 * n + t];
    }
  }
  const ScaleAndBias<K> factors = read_scale_and_bias(gemm, tile, coords);
  if (has_token_scales) {
#pragma unroll
    for (int i = 0; i < 4 * kTokenEights; ++i) accumulators[0][i] *= of_tokens[i / 4][i % 2];
  }
#pragma unroll
  for (int i = 0; i < 4 * kTokenEights; ++i) {
    const int r = i % 4 / 2;
    accumulators[0][i] = accumulators[0][i] * factors.scale[0][r] + factors.bias[0][r];
  }
}

/// Writes a warp's results, 32 units of 8 features at a time: of 32 tokens one each, or of 16
/// tokens two, with weight rows r and r + 8.
template <typename K>
class WarpWriter {
 public:
  __device__ __forceinline__ WarpWriter(SharedMemory<K>& shared, const GemmParams& gemm,
                                        const WorkTile& tile, const WarpgroupCoords<K>& coords,
                                        int thread)
      : gemm_(&gemm), pitch_(gemm.out_pitch * out_bytes<K>(gemm)) {
    const int lane = thread % 32, warp = thread / 32;
    std::uint8_t* staged =
        reinterpret_cast<std::uint8_t*>(&shared.rows[coords.row_group()]) + warp * kWarpBytes;
    read_ = write_ = staged + lane * kUnitBytes;
    int token = lane, half = 0;
    const bool has_both_rows = gemm.epilogue != Epilogue::kActivate;
    if (has_both_rows) {
      token = lane / 2;
      // Units of every other four tokens change places: eight rows lie on different banks.
      half = lane % 2 ^ token / 4 % 2;
      const int row = lane / 16 * 8 + lane % 8;
      write_ = staged + (row * 2 + (lane / 8 % 2 ^ row / 4 % 2)) * kUnitBytes;
    }
    // Of gate and up, rows r + 8 are up's.
    const bool halves = !has_both_rows || gemm.epilogue == Epilogue::kStoreGateUp;
    int column = first_row_block(tile, coords) * kBlockRows + warp * 16;
    column = halves ? column / 2 : column + half * 8;
    left_ = column < gemm.width ? tile.num_tokens - token : 0;
    if (halves) column += half * gemm.width;
    tokens_ = has_both_rows ? 16 : 32;
    out_ = static_cast<char*>(gemm.out) +
           (tile.split * gemm.split_pitch + (tile.first_row + token) * gemm.out_pitch + column) *
               out_bytes<K>(gemm);
  }

  /// The next tokens: four matrices of eight features or weight rows by eight tokens.
  __device__ __forceinline__ void write(const std::uint32_t (&matrices)[4]) {
    __syncwarp();  // those before are read
    store_transposed(write_, matrices);
    __syncwarp();
    const uint4 unit = *reinterpret_cast<const uint4*>(read_);
    if (left_ > 0) write_staged<K>(*gemm_, unit, out_);
    left_ -= tokens_;
    out_ += tokens_ * pitch_;
  }

 private:
  static constexpr int kWarpBytes = sizeof(StagedRows<K>) / 4 / kUnitBytes * kUnitBytes;
  static_assert(kWarpBytes >= 32 * kUnitBytes);

  const GemmParams* gemm_;
  std::int64_t pitch_;
  std::uint8_t *write_, *read_;
  char* out_;
  int left_, tokens_;
};

/// The first tokens' results, activated -> rows.
template <typename K>
__device__ __forceinline__ void write_activated(const ResolvedActivation& activation,
                                                const float* values, WarpWriter<K>& writer) {
  constexpr int kPairs = kSideBySideTokens<K> / 8;
  std::uint32_t pairs[kPairs];
  call_for_gated(activation, [&](const ResolvedActivation& known) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const float* v = &values[4 * n];
      pairs[n] = K::Output::round(activate(known, v[0], v[2]), activate(known, v[1], v[3]));
    }
  });
#pragma unroll
  for (int n = 0; n < kPairs; n += 4) {
    writer.write({pairs[n], pairs[n + 1], pairs[n + 2], pairs[n + 3]});
  }
}

/// As store_tile().
template <typename K>
__device__ __forceinline__ void store_side_by_side(SharedMemory<K>& shared, const FusedMlpParams& p,
                                                   const WorkTile& tile,
                                                   const WarpgroupCoords<K>& coords,
                                                   typename K::Accumulators& accumulators) {
  static_assert(!K::Output::kQuantizes && !K::Output::kWeightsRows && K::kRowBlocks == 1);
  constexpr int kTokens = kSideBySideTokens<K>;
  static_assert(kTokens % 32 == 0 && K::kMaxTokens % kTokens == 0);
  const GemmParams& gemm = p.gemms[tile.gemm];
  const auto thread = static_cast<int>(TileThread<K>().index);
  finish_side_by_side<K>(gemm, tile, coords, thread, accumulators);
  WarpWriter<K> writer(shared, gemm, tile, coords, thread);
  auto& values = accumulators[0];
#pragma unroll 1
  for (int first = 0; first < tile.num_tokens; first += kTokens) {
    if (gemm.out_f32) {
#pragma unroll
      for (int t = 0; t < kTokens; t += K::kChunkTokens) {
        write_f32<K>(gemm, coords, first_row_block(tile, coords), tile, first + t,
                     reinterpret_cast<const Chunk<K>&>(values[t / 2]));
      }
    } else if (gemm.epilogue == Epilogue::kActivate) {
      write_activated<K>(p.activation, values, writer);
    } else {
      if (gemm.epilogue == Epilogue::kActivateGate) {
        call_for_not_gated(p.activation, [&](const ResolvedActivation& known) {
#pragma unroll
          for (int i = 0; i < kTokens / 2; ++i) values[i] = activate_gate(known, values[i]);
        });
      }
#pragma unroll
      for (int t = 0; t < kTokens; t += 16) {
        const float* v = &values[t / 2];
        writer.write({K::Output::round(v[0], v[1]), K::Output::round(v[2], v[3]),
                      K::Output::round(v[4], v[5]), K::Output::round(v[6], v[7])});
      }
    }
    // Registers have no index: the other tokens move up.
#pragma unroll
    for (int i = kTokens / 2; i < K::kAccumulators; ++i) values[i - kTokens / 2] = values[i];
  }
}

}  // namespace fusedmoe::cuda::sm90
