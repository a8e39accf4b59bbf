/* The ranks of a layer, for C: Communicator in fusedmoe/comm.h, seen from one rank. Rules of calls
 * and structs are those of fusedmoe.h.
 *
 * A failure is final: every call of every rank then returns FUSEDMOE_COMMUNICATION with the same
 * reason. One thread at a time, except abort and status. A layer keeps what it needs of the
 * communicator it is made with. */
#ifndef FUSEDMOE_RANKS_H
#define FUSEDMOE_RANKS_H

#include "fusedmoe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fusedmoe_communicator_options {
  size_t struct_size;
  int32_t device_type; /* of this rank */
  int32_t device_index;
  int64_t timeout_ms; /* of every wait, at most a year; 0: 30000 */
  /* Processes of one host share memory on the CPU. Where one rank sets this, all send messages. */
  int32_t no_shared_memory;
  /* Rows between GPUs of one host go through their memory: 1 where each rank has a GPU to itself,
   * 2 also where ranks share one. Where one rank has -1, all send messages. 0: the default, 1.
   * Where rows or sums go so, by default too, steps of one communicator that overlap are an error,
   * and steps or replays of graphs on several streams must be ordered by events of the caller. */
  int32_t peer_memory;
} fusedmoe_communicator_options;

/* Ranks that are threads of this process: communicators[r] becomes rank r's. On the CPU they read
 * each other's memory; on CUDA all share the device. */
FUSEDMOE_C_API fusedmoe_status
fusedmoe_communicator_create_threads(int32_t size, const fusedmoe_communicator_options* options,
                                     fusedmoe_communicator** communicators);
/* Ranks that are processes, over TCP. On CUDA messages go over NCCL; rows between GPUs of one host
 * go through their memory, see peer_memory. Collective. Rank 0 listens at the port of the address.
 * NULL: rank, size, address and port are what torchrun, mpirun or srun says. For an address that
 * other hosts reach the variable FUSEDMOE_TOKEN must be set: see fusedmoe_rendezvous. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_communicator_join(
    int32_t rank, int32_t size, const char* address, int32_t port,
    const fusedmoe_communicator_options* options, fusedmoe_communicator** communicator);

/* An engine's own collective: give(data, r, text of rank r, its bytes) for every rank r, this one
 * too. Returns 0 if that worked. */
typedef struct fusedmoe_gather {
  size_t struct_size;
  void* context;
  int32_t (*run)(void* context, const char* text, size_t bytes,
                 void (*give)(void* data, int32_t rank, const char* text, size_t bytes),
                 void* data);
} fusedmoe_gather;

/* The same, where the ranks find each other by such a collective, which is called twice. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_communicator_create(
    int32_t rank, int32_t size, const fusedmoe_gather* gather,
    const fusedmoe_communicator_options* options, fusedmoe_communicator** communicator);

/* Of a ncclUniqueId. */
#define FUSEDMOE_NCCL_UNIQUE_ID_BYTES 128

/* Where ranks that are processes find each other, which is one of folder, gather and address; and,
 * on CUDA, NCCL as the caller has it, which is at most one of nccl_comm and nccl_unique_id. */
typedef struct fusedmoe_rendezvous {
  size_t struct_size;
  const char* folder;            /* that all ranks see, and that is empty or does not exist yet */
  const fusedmoe_gather* gather; /* called twice */
  const char* address;           /* of rank 0, which listens at the port */
  int32_t port;
  int32_t reserved; /* 0 */
  /* An ncclComm_t of this rank, with as many ranks, on the device of the options; else an error of
   * all ranks. It must outlive the communicator, and is aborted when ranks fail. */
  void* nccl_comm;
  /* FUSEDMOE_NCCL_UNIQUE_ID_BYTES that all ranks were given. */
  const void* nccl_unique_id;
  /* With address: a secret of 16 to 64 characters, the same on all ranks, without which nobody is
   * let in. NULL: that in the variable FUSEDMOE_TOKEN. Only where the address is of this host
   * alone, as 127.0.0.1 is, there may be none. */
  const char* token;
} fusedmoe_rendezvous;

