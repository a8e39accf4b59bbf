// DLPack at no cost. Templates over the user's own <dlpack/dlpack.h> (any version from 0.6), so
// that this library needs none. Ownership stays with whoever holds the managed tensor.
#pragma once

#include <string>

#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// Fills `out` (a `DLTensor`). `out.shape` and `out.strides` point into `view`, which must outlive
/// it. Packed FP4 is described as 4-bit elements.
template <typename DLTensorT>
void to_dlpack(const TensorView& view, DLTensorT& out) {
  const DlpackType type = dlpack_type(view.dtype());
  out.data = view.data();
  out.ndim = view.rank();
  out.dtype.code = type.code;
  out.dtype.bits = type.bits;
  out.dtype.lanes = 1;
  out.shape = const_cast<std::int64_t*>(view.shape().begin());
  out.strides = const_cast<std::int64_t*>(view.strides().begin());
  out.byte_offset = 0;
  constexpr int kDlCpu = 1, kDlCuda = 2;
  out.device.device_type =
      static_cast<decltype(out.device.device_type)>(view.device().is_cpu() ? kDlCpu : kDlCuda);
  out.device.device_id = view.device().index;
}

/// View of a `DLTensor`; throws Error for a type, device or rank that the library does not have.
template <typename DLTensorT>
TensorView from_dlpack(const DLTensorT& in) {
  const auto dtype = dtype_from_dlpack({in.dtype.code, in.dtype.bits});
  if (!dtype || in.dtype.lanes != 1) {
    throw Error("dlpack.dtype",
                "code " + std::to_string(in.dtype.code) + ", " + std::to_string(in.dtype.bits) +
                    " bits, " + std::to_string(in.dtype.lanes) + " lanes",
                "a dtype of fusedmoe::DType with one lane", Fault::kDType);
  }
  const int device_type = static_cast<int>(in.device.device_type);
  if (device_type != 1 && device_type != 2) {
    throw Error("dlpack.device", std::to_string(device_type), "kDLCPU (1) or kDLCUDA (2)",
                Fault::kDevice);
  }
  if (in.ndim < 0 || in.ndim > Shape::kMaxRank) {
    throw Error("dlpack.ndim", std::to_string(in.ndim), "0 to 6", Fault::kShape);
  }
  const Shape shape(std::span<const std::int64_t>(in.shape, static_cast<std::size_t>(in.ndim)));
  const Shape strides =
      in.strides
          ? Shape(std::span<const std::int64_t>(in.strides, static_cast<std::size_t>(in.ndim)))
          : contiguous_strides(shape);
  const Device device{device_type == 1 ? DeviceKind::kCpu : DeviceKind::kCuda,
                      device_type == 1 ? 0 : static_cast<int>(in.device.device_id)};
  return TensorView(static_cast<char*>(in.data) + in.byte_offset, *dtype, shape, strides, device);
}

}  // namespace fusedmoe
