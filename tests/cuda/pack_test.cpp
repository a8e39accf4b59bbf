// Packed weights on the GPU: every element lies where the policies in cuda/formats/ say,
// padding is zero, what cannot be packed is refused, one expert can be replaced, and unpacking is
// the inverse.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/experts/packed_weights.h"
#include "cuda/formats/codes.h"
#include "cuda_test.h"
#include "experts_problem.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "testing/cases.h"

namespace fusedmoe {
namespace {

using cuda::CudaPackedWeights;
using cuda::GemmParams;
using cuda::PackedMatrices;
using cuda::WeightFormat;
using testing::argument_of;
using testing::Case;
using testing::is_mxfp4;
using testing::kGpu;
using testing::make_experts;
using testing::make_problem;
using testing::Problem;
using testing::to_host;

// ------------------------------------------------------------------------------------------------
// Packed blocks, read on the host after their description

/// The packed blocks, biases and scales of w13 or w2, in host memory.
struct Downloaded {
  const WeightFormat& format;
  std::int64_t row_blocks, k_blocks, expert_bytes;
  Tensor blocks, bias, scales;

  Downloaded(const PackedMatrices& matrices, const WeightFormat& of, std::int64_t num_experts)
      : format(of) {
    GemmParams gemm;
    matrices.set(gemm);
    row_blocks = gemm.row_blocks;
    k_blocks = gemm.k_blocks;
    expert_bytes = gemm.expert_bytes;
    const auto download = [](const void* data, DType dtype, Shape shape) {
      return data ? to_host(Tensor(TensorView(data, dtype, shape, kGpu), nullptr)) : Tensor();
    };
    blocks = download(gemm.weights, DType::kU8, {num_experts, expert_bytes});
    bias = download(gemm.bias, DType::kF32, {num_experts, row_blocks * cuda::kBlockRows});
    scales = download(gemm.scales, DType::kF32, {num_experts, row_blocks * cuda::kBlockRows});
  }

  const std::uint8_t* block(std::int64_t expert, std::int64_t row, std::int64_t k) const {
    const std::int64_t index = row / 64 * k_blocks + k / 64;
    return blocks.as<const std::uint8_t>() + expert * expert_bytes + index * format.block.bytes;
  }

