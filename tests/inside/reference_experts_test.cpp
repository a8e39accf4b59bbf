// The reference experts against hand-computed numbers and against the formula evaluated densely,
// token by token, with the library's own number conversions.
#include "reference/experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "reference/activation.h"
#include "reference/matrix.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace fusedmoe::reference_experts_test {

using testing::Case;
using testing::Problem;

Tensor run(const Problem& problem, DType dtype = DType::kF32, const char* variant = "reference") {
  return testing::run_variant(problem, testing::find_variant(variant), dtype);
}

std::shared_ptr<const Experts> make_experts(const Case& spec,
                                            ActivationFormat format = ActivationFormat::kStandard) {
  MoeConfig config = testing::make_config(spec, DType::kF32);
  config.activation_format = format;
  return reference::descriptor().create(config, {});
}

double stored(const TensorView& view, std::int64_t index) {
  return load_f32(view.data(), view.dtype(), index);
}

double weight(const WeightMatrix& m, std::int64_t row, std::int64_t column) {
  if (!m.scales) return stored(m.values, row * m.values.stride(0) + column * m.values.stride(1));
  const auto byte =
      m.values.as<std::uint8_t>()[row * m.values.stride(0) + column / 2 * m.values.stride(1)];
  const auto scale = m.scales.as<std::uint8_t>()[row * m.scales.stride(0) + column / 32];
  return double{e2m1_to_f32(column % 2 ? byte >> 4 : byte & 15)} * e8m0_to_f32(scale);
}

std::vector<double> linear(const WeightMatrix& m, std::int64_t out, const std::vector<double>& x) {
  std::vector<double> y(static_cast<std::size_t>(out));
  for (std::int64_t o = 0; o < out; ++o) {
    for (std::size_t i = 0; i < x.size(); ++i) y[o] += weight(m, o, std::int64_t(i)) * x[i];
    if (m.bias) y[o] += stored(m.bias, o * m.bias.stride(0));
  }
  return y;
}

/// The formula for one token in `dtype`, without the last rounding.
std::vector<double> evaluate(const Problem& p, std::int64_t token, DType dtype) {
  const Case& spec = p.spec;
  const ResolvedActivation activation = resolve(spec.activation, spec.activation_params);
  const bool gated = is_gated(spec.activation);
  std::vector<double> sum(static_cast<std::size_t>(spec.hidden));
  for (std::int64_t j = 0; j < spec.topk; ++j) {
    const std::int64_t slot = token * spec.topk + j;
    std::int32_t expert = p.topk_ids.as<std::int32_t>()[slot];
    if (expert >= 0 && p.expert_map) expert = p.expert_map.as<std::int32_t>()[expert];
    if (expert < 0) continue;
    const float router_weight = p.topk_weights.as<float>()[slot];
    std::vector<double> x;
    for (std::int64_t i = 0; i < spec.hidden; ++i) {
      double value = stored(p.hidden_states, token * spec.hidden + i);
      if (spec.weight_on_input) {
        // The weight is rounded to dtype first, then the product.
        value = reference::round_to(dtype, value * reference::round_to(dtype, router_weight));
      }
      x.push_back(value);
    }
    const ExpertMatrices& e = p.weights.experts[expert];
    std::vector<double> h = linear(e.gate, spec.intermediate, x);
    const std::vector<double> up = gated ? linear(e.up, spec.intermediate, x) : h;
    for (std::size_t i = 0; i < h.size(); ++i) {
      h[i] = reference::round_to(dtype, reference::activate(activation, h[i], up[i]));
    }
    const std::vector<double> y = linear(e.down, spec.hidden, h);
    for (std::size_t i = 0; i < y.size(); ++i) {
      sum[i] += spec.weight_on_input ? y[i] : router_weight * y[i];
    }
  }
  return sum;
}

Tensor evaluate(const Problem& p, DType dtype) {
  Tensor out = Tensor::empty({p.spec.num_tokens, p.spec.hidden}, dtype);
  for (std::int64_t t = 0; t < p.spec.num_tokens; ++t) {
    const std::vector<double> row = evaluate(p, t, dtype);
    for (std::int64_t i = 0; i < p.spec.hidden; ++i) {
      reference::store(out.data(), dtype, t * p.spec.hidden + i, row[i]);
    }
  }
  return out;
}

class AwkwardCaseTest : public ::testing::TestWithParam<Case> {};

