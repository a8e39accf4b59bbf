// What the benches of all devices share: a layer's weights, routings, inputs, and the comparison
// with the reference.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench.h"
#include "fusedmoe/modular_kernel.h"
#include "testing/cases.h"

namespace fusedmoe::cli {

double median(std::vector<double> values);

/// Largest accepted error of a timed configuration: the bound of the golden tests for bf16, and
/// likewise for the sums of f32 and the rounding of f16. Sums of another order may quantize a value
/// at a tie to the other neighbour, which moves it by a whole step.
double error_bound(DType dtype, const QuantScheme& scheme);

/// A layer of the model as the case generator describes it.
testing::Case bench_case(const ModelConfig& model, const QuantScheme& scheme,
                         std::int64_t num_tokens);
/// Its weights: a few distinct experts of random values, repeated. Packing copies each.
ExpertWeights bench_weights(testing::Case spec, std::int64_t num_experts);

/// Tensors of one number of tokens, on one device.
struct BenchBuffers {
  Tensor hidden_states, output, topk_ids, topk_weights, workspace;

  /// Random hidden states and weights; no ids yet.
  BenchBuffers(const ModularKernel& kernel, const testing::Case& spec);
  /// `kernel_config`: see ForwardArgs.
  void run(const ModularKernel& kernel, const PackedWeights& packed, Stream stream,
           int kernel_config = -1) const;
};

/// What a number of tokens costs at least.
struct BenchWork {
  double flops, expert_bytes;
  BenchWork(const testing::Case& spec, std::int64_t weight_bytes);
};

/// A model's layer with bench_weights().
class BenchProblem {
 public:
  BenchProblem(BenchOptions options, const PackProgress& progress);

  const BenchOptions& options() const { return options_; }
  const ModularKernel& kernel() const { return *kernel_; }
  const PackedWeights& packed() const { return *packed_; }
  std::int64_t weight_bytes() const { return weights_.nbytes(); }
  std::string implementation() const;
  testing::Case spec(std::int64_t num_tokens) const;

  /// The next routing, into host tensors: drawn or replayed. Distinct experts for each token;
  /// single tokens walk through all experts, so that weights are cold.
  void route(const TensorView& topk_ids, const TensorView& topk_weights);
  /// Rows from all over the batch, as `reference` computes them from the same inputs.
  Tensor expected_rows(const testing::Case& spec, const BenchBuffers& timed) const;
  /// Error of those rows; infinite where only one of them has a NaN or an
  /// infinity. Rows that depend on their batch are computed again in a smaller one.
  double relative_error(const testing::Case& spec, const BenchBuffers& timed,
                        const Tensor& expected) const;

 private:
  std::int32_t draw_expert(std::int64_t num_tokens);
  void draw(const TensorView& topk_ids);
  void replay(const TensorView& topk_ids, const TensorView& topk_weights);
  BenchBuffers run_sample(const ModularKernel& kernel, const PackedWeights& packed,
                          testing::Case spec, const BenchBuffers& all) const;

  BenchOptions options_;
  ExpertWeights weights_;
  std::unique_ptr<ModularKernel> kernel_;
  std::shared_ptr<const PackedWeights> packed_;
  std::vector<std::int32_t> expert_order_;
  std::size_t next_expert_ = 0;
  std::int64_t next_row_ = 0;  // of the recorded routing
  testing::Random random_{1};
};

}  // namespace fusedmoe::cli
