// MoeLayer: router + shared experts + modular kernel + weights. What most users hold.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "fusedmoe/export.h"
#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/router.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/weights.h"

namespace fusedmoe {

/// Dense experts that see every token (DeepSeek, Qwen2, Llama 4, GLM).
struct SharedExperts {
  ExpertWeights weights{};  ///< one expert of width intermediate * number of shared experts
  Tensor gate{};            ///< (1, hidden): output *= sigmoid(x gate^T) (Qwen2); optional
};

/// One layer's parameters as a checkpoint holds them.
struct LayerWeights {
  RouterConfig router{};
  RouterWeights router_weights{};
  ExpertWeights experts{};
  std::optional<SharedExperts> shared_experts{};
};

struct LayerOptions {
  Device device{};             ///< that holds the weights and runs the layer
  DType dtype = DType::kBF16;  ///< of hidden states and output
  std::string require{};       ///< see select(); empty = best
  std::string plan{};          ///< JSON of MoeLayer::plan_json(): exactly that, or an Error
  bool batch_invariant = false;
  bool inplace = false;  ///< forward may be given the hidden states themselves as output
  bool hooks = false;    ///< only experts that call ExpertsHooks (the routed ones)
  PackProgress progress{};
};

/// Optional results of a forward; undefined views are not filled.
struct ForwardDetails {
  TensorView router_logits{};  ///< (num_tokens, num_experts) f32
  TensorView topk_ids{};       ///< (num_tokens, topk) i32
  TensorView topk_weights{};   ///< (num_tokens, topk) f32
};

/// Immutable after construction; forward may run on several threads with separate workspaces.
///
/// Shared experts run through a kernel of their own, as one expert that every token chooses, and
/// are added to the routed output in fp32: below f32 that sum is the third rounding, after one in
/// each kernel, as in inference engines.
class FUSEDMOE_API MoeLayer {
 public:
  /// Selects an implementation and packs the weights; the source weights, which are in host memory,
  /// are not needed after. Throws Error for weights that do not fit each other, for custom routing
  /// on CUDA (its callback runs on the host), and as select() does.
  MoeLayer(LayerWeights weights, LayerOptions options = {});
  ~MoeLayer();
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;

  const MoeConfig& config() const;
  const Selection& selection() const;
  const RouterConfig& router() const;
  const PackedWeights& packed_weights() const;
  /// One line: experts, prepare_finalize, scheme, dtype, instruction set, and threads or the
  /// device; for example "cpu+no_ep mxfp4_w4a16 bf16 isa=avx512_bf16 threads=2".
  std::string plan_line() const;
  /// The same as a JSON object that LayerOptions::plan pins; see Plan.
  std::string plan_json() const;

  /// Bytes of scratch that forward(num_tokens) needs: monotone, and a function of num_tokens
  /// and, on the CPU, of the number of threads.
  std::size_t workspace_bytes(std::int64_t num_tokens) const;

  /// output = MoE(hidden_states); both (num_tokens, hidden) of LayerOptions::dtype, not
  /// overlapping unless `inplace` is set and they are the same. `workspace`:
  /// workspace_bytes(num_tokens), 64-byte aligned. All on LayerOptions::device. `hooks`: of the
  /// routed experts, which must have injection points. `stream`: of that device; none is its
  /// default stream. Checks every argument before it touches any output; allocates nothing. On CUDA
  /// it only enqueues, waits for nothing, and can be captured in a Graph.
  void forward(const TensorView& hidden_states, const TensorView& output, Workspace workspace,
               const ForwardDetails& details = {}, const ExpertsHooks* hooks = nullptr,
               std::optional<Stream> stream = {}) const;

  /// As forward, with routing given by the caller (precomputed or replayed ids): global ids or -1.
  /// Other ids are an Error; on CUDA, where they cannot be seen, they select nothing. An Error if
  /// the chosen experts are monolithic.
  void forward_routed(const TensorView& hidden_states, const Routing& routing,
                      const TensorView& output, Workspace workspace,
                      const ExpertsHooks* hooks = nullptr, std::optional<Stream> stream = {}) const;

  /// Convenience: allocates output and workspace on the device, and waits.
  Tensor forward(const TensorView& hidden_states) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusedmoe
