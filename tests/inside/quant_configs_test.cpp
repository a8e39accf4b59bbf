// Quantization configs as tools publish them: which scheme each means.
#include <map>
#include <string>

#include "error_text.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/quant.h"
#include "gtest/gtest.h"
#include "tiny_checkpoint.h"

namespace fusedmoe::quant_configs_test {

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
        Published{"ModelOptWithGroups",
                  R"({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
                      "producer": {"name": "modelopt", "version": "0.29.0"}, "ignore": ["lm_head"],
                      "kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"},
                      "config_groups": {"group_0": {"targets": ["Linear"],
                      "input_activations": {"dynamic": false, "num_bits": 4, "type": "float",
                      "group_size": 16}, "weights": {"dynamic": false, "num_bits": 4,
                      "type": "float", "group_size": 16}}}})",
                  "nvfp4"},
        Published{"ModelOptWeightsOnlyByGroups",
                  R"({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups":
                      {"group_0": {"targets": ["Linear"], "input_activations": null,
                      "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}})",
                  "nvfp4_w4a16"},
        Published{"ModelOptWeightsOnly",
                  R"({"quantization": {"quant_algo": "W4A16_NVFP4", "group_size": 16,
                      "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "mtp*"]},
                      "producer": {"name": "modelopt"}})",
                  "nvfp4_w4a16"},
        Published{"ModelOptTableWithGroups",
                  R"({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                      "moe_quant_algo": "NVFP4", "quantized_layers": {"model.layers.0.mlp.experts":
                      {"quant_algo": "NVFP4", "group_size": 16}, "model.layers.0.self_attn.q_proj":
                      {"quant_algo": "W4A16_AWQ", "pre_quant_scale": true}}, "config_groups": {
                      "group_0": {"targets": ["model.layers.0.mlp.experts.0.gate_proj",
                      "model.layers.0.mlp.experts.0.up_proj"],
                      "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
                      "group_1": {"targets": ["model.layers.0.self_attn.q_proj"],
                      "weights": {"num_bits": 4, "type": "int"}}}})",
                  "nvfp4_w4a16"},
        Published{"OnlyTheCacheOfModelOpt",
                  R"({"quant_method": "modelopt", "quant_algo": null, "kv_cache_quant_algo":
                      "FP8"})",
                  "bf16"},
        Published{"MiniMaxM2",
                  R"({"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
                      "weight_block_size": [128, 128],
                      "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]})",
                  "fp8_block"},
        Published{"Ministral",
                  R"({"quant_method": "fp8", "activation_scheme": "static", "dequantize": false,
                      "weight_block_size": null, "modules_to_not_convert": ["vision_tower",
                      "multi_modal_projector", "lm_head"]})",
                  "fp8_tensor_static"},
        Published{"Qwen3GptqInt4",
                  R"({"batch_size": 1, "bits": 4, "block_name_to_quantize": null,
                      "cache_block_outputs": true, "damp_percent": 0.01, "dataset": null,
                      "desc_act": false, "exllama_config": {"version": 1}, "group_size": 128,
                      "max_input_length": null, "model_seqlen": null,
                      "module_name_preceding_first_block": null, "quant_method": "gptq",
                      "modules_in_block_to_quantize": null, "pad_token_id": null, "sym": true,
                      "tokenizer": null, "true_sequential": true, "use_cuda_fp16": false,
                      "use_exllama": true})",
                  "int4_g128"},
        Published{"GptqModel",
                  R"({"bits": 4, "group_size": 128, "desc_act": false, "sym": true,
                      "lm_head": false, "quant_method": "gptq", "checkpoint_format": "gptq",
                      "pack_dtype": "int32", "pack_impl": "cpu", "format": "gptq", "dynamic":
                      {"-:.*mlp.gate$": {}}, "meta": {"quantizer": ["gptqmodel:5.6.12"],
                      "uri": "https://github.com/modelcloud/gptqmodel", "damp_percent": 0.05,
                      "static_groups": false, "mse": 0.0, "act_group_aware": true}})",
                  "int4_g128"},
        Published{"AutoRound",
                  R"({"bits": 4, "data_type": "int", "group_size": 128, "sym": true, "iters": 0,
                      "enable_quanted_input": false, "low_gpu_mem_usage": true,
                      "autoround_version": "0.12.2", "quant_method": "auto-round",
                      "block_name_to_quantize": "model.layers",
                      "packing_format": "auto_round:auto_gptq", "extra_config":
                      {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}}})",
                  "int4_g128"},
        Published{"GptOss",
                  R"({"quant_method": "mxfp4", "modules_to_not_convert":
                      ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                      "model.embed_tokens", "lm_head"]})",
                  "mxfp4_w4a16"},
        Published{"EveryKeyOfCompressedTensors",
                  R"({"quant_method": "compressed-tensors", "format": "pack-quantized",
                      "quantization_status": "compressed", "global_compression_ratio": null,
                      "kv_cache_scheme": null, "version": "0.12.2", "sparsity_config": {},
                      "transform_config": {}, "ignore": ["lm_head", "re:.*mlp.gate$"],
                      "config_groups": {"group_0": {"targets": ["Linear"], "format": null,
                      "input_activations": null, "output_activations": null, "weights": {
                      "actorder": "static", "block_structure": null, "dynamic": false,
                      "group_size": 128, "num_bits": 4, "observer": "mse", "observer_kwargs": {},
                      "scale_dtype": null, "zp_dtype": null, "strategy": "group",
                      "symmetric": true, "type": "int"}}}})",
                  "int4_g128"},
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

