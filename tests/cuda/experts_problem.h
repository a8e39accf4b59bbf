// What the tests of the Hopper experts share: finding them, running a problem, and how close to the
// reference they must be.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/gemm/weight_format.h"
#include "cuda_test.h"
#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/tensor.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace fusedmoe::testing {

/// Bounds of spec "tolerances", section 5, against a reference that rounds at the same points. Rows
/// that GEMM 2 leaves in bf16, to the combine or to finalize, are one rounding more. f16 rounds 8
/// times finer; the GPU's approximations of exp and tanh take half of that.
inline void expect_close(const TensorView& actual, const TensorView& expected) {
  const double unit = expected.dtype() == DType::kF16 ? 0.25 : 1;
  const Difference difference = compare(actual, expected);
  EXPECT_FALSE(difference.nonfinite_mismatch) << difference.to_string();
  EXPECT_LE(difference.max_element, unit * 2 * 2e-2) << difference.to_string();
  EXPECT_LE(difference.rms_element, unit * 2 * 4e-3) << difference.to_string();
}

inline std::vector<QuantScheme> gpu_schemes() {
  return {schemes::unquantized(DType::kBF16), schemes::unquantized(DType::kF16),
          schemes::mxfp4_w4a16()};
}
inline bool is_mxfp4(const QuantScheme& scheme) {
  return scheme == schemes::mxfp4_w4a16();
}

inline const cuda::WeightFormat& format_of(const QuantScheme& scheme) {
  const cuda::WeightFormat* format = cuda::find_weight_format(scheme);
  if (!format) throw Error("scheme", std::string(name(scheme)), "one of the GPU");
  return *format;
}
/// Of the rows that the GPU's experts take for a scheme.
inline DType row_dtype(const QuantScheme& scheme) {
  return format_of(scheme).row_dtype;
}

/// Of the registry, with monolithic adapters, by name.
inline std::shared_ptr<const Experts> find_experts(std::string_view wanted) {
  for (const auto& experts : all_experts()) {
    if (experts->name() == wanted) return experts;
  }
  throw Error("experts", std::string(wanted), "in the registry");
}

/// "sm90_bf16_unfused" for ("_unfused", bf16)
inline std::shared_ptr<const Experts> find_experts(std::string_view suffix,
                                                   const QuantScheme& scheme) {
  return find_experts("sm90_" + std::string(format_of(scheme).name) + std::string(suffix));
}

inline std::shared_ptr<const PrepareAndFinalize> pair_of(const Experts& experts) {
  return experts.activation_format() == ActivationFormat::kStandard ? make_no_ep() : make_batched();
}

/// With rows as the GPU's experts take them for the scheme.
inline Tensor run_rows(const Problem& problem, const Experts& experts,
                       const ExpertsHooks* hooks = nullptr) {
  return run_experts(problem, *pair_of(experts), experts, *experts.pack(problem.weights),
                     row_dtype(problem.spec.scheme), hooks);
}

/// Every implementation on the GPU that serves the case, with adapters and unfused ones.
inline std::vector<std::shared_ptr<const Experts>> experts_for(const Case& spec) {
  std::vector<std::shared_ptr<const Experts>> result;
  for (const auto& experts : all_experts()) {
    MoeConfig config = make_config(spec, row_dtype(spec.scheme), kGpu);
    config.activation_format = experts->activation_format();
    if (experts->supports(config)) result.push_back(experts);
  }
  return result;
}

