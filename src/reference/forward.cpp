// The steps of the reference experts. A slot is a (token, choice) pair t * topk + j in the standard
// format and a row e * max_tokens + i in the batched one; only slots of a local expert take part.
// Each output element has its own sum in a fixed order, so a row never depends on its batch.
#include "reference/forward.h"

#include <algorithm>
#include <optional>

#include "core/parallel.h"
#include "core/workspace.h"
#include "moe/experts_args.h"
#include "moe/local_experts.h"
#include "moe/problem_size.h"
#include "quant/quantize.h"
#include "reference/activation.h"
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

Sizes sizes_of(const ProblemSize& p, bool batched) {
  const std::int64_t rows = p.num_tokens * (batched ? p.num_local_experts : 1);
  return {rows, batched ? rows : Shape({rows, p.topk}).numel(), p.num_local_experts, p.hidden,
          p.intermediate};
}

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
    codes = take<std::uint8_t>(in2, {quantized, key ? bytes(key->value, width) : 0});
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

/// Writes one rounded element of row `row`, or adds it to what is there.
void write(const TensorView& output, std::int64_t row, std::int64_t column, double value,
           bool accumulate) {
  const std::int64_t index = row * output.stride(output.rank() - 2) + column;
  if (accumulate) value += load(output.data(), output.dtype(), index);
  store(output.data(), output.dtype(), index, value);
}

/// out[token] = sum over its slots of weight * y, rounded once.
void weight_and_sum(const ForwardArgs& args, bool weights_on_input, const Sizes& n,
                    const double* y) {
  const std::int64_t topk = args.topk_ids.size(1);
  const auto* ids = args.topk_ids.as<const std::int32_t>();
  const auto* weights = args.topk_weights.as<const float>();
  const core::LocalExperts local_expert(args.expert_map, n.num_experts);
  const bool worthwhile = n.slots * n.hidden >= kParallelWork;
  core::Completing executor(core::executor_of(args.stream));
  core::parallel_for(executor, n.rows, worthwhile, [&](std::int64_t token) {
    for (std::int64_t column = 0; column < n.hidden; ++column) {
      double sum = 0;
      for (std::int64_t slot = token * topk; slot < (token + 1) * topk; ++slot) {
        if (local_expert(ids[slot]) < 0) continue;
        const double weight = weights_on_input ? 1 : weights[slot];
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
  Forward(const Experts& experts, const ForwardArgs& args, const ProblemSize& problem)
      : args_(args),
        config_(experts.config()),
        batched_(experts.batched()),
        n_(sizes_of(problem, batched_)),
        topk_(batched_ ? 1 : problem.topk),
        quantized_inputs_(problem.scheme.activations &&
                          !experts.descriptor().expects_unquantized_inputs(problem.scheme)),
        weights_(static_cast<const ReferenceWeights&>(*args.weights).source),
        key_(weights_.scheme.activations),
        b_(n_, key_, args.workspace13, args.workspace2) {
    if (!config_.hooks) return;
    // Steps whose results are rounded and pass the hooks, behind the other buffers in workspace 2.
    unfused_.emplace(problem, static_cast<char*>(args.workspace2) + b_.bytes2, args);
    if (args.hooks) hooks_ = args.hooks;
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
      weight_and_sum(args_, config_.apply_router_weight_on_input, n_, b_.y);
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
    const bool one_scale = args_.hidden_scales.numel() == 1;
    const std::int64_t row_bytes = core::scales_per_row(*key_, n_.hidden) * bytes(*key_->scale, 1);
    const TensorView& states = args_.hidden_states;
    const std::int64_t offset = bytes(states.dtype(), row * states.stride(states.rank() - 2));
    return {*key_, states.as<const std::uint8_t>() + offset,
            args_.hidden_scales.as<const char>() + (one_scale ? 0 : row * row_bytes)};
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
      std::uint8_t* codes = b_.codes + slot * bytes(key.value, width);
      float* scales = b_.scales + slot * row_scales;
      core::quantize_row(b_.unquantized + slot * width, columns, key, scale, codes, scales);
      if (key.group.rows < 0) *scales = scale;
      const QuantizedRow row{key, codes, scales, key.global_scale ? scale : 1.0};
      for (std::int64_t i = 0; i < columns; ++i) b_.operand[slot * width + i] = element(row, i);
    }
  }

  void multiply(const WeightMatrix& matrix, std::int64_t e, std::int64_t out, std::int64_t in,
                double* y, std::int64_t y_stride) const {
    const bool down = &matrix == &weights_.experts[static_cast<std::size_t>(e)].down;
    const QuantScheme& scheme = weights_.scheme;
    apply_linear({core::executor_of(args_.stream), matrix,
                  down ? scheme.down_weights() : scheme.weights, out, in, slots(e), count(e),
                  b_.operand, n_.operand_width(), y, y_stride});
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
        b_.operand[slot * width + i] = round_to(config_.dtype, activate(activation, gate[i], up));
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
  const MoeConfig& config_;
  const bool batched_;
  const Sizes n_;
  const std::int64_t topk_;
  const bool quantized_inputs_;
  const ExpertWeights& weights_;
  const std::optional<QuantKey>& key_;
  const Buffers b_;
  static inline const ExpertsHooks kNoHooks{};
  const ExpertsHooks* hooks_ = &kNoHooks;
  std::optional<UnfusedRows> unfused_;
};

}  // namespace

ScratchBytes scratch_bytes(const Experts& experts, const ProblemSize& problem) {
  const Buffers buffers(sizes_of(problem, experts.batched()), problem.scheme.activations, nullptr,
                        nullptr);
  ScratchBytes bytes{buffers.bytes13, buffers.bytes2};
  if (experts.config().hooks) bytes.workspace2 += UnfusedRows(problem, nullptr, {}).bytes();
  return bytes;
}

void run_forward(const Experts& experts, const ForwardArgs& args) {
  const ProblemSize problem = core::experts_problem(experts, args);
  if (problem.num_tokens > 0) Forward(experts, args, problem).run();
}

}  // namespace fusedmoe::reference
