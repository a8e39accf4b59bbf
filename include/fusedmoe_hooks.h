/* Callbacks between the steps of a forward, for C: ExpertsHooks in fusedmoe/experts.h, as for the
 * adapters of LoRA. Rules of calls and structs are those of fusedmoe.h. */
#ifndef FUSEDMOE_HOOKS_H
#define FUSEDMOE_HOOKS_H

#include "fusedmoe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows in the order of the grouped GEMM: those of local expert e are expert_offsets[e] to
 * expert_offsets[e + 1] - 1. Row r belongs to slot permuted_to_slot[r], that is, to token
 * slot / topk. On CUDA the memory is the device's, and earlier work of the stream fills it, so a
 * callback enqueues its own there; `rows` is then the number of slots, of which those behind the
 * last offset belong to nobody and have slot -1. */
typedef struct fusedmoe_hook_args {
  size_t struct_size;               /* of the library's version */
  fusedmoe_tensor input;            /* what the step before read; FUSEDMOE_NONE where quantized */
  fusedmoe_tensor output;           /* (rows, width) of the layer's dtype, to be changed in place */
  fusedmoe_tensor expert_offsets;   /* (num_local_experts + 1) i32 */
  fusedmoe_tensor permuted_to_slot; /* (rows) i32 */
  int64_t topk;
  void* stream; /* CUDA: the cudaStream_t of the forward. CPU: NULL */
  /* Where tokens come from other ranks, ordered by the rank: each one's number among those of its
   * rank, (num_tokens, 1) i32 on the device, and how many there are of each rank. */
  fusedmoe_tensor origin_numbers;
  const int64_t* origin_counts;
  size_t num_origins; /* 0: tokens do not travel */
} fusedmoe_hook_args;

/* Called by the thread of the forward, once each, but not for no tokens. NULL: not called. What is
 * not 0 ends the forward with FUSEDMOE_CANCELLED and its output untouched. */
struct fusedmoe_hooks {
  size_t struct_size;
  void* context;
  /* input: hidden states, (num_tokens, hidden). output: (rows, 2 I), gate then up; or (rows, I). */
  int32_t (*after_gemm1)(void* context, const fusedmoe_hook_args* args);
  /* input: GEMM 1's output. output: (rows, I). */
  int32_t (*after_activation)(void* context, const fusedmoe_hook_args* args);
  /* Before router weights. input: (rows, I). output: (rows, hidden). */
  int32_t (*after_gemm2)(void* context, const fusedmoe_hook_args* args);
};

#ifdef __cplusplus
}
#endif

#endif /* FUSEDMOE_HOOKS_H */
