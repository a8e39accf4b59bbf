// Quantization configs as tools publish them: which scheme each means.
#include <string>

#include "error_text.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/quant.h"
#include "gtest/gtest.h"
#include "tiny_checkpoint.h"

namespace fusedmoe {
namespace {

struct Published {
  const char* name;
  const char* json;
  const char* scheme;
};

class PublishedConfigTest : public ::testing::TestWithParam<Published> {};

TEST_P(PublishedConfigTest, MeansThisScheme) {
  nlohmann::json config = nlohmann::json::parse(testing::tiny_config("qwen3_moe"));
  config["quantization_config"] = nlohmann::json::parse(GetParam().json);
  EXPECT_EQ(name(parse_model_config(config.dump()).scheme), GetParam().scheme);
}

INSTANTIATE_TEST_SUITE_P(
    All, PublishedConfigTest,
    ::testing::Values(
        Published{"DeepseekV31",
                  R"({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                      "scale_fmt": "ue8m0", "weight_block_size": [128, 128]})",
                  "fp8_block_ue8m0"},
        Published{"KimiK2Thinking",
                  R"({"quant_method": "compressed-tensors", "format": "pack-quantized",
                      "config_groups": {"group_0": {"input_activations": null, "targets": ["Linear"],
                      "weights": {"actorder": null, "block_structure": null, "dynamic": false,
                      "group_size": 32, "num_bits": 4, "strategy": "group", "symmetric": true,
                      "type": "int"}}}, "ignore": ["re:.*self_attn.*"]})",
                  "int4_g32"},
        Published{"Fp8Dynamic",
                  R"({"quant_method": "compressed-tensors", "format": "float-quantized",
                      "config_groups": {"group_0": {"targets": ["Linear"],
                      "input_activations": {"dynamic": true, "num_bits": 8, "strategy": "token",
                      "symmetric": true, "type": "float", "group_size": null},
                      "weights": {"dynamic": false, "num_bits": 8, "strategy": "channel",
                      "symmetric": true, "type": "float", "group_size": null}}}})",
                  "fp8_channel_token"},
        Published{"GroupForExpertsFirst",
                  R"({"quant_method": "compressed-tensors", "format": "mixed-precision",
                      "config_groups": {
                      "group_0": {"targets": ["Linear"], "format": "float-quantized",
                      "weights": {"num_bits": 8, "strategy": "channel", "type": "float"}},
                      "group_1": {"targets": ["re:.*mlp.experts.*"], "format": "pack-quantized",
                      "weights": {"num_bits": 4, "strategy": "group", "group_size": 128,
                      "type": "int", "symmetric": false}}}})",
                  "int4_g128_zp"},
        Published{"AttentionHasAGroupOfItsOwn",
                  R"({"quant_method": "compressed-tensors", "format": "mixed-precision",
                      "config_groups": {
                      "group_0": {"targets": ["re:.*self_attn.*", "re:.*no_experts.*"],
                      "format": "float-quantized",
                      "weights": {"num_bits": 8, "strategy": "channel", "type": "float"}},
                      "group_1": {"targets": ["Linear"], "format": "pack-quantized",
                      "weights": {"num_bits": 4, "strategy": "group", "group_size": 128,
                      "type": "int", "symmetric": false}}}})",
                  "int4_g128_zp"},
        Published{"IgnoredExpertsArePlain",
                  R"({"quant_method": "compressed-tensors", "format": "float-quantized",
                      "ignore": ["lm_head", "re:.*mlp.experts.*", "re:.*block_sparse_moe.*"],
                      "config_groups": {"group_0": {"targets": ["Linear"],
                      "weights": {"num_bits": 8, "strategy": "channel", "type": "float"}}}})",
                  "bf16"},
        Published{"W4AFp8",
                  R"({"quant_method": "compressed-tensors", "format": "pack-quantized",
                      "config_groups": {"group_0": {"targets": ["Linear"],
                      "input_activations": {"dynamic": true, "num_bits": 8, "strategy": "token",
                      "type": "float"}, "weights": {"num_bits": 4, "strategy": "group",
                      "group_size": 128, "type": "int", "symmetric": true}}}})",
                  "w4a8"},
        Published{"ModelOpt",
                  R"({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]})",
                  "fp8_tensor_static"},
        Published{"Gptq", R"({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true,
                              "desc_act": false, "damp_percent": 0.1})",
                  "int4_g128"},
        Published{"Awq", R"({"quant_method": "awq", "bits": 4, "group_size": 128,
                             "zero_point": true, "version": "gemm"})",
                  "int4_g128_zp"}),
    [](const auto& info) { return std::string(info.param.name); });

ModelConfig gptq_config(const std::string& keys) {
  nlohmann::json config = nlohmann::json::parse(testing::tiny_config("qwen3_moe"));
  config["quantization_config"] = nlohmann::json::parse(
      R"({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": false)" + keys + "}");
  return parse_model_config(config.dump());
}

// Zero points of gptq are stored minus one, those of gptq_v2 as they are.
TEST(GptqFormatTest, StandsUnderEitherKey) {
  EXPECT_EQ(gptq_config("").layout, CheckpointLayout::kGptq);
  EXPECT_EQ(gptq_config(R"(, "format": "gptq_v2")").layout, CheckpointLayout::kGptqV2);
  EXPECT_EQ(gptq_config(R"(, "checkpoint_format": "gptq_v2")").layout, CheckpointLayout::kGptqV2);
  EXPECT_EQ(testing::error_text(
                [] { gptq_config(R"(, "checkpoint_format": "gptq_v2", "format": "gptq")"); }),
            "config.quantization_config.format: was \"gptq\"; must be gptq_v2, as "
            "checkpoint_format");
  EXPECT_THROW(gptq_config(R"(, "format": "marlin")"), Error);
}

}  // namespace
}  // namespace fusedmoe
