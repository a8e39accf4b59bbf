// What the tests of the experts share: making them, running a problem, and how close to the
// reference they must be.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../unit/error_text.h"
#include "cuda/formats/weight_formats.h"
#include "cuda/sm80/family.h"
#include "cuda/sm90/family.h"
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

/// That of experts_under_test().
inline const cuda::KernelFamily& gpu_family() {
  for (const cuda::KernelFamily* family : {&cuda::sm80_family(), &cuda::sm89_family()}) {
    if (family->name() == experts_under_test()) return *family;
  }
  return cuda::sm90_family();
}
/// Whether they have kernels of a scheme for rows of this dtype.
inline bool has_kernels(const QuantScheme& scheme, DType dtype) {
  const cuda::WeightFormat* format = cuda::find_weight_format(scheme, dtype);
  return format && !gpu_family().tiles(*format).empty();
}

#define FUSEDMOE_SKIP_WITHOUT_KERNELS(scheme, dtype)                                \
  if (!::fusedmoe::testing::has_kernels(parse_scheme(scheme), dtype)) {             \
    GTEST_SKIP() << ::fusedmoe::testing::gpu_family().name() << " does not run it"; \
  }

/// Prints once in a run which code of the experts under test the driver runs: for which compute
/// capability its PTX was compiled, and for which its machine code, be it in the program or made of
/// that PTX by the driver.
class CodeOfTheExperts : public ::testing::Environment {
  void SetUp() override {
    const cuda::KernelFamily& family = gpu_family();
    cudaFuncAttributes code{};
    if (!device_problem(kGpu).empty()) return;
    if (cudaFuncGetAttributes(&code, family.kernel()) == cudaSuccess) {
      std::printf("%s: ptxVersion %d, binaryVersion %d\n", std::string(family.name()).c_str(),
                  code.ptxVersion, code.binaryVersion);
    } else {
      std::printf("%s: no code\n", std::string(family.name()).c_str());
      cudaGetLastError();
    }
  }
};
inline ::testing::Environment* const kCodeOfTheExperts =
    ::testing::AddGlobalTestEnvironment(new CodeOfTheExperts);

/// Of those of 16-bit and 4-bit weights the ones that the experts run. sm89 runs none of them:
/// suites of cases of them are then empty, which GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST
/// says.
inline std::vector<QuantScheme> gpu_schemes() {
  std::vector<QuantScheme> result;
  for (const auto& [scheme, dtype] : {std::pair(schemes::unquantized(DType::kBF16), DType::kBF16),
                                      std::pair(schemes::unquantized(DType::kF16), DType::kF16),
                                      std::pair(schemes::mxfp4_w4a16(), DType::kBF16)}) {
    // sm89 has no rows of 16 bits. Another family that lacks them fails.
    if (gpu_family().name() != "sm89" || has_kernels(scheme, dtype)) result.push_back(scheme);
  }
  return result;
}
inline bool is_mxfp4(const QuantScheme& scheme) {
  return scheme == schemes::mxfp4_w4a16();
}

/// Of the rows that the GPU's experts take for one of those.
inline DType row_dtype(const QuantScheme& scheme) {
  return scheme.weights.value == DType::kF16 ? DType::kF16 : DType::kBF16;
}
inline const cuda::WeightFormat& format_of(const QuantScheme& scheme, DType dtype) {
  const cuda::WeightFormat* format = cuda::find_weight_format(scheme, dtype);
  if (!format) throw Error("scheme", std::string(name(scheme)), "one of the GPU");
  return *format;
}
inline const cuda::WeightFormat& format_of(const QuantScheme& scheme) {
  return format_of(scheme, row_dtype(scheme));
}

/// "", "_batched", "_unfused", "_monolithic" or "_batch_invariant": see Variant::name().
inline Variant gpu_variant(std::string_view suffix = "") {
  return find_variant(std::string(gpu_family().name()).append(suffix));
}
/// Every variant on the GPU that serves the case.
inline std::vector<Variant> gpu_variants(const Case& spec) {
  return variants_for(make_config(spec, row_dtype(spec.scheme), kGpu));
}

