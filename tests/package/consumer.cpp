#include <fusedmoe/layer.h>

#include <cstdio>

int main() {
  const auto model = fusedmoe::parse_model_config(fusedmoe::model_preset("gpt-oss-20b"));
  const auto selection = fusedmoe::explain(fusedmoe::moe_config(model, fusedmoe::DType::kBF16));
  std::puts(selection.table().c_str());
  return selection ? 0 : 1;
}
