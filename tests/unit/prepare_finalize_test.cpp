// prepare and finalize of "no_ep" and "batched", by themselves.
#include "fusedmoe/modular_kernel.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "prepare_call.h"
#include "testing/compare.h"

namespace fusedmoe::prepare_finalize_test {

using testing::bitwise_equal;
using testing::fill_nan;
using testing::make_f32;
using testing::make_floats;
using testing::make_ids;
using testing::make_sample;
using testing::to_vector;
using Call = testing::PrepareCall;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class DTypes : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Activations, DTypes,
                         ::testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST(NoEpTest, HiddenStatesPassThrough) {
  Call call{make_sample(DType::kBF16, {3, 5}), make_ids({3, 2}, {0, 1, 2, 3, -1, 0}),
            make_sample(DType::kF32, {3, 2})};
  EXPECT_EQ(no_ep().create({}, {})->sizes(call.problem(), {}).workspace_bytes, 0u);
  const ForwardArgs prepared = call.prepare(no_ep());
  EXPECT_EQ(prepared.hidden_states.data(), call.hidden_states.data());
  EXPECT_EQ(prepared.topk_ids.data(), call.topk_ids.data());
  EXPECT_EQ(prepared.topk_weights.data(), call.topk_weights.data());
  EXPECT_FALSE(prepared.hidden_scales.defined());
  EXPECT_FALSE(prepared.expert_num_tokens.defined());
}

TEST_P(DTypes, NoEpWeightsTheInputWithARoundedWeight) {
  const DType dtype = GetParam();
  Call call{make_sample(dtype, {3, 7}), make_ids({3, 1}, {0, 1, 2}),
            make_f32({3, 1}, {0.7310586f, 1.0f / 3, -2.1f})};
  call.preparation.apply_router_weight_on_input = true;
  const Tensor before = make_sample(dtype, {3, 7});
  const ForwardArgs prepared = call.prepare(no_ep());
  EXPECT_TRUE(bitwise_equal(call.hidden_states, before)) << "prepare must not touch its input";

  Tensor expected = Tensor::empty({3, 7}, dtype);
  for (std::int64_t i = 0; i < 21; ++i) {
    float rounded = 0;
    store_f32(&rounded, dtype, 0, load_f32(call.topk_weights.data(), DType::kF32, i / 7));
    const float weight = load_f32(&rounded, dtype, 0);
    store_f32(expected.data(), dtype, i, load_f32(before.data(), dtype, i) * weight);
  }
  EXPECT_TRUE(bitwise_equal(prepared.hidden_states, expected));
}

TEST(NoEpTest, WeightOnInputIsForTopOneOnly) {
  Call call{make_sample(DType::kF32, {2, 4}), make_ids({2, 2}, {0, 1, 2, 3}),
            make_sample(DType::kF32, {2, 2})};
  call.preparation.apply_router_weight_on_input = true;
  for (const PrepareFinalizeDescriptor* object : {&no_ep(), &batched()}) {
    try {
      call.prepare(*object);
      ADD_FAILURE() << object->name();
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), "apply_router_weight_on_input");
    }
  }
}

TEST(NoEpTest, FinalizeCopiesWhatIsReduced) {
  const Call call{make_sample(DType::kBF16, {3, 5}), make_ids({3, 1}, {0, 1, -1}),
                  make_f32({3, 1}, {kNaN, kNaN, kNaN})};
  const Tensor reduced = make_sample(DType::kBF16, {3, 5});
  EXPECT_TRUE(bitwise_equal(call.finalize(no_ep(), reduced, WeightAndReduce::kNoOp), reduced));
}

TEST(NoEpTest, FinalizeSumsInSlotOrder) {
  const Call call{make_sample(DType::kF32, {2, 1}), make_ids({2, 3}, {0, 1, 2, 2, 1, 0}),
                  make_f32({2, 3}, {1, 1, 1, 1, 1, 1})};
  // Only left to right, in fp32, gives 0 for the first token and 1 for the second.
  const Tensor rows = make_f32({6, 1}, {1e8f, 1, -1e8f, 1e8f, -1e8f, 1});
  EXPECT_EQ(to_vector(call.finalize(no_ep(), rows, WeightAndReduce::kDelegate)),
            (std::vector<float>{0, 1}));
}

TEST(NoEpTest, FinalizeRoundsOnce) {
  const Call call{make_sample(DType::kBF16, {1, 1}), make_ids({1, 3}, {0, 1, 2}),
                  make_f32({1, 3}, {1, 1, 1})};
  // bf16 has 8 bits: 256 + 1 would round back to 256 after each addition.
  const Tensor rows = make_floats(DType::kBF16, {3, 1}, {256, 1, 1});
  EXPECT_EQ(to_vector(call.finalize(no_ep(), rows, WeightAndReduce::kDelegate)),
            (std::vector<float>{258}));
}

