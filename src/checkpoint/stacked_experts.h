// Experts by the formats of their tensors: plain ones, and the blocks of GGUF files.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/block.h"
#include "checkpoint/block_tensors.h"

namespace fusedmoe::checkpoint {

/// Matrices in the blocks of a GGUF file, decoded to parts in memory of their own.
class MatrixStack {
 public:
  explicit MatrixStack(const BlockTensor& tensor);
  /// The matrix of rows [first, first + count) of all rows.
  WeightMatrix rows(std::int64_t first, std::int64_t count) const;
  void keep_owners(std::vector<std::shared_ptr<const void>>& owners) const;

 private:
  QuantizedMatrix quantized_;
};

/// The format of a tensor's elements; none for one that nothing here computes.
std::optional<QuantKey> key_of(const BlockTensor& tensor);

/// Throws Error naming `name` if gate and up have different formats.
void check_same_format(const BlockTensor& gate, const BlockTensor& up, const std::string& name);

/// The scheme of experts by the formats of two tensors, their first and last matrices; none if one
/// is absent or has a format that nothing here computes.
std::optional<QuantScheme> scheme_of_tensors(const Block& block, const std::string& first_name,
                                             const std::string& last_name);
/// The same of a block's experts, stacked or (then of the first one) in tensors of their own.
std::optional<QuantScheme> scheme_of_experts(const BlockLayout& layout, const Block& block);

}  // namespace fusedmoe::checkpoint
