// See experts.h. A slot is a (token, choice) pair t * topk + j in the standard format and a row
// e * max_tokens + i in the batched one; only slots of a local expert take part. Each output
// element has its own sum in a fixed order, so a row never depends on its batch.
#include "reference/experts.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/experts_args.h"
#include "core/workspace.h"
#include "reference/activation.h"
#include "reference/matrix.h"

namespace fusedmoe::reference {
namespace {

/// Multiplications below which waking the threads costs more than it saves.
constexpr std::int64_t kParallelWork = 1 << 16;

/// Keeps the published weights as they are.
class ReferenceWeights final : public PackedWeights {
 public:
  ReferenceWeights(Info info, ExpertWeights weights)
      : PackedWeights(std::move(info)), source(std::move(weights)) {}

  std::int64_t nbytes() const override { return 0; }

  const ExpertWeights source;
};

/// Sizes of one apply. The batched format has num_experts * max_tokens rows and as many slots.
struct Sizes {
  std::int64_t rows;   // of hidden_states
  std::int64_t slots;  // of results
  std::int64_t num_experts;
  std::int64_t hidden;
  std::int64_t intermediate;
};

/// What lies in the two workspaces.
struct Buffers {
  double* gate_up;        // (slots, 2 * intermediate), in workspace 13
  float* x;               // (rows, hidden), hidden_states widened
  float* h;               // (slots, intermediate), activated
  double* y;              // (slots, hidden)
  std::int64_t* slots;    // (slots): those of expert 0, of expert 1, ...
  std::int64_t* offsets;  // (num_experts + 1) into `slots`

  std::size_t bytes13, bytes2;

  Buffers(const Sizes& n, void* workspace13, void* workspace2) {
    core::WorkspaceCutter in13(workspace13), in2(workspace2);
    gate_up = take<double>(in13, {n.slots, 2, n.intermediate});
    x = take<float>(in2, {n.rows, n.hidden});
    h = take<float>(in2, {n.slots, n.intermediate});
    y = take<double>(in2, {n.slots, n.hidden});
    slots = take<std::int64_t>(in2, {n.slots});
    offsets = take<std::int64_t>(in2, {n.num_experts + 1});
    bytes13 = in13.used();
    bytes2 = in2.used();
  }

 private:
  template <typename T>
  static T* take(core::WorkspaceCutter& cutter, const Shape& shape) {
    return static_cast<T*>(cutter.take(static_cast<std::size_t>(shape.numel()) * sizeof(T)));
  }
};

/// y[slot] = x[slot / slots_per_row] matrix^T + bias for the `count` slots of one expert.
struct Linear {
  const WeightMatrix& matrix;  // (out, in)
  const std::int64_t* slots;
  std::int64_t count;
  std::int64_t slots_per_row;
  const float* x;
  double* y;
  std::int64_t y_stride;
};

double dot(const float* x, const double* w, std::int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) sum += x[i] * w[i];
  return sum;
}

void apply_linear(const Linear& a) {
  constexpr std::int64_t kChunk = 512;  // columns decoded at a time, once for all slots
  const std::int64_t out = a.matrix.values.size(0);
  const std::int64_t in = a.matrix.values.size(1) * (a.matrix.scales ? 2 : 1);
#pragma omp parallel for schedule(static) \
    num_threads(num_threads()) if (out * in * a.count >= kParallelWork)
  for (std::int64_t o = 0; o < out; ++o) {
    for (std::int64_t r = 0; r < a.count; ++r) {
      a.y[a.slots[r] * a.y_stride + o] = bias(a.matrix, o);
    }
    for (std::int64_t begin = 0; begin < in; begin += kChunk) {
      const std::int64_t columns = std::min(kChunk, in - begin);
      double w[kChunk];
      for (std::int64_t i = 0; i < columns; ++i) w[i] = element(a.matrix, o, begin + i);
      for (std::int64_t r = 0; r < a.count; ++r) {
        const std::int64_t slot = a.slots[r];
        a.y[slot * a.y_stride + o] += dot(a.x + slot / a.slots_per_row * in + begin, w, columns);
      }
    }
  }
}

/// Global id -> local expert, or -1.
std::int64_t local_expert(const ExpertsArgs& args, std::int64_t num_experts, std::int32_t id) {
  const std::int64_t num_ids = args.expert_map ? args.expert_map.size(0) : num_experts;
  if (id < 0 || id >= num_ids) return -1;
  const std::int32_t local = args.expert_map ? args.expert_map.as<const std::int32_t>()[id] : id;
  return local < num_experts ? local : -1;
}

class ReferenceExperts final : public ModularExperts {
 public:
  explicit ReferenceExperts(ActivationFormat format) : format_(format) {}

