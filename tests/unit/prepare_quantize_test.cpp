// prepare quantizes the hidden states as the key says, before it dispatches them.
#include <gtest/gtest.h>

#include <vector>

#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "prepare_call.h"
#include "testing/compare.h"

namespace fusedmoe::prepare_quantize_test {

using testing::bitwise_equal;
using testing::make_f32;
using testing::make_ids;
using testing::make_sample;
using Call = testing::PrepareCall;

class QuantizedDTypes : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Quantize, QuantizedDTypes,
                         ::testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& info) { return std::string(name(info.param)); });

/// What the whole rows give; each token's are then copied.
struct Expected {
  Tensor values, scales;
};
Expected quantize_all(const TensorView& x, const Preparation& preparation) {
  const QuantizedShape shape = quantized_shape(*preparation.quant, x.size(0), x.size(1));
  Expected expected{Tensor::empty(shape.values, shape.values_dtype),
                    Tensor::empty(shape.scales, shape.scales_dtype)};
  quantize(x, *preparation.quant, expected.values, expected.scales, preparation.scale);
  return expected;
}

/// Keys that prepare quantizes by: every kind of scale, both element types.
std::vector<Preparation> quantizing_preparations() {
  return {{false, keys::e4m3_tensor(true), {}}, {false, keys::e4m3_tensor(false), 0.01f},
          {false, keys::e4m3_row(true), {}},    {false, keys::e4m3_group(), {}},
          {false, keys::e4m3_group(true), {}},  {false, keys::mxfp8(true), {}},
          {false, keys::int8_row(true), {}},    {false, keys::int8_group(32), {}},
          {false, keys::int16_group(32), {}}};
}

TEST_P(QuantizedDTypes, NoEpQuantizesAsTheKeySays) {
  for (const Preparation& preparation : quantizing_preparations()) {
    Call call{make_sample(GetParam(), {5, 160}), Tensor(), Tensor()};
    call.topk_ids = make_ids({5, 1}, {0, 1, 2, 3, 0});
    call.preparation = preparation;
    const Tensor before = make_sample(GetParam(), {5, 160});
    const ForwardArgs prepared = call.prepare(no_ep());
    EXPECT_TRUE(bitwise_equal(call.hidden_states, before)) << "prepare must not touch its input";
    const Expected expected = quantize_all(before, preparation);
    EXPECT_TRUE(bitwise_equal(prepared.hidden_states, expected.values));
    EXPECT_TRUE(bitwise_equal(prepared.hidden_scales, expected.scales));
  }
}

TEST(NoEpTest, QuantizesWhatTheWeightGave) {
  Call call{make_sample(DType::kBF16, {3, 64}), make_ids({3, 1}, {0, 1, 2}),
            make_f32({3, 1}, {0.3f, 5, -2})};
  call.preparation.apply_router_weight_on_input = true;
  const ForwardArgs weighted = call.prepare(no_ep());
  Tensor x = Tensor::empty({3, 64}, DType::kBF16);
  std::memcpy(x.data(), weighted.hidden_states.data(), static_cast<std::size_t>(x.nbytes()));
  call.preparation.quant = keys::e4m3_row(true);
  const ForwardArgs prepared = call.prepare(no_ep());
  const Expected expected = quantize_all(x, call.preparation);
  EXPECT_TRUE(bitwise_equal(prepared.hidden_states, expected.values));
  EXPECT_TRUE(bitwise_equal(prepared.hidden_scales, expected.scales));
}

TEST(PrepareAndFinalizeTest, StaticScaleMustBeGiven) {
  for (const PrepareFinalizeDescriptor* object : {&no_ep(), &batched()}) {
    Call call{make_sample(DType::kBF16, {1, 4}), make_ids({1, 1}, {0}), make_f32({1, 1}, {1})};
    call.preparation.quant = keys::e4m3_tensor(false);
    EXPECT_THROW(call.prepare(*object), Error);
  }
}

TEST_P(QuantizedDTypes, BatchedDispatchesCodesAndScales) {
  for (const Preparation& preparation : quantizing_preparations()) {
    Call call{make_sample(GetParam(), {4, 160}), make_ids({4, 2}, {3, 0, 0, 2, -1, 0, 1, 3}),
              make_sample(DType::kF32, {4, 2})};
    call.preparation = preparation;
    const ForwardArgs prepared = call.prepare(batched());
    const Expected expected = quantize_all(call.hidden_states, preparation);
    ASSERT_EQ(prepared.hidden_states.shape(), (Shape{4, 4, 160}));
    const bool row_scales = preparation.quant->group.rows == 1;
    if (row_scales) {
      ASSERT_EQ(prepared.hidden_scales.shape(), (Shape{4, 4, expected.scales.size(1)}));
    } else {
      EXPECT_TRUE(bitwise_equal(prepared.hidden_scales, expected.scales));
    }
    const std::vector<std::vector<std::int64_t>> tokens{{0, 1, 2}, {3}, {1}, {0, 3}};
    for (std::int64_t e = 0; e < 4; ++e) {
      const auto& rows = tokens[static_cast<std::size_t>(e)];
      for (std::int64_t row = 0; row < static_cast<std::int64_t>(rows.size()); ++row) {
        const std::int64_t token = rows[static_cast<std::size_t>(row)];
        EXPECT_TRUE(bitwise_equal(prepared.hidden_states.select(0, e).select(0, row),
                                  expected.values.select(0, token)));
        if (!row_scales) continue;
        EXPECT_TRUE(bitwise_equal(prepared.hidden_scales.select(0, e).select(0, row),
                                  expected.scales.select(0, token)));
      }
    }
  }
}

}  // namespace fusedmoe::prepare_quantize_test
