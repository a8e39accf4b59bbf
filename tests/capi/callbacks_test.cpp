// Functions of the caller's: hooks, threads of one forward, cancellation, messages. And a cache of
// experts.
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "fusedmoe/quant.h"
#include "fusedmoe_hooks.h"
#include "option_rows.h"
#include "testing/compare.h"

namespace fusedmoe::testing::callbacks_test {

constexpr std::int64_t kTokens = 600;  // more than one thread's work

/// A forward of a layer with hooks.
struct Case : TinyLayer {
  Tensor x = filled({kTokens, kHidden}, 7);
  Tensor output = filled({kTokens, kHidden}, 8);
  fusedmoe_forward_args args = sized<fusedmoe_forward_args>();
  fusedmoe_hooks hooks = sized<fusedmoe_hooks>();
  fusedmoe_executor executor = sized<fusedmoe_executor>();
  std::vector<std::string> seen;
  std::int32_t result = 0;      // of the hooks
  int runs = 0, last_run = -1;  // of the executor, which gives up behind the last one

  Case() {
    options.hooks = 1;
    args.hidden_states = to_c(x);
    args.output = to_c(output);
    args.hooks = &hooks;
    hooks.context = executor.context = this;
    executor.concurrency = 3;
    executor.run = [](void* context, std::int32_t num_tasks, void (*task)(void*, std::int32_t),
                      void* data) -> std::int32_t {
      auto& c = *static_cast<Case*>(context);
      if (c.runs++ == c.last_run) return 7;
      for (std::int32_t i = 0; i < num_tasks; ++i) task(data, i);
      return 0;
    };
  }
  fusedmoe_status forward(const fusedmoe_layer* layer) {
    const Scratch scratch(layer, kTokens, args);
    return fusedmoe_layer_forward(layer, &args);
  }
  fusedmoe_status forward() { return forward(create().get()); }
  /// A hook that notes the width of the output, and adds to its first value.
  template <typename Hook>
  void set(Hook fusedmoe_hooks::*member) {
    hooks.*member = [](void* context, const fusedmoe_hook_args* args) -> std::int32_t {
      auto& c = *static_cast<Case*>(context);
      c.seen.push_back(std::to_string(args->input.shape[1]) + " " +
                       std::to_string(args->output.shape[1]));
      EXPECT_EQ(args->struct_size, sizeof(fusedmoe_hook_args));
      EXPECT_EQ(args->output.shape[0], kTokens * kTopk);
      EXPECT_EQ(args->expert_offsets.shape[0], kExperts + 1);
      EXPECT_EQ(args->permuted_to_slot.shape[0], kTokens * kTopk);
      EXPECT_EQ(args->topk, kTopk);
      EXPECT_TRUE(!args->stream && args->num_origins == 0);
      static_cast<float*>(args->output.data)[0] += 1;
      return c.result;
    };
  }
  /// The hook sees (rows, input) and (rows, output), changes the result, and can end the forward.
  template <typename Hook>
  void obeys(Hook fusedmoe_hooks::*member, const std::string& widths, const std::string& name) {
    ASSERT_OK(forward());
    const Tensor plain = Tensor::empty(output.shape(), DType::kF32);
    std::memcpy(plain.data(), output.data(), static_cast<std::size_t>(output.nbytes()));
    set(member);
    ASSERT_OK(forward());
    EXPECT_EQ(seen, std::vector{widths});
    EXPECT_FALSE(bitwise_equal(output, plain));
    std::memcpy(output.data(), plain.data(), static_cast<std::size_t>(output.nbytes()));
    result = -3;
    EXPECT_EQ(forward(), FUSEDMOE_CANCELLED);
    EXPECT_EQ(std::string(fusedmoe_last_error()), name + " returned -3, which gives the call up");
    EXPECT_TRUE(bitwise_equal(output, plain));
  }
};

TEST(CCallbacksTest, HooksAreCalledAndCanEndAForward) {
  using T = fusedmoe_hooks;
#define HOOK(member, ...) ROW(Case, T, member, __VA_ARGS__)
  test_all<Case>(
      {
        HOOK(context, c.set(&T::after_gemm2); ASSERT_OK(c.forward());
             EXPECT_EQ(c.seen.size(), 1U);),
            HOOK(after_gemm1, c.obeys(&T::after_gemm1, "32 32", "hooks.after_gemm1");),
            HOOK(after_activation,
                 c.obeys(&T::after_activation, "32 16", "hooks.after_activation");),
            HOOK(after_gemm2, c.obeys(&T::after_gemm2, "16 32", "hooks.after_gemm2");)
      },
      sizeof(T));
}

TEST(CCallbacksTest, AForwardsExecutorMayGiveItUp) {
  Case c;
  c.args.executor = &c.executor;
  c.args.hooks = nullptr;
  const auto layer = c.create();
  const Tensor before = Case::filled(c.output.shape(), 8);
  ASSERT_OK(c.forward(layer.get()));
  const int runs = c.runs;
  ASSERT_GT(runs, 1);
  const Tensor expected = Tensor::empty(before.shape(), DType::kF32);
  convert(c.output, expected);
  for (c.last_run = 0; c.last_run < runs; ++c.last_run) {
    convert(before, c.output);
    c.runs = 0;
    const bool last = c.last_run == runs - 1;  // writes the output
    EXPECT_EQ(c.forward(layer.get()), last ? FUSEDMOE_OK : FUSEDMOE_CANCELLED) << c.last_run;
    EXPECT_TRUE(bitwise_equal(c.output, last ? expected : before));
    if (last) continue;
    auto error = sized<fusedmoe_error>();
    ASSERT_OK(fusedmoe_last_error_info(&error));
    EXPECT_STREQ(error.message, "args.executor.run returned 7, which gives the call up");
    EXPECT_STREQ(error.argument, "args.executor.run");
  }
}

TEST(CCallbacksTest, CacheOfExperts) {
  TinyLayer tiny;
  const auto whole = tiny.create();
  std::array<std::int32_t, 4> map{0, 1, -1, -1};
  tiny.weights.expert_map = to_c(TensorView(map.data(), DType::kI32, {4}));
  const fusedmoe_expert_weights all = tiny.experts;
  const auto experts = [&](std::int64_t begin, std::int64_t end) {
    fusedmoe_expert_weights some = all;
    some.w13 = to_c(tiny.w13.slice(0, begin, end));
    some.w2 = to_c(tiny.w2.slice(0, begin, end));
    return some;
  };
  tiny.experts = experts(0, 2);
  const auto cache = tiny.create();
  const fusedmoe_expert_weights third = experts(2, 3);
  ASSERT_OK(fusedmoe_layer_repack(cache.get(), &third, 0));
  EXPECT_EQ(fusedmoe_layer_repack(cache.get(), &third, 2), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_layer_repack(cache.get(), nullptr, 0), FUSEDMOE_INVALID_ARGUMENT);

  const Tensor x = TinyLayer::filled({1, TinyLayer::kHidden}, 7);
  std::array<std::int32_t, 2> ids{2, 1};
  std::array<float, 2> weights{0.5F, 0.25F};
  std::array<std::int32_t, 4> load{};
  const auto forward = [&](const fusedmoe_layer* layer, bool mapped) {
    const Tensor output = Tensor::zeros(x.shape(), DType::kF32);
    auto args = sized<fusedmoe_forward_args>();
    const Scratch scratch(layer, 1, args);
    args.hidden_states = to_c(x);
    args.output = to_c(output);
    args.topk_ids = to_c(TensorView(ids.data(), DType::kI32, {1, 2}));
    args.topk_weights = to_c(TensorView(weights.data(), DType::kF32, {1, 2}));
    args.expert_load = to_c(TensorView(load.data(), DType::kI32, {4}));
    if (mapped) args.expert_map = tiny.weights.expert_map;
    EXPECT_OK(fusedmoe_layer_forward_routed(layer, &args));
    EXPECT_EQ(load, (std::array<std::int32_t, 4>{0, 1, 1, 0}));
    return output;
  };
  map = {-1, 1, 0, -1};  // the layer has a copy of the one before
  EXPECT_TRUE(bitwise_equal(forward(cache.get(), true), forward(whole.get(), false)));
}

TEST(CCallbacksTest, MessagesSayWhatWasChosen) {
  std::vector<std::string> messages;
  const auto note = [](void* context, std::int32_t level, const char* message) {
    EXPECT_EQ(level, FUSEDMOE_LOG_INFO);
    static_cast<std::vector<std::string>*>(context)->emplace_back(message);
  };
  ASSERT_OK(fusedmoe_set_log(note, &messages));
  const TinyLayer tiny;
  EXPECT_TRUE(tiny.create() && tiny.create());
  ASSERT_OK(fusedmoe_set_log(nullptr, nullptr));
  EXPECT_TRUE(tiny.create());
  ASSERT_EQ(messages.size(), 1U);
  EXPECT_EQ(messages.front().find("cpu+no_ep runs 4 experts, topk 2, hidden 32"), 0U);
}

}  // namespace fusedmoe::testing::callbacks_test
