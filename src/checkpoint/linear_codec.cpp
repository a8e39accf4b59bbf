// Stored tensor <-> part of a WeightMatrix. Views wherever the bits already lie as WeightMatrix has
// them; AWQ words, packed zero points and reciprocals are unpacked into memory of their own.
#include "checkpoint/linear_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/ceil_div.h"
#include "core/check.h"
#include "core/copy_rows.h"
#include "fusedmoe/quant.h"
#include "quant/quantize.h"

namespace fusedmoe::checkpoint {
namespace {

using core::ceil_div;
using enum Form;

constexpr std::int64_t kWordBits = 32;

/// Integer codes in a word.
std::int64_t per_word(const QuantKey& key) {
  return key.value == DType::kU8 ? 4 : 8;
}

Shape values_shape(const QuantKey& key, LinearShape shape) {
  std::int64_t in = shape.in;
  if (key.value == DType::kE2M1) in = ceil_div(in, 2);
  if (key.value == DType::kI4 || key.value == DType::kU8) in = ceil_div(in, per_word(key));
  return {shape.out, in};
}

Shape scales_shape(const QuantKey& key, LinearShape shape) {
  const GroupShape group = key.group;
  return {group.rows < 0 ? 1 : ceil_div(shape.out, group.rows),
          group.cols < 0 ? 1 : ceil_div(shape.in, group.cols)};
}

/// What WeightMatrix has in this place.
Shape part_shape(Part part, const QuantKey& key, LinearShape shape) {
  switch (part) {
    case Part::kValues:
      return values_shape(key, shape);
    case Part::kScales:
    case Part::kZeroPoints:
      return scales_shape(key, shape);
    case Part::kGlobalScale:
      return {key.global_group.rows == 1 ? shape.out : 1};
    case Part::kInputScale:
      return {1};
    case Part::kNothing:
      return {};
  }
  return {};
}

TensorView& part_of(WeightMatrix& matrix, Part part) {
  switch (part) {
    case Part::kScales:
      return matrix.scales;
    case Part::kZeroPoints:
      return matrix.zero_points;
    case Part::kGlobalScale:
      return matrix.global_scale;
    case Part::kInputScale:
      return matrix.input_scale;
    case Part::kValues:
    case Part::kNothing:
      break;
  }
  return matrix.values;
}

/// A contiguous copy in another dtype: converted between floating types, else the same bytes.
Tensor copy_as(const TensorView& source, DType dtype) {
  Tensor result = Tensor::empty(source.shape(), dtype);
  if (is_float(dtype)) {
    convert(source, result);
    return result;
  }
  FUSEDMOE_CHECK_FILE(bits(source.dtype()) == bits(dtype) && source.rank() == 2, "tensor",
                      core::describe(source), core::format("a matrix of {}", name(dtype)));
  core::copy_matrix(source, result);
  return result;
}

/// Powers of two as the floats that they are.
Tensor e8m0_as_f32(const TensorView& codes) {
  Tensor result = Tensor::empty(codes.shape(), DType::kF32);
  float* next = result.as<float>();
  for (std::int64_t row = 0; row < codes.size(0); ++row) {
    for (std::int64_t col = 0; col < codes.size(1); ++col) {
      *next++ = load_f32(codes.data(), DType::kE8M0, row * codes.stride(0) + col * codes.stride(1));
    }
  }
  return result;
}

TensorView as_u8(const TensorView& bytes) {
  return {bytes.data(), DType::kU8, bytes.shape(), bytes.strides(), bytes.device()};
}

// ------------------------------------------------------------------------------------------------
// Packed integers

/// A tensor of packed zero points as (groups, words of outputs).
TensorView zero_words(Form form, const TensorView& tensor) {
  return form == kZerosByRow ? tensor.transpose(0, 1) : tensor;
}

CodeOrder order_of(Form form) {
  return form == kAwqZeros ? CodeOrder::kAwq : CodeOrder::kSequential;
}

/// Adds `step` to every code of that many bits, modulo 2^bits.
void shift_codes(const Tensor& codes, int step, std::int64_t bits) {
  const int mask = (1 << bits) - 1;
  auto* code = codes.as<std::uint8_t>();
  for (std::int64_t i = 0; i < codes.numel(); ++i) {
    code[i] = static_cast<std::uint8_t>((code[i] + step) & mask);
  }
}

/// Zero points (out, groups) u8.
Tensor unpack_zeros(Form form, const TensorView& tensor, const QuantKey& key, LinearShape shape) {
  const std::int64_t width = kWordBits / per_word(key);
  Tensor zeros = Tensor::empty(scales_shape(key, shape), DType::kU8);
  unpack_codes(zero_words(form, tensor), zeros.transpose(0, 1), static_cast<int>(width),
               order_of(form));
  if (form == kZerosMinusOne) shift_codes(zeros, 1, width);
  return zeros;
}

Tensor pack_zeros(Form form, const TensorView& zeros, const QuantKey& key, LinearShape shape,
                  const Shape& words) {
  const std::int64_t width = kWordBits / per_word(key);
  const Tensor codes = Tensor::empty(scales_shape(key, shape), DType::kU8);
  if (zeros.defined()) {
    core::copy_matrix(zeros, codes);
  } else {
    std::memset(codes.data(), 1 << (width - 1), static_cast<std::size_t>(codes.nbytes()));
  }
  if (form == kZerosMinusOne) shift_codes(codes, -1, width);
  Tensor result = Tensor::empty(words, DType::kI32);
  pack_codes(codes.transpose(0, 1), zero_words(form, result), static_cast<int>(width),
             order_of(form));
  return result;
}

void check_middle(const Tensor& zeros, const QuantKey& key) {
  const unsigned middle = key.value == DType::kU8 ? 128 : 8;
  const auto* codes = zeros.as<const std::uint8_t>();
  for (std::int64_t i = 0; i < zeros.numel(); ++i) {
    FUSEDMOE_CHECK_FILE(codes[i] == middle, "zero point", core::to_string(codes[i]),
                        core::format("{}, as the config says symmetric", middle));
  }
}

/// Int4 values in bytes -> words of codes, which are the values plus 8.
Tensor pack_bytes(const TensorView& bytes, const QuantKey& key, LinearShape shape) {
  const Tensor codes = Tensor::empty({shape.out, shape.in}, DType::kU8);
  const auto* value = bytes.as<const std::int8_t>();
  for (std::int64_t i = 0; i < codes.numel(); ++i) {
    FUSEDMOE_CHECK_FILE(value[i] >= -8 && value[i] <= 7, "contents",
                        core::to_string(static_cast<int>(value[i])), "from -8 to 7");
    codes.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(value[i] + 8);
  }
  Tensor words = Tensor::empty(values_shape(key, shape), DType::kI32);
  pack_codes(codes, words);
  return words;
}

/// Exchanges the dimensions of int4 codes in words: (in, out / 8) in AWQ's order and (out, in / 8)
/// in sequence. `to_awq` says which of the two is the target.
void transpose_awq(const TensorView& awq, const TensorView& words, LinearShape shape, bool to_awq) {
  constexpr std::int64_t kRows = 64;  // whose codes stay in the cache
  const Tensor block = Tensor::empty({kRows, shape.out}, DType::kU8);
  for (std::int64_t begin = 0; begin < shape.in; begin += kRows) {
    const std::int64_t end = std::min(shape.in, begin + kRows);
    const TensorView codes = block.slice(0, 0, end - begin);
    const TensorView rows = awq.slice(0, begin, end);
    const TensorView columns = words.slice(1, begin / 8, ceil_div(end, 8));
    if (to_awq) {
      unpack_codes(columns, codes.transpose(0, 1));
      pack_codes(codes, rows, 4, CodeOrder::kAwq);
    } else {
      unpack_codes(rows, codes, 4, CodeOrder::kAwq);
      pack_codes(codes.transpose(0, 1), columns);
    }
  }
}

// ------------------------------------------------------------------------------------------------
// Tensors without values

void check_matrix_shape(const TensorView& tensor, LinearShape shape) {
  const auto at = [&](int i) {
    return tensor.dtype() == DType::kI64 ? tensor.as<const std::int64_t>()[i]
                                         : tensor.as<const std::int32_t>()[i];
  };
  FUSEDMOE_CHECK_FILE(at(0) == shape.out && at(1) == shape.in, "contents",
                      core::format("[{}, {}]", at(0), at(1)),
                      core::format("[{}, {}]", shape.out, shape.in));
}

std::int64_t group_of(const QuantKey& key, std::int64_t column) {
  return key.group.cols < 0 ? 0 : column / key.group.cols;
}

void check_group_index(const TensorView& tensor, const QuantKey& key) {
  for (std::int64_t i = 0; i < tensor.size(0); ++i) {
    const std::int32_t group = tensor.as<const std::int32_t>()[i];
    FUSEDMOE_CHECK_FILE(
        group == group_of(key, i), "group index", core::format("{} at column {}", group, i),
        core::format("{}: columns permuted by activation order (desc_act) are not supported",
                     group_of(key, i)));
  }
}

}  // namespace

Shape stored_shape(const StoredTensor& stored, const QuantKey& weights, LinearShape shape) {
  const Shape same = part_shape(stored.part, weights, shape);
  const std::int64_t per = per_word(weights), groups = scales_shape(weights, shape)[1];
  switch (stored.form) {
    case kSame:
    case kBlocks:
      return same;
    case kTransposed:
      return {same[1], same[0]};
    case kBytes:
      return {shape.out, shape.in};
    case kScalar:
      return {};
    case kSingle:
    case kReciprocal:
      return {1};
    case kVector:
      return {shape.out};
    case kColumn:
      return {shape.out, 1};
    case kAwqValues:
      return {shape.in, ceil_div(shape.out, 8)};
    case kAwqZeros:
    case kZerosByColumn:
    case kZerosMinusOne:
      return {groups, ceil_div(shape.out, per)};
    case kZerosByRow:
      return {ceil_div(shape.out, per), groups};
    case kMatrixShape:
      return {2};
    case kTrivialGroupIndex:
      return {shape.in};
  }
  return {};
}

namespace {

/// The extents other than 1.
std::vector<std::int64_t> without_ones(const Shape& shape) {
  std::vector<std::int64_t> extents(shape.begin(), shape.end());
  std::erase(extents, 1);
  return extents;
}

}  // namespace

bool accepts_shape(const StoredTensor& stored, const Shape& expected, const Shape& actual) {
  if (actual == expected) return true;
  switch (stored.form) {
    case kScalar:
    case kSingle:
    case kReciprocal:
      return actual.rank() <= 2 && actual.numel() == 1;
    case kVector:
    case kColumn:
      return actual == Shape{expected[0]} || actual == Shape{expected[0], 1};
    case kBlocks:
      return without_ones(actual) == without_ones(expected);
    default:
      return false;
  }
}

void decode(const StoredTensor& stored, const TensorView& tensor, const QuantScheme& scheme,
            LinearShape shape, WeightMatrix& matrix,
            std::vector<std::shared_ptr<const void>>& owners) {
  const QuantKey& key = scheme.weights;
  TensorView& part = part_of(matrix, stored.part);
  const auto own = [&](const Tensor& made) {
    part = made;
    owners.push_back(made.owner());
  };
  switch (stored.form) {
    case kSame:
    case kBlocks:
      part = stored.form == kSame ? tensor : tensor.reshape(stored_shape(stored, key, shape));
      if (stored.part == Part::kScales && key.scale == DType::kF32 &&
          part.dtype() == DType::kE8M0) {
        own(e8m0_as_f32(part));
      }
      if (part.dtype() == DType::kI8 && key.value == DType::kE2M1) part = as_u8(part);
      break;
    case kTransposed:
      part = tensor.transpose(0, 1);
      break;
    case kBytes:
      own(pack_bytes(tensor, key, shape));
      break;
    case kScalar:
    case kSingle:
    case kVector:
    case kColumn:
      part = tensor.reshape(part_shape(stored.part, key, shape));
      // Input scales and global scales are f32 here, whatever the model's dtype.
      if (stored.part != Part::kScales && part.dtype() != DType::kF32) {
        own(copy_as(part, DType::kF32));
      }
      break;
    case kReciprocal: {
      const Tensor one = Tensor::empty({1}, DType::kF32);
      const float value = load_f32(tensor.data(), tensor.dtype(), 0);
      *one.as<float>() = 1.0F / value;
      FUSEDMOE_CHECK_FILE(std::isfinite(*one.as<float>()), "contents", core::to_string(value),
                          "a number that has a finite reciprocal");
      own(one);
      break;
    }
    case kAwqValues: {
      const Tensor words = Tensor::empty(values_shape(key, shape), DType::kI32);
      transpose_awq(tensor, words, shape, false);
      own(words);
      break;
    }
    case kAwqZeros:
    case kZerosByRow:
    case kZerosByColumn:
    case kZerosMinusOne: {
      const Tensor zeros = unpack_zeros(stored.form, tensor, key, shape);
      if (key.symmetric) {
        check_middle(zeros, key);
      } else {
        own(zeros);
      }
      break;
    }
    case kMatrixShape:
      check_matrix_shape(tensor, shape);
      break;
    case kTrivialGroupIndex:
      check_group_index(tensor, key);
      break;
  }
}

Tensor encode(const StoredTensor& stored, const WeightMatrix& matrix, const QuantKey& weights,
              LinearShape shape) {
  WeightMatrix copy = matrix;
  const TensorView part = part_of(copy, stored.part);
  const Shape expected = stored_shape(stored, weights, shape);
  const DType dtype = stored.dtypes.front();
  const auto reshaped = [&](const Tensor& tensor) {
    return Tensor(tensor.reshape(expected), tensor.owner());
  };
  switch (stored.form) {
    case kSame:
    case kBlocks:
      return copy_as(part, dtype);
    case kTransposed:
      return copy_as(part.transpose(0, 1), dtype);
    case kScalar:
    case kSingle:
    case kVector:
    case kColumn:
      return reshaped(copy_as(part, dtype));
    case kReciprocal: {
      Tensor one = copy_as(part, dtype);
      *one.as<float>() = 1.0F / *one.as<float>();
      return one;
    }
    case kBytes: {
      Tensor codes = Tensor::empty(expected, DType::kU8);
      unpack_codes(part, codes);
      Tensor result = Tensor::empty(expected, DType::kI8);
      for (std::int64_t i = 0; i < codes.numel(); ++i) {
        result.as<std::int8_t>()[i] =
            static_cast<std::int8_t>(static_cast<int>(codes.as<std::uint8_t>()[i]) - 8);
      }
      return result;
    }
    case kAwqValues: {
      Tensor awq = Tensor::empty(expected, dtype);
      transpose_awq(awq, part, shape, true);
      return awq;
    }
    case kAwqZeros:
    case kZerosByRow:
    case kZerosByColumn:
    case kZerosMinusOne:
      return pack_zeros(stored.form, part, weights, shape, expected);
    case kMatrixShape: {
      Tensor pair = Tensor::empty(expected, DType::kI64);
      pair.as<std::int64_t>()[0] = shape.out;
      pair.as<std::int64_t>()[1] = shape.in;
      return pair;
    }
    case kTrivialGroupIndex: {
      Tensor index = Tensor::empty(expected, DType::kI32);
      for (std::int64_t i = 0; i < shape.in; ++i) {
        index.as<std::int32_t>()[i] = static_cast<std::int32_t>(group_of(weights, i));
      }
      return index;
    }
  }
  return {};
}

DType scale_dtype(const LinearLayout& layout) {
  for (const StoredTensor& stored : layout.tensors) {
    if (stored.part == Part::kScales && is_float(stored.dtypes.front())) {
      return stored.dtypes.front();
    }
  }
  return DType::kF32;
}

float amax_with_reciprocal(float amax) {
  // Of any four neighbouring floats one has such a scale.
  for (float next = amax;; next = std::nextafter(next, std::numeric_limits<float>::infinity())) {
    const float scale = core::nvfp4_global_scale(next), reciprocal = 1.0F / scale;
    if (1.0F / reciprocal == scale) return next;
  }
}

}  // namespace fusedmoe::checkpoint
