/* fusedmoe for C11, and for every language that can call C.
 *
 * Handles are opaque; whoever creates one destroys it. Destroying NULL does nothing. Several
 * threads may use a const handle at once.
 *
 * Structs that begin with struct_size grow at their end in later versions. Set every byte to 0,
 * then struct_size to sizeof the struct:
 *
 *   fusedmoe_layer_options options = {.struct_size = sizeof options};
 *
 * 0 and NULL stand for the default, and a tensor whose bytes are all 0 for "not given". A library
 * older than its caller refuses members that it does not know, unless they are 0. Where a function
 * fills a struct, it fills what struct_size has room for.
 *
 * Functions return a status. After one that is not FUSEDMOE_OK, fusedmoe_last_error() says what was
 * wrong, and outputs are untouched. Text that is returned belongs to the library; each function
 * says how long it lives. No C++ exception leaves a function. Names of schemes, activations and
 * implementations: docs/number-formats.md, docs/architecture.md. */
#ifndef FUSEDMOE_H
#define FUSEDMOE_H

#include <stddef.h>
#include <stdint.h>

#include "fusedmoe/version.h" /* FUSEDMOE_VERSION_MAJOR, _MINOR and _PATCH: of this header */

#define FUSEDMOE_C_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------
 * Errors. The numbers are those of fusedmoe/error.h. */

typedef int32_t fusedmoe_status;
enum {
  FUSEDMOE_OK = 0,
  FUSEDMOE_INVALID_ARGUMENT = 1, /* the call is wrong */
  FUSEDMOE_UNSUPPORTED = 2,      /* the call is right, but nothing here can serve it */
  FUSEDMOE_OUT_OF_MEMORY = 3,
  FUSEDMOE_IO = 4,
  FUSEDMOE_DEVICE = 5,        /* the CUDA runtime or driver failed */
  FUSEDMOE_COMMUNICATION = 6, /* a rank is missing, has failed or does something else */
  FUSEDMOE_CANCELLED = 7,     /* a callback of the caller's has returned something but 0 */
  FUSEDMOE_INTERNAL = 100,    /* a fault of the library */
};

/* Of the last call in this thread that failed. Strings live until the thread's next failed call;
 * they are never NULL. */
typedef struct fusedmoe_error {
  size_t struct_size;
  fusedmoe_status status;
  int32_t fault;          /* of an invalid argument: fusedmoe::Fault (1 value, 2 shape, 3 dtype, */
                          /* 4 layout, 5 alignment, 6 overlap, 7 null, 8 workspace, 9 device) */
  int32_t reason;         /* of what is unsupported: fusedmoe::Reason */
  int32_t device_error;   /* of a device error: the number that CUDA gave */
  size_t requested_bytes; /* of memory that there was not; 0: not known */
  const char* message;    /* one sentence */
  const char* argument;   /* the argument, file or callback at fault, or "" */
  const char* was;        /* of a value at fault: what it was, */
  const char* must_be;    /* and what it must be; else "" */
} fusedmoe_error;

/* The message alone. */
FUSEDMOE_C_API const char* fusedmoe_last_error(void);
FUSEDMOE_C_API fusedmoe_status fusedmoe_last_error_info(fusedmoe_error* error);

/* ------------------------------------------------------------------------------------------------
 * Tensors. The caller owns the memory. */

enum { /* fusedmoe_tensor.dtype */
       FUSEDMOE_NONE = 0,
       FUSEDMOE_F64 = 1,
       FUSEDMOE_F32 = 2,
       FUSEDMOE_F16 = 3,
       FUSEDMOE_BF16 = 4,
       FUSEDMOE_E4M3 = 5,
       FUSEDMOE_E5M2 = 6,
       FUSEDMOE_E8M0 = 7,
       FUSEDMOE_E2M1 = 8, /* two in a byte, the first in its low nibble; shapes count elements */
       FUSEDMOE_I4 = 9,   /* likewise */
       FUSEDMOE_I8 = 10,
       FUSEDMOE_U8 = 11,
       FUSEDMOE_I16 = 12,
       FUSEDMOE_I32 = 13,
       FUSEDMOE_I64 = 14,
       FUSEDMOE_BOOL = 15,
};

