// How the experts run, and what scratch memory that takes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/workspace.h"
#include "cuda/experts/row_format.h"
#include "cuda/mlp/kernel_config.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

inline constexpr std::int64_t kPitchUnit = 8;  // elements: rows of activations start at 16 bytes

/// How the experts run, by their configuration.
enum class Variant { kStandard, kBatched, kUnfused, kBatchInvariant };

Variant variant_of(const MoeConfig& config);

/// Quantized rows.
struct QuantizedRows {
  void* codes = nullptr;
  std::int64_t pitch = 0;  // of codes
  float* scales = nullptr;
  std::int64_t scale_pitch = 0;  // between groups; 0: a row has one scale
};

/// Scratch of one forward. With a null block only the size is meaningful.
struct Scratch {
  std::int64_t rows = 0;             // token rows of all experts, at most
  std::int64_t activated_pitch = 0;  // elements
  void* routing = nullptr;
  std::int32_t* counters = nullptr;
  int group_counters = 0;            // RowPass::group_counters
  std::int32_t* arrivals = nullptr;  // RowArrivals::counts, behind the counters
  std::uint32_t* amax = nullptr;     // (2) behind these, cleared with them
  void* permuted = nullptr;          // (rows, hidden): hidden states in expert order; or null
  QuantizedRows hidden;              // the same as codes
  void* gate_up = nullptr;           // unfused: GEMM 1's rows
  void* activated = nullptr;         // (rows, activated_pitch); or null: GEMM 1 stores codes
  QuantizedRows quantized;           // activated rows as codes, or where they take a pass
  void* rows_out = nullptr;          // (splits, rows, hidden): GEMM 2's rows, for the combine
  std::size_t bytes = 0;

  Scratch(const ProblemSize& problem, const RowFormat& format, Variant variant,
          const KernelConfig& config, void* block);
  /// Words from `counters` on that are zero when a forward begins.
  std::int64_t num_zeroed = 0;

 private:
  QuantizedRows take_codes(core::WorkspaceCutter& cutter, const RowFormat& format,
                           const QuantKey& key, std::int64_t columns);
};

}  // namespace fusedmoe::cuda
