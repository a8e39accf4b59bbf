// Packed weights of the CPU experts: what goes in comes out again, for every scheme, and one expert
// can be replaced by another.
#include <gtest/gtest.h>

#include <cstring>

#include "cpu/experts.h"
#include "cpu/pack.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "small_case.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace fusedmoe::pack_test {

using testing::bitwise_equal;
using testing::Case;
using testing::make_experts;
using testing::make_problem;
using testing::Problem;
using testing::small_case;

Tensor decoded(const WeightMatrix& matrix, const QuantScheme& scheme, std::int64_t in) {
  if (scheme.weights.quantized()) return dequantize_weights(matrix, scheme.weights, in);
  Tensor result = Tensor::empty(matrix.values.shape(), DType::kF32);
  convert(matrix.values, result);
  return result;
}

Tensor as_f32(const TensorView& view) {
  Tensor result = Tensor::empty(view.shape(), DType::kF32);
  convert(view, result);
  return result;
}

void expect_same(const WeightMatrix& actual, const WeightMatrix& expected,
                 const QuantScheme& scheme, std::int64_t in) {
  const Tensor a = decoded(actual, scheme, in), e = decoded(expected, scheme, in);
  // Element by element, because a zero may have changed its sign.
  ASSERT_EQ(a.shape(), e.shape());
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    ASSERT_EQ(a.as<const float>()[i], e.as<const float>()[i]) << i;
  }
  EXPECT_TRUE(bitwise_equal(as_f32(actual.bias), as_f32(expected.bias)));
  ASSERT_EQ(actual.input_scale.defined(), expected.input_scale.defined());
  if (actual.input_scale) {
    EXPECT_EQ(*actual.input_scale.as<const float>(), *expected.input_scale.as<const float>());
  }
}

void expect_same(const ExpertMatrices& actual, const ExpertMatrices& expected,
                 const ExpertWeights& weights) {
  expect_same(actual.gate, expected.gate, weights.scheme, weights.hidden);
  expect_same(actual.up, expected.up, weights.scheme, weights.hidden);
  expect_same(actual.down, expected.down, weights.scheme, weights.intermediate);
}

class PackTest : public ::testing::TestWithParam<NamedScheme> {
 protected:
  const std::shared_ptr<const Experts> experts_ = make_experts(small_case(GetParam().scheme));
};

TEST_P(PackTest, UnpackIsTheInverse) {
  const Problem problem = make_problem(small_case(GetParam().scheme));
  const auto packed = experts_->pack(problem.weights);
  for (std::int64_t e = 0; e < 3; ++e) {
    const ExpertWeights unpacked = experts_->unpack(*packed, e);
    ASSERT_EQ(unpacked.num_experts(), 1);
    expect_same(unpacked.experts[0], problem.weights.experts[static_cast<std::size_t>(e)],
                problem.weights);
  }
}

TEST_P(PackTest, RepackReplacesOneExpert) {
  const Problem problem = make_problem(small_case(GetParam().scheme));
  Case other = small_case(GetParam().scheme);
  other.seed = 9;
  const Problem replacement = make_problem(other);
  const auto packed = experts_->pack(problem.weights);
  ExpertWeights one = replacement.weights;
  one.experts.erase(one.experts.begin(), one.experts.begin() + 2);
  experts_->repack(one, 1, *packed);
  for (std::int64_t e = 0; e < 3; ++e) {
    const auto index = static_cast<std::size_t>(e);
    const ExpertMatrices& expected = e == 1 ? one.experts[0] : problem.weights.experts[index];
    expect_same(experts_->unpack(*packed, e).experts[0], expected, problem.weights);
  }
}

TEST_P(PackTest, UnpackedWeightsPackToTheSameBytes) {
  const Problem problem = make_problem(small_case(GetParam().scheme));
  const auto packed = experts_->pack(problem.weights);
  Case single = small_case(GetParam().scheme);
  single.num_experts = single.topk = 1;
  const auto again = make_experts(single)->pack(experts_->unpack(*packed, 2));
  const auto& first = static_cast<const cpu::CpuPackedWeights&>(*packed);
  const auto& second = static_cast<const cpu::CpuPackedWeights&>(*again);
  for (std::int64_t tile = 0; tile < first.gemm1().num_tiles; ++tile) {
    EXPECT_EQ(std::memcmp(first.tile1(2, tile), second.tile1(0, tile),
                          static_cast<std::size_t>(first.gemm1().tile_bytes)),
              0);
  }
  for (std::int64_t tile = 0; tile < first.gemm2().num_tiles; ++tile) {
    EXPECT_EQ(std::memcmp(first.tile2(2, tile), second.tile2(0, tile),
                          static_cast<std::size_t>(first.gemm2().tile_bytes)),
              0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, PackTest, ::testing::ValuesIn(named_schemes()),
                         [](const auto& info) { return info.param.name; });

TEST(RepackTest, RefusesWhatDoesNotFit) {
  const auto experts = make_experts(small_case(parse_scheme("int4_g32")));
  const Problem problem = make_problem(small_case(parse_scheme("int4_g32")));
  const auto packed = experts->pack(problem.weights);
  EXPECT_THROW(experts->repack(problem.weights, 3, *packed), Error);
  EXPECT_THROW(experts->repack(problem.weights, -1, *packed), Error);
  EXPECT_THROW(experts->unpack(*packed, 3), Error);
  Case wider = small_case(parse_scheme("int4_g32"));
  wider.hidden = 192;
  EXPECT_THROW(experts->repack(make_problem(wider).weights, 0, *packed), Error);
  EXPECT_THROW(
      experts->repack(make_problem(small_case(parse_scheme("int4_g64"))).weights, 0, *packed),
      Error);
  Case no_bias = small_case(parse_scheme("int4_g32"));
  no_bias.bias = false;
  const auto without = make_experts(no_bias);
  const auto packed_without = without->pack(make_problem(no_bias).weights);
  EXPECT_THROW(without->repack(problem.weights, 0, *packed_without), Error);
  EXPECT_THROW(experts->repack(problem.weights, 0, *packed_without), Error)
      << "weights of another configuration";
}

TEST(TileFormatTest, RowsOfIntegersHaveGroupsOfAtLeast32) {
  const std::pair<std::optional<QuantKey>, bool> rows[] = {
      {std::nullopt, true},           {keys::int8_row(true), true},  {keys::int8_group(32), true},
      {keys::int16_group(128), true}, {keys::int8_group(16), false}, {keys::int16_group(16), false},
      {keys::nvfp4(true), true}};
  for (const auto& [key, expected] : rows) {
    EXPECT_EQ(cpu::has_rows(key), expected) << name(QuantScheme{keys::int4(32), key});
  }
}

}  // namespace fusedmoe::pack_test
