// The experts against the reference: every awkward case, every tile configuration around its
// edges, the same bits twice and in any batch.
#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "cuda/mlp/kernel_choice.h"
#include "cuda_test.h"
#include "experts_problem.h"
#include "fusedmoe/quant.h"

namespace fusedmoe {
namespace {

using testing::bitwise_equal;
using testing::Case;
using testing::expect_close;
using testing::gpu_schemes;
using testing::gpu_variant;
using testing::is_mxfp4;
using testing::kGpu;
using testing::Problem;
using testing::run_reference;
using testing::run_rows;
using testing::Variant;

/// Every case in every scheme that has a form for its sizes.
std::vector<Case> awkward_cases() {
  std::vector<Case> result;
  for (const Case& spec : testing::awkward_cases()) {
    for (const QuantScheme& scheme : gpu_schemes()) {
      Case changed = spec;
      if (is_mxfp4(scheme)) {
        if (spec.hidden % 2 != 0 || spec.intermediate % 2 != 0) continue;  // two codes in a byte
        changed.transposed = false;
      }
      changed.scheme = scheme;
      changed.name.append("_").append(name(scheme));
      result.push_back(changed);
    }
  }
  return result;
}

class CudaExpertsTest : public testing::CudaTestWith<Case> {};

TEST_P(CudaExpertsTest, MatchesReference) {
  const Problem problem = testing::make_problem(GetParam());
  const Tensor fused = run_reference(problem), unfused = run_reference(problem, true);
  const std::vector<Variant> all = testing::gpu_variants(GetParam());
  for (const Variant& variant : all) {
    SCOPED_TRACE(variant.name());
    const Tensor actual = run_rows(problem, variant);
    expect_close(actual, variant.hooks ? unfused : fused);
    EXPECT_TRUE(bitwise_equal(run_rows(problem, variant), actual)) << "second run";
  }
  // Hidden sizes that are no multiple of 8 are for the CPU.
  EXPECT_EQ(all.empty(), GetParam().hidden % 8 != 0);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaExpertsTest);
INSTANTIATE_TEST_SUITE_P(Cases, CudaExpertsTest, ::testing::ValuesIn(awkward_cases()),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return info.param.name;
                         });

TEST(CudaExpertsRefuse, RowsOfAnotherDtype) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const QuantScheme& scheme : gpu_schemes()) {
    Case spec;
    spec.scheme = scheme;
    const Problem problem = testing::make_problem(spec);
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      if (cuda::find_weight_format(scheme, dtype)) continue;
      EXPECT_THROW(testing::run_variant(problem, gpu_variant(), dtype, kGpu), Error);
    }
  }
}

TEST(CudaExpertsRefuse, HiddenSizesThatRowsCannotHave) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  Case spec;
  spec.hidden = 36;
  EXPECT_THROW(testing::make_experts(spec), Error);
}

struct TileCase {
  Case spec;
  std::string suffix;  // of the experts
};
void PrintTo(const TileCase& each, std::ostream* stream) {
  *stream << each.spec.name << each.suffix;
}

