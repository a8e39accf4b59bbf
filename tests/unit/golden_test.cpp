// Twelve MoE layers computed by Hugging Face transformers (data/README.md), from the published
// checkpoint to the output: Checkpoint -> MoeLayer -> forward.
#include "golden.h"

#include <map>
#include <string>
#include <tuple>

#include "layer_problem.h"
#include "testing/compare.h"

namespace fusedmoe::golden_test {

using testing::compare;
using testing::Difference;
using testing::expect_same_routing;
using testing::forward_golden;
using testing::Golden;
using testing::golden_names;
using testing::golden_path;
using testing::kGoldenTokens;
using testing::LayerResult;

/// Layers are made once per case and implementation.
const MoeLayer& layer_of(const std::string& name, const std::string& experts, DType dtype) {
  static std::map<std::tuple<std::string, std::string, DType>, MoeLayer> layers;
  const auto key = std::make_tuple(name, experts, dtype);
  auto found = layers.find(key);
  if (found == layers.end()) {
    found =
        layers
            .emplace(key, testing::make_golden_layer(name, testing::layer_options(dtype, experts)))
            .first;
  }
  return found->second;
}

struct Tolerance {
  double output;         ///< max-norm, relative
  double topk_weights;   ///< absolute; weights are at most 2.5
  double router_logits;  ///< max-norm, relative
};

void expect_golden(const std::string& name, const std::string& experts, DType dtype,
                   const Tolerance& tolerance) {
  const MoeLayer& layer = layer_of(name, experts, dtype);
  const testing::Variant variant = testing::find_variant(experts);
  ASSERT_EQ(layer.selection().experts, variant.experts);
  ASSERT_EQ(layer.selection().prepare_finalize, variant.prepare_finalize);
  const SafetensorsFile file = SafetensorsFile::open(golden_path(name));
  for (const std::int64_t num_tokens : kGoldenTokens) {
    SCOPED_TRACE(::testing::Message() << name << " " << experts << " T=" << num_tokens);
    const Golden golden(file, num_tokens);
    ASSERT_EQ(golden.hidden_states.size(0), num_tokens);
    const LayerResult result = forward_golden(layer, golden.hidden_states, dtype);

    const Difference output = compare(result.output, golden.output);
    EXPECT_FALSE(output.nonfinite_mismatch) << output.to_string();
    EXPECT_LE(output.max_norm_relative, tolerance.output) << output.to_string();
    const Difference logits = compare(result.router_logits, golden.router_logits);
    EXPECT_LE(logits.max_norm_relative, tolerance.router_logits) << logits.to_string();
    expect_same_routing(result, golden, tolerance.topk_weights);
  }
}

class GoldenTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Transformers, GoldenTest, ::testing::ValuesIn(golden_names()),
                         [](const auto& info) { return info.param; });

// The vectors were computed in float32 and are themselves within 1e-6 of the exact result; the
// reference sums in double and rounds its activations and its output to float32. Logits and router
// weights are float32 sums on both sides: about 3e-7 apart.
constexpr Tolerance kFloat{2e-6, 1e-6, 1e-6};
// Hidden states are bf16 values, so the router sees the same numbers; activations and the output
// are rounded to bf16 (2^-9 relative each), and errors of the intermediate add up as noise.
constexpr Tolerance kBFloat16{1e-2, 1e-6, 1e-6};

TEST_P(GoldenTest, ReferenceInFloat) {
  expect_golden(GetParam(), "reference", DType::kF32, kFloat);
}

TEST_P(GoldenTest, OtherReferencesInFloat) {
  expect_golden(GetParam(), "reference_batched", DType::kF32, kFloat);
  if (GetParam() != "llama4") {  // weights the input
    expect_golden(GetParam(), "reference_monolithic", DType::kF32, kFloat);
  }
}

TEST_P(GoldenTest, CpuInBFloat16) {
  expect_golden(GetParam(), "cpu", DType::kBF16, kBFloat16);
  expect_golden(GetParam(), "cpu_batched", DType::kBF16, kBFloat16);
}

}  // namespace fusedmoe::golden_test
