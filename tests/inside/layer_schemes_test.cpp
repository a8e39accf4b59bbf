// Checkpoints whose layers, experts or matrices differ in their format, as configs of every
// quantizer say it. Each layer is one of a checkpoint of one format, whose bits other tests compare
// with the published definitions; here it must keep them beside layers of other formats.
#include <string>

#include "fusedmoe/quant.h"
#include "gtest/gtest.h"
#include "layered_checkpoint.h"

namespace fusedmoe::layer_schemes_test {

using testing::File;
using testing::Layers;
using testing::source_of;
using enum CheckpointLayout;

/// Of expert 2: gate, up or down.
Tensor decoded(const LayerWeights& layer, WeightMatrix ExpertMatrices::*matrix) {
  const bool down = matrix == &ExpertMatrices::down;
  const QuantScheme& scheme = layer.experts.scheme;
  return dequantize_weights(layer.experts.experts[2].*matrix,
                            down ? scheme.down_weights() : scheme.weights,
                            down ? layer.experts.intermediate : layer.experts.hidden);
}

class LayersTest : public ::testing::TestWithParam<Layers> {};

TEST_P(LayersTest, HaveTheSchemesThatTheConfigSays) {
  const Layers& wanted = GetParam();
  File file;
  fill(wanted, file);
  const Checkpoint checkpoint = file.open();
  for (std::size_t i = 0; i < wanted.schemes.size(); ++i) {
    const auto number = static_cast<std::int64_t>(i);
    const std::string scheme = wanted.schemes[i];
    EXPECT_EQ(name(checkpoint.config(number).scheme), scheme) << i;
    EXPECT_EQ(name(checkpoint.check_layer(number).experts), scheme) << i;
    const LayerWeights layer = checkpoint.load_layer(number);
    EXPECT_EQ(name(layer.experts.scheme), scheme) << i;
    const auto [first, down] = testing::formats_of(scheme);
    const auto expect_same = [&](const std::string& from, WeightMatrix ExpertMatrices::*matrix) {
      const LayerWeights alone =
          Checkpoint::open(source_of(from, wanted.layout, wanted.family)).load_layer(0);
      EXPECT_TRUE(testing::bitwise_equal(decoded(layer, matrix), decoded(alone, matrix)))
          << from << " in layer " << i;
    };
    expect_same(first, &ExpertMatrices::gate);
    expect_same(first, &ExpertMatrices::up);
    expect_same(down, &ExpertMatrices::down);
  }
}

INSTANTIATE_TEST_SUITE_P(
    PlainAmongQuantized, LayersTest,
    ::testing::Values(Layers{"Fp8Block",
                             "{" FUSEDMOE_FP8 R"("modules_to_not_convert": ["lm_head", "gate",
               "model.layers.1.mlp"]})",
                             kFp8,
                             {"fp8_block", "bf16", "fp8_block"}},
                      Layers{"Fp8FirstLayer",
                             "{" FUSEDMOE_FP8 R"("ignored_layers": ["model.layers.0."]})",
                             kFp8,
                             {"bf16", "fp8_block"}},
                      Layers{"Fp8Regex",
                             "{" FUSEDMOE_FP8 R"("modules_to_not_convert":
               ["model.layers.[12].mlp.experts.*"]})",
                             kFp8,
                             {"fp8_block", "bf16", "bf16"}},
                      Layers{"Awq",
                             "{" FUSEDMOE_AWQ R"("modules_to_not_convert": ["layers.1.", "gate"]})",
                             kAwq,
                             {"int4_g32_zp", "bf16"}},
                      Layers{"AwqExperts",
                             "{" FUSEDMOE_AWQ R"("modules_to_not_convert":
               ["model.layers.0.mlp.experts"]})",
                             kAwq,
                             {"bf16", "int4_g32_zp"}},
                      Layers{"Gptq",
                             "{" FUSEDMOE_GPTQ R"("dynamic": {"-:.*layers\\.2\\..*": {}}})",
                             kGptq,
                             {"int4_g32", "int4_g32", "bf16"}},
                      Layers{"GptqBlocks",
                             "{" FUSEDMOE_GPTQ R"("block_name_to_quantize": "model.layers.1"})",
                             kGptq,
                             {"bf16", "int4_g32"}},
                      Layers{"GptqMixtral",
                             "{" FUSEDMOE_GPTQ R"("dynamic":
               {"-:^model\\.layers\\.1\\.block_sparse_moe\\.experts\\..*": {}}})",
                             kGptq,
                             {"int4_g32", "bf16"},
                             "mixtral"},
                      Layers{"AutoRound",
                             "{" FUSEDMOE_ROUND R"("extra_config":
               {"model.layers.1.mlp.experts": {"bits": 16, "data_type": "float"}}})",
                             kGptq,
                             {"int4_g32", "bf16"}},
                      Layers{
                          "ModelOpt",
                          R"({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
               "exclude_modules": ["model.layers.1.mlp*", "lm_head"]})",
                          kModelOpt,
                          {"fp8_channel_token", "bf16"}},
                      Layers{"ModelOptInConfig",
                             R"({"quant_method": "modelopt", "quant_algo": "MXFP8",
               "ignore": ["*layers.0.mlp.experts"]})",
                             kModelOpt,
                             {"bf16", "mxfp8"}},
                      Layers{"CompressedTensors",
                             "{" FUSEDMOE_CT R"("ignore": ["lm_head",
               "re:.*layers\\.1\\..*"], "config_groups": {"group_0": {"targets": ["Linear"],)" FUSEDMOE_INT4
                             "}}}",
                             kCompressedTensors,
                             {"int4_g32", "bf16", "int4_g32"}},
                      // Written for dense layers: no name of the experts fits, but another one that
                      // the family's stacks have, or any that is not theirs.
                      Layers{"DenseLayers",
                             "{" FUSEDMOE_CT R"("ignore": ["lm_head",
               "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:(?!.*\\.mlp\\.experts\\.).*"],
               "config_groups": {"group_0": {"targets": ["Linear"],)" FUSEDMOE_INT4 "}}}",
                             kCompressedTensors,
                             {"int4_g32", "int4_g32"}},
                      // Names of another model, which the tensors contradict.
                      Layers{"OtherPrefix",
                             "{" FUSEDMOE_CT R"("ignore": ["re:model\\.language_model\\..*"],
               "config_groups": {"group_0": {"targets": ["Linear"],)" FUSEDMOE_INT4 "}}}",
                             kCompressedTensors,
                             {"int4_g32"}},
                      // Numbers that only Python writes, before rules whose order counts.
                      Layers{"OrderBehindInfinity",
                             "{" FUSEDMOE_GPTQ R"("mse": NaN, "damp_percent": -Infinity,
               "dataset": "a \"NaN\\", "dynamic": {".*layers\\.0.*": {"bits": 8},
               ".*": {"bits": 4}}})",
                             kGptq,
                             {"int8_g32", "int4_g32"}},
                      Layers{"BitsOfAnotherPrefix",
                             "{" FUSEDMOE_GPTQ R"("dynamic":
               {"+:^model\\.language_model\\.layers\\..*": {"bits": 8}}})",
                             kGptq,
                             {"int4_g32"}},
                      Layers{"OtherPrefixFits",
                             R"({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": true,
               "dynamic": {"+:^model\\.language_model\\.layers\\..*": {"bits": 4}}})",
                             kGptq,
                             {"int4_g32"}},
                      Layers{"GptqAllButExperts",
                             "{" FUSEDMOE_GPTQ R"("dynamic":
               {"-:^(?!.*layers\\.1\\.mlp\\.experts).*": {}}})",
                             kGptq,
                             {"bf16", "int4_g32"}},
                      Layers{"NoTarget",
                             "{" FUSEDMOE_CT R"("config_groups": {"group_0": {
               "targets": ["re:.*layers.[02].*"],)" FUSEDMOE_CHANNEL "," FUSEDMOE_TOKEN "}}}",
                             kCompressedTensors,
                             {"fp8_channel_token", "bf16", "fp8_channel_token"}},
                      Layers{"GptOss",
                             R"({"quant_method": "mxfp4", "modules_to_not_convert":
               ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head",
                "model.layers.1.mlp"]})",
                             kGptOss,
                             {"mxfp4_w4a16", "bf16"},
                             "gpt_oss"}),
    [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(
    OtherNumbers, LayersTest,
    ::testing::Values(
        Layers{"GptqBitsGroupAndZeros",
               "{" FUSEDMOE_GPTQ R"("dynamic": {
               "+:.*\\.1\\.mlp.*": {"bits": 8}, ".*\\.2\\.mlp.*": {"group_size": 128},
               ".*\\.3\\.mlp.*": {"sym": false}}})",
               kGptq,
               {"int4_g32", "int8_g32", "int4_g128", "int4_g32_zp"}},
        Layers{"GptqV2",
               "{" FUSEDMOE_GPTQ R"("checkpoint_format": "gptq_v2", "dynamic": {
               "model.layers.0.mlp.*": {"sym": false, "damp_percent": 0.1}}})",
               kGptqV2,
               {"int4_g32_zp", "int4_g32"}},
        // Patterns in the order of the text, those that leave modules as they are first.
        Layers{"GptqOrder",
               "{" FUSEDMOE_GPTQ R"("dynamic": {".*layers.0.*": {"bits": 8},
               ".*experts.*": {"group_size": 128}, "-:.*layers.2.*": {}}})",
               kGptq,
               {"int8_g32", "int4_g128", "bf16"}},
        Layers{"AutoRoundPattern",
               "{" FUSEDMOE_ROUND R"("extra_config":
               {"layers\\.1\\.mlp\\.experts": {"bits": 8}, "model.layers.2.mlp.gate": {"bits": 16}}})",
               kGptq,
               {"int4_g32", "int8_g32", "int4_g32"}},
        Layers{"AwqGroups",
               "{" FUSEDMOE_AWQ R"("dynamic": {".*layers.1.*": {"group_size": 128}}})",
               kAwq,
               {"int4_g32_zp", "int4_g128_zp"}},
        Layers{"OneGroupInAnyOrder",
               "{"
               R"("quant_method": "gptq", "bits": 4, "group_size": -1,
               "desc_act": true, "dynamic": {".*layers.1.*":
               {"group_size": 32, "desc_act": true, "static_groups": true}}})",
               kGptq,
               {"int4_channel", "int4_g32"}},
        Layers{"CompressedTensorsByLayer",
               "{" FUSEDMOE_CT R"("config_groups": {
               "group_0": {"targets": ["re:.*layers\\.(0|2)\\.mlp.*"],)" FUSEDMOE_CHANNEL
               "," FUSEDMOE_TOKEN
               R"(}, "group_1": {"targets": ["re:.*layers\\.1\\.mlp.*"],)" FUSEDMOE_INT4 "}}}",
               kCompressedTensors,
               {"fp8_channel_token", "int4_g32", "fp8_channel_token"}},
        Layers{"CompressedTensorsByName",
               "{" FUSEDMOE_CT R"("config_groups": {
               "group_0": {"targets": ["Linear"],)" FUSEDMOE_INT8 R"(},
               "group_1": {"targets": ["re:language_model.model.layers.1.*"],)" FUSEDMOE_INT4 "}}}",
               kCompressedTensors,
               {"int8_g32", "int4_g32", "int8_g32"}},
        Layers{"MixedPrecision",
               R"({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
               "quantized_layers": {
               "model.layers.0.mlp.experts": {"quant_algo": "FP8_PB_WO"},
               "model.layers.1.mlp": {"quant_algo": "MXFP8"},
               "model.layers.2.self_attn.q_proj": {"quant_algo": "W8A16"}}})",
               kModelOpt,
               {"fp8_block_w8a16", "mxfp8", "bf16"}},
        Layers{"MixedPrecisionUnderOtherNames",
               R"({"quantization": {
               "quant_algo": "MIXED_PRECISION", "exclude_modules": ["mtp*"], "quantized_layers": {
               "layers.1.mlp.experts": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}}})",
               kModelOpt,
               {"bf16", "fp8_channel_token"}}),
    [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(
    OtherDown, LayersTest,
    ::testing::Values(Layers{"Gptq",
                             "{" FUSEDMOE_GPTQ R"("dynamic": {".*down_proj.*": {"bits": 8}}})",
                             kGptq,
                             {"int4_g32+int8_g32"}},
                      Layers{"GptqInOneLayer",
                             "{" FUSEDMOE_GPTQ R"("dynamic":
               {".*layers.1.*down_proj": {"sym": false}}})",
                             kGptq,
                             {"int4_g32", "int4_g32+int4_g32_zp"}},
                      Layers{"GptqPlain",
                             "{" FUSEDMOE_GPTQ R"("dynamic": {"-:.*down_proj": {}}})",
                             kGptq,
                             {"int4_g32+bf16"}},
                      Layers{"GptqPlainGate",
                             "{" FUSEDMOE_GPTQ R"("modules_in_block_to_quantize":
               [["mlp.experts.0.down_proj", "mlp.experts.1.down_proj"],
                ["mlp.experts.2.down_proj", "mlp.experts.3.down_proj"]]})",
                             kGptq,
                             {"bf16+int4_g32"}},
                      Layers{"AutoRound",
                             "{" FUSEDMOE_ROUND R"("extra_config": {".*down_proj": {"bits": 8}}})",
                             kGptq,
                             {"int4_g32+int8_g32"}},
                      Layers{"CompressedTensors",
                             "{" FUSEDMOE_CT R"("config_groups": {
               "group_0": {"targets": ["re:.*(gate|up)_proj"],)" FUSEDMOE_INT4 R"(},
               "group_1": {"targets": ["re:.*down_proj"],)" FUSEDMOE_INT8 "}}}",
                             kCompressedTensors,
                             {"int4_g32+int8_g32"}},
                      Layers{"ModelOpt",
                             R"({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
               "quantized_layers": {"model.layers.0.mlp.experts.*.gate_proj":
               {"quant_algo": "W4A16_NVFP4"}, "model.layers.0.mlp.experts.*.up_proj":
               {"quant_algo": "W4A16_NVFP4"}, "model.layers.0.mlp.experts.*.down_proj":
               {"quant_algo": "FP8_PB_WO"}}})",
                             kModelOpt,
                             {"nvfp4_w4a16+fp8_block_w8a16"}}),
    [](const auto& info) { return std::string(info.param.name); });

