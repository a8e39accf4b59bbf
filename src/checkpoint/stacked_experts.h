// Experts by the formats of their tensors (plain ones, and the blocks of GGUF files), and those
// whose matrices lie stacked in one tensor each.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "checkpoint/layer_loader.h"

namespace fusedmoe::checkpoint {

/// All experts' matrices of one kind.
class MatrixStack {
 public:
  /// Quantized blocks are decoded to parts in memory of their own.
  explicit MatrixStack(const BlockTensor& tensor);
  /// The matrix of rows [first, first + count) of all rows.
  WeightMatrix rows(std::int64_t first, std::int64_t count) const;
  void keep_owners(std::vector<std::shared_ptr<const void>>& owners) const;

 private:
  Tensor plain_;
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

/// Fills `weights.experts` from tensors that were checked. Gate and up lie in one
/// tensor (gate rows first) or each in its own.
void load_stacks(const BlockLayout& layout, const Block& block, std::int64_t num_experts,
                 ExpertWeights& weights);

/// Leaves these of all experts, in this order.
void keep_experts(std::span<const std::int32_t> wanted, ExpertWeights& weights);

/// The experts `wanted` of stacked tensors, made one after the other: what is checked is read.
ExpertWeights some_of_stacked(
    const ExpertWeights::Stacked& stacked, std::span<const std::int32_t> wanted,
    const std::function<ExpertWeights(const ExpertWeights::Stacked&)>& make);

}  // namespace fusedmoe::checkpoint
