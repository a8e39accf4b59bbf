// Routing of few tokens and all that the experts' kernel needs of it, in one launch: router logits,
// top-k, routing data, permuted rows, cleared counters. In plain C++.
#pragma once

#include <cstdint>

#include "cuda/device/limits.h"
#include "cuda/rows/routing_data.h"
#include "fusedmoe/router.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// Views of device memory; each result is that of the separate kernels, bit for bit.
struct FusedRoute {
  const RouterConfig* config = nullptr;
  /// Of the router, as in router_logits(). Where `weight` is undefined the logits are given.
  TensorView weight, bias;
  TensorView hidden_states;  ///< (num_tokens, hidden); rows may have a stride; with `weight` only
  /// (num_tokens, num_experts). With `weight` f32, written; else read: f32, bf16 or f16.
  TensorView logits;
  TensorView correction_bias;  ///< (num_experts) f32, optional
  Routing out;                 ///< written
  TensorView expert_load;      ///< (num_experts) i32, optional: += tokens that chose each expert
  TensorView expert_map;       ///< optional
  std::int64_t num_local_experts = 0;
  void* routing_data = nullptr;  ///< routing_data_bytes()
  RoutingDataExtras extras;      ///< rows that are quantized are not written
};

/// Whether fused_route() takes so many tokens: up to 32, and 512 slots, of experts whose scores fit
/// into the shared memory of a block of the device. Not for custom routing or kSparsemixer. For
/// more tokens the separate kernels are faster.
bool may_fuse(const RouterConfig& config, std::int64_t num_tokens, std::int64_t num_local_experts,
              const DeviceLimits& device);

/// Enqueues one kernel, or the router's logits and then one kernel where the router's weights are
/// too many for one cluster. Throws Error as route() and router_logits() do, and where may_fuse()
/// says no.
///
/// A kernel launched next with overlap may start at once. It calls wait_for_previous_launch()
/// before it reads anything that is written here, ids and weights too: unlike those that a caller
/// gives they are new. So the experts' kernel must not count rows from topk_ids before that call.
/// A kernel behind that one may read them as soon as it starts, if the experts' kernel triggers
/// after the call.
RoutingData fused_route(const FusedRoute& args, const Stream& stream);

}  // namespace fusedmoe::cuda
