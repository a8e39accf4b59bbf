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

/// The members of a DLTensor, whatever version it is of.
struct DlpackMembers {
  void* data;
  int device_type, device_id, ndim;
  DlpackType dtype;
  int lanes;
  const std::int64_t *shape, *strides;  ///< strides: null if row major
  std::uint64_t byte_offset;
};
/// Throws Error for a type, device or rank that the library does not have.
FUSEDMOE_API TensorView view_of_dlpack(const DlpackMembers& members);

/// View of a `DLTensor`; throws as above.
template <typename DLTensorT>
TensorView from_dlpack(const DLTensorT& in) {
  return view_of_dlpack({in.data,
                         static_cast<int>(in.device.device_type),
                         static_cast<int>(in.device.device_id),
                         static_cast<int>(in.ndim),
                         {in.dtype.code, in.dtype.bits},
                         in.dtype.lanes,
                         in.shape,
                         in.strides,
                         in.byte_offset});
}

}  // namespace fusedmoe
