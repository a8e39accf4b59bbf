// The reference experts with quantized weights and activations: by hand, and against the formula
// evaluated densely with the library's number conversions.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "quant/quantize.h"
#include "quant/weight_layout.h"
#include "reference/activation.h"
#include "reference/experts.h"
#include "reference/matrix.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace fusedmoe::reference_schemes_test {

using testing::bitwise_equal;
using testing::Case;
using testing::Problem;

Tensor run(const Problem& problem, DType dtype, const char* variant = "reference") {
  return testing::run_variant(problem, testing::find_variant(variant), dtype);
}

ModularKernel make_kernel(const Problem& problem) {
  return testing::find_variant("reference")
      .create(testing::make_config(problem.spec, DType::kBF16));
}

/// Rows of doubles.
using Rows = std::vector<std::vector<double>>;

/// The exact values that an expert's matrix stands for.
Rows decode(const WeightMatrix& m, const QuantKey& key, std::int64_t out, std::int64_t in) {
  const core::WeightLayout layout = core::weight_layout(key, "key");
  const auto at = [](const TensorView& v, std::int64_t r, std::int64_t c) {
    return r * v.stride(0) + c * v.stride(1);
  };
  Rows rows(out, std::vector<double>(in));
  for (std::int64_t r = 0; r < out; ++r) {
    for (std::int64_t c = 0; c < in; ++c) {
      const std::int64_t stored = at(m.values, r, c / layout.packing);
      double value = 0;
      if (layout.packing > 1) {
        const int width = key.value == DType::kU8 ? 8 : 4;
        const std::uint32_t word = width * layout.packing == 8
                                       ? m.values.as<std::uint8_t>()[stored]
                                       : m.values.as<std::uint32_t>()[stored];
        const std::uint32_t code = word >> (c % layout.packing * width) & ((1U << width) - 1);
        const auto byte = static_cast<std::uint8_t>(code);
        value = key.value == DType::kE2M1  ? e2m1_to_f32(byte)
                : key.value == DType::kIq4 ? load_f32(&byte, DType::kIq4, 0)
                                           : code;
      } else {
        value = load_f32(m.values.data(), key.value, stored);
      }
      if (layout.quantized()) {
        const std::int64_t block_row = core::block_of(r, key.group.rows, m.first_row);
        const std::int64_t block = core::block_of(c, key.group.cols, m.first_col);
        const DType type = m.scales.dtype() == DType::kU8 ? *key.scale : m.scales.dtype();
        const double zero =
            layout.zero_points
                ? m.zero_points.as<std::uint8_t>()[at(m.zero_points, block_row, block)]
                : static_cast<double>(layout.zero);
        const double scale = load_f32(m.scales.data(), type, at(m.scales, block_row, block));
        if (layout.global_scale == core::GlobalScale::kPerBlock) {
          const std::int64_t count = layout.factors_per_block(),
                             first = c / key.global_group.cols * count;
          const auto factor = [&](std::int64_t i) {
            return double{load_f32(m.global_scale.data(), DType::kF16, at(m.global_scale, r, i))};
          };
          rows[r][c] = count == 1 ? (value - zero) * scale * factor(first)
                                  : value * scale * factor(first) - zero * factor(first + 1);
          continue;
        }
        value = (value - zero) * scale;
        if (layout.global_scale == core::GlobalScale::kPerMatrix) {
          value *= *m.global_scale.as<float>();
        } else if (layout.global_scale == core::GlobalScale::kPerRow) {
          value = double{e4m3_to_f32(f32_to_e4m3(static_cast<float>(value)))} *
                  m.global_scale.as<float>()[r * m.global_scale.stride(0)];
        }
      }
      rows[r][c] = value;
    }
  }
  return rows;
}

/// What becomes of a row of activations; `scale` is of the tensor, or NVFP4's global one.
void quantize_and_decode(std::vector<double>& row, const QuantKey& key, float scale) {
  std::vector<float> x(row.begin(), row.end());
  std::vector<std::uint8_t> codes(2 * x.size());
  std::vector<float> scales(x.size());
  core::quantize_row(x.data(), std::int64_t(x.size()), key, scale, codes.data(), scales.data());
  for (std::size_t i = 0; i < row.size(); ++i) {
    const DType type = key.value;
    const double group_scale = key.group.rows < 0
                                   ? scale
                                   : load_f32(scales.data(), *key.scale,
                                              core::block_of(std::int64_t(i), key.group.cols, 0));
    row[i] = load_f32(codes.data(), type, std::int64_t(i)) * group_scale *
             (key.global_scale ? double{scale} : 1.0);
  }
}

