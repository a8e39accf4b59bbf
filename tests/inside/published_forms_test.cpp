// Forms of storage in which models are published, beside those that this library writes: the same
// layer, stored anew by plain code, has the same weights.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fusedmoe/quant.h"
#include "published_parts.h"

namespace fusedmoe::published_forms_test {

using testing::bitwise_equal;
using testing::expect_same;
using testing::gpt_oss;
using testing::Parts;
using testing::rename;
using testing::replace;
using testing::stacked;

constexpr auto kFp8 = CheckpointLayout::kFp8;
constexpr auto kModelOpt = CheckpointLayout::kModelOpt;
constexpr auto kCompressed = CheckpointLayout::kCompressedTensors;

// ------------------------------------------------------------------------------------------------
// Stacks

struct StackForm {
  const char* name;
  const char* family;
  const char* scheme;
  CheckpointLayout layout;
  std::string block;          ///< with the names of the layer's experts
  std::string gate_up, down;  ///< of the stacks, within "<block>."
  bool joined, transposed, pairs;
};

/// "_weight_scale", "_scale" or ".weight_scale".
std::string stack_suffix(const StackForm& form, std::string suffix) {
  if (form.gate_up.ends_with(".weight")) return suffix;
  if (suffix == ".weight") return "";
  if (!form.joined) replace(suffix, ".weight", "");
  if (suffix.starts_with('.')) suffix[0] = '_';
  return suffix;
}

/// The experts' linear layers become stacks.
void stack(Parts& parts, const StackForm& form) {
  const std::string experts = form.block + ".experts.";
  const std::string first = experts + "0.gate_proj";
  std::vector<std::string> suffixes;
  for (const auto& [name, tensor] : parts.tensors) {
    if (name.starts_with(first)) suffixes.push_back(name.substr(first.size()));
  }
  const auto of = [&](const std::string& suffix, const std::vector<const char*>& layers) {
    std::vector<std::vector<Tensor>> all(4);
    for (int e = 0; e < 4; ++e) {
      for (const char* layer : layers) {
        all[static_cast<std::size_t>(e)].push_back(
            parts.tensors.at(experts + std::to_string(e) + "." + layer + suffix));
      }
    }
    return stacked(all, form.transposed, form.pairs);
  };
  std::map<std::string, Tensor> made;
  for (const std::string& suffix : suffixes) {
    const auto put = [&](std::string base, const std::vector<const char*>& layers) {
      replace(base, ".weight", "");
      made[form.block + "." + base + stack_suffix(form, suffix)] = of(suffix, layers);
    };
    put(form.gate_up, {"gate_proj", "up_proj"});
    put(form.down, {"down_proj"});
  }
  rename(parts,
         [&](const std::string& name) { return name.starts_with(experts) ? std::string() : name; });
  for (const auto& [name, tensor] : made) parts.tensors[name] = tensor;
}

class StackTest : public ::testing::TestWithParam<StackForm> {};

TEST_P(StackTest, HasTheWeightsOfItsLayers) {
  const StackForm& form = GetParam();
  Parts parts(form.scheme, form.layout, form.family);
  const LayerWeights layers = parts.load();
  stack(parts, form);
  expect_same(parts.load().experts, layers.experts);
  // Parts of the experts: what a rank of two loads.
  const testing::TemporaryDirectory directory;
  const std::map<std::string, TensorView> views(parts.tensors.begin(), parts.tensors.end());
  save_safetensors(directory / "x.safetensors", views, {{"config", parts.config.dump()}});
  const LayerWeights half = Checkpoint::open(directory / "x.safetensors", {FileAccess::kRead})
                                .load_layer(0, ParallelConfig{.ep_size = 2, .ep_rank = 1});
  ASSERT_EQ(half.experts.num_experts(), 2);
  const QuantKey& key = layers.experts.scheme.weights;
  EXPECT_TRUE(
      bitwise_equal(dequantize_weights(half.experts.experts[1].up, key, layers.experts.hidden),
                    dequantize_weights(layers.experts.experts[3].up, key, layers.experts.hidden)));
  // A part that is missing is named.
  const std::string missing = parts.tensors.begin()->first;
  parts.tensors.erase(missing);
  EXPECT_NE(parts.error().find(missing + ": missing"), std::string::npos) << parts.error();
}

std::vector<StackForm> stack_forms() {
  const std::string vl = "model.language_model.layers.0.mlp", text = "model.layers.0.mlp";
  const std::string gate_up = "experts.gate_up_proj", down = "experts.down_proj";
  return {
      {"Qwen3VlFp8", "qwen3_vl_moe-wide", "fp8_block", kFp8, vl, gate_up, down, false, true, false},
      {"Qwen35Nvfp4", "qwen3_5_moe", "nvfp4", kModelOpt, vl, gate_up, down, true, false, false},
      {"GraniteFp8", "granitemoe", "fp8_channel_token", kCompressed,
       "model.layers.0.block_sparse_moe", "input_linear.weight", "output_linear.weight", false,
       false, false},
      {"Llama4Fp8InPairs", "llama4", "fp8_tensor_static", kModelOpt,
       "language_model.model.layers.0.feed_forward", gate_up, down, true, true, true},
      {"Qwen3Fp8Blocks", "qwen3_moe-wide", "fp8_block", kFp8, text, gate_up, down, true, false,
       false},
      {"Qwen2Mxfp8", "qwen2_moe", "mxfp8", kModelOpt, text, gate_up, down, true, false, false},
      {"DeepseekNvfp4", "deepseek_v3", "nvfp4", kModelOpt, text, gate_up, down, false, false,
       false},
  };
}

INSTANTIATE_TEST_SUITE_P(All, StackTest, ::testing::ValuesIn(stack_forms()),
                         [](const auto& info) { return std::string(info.param.name); });

// ------------------------------------------------------------------------------------------------
// Biases that a model does not have, and quantized routers

TEST(ZeroBiasTest, OnlyZerosMayLieBesideALayer) {
  struct Case {
    const char *family, *scheme;
    CheckpointLayout layout;
    const char* layer;
  };
  for (const Case& test :
       {Case{"qwen3_moe", "int4_g32", CheckpointLayout::kGptq, "mlp.experts.2.down_proj"},
        Case{"qwen2_moe", "fp8_channel_token", kCompressed, "mlp.shared_expert.up_proj"},
        Case{"mixtral", "nvfp4", kModelOpt, "block_sparse_moe.gate"}}) {
    Parts parts(test.scheme, test.layout, test.family);
    const LayerWeights before = parts.load();
    const std::string name = "model.layers.0." + std::string(test.layer) + ".bias";
    for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
      parts.tensors[name] = Tensor::zeros({96}, dtype);
      expect_same(parts.load().experts, before.experts);
    }
    parts.tensors[name].as<float>()[7] = -0.5F;
    EXPECT_NE(parts.error().find(name + ": -0.5 at 7, but the model has no such bias"),
              std::string::npos)
        << parts.error();
    parts.tensors[name] = Tensor::zeros({96}, DType::kI32);
    EXPECT_NE(parts.error().find(name + ": unexpected"), std::string::npos) << parts.error();
  }
}