enum { FUSEDMOE_CPU = 0, FUSEDMOE_CUDA = 1 }; /* device_type */

typedef struct fusedmoe_tensor { /* never changes */
  void* data;
  int32_t dtype; /* FUSEDMOE_NONE: not given */
  int32_t device_type;
  int32_t device_index;
  int32_t ndim;        /* at most 6 */
  int32_t has_strides; /* 0: row major, strides are not read */
  int32_t reserved;    /* 0 */
  int64_t shape[6];
  int64_t strides[6]; /* in elements */
} fusedmoe_tensor;

/* ------------------------------------------------------------------------------------------------
 * The library and its devices. */

/* Of the library that is loaded, as "0.2.0". */
FUSEDMOE_C_API const char* fusedmoe_version(void);
/* Name of the level of instructions that the CPU kernels run with, as "avx2" or "neon". Chosen once
 * from the processor; the environment variable FUSEDMOE_CPU_ISA may name another.
 * docs/cpu-kernels.md has all names. */
FUSEDMOE_C_API const char* fusedmoe_cpu_isa(void);
/* Threads of CPU work that is given no executor; 0 restores the default. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_set_num_threads(int32_t num_threads);
FUSEDMOE_C_API int32_t fusedmoe_num_threads(void);
FUSEDMOE_C_API int32_t fusedmoe_cuda_device_count(void);
/* Why the device cannot be used; "" if it can. Lives until the thread's next call of this. */
FUSEDMOE_C_API const char* fusedmoe_device_problem(int32_t device_type, int32_t device_index);

enum { FUSEDMOE_LOG_INFO = 20, FUSEDMOE_LOG_WARNING = 30 }; /* LogLevel in fusedmoe/log.h */
/* From now on log(context, level, message) hears what the library chooses, and why, in one line
 * each: of every kernel that is made, once for those alike. Forwards say nothing. NULL, as at the
 * start: nobody does. Several threads may call it at once, one that has begun even after another
 * function was set. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_set_log(void (*log)(void* context, int32_t level,
                                                            const char* message),
                                                void* context);

/* Runs the tasks of CPU work on the caller's threads. */
typedef struct fusedmoe_executor {
  size_t struct_size;
  void* context;
  int32_t concurrency; /* tasks that can run at the same time, at least 1 */
  /* Calls task(data, 0), ..., task(data, num_tasks - 1), in any order, on any threads, and returns
   * 0 when all have returned. Several threads may call it at once. Something but 0, when none of
   * the tasks runs any more, gives the call up: it ends with FUSEDMOE_CANCELLED, a forward with its
   * output untouched (in chunks of tokens: that of the chunk). A forward that has begun to write
   * its output ends as usual. One thread's work does not ask run. */
  int32_t (*run)(void* context, int32_t num_tasks, void (*task)(void* data, int32_t index),
                 void* data);
} fusedmoe_executor;

/* ------------------------------------------------------------------------------------------------
 * Checkpoints: a folder with config.json and *.safetensors, one safetensors file whose metadata key
 * `config` holds the config, or a GGUF file (of several: any). */

typedef struct fusedmoe_checkpoint fusedmoe_checkpoint;

typedef struct fusedmoe_checkpoint_info {
  size_t struct_size;
  const char* family; /* "gpt_oss", "mixtral", ...; strings live as long as the checkpoint */
  const char* scheme; /* of the first layer with experts: others may have another one */
  const char* activation;
  int64_t num_layers;
  int64_t num_experts, topk;
  int64_t hidden, intermediate;
  int64_t shared_intermediate; /* 0: no shared experts */
  const int64_t* moe_layers;   /* those with experts, ascending */
  size_t num_moe_layers;
} fusedmoe_checkpoint_info;

