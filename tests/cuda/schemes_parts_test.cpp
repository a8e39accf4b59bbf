// Parts of layers of every scheme that the experts run: a row by itself, shards, experts of
// a rank, a replaced expert, weights in device memory, weights that another family packed.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "../unit/temporary_directory.h"
#include "cuda_test.h"
#include "experts_problem.h"
#include "fusedmoe/comm.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/packed_file.h"
#include "fusedmoe/quant.h"
#include "scheme_rows.h"

namespace fusedmoe {
namespace {

using testing::all_rows;
using testing::bitwise_equal;
using testing::Case;
using testing::expect_close;
using testing::find_variant;
using testing::kGpu;
using testing::kHost;
using testing::Problem;
using testing::Rows;
using testing::run_variant;
using testing::Variant;

class CudaSchemeParts : public testing::CudaTestWith<Rows> {
 protected:
  /// Sizes that no packed block divides.
  static Case spec(std::int64_t num_tokens) {
    Case result;
    result.num_tokens = num_tokens;
    result.num_experts = 6;
    result.topk = 3;
    result.hidden = 296;
    result.intermediate = 104;
    result.scheme = GetParam().scheme.scheme;
    result.scale_dtype = GetParam().dtype;
    result.activation = Activation::kSwigluOai;
    result.bias = true;
    return result;
  }
  static ModularKernel make_kernel(const Case& spec, const Variant& variant) {
    return variant.create(testing::make_config(spec, GetParam().dtype, kGpu));
  }
  static void expect_like_reference(const Problem& problem, const TensorView& actual) {
    const Tensor expected =
        run_variant(problem, find_variant("reference"), GetParam().dtype, kHost);
    expect_close(actual, expected, problem.spec.scheme);
  }
};
INSTANTIATE_TEST_SUITE_P(All, CudaSchemeParts, ::testing::ValuesIn(all_rows()),
                         [](const auto& info) { return info.param.name(); });

TEST_P(CudaSchemeParts, RowDoesNotDependOnItsBatch) {
  constexpr std::int64_t kRows = 700;
  const Variant variant = testing::gpu_variant("_batch_invariant");
  const Problem problem = testing::make_problem(spec(kRows));
  if (!variant.supports(testing::make_config(problem.spec, GetParam().dtype, kGpu))) {
    EXPECT_TRUE(batch_dependent(problem.spec.scheme)) << "nothing else may refuse";
    return;
  }
  const ModularKernel kernel = make_kernel(problem.spec, variant);
  const auto packed = kernel.experts().pack(problem.weights);
  const Tensor all = testing::run_experts(problem, kernel, *packed);
  for (const std::int64_t rows : {1, 24, 60, 190}) {
    Problem first = problem;
    first.spec.num_tokens = rows;
    for (Tensor* tensor : {&first.hidden_states, &first.topk_ids, &first.topk_weights}) {
      *tensor = Tensor(tensor->slice(0, 0, rows), tensor->owner());
    }
    const ProblemSize size = ProblemSize::of(kernel.experts().config(), rows);
    for (const std::string& config : kernel.experts().kernel_configs(size)) {
      const int number = kernel.experts().find_kernel_config(config);
      const Tensor some = testing::run_experts(first, kernel, *packed, {.kernel_config = number});
      EXPECT_TRUE(bitwise_equal(some, all.slice(0, 0, rows))) << rows << " rows, " << config;
    }
  }
}

TEST_P(CudaSchemeParts, ShardsMatchReference) {
  Case whole = spec(33);
  whole.intermediate = 424;
  whole.expert_map = true;
  whole.negative_ids = true;
  whole.skew = testing::RoutingSkew::kZipf;
  const Problem problem = testing::make_problem(whole);
  for (const int rank : {0, 1, 2}) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    const Slice slice = slice_of(whole.intermediate, slice_unit(whole.scheme), 3, rank);
    Problem part = problem;
    part.weights = slice_experts(problem.weights, slice);
    part.spec.intermediate = slice.size();
    expect_like_reference(part, run_variant(part, testing::gpu_variant(), GetParam().dtype, kGpu));
  }
}

TEST_P(CudaSchemeParts, RepackReplacesOneExpert) {
  const Problem problem = testing::make_problem(spec(40));
  const ModularKernel kernel = make_kernel(problem.spec, testing::gpu_variant());
  const auto packed = kernel.experts().pack(problem.weights);
  const Tensor before = testing::run_experts(problem, kernel, *packed);
  const auto replace = [&](std::size_t with) {
    ExpertWeights one = problem.weights;
    one.experts = {problem.weights.experts[with]};
    kernel.experts().repack(one, 1, *packed);
    return testing::run_experts(problem, kernel, *packed);
  };
  Problem other = problem;
  other.weights.experts[1] = problem.weights.experts[4];
  expect_like_reference(other, replace(4));
  EXPECT_TRUE(bitwise_equal(replace(1), before));
}

/// A copy in device memory; matrices are contiguous.
ExpertWeights on_gpu(ExpertWeights weights) {
  for (ExpertMatrices& expert : weights.experts) {
    for (WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      for (TensorView* view : {&matrix->values, &matrix->scales, &matrix->zero_points,
                               &matrix->global_scale, &matrix->input_scale, &matrix->bias}) {
        if (!view->defined()) continue;
        const Tensor copied = testing::to_gpu(Tensor(*view, nullptr));
        weights.owners.push_back(copied.owner());
        *view = copied;
      }
    }
  }
  return weights;
}

TEST_P(CudaSchemeParts, PacksFromDeviceMemory) {
  const Problem problem = testing::make_problem(spec(17));
  const ModularKernel kernel = make_kernel(problem.spec, testing::gpu_variant());
  const Tensor expected =
      testing::run_experts(problem, kernel, *kernel.experts().pack(problem.weights));
  const ExpertWeights there = on_gpu(problem.weights);
  const Tensor actual = testing::run_experts(problem, kernel, *kernel.experts().pack(there));
  EXPECT_TRUE(bitwise_equal(actual, expected));
}

class CudaNaN : public testing::CudaTest {
 protected:
  static Problem problem_of(const char* scheme) {
    Case spec;
    spec.num_experts = spec.topk = 2;
    spec.scheme = parse_scheme(scheme);
    return testing::make_problem(spec);
  }
};

TEST_F(CudaNaN, AWeightMakesItsRowNaN) {
  for (const char* scheme :
       {"fp8_channel_token", "fp8_channel_w8a16", "fp8_block_w8a16", "mxfp8_w8a16"}) {
    if (!testing::has_kernels(parse_scheme(scheme), DType::kBF16)) continue;
    SCOPED_TRACE(scheme);
    const Problem problem = problem_of(scheme);
    constexpr std::int64_t kRow = 19;
    const TensorView& down = problem.weights.experts[1].down.values;
    down.as<std::uint8_t>()[kRow * down.stride(0) + 5] = 0xFF;
    const Tensor output = run_variant(problem, testing::gpu_variant(), DType::kBF16, kGpu);
    for (std::int64_t i = 0; i < output.numel(); ++i) {
      const float value = load_f32(output.data(), output.dtype(), i);
      ASSERT_EQ(std::isnan(value), i % problem.spec.hidden == kRow) << i;
    }
  }
}

TEST_F(CudaNaN, AScaleOnTheDeviceIsRefused) {
  FUSEDMOE_SKIP_WITHOUT_KERNELS("fp8_channel_token", DType::kBF16);
  const Problem problem = problem_of("fp8_channel_token");
  const Case& spec = problem.spec;
  const TensorView& scales = problem.weights.experts[1].up.scales;
  scales.as<float>()[3 * scales.stride(0)] = std::numeric_limits<float>::quiet_NaN();
  const auto experts = testing::make_experts(spec);
  const ExpertWeights there = on_gpu(problem.weights);
  EXPECT_EQ(testing::argument_of([&] { experts->pack(there); }), "weights.up.scales");
}

class CudaBlockScales : public testing::CudaTest {
 protected:
  static Problem problem() {
    Case spec;
    spec.num_experts = 3;
    spec.hidden = 296;
    spec.intermediate = 200;
    spec.scheme = parse_scheme("fp8_block_w8a16");
    return testing::make_problem(spec);
  }
  /// Multiplies scales of w2's first `rows` rows of blocks.
  static void multiply(const Problem& problem, float factor, std::int64_t rows) {
    for (const ExpertMatrices& expert : problem.weights.experts) {
      const TensorView& scales = expert.down.scales;
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < scales.size(1); ++c) {
          scales.as<float>()[r * scales.stride(0) + c * scales.stride(1)] *= factor;
        }
      }
    }
  }
};

