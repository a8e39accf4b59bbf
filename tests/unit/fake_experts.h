// Experts simple enough to know every number of the output: local expert e multiplies by e + 1.
// They fill their whole workspace with NaN, so a kernel that hands out too little memory, or reads
// what it must not, shows.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fusedmoe/experts.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::testing {

template <typename T>
Tensor make_tensor(DType dtype, Shape shape, const std::vector<T>& values) {
  Tensor tensor = Tensor::empty(shape, dtype);
  std::memcpy(tensor.data(), values.data(), values.size() * sizeof(T));
  return tensor;
}
inline Tensor make_ids(Shape shape, const std::vector<std::int32_t>& values) {
  return make_tensor(DType::kI32, shape, values);
}
inline Tensor make_f32(Shape shape, const std::vector<float>& values) {
  return make_tensor(DType::kF32, shape, values);
}
/// Rounds the values to dtype.
inline Tensor make_floats(DType dtype, Shape shape, const std::vector<float>& values) {
  Tensor tensor = Tensor::empty(shape, dtype);
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_f32(tensor.data(), dtype, static_cast<std::int64_t>(i), values[i]);
  }
  return tensor;
}
inline std::vector<float> to_vector(const TensorView& view) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    values.push_back(load_f32(view.data(), view.dtype(), i));
  }
  return values;
}
/// A repeatable value in [-1, 1) that bf16 and f16 hold exactly.
inline float sample(std::int64_t i) {
  return static_cast<float>((i * 2654435761u) % 256) / 128 - 1;
}
inline Tensor make_sample(DType dtype, Shape shape) {
  Tensor tensor = Tensor::empty(shape, dtype);
  for (std::int64_t i = 0; i < shape.numel(); ++i) store_f32(tensor.data(), dtype, i, sample(i));
  return tensor;
}
inline void fill_nan(const TensorView& view) {
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    store_f32(view.data(), view.dtype(), i, std::numeric_limits<float>::quiet_NaN());
  }
}

class FakePacked : public PackedWeights {
 public:
  using PackedWeights::PackedWeights;
  std::int64_t nbytes() const override { return 0; }
};

struct FakeOptions {
  ActivationFormat format = ActivationFormat::kStandard;
  WeightAndReduce reduce = WeightAndReduce::kNoOp;
  std::size_t workspace13_per_token = 40;  ///< odd sizes, so that rounding up matters
  std::size_t workspace2_per_token = 12;
};

class FakeDescriptor : public ExpertsDescriptor {
 public:
  explicit FakeDescriptor(WeightAndReduce reduce) : reduce_(reduce) {}
  std::string_view name() const override { return "fake"; }
  Support supports(const MoeConfig&) const override { return Support::yes(); }
  std::string_view instruction_set() const override { return "generic"; }
  int layout_version() const override { return 1; }
  WeightAndReduce weight_and_reduce(ActivationFormat) const override { return reduce_; }
  std::shared_ptr<const Experts> create(const MoeConfig&, const Context&) const override {
    return nullptr;
  }

 private:
  WeightAndReduce reduce_;
};

inline const ExpertsDescriptor& fake_descriptor(WeightAndReduce reduce) {
  static const FakeDescriptor descriptors[] = {FakeDescriptor(WeightAndReduce::kNoOp),
                                               FakeDescriptor(WeightAndReduce::kDelegate)};
  return descriptors[static_cast<std::size_t>(reduce)];
}

/// Of experts as wide as the hidden size.
struct FakeSizes {
  std::int64_t num_experts = 4, num_local_experts = 4, topk = 2, hidden = 5;
  DType dtype = DType::kF32;
  bool has_expert_map = false, weight_on_input = false, monolithic = false;
};

inline MoeConfig fake_config(const FakeSizes& sizes, ActivationFormat format) {
  MoeConfig config;
  config.num_experts = sizes.num_experts;
  config.num_local_experts = sizes.num_local_experts;
  config.topk = sizes.topk;
  config.hidden = config.intermediate = sizes.hidden;
  config.dtype = sizes.dtype;
  config.has_expert_map = sizes.has_expert_map;
  config.apply_router_weight_on_input = sizes.weight_on_input;
  config.monolithic = sizes.monolithic;
  config.activation_format = format;
  return config;
}

class FakeExperts : public Experts {
 public:
  explicit FakeExperts(FakeOptions options = {}, const FakeSizes& sizes = {})
      : Experts(fake_descriptor(options.reduce), fake_config(sizes, options.format), {}),
        options_(options) {}

