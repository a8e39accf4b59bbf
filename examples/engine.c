/* The C interface in an engine that has its own tensors, routing, threads and log: memory is known
 * before anything is packed, packed weights are kept in a file, more experts are served than fit
 * into memory, an adapter works between the steps, and a forward is given up. Usage: engine_c */
#include <fusedmoe_hooks.h>
#include <fusedmoe_selection.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kExperts = 8, kSlots = 4, kTopk = 2, kHidden = 256, kIntermediate = 128, kTokens = 64 };
static const char* const kFile = "layer0.packed_c.safetensors";

static void check(fusedmoe_status status) {
  if (status == FUSEDMOE_OK) return;
  fprintf(stderr, "error %d: %s\n", status, fusedmoe_last_error());
  exit(1);
}

static void* allocate(size_t bytes) {
  void* memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!memory) exit(1);
  return memory;
}

static fusedmoe_tensor tensor(void* data, int32_t dtype, int32_t ndim, int64_t a, int64_t b,
                              int64_t c) {
  fusedmoe_tensor result = {.data = data, .dtype = dtype, .ndim = ndim, .shape = {a, b, c}};
  return result;
}

static float* values(size_t count, float scale) {
  float* result = allocate(count * sizeof *result);
  for (size_t i = 0; i < count; ++i) result[i] = scale * sinf((float)(i % 9973));
  return result;
}

/* The engine's threads, here one, and whether somebody still waits for the result. */
typedef struct threads {
  int cancelled;
} threads;
static int32_t run(void* context, int32_t num_tasks, void (*task)(void* data, int32_t index),
                   void* data) {
  threads* mine = context;
  if (mine->cancelled) return 1;
  for (int32_t i = 0; i < num_tasks; ++i) task(data, i);
  return 0;
}

static void note(void* context, int32_t level, const char* message) {
  (void)context;
  printf("%s: %s\n", level < FUSEDMOE_LOG_WARNING ? "info" : "warning", message);
}

/* What an adapter would do: here it only looks. */
static int32_t count_rows(void* context, const fusedmoe_hook_args* args) {
  *(int64_t*)context += args->output.shape[0];
  return 0;
}