std::vector<double> multiply(const Rows& w, const std::vector<double>& x, const TensorView& bias) {
  std::vector<double> y(w.size());
  for (std::size_t o = 0; o < w.size(); ++o) {
    for (std::size_t i = 0; i < x.size(); ++i) y[o] += w[o][i] * x[i];
    if (bias) y[o] += load_f32(bias.data(), bias.dtype(), std::int64_t(o) * bias.stride(0));
  }
  return y;
}

float input_scale(const WeightMatrix& m) {
  return m.input_scale ? *m.input_scale.as<float>() : 0;
}

float amax(const Rows& rows) {
  double largest = 0;
  for (const auto& row : rows) {
    for (const double value : row) largest = std::max(largest, std::abs(value));
  }
  return static_cast<float>(largest);
}

struct Expert {
  Rows gate, up, down;

  Expert(const ExpertMatrices& e, const Case& spec) {
    const QuantKey& key = spec.scheme.weights;
    gate = decode(e.gate, key, spec.intermediate, spec.hidden);
    if (e.up.values) up = decode(e.up, key, spec.intermediate, spec.hidden);
    down = decode(e.down, key, spec.hidden, spec.intermediate);
  }
};

/// The layer's formula in f32 with all quantization steps, without the last rounding.
Rows evaluate(const Problem& p) {
  const Case& spec = p.spec;
  const std::optional<QuantKey>& key = spec.scheme.activations;
  const ResolvedActivation activation = resolve(spec.activation, spec.activation_params);
  const bool gated = is_gated(spec.activation);
  const bool per_tensor = key && key->group.rows < 0;
  float a1 = 0, a2 = 0;
  for (const ExpertMatrices& e : p.weights.experts) {
    a1 = std::max({a1, input_scale(e.gate), input_scale(e.up)});
    a2 = std::max(a2, input_scale(e.down));
  }
  Rows x(spec.num_tokens, std::vector<double>(spec.hidden));
  for (std::int64_t t = 0; t < spec.num_tokens; ++t) {
    for (std::int64_t i = 0; i < spec.hidden; ++i) {
      const float value = p.hidden_states.as<float>()[t * spec.hidden + i];
      x[t][i] = spec.weight_on_input ? value * p.topk_weights.as<float>()[t] : value;
    }
  }
  if (per_tensor && key->dynamic) a1 = amax(x) / 448;

  struct Slot {
    std::int64_t token, expert;
    double weight;
  };
  std::vector<Slot> slots;
  for (std::int64_t s = 0; s < spec.num_tokens * spec.topk; ++s) {
    std::int32_t expert = p.topk_ids.as<std::int32_t>()[s];
    if (expert >= 0 && p.expert_map) expert = p.expert_map.as<std::int32_t>()[expert];
    const double weight = spec.weight_on_input ? 1 : p.topk_weights.as<float>()[s];
    if (expert >= 0) slots.push_back({s / spec.topk, expert, weight});
  }
  std::vector<Expert> experts;
  for (const ExpertMatrices& e : p.weights.experts) experts.push_back(Expert(e, spec));
  Rows h;
  for (const Slot& slot : slots) {
    const ExpertMatrices& e = p.weights.experts[slot.expert];
    std::vector<double> row = x[slot.token];
    const float nvfp4 = std::max(input_scale(e.gate), input_scale(e.up));
    if (key) quantize_and_decode(row, *key, key->global_scale ? nvfp4 : a1);
    const Expert& decoded = experts[slot.expert];
    std::vector<double> gate = multiply(decoded.gate, row, e.gate.bias);
    const std::vector<double> up = gated ? multiply(decoded.up, row, e.up.bias) : gate;
    for (std::size_t i = 0; i < gate.size(); ++i) {
      gate[i] = static_cast<float>(reference::activate(activation, gate[i], up[i]));
    }
    h.push_back(gate);
  }
  if (per_tensor && key->dynamic) a2 = amax(h) / 448;
  Rows out(spec.num_tokens, std::vector<double>(spec.hidden));
  for (std::size_t s = 0; s < slots.size(); ++s) {
    const ExpertMatrices& e = p.weights.experts[slots[s].expert];
    if (key) quantize_and_decode(h[s], *key, key->global_scale ? input_scale(e.down) : a2);
    const std::vector<double> y = multiply(experts[slots[s].expert].down, h[s], e.down.bias);
    for (std::size_t i = 0; i < y.size(); ++i) out[slots[s].token][i] += slots[s].weight * y[i];
  }
  return out;
}

/// One thread: the problems are small.
class SchemeCaseTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { set_num_threads(1); }
  void TearDown() override { set_num_threads(0); }
};

