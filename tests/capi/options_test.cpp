// Every member of the structs that describe a layer and a call is obeyed or refused.
#include <algorithm>
#include <string>

#include "../unit/golden.h"
#include "../unit/temporary_directory.h"
#include "fusedmoe_hooks.h"
#include "option_rows.h"
#include "testing/compare.h"

namespace fusedmoe::testing::options_test {

constexpr std::int64_t kTokens = 3;

/// A layer that one member makes another one, or nobody's.
struct Case : TinyLayer {
  fusedmoe_forward_args args = sized<fusedmoe_forward_args>();
  Tensor x = filled({kTokens, kHidden}, 7);
  Tensor output = Tensor::zeros({kTokens, kHidden}, DType::kF32);

  Case() {
    args.hidden_states = to_c(x);
    args.output = to_c(output);
  }
  fusedmoe_layer_info info(const Handle<fusedmoe_layer>& layer) const {
    auto result = sized<fusedmoe_layer_info>();
    EXPECT_OK(fusedmoe_layer_get_info(layer.get(), &result));
    return result;
  }
  fusedmoe_status forward(const Handle<fusedmoe_layer>& layer) {
    const Scratch scratch(layer.get(), x.size(0), args);
    return fusedmoe_layer_forward(layer.get(), &args);
  }
  /// Making the layer fails with a text that names `word`.
  void refused(const std::string& word) const {
    fusedmoe_layer* layer = nullptr;
    const fusedmoe_status status = fusedmoe_layer_create(&weights, &options, &layer);
    const Handle<fusedmoe_layer> made(layer);
    EXPECT_TRUE(status == FUSEDMOE_INVALID_ARGUMENT || status == FUSEDMOE_UNSUPPORTED) << status;
    EXPECT_NE(std::string(fusedmoe_last_error()).find(word), std::string::npos)
        << fusedmoe_last_error();
  }
  void forward_refused(const std::string& word) {
    EXPECT_EQ(forward(create()), FUSEDMOE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(fusedmoe_last_error()).find(word), std::string::npos)
        << fusedmoe_last_error();
  }
  std::string plan_line() const { return info(create()).plan_line; }
};

TEST(COptionsTest, OfALayerAreObeyedOrRefused) {
  using T = fusedmoe_layer_options;
#define LAYER(member, ...) ROW(Case, T, member, __VA_ARGS__)
// What only ranks that exchange rows can obey.
#define OF_RANKS(member, value) \
  LAYER(member, c.options.member = value; c.refused("cannot be used without a communicator");)
  test_all<Case>(
      {
        LAYER(device_type, c.options.device_type = 2; c.refused("options.device");),
            LAYER(device_index, c.options.device_index = 1; c.refused("options.device");),
            LAYER(dtype, c.options.dtype = FUSEDMOE_BF16;
                  EXPECT_EQ(c.info(c.create()).dtype, FUSEDMOE_BF16);),
            LAYER(output_dtype, c.options.dtype = FUSEDMOE_BF16;
                  c.options.output_dtype = FUSEDMOE_F32;
                  EXPECT_EQ(c.info(c.create()).output_dtype, FUSEDMOE_F32);),
            LAYER(require, c.options.require = "reference";
                  EXPECT_EQ(c.plan_line().find("reference+no_ep"), 0U);),
            LAYER(plan, c.options.require = "reference"; const auto other = c.create();
                  c.options.require = nullptr; c.options.plan = c.info(other).plan;
                  EXPECT_EQ(c.plan_line().find("reference+no_ep"), 0U);),
            LAYER(batch_invariant, const Tensor w13 = Tensor::zeros(c.w13.shape(), DType::kE4M3);
                  const Tensor w2 = Tensor::zeros(c.w2.shape(), DType::kE4M3);
                  Tensor ones = Tensor::empty({c.kExperts}, DType::kF32);
                  std::fill_n(ones.as<float>(), c.kExperts, 1.0F); c.experts.scheme = "fp8_tensor";
                  c.experts.w13 = to_c(w13); c.experts.w2 = to_c(w2);
                  c.experts.w13_scales = c.experts.w2_scales = to_c(ones); EXPECT_TRUE(c.create());
                  c.options.batch_invariant = 1; c.refused("one activation scale");),
            LAYER(inplace, c.args.output = c.args.hidden_states; c.forward_refused("output");
                  c.options.inplace = 1; EXPECT_OK(c.forward(c.create()));),
            LAYER(monolithic, c.weights.router_weight = {}; c.options.monolithic = 1;
                  c.refused("monolithic");),
            LAYER(num_threads, c.options.num_threads = 1;
                  EXPECT_NE(c.plan_line().find("threads=1"), std::string::npos);
                  c.options.num_threads = -1; c.refused("num_threads");),
            LAYER(tp_size, c.options.tp_size = 2; c.refused("intermediate");
                  c.weights.intermediate = c.kIntermediate;
                  EXPECT_EQ(c.info(c.create()).intermediate, c.kIntermediate / 2);
                  c.options.tp_size = 1 << 30; c.refused("size");),
            LAYER(dp_size, c.options.dp_size = 2; c.refused("dp_size");),
            LAYER(ep_size, c.options.ep_size = 2; c.refused("expert map");),
            LAYER(ep_rank, c.options.ep_rank = 1; c.refused("parallel.ep_rank");),
            LAYER(executor, auto executor = sized<fusedmoe_executor>(); executor.concurrency = 1;
                  c.options.executor = &executor; c.refused("executor.run");),
            LAYER(max_workspace_bytes, c.options.max_workspace_bytes = 1;
                  c.refused("max_workspace_bytes");),
            LAYER(experts_only, c.options.experts_only = 1; c.forward_refused("router");),
            LAYER(communicator, fusedmoe_communicator* one = nullptr;
                  ASSERT_OK(fusedmoe_communicator_create_threads(1, nullptr, &one));
                  const Handle<fusedmoe_communicator> owner(one); c.options.communicator = one;
                  EXPECT_OK(c.forward(c.create())); c.options.tp_size = 2;
                  c.weights.intermediate = c.kIntermediate; c.refused("communicator");),
            LAYER(placement, const std::string rest = R"("physical_to_logical": [3, 0, 1, 2],)";
                  const std::string json = "{\"num_experts\": 4, \"num_ranks\": 2, " + rest +
                                           "\"rank_of\": [0, 1, 1, 1]}";
                  c.options.placement = json.c_str(); c.refused("placement"); c.options.ep_size = 2;
                  c.options.ep_rank = 1; EXPECT_EQ(c.info(c.create()).num_local_experts, 3);),
            OF_RANKS(max_tokens_per_rank, 1), OF_RANKS(receive_capacity, 1),
            OF_RANKS(nearest_replica, 1), OF_RANKS(combine, 1),
            OF_RANKS(combine_dtype, FUSEDMOE_F32),
            LAYER(fixed_sizes, c.options.fixed_sizes = 1; c.refused("args.fixed_sizes");),
            LAYER(tp_rank, c.options.tp_rank = 1; c.refused("parallel.tp_rank");),
            LAYER(sequence_parallel, c.options.sequence_parallel = 1;
                  c.refused("sequence_parallel");),
            OF_RANKS(drop_rows, 1), OF_RANKS(dispatch_dtype, FUSEDMOE_F32),
            LAYER(packed_weights, const TemporaryDirectory folder;
                  const std::string path = (folder / "packed").string();
                  ASSERT_OK(fusedmoe_layer_save_packed(c.create().get(), path.c_str()));
                  c.options.packed_weights = path.c_str(); EXPECT_OK(c.forward(c.create()));
                  c.options.require = "reference"; c.refused("packed_for cpu");),
            LAYER(packed_read, c.options.packed_read = 1; c.refused("packed_weights");),
            LAYER(packed_unverified, c.options.packed_unverified = 1; c.refused("packed_weights");),
            LAYER(hooks, auto hooks = sized<fusedmoe_hooks>(); c.args.hooks = &hooks;
                  EXPECT_EQ(c.forward(c.create()), FUSEDMOE_UNSUPPORTED); c.options.hooks = 1;
                  EXPECT_OK(c.forward(c.create()));),
            OF_RANKS(lanes, 2)
      },
      sizeof(T));
}

TEST(COptionsTest, OfARouterAreObeyedOrRefused) {
  using T = fusedmoe_router_config;
// What one token's two weights become, or experts that differ from softmax's top-2.
#define ROUTER(member, ...) ROW(Case, T, member, __VA_ARGS__)
  test_all<Case>(
      {
        ROUTER(num_experts, c.router.num_experts = 5; c.refused("experts");),
            ROUTER(topk, c.router.topk = 1; EXPECT_EQ(c.info(c.create()).topk, 1);),
            ROUTER(scoring, c.router.scoring = 7; c.refused("router.scoring");),
            ROUTER(renormalize, Tensor sums = Tensor::zeros({kTokens, 2}, DType::kF32);
                   c.router.renormalize = 1; c.args.topk_weights = to_c(sums);
                   ASSERT_OK(c.forward(c.create()));
                   EXPECT_NEAR(sums.as<float>()[0] + sums.as<float>()[1], 1, 1e-6);),
            ROUTER(num_expert_group, c.router.num_expert_group = 3; c.refused("num_expert_group");),
            ROUTER(topk_group, c.router.topk_group = 1; c.refused("topk_group");),
            ROUTER(routed_scaling_factor, const float none = 0;
                   c.router.routed_scaling_factor = &none; ASSERT_OK(c.forward(c.create()));
                   EXPECT_TRUE(
                       bitwise_equal(c.output, Tensor::zeros(c.output.shape(), DType::kF32)));),
            ROUTER(apply_router_weight_on_input, c.router.apply_router_weight_on_input = 1;
                   c.refused("apply_router_weight_on_input");),
            ROUTER(renormalize_epsilon, const double wrong = -1;
                   c.router.renormalize_epsilon = &wrong; c.refused("renormalize_epsilon");),
            ROUTER(num_zero_experts, c.router.num_zero_experts = 1; c.refused("router_weight");),
            ROUTER(sparsemixer_jitter, const float wrong = -1; c.router.sparsemixer_jitter = &wrong;
                   c.refused("sparsemixer_jitter");)
      },
      sizeof(T));
}

TEST(COptionsTest, OfAForwardAreObeyedOrRefused) {
  using T = fusedmoe_forward_args;
#define CALL(member, ...) ROW(Case, T, member, __VA_ARGS__)
// A result of so many elements is filled.
#define RESULT(member, dtype, ...)                                            \
  CALL(member, const Tensor result = Tensor::zeros(Shape __VA_ARGS__, dtype); \
       std::fill_n(result.as<unsigned char>(), result.nbytes(), 0xff);        \
       c.args.member = to_c(result); ASSERT_OK(c.forward(c.create()));        \
       EXPECT_NE(result.as<unsigned char>()[result.nbytes() - 1], 0xff);)
  test_all<Case>(
      {
        CALL(hidden_states, c.args.hidden_states = {}; c.forward_refused("hidden_states");),
            CALL(output, c.args.output = {}; c.forward_refused("output");),
            RESULT(topk_ids, DType::kI32, {kTokens, 2}),
            RESULT(topk_weights, DType::kF32, {kTokens, 2}),
            RESULT(router_logits, DType::kF32, {kTokens, 4}), RESULT(expert_load, DType::kI32, {4}),
            CALL(workspace, const auto layer = c.create();
                 const Scratch scratch(layer.get(), kTokens, c.args); c.args.workspace = nullptr;
                 EXPECT_EQ(fusedmoe_layer_forward(layer.get(), &c.args),
                           FUSEDMOE_INVALID_ARGUMENT);),
            CALL(workspace_bytes, const auto layer = c.create();
                 const Scratch scratch(layer.get(), kTokens, c.args); c.args.workspace_bytes = 1;
                 EXPECT_EQ(fusedmoe_layer_forward(layer.get(), &c.args),
                           FUSEDMOE_INVALID_ARGUMENT);),
            CALL(stream, c.args.stream = &c; c.forward_refused("stream");),
            CALL(accumulate, ASSERT_OK(c.forward(c.create()));
                 const float once = *c.output.as<float>(); c.args.accumulate = 1;
                 ASSERT_OK(c.forward(c.create()));
                 EXPECT_FLOAT_EQ(*c.output.as<float>(), 2 * once);),
            CALL(max_tokens, c.args.max_tokens = kTokens - 1; c.forward_refused("hidden_states");
                 c.args.max_tokens = -1; c.forward_refused("max_tokens");),
            RESULT(dropped_rows, DType::kI32, {1}),
            CALL(fixed_sizes, ASSERT_OK(c.forward(c.create())); const std::vector<float> exact(
                     c.output.as<float>(), c.output.as<float>() + c.output.numel());
                 c.args.fixed_sizes = 1; EXPECT_OK(c.forward(c.create()));
                 EXPECT_TRUE(std::equal(exact.begin(), exact.end(), c.output.as<float>()));),
            CALL(expert_map, const Tensor map = Tensor::zeros({4}, DType::kI32);
                 c.args.expert_map = to_c(map); c.forward_refused("options.expert_map");),
            CALL(executor, auto executor = sized<fusedmoe_executor>(); executor.concurrency = 1;
                 c.args.executor = &executor; c.forward_refused("args.executor.run");),
            CALL(hooks, auto hooks = sized<fusedmoe_hooks>(); c.args.hooks = &hooks;
                 EXPECT_EQ(c.forward(c.create()), FUSEDMOE_UNSUPPORTED);),
            CALL(lane, c.args.lane = 1; c.forward_refused("options.lane");)
      },
      sizeof(T));
  // The caller's routing has no logits.
  Case c;
  const Tensor result = Tensor::zeros({kTokens, 4}, DType::kF32);
  c.args.router_logits = to_c(result);
  const auto layer = c.create();
  const Scratch scratch(layer.get(), kTokens, c.args);
  EXPECT_EQ(fusedmoe_layer_forward_routed(layer.get(), &c.args), FUSEDMOE_INVALID_ARGUMENT);
}

/// The layer of a checkpoint, or one rank's part of it, in f32.
Tensor part_of(const fusedmoe_checkpoint* checkpoint, const fusedmoe_layer_options& options,
               const Tensor& x) {
  fusedmoe_layer* made = nullptr;
  EXPECT_OK(fusedmoe_layer_load(checkpoint, 0, &options, &made));
  const Handle<fusedmoe_layer> layer(made);
  const Tensor output = Tensor::zeros(x.shape(), DType::kF32);
  if (!made) return output;
  auto args = sized<fusedmoe_forward_args>();
  args.hidden_states = to_c(x);
  args.output = to_c(output);
  const Scratch scratch(made, x.size(0), args);
  EXPECT_OK(fusedmoe_layer_forward(made, &args));
  return output;
}

// With biases, shared experts, scale groups; the caller adds what the ranks give.
TEST(COptionsTest, PartsOfRanksAddUpToTheLayer) {
  for (const char* name : {"mixtral", "gpt_oss_mxfp4", "deepseek_v3", "glm4_moe"}) {
    fusedmoe_checkpoint* opened = nullptr;
    ASSERT_OK(fusedmoe_checkpoint_open(golden_path(name).c_str(), nullptr, &opened));
    const Handle<fusedmoe_checkpoint> checkpoint(opened);
    const SafetensorsFile file = SafetensorsFile::open(golden_path(name));
    const Golden golden(file, 7);
    const Tensor x = Tensor::empty(golden.hidden_states.shape(), DType::kF32);
    convert(golden.hidden_states, x);
    auto options = sized<fusedmoe_layer_options>();
    options.dtype = FUSEDMOE_F32;
    const Tensor whole = part_of(opened, options, x);
    for (std::int32_t fusedmoe_layer_options::*const kind :
         {&fusedmoe_layer_options::tp_size, &fusedmoe_layer_options::ep_size}) {
      auto ranks = options;
      ranks.*kind = 2;
      Tensor sum = Tensor::zeros(x.shape(), DType::kF32);
      for (const int rank : {0, 1}) {
        (ranks.tp_size == 2 ? ranks.tp_rank : ranks.ep_rank) = rank;
        const Tensor part = part_of(opened, ranks, x);
        for (std::int64_t i = 0; i < sum.numel(); ++i) sum.as<float>()[i] += part.as<float>()[i];
      }
      // Sums in another order.
      EXPECT_LE(compare(sum, whole).max_norm_relative, 1e-5) << name;
    }
  }
}

TEST(COptionsTest, TensorsOfARankAreWholeOrItsSlice) {
  Case c;
  const Tensor bias = c.filled({Case::kExperts, Case::kHidden}, 9);
  c.experts.w2_bias = to_c(bias);
  ASSERT_OK(c.forward(c.create()));
  const Tensor whole = Tensor::zeros(c.output.shape(), DType::kF32);
  copy(c.output, whole, {});
  constexpr std::int64_t kHalf = Case::kIntermediate / 2;
  for (const bool cut : {false, true}) {
    std::fill_n(c.output.as<float>(), c.output.numel(), 0.0F);
    c.args.accumulate = 1;
    for (const std::int32_t rank : {0, 1}) {
      Case part;
      part.weights.intermediate = Case::kIntermediate;
      part.options.tp_size = 2;
      part.options.tp_rank = rank;
      part.experts.w2_bias = to_c(bias);
      Tensor w13 = Tensor::zeros({Case::kExperts, 2 * kHalf, Case::kHidden}, DType::kF32);
      if (cut) {
        for (std::int64_t e = 0; e < Case::kExperts; ++e) {
          for (const std::int64_t half : {0, 1}) {  // gate, up
            const std::int64_t from = half * Case::kIntermediate + rank * kHalf;
            copy(part.w13.select(0, e).slice(0, from, from + kHalf),
                 w13.select(0, e).slice(0, half * kHalf, (half + 1) * kHalf), {});
          }
        }
        part.experts.w13 = to_c(w13);
        part.experts.w2 = to_c(part.w2.slice(2, rank * kHalf, (rank + 1) * kHalf));
        // Neither the whole nor a slice of it.
        for (const std::int64_t whole_size : {kHalf - 1, 2 * kHalf - 2, 2 * kHalf + 2, 4 * kHalf}) {
          part.weights.intermediate = whole_size;
          part.refused("intermediate");
        }
        part.weights.intermediate = Case::kIntermediate;
      }
      ASSERT_OK(c.forward(part.create()));
    }
    EXPECT_LE(compare(c.output, whole).max_norm_relative, 1e-6);
  }
  // Who adds the outputs would add the shared experts twice.
  auto shared = sized<fusedmoe_expert_weights>();
  shared.w13 = to_c(c.w13.slice(0, 0, 1));
  shared.w2 = to_c(c.w2.slice(0, 0, 1));
  c.weights.shared_experts = &shared;
  c.weights.intermediate = Case::kIntermediate;
  c.options.tp_size = 2;
  EXPECT_TRUE(c.create());
  c.options.tp_rank = 1;
  c.refused("shared_experts are for rank 0 alone");
}

}  // namespace fusedmoe::testing::options_test
