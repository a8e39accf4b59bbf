// How the Hopper experts run, and what scratch memory that takes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/gemm/heuristic.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

inline constexpr std::int64_t kPitchUnit = 8;  // elements: rows of activations start at 16 bytes

/// How the experts run, by their configuration.
enum class Variant { kStandard, kBatched, kUnfused, kBatchInvariant };

Variant variant_of(const MoeConfig& config);

/// Scratch of one forward. With a null block only the size is meaningful.
struct Scratch {
  std::int64_t rows = 0;             // token rows of all experts, at most
  std::int64_t activated_pitch = 0;  // elements
  void* routing = nullptr;
  std::int32_t* counters = nullptr;
  void* permuted = nullptr;   // (rows, hidden): hidden states in expert order
  void* gate_up = nullptr;    // unfused: GEMM 1's rows
  void* activated = nullptr;  // (rows, activated_pitch)
  void* rows_out = nullptr;   // (splits, rows, hidden): GEMM 2's rows, for the combine
  std::size_t bytes = 0;

  Scratch(const ProblemSize& problem, Variant variant, const KernelConfig& config, void* block);
};

}  // namespace fusedmoe::cuda
