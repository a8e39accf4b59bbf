// See experts.h. A slot is a (token, choice) pair t * topk + j in the standard format and a row
// e * max_tokens + i in the batched one; only slots of a local expert take part. Each output
// element has its own sum in a fixed order, so a row never depends on its batch.
#include "reference/experts.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/parallel.h"
#include "core/workspace.h"
#include "moe/experts_args.h"
#include "moe/local_experts.h"
#include "moe/routed_experts.h"
#include "quant/quantize.h"
#include "quant/weight_layout.h"
#include "reference/activation.h"
#include "reference/backend.h"
#include "reference/matrix.h"
#include "reference/packed_weights.h"
#include "reference/unfused.h"

namespace fusedmoe::reference {
namespace {

/// Multiplications below which waking the threads costs more than it saves.
constexpr std::int64_t kParallelWork = 1 << 16;

/// Sizes of one apply. The batched format has num_experts * max_tokens rows and as many slots.
struct Sizes {
  std::int64_t rows;   // of hidden_states
  std::int64_t slots;  // of results
  std::int64_t num_experts;
  std::int64_t hidden;
  std::int64_t intermediate;

  /// Room for what either GEMM multiplies.
  std::int64_t operand_width() const { return std::max(hidden, intermediate); }
};

/// What lies in the two workspaces.
struct Buffers {
  double* gate_up;        // (slots, 2 * intermediate), in workspace 13
  double* operand;        // (slots, operand_width): rows of x, then activated ones, decoded
  double* y;              // (slots, hidden)
  std::int64_t* slots;    // (slots): those of expert 0, of expert 1, ...
  std::int64_t* offsets;  // (num_experts + 1) into `slots`
  // With quantized activations, (slots, ...): rows before and after quantization.
  float* unquantized;   // operand_width
  std::uint8_t* codes;  // operand_width
  float* scales;        // scales_per_row, of any type

  std::size_t bytes13, bytes2;

  Buffers(const Sizes& n, const std::optional<QuantKey>& key, void* workspace13, void* workspace2) {
    core::WorkspaceCutter in13(workspace13), in2(workspace2);
    const std::int64_t width = n.operand_width();
    gate_up = take<double>(in13, {n.slots, 2, n.intermediate});
    operand = take<double>(in2, {n.slots, width});
    y = take<double>(in2, {n.slots, n.hidden});
    slots = take<std::int64_t>(in2, {n.slots});
    offsets = take<std::int64_t>(in2, {n.num_experts + 1});
    const std::int64_t quantized = key ? n.slots : 0;
    unquantized = take<float>(in2, {quantized, width});
    codes = take<std::uint8_t>(in2, {quantized, width});
    scales = take<float>(in2, {quantized, key ? core::scales_per_row(*key, width) : 0});
    bytes13 = in13.used();
    bytes2 = in2.used();
  }

 private:
  template <typename T>
  static T* take(core::WorkspaceCutter& cutter, const Shape& shape) {
    return static_cast<T*>(cutter.take(static_cast<std::size_t>(shape.numel()) * sizeof(T)));
  }
};

/// y[slot] = x[slot] matrix^T + bias for the `count` slots of one expert.
struct Linear {
  Executor& executor;
  const WeightMatrix& matrix;  // (out, in)
  const QuantKey& key;
  std::int64_t out, in;
  const std::int64_t* slots;
  std::int64_t count;
  const double* x;
  std::int64_t x_stride;
  double* y;
  std::int64_t y_stride;
};

double dot(const double* x, const double* w, std::int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) sum += x[i] * w[i];
  return sum;
}

void apply_linear(const Linear& a) {
  constexpr std::int64_t kChunk = 512;  // columns decoded at a time, once for all slots
  const bool worthwhile = a.out * a.in * a.count >= kParallelWork;
  core::parallel_for(a.executor, a.out, worthwhile, [&](std::int64_t o) {
    for (std::int64_t r = 0; r < a.count; ++r) {
      a.y[a.slots[r] * a.y_stride + o] = bias(a.matrix, o);
    }
    for (std::int64_t begin = 0; begin < a.in; begin += kChunk) {
      const std::int64_t columns = std::min(kChunk, a.in - begin);
      double w[kChunk];
      for (std::int64_t i = 0; i < columns; ++i) w[i] = element(a.matrix, a.key, o, begin + i);
      for (std::int64_t r = 0; r < a.count; ++r) {
        const std::int64_t slot = a.slots[r];
        a.y[slot * a.y_stride + o] += dot(a.x + slot * a.x_stride + begin, w, columns);
      }
    }
  });
}

class ReferenceExperts final : public core::RoutedExperts {
 public:
  ReferenceExperts(const ExpertsDescriptor& descriptor, const MoeConfig& config,
                   const Context& context)
      : RoutedExperts(descriptor, config, context, backend()) {}

