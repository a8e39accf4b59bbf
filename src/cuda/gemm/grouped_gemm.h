// The grouped GEMMs of one layer on Hopper: problem, configuration, and the call. Plain C++.
//
// One persistent kernel works off the tiles of GEMM 1 and then those of GEMM 2, so that weights
// stream without a pause between them. Rows of an expert are the columns (N, in steps of 8 to 16)
// of wgmma and weights its 64-row operand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "cuda/gemm/records.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"
#include "moe/local_experts.h"

namespace fusedmoe::cuda {

/// Shape of the work of one thread block. Warpgroups that multiply: row_groups * k_groups. Each
/// row group has row_blocks blocks of 64 weight rows; the k_groups of one split the blocks of K
/// among them in turn, and their sums are added at the end, in order.
struct TileConfig {
  int max_tokens = 0;  ///< rows of one expert in a tile, at most
  int row_groups = 0;
  int k_groups = 0;
  int row_blocks = 0;
  int cluster = 1;  ///< blocks that work side by side on the same rows and share them

  constexpr int warpgroups() const { return row_groups * k_groups; }
  /// Whether a warpgroup of its own runs the epilogues of what the others multiply. Weights that
  /// are decoded have only `mma.sync` there, so no batch invariance.
  constexpr bool has_epilogue_warpgroup() const { return row_blocks == 1 && max_tokens <= 32; }
  constexpr int tile_row_blocks() const { return row_groups * row_blocks; }
  constexpr bool operator==(const TileConfig&) const = default;
};

/// "128x288k1c2": weight rows x tokens of a block, K groups, blocks of a cluster.
std::string to_string(const TileConfig& config);

/// Configurations that are compiled, from few tokens to many.
inline constexpr TileConfig kTileConfigs[] = {
    {16, 1, 4, 1, 1},  {32, 4, 1, 1, 1},  {64, 4, 1, 1, 1},  {96, 4, 1, 1, 1},
    {144, 2, 1, 2, 1}, {144, 2, 1, 2, 2}, {288, 2, 1, 1, 2},
};
std::span<const TileConfig> tile_configs();

/// Tokens of a tile up to which `mma.sync` multiplies decoded weights faster than wgmma.
inline constexpr int kMmaSyncTokens = 24;

enum class Epilogue {
  kStore,        ///< the sums (activated where the activation is not gated)
  kActivate,     ///< gated activation
  kStoreGateUp,  ///< (rows, 2 width): gate sums, then up sums
};

/// One of the two GEMMs. `rows` are those of all experts, in the order of the grouped GEMM.
struct GemmPhase {
  const void* weights = nullptr;  ///< records of all experts
  std::int64_t expert_bytes = 0;
  int row_blocks = 0;  ///< of one expert
  int k_blocks = 0;
  int k = 0;                      ///< columns of `x`; what is behind them counts as 0
  const float* bias = nullptr;    ///< (experts, row_blocks * 64) in packed row order, or null
  const float* scales = nullptr;  ///< (experts): power of two that all sums are multiplied by
  const void* x = nullptr;        ///< (x_rows, x_pitch) 16-bit numbers, 16-byte aligned
  std::int64_t x_rows = 0;        ///< those of the grouped GEMM
  std::int64_t x_pitch = 0;       ///< elements, a multiple of 8
  void* out = nullptr;            ///< (splits, rows, out_pitch), 16-byte aligned
  std::int64_t out_pitch = 0;     ///< elements, a multiple of 8
  std::int64_t split_pitch = 0;   ///< elements between the partial sums of splits
  int width = 0;                  ///< columns of each row; written are up to a multiple of 8
  int splits = 1;                 ///< K is cut into so many parts; the reader adds them
  bool out_f32 = false;           ///< else as `x`; with Epilogue::kStore
  const std::int32_t* out_rows = nullptr;  ///< with out_f32: rows of `out`; null: the same order
  Epilogue epilogue = Epilogue::kStore;
};

/// Device pointers throughout.
struct GroupedGemm {
  GemmPhase phases[2];
  int num_phases = 2;  ///< the second reads what the first writes
  int num_experts = 0;
  const std::int32_t* expert_num_tokens = nullptr;  ///< (experts)
  const std::int32_t* expert_offsets = nullptr;     ///< (experts): first row; null: e * capacity
  std::int64_t capacity = 0;
  /// Few slots (may_route_inline) every block counts by itself, from these ids, instead of reading
  /// expert_num_tokens and expert_offsets; so it starts while they are still made. Null: not so.
  const std::int32_t* topk_ids = nullptr;
  int num_slots = 0;
  core::LocalExperts local_experts;
  /// work_counters(...) words, zero when the kernel begins.
  std::int32_t* counters = nullptr;
  ResolvedActivation activation{};
  /// Sums of a row in one order, whatever else is in its tile; see
  /// TileConfig::has_epilogue_warpgroup().
  bool batch_invariant = false;
  /// Weights that only one tile of tokens reads need not stay in the L2: what they would push out
  /// may have to be written back first.
  bool weights_evict_first = false;
  /// The operation of the stream before is a kernel that may still run when this one starts. Copies
  /// and whatever a caller enqueues must not: a kernel that starts early waits for kernels only.
  bool overlap_previous = false;
};

/// Words of GroupedGemm::counters for so many rows.
std::int64_t work_counters(const TileConfig& config, std::int64_t rows, std::int64_t num_experts);

/// Largest number of experts.
inline constexpr int kMaxExperts = 2048;

/// Whether GroupedGemm::topk_ids may be set.
constexpr bool may_route_inline(std::int64_t num_slots, std::int64_t num_experts) {
  return num_slots <= 128 && num_experts < kMaxExperts / 2;
}

/// dtype of the rows that weights of a format are multiplied by, and of results.
constexpr DType row_dtype(WeightFormat format) {
  return format == WeightFormat::kF16 ? DType::kF16 : DType::kBF16;
}

/// Enqueues; rows are of row_dtype(format), or f32. Throws Error for a configuration that is not
/// compiled.
void grouped_gemm(const GroupedGemm& problem, WeightFormat format, const TileConfig& config,
                  const Stream& stream);

}  // namespace fusedmoe::cuda
