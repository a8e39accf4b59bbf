// Every scheme that the experts run, for each dtype of rows: against the reference, in every
// tile configuration, and back from packed weights. Quantized activations have the bits of the CPU.
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../ranks/same_parts.h"
#include "../unit/temporary_directory.h"
#include "cuda/mlp/kernel_choice.h"
#include "cuda/rows/permute.h"
#include "cuda_test.h"
#include "experts_problem.h"
#include "fusedmoe/packed_file.h"
#include "fusedmoe/quant.h"
#include "scheme_rows.h"

namespace fusedmoe {
namespace {

using testing::all_rows;
using testing::bitwise_equal;
using testing::Case;
using testing::expect_close;
using testing::kGpu;
using testing::kHost;
using testing::Problem;
using testing::Rows;
using testing::to_gpu;
using testing::to_host;
using testing::Variant;

class CudaSchemes : public testing::CudaTestWith<Rows> {};
INSTANTIATE_TEST_SUITE_P(All, CudaSchemes, ::testing::ValuesIn(all_rows()),
                         [](const auto& info) { return info.param.name(); });

TEST_P(CudaSchemes, MatchReference) {
  const auto& [scheme, dtype] = GetParam();
  for (Case spec : testing::scheme_cases(scheme)) {
    if (spec.hidden % 8 != 0) continue;  // for the CPU
    if (scheme.scheme.weights.value == DType::kE2M1 && spec.intermediate % 2 != 0) continue;
    if (testing::needs_whole_slices(scheme.scheme) && spec.intermediate % 8 != 0) continue;
    if (spec.scale_dtype == DType::kBF16) spec.scale_dtype = dtype;
    SCOPED_TRACE(spec.name);
    const Problem problem = testing::make_problem(spec);
    const auto reference = [&](const char* name) {
      return testing::run_variant(problem, testing::find_variant(name), dtype, kHost);
    };
    const Tensor fused = reference("reference"), unfused = reference("reference_unfused");
    const auto variants = testing::variants_for(testing::make_config(spec, dtype, kGpu));
    EXPECT_FALSE(variants.empty());
    for (const Variant& variant : variants) {
      SCOPED_TRACE(variant.name());
      const Tensor actual = testing::run_variant(problem, variant, dtype, kGpu);
      expect_close(actual, variant.hooks ? unfused : fused, scheme.scheme);
      EXPECT_TRUE(bitwise_equal(testing::run_variant(problem, variant, dtype, kGpu), actual));
    }
  }
}

TEST_P(CudaSchemes, EveryConfiguration) {
  const auto& [scheme, dtype] = GetParam();
  for (const std::int64_t tokens : {1, 9, 25, 60, 96, 150, 300}) {
    Case spec;
    spec.num_tokens = tokens;
    spec.num_experts = 5;
    spec.hidden = 480;
    // With 25 tokens a row is more than a warp of the row pass takes by itself.
    spec.intermediate = tokens == 25 ? 2320 : tokens % 2 == 0 ? 192 : 320;
    spec.scheme = scheme.scheme;
    spec.activation = Activation::kSwigluOai;
    spec.bias = true;
    spec.skew = testing::RoutingSkew::kOneExpert;
    spec.scale_dtype = dtype;
    SCOPED_TRACE(std::to_string(tokens) + " tokens");
    const Problem problem = testing::make_problem(spec);
    const Tensor expected =
        testing::run_variant(problem, testing::find_variant("reference"), dtype, kHost);
    cuda::MlpShape shape;
    shape.family = &testing::gpu_family();
    shape.format = &testing::format_of(scheme.scheme, dtype);
    shape.num_tokens = tokens;
    shape.topk = spec.topk;
    shape.num_local_experts = spec.num_experts;
    shape.hidden = spec.hidden;
    shape.intermediate = spec.intermediate;
    shape.has_one_token =
        tokens == 1 && !testing::has_tensor_scale(scheme.scheme) && !shape.format->int8_rows;
    for (const cuda::KernelConfig& config : cuda::valid_configs(shape)) {
      SCOPED_TRACE(to_string(config));
      testing::RunOptions options;
      options.kernel_config = cuda::find_config(testing::gpu_family(), to_string(config));
      const Tensor actual =
          testing::run_variant(problem, testing::gpu_variant(), dtype, kGpu, options);
      expect_close(actual, expected, scheme.scheme);
      EXPECT_TRUE(bitwise_equal(
          testing::run_variant(problem, testing::gpu_variant(), dtype, kGpu, options), actual))
          << "second run";
    }
  }
}

TEST_P(CudaSchemes, UnpackIsTheInverse) {
  const auto& [scheme, dtype] = GetParam();
  Case spec;
  spec.num_experts = 2;
  spec.hidden = 360;
  spec.intermediate = testing::needs_whole_slices(scheme.scheme) ? 136 : 90;
  spec.scheme = scheme.scheme;
  spec.scale_dtype = dtype;
  const Problem problem = testing::make_problem(spec);
  const Variant variant = testing::gpu_variant();
  const auto experts =
      variant.experts->create(variant.of(testing::make_config(spec, dtype, kGpu)), Context{});
  const auto packed = experts->pack(problem.weights);
  for (std::int64_t e = 0; e < spec.num_experts; ++e) {
    const ExpertWeights unpacked = experts->unpack(*packed, e);
    const ExpertMatrices &actual = unpacked.experts[0],
                         &expected = problem.weights.experts[static_cast<std::size_t>(e)];
    const QuantKey& key = scheme.scheme.weights;
    const auto expect_same = [&](const WeightMatrix& a, const WeightMatrix& b, std::int64_t in) {
      const Tensor left = dequantize_weights(a, key, in), right = dequantize_weights(b, key, in);
      for (std::int64_t i = 0; i < left.numel(); ++i) {  // a zero may lose its sign
        ASSERT_EQ(left.as<const float>()[i], right.as<const float>()[i]) << i;
      }
    };
    expect_same(actual.gate, expected.gate, spec.hidden);
    expect_same(actual.up, expected.up, spec.hidden);
    expect_same(actual.down, expected.down, spec.intermediate);
  }
}

// ------------------------------------------------------------------------------------------------
// Quantizers

struct RowsShape {
  std::int64_t rows = 24, columns = 360;
};

/// Rows of all sizes of numbers; zeros, infinities and NaN among them.
Tensor odd_rows(DType dtype, const RowsShape& shape) {
  const Tensor rows = Tensor::empty({shape.rows, shape.columns}, dtype);
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < rows.numel(); ++i) {
    const std::int64_t row = i / shape.columns, column = i % shape.columns;
    float value = std::ldexp(normal(random), static_cast<int>(row * 9 % 67) - 33);
    if (row == 3) value = 0;
    if (row == 4 && column == 40) value = std::numeric_limits<float>::infinity();
    if (row == 5 && column == 300) value = std::numeric_limits<float>::quiet_NaN();
    if (row == 6) value = column % 3 == 0 ? 0x1p-126F : 0;
    if (row == 7) value = std::ldexp(1.0F + static_cast<float>(column % 16) / 8, 3);  // ties
    if (row == 8 && column < 96) value = column % 2 == 0 ? -0.0F : 0.0F;
    store_f32(rows.data(), dtype, i, value);
  }
  return rows;
}

/// All rows are of one expert.
struct OneExpert {
  RowsShape shape;
  Tensor rows, offsets = Tensor::empty({2}, DType::kI32);
  OneExpert(DType dtype, const RowsShape& shape)
      : shape(shape), rows(to_gpu(odd_rows(dtype, shape))) {
    offsets.as<std::int32_t>()[0] = 0;
    offsets.as<std::int32_t>()[1] = static_cast<std::int32_t>(shape.rows);
    offsets = to_gpu(offsets);
  }
  cuda::TransformRows args() const {
    cuda::TransformRows args;
    args.rows.rows = rows.data();
    args.rows.row_pitch = args.rows.row_bytes = shape.columns * 2;
    args.num_rows = shape.rows;
    args.num_experts = 1;
    args.expert_offsets = offsets.as<const std::int32_t>();
    return args;
  }
};

struct Quantized {
  Tensor values, scales;
};
Quantized quantized_on_cpu(const QuantKey& key, std::optional<float> scale, const RowsShape& rows,
                           DType dtype = DType::kBF16) {
  const QuantizedShape shape = quantized_shape(key, rows.rows, rows.columns);
  Quantized result{Tensor::empty(shape.values, shape.values_dtype),
                   Tensor::empty(shape.scales, shape.scales_dtype)};
  quantize(odd_rows(dtype, rows), key, result.values, result.scales, scale);
  return result;
}

class CudaQuantizers : public testing::CudaTest {};

TEST_F(CudaQuantizers, DecodedRowsAreThoseOfTheCpu) {
  struct Kind {
    QuantKey key;
    cuda::RowQuantizer::Kind kind;
  };
  std::vector<Kind> kinds{{keys::mxfp8(true), cuda::RowQuantizer::Kind::kMxfp8},
                          {keys::nvfp4(true), cuda::RowQuantizer::Kind::kNvfp4}};
  for (const MxScaleRule rule :
       {MxScaleRule::kOcp, MxScaleRule::kEven, MxScaleRule::kCeil, MxScaleRule::kFloor}) {
    kinds.push_back({keys::mxfp4(true, rule), cuda::RowQuantizer::Kind::kMxfp4});
  }
  const RowsShape shape;
  const float global = 0.037F;
  const Tensor scale = Tensor::empty({1}, DType::kF32);
  *scale.as<float>() = global;
  const Tensor on_gpu = to_gpu(scale);
  for (const auto& [key, kind] : kinds) {
    SCOPED_TRACE(fusedmoe::name(QuantScheme{keys::mxfp4(), key}));
    const OneExpert one(DType::kBF16, shape);
    const Tensor out = Tensor::empty({shape.rows, shape.columns}, DType::kBF16, kGpu);
    cuda::TransformRows args = one.args();
    args.rows.kind = cuda::RowTransform::Kind::kQuantizeAndDecode;
    args.rows.to = out.data();
    args.rows.to_pitch = shape.columns * 2;
    args.rows.decoded = {kind, key.scale_rule, on_gpu.as<const float>()};
    cuda::transform_rows(args, false, Stream{kGpu});
    const Tensor actual = to_host(out);
    const bool nvfp4 = kind == cuda::RowQuantizer::Kind::kNvfp4;
    const Quantized expected =
        quantized_on_cpu(key, nvfp4 ? std::optional<float>(global) : std::nullopt, shape);
    for (std::int64_t i = 0; i < shape.rows * shape.columns; ++i) {
      const std::int64_t row = i / shape.columns, column = i % shape.columns;
      const DType dtype = key.value;
      const float code =
          load_f32(expected.values.data(), dtype,
                   dtype == DType::kE2M1 ? row * ((shape.columns + 1) / 2) * 2 + column : i);
      const float block = load_f32(expected.scales.data(), *key.scale,
                                   row * expected.scales.size(1) + column / key.group.cols);
      const float value = load_f32(actual.data(), DType::kBF16, i);
      const float wanted = bf16_to_f32(f32_to_bf16(code * block));
      ASSERT_TRUE(value == wanted || (std::isnan(value) && std::isnan(wanted)))
          << "row " << row << " column " << column << ": " << value << ", not " << wanted;
    }
  }
}

/// Where a column is in a row of FP8 as f16, see e4m3_f16.cuh.
std::int64_t place_of_fp8_as_f16(std::int64_t column) {
  return column / 16 * 16 + (column % 2 == 0 ? 8 : 0) + column % 16 / 2;
}

/// `fp8_as_f16`: the numbers that E4M3 codes are.
void expect_codes_of_the_cpu(DType dtype, const RowsShape& shape, bool fp8_as_f16 = false) {
  using Kind = cuda::RowTransform::Kind;
  SCOPED_TRACE(std::to_string(shape.rows) + " x " + std::to_string(shape.columns));
  const QuantKey full = *parse_scheme("int8_w8a8:full").activations;
  for (const QuantKey& key :
       {keys::e4m3_tensor(), keys::e4m3_tensor(true), keys::e4m3_row(true), keys::e4m3_group(),
        keys::e4m3_group(true), keys::int8_row(true), full}) {
    const bool int8 = key.value == DType::kI8;
    if (int8 && fp8_as_f16) continue;
    SCOPED_TRACE(fusedmoe::name(QuantScheme{int8 ? keys::int8_row() : keys::e4m3_tensor(), key}));
    const OneExpert one(dtype, shape);
    const std::int64_t pitch = shape.columns + 8;
    const std::int64_t groups = key.group.cols > 0 ? (shape.columns + 127) / 128 : 1;
    const DType stored = fp8_as_f16 ? DType::kF16 : key.value;
    const Tensor codes = Tensor::empty({shape.rows, pitch}, stored, kGpu);
    const Tensor scales = Tensor::zeros({groups, shape.rows}, DType::kF32, kGpu);
    const Tensor amax = Tensor::zeros({1}, DType::kI32, kGpu);
    cuda::TransformRows args = one.args();
    args.rows.kind = int8 ? Kind::kInt8 : fp8_as_f16 ? Kind::kFp8AsF16 : Kind::kFp8;
    args.rows.full_range = key.full_range;
    args.rows.from_f16 = dtype == DType::kF16;
    args.rows.to = codes.data();
    args.rows.to_pitch = bytes(stored, pitch);
    args.rows.scales = key.dynamic ? scales.as<float>() : nullptr;
    args.rows.scale_pitch = groups > 1 ? shape.rows : 0;
    const std::optional<float> static_scale =
        key.dynamic ? std::nullopt : std::optional<float>(0.021F);
    if (!int8) args.rows.fp8 = cuda::fp8_quantizer(key, static_scale, amax.as<std::uint32_t>());
    cuda::transform_rows(args, false, Stream{kGpu});
    const Tensor actual = to_host(codes), actual_scales = to_host(scales);
    const Quantized expected = quantized_on_cpu(key, static_scale, shape, dtype);
    for (std::int64_t i = 0; i < shape.rows * shape.columns; ++i) {
      const std::int64_t row = i / shape.columns, column = i % shape.columns;
      const std::int64_t at = row * pitch + (fp8_as_f16 ? place_of_fp8_as_f16(column) : column);
      const float code = load_f32(expected.values.data(), key.value, i);
      const float value = load_f32(actual.data(), stored, at);
      ASSERT_TRUE(std::isnan(code) ? std::isnan(value)
                                   : std::bit_cast<int>(value) == std::bit_cast<int>(code))
          << "row " << row << " column " << column << ": " << value << ", not " << code;
      if (!key.dynamic) continue;
      const std::int64_t group = key.group.cols > 0 ? column / key.group.cols : 0;
      const float wanted = load_f32(expected.scales.data(), *key.scale,
                                    key.group.rows < 0 ? 0 : row * groups + group);
      ASSERT_EQ(actual_scales.as<const float>()[group * shape.rows + row], wanted) << "row " << row;
    }
  }
}

TEST_F(CudaQuantizers, CodesAndScalesAreThoseOfTheCpu) {
  // Few rows, and many that a warp keeps in registers, in two sizes.
  for (const RowsShape& shape : {RowsShape{}, RowsShape{600, 360}, RowsShape{600, 1800}}) {
    expect_codes_of_the_cpu(DType::kBF16, shape);
  }
}
TEST_F(CudaQuantizers, CodesOfF16RowsAreThoseOfTheCpu) {
  expect_codes_of_the_cpu(DType::kF16, {});
}
TEST_F(CudaQuantizers, RowsAsF16HaveTheCodesOfTheCpu) {
  for (const RowsShape& shape : {RowsShape{}, RowsShape{600, 360}, RowsShape{600, 1800}}) {
    expect_codes_of_the_cpu(DType::kBF16, shape, true);
  }
}

// ------------------------------------------------------------------------------------------------
// Sums of INT8

/// Fills a matrix with codes from 64 to 127, so large that sums reach some 2^25, which fp32 cannot
/// hold exactly. The scale is a power of two, so multiplying by it rounds nothing.
void fill(const WeightMatrix& matrix, float scale) {
  for (std::int64_t r = 0; r < matrix.values.size(0); ++r) {
    for (std::int64_t c = 0; c < matrix.values.size(1); ++c) {
      const std::int64_t at = r * matrix.values.stride(0) + c * matrix.values.stride(1);
      matrix.values.as<std::int8_t>()[at] =
          static_cast<std::int8_t>(64 + (r * 37 + c * (11 + r)) % 64);
    }
    matrix.scales.as<float>()[r * matrix.scales.stride(0)] = scale;
  }
}

class CudaInt8 : public testing::CudaTest {};

/// fp32 does not hold the sums: they are rounded once, as on the CPU.
TEST_F(CudaInt8, SumsAreExact) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const char* scheme : {"int8_w8a8", "int8_w8a8:full"}) {
      SCOPED_TRACE(std::string(scheme) + " " + std::string(name(dtype)));
      Case spec;
      spec.num_tokens = 150;
      spec.num_experts = 3;
      spec.topk = 1;
      spec.hidden = spec.intermediate = 4104;
      spec.scheme = parse_scheme(scheme);
      spec.activation = Activation::kRelu2NoMul;
      spec.skew = testing::RoutingSkew::kOneExpert;
      if (!testing::has_kernels(spec.scheme, dtype)) GTEST_SKIP() << "no kernels of INT8";
      const Problem problem = testing::make_problem(spec);
      for (const ExpertMatrices& expert : problem.weights.experts) {
        fill(expert.gate, 0x1p-24F);
        fill(expert.down, 0x1p-20F);
      }
      for (std::int64_t i = 0; i < problem.hidden_states.numel(); ++i) {
        const std::int64_t column = i % spec.hidden;
        const std::int64_t value =
            column == 0 ? 127 : 64 + (i / spec.hidden * 5 + column * 29) % 64;
        problem.hidden_states.as<float>()[i] = static_cast<float>(value);
      }
      for (std::int64_t i = 0; i < spec.num_tokens; ++i) problem.topk_weights.as<float>()[i] = 1;
      const Tensor expected =
          testing::run_variant(problem, testing::find_variant("cpu"), dtype, kHost);
      const cuda::WeightFormat& format = testing::format_of(spec.scheme, dtype);
      for (const cuda::TileShape& tile : testing::gpu_family().tiles(format)) {
        SCOPED_TRACE(to_string(tile));
        testing::RunOptions options;
        options.kernel_config =
            cuda::find_config(testing::gpu_family(), to_string(cuda::KernelConfig{tile, 1, false}));
        const Tensor actual =
            testing::run_variant(problem, testing::gpu_variant(), dtype, kGpu, options);
        EXPECT_TRUE(bitwise_equal(actual, expected))
            << testing::compare(actual, expected).to_string();
      }
    }
  }
}

