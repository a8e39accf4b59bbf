// Every member of the structs that a call takes, and of those with the caller's functions, is
// obeyed or refused.
#include <atomic>
#include <string>

#include "../unit/golden.h"
#include "capi_ranks.h"
#include "option_rows.h"

namespace fusedmoe::testing::call_options_test {

/// A layer of other tensors, or nobody's.
struct Weights : TinyLayer {
  const Tensor ones = filled({kExperts}, 4);
  const Tensor square = filled({kHidden, kHidden}, 5);
  fusedmoe_expert_weights shared = sized<fusedmoe_expert_weights>();

  Weights() {
    shared.w13 = to_c(w13.slice(0, 0, 1));
    shared.w2 = to_c(w2.slice(0, 0, 1));
  }
  void refused(const std::string& word) const {
    fusedmoe_layer* layer = nullptr;
    expect_error(fusedmoe_layer_create(&weights, &options, &layer), word);
    fusedmoe_layer_destroy(layer);
  }
  bool differs() const { return !bitwise_equal(forward_alone(*this), forward_alone(TinyLayer())); }
};

TEST(CCallOptionsTest, OfTheWeightsOfALayerAreObeyedOrRefused) {
  using T = fusedmoe_layer_weights;
#define WEIGHTS(member, ...) ROW(Weights, T, member, __VA_ARGS__)
  test_all<Weights>(
      {
        WEIGHTS(router, c.weights.router = nullptr; c.refused("weights.router");),
            WEIGHTS(router_weight,
                    c.weights.router_weight = to_c(c.w13.select(0, 0).slice(0, 0, 4));
                    EXPECT_TRUE(c.differs());),
            WEIGHTS(router_bias, c.weights.router_bias = to_c(c.ones); EXPECT_TRUE(c.differs());),
            WEIGHTS(score_correction_bias, c.weights.score_correction_bias = to_c(c.ones);
                    EXPECT_TRUE(c.differs());),
            WEIGHTS(experts, c.weights.experts = nullptr; c.refused("weights.experts");),
            WEIGHTS(expert_map, c.weights.expert_map = to_c(c.ones); c.refused("expert_map");),
            WEIGHTS(shared_experts, c.weights.shared_experts = &c.shared;
                    EXPECT_TRUE(c.differs());),
            WEIGHTS(shared_gate, c.weights.shared_gate = to_c(c.gate.slice(0, 0, 1));
                    c.refused("weights.shared_gate"); c.weights.shared_experts = &c.shared;
                    const Tensor gated = forward_alone(c); c.weights.shared_gate = {};
                    EXPECT_FALSE(bitwise_equal(gated, forward_alone(c)));),
            WEIGHTS(latent_down, c.weights.latent_down = to_c(c.square); c.refused("latent");),
            WEIGHTS(latent_up, c.weights.latent_up = to_c(c.square); c.refused("latent");
                    c.weights.latent_down = to_c(c.square); EXPECT_TRUE(c.differs());),
            WEIGHTS(intermediate, c.weights.intermediate = c.kIntermediate + 1;
                    c.refused("intermediate");)
      },
      sizeof(T));
}

/// A call of the experts alone.
struct Call {
  const TinyLayer tiny{};
  Tensor x = TinyLayer::filled({kTokens, TinyLayer::kHidden}, 7);
  Tensor ids = Tensor::zeros({kTokens, 2}, DType::kI32);
  Tensor weights = TinyLayer::filled({kTokens, 2}, 8);
  Tensor output = Tensor::zeros(x.shape(), DType::kF32);
  fusedmoe_fused_experts_args args = sized<fusedmoe_fused_experts_args>();

  Call() {
    for (std::int64_t t = 0; t < kTokens; ++t) ids.as<std::int32_t>()[2 * t] = 1;
    args.hidden_states = to_c(x);
    args.weights = &tiny.experts;
    args.topk_weights = to_c(weights);
    args.topk_ids = to_c(ids);
    args.output = to_c(output);
  }
  fusedmoe_status run() const {
    fusedmoe_pack_cache* made = nullptr;
    EXPECT_OK(fusedmoe_pack_cache_create(&made));
    const Handle<fusedmoe_pack_cache> cache(made);
    return fusedmoe_fused_experts(&args, made);
  }
  void refused(const std::string& word) const { expect_error(run(), word); }
};

TEST(CCallOptionsTest, OfFusedExpertsAreObeyedOrRefused) {
  using T = fusedmoe_fused_experts_args;
#define CALL(member, ...) ROW(Call, T, member, __VA_ARGS__)
#define TENSOR(member) CALL(member, c.args.member = {}; c.refused(#member);)
  test_all<Call>(
      {
        TENSOR(hidden_states), CALL(weights, c.args.weights = nullptr; c.refused("weights");),
            TENSOR(topk_weights), TENSOR(topk_ids), TENSOR(output),
            CALL(expert_map, c.args.expert_map = to_c(c.ids); c.refused("expert_map");),
            CALL(global_num_experts, c.args.global_num_experts = 9; c.refused("expert map");
                 c.args.global_num_experts = -1; c.refused("global_num_experts");),
            CALL(apply_router_weight_on_input, c.args.apply_router_weight_on_input = 1;
                 c.refused("router weight on input");),
            CALL(require, c.args.require = "nobody"; c.refused("nobody");
                 c.args.require = "reference"; EXPECT_OK(c.run());),
            CALL(stream, c.args.stream = &c; c.refused("stream");),
            CALL(executor, auto executor = sized<fusedmoe_executor>(); executor.concurrency = 1;
                 c.args.executor = &executor; c.refused("args.executor.run");)
      },
      sizeof(T));
#undef CALL
}

/// The caller's threads, or what is none of that.
struct Threads : TinyLayer {
  std::atomic<int> tasks{0};
  fusedmoe_executor executor = sized<fusedmoe_executor>();

