// The kernel configuration and the scratch memory of each forward, for one MoeConfig: all that can
// be said of the experts without a device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/experts/one_token_plan.h"
#include "cuda/experts/row_format.h"
#include "cuda/experts/scratch.h"
#include "cuda/mlp/kernel_choice.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

/// Keeps a reference to the configuration.
class Planner {
 public:
  Planner(const MoeConfig& config, const Context& context, const KernelFamily& family,
          const DeviceLimits& device);

  const KernelFamily& family() const { return family_; }
  const WeightFormat& format() const { return format_; }
  Variant variant() const { return variant_; }
  int multiprocessors() const { return device_.multiprocessors; }
  const OneTokenPlan& one_token() const { return one_token_; }

  /// Experts::workspace_sizes() and kernel_configs().
  WorkspaceSizes workspace_sizes(const ProblemSize& problem) const;
  std::vector<std::string> kernel_configs(const ProblemSize& problem) const;
  /// What the caller requests, else what was tuned, else what the heuristic chooses. `in_tiles`:
  /// not the kernel of one token, which neither reads quantized rows or row_sources nor writes to
  /// row_targets.
  KernelConfig config_for(const ProblemSize& problem, int requested, bool in_tiles = false) const;
  Scratch scratch_of(const ProblemSize& problem, const KernelConfig& config, void* block) const {
    return Scratch(problem, rows_, variant_, config, block);
  }

 private:
  bool batched() const { return variant_ == Variant::kBatched; }
  MlpShape shape_of(const ProblemSize& problem) const;

  /// What was tuned for one layer, by number of tokens.
  struct TunedTokens {
    std::int64_t num_tokens;
    KernelConfig config;
  };

  const MoeConfig& config_;
  const KernelFamily& family_;
  const WeightFormat& format_;
  const RowFormat rows_;
  const Variant variant_;
  const DeviceLimits device_;
  const OneTokenPlan one_token_;
  std::vector<TunedTokens> tuned_;  // ascending numbers of tokens
};

/// The configuration that is likely the fastest: the kernel of one token, or tiles.
KernelConfig choose_config(const MlpShape& shape);

}  // namespace fusedmoe::cuda