/// A small layer, and the experts under test for it.
auto small_layer(const NamedScheme& scheme, DType dtype) {
  Case spec = testing::scheme_cases(scheme).front();
  spec.hidden = 256;
  spec.intermediate = 128;
  spec.bias = true;
  Problem problem = testing::make_problem(spec);
  const Variant variant = testing::gpu_variant();
  auto experts = variant.experts->create(variant.of(testing::make_config(spec, dtype, kGpu)), {});
  return std::pair(std::move(problem), std::move(experts));
}

/// From a file the same bits come to the device, and the forward and unpacking with them.
TEST_P(CudaSchemes, PackedWeightsComeBackFromFiles) {
  const auto& [scheme, dtype] = GetParam();
  const testing::TemporaryDirectory folder;
  const auto [problem, experts] = small_layer(scheme, dtype);
  const auto packed = experts->pack(problem.weights);
  const std::int64_t bytes = experts->descriptor().packed_bytes(experts->config());
  EXPECT_GE(bytes, packed->nbytes());
  EXPECT_LE(bytes, packed->nbytes() + packed->nbytes() / 8);
  save_packed(*experts, *packed, folder / "packed");
  const auto loaded = load_packed(*experts, {folder / "packed"});
  EXPECT_TRUE(experts->accepts(*loaded));
  testing::expect_same_parts(*loaded, *packed);
}

/// Each expert goes as its parts, which lie on the device, to its place in other weights.
TEST_P(CudaSchemes, ExpertsMoveAsTheyArePacked) {
  const auto& [scheme, dtype] = GetParam();
  const auto [problem, experts] = small_layer(scheme, dtype);
  const auto packed = experts->pack(problem.weights), room = experts->make_room(*packed);
  EXPECT_EQ(room->expert_layout(), packed->expert_layout());
  PackedWeights::Info info = packed->info();
  info.num_experts = 1;
  for (std::int64_t e = 0; e < packed->info().num_experts; ++e) {
    PackedParts parts = packed->extract_expert(e)->parts();
    for (auto& [name, part] : parts) part = to_gpu(part);
    room->replace_expert(e, *experts->from_parts(info, parts));
  }
  testing::expect_same_parts(*room, *packed);
  EXPECT_THROW(room->replace_expert(packed->info().num_experts, *packed->extract_expert(0)), Error);
  EXPECT_THROW(room->replace_expert(0, *packed), Error) << "of one expert alone";
}

}  // namespace
}  // namespace fusedmoe