TEST(NoEpTest, FinalizeSelectsLocalSlots) {
  Call call{make_sample(DType::kF32, {3, 2}), make_ids({3, 2}, {-1, 1, 0, 2, 0, -1}),
            make_f32({3, 2}, {kNaN, 2, kNaN, 3, kNaN, kNaN})};
  call.expert_map = make_ids({3}, {-1, 0, 1});
  call.num_local_experts = 2;
  const Tensor rows =
      make_f32({6, 2}, {kNaN, kNaN, 1, 2, kNaN, kNaN, 3, 4, kNaN, kNaN, kNaN, kNaN});
  EXPECT_EQ(to_vector(call.finalize(no_ep(), rows, WeightAndReduce::kDelegate)),
            (std::vector<float>{2, 4, 9, 12, 0, 0}));
}

TEST(NoEpTest, NaNWeightReachesItsTokenOnly) {
  const Call call{make_sample(DType::kF32, {2, 1}), make_ids({2, 2}, {0, 1, 0, 1}),
                  make_f32({2, 2}, {kNaN, 1, 1, 1})};
  const auto out =
      to_vector(call.finalize(no_ep(), make_f32({4, 1}, {1, 2, 3, 4}), WeightAndReduce::kDelegate));
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_EQ(out[1], 7);
}

TEST(NoEpTest, FinalizeLeavesOutWeightsThatAreOnTheInput) {
  Call call{make_sample(DType::kF32, {2, 1}), make_ids({2, 1}, {0, 1}),
            make_f32({2, 1}, {kNaN, 5})};
  call.preparation.apply_router_weight_on_input = true;
  EXPECT_EQ(to_vector(call.finalize(no_ep(), make_f32({2, 1}, {3, 4}), WeightAndReduce::kDelegate)),
            (std::vector<float>{3, 4}));
}

TEST_P(DTypes, NoEpFinalizeMatchesPlainLoopsAtEveryWidth) {
  const DType dtype = GetParam();
  for (const std::int64_t hidden : {1, 255, 256, 257, 600}) {
    const std::int64_t tokens = 5, topk = 3;
    const Call call{make_sample(dtype, {tokens, hidden}),
                    make_ids({tokens, topk}, {0, 1, 2, 3, -1, 1, 2, 2, 2, -1, -1, -1, 3, 2, 1}),
                    make_sample(DType::kF32, {tokens, topk})};
    const Tensor rows = make_sample(dtype, {tokens * topk, hidden});
    Tensor expected = Tensor::empty({tokens, hidden}, dtype);
    for (std::int64_t i = 0; i < tokens * hidden; ++i) {
      float sum = 0;
      for (std::int64_t j = 0; j < topk; ++j) {
        const std::int64_t flat = i / hidden * topk + j;
        if (call.topk_ids.as<std::int32_t>()[flat] < 0) continue;
        sum += call.topk_weights.as<float>()[flat] *
               load_f32(rows.data(), dtype, flat * hidden + i % hidden);
      }
      store_f32(expected.data(), dtype, i, sum);
    }
    const Tensor actual = call.finalize(no_ep(), rows, WeightAndReduce::kDelegate);
    EXPECT_TRUE(bitwise_equal(actual, expected)) << "hidden " << hidden;
  }
}

TEST_P(DTypes, BatchedDispatchesInTokenOrder) {
  const DType dtype = GetParam();
  Call call{make_sample(dtype, {4, 3}), make_ids({4, 2}, {3, 0, 0, 2, -1, 0, 5, 3}),
            make_sample(DType::kF32, {4, 2})};
  call.expert_map = make_ids({6}, {2, -1, 0, 1, -1, -1});
  call.num_local_experts = 3;
  const ForwardArgs prepared = call.prepare(batched());
  ASSERT_EQ(prepared.hidden_states.shape(), (Shape{3, 4, 3}));
  ASSERT_EQ(prepared.expert_num_tokens.shape(), Shape{3});
  const auto* counts = prepared.expert_num_tokens.as<std::int32_t>();
  // Global expert 2 is local 0, 3 is 1, 0 is 2.
  const std::vector<std::vector<std::int64_t>> tokens{{1}, {0, 3}, {0, 1, 2}};
  for (std::size_t e = 0; e < 3; ++e) {
    ASSERT_EQ(static_cast<std::size_t>(counts[e]), tokens[e].size());
    const TensorView expert = prepared.hidden_states.select(0, static_cast<std::int64_t>(e));
    for (std::size_t row = 0; row < tokens[e].size(); ++row) {
      EXPECT_TRUE(bitwise_equal(expert.select(0, static_cast<std::int64_t>(row)),
                                call.hidden_states.select(0, tokens[e][row])));
    }
    for (std::int64_t row = counts[e]; row < 4; ++row) {
      for (float x : to_vector(expert.select(0, row))) {
        EXPECT_TRUE(std::isnan(x)) << "rows behind the count stay as they were";
      }
    }
  }
}