TEST_F(CudaBlockScales, PowersOfTwoAndSignsAreExact) {
  FUSEDMOE_SKIP_WITHOUT_KERNELS("fp8_block_w8a16", DType::kBF16);
  constexpr std::int64_t kBlock = 128;
  const Tensor before = run_variant(problem(), testing::gpu_variant(), DType::kBF16, kGpu);
  struct Change {
    float factor;
    std::int64_t blocks;
  };
  for (const auto& [factor, blocks] :
       {Change{0x1p-60F, 1}, Change{0x1p50F, 2}, Change{0x1p-90F, 3}, Change{-0x1p100F, 2}}) {
    SCOPED_TRACE(std::to_string(factor) + ", " + std::to_string(blocks) + " blocks");
    const Problem changed = problem();
    multiply(changed, factor, blocks);
    const Tensor after = run_variant(changed, testing::gpu_variant(), DType::kBF16, kGpu);
    for (std::int64_t i = 0; i < before.numel(); ++i) {
      const bool is_changed = i % changed.spec.hidden < blocks * kBlock;
      const float old = load_f32(before.data(), DType::kBF16, i);
      ASSERT_EQ(load_f32(after.data(), DType::kBF16, i), is_changed ? old * factor : old) << i;
    }
  }
}

class CudaFp8F16 : public testing::CudaTest {};

