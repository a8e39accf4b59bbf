// Twelve MoE layers computed by Hugging Face transformers (data/README.md), from the published
// checkpoint to the output: Checkpoint -> MoeLayer -> forward.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/formats.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/safetensors.h"
#include "layer_problem.h"
#include "testing/compare.h"

namespace fusedmoe {
namespace {

using testing::compare;
using testing::Difference;

std::filesystem::path path_of(const std::string& name) {
  return std::filesystem::path(FUSEDMOE_GOLDEN_DIR) / (name + ".safetensors");
}

/// Layers are made once per case and implementation, with the path a user takes.
const MoeLayer& layer_of(const std::string& name, const std::string& experts, DType dtype) {
  static std::map<std::tuple<std::string, std::string, DType>, MoeLayer> layers;
  const auto key = std::make_tuple(name, experts, dtype);
  auto found = layers.find(key);
  if (found == layers.end()) {
    const Checkpoint checkpoint = Checkpoint::open(path_of(name));
    LayerWeights weights = checkpoint.load_layer(checkpoint.moe_layers().front());
    found =
        layers.emplace(key, MoeLayer(std::move(weights), testing::layer_options(dtype, experts)))
            .first;
  }
  return found->second;
}

Tensor converted(const TensorView& view, DType dtype) {
  Tensor result = Tensor::empty(view.shape(), dtype);
  convert(view, result);
  return result;
}

struct Golden {
  TensorView hidden_states, output, router_logits, topk_ids, topk_weights;

  Golden(const SafetensorsFile& file, std::int64_t num_tokens) {
    const auto tensor = [&](const char* name) -> TensorView {
      return file.tensor("io.T" + std::to_string(num_tokens) + "." + name);
    };
    hidden_states = tensor("hidden_states");
    output = tensor("output");
    router_logits = tensor("router_logits");
    topk_ids = tensor("topk_ids");
    topk_weights = tensor("topk_weights");
  }
};

struct Result {
  Tensor output, router_logits, topk_ids, topk_weights;
};
Result forward(const MoeLayer& layer, const TensorView& x) {
  const std::int64_t num_tokens = x.size(0);
  const RouterConfig& router = layer.router();
  Result result{Tensor::empty(x.shape(), x.dtype()),
                Tensor::empty({num_tokens, router.num_experts}, DType::kF32),
                Tensor::empty({num_tokens, router.topk}, DType::kI32),
                Tensor::empty({num_tokens, router.topk}, DType::kF32)};
  const std::size_t bytes = layer.workspace_bytes(num_tokens);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  testing::poison(workspace);
  testing::poison(result.output);
  layer.forward(x, result.output, {workspace.data(), bytes},
                {result.router_logits, result.topk_ids, result.topk_weights});
  return result;
}

/// The chosen experts of a token and their weights; the order of columns has no meaning.
template <typename Id>
std::map<std::int64_t, float> chosen(const TensorView& ids, const TensorView& weights,
                                     std::int64_t token) {
  std::map<std::int64_t, float> result;
  for (std::int64_t i = token * ids.size(1); i < (token + 1) * ids.size(1); ++i) {
    result[ids.as<const Id>()[i]] = load_f32(weights.data(), weights.dtype(), i);
  }
  return result;
}

struct Tolerance {
  double output;         ///< max-norm, relative
  double topk_weights;   ///< absolute; weights are at most 2.5
  double router_logits;  ///< max-norm, relative
};

void expect_golden(const std::string& name, const std::string& experts, DType dtype,
                   const Tolerance& tolerance) {
  const MoeLayer& layer = layer_of(name, experts, dtype);
  ASSERT_EQ(layer.selection().experts->name(), experts);
  const SafetensorsFile file = SafetensorsFile::open(path_of(name));
  for (const std::int64_t num_tokens : {1, 7, 64}) {
    SCOPED_TRACE(name + " " + experts + " T=" + std::to_string(num_tokens));
    const Golden golden(file, num_tokens);
    ASSERT_EQ(golden.hidden_states.size(0), num_tokens);
    const Result result = forward(layer, converted(golden.hidden_states, dtype));

    const Difference output = compare(result.output, golden.output);
    EXPECT_FALSE(output.nonfinite_mismatch) << output.to_string();
    EXPECT_LE(output.max_norm_relative, tolerance.output) << output.to_string();
    const Difference logits = compare(result.router_logits, golden.router_logits);
    EXPECT_LE(logits.max_norm_relative, tolerance.router_logits) << logits.to_string();
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      const auto actual = chosen<std::int32_t>(result.topk_ids, result.topk_weights, t);
      const auto expected = chosen<std::int64_t>(golden.topk_ids, golden.topk_weights, t);
      ASSERT_EQ(actual.size(), expected.size()) << "token " << t;
      for (const auto& [expert, weight] : expected) {
        ASSERT_TRUE(actual.count(expert)) << "token " << t << " expert " << expert;
        EXPECT_NEAR(actual.at(expert), weight, tolerance.topk_weights) << "token " << t;
      }
    }
  }
}

class GoldenTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Transformers, GoldenTest,
                         ::testing::Values("gpt_oss", "gpt_oss_odd", "gpt_oss_mxfp4",
                                           "gpt_oss_mxfp4_odd", "mixtral", "qwen3_moe_norm",
                                           "qwen3_moe_nonorm", "deepseek_v3", "llama4", "olmoe",
                                           "granitemoe", "glm4_moe"),
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

}  // namespace
}  // namespace fusedmoe