  bool accepts(const PackedWeights& weights) const override {
    return dynamic_cast<const ReferenceWeights*>(&weights) &&
           core::matches(weights.info(), config());
  }
  std::shared_ptr<PackedWeights> pack(const ExpertWeights& weights,
                                      const PackOptions& options) const override;
  WorkspacePlan plan(const ProblemSize& problem) const override;
  ExpertWeights unpack(const PackedWeights& packed, std::int64_t expert) const override;
  void repack(const ExpertWeights& weights, std::int64_t expert,
              PackedWeights& packed) const override;

 private:
  void run_routed(const ForwardArgs& args) const override;
  Sizes sizes(const ProblemSize& problem) const;
};

class ReferenceDescriptor final : public ExpertsDescriptor {
 public:
  std::string_view name() const override { return "reference"; }
  Support supports(const MoeConfig& config) const override {
    const std::optional<QuantKey>& activations = config.scheme.activations;
    const bool known = core::find_weight_layout(config.scheme.weights) &&
                       (!activations || core::has_quantizer(*activations));
    return core::supports_on_cpu(config, known, "every named scheme");
  }
  bool on_request_only() const override { return true; }
  std::string_view instruction_set() const override { return "generic"; }
  int layout_version() const override { return 1; }
  WeightAndReduce weight_and_reduce(ActivationFormat format) const override {
    return format == ActivationFormat::kBatchedExperts ? WeightAndReduce::kDelegate
                                                       : WeightAndReduce::kNoOp;
  }
  std::shared_ptr<const Experts> create(const MoeConfig& config,
                                        const Context& context) const override {
    core::check_supported(*this, config);
    return std::make_shared<ReferenceExperts>(*this, config, context);
  }
};

Sizes ReferenceExperts::sizes(const ProblemSize& p) const {
  const std::int64_t rows = p.num_tokens * (batched() ? p.num_local_experts : 1);
  return {rows, batched() ? rows : Shape({rows, p.topk}).numel(), p.num_local_experts, p.hidden,
          p.intermediate};
}

WorkspacePlan ReferenceExperts::plan(const ProblemSize& problem) const {
  const Buffers buffers(sizes(problem), problem.scheme.activations, nullptr, nullptr);
  WorkspacePlan plan;
  plan.workspace13_bytes = buffers.bytes13;
  plan.workspace2_bytes = buffers.bytes2;
  if (config().hooks) plan.workspace2_bytes += UnfusedRows(problem, nullptr).bytes();
  plan.output_shape = batched()
                          ? Shape{problem.num_local_experts, problem.num_tokens, problem.hidden}
                          : Shape{problem.num_tokens, problem.hidden};
  plan.output_dtype = problem.output_dtype;
  return plan;
}

std::shared_ptr<PackedWeights> ReferenceExperts::pack(const ExpertWeights& weights,
                                                      const PackOptions& options) const {
  auto packed = std::make_shared<ReferenceWeights>(core::make_packed_info(*this, weights), weights);
  if (options.progress) {
    for (std::int64_t e = 1; e <= weights.num_experts(); ++e) {
      options.progress(e, weights.num_experts());
    }
  }
  return packed;
}

ExpertWeights ReferenceExperts::unpack(const PackedWeights& packed, std::int64_t expert) const {
  core::check_expert(*this, packed, expert);
  return copy_expert(static_cast<const ReferenceWeights&>(packed).source, expert);
}

void ReferenceExperts::repack(const ExpertWeights& weights, std::int64_t expert,
                              PackedWeights& packed) const {
  core::check_expert(*this, packed, expert);
  core::check_replacement(weights, packed.info());
  auto& target = static_cast<ReferenceWeights&>(packed);
  const auto index = static_cast<std::size_t>(expert);
  target.replaced[index] = copy_expert(weights, 0);
  target.source.experts[index] = target.replaced[index].experts.front();
}

/// Writes one rounded element of row `row`, or adds it to what is there.
void write(const TensorView& output, std::int64_t row, std::int64_t column, double value,
           bool accumulate) {
  const std::int64_t index = row * output.stride(output.rank() - 2) + column;
  if (accumulate) value += load(output.data(), output.dtype(), index);
  store(output.data(), output.dtype(), index, value);
}

/// out[token] = sum over its slots of weight * y, rounded once.
void weight_and_sum(const ForwardArgs& args, const Sizes& n, const double* y) {
  const std::int64_t topk = args.topk_ids.size(1);
  const auto* ids = args.topk_ids.as<const std::int32_t>();
  const auto* weights = args.topk_weights.as<const float>();
  const core::LocalExperts local_expert(args.expert_map, n.num_experts);
  const bool worthwhile = n.slots * n.hidden >= kParallelWork;
  Executor& executor = core::executor_of(args.stream);
  core::parallel_for(executor, n.rows, worthwhile, [&](std::int64_t token) {
    for (std::int64_t column = 0; column < n.hidden; ++column) {
      double sum = 0;
      for (std::int64_t slot = token * topk; slot < (token + 1) * topk; ++slot) {
        if (local_expert(ids[slot]) < 0) continue;
        const double weight = args.apply_router_weight_on_input ? 1 : weights[slot];
        sum += weight * y[slot * n.hidden + column];
      }
      write(args.fused_output, token, column, sum, args.accumulate);
    }
  });
}

/// out[expert, i] = y, rounded once; zeros behind the expert's last row.
void store_batched(const ForwardArgs& args, const Sizes& n, const double* y) {
  const std::int64_t max_tokens = args.hidden_states.size(1);
  for (std::int64_t slot = 0; slot < n.slots; ++slot) {
    const std::int64_t expert = slot / max_tokens, row = slot % max_tokens;
    const bool real = row < args.expert_num_tokens.as<const std::int32_t>()[expert];
    for (std::int64_t column = 0; column < n.hidden; ++column) {
      write(args.fused_output, slot, column, real ? y[slot * n.hidden + column] : 0, false);
    }
  }
}

/// One apply(): the steps in the order they are taken.
class Forward {
 public:
  Forward(const ForwardArgs& args, const Sizes& n, const ProblemSize& problem, bool batched,
          bool quantized_inputs)
      : args_(args),
        n_(n),
        dtype_(problem.dtype),
        topk_(batched ? 1 : problem.topk),
        batched_(batched),
        quantized_inputs_(quantized_inputs),
        weights_(static_cast<const ReferenceWeights&>(*args.weights).source),
        key_(weights_.scheme.activations),
        b_(n, key_, args.workspace13, args.workspace2) {}

