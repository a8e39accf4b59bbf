// Model families as descriptions: the table, a layer of each against transformers
// (tests/interop/interop.py --vectors), and configs that are another model than they say.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "error_text.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/quant.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "temporary_directory.h"

namespace fusedmoe::families_test {

using testing::error_text;
using testing::TemporaryDirectory;

std::vector<std::string> vector_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(FUSEDMOE_FAMILIES_DIR)) {
    names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::filesystem::path vector_path(const std::string& name) {
  return std::filesystem::path(FUSEDMOE_FAMILIES_DIR) / (name + ".safetensors");
}

class FamilyVectorTest : public ::testing::TestWithParam<std::string> {};

TEST_P(FamilyVectorTest, MatchesTransformers) {
  const SafetensorsFile file = SafetensorsFile::open(vector_path(GetParam()));
  const Tensor x = file.tensor("check.input"), wanted = file.tensor("check.output");
  const Checkpoint checkpoint = Checkpoint::open(vector_path(GetParam()));
  ASSERT_EQ(checkpoint.moe_layers().size(), 1u);
  for (const char* experts : {"reference", "cpu"}) {
    LayerOptions options;
    options.dtype = DType::kF32;
    options.require = experts;
    const Tensor actual =
        MoeLayer(checkpoint.load_layer(checkpoint.moe_layers().front()), options).forward(x);
    float largest = 0, difference = 0;
    for (std::int64_t i = 0; i < wanted.numel(); ++i) {
      const float value = wanted.as<const float>()[i];
      largest = std::max(largest, std::abs(value));
      difference = std::max(difference, std::abs(actual.as<const float>()[i] - value));
    }
    EXPECT_GT(largest, 0);
    // Both sum some hundred products in fp32, in another order.
    EXPECT_LE(difference, 2e-6F * largest) << experts;
  }
}

INSTANTIATE_TEST_SUITE_P(All, FamilyVectorTest, ::testing::ValuesIn(vector_names()),
                         [](const auto& info) { return info.param; });

TEST(FamilyTest, TableHasNoNameTwice) {
  std::vector<std::string> names;
  for (const Family& family : Family::all()) names.emplace_back(family.name());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
  EXPECT_GE(names.size(), 60u);
}

std::string config_of(const std::string& type, const std::string& more) {
  return R"({"model_type": ")" + type + R"(", "num_hidden_layers": 1, "hidden_size": 32,
    "moe_intermediate_size": 16, "intermediate_size": 16, "num_experts": 8,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16)" +
         more + "}";
}

TEST(FamilyTest, AnotherModelThanTheTypeSaysIsRefused) {
  const auto error = [](const std::string& type, const std::string& more) {
    return error_text([&] { parse_model_config(config_of(type, more)); });
  };
  EXPECT_NE(error("qwen2_moe", R"(, "architectures": ["Qwen3_5MoeForCausalLM"])")
                .find("of the family qwen3_5_moe, and config.model_type says qwen2_moe"),
            std::string::npos);
  EXPECT_NE(error("qwen2_moe", R"(, "linear_num_value_heads": 4)").find("linear_num_value_heads"),
            std::string::npos);
  EXPECT_NE(error("mixtral", R"(, "architectures": ["PhimoeForCausalLM"])").find("phimoe"),
            std::string::npos);
  EXPECT_NE(error("qwen2_moe", R"(, "routed_scaling_factor": 2.5)").find("routed_scaling_factor"),
            std::string::npos);
  for (const char* scores : {"score_function", "score_func"}) {
    const std::string key = std::string(", \"") + scores + "\": ";
    EXPECT_NE(error("qwen2_moe", key + "\"sigmoid\"").find(scores), std::string::npos);
    EXPECT_EQ(error("qwen2_moe", key + "\"softmax\"").find(scores), std::string::npos);
  }
  EXPECT_NE(error("zaya", "").find("models of the family zaya are not served: their router"),
            std::string::npos);
  EXPECT_EQ(name(parse_model_config(config_of("qwen2_moe", R"(, "n_group": 1)")).family),
            "qwen2_moe");
}

