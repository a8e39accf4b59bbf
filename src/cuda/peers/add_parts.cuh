// Adding what ranks have left in their arenas for a token.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "cuda/peers/step_kernels.cuh"
#include "cuda/rows/element.cuh"

namespace fusedmoe::cuda {

/// Adds a chunk of a token's columns, kWidth in a thread.
using SumTeam = Team<128>;
template <int kWidth>
std::int32_t chunks_of(std::int64_t columns) {
  return static_cast<std::int32_t>(
      core::ceil_div(columns, std::int64_t{kWidth} * SumTeam::kThreads));
}

/// Where a part of a sum lies; null: nowhere.
template <typename Row>
struct SumPart {
  const Row* at = nullptr;
  float weight = 1;
};

/// sums += weight x value over the parts in their order, in f32. The rows of kBatch parts are on
/// their way at once. `part_of(number)`: a SumPart.
template <typename Row, int kWidth, typename PartOf>
__device__ void add_parts(float (&sums)[kWidth], int parts, const PartOf& part_of) {
  constexpr int kBatch = 4;
  for (int first = 0; first < parts; first += kBatch) {
    SumPart<Row> batch[kBatch];
    Pack<Row, kWidth> rows[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b < parts) batch[b] = part_of(first + b);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      using Unit = std::conditional_t<
          sizeof(rows[b]) == 16, uint4,
          std::conditional_t<sizeof(rows[b]) == 4, std::uint32_t, std::uint16_t>>;
      if (!batch[b].at) continue;
      const Unit unit = load_far(reinterpret_cast<const Unit*>(batch[b].at));
      memcpy(&rows[b], &unit, sizeof unit);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (!batch[b].at) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        sums[i] = fmaf(batch[b].weight, to_f32(rows[b].values[i]), sums[i]);
      }
    }
  }
}

/// Launches the kernel of a sum for so many tokens: kernel_of(width), as dispatch_width() finds it
/// for rows at these addresses. The other arguments are those of launch_teams().
template <typename Row, typename KernelOf, typename Params, typename... Pointers>
void launch_sum(const KernelOf& kernel_of, Params p, std::int64_t num_tokens, bool overlap_previous,
                bool together, Stream stream, Pointers... rows) {
  dispatch_width<Row>(
      p.hidden,
      [&](auto width) {
        p.chunks = chunks_of<decltype(width)::value>(p.hidden);
        launch_teams<SumTeam>(kernel_of(width), num_tokens * p.chunks, stream, overlap_previous, p,
                              together);
      },
      rows...);
}

/// Calls function(Row{}, Output{}) for all that a sum may be of.
template <typename Function>
void each_row_and_output(const Function& function) {
  using enum DType;
  constexpr std::pair<DType, DType> kPairs[] = {{kF32, kF32},   {kF32, kBF16}, {kF32, kF16},
                                                {kBF16, kBF16}, {kBF16, kF32}, {kF16, kF16},
                                                {kF16, kF32}};
  for (const auto& [row, output] : kPairs) dispatch_row_and_output(row, output, function);
}

}  // namespace fusedmoe::cuda
