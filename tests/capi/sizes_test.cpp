// Sizes that nothing can have are refused before anything is allocated for them.
#include <functional>
#include <limits>
#include <string>

#include "capi_test.h"

namespace fusedmoe::testing::sizes_test {

struct Call {
  const char* name;
  std::function<fusedmoe_status(std::int64_t)> call;
};

fusedmoe_moe_config small_config() {
  auto config = sized<fusedmoe_moe_config>();
  config.num_experts = 8;
  config.topk = 2;
  config.hidden = config.intermediate = 64;
  return config;
}

Handle<fusedmoe_selection> explained(const fusedmoe_moe_config& config) {
  fusedmoe_selection* selection = nullptr;
  EXPECT_OK(fusedmoe_explain(&config, &selection));
  return Handle<fusedmoe_selection>(selection);
}

TEST(CSizesTest, NegativeAndHugeOnesAreRefused) {
  const TinyLayer tiny;
  const auto layer = tiny.create();
  const Tensor x = TinyLayer::filled({2, TinyLayer::kHidden}, 1);
  const Tensor output = Tensor::zeros(x.shape(), DType::kF32);
  const Tensor ids = Tensor::zeros({2, TinyLayer::kTopk}, DType::kI32);
  const Tensor weights = Tensor::zeros({2, TinyLayer::kTopk}, DType::kF32);
  fusedmoe_pack_cache* cache = nullptr;
  ASSERT_OK(fusedmoe_pack_cache_create(&cache));
  const Handle<fusedmoe_pack_cache> owner(cache);
  const fusedmoe_moe_config config = small_config();
  const auto selection = explained(config);
  ASSERT_TRUE(selection);
  std::size_t bytes = 0;
  fusedmoe_tensor values{}, scales{};
  const Tensor values_f32 = TinyLayer::filled({32, 64}, 5);
  const fusedmoe_tensor matrix = to_c(values_f32);
  fusedmoe_matrix* made = nullptr;
  ASSERT_OK(fusedmoe_quantize_weights(&matrix, "mxfp4_w4a16", nullptr, &made));
  const Handle<fusedmoe_matrix> quantized(made);
  auto view = sized<fusedmoe_matrix_view>();
  ASSERT_OK(fusedmoe_matrix_get(made, &view));

  const auto with_layer = [&](auto set) {
    return [set](std::int64_t size) {
      TinyLayer other;
      set(other, size);
      fusedmoe_layer* nothing = nullptr;
      return fusedmoe_layer_create(&other.weights, &other.options, &nothing);
    };
  };
  const auto with_experts = [&](auto set) {
    return [&, set](std::int64_t size) {
      auto args = sized<fusedmoe_fused_experts_args>();
      fusedmoe_expert_weights experts = tiny.experts;
      args.hidden_states = to_c(x);
      args.weights = &experts;
      args.topk_ids = to_c(ids);
      args.topk_weights = to_c(weights);
      args.output = to_c(output);
      set(args, experts, size);
      return fusedmoe_fused_experts(&args, cache);
    };
  };
  const auto with_config = [&](std::int64_t fusedmoe_moe_config::*member) {
    return [&, member](std::int64_t size) {
      auto asked = config;
      asked.*member = size;
      asked.require = "cpu";
      fusedmoe_selection* found = nullptr;
      const fusedmoe_status status = fusedmoe_explain(&asked, &found);
      fusedmoe_selection_destroy(found);
      return status;
    };
  };
  const Call calls[] = {
      {"layer_workspace_bytes",
       [&](auto n) { return fusedmoe_layer_workspace_bytes(layer.get(), n, &bytes); }},
      {"layer_shared_bytes",
       [&](auto n) { return fusedmoe_layer_shared_bytes(layer.get(), n, &bytes); }},
      {"selection_workspace_bytes",
       [&](auto n) { return fusedmoe_selection_workspace_bytes(selection.get(), n, 1, &bytes); }},
      {"quantized_activations rows",
       [&](auto n) {
         return fusedmoe_quantized_activations("fp8_block", n, 128, &values, &scales);
       }},
      {"quantized_activations columns",
       [&](auto n) {
         return fusedmoe_quantized_activations("fp8_block", 128, n, &values, &scales);
       }},
      {"dequantize_weights",
       [&](auto n) { return fusedmoe_dequantize_weights(&view, "mxfp4_w4a16", n, &made); }},
      {"router.num_experts", with_layer([](auto& l, auto n) { l.router.num_experts = n; })},
      {"router.topk", with_layer([](auto& l, auto n) { l.router.topk = n; })},
      {"router.num_expert_group",
       with_layer([](auto& l, auto n) { l.router.num_expert_group = n; })},
      {"router.num_zero_experts",
       with_layer([](auto& l, auto n) { l.router.num_zero_experts = n; })},
      {"weights.intermediate", with_layer([](auto& l, auto n) { l.weights.intermediate = n; })},
      {"w13", with_layer([](auto& l, auto n) { l.experts.w13.shape[1] = n; })},
      {"fused hidden_states rows",
       with_experts([](auto& a, auto&, auto n) { a.hidden_states.shape[0] = n; })},
      {"fused hidden_states columns",
       with_experts([](auto& a, auto&, auto n) { a.hidden_states.shape[1] = n; })},
      {"fused topk", with_experts([](auto& a, auto&, auto n) {
         a.topk_ids.shape[1] = a.topk_weights.shape[1] = n;
         a.topk_ids.has_strides = a.topk_weights.has_strides = 0;
       })},
      {"fused rows", with_experts([](auto& a, auto&, auto n) {
         for (auto* each : {&a.hidden_states, &a.output, &a.topk_ids, &a.topk_weights}) {
           each->shape[0] = n;
         }
       })},
      {"fused w2", with_experts([](auto&, auto& w, auto n) { w.w2.shape[0] = n; })},
      {"global_num_experts",
       with_experts([](auto& a, auto&, auto n) { a.global_num_experts = n; })},
      {"config.num_experts", with_config(&fusedmoe_moe_config::num_experts)},
      {"config.num_local_experts", with_config(&fusedmoe_moe_config::num_local_experts)},
      {"config.topk", with_config(&fusedmoe_moe_config::topk)},
      {"config.hidden", with_config(&fusedmoe_moe_config::hidden)},
      {"config.intermediate", with_config(&fusedmoe_moe_config::intermediate)},
  };
  using Limits = std::numeric_limits<std::int64_t>;
  for (const Call& each : calls) {
    for (const std::int64_t size :
         {Limits::min(), std::int64_t{-1}, std::int64_t{1} << 40, Limits::max()}) {
      const fusedmoe_status status = each.call(size);
      EXPECT_TRUE(status == FUSEDMOE_INVALID_ARGUMENT || status == FUSEDMOE_UNSUPPORTED)
          << each.name << " " << size << ": status " << status << ", " << fusedmoe_last_error();
    }
  }
}

TEST(CSizesTest, OfRanksAndThreadsToo) {
  using Limits = std::numeric_limits<std::int32_t>;
  std::size_t bytes = 0;
  const auto selection = explained(small_config());
  ASSERT_TRUE(selection);
  for (const std::int32_t count : {Limits::min(), -1, Limits::max()}) {
    fusedmoe_communicator* none[1] = {};
    EXPECT_EQ(fusedmoe_communicator_create_threads(count, nullptr, none),
              FUSEDMOE_INVALID_ARGUMENT);
    EXPECT_EQ(fusedmoe_set_num_threads(count), FUSEDMOE_INVALID_ARGUMENT);
    EXPECT_EQ(fusedmoe_selection_workspace_bytes(selection.get(), 1, count, &bytes),
              FUSEDMOE_INVALID_ARGUMENT);
  }
}

}  // namespace fusedmoe::testing::sizes_test