typedef struct fusedmoe_checkpoint_options {
  size_t struct_size;
  /* 0: files are mapped and must not be changed in place before their layers are made. Else each
   * tensor is read into memory when it is needed. */
  int32_t read_files;
  /* How the model's tensors are named: a built-in family, or a JSON file (docs/families.md). NULL:
   * the family that the config names. */
  const char* family;
} fusedmoe_checkpoint_options;

/* Reads headers only. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_checkpoint_open(const char* path,
                                                        const fusedmoe_checkpoint_options* options,
                                                        fusedmoe_checkpoint** checkpoint);
FUSEDMOE_C_API void fusedmoe_checkpoint_destroy(fusedmoe_checkpoint* checkpoint);
FUSEDMOE_C_API fusedmoe_status fusedmoe_checkpoint_get_info(const fusedmoe_checkpoint* checkpoint,
                                                            fusedmoe_checkpoint_info* info);
/* The scheme of a layer's experts. It lives as long as the checkpoint. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_checkpoint_get_scheme(const fusedmoe_checkpoint* checkpoint,
                                                              int64_t layer, const char** scheme);

/* ------------------------------------------------------------------------------------------------
 * Weights and router settings of the caller's. */

enum { /* where gate (w1) and up (w3) rows lie in w13 */
       FUSEDMOE_GATE_UP = 0,
       FUSEDMOE_UP_GATE = 1,
       FUSEDMOE_INTERLEAVED = 2, /* gate, up, gate, up, ... (gpt-oss) */
};
enum { FUSEDMOE_SCALES_FLAT = 0, FUSEDMOE_SCALES_TILED_128X4 = 1 };

/* Stacked expert weights; shapes: ExpertWeights::Stacked in fusedmoe/weights.h. w13 is (E, 2I, H)
 * and w2 (E, H, I), in host memory or on the layer's device. */
typedef struct fusedmoe_expert_weights {
  size_t struct_size;
  fusedmoe_tensor w13, w13_scales, w13_zero_points, w13_global_scales, w13_input_scales, w13_bias;
  fusedmoe_tensor w2, w2_scales, w2_zero_points, w2_global_scales, w2_input_scales, w2_bias;
  const char* scheme;     /* "mxfp4_w4a16", ...; NULL: unquantized, the dtype of w13 */
  const char* activation; /* "silu" (NULL), "swigluoai", ... */
  /* NULL: the activation's default. */
  const float *activation_alpha, *activation_beta, *activation_limit;
  const float *situ_beta, *situ_linear_beta;
  int32_t gate_up_layout;
  int32_t transposed; /* w13 (E, H, 2I) and w2 (E, I, H) */
  int32_t scale_layout;
} fusedmoe_expert_weights;

enum { /* fusedmoe_router_config.scoring */
       FUSEDMOE_SOFTMAX = 0,
       FUSEDMOE_SIGMOID = 1,
       FUSEDMOE_SQRT_SOFTPLUS = 2,
       FUSEDMOE_TOPK_SOFTMAX = 3, /* top-k of the logits, then softmax over the chosen ones */
       FUSEDMOE_TOPK_SIGMOID = 4,
       FUSEDMOE_LOGITS = 5,
       FUSEDMOE_SPARSEMIXER = 6, /* PhiMoE */
};

typedef struct fusedmoe_router_config { /* RouterConfig in fusedmoe/router.h */
  size_t struct_size;
  int64_t num_experts;
  int64_t topk;
  int32_t scoring;
  int32_t renormalize;
  int64_t num_expert_group; /* 0: no groups */
  int64_t topk_group;
  const float* routed_scaling_factor; /* NULL: 1 */
  int32_t apply_router_weight_on_input;
  const double* renormalize_epsilon; /* added to the sum that renormalizes; NULL: 1e-20 */
  int64_t num_zero_experts; /* more choices, which return their input; logits have them too */
  const float* sparsemixer_jitter; /* NULL: 0.01 */
} fusedmoe_router_config;

