// Parameters of the fused MLP kernel: GEMM 1, activation and GEMM 2 of all experts. Plain C++.
//
// One persistent kernel works off the tiles of GEMM 1 and then those of GEMM 2, so that weights
// stream without a pause between them. Weight rows are the rows of the tensor cores' operand A, the
// token rows of an expert the columns of B.
#pragma once

#include <cstdint>

#include "cuda/formats/packed_block.h"
#include "cuda/mlp/tile_shape.h"
#include "cuda/rows/row_arrivals.h"
#include "cuda/rows/row_transform.h"
#include "fusedmoe/weights.h"
#include "moe/local_experts.h"

namespace fusedmoe::cuda {

enum class Epilogue {
  kStore,         ///< the accumulators
  kActivate,      ///< gated activation
  kActivateGate,  ///< activation that is not gated
  kStoreGateUp,   ///< (rows, 2 width): gate, then up
};

/// One of the two GEMMs. Elements of `activations` are those of the operands, of `out` those of the
/// layer's dtype, which for FP8 differ. Rows are the token rows of all experts, in expert order.
struct GemmParams {
  const void* weights = nullptr;  ///< packed blocks of all experts
  std::int64_t expert_bytes = 0;
  int row_blocks = 0;  ///< of one expert
  int k_blocks = 0;
  int k = 0;                      ///< columns of `activations`; behind them counts as 0
  const float* bias = nullptr;    ///< (experts, row_blocks * 64) in packed row order, or null
  const float* scales = nullptr;  ///< like `bias`: what results are multiplied by, or null
  /// With promoted accumulators: scales of weights by (experts, row_blocks, k_blocks, 8), one for
  /// each slice of 8 rows; or null. 16-byte aligned, as token_scales.
  const float* block_scales = nullptr;
  /// True if a K block of a tile of 128 rows has just two weight scales: one for its even slices of
  /// 8 rows (gate's, where gate and up alternate), one for the odd. True without block scales.
  bool two_scales_a_tile = true;
  /// Of `activations`: (rows), or with groups (k_blocks, token_scale_pitch); or null.
  const float* token_scales = nullptr;
  std::int64_t token_scale_pitch = 0;  ///< a multiple of 4; 0: one scale for each row
  const void* activations = nullptr;   ///< (num_rows, row_pitch) elements, 16-byte aligned
  std::int64_t num_rows = 0;
  std::int64_t row_pitch = 0;    ///< elements; rows start at 16 bytes
  void* out = nullptr;           ///< (splits, rows, out_pitch), 16-byte aligned
  std::int64_t out_pitch = 0;    ///< elements; rows start at 16 bytes
  std::int64_t split_pitch = 0;  ///< elements between the partial results of splits
  int width = 0;                 ///< columns of each row; written are up to a multiple of 8
  int splits = 1;                ///< K is cut into so many parts; the reader adds them
  /// Not null: `out` are E4M3 codes, quantized in groups of 128 features, and these their scales,
  /// (groups, out_scale_pitch). With two GEMMs of FP8 rows, Epilogue::kActivate and tiles of
  /// TileShape::has_whole_groups().
  float* out_scales = nullptr;
  std::int64_t out_scale_pitch = 0;
  bool out_power_of_two = false;  ///< scales are powers of two
  /// `out` are E4M3 codes of results times out_factor, one for all. For
  /// WeightFormat::stores_codes().
  bool out_e4m3 = false;
  float out_factor = 1;
  bool out_f32 = false;                    ///< else of the layer's dtype; with Epilogue::kStore
  const std::int32_t* out_rows = nullptr;  ///< with out_f32: rows of `out`; null: the same order
  Epilogue epilogue = Epilogue::kStore;
};

/// How the launch of both GEMMs quantizes rows that GEMM 1 has stored for GEMM 2. A row's scale
/// depends on no other row.
struct RowPass {
  RowTransform rows;
  /// In tiles of their own, so many for each token tile; for KernelFamily::has_row_pass(). 0: not.
  int tiles = 0;
  /// By whoever stores the last part of a group of 128 features, in tiles of
  /// TileShape::has_parts_of_groups(): which of FusedMlpParams::counters is the first of those that
  /// count parts, (token tiles, groups). 0: not.
  int group_counters = 0;
};

/// When a launch begins, and when it lets the next one begin. See launch.h for the rules. Except
/// with kApart the operation before is one of our kernels: an early start waits for kernels only.
enum class LaunchOrder : std::uint8_t {
  kApart,   ///< behind all that was enqueued before: copies, a caller's own work
  kBehind,  ///< behind the launch before. It and all others below let the next one begin at once
  /// While the launch before still brings the rows of GEMM 1. FusedMlpParams::arrivals tells which
  /// rows are here. All else that this one reads was complete before it could begin. Only for
  /// families with awaits_rows().
  kBesideArrivals,
  /// While the launch before still makes the activations, which it waits for before it reads them.
  /// The counts of rows, and the counters, were complete before.
  kBesideRows,
  /// While the launches before still make the counts of rows, too. It counts rows itself, from
  /// FusedMlpParams::topk_ids.
  kBesideRouting,
  /// The same for GEMM 1 alone, where a launch quantizes its rows and GEMM 2 is kBesideRows: lets
  /// that launch begin only when the counts are complete, as GEMM 2 does not wait for them.
  kFirstBesideRouting,
};

/// Device pointers throughout.
struct FusedMlpParams {
  GemmParams gemms[2];
  int num_gemms = 2;  ///< the second reads what the first writes
  int num_experts = 0;
  const std::int32_t* expert_num_tokens = nullptr;  ///< (experts)
  const std::int32_t* expert_offsets = nullptr;     ///< (experts): first row; null: e * capacity
  std::int64_t capacity = 0;
  /// Few slots (may_route_inline): every thread block counts the rows of experts itself, from these
  /// ids. So it starts while expert_num_tokens and expert_offsets are still made. Null: it reads
  /// those.
  const std::int32_t* topk_ids = nullptr;
  int num_slots = 0;
  core::LocalExperts local_experts;
  LaunchOrder order = LaunchOrder::kApart;
  RowArrivals arrivals;  ///< with LaunchOrder::kBesideArrivals
  int stages = 0;        ///< of the ring, where the launch chooses them (sm80)
  /// num_counters(...) words, then num_group_counters(...) where tiles share groups of features;
  /// zero when the kernel begins.
  std::int32_t* counters = nullptr;
  ResolvedActivation activation{};
  /// Of what GEMM 1 stores, with two GEMMs. For operands whose WeightFormat::quantizes_rows is set.
  RowQuantizer quantizer;
  /// How tiles between those of the GEMMs quantize what GEMM 1 stores.
  RowPass pass;
  /// Add up each row in one order, whatever else is in its tile (KernelFamily::keeps_order).
  bool batch_invariant = false;
  /// Weights that only one token tile reads need not stay in the L2: what they would push out may
  /// have to be written back first.
  bool weights_evict_first = false;
  /// If not null, the last GEMM multiplies row r by topk_weights[row_slots[r]] before it rounds to
  /// the elements' type. For operands whose WeightFormat::weights_rows is set.
  const float* topk_weights = nullptr;
  const std::int32_t* row_slots = nullptr;
};

/// Words of FusedMlpParams::counters for so many rows.
constexpr std::int64_t num_counters(const TileShape& tile, std::int64_t rows,
                                    std::int64_t num_experts) {
  return 1 + ceil_div(rows, tile.max_tokens) + num_experts;
}
/// Words behind them for RowPass::group_counters, with so many features.
constexpr std::int64_t num_group_counters(const TileShape& tile, std::int64_t rows,
                                          std::int64_t num_experts, std::int64_t width) {
  const std::int64_t token_tiles = num_counters(tile, rows, num_experts) - 1;
  return (rows < token_tiles ? rows : token_tiles) * ceil_div(width, kGroupFeatures);
}

/// Largest number of experts.
inline constexpr int kMaxExperts = 2048;

/// Whether FusedMlpParams::topk_ids may be set.
constexpr bool may_route_inline(std::int64_t num_slots, std::int64_t num_experts) {
  return num_slots <= 128 && num_experts < kMaxExperts / 2;
}

}  // namespace fusedmoe::cuda
