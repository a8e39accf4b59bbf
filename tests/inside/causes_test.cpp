// Tensors that do not fit because one key of the config is wrong: the error names that key first.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "checkpoint/problems.h"
#include "fusedmoe/runtime.h"
#include "layered_checkpoint.h"

namespace fusedmoe::causes_test {

using testing::kCt;
using testing::Parts;
using enum CheckpointLayout;

struct Misfit {
  const char* name;
  const char* scheme;  ///< of the tensors; "bf16": plain
  CheckpointLayout layout;
  const char* family;
  std::function<void(nlohmann::json&)> change;
  const char* cause;  ///< what the error begins with, behind the layer
};

std::function<void(nlohmann::json&)> set(const std::string& pointer, const nlohmann::json& value) {
  return [=](nlohmann::json& config) { config[nlohmann::json::json_pointer(pointer)] = value; };
}

std::vector<Misfit> misfits() {
  return {
      {"Hidden", "bf16", kPlain, "qwen3_moe", set("/hidden_size", 128),
       "config.hidden_size is 128, but the tensors have 160, so 13 tensors do not fit"},
      {"Width", "bf16", kPlain, "deepseek_v3", set("/moe_intermediate_size", 64),
       "config.moe_intermediate_size is 64, but the tensors have 96, so 15 tensors do not fit"},
      {"HiddenAndWidth", "bf16", kPlain, "mixtral",
       [](nlohmann::json& config) {
         config["hidden_size"] = 128;
         config["intermediate_size"] = 64;
       },
       "config.hidden_size is 128, but the tensors have 160; config.intermediate_size is 64, but "
       "the tensors have 96, so"},
      {"FewerExperts", "bf16", kPlain, "mixtral", set("/num_local_experts", 3),
       "config.num_local_experts is 3, but the tensors have 4, so"},
      {"MoreExperts", "int4_g32", kGptq, "qwen3_moe", set("/num_local_experts", 128),
       "config.num_local_experts is 128, but the tensors have 4, so"},
      {"ManyMoreExperts", "int4_g32", kGptq, "qwen3_moe", set("/num_local_experts", 4096),
       "config.num_local_experts is 4096, but the tensors have 4, so"},
      {"StackedWidth", "bf16", kPlain, "gpt_oss", set("/intermediate_size", 32),
       "config.intermediate_size is 32, but the tensors have 96, so"},
      {"BlocksWidth", "mxfp4_w4a16", kGptOss, "gpt_oss", set("/intermediate_size", 32),
       "config.intermediate_size is 32, but the tensors have 96, so"},
      {"SharedWidth", "bf16", kPlain, "qwen2_moe", set("/shared_expert_intermediate_size", 32),
       "config.shared_expert_intermediate_size is 32, but the tensors have 64, so 3 tensors"},
      {"NoSharedExperts", "bf16", kPlain, "deepseek_v3", set("/n_shared_experts", 0),
       "config.n_shared_experts times config.moe_intermediate_size is 0, but the tensors have 96, "
       "so 3"},
      {"CorrectionBias", "bf16", kPlain, "deepseek_v3", set("/topk_method", "greedy"),
       "config.topk_method means a router without a correction bias, which the file has, so 1"},
      {"QuantizedWidth", "int4_g32", kGptq, "qwen3_moe", set("/moe_intermediate_size", 64),
       "config.moe_intermediate_size is 64, but the tensors have 96, so"},
      {"GptqGroup", "int4_g32", kGptq, "qwen3_moe-wide", set("/quantization_config/group_size", 64),
       "config.quantization_config says that the experts are int4_g64, but their tensors are "
       "int4_g32 (groups of 32), so 24 tensors do not fit"},
      {"GptqBits", "int4_g32", kGptq, "qwen3_moe", set("/quantization_config/bits", 8),
       "config.quantization_config says that the experts are int8_g32, but their tensors are "
       "int4_g32 (4 bits), so"},
      {"AwqGroup", "int4_g32_zp", kAwq, "qwen3_moe-wide",
       set("/quantization_config/group_size", 128),
       "config.quantization_config says that the experts are int4_g128_zp, but their tensors are "
       "int4_g32_zp (groups of 32), so"},
      {"CompressedGroup", "int4_g32", kCt, "qwen3_moe-wide",
       set("/quantization_config/config_groups/group_0/weights/group_size", 128),
       "config.quantization_config.config_groups.\"group_0\" says that the experts are int4_g128, "
       "but "
       "their tensors are int4_g32 (groups of 32), so"},
      {"CompressedBits", "int4_g32", kCt, "qwen3_moe",
       set("/quantization_config/config_groups/group_0/weights/num_bits", 8),
       "config.quantization_config.config_groups.\"group_0\" says that the experts are int8_g32, "
       "but "
       "their tensors are int4_g32 (4 bits), so"},
      {"CompressedTargets", "int4_g32", kCt, "qwen3_moe",
       set("/quantization_config/config_groups/group_0/targets", {"re:.*self_attn.*"}),
       "no entry of config.quantization_config quantizes model.layers.0.mlp.experts.0.gate_proj, "
       "but "
       "the file holds model.layers.0.mlp.experts.0.gate_proj.weight_packed in i32"},
      {"GptqAsAwq", "int4_g32", kGptq, "qwen3_moe",
       set("/quantization_config", {{"quant_method", "awq"},
                                    {"bits", 4},
                                    {"group_size", 32},
                                    {"zero_point", true},
                                    {"version", "gemm"}}),
       "config.quantization_config says that the experts are int4_g32_zp in the layout awq, but "
       "their tensors are int4_g32_zp in the layout gptq, so 24 tensors do not fit"},
      {"DownBits", "int4_g32", kGptq, "qwen3_moe",
       set("/quantization_config/dynamic", {{".*down_proj", {{"bits", 8}}}}),
       "config.quantization_config.dynamic.\".*down_proj\" says that the down matrices are "
       "int8_g32, "
       "but their tensors are int4_g32 (4 bits), so 8 tensors do not fit"},
      {"BlocksAsOneScale", "fp8_block", kFp8, "qwen3_moe",
       set("/quantization_config", {{"quant_method", "fp8"}}),
       "config.quantization_config says that the experts are fp8_tensor, but their tensors are "
       "fp8_block, so 12 tensors do not fit"},
      {"CompressedAsFp8", "fp8_block", kCt, "qwen3_moe-wide",
       set("/quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}}),
       "config.quantization_config says that the experts are fp8_block in the layout fp8, but "
       "their "
       "tensors are fp8_block in the layout compressed-tensors, so 24 tensors do not fit"},
      {"NvfpAsFp8", "nvfp4", kModelOpt, "qwen3_moe", set("/quantization_config/quant_algo", "FP8"),
       "config.quantization_config.quant_algo says that the experts are fp8_tensor_static, but "
       "their "
       "tensors are nvfp4, so 36 tensors do not fit"},
      {"InputsToo", "nvfp4_w4a16", kModelOpt, "qwen3_moe",
       set("/quantization_config/quant_algo", "NVFP4"),
       "config.quantization_config says that the experts are nvfp4, which quantizes their inputs "
       "by "
       "scales of the file, but it holds none, so 12 tensors do not fit"},
      {"NoConfig", "nvfp4", kModelOpt, "qwen3_moe", set("/quantization_config", nullptr),
       "the config has no entry that quantizes the experts, but their tensors are nvfp4_w4a16 in "
       "the layout modelopt, so 48 tensors do not fit"},
      {"NoConfigOfGptq", "int8_g32", kGptq, "qwen3_moe", set("/quantization_config", nullptr),
       "the config has no entry that quantizes the experts, but their tensors are int8_g32 in "
       "the layout gptq, so"},
      {"PlainButListed", "fp8_block", kFp8, "qwen3_moe",
       set("/quantization_config/modules_to_not_convert", {"experts"}),
       "config.quantization_config.modules_to_not_convert says that "
       "model.layers.0.mlp.experts.0.gate_proj is not quantized, but the file holds "
       "model.layers.0.mlp.experts.0.gate_proj.weight in e4m3"},
      {"NotListed", "bf16", kPlain, "qwen3_moe",
       set("/quantization_config", {{"quant_method", "fp8"}}),
       "config.quantization_config says that model.layers.0.mlp.experts.0.gate_proj is fp8_tensor, "
       "but "
       "its weight is plain bf16"},
  };
}

constexpr const char* kShared = "model.layers.0.mlp.shared_experts.";
constexpr const char* kFp8Blocks = R"({"quant_method": "fp8", "weight_block_size": [128, 128]})";
constexpr const char* kGptq4 =
    R"({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true})";
constexpr const char* kGateIgnored =
    R"({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true,
        "dynamic": {"-:.*shared_experts.gate_proj": {}}})";

