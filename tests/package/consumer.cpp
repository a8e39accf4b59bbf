#include <fusedmoe/checkpoint.h>
#include <fusedmoe/layer.h>

#include <cstdio>

int main() {
  const auto model = fusedmoe::parse_model_config(fusedmoe::model_preset("gpt-oss-20b"));
  const fusedmoe::LayerOptions options{.device = fusedmoe::Device{}};
  const auto selection =
      fusedmoe::explain(fusedmoe::moe_config(model, options.dtype, options.device));
  std::puts(selection.table().c_str());
  return selection ? 0 : 1;
}