  std::string_view name() const override { return batched() ? "reference_batched" : "reference"; }
  ActivationFormat activation_format() const override { return format_; }
  bool is_reference() const override { return true; }
  WeightAndReduce weight_and_reduce() const override {
    return batched() ? WeightAndReduce::kDelegate : WeightAndReduce::kNoOp;
  }
  bool accepts(const PackedWeights& weights) const override {
    return dynamic_cast<const ReferenceWeights*>(&weights) != nullptr;
  }

  Support supports(const MoeConfig& config) const override;
  WorkspacePlan plan(const ProblemSize& problem) const override;
  std::shared_ptr<PackedWeights> pack(const ExpertWeights& weights,
                                      const PackProgress& progress) const override;
  void apply(const ExpertsArgs& args) const override;

 private:
  bool batched() const { return format_ == ActivationFormat::kBatchedExperts; }
  Sizes sizes(const ProblemSize& problem) const;
  void group_slots(const ExpertsArgs& args, const Sizes& n, const Buffers& buffers) const;

  const ActivationFormat format_;
};

Support ReferenceExperts::supports(const MoeConfig& config) const {
  bool known = config.scheme == schemes::mxfp4_w4a16();
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    known = known || config.scheme == schemes::unquantized(dtype);
  }
  return core::supports_on_cpu(config, format_, known, "f32, f16, bf16, mxfp4_w4a16");
}

Sizes ReferenceExperts::sizes(const ProblemSize& p) const {
  const std::int64_t rows = p.num_tokens * (batched() ? p.num_local_experts : 1);
  return {rows, batched() ? rows : Shape({rows, p.topk}).numel(), p.num_local_experts, p.hidden,
          p.intermediate};
}

WorkspacePlan ReferenceExperts::plan(const ProblemSize& problem) const {
  const Buffers buffers(sizes(problem), nullptr, nullptr);
  WorkspacePlan plan;
  plan.workspace13_bytes = buffers.bytes13;
  plan.workspace2_bytes = buffers.bytes2;
  plan.output_shape = batched()
                          ? Shape{problem.num_local_experts, problem.num_tokens, problem.hidden}
                          : Shape{problem.num_tokens, problem.hidden};
  plan.output_dtype = problem.dtype;
  return plan;
}

std::shared_ptr<PackedWeights> ReferenceExperts::pack(const ExpertWeights& weights,
                                                      const PackProgress& progress) const {
  auto packed =
      std::make_shared<ReferenceWeights>(core::make_packed_info(name(), weights), weights);
  if (progress) {
    for (std::int64_t e = 1; e <= weights.num_experts(); ++e) progress(e, weights.num_experts());
  }
  return packed;
}

void ReferenceExperts::group_slots(const ExpertsArgs& args, const Sizes& n,
                                   const Buffers& buffers) const {
  std::int64_t count = 0;
  for (std::int64_t e = 0; e < n.num_experts; ++e) {
    buffers.offsets[e] = count;
    if (batched()) {
      const std::int64_t max_tokens = args.hidden_states.size(1);
      for (std::int64_t i = 0; i < args.expert_num_tokens.as<const std::int32_t>()[e]; ++i) {
        buffers.slots[count++] = e * max_tokens + i;
      }
    } else {
      const auto* ids = args.topk_ids.as<const std::int32_t>();
      for (std::int64_t slot = 0; slot < n.slots; ++slot) {
        if (local_expert(args, n.num_experts, ids[slot]) == e) buffers.slots[count++] = slot;
      }
    }
  }
  buffers.offsets[n.num_experts] = count;
}

