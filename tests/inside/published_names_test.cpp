// Names in which models are published, beside those that this library writes: the same layer under
// other names has the same weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "published_parts.h"

namespace fusedmoe::published_names_test {

using testing::bitwise_equal;
using testing::expect_same;
using testing::gpt_oss;
using testing::Parts;
using testing::rename;
using testing::replace;
using testing::stacked;
using testing::TinyCheckpoints;

constexpr auto kCompressed = CheckpointLayout::kCompressedTensors;
constexpr auto kModelOpt = CheckpointLayout::kModelOpt;

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

// A layer would run without them. Two families differ in shared experts beside the block alone.
TEST(NamesTest, PartsOfExpertsOutsideTheBlockAreRefused) {
  for (const std::string part :
       {"shared_mlp.input_linear.weight", "shared_expert.up_proj.weight",
        "shared_experts.gate.weight", "shared_expert_gate.weight",
        "feed_forward.shared_expert.up_proj.weight", "gate.e_score_correction_bias"}) {
    Parts parts(TinyCheckpoints::instance().source("qwen3_moe"));
    const std::string name = "model.layers.0." + part;
    parts.tensors[name] = Tensor::zeros({4, 4}, DType::kBF16);
    EXPECT_NE(parts.error().find(name + ": unexpected"), std::string::npos) << parts.error();
  }
}

/// A part of one expert's rows, from a stack (E, in, rows) of bf16: row `begin` and every `step`-th
/// one behind it.
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

}  // namespace fusedmoe::published_names_test
