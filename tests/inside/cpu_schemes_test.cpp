// The fast CPU experts on every scheme: against the reference, twice, alone and in a batch. Runs
// once for each instruction set of the machine (tests/CMakeLists.txt).
#include <gtest/gtest.h>

#include "cpu/experts.h"
#include "cpu/pack.h"
#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "runner.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace fusedmoe::cpu_schemes_test {

using testing::bitwise_equal;
using testing::Case;
using testing::compare;
using testing::Problem;
using testing::Runner;

Tensor run(const Problem& problem, const char* variant, DType dtype) {
  return testing::run_variant(problem, testing::find_variant(variant), dtype);
}

constexpr const char* kVariants[] = {"cpu", "cpu_batched", "cpu_unfused"};

/// Those whose rows do not depend on their batch: on AMX only where that is asked for.
std::vector<const char*> invariant_variants() {
  std::vector<const char*> variants{"cpu_batch_invariant", "cpu_batched_batch_invariant"};
  if (cpu_isa() != "amx")
    variants.insert(variants.end(), std::begin(kVariants), std::end(kVariants));
  return variants;
}

/// Without quantized activations: spec "tolerances", section 5, as in cpu_experts_test.cpp; zero
/// points are subtracted from the sums of whole groups, which cancels up to half of their bits.
///
/// With them, the two sides' activated rows differ by their own rounding, and where that carries an
/// element over a tie its code differs: by 1/16 of an E4M3 value, 1/127 of the largest of an int8
/// group, 2^-14 of that of an int16 group, and up to a third of the largest of an E2M1 block. Rare
/// (1 in 1000 at most in bf16, whose ulp is 1/16 of an E4M3 step), so the rms hardly sees it; one
/// element of the output sees one of `intermediate` terms.
struct Tolerance {
  double max, rms;
};
Tolerance tolerance(const QuantScheme& scheme, DType dtype) {
  const bool f32 = dtype == DType::kF32;
  if (!scheme.activations)
    return f32 ? Tolerance{2e-5, scheme.weights.symmetric ? 2e-6 : 4e-6} : Tolerance{2e-2, 4e-3};
  switch (scheme.activations->value) {
    case DType::kE2M1:
      return {1.5e-1, 1.5e-2};
    case DType::kE4M3:
      return {f32 ? 1e-2 : 2e-2, 4e-3};
    case DType::kI16:
      return f32 ? Tolerance{2e-4, 2e-5} : Tolerance{2e-2, 4e-3};
    default:
      return {f32 ? 5e-3 : 2e-2, 4e-3};
  }
}

std::vector<Case> cases(const QuantScheme& scheme) {
  std::vector<Case> result{
      {.name = "odd",  // sizes that no block divides
       .num_tokens = 23,
       .num_experts = 5,
       .topk = 2,
       .hidden = 360,
       .intermediate = 90,
       .bias = true,
       .negative_ids = true,
       .scale_dtype = DType::kF16},
      {.name = "mapped",
       .num_tokens = 9,
       .num_experts = 7,
       .topk = 3,
       .hidden = 192,
       .intermediate = 256,
       .activation = Activation::kSwigluOai,
       .expert_map = true,
       .scale_dtype = DType::kF32},
      {.name = "one_expert",  // a full block of rows, and experts without any
       .num_tokens = 40,
       .num_experts = 4,
       .topk = 1,
       .hidden = 64,
       .intermediate = 1368,
       .activation = Activation::kRelu2NoMul,
       .skew = testing::RoutingSkew::kOneExpert},
  };
  for (Case& spec : result) spec.scheme = scheme;
  return result;
}

class CpuSchemesTest : public ::testing::TestWithParam<NamedScheme> {
 protected:
  const QuantScheme& scheme() const { return GetParam().scheme; }
};

TEST_P(CpuSchemesTest, MatchesReference) {
  for (const Case& spec : cases(scheme())) {
    const Problem problem = testing::make_problem(spec);
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const Tensor expected = run(problem, "reference", dtype);
      for (const std::string variant : kVariants) {
        // Unfused experts round once more, before the activation. Quantized, that is another
        // problem, for another reference.
        const bool unfused = variant == "cpu_unfused";
        if (unfused && dtype == DType::kBF16 && scheme().activations) continue;
        const Runner runner(problem, variant.c_str(), dtype);
        const Tensor actual = runner.run(problem);
        const testing::Difference difference = compare(actual, expected);
        SCOPED_TRACE(spec.name + " " + variant + " " + std::string(name(dtype)) + ": " +
                     difference.to_string());
        EXPECT_FALSE(difference.nonfinite_mismatch);
        // Batched experts round their rows before the weighted sum.
        const double factor = variant == "cpu" ? 1 : 2;
        EXPECT_LE(difference.max_element, factor * tolerance(scheme(), dtype).max);
        EXPECT_LE(difference.rms_element, factor * tolerance(scheme(), dtype).rms);
        EXPECT_TRUE(bitwise_equal(runner.run(problem), actual)) << "second run";
      }
    }
  }
}

