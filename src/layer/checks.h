// Argument checks shared by the modular kernel and the layer. All throw Error.
#pragma once

#include <cstddef>
#include <initializer_list>

#include "fusedmoe/experts.h"
#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::layer {

/// A view and what callers know it by.
struct NamedView {
  const char* name;
  const TensorView* view;
};

/// Memory of this dtype and shape (-1: any extent): on `device`, contiguous, and aligned to its
/// elements.
void check_buffer(const TensorView& view, const char* name, DType dtype, const Shape& shape,
                  Device device);

/// The same with f32, bf16 or f16 elements, rank 2.
void check_activations(const TensorView& view, const char* name, Device device);

/// The memory of `written` overlaps none of the others; undefined views are skipped.
void check_disjoint(NamedView written, std::initializer_list<NamedView> others);

/// Apart from the hidden states, or, where `inplace` allows it, exactly them (same dtype and
/// shape).
void check_output(const TensorView& output, const TensorView& hidden_states, bool inplace);

/// At least `needed` bytes, 64-byte aligned, apart from all these tensors.
void check_workspace(Workspace workspace, std::size_t needed,
                     std::initializer_list<NamedView> tensors);

/// Checks every argument of an apply() and returns its problem, sizes as the caller sees them.
ProblemSize check_kernel_args(const ModularKernel& kernel, const KernelArgs& args,
                              Workspace workspace);

}  // namespace fusedmoe::layer