/// Rows per expert around the edges of tiles, with sizes that end inside a packed block; each
/// epilogue.
std::vector<TileCase> tile_cases() {
  std::vector<TileCase> result;
  for (const QuantScheme& scheme : gpu_schemes()) {
    const auto add = [&](std::int64_t tokens, Activation activation, std::int64_t intermediate,
                         const char* suffix, std::int64_t hidden = 480) {
      Case spec;
      spec.name = std::string(name(scheme)) + "_" + std::to_string(tokens) + "_" +
                  std::string(name(activation));
      if (hidden % 64 == 0) spec.name += "_whole_blocks";
      spec.num_tokens = tokens;
      spec.num_experts = 5;
      spec.topk = 2;
      spec.hidden = hidden;
      spec.intermediate = intermediate;
      spec.scheme = scheme;
      spec.activation = activation;
      spec.bias = true;
      // All rows on two experts, so that their number is that of the tokens.
      spec.skew = testing::RoutingSkew::kOneExpert;
      spec.negative_ids = tokens == 9 || tokens == 65;  // few slots, and more than few
      result.push_back({spec, suffix});
    };
    for (const std::int64_t tokens :
         {1, 8, 9, 17, 24, 25, 31, 33, 64, 65, 96, 97, 144, 145, 161, 288, 289, 580}) {
      add(tokens, Activation::kSwigluOai, 160, "");
    }
    for (const std::int64_t tokens : {9, 33}) {  // splits end inside a stage
      add(tokens, Activation::kSwigluOai, 320, "", 448);
    }
    for (const std::int64_t tokens : {3, 77, 256, 300}) {
      add(tokens, Activation::kRelu2NoMul, 90, "");  // rows end in the middle of 16 bytes
      add(tokens, Activation::kSilu, 72, "_unfused");
      add(tokens, Activation::kGeluTanhNoMul, 72, "_unfused");
    }
  }
  return result;
}

/// Calls function() with each configuration that is valid for the case.
void for_each_config(const Case& spec, const Variant& variant,
                     const std::function<void(const testing::RunOptions&)>& function) {
  cuda::MlpShape shape;
  shape.family = &testing::gpu_family();
  shape.format = &testing::format_of(spec.scheme);
  shape.unfused = variant.hooks;
  shape.num_tokens = spec.num_tokens;
  shape.topk = spec.topk;
  shape.num_local_experts = spec.num_experts;
  shape.hidden = spec.hidden;
  shape.intermediate = spec.intermediate;
  for (cuda::KernelConfig config : cuda::valid_configs(shape)) {
    for (const bool rows_f32 : {true, false}) {
      config.rows_f32 = rows_f32;
      if (!valid(shape, config)) continue;
      SCOPED_TRACE(to_string(config));
      function({.kernel_config = cuda::find_config(testing::gpu_family(), to_string(config))});
    }
  }
}

class CudaTileConfigTest : public testing::CudaTestWith<TileCase> {};

TEST_P(CudaTileConfigTest, EveryConfigurationMatchesReference) {
  const auto& [spec, suffix] = GetParam();
  const Problem problem = testing::make_problem(spec);
  const Variant variant = gpu_variant(suffix);
  const Tensor expected = run_reference(problem, variant.hooks);
  const ModularKernel kernel = testing::make_kernel(spec, variant);
  const testing::KernelRun run(problem, kernel, kernel.experts().pack(problem.weights));
  for_each_config(spec, variant, [&](const testing::RunOptions& options) {
    const Tensor actual = run.run(options);
    expect_close(actual, expected);
    run.poison(0xff);
    EXPECT_TRUE(bitwise_equal(run.run(options), actual)) << "second run";
  });
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaTileConfigTest);
INSTANTIATE_TEST_SUITE_P(Cases, CudaTileConfigTest, ::testing::ValuesIn(tile_cases()),
                         [](const ::testing::TestParamInfo<TileCase>& info) {
                           return info.param.spec.name + info.param.suffix;
                         });

/// The first rows of a problem, as a problem.
Problem head(const Problem& problem, std::int64_t num_tokens) {
  Problem result = problem;
  result.spec.num_tokens = num_tokens;
  for (Tensor* tensor : {&result.hidden_states, &result.topk_ids, &result.topk_weights}) {
    *tensor = Tensor(tensor->slice(0, 0, num_tokens), tensor->owner());
  }
  return result;
}

class CudaExpertsInvarianceTest : public testing::CudaTest {};