TEST(BatchedTest, FinalizeGathersInSlotOrderAndSkipsPoison) {
  Call call{make_sample(DType::kF32, {3, 1}), make_ids({3, 2}, {1, 0, -1, 1, 0, 2}),
            make_f32({3, 2}, {2, 3, kNaN, 5, 7, kNaN})};
  call.expert_map = make_ids({3}, {0, 1, -1});
  call.num_local_experts = 2;
  call.prepare(batched());
  const Tensor rows = make_f32({2, 3, 1}, {10, 20, kNaN, 100, 200, kNaN});
  EXPECT_EQ(to_vector(call.finalize(batched(), rows, WeightAndReduce::kDelegate)),
            (std::vector<float>{2 * 100 + 3 * 10, 5 * 200, 7 * 20}));
}

TEST(BatchedTest, MapEntriesBeyondTheLocalExpertsAreNotLocal) {
  Call call{make_sample(DType::kF32, {3, 2}), make_ids({3, 2}, {0, 1, 2, 0, 3, 1}),
            make_sample(DType::kF32, {3, 2})};
  call.expert_map = make_ids({4}, {1, 2, 1 << 30, -7});
  call.num_local_experts = 2;
  const ForwardArgs prepared = call.prepare(batched());
  EXPECT_EQ(prepared.expert_num_tokens.as<const std::int32_t>()[0], 0);
  EXPECT_EQ(prepared.expert_num_tokens.as<const std::int32_t>()[1], 2);
  const TensorView rows = prepared.hidden_states.select(0, 1);
  EXPECT_TRUE(bitwise_equal(rows.slice(0, 0, 2), call.hidden_states.slice(0, 0, 2)));
}

TEST(BatchedTest, TwoIdsOfATokenOnOneLocalExpertAreAnError) {
  Call call{make_sample(DType::kF32, {1, 2}), make_ids({1, 2}, {0, 1}),
            make_sample(DType::kF32, {1, 2})};
  call.expert_map = make_ids({2}, {0, 0});
  call.num_local_experts = 1;
  EXPECT_THROW(call.prepare(batched()), Error);
}

TEST(BatchedTest, WeightsTheInputOnDispatch) {
  Call call{make_floats(DType::kBF16, {2, 2}, {1, 2, 3, 4}), make_ids({2, 1}, {1, 0}),
            make_f32({2, 1}, {0.5f, 2})};
  call.num_local_experts = 2;
  call.preparation.apply_router_weight_on_input = true;
  const ForwardArgs prepared = call.prepare(batched());
  EXPECT_EQ(to_vector(prepared.hidden_states.select(0, 0).select(0, 0)),
            (std::vector<float>{6, 8}));
  EXPECT_EQ(to_vector(prepared.hidden_states.select(0, 1).select(0, 0)),
            (std::vector<float>{0.5f, 1}));
  EXPECT_EQ(to_vector(call.hidden_states), (std::vector<float>{1, 2, 3, 4}));
}

TEST(BatchedTest, DuplicateIdInATokenIsAnError) {
  Call call{make_sample(DType::kF32, {2, 3}), make_ids({2, 3}, {0, 1, 2, 3, -1, 3}),
            make_sample(DType::kF32, {2, 3})};
  try {
    call.prepare(batched());
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "topk_ids");
    EXPECT_NE(std::string_view(error.what()).find("expert 3 twice for token 1"), std::string::npos)
        << error.what();
  }
  // Several slots of -1 are not duplicates.
  call.topk_ids = make_ids({2, 3}, {0, -1, -1, -1, -1, -1});
  EXPECT_NO_THROW(call.prepare(batched()));
}

TEST(BatchedTest, RefusesReducedOutput) {
  EXPECT_FALSE(batched().accepts(WeightAndReduce::kNoOp));
}

TEST(BatchedTest, ThreadsDoNotChangeBits) {
  const std::int64_t tokens = 96, topk = 2, hidden = 400;  // above the threshold for threads
  Call call{make_sample(DType::kBF16, {tokens, hidden}), Tensor::empty({tokens, topk}, DType::kI32),
            make_sample(DType::kF32, {tokens, topk})};
  for (std::int64_t i = 0; i < tokens * topk; ++i) {
    call.topk_ids.as<std::int32_t>()[i] =
        static_cast<std::int32_t>((i * 5 + i / 7) % 2 + 2 * (i % 2));
  }
  std::vector<Tensor> results;
  for (const int threads : {1, 2, 3}) {
    set_num_threads(threads);
    const ForwardArgs prepared = call.prepare(batched());
    results.push_back(call.finalize(batched(), prepared.hidden_states, WeightAndReduce::kDelegate));
  }
  set_num_threads(0);
  EXPECT_TRUE(bitwise_equal(results[0], results[1]));
  EXPECT_TRUE(bitwise_equal(results[0], results[2]));
}

