/* What would run, and why, for C: Selection in fusedmoe/selection.h. Needs neither weights nor the
 * device that it asks about. Rules of calls and structs are those of fusedmoe.h. */
#ifndef FUSEDMOE_SELECTION_H
#define FUSEDMOE_SELECTION_H

#include "fusedmoe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fusedmoe_selection fusedmoe_selection;

typedef struct fusedmoe_moe_config { /* MoeConfig in fusedmoe/experts.h */
  size_t struct_size;
  int64_t num_experts;
  int64_t num_local_experts; /* 0: num_experts */
  int64_t topk;
  int64_t hidden;
  int64_t intermediate;
  int32_t dtype;          /* FUSEDMOE_NONE: bf16 */
  const char* scheme;     /* NULL: unquantized, dtype */
  const char* activation; /* NULL: "silu" */
  int32_t has_bias;
  int32_t has_expert_map;
  int32_t apply_router_weight_on_input;
  int32_t batch_invariant;
  int32_t monolithic;
  int32_t device_type;
  int32_t device_index;
  int32_t compute_capability; /* 90: Hopper, which need not be here; 0: that of the device */
  const char* require;        /* NULL: the best */
  int32_t hooks;              /* experts that call hooks: fusedmoe_hooks.h */
} fusedmoe_moe_config;

typedef struct fusedmoe_candidate { /* strings live as long as the selection */
  size_t struct_size;
  const char* experts;
  const char* prepare_finalize;
  int32_t chosen;
  int32_t reason;   /* fusedmoe::Reason; 0: it can serve the configuration */
  const char* text; /* why not; or what would be multiplied, and by which code */
} fusedmoe_candidate;

/* Succeeds too where nothing fits, unless `require` names what must. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_explain(const fusedmoe_moe_config* config,
                                                fusedmoe_selection** selection);
/* The same for all layers of a checkpoint, which must have one scheme; dtype, device and compute
 * capability as above. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_explain_checkpoint(const fusedmoe_checkpoint* checkpoint,
                                                           int32_t dtype, int32_t device_type,
                                                           int32_t device_index,
                                                           int32_t compute_capability,
                                                           fusedmoe_selection** selection);
/* The same for one of them. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_explain_layer(const fusedmoe_checkpoint* checkpoint,
                                                      int64_t layer, int32_t dtype,
                                                      int32_t device_type, int32_t device_index,
                                                      int32_t compute_capability,
                                                      fusedmoe_selection** selection);
FUSEDMOE_C_API void fusedmoe_selection_destroy(fusedmoe_selection* selection);
/* In order of preference. */
FUSEDMOE_C_API size_t fusedmoe_selection_size(const fusedmoe_selection* selection);
FUSEDMOE_C_API fusedmoe_status fusedmoe_selection_get(const fusedmoe_selection* selection,
                                                      size_t index, fusedmoe_candidate* candidate);
/* All of it as text, and as a JSON array. They live as long as the selection. */
FUSEDMOE_C_API const char* fusedmoe_selection_table(const fusedmoe_selection* selection);
FUSEDMOE_C_API const char* fusedmoe_selection_json(const fusedmoe_selection* selection);
/* Scratch memory of the chosen experts' forward, without shared experts and router. num_threads:
 * of the CPU, 0 the default. A CUDA device may be missing where its compute capability is named. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_selection_workspace_bytes(
    const fusedmoe_selection* selection, int64_t num_tokens, int32_t num_threads, size_t* bytes);
/* Memory that the packed weights of the chosen experts will take, before any are packed. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_selection_packed_bytes(const fusedmoe_selection* selection,
                                                               int64_t* bytes);

/* Memory that the GPU of each rank lends the others for a layer with the chosen experts, where its
 * rows go that way: fusedmoe_communicator_map_peers(). num_ranks, each with tokens of its own,
 * share the experts; max_tokens_per_rank, combine and combine_dtype are those of
 * fusedmoe_layer_options. 0 on the CPU. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_selection_peer_bytes(const fusedmoe_selection* selection,
                                                             int32_t num_ranks,
                                                             int64_t max_tokens_per_rank,
                                                             int32_t combine, int32_t combine_dtype,
                                                             size_t* bytes);

/* ------------------------------------------------------------------------------------------------
 * How long a layer with the chosen experts would take on ranks that are not here: simulate() in
 * fusedmoe/simulation.h. */

typedef struct fusedmoe_simulation {
  size_t struct_size;
  const char* placement; /* JSON; NULL: consecutive experts on num_ranks */
  int32_t num_ranks;     /* beside a placement 0, or its own */
  int32_t num_hosts;     /* of equally many ranks; 0: 1 */
  int64_t tokens_per_rank;
  const char* costs;      /* as fusedmoe_rank_costs() gives them; NULL: those */
  int32_t to_each_expert; /* a row goes to each expert, not once to each rank */
  int32_t reserved;       /* 0 */
} fusedmoe_simulation;

typedef struct fusedmoe_simulated_step { /* each number that of the rank with most */
  size_t struct_size;
  double dispatch_us, experts_us, combine_us;
  double inside_bytes, between_bytes; /* of dispatch, within the host and from or to others */
  double balance;                     /* rows of the busiest rank's experts over the mean */
  double quantize_us; /* of dispatch_us, if rows are quantized before they travel; else 0 */
} fusedmoe_simulated_step;

/* topk_ids: (num_tokens, topk) i32 in host memory, the tokens of the ranks one behind the other.
 * NULL: ids at random. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_selection_simulate(const fusedmoe_selection* selection,
                                                           const fusedmoe_simulation* simulation,
                                                           const fusedmoe_tensor* topk_ids,
                                                           fusedmoe_simulated_step* step);
/* The costs by which layers choose how their rows travel, as JSON: the file that the variable
 * FUSEDMOE_RANK_COSTS names, which `fusedmoe bench --calibrate` writes; else what H200s cost, and
 * what is assumed of a network. Lives as long as the program. NULL: the file cannot be read, and
 * fusedmoe_last_error() says why. */
FUSEDMOE_C_API const char* fusedmoe_rank_costs(void);

#ifdef __cplusplus
}
#endif

#endif /* FUSEDMOE_SELECTION_H */