  /// Value of a packed element, as the GEMM sees it; the MXFP4 scale of its block besides.
  double value(std::int64_t expert, std::int64_t row, std::int64_t k) const {
    const std::uint8_t* base = block(expert, row, k);
    const std::int64_t r = row % 64, c = k % 64;
    if (!format.decodes) {
      std::uint16_t bits;
      std::memcpy(&bits, base + r * 128 + (c / 8 ^ r % 8) * 16 + c % 8 * 2, 2);
      return load_f32(&bits, format.row_dtype, 0);
    }
    // Thread 32 w + 4 g + q has rows 16 w + g and 8 more, columns 2 q, 2 q + 1 and 8 more.
    const std::int64_t w = r / 16, g = r % 8, q = c % 8 / 2;
    const int pair = static_cast<int>(r % 16 / 8 + c % 16 / 8 * 2);
    const int word = static_cast<int>(c / 16);
    std::uint32_t words[4];
    std::memcpy(words, base + 16 * (32 * w + 4 * g + q), sizeof(words));
    const auto bit = [&](int of_code) {
      const cuda::BitPlace at =
          cuda::E2m1Codes::place(word, pair, static_cast<int>(c % 2), of_code);
      return words[at.word] >> at.bit & 1U;
    };
    const unsigned exponent = 2 * bit(2) + bit(1), mantissa = bit(0);
    const double magnitude = exponent == 0
                                 ? 0.5 * mantissa
                                 : std::ldexp(1 + 0.5 * mantissa, static_cast<int>(exponent) - 1);
    const int field = base[2048 + (w * 8 + g) * 4 + r % 16 / 8 * 2 + c / 32];
    // The bf16 with this exponent field is 2^126 times the scale over the expert's power of two.
    const double scale = std::ldexp(1.0, field - 127 - 126) *
                         scales.as<const float>()[expert * scales.size(1) + row];
    return (bit(3) ? -magnitude : magnitude) * scale;
  }
};

Tensor decoded(const WeightMatrix& matrix, const QuantScheme& scheme, std::int64_t in) {
  if (scheme.weights.quantized()) return dequantize_weights(matrix, scheme.weights, in);
  Tensor result = Tensor::empty(matrix.values.shape(), DType::kF32);
  convert(matrix.values, result);
  return result;
}

float bias_at(const TensorView& bias, std::int64_t index) {
  return load_f32(bias.data(), bias.dtype(), index * bias.stride(0));
}

/// w13 (with `up` where gated) or w2 of one expert.
void expect_packed(const Downloaded& packed, std::int64_t expert, const QuantScheme& scheme,
                   const WeightMatrix& gate, const WeightMatrix* up, std::int64_t k) {
  const Tensor gates = decoded(gate, scheme, k), ups = up ? decoded(*up, scheme, k) : Tensor();
  const std::int64_t width = gates.size(0);
  ASSERT_EQ(packed.k_blocks, (k + 63) / 64);
  ASSERT_EQ(packed.row_blocks, (width * (up ? 2 : 1) + 63) / 64);
  std::int64_t found = 0;
  for (std::int64_t row = 0; row < packed.row_blocks * 64; ++row) {
    // Blocks of 8 rows of gate and the same 8 of up.
    const bool is_up = up && row / 8 % 2 == 1;
    const std::int64_t feature = up ? row / 16 * 8 + row % 8 : row;
    const bool padding = feature >= width;
    const Tensor& source = is_up ? ups : gates;
    for (std::int64_t c = 0; c < packed.k_blocks * 64; ++c) {
      const double expected =
          padding || c >= k ? 0 : double{source.as<const float>()[feature * k + c]};
      ASSERT_EQ(packed.value(expert, row, c), expected) << "row " << row << ", column " << c;
    }
    if (packed.bias) {
      const float bias = packed.bias.as<const float>()[expert * packed.bias.size(1) + row];
      ASSERT_EQ(bias, padding ? 0 : bias_at((is_up ? *up : gate).bias, feature)) << "row " << row;
    }
    found += !padding;
  }
  EXPECT_EQ(found, width * (up ? 2 : 1));
}

void expect_packed(const PackedWeights& weights, const ExpertWeights& source) {
  const auto& packed = static_cast<const CudaPackedWeights&>(weights);
  const bool gated = is_gated(source.activation);
  const Downloaded w13(packed.w13(), packed.format(), source.num_experts());
  const Downloaded w2(packed.w2(), packed.format(), source.num_experts());
  for (std::int64_t e = 0; e < source.num_experts(); ++e) {
    const ExpertMatrices& expert = source.experts[static_cast<std::size_t>(e)];
    SCOPED_TRACE("expert " + std::to_string(e));
    expect_packed(w13, e, source.scheme, expert.gate, gated ? &expert.up : nullptr, source.hidden);
    expect_packed(w2, e, source.scheme, expert.down, nullptr, source.intermediate);
  }
}

// ------------------------------------------------------------------------------------------------
// Cases

std::vector<Case> pack_cases() {
  struct Sizes {
    std::int64_t hidden, intermediate;
  };
  const GateUpLayout layouts[] = {GateUpLayout::kGateUp, GateUpLayout::kUpGate,
                                  GateUpLayout::kInterleaved};
  std::vector<Case> cases;
  for (const QuantScheme& scheme : testing::gpu_schemes()) {
    for (const Sizes size : {Sizes{64, 64}, Sizes{128, 32}, Sizes{360, 90}, Sizes{96, 45},
                             Sizes{360, 360}, Sizes{8, 1}, Sizes{200, 136}}) {
      if (is_mxfp4(scheme) && size.intermediate % 2 != 0) continue;  // two codes in a byte
      for (const bool gated : {true, false}) {
        Case spec;
        spec.num_tokens = 1;
        spec.num_experts = 3;
        spec.hidden = size.hidden;
        spec.intermediate = size.intermediate;
        spec.scheme = scheme;
        spec.activation = gated ? Activation::kSwigluOai : Activation::kRelu2NoMul;
        spec.bias = cases.size() % 3 != 2;
        spec.gate_up_layout = layouts[cases.size() / 2 % 3];
        spec.transposed = !is_mxfp4(scheme) && cases.size() % 4 == 1;
        spec.seed = 50 + cases.size();
        spec.name = std::string(name(scheme)) + "_" + std::to_string(size.hidden) + "x" +
                    std::to_string(size.intermediate) + (gated ? "_gated" : "_plain");
        cases.push_back(spec);
      }
    }
  }
  return cases;
}

/// The last nibble of a row of odd length belongs to nobody.
void clear_padding(const ExpertWeights& weights) {
  if (!is_mxfp4(weights.scheme)) return;
  for (const ExpertMatrices& expert : weights.experts) {
    for (const WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      const std::int64_t in = matrix == &expert.down ? weights.intermediate : weights.hidden;
      if (!matrix->values || in % 2 == 0) continue;
      for (std::int64_t r = 0; r < matrix->values.size(0); ++r) {
        matrix->values.select(0, r).as<std::uint8_t>()[in / 2] &= 0xf;
      }
    }
  }
}

class CudaPack : public testing::CudaTestWith<Case> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaPack);
INSTANTIATE_TEST_SUITE_P(Cases, CudaPack, ::testing::ValuesIn(pack_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CudaPack, EveryElementIsInItsBlock) {
  const Problem problem = make_problem(GetParam());
  expect_packed(*make_experts(GetParam())->pack(problem.weights), problem.weights);
}

/// Contiguous rows of a matrix of any strides.
Tensor copied(const TensorView& view) {
  Tensor result = Tensor::empty(view.shape(), view.dtype());
  const std::int64_t size = bytes(view.dtype(), 1), columns = view.size(1);
  for (std::int64_t r = 0; r < view.size(0); ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      std::memcpy(result.as<std::byte>() + (r * columns + c) * size,
                  view.as<const std::byte>() + (r * view.stride(0) + c * view.stride(1)) * size,
                  static_cast<std::size_t>(size));
    }
  }
  return result;
}

void expect_same(const WeightMatrix& actual, const WeightMatrix& expected) {
  ASSERT_EQ(actual.values.defined(), expected.values.defined());
  if (!expected.values) return;
  // Codes of zeros keep their sign too.
  EXPECT_TRUE(testing::bitwise_equal(actual.values, copied(expected.values)));
  ASSERT_EQ(actual.scales.defined(), expected.scales.defined());
  if (expected.scales) {
    EXPECT_TRUE(testing::bitwise_equal(actual.scales, copied(expected.scales)));
  }
  ASSERT_EQ(actual.bias.defined(), expected.bias.defined());
  for (std::int64_t i = 0; expected.bias && i < expected.bias.size(0); ++i) {
    ASSERT_EQ(bias_at(actual.bias, i), bias_at(expected.bias, i)) << i;
  }
}

void expect_same(const ExpertMatrices& actual, const ExpertMatrices& expected) {
  expect_same(actual.gate, expected.gate);
  expect_same(actual.up, expected.up);
  expect_same(actual.down, expected.down);
}

TEST_P(CudaPack, UnpackIsTheInverse) {
  const Problem problem = make_problem(GetParam());
  clear_padding(problem.weights);
  const auto experts = make_experts(GetParam());
  const auto packed = experts->pack(problem.weights);
  for (std::int64_t e = 0; e < 3; ++e) {
    const ExpertWeights unpacked = experts->unpack(*packed, e);
    ASSERT_EQ(unpacked.num_experts(), 1);
    EXPECT_EQ(unpacked.scheme, problem.weights.scheme);
    EXPECT_EQ(unpacked.activation, problem.weights.activation);
    EXPECT_EQ(unpacked.hidden, problem.weights.hidden);
    EXPECT_EQ(unpacked.intermediate, problem.weights.intermediate);
    SCOPED_TRACE("expert " + std::to_string(e));
    expect_same(unpacked.experts[0], problem.weights.experts[static_cast<std::size_t>(e)]);
  }
  EXPECT_THROW(experts->unpack(*packed, 3), Error);
  EXPECT_THROW(experts->unpack(*packed, -1), Error);
}

TEST_P(CudaPack, RepackReplacesOneExpert) {
  Case other = GetParam();
  other.seed += 1000;
  Problem problem = make_problem(GetParam());
  const Problem replacement = make_problem(other);
  const auto experts = make_experts(GetParam());
  const auto packed = experts->pack(problem.weights);
  ExpertWeights one = replacement.weights;
  one.experts.erase(one.experts.begin(), one.experts.begin() + 2);
  experts->repack(one, 1, *packed);
  problem.weights.experts[1] = one.experts[0];
  expect_packed(*packed, problem.weights);
}

/// Kernels take as an argument whether the blocks of scales begin with a tile, so a graph holds it.
TEST(CudaRepackTest, BlocksOfScalesBeginWhereTheyDid) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  Case spec;
  spec.num_experts = 2;
  spec.hidden = spec.intermediate = 256;
  spec.scheme = parse_scheme("fp8_block");
  const Problem whole = make_problem(spec);
  ExpertWeights begins_with_a_tile = whole.weights, begins_elsewhere = whole.weights;
  const auto cut = [](ExpertWeights& weights, std::int64_t first) {
    weights.intermediate = 128;
    for (ExpertMatrices& expert : weights.experts) {
      for (WeightMatrix* matrix : {&expert.gate, &expert.up}) {
        matrix->values = matrix->values.slice(0, first, first + 128);
        if (first == 0) matrix->scales = matrix->scales.slice(0, 0, 1);
        matrix->first_row = first;
      }
      expert.down.values = expert.down.values.slice(1, 0, 128);
      expert.down.scales = expert.down.scales.slice(1, 0, 1);
    }
  };
  cut(begins_with_a_tile, 0);
  cut(begins_elsewhere, 8);
  spec.intermediate = 128;
  const auto experts = make_experts(spec);
  const auto packed = experts->pack(begins_with_a_tile);
  const std::string layout = packed->expert_layout();
  EXPECT_EQ(argument_of([&] { experts->repack(begins_elsewhere, 0, *packed); }),
            "weights.first_row");
  EXPECT_EQ(packed->expert_layout(), layout);
  const auto other = experts->pack(begins_elsewhere);
  EXPECT_NE(other->expert_layout(), layout);
  EXPECT_EQ(argument_of([&] { packed->replace_expert(0, *other->extract_expert(0)); }), "one");
  experts->repack(begins_with_a_tile, 0, *other);
}