/* topk_ids (num_tokens, topk) i32 and topk_weights (num_tokens, topk) f32 from logits (num_tokens,
 * num_experts) f32, bf16 or f16. correction_bias (num_experts) f32, or NULL. Host memory. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_route(const fusedmoe_router_config* config,
                                              const fusedmoe_tensor* logits,
                                              const fusedmoe_tensor* correction_bias,
                                              const fusedmoe_tensor* topk_ids,
                                              const fusedmoe_tensor* topk_weights);
/* logits (num_tokens, num_experts) f32 = x weight^T + bias. bias: or NULL. Host memory. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_router_logits(const fusedmoe_tensor* weight,
                                                      const fusedmoe_tensor* bias,
                                                      const fusedmoe_tensor* x,
                                                      const fusedmoe_tensor* logits);

/* ------------------------------------------------------------------------------------------------
 * Layers: router, shared experts and experts. Immutable; made once, run many times. */

/* See fusedmoe_ranks.h. */
typedef struct fusedmoe_communicator fusedmoe_communicator;

typedef struct fusedmoe_layer fusedmoe_layer;

typedef struct fusedmoe_layer_weights {
  size_t struct_size;
  const fusedmoe_router_config* router;
  /* Where the router has zero experts, they come behind the others in its tensors and results. */
  fusedmoe_tensor router_weight; /* (num_experts, hidden); not given: only forward_routed works */
  fusedmoe_tensor router_bias;   /* (num_experts) */
  fusedmoe_tensor score_correction_bias; /* (num_experts) f32 */
  const fusedmoe_expert_weights* experts;
  fusedmoe_tensor expert_map; /* (num_experts) i32: global -> local expert, or -1 */
  const fusedmoe_expert_weights* shared_experts; /* one expert that every token uses, or NULL */
  fusedmoe_tensor shared_gate;                   /* (1, hidden) */
  /* Projections around the routed experts, which have the width `latent`; or not given. */
  fusedmoe_tensor latent_down; /* (latent, hidden) */
  fusedmoe_tensor latent_up;   /* (hidden, latent) */
  /* Of the whole layer. Must be given with tp_size > 1, where w13 and w2 are whole or this rank's
   * slice, and w2's bias counts on tp_rank 0 alone; else 0, or the size that they have. */
  int64_t intermediate;
} fusedmoe_layer_weights;

typedef struct fusedmoe_layer_options { /* LayerOptions in fusedmoe/layer.h */
  size_t struct_size;
  int32_t device_type;
  int32_t device_index;
  int32_t dtype;        /* of hidden states; FUSEDMOE_NONE: bf16 */
  int32_t output_dtype; /* FUSEDMOE_NONE: dtype */
  const char* require;  /* an implementation by name, or an error; NULL: the best */
  const char* plan;     /* JSON of fusedmoe_layer_plan(): exactly that, or an error */
  int32_t batch_invariant;
  int32_t inplace; /* the output may be the hidden states themselves */
  int32_t monolithic;
  int32_t num_threads;               /* of the CPU; 0: those of the executor */
  int32_t tp_size, dp_size, ep_size; /* 0: 1 */
  int32_t ep_rank;
  const fusedmoe_executor* executor; /* copied; its context must outlive the layer */
  size_t max_workspace_bytes;        /* 0: no limit */
  /* Leaves out router and shared experts: only forward_routed works. */
  int32_t experts_only;
  /* Ranks: RankOptions in fusedmoe/experts.h. NULL: one rank, or each output is one rank's part,
   * and the caller adds those of all ranks; only placement of the members below may then be set.
   * With one, sizes of 0 mean that all its ranks share the experts and have tokens of their own;
   * making the layer is then collective. fusedmoe_layer_load() reads only what this rank holds, and
   * without a communicator gives the shared experts to rank 0; fusedmoe_layer_create() is given
   * that, or with a communicator all experts. */
  fusedmoe_communicator* communicator;
  const char* placement;       /* JSON of ExpertPlacement; NULL: linear */
  int64_t max_tokens_per_rank; /* the most that any rank gives to a forward */
  int64_t receive_capacity;    /* rows of exact sizes; 0: as many as can come */
  int32_t nearest_replica;     /* of a token's experts; 0: by the token's hash */
  int32_t combine;       /* 0: as batch invariance needs or faster, 1: per rank, 2: per slot */
  int32_t combine_dtype; /* of rows per rank; FUSEDMOE_NONE: dtype */
  int32_t fixed_sizes;   /* must be 0: now in fusedmoe_forward_args */
  int32_t tp_rank;
  int32_t sequence_parallel;
  int32_t drop_rows; /* those that do not fit into receive_capacity, instead of an error */
  /* Of rows on their way to other ranks: dtype, or that of the scheme's activations; FUSEDMOE_NONE:
   * as the experts read rows, and between GPUs of one host quantized where that is predicted to be
   * faster. */
  int32_t dispatch_dtype;
  /* A file of fusedmoe_layer_save_packed(), whose routed experts are used instead of packing those
   * of the source: PackedFile in fusedmoe/packed_file.h. NULL: they are packed. Of a rank: its own
   * file. */
  const char* packed_weights;
  int32_t packed_read;       /* read the file into memory; 0: map it */
  int32_t packed_unverified; /* leave out the checksum of the contents */
  int32_t hooks;             /* only experts that call fusedmoe_forward_args.hooks */
  /* So many forwards may be in flight at the same time, see fusedmoe_forward_args.lane: on GPUs
   * that read each other's memory. 0: 1. */
  int32_t lanes;
} fusedmoe_layer_options;