/* Ranks that are processes and find each other as `rendezvous` says. Collective. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_communicator_create_at(
    int32_t rank, int32_t size, const fusedmoe_rendezvous* rendezvous,
    const fusedmoe_communicator_options* options, fusedmoe_communicator** communicator);
/* Writes a new id; `bytes` is FUSEDMOE_NCCL_UNIQUE_ID_BYTES. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_make_nccl_unique_id(void* id, size_t bytes);
FUSEDMOE_C_API void fusedmoe_communicator_destroy(fusedmoe_communicator* communicator);

typedef struct fusedmoe_communicator_info {
  size_t struct_size;
  int32_t rank, size;
  const char* backend; /* "threads", "tcp", "nccl"; lives as long as the communicator */
} fusedmoe_communicator_info;

FUSEDMOE_C_API fusedmoe_status fusedmoe_communicator_get_info(
    const fusedmoe_communicator* communicator, fusedmoe_communicator_info* info);
/* Waits for all ranks. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_communicator_barrier(fusedmoe_communicator* communicator);
/* Collective: connects the ranks for messages now, on CUDA over NCCL, instead of when a layer whose
 * rows are messages is made. An error of all where they cannot; the communicator stays usable. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_communicator_connect(fusedmoe_communicator* communicator);
/* Collective: lets the GPU of each rank lend the others so many bytes, or as many as before if that
 * is more. Layers call it when they are made, but that memory cannot grow behind the first forward:
 * where layers are made later, call it before, with the largest fusedmoe_selection_peer_bytes(),
 * or, of layers that differ in more than their tokens, with the sum of theirs. Where the ranks give
 * different `bytes` it is an error of all, and the communicator stays usable. *why becomes the
 * reason why rows and sums go as messages instead, "" where they do not; it lives until the next
 * such call or as long as the communicator. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_communicator_map_peers(fusedmoe_communicator* communicator,
                                                               size_t bytes, const char** why);
/* Collective: a second communicator of the same ranks, whose steps may overlap those of this one.
 * It has GPU memory of its own for them, but sends no messages. `number`: which one, from 1 on, as
 * fusedmoe_forward_args.lane; of the same number it is the same one. A failure in one ends both.
 * The caller destroys it, before `communicator`. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_communicator_lane(fusedmoe_communicator* communicator,
                                                          int32_t number,
                                                          fusedmoe_communicator** lane);
/* Ends the communicator on all ranks. */
FUSEDMOE_C_API void fusedmoe_communicator_abort(fusedmoe_communicator* communicator,
                                                const char* reason);
/* FUSEDMOE_OK while it works. On CUDA to be asked after waiting for a stream. */
FUSEDMOE_C_API fusedmoe_status
fusedmoe_communicator_status(const fusedmoe_communicator* communicator);

/* ------------------------------------------------------------------------------------------------
 * A forward in three parts, between which the caller may do work of its own: begin routes and sends
 * rows, compute runs the experts, finish writes the output. What the arguments point to, the layer
 * and the workspace must outlive the step. All ranks take the parts of their steps in one order. */

typedef struct fusedmoe_step fusedmoe_step;
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_begin(const fusedmoe_layer* layer,
                                                    const fusedmoe_forward_args* args,
                                                    fusedmoe_step** step);
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_begin_routed(const fusedmoe_layer* layer,
                                                           const fusedmoe_forward_args* args,
                                                           fusedmoe_step** step);
FUSEDMOE_C_API fusedmoe_status fusedmoe_step_compute(fusedmoe_step* step);
FUSEDMOE_C_API fusedmoe_status fusedmoe_step_finish(fusedmoe_step* step);
/* Before it is finished, this ends the communicator. */
FUSEDMOE_C_API void fusedmoe_step_destroy(fusedmoe_step* step);

/* fusedmoe_layer_workspace_bytes for forwards with fixed sizes: fusedmoe_forward_args.fixed_sizes,
 * or a captured stream. num_tokens: max_tokens. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_fixed_workspace_bytes(const fusedmoe_layer* layer,
                                                                    int64_t num_tokens,
                                                                    size_t* bytes);

/* ------------------------------------------------------------------------------------------------
 * Balance: which experts to put on which rank, and to move them there while a layer serves. Rules
 * are those of LoadWindow and balance() in fusedmoe/balance.h and of MoeLayer in fusedmoe/layer.h.
 */