// ------------------------------------------------------------------------------------------------
// Scales

Case mxfp4_case() {
  Case spec;
  spec.num_tokens = 1;
  spec.num_experts = 2;
  spec.hidden = 96;
  spec.intermediate = 64;
  spec.scheme = schemes::mxfp4_w4a16();
  spec.bias = true;
  return spec;
}

/// Scale code of row r and block b: walks from `low` to `high` and round again.
void set_scales(const TensorView& scales, int low, int high) {
  const std::int64_t steps = high - low + 1;
  for (std::int64_t r = 0; r < scales.size(0); ++r) {
    for (std::int64_t b = 0; b < scales.size(1); ++b) {
      const std::int64_t step = (r * scales.size(1) + b) * std::max<std::int64_t>(steps / 7, 1);
      scales.as<std::uint8_t>()[r * scales.stride(0) + b * scales.stride(1)] =
          static_cast<std::uint8_t>(r == 0 && b == 0 ? high : low + step % steps);
    }
  }
}

class CudaPackTest : public testing::CudaTest {
 protected:
  void SetUp() override {
    testing::CudaTest::SetUp();
    if (IsSkipped()) return;
    FUSEDMOE_SKIP_WITHOUT_KERNELS("mxfp4_w4a16", DType::kBF16);
    experts_ = make_experts(mxfp4_case());
  }

