// Sources: config.json and tensor tables of published checkpoints: DeepSeek-V3 (fp8),
// llm-compressor (compressed-tensors), NVIDIA ModelOpt, AutoGPTQ / GPTQModel, AutoAWQ.
#include "checkpoint/linear_layouts.h"

#include <array>

#include "core/check.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {
namespace {

using Layout = CheckpointLayout;

constexpr std::array kScaleTypes{DType::kF32, DType::kBF16, DType::kF16};
constexpr std::array kModelTypes{DType::kBF16, DType::kF16, DType::kF32};
constexpr std::array kHalf{DType::kF16, DType::kBF16, DType::kF32};
constexpr std::array kE4M3{DType::kE4M3};
constexpr std::array kE8M0{DType::kU8, DType::kE8M0};
constexpr std::array kBlockScaleTypes{DType::kF32, DType::kBF16, DType::kF16, DType::kE8M0};
constexpr std::array kPackedBytes{DType::kU8};
constexpr std::array kSignedBytes{DType::kI8};
constexpr std::array kPairs{DType::kI8, DType::kU8};
constexpr std::array kWords{DType::kI32};
constexpr std::array kIndices{DType::kI64, DType::kI32};
constexpr std::array kGroupScales{DType::kBF16, DType::kE4M3, DType::kF16, DType::kF32};

using enum Part;
using enum Form;
using enum Presence;

constexpr StoredTensor kInput{".input_scale", kInputScale, kScalar, kScaleTypes, kIfStatic};
constexpr StoredTensor kMatrix{".weight_shape", kNothing, kMatrixShape, kIndices, kOptional};
constexpr StoredTensor kGroups{".g_idx", kNothing, kTrivialGroupIndex, kWords, kOptional};

// quant_method fp8. weight_scale_inv multiplies, in spite of its name.
constexpr std::array<StoredTensor, 2> kFp8Block{{
    {".weight", kValues, kSame, kE4M3},
    {".weight_scale_inv", kScales, kSame, kBlockScaleTypes},
}};
// DeepSeek-V4: the same under another name, and experts in MXFP4.
constexpr std::array<StoredTensor, 2> kFp8BlockV4{{
    {".weight", kValues, kSame, kE4M3},
    {".scale", kScales, kSame, kBlockScaleTypes},
}};
constexpr std::array<StoredTensor, 2> kMxfp4V4{{
    {".weight", kValues, kSame, kPairs},
    {".scale", kScales, kSame, kE8M0},
}};
// ModelOpt: weights alone are quantized. Its files have (N/128, 1, K/128, 1), or () for one block.
constexpr std::array<StoredTensor, 2> kFp8BlockModelOpt{{
    {".weight", kValues, kSame, kE4M3},
    {".weight_scale", kScales, kBlocks, kScaleTypes},
}};
// As transformers writes and reads it.
constexpr std::array<StoredTensor, 3> kFp8TensorInv{{
    {".weight", kValues, kSame, kE4M3},
    {".weight_scale_inv", kScales, kScalar, kScaleTypes},
    {".activation_scale", kInputScale, kScalar, kScaleTypes, kIfStatic},
}};
// Also ModelOpt's; vLLM and AutoFP8 under fp8.
constexpr std::array<StoredTensor, 3> kFp8Tensor{{
    {".weight", kValues, kSame, kE4M3},
    {".weight_scale", kScales, kScalar, kScaleTypes},
    kInput,
}};

// compressed-tensors
constexpr std::array<StoredTensor, 3> kFp8TensorCt{{
    {".weight", kValues, kSame, kE4M3},
    {".weight_scale", kScales, kSingle, kScaleTypes},
    {".input_scale", kInputScale, kSingle, kScaleTypes, kIfStatic},
}};
constexpr std::array<StoredTensor, 2> kFp8Channel{{
    {".weight", kValues, kSame, kE4M3},
    {".weight_scale", kScales, kColumn, kScaleTypes},
}};
constexpr std::array<StoredTensor, 2> kFp8BlockCt{{
    {".weight", kValues, kSame, kE4M3},
    {".weight_scale", kScales, kSame, kScaleTypes},
}};
constexpr std::array<StoredTensor, 2> kInt8Channel{{
    {".weight", kValues, kSame, kSignedBytes},
    {".weight_scale", kScales, kColumn, kScaleTypes},
}};
constexpr std::array<StoredTensor, 5> kPacked{{
    {".weight_packed", kValues, kSame, kWords},
    {".weight_scale", kScales, kSame, kModelTypes},
    {".weight_zero_point", kZeroPoints, kZerosByRow, kWords, kIfZeroPoints},
    kMatrix,
    {".weight_g_idx", kNothing, kTrivialGroupIndex, kWords, kOptional, false},
}};
// As compressed-tensors writes it today, a byte for each value; or packed.
constexpr std::array<StoredTensor, 3> kW4A8{{
    {".weight", kValues, kBytes, kSignedBytes},
    {".weight_scale", kScales, kSame, kGroupScales},
    {".weight_chan_scale", kGlobalScale, kColumn, kScaleTypes, kOptional, false},
}};
constexpr std::array<StoredTensor, 4> kW4A8Packed{{
    {".weight_packed", kValues, kSame, kWords},
    {".weight_scale", kScales, kSame, kGroupScales},
    {".weight_chan_scale", kGlobalScale, kColumn, kScaleTypes, kOptional, false},
    kMatrix,
}};
constexpr std::array<StoredTensor, 4> kNvfp4Ct{{
    {".weight_packed", kValues, kSame, kPackedBytes},
    {".weight_scale", kScales, kSame, kE4M3},
    {".weight_global_scale", kGlobalScale, kReciprocal, kScaleTypes},
    {".input_global_scale", kInputScale, kReciprocal, kScaleTypes, kIfStatic},
}};
constexpr std::array<StoredTensor, 3> kMxfp4{{
    {".weight_packed", kValues, kSame, kPackedBytes},
    {".weight_scale", kScales, kSame, kE8M0},
    {".input_scale", kInputScale, kSingle, kScaleTypes, kIfStatic},
}};
// Also ModelOpt's.
constexpr std::array<StoredTensor, 2> kMxfp8{{
    {".weight", kValues, kSame, kE4M3},
    {".weight_scale", kScales, kSame, kE8M0},
}};

// ModelOpt
constexpr std::array<StoredTensor, 2> kFp8ChannelModelOpt{{
    {".weight", kValues, kSame, kE4M3},
    {".weight_scale", kScales, kVector, kScaleTypes},
}};
constexpr std::array<StoredTensor, 4> kNvfp4{{
    {".weight", kValues, kSame, kPackedBytes},
    {".weight_scale", kScales, kSame, kE4M3},
    {".weight_scale_2", kGlobalScale, kScalar, kScaleTypes},
    kInput,
}};

// GPTQ and AWQ. Symmetric GPTQ stores zero points, too.
constexpr std::array<StoredTensor, 4> kGptq{{
    {".qweight", kValues, kTransposed, kWords},
    {".qzeros", kZeroPoints, kZerosMinusOne, kWords},
    {".scales", kScales, kTransposed, kHalf},
    kGroups,
}};
constexpr std::array<StoredTensor, 4> kGptqV2{{
    {".qweight", kValues, kTransposed, kWords},
    {".qzeros", kZeroPoints, kZerosByColumn, kWords},
    {".scales", kScales, kTransposed, kHalf},
    kGroups,
}};
constexpr std::array<StoredTensor, 3> kAwq{{
    {".qweight", kValues, kAwqValues, kWords},
    {".qzeros", kZeroPoints, kAwqZeros, kWords},
    {".scales", kScales, kTransposed, kHalf},
}};

/// What decides about the layout of weights: more than a type, less than a key.
enum class Kind {
  kFp8Tensor,
  kFp8Row,
  kFp8Block,
  kMxfp8,
  kMxfp4,
  kNvfp4,
  kW4A8,
  kInt4,
  kInt8Words,
  kInt8,
  kOther
};

Kind kind_of(const QuantKey& key) {
  switch (key.value) {
    case DType::kE4M3:
      if (key == keys::e4m3_tensor()) return Kind::kFp8Tensor;
      if (key == keys::e4m3_row()) return Kind::kFp8Row;
      if (key == keys::e4m3_block()) return Kind::kFp8Block;
      return key == keys::mxfp8() ? Kind::kMxfp8 : Kind::kOther;
    case DType::kE2M1:
      if (key == keys::mxfp4()) return Kind::kMxfp4;
      return key == keys::nvfp4() ? Kind::kNvfp4 : Kind::kOther;
    case DType::kI4:
      if (key == keys::int4_e4m3()) return Kind::kW4A8;
      return key == keys::int4(key.group.cols, key.symmetric) ? Kind::kInt4 : Kind::kOther;
    case DType::kU8:
      return key == keys::int8(key.group.cols, key.symmetric) ? Kind::kInt8Words : Kind::kOther;
    case DType::kI8:
      return key == keys::int8_row() ? Kind::kInt8 : Kind::kOther;
    default:
      return Kind::kOther;
  }
}

struct Row {
  Kind kind;
  LinearLayout layout;
};

constexpr std::array<Row, 26> kTable{{
    {Kind::kFp8Block, {Layout::kFp8, kFp8Block}},
    {Kind::kFp8Block, {Layout::kFp8, kFp8BlockV4}},
    {Kind::kMxfp4, {Layout::kFp8, kMxfp4V4}},
    {Kind::kFp8Tensor, {Layout::kFp8, kFp8TensorInv}},
    {Kind::kFp8Tensor, {Layout::kFp8, kFp8Tensor}},
    {Kind::kFp8Tensor, {Layout::kCompressedTensors, kFp8TensorCt}},
    {Kind::kFp8Row, {Layout::kCompressedTensors, kFp8Channel}},
    {Kind::kFp8Block, {Layout::kCompressedTensors, kFp8BlockCt}},
    {Kind::kInt8, {Layout::kCompressedTensors, kInt8Channel}},
    {Kind::kInt4, {Layout::kCompressedTensors, kPacked}},
    {Kind::kInt8Words, {Layout::kCompressedTensors, kPacked}},
    {Kind::kW4A8, {Layout::kCompressedTensors, kW4A8}},
    {Kind::kW4A8, {Layout::kCompressedTensors, kW4A8Packed}},
    {Kind::kNvfp4, {Layout::kCompressedTensors, kNvfp4Ct}},
    {Kind::kMxfp4, {Layout::kCompressedTensors, kMxfp4}},
    {Kind::kMxfp8, {Layout::kCompressedTensors, kMxfp8}},
    {Kind::kFp8Tensor, {Layout::kModelOpt, kFp8Tensor}},
    {Kind::kFp8Row, {Layout::kModelOpt, kFp8ChannelModelOpt}},
    {Kind::kFp8Block, {Layout::kModelOpt, kFp8BlockModelOpt}},
    {Kind::kMxfp8, {Layout::kModelOpt, kMxfp8}},
    {Kind::kNvfp4, {Layout::kModelOpt, kNvfp4}},
    {Kind::kInt4, {Layout::kGptq, kGptq}},
    {Kind::kInt8Words, {Layout::kGptq, kGptq}},
    {Kind::kInt4, {Layout::kGptqV2, kGptqV2}},
    {Kind::kInt8Words, {Layout::kGptqV2, kGptqV2}},
    {Kind::kInt4, {Layout::kAwq, kAwq}},
}};

}  // namespace