// ------------------------------------------------------------------------------------------------

struct Unknown {
  const char* name;
  const char* json;  ///< a config that would be served but for one key
  const char* text;  ///< what the Error begins with
};

class UnknownKeyTest : public ::testing::TestWithParam<Unknown> {};

TEST_P(UnknownKeyTest, IsRefusedByName) {
  nlohmann::json config = nlohmann::json::parse(testing::tiny_config("qwen3_moe"));
  config["quantization_config"] = nlohmann::json::parse(GetParam().json);
  const std::string text = testing::error_text([&] { parse_model_config(config.dump()); });
  EXPECT_EQ(text.find("config.quantization_config." + std::string(GetParam().text)), 0u) << text;
}

#define FUSEDMOE_KNOWN_INT4 \
  R"("weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32)"

INSTANTIATE_TEST_SUITE_P(
    All, UnknownKeyTest,
    ::testing::Values(
        Unknown{"Fp8", R"({"quant_method": "fp8", "clamp": 448})",
                "clamp is 448: nothing here knows that key of an fp8 config, and it may change "
                "what the layers compute"},
        Unknown{"Fp8Type", R"({"quant_method": "fp8", "fmt": "e5m2"})", "fmt: was \"e5m2\""},
        Unknown{"Mxfp4", R"({"quant_method": "mxfp4", "hadamard": true})", "hadamard is true"},
        Unknown{"Awq", R"({"quant_method": "awq", "bits": 4, "group_size": 128, "backend":
                "llm-awq"})",
                "backend: was \"llm-awq\""},
        Unknown{"AwqScales", R"({"quant_method": "awq", "bits": 4, "group_size": 128,
                "act_scales": {}})",
                "act_scales is object"},
        Unknown{"Gptq", R"({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"})",
                "rotation is \"hadamard\""},
        Unknown{"GptqAdapter", R"({"quant_method": "gptq", "bits": 4, "adapter": {"rank": 64}})",
                "adapter: was object"},
        Unknown{"GptqModule", R"({"quant_method": "gptq", "bits": 4, "dynamic":
                {".*experts.*": {"format": "qvq"}}})",
                "dynamic.\".*experts.*\".format is \"qvq\""},
        // A search that would not end.
        Unknown{"GptqRepeatedRepetition", R"({"quant_method": "gptq", "bits": 4, "dynamic":
                {"-:.**layers\\.2\\..*": {}}})",
                "dynamic: was \".**layers\\.2\\..*\"; must be a pattern"},
        Unknown{"GptqRepeatedGroup", R"({"quant_method": "gptq", "bits": 4, "dynamic":
                {"(.*a)+b": {}}})",
                "dynamic: was \"(.*a)+b\"; must be a pattern"},
        // Of Python alone.
        Unknown{"GptqFlags", R"({"quant_method": "gptq", "bits": 4, "dynamic":
                {"-:(?i)MODEL\\..*": {}}})",
                "dynamic has the pattern \"(?i)MODEL\\..*\", which is no regular expression, or "
                "has what Python's alone have"},
        Unknown{"GptqBits", R"({"quant_method": "gptq", "bits": 4, "dynamic":
                {".*experts.*": {"bits": 3}}})",
                "dynamic.\".*experts.*\".bits: was 3"},
        Unknown{"GptqOrder", R"({"quant_method": "gptq", "bits": 4, "group_size": 128,
                "desc_act": true})",
                "desc_act: was true"},
        Unknown{"AutoRoundRotation", R"({"quant_method": "auto-round", "bits": 4,
                "packing_format": "auto_round:auto_gptq",
                "spinquant_config": {"online_r1_rotation": true}})",
                "spinquant_config is object"},
        Unknown{"AutoRoundInputs", R"({"quant_method": "auto-round", "bits": 4, "act_bits": 8,
                "packing_format": "auto_round:auto_gptq"})",
                "act_bits: was 8"},
        Unknown{"AutoRoundType", R"({"quant_method": "auto-round", "bits": 4, "data_type": "nv_fp",
                "packing_format": "auto_round:auto_gptq"})",
                "data_type: was \"nv_fp\""},
        Unknown{"NoMethod", R"({"group_size": 64, "bits": 4})", "quant_method: was absent"},
        Unknown{"ModelOpt", R"({"quant_method": "modelopt", "quant_algo": "NVFP4",
                "rotate": {"enable": true}})",
                "rotate is object"},
        Unknown{"ModelOptScale", R"({"quant_method": "modelopt", "quant_algo": "NVFP4",
                "pre_quant_scale": true})",
                "pre_quant_scale: was true"},
        Unknown{"ModelOptGroup", R"({"quant_method": "modelopt", "quant_algo": "NVFP4",
                "group_size": 32})",
                "group_size: was 32"},
        Unknown{"ModelOptTable", R"({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4",
                "clip": 2}}})",
                "quantized_layers.\"model.layers.0.mlp.experts\".clip is 2"},
        Unknown{"ModelOptContradiction", R"({"quant_method": "modelopt", "quant_algo": "NVFP4",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}}})",
                "config_groups.\"group_0\".weights.num_bits: was 8"},
        Unknown{"ModelOptGroupOfGroups", R"({"quant_method": "modelopt", "quant_algo":
                "W4A16_NVFP4", "config_groups": {"group_0": {"weights": {"num_bits": 4,
                "type": "float", "group_size": 32}}}})",
                "config_groups.\"group_0\".weights.group_size: was 32"},
        Unknown{"ModelOptTypeOfGroups", R"({"quant_method": "modelopt", "quant_algo": "NVFP4",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}})",
                "config_groups.\"group_0\".weights.type: was \"int\""},
        Unknown{"ModelOptOperand", R"({"quant_method": "modelopt", "quant_algo": "NVFP4",
                "config_groups": {"group_0": {"input_activations": {"num_bits": 4, "clip": 2},
                "weights": {"num_bits": 4}}}})",
                "config_groups.\"group_0\".input_activations.clip is 2"},
        Unknown{"CompressedTensors", R"({"quant_method": "compressed-tensors", "smooth": 0.5,
                "config_groups": {"group_0": {)" FUSEDMOE_KNOWN_INT4 "}}}}",
                "smooth is 0.5"},
        Unknown{"CompressedTensorsGroup", R"({"quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"clip": 1, )" FUSEDMOE_KNOWN_INT4 "}}}}",
                "config_groups.\"group_0\".clip is 1"},
        Unknown{"CompressedTensorsArguments", R"({"quant_method": "compressed-tensors",
                "config_groups": {"group_0": {)" FUSEDMOE_KNOWN_INT4 R"(, "codebook": 1}}}})",
                "config_groups.\"group_0\".weights.codebook is 1"},
        Unknown{"Sparsity",
                R"({"quant_method": "compressed-tensors", "sparsity_config":
                {"format": "sparse-24-bitmask"}, "config_groups": {"group_0": {)" FUSEDMOE_KNOWN_INT4
                "}}}}",
                "sparsity_config.format: was \"sparse-24-bitmask\""},
        Unknown{"Marlin24", R"({"quant_method": "compressed-tensors", "format": "marlin-24",
                "config_groups": {"group_0": {)" FUSEDMOE_KNOWN_INT4 "}}}}",
                "format: was \"marlin-24\""},
        Unknown{"Outputs", R"({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
                "output_activations": {"num_bits": 8}, )" FUSEDMOE_KNOWN_INT4 "}}}}",
                "config_groups.\"group_0\".output_activations: was object"},
        Unknown{"OrderOfColumns", R"({"quant_method": "compressed-tensors", "config_groups":
                {"group_0": {)" FUSEDMOE_KNOWN_INT4 R"(, "actorder": "group"}}}})",
                "config_groups.\"group_0\".weights.actorder: was \"group\""},
        Unknown{"OrderOfColumnsByTrue", R"({"quant_method": "compressed-tensors", "config_groups":
                {"group_0": {)" FUSEDMOE_KNOWN_INT4 R"(, "actorder": true}}}})",
                "config_groups.\"group_0\".weights.actorder: was true"}),
    [](const auto& info) { return std::string(info.param.name); });