/// The first rows of a problem, as a problem.
Problem head(const Problem& problem, std::int64_t num_tokens) {
  Problem result = problem;
  result.spec.num_tokens = num_tokens;
  for (Tensor* tensor : {&result.hidden_states, &result.topk_ids, &result.topk_weights}) {
    *tensor = Tensor(tensor->slice(0, 0, num_tokens), tensor->owner());
  }
  return result;
}

TEST_P(CpuSchemesTest, RowDoesNotDependOnItsBatch) {
  const auto& key = scheme().activations;
  if (key && key->dynamic && key->group == GroupShape{-1, -1}) {
    // One scale for the batch: refused where rows may not depend on it.
    MoeConfig config = testing::make_config(cases(scheme()).front(), DType::kBF16);
    config.batch_invariant = true;
    EXPECT_EQ(no_ep().supports(config).reason, Reason::kBatchInvariance);
    return;
  }
  Case spec;
  spec.num_tokens = 100;  // more rows an expert than stream in blocks
  spec.num_experts = 3;
  spec.topk = 2;
  spec.hidden = 1696;  // more than one panel of every element type
  spec.intermediate = 72;
  spec.scheme = scheme();
  spec.bias = true;
  const Problem problem = testing::make_problem(spec);
  for (const char* variant : invariant_variants()) {
    const Runner runner(problem, variant, DType::kBF16);
    const Tensor whole = runner.run(problem);
    for (std::int64_t num_tokens : {1, 2, 3, 4, 5, 9, 40}) {
      EXPECT_TRUE(
          bitwise_equal(runner.run(head(problem, num_tokens)), whole.slice(0, 0, num_tokens)))
          << variant << " M = " << num_tokens;
    }
  }
}

/// Those with blocks to begin inside; W4A8 takes whole groups only.
std::vector<NamedScheme> schemes_with_blocks() {
  std::vector<NamedScheme> result;
  for (const NamedScheme& entry : named_schemes()) {
    const QuantKey& weights = entry.scheme.weights;
    const bool blocks = weights.quantized() && weights.group.cols > 32;
    if (blocks && weights != keys::int4_e4m3()) result.push_back(entry);
  }
  return result;
}

class CpuShardsTest : public CpuSchemesTest {};

/// Hidden columns and intermediate rows from 32 on: what is left of larger matrices.
Problem shard(const QuantScheme& scheme, std::int64_t num_tokens) {
  constexpr std::int64_t kFirst = 32;
  const GroupShape group = scheme.weights.group;
  Case spec;
  spec.num_tokens = num_tokens;
  spec.num_experts = 2;
  spec.topk = 1;
  spec.hidden = 256;
  spec.intermediate = 256;
  spec.scheme = scheme;
  Problem problem = testing::make_problem(spec);
  for (ExpertMatrices& expert : problem.weights.experts) {
    for (WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      const std::int64_t stored = matrix->values.size(1) * kFirst / 256;
      matrix->values = matrix->values.slice(1, stored, matrix->values.size(1));
      matrix->first_col = kFirst;
      matrix->values = matrix->values.slice(0, kFirst, 256);
      if (group.rows > 1) {
        matrix->first_row = kFirst;
      } else {
        matrix->scales = matrix->scales.slice(0, kFirst, 256);
        if (matrix->zero_points) matrix->zero_points = matrix->zero_points.slice(0, kFirst, 256);
      }
    }
  }
  problem.weights.hidden = problem.weights.intermediate = 256 - kFirst;
  problem.spec.hidden = problem.spec.intermediate = 256 - kFirst;
  problem.hidden_states = Tensor::empty({num_tokens, 256 - kFirst}, DType::kF32);
  for (std::int64_t i = 0; i < problem.hidden_states.numel(); ++i) {
    problem.hidden_states.as<float>()[i] = static_cast<float>(i * 37 % 101 - 50) / 32;
  }
  return problem;
}

