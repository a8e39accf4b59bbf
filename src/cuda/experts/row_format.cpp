#include "cuda/experts/row_format.h"

namespace fusedmoe::cuda {

bool RowFormat::needs_hidden_pass() const {
  const std::optional<QuantKey>& key = config_.scheme.activations;
  return has_coded_rows() && key->dynamic && key->group.rows < 0;
}

bool RowFormat::quantizes_groups() const {
  return has_coded_rows() && format_.k_scales && config_.scheme.activations->group.cols > 0 &&
         is_gated(config_.activation) && !config_.hooks;
}

bool RowFormat::stores_codes() const {
  return format_.stores_codes() && !fp8_as_f16() && !config_.scheme.activations->dynamic &&
         !config_.hooks;
}

}  // namespace fusedmoe::cuda