TEST_P(SchemeCaseTest, MatchesTheFormula) {
  const Problem problem = testing::make_problem(GetParam());
  const Support support =
      reference::descriptor().supports(testing::make_config(GetParam(), DType::kF32));
  ASSERT_TRUE(support) << support.text;
  const Tensor expected = Tensor::empty(problem.hidden_states.shape(), DType::kF32);
  const Rows rows = evaluate(problem);
  for (std::int64_t i = 0; i < expected.numel(); ++i) {
    expected.as<float>()[i] =
        static_cast<float>(rows[i / GetParam().hidden][i % GetParam().hidden]);
  }
  // Operands are the same, sums in double in another order, each result rounded to f32 once: an
  // activated value may come out one f32 ulp away, which no code of these cases sits close to.
  const Tensor actual = run(problem, DType::kF32);
  testing::Difference difference = testing::compare(actual, expected);
  EXPECT_FALSE(difference.nonfinite_mismatch);
  EXPECT_LE(difference.max_element, 1e-6) << difference.to_string();
  // Batched rows are rounded to f32 before they are weighted, and summed in fp32.
  difference = testing::compare(run(problem, DType::kF32, "reference_batched"), actual);
  EXPECT_FALSE(difference.nonfinite_mismatch);
  EXPECT_LE(difference.max_element, 1e-5) << difference.to_string();
}