  /// Steps whose results are rounded and pass the hooks, behind the other buffers in workspace 2.
  void set_unfused(const ProblemSize& problem) {
    unfused_.emplace(problem, static_cast<char*>(args_.workspace2) + b_.bytes2);
    hooks_ = args_.hooks ? args_.hooks : &kNoHooks;
  }

  void run() {
    group_slots();
    if (unfused_) unfused_->set_order(b_.slots, b_.offsets);
    for (std::int64_t e = 0; e < n_.num_experts; ++e) {
      if (count(e) == 0) continue;
      load_inputs(e);
      multiply_gate_and_up(e);
    }
    if (unfused_) {
      const std::int64_t width = (gated() ? 2 : 1) * n_.intermediate;
      unfused_->after_gemm1(*hooks_, quantized_inputs_ ? TensorView() : args_.hidden_states,
                            {b_.gate_up, 2 * n_.intermediate, width});
    }
    for (std::int64_t e = 0; e < n_.num_experts; ++e) activate_rows(e);
    if (unfused_) {
      unfused_->after_activation(*hooks_, {b_.operand, n_.operand_width(), n_.intermediate});
    }
    if (key_) keep_unquantized();
    const float tensor_scale = scale_of_activated();
    for (std::int64_t e = 0; e < n_.num_experts; ++e) {
      if (count(e) == 0) continue;
      if (key_) quantize_rows(e, n_.intermediate, *key_, scale_of_expert(e, tensor_scale));
      multiply(weights_.experts[static_cast<std::size_t>(e)].down, e, n_.hidden, n_.intermediate,
               b_.y, n_.hidden);
    }
    if (unfused_) unfused_->after_gemm2(*hooks_, {b_.y, n_.hidden, n_.hidden});
    if (batched_) {
      store_batched(args_, n_, b_.y);
    } else {
      weight_and_sum(args_, n_, b_.y);
    }
  }

