#include "cuda/mlp/kernel_config.h"

#include "core/format.h"

namespace fusedmoe::cuda {

std::string to_string(const KernelConfig& config) {
  if (config.one_token) return "one token";
  return core::format("{} splits {} {}", to_string(config.tile), config.splits,
                      config.rows_f32 ? "f32" : "bf16");
}

}  // namespace fusedmoe::cuda