TEST(PrepareAndFinalizeTest, RefusalsHaveReasons) {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 8;
  config.topk = 2;
  config.scheme = schemes::unquantized(DType::kBF16);
  const auto reason = [&](const std::function<void(MoeConfig&)>& change) {
    MoeConfig changed = config;
    change(changed);
    const Support support = no_ep().supports(changed);
    EXPECT_EQ(support.reason, batched().supports(changed).reason);
    EXPECT_EQ(support.text.empty(), static_cast<bool>(support));
    return support.reason;
  };
  EXPECT_EQ(reason([](MoeConfig&) {}), Reason::kSupported);
  EXPECT_EQ(reason([](MoeConfig& c) {
              c.device = {DeviceKind::kCuda, 999};
            }),
            Reason::kSupported)
      << "the device is a question to the experts";
  EXPECT_EQ(reason([](MoeConfig& c) { c.dtype = DType::kE4M3; }), Reason::kDType);
  EXPECT_EQ(reason([](MoeConfig& c) { c.batch_invariant = true; }), Reason::kSupported);
  EXPECT_EQ(reason([](MoeConfig& c) {
              c.scheme = parse_scheme("fp8_channel_token");
              c.batch_invariant = true;
            }),
            Reason::kSupported);
  EXPECT_EQ(reason([](MoeConfig& c) {
              c.scheme = parse_scheme("fp8_tensor_static");
              c.batch_invariant = true;
            }),
            Reason::kSupported);
  EXPECT_EQ(reason([](MoeConfig& c) { c.scheme = parse_scheme("fp8_tensor"); }),
            Reason::kSupported);
  EXPECT_EQ(reason([](MoeConfig& c) {
              c.scheme = parse_scheme("fp8_tensor");
              c.batch_invariant = true;
            }),
            Reason::kBatchInvariance);
  EXPECT_EQ(reason([](MoeConfig& c) { c.parallel.ep_size = 2; }), Reason::kParallelConfig);
  EXPECT_EQ(reason([](MoeConfig& c) {
              c.parallel.ep_size = 2;
              c.has_expert_map = true;
            }),
            Reason::kSupported);
  EXPECT_EQ(reason([](MoeConfig& c) { c.parallel.dp_size = 2; }), Reason::kParallelConfig);
  EXPECT_EQ(reason([](MoeConfig& c) { c.parallel.tp_size = 2; }), Reason::kSupported);
  EXPECT_EQ(reason([](MoeConfig& c) { c.parallel.tp_size = 0; }), Reason::kParallelConfig);
  EXPECT_EQ(reason([](MoeConfig& c) { c.parallel.ep_rank = 1; }), Reason::kParallelConfig);
  EXPECT_EQ(reason([](MoeConfig& c) { c.apply_router_weight_on_input = true; }),
            Reason::kRouterWeightOnInput);
}

TEST(PrepareAndFinalizeTest, ExpertsSayWhatTheyLeaveToPrepare) {
  const ExpertsDescriptor& experts = testing::fake_descriptor(WeightAndReduce::kNoOp);
  EXPECT_FALSE(make_preparation(experts, parse_scheme("bf16"), false).quant);
  EXPECT_FALSE(make_preparation(experts, parse_scheme("nvfp4"), false).quant)
      << "quantized after the permutation";
  const Preparation fp8 = make_preparation(experts, parse_scheme("fp8_tensor_static"), true, 0.5f);
  EXPECT_EQ(fp8.quant, keys::e4m3_tensor(false));
  EXPECT_EQ(fp8.scale, 0.5f);
  EXPECT_TRUE(fp8.apply_router_weight_on_input);
}

TEST(PrepareAndFinalizeTest, NoTokensNeedNothing) {
  Call call{Tensor::empty({0, 4}, DType::kBF16), Tensor::empty({0, 2}, DType::kI32),
            Tensor::empty({0, 2}, DType::kF32)};
  EXPECT_EQ(call.prepare(no_ep()).hidden_states.size(0), 0);
  const ForwardArgs prepared = call.prepare(batched());
  for (std::int64_t e = 0; e < 4; ++e) {
    EXPECT_EQ(prepared.expert_num_tokens.as<std::int32_t>()[e], 0);
  }
}

}  // namespace fusedmoe::prepare_finalize_test
