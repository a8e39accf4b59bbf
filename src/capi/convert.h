// C values to C++ ones and back. Everything that a caller can get wrong is an Error with the name
// of the argument.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "capi/status.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::capi {

DType to_dtype(std::int32_t dtype, const char* name);
/// FUSEDMOE_NONE is `fallback`.
DType to_dtype_or(std::int32_t dtype, DType fallback, const char* name);
std::int32_t from_dtype(DType dtype);
Device to_device_id(std::int32_t device_type, std::int32_t device_index, const char* name);

/// FUSEDMOE_NONE is an undefined view.
TensorView to_view(const fusedmoe_tensor& tensor, const char* name);
/// NULL too.
TensorView to_view(const fusedmoe_tensor* tensor, const char* name);
/// The same as a tensor without an owner.
Tensor to_tensor(const fusedmoe_tensor& tensor, const char* name);
fusedmoe_tensor from_view(const TensorView& view);

/// NULL is an empty text.
std::string to_text(const char* text);
/// A stream of the device: of CUDA, or on the CPU of an executor; none where both are null.
std::optional<Stream> to_stream(void* stream, Executor* executor, Device device);

RouterConfig to_router(const fusedmoe_router_config* config, const char* name);

/// A flag's 0 is false; an enumeration's value must be below `count`.
std::int32_t check_enum(std::int32_t value, std::int32_t count, const std::string& name);
/// `combine` of fusedmoe_layer_options.
std::optional<CombineMode> to_combine(std::int32_t combine, const std::string& name);

/// What fusedmoe_expert_weights holds, in the form that fused_experts() takes.
struct StackedExperts {
  ExpertWeights::Stacked stacked;
  QuantScheme scheme;
  Activation activation = Activation::kSilu;
  ActivationParams params;

  ExpertWeights weights() const {
    return ExpertWeights::from_stacked(stacked, scheme, activation, params);
  }
};
StackedExperts to_experts(const fusedmoe_expert_weights* weights, const char* name);

}  // namespace fusedmoe::capi
