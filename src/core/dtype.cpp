#include "fusedmoe/tensor.h"

#include <array>
#include <limits>

#include "core/check.h"

namespace fusedmoe {
namespace {

struct Row {
  DType dtype;
  std::string_view name;
  int bits;
  DlpackType dlpack;
};

// DLPack codes: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10 e4m3fn, 12 e5m2, 14 e8m0fnu,
// 17 e2m1fn; 3, an opaque type, for what DLPack has no code for.
constexpr std::array<Row, 16> kTable{{
    {DType::kF64, "f64", 64, {2, 64}},
    {DType::kF32, "f32", 32, {2, 32}},
    {DType::kF16, "f16", 16, {2, 16}},
    {DType::kBF16, "bf16", 16, {4, 16}},
    {DType::kE4M3, "e4m3", 8, {10, 8}},
    {DType::kE5M2, "e5m2", 8, {12, 8}},
    {DType::kE8M0, "e8m0", 8, {14, 8}},
    {DType::kE2M1, "e2m1", 4, {17, 4}},
    {DType::kI4, "i4", 4, {0, 4}},
    {DType::kI8, "i8", 8, {0, 8}},
    {DType::kU8, "u8", 8, {1, 8}},
    {DType::kI16, "i16", 16, {0, 16}},
    {DType::kI32, "i32", 32, {0, 32}},
    {DType::kI64, "i64", 64, {0, 64}},
    {DType::kBool, "bool", 8, {6, 8}},
    {DType::kIq4, "iq4", 4, {3, 4}},
}};

const Row& row(DType dtype) {
  return kTable[static_cast<std::size_t>(dtype)];
}

}  // namespace

int bits(DType dtype) {
  return row(dtype).bits;
}

std::int64_t bytes(DType dtype, std::int64_t count) {
  std::int64_t num_bits = 0;
  const bool overflow = __builtin_mul_overflow(count, row(dtype).bits, &num_bits) ||
                        num_bits > std::numeric_limits<std::int64_t>::max() - 7;
  FUSEDMOE_CHECK_FAULT(!overflow, kShape, "shape",
                       core::format("{} elements of {}", count, name(dtype)),
                       "of less than 2^60 bytes");
  return (num_bits + 7) / 8;
}

std::string_view name(DType dtype) {
  return row(dtype).name;
}

std::optional<DType> parse_dtype(std::string_view text) {
  for (const Row& entry : kTable) {
    if (entry.name == text) return entry.dtype;
  }
  if (text == "float32") return DType::kF32;
  if (text == "float16") return DType::kF16;
  if (text == "bfloat16") return DType::kBF16;
  return std::nullopt;
}

DlpackType dlpack_type(DType dtype) {
  return row(dtype).dlpack;
}

std::optional<DType> dtype_from_dlpack(DlpackType type) {
  for (const Row& entry : kTable) {
    if (entry.dlpack.code == type.code && entry.dlpack.bits == type.bits) return entry.dtype;
  }
  return std::nullopt;
}

}  // namespace fusedmoe