int main(void) {
  check(fusedmoe_set_log(note, NULL));
  float* w13 = values((size_t)kExperts * 2 * kIntermediate * kHidden, 0.1F);
  float* w2 = values((size_t)kExperts * kHidden * kIntermediate, 0.1F);

  /* 1. What will run, and what its weights take, before anything is packed. */
  fusedmoe_moe_config config = {.struct_size = sizeof config};
  config.num_experts = kExperts;
  config.num_local_experts = kSlots;
  config.topk = kTopk;
  config.hidden = kHidden;
  config.intermediate = kIntermediate;
  config.dtype = FUSEDMOE_F32;
  config.has_expert_map = 1;
  config.hooks = 1;
  fusedmoe_selection* selection = NULL;
  int64_t packed_bytes = 0;
  check(fusedmoe_explain(&config, &selection));
  check(fusedmoe_selection_packed_bytes(selection, &packed_bytes));
  fusedmoe_selection_destroy(selection);
  printf("%lld bytes of packed weights\n", (long long)packed_bytes);

  /* 2. A layer of the first four experts, without a router; packed once, and read at every later
   * start. Read, not mapped, as experts will be replaced. */
  int32_t slot_of[kExperts] = {0, 1, 2, 3, -1, -1, -1, -1};
  fusedmoe_expert_weights experts = {.struct_size = sizeof experts};
  experts.w13 = tensor(w13, FUSEDMOE_F32, 3, kSlots, 2 * kIntermediate, kHidden);
  experts.w2 = tensor(w2, FUSEDMOE_F32, 3, kSlots, kHidden, kIntermediate);
  fusedmoe_router_config router = {.struct_size = sizeof router};
  router.num_experts = kExperts;
  router.topk = kTopk;
  fusedmoe_layer_weights weights = {.struct_size = sizeof weights};
  weights.router = &router;
  weights.experts = &experts;
  weights.expert_map = tensor(slot_of, FUSEDMOE_I32, 1, kExperts, 0, 0);
  threads engine = {0};
  fusedmoe_executor executor = {.struct_size = sizeof executor};
  executor.context = &engine;
  executor.concurrency = 2;
  executor.run = run;
  fusedmoe_layer_options options = {.struct_size = sizeof options};
  options.dtype = FUSEDMOE_F32;
  options.executor = &executor;
  options.hooks = 1;
  FILE* before = fopen(kFile, "rb");
  if (before) {
    fclose(before);
    options.packed_weights = kFile;
    options.packed_read = 1;
  }
  fusedmoe_layer* layer = NULL;
  check(fusedmoe_layer_create(&weights, &options, &layer));
  if (!before) check(fusedmoe_layer_save_packed(layer, kFile));

  /* 3. The engine's routing, and how often it chose each expert. */
  int32_t ids[kTokens * kTopk], load[kExperts];
  float topk_weights[kTokens * kTopk];
  for (int i = 0; i < kTokens * kTopk; ++i) {
    ids[i] = i % kSlots;
    topk_weights[i] = 0.5F;
  }
  float* x = values((size_t)kTokens * kHidden, 1);
  float* y = values((size_t)kTokens * kHidden, 0);
  fusedmoe_forward_args args = {.struct_size = sizeof args};
  args.hidden_states = tensor(x, FUSEDMOE_F32, 2, kTokens, kHidden, 0);
  args.output = tensor(y, FUSEDMOE_F32, 2, kTokens, kHidden, 0);
  args.topk_ids = tensor(ids, FUSEDMOE_I32, 2, kTokens, kTopk, 0);
  args.topk_weights = tensor(topk_weights, FUSEDMOE_F32, 2, kTokens, kTopk, 0);
  args.expert_load = tensor(load, FUSEDMOE_I32, 1, kExperts, 0, 0);
  args.expert_map = weights.expert_map;
  check(fusedmoe_layer_workspace_bytes(layer, kTokens, &args.workspace_bytes));
  args.workspace = allocate(args.workspace_bytes);
  check(fusedmoe_layer_forward_routed(layer, &args));
  printf("first output: %g; %d tokens for expert 0\n", (double)y[0], load[0]);

  /* 4. Token 0 wants expert 6, which takes the place of expert 3. */
  fusedmoe_expert_weights sixth = experts;
  sixth.w13 =
      tensor(w13 + 6 * 2 * kIntermediate * kHidden, FUSEDMOE_F32, 3, 1, 2 * kIntermediate, kHidden);
  sixth.w2 = tensor(w2 + 6 * kHidden * kIntermediate, FUSEDMOE_F32, 3, 1, kHidden, kIntermediate);
  check(fusedmoe_layer_repack(layer, &sixth, 3));
  slot_of[6] = 3;
  slot_of[3] = -1; /* tokens that choose it get nothing from it */
  ids[0] = 6;
  int64_t rows = 0;
  fusedmoe_hooks hooks = {.struct_size = sizeof hooks, .context = &rows, .after_gemm2 = count_rows};
  args.hooks = &hooks;
  check(fusedmoe_layer_forward_routed(layer, &args));
  printf("with expert 6: %g; %lld rows\n", (double)y[0], (long long)rows);

  /* 5. Nobody waits any more: the output stays as it was. */
  const float last = y[0];
  engine.cancelled = 1;
  const fusedmoe_status status = fusedmoe_layer_forward_routed(layer, &args);
  printf("%s: %s\n", status == FUSEDMOE_CANCELLED && y[0] == last ? "cancelled" : "not cancelled",
         fusedmoe_last_error());
  engine.cancelled = 0;
  check(fusedmoe_layer_forward_routed(layer, &args));
  printf("again: %g\n", (double)y[0]);

  fusedmoe_layer_destroy(layer);
  free(args.workspace);
  free(y);
  free(x);
  free(w2);
  free(w13);
  return 0;
}