  std::shared_ptr<const Experts> experts_;
};

// From where a multiplier is no bf16 number any more: scales above 2^1.
TEST_F(CudaPackTest, LargeScalesMoveTheExponents) {
  struct Range {
    int low, high;
  };
  for (const Range range : {Range{0, 128}, Range{2, 129}, Range{100, 130}, Range{1, 254},
                            Range{120, 254}, Range{254, 254}, Range{0, 0}}) {
    SCOPED_TRACE(std::to_string(range.low) + " to " + std::to_string(range.high));
    const Problem problem = make_problem(mxfp4_case());
    // Of expert 1's up alone, which shares its power of two with gate, and of its down.
    const ExpertMatrices& expert = problem.weights.experts[1];
    set_scales(expert.up.scales, range.low, range.high);
    if (range.high > 128) set_scales(expert.gate.scales, range.high - 100, range.high - 50);
    set_scales(expert.down.scales, range.low, range.high);
    const auto packed = experts_->pack(problem.weights);
    if (range.high < 250) expect_packed(*packed, problem.weights);  // decoded values fit in f32
    const auto& scales = static_cast<const CudaPackedWeights&>(*packed).w2();
    const Downloaded w2(scales, static_cast<const CudaPackedWeights&>(*packed).format(), 2);
    EXPECT_EQ(w2.scales.as<const float>()[0], 1);
    EXPECT_EQ(w2.scales.as<const float>()[w2.scales.size(1)],
              std::ldexp(1.0F, std::max(0, range.high - 128)));
    const ExpertWeights unpacked = experts_->unpack(*packed, 1);
    expect_same(unpacked.experts[0], expert);
  }
}

