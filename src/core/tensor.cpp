#include "fusedmoe/tensor.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

#include "core/check.h"
#include "core/device_runtime.h"

namespace fusedmoe {
namespace {

/// Whether every element lies within 2^63 bits of the first one.
bool within_reach(const Shape& shape, const Shape& strides) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max() / 64;
  std::int64_t reach = 0;
  for (int dim = 0; dim < shape.rank(); ++dim) {
    std::int64_t span = 0;
    if (__builtin_mul_overflow(shape[dim], strides[dim], &span) || span < -kLargest ||
        span > kLargest) {
      return false;
    }
    reach += std::abs(span);
    if (reach > kLargest) return false;
  }
  return true;
}

}  // namespace

Shape::Shape(std::initializer_list<std::int64_t> extents)
    : Shape(std::span<const std::int64_t>(extents.begin(), extents.size())) {}

Shape::Shape(std::span<const std::int64_t> extents) {
  FUSEDMOE_CHECK_FAULT(extents.size() <= kMaxRank, kShape, "shape",
                       core::format("rank {}", extents.size()),
                       core::format("of rank at most {}", kMaxRank));
  for (std::int64_t extent : extents) extents_[rank_++] = extent;
}

std::int64_t Shape::numel() const {
  std::int64_t product = 1;
  bool empty = false;
  for (std::int64_t extent : *this) {
    empty |= extent == 0;
    FUSEDMOE_CHECK_FAULT(
        extent >= 0 &&
            !__builtin_mul_overflow(product, std::max<std::int64_t>(extent, 1), &product),
        kShape, "shape", to_string(*this), "non-negative extents whose product fits in 63 bits");
  }
  return empty ? 0 : product;
}

bool Shape::operator==(const Shape& other) const {
  return rank_ == other.rank_ && std::equal(begin(), end(), other.begin());
}

std::string to_string(const Shape& shape) {
  return "[" + core::join(shape, ", ") + "]";
}

Shape contiguous_strides(const Shape& shape) {
  shape.numel();  // checks the extents
  Shape strides = shape;
  std::int64_t stride = 1;
  for (int dim = shape.rank() - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= std::max<std::int64_t>(shape[dim], 1);
  }
  return strides;
}

TensorView::TensorView(void* data, DType dtype, Shape shape, Device device)
    : TensorView(data, dtype, shape, contiguous_strides(shape), device) {}

TensorView::TensorView(void* data, DType dtype, Shape shape, Shape strides, Device device)
    : data_(data),
      dtype_(dtype),
      shape_(shape),
      strides_(strides),
      device_(device),
      defined_(true) {
  FUSEDMOE_CHECK_FAULT(shape.rank() == strides.rank(), kShape, "strides", to_string(strides),
                       core::format("of rank {}", shape.rank()));
  FUSEDMOE_CHECK_FAULT(within_reach(shape, strides), kLayout, "strides", to_string(strides),
                       core::format("within 2^63 bits for the shape {}", to_string(shape)));
  const std::int64_t elements = shape.numel();
  FUSEDMOE_CHECK_FAULT(data != nullptr || elements == 0, kNull, "data", "null",
                       "a valid pointer, for a shape with elements");
}

bool TensorView::contiguous() const {
  if (std::find(shape_.begin(), shape_.end(), 0) != shape_.end()) return true;
  std::int64_t expected = 1;
  for (int dim = rank() - 1; dim >= 0; --dim) {
    if (shape_[dim] != 1 && strides_[dim] != expected) return false;
    expected *= shape_[dim];
  }
  return true;
}

TensorView TensorView::select(int dim, std::int64_t index) const {
  FUSEDMOE_CHECK(dim >= 0 && dim < rank(), "dim", core::to_string(dim),
                 core::format("below the rank {}", rank()));
  FUSEDMOE_CHECK(index >= 0 && index < shape_[dim], "index", core::to_string(index),
                 core::format("in [0, {})", shape_[dim]));
  TensorView result = slice(dim, index, index + 1);
  std::array<std::int64_t, Shape::kMaxRank> kept_shape{}, kept_strides{};
  std::size_t kept = 0;
  for (int i = 0; i < rank(); ++i) {
    if (i == dim) continue;
    kept_shape[kept] = shape_[i];
    kept_strides[kept++] = strides_[i];
  }
  result.shape_ = Shape(std::span<const std::int64_t>(kept_shape.data(), kept));
  result.strides_ = Shape(std::span<const std::int64_t>(kept_strides.data(), kept));
  return result;
}

