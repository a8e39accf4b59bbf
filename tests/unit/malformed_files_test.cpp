// Hostile files: each is an Error that names the file and the fault.
#include <filesystem>
#include <vector>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/safetensors.h"
#include "fusedmoe/tensor.h"
#include "gtest/gtest.h"
#include "safetensors_bytes.h"
#include "temporary_directory.h"

namespace fusedmoe::malformed_files_test {

using testing::safetensors_bytes;
using testing::TemporaryDirectory;
using testing::write_file;

struct Malformed {
  std::string name;
  std::string bytes;
  std::string fault;  ///< what the message must hold
};

std::string length_only(std::uint64_t length) {
  return safetensors_bytes("", 0, length);
}

// One tensor "a" with these fields.
std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets,
                   std::size_t data_bytes) {
  return safetensors_bytes(
      "{\"a\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}",
      data_bytes);
}

std::string two_tensors(const std::string& first, const std::string& second,
                        std::size_t data_bytes) {
  const auto entry = [](const char* name, const std::string& offsets) {
    return std::string("\"") + name + R"(":{"dtype":"U8","shape":[4],"data_offsets":)" + offsets +
           "}";
  };
  return safetensors_bytes("{" + entry("a", first) + "," + entry("b", second) + "}", data_bytes);
}

