// Tensors: a non-owning typed view, and the same with ownership.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "fusedmoe/device.h"
#include "fusedmoe/dtype.h"
#include "fusedmoe/export.h"

namespace fusedmoe {

/// Up to kMaxRank extents (or strides), stored inline.
class FUSEDMOE_API Shape {
 public:
  static constexpr int kMaxRank = 6;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> extents);
  explicit Shape(std::span<const std::int64_t> extents);

  int rank() const { return rank_; }
  std::int64_t operator[](int dim) const { return extents_[dim]; }
  std::int64_t& operator[](int dim) { return extents_[dim]; }
  const std::int64_t* begin() const { return extents_.data(); }
  const std::int64_t* end() const { return extents_.data() + rank_; }
  /// Product of the extents; throws Error on a negative extent or 64-bit overflow.
  std::int64_t numel() const;
  bool operator==(const Shape& other) const;

 private:
  std::array<std::int64_t, kMaxRank> extents_{};
  int rank_ = 0;
};

/// "[2, 3, 4]"
FUSEDMOE_API std::string to_string(const Shape& shape);

/// Row-major strides, in elements.
FUSEDMOE_API Shape contiguous_strides(const Shape& shape);

/// A typed, strided view of memory somebody else owns. Shape and strides count elements, also for
/// the packed 4-bit types (whose last dimension must be contiguous). A default-constructed view is
/// empty and stands for "not given". Copying is cheap; constness of the elements is a matter of
/// the function that takes the view: outputs are documented as such.
class FUSEDMOE_API TensorView {
 public:
  TensorView() = default;
  TensorView(void* data, DType dtype, Shape shape, Device device = {});
  TensorView(void* data, DType dtype, Shape shape, Shape strides, Device device);
  TensorView(const void* data, DType dtype, Shape shape, Device device = {})
      : TensorView(const_cast<void*>(data), dtype, shape, device) {}

  /// False for the default-constructed view only.
  bool defined() const { return defined_; }
  explicit operator bool() const { return defined_; }

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  const Shape& shape() const { return shape_; }
  const Shape& strides() const { return strides_; }
  int rank() const { return shape_.rank(); }
  std::int64_t size(int dim) const { return shape_[dim]; }
  std::int64_t stride(int dim) const { return strides_[dim]; }
  std::int64_t numel() const { return shape_.numel(); }
  bool contiguous() const;
  /// Bytes of the elements when contiguous.
  std::int64_t nbytes() const { return bytes(dtype_, numel()); }

  /// Index `dim` fixed at `index`; rank shrinks by one.
  TensorView select(int dim, std::int64_t index) const;
  /// Elements begin, begin + step, ... below end of dimension `dim`.
  TensorView slice(int dim, std::int64_t begin, std::int64_t end, std::int64_t step = 1) const;
  /// Dimensions a and b exchanged; moves no data.
  TensorView transpose(int a, int b) const;
  /// Same elements, other shape; the view must be contiguous.
  TensorView reshape(Shape shape) const;

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::kF32;
  Shape shape_;
  Shape strides_;
  Device device_;
  bool defined_ = false;
};

/// A view that keeps its memory alive: its own allocation, a mapped file, or anything else a
/// shared pointer can hold. Copies share the memory.
class FUSEDMOE_API Tensor : public TensorView {
 public:
  Tensor() = default;
  Tensor(TensorView view, std::shared_ptr<const void> owner);

  /// Uninitialised memory: of the host, 64-byte aligned, with 2 MiB pages where it is large; or of
  /// a CUDA device, 256-byte aligned. Throws Error for a device that cannot be used.
  static Tensor empty(Shape shape, DType dtype, Device device = {});
  static Tensor zeros(Shape shape, DType dtype, Device device = {});

  const std::shared_ptr<const void>& owner() const { return owner_; }

 private:
  std::shared_ptr<const void> owner_;
};

}  // namespace fusedmoe