INSTANTIATE_TEST_SUITE_P(Reference, SchemeCaseTest, ::testing::ValuesIn(testing::scheme_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(ReferenceSchemesTest, UnpackedExpertsGiveTheSameBits) {
  for (const NamedScheme& entry : named_schemes()) {
    Problem problem = testing::make_problem(testing::scheme_cases(entry)[1]);
    const Tensor expected = run(problem, DType::kBF16);
    const ModularKernel kernel = make_kernel(problem);
    const Experts& experts = kernel.experts();
    const auto packed = experts.pack(problem.weights);
    for (std::int64_t e = 0; e < problem.weights.num_experts(); ++e) {
      const ExpertWeights one = experts.unpack(*packed, e);
      ASSERT_EQ(one.num_experts(), 1);
      EXPECT_TRUE(one.experts[0].down.values.contiguous());
      problem.weights.experts[e] = one.experts.front();
      problem.weights.owners.insert(problem.weights.owners.end(), one.owners.begin(),
                                    one.owners.end());
    }
    EXPECT_TRUE(bitwise_equal(run(problem, DType::kBF16), expected)) << entry.name;
  }
}

TEST(ReferenceSchemesTest, RepackReplacesOneExpert) {
  for (const char* text : {"nvfp4", "int4_g32_zp", "fp8_block", "mxfp4"}) {
    Case spec{.num_tokens = 8, .num_experts = 3, .hidden = 64, .intermediate = 90};
    spec.scheme = parse_scheme(text);
    spec.bias = true;
    const Problem problem = testing::make_problem(spec);
    spec.seed = 99;
    Problem other = testing::make_problem(spec);
    other.hidden_states = problem.hidden_states;
    other.topk_ids = problem.topk_ids;
    other.topk_weights = problem.topk_weights;
    const ModularKernel kernel = make_kernel(problem);
    const Experts& experts = kernel.experts();
    const auto packed = experts.pack(problem.weights);
    EXPECT_EQ(packed->nbytes(), 0);
    for (std::int64_t e = 0; e < 3; ++e) {
      ExpertWeights one = other.weights;
      one.experts = {other.weights.experts[e]};
      experts.repack(one, e, *packed);
    }
    EXPECT_GT(packed->nbytes(), 0);
    const Tensor actual = testing::run_experts(problem, kernel, *packed);
    EXPECT_TRUE(bitwise_equal(actual, run(other, DType::kBF16))) << text;
    EXPECT_THROW(experts.repack(other.weights, 3, *packed), Error);
    EXPECT_THROW(experts.unpack(*packed, -1), Error);
    ExpertWeights wrong = testing::make_problem({.hidden = 64, .intermediate = 90}).weights;
    EXPECT_THROW(experts.repack(wrong, 0, *packed), Error);
  }
}

// ------------------------------------------------------------------------------------------------
// By hand: x = (1, 0.3), both matrices the identity, ReLU squared. The weights are f32, so only the
// activations are rounded: x to x', x' x' to the result.

struct ByHand {
  std::string name;
  QuantKey key;
  std::vector<double> expected;
};

class ActivationsByHandTest : public ::testing::TestWithParam<ByHand> {};

TEST_P(ActivationsByHandTest, TwoElements) {
  std::vector<float> identity = {1, 0, 0, 1};
  float scale = 1.0F / 448;
  Problem p;
  p.spec = Case{.num_tokens = 1, .num_experts = 1, .topk = 1, .hidden = 2, .intermediate = 2};
  p.spec.activation = Activation::kRelu2NoMul;
  p.spec.scheme = p.weights.scheme = {schemes::unquantized(DType::kF32).weights, GetParam().key};
  p.weights.hidden = p.weights.intermediate = 2;
  p.weights.activation = p.spec.activation;
  ExpertMatrices expert;
  expert.gate.values = expert.down.values = TensorView(identity.data(), DType::kF32, {2, 2});
  expert.gate.input_scale = expert.down.input_scale = TensorView(&scale, DType::kF32, {1});
  p.weights.experts = {expert};
  p.hidden_states = Tensor::empty({1, 2}, DType::kF32);
  p.hidden_states.as<float>()[0] = 1;
  p.hidden_states.as<float>()[1] = 0.3F;
  p.topk_ids = Tensor::zeros({1, 1}, DType::kI32);
  p.topk_weights = Tensor::empty({1, 1}, DType::kF32);
  *p.topk_weights.as<float>() = 1;
  for (const char* variant : {"reference", "reference_batched"}) {
    const Tensor out = run(p, DType::kF32, variant);
    // Scales such as 1/448 are rounded to f32, and so are results.
    EXPECT_NEAR(out.as<float>()[0], GetParam().expected[0], 2e-7);
    EXPECT_NEAR(out.as<float>()[1], GetParam().expected[1], 2e-7);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Reference, ActivationsByHandTest,
    ::testing::Values(
        // 448 and 134.4 -> 128; 0.0816 * 448 = 36.6 -> 36.
        ByHand{"e4m3_tensor_static", keys::e4m3_tensor(), {1, 36.0 / 448}},
        ByHand{"e4m3_tensor", keys::e4m3_tensor(true), {1, 36.0 / 448}},
        ByHand{"e4m3_row", keys::e4m3_row(true), {1, 36.0 / 448}},
        ByHand{"e4m3_group", keys::e4m3_group(), {1, 36.0 / 448}},
        // Scale 2^-8: 76.8 -> 80; 0.0977 * 256 = 25 -> 24, a tie.
        ByHand{"e4m3_group_ue8m0", keys::e4m3_group(true), {1, 24.0 / 256}},
        ByHand{"mxfp8", keys::mxfp8(true), {1, 24.0 / 256}},
        // 38.1 -> 38; (38 / 127)^2 * 127 = 11.4 -> 11.
        ByHand{"int8_row", keys::int8_row(true), {1, 11.0 / 127}},
        ByHand{"int8_group", keys::int8_group(32), {1, 11.0 / 127}},
        // 2^14 * 0.3 = 4915.2 -> 4915; 4915^2 / 2^14 = 1474.4 -> 1474.
        ByHand{"int16_group", keys::int16_group(32), {1, 1474.0 / 16384}},
        // Scale 1/4: 1.2 -> 1; 0.0625 * 4 = 0.25 -> 0, a tie.
        ByHand{"mxfp4", keys::mxfp4(true), {1, 0}},
        // Scale e4m3(448 / 6) = 72: 6.2 -> 6, 1.87 -> 2; again 72: 5.8 -> 6, 0.64 -> 0.5.
        ByHand{"nvfp4", keys::nvfp4(true), {6 * 72.0 / 448, 36.0 / 448}}),
    [](const auto& info) { return info.param.name; });

TEST(ReferenceSchemesTest, DecodedWeightsGiveTheSame) {
  for (const NamedScheme& entry : named_schemes()) {
    if (entry.scheme.activations || !entry.scheme.weights.quantized()) continue;
    Case spec{.num_tokens = 9, .num_experts = 3, .hidden = 90, .intermediate = 192, .bias = true};
    spec.scheme = entry.scheme;
    const Problem problem = testing::make_problem(spec);
    Problem plain = problem;
    plain.spec.scheme = plain.weights.scheme = schemes::unquantized(DType::kF32);
    for (ExpertMatrices& expert : plain.weights.experts) {
      for (auto [matrix, in] : {std::pair(&expert.gate, spec.hidden),
                                {&expert.up, spec.hidden},
                                {&expert.down, spec.intermediate}}) {
        const Tensor values = dequantize_weights(*matrix, entry.scheme.weights, in);
        plain.weights.owners.push_back(values.owner());
        const TensorView bias = matrix->bias;
        *matrix = {};
        matrix->values = values;
        matrix->bias = bias;
      }
    }
    const testing::Difference difference =
        testing::compare(run(problem, DType::kF32), run(plain, DType::kF32));
    // Products of code and scale are rounded to f32; with power-of-two scales they are exact.
    const bool exact = entry.scheme.weights.scale == DType::kE8M0;
    EXPECT_LE(difference.max_element, exact ? 0 : 1e-6) << entry.name << difference.to_string();
  }
}

}  // namespace fusedmoe::reference_schemes_test
