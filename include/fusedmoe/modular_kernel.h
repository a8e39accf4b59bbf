// ModularKernel: one PrepareAndFinalize + one Experts + their scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "fusedmoe/experts.h"
#include "fusedmoe/export.h"

namespace fusedmoe {

/// What prepare hands to the experts. Undefined ids or weights mean "the caller's still hold".
struct Prepared {
  TensorView hidden_states;
  TensorView hidden_scales;
  TensorView expert_num_tokens;
  TensorView topk_ids;
  TensorView topk_weights;
};

/// What prepare does to the hidden states on their way to the experts, out of place, in this order.
struct Preparation {
  bool apply_router_weight_on_input = false;  ///< topk = 1: multiply by the weight
  std::optional<QuantKey> quant;              ///< quantize; none: they keep their dtype
  std::optional<float> scale;                 ///< of a static key
};

/// What `experts` leave to prepare; `a1_scale`: see PackedWeights::Info.
FUSEDMOE_API Preparation make_preparation(const Experts& experts, const QuantScheme& scheme,
                                          bool apply_router_weight_on_input,
                                          std::optional<float> a1_scale = {});

struct PrepareArgs {
  TensorView hidden_states;  ///< (num_tokens, hidden); never modified
  TensorView topk_ids;       ///< (num_tokens, topk) i32; no_ep needs neither ids ...
  TensorView topk_weights;   ///< (num_tokens, topk) f32; ... nor weights unless on the input
  TensorView expert_map;     ///< optional
  std::int64_t num_local_experts = 0;
  Preparation preparation;
  /// workspace_bytes(), 64-byte aligned; holds what prepare returns, until finalize is done.
  void* workspace = nullptr;
  Stream stream;
};

struct FinalizeArgs {
  TensorView output;        ///< (num_tokens, hidden), written completely
  TensorView fused_output;  ///< what the experts wrote; may be `output` itself
  TensorView topk_ids;
  TensorView topk_weights;
  TensorView expert_map;
  std::int64_t num_local_experts = 0;
  bool router_weight_on_input = false;  ///< prepare has applied the weights: sum without them
  WeightAndReduce weight_and_reduce = WeightAndReduce::kNoOp;
  void* workspace = nullptr;  ///< the one that prepare had, untouched since
  Stream stream;
};

/// Both halves work on the stream of their arguments, which must be of the device of all views.
/// Quantization, so far, is done on the CPU only.
class FUSEDMOE_API PrepareAndFinalize {
 public:
  virtual ~PrepareAndFinalize() = default;

  /// Stable name: "no_ep", "batched".
  virtual std::string_view name() const = 0;
  virtual ActivationFormat activation_format() const = 0;
  /// Whether it can serve the configuration; the format is compared by the selection.
  virtual Support supports(const MoeConfig& config) const = 0;
  /// Whether finalize leaves the sum over all ranks (false: a reduction over ranks must follow).
  virtual bool output_is_reduced() const { return true; }
  /// Ranks that can send to this one.
  virtual int num_dispatchers() const { return 1; }

  /// Size that the experts see for a forward of num_tokens rows: the same, or the row capacity
  /// per expert in the batched format.
  virtual ProblemSize problem_size(const ProblemSize& caller) const { return caller; }
  /// Whether finalize knows what to do with the output of such experts.
  virtual bool accepts(WeightAndReduce kind) const = 0;
  /// Scratch that prepare needs until finalize returns.
  virtual std::size_t workspace_bytes(const ProblemSize& caller,
                                      const Preparation& preparation) const = 0;
  virtual Prepared prepare(const PrepareArgs& args) const = 0;
  virtual void finalize(const FinalizeArgs& args) const = 0;
};

/// One rank, standard format.
FUSEDMOE_API std::shared_ptr<const PrepareAndFinalize> make_no_ep();
/// One rank, batched format: tokens are copied to (num_local_experts, capacity, hidden), capacity
/// = the number of tokens of the call, in ascending token order per expert. A token may therefore
/// name an expert once only: prepare throws Error for a duplicate id, or on CUDA, where it cannot
/// see the ids, drops all slots of the token but the first that name it. Rows of an expert behind
/// expert_num_tokens are neither written nor read.
FUSEDMOE_API std::shared_ptr<const PrepareAndFinalize> make_batched();

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
