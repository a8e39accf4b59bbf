// Quantizing and dequantizing host memory.
#include "capi/convert.h"
#include "fusedmoe/quant.h"
#include "fusedmoe_quant.h"

struct fusedmoe_matrix {
  fusedmoe::QuantizedMatrix matrix;
};

namespace {

using fusedmoe::capi::from_view;
using fusedmoe::capi::given;
using fusedmoe::capi::guarded;
using fusedmoe::capi::to_view;

fusedmoe::QuantScheme scheme_of(const char* scheme) {
  return fusedmoe::parse_scheme(&given(scheme, "scheme"));
}

fusedmoe::QuantKey activations_of(const char* scheme) {
  const fusedmoe::QuantScheme parsed = scheme_of(scheme);
  if (parsed.activations) return *parsed.activations;
  throw fusedmoe::Error("scheme", scheme, "one that quantizes activations");
}

/// View of host memory: what converts it reads it at once.
fusedmoe::TensorView host_view(const fusedmoe_tensor* tensor, const char* name) {
  const fusedmoe::TensorView view = to_view(&given(tensor, name), name);
  if (!view) throw fusedmoe::Error(name, "NULL", "given", fusedmoe::Fault::kNull);
  if (!view.device().is_cpu()) {
    throw fusedmoe::Error(name, "on " + to_string(view.device()), "in host memory",
                          fusedmoe::Fault::kDevice);
  }
  return view;
}

fusedmoe_tensor described(fusedmoe::DType dtype, const fusedmoe::Shape& shape) {
  fusedmoe_tensor result{};
  result.dtype = fusedmoe::capi::from_dtype(dtype);
  result.ndim = shape.rank();
  for (int dim = 0; dim < shape.rank(); ++dim) result.shape[dim] = shape[dim];
  return result;
}

}  // namespace

void fusedmoe_matrix_destroy(fusedmoe_matrix* matrix) {
  delete matrix;
}

fusedmoe_status fusedmoe_matrix_get(const fusedmoe_matrix* matrix, fusedmoe_matrix_view* view) {
  return guarded([&] {
    const fusedmoe::QuantizedMatrix& made = given(matrix, "matrix").matrix;
    fusedmoe_matrix_view values{};
    values.values = from_view(made.values);
    values.scales = from_view(made.scales);
    values.zero_points = from_view(made.zero_points);
    values.global_scale = from_view(made.global_scale);
    fusedmoe::capi::write_struct(view, values, "view");
  });
}

fusedmoe_status fusedmoe_quantize_weights(const fusedmoe_tensor* values, const char* scheme,
                                          const float* global_amax, fusedmoe_matrix** matrix) {
  return guarded([&] {
    given(matrix, "matrix");
    std::optional<float> amax;
    if (global_amax) amax = *global_amax;
    const fusedmoe::QuantKey key = scheme_of(scheme).weights;
    if (amax && key != fusedmoe::keys::nvfp4()) {
      throw fusedmoe::Error::conflict("global_amax", "scheme " + std::string(scheme));
    }
    *matrix =
        new fusedmoe_matrix{fusedmoe::quantize_weights(host_view(values, "values"), key, {}, amax)};
  });
}

fusedmoe_status fusedmoe_dequantize_weights(const fusedmoe_matrix_view* matrix, const char* scheme,
                                            int64_t in, fusedmoe_matrix** result) {
  return guarded([&] {
    given(result, "result");
    const fusedmoe_matrix_view parts = fusedmoe::capi::read_given_struct(matrix, "matrix");
    const auto part = [](const fusedmoe_tensor& tensor, const char* name) {
      return tensor.dtype == FUSEDMOE_NONE ? fusedmoe::TensorView() : host_view(&tensor, name);
    };
    fusedmoe::WeightMatrix weights;
    weights.values = part(parts.values, "matrix.values");
    weights.scales = part(parts.scales, "matrix.scales");
    weights.zero_points = part(parts.zero_points, "matrix.zero_points");
    weights.global_scale = part(parts.global_scale, "matrix.global_scale");
    fusedmoe::QuantizedMatrix decoded;
    decoded.values = fusedmoe::dequantize_weights(weights, scheme_of(scheme).weights, in);
    *result = new fusedmoe_matrix{std::move(decoded)};
  });
}

fusedmoe_status fusedmoe_quantize_activations(const fusedmoe_tensor* x, const char* scheme,
                                              const float* scale, const fusedmoe_tensor* values,
                                              const fusedmoe_tensor* scales) {
  return guarded([&] {
    std::optional<float> given_scale;
    if (scale) given_scale = *scale;
    fusedmoe::quantize(host_view(x, "x"), activations_of(scheme), host_view(values, "values"),
                       host_view(scales, "scales"), given_scale);
  });
}

fusedmoe_status fusedmoe_quantized_activations(const char* scheme, int64_t rows, int64_t cols,
                                               fusedmoe_tensor* values, fusedmoe_tensor* scales) {
  return guarded([&] {
    given(values, "values");
    given(scales, "scales");
    const fusedmoe::QuantizedShape shape =
        fusedmoe::quantized_shape(activations_of(scheme), rows, cols);
    *values = described(shape.values_dtype, shape.values);
    *scales = described(shape.scales_dtype, shape.scales);
  });
}