std::vector<const LinearLayout*> linear_layouts(CheckpointLayout layout, const QuantKey& weights) {
  const Kind kind = kind_of(weights);
  std::vector<const LinearLayout*> result;
  for (const Row& row : kTable) {
    if (row.kind == kind && row.layout.layout == layout) result.push_back(&row.layout);
  }
  return result;
}

const LinearLayout* find_linear_layout(CheckpointLayout layout, const QuantKey& weights) {
  const auto rows = linear_layouts(layout, weights);
  return rows.empty() ? nullptr : rows.front();
}

QuantKey written_key(const QuantKey& weights) {
  return weights == keys::int4_e4m3() ? keys::int4(weights.group.cols) : weights;
}

bool has_input_scale(const QuantScheme& scheme) {
  return scheme.activations && (!scheme.activations->dynamic || scheme.activations->global_scale);
}

bool is_required(const StoredTensor& stored, const QuantScheme& scheme) {
  switch (stored.presence) {
    case kAlways:
      return true;
    case kIfZeroPoints:
      return !scheme.weights.symmetric;
    case kIfStatic:
    case kOptional:
      return false;
  }
  return false;
}

bool is_written(const StoredTensor& stored, const QuantScheme& scheme) {
  if (!stored.written) return false;
  if (stored.presence == kIfStatic) return has_input_scale(scheme);
  return stored.presence == kOptional || is_required(stored, scheme);
}