// A description from outside: the router of qwen2_moe under other names.
TEST(FamilyTest, DescriptionFromAFile) {
  const TemporaryDirectory directory;
  std::ofstream(directory / "mine.json")
      << R"({"name": "mine", "like": "qwen2_moe", "router": {"scaling": {"key": "gain"}}})";
  const Family mine = Family::named((directory / "mine.json").string());
  EXPECT_EQ(mine.name(), "mine");
  const ModelConfig model = parse_model_config(config_of("anything", R"(, "gain": 3)"), mine);
  EXPECT_FLOAT_EQ(model.router.routed_scaling_factor, 3);
  EXPECT_EQ(model.shared_intermediate, 16);

  const auto error = [](const char* json) {
    return error_text([&] { Family::parse(json, "x.json"); });
  };
  EXPECT_NE(error(R"({"name": "a", "like": "nobody"})").find("x.json: a.like"), std::string::npos);
  EXPECT_NE(error(R"({"name": "a", "like": "mixtral", "rooter": {}})").find("x.json: a.rooter"),
            std::string::npos);
  EXPECT_NE(error(R"({"name": "a", "like": "mixtral", "router": {"topk": "two"}})")
                .find("x.json: a.router.topk"),
            std::string::npos);
  EXPECT_NE(error(R"({"name": "a"})").find("a needs blocks"), std::string::npos);
  EXPECT_NE(error_text([] { Family::named("nobody"); }).find("fusedmoe families list"),
            std::string::npos);
}

std::string like_mixtral(const std::string& more) {
  return R"({"name": "a", "like": "mixtral", )" + more + "}";
}

std::string layout(const std::string& more) {
  return like_mixtral(R"("experts": {"layouts": [{)" + more + "}]}");
}

// Fields that nothing would read, contradictions, and numbers that no model has.
TEST(FamilyTest, DescriptionThatCannotBeHonouredIsRefused) {
  const std::string parted = R"("storage": "stacked", "gate": "g", "up": "u", "down": "d")";
  const std::string both = R"("storage": "stacked", "gate_up": "w", "down": "d")";
  const std::string rows = R"("storage": "rows", "gate": "g", "up": "u", "down": "d")";
  const std::vector<std::pair<std::string, std::string>> cases{
      {layout(parted + R"(, "gate_up_bias": "b", "down_bias": "c")"),
       "\"up_bias\" stands beside gate_bias"},
      {layout(both + R"(, "up_bias": "b")"), "\"up_bias\" stands beside gate_bias"},
      {layout(rows + R"(, "gate_up_bias": "b", "down_bias": "c")"),
       "biases are read beside stacked experts only"},
      {layout(both + R"(, "down_bias": "c")"), "gate_up_bias and down_bias are given together"},
      {layout(parted + R"(, "interleaved": true)"), "\"interleaved\" needs \"gate_up\""},
      {layout(rows + R"(, "interleaved": true)"), "\"interleaved\" needs \"gate_up\""},
      {layout(both + R"(, "down_scales": "s")"),
       "has gate_up_scales and down_scales, and no other"},
      {layout(both + R"(, "gate": "g")"), "gate cannot be used with gate_up"},
      {like_mixtral(R"("shared": {"names": {"gate": "g", "gate_up": "w", "down": "d"}})"),
       "gate cannot be used with gate_up"},
      {like_mixtral(R"("experts": {"count": 1000000000000000})"),
       "a.experts.count: was 1000000000"},
      {like_mixtral(R"("experts": {"width": {"key": "w", "values": {"big": -1}}})"),
       "a.experts.width: was -1"},
      {like_mixtral(R"("hidden": {"key": "h", "default": 0})"), "a.hidden: was 0"},
      {like_mixtral(R"("router": {"groups": 4})"), "a.router.groups needs kept_groups"},
      {R"({"name": "a", "like": "deepseek_v3", "router": {"has_correction_bias": false}})",
       "has_correction_bias cannot be used with"},
      {R"({"families": []})", "an empty list"},
  };
  for (const auto& [json, wanted] : cases) {
    const std::string error = error_text([&, json = json] { Family::parse(json, "x.json"); });
    EXPECT_NE(error.find(wanted), std::string::npos) << json << "\n" << error;
  }
  Family::parse(layout(both + R"(, "gate_up_bias": "b", "down_bias": "c", "interleaved": true)"),
                "x.json");
}

TEST(FamilyTest, ConstantsCount) {
  const auto parse = [](const char* json) {
    return parse_model_config(config_of("mine", R"(, "expert_size": "big")"),
                              Family::parse(json, "x.json").back());
  };
  const ModelConfig model = parse(
      R"({"name": "a", "like": "qwen2_moe", "router": {"groups": 4, "kept_groups": 1},
          "experts": {"count": 16, "width": {"key": "expert_size", "values": {"big": 48}}}})");
  EXPECT_EQ(model.router.num_experts, 16);
  EXPECT_EQ(model.router.num_expert_group, 4);
  EXPECT_EQ(model.router.topk_group, 1);
  EXPECT_EQ(model.intermediate, 48);
  // Each is in range, but not beside the other.
  const std::string error = error_text([&] {
    parse(
        R"({"name": "a", "like": "qwen2_moe", "router": {"topk": 9},
            "ignores": ["expert_size", "num_experts_per_tok"]})");
  });
  EXPECT_NE(error.find("9 by the family's description; must be an integer from 1 to 8"),
            std::string::npos)
      << error;
}

}  // namespace fusedmoe::families_test