TEST_P(AwkwardCaseTest, MatchesTheFormula) {
  const Problem problem = testing::make_problem(GetParam());
  // Both sides round at the same points and sum in double, in different orders: results are the
  // same but for values that fall within 1e-15 of a rounding boundary. One such activation moves
  // its row by an ulp of the activation's dtype times a weight.
  for (auto [dtype, ulp] : {std::pair{DType::kF32, 0x1p-23}, {DType::kBF16, 0x1p-7}}) {
    const testing::Difference difference =
        testing::compare(run(problem, dtype), evaluate(problem, dtype));
    EXPECT_FALSE(difference.nonfinite_mismatch) << difference.to_string();
    EXPECT_LE(difference.max_norm_relative, ulp) << difference.to_string();
    EXPECT_LE(difference.rms_relative, ulp / 16) << difference.to_string();
  }
}

TEST_P(AwkwardCaseTest, BatchedFormatGivesTheSameWithinARounding) {
  const Problem problem = testing::make_problem(GetParam());
  const Tensor standard = run(problem);
  const Tensor batched = run(problem, DType::kF32, "reference_batched");
  // Rows are rounded to f32 before they are weighted, and summed in fp32.
  const testing::Difference difference = testing::compare(batched, standard);
  EXPECT_FALSE(difference.nonfinite_mismatch);
  EXPECT_LE(difference.max_element, 1e-5) << difference.to_string();
  EXPECT_LE(difference.rms_relative, 1e-6) << difference.to_string();
}

TEST_P(AwkwardCaseTest, TwoRunsGiveTheSameBits) {
  const Problem problem = testing::make_problem(GetParam());
  EXPECT_TRUE(testing::bitwise_equal(run(problem, DType::kBF16), run(problem, DType::kBF16)));
}

TEST_P(AwkwardCaseTest, IsSupported) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Support support =
        reference::descriptor().supports(testing::make_config(GetParam(), dtype));
    EXPECT_TRUE(support) << support.text;
  }
}

INSTANTIATE_TEST_SUITE_P(ReferenceExperts, AwkwardCaseTest,
                         ::testing::ValuesIn(testing::awkward_cases()),
                         [](const auto& info) { return info.param.name; });

/// Two experts with hidden 2 and intermediate 1, ReLU squared, so that all numbers are small
/// integers.
struct Tiny {
  std::vector<float> w13 = {1, 2, -1, 3};  // (2, 1, 2)
  std::vector<float> w2 = {1, -1, 2, 5};   // (2, 2, 1)
  std::vector<float> bias = {10, 20};      // (2), of expert 1's second matrix
  std::vector<float> x = {1, 1, 3, 2};     // (2, 2)
  std::vector<std::int32_t> ids = {0, 1, 1, -1};
  std::vector<float> router_weights = {0.5F, 2, 4, std::nanf("")};
  ExpertWeights weights;

  Tiny() {
    weights.scheme = schemes::unquantized(DType::kF32);
    weights.hidden = 2;
    weights.intermediate = 1;
    weights.activation = Activation::kRelu2NoMul;
    for (std::int64_t e = 0; e < 2; ++e) {
      ExpertMatrices expert;
      expert.gate.values = TensorView(&w13[2 * e], DType::kF32, {1, 2});
      expert.down.values = TensorView(&w2[2 * e], DType::kF32, {2, 1});
      expert.down.bias = TensorView(bias.data(), DType::kF32, {2});
      weights.experts.push_back(expert);
    }
  }

  std::vector<float> run() {
    const auto experts = reference::descriptor().create(moe_config(weights, 2, DType::kF32), {});
    const auto packed = experts->pack(weights);
    const WorkspaceSizes sizes = experts->workspace_sizes(ProblemSize::of(experts->config(), 2));
    std::vector<double> workspace13(sizes.common_bytes() / 8),
        workspace2(sizes.workspace2_bytes / 8);
    std::vector<float> out(4, std::nanf(""));
    ForwardArgs args;
    args.weights = packed.get();
    args.fused_output = TensorView(out.data(), DType::kF32, {2, 2});
    args.hidden_states = TensorView(x.data(), DType::kF32, {2, 2});
    args.topk_ids = TensorView(ids.data(), DType::kI32, {2, 2});
    args.topk_weights = TensorView(router_weights.data(), DType::kF32, {2, 2});
    args.workspace13 = workspace13.data();
    args.workspace2 = workspace2.data();
    experts->apply(args);
    return out;
  }
};