/// Shared experts in another format than the config says.
struct SharedMisfit {
  const char* name;
  const char* quantization;
  std::pair<const char*, CheckpointLayout> routed, shared;
  const char* part;  ///< of the shared experts that has the other format
  const char* cause;
};

std::vector<SharedMisfit> shared_misfits() {
  constexpr std::pair kBlocks{"fp8_block", kFp8}, kTensor{"fp8_tensor", kFp8};
  constexpr std::pair kInt4{"int4_g32", kGptq}, kInt8{"int8_g32", kGptq},
      kPlainBits{"bf16", kPlain};
  return {
      {"OneScale", kFp8Blocks, kBlocks, kTensor, "",
       "config.quantization_config says that the shared experts are fp8_block, but their tensors "
       "are fp8_tensor, so 3 tensors do not fit"},
      {"OneScaleOfDown", kFp8Blocks, kBlocks, kTensor, "down_proj",
       "config.quantization_config says that the down matrices of the shared experts are "
       "fp8_block, but their tensors are fp8_tensor, so 1 tensor does not fit"},
      {"OtherLayout", kFp8Blocks, kBlocks, kInt4, "",
       "config.quantization_config says that the shared experts are fp8_block in the layout fp8, "
       "but their tensors are int4_g32 in the layout gptq, so 18 tensors do not fit"},
      {"Group",
       kGptq4,
       kInt4,
       {"int4_g128", kGptq},
       "",
       "config.quantization_config says that the shared experts are int4_g32, but their tensors "
       "are int4_g128 (groups of 128), so 6 tensors do not fit"},
      {"Bits", kGptq4, kInt4, kInt8, "",
       "config.quantization_config says that the shared experts are int4_g32, but their tensors "
       "are int8_g32 (8 bits), so 6 tensors do not fit"},
      {"BitsOfAll", kGptq4, kInt8, kInt8, "",
       "config.quantization_config says that the experts are int4_g32, but their tensors are "
       "int8_g32 (8 bits), so 30 tensors do not fit"},
      {"ZeroPoints",
       R"({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {
           "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}}})",
       {"int4_g32", kCt},
       {"int4_g32_zp", kCt},
       "",
       "config.quantization_config.config_groups.\"group_0\" says that the shared experts are "
       "int4_g32, but their tensors are int4_g32_zp, so 3 tensors do not fit"},
      {"NoConfig", "null", kPlainBits, kBlocks, "",
       "the config has no entry that quantizes the shared experts, but their tensors are "
       "fp8_block_w8a16 in the layout fp8, so 6 tensors do not fit"},
      {"PlainUp", kGptq4, kInt4, kPlainBits, "up_proj",
       "config.quantization_config says that model.layers.0.mlp.shared_experts.up_proj is "
       "int4_g32, but its weight is plain bf16"},
      {"PlainGate", kGptq4, kInt4, kPlainBits, "gate_proj",
       "config.quantization_config says that model.layers.0.mlp.shared_experts.gate_proj is "
       "int4_g32, but its weight is plain bf16"},
      {"OneScaleOfUp", kFp8Blocks, kBlocks, kTensor, "up_proj",
       "config.quantization_config says that the up matrices of the shared experts are fp8_block, "
       "but their tensors are fp8_tensor, so 1 tensor does not fit"},
      {"PlainGateByConfig", kGateIgnored, kInt4, kPlainBits, "gate_proj",
       "config.quantization_config.dynamic.\"-:.*shared_experts.gate_proj\" says that "
       "model.layers.0.mlp.shared_experts.gate_proj is not quantized and "
       "model.layers.0.mlp.shared_experts.up_proj is int4_g32: the shared experts must have one "
       "format"},
  };
}

