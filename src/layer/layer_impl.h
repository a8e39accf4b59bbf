// What MoeLayer holds: layer_build.cpp makes it, layer.cpp runs it.
#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "fusedmoe/layer.h"
#include "layer/layer_weights.h"
#include "moe/backend.h"

namespace fusedmoe {

struct MoeLayer::Impl {
  struct Shared {
    std::string pair;
    ModularKernel kernel;
    std::shared_ptr<const PackedWeights> packed;
    Tensor gate;  // (1, hidden) on the device, or undefined
  };

  // The workspace of one forward.
  struct Buffers {
    TensorView router_logits;  // (num_tokens, num_choices) f32
    Routing routing;           // (num_tokens, topk)
    Routing shared_routing;    // (num_tokens, 1): expert 0 with the gate's weight, or 1
    TensorView expert_ids;     // (num_tokens, topk): without zero experts
    TensorView zero_weights;   // (num_tokens, 1): of a token's zero experts
    TensorView latent_input, latent_output;  // (num_tokens, latent), of the routed experts
    void* projected = nullptr;  // (num_tokens, latent), later (num_tokens, hidden), f32
    TensorView beside;          // (num_tokens, hidden): of shared and zero experts
    void* kernel = nullptr;     // one after the other: routed experts, shared experts
    std::size_t bytes = 0;
  };

  // What a forward is about.
  struct Call {
    TensorView hidden_states, output;
    Routing routing;  // of the caller; undefined: the layer routes
    const ForwardOptions& options;
    Stream stream;
    std::int64_t max_tokens;  // of any rank
  };

  MoeConfig config;
  Selection selection;
  const core::Backend& backend;
  RouterConfig router;
  RouterWeights router_weights;             // on the device
  Tensor expert_map;                        // on the device
  std::optional<LatentProjections> latent;  // on the device
  std::int64_t hidden;                      // of the layer, not of experts between projections
  ModularKernel kernel;                     // takes ids and weights
  std::optional<ModularKernel> monolithic;  // routes by itself, with the same packed weights
  std::shared_ptr<const PackedWeights> packed;
  std::optional<Shared> shared;
  DType output_dtype;
  bool inplace;
  bool adds_zero_experts;              // the router has some, and this rank adds what they return
  std::shared_ptr<Executor> executor;  // of the CPU; null: the default one
  Stream stream;                       // of forwards that name none
  std::int64_t chunk = std::numeric_limits<std::int64_t>::max();  // tokens at a time, at most
  std::shared_ptr<Communicator> communicator;                     // of several ranks, else null
  std::int64_t max_tokens_per_rank = 0;                           // where rows travel, else 0

  Impl(const LayerWeights& weights, const LayerOptions& options, const Selection& chosen);
  void pack(const LayerWeights& weights, const LayerOptions& options);
  void limit_chunk(std::size_t max_bytes);

  Plan plan() const;
  bool adds_beside() const { return shared || adds_zero_experts; }
  /// With a null workspace only `bytes` is meaningful. max_tokens: of any rank; 0: num_tokens.
  Buffers cut(std::int64_t num_tokens, void* workspace, std::int64_t max_tokens = 0) const;
  /// Of one of the two kernels.
  ProblemSize problem(const ModularKernel& of, std::int64_t num_tokens,
                      std::int64_t max_tokens = 0) const;
  Call call(const TensorView& hidden_states, const TensorView& output, const Routing& routing,
            const ForwardOptions& options) const;
  /// Checks and runs. What throws here ends the communicator: other ranks may wait already.
  void forward(const Call& call, Workspace workspace) const;
  void check(const Call& call, Workspace workspace) const;
  void run(const Call& call, void* workspace) const;
  void run_chunk(const Call& call, void* workspace) const;
  void apply_routed(const Call& call, const Routing& routing, const Buffers& buffers) const;
  /// to.target = or += x weight^T, summed in f32 first.
  void project(const Tensor& weight, const TensorView& x, core::AddArgs to,
               const Buffers& buffers) const;
  /// Returns the ids that the other experts see.
  TensorView apply_zero_experts(const Call& call, const Routing& routing,
                                const Buffers& buffers) const;
  void apply_shared(const Call& call, const Buffers& buffers) const;
};

}  // namespace fusedmoe
