// Wrong calls end in a status with a text, and never in a crash.
#include <cstring>
#include <functional>
#include <random>
#include <string>

#include "capi_test.h"

namespace fusedmoe::testing::wrong_calls_test {

fusedmoe_error last_error() {
  auto error = sized<fusedmoe_error>();
  EXPECT_OK(fusedmoe_last_error_info(&error));
  return error;
}

TEST(CErrorTest, SaysWhatWasWrong) {
  TinyLayer tiny;
  tiny.experts.w13_bias = to_c(tiny.w2);
  auto* untouched = reinterpret_cast<fusedmoe_layer*>(&tiny);
  fusedmoe_layer* layer = untouched;
  EXPECT_EQ(fusedmoe_layer_create(&tiny.weights, &tiny.options, &layer), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(layer, untouched);
  EXPECT_EQ(last_error().fault, 2);  // shape
  EXPECT_NE(std::string(last_error().argument).find("w13_bias"), std::string::npos);
  EXPECT_STREQ(last_error().message, fusedmoe_last_error());
  EXPECT_STRNE(last_error().was, "");
  EXPECT_STRNE(last_error().must_be, "");
}

TEST(CErrorTest, EveryKindHasItsStatus) {
  fusedmoe_checkpoint* checkpoint = nullptr;
  EXPECT_EQ(fusedmoe_checkpoint_open("/nowhere", nullptr, &checkpoint), FUSEDMOE_IO);
  EXPECT_STREQ(last_error().argument, "/nowhere");
  EXPECT_EQ(fusedmoe_checkpoint_open(nullptr, nullptr, &checkpoint), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(last_error().fault, 7);  // null
  auto opening = sized<fusedmoe_checkpoint_options>();
  opening.family = "nothing";
  EXPECT_EQ(fusedmoe_checkpoint_open("/nowhere", &opening, &checkpoint), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fusedmoe_last_error()).find("nothing"), std::string::npos);

  TinyLayer tiny;
  tiny.options.require = "sm90";
  fusedmoe_layer* layer = nullptr;
  EXPECT_EQ(fusedmoe_layer_create(&tiny.weights, &tiny.options, &layer), FUSEDMOE_UNSUPPORTED);
  EXPECT_NE(last_error().reason, 0);
  tiny.options.require = "nonsense";
  EXPECT_EQ(fusedmoe_layer_create(&tiny.weights, &tiny.options, &layer), FUSEDMOE_INVALID_ARGUMENT);
}

TEST(CErrorTest, StructsOfOtherVersions) {
  TinyLayer tiny;
  tiny.options.struct_size = 0;
  fusedmoe_layer* layer = nullptr;
  EXPECT_EQ(fusedmoe_layer_create(&tiny.weights, &tiny.options, &layer), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_STREQ(last_error().argument, "options.struct_size");

  // Older: members behind its end are the defaults. Newer: refused only if it uses what is new.
  struct Newer {
    fusedmoe_layer_options options;
    std::int64_t unknown;
  } newer{tiny.options, 0};
  newer.options.struct_size = offsetof(fusedmoe_layer_options, require);
  newer.options.require = "nonsense";
  const fusedmoe_layer_options* options = &newer.options;
  ASSERT_OK(fusedmoe_layer_create(&tiny.weights, options, &layer));
  Handle<fusedmoe_layer> made(layer);
  newer.options.struct_size = sizeof newer;
  newer.options.require = nullptr;
  ASSERT_OK(fusedmoe_layer_create(&tiny.weights, options, &layer));
  made.reset(layer);
  newer.unknown = 1;
  EXPECT_EQ(fusedmoe_layer_create(&tiny.weights, options, &layer), FUSEDMOE_INVALID_ARGUMENT);

  auto info = sized<fusedmoe_layer_info>();
  info.struct_size = offsetof(fusedmoe_layer_info, topk);
  info.topk = -7;
  ASSERT_OK(fusedmoe_layer_get_info(made.get(), &info));
  EXPECT_EQ(info.num_experts, TinyLayer::kExperts);
  EXPECT_EQ(info.topk, -7);
}

/// Another value for one member of a tensor, which some calls accept: what they then read or write
/// lies within the room of roomy().
void spoil(fusedmoe_tensor& tensor, std::mt19937& random) {
  const auto pick = [&](auto... values) {
    const std::int64_t list[] = {static_cast<std::int64_t>(values)...};
    return list[random() % (sizeof...(values))];
  };
  const auto dim = random() % 6;
  switch (random() % 8) {
    case 0:
      tensor.data = nullptr;
      break;
    case 1:
      tensor.dtype = static_cast<std::int32_t>(pick(-1, 0, 1, 3, 4, 5, 8, 10, 13, 15, 16));
      break;
    case 2:
      tensor.device_type = static_cast<std::int32_t>(pick(-1, 1, 2, 7));
      break;
    case 3:
      tensor.device_index = static_cast<std::int32_t>(pick(-1, 1, 99));
      break;
    case 4:
      tensor.ndim = static_cast<std::int32_t>(pick(-1, 0, 1, 3, 4, 6, 7, 1 << 30));
      break;
    case 5:
      tensor.reserved = 1;
      break;
    case 6:
      tensor.shape[dim] = pick(-1, 0, 1, 31, 33, INT64_MAX, INT64_MIN, 1LL << 40);
      break;
    default:
      tensor.has_strides = 1;
      tensor.strides[dim] = pick(0, 2, 33, INT64_MAX, INT64_MIN, 1LL << 60);
  }
}

/// Every call with one to three members spoiled: a status, and a text where it is an error.
void expect_statuses(int runs, const std::vector<fusedmoe_tensor*>& tensors,
                     const std::function<fusedmoe_status()>& call) {
  std::mt19937 random(1);
  const std::vector<fusedmoe_tensor> right = [&] {
    std::vector<fusedmoe_tensor> result;
    result.reserve(tensors.size());
    for (const fusedmoe_tensor* tensor : tensors) result.push_back(*tensor);
    return result;
  }();
  int refused = 0;
  for (int run = 0; run < runs; ++run) {
    for (auto count = 1 + random() % 3; count > 0; --count) {
      spoil(*tensors[random() % tensors.size()], random);
    }
    const fusedmoe_status status = call();
    if (status != FUSEDMOE_OK) {
      ++refused;
      ASSERT_NE(status, FUSEDMOE_INTERNAL) << fusedmoe_last_error();
      ASSERT_STRNE(fusedmoe_last_error(), "");
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) *tensors[i] = right[i];
  }
  EXPECT_GT(refused, runs / 2);
  EXPECT_OK(call());
}

/// Zeros, with as much memory again behind them as strides of up to 33 reach.
Tensor roomy(Shape shape, DType dtype) {
  const Tensor memory = Tensor::zeros({shape.numel() + (1 << 16)}, dtype);
  return {TensorView(memory.data(), dtype, shape), memory.owner()};
}

TEST(CWrongCallsTest, Forward) {
  const TinyLayer tiny;
  const auto layer = tiny.create();
  const Tensor x = roomy({3, TinyLayer::kHidden}, DType::kF32);
  const Tensor output = roomy(x.shape(), DType::kF32);
  const Tensor ids = roomy({3, TinyLayer::kTopk}, DType::kI32);
  const Tensor weights = roomy({3, TinyLayer::kTopk}, DType::kF32);
  const Tensor logits = roomy({3, TinyLayer::kExperts}, DType::kF32);
  const Tensor load = roomy({TinyLayer::kExperts}, DType::kI32);
  const Tensor dropped = roomy({1}, DType::kI32);
  auto args = sized<fusedmoe_forward_args>();
  args.hidden_states = to_c(x);
  args.output = to_c(output);
  args.topk_ids = to_c(ids);
  args.topk_weights = to_c(weights);
  args.router_logits = to_c(logits);
  args.expert_load = to_c(load);
  args.dropped_rows = to_c(dropped);
  const Scratch scratch(layer.get(), 3, args);
  expect_statuses(4000,
                  {&args.hidden_states, &args.output, &args.topk_ids, &args.topk_weights,
                   &args.router_logits, &args.expert_load, &args.dropped_rows},
                  [&] { return fusedmoe_layer_forward(layer.get(), &args); });
  args.router_logits = {};
  args.expert_load = {};
  ASSERT_OK(fusedmoe_layer_forward(layer.get(), &args));
  expect_statuses(4000, {&args.hidden_states, &args.output, &args.topk_ids, &args.topk_weights},
                  [&] { return fusedmoe_layer_forward_routed(layer.get(), &args); });
  args.workspace_bytes -= 1;
  EXPECT_EQ(fusedmoe_layer_forward(layer.get(), &args), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(last_error().fault, 8);  // workspace
}

TEST(CWrongCallsTest, LayersAndRouters) {
  TinyLayer tiny;
  const Tensor w13 = roomy(tiny.w13.shape(), DType::kF32);
  const Tensor w2 = roomy(tiny.w2.shape(), DType::kF32);
  const Tensor gate = roomy(tiny.gate.shape(), DType::kF32);
  tiny.experts.w13 = to_c(w13);
  tiny.experts.w2 = to_c(w2);
  tiny.weights.router_weight = to_c(gate);
  expect_statuses(2000,
                  {&tiny.experts.w13, &tiny.experts.w2, &tiny.weights.router_weight,
                   &tiny.experts.w13_bias, &tiny.weights.expert_map},
                  [&] {
                    fusedmoe_layer* layer = nullptr;
                    const auto status = fusedmoe_layer_create(&tiny.weights, &tiny.options, &layer);
                    fusedmoe_layer_destroy(layer);
                    return status;
                  });
  const Tensor logits = roomy({3, TinyLayer::kExperts}, DType::kF32);
  const Tensor ids = roomy({3, TinyLayer::kTopk}, DType::kI32);
  const Tensor weights = roomy({3, TinyLayer::kTopk}, DType::kF32);
  fusedmoe_tensor c_logits = to_c(logits), c_ids = to_c(ids), c_weights = to_c(weights);
  expect_statuses(2000, {&c_logits, &c_ids, &c_weights}, [&] {
    return fusedmoe_route(&tiny.router, &c_logits, nullptr, &c_ids, &c_weights);
  });
}

TEST(CWrongCallsTest, FusedExperts) {
  TinyLayer tiny;
  const Tensor w13 = roomy(tiny.w13.shape(), DType::kF32);
  const Tensor w2 = roomy(tiny.w2.shape(), DType::kF32);
  tiny.experts.w13 = to_c(w13);
  tiny.experts.w2 = to_c(w2);
  const Tensor x = roomy({3, TinyLayer::kHidden}, DType::kF32);
  const Tensor output = roomy(x.shape(), DType::kF32);
  const Tensor ids = roomy({3, TinyLayer::kTopk}, DType::kI32);
  const Tensor weights = roomy({3, TinyLayer::kTopk}, DType::kF32);
  fusedmoe_pack_cache* made = nullptr;
  ASSERT_OK(fusedmoe_pack_cache_create(&made));
  const Handle<fusedmoe_pack_cache> cache(made);
  auto args = sized<fusedmoe_fused_experts_args>();
  args.hidden_states = to_c(x);
  args.weights = &tiny.experts;
  args.output = to_c(output);
  args.topk_ids = to_c(ids);
  args.topk_weights = to_c(weights);
  expect_statuses(2000,
                  {&args.hidden_states, &args.output, &args.topk_ids, &args.topk_weights,
                   &args.expert_map, &tiny.experts.w13, &tiny.experts.w2, &tiny.experts.w13_bias},
                  [&] { return fusedmoe_fused_experts(&args, cache.get()); });
}

TEST(CWrongCallsTest, NullEverywhere) {
  EXPECT_NE(fusedmoe_checkpoint_get_info(nullptr, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_checkpoint_get_scheme(nullptr, 0, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_layer_load(nullptr, 0, nullptr, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_layer_create(nullptr, nullptr, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_layer_get_info(nullptr, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_layer_workspace_bytes(nullptr, 1, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_layer_shared_bytes(nullptr, 1, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_layer_forward(nullptr, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_layer_forward_routed(nullptr, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_pack_cache_create(nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_pack_cache_clear(nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_fused_experts(nullptr, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_route(nullptr, nullptr, nullptr, nullptr, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_router_logits(nullptr, nullptr, nullptr, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_explain(nullptr, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_explain_checkpoint(nullptr, 0, 0, 0, 0, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_explain_layer(nullptr, 0, 0, 0, 0, 0, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_selection_get(nullptr, 0, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_selection_workspace_bytes(nullptr, 1, 0, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_matrix_get(nullptr, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_quantize_weights(nullptr, nullptr, nullptr, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_dequantize_weights(nullptr, nullptr, 0, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_quantize_activations(nullptr, nullptr, nullptr, nullptr, nullptr),
            FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_quantized_activations(nullptr, 0, 0, nullptr, nullptr), FUSEDMOE_OK);
  EXPECT_NE(fusedmoe_last_error_info(nullptr), FUSEDMOE_OK);
  EXPECT_EQ(fusedmoe_selection_size(nullptr), 0U);
  EXPECT_STREQ(fusedmoe_selection_table(nullptr), "");
  fusedmoe_checkpoint_destroy(nullptr);
  fusedmoe_layer_destroy(nullptr);
  fusedmoe_pack_cache_destroy(nullptr);
  fusedmoe_selection_destroy(nullptr);
  fusedmoe_matrix_destroy(nullptr);
}

}  // namespace fusedmoe::testing::wrong_calls_test