TEST(ReferenceExpertsTest, ByHand) {
  // Token 0: expert 0: h = (1 + 2)^2 = 9, y = (9 + 10, -9 + 20), weight 0.5;
  //          expert 1: h = (-1 + 3)^2 = 4, y = (8 + 10, 20 + 20), weight 2.
  // Token 1: expert 1: h = (-3 + 6)^2 = 9, y = (18 + 10, 45 + 20), weight 4; the other slot none.
  EXPECT_EQ(Tiny().run(), (std::vector<float>{9.5F + 36, 5.5F + 80, 112, 260}));
}

TEST(ReferenceExpertsTest, ATokenWithoutLocalExpertsIsZero) {
  Tiny tiny;
  tiny.ids = {0, -1, -1, 7};
  tiny.router_weights = {1, std::nanf(""), INFINITY, std::nanf("")};
  EXPECT_EQ(tiny.run(), (std::vector<float>{19, 11, 0, 0}));
}

TEST(ReferenceExpertsTest, NanInOneTokenStaysThere) {
  Tiny tiny;
  tiny.x[0] = std::nanf("");
  const std::vector<float> out = tiny.run();
  EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1]));
  EXPECT_EQ(out[2], 112);
  EXPECT_EQ(out[3], 260);
}

TEST(ReferenceExpertsTest, EveryLayoutGivesTheSameBits) {
  Case spec{.name = "layouts", .hidden = 40, .intermediate = 24, .bias = true};
  const Tensor expected = run(testing::make_problem(spec));
  for (auto layout : {GateUpLayout::kGateUp, GateUpLayout::kUpGate, GateUpLayout::kInterleaved}) {
    for (bool transposed : {false, true}) {
      spec.gate_up_layout = layout;
      spec.transposed = transposed;
      EXPECT_TRUE(testing::bitwise_equal(run(testing::make_problem(spec)), expected))
          << static_cast<int>(layout) << transposed;
    }
  }
}

TEST(ReferenceExpertsTest, EveryMxfp4LayoutGivesTheSameBits) {
  Case spec{.name = "layouts", .hidden = 64, .intermediate = 32};
  spec.scheme = schemes::mxfp4_w4a16();
  spec.bias = true;
  const Tensor expected = run(testing::make_problem(spec));
  for (auto layout : {GateUpLayout::kUpGate, GateUpLayout::kInterleaved}) {
    spec.gate_up_layout = layout;
    EXPECT_TRUE(testing::bitwise_equal(run(testing::make_problem(spec)), expected));
  }
}

TEST(ReferenceExpertsTest, HalvesOfTheExpertsSumToTheWhole) {
  const Case spec{.num_tokens = 17, .num_experts = 6, .topk = 3, .bias = true};
  const Problem whole = testing::make_problem(spec);
  const Tensor expected = run(whole);
  std::vector<float> sum(static_cast<std::size_t>(expected.numel()));
  for (std::int64_t half = 0; half < 2; ++half) {
    Problem part = whole;
    part.expert_map = Tensor::empty({6}, DType::kI32);
    part.weights.experts.clear();
    for (std::int64_t e = 0; e < 6; ++e) {
      const bool mine = e % 2 == half;
      part.expert_map.as<std::int32_t>()[e] =
          mine ? static_cast<std::int32_t>(part.weights.num_experts()) : -1;
      if (mine) part.weights.experts.push_back(whole.weights.experts[e]);
    }
    MoeConfig config = testing::make_config(spec, DType::kF32);
    config.num_local_experts = 3;
    config.has_expert_map = true;
    const ModularKernel kernel = testing::find_variant("reference").create(config);
    const Tensor out = testing::run_experts(part, kernel, *kernel.experts().pack(part.weights));
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += out.as<float>()[i];
  }
  const testing::Difference difference =
      testing::compare(TensorView(sum.data(), DType::kF32, expected.shape()), expected);
  // Each half is rounded to f32 once, and so is their sum.
  EXPECT_LE(difference.max_element, 4 * 0x1p-24) << difference.to_string();
}

TEST(ReferenceExpertsTest, ARowDoesNotDependOnItsBatch) {
  Case spec{.num_tokens = 64, .topk = 3, .bias = true};
  const Problem all = testing::make_problem(spec);
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensor expected = run(all, dtype);
    for (std::int64_t count : {1, 7}) {
      Problem some = all;
      some.spec.num_tokens = count;
      const auto rows = [&](const Tensor& tensor) {
        return Tensor(tensor.slice(0, 20, 20 + count), tensor.owner());
      };
      some.hidden_states = rows(all.hidden_states);
      some.topk_ids = rows(all.topk_ids);
      some.topk_weights = rows(all.topk_weights);
      EXPECT_TRUE(testing::bitwise_equal(run(some, dtype), expected.slice(0, 20, 20 + count)));
    }
  }
}