/* How many tokens chose each expert in the last num_forwards forwards of each layer. */
typedef struct fusedmoe_load_window fusedmoe_load_window;
FUSEDMOE_C_API fusedmoe_status fusedmoe_load_window_create(int64_t num_layers, int64_t num_experts,
                                                           int64_t num_forwards,
                                                           fusedmoe_load_window** window);
/* expert_load: that of fusedmoe_forward_args, filled. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_load_window_add(fusedmoe_load_window* window, int64_t layer,
                                                        const fusedmoe_tensor* expert_load);
/* Fills num_layers * num_experts loads. With a communicator they are sums over its ranks, the same
 * on all, which all ask for them; NULL: of this rank. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_load_window_get(const fusedmoe_load_window* window,
                                                        fusedmoe_communicator* communicator,
                                                        double* loads, size_t count);
FUSEDMOE_C_API fusedmoe_status fusedmoe_load_window_clear(fusedmoe_load_window* window);
FUSEDMOE_C_API void fusedmoe_load_window_destroy(fusedmoe_load_window* window);

typedef struct fusedmoe_balance_options { /* BalanceOptions */
  size_t struct_size;
  int32_t num_ranks; /* 0: 1 */
  int32_t num_hosts; /* 0: 1 */
  int64_t redundant; /* copies beyond one of each expert */
  int64_t num_groups;
  /* JSON: what the ranks hold now, one for all layers or one for each. */
  const char* const* placements;
  int64_t num_placements;
} fusedmoe_balance_options;

typedef struct fusedmoe_balanced_layer {
  size_t struct_size;
  const char* placement; /* JSON; lives as long as what it was taken from */
  double before, after;  /* load of the busiest rank over the mean of all */
} fusedmoe_balanced_layer;

typedef struct fusedmoe_balanced fusedmoe_balanced;
/* loads: (num_layers, num_experts), tokens that chose each. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_balance(const double* loads, int64_t num_layers,
                                                int64_t num_experts,
                                                const fusedmoe_balance_options* options,
                                                fusedmoe_balanced** balanced);
FUSEDMOE_C_API fusedmoe_status fusedmoe_balanced_get(const fusedmoe_balanced* balanced,
                                                     int64_t layer,
                                                     fusedmoe_balanced_layer* values);
FUSEDMOE_C_API void fusedmoe_balanced_destroy(fusedmoe_balanced* balanced);

/* Which rank has which experts now, as JSON that lives until they move or the layer goes; NULL
 * unless ranks with a communicator share experts. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_placement(const fusedmoe_layer* layer,
                                                        const char** placement);
/* Collective, between two forwards: brings the experts that arrive here. Forwards then go on as
 * before, until all ranks commit the move between the same two of them, which is not collective. An
 * error of one rank is one of all, and changes nothing. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_start_move(fusedmoe_layer* layer,
                                                         const char* placement);
/* The same over another communicator of the same ranks, by a thread of its own beside forwards:
 * between the GPUs of a host that of fusedmoe_communicator_lane() will do. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_start_move_over(fusedmoe_layer* layer,
                                                              const char* placement,
                                                              fusedmoe_communicator* communicator);
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_commit_move(fusedmoe_layer* layer);

/* Where experts are that no rank has any more: in a layer of a checkpoint, or with the caller. */
typedef struct fusedmoe_lost_experts {
  size_t struct_size;
  const fusedmoe_checkpoint* checkpoint; /* of all experts; or NULL: run is called */
  int64_t layer_index;                   /* of the checkpoint */
  void* context;
  /* Calls give(data, weights) with those of this expert alone; what they point to must live until
   * the layer asks for the next expert or is bound. Returns 0 if that worked. */
  int32_t (*run)(void* context, int64_t expert,
                 void (*give)(void* data, const fusedmoe_expert_weights* weights), void* data);
} fusedmoe_lost_experts;

/* After a rank has failed: the layer goes on with a new communicator of those that are left, where
 * the placement puts its experts. Collective over the new communicator. Experts that none of its
 * ranks has come from `lost`; NULL: that there are some is an error. The layer is as before where
 * this fails. The strings of fusedmoe_layer_get_info are then new ones. */
FUSEDMOE_C_API fusedmoe_status fusedmoe_layer_rebind(fusedmoe_layer* layer,
                                                     fusedmoe_communicator* communicator,
                                                     const char* placement,
                                                     const fusedmoe_lost_experts* lost);

#ifdef __cplusplus
}
#endif

#endif