// ------------------------------------------------------------------------------------------------

struct Refused {
  const char* name;
  const char* scheme;  ///< of the tensors
  CheckpointLayout layout;
  const char* quantization;
  const char* text;  ///< in the Error
};

class RefusedLayersTest : public ::testing::TestWithParam<Refused> {};

TEST_P(RefusedLayersTest, SayWhy) {
  const Refused& refused = GetParam();
  File file;
  file.config = nlohmann::json::parse(testing::tiny_config("qwen3_moe-wide"));
  file.quantization = refused.quantization;
  file.add(source_of(refused.scheme, refused.layout, "qwen3_moe-wide"), 0);
  const std::string text = testing::error_text([&] { file.open().load_layer(0); });
  EXPECT_NE(text.find(refused.text), std::string::npos) << text;
}

INSTANTIATE_TEST_SUITE_P(
    Mixtures, RefusedLayersTest,
    ::testing::Values(
        Refused{"OneExpert", "int8_g32", kCompressedTensors, "{" FUSEDMOE_CT R"("config_groups":
                {"group_0": {"targets": ["re:.*experts\\.[0-2]\\..*"],)" FUSEDMOE_INT8 R"(},
                "group_1": {"targets": ["re:.*experts\\.3\\..*"],)" FUSEDMOE_INT4 "}}}",
                "model.layers.0.mlp.experts.0.gate_proj is int8_g32 and "
                "model.layers.0.mlp.experts.3.gate_proj is int4_g32"},
        Refused{"OneExpertIsPlain", "int4_g32", kCompressedTensors,
                "{" FUSEDMOE_CT R"("ignore":
                ["model.layers.0.mlp.experts.2.down_proj"], "config_groups": {"group_0": {)" FUSEDMOE_INT4
                "}}}",
                "model.layers.0.mlp.experts.0.down_proj is int4_g32 and "
                "model.layers.0.mlp.experts.2.down_proj is not quantized"},
        Refused{
            "GateAndUp", "int4_g32_zp", kAwq, "{" FUSEDMOE_AWQ R"("dynamic":
                {".*up_proj": {"group_size": 128}}})",
            "gate_proj is int4_g32_zp and model.layers.0.mlp.experts.0.up_proj is int4_g128_zp"},
        Refused{
            "InputsOfDown", "fp8_channel_token", kCompressedTensors,
            "{" FUSEDMOE_CT
            R"("config_groups": {"group_0": {"targets": ["re:.*(gate|up)_proj"],)" FUSEDMOE_CHANNEL
            "," FUSEDMOE_TOKEN R"(}, "group_1": {"targets":
                ["re:.*down_proj"],)" FUSEDMOE_CHANNEL "}}}",
            "the inputs of all matrices of a layer's experts must have one format"},
        Refused{"ExpertsOfModelOpt", "nvfp4", kModelOpt, R"({"quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
                "model.layers.0.mlp.experts.1": {"quant_algo": "FP8"}}})",
                "experts.0.gate_proj is nvfp4 and model.layers.0.mlp.experts.1.gate_proj is fp8"},
        Refused{"GroupsThatBothFit", "int4_g32", kCompressedTensors,
                "{" FUSEDMOE_CT
                R"("config_groups": {"group_0": {"targets": ["re:.*mlp.experts.*"],)" FUSEDMOE_INT4
                R"(}, "group_1": {"targets": ["re:.*experts.*"],)" FUSEDMOE_INT8 "}}}",
                "\"group_1\" fits it, too"}),
    [](const auto& info) { return std::string(info.param.name); });

