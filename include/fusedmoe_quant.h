/* Quantizing matrices and activations, for C: fusedmoe/quant.h. Host memory. Rules of calls and
 * structs are those of fusedmoe.h. */
#ifndef FUSEDMOE_QUANT_H
#define FUSEDMOE_QUANT_H

#include "fusedmoe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A matrix in memory of its own; see WeightMatrix in fusedmoe/quant.h. */
typedef struct fusedmoe_matrix fusedmoe_matrix;
FUSEDMOE_C_API void fusedmoe_matrix_destroy(fusedmoe_matrix* matrix);

typedef struct fusedmoe_matrix_view { /* tensors that the format lacks are not given */
  size_t struct_size;
  fusedmoe_tensor values, scales, zero_points, global_scale;
} fusedmoe_matrix_view;
/* The memory lives as long as the matrix. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_matrix_get(const fusedmoe_matrix* matrix,
                                                   fusedmoe_matrix_view* view);

/* values (out, in) f32, bf16 or f16 in the weight format of a scheme. `global_amax` (NULL: that of
 * the matrix) is for NVFP4, whose gate and up share one. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_quantize_weights(const fusedmoe_tensor* values,
                                                         const char* scheme,
                                                         const float* global_amax,
                                                         fusedmoe_matrix** matrix);
/* The values of `matrix` as f32 (out, in). */
FUSEDMOE_C_API fusedmoe_status fusedmoe_dequantize_weights(const fusedmoe_matrix_view* matrix,
                                                           const char* scheme, int64_t in,
                                                           fusedmoe_matrix** result);
/* x (rows, cols) f32, bf16 or f16 in the activation format of a scheme. `values` and `scales` are
 * as fusedmoe_quantized_activations says, contiguous. `scale` (or NULL): see quantize() in
 * fusedmoe/quant.h. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_quantize_activations(const fusedmoe_tensor* x,
                                                             const char* scheme, const float* scale,
                                                             const fusedmoe_tensor* values,
                                                             const fusedmoe_tensor* scales);
/* Shapes and dtypes of quantized activations (rows, cols); data is NULL. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_quantized_activations(const char* scheme, int64_t rows,
                                                              int64_t cols, fusedmoe_tensor* values,
                                                              fusedmoe_tensor* scales);

#ifdef __cplusplus
}
#endif

#endif /* FUSEDMOE_QUANT_H */