 private:
  std::int64_t count(std::int64_t e) const { return b_.offsets[e + 1] - b_.offsets[e]; }
  const std::int64_t* slots(std::int64_t e) const { return b_.slots + b_.offsets[e]; }

  void group_slots() {
    const core::LocalExperts local_expert(args_.expert_map, n_.num_experts);
    std::int64_t count = 0;
    for (std::int64_t e = 0; e < n_.num_experts; ++e) {
      b_.offsets[e] = count;
      if (batched_) {
        const std::int64_t max_tokens = args_.hidden_states.size(1);
        for (std::int64_t i = 0; i < args_.expert_num_tokens.as<const std::int32_t>()[e]; ++i) {
          b_.slots[count++] = e * max_tokens + i;
        }
      } else {
        const auto* ids = args_.topk_ids.as<const std::int32_t>();
        for (std::int64_t slot = 0; slot < n_.slots; ++slot) {
          if (local_expert(ids[slot]) == e) b_.slots[count++] = slot;
        }
      }
    }
    b_.offsets[n_.num_experts] = count;
  }

  /// Rows of x for one expert: decoded, widened, or quantized here and decoded.
  void load_inputs(std::int64_t e) {
    const std::int64_t width = n_.operand_width();
    for (std::int64_t r = 0; r < count(e); ++r) {
      const std::int64_t slot = slots(e)[r], row = slot / topk_;
      double* x = b_.operand + slot * width;
      if (quantized_inputs_) {
        const QuantizedRow codes = input_row(row);
        for (std::int64_t i = 0; i < n_.hidden; ++i) x[i] = element(codes, i);
        continue;
      }
      const TensorView& states = args_.hidden_states;
      for (std::int64_t i = 0; i < n_.hidden; ++i) {
        x[i] = load(states.data(), states.dtype(), row * states.stride(states.rank() - 2) + i);
        if (key_) b_.unquantized[slot * width + i] = static_cast<float>(x[i]);
      }
    }
    if (!key_ || quantized_inputs_) return;
    const ExpertMatrices& expert = weights_.experts[static_cast<std::size_t>(e)];
    quantize_rows(e, n_.hidden, *key_, std::max(input_scale(expert.gate), input_scale(expert.up)));
  }

  QuantizedRow input_row(std::int64_t row) const {
    const bool per_tensor = key_->group.rows < 0;
    const std::int64_t row_bytes = core::scales_per_row(*key_, n_.hidden) * bytes(*key_->scale, 1);
    const TensorView& states = args_.hidden_states;
    return {*key_, states.as<const std::uint8_t>() + row * states.stride(states.rank() - 2),
            args_.hidden_scales.as<const char>() + (per_tensor ? 0 : row * row_bytes)};
  }

  /// 0 for a matrix without one.
  static float input_scale(const WeightMatrix& matrix) {
    return matrix.input_scale ? *matrix.input_scale.as<const float>() : 0;
  }

  /// Of NVFP4 and of scales per tensor; other keys take none.
  float scale_of_expert(std::int64_t e, float tensor_scale) const {
    if (!key_->global_scale) return tensor_scale;
    return input_scale(weights_.experts[static_cast<std::size_t>(e)].down);
  }

  /// `unquantized` rows of an expert to codes, and the values of those to `operand`.
  void quantize_rows(std::int64_t e, std::int64_t columns, const QuantKey& key, float scale) {
    const std::int64_t width = n_.operand_width();
    const std::int64_t row_scales = core::scales_per_row(key, width);
    for (std::int64_t r = 0; r < count(e); ++r) {
      const std::int64_t slot = slots(e)[r];
      std::uint8_t* codes = b_.codes + slot * width;
      float* scales = b_.scales + slot * row_scales;
      core::quantize_row(b_.unquantized + slot * width, columns, key, scale, codes, scales);
      if (key.group.rows < 0) *scales = scale;
      const QuantizedRow row{key, codes, scales, key.global_scale ? scale : 1.0};
      for (std::int64_t i = 0; i < columns; ++i) b_.operand[slot * width + i] = element(row, i);
    }
  }