// ------------------------------------------------------------------------------------------------

/// `apply` of a transform of compressed-tensors.
std::string with_transform(const std::string& apply) {
  nlohmann::json config = nlohmann::json::parse(testing::tiny_config("qwen3_moe"));
  config["quantization_config"] = nlohmann::json::parse(
      R"({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups":
          {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
          "transform_config": {"config_groups": {"R": {"type": "hadamard", "apply": [)" +
      apply + "]}}}}");
  return testing::error_text([&] { parse_model_config(config.dump()); });
}

// AutoRound writes it there where nothing is quantized.
TEST(TransformTest, IsRefusedBesideTheKeysOfTheModel) {
  const auto error = [](const char* key, const nlohmann::json& value) {
    nlohmann::json config = nlohmann::json::parse(testing::tiny_config("qwen3_moe"));
    config[key] = value;
    return testing::error_text([&] { parse_model_config(config.dump()); });
  };
  const nlohmann::json rotation{{"hadamard_type", "hadamard"}, {"block_size", 32}};
  for (const char* key : {"rotation_config", "spinquant_config", "transform_config"}) {
    const std::string refused = std::string("config.") + key + " is object: inputs of layers are";
    EXPECT_EQ(error(key, rotation).find(refused), 0u) << error(key, rotation);
    EXPECT_EQ(error(key, nullptr), "no error");
    EXPECT_EQ(error(key, nlohmann::json::object()), "no error");
  }
}

// A rotation that was folded into the weights changes nothing; one at run time does.
TEST(TransformTest, IsRefusedWhereItReachesTheExpertsAtRunTime) {
  const std::string refused =
      "config.quantization_config.transform_config.config_groups.\"R\" applies a hadamard to the ";
  for (const auto& [apply, location] : std::map<std::string, std::string>{
           {R"({"targets": ["re:.*down_proj$"], "location": "input"},
               {"targets": ["re:.*down_proj$"], "location": "weight_input", "inverse": true})",
            "input"},
           {R"({"targets": ["Linear"], "location": "output", "ignore": ["re:.*self_attn.*"]})",
            "output"},
           {R"({"targets": "model.layers.0.mlp.experts.0.up_proj", "location": "input"})", "input"},
           {R"({"targets": ["re:.*experts.*"], "location": "input", "ignore": ["re:.*gate$"]})",
            "input"}}) {
    EXPECT_EQ(with_transform(apply).find(refused + location), 0u) << with_transform(apply);
  }
  for (const char* apply :
       {R"({"targets": ["Linear"], "location": "weight_output"},
           {"targets": ["re:.*"], "location": "weight_input", "inverse": true})",
        R"({"targets": ["re:.*self_attn.*"], "location": "q_attn"})",
        R"({"targets": ["Linear"], "location": "input", "ignore": ["re:.*mlp.*"]})"}) {
    EXPECT_EQ(with_transform(apply), "no error");
  }
}

}  // namespace fusedmoe::quant_configs_test
