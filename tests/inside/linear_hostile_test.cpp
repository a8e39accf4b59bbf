// Quantized linear layers of hostile files: each fault is an error that names it.
#include <gtest/gtest.h>

#include <limits>

#include "fusedmoe/runtime.h"
#include "linear_parts.h"

namespace fusedmoe::linear_hostile_test {

using testing::kCt;
using testing::kExperts;
using testing::Parts;

struct Hostile {
  const char* name;
  const char* scheme;
  CheckpointLayout layout;
  std::function<void(Parts&)> change;
  const char* fault;
};

void erase(Parts& parts, const std::string& name) {
  parts.tensors.erase(kExperts + name);
}

template <typename T>
void set(Parts& parts, const std::string& name, std::int64_t index, T value) {
  parts.copy(kExperts + name).as<T>()[index] = value;
}

std::vector<Hostile> hostile() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  return {
      {"missing_scale", "fp8_block", CheckpointLayout::kFp8,
       [](Parts& p) { erase(p, "3.up_proj.weight_scale_inv"); },
       "experts.3.up_proj.weight_scale_inv: missing, must be [1, 2]"},
      {"missing_input_scales", "fp8_tensor_static", CheckpointLayout::kFp8,
       [](Parts& p) {
         for (const char* expert : {"0", "1", "2", "3"}) {
           erase(p, std::string(expert) + ".down_proj.activation_scale");
         }
       },
       "experts.{0-3}.down_proj.activation_scale: missing, and no other expert"},
      {"missing_zero_points", "int4_g32_zp", kCt,
       [](Parts& p) { erase(p, "0.up_proj.weight_zero_point"); },
       "experts.0.up_proj.weight_zero_point: missing, must be [12, 5]"},
      {"wrong_shape", "nvfp4", CheckpointLayout::kModelOpt,
       [](Parts& p) {
         p.tensors[kExperts + "2.down_proj.weight_scale"] = Tensor::zeros({160, 7}, DType::kE4M3);
       },
       "experts.2.down_proj.weight_scale: shape [160, 7], must be [160, 6]"},
      {"wrong_dtype", "nvfp4", CheckpointLayout::kModelOpt,
       [](Parts& p) {
         p.tensors[kExperts + "2.down_proj.weight_scale"] = Tensor::zeros({160, 6}, DType::kBF16);
       },
       "experts.2.down_proj.weight_scale: dtype bf16, must be e4m3"},
      {"nan_scale", "fp8_channel_token", kCt,
       [=](Parts& p) { set(p, "2.down_proj.weight_scale", 7, nan); },
       "layer 0: model.layers.0.mlp.experts.2.down_proj.weight_scale: was nan at row 7"},
      {"nan_e4m3_scale", "nvfp4", CheckpointLayout::kModelOpt,
       [](Parts& p) { set<std::uint8_t>(p, "1.up_proj.weight_scale", 9, 0x7f); },
       "layer 0: model.layers.0.mlp.experts.1.up_proj.weight_scale: was nan at row 0, block 9"},
      {"zero_global_scale", "nvfp4", kCt,
       [](Parts& p) { set(p, "1.up_proj.weight_global_scale", 0, 0.0F); },
       "experts.1.up_proj.weight_global_scale: contents 0, must be a number that has a finite"},
      {"nan_global_scale", "nvfp4", CheckpointLayout::kModelOpt,
       [=](Parts& p) { set(p, "1.up_proj.weight_scale_2", 0, nan); },
       "layer 0: model.layers.0.mlp.experts.1.up_proj.weight_scale_2: was nan at 0; must be"},
      {"permuted_columns", "int4_g32", CheckpointLayout::kGptq,
       [](Parts& p) { set(p, "1.up_proj.g_idx", 33, 0); },
       "experts.1.up_proj.g_idx: group index 0 at column 33, must be 1: columns permuted"},
      {"zero_points_of_symmetric", "int4_g32", CheckpointLayout::kGptq,
       [](Parts& p) { set(p, "1.up_proj.qzeros", 5, 0x77777767); },
       "experts.1.up_proj.qzeros: zero point 7, must be 8, as the config says symmetric"},
      {"other_matrix_shape", "int4_g32", kCt,
       [](Parts& p) { set<std::int64_t>(p, "1.up_proj.weight_shape", 0, 95); },
       "experts.1.up_proj.weight_shape: contents [95, 160], must be [96, 160]"},
      {"unclaimed", "int4_g32", kCt,
       [](Parts& p) {
         p.tensors[kExperts + "1.up_proj.weight_zero_point"] = Tensor::zeros({12, 5}, DType::kI32);
       },
       "weight_zero_point: unexpected"},
      {"config_without_quantization", "fp8_block", CheckpointLayout::kFp8,
       [](Parts& p) { p.config.erase("quantization_config"); }, "weight_scale_inv: unexpected"},
      {"config_of_another_method", "fp8_block", CheckpointLayout::kFp8,
       [](Parts& p) {
         p.quantization() = {{"quant_method", "fp8"}};
       },
       "weight_scale_inv: shape [1, 2], must be []"},
      {"config_of_gpt_oss", "fp8_block", CheckpointLayout::kFp8,
       [](Parts& p) {
         p.quantization() = {{"quant_method", "mxfp4"}};
       },
       "config.quantization_config says that the experts are mxfp4_w4a16 in the layout gpt-oss, "
       "but "
       "their tensors are fp8_block_w8a16 in the layout fp8"},
      {"activation_order", "int4_g32", CheckpointLayout::kGptq,
       [](Parts& p) { p.quantization()["desc_act"] = true; },
       "quantization_config.desc_act: was true; must be false"},
      {"awq_gemv", "int4_g32_zp", CheckpointLayout::kAwq,
       [](Parts& p) { p.quantization()["version"] = "gemv"; }, "version: was \"gemv\""},
      {"three_bits", "int4_g32", CheckpointLayout::kGptq,
       [](Parts& p) { p.quantization()["bits"] = 3; }, "bits: was 3; must be 4 or 8"},
      {"other_block", "fp8_block", CheckpointLayout::kFp8,
       [](Parts& p) {
         p.quantization()["weight_block_size"] = {64, 64};
       },
       "weight_block_size: was [64,64]; must be [128, 128]"},
      {"unknown_algorithm", "nvfp4", CheckpointLayout::kModelOpt,
       [](Parts& p) { p.quantization()["quant_algo"] = "INT3"; }, "quant_algo: was \"INT3\""},
      {"no_groups", "nvfp4", kCt, [](Parts& p) { p.quantization()["config_groups"] = {}; },
       "config_groups: was absent"},
      {"unknown_weights", "nvfp4", kCt,
       [](Parts& p) { p.quantization()["config_groups"]["group_0"]["weights"]["num_bits"] = 6; },
       "6 bits, float, tensor_group, group_size 16"},
  };
}

class HostileTest : public ::testing::TestWithParam<Hostile> {
 protected:
  void SetUp() override { set_num_threads(1); }
};

TEST_P(HostileTest, IsAClearError) {
  Parts parts(GetParam().scheme, GetParam().layout);
  EXPECT_EQ(parts.error(), "no error");
  GetParam().change(parts);
  EXPECT_NE(parts.error().find(GetParam().fault), std::string::npos) << parts.error();
}

INSTANTIATE_TEST_SUITE_P(All, HostileTest, ::testing::ValuesIn(hostile()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace fusedmoe::linear_hostile_test