// Stacks are no linear layers: a rule for those says nothing of them.
TEST(StacksTest, StayPlainBesideQuantizedLinearLayers) {
  const char* groups = R"("config_groups": {"group_0": {"targets": [")";
  for (const auto& [target, error] :
       {std::pair{"Linear", "no error"},
        std::pair{"re:.*experts.*", "experts.gate_up_proj is int4_g32, but its weight is plain"},
        std::pair{"FusedMoE", "experts.gate_up_proj is int4_g32, but its weight is plain"}}) {
    File file;
    file.config = nlohmann::json::parse(testing::tiny_config("gpt_oss"));
    file.quantization =
        "{" FUSEDMOE_CT + (groups + std::string(target)) + "\"]," FUSEDMOE_INT4 "}}}";
    file.add(source_of("bf16", kPlain, "gpt_oss"), 0);
    const std::string text = testing::error_text([&] { file.open().load_layer(0); });
    EXPECT_NE(text.find(error), std::string::npos) << text;
  }
}

// A layer in a format that nothing here reads does not stand before the others.
TEST(UnreadLayersTest, AreRefusedByThemselves) {
  for (const char* layer : {"0", "1"}) {
    File file;
    const std::string quantization = "{" FUSEDMOE_GPTQ R"("dynamic": {".*layers.)" +
                                     std::string(layer) + R"(.mlp.*": {"bits": 3}}})";
    fill({"", quantization.c_str(), kGptq, {"int4_g32", "int4_g32"}}, file);
    const Checkpoint checkpoint = file.open();
    EXPECT_EQ(name(checkpoint.config().scheme), "int4_g32");
    const std::int64_t unread = std::stoi(layer);
    EXPECT_EQ(name(checkpoint.load_layer(1 - unread).experts.scheme), "int4_g32");
    const std::string text = testing::error_text([&] { checkpoint.load_layer(unread); });
    EXPECT_NE(text.find(".bits: was 3; must be 4 or 8"), std::string::npos) << text;
  }
}

