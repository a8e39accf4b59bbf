#include "quant/weight_layout.h"

#include <array>

#include "core/check.h"
#include "quant/quantize.h"

namespace fusedmoe::core {
namespace {

constexpr std::array kF32Values{DType::kF32};
constexpr std::array kF16Values{DType::kF16};
constexpr std::array kBF16Values{DType::kBF16};
constexpr std::array kE4M3Codes{DType::kE4M3, DType::kU8};
constexpr std::array kE8M0Codes{DType::kE8M0, DType::kU8};
constexpr std::array kI8Codes{DType::kI8};
constexpr std::array kBytes{DType::kU8};
constexpr std::array kWords{DType::kI32};
constexpr std::array kFloats{DType::kF32, DType::kF16, DType::kBF16};

constexpr std::int64_t kAny = 0;  // any extent of a block

struct Row {
  DType value;
  std::optional<DType> scale;
  GroupShape group;
  GlobalScale global_scale;
  bool may_have_zero_points;
  WeightLayout layout;
};

const std::array<Row, 12> kRows{{
    {DType::kF32, {}, {}, GlobalScale::kNone, false, {kF32Values}},
    {DType::kF16, {}, {}, GlobalScale::kNone, false, {kF16Values}},
    {DType::kBF16, {}, {}, GlobalScale::kNone, false, {kBF16Values}},
    {DType::kE4M3,
     DType::kF32,
     {kAny, kAny},
     GlobalScale::kNone,
     false,
     {kE4M3Codes, 1, false, kFloats}},
    {DType::kE4M3,
     DType::kE8M0,
     {1, 32},
     GlobalScale::kNone,
     false,
     {kE4M3Codes, 1, false, kE8M0Codes}},
    {DType::kE2M1, DType::kE8M0, {1, 32}, GlobalScale::kNone, false, {kBytes, 2, true, kE8M0Codes}},
    {DType::kE2M1,
     DType::kE4M3,
     {1, 16},
     GlobalScale::kPerMatrix,
     false,
     {kBytes, 2, true, kE4M3Codes}},
    {DType::kI4, DType::kF32, {1, kAny}, GlobalScale::kNone, true, {kWords, 8, false, kFloats}},
    {DType::kI4,
     DType::kE4M3,
     {1, kAny},
     GlobalScale::kPerRow,
     false,
     {kWords, 8, false, kE4M3Codes}},
    {DType::kU8, DType::kF32, {1, kAny}, GlobalScale::kNone, true, {kWords, 4, false, kFloats}},
    {DType::kI8, DType::kF32, {1, kAny}, GlobalScale::kNone, false, {kI8Codes, 1, false, kFloats}},
    {DType::kIq4, DType::kF32, {1, 32}, GlobalScale::kNone, false, {kWords, 8, false, kFloats}},
}};

bool fits(std::int64_t extent, std::int64_t allowed) {
  return allowed == kAny ? extent == -1 || extent > 0 : extent == allowed;
}

bool global_fits(const QuantKey& key, GlobalScale global) {
  switch (global) {
    case GlobalScale::kNone:
      return !key.global_scale;
    case GlobalScale::kPerMatrix:
      return key.global_scale == DType::kF32 && key.global_group == GroupShape{-1, -1};
    case GlobalScale::kPerRow:
      return key.global_scale == DType::kF32 && key.global_group == GroupShape{1, -1};
    case GlobalScale::kPerBlock:
      break;  // they have a table of their own, find_block_format()
  }
  return false;
}

}  // namespace

TensorView as_bytes(const TensorView& view, const std::string& argument) {
  if (!view || view.dtype() != DType::kE2M1) return view;
  Shape shape = view.shape(), strides = view.strides();
  const int last = view.rank() - 1;
  bool whole = last >= 0 && (view.size(last) <= 1 || view.stride(last) == 1);
  for (int dim = 0; whole && dim < last; ++dim) {
    whole = strides[dim] % 2 == 0 || shape[dim] <= 1;
    strides[dim] /= 2;
  }
  FUSEDMOE_CHECK_FAULT(
      whole, kLayout, argument,
      core::format("{} with strides {}", describe(view), to_string(view.strides())),
      "e2m1 in contiguous rows of an even number of elements");
  shape[last] = (shape[last] + 1) / 2;
  return TensorView(view.data(), DType::kU8, shape, strides, view.device());
}

namespace {

/// What follows from the key, whatever the row.
WeightLayout completed(WeightLayout layout, GlobalScale global_scale, const QuantKey& key) {
  layout.global_scale = global_scale;
  layout.global_group = key.global_group;
  layout.zero_points = !key.symmetric;
  if (key.symmetric && key.value == DType::kI4) layout.zero = 8;
  if (key.symmetric && key.value == DType::kU8) layout.zero = 128;
  return layout;
}

}  // namespace

std::string names(std::span<const DType> dtypes) {
  std::string text;
  for (std::size_t i = 0; i < dtypes.size(); ++i) {
    if (i > 0) text += i + 1 < dtypes.size() ? ", " : " or ";
    text += name(dtypes[i]);
  }
  return text;
}

std::optional<WeightLayout> find_weight_layout(const QuantKey& key) {
  if (find_block_format(key)) {
    const std::int64_t packing = key.value == DType::kU8 ? 4 : 8;
    const std::span<const DType> scales = key.scale == DType::kU8 ? kBytes : kI8Codes;
    return completed({kWords, packing, false, scales}, GlobalScale::kPerBlock, key);
  }
  for (const Row& row : kRows) {
    if (key.value != row.value || key.scale != row.scale || key.dynamic) continue;
    if (key.scale &&
        !(fits(key.group.rows, row.group.rows) && fits(key.group.cols, row.group.cols))) {
      continue;
    }
    if (!global_fits(key, row.global_scale)) continue;
    if (!key.symmetric && !row.may_have_zero_points) continue;
    return completed(row.layout, row.global_scale, key);
  }
  return std::nullopt;
}

WeightLayout weight_layout(const QuantKey& key, const char* argument) {
  const std::optional<WeightLayout> layout = find_weight_layout(key);
  FUSEDMOE_CHECK(layout, argument, name(QuantScheme{key, {}}), "a number format of weights");
  return *layout;
}

WeightMatrix make_matrix(const QuantKey& key, std::int64_t out, std::int64_t in,
                         const MatrixOrigin& origin,
                         std::vector<std::shared_ptr<const void>>& owners) {
  const auto tensor = [&](const Shape& shape, DType dtype) {
    Tensor result = Tensor::zeros(shape, dtype);
    owners.push_back(result.owner());
    return result;
  };
  const WeightLayout layout = weight_layout(key, "scheme.weights");
  WeightMatrix matrix;
  matrix.first_row = origin.first_row;
  matrix.first_col = origin.first_col;
  matrix.values = tensor(layout.values_shape(out, in), layout.values_dtypes.front());
  if (!layout.quantized()) return matrix;
  const Shape grid{num_blocks(out, key.group.rows, origin.first_row),
                   num_blocks(in, key.group.cols, origin.first_col)};
  matrix.scales = tensor(grid, origin.scales.value_or(*key.scale));
  if (layout.zero_points) matrix.zero_points = tensor(grid, DType::kU8);
  if (layout.global_scale != GlobalScale::kNone) {
    matrix.global_scale = tensor(layout.global_shape(out, in), layout.global_dtype());
  }
  return matrix;
}

}  // namespace fusedmoe::core
