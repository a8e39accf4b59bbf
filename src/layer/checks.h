// Argument checks shared by the modular kernel and the layer. All throw Error.
#pragma once

#include <cstddef>
#include <initializer_list>

#include "fusedmoe/experts.h"
#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::layer {

/// Throws Error for a selection that chose nothing.
void check_chosen(const Selection& selection);

/// A view and what callers know it by.
struct NamedView {
  const char* name;
  const TensorView* view;
};

/// The memory of `written` overlaps none of the others; undefined views are skipped.
void check_disjoint(NamedView written, std::initializer_list<NamedView> others);

/// Apart from the hidden states, or, where `inplace` allows it, exactly them (same dtype,
/// shape and stride).
void check_output(const TensorView& output, const TensorView& hidden_states, bool inplace);

/// Values of arguments in host memory: ids that are -1 or in [0, num_choices), and in the batched
/// format of distinct local experts within a token; a map to local experts or -1 that names each at
/// most once.
void check_ids(const TensorView& topk_ids, std::int64_t num_choices, const MoeConfig& config,
               const TensorView& expert_map);
void check_expert_map(const TensorView& expert_map, std::int64_t num_local_experts);

/// At least `needed` bytes, 64-byte aligned, apart from all these tensors.
void check_workspace(Workspace workspace, std::size_t needed,
                     std::initializer_list<NamedView> tensors);

/// Arguments of one step of a PrepareAndFinalize.
void check_prepare_args(const PrepareFinalizeDescriptor& descriptor, const ForwardArgs& args);
void check_finalize_args(const PrepareAndFinalize& instance, const ForwardArgs& args);

/// Whether a forward has fixed sizes: where it is asked for, and where a graph records it.
bool has_fixed_sizes(const ModularKernel& kernel, bool asked, Stream stream);

/// Checks every argument of ModularKernel::apply() and returns its sizes.
ForwardSizes check_forward_args(const ModularKernel& kernel, const ForwardArgs& args,
                                Workspace workspace);

}  // namespace fusedmoe::layer
