// The golden vectors through C, and layers of C++ and C bit for bit.
#include "../unit/golden.h"

#include "capi_test.h"
#include "testing/compare.h"

namespace fusedmoe::testing::golden_test {

class CGoldenTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Transformers, CGoldenTest, ::testing::ValuesIn(golden_names()),
                         [](const auto& info) { return info.param; });

Handle<fusedmoe_layer> load_golden(const std::string& name, std::int32_t dtype,
                                   std::int32_t experts_only = 0) {
  fusedmoe_checkpoint* opened = nullptr;
  EXPECT_OK(fusedmoe_checkpoint_open(golden_path(name).c_str(), nullptr, &opened));
  const Handle<fusedmoe_checkpoint> checkpoint(opened);
  auto info = sized<fusedmoe_checkpoint_info>();
  EXPECT_OK(fusedmoe_checkpoint_get_info(opened, &info));
  EXPECT_EQ(info.num_moe_layers, 1U);
  const char* scheme = nullptr;
  EXPECT_OK(fusedmoe_checkpoint_get_scheme(opened, info.moe_layers[0], &scheme));
  EXPECT_STREQ(scheme, info.scheme);
  EXPECT_NE(fusedmoe_checkpoint_get_scheme(opened, info.moe_layers[0] + 1, &scheme), FUSEDMOE_OK);
  auto options = sized<fusedmoe_layer_options>();
  options.dtype = dtype;
  options.experts_only = experts_only;
  fusedmoe_layer* layer = nullptr;
  EXPECT_OK(fusedmoe_layer_load(opened, info.moe_layers[0], &options, &layer));
  return Handle<fusedmoe_layer>(layer);
}

TEST_P(CGoldenTest, TheCpuAgreesWithTransformersAndWithCpp) {
  const Handle<fusedmoe_layer> layer = load_golden(GetParam(), FUSEDMOE_BF16);
  const MoeLayer same = make_golden_layer(GetParam(), {});
  const SafetensorsFile file = SafetensorsFile::open(golden_path(GetParam()));
  for (const std::int64_t num_tokens : kGoldenTokens) {
    const Golden golden(file, num_tokens);
    const LayerResult expected = forward_golden(same, golden.hidden_states, DType::kBF16);
    const Tensor x = Tensor::empty(golden.hidden_states.shape(), DType::kBF16);
    convert(golden.hidden_states, x);
    const LayerResult result{Tensor::empty(x.shape(), DType::kBF16),
                             Tensor::empty(golden.router_logits.shape(), DType::kF32),
                             Tensor::empty(golden.topk_ids.shape(), DType::kI32),
                             Tensor::empty(golden.topk_ids.shape(), DType::kF32)};
    auto args = sized<fusedmoe_forward_args>();
    args.hidden_states = to_c(x);
    args.output = to_c(result.output);
    args.router_logits = to_c(result.router_logits);
    args.topk_ids = to_c(result.topk_ids);
    args.topk_weights = to_c(result.topk_weights);
    const Scratch scratch(layer.get(), num_tokens, args);
    ASSERT_OK(fusedmoe_layer_forward(layer.get(), &args));
    EXPECT_TRUE(bitwise_equal(result.output, expected.output));
    EXPECT_LE(compare(result.output, golden.output).max_norm_relative, 1e-2);  // as in C++
    expect_same_routing(result, golden, 1e-6);

    // With that routing given, the same bits again.
    const Tensor again = Tensor::empty(x.shape(), DType::kBF16);
    args.output = to_c(again);
    args.router_logits = {};
    ASSERT_OK(fusedmoe_layer_forward_routed(layer.get(), &args));
    EXPECT_TRUE(bitwise_equal(again, result.output));
  }
}

TEST(CExpertsTest, ExpertsWithoutRouterAndSharedExperts) {
  const auto layer = load_golden("deepseek_v3", FUSEDMOE_F32, 1);
  auto info = sized<fusedmoe_layer_info>();
  ASSERT_OK(fusedmoe_layer_get_info(layer.get(), &info));
  const Tensor x = Tensor::zeros({1, info.hidden}, DType::kF32);
  const Tensor output = Tensor::zeros(x.shape(), DType::kF32);
  const Tensor ids = Tensor::zeros({1, info.topk}, DType::kI32);
  const Tensor weights = Tensor::zeros({1, info.topk}, DType::kF32);
  auto args = sized<fusedmoe_forward_args>();
  args.hidden_states = to_c(x);
  args.output = to_c(output);
  const Scratch scratch(layer.get(), 1, args);
  EXPECT_EQ(fusedmoe_layer_forward(layer.get(), &args), FUSEDMOE_INVALID_ARGUMENT);
  args.topk_ids = to_c(ids);
  args.topk_weights = to_c(weights);
  EXPECT_OK(fusedmoe_layer_forward_routed(layer.get(), &args));
}

}  // namespace fusedmoe::testing::golden_test