std::vector<Malformed> malformed_headers() {
  const std::string ok = R"("a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  return {
      {"empty", "", "0 bytes"},
      {"seven_bytes", std::string(7, '\0'), "7 bytes"},
      {"length_zero", length_only(0), "header length: was 0"},
      {"length_one", safetensors_bytes("{", 0), "header length: was 1"},
      {"length_past_the_end", safetensors_bytes("{}", 0, 1),
       "header length: was 3; must be at most 2"},
      {"length_absurd", length_only(100'000'001), "header length: was 100000001"},
      {"length_all_ones", length_only(~std::uint64_t{0}),
       "header length: was 18446744073709551615"},
      {"truncated_data", safetensors_bytes("{" + ok + "}", 3), "within the 3 bytes of data"},
      {"trailing_data", safetensors_bytes("{" + ok + "}", 5), "data: was 5 bytes; must be 4 bytes"},
      {"data_without_tensors", safetensors_bytes("{}", 1), "data: was 1 bytes; must be 0 bytes"},
      {"not_json", safetensors_bytes("{nonsense}", 0), "valid JSON"},
      {"unterminated", safetensors_bytes("{" + ok, 4), "valid JSON"},
      {"two_objects", safetensors_bytes("{" + ok + "}{}", 4), "valid JSON"},
      {"array_at_top", safetensors_bytes("[1, 2]", 0), "JSON that starts with {"},
      {"byte_order_mark", safetensors_bytes("\xef\xbb\xbf{}", 0), "JSON that starts with {"},
      {"invalid_utf8", safetensors_bytes("{\"\xff\":{}}", 0), "valid JSON"},
      {"nul_in_header", safetensors_bytes(std::string("{}\0", 3), 0), "valid JSON"},
      {"tensor_is_a_number", safetensors_bytes("{\"a\":1}", 0),
       "entry \"a\": was 1; must be an object"},
      {"tensor_is_null", safetensors_bytes("{\"a\":null}", 0), "entry \"a\": was null"},
      {"deep_nesting", safetensors_bytes("{\"a\":" + std::string(200'000, '['), 0),
       "entry \"a\": was an array"},
      {"deep_objects", safetensors_bytes(R"({"a":{"dtype":{"dtype":{}}}})", 0),
       "dtype: was an object"},
      {"nested_shape", tensor("\"U8\"", "[[4]]", "[0,4]", 4), "shape: was an array"},
      {"duplicate_tensor", safetensors_bytes("{" + ok + "," + ok + "}", 4),
       "tensor \"a\" is there twice"},
      {"duplicate_dtype",
       safetensors_bytes(R"({"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}})", 1),
       "dtype is there twice"},
      {"unknown_key",
       safetensors_bytes(R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":1}})", 1),
       "tensor \"a\" has the key \"x\", but"},
      {"missing_dtype", safetensors_bytes(R"({"a":{"shape":[4],"data_offsets":[0,4]}})", 4),
       "tensor \"a\" has no dtype"},
      {"missing_shape", safetensors_bytes(R"({"a":{"dtype":"U8","data_offsets":[0,4]}})", 4),
       "tensor \"a\" has no shape"},
      {"missing_offsets", safetensors_bytes(R"({"a":{"dtype":"U8","shape":[4]}})", 4),
       "tensor \"a\" has no data_offsets"},
      {"unknown_dtype", tensor("\"F128\"", "[4]", "[0,4]", 4),
       "dtype: was \"F128\"; must be one of F64"},
      {"dtype_is_a_number", tensor("7", "[4]", "[0,4]", 4), "dtype: was 7; must be a string"},
      {"shape_is_a_string", tensor("\"U8\"", "\"4\"", "[0,4]", 4), "shape: was \"4\""},
      {"shape_is_a_number", tensor("\"U8\"", "4", "[0,4]", 4), "shape: was 4"},
      {"shape_too_long", tensor("\"U8\"", "[1,1,1,1,1,1,4]", "[0,4]", 4), "more than 6 values"},
      {"negative_extent", tensor("\"U8\"", "[-4]", "[0,4]", 4), "shape: was -4"},
      {"fractional_extent", tensor("\"U8\"", "[4.0]", "[0,4]", 4), "shape: was 4.0"},
      {"extent_beyond_63_bits", tensor("\"U8\"", "[9223372036854775808]", "[0,4]", 4),
       "shape: was 9223372036854775808"},
      {"extent_beyond_64_bits", tensor("\"U8\"", "[99999999999999999999]", "[0,4]", 4),
       "shape: was 99999999999999999999"},
      {"boolean_extent", tensor("\"U8\"", "[true]", "[0,4]", 4), "shape: was true"},
      {"product_overflows", tensor("\"U8\"", "[4294967296,4294967296,4]", "[0,4]", 4),
       "at most 2^56 elements"},
      {"product_overflows_behind_zero",
       tensor("\"F64\"", "[0,4611686018427387904,4611686018427387904]", "[0,0]", 0),
       "at most 2^56 elements"},
      {"product_wraps_to_size", tensor("\"U8\"", "[6148914691236517206,3]", "[0,2]", 2),
       "at most 2^56 elements"},
      {"offsets_reversed", tensor("\"U8\"", "[4]", "[4,0]", 4),
       "data_offsets: was [4, 0]; must be in ascending order"},
      {"offsets_out_of_range", tensor("\"U8\"", "[4]", "[0,5]", 4), "within the 4 bytes"},
      {"offsets_huge", tensor("\"U8\"", "[4]", "[9223372036854775803,9223372036854775807]", 4),
       "within the 4 bytes"},
      {"offsets_negative", tensor("\"U8\"", "[4]", "[-1,3]", 4), "data_offsets: was -1"},
      {"offsets_single", tensor("\"U8\"", "[4]", "[0]", 4), "data_offsets: was 1 values"},
      {"offsets_three", tensor("\"U8\"", "[4]", "[0,4,4]", 4), "more than 2 values"},
      {"offsets_empty", tensor("\"U8\"", "[4]", "[]", 4), "data_offsets: was 0 values"},
      {"size_is_not_shape_times_dtype", tensor("\"F32\"", "[4]", "[0,4]", 4),
       "must be 16 bytes for [4] of f32"},
      {"odd_number_of_nibbles", tensor("\"F4\"", "[3]", "[0,2]", 2), "in whole bytes"},
      {"hole_at_the_start", tensor("\"U8\"", "[4]", "[1,5]", 5), "a hole was found"},
      {"hole_between", two_tensors("[0,4]", "[5,9]", 9), "tensor \"b\": data_offsets: was [5, 9]"},
      {"overlap", two_tensors("[0,4]", "[3,7]", 7), "an overlap was found"},
      {"same_bytes_twice", two_tensors("[0,4]", "[0,4]", 4), "an overlap was found"},
      {"metadata_number", safetensors_bytes(R"({"__metadata__":{"k":1}})", 0),
       "__metadata__.\"k\": was 1; must be a string"},
      {"metadata_object", safetensors_bytes(R"({"__metadata__":{"k":{}}})", 0),
       "__metadata__.\"k\": was an object"},
      {"metadata_string", safetensors_bytes(R"({"__metadata__":"x"})", 0),
       "entry \"__metadata__\": was \"x\""},
      {"metadata_twice", safetensors_bytes(R"({"__metadata__":{},"__metadata__":{}})", 0),
       "__metadata__ is there twice"},
      {"metadata_key_twice", safetensors_bytes(R"({"__metadata__":{"k":"a","k":"b"}})", 0),
       "__metadata__.\"k\" is there twice"},
      {"control_characters_in_names", safetensors_bytes("{\"a\\u001b[31m\":1}", 0),
       "entry \"a\\x1b[31m\""},
  };
}

class MalformedFileTest : public ::testing::TestWithParam<Malformed> {};

TEST_P(MalformedFileTest, IsAnErrorThatNamesFileAndFault) {
  const TemporaryDirectory directory;
  const std::filesystem::path path = directory / "hostile.safetensors";
  write_file(path, GetParam().bytes);
  try {
    SafetensorsFile::open(path);
    FAIL() << "was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(GetParam().fault), std::string::npos) << error.what();
    EXPECT_EQ(error.argument().find(path.string()), 0u) << error.what();
    EXPECT_LT(std::string(error.what()).size(), 1000u);
  }
}

INSTANTIATE_TEST_SUITE_P(All, MalformedFileTest, ::testing::ValuesIn(malformed_headers()),
                         [](const auto& info) { return info.param.name; });

TEST(MalformedFileTest, EveryTruncationIsAnError) {
  const std::string header = R"({"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}})";
  const std::string bytes = safetensors_bytes(header, 16);
  EXPECT_NO_THROW(SafetensorsFile::parse(bytes.data(), bytes.size(), "whole"));
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const std::vector<char> part(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_THROW(SafetensorsFile::parse(part.data(), part.size(), "part"), Error) << size;
  }
}