  void multiply(const WeightMatrix& matrix, std::int64_t e, std::int64_t out, std::int64_t in,
                double* y, std::int64_t y_stride) const {
    apply_linear({core::executor_of(args_.stream), matrix, weights_.scheme.weights, out, in,
                  slots(e), count(e), b_.operand, n_.operand_width(), y, y_stride});
  }

  bool gated() const { return is_gated(args_.weights->info().activation.kind); }

  void multiply_gate_and_up(std::int64_t e) const {
    const ExpertMatrices& expert = weights_.experts[static_cast<std::size_t>(e)];
    const std::int64_t inner = n_.intermediate;
    multiply(expert.gate, e, inner, n_.hidden, b_.gate_up, 2 * inner);
    if (gated()) multiply(expert.up, e, inner, n_.hidden, b_.gate_up + inner, 2 * inner);
  }

  /// Activated rows, rounded once to the layer's dtype.
  void activate_rows(std::int64_t e) {
    const ResolvedActivation& activation = args_.weights->info().activation;
    const std::int64_t inner = n_.intermediate, width = n_.operand_width();
    const std::int64_t rows = count(e);
    const bool worthwhile = rows * inner >= kParallelWork / 16;
    core::parallel_for(core::executor_of(args_.stream), rows, worthwhile, [&](std::int64_t r) {
      const std::int64_t slot = slots(e)[r];
      const double* gate = b_.gate_up + slot * 2 * inner;
      for (std::int64_t i = 0; i < inner; ++i) {
        const double up = gated() ? gate[inner + i] : 0;
        b_.operand[slot * width + i] = round_to(dtype_, activate(activation, gate[i], up));
      }
    });
  }

  /// The activated rows as the quantizers read them.
  void keep_unquantized() const {
    const std::int64_t width = n_.operand_width();
    for (std::int64_t r = 0; r < b_.offsets[n_.num_experts]; ++r) {
      const std::int64_t begin = b_.slots[r] * width;
      for (std::int64_t i = begin; i < begin + n_.intermediate; ++i) {
        b_.unquantized[i] = static_cast<float>(b_.operand[i]);
      }
    }
  }

  /// Scale per tensor before GEMM 2: the static one, or that of all real rows of all experts.
  float scale_of_activated() const {
    if (!key_ || key_->group.rows >= 0) return 0;
    if (!key_->dynamic) return *args_.weights->info().a2_scale;
    float largest = 0;
    for (std::int64_t i = 0; i < b_.offsets[n_.num_experts]; ++i) {
      const float* row = b_.unquantized + b_.slots[i] * n_.operand_width();
      largest = std::max(largest, core::amax(row, n_.intermediate));
    }
    return core::tensor_scale(largest);
  }

  const ForwardArgs& args_;
  const Sizes& n_;
  const DType dtype_;
  const std::int64_t topk_;
  const bool batched_, quantized_inputs_;
  const ExpertWeights& weights_;
  const std::optional<QuantKey>& key_;
  const Buffers b_;
  static inline const ExpertsHooks kNoHooks{};
  const ExpertsHooks* hooks_ = nullptr;
  std::optional<UnfusedRows> unfused_;
};

void ReferenceExperts::run_routed(const ForwardArgs& args) const {
  const ProblemSize problem = core::problem_of(*this, args);
  if (problem.num_tokens == 0) return;
  const Sizes n = sizes(problem);
  const bool quantized_inputs =
      problem.scheme.activations && !descriptor().expects_unquantized_inputs(problem.scheme);
  Forward forward(args, n, problem, batched(), quantized_inputs);
  if (config().hooks) forward.set_unfused(problem);
  forward.run();
}

}  // namespace

const ExpertsDescriptor& descriptor() {
  static const ReferenceDescriptor descriptor;
  return descriptor;
}

}  // namespace fusedmoe::reference