inline std::shared_ptr<const Experts> make_experts(const Case& spec,
                                                   const Variant& variant = gpu_variant()) {
  const MoeConfig config = variant.of(make_config(spec, row_dtype(spec.scheme), kGpu));
  return variant.experts->create(config, Context{});
}
inline ModularKernel make_kernel(const Case& spec, const Variant& variant = gpu_variant()) {
  const auto experts = make_experts(spec, variant);
  return {variant.prepare_finalize->create(experts->config(), experts->context()), experts};
}

/// On the GPU, with rows as its experts take them for the scheme.
inline Tensor run_rows(const Problem& problem, const Variant& variant,
                       const RunOptions& options = {}) {
  return run_variant(problem, variant, row_dtype(problem.spec.scheme), kGpu, options);
}
/// The same rows by the reference; with `unfused` it rounds where experts with hooks do.
inline Tensor run_reference(const Problem& problem, bool unfused = false,
                            const RunOptions& options = {}) {
  return run_variant(problem, find_variant(unfused ? "reference_unfused" : "reference"),
                     row_dtype(problem.spec.scheme), kHost, options);
}

/// What a run does to its output.
struct OutputOptions {
  std::optional<DType> dtype = std::nullopt;  ///< none: that of the rows
  bool accumulate = false;
};

/// A problem's tensors on the GPU, with an output and a workspace of exactly the planned size.
/// Guard bytes around the output and behind the workspace show what writes too far. Of modular
/// experts.
class KernelRun {
 public:
  KernelRun(const Problem& problem, const ModularKernel& kernel,
            std::shared_ptr<const PackedWeights> packed, const OutputOptions& options = {})
      : kernel_(kernel), packed_(std::move(packed)), accumulate_(options.accumulate) {
    const Case& spec = problem.spec;
    const DType dtype = row_dtype(spec.scheme);
    ProblemSize size = ProblemSize::of(kernel.experts().config(), spec.num_tokens);
    size.output_dtype = options.dtype.value_or(dtype);
    x_ = Tensor::empty({spec.num_tokens, spec.hidden}, dtype, kGpu);
    ids_ = Tensor::empty({spec.num_tokens, spec.topk}, DType::kI32, kGpu);
    weights_ = Tensor::empty({spec.num_tokens, spec.topk}, DType::kF32, kGpu);
    output_ =
        Tensor::empty({spec.num_tokens + 2 * kGuardRows, spec.hidden}, size.output_dtype, kGpu);
    if (problem.expert_map) map_ = to_gpu(problem.expert_map);
    bytes_ = static_cast<std::int64_t>(kernel_.workspace_bytes(size));
    workspace_ = Tensor::empty({bytes_ + kGuardBytes}, DType::kU8, kGpu);
    num_experts_ = spec.num_experts;
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
  void enqueue(Stream stream, const RunOptions& options = {}) const {
    ForwardArgs args;
    args.weights = packed_.get();
    args.output = output_view();
    args.hidden_states = x_;
    args.topk_ids = ids_;
    args.topk_weights = weights_;
    args.expert_map = map_;
    args.num_experts = num_experts_;
    args.accumulate = accumulate_;
    args.hooks = options.hooks;
    args.kernel_config = options.kernel_config;
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
    const std::int64_t end = kGuardRows + x_.size(0);
    EXPECT_TRUE(untouched(output_.slice(0, 0, kGuardRows))) << "before the output";
    EXPECT_TRUE(untouched(output_.slice(0, end, end + kGuardRows))) << "behind the output";
    EXPECT_TRUE(untouched(workspace_.slice(0, bytes_, bytes_ + kGuardBytes)))
        << "behind the workspace";
    return to_host(Tensor(output_view(), output_.owner()));
  }
  Tensor run(const RunOptions& options = {}) const {
    enqueue(Stream{kGpu}, options);
    synchronize(Stream{kGpu});
    return output();
  }
  const Tensor& hidden_states() const { return x_; }
  TensorView output_view() const { return output_.slice(0, kGuardRows, kGuardRows + x_.size(0)); }

 private:
  static constexpr std::int64_t kGuardRows = 3, kGuardBytes = 1024;

  const ModularKernel& kernel_;
  std::shared_ptr<const PackedWeights> packed_;
  bool accumulate_;
  Tensor x_, ids_, weights_, map_, output_, workspace_;
  std::int64_t bytes_ = 0, num_experts_ = 0;
  mutable std::uint8_t poison_ = 0;
};

/// What an Error names.
}  // namespace fusedmoe::testing
