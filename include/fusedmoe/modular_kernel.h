// ModularKernel: one PrepareAndFinalize + one Experts + their scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "fusedmoe/experts.h"
#include "fusedmoe/export.h"
#include "fusedmoe/prepare_finalize.h"

namespace fusedmoe {

/// A caller-owned block of scratch memory.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// Arguments of ModularKernel::apply: contiguous views, all on the stream's device, which must be
/// that of the packed weights. Modular kernels
/// ignore what is for monolithic ones, and the other way round.
struct KernelArgs {
  const PackedWeights* weights = nullptr;
  TensorView output;                     ///< (num_tokens, hidden), same dtype as hidden_states
  TensorView hidden_states;              ///< (num_tokens, hidden); see inplace
  TensorView topk_ids;                   ///< (num_tokens, topk) i32; modular kernels
  TensorView topk_weights;               ///< (num_tokens, topk) f32; modular kernels
  TensorView router_logits;              ///< (num_tokens, num_experts) f32; monolithic kernels
  const RouterConfig* router = nullptr;  ///< monolithic kernels
  TensorView score_correction_bias;      ///< monolithic kernels; optional
  TensorView expert_map;                 ///< (num_experts) i32; optional
  std::int64_t num_experts = 0;          ///< global; 0 = number of local experts
  bool apply_router_weight_on_input = false;
  bool inplace = false;                 ///< output may be hidden_states; they never overlap in part
  const ExpertsHooks* hooks = nullptr;  ///< for experts that have hooks; others throw Error
  Stream stream;
};

class FUSEDMOE_API ModularKernel {
 public:
  /// Throws Error unless the activation formats agree, finalize accepts what the experts leave to
  /// it, and a monolithic Experts has the standard format and reduces by itself.
  ModularKernel(std::shared_ptr<const PrepareAndFinalize> prepare_finalize,
                std::shared_ptr<const Experts> experts);

  const PrepareAndFinalize& prepare_finalize() const { return *prepare_finalize_; }
  const Experts& experts() const { return *experts_; }

  /// Exact bytes that apply() needs for this problem (sizes as the caller sees them): 0 for no
  /// tokens; monotone in num_tokens; on the CPU it depends on the number of threads.
  std::size_t workspace_bytes(const ProblemSize& problem, bool weight_on_input = false) const;

  /// prepare -> experts -> finalize, on `stream`: on CUDA asynchronous, and capturable in a graph.
  /// Checks every argument first; allocates nothing. Ids outside [0, num_experts) other than -1 are
  /// an Error, and so is an expert_map with such values. On CUDA, where values cannot be checked
  /// without waiting, they select nothing. Router weights that are not finite are no error: they
  /// reach the rows of their token. `workspace` must be 64-byte aligned. Where the experts' output
  /// has the shape and dtype of `output`, they write there.
  void apply(const KernelArgs& args, Workspace workspace) const;

 private:
  std::shared_ptr<const PrepareAndFinalize> prepare_finalize_;
  std::shared_ptr<const Experts> experts_;
};

}  // namespace fusedmoe
