// The ground: element types, devices, streams, and tensors as views and with ownership.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "fusedmoe/error.h"
#include "fusedmoe/export.h"

namespace fusedmoe {

/// Element type of a tensor. Layouts and rounding: docs/number-formats.md, "Element types".
enum class DType : std::uint8_t {
  kF64,
  kF32,
  kF16,
  kBF16,
  kE4M3,  ///< FP8 E4M3FN: no infinity, maximum 448
  kE5M2,  ///< FP8 E5M2
  kE8M0,  ///< power-of-two scale, 2^(code - 127), 255 = NaN
  kE2M1,  ///< FP4; two elements per byte, element 2i in the low nibble
  kI4,    ///< two's complement nibble; packed like kE2M1
  kI8,
  kU8,
  kI16,
  kI32,
  kI64,
  kBool,
  kIq4,  ///< nibble that stands for one of 16 integers (llama.cpp's IQ4 types); packed like kE2M1
};

/// Width of one element in bits (4 for the packed types).
FUSEDMOE_API int bits(DType dtype);

/// Bytes that `count` consecutive elements take; packed types round up to whole bytes. Throws Error
/// for more than fit in 63 bits.
FUSEDMOE_API std::int64_t bytes(DType dtype, std::int64_t count);

/// Short lower-case name: "f32", "bf16", "e4m3", ...
FUSEDMOE_API std::string_view name(DType dtype);

/// Inverse of `name`; also accepts "float32", "bfloat16", "float16".
FUSEDMOE_API std::optional<DType> parse_dtype(std::string_view text);

/// `DLDataType` of DLPack 1.1 (code, bits; lanes is always 1).
struct DlpackType {
  std::uint8_t code;
  std::uint8_t bits;
};
FUSEDMOE_API DlpackType dlpack_type(DType dtype);
FUSEDMOE_API std::optional<DType> dtype_from_dlpack(DlpackType type);

enum class DeviceKind { kCpu, kCuda };

/// `cpu` or `cuda:i`.
struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;

  bool is_cpu() const { return kind == DeviceKind::kCpu; }
  bool operator==(const Device&) const = default;
};

/// "cpu" or "cuda:0".
FUSEDMOE_API std::string to_string(Device device);

/// Accepts "cpu", "cuda" (= "cuda:0") and "cuda:i"; throws Error otherwise.
FUSEDMOE_API Device parse_device(std::string_view text);

/// An ordered queue of work on a device. On CUDA the handle is a `cudaStream_t`, null for the
/// device's default stream. On the CPU work is done when the call returns; the handle is an
/// `Executor*` (cpu_stream() in runtime.h), null for the default one.
struct Stream {
  Device device;
  void* handle = nullptr;
};

/// Up to kMaxRank extents (or strides), stored inline.
class FUSEDMOE_API Shape {
 public:
  static constexpr int kMaxRank = 6;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> extents);
  explicit Shape(std::span<const std::int64_t> extents);

  int rank() const { return rank_; }
  std::int64_t operator[](int dim) const { return extents_[static_cast<std::size_t>(dim)]; }
  std::int64_t& operator[](int dim) { return extents_[static_cast<std::size_t>(dim)]; }
  const std::int64_t* begin() const { return extents_.data(); }
  const std::int64_t* end() const { return extents_.data() + rank_; }
  /// Product of the extents. Throws Error for a negative extent, and where the product of those
  /// that are not 0 does not fit in 63 bits.
  std::int64_t numel() const;
  bool operator==(const Shape& other) const;

 private:
  std::array<std::int64_t, kMaxRank> extents_{};
  int rank_ = 0;
};

/// "[2, 3, 4]"
FUSEDMOE_API std::string to_string(const Shape& shape);

/// Row-major strides, in elements. Throws Error for a shape that has no numel().
FUSEDMOE_API Shape contiguous_strides(const Shape& shape);

/// A typed, strided view of memory somebody else owns. Shape and strides count elements, also for
/// the packed 4-bit types (whose last dimension must be contiguous). A default-constructed view is
/// empty and stands for "not given". Copying is cheap; constness of the elements is a matter of
/// the function that takes the view: outputs are documented as such. Extents and strides are
/// checked here, so that no arithmetic on a view overflows.
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
/// shared pointer can hold. Copies share the memory. Without an owner, as borrow() makes it, the
/// caller keeps the memory alive.
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

/// Memory of the caller as a contiguous tensor that owns nothing; Tensor(view, nullptr) is the same
/// for a strided view.
FUSEDMOE_API Tensor borrow(const void* data, DType dtype, Shape shape, Device device = {});

}  // namespace fusedmoe