  Threads() {
    executor.context = this;
    executor.concurrency = 3;
    executor.run = [](void* context, std::int32_t num_tasks, void (*task)(void*, std::int32_t),
                      void* data) {
      for (std::int32_t i = 0; i < num_tasks; ++i) task(data, i);
      static_cast<Threads*>(context)->tasks += num_tasks;
      return 0;
    };
    options.executor = &executor;
  }
  void refused(const std::string& word) const {
    fusedmoe_layer* layer = nullptr;
    expect_error(fusedmoe_layer_create(&weights, &options, &layer), word);
    fusedmoe_layer_destroy(layer);
  }
};

TEST(CCallOptionsTest, OfAnExecutorAreObeyedOrRefused) {
  using T = fusedmoe_executor;
#define THREADS(member, ...) ROW(Threads, T, member, __VA_ARGS__)
  test_all<Threads>(
      {
        THREADS(context, forward_alone(c); EXPECT_GT(c.tasks, 0);),
            THREADS(concurrency, c.executor.concurrency = 0; c.refused("executor.concurrency");),
            THREADS(run, c.executor.run = nullptr; c.refused("executor.run");)
      },
      sizeof(T));
}

/// A collective of one rank.
struct Collective {
  int calls = 0;
  fusedmoe_gather gather = sized<fusedmoe_gather>();

  Collective() {
    gather.context = this;
    gather.run = [](void* context, const char* text, std::size_t bytes,
                    void (*give)(void*, std::int32_t, const char*, std::size_t),
                    void* data) -> std::int32_t {
      give(data, 0, text, bytes);
      ++static_cast<Collective*>(context)->calls;
      return 0;
    };
  }
  fusedmoe_status run() const {
    fusedmoe_communicator* made = nullptr;
    const fusedmoe_status status = fusedmoe_communicator_create(0, 1, &gather, nullptr, &made);
    fusedmoe_communicator_destroy(made);
    return status;
  }
};

TEST(CCallOptionsTest, OfAGatherAreObeyedOrRefused) {
  using T = fusedmoe_gather;
#define GATHER(member, ...) ROW(Collective, T, member, __VA_ARGS__)
  test_all<Collective>(
      {
        GATHER(context, EXPECT_OK(c.run()); EXPECT_GT(c.calls, 0);),
            GATHER(run, c.gather.run = nullptr; expect_error(c.run(), "gather.run");)
      },
      sizeof(T));
}

struct Opening {
  fusedmoe_checkpoint_options options = sized<fusedmoe_checkpoint_options>();

  fusedmoe_status open() const {
    fusedmoe_checkpoint* made = nullptr;
    const auto status = fusedmoe_checkpoint_open(golden_path("mixtral").c_str(), &options, &made);
    fusedmoe_checkpoint_destroy(made);
    return status;
  }
};

TEST(CCallOptionsTest, OfACheckpointAreObeyedOrRefused) {
  using T = fusedmoe_checkpoint_options;
#define OPENING(member, ...) ROW(Opening, T, member, __VA_ARGS__)
  test_all<Opening>(
      {
        // That it reads files which change later is seen by the tests of files.
        OPENING(read_files, c.options.read_files = 1; EXPECT_OK(c.open());),
            OPENING(family, c.options.family = "nobody"; expect_error(c.open(), "nobody");)
      },
      sizeof(T));
}

/// A matrix of this format without one of its tensors.
struct Matrix {
  Handle<fusedmoe_matrix> made{};
  fusedmoe_matrix_view view = sized<fusedmoe_matrix_view>();

  void quantize(const char* scheme) {
    const Tensor values = TinyLayer::filled({32, 64}, 5);
    const fusedmoe_tensor c_values = to_c(values);
    fusedmoe_matrix* matrix = nullptr;
    ASSERT_OK(fusedmoe_quantize_weights(&c_values, scheme, nullptr, &matrix));
    made.reset(matrix);
    ASSERT_OK(fusedmoe_matrix_get(matrix, &view));
  }
  void refused(const char* scheme, const std::string& word) const {
    fusedmoe_matrix* result = nullptr;
    expect_error(fusedmoe_dequantize_weights(&view, scheme, 64, &result), word);
    fusedmoe_matrix_destroy(result);
  }
};

TEST(CCallOptionsTest, OfAMatrixAreObeyedOrRefused) {
  using T = fusedmoe_matrix_view;
#define PART(member, scheme, word) \
  ROW(Matrix, T, member, c.quantize(scheme); c.view.member = {}; c.refused(scheme, word);)
  test_all<Matrix>({PART(values, "nvfp4", "values"), PART(scales, "nvfp4", "scales"),
                    PART(zero_points, "int4_g32_zp", "zero_points"),
                    PART(global_scale, "nvfp4", "global_scale")},
                   sizeof(T));
}

}  // namespace fusedmoe::testing::call_options_test