/* Both select an implementation and pack the weights, which takes long. The sources are not needed
 * afterwards. With a communicator all ranks call it: what fails on one, reading its file too, is
 * the error of all, FUSEDMOE_COMMUNICATION. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_load(const fusedmoe_checkpoint* checkpoint,
                                                   int64_t layer_index,
                                                   const fusedmoe_layer_options* options,
                                                   fusedmoe_layer** layer);
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_create(const fusedmoe_layer_weights* weights,
                                                     const fusedmoe_layer_options* options,
                                                     fusedmoe_layer** layer);
FUSEDMOE_C_API void fusedmoe_layer_destroy(fusedmoe_layer* layer);
/* Keeps the packed routed experts in a file, for fusedmoe_layer_options.packed_weights: later
 * starts need not pack them. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_save_packed(const fusedmoe_layer* layer,
                                                          const char* path);
/* Replaces the routed expert at a place, 0 to num_local_experts - 1, by the first of `weights`:
 * new values in training, or another expert in a cache, of which fusedmoe_forward_args.expert_map
 * then says where it lies. No forward may run meanwhile. Everything is checked first. Not where the
 * weights lie in a mapped file: see fusedmoe_layer_options.packed_read. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_repack(fusedmoe_layer* layer,
                                                     const fusedmoe_expert_weights* weights,
                                                     int64_t expert);

typedef struct fusedmoe_layer_info {
  size_t struct_size;
  int64_t num_experts, num_local_experts, topk;
  int64_t hidden, intermediate;
  int32_t dtype, output_dtype;
  int64_t packed_bytes;
  const char* plan_line; /* "cpu+no_ep mxfp4_w4a16 bf16 ..."; strings live as long as the layer */
  const char* plan;      /* JSON that fusedmoe_layer_options.plan takes */
  const char* table;     /* every implementation, and why it was not chosen */
  int64_t num_zero_experts; /* that return their input; their ids come behind num_experts */
} fusedmoe_layer_info;

FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_get_info(const fusedmoe_layer* layer,
                                                       fusedmoe_layer_info* info);
/* Scratch memory that a forward of num_tokens needs; monotone. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_workspace_bytes(const fusedmoe_layer* layer,
                                                              int64_t num_tokens, size_t* bytes);
/* Memory that a forward takes beside it, where ranks are processes of one host that share memory;
 * else 0. num_tokens is that of the rank with the most. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_shared_bytes(const fusedmoe_layer* layer,
                                                           int64_t num_tokens, size_t* bytes);

/* See fusedmoe_hooks.h. */
typedef struct fusedmoe_hooks fusedmoe_hooks;