/// Shards whose first element lies inside a block of scales, for few rows and for more.
TEST_P(CpuShardsTest, MatchReference) {
  for (const std::int64_t num_tokens : {5, 90}) {
    const Problem problem = shard(scheme(), num_tokens);
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const testing::Difference difference =
          compare(run(problem, "cpu", dtype), run(problem, "reference", dtype));
      SCOPED_TRACE(std::to_string(num_tokens) + " tokens " + std::string(name(dtype)) + ": " +
                   difference.to_string());
      EXPECT_FALSE(difference.nonfinite_mismatch);
      EXPECT_LE(difference.max_element, tolerance(scheme(), dtype).max);
      EXPECT_LE(difference.rms_element, tolerance(scheme(), dtype).rms);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CpuShardsTest, ::testing::ValuesIn(schemes_with_blocks()),
                         [](const auto& info) { return info.param.name; });
/// Also int8 activations with codes down to -128.
std::vector<NamedScheme> schemes_and_ranges() {
  std::vector<NamedScheme> result = named_schemes();
  for (const char* name : {"int8_w8a8", "int4_g32_int8"}) {
    result.push_back({std::string(name) + "_full", parse_scheme(std::string(name) + ":full")});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(All, CpuSchemesTest, ::testing::ValuesIn(schemes_and_ranges()),
                         [](const auto& info) { return info.param.name; });

/// Kernels take the rows of an expert in blocks of up to 32, and tasks of up to 192.
TEST(CpuBlocksOfRowsTest, RowsDoNotDependOnTheirBlock) {
  for (const char* scheme : {"bf16", "mxfp4_w4a16", "nvfp4_w4a16", "int4_g32_zp", "fp8_block",
                             "int4_g128_int8", "int8_w8a8"}) {
    Case spec;
    spec.num_tokens = 193;
    spec.num_experts = 2;
    spec.topk = 1;
    spec.hidden = 288;
    spec.intermediate = 160;
    spec.skew = testing::RoutingSkew::kOneExpert;
    spec.scheme = parse_scheme(scheme);
    const Problem problem = testing::make_problem(spec);
    const Runner runner(problem, "cpu_batch_invariant", DType::kBF16);
    const Tensor whole = runner.run(problem);
    for (const std::int64_t rows : {6, 15, 16, 17, 31, 32, 33, 47, 48, 49, 192}) {
      EXPECT_TRUE(bitwise_equal(runner.run(head(problem, rows)), whole.slice(0, 0, rows)))
          << scheme << ", " << rows << " rows";
    }
  }
}

/// Where a few rows in fp32 no longer fit a task's scratch memory, AMX takes tiles.
TEST(CpuWideRowsTest, MatchReference) {
  struct Width {
    const char* scheme;
    std::int64_t rows, hidden;
  };
  for (const Width& width :
       {Width{"bf16", 4, 12032}, Width{"bf16", 4, 12064}, Width{"fp8_channel_w8a16", 4, 12064},
        Width{"mxfp4_w4a16", 5, 9568}, Width{"mxfp4_w4a16", 5, 9600}}) {
    Case spec;
    spec.num_tokens = width.rows;
    spec.num_experts = 1;
    spec.topk = 1;
    spec.hidden = width.hidden;
    spec.intermediate = 64;
    spec.scheme = parse_scheme(width.scheme);
    const Problem problem = testing::make_problem(spec);
    const testing::Difference difference =
        compare(run(problem, "cpu", DType::kBF16), run(problem, "reference", DType::kBF16));
    SCOPED_TRACE(std::string(width.scheme) + " " + difference.to_string());
    EXPECT_FALSE(difference.nonfinite_mismatch);
    EXPECT_LE(difference.max_element, tolerance(spec.scheme, DType::kBF16).max);
    EXPECT_LE(difference.rms_element, tolerance(spec.scheme, DType::kBF16).rms);
  }
}

/// Codes that no quantizer writes, but a file may hold; for experts of few rows and of more.
TEST(CpuCodesTest, UnusualScalesAndValuesAreTheReferencesOrRefused) {
  struct Change {
    const char* scheme;
    bool values;  // else scales
    std::uint8_t code;
    bool refused;
  };
  for (const Change& change :
       {Change{"nvfp4_w4a16", false, 0x80, false},  // -0
        Change{"nvfp4_w4a16", false, 0x7F, true},   // NaN
        Change{"nvfp4_w4a16", false, 0xC8, true},   // negative
        Change{"w4a8", false, 0x7E, false},         // saturates
        Change{"w4a8", false, 0xB9, false}, Change{"fp8_channel_w8a16", true, 0x7F, false},  // NaN
        Change{"mxfp8_w8a16", true, 0xFF, false}}) {
    SCOPED_TRACE(std::string(change.scheme) + " " + std::to_string(change.code));
    for (const std::int64_t num_tokens : {2, 40}) {
      Case spec;
      spec.num_tokens = num_tokens;
      spec.num_experts = 1;
      spec.topk = 1;
      spec.hidden = 128;
      spec.intermediate = 128;
      spec.scheme = parse_scheme(change.scheme);
      const Problem problem = testing::make_problem(spec);
      const WeightMatrix& down = problem.weights.experts[0].down;
      const TensorView& changed = change.values ? down.values : down.scales;
      changed.as<std::uint8_t>()[3] = change.code;
      if (change.refused) {
        EXPECT_THROW(run(problem, "cpu", DType::kF32), Error);
        continue;
      }
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        const testing::Difference difference =
            compare(run(problem, "cpu", dtype), run(problem, "reference", dtype));
        EXPECT_FALSE(difference.nonfinite_mismatch) << difference.to_string();
        EXPECT_LE(difference.max_element, 2e-2) << difference.to_string();
      }
    }
  }
}

}  // namespace fusedmoe::cpu_schemes_test