TEST_F(CudaFp8F16, AnExpertsOutputMayBeLargerThanF16) {
  FUSEDMOE_SKIP_WITHOUT_KERNELS("fp8_channel_token", DType::kF16);
  for (const std::int64_t num_tokens : {5, 100, 700}) {
    SCOPED_TRACE(std::to_string(num_tokens) + " tokens");
    Case spec;
    spec.num_tokens = num_tokens;
    spec.num_experts = 5;
    spec.topk = 3;
    spec.hidden = 136;
    spec.intermediate = 72;
    spec.scheme = parse_scheme("fp8_channel_token");
    spec.bias = true;
    const Problem problem = testing::make_problem(spec);
    // Outputs are around 65504, the largest number of f16, give or take a few thousand.
    for (const ExpertMatrices& expert : problem.weights.experts) {
      const TensorView &bias = expert.down.bias, &scales = expert.down.scales;
      for (std::int64_t row = 0; row < spec.hidden; ++row) {
        store_f32(bias.data(), bias.dtype(), row * bias.stride(0), 65504);
        scales.as<float>()[row * scales.stride(0)] *= 8192;
      }
    }
    for (std::int64_t slot = 0; slot < problem.topk_weights.numel(); ++slot) {
      problem.topk_weights.as<float>()[slot] = 1.0F / static_cast<float>(16 << slot % 3);
    }
    const Tensor expected = run_variant(problem, find_variant("reference"), DType::kF16, kHost);
    for (const char* suffix : {"", "_batch_invariant"}) {  // rows in fp32, and in f16
      SCOPED_TRACE(suffix);
      const Tensor actual = run_variant(problem, testing::gpu_variant(suffix), DType::kF16, kGpu);
      expect_close(actual, expected, spec.scheme);
    }
  }
}

/// What GEMM 1 of coded rows stores in each of its tiles; swigluoai is in
/// CudaSchemes.EveryConfiguration.
struct StoredRows {
  const char* scheme;
  Activation activation;
  const char* suffix = "";
  std::string name() const {
    return std::string(scheme) + "_" + std::string(fusedmoe::name(activation)) + suffix;
  }
};
void PrintTo(const StoredRows& rows, std::ostream* stream) {
  *stream << rows.name();
}

std::vector<StoredRows> stored_rows() {
  std::vector<StoredRows> result;
  for (const char* scheme : {"fp8_block", "fp8_channel_token", "int8_w8a8"}) {
    result.push_back({scheme, Activation::kSilu});
    result.push_back({scheme, Activation::kRelu2NoMul});
    result.push_back({scheme, Activation::kSilu, "_unfused"});
    result.push_back({scheme, Activation::kGeluTanhNoMul, "_unfused"});
  }
  for (const char* scheme : {"fp8_tensor_static", "mxfp4_fp8_static"}) {  // GEMM 1 stores codes
    result.push_back({scheme, Activation::kSilu});
    result.push_back({scheme, Activation::kRelu2NoMul});
  }
  return result;
}

class CudaCodedTiles : public testing::CudaTestWith<StoredRows> {};
INSTANTIATE_TEST_SUITE_P(All, CudaCodedTiles, ::testing::ValuesIn(stored_rows()),
                         [](const auto& info) { return info.param.name(); });

TEST_P(CudaCodedTiles, MatchReference) {
  const auto& [scheme, activation, suffix] = GetParam();
  FUSEDMOE_SKIP_WITHOUT_KERNELS(scheme, DType::kBF16);
  const Variant variant = testing::gpu_variant(suffix);
  for (const std::int64_t tokens : {1, 12, 65, 129, 200}) {
    Case spec;
    spec.num_tokens = tokens;
    spec.num_experts = 5;
    spec.hidden = 296;
    spec.intermediate = 328;  // ends inside a packed block
    spec.scheme = parse_scheme(scheme);
    spec.activation = activation;
    spec.bias = true;
    spec.skew = testing::RoutingSkew::kOneExpert;  // so tiles have as many rows as tokens
    const Problem problem = testing::make_problem(spec);
    const Tensor expected =
        run_variant(problem, find_variant(variant.hooks ? "reference_unfused" : "reference"),
                    DType::kBF16, kHost);
    for (const cuda::TileShape& tile :
         testing::gpu_family().tiles(testing::format_of(spec.scheme))) {
      SCOPED_TRACE(std::to_string(tokens) + " tokens, " + to_string(tile));
      testing::RunOptions options;
      options.kernel_config =
          cuda::find_config(testing::gpu_family(), to_string(cuda::KernelConfig{tile, 1, false}));
      ASSERT_GE(options.kernel_config, 0);
      const Tensor actual = run_variant(problem, variant, DType::kBF16, kGpu, options);
      expect_close(actual, expected, spec.scheme);
      EXPECT_TRUE(
          bitwise_equal(run_variant(problem, variant, DType::kBF16, kGpu, options), actual));
    }
  }
}

