/* The C interface: what would run, a layer of a published checkpoint, and a forward that allocates
 * nothing. Usage: layer_c CHECKPOINT */
#include <fusedmoe_selection.h>
#include <stdio.h>
#include <stdlib.h>

static void check(fusedmoe_status status) {
  if (status == FUSEDMOE_OK) return;
  fprintf(stderr, "error %d: %s\n", status, fusedmoe_last_error());
  exit(1);
}

static fusedmoe_tensor matrix(void* data, int32_t dtype, int64_t rows, int64_t columns) {
  fusedmoe_tensor tensor = {.data = data, .dtype = dtype, .ndim = 2};
  tensor.shape[0] = rows;
  tensor.shape[1] = columns;
  return tensor;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: layer_c CHECKPOINT\n");
    return 1;
  }
  fusedmoe_checkpoint* checkpoint = NULL;
  check(fusedmoe_checkpoint_open(argv[1], NULL, &checkpoint));
  fusedmoe_checkpoint_info model = {.struct_size = sizeof model};
  check(fusedmoe_checkpoint_get_info(checkpoint, &model));
  printf("%s, %s: %zu layers with experts\n", model.family, model.scheme, model.num_moe_layers);

  /* What would run on a Hopper GPU, whether or not there is one. */
  fusedmoe_selection* selection = NULL;
  check(fusedmoe_explain_checkpoint(checkpoint, FUSEDMOE_BF16, FUSEDMOE_CUDA, 0, 90, &selection));
  puts(fusedmoe_selection_table(selection));
  fusedmoe_selection_destroy(selection);

  fusedmoe_layer_options options = {.struct_size = sizeof options, .dtype = FUSEDMOE_F32};
  fusedmoe_layer* layer = NULL;
  check(fusedmoe_layer_load(checkpoint, model.moe_layers[0], &options, &layer));
  fusedmoe_checkpoint_destroy(checkpoint); /* the weights are packed */
  fusedmoe_layer_info info = {.struct_size = sizeof info};
  check(fusedmoe_layer_get_info(layer, &info));
  puts(info.plan_line);

  enum { kTokens = 4 };
  const size_t elements = (size_t)(kTokens * info.hidden);
  float* x = malloc(elements * sizeof *x);
  float* y = malloc(elements * sizeof *y);
  if (!x || !y) return 1;
  for (size_t i = 0; i < elements; ++i) x[i] = (float)(i % 7) - 3;

  fusedmoe_forward_args args = {.struct_size = sizeof args};
  args.hidden_states = matrix(x, FUSEDMOE_F32, kTokens, info.hidden);
  args.output = matrix(y, FUSEDMOE_F32, kTokens, info.hidden);
  check(fusedmoe_layer_workspace_bytes(layer, kTokens, &args.workspace_bytes));
  args.workspace = aligned_alloc(64, (args.workspace_bytes + 63) / 64 * 64);
  check(fusedmoe_layer_forward(layer, &args));
  printf("first outputs: %g %g\n", (double)y[0], (double)y[1]);

  free(args.workspace);
  free(y);
  free(x);
  fusedmoe_layer_destroy(layer);
  return 0;
}
