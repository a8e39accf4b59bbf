// Names and forms of storage in which models are published, beside those that this library writes:
// the same layer, stored anew by plain code, has the same weights.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "fusedmoe/quant.h"
#include "linear_parts.h"

namespace fusedmoe {
namespace {

using testing::bitwise_equal;
using testing::Parts;
using testing::TinyCheckpoints;

constexpr auto kFp8 = CheckpointLayout::kFp8;
constexpr auto kModelOpt = CheckpointLayout::kModelOpt;
constexpr auto kCompressed = CheckpointLayout::kCompressedTensors;

void replace(std::string& text, const std::string& from, const std::string& to) {
  if (const std::size_t at = text.find(from); at != text.npos) text.replace(at, from.size(), to);
}

/// Every tensor under another name; an empty one leaves it out.
void rename(Parts& parts, const std::function<std::string(const std::string&)>& other) {
  std::map<std::string, Tensor, std::less<>> renamed;
  for (const auto& [name, tensor] : parts.tensors) {
    if (const std::string text = other(name); !text.empty()) renamed[text] = tensor;
  }
  parts.tensors = renamed;
}

/// Whether both have the same weights, biases and input scales.
void expect_same(const ExpertWeights& actual, const ExpertWeights& wanted) {
  EXPECT_EQ(name(actual.scheme), name(wanted.scheme));
  ASSERT_EQ(actual.num_experts(), wanted.num_experts());
  const auto same = [&](const WeightMatrix& a, const WeightMatrix& b, std::int64_t in) {
    ASSERT_EQ(a.values.defined(), b.values.defined());
    if (!a.values) return;
    const QuantKey& key = wanted.scheme.weights;
    EXPECT_TRUE(bitwise_equal(dequantize_weights(a, key, in), dequantize_weights(b, key, in)));
    ASSERT_EQ(a.bias.defined(), b.bias.defined());
    for (std::int64_t i = 0; a.bias && i < a.bias.numel(); ++i) {
      EXPECT_EQ(load_f32(a.bias.data(), a.bias.dtype(), i * a.bias.stride(0)),
                load_f32(b.bias.data(), b.bias.dtype(), i * b.bias.stride(0)));
    }
    ASSERT_EQ(a.input_scale.defined(), b.input_scale.defined());
    if (a.input_scale) {
      EXPECT_EQ(*a.input_scale.as<const float>(), *b.input_scale.as<const float>());
    }
  };
  for (std::size_t e = 0; e < wanted.experts.size(); ++e) {
    same(actual.experts[e].gate, wanted.experts[e].gate, wanted.hidden);
    same(actual.experts[e].up, wanted.experts[e].up, wanted.hidden);
    same(actual.experts[e].down, wanted.experts[e].down, wanted.intermediate);
  }
}

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

/// (E, rows, columns) of the matrices of each expert, one below the other; transposed (E, columns,
/// rows). Numbers: (E), or (E, 2) in pairs.
Tensor stacked(const std::vector<std::vector<Tensor>>& experts, bool transposed, bool pairs) {
  const Tensor& one = experts[0][0];
  const auto count = static_cast<std::int64_t>(experts.size());
  const std::int64_t width = bytes(one.dtype(), 1);
  if (one.numel() == 1 && one.rank() < 2) {
    const std::int64_t each = pairs ? static_cast<std::int64_t>(experts[0].size()) : 1;
    Tensor result =
        each == 2 ? Tensor::empty({count, 2}, one.dtype()) : Tensor::empty({count}, one.dtype());
    for (std::int64_t e = 0; e < count; ++e) {
      for (std::int64_t i = 0; i < each; ++i) {
        std::memcpy(result.as<char>() + (e * each + i) * width,
                    experts[static_cast<std::size_t>(e)][static_cast<std::size_t>(i)].data(),
                    static_cast<std::size_t>(width));
      }
    }
    return result;
  }
  std::int64_t rows = 0;
  for (const Tensor& part : experts[0]) rows += part.size(0);
  const std::int64_t columns = one.size(1);
  Tensor result = Tensor::empty(
      transposed ? Shape{count, columns, rows} : Shape{count, rows, columns}, one.dtype());
  char* out = result.as<char>();
  for (std::int64_t e = 0; e < count; ++e) {
    std::int64_t row = 0;
    for (const Tensor& part : experts[static_cast<std::size_t>(e)]) {
      for (std::int64_t r = 0; r < part.size(0); ++r, ++row) {
        for (std::int64_t c = 0; c < columns; ++c) {
          const std::int64_t at =
              transposed ? (e * columns + c) * rows + row : (e * rows + row) * columns + c;
          std::memcpy(out + at * width, part.as<char>() + (r * columns + c) * width,
                      static_cast<std::size_t>(width));
        }
      }
    }
  }
  return result;
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
// Names

TEST(NamesTest, ExpertsNumberBehindTheMatrix) {
  struct Case {
    const char *family, *scheme;
    CheckpointLayout layout;
  };
  for (const Case& test :
       {Case{"qwen3_moe", "nvfp4", kModelOpt}, Case{"mixtral", "int4_g32", CheckpointLayout::kGptq},
        Case{"deepseek_v3", "fp8_channel_token", kCompressed}}) {
    Parts parts(test.scheme, test.layout, test.family);
    const LayerWeights before = parts.load();
    rename(parts, [](const std::string& name) {
      const std::size_t at = name.find(".experts.");
      if (at == name.npos) return name;
      const std::size_t number = at + 9, matrix = name.find('.', number) + 1,
                        rest = name.find('.', matrix);
      return name.substr(0, number) + name.substr(matrix, rest - matrix) + "." +
             name.substr(number, matrix - number - 1) + name.substr(rest);
    });
    ASSERT_TRUE(std::any_of(parts.tensors.begin(), parts.tensors.end(), [](const auto& entry) {
      return entry.first.find("_proj.3.") != std::string::npos ||
             entry.first.find(".w1.3.") != std::string::npos;
    }));
    expect_same(parts.load().experts, before.experts);
  }
}

/// One expert's rows of a stack (E, in, rows) bf16: `step` apart from `begin` on.
Tensor rows_of(const Tensor& stack, std::int64_t expert, std::int64_t begin, std::int64_t step) {
  const std::int64_t in = stack.size(1), all = stack.size(2),
                     rows = (all - begin + step - 1) / step;
  Tensor result = Tensor::empty({rows, in}, stack.dtype());
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < in; ++c) {
      result.as<std::uint16_t>()[r * in + c] =
          stack.as<const std::uint16_t>()[(expert * in + c) * all + begin + r * step];
    }
  }
  return result;
}

Tensor bias_of(const Tensor& stack, std::int64_t expert, std::int64_t begin, std::int64_t step) {
  const std::int64_t all = stack.size(1), rows = (all - begin + step - 1) / step;
  Tensor result = Tensor::empty({rows}, stack.dtype());
  for (std::int64_t r = 0; r < rows; ++r) {
    result.as<std::uint16_t>()[r] =
        stack.as<const std::uint16_t>()[expert * all + begin + r * step];
  }
  return result;
}

Parts gpt_oss() {
  Parts parts("mxfp4_w4a16", CheckpointLayout::kGptOss, "gpt_oss");
  const auto path = TinyCheckpoints::instance().source("gpt_oss");
  parts.tensors = testing::tensors_of(path);
  parts.config = testing::read_json(path / "config.json");
  return parts;
}

// unsloth: a linear layer for each expert, gate and up rows in turn.
TEST(NamesTest, GptOssOfUnsloth) {
  Parts parts = gpt_oss();
  const LayerWeights before = parts.load();
  const std::string block = "model.layers.0.mlp.", experts = block + "experts.";
  const auto add = [&](const std::string& to, const std::string& from) {
    const Tensor stack = parts.tensors.at(experts + from),
                 bias = parts.tensors.at(experts + from + "_bias");
    for (int e = 0; e < 4; ++e) {
      const std::string name = experts + to + "." + std::to_string(e);
      parts.tensors[name + ".weight"] = rows_of(stack, e, 0, 1);
      parts.tensors[name + ".bias"] = bias_of(bias, e, 0, 1);
    }
    parts.tensors.erase(experts + from);
    parts.tensors.erase(experts + from + "_bias");
  };
  add("gate_up_projs", "gate_up_proj");
  add("down_projs", "down_proj");
  rename(parts, [](std::string name) {
    replace(name, "router.", "router.linear.");
    return name;
  });
  const LayerWeights after = parts.load();
  expect_same(after.experts, before.experts);
  EXPECT_TRUE(after.router_weights.bias.defined());
  parts.tensors.erase(experts + "gate_up_projs.2.bias");
  EXPECT_NE(parts.error().find("gate_up_projs.2.bias: missing"), std::string::npos);
}

// A model in bf16 that keeps the config of the MXFP4 one it was made from.
TEST(NamesTest, GptOssWithTheConfigOfMxfp4) {
  Parts parts = gpt_oss();
  const LayerWeights before = parts.load();
  parts.config["quantization_config"] = {{"quant_method", "mxfp4"}};
  expect_same(parts.load().experts, before.experts);
}

// mlx: stacks of gate, up and down, under names of two kinds.
TEST(NamesTest, StacksOfMlx) {
  Parts parts = gpt_oss();
  const LayerWeights before = parts.load();
  const std::string experts = "model.layers.0.mlp.experts.";
  const auto add = [&](const std::string& to, const std::string& from, std::int64_t begin,
                       std::int64_t step) {
    std::vector<std::vector<Tensor>> values;
    const Tensor stack = parts.tensors.at(experts + from),
                 bias = parts.tensors.at(experts + from + "_bias");
    Tensor biases = Tensor::empty({4, bias.size(1) / step}, bias.dtype());
    for (std::int64_t e = 0; e < 4; ++e) {
      values.push_back({rows_of(stack, e, begin, step)});
      const Tensor own = bias_of(bias, e, begin, step);
      std::memcpy(biases.as<std::uint16_t>() + e * own.numel(), own.data(),
                  static_cast<std::size_t>(own.nbytes()));
    }
    parts.tensors[experts + to + ".weight"] = stacked(values, false, false);
    parts.tensors[experts + to + ".bias"] = biases;
  };
  add("gate_proj", "gate_up_proj", 0, 2);
  add("up_proj", "gate_up_proj", 1, 2);
  add("down_proj", "down_proj", 0, 1);
  for (const char* name : {"gate_up_proj", "down_proj"}) {
    parts.tensors.erase(experts + name);
    parts.tensors.erase(experts + name + std::string("_bias"));
  }
  expect_same(parts.load().experts, before.experts);

  for (const char* family : {"qwen3_moe", "mixtral", "deepseek_v3"}) {
    const auto path = TinyCheckpoints::instance().source(family);
    Parts plain("fp8_channel_token", kCompressed, family);
    plain.tensors = testing::tensors_of(path);
    plain.config = testing::read_json(path / "config.json");
    const LayerWeights wanted = plain.load();
    const std::string block = family == std::string("mixtral") ? "model.layers.0.block_sparse_moe."
                                                               : "model.layers.0.mlp.";
    const bool numbered = family == std::string("mixtral");
    for (const auto& [to, from] : {std::pair{"gate_proj", numbered ? "w1" : "gate_proj"},
                                   std::pair{"up_proj", numbered ? "w3" : "up_proj"},
                                   std::pair{"down_proj", numbered ? "w2" : "down_proj"}}) {
      std::vector<std::vector<Tensor>> values;
      for (int e = 0; e < 4; ++e) {
        const std::string name = block + "experts." + std::to_string(e) + "." + from + ".weight";
        values.push_back({plain.tensors.at(name)});
        plain.tensors.erase(name);
      }
      plain.tensors[block + "switch_mlp." + to + ".weight"] = stacked(values, false, false);
    }
    expect_same(plain.load().experts, wanted.experts);
  }
}

// granitemoeshared keeps gate and up of its shared experts in one tensor, quantized ones too.
TEST(NamesTest, QuantizedSharedGateAndUpInOneTensor) {
  for (const char* scheme : {"fp8_channel_token", "fp8_tensor", "int4_g32"}) {
    Parts parts(scheme, kCompressed, "qwen2_moe");
    const ExpertWeights wanted =
        parts.load().shared_experts ? parts.load().shared_experts->weights : ExpertWeights();
    ASSERT_EQ(wanted.num_experts(), 1);
    parts = Parts(scheme, kCompressed, "granitemoe");
    parts.config["model_type"] = "granitemoeshared";
    parts.config["shared_intermediate_size"] = 96;
    // The shared expert has the matrices of expert 1.
    const std::string expert = "model.layers.0.block_sparse_moe.experts.1.",
                      shared = "model.layers.0.shared_mlp.";
    std::map<std::string, Tensor> made;
    for (const auto& [name, tensor] : parts.tensors) {
      if (name.starts_with(expert + "gate_proj")) {
        const std::string suffix = name.substr(expert.size() + 9);
        const Tensor up = parts.tensors.at(expert + "up_proj" + suffix);
        if (suffix == ".weight_shape") continue;
        if (tensor.rank() < 2) {
          made[shared + "input_linear" + suffix] = tensor;  // one scale for both
          continue;
        }
        const Tensor both = stacked({{tensor, up}}, false, false);
        made[shared + "input_linear" + suffix] =
            Tensor(both.reshape({both.size(1), both.size(2)}), both.owner());
      } else if (name.starts_with(expert + "down_proj")) {
        made[shared + "output_linear" + name.substr(expert.size() + 9)] = tensor;
      }
    }
    for (const auto& [name, tensor] : made) parts.tensors[name] = tensor;
    const LayerWeights layer = parts.load();
    ASSERT_TRUE(layer.shared_experts);
    const ExpertMatrices &own = layer.shared_experts->weights.experts[0],
                         &expert1 = layer.experts.experts[1];
    const QuantKey& key = layer.experts.scheme.weights;
    const auto same = [&](const WeightMatrix& a, const WeightMatrix& b, std::int64_t in) {
      return bitwise_equal(dequantize_weights(a, key, in), dequantize_weights(b, key, in));
    };
    EXPECT_TRUE(same(own.gate, expert1.gate, 160)) << scheme;
    EXPECT_TRUE(same(own.down, expert1.down, 96)) << scheme;
    if (std::string(scheme) != "fp8_tensor") {
      EXPECT_TRUE(same(own.up, expert1.up, 160)) << scheme;
    }
  }
}

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

}  // namespace
}  // namespace fusedmoe