class CudaMxfp4Fp8 : public testing::CudaTest {};

TEST_F(CudaMxfp4Fp8, CodesOfScalesFarBelowTheLargestAreRounded) {
  FUSEDMOE_SKIP_WITHOUT_KERNELS("mxfp4_fp8", DType::kBF16);
  for (const int below : {7, 13, 40}) {
    SCOPED_TRACE("2^-" + std::to_string(below));
    Case spec;
    spec.num_experts = 3;
    spec.hidden = 296;
    spec.intermediate = 200;
    spec.scheme = parse_scheme("mxfp4_fp8");
    const Problem problem = testing::make_problem(spec);
    for (const ExpertMatrices& expert : problem.weights.experts) {
      for (const WeightMatrix* matrix : {&expert.gate, &expert.down}) {
        const TensorView& scales = matrix->scales;
        for (std::int64_t r = 0; r < scales.size(0); ++r) {
          for (std::int64_t c = r % 2; c < scales.size(1); c += 2) {
            auto& code = scales.as<std::uint8_t>()[r * scales.stride(0) + c * scales.stride(1)];
            code = static_cast<std::uint8_t>(code - below);
          }
        }
      }
    }
    const Tensor expected = run_variant(problem, find_variant("reference"), DType::kBF16, kHost);
    const Tensor actual = run_variant(problem, testing::gpu_variant(), DType::kBF16, kGpu);
    expect_close(actual, expected, spec.scheme);
  }
}

// ------------------------------------------------------------------------------------------------
// Families of kernels

/// Those that serve a configuration on this GPU.
std::vector<Variant> families_for(const MoeConfig& config) {
  std::vector<Variant> result;
  for (const char* name : {"sm90", "sm89", "sm80"}) {
    const Variant variant = find_variant(name);
    if (variant.supports(config)) result.push_back(variant);
  }
  return result;
}

/// Each family packs the weights. With those of another, from the device or from a file, it must
/// give the same bits as with its own. Returns how many pairs of families there were.
int expect_packed_for_others(const Rows& rows, const std::filesystem::path& file) {
  SCOPED_TRACE(rows.name());
  Case spec;
  spec.num_tokens = 33;
  spec.hidden = 296;
  spec.intermediate = 104;
  spec.scheme = rows.scheme.scheme;
  spec.scale_dtype = rows.dtype;
  spec.bias = true;
  const Problem problem = testing::make_problem(spec);
  const MoeConfig config = testing::make_config(spec, rows.dtype, kGpu);
  const std::vector<Variant> families = families_for(config);
  int pairs = 0;
  for (const Variant& family : families) {
    const ModularKernel kernel = family.create(config);
    const Tensor own =
        testing::run_experts(problem, kernel, *kernel.experts().pack(problem.weights));
    for (const Variant& other : families) {
      if (other.experts == family.experts) continue;
      SCOPED_TRACE(family.name() + " with weights of " + other.name());
      const ModularKernel packer = other.create(config);
      const auto packed = packer.experts().pack(problem.weights);
      save_packed(packer.experts(), *packed, file);
      EXPECT_TRUE(kernel.experts().accepts(*packed));
      EXPECT_TRUE(bitwise_equal(testing::run_experts(problem, kernel, *packed), own));
      const auto loaded = load_packed(kernel.experts(), {file});
      EXPECT_TRUE(bitwise_equal(testing::run_experts(problem, kernel, *loaded), own)) << "file";
      ++pairs;
    }
  }
  return pairs;
}

TEST(CudaFamilies, EachRunsWhatAnotherPacked) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  const testing::TemporaryDirectory folder;
  int pairs = 0;
  for (const NamedScheme& scheme : named_schemes()) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      if (!cuda::find_weight_format(scheme.scheme, dtype)) continue;
      pairs += expect_packed_for_others({scheme, dtype}, folder / "packed");
    }
  }
  if (pairs == 0) GTEST_SKIP() << "this GPU has code of one family alone";
}

}  // namespace
}  // namespace fusedmoe