TensorView TensorView::slice(int dim, std::int64_t begin, std::int64_t end,
                             std::int64_t step) const {
  FUSEDMOE_CHECK(dim >= 0 && dim < rank(), "dim", core::to_string(dim),
                 core::format("below the rank {}", rank()));
  FUSEDMOE_CHECK(begin >= 0 && begin <= end && end <= shape_[dim] && step >= 1, "slice",
                 core::format("[{}, {}) step {}", begin, end, step),
                 core::format("within [0, {}) with a positive step", shape_[dim]));
  const std::int64_t offset_bits = begin * strides_[dim] * bits(dtype_);
  FUSEDMOE_CHECK(offset_bits % 8 == 0, "slice", core::format("begin {}", begin), "on a whole byte");
  TensorView result = *this;
  if (data_) result.data_ = static_cast<char*>(data_) + offset_bits / 8;
  result.shape_[dim] = begin == end ? 0 : (end - begin - 1) / step + 1;
  if (result.shape_[dim] > 1) result.strides_[dim] = strides_[dim] * step;
  return result;
}

TensorView TensorView::transpose(int a, int b) const {
  FUSEDMOE_CHECK(a >= 0 && b >= 0 && a < rank() && b < rank(), "dim",
                 core::format("{} and {}", a, b), core::format("below the rank {}", rank()));
  TensorView result = *this;
  std::swap(result.shape_[a], result.shape_[b]);
  std::swap(result.strides_[a], result.strides_[b]);
  return result;
}

TensorView TensorView::reshape(Shape shape) const {
  FUSEDMOE_CHECK_FAULT(contiguous(), kLayout, "reshape", "a strided view", "contiguous");
  FUSEDMOE_CHECK_FAULT(shape.numel() == numel(), kShape, "reshape", to_string(shape),
                       core::format("of {} elements", numel()));
  TensorView result = *this;
  result.shape_ = shape;
  result.strides_ = contiguous_strides(shape);
  return result;
}

Tensor::Tensor(TensorView view, std::shared_ptr<const void> owner)
    : TensorView(view), owner_(std::move(owner)) {}

Tensor borrow(const void* data, DType dtype, Shape shape, Device device) {
  return Tensor(TensorView(data, dtype, shape, device), nullptr);
}

Tensor Tensor::empty(Shape shape, DType dtype, Device device) {
  const auto size = static_cast<std::size_t>(bytes(dtype, shape.numel()));
  auto memory = core::runtime_of(device).allocate(size, device);
  void* data = memory.get();
  return Tensor(TensorView(data, dtype, shape, device), std::move(memory));
}

Tensor Tensor::zeros(Shape shape, DType dtype, Device device) {
  Tensor result = empty(shape, dtype, device);
  const core::DeviceRuntime& runtime = core::runtime_of(device);
  runtime.fill(result.data(), 0, static_cast<std::size_t>(result.nbytes()), Stream{device});
  runtime.synchronize(Stream{device});
  return result;
}

