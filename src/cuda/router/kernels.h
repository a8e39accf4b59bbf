// Launchers of the router's kernels, in plain C++. Arguments are checked by router.cpp.
#pragma once

#include <cstdint>

#include "fusedmoe/router.h"
#include "fusedmoe/tensor.h"
#include "moe/local_experts.h"

namespace fusedmoe::cuda {

inline constexpr int kMaxRouterExperts = 2048;
inline constexpr int kMaxRouterTopk = 64;

/// Rows of one dtype: f32, bf16 or f16.
struct LogitsOperand {
  const void* data;
  DType dtype;
};

struct RouteParams {
  LogitsOperand logits;  // (num_tokens, num_experts)
  const float* bias;     // (num_experts), or null
  std::int32_t* ids;     // (num_tokens, topk)
  float* weights;        // (num_tokens, topk)
  std::int32_t* counts;  // (num_experts), or null
  std::int64_t num_tokens;
  int num_experts;
  int topk;
  int num_groups;  // 0 where all groups stay
  int topk_group;
  ScoringFunc scoring;
  float sparsemixer_jitter;
  bool renormalize;
  double renormalize_epsilon;
  float scaling_factor;
};

/// Blocks and warps of a launch.
struct RouteLaunch {
  std::int64_t blocks, warps, shared_bytes;
};
RouteLaunch route_launch_of(const RouteParams& params, Device device);

void launch_route(const RouteParams& params, const RouteLaunch& shape, Stream stream);
/// Whether `function` is the kernel that launch_route() launches. That kernel lets the launch
/// behind it begin early: what ran before the router is complete then, its ids and weights are not.
bool is_route_kernel(const void* function);
/// Behind launch_route: the weights of kSparsemixer.
void launch_near_weights(const RouteParams& params, Stream stream);

struct LogitsParams {
  LogitsOperand x;       // (num_tokens, hidden)
  LogitsOperand weight;  // (num_experts, hidden)
  LogitsOperand bias;    // (num_experts), or null
  float* logits;         // (num_tokens, num_experts)
  std::int64_t num_tokens;
  int num_experts;
  int hidden;
  unsigned x_stride;  // elements between rows of x, less than 2^26
};

void launch_router_logits(const LogitsParams& params, Stream stream);

/// The parameters of checked arguments of route() and router_logits(); both throw Error.
RouteParams check_route(const RouterConfig& config, const TensorView& logits,
                        const TensorView& correction_bias, const Routing& out,
                        const TensorView& expert_load, Stream stream);
LogitsParams check_router_logits(const TensorView& weight, const TensorView& bias,
                                 const TensorView& x, const TensorView& logits, Stream stream);

}  // namespace fusedmoe::cuda
