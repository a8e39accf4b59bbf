// The golden vectors (data/README.md): where they are, and a layer run on them the way a user
// would.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/safetensors.h"
#include "testing/cases.h"

namespace fusedmoe::testing {

inline std::vector<std::string> golden_names() {
  return {"gpt_oss", "gpt_oss_odd",    "gpt_oss_mxfp4",    "gpt_oss_mxfp4_odd",
          "mixtral", "qwen3_moe_norm", "qwen3_moe_nonorm", "deepseek_v3",
          "llama4",  "olmoe",          "granitemoe",       "glm4_moe"};
}

inline constexpr std::int64_t kGoldenTokens[] = {1, 7, 64};

inline std::filesystem::path golden_path(const std::string& name) {
  return std::filesystem::path(FUSEDMOE_GOLDEN_DIR) / (name + ".safetensors");
}

/// With the path a user takes: Checkpoint -> LayerWeights -> MoeLayer.
inline MoeLayer make_golden_layer(const std::string& name, LayerOptions options) {
  const Checkpoint checkpoint = Checkpoint::open(golden_path(name));
  return MoeLayer(checkpoint.load_layer(checkpoint.moe_layers().front()), std::move(options));
}

/// What transformers computed for one number of tokens.
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

/// What a layer computed, in host memory.
struct LayerResult {
  Tensor output, router_logits, topk_ids, topk_weights;
};

/// Runs a layer on the device it lives on, with poisoned buffers, on the golden hidden states
/// converted to `dtype` (they are bf16 values).
inline LayerResult forward_golden(const MoeLayer& layer, const TensorView& hidden_states,
                                  DType dtype) {
  const Device device = layer.config().device;
  const RouterConfig& router = layer.router();
  const std::int64_t num_tokens = hidden_states.size(0);
  const Tensor converted = Tensor::empty(hidden_states.shape(), dtype);
  convert(hidden_states, converted);
  const Tensor x = to_device(converted, device);
  const std::size_t bytes = layer.workspace_bytes(num_tokens);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, device);
  const LayerResult there{Tensor::empty(x.shape(), dtype, device),
                          Tensor::empty({num_tokens, router.num_experts}, DType::kF32, device),
                          Tensor::empty({num_tokens, router.topk}, DType::kI32, device),
                          Tensor::empty({num_tokens, router.topk}, DType::kF32, device)};
  poison(workspace);
  poison(there.output);
  layer.forward(x, there.output, {workspace.data(), bytes},
                {there.router_logits, there.topk_ids, there.topk_weights});
  return {to_device(there.output, {}), to_device(there.router_logits, {}),
          to_device(there.topk_ids, {}), to_device(there.topk_weights, {})};
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

/// Every token has chosen the same experts, with the same weights up to `tolerance`.
inline void expect_same_routing(const LayerResult& result, const Golden& golden, double tolerance) {
  for (std::int64_t t = 0; t < golden.hidden_states.size(0); ++t) {
    const auto actual = chosen<std::int32_t>(result.topk_ids, result.topk_weights, t);
    const auto expected = chosen<std::int64_t>(golden.topk_ids, golden.topk_weights, t);
    ASSERT_EQ(actual.size(), expected.size()) << "token " << t;
    for (const auto& [expert, weight] : expected) {
      ASSERT_TRUE(actual.count(expert)) << "token " << t << " expert " << expert;
      EXPECT_NEAR(actual.at(expert), weight, tolerance) << "token " << t;
    }
  }
}

}  // namespace fusedmoe::testing
