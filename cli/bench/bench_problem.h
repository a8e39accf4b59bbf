// What the benches of all devices share: a layer's weights, routings, inputs, and the comparison
// with the reference.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/layer_bench.h"
#include "testing/cases.h"

namespace fusedmoe::cli {

double median(std::vector<double> values);

/// A layer of the model as the case generator describes it.
testing::Case bench_case(const ModelConfig& model, const QuantScheme& scheme,
                         std::int64_t num_tokens);
/// Its weights: a few distinct experts of random values, repeated. Packing copies each.
ExpertWeights bench_weights(testing::Case spec, std::int64_t num_experts);

/// Random weights of a router over rows of `hidden` columns: logits of such rows are N(0, 1).
Tensor random_router_weight(const RouterConfig& router, std::int64_t hidden, DType dtype,
                            testing::Random& random);

/// Tensors of one number of tokens, on one device. A layer writes ids and weights where there are
/// tensors for them.
struct BenchBuffers {
  Tensor hidden_states, output, topk_ids, topk_weights, workspace;
};

/// What is timed: experts from given ids, or a layer from hidden states.
class BenchTarget {
 public:
  virtual ~BenchTarget() = default;
  /// "cpu+no_ep"
  virtual std::string implementation() const = 0;
  virtual std::size_t workspace_bytes(std::int64_t num_tokens) const = 0;
  /// `kernel_config`: see ForwardArgs; a layer has its own choice.
  virtual void run(const BenchBuffers& buffers, Stream stream, int kernel_config = -1) const = 0;
  /// As those of Experts; a layer names none.
  virtual std::vector<std::string> kernel_configs(std::int64_t) const { return {}; }
  virtual int find_kernel_config(const std::string&) const { return -1; }
};

/// What a number of tokens costs at least.
struct BenchWork {
  double flops, expert_bytes;
  BenchWork(const testing::Case& spec, std::int64_t weight_bytes);
};

/// (num_tokens, topk) f32.
Tensor random_topk_weights(std::int64_t num_tokens, std::int64_t topk, testing::Random& random);

/// Draws random ids of distinct experts, one token after the other.
class RoutingDraw {
 public:
  RoutingDraw(std::int64_t num_experts, testing::RoutingSkew skew);

  /// `topk_ids` (num_tokens, topk) i32 on the CPU. Single tokens walk through all experts, so that
  /// weights are cold.
  void draw(const TensorView& topk_ids);

 private:
  std::int32_t draw_expert(bool walks);

  testing::RoutingSkew skew_;
  testing::Random random_{1};
  std::vector<std::int32_t> expert_order_;
  std::size_t next_expert_ = 0;
};

/// A model's layer with bench_weights(), and random weights of its router.
class BenchProblem {
 public:
  BenchProblem(BenchOptions options, const PackProgress& progress);

  const BenchOptions& options() const { return options_; }
  const BenchTarget& target() const { return *target_; }
  std::int64_t weight_bytes() const { return experts_.nbytes(); }
  testing::Case spec(std::int64_t num_tokens) const;

  /// Random hidden states and router weights; no ids yet.
  BenchBuffers buffers(const testing::Case& spec) const;
  /// Replaces the inputs by those of the next sample. Of experts: ids, and weights if a routing is
  /// replayed. Of a layer: hidden states. On a GPU they are new tensors.
  void route(BenchBuffers& buffers);
  /// Rows from all over the batch, as `reference` computes them from the same inputs.
  Tensor expected_rows(const testing::Case& spec, const BenchBuffers& timed) const;
  /// Error of those rows; infinite where only one of them has a NaN or an
  /// infinity. Rows that depend on their batch are computed again in a smaller one.
  double relative_error(const testing::Case& spec, const BenchBuffers& timed,
                        const Tensor& expected) const;

 private:
  std::unique_ptr<BenchTarget> make_target(const std::string& experts, Device device,
                                           const PackProgress& progress) const;
  BenchBuffers make_buffers(const BenchTarget& target, Device device,
                            const testing::Case& spec) const;
  void replay(const TensorView& topk_ids, const TensorView& topk_weights);
  BenchBuffers run_sample(const BenchTarget& target, Device device, testing::Case spec,
                          const BenchBuffers& all) const;

  BenchOptions options_;
  ExpertWeights experts_;
  std::unique_ptr<BenchTarget> target_;
  RoutingDraw routing_;
  std::int64_t next_row_ = 0;  // of the recorded routing
  testing::Random random_{1};  // of hidden states
};

}  // namespace fusedmoe::cli
