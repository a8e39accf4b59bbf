// The one case generator of tests, benchmarks and the CLI.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/experts.h"
#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"
#include "testing/case.h"
#include "testing/random.h"

namespace fusedmoe::testing {

/// Awkward ones first: sizes 1, 2880, 360 and primes, 0 tokens, empty experts, all tokens on one
/// expert, k = 1 and k = E, ids of -1, expert maps. Sizes suit the reference implementation. Ids
/// of a token are distinct, so every case suits the batched format too.
std::vector<Case> awkward_cases();

/// The same for one scheme: sizes that divide no block (360, 90, 192, 1368, 2), every layout it
/// has, biases, maps, ids of -1, weights on the input, and activations that go round from scheme to
/// scheme. Small enough for the reference.
std::vector<Case> scheme_cases(const NamedScheme& scheme);
/// Of every named scheme.
std::vector<Case> scheme_cases();

/// A case with its tensors. Weights ~ N(0, 1 / fan-in), so outputs are of order one, quantized
/// where the scheme says so; MXFP4 blocks have random codes and scales around 1 / sqrt(fan-in).
/// Biases ~ N(0, 1/4). Hidden states ~ N(0, 1) are bf16 values. The same case gives the same
/// numbers in every layout of the weights, but for scale blocks of several rows, which count from
/// the first row of w13.
struct Problem {
  Case spec;
  ExpertWeights weights;  ///< local experts only, when there is an expert map; views of stacked
                          ///< tensors in the layout that the case asks for
  Tensor hidden_states;   ///< (num_tokens, hidden) f32, holding bf16 values
  Tensor topk_ids;        ///< (num_tokens, topk) i32
  Tensor topk_weights;    ///< (num_tokens, topk) f32
  Tensor expert_map;      ///< (num_experts) i32, or undefined
};
Problem make_problem(const Case& spec);

/// The configuration that the case asks implementations about.
MoeConfig make_config(const Case& spec, DType dtype, Device device = {});

/// One way to run a layer: a pair of the registry, and what a configuration asks of it.
struct Variant {
  const ExpertsDescriptor* experts = nullptr;
  const PrepareFinalizeDescriptor* prepare_finalize = nullptr;
  bool hooks = false, monolithic = false, batch_invariant = false;

  /// "cpu", "cpu_batched", "cpu_unfused", "cpu_monolithic", "sm90_batch_invariant".
  std::string name() const;
  /// `config` with the variant's wishes.
  MoeConfig of(MoeConfig config) const;
  /// Whether the pair serves `config` with the variant's wishes.
  Support supports(const MoeConfig& config) const;
  /// What runs of(config).
  ModularKernel create(const MoeConfig& config, const Context& context = {}) const;
};
/// Each with at most one of the wishes.
std::vector<Variant> all_variants();
/// Those that serve a configuration.
std::vector<Variant> variants_for(const MoeConfig& config);
/// By Variant::name(). Throws std::out_of_range for any other.
Variant find_variant(std::string_view name);

/// Fills floating tensors with NaN and integers with 0x7f bytes: what was not written shows.
void poison(const TensorView& view);

/// What run_experts() needs not.
struct RunOptions {
  const ExpertsHooks* hooks = nullptr;
  int kernel_config = -1;
};

/// Runs experts and a prepare/finalize on the problem, step by step, in the dtype and on the device
/// of their configuration; returns (num_tokens, hidden) of that dtype in host memory. Every buffer
/// has exactly the planned size, so that a sanitizer sees the first byte beyond it, and is
/// poisoned. Monolithic experts get a router that returns the problem's ids, on CUDA by descending
/// weight. Throws Error when an input changed on the way.
Tensor run_experts(const Problem& problem, const ModularKernel& kernel, const PackedWeights& packed,
                   const RunOptions& options = {});

/// The same from the beginning: makes the instances and packs the weights.
Tensor run_variant(const Problem& problem, const Variant& variant, DType dtype, Device device = {},
                   const RunOptions& options = {});

}  // namespace fusedmoe::testing