// Experts whose tensors are parameters of one module are no linear layers with a bias.
TEST(ZeroBiasTest, NoneBesideParameters) {
  Parts parts = gpt_oss();
  parts.tensors["model.layers.0.mlp.experts.bias"] = Tensor::zeros({4}, DType::kBF16);
  EXPECT_NE(parts.error().find("mlp.experts.bias: unexpected"), std::string::npos);
}

TEST(QuantizedRouterTest, IsRefusedByName) {
  Parts parts("int4_g32", CheckpointLayout::kGptq);
  const std::string router = "model.layers.0.mlp.gate";
  parts.tensors.erase(router + ".weight");
  parts.tensors[router + ".qweight"] = Tensor::zeros({40, 4}, DType::kI32);
  parts.tensors[router + ".qzeros"] = Tensor::zeros({5, 1}, DType::kI32);
  parts.tensors[router + ".scales"] = Tensor::zeros({5, 4}, DType::kF16);
  EXPECT_NE(parts.error().find("the router model.layers.0.mlp.gate is quantized (qweight, qzeros)"),
            std::string::npos)
      << parts.error();
  Parts fp8("fp8_block", kFp8, "deepseek_v3");
  fp8.tensors[router + ".weight"] = Tensor::zeros({4, 160}, DType::kE4M3);
  EXPECT_NE(fp8.error().find("the router model.layers.0.mlp.gate is quantized (weight)"),
            std::string::npos)
      << fp8.error();
}

}  // namespace fusedmoe::published_forms_test