typedef struct fusedmoe_forward_args {
  size_t struct_size;
  fusedmoe_tensor hidden_states; /* (num_tokens, hidden) */
  fusedmoe_tensor output;        /* (num_tokens, hidden) */
  /* (num_tokens, topk) i32 and f32. forward: results, if given. forward_routed: the caller's
   * routing; global ids, -1 selects nothing. */
  fusedmoe_tensor topk_ids;
  fusedmoe_tensor topk_weights;
  /* Results, if given: of forward alone (num_tokens, num_experts + num_zero_experts) f32, and of
   * both (num_experts + num_zero_experts) i32, the tokens that chose each. */
  fusedmoe_tensor router_logits;
  fusedmoe_tensor expert_load;
  void* workspace; /* 64-byte aligned, on the layer's device */
  size_t workspace_bytes;
  void* stream;       /* CUDA: a cudaStream_t, NULL the default one. CPU: NULL */
  int32_t accumulate; /* output += instead of output = */
  int64_t max_tokens; /* of any rank in this forward, the same on all; 0: max_tokens_per_rank */
  fusedmoe_tensor dropped_rows; /* result, if given: (1) i32, of these tokens */
  int32_t fixed_sizes; /* count nothing; the same on all ranks. Captured streams imply it */
  /* (num_experts) i32, if given: in place of that of the layer, which must have been made with one
   * and without a communicator. See fusedmoe_layer_repack(). */
  fusedmoe_tensor expert_map;
  const fusedmoe_executor* executor; /* of this forward on the CPU; NULL: the layer's */
  const fusedmoe_hooks* hooks;       /* of a layer with options.hooks; NULL: none */
  /* Below options.lanes; the same on all ranks. Forwards of one lane follow each other; those of
   * several may be in flight at the same time, each on its own stream and in its own workspace. */
  int32_t lane;
} fusedmoe_forward_args;

/* Both check every argument before they write, and allocate nothing. On CUDA they only enqueue. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_forward(const fusedmoe_layer* layer,
                                                      const fusedmoe_forward_args* args);
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_forward_routed(const fusedmoe_layer* layer,
                                                             const fusedmoe_forward_args* args);

/* ------------------------------------------------------------------------------------------------
 * The experts alone, with vLLM's argument names. A layer without a router does the same with a
 * workspace of the caller's. */

/* Packed weights and scratch memory; for one thread and one stream at a time. */
typedef struct fusedmoe_pack_cache fusedmoe_pack_cache;
FUSEDMOE_C_API fusedmoe_status fusedmoe_pack_cache_create(fusedmoe_pack_cache** cache);
FUSEDMOE_C_API void fusedmoe_pack_cache_destroy(fusedmoe_pack_cache* cache);
/* Forgets everything: after weights in memory have changed or were freed. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_pack_cache_clear(fusedmoe_pack_cache* cache);

typedef struct fusedmoe_fused_experts_args {
  size_t struct_size;
  fusedmoe_tensor hidden_states; /* (num_tokens, hidden) */
  const fusedmoe_expert_weights* weights;
  fusedmoe_tensor topk_weights; /* (num_tokens, topk) f32 */
  fusedmoe_tensor topk_ids;     /* (num_tokens, topk) i32, global ids or -1 */
  fusedmoe_tensor output;       /* (num_tokens, hidden); may be hidden_states */
  fusedmoe_tensor expert_map;   /* (global_num_experts) i32 */
  int64_t global_num_experts;   /* 0: those of w13 */
  int32_t apply_router_weight_on_input;
  const char* require;               /* NULL: the best */
  void* stream;                      /* as in fusedmoe_forward_args */
  const fusedmoe_executor* executor; /* of the call on the CPU, packing too; NULL: the library's */
} fusedmoe_fused_experts_args;

/* The first call with some weights packs them; later calls with the same addresses, shapes and
 * settings reuse the result. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_fused_experts(const fusedmoe_fused_experts_args* args,
                                                      fusedmoe_pack_cache* cache);

#ifdef __cplusplus
}
#endif

#endif /* FUSEDMOE_H */
