// Whether a tensor of a block is what a layer needs, by its shape and its dtype or format; and what
// a block must not hold.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/block.h"
#include "checkpoint/block_tensors.h"

namespace fusedmoe::checkpoint {

/// "mlp.gate" of "mlp.gate.weight".
std::string module_of(const std::string& tensor);

/// Throws Error for tensors that nothing here computes: those that the family refuses, routers that
/// are quantized, and layers beside the experts whose inputs are.
void check_served(const ModelConfig& model, const BlockLayout& layout, const Block& block,
                  const std::string& label);

/// Of one block: expert weights must have one dtype in common, shared ones too.
class TensorChecks {
 public:
  /// "shape [2, 3], must be [3, 2]" and the like; empty: the tensor fits.
  std::string problem(const TensorSpec& spec, const BlockTensor& tensor);

  /// Of the expert weights that were checked; none: they are quantized.
  std::optional<DType> expert_dtype() const { return expert_dtype_; }

 private:
  std::string dtype_problem(const TensorSpec& spec, DType dtype);

  std::optional<DType> expert_dtype_, shared_dtype_;
};

}  // namespace fusedmoe::checkpoint
