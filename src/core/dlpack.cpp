#include "fusedmoe/dlpack.h"

#include <span>

#include "core/check.h"

namespace fusedmoe {

TensorView view_of_dlpack(const DlpackMembers& in) {
  constexpr int kDlCpu = 1, kDlCuda = 2;
  const std::optional<DType> dtype = dtype_from_dlpack(in.dtype);
  FUSEDMOE_CHECK_FAULT(dtype && in.lanes == 1, kDType, "dlpack.dtype",
                       core::format("code {}, {} bits, {} lanes", static_cast<int>(in.dtype.code),
                                    static_cast<int>(in.dtype.bits), in.lanes),
                       "a dtype of fusedmoe::DType with one lane");
  FUSEDMOE_CHECK_FAULT(in.device_type == kDlCpu || in.device_type == kDlCuda, kDevice,
                       "dlpack.device", core::to_string(in.device_type),
                       "kDLCPU (1) or kDLCUDA (2)");
  FUSEDMOE_CHECK_FAULT(in.ndim >= 0 && in.ndim <= Shape::kMaxRank, kShape, "dlpack.ndim",
                       core::to_string(in.ndim), "0 to 6");
  const auto rank = static_cast<std::size_t>(in.ndim);
  const Shape shape(std::span(in.shape, rank));
  const Shape strides = in.strides ? Shape(std::span(in.strides, rank)) : contiguous_strides(shape);
  const Device device =
      in.device_type == kDlCpu ? Device{} : Device{DeviceKind::kCuda, in.device_id};
  return {static_cast<char*>(in.data) + in.byte_offset, *dtype, shape, strides, device};
}

}  // namespace fusedmoe