TEST(MalformedFileTest, NotAFile) {
  const TemporaryDirectory directory;
  EXPECT_THROW(SafetensorsFile::open(directory / "absent"), Error);
  EXPECT_THROW(SafetensorsFile::open(directory.path()), Error);
}

struct BadConfig {
  std::string name;
  std::string json;
  std::string fault;
};

std::string with(const std::string& type, const std::string& keys) {
  return R"({"model_type": ")" + type + "\", " + keys + "}";
}

std::vector<BadConfig> bad_configs() {
  const std::string sizes = R"("num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64)";
  const std::string experts = R"(, "num_experts": 8, "num_experts_per_tok": 2)";
  const std::string deepseek =
      R"("num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 64,
         "n_routed_experts": 8, "num_experts_per_tok": 4)";
  return {
      {"not_json", "{", "valid JSON"},
      {"array", "[]", "config: was array; must be a JSON object"},
      {"nul", std::string("{}\0", 3), "NUL byte"},
      {"deep", "{\"a\":" + std::string(100'000, '['), "nested"},
      {"no_model_type", "{}", "config.model_type: was absent; must be a family that is described"},
      {"unknown_model_type", with("bert", sizes), "config.model_type: was \"bert\""},
      {"model_type_is_a_number", R"({"model_type": 3})",
       "config.model_type: was 3; must be a string"},
      {"no_hidden_size", with("olmoe", R"("num_hidden_layers": 2)"),
       "config.hidden_size: was absent"},
      {"zero_hidden_size", with("olmoe", R"("num_hidden_layers": 2, "hidden_size": 0)"),
       "config.hidden_size: was 0; must be an integer from 1"},
      {"negative_hidden_size", with("olmoe", R"("num_hidden_layers": 2, "hidden_size": -5)"),
       "config.hidden_size: was -5"},
      {"fractional_hidden_size", with("olmoe", R"("num_hidden_layers": 2, "hidden_size": 64.5)"),
       "config.hidden_size: was 64.5"},
      {"huge_hidden_size",
       with("olmoe", R"("num_hidden_layers": 2, "hidden_size": 18446744073709551615)"),
       "config.hidden_size"},
      {"zero_experts", with("olmoe", sizes + R"(, "num_experts": 0)"), "config.num_experts: was 0"},
      {"topk_above_experts",
       with("olmoe", sizes + R"(, "num_experts": 8, "num_experts_per_tok": 9)"),
       "config.num_experts_per_tok: was 9; must be an integer from 1 to 8"},
      {"llama4_top_2", with("llama4_text", sizes + experts),
       "config.num_experts_per_tok: was 2; must be 1"},
      {"bad_activation", with("olmoe", sizes + experts + R"(, "hidden_act": "relu")"),
       "config.hidden_act: was \"relu\""},
      {"bad_dtype", with("olmoe", sizes + experts + R"(, "torch_dtype": "int8")"),
       "config.dtype: was \"int8\""},
      {"bad_norm", with("olmoe", sizes + experts + R"(, "norm_topk_prob": "yes")"),
       "config.norm_topk_prob"},
      {"bad_quantization",
       with("olmoe", sizes + experts + R"(, "quantization_config": {"quant_method": "hqq"})"),
       "config.quantization_config.quant_method: was \"hqq\""},
      {"groups_absent", with("deepseek_v3", deepseek), "config.n_group: was absent"},
      {"groups_do_not_divide", with("deepseek_v3", deepseek + R"(, "n_group": 3, "topk_group": 1)"),
       "config.n_group: was 3; must be a divisor of the 8 experts"},
      {"too_few_groups", with("deepseek_v3", deepseek + R"(, "n_group": 4, "topk_group": 1)"),
       "config.topk_group: was 1"},
      {"bad_method", with("deepseek_v2", deepseek + R"(, "topk_method": "best")"),
       "config.topk_method: was \"best\""},
      {"bad_scoring", with("deepseek_v3", deepseek + R"(, "scoring_func": "tanh")"),
       "config.scoring_func: was \"tanh\""},
      {"bad_limit",
       with("gpt_oss",
            sizes + R"(, "num_local_experts": 8, "num_experts_per_tok": 2, "swiglu_limit": -1)"),
       "config.swiglu_limit"},
      {"more_experts_than_routers_take",
       with("gpt_oss", sizes + R"(, "num_local_experts": 4097, "num_experts_per_tok": 2)"),
       "config.num_local_experts: was 4097"},
      {"text_config_is_a_list", R"({"model_type": "llama4", "text_config": []})",
       "config.text_config: was array"},
  };
}

class BadConfigTest : public ::testing::TestWithParam<BadConfig> {};

TEST_P(BadConfigTest, IsAnErrorThatNamesTheKey) {
  try {
    parse_model_config(GetParam().json);
    FAIL() << "was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(GetParam().fault), std::string::npos) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(All, BadConfigTest, ::testing::ValuesIn(bad_configs()),
                         [](const auto& info) { return info.param.name; });

TEST(ConfigTest, Fp8IsDescribed) {
  const ModelConfig model = parse_model_config(
      R"({"model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64,
          "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 4,
          "n_group": 4, "topk_group": 2, "quantization_config": {
            "quant_method": "fp8", "weight_block_size": [128, 128]}})");
  EXPECT_EQ(model.scheme.weights.value, DType::kE4M3);
  EXPECT_EQ(model.scheme.weights.group, (GroupShape{128, 128}));
  EXPECT_TRUE(model.has_correction_bias);
}

TEST(ConfigTest, DeepseekV2Methods) {
  const std::string keys =
      R"("num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 64,
         "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
         "n_shared_experts": null, "routed_scaling_factor": 16, "scoring_func": "softmax")";
  const ModelConfig greedy = parse_model_config(with("deepseek_v2", keys));
  EXPECT_EQ(greedy.router.num_expert_group, 0);
  EXPECT_EQ(greedy.shared_intermediate, 0);
  EXPECT_FLOAT_EQ(greedy.router.routed_scaling_factor, 16);
  const ModelConfig grouped =
      parse_model_config(with("deepseek_v2", keys + R"(, "topk_method": "group_limited_greedy")"));
  EXPECT_EQ(grouped.router.num_expert_group, 4);
  EXPECT_EQ(grouped.router.topk_group, 2);
  EXPECT_FALSE(grouped.has_correction_bias);
  EXPECT_EQ(grouped.router.scoring, ScoringFunc::kSoftmax);
}

}  // namespace fusedmoe::malformed_files_test
