// Layers from raw tensors, the experts alone, routers, quantizing: what C adds to the
// C++ interface, which has tests of its own.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "capi_test.h"
#include "testing/compare.h"

namespace {

std::atomic<std::int64_t> allocations{0};

}  // namespace

#if !defined(__SANITIZE_ADDRESS__)
// Counts what the C library allocates too: it has no operator new of its own.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
#endif

namespace fusedmoe::testing::layer_test {

constexpr std::int64_t kTokens = 5;

/// A forward of the tiny layer with every result.
struct Forward {
  Tensor x = TinyLayer::filled({kTokens, TinyLayer::kHidden}, 7);
  Tensor output = Tensor::zeros({kTokens, TinyLayer::kHidden}, DType::kF32);
  Tensor ids = Tensor::zeros({kTokens, TinyLayer::kTopk}, DType::kI32);
  Tensor weights = Tensor::zeros({kTokens, TinyLayer::kTopk}, DType::kF32);
  fusedmoe_forward_args args = sized<fusedmoe_forward_args>();
  Scratch scratch;

  explicit Forward(const fusedmoe_layer* layer) : scratch(layer, kTokens, args) {
    args.hidden_states = to_c(x);
    args.output = to_c(output);
    args.topk_ids = to_c(ids);
    args.topk_weights = to_c(weights);
  }
};

TEST(CLayerTest, ForwardRoutedLayerAndFusedExpertsAgree) {
  TinyLayer tiny;
  const auto layer = tiny.create();
  Forward forward(layer.get());
  ASSERT_OK(fusedmoe_layer_forward(layer.get(), &forward.args));

  tiny.weights.router_weight = {};  // a layer without a router, and the experts alone
  const auto experts = tiny.create();
  Forward routed(experts.get());
  EXPECT_EQ(fusedmoe_layer_forward(experts.get(), &routed.args), FUSEDMOE_INVALID_ARGUMENT);
  routed.args.topk_ids = to_c(forward.ids);
  routed.args.topk_weights = to_c(forward.weights);
  ASSERT_OK(fusedmoe_layer_forward_routed(experts.get(), &routed.args));
  EXPECT_TRUE(bitwise_equal(routed.output, forward.output));

  fusedmoe_pack_cache* made = nullptr;
  ASSERT_OK(fusedmoe_pack_cache_create(&made));
  const Handle<fusedmoe_pack_cache> cache(made);
  const Tensor output = Tensor::zeros(forward.output.shape(), DType::kF32);
  auto args = sized<fusedmoe_fused_experts_args>();
  args.hidden_states = to_c(forward.x);
  args.weights = &tiny.experts;
  args.topk_weights = to_c(forward.weights);
  args.topk_ids = to_c(forward.ids);
  args.output = to_c(output);
  for (int step = 0; step < 2; ++step) {
    ASSERT_OK(fusedmoe_fused_experts(&args, cache.get()));
    EXPECT_TRUE(bitwise_equal(output, forward.output));
  }
  ASSERT_OK(fusedmoe_pack_cache_clear(cache.get()));
}

TEST(CLayerTest, RouterAloneGivesTheLayersRouting) {
  TinyLayer tiny;
  const auto layer = tiny.create();
  Forward forward(layer.get());
  ASSERT_OK(fusedmoe_layer_forward(layer.get(), &forward.args));
  const Tensor logits = Tensor::zeros({kTokens, TinyLayer::kExperts}, DType::kF32);
  const Tensor ids = Tensor::zeros(forward.ids.shape(), DType::kI32);
  const Tensor weights = Tensor::zeros(forward.weights.shape(), DType::kF32);
  const fusedmoe_tensor c_logits = to_c(logits), c_ids = to_c(ids), c_weights = to_c(weights);
  ASSERT_OK(fusedmoe_router_logits(&tiny.weights.router_weight, nullptr,
                                   &forward.args.hidden_states, &c_logits));
  ASSERT_OK(fusedmoe_route(&tiny.router, &c_logits, nullptr, &c_ids, &c_weights));
  EXPECT_TRUE(bitwise_equal(ids, forward.ids));
  EXPECT_TRUE(bitwise_equal(weights, forward.weights));

  tiny.router.renormalize = 1;
  const double epsilon = 1e30;
  tiny.router.renormalize_epsilon = &epsilon;
  ASSERT_OK(fusedmoe_route(&tiny.router, &c_logits, nullptr, &c_ids, &c_weights));
  EXPECT_LE(*static_cast<const float*>(weights.data()), 1e-30F);
}

// The routing chooses the only zero expert, or the experts see nothing.
TEST(CLayerTest, ZeroExpertsAndProjections) {
  TinyLayer tiny;
  tiny.router.num_zero_experts = 1;
  tiny.weights.router_weight = {};
  const auto layer = tiny.create();
  Forward forward(layer.get());
  std::fill_n(forward.ids.as<std::int32_t>(), forward.ids.numel(), TinyLayer::kExperts);
  std::fill_n(forward.weights.as<float>(), forward.weights.numel(), 0.5F);
  ASSERT_OK(fusedmoe_layer_forward_routed(layer.get(), &forward.args));
  EXPECT_TRUE(bitwise_equal(forward.output, forward.x));
  auto counts = sized<fusedmoe_layer_info>();
  ASSERT_OK(fusedmoe_layer_get_info(layer.get(), &counts));
  EXPECT_EQ(counts.num_experts, TinyLayer::kExperts);
  EXPECT_EQ(counts.num_zero_experts, 1);
  // A program that was built when the struct ended earlier.
  counts.num_zero_experts = 7;
  counts.struct_size = offsetof(fusedmoe_layer_info, num_zero_experts);
  ASSERT_OK(fusedmoe_layer_get_info(layer.get(), &counts));
  EXPECT_EQ(counts.num_zero_experts, 7);

  constexpr std::int64_t kWide = 48;
  const Tensor down = Tensor::zeros({TinyLayer::kHidden, kWide}, DType::kF32);
  const Tensor up = Tensor::zeros({kWide, TinyLayer::kHidden}, DType::kF32);
  tiny.weights.latent_down = to_c(down);
  fusedmoe_layer* none = nullptr;
  EXPECT_EQ(fusedmoe_layer_create(&tiny.weights, &tiny.options, &none), FUSEDMOE_INVALID_ARGUMENT);
  tiny.weights.latent_up = to_c(up);
  const auto wide = tiny.create();
  auto info = sized<fusedmoe_layer_info>();
  ASSERT_OK(fusedmoe_layer_get_info(wide.get(), &info));
  EXPECT_EQ(info.hidden, kWide);
}

#if !defined(__SANITIZE_ADDRESS__)
TEST(CLayerTest, ForwardAllocatesNothing) {
  const TinyLayer tiny;
  const auto layer = tiny.create();
  Forward forward(layer.get());
  const std::int64_t before = allocations;
  ASSERT_OK(fusedmoe_layer_forward(layer.get(), &forward.args));
  ASSERT_OK(fusedmoe_layer_forward_routed(layer.get(), &forward.args));
  EXPECT_EQ(allocations, before);
}
#endif

TEST(CLayerTest, WorkRunsOnTheCallersThreads) {
  struct Calls {
    std::atomic<int> tasks{0};
  } calls;
  auto executor = sized<fusedmoe_executor>();
  executor.context = &calls;
  executor.concurrency = 3;
  executor.run = [](void* context, std::int32_t num_tasks, void (*task)(void*, std::int32_t),
                    void* data) {
    for (std::int32_t i = 0; i < num_tasks; ++i) task(data, i);
    static_cast<Calls*>(context)->tasks += num_tasks;
    return 0;
  };
  TinyLayer tiny;
  const auto expected = tiny.create();
  tiny.options.executor = &executor;
  const auto layer = tiny.create();
  Forward forward(layer.get()), plain(expected.get());
  ASSERT_OK(fusedmoe_layer_forward(layer.get(), &forward.args));
  ASSERT_OK(fusedmoe_layer_forward(expected.get(), &plain.args));
  EXPECT_GT(calls.tasks, 0);
  EXPECT_TRUE(bitwise_equal(forward.output, plain.output));
}

TEST(CLayerTest, InfoAndPinnedPlan) {
  TinyLayer tiny;
  const auto layer = tiny.create();
  auto info = sized<fusedmoe_layer_info>();
  ASSERT_OK(fusedmoe_layer_get_info(layer.get(), &info));
  EXPECT_EQ(info.num_local_experts, TinyLayer::kExperts);
  EXPECT_EQ(info.hidden, TinyLayer::kHidden);
  EXPECT_EQ(info.output_dtype, FUSEDMOE_F32);
  EXPECT_EQ(std::string(info.plan_line).rfind("cpu+no_ep f32 f32", 0), 0U);
  tiny.options.plan = info.plan;
  EXPECT_TRUE(tiny.create());
  tiny.options.plan = nullptr;
  tiny.options.require = "reference";
  const auto reference = tiny.create();
  ASSERT_OK(fusedmoe_layer_get_info(reference.get(), &info));
  EXPECT_EQ(std::string(info.plan_line).rfind("reference+no_ep", 0), 0U);
}

TEST(CQuantizeTest, WeightsComeBack) {
  const Tensor values = TinyLayer::filled({32, 64}, 5);
  const fusedmoe_tensor c_values = to_c(values);
  for (const char* scheme : {"mxfp4_w4a16", "nvfp4", "int4_g128", "fp8_block"}) {
    fusedmoe_matrix* made = nullptr;
    ASSERT_OK(fusedmoe_quantize_weights(&c_values, scheme, nullptr, &made));
    const Handle<fusedmoe_matrix> quantized(made);
    auto view = sized<fusedmoe_matrix_view>();
    ASSERT_OK(fusedmoe_matrix_get(made, &view));
    ASSERT_OK(fusedmoe_dequantize_weights(&view, scheme, 64, &made));
    const Handle<fusedmoe_matrix> decoded(made);
    ASSERT_OK(fusedmoe_matrix_get(made, &view));
    ASSERT_EQ(view.values.dtype, FUSEDMOE_F32);
    const TensorView back(view.values.data, DType::kF32, {32, 64});
    EXPECT_LE(compare(back, values).rms_relative, 0.15) << scheme;  // four bits
  }
}

TEST(CQuantizeTest, ActivationsGetTheShapesThatTheSchemeSays) {
  fusedmoe_tensor values{}, scales{};
  ASSERT_OK(fusedmoe_quantized_activations("fp8_block", kTokens, 256, &values, &scales));
  EXPECT_EQ(values.dtype, FUSEDMOE_E4M3);
  EXPECT_EQ(scales.shape[1], 2);
  std::vector<std::uint8_t> codes(kTokens * 256);
  std::vector<float> factors(kTokens * 2);
  values.data = codes.data();
  scales.data = factors.data();
  const Tensor x = TinyLayer::filled({kTokens, 256}, 1);
  const fusedmoe_tensor c_x = to_c(x);
  ASSERT_OK(fusedmoe_quantize_activations(&c_x, "fp8_block", nullptr, &values, &scales));
  EXPECT_GT(factors[0], 0);
  EXPECT_EQ(fusedmoe_quantized_activations("mxfp4_w4a16", 1, 32, &values, &scales),
            FUSEDMOE_INVALID_ARGUMENT);
}

}  // namespace fusedmoe::testing::layer_test