TEST_F(CudaPackTest, F16ScalesThatAreTooSmallUnpackAsZeros) {
  Case spec = mxfp4_case();
  const Problem problem = make_problem(spec);
  const TensorView& scales = problem.weights.experts[0].down.scales;
  set_scales(scales, 127 - 40, 127);
  const testing::Variant variant = testing::gpu_variant();
  const auto experts =
      variant.experts->create(variant.of(testing::make_config(spec, DType::kF16, kGpu)), Context{});
  const WeightMatrix before = problem.weights.experts[0].down;
  const ExpertWeights unpacked = experts->unpack(*experts->pack(problem.weights), 0);
  const Tensor actual = decoded(unpacked.experts[0].down, spec.scheme, spec.intermediate);
  const Tensor expected = decoded(before, spec.scheme, spec.intermediate);
  for (std::int64_t i = 0; i < actual.numel(); ++i) {
    const std::int64_t row = i / spec.intermediate, block = i % spec.intermediate / 32;
    const int code =
        scales.as<const std::uint8_t>()[row * scales.stride(0) + block * scales.stride(1)];
    const float wanted = code > 127 - 29 ? expected.as<const float>()[i] : 0;
    ASSERT_EQ(actual.as<const float>()[i], wanted) << "row " << row << ", scale " << code;
  }
}

TEST_F(CudaPackTest, ScalesTooFarApartAreRefused) {
  for (WeightMatrix ExpertMatrices::*matrix : {&ExpertMatrices::gate, &ExpertMatrices::down}) {
    const Problem problem = make_problem(mxfp4_case());
    set_scales((problem.weights.experts[1].*matrix).scales, 0, 254);
    EXPECT_EQ(argument_of([&] { experts_->pack(problem.weights); }), "weights.scales");
  }
  // Gate and up share one power of two.
  const Problem problem = make_problem(mxfp4_case());
  set_scales(problem.weights.experts[0].gate.scales, 254, 254);
  set_scales(problem.weights.experts[0].up.scales, 0, 0);
  EXPECT_EQ(argument_of([&] { experts_->pack(problem.weights); }), "weights.scales");
}

TEST_F(CudaPackTest, ARefusedRepackLeavesTheExpertWhole) {
  const Problem problem = make_problem(mxfp4_case());
  const auto packed = experts_->pack(problem.weights);
  Case other = mxfp4_case();
  other.seed = 77;
  // w13 is fine and would be written first.
  const Problem wide = make_problem(other);
  set_scales(wide.weights.experts[0].down.scales, 0, 254);
  EXPECT_EQ(argument_of([&] { experts_->repack(wide.weights, 1, *packed); }), "weights.scales");
  other.hidden = 128;
  EXPECT_EQ(argument_of([&] { experts_->repack(make_problem(other).weights, 1, *packed); }),
            "weights");
  other = mxfp4_case();
  other.bias = false;
  EXPECT_EQ(argument_of([&] { experts_->repack(make_problem(other).weights, 1, *packed); }),
            "weights.bias");
  const Problem fine = make_problem(mxfp4_case());
  EXPECT_EQ(argument_of([&] { experts_->repack(fine.weights, 2, *packed); }), "expert");
  Case bf16 = mxfp4_case();
  bf16.scheme = schemes::unquantized(DType::kBF16);
  EXPECT_EQ(argument_of([&] { make_experts(bf16)->repack(fine.weights, 0, *packed); }), "packed");
  expect_packed(*packed, problem.weights);
}

}  // namespace
}  // namespace fusedmoe