// GPTQ's patterns are often meant for layers and hit numbers of experts: the tensors say which.
TEST(ExpertNumbersTest, CountWhereTheTensorsDiffer) {
  File file;
  fill({"",
        "{" FUSEDMOE_GPTQ R"("dynamic": {".*\\.1\\..*": {"bits": 8}}})",
        kGptq,
        {"int4_g32", "int8_g32"}},
       file);
  const Checkpoint checkpoint = file.open();
  EXPECT_EQ(name(checkpoint.load_layer(0).experts.scheme), "int4_g32");
  EXPECT_EQ(name(checkpoint.load_layer(1).experts.scheme), "int8_g32");
  file.add(source_of("int8_g32", kGptq, "qwen3_moe-wide"), 0, "experts.1.");
  const std::string text = testing::error_text([&] { file.open().load_layer(0); });
  EXPECT_NE(text.find("say that model.layers.0.mlp.experts.0.gate_proj is int4_g32 and "
                      "model.layers.0.mlp.experts.1.gate_proj is int8_g32"),
            std::string::npos)
      << text;
}

TEST(CommonConfigTest, IsThatOfLayersWithOneScheme) {
  File same, mixed;
  const char* config = "{" FUSEDMOE_FP8 R"("modules_to_not_convert": ["layers.1"]})";
  fill({"Same",
        "{" FUSEDMOE_FP8 R"("modules_to_not_convert": []})",
        kFp8,
        {"fp8_block", "fp8_block"},
        "qwen3_moe"},
       same);
  fill({"Mixed", config, kFp8, {"fp8_block", "bf16", "fp8_block", "fp8_block"}, "qwen3_moe"},
       mixed);
  EXPECT_EQ(name(same.open().common_config().scheme), "fp8_block");
  const std::string text = testing::error_text([&] { mixed.open().common_config(); });
  EXPECT_NE(text.find("layers have different schemes, so one must be named: fp8_block in layers "
                      "{0,2-3}, bf16 in layer 1"),
            std::string::npos)
      << text;
}

INSTANTIATE_TEST_SUITE_P(
    ConfigAndTensors, RefusedLayersTest,
    ::testing::Values(
        Refused{"PlainTensors", "bf16", kGptq, "{" FUSEDMOE_GPTQ R"("desc_act": false})",
                "says that model.layers.0.mlp.experts.0.gate_proj is int4_g32, but its weight is "
                "plain bf16"},
        Refused{"QuantizedTensors", "int4_g32_zp", kAwq,
                "{" FUSEDMOE_AWQ R"("modules_to_not_convert": ["model.layers.0"]})",
                "config.quantization_config.modules_to_not_convert says that "
                "model.layers.0.mlp.experts.0.gate_proj is not quantized, but the file holds "
                "model.layers.0.mlp.experts.0.gate_proj.qweight"},
        Refused{"IgnoredButQuantized", "fp8_channel_token", kCompressedTensors,
                "{" FUSEDMOE_CT
                R"("ignore": ["re:.*experts.*"], "config_groups": {"group_0": {)" FUSEDMOE_CHANNEL
                "}}}",
                "config.quantization_config.ignore (\"re:.*experts.*\") says that"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace fusedmoe::layer_schemes_test