/// out[token] = sum over its slots of weight * y, rounded once.
void weight_and_sum(const ExpertsArgs& args, const Sizes& n, const double* y) {
  const std::int64_t topk = args.topk_ids.size(1);
  const auto* ids = args.topk_ids.as<const std::int32_t>();
  const auto* weights = args.topk_weights.as<const float>();
#pragma omp parallel for schedule(static) \
    num_threads(num_threads()) if (n.slots * n.hidden >= kParallelWork)
  for (std::int64_t token = 0; token < n.rows; ++token) {
    for (std::int64_t column = 0; column < n.hidden; ++column) {
      double sum = 0;
      for (std::int64_t slot = token * topk; slot < (token + 1) * topk; ++slot) {
        if (local_expert(args, n.num_experts, ids[slot]) < 0) continue;
        const double weight = args.router_weight_on_input ? 1 : weights[slot];
        sum += weight * y[slot * n.hidden + column];
      }
      store(args.output.data(), args.output.dtype(), token * n.hidden + column, sum);
    }
  }
}

/// out[expert, i] = y, rounded once; zeros behind the expert's last row.
void store_batched(const ExpertsArgs& args, const Sizes& n, const double* y) {
  const std::int64_t max_tokens = args.hidden_states.size(1);
  for (std::int64_t slot = 0; slot < n.slots; ++slot) {
    const std::int64_t expert = slot / max_tokens, row = slot % max_tokens;
    const bool real = row < args.expert_num_tokens.as<const std::int32_t>()[expert];
    for (std::int64_t column = 0; column < n.hidden; ++column) {
      const std::int64_t index = slot * n.hidden + column;
      store(args.output.data(), args.output.dtype(), index, real ? y[index] : 0);
    }
  }
}

void ReferenceExperts::apply(const ExpertsArgs& args) const {
  const ProblemSize problem = core::check_experts_args(*this, args);
  if (problem.num_tokens == 0) return;
  const ExpertWeights& weights = static_cast<const ReferenceWeights&>(*args.weights).source;
  const ResolvedActivation& activation = args.weights->info().activation;
  const bool gated = is_gated(activation.kind);
  const Sizes n = sizes(problem);
  const Buffers b(n, args.workspace13, args.workspace2);
  const std::int64_t slots_per_row = batched() ? 1 : problem.topk;
  const std::int64_t width = 2 * n.intermediate;

  group_slots(args, n, b);
  for (std::int64_t i = 0; i < n.rows * n.hidden; ++i) {
    b.x[i] = static_cast<float>(load(args.hidden_states.data(), problem.dtype, i));
  }
  for (std::int64_t e = 0; e < n.num_experts; ++e) {
    const ExpertMatrices& expert = weights.experts[e];
    const std::int64_t* slots = b.slots + b.offsets[e];
    const std::int64_t count = b.offsets[e + 1] - b.offsets[e];
    if (count == 0) continue;
    apply_linear({expert.gate, slots, count, slots_per_row, b.x, b.gate_up, width});
    if (gated) {
      double* up = b.gate_up + n.intermediate;
      apply_linear({expert.up, slots, count, slots_per_row, b.x, up, width});
    }
#pragma omp parallel for schedule(static) \
    num_threads(num_threads()) if (count * n.intermediate >= kParallelWork / 16)
    for (std::int64_t r = 0; r < count; ++r) {
      const double* gate = b.gate_up + slots[r] * width;
      for (std::int64_t i = 0; i < n.intermediate; ++i) {
        const double up = gated ? gate[n.intermediate + i] : 0;
        b.h[slots[r] * n.intermediate + i] =
            static_cast<float>(round_to(problem.dtype, activate(activation, gate[i], up)));
      }
    }
    apply_linear({expert.down, slots, count, 1, b.h, b.y, n.hidden});
  }
  if (batched()) {
    store_batched(args, n, b.y);
  } else {
    weight_and_sum(args, n, b.y);
  }
}

}  // namespace

std::shared_ptr<const ModularExperts> make_experts(ActivationFormat format) {
  return std::make_shared<const ReferenceExperts>(format);
}

}  // namespace fusedmoe::reference
