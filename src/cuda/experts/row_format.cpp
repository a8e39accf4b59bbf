#include "cuda/experts/row_format.h"

#include "cuda/sm90/kernel_set.h"

namespace fusedmoe::cuda {

bool RowFormat::needs_hidden_pass() const {
  const std::optional<QuantKey>& key = config_.scheme.activations;
  return has_fp8_rows() && key->dynamic && key->group.rows < 0;
}

bool RowFormat::stores_groups(const TileShape& tile) const {
  return has_fp8_rows() && format_.k_scales && config_.scheme.activations->group.cols > 0 &&
         is_gated(config_.activation) && !config_.hooks && tile.has_whole_groups();
}

bool RowFormat::has_row_pass(const TileShape& tile) const {
  return kernel_set(format_).has_row_pass(tile) && !needs_hidden_pass() && !config_.hooks;
}

}  // namespace fusedmoe::cuda
