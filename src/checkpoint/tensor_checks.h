// Whether a tensor of a block is what a layer needs, by its shape and its dtype or format.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/block_tensors.h"
#include "checkpoint/checkpoint_files.h"

namespace fusedmoe::checkpoint {

/// Of one block: expert weights must have one dtype in common, shared ones too.
class TensorChecks {
 public:
  /// "shape (2, 3), must be (3, 2)" and the like; empty: the tensor fits.
  std::vector<std::string> problems(const TensorSpec& spec, const BlockTensor& tensor);

  /// Of the expert weights that were checked; none: they are quantized.
  std::optional<DType> expert_dtype() const { return expert_dtype_; }

 private:
  std::string dtype_problem(const TensorSpec& spec, DType dtype);

  std::optional<DType> expert_dtype_, shared_dtype_;
};

}  // namespace fusedmoe::checkpoint