TEST(ReferenceExpertsTest, BatchedLeavesUnweightedRowsAndZerosBehindThem) {
  const Case spec{.num_experts = 3, .topk = 1, .hidden = 5, .intermediate = 4};
  const Problem problem = testing::make_problem(spec);
  constexpr std::int64_t kCapacity = 3;
  std::vector<float> x(3 * kCapacity * 5, std::nanf(""));
  const std::vector<std::int32_t> counts = {2, 0, 3};
  for (std::int64_t e = 0; e < 3; ++e) {
    for (std::int64_t i = 0; i < counts[e] * 5; ++i) {
      x[e * kCapacity * 5 + i] = problem.hidden_states.as<float>()[i];
    }
  }
  const auto experts = make_experts(spec, ActivationFormat::kBatchedExperts);
  const auto packed = experts->pack(problem.weights);
  const WorkspaceSizes sizes =
      experts->workspace_sizes(ProblemSize::of(experts->config(), kCapacity));
  EXPECT_EQ(sizes.output_shape, (Shape{3, kCapacity, 5}));
  std::vector<char> workspace13(sizes.common_bytes()), workspace2(sizes.workspace2_bytes);
  std::vector<float> out(x.size(), std::nanf(""));
  ForwardArgs args;
  args.weights = packed.get();
  args.fused_output = TensorView(out.data(), DType::kF32, sizes.output_shape);
  args.hidden_states = TensorView(x.data(), DType::kF32, sizes.output_shape);
  args.expert_num_tokens = TensorView(counts.data(), DType::kI32, {3});
  args.workspace13 = workspace13.data();
  args.workspace2 = workspace2.data();
  experts->apply(args);

  for (std::int64_t e = 0; e < 3; ++e) {
    for (std::int64_t row = 0; row < kCapacity; ++row) {
      Problem one = problem;
      one.topk_ids.as<std::int32_t>()[row] = static_cast<std::int32_t>(e);
      one.topk_weights.as<float>()[row] = 1;
      const std::vector<double> expected = evaluate(one, row, DType::kF32);
      for (std::int64_t i = 0; i < 5; ++i) {
        const float actual = out[(e * kCapacity + row) * 5 + i];
        if (row < counts[e]) {
          EXPECT_NEAR(actual, expected[i], 1e-6 * std::max(1.0, std::abs(expected[i])));
        } else {
          EXPECT_EQ(actual, 0);
        }
      }
    }
  }
}

TEST(ReferenceExpertsTest, PlanIsMonotoneAndEmptyForNoTokens) {
  for (auto format : {ActivationFormat::kStandard, ActivationFormat::kBatchedExperts}) {
    const auto experts = make_experts({.topk = 4, .hidden = 2880, .intermediate = 2880}, format);
    std::size_t last = 0;
    for (std::int64_t tokens : {1, 2, 3, 64, 65, 4096}) {
      const WorkspaceSizes sizes =
          experts->workspace_sizes(ProblemSize::of(experts->config(), tokens));
      const std::size_t bytes = sizes.workspace13_bytes + sizes.workspace2_bytes;
      EXPECT_GT(bytes, last);
      last = bytes;
    }
    const WorkspaceSizes none = experts->workspace_sizes(ProblemSize::of(experts->config(), 0));
    EXPECT_EQ(none.common_bytes() + none.workspace2_bytes, 0U);
  }
}

TEST(ReferenceExpertsTest, PackKeepsThePublishedWeights) {
  const Problem problem = testing::make_problem({.num_experts = 4, .bias = true});
  const auto experts = make_experts(problem.spec);
  std::vector<std::int64_t> done;
  PackOptions options;
  options.progress = [&](std::int64_t now, std::int64_t total) {
    EXPECT_EQ(total, 4);
    done.push_back(now);
  };
  const auto packed = experts->pack(problem.weights, options);
  EXPECT_EQ(done, (std::vector<std::int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(packed->nbytes(), 0);
  EXPECT_EQ(packed->info().implementation, "reference");
  EXPECT_EQ(packed->info().num_experts, 4);
  EXPECT_TRUE(packed->info().has_bias);
  EXPECT_TRUE(make_experts(problem.spec, ActivationFormat::kBatchedExperts)->accepts(*packed));
  ExpertWeights bad = problem.weights;
  bad.hidden += 1;
  EXPECT_THROW(experts->pack(bad), Error);
}

}  // namespace fusedmoe::reference_experts_test