  WorkspaceSizes workspace_sizes(const ProblemSize& problem) const override {
    WorkspaceSizes sizes;
    const auto tokens = static_cast<std::size_t>(problem.num_tokens);
    sizes.workspace13_bytes = options_.workspace13_per_token * tokens;
    sizes.workspace2_bytes = options_.workspace2_per_token * tokens;
    sizes.output_dtype = problem.dtype;
    if (options_.format == ActivationFormat::kBatchedExperts) {
      sizes.output_shape = {problem.num_local_experts, problem.num_tokens, problem.hidden};
    } else if (options_.reduce == WeightAndReduce::kNoOp) {
      sizes.output_shape = {problem.num_tokens, problem.hidden};
    } else {
      sizes.output_shape = {problem.num_tokens * problem.topk, problem.hidden};
    }
    return sizes;
  }

  bool accepts(const PackedWeights& weights) const override {
    const PackedWeights::Info& info = weights.info();
    return info.implementation == "fake" && info.num_experts == config().num_local_experts &&
           info.hidden == config().hidden;
  }
  std::shared_ptr<PackedWeights> pack(const ExpertWeights& weights,
                                      const PackOptions&) const override {
    return pack_sizes(weights.num_experts(), weights.hidden);
  }
  static std::shared_ptr<PackedWeights> pack_sizes(std::int64_t num_experts, std::int64_t hidden) {
    PackedWeights::Info info;
    info.implementation = "fake";
    info.num_experts = num_experts;
    info.hidden = hidden;
    info.intermediate = hidden;
    return std::make_shared<FakePacked>(info);
  }

  std::function<void(const ForwardArgs&)> on_apply;

 private:
  void run(const ForwardArgs& args) const override {
    if (on_apply) on_apply(args);
    const std::int64_t tokens = args.hidden_states.size(args.hidden_states.rank() - 2);
    if (tokens == 0) return;
    std::memset(args.workspace13, 0xff,
                options_.workspace13_per_token * static_cast<std::size_t>(tokens));
    std::memset(args.workspace2, 0xff,
                options_.workspace2_per_token * static_cast<std::size_t>(tokens));
    fill_nan(args.fused_output);
    if (config().monolithic) {
      std::memcpy(args.fused_output.data(), args.hidden_states.data(),
                  static_cast<std::size_t>(args.fused_output.nbytes()));
    } else if (options_.format == ActivationFormat::kBatchedExperts) {
      apply_batched(args);
    } else {
      apply_standard(args);
    }
  }

  static float value(const TensorView& view, std::int64_t i) {
    return load_f32(view.data(), view.dtype(), i);
  }

  static std::int64_t local_expert(const ForwardArgs& args, std::int64_t flat) {
    const std::int32_t id = args.topk_ids.as<const std::int32_t>()[flat];
    if (id < 0 || !args.expert_map) return id;
    return args.expert_map.as<const std::int32_t>()[id];
  }

  void apply_standard(const ForwardArgs& args) const {
    const std::int64_t tokens = args.topk_ids.size(0), topk = args.topk_ids.size(1);
    const std::int64_t hidden = args.hidden_states.size(1);
    const TensorView& out = args.fused_output;
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t i = 0; i < hidden; ++i) {
        float sum = 0;
        for (std::int64_t j = 0; j < topk; ++j) {
          const std::int64_t flat = t * topk + j, local = local_expert(args, flat);
          if (local < 0) continue;
          const float row =
              static_cast<float>(local + 1) * value(args.hidden_states, t * hidden + i);
          if (options_.reduce != WeightAndReduce::kNoOp) {
            store_f32(out.data(), out.dtype(), flat * hidden + i, row);
          }
          sum += row * (config().apply_router_weight_on_input ? 1 : value(args.topk_weights, flat));
        }
        if (options_.reduce == WeightAndReduce::kNoOp) {
          store_f32(out.data(), out.dtype(), t * hidden + i, sum);
        }
      }
    }
  }

  void apply_batched(const ForwardArgs& args) const {
    const std::int64_t capacity = args.hidden_states.size(1), hidden = args.hidden_states.size(2);
    const auto* counts = args.expert_num_tokens.as<const std::int32_t>();
    for (std::int64_t e = 0; e < args.hidden_states.size(0); ++e) {
      for (std::int64_t i = 0; i < counts[e] * hidden; ++i) {
        const std::int64_t at = e * capacity * hidden + i;
        store_f32(args.fused_output.data(), args.fused_output.dtype(), at,
                  static_cast<float>(e + 1) * value(args.hidden_states, at));
      }
    }
  }

  FakeOptions options_;
};

}  // namespace fusedmoe::testing