namespace core {

std::string describe(const TensorView& view) {
  return view.defined() ? core::format("{} {}", name(view.dtype()), to_string(view.shape()))
                        : "undefined";
}

bool is_activation_dtype(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

namespace {

/// "[any, 256]": -1 stands for any extent.
std::string with_any(const Shape& shape) {
  std::string text = to_string(shape);
  for (std::size_t at = text.find("-1"); at != std::string::npos; at = text.find("-1", at)) {
    text.replace(at, 2, "any");
  }
  return text;
}

void check_shape(const TensorView& view, std::string_view argument, DType dtype,
                 const Shape& shape) {
  bool fits = view.rank() == shape.rank();
  for (int dim = 0; fits && dim < shape.rank(); ++dim) {
    fits = shape[dim] == -1 || shape[dim] == view.size(dim);
  }
  const auto wanted = [&] { return core::format("{} {}", name(dtype), with_any(shape)); };
  FUSEDMOE_CHECK_FAULT(view.defined(), kNull, argument, describe(view), wanted());
  FUSEDMOE_CHECK_FAULT(view.dtype() == dtype, kDType, argument, describe(view), wanted());
  FUSEDMOE_CHECK_FAULT(fits, kShape, argument, describe(view), wanted());
}

}  // namespace

void check_tensor(const TensorView& view, std::string_view argument, DType dtype,
                  const Shape& shape) {
  check_shape(view, argument, dtype, shape);
  check_contiguous(view, argument);
}

void check_rows(const TensorView& view, std::string_view argument, DType dtype,
                const Shape& shape) {
  check_shape(view, argument, dtype, shape);
  if (view.contiguous()) return;
  FUSEDMOE_CHECK_FAULT(view.rank() == 2 && view.stride(1) == 1 && view.stride(0) >= view.size(1),
                       kLayout, argument, core::format("strided {}", to_string(view.strides())),
                       "of contiguous rows that do not overlap");
}

void check_activation_dtype(const TensorView& view, std::string_view argument) {
  FUSEDMOE_CHECK_FAULT(view.defined(), kNull, argument, "undefined", "f32, bf16 or f16");
  FUSEDMOE_CHECK_FAULT(is_activation_dtype(view.dtype()), kDType, argument, describe(view),
                       "f32, bf16 or f16");
}

void check_device(const TensorView& view, std::string_view argument, Device device) {
  FUSEDMOE_CHECK_FAULT(view.device() == device, kDevice, argument,
                       core::format("on {}", to_string(view.device())),
                       core::format("on {}", to_string(device)));
}

void check_contiguous(const TensorView& view, std::string_view argument) {
  FUSEDMOE_CHECK_FAULT(view.defined(), kNull, argument, "undefined", "given, and contiguous");
  FUSEDMOE_CHECK_FAULT(view.contiguous(), kLayout, argument,
                       core::format("strided {}", to_string(view.strides())), "contiguous");
}

void check_aligned(const void* data, std::string_view argument, std::size_t alignment) {
  FUSEDMOE_CHECK_FAULT(reinterpret_cast<std::uintptr_t>(data) % alignment == 0, kAlignment,
                       argument, core::format("at {}", data),
                       core::format("aligned to {} bytes", alignment));
}

namespace {

/// From the first byte of a view to the one behind its last.
std::int64_t extent_bytes(const TensorView& view) {
  if (view.numel() == 0) return 0;
  std::int64_t elements = 1;
  for (int axis = 0; axis < view.rank(); ++axis) {
    elements += (view.size(axis) - 1) * view.stride(axis);
  }
  return bytes(view.dtype(), elements);
}

/// Columns of two matrices that lie side by side in the rows of one buffer.
bool side_by_side(const TensorView& a, const TensorView& b, std::int64_t offset) {
  if (a.rank() != 2 || b.rank() != 2) return false;
  const std::int64_t row = bytes(a.dtype(), a.stride(0));
  if (row <= 0 || row != bytes(b.dtype(), b.stride(0))) return false;
  const std::int64_t column = ((offset % row) + row) % row;
  return column >= bytes(a.dtype(), a.size(1)) && column + bytes(b.dtype(), b.size(1)) <= row;
}

}  // namespace

bool overlap(const TensorView& a, const TensorView& b) {
  const auto* a_begin = a.as<const char>();
  const auto* b_begin = b.as<const char>();
  if (!a_begin || !b_begin) return false;
  const std::int64_t a_bytes = extent_bytes(a), b_bytes = extent_bytes(b);
  if (a_bytes == 0 || b_bytes == 0) return false;
  if (a_begin >= b_begin + b_bytes || b_begin >= a_begin + a_bytes) return false;
  return !side_by_side(a, b, b_begin - a_begin);
}

}  // namespace core
}  // namespace fusedmoe