/// A problem's tensors on the GPU, with an output and a workspace of exactly the planned size,
/// behind which guard bytes show what writes too far. Of modular experts.
class KernelRun {
 public:
  KernelRun(const Problem& problem, const ModularKernel& kernel,
            std::shared_ptr<const PackedWeights> packed)
      : kernel_(kernel), packed_(std::move(packed)) {
    const Case& spec = problem.spec;
    const DType dtype = row_dtype(spec.scheme);
    x_ = Tensor::empty({spec.num_tokens, spec.hidden}, dtype, kGpu);
    ids_ = Tensor::empty({spec.num_tokens, spec.topk}, DType::kI32, kGpu);
    weights_ = Tensor::empty({spec.num_tokens, spec.topk}, DType::kF32, kGpu);
    output_ = Tensor::empty({spec.num_tokens + kGuardRows, spec.hidden}, dtype, kGpu);
    if (problem.expert_map) map_ = to_gpu(problem.expert_map);
    bytes_ = static_cast<std::int64_t>(kernel_.workspace_bytes(
        ProblemSize::of(packed_->info(), spec.num_tokens, spec.topk, dtype), spec.weight_on_input));
    workspace_ = Tensor::empty({bytes_ + kGuardBytes}, DType::kU8, kGpu);
    num_experts_ = spec.num_experts;
    weight_on_input_ = spec.weight_on_input;
    set(problem);
    poison(0xff);
  }

  /// Other inputs in the same memory.
  void set(const Problem& problem) const {
    const Tensor rounded = Tensor::empty(problem.hidden_states.shape(), x_.dtype());
    convert(problem.hidden_states, rounded);
    copy(rounded, x_, Stream{kGpu});
    copy(problem.topk_ids, ids_, Stream{kGpu});
    copy(problem.topk_weights, weights_, Stream{kGpu});
    synchronize(Stream{kGpu});
  }
  /// Every byte of the output and of the workspace, and of what is behind them.
  void poison(std::uint8_t value) const {
    poison_ = value;
    fill_bytes(workspace_, value, Stream{kGpu});
    fill_bytes(output_, value, Stream{kGpu});
    synchronize(Stream{kGpu});
  }
  void enqueue(Stream stream, const ExpertsHooks* hooks = nullptr) const {
    KernelArgs args;
    args.weights = packed_.get();
    args.output = output_view();
    args.hidden_states = x_;
    args.topk_ids = ids_;
    args.topk_weights = weights_;
    args.expert_map = map_;
    args.num_experts = num_experts_;
    args.apply_router_weight_on_input = weight_on_input_;
    args.hooks = hooks;
    args.stream = stream;
    kernel_.apply(args, {workspace_.data(), static_cast<std::size_t>(bytes_)});
  }
  /// In host memory, once the stream is done; fails the test where guards were written.
  Tensor output() const {
    const auto untouched = [&](const TensorView& guard) {
      const Tensor host = to_host(Tensor(guard, nullptr));
      const auto* bytes = host.as<const std::uint8_t>();
      return std::all_of(bytes, bytes + host.nbytes(), [&](auto b) { return b == poison_; });
    };
    const std::int64_t rows = x_.size(0);
    EXPECT_TRUE(untouched(output_.slice(0, rows, rows + kGuardRows))) << "behind the output";
    EXPECT_TRUE(untouched(workspace_.slice(0, bytes_, bytes_ + kGuardBytes)))
        << "behind the workspace";
    return to_host(Tensor(output_.slice(0, 0, rows), output_.owner()));
  }
  Tensor run(Stream stream = Stream{kGpu}) const {
    enqueue(stream);
    synchronize(stream);
    return output();
  }
  const Tensor& hidden_states() const { return x_; }
  TensorView output_view() const { return output_.slice(0, 0, x_.size(0)); }

 private:
  static constexpr std::int64_t kGuardRows = 3, kGuardBytes = 1024;

  const ModularKernel& kernel_;
  std::shared_ptr<const PackedWeights> packed_;
  Tensor x_, ids_, weights_, map_, output_, workspace_;
  std::int64_t bytes_ = 0, num_experts_ = 0;
  bool weight_on_input_ = false;
  mutable std::uint8_t poison_ = 0;
};

/// What an Error names.
inline std::string argument_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.argument();
  }
  return "no error";
}

}  // namespace fusedmoe::testing
