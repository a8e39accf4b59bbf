#include <fusedmoe_selection.h>
#include <stdio.h>

int main(void) {
  fusedmoe_moe_config config = {
      .struct_size = sizeof config, .num_experts = 8, .topk = 2, .hidden = 64, .intermediate = 32};
  fusedmoe_selection* selection = NULL;
  if (fusedmoe_explain(&config, &selection) != FUSEDMOE_OK) {
    fprintf(stderr, "%s\n", fusedmoe_last_error());
    return 1;
  }
  puts(fusedmoe_selection_table(selection));
  fusedmoe_selection_destroy(selection);
  return 0;
}