class SharedMisfitTest : public ::testing::TestWithParam<SharedMisfit> {};

/// A copy of expert 0, which has the same sizes.
void set_shared(Parts& parts, const std::filesystem::path& source, const std::string& part) {
  std::erase_if(parts.tensors,
                [&](const auto& entry) { return entry.first.starts_with(kShared + part); });
  const std::string expert = testing::kExperts + "0.";
  for (const auto& [name, tensor] : testing::tensors_of(source)) {
    if (!name.starts_with(expert + part)) continue;
    parts.tensors[kShared + name.substr(expert.size())] = tensor;
  }
}

TEST_P(SharedMisfitTest, CauseStandsBeforeTheTensors) {
  const SharedMisfit& misfit = GetParam();
  const std::string family = "deepseek_v3-wide";
  const auto routed = testing::source_of(misfit.routed.first, misfit.routed.second, family);
  Parts parts(routed);
  parts.quantization() = nlohmann::json::parse(misfit.quantization);
  set_shared(parts, routed, "");
  set_shared(parts, testing::source_of(misfit.shared.first, misfit.shared.second, family),
             misfit.part);
  const std::string error = parts.error();
  EXPECT_NE(error.find(std::string(": ") + misfit.cause), std::string::npos) << error;
}

INSTANTIATE_TEST_SUITE_P(All, SharedMisfitTest, ::testing::ValuesIn(shared_misfits()),
                         [](const auto& info) { return std::string(info.param.name); });