TEST_F(CudaExpertsInvarianceTest, RowDoesNotDependOnItsBatch) {
  std::vector<QuantScheme> all_schemes = gpu_schemes();
  for (const char* quantized :
       {"fp8_block", "fp8_channel_token", "w4a8", "mxfp4_fp8", "int8_w8a8"}) {
    all_schemes.push_back(parse_scheme(quantized));
  }
  for (const QuantScheme& scheme : all_schemes) {
    if (!testing::has_kernels(scheme, testing::row_dtype(scheme))) continue;
    const cuda::WeightFormat& format = testing::format_of(scheme);
    Case spec;
    spec.num_tokens = 8192;
    spec.num_experts = 6;
    spec.topk = 3;
    // With FP8 rows each team has more tiles than its ring of them has places.
    spec.hidden = format.fp8_rows ? 1800 : 416;
    spec.intermediate = 96;
    spec.scheme = scheme;
    spec.activation = Activation::kSwigluOai;
    spec.bias = true;
    const Problem problem = testing::make_problem(spec);
    const ModularKernel kernel = testing::make_kernel(spec, gpu_variant("_batch_invariant"));
    const auto packed = kernel.experts().pack(problem.weights);
    const Tensor all = testing::run_experts(problem, kernel, *packed);
    std::set<std::string> configs;
    for (const std::int64_t rows : {1, 5, 24, 44, 64, 140, 200, 300, 1000}) {
      const Problem first = head(problem, rows);
      const ProblemSize size = ProblemSize::of(kernel.experts().config(), rows);
      for (const std::string& config : kernel.experts().kernel_configs(size)) {
        const int number = kernel.experts().find_kernel_config(config);
        const Tensor some = testing::run_experts(first, kernel, *packed, {.kernel_config = number});
        EXPECT_TRUE(bitwise_equal(some, all.slice(0, 0, rows)))
            << name(scheme) << ", " << rows << " rows, " << config;
        configs.insert(config);
      }
    }
    const cuda::KernelFamily& family = testing::gpu_family();
    const auto tiles = family.tiles(format);
    const auto kept = std::count_if(tiles.begin(), tiles.end(), [&](const auto& tile) {
      return family.keeps_order(format, tile);
    });
    EXPECT_EQ(configs.size(), static_cast<std::size_t>(kept)) << name(scheme);
    EXPECT_GE(kept, 3) << name(scheme);
  }
}

class CudaExpertsF16Test : public testing::CudaTest {};

TEST_F(CudaExpertsF16Test, AnExpertsOutputMayBeLargerThanF16) {
  FUSEDMOE_SKIP_WITHOUT_KERNELS("f16", DType::kF16);
  for (const std::int64_t num_tokens : {5, 100, 700}) {  // slots few enough to count inline, or not
    SCOPED_TRACE(std::to_string(num_tokens) + " tokens");
    Case spec;
    spec.num_tokens = num_tokens;
    spec.num_experts = 5;
    spec.topk = 3;
    spec.hidden = 136;
    spec.intermediate = 72;
    spec.scheme = schemes::unquantized(DType::kF16);
    spec.bias = true;
    spec.negative_ids = true;
    const Problem problem = testing::make_problem(spec);
    // Outputs are around 65504, the largest number of f16, give or take a few thousand.
    for (const ExpertMatrices& expert : problem.weights.experts) {
      const WeightMatrix& down = expert.down;
      for (std::int64_t row = 0; row < spec.hidden; ++row) {
        store_f32(down.bias.data(), DType::kF16, row * down.bias.stride(0), 65504);
        for (std::int64_t c = 0; c < spec.intermediate; ++c) {
          const std::int64_t at = row * down.values.stride(0) + c * down.values.stride(1);
          const float value = load_f32(down.values.data(), DType::kF16, at);
          store_f32(down.values.data(), DType::kF16, at, 8192 * value);
        }
      }
    }
    for (std::int64_t slot = 0; slot < problem.topk_weights.numel(); ++slot) {
      problem.topk_weights.as<float>()[slot] = 1.0F / static_cast<float>(16 << slot % 3);
    }
    const Tensor expected = run_reference(problem);
    for_each_config(spec, gpu_variant(), [&](const testing::RunOptions& options) {
      expect_close(run_rows(problem, gpu_variant(), options), expected);
    });
    expect_close(run_rows(problem, gpu_variant("_batch_invariant")), expected);
  }
}

}  // namespace
}  // namespace fusedmoe
