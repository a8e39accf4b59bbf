#include "capi/convert.h"

#include <span>

namespace fusedmoe::capi {
namespace {

constexpr std::int32_t kNumDTypes = 15;
static_assert(static_cast<int>(DType::kF64) + 1 == FUSEDMOE_F64);
static_assert(static_cast<int>(DType::kBF16) + 1 == FUSEDMOE_BF16);
static_assert(static_cast<int>(DType::kE8M0) + 1 == FUSEDMOE_E8M0);
static_assert(static_cast<int>(DType::kI8) + 1 == FUSEDMOE_I8);
static_assert(static_cast<int>(DType::kBool) + 1 == FUSEDMOE_BOOL);
static_assert(FUSEDMOE_BOOL == kNumDTypes);
static_assert(static_cast<int>(ScoringFunc::kSoftmax) == FUSEDMOE_SOFTMAX);
static_assert(static_cast<int>(ScoringFunc::kTopkSoftmax) == FUSEDMOE_TOPK_SOFTMAX);
static_assert(static_cast<int>(ScoringFunc::kLogits) == FUSEDMOE_LOGITS);
static_assert(static_cast<int>(GateUpLayout::kInterleaved) == FUSEDMOE_INTERLEAVED);
static_assert(static_cast<int>(ScaleLayout::kTiled128x4) == FUSEDMOE_SCALES_TILED_128X4);
static_assert(Shape::kMaxRank == 6);

TensorView make_view(const fusedmoe_tensor& tensor) {
  if (tensor.ndim < 0 || tensor.ndim > Shape::kMaxRank) {
    throw Error("ndim", std::to_string(tensor.ndim), "0 to 6", Fault::kShape);
  }
  if (tensor.reserved != 0) throw Error("reserved", std::to_string(tensor.reserved), "0");
  const auto rank = static_cast<std::size_t>(tensor.ndim);
  const Shape shape(std::span(tensor.shape, rank));
  const DType dtype = to_dtype(tensor.dtype, "dtype");
  const Device device = to_device_id(tensor.device_type, tensor.device_index, "device");
  if (!tensor.has_strides) return {tensor.data, dtype, shape, device};
  return {tensor.data, dtype, shape, Shape(std::span(tensor.strides, rank)), device};
}

std::optional<float> to_optional(const float* value) {
  return value ? std::optional(*value) : std::nullopt;
}

}  // namespace

DType to_dtype(std::int32_t dtype, const char* name) {
  if (dtype < 1 || dtype > kNumDTypes) {
    throw Error(name, std::to_string(dtype), "1 to 15, a FUSEDMOE_ element type", Fault::kDType);
  }
  return static_cast<DType>(dtype - 1);
}

DType to_dtype_or(std::int32_t dtype, DType fallback, const char* name) {
  return dtype == FUSEDMOE_NONE ? fallback : to_dtype(dtype, name);
}

std::int32_t from_dtype(DType dtype) {
  return static_cast<std::int32_t>(dtype) + 1;
}

Device to_device_id(std::int32_t device_type, std::int32_t device_index, const char* name) {
  const bool cpu = device_type == FUSEDMOE_CPU && device_index == 0;
  if (!cpu && (device_type != FUSEDMOE_CUDA || device_index < 0)) {
    throw Error(name,
                "type " + std::to_string(device_type) + ", index " + std::to_string(device_index),
                "FUSEDMOE_CPU with index 0, or FUSEDMOE_CUDA", Fault::kDevice);
  }
  return {cpu ? DeviceKind::kCpu : DeviceKind::kCuda, device_index};
}

TensorView to_view(const fusedmoe_tensor& tensor, const char* name) {
  if (tensor.dtype == FUSEDMOE_NONE) return {};
  try {
    return make_view(tensor);
  } catch (const Error& error) {
    throw error.within(name);
  }
}

TensorView to_view(const fusedmoe_tensor* tensor, const char* name) {
  return tensor ? to_view(*tensor, name) : TensorView();
}

Tensor to_tensor(const fusedmoe_tensor& tensor, const char* name) {
  const TensorView view = to_view(tensor, name);
  return view ? Tensor(view, nullptr) : Tensor();
}

fusedmoe_tensor from_view(const TensorView& view) {
  fusedmoe_tensor result{};
  if (!view) return result;
  result.data = view.data();
  result.dtype = from_dtype(view.dtype());
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

std::string to_text(const char* text) {
  return text ? text : "";
}

std::optional<Stream> to_stream(void* stream, Executor* executor, Device device) {
  if (stream && device.is_cpu()) {
    throw Error::invalid("stream", "stream is of CUDA: on the cpu it is NULL", Fault::kDevice);
  }
  if (executor && !device.is_cpu()) {
    throw Error::invalid("args.executor",
                         "args.executor is of the cpu: on " + to_string(device) + " it is NULL",
                         Fault::kDevice);
  }
  if (executor) return cpu_stream(*executor);
  return stream ? std::optional(Stream{device, stream}) : std::nullopt;
}

std::int32_t check_enum(std::int32_t value, std::int32_t count, const std::string& name) {
  if (value < 0 || value >= count) {
    throw Error(name, std::to_string(value), "0 to " + std::to_string(count - 1));
  }
  return value;
}

std::optional<CombineMode> to_combine(std::int32_t combine, const std::string& name) {
  if (check_enum(combine, 3, name) == 0) return std::nullopt;
  return combine == 1 ? CombineMode::kPerRank : CombineMode::kPerSlot;
}

RouterConfig to_router(const fusedmoe_router_config* config, const char* name) {
  const fusedmoe_router_config c = read_given_struct(config, name);
  RouterConfig result;
  result.num_experts = c.num_experts;
  result.topk = c.topk;
  result.scoring =
      static_cast<ScoringFunc>(check_enum(c.scoring, 7, std::string(name) + ".scoring"));
  result.renormalize = c.renormalize != 0;
  result.num_expert_group = c.num_expert_group;
  result.topk_group = c.topk_group;
  if (c.topk_group != 0 && c.num_expert_group == 0) {
    throw Error::conflict(std::string(name) + ".topk_group", "num_expert_group 0");
  }
  if (c.routed_scaling_factor) result.routed_scaling_factor = *c.routed_scaling_factor;
  result.apply_router_weight_on_input = c.apply_router_weight_on_input != 0;
  result.num_zero_experts = c.num_zero_experts;
  if (c.sparsemixer_jitter) result.sparsemixer_jitter = *c.sparsemixer_jitter;
  if (c.renormalize_epsilon) result.renormalize_epsilon = *c.renormalize_epsilon;
  return result;
}

StackedExperts to_experts(const fusedmoe_expert_weights* weights, const char* name) {
  const fusedmoe_expert_weights w = read_given_struct(weights, name);
  const std::string prefix = std::string(name) + ".";
  StackedExperts result;
  ExpertWeights::Stacked& s = result.stacked;
  const struct {
    const fusedmoe_tensor& from;
    Tensor& to;
    const char* name;
  } tensors[] = {{w.w13, s.w13, "w13"},
                 {w.w13_scales, s.w13_scales, "w13_scales"},
                 {w.w13_zero_points, s.w13_zero_points, "w13_zero_points"},
                 {w.w13_global_scales, s.w13_global_scales, "w13_global_scales"},
                 {w.w13_input_scales, s.w13_input_scales, "w13_input_scales"},
                 {w.w13_bias, s.w13_bias, "w13_bias"},
                 {w.w2, s.w2, "w2"},
                 {w.w2_scales, s.w2_scales, "w2_scales"},
                 {w.w2_zero_points, s.w2_zero_points, "w2_zero_points"},
                 {w.w2_global_scales, s.w2_global_scales, "w2_global_scales"},
                 {w.w2_input_scales, s.w2_input_scales, "w2_input_scales"},
                 {w.w2_bias, s.w2_bias, "w2_bias"}};
  for (const auto& tensor : tensors) {
    if (tensor.from.dtype == FUSEDMOE_NONE) continue;
    tensor.to = to_tensor(tensor.from, (prefix + tensor.name).c_str());
  }
  if (!s.w13) throw Error(prefix + "w13", "NULL", "given", Fault::kNull);
  s.gate_up_layout =
      static_cast<GateUpLayout>(check_enum(w.gate_up_layout, 3, prefix + "gate_up_layout"));
  s.transposed = w.transposed != 0;
  s.scale_layout = static_cast<ScaleLayout>(check_enum(w.scale_layout, 2, prefix + "scale_layout"));
  result.scheme = w.scheme ? parse_scheme(w.scheme) : schemes::unquantized(s.w13.dtype());
  if (w.activation) result.activation = parse_activation(w.activation);
  result.params = {to_optional(w.activation_alpha), to_optional(w.activation_beta),
                   to_optional(w.activation_limit), to_optional(w.situ_beta),
                   to_optional(w.situ_linear_beta)};
  return result;
}

}  // namespace fusedmoe::capi
