// Helpers of the tests of the C interface.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fusedmoe/tensor.h"
#include "fusedmoe_quant.h"
#include "fusedmoe_ranks.h"
#include "fusedmoe_selection.h"

namespace fusedmoe::testing {

#define EXPECT_OK(call) EXPECT_EQ(call, FUSEDMOE_OK) << fusedmoe_last_error()
#define ASSERT_OK(call) ASSERT_EQ(call, FUSEDMOE_OK) << fusedmoe_last_error()

struct Destroy {
  void operator()(fusedmoe_checkpoint* handle) const { fusedmoe_checkpoint_destroy(handle); }
  void operator()(fusedmoe_layer* handle) const { fusedmoe_layer_destroy(handle); }
  void operator()(fusedmoe_pack_cache* handle) const { fusedmoe_pack_cache_destroy(handle); }
  void operator()(fusedmoe_selection* handle) const { fusedmoe_selection_destroy(handle); }
  void operator()(fusedmoe_communicator* handle) const { fusedmoe_communicator_destroy(handle); }
  void operator()(fusedmoe_matrix* handle) const { fusedmoe_matrix_destroy(handle); }
  void operator()(fusedmoe_load_window* handle) const { fusedmoe_load_window_destroy(handle); }
  void operator()(fusedmoe_balanced* handle) const { fusedmoe_balanced_destroy(handle); }
};
template <typename T>
using Handle = std::unique_ptr<T, Destroy>;

template <typename T>
T sized() {
  T result{};
  result.struct_size = sizeof(T);
  return result;
}

inline fusedmoe_tensor to_c(const TensorView& view) {
  fusedmoe_tensor result{};
  if (!view) return result;
  result.data = view.data();
  result.dtype = static_cast<std::int32_t>(view.dtype()) + 1;
  result.device_type = view.device().is_cpu() ? FUSEDMOE_CPU : FUSEDMOE_CUDA;
  result.device_index = view.device().index;
  result.ndim = view.rank();
  result.has_strides = 1;
  for (int dim = 0; dim < view.rank(); ++dim) {
    result.shape[dim] = view.size(dim);
    result.strides[dim] = view.stride(dim);
  }
  return result;
}

/// Scratch memory of one forward.
struct Scratch {
  Tensor memory;

  Scratch(const fusedmoe_layer* layer, std::int64_t num_tokens, fusedmoe_forward_args& args) {
    EXPECT_OK(fusedmoe_layer_workspace_bytes(layer, num_tokens, &args.workspace_bytes));
    memory = Tensor::empty({static_cast<std::int64_t>(args.workspace_bytes)}, DType::kU8);
    args.workspace = memory.data();
  }
};

/// Stacked f32 weights of a tiny layer with a router: 4 experts, top-2, hidden 32, intermediate 16.
struct TinyLayer {
  static constexpr std::int64_t kExperts = 4, kTopk = 2, kHidden = 32, kIntermediate = 16;

  Tensor w13 = filled({kExperts, 2 * kIntermediate, kHidden}, 1);
  Tensor w2 = filled({kExperts, kHidden, kIntermediate}, 2);
  Tensor gate = filled({kExperts, kHidden}, 3);
  fusedmoe_expert_weights experts = sized<fusedmoe_expert_weights>();
  fusedmoe_router_config router = sized<fusedmoe_router_config>();
  fusedmoe_layer_weights weights = sized<fusedmoe_layer_weights>();
  fusedmoe_layer_options options = sized<fusedmoe_layer_options>();

  TinyLayer() {
    experts.w13 = to_c(w13);
    experts.w2 = to_c(w2);
    router.num_experts = kExperts;
    router.topk = kTopk;
    weights.router = &router;
    weights.router_weight = to_c(gate);
    weights.experts = &experts;
    options.dtype = FUSEDMOE_F32;
  }
  TinyLayer(const TinyLayer&) = delete;
  TinyLayer& operator=(const TinyLayer&) = delete;

  Handle<fusedmoe_layer> create() const {
    fusedmoe_layer* layer = nullptr;
    EXPECT_OK(fusedmoe_layer_create(&weights, &options, &layer));
    return Handle<fusedmoe_layer>(layer);
  }

  /// Values in [-1, 1] that depend on `seed`.
  static Tensor filled(Shape shape, int seed) {
    const Tensor result = Tensor::empty(shape, DType::kF32);
    for (std::int64_t i = 0; i < result.numel(); ++i) {
      result.as<float>()[i] = static_cast<float>((i * 37 + seed * 11) % 101 - 50) / 50;
    }
    return result;
  }
};

}  // namespace fusedmoe::testing