bool is_allowed(const StoredTensor& stored, const QuantScheme& scheme) {
  return stored.presence != kIfZeroPoints || is_required(stored, scheme);
}

void split_group_scales(const QuantKey& weights, WeightMatrix& matrix,
                        std::vector<std::shared_ptr<const void>>& owners) {
  if (weights != keys::int4_e4m3()) return;
  const bool split = matrix.global_scale.defined();
  FUSEDMOE_CHECK_FILE(is_float(matrix.scales.dtype()) != split, "weight_scale",
                      core::format("{} {} weight_chan_scale", name(matrix.scales.dtype()),
                                   split ? "beside" : "without"),
                      "e4m3 beside weight_chan_scale, or a floating type without");
  if (split) return;
  // The scales of a row become E4M3 with a scale of their own; an eighth of their size, so that
  // -8 times a scale stays in range.
  const Tensor groups = Tensor::empty(matrix.scales.shape(), DType::kF32);
  convert(matrix.scales, groups);
  const std::int64_t rows = groups.size(0);
  const Tensor codes = Tensor::empty(groups.shape(), DType::kE4M3);
  const Tensor channels = Tensor::empty({rows, 1}, DType::kF32);
  quantize(groups, keys::e4m3_row(true), codes, channels);
  for (std::int64_t i = 0; i < codes.numel(); ++i) {
    std::uint8_t& code = codes.as<std::uint8_t>()[i];
    code = f32_to_e4m3(e4m3_to_f32(code) / 8);
  }
  for (std::int64_t row = 0; row < rows; ++row) channels.as<float>()[row] *= 8;
  matrix.scales = codes;
  matrix.global_scale = channels.reshape({rows});
  owners.push_back(codes.owner());
  owners.push_back(channels.owner());
}

}  // namespace fusedmoe::checkpoint