// What loads, but is not run by the backend that is asked for.
TEST(SchemeTest, RefusalsOfABackendBeginWithTheKey) {
  Parts parts("int4_g32", kCt);
  parts.quantization()["config_groups"]["group_0"]["input_activations"] = {
      {"num_bits", 8}, {"type", "float"}, {"strategy", "token"}, {"dynamic", true}};
  const LayerWeights routed = parts.load();
  LayerWeights shared = routed;
  shared.experts = Parts(testing::source_of("bf16", kPlain, "qwen3_moe")).load().experts;
  shared.shared_experts.emplace().weights = routed.experts;
  shared.shared_experts->weights.experts.resize(1);
  const std::string cause =
      "x.safetensors: layer 0: config.quantization_config.config_groups.\"group_0\" gives the ";
  for (const char* require : {"", "cpu"}) {
    LayerOptions options;
    options.require = require;
    const auto expect = [&](const LayerWeights& weights, const char* whose) {
      const std::string error = testing::error_text([&] { MoeLayer(weights, options); });
      EXPECT_NE(error.find(cause + whose + " a scheme that is not served here"), std::string::npos)
          << error;
      const auto lines = std::count(error.begin(), error.end(), '\n') + 1;
      EXPECT_LE(lines, static_cast<std::ptrdiff_t>(checkpoint::Problems::kMaxLines)) << error;
    };
    expect(routed, "experts");
    expect(shared, "shared experts");
  }
}

class MisfitTest : public ::testing::TestWithParam<Misfit> {};

TEST_P(MisfitTest, CauseStandsBeforeTheTensors) {
  const Misfit& misfit = GetParam();
  Parts parts(testing::source_of(misfit.scheme, misfit.layout, misfit.family));
  ASSERT_EQ(parts.error(), "no error");
  misfit.change(parts.config);
  const std::string error = parts.error();
  EXPECT_NE(error.find(misfit.cause), std::string::npos) << error;
  const auto lines = std::count(error.begin(), error.end(), '\n') + 1;
  EXPECT_LE(lines, static_cast<std::ptrdiff_t>(checkpoint::Problems::kMaxLines)) << error;
}

// Nothing else is tried for them, which would take long.
TEST(CauseTest, ThousandsOfMissingExpertsHaveNone) {
  Parts parts("int4_g32", kGptq);
  parts.config["num_local_experts"] = 4096;
  parts.config["quantization_config"]["bits"] = 8;
  parts.tensors["model.layers.0.mlp.gate.weight"] = Tensor::zeros({4096, 160}, DType::kBF16);
  const std::string error = parts.error();
  EXPECT_NE(error.find("layer 0: 36852 tensors do not fit"), std::string::npos) << error;
}

TEST(CauseTest, MatricesThatLieAcrossAreCalledSo) {
  Parts parts(testing::source_of("bf16", kPlain, "gpt_oss"));
  const std::string name = testing::kExperts + "gate_up_proj";
  const Tensor& stored = parts.tensors.at(name);
  const Shape& shape = stored.shape();
  parts.tensors[name] = Tensor::zeros({shape[0], shape[2], shape[1]}, stored.dtype());
  EXPECT_NE(parts.error().find("1 tensor does not fit an MoE block of gpt_oss: "
                               "model.layers.0.mlp.experts.gate_up_proj: shape [4, 192, 160], must "
                               "be [4, 160, 192]: its "
                               "matrices lie across"),
            std::string::npos)
      << parts.error();
}

// Faults of the file alone are not blamed on the config.
TEST(CauseTest, SingleTensorsAndContentsHaveNone) {
  Parts missing("int4_g32", kGptq), permuted("int4_g32", kGptq);
  missing.tensors.erase(testing::kExperts + "2.up_proj.scales");
  EXPECT_NE(missing.error().find("layer 0: 1 tensor does not fit"), std::string::npos)
      << missing.error();
  Parts renamed(testing::source_of("bf16", kPlain, "qwen3_moe"));
  renamed.config["quantization_config"] = {{"quant_method", "fp8"},
                                           {"modules_to_not_convert", {"experts", "gate"}}};
  auto node = renamed.tensors.extract(testing::kExperts + "0.gate_proj.weight");
  node.key() += "_";
  renamed.tensors.insert(std::move(node));
  EXPECT_NE(renamed.error().find("layer 0: 2 tensors do not fit"), std::string::npos)
      << renamed.error();
  permuted.copy(testing::kExperts + "1.up_proj.g_idx").as<std::int32_t>()[33] = 0;
  EXPECT_NE(permuted.error().find("layer 0: 1 tensor does not fit"), std::string::npos)
      << permuted.error();
}

INSTANTIATE_TEST_SUITE_P(All, MisfitTest, ::testing::ValuesIn(misfits()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace fusedmoe::causes_test
