#include "checkpoint/stacked_experts.h"

#include <vector>

#include "checkpoint/gguf_blocks.h"
#include "checkpoint/linear_layouts.h"
#include "core/check.h"

namespace fusedmoe::checkpoint {
namespace {

const BlockTensor* find(const Block& block, const std::string& name) {
  const auto found = block.tensors.find(name);
  return found == block.tensors.end() ? nullptr : &found->second;
}

}  // namespace

std::optional<QuantKey> key_of(const BlockTensor& tensor) {
  if (tensor.type) return key_of(*tensor.type);
  if (!is_float(tensor.tensor.dtype())) return std::nullopt;
  return schemes::unquantized(tensor.tensor.dtype()).weights;
}

void check_same_format(const BlockTensor& gate, const BlockTensor& up, const std::string& name) {
  if (key_of(gate) == key_of(up)) return;
  throw Error::unsupported(
      Reason::kQuantScheme, name,
      core::format("{} is in another format than the gate, but both must have one", name));
}

MatrixStack::MatrixStack(const BlockTensor& tensor)
    : quantized_(decode_blocks(tensor.tensor, *tensor.type)) {}

WeightMatrix MatrixStack::rows(std::int64_t first, std::int64_t count) const {
  const auto part = [&](const Tensor& tensor) {
    return tensor ? tensor.slice(0, first, first + count) : TensorView();
  };
  WeightMatrix matrix;
  matrix.values = part(quantized_.values);
  matrix.scales = part(quantized_.scales);
  matrix.zero_points = part(quantized_.zero_points);
  matrix.global_scale = part(quantized_.global_scale);
  return matrix;
}

void MatrixStack::keep_owners(std::vector<std::shared_ptr<const void>>& owners) const {
  for (const Tensor* tensor : {&quantized_.values, &quantized_.scales, &quantized_.zero_points,
                               &quantized_.global_scale}) {
    if (*tensor) owners.push_back(tensor->owner());
  }
}

std::optional<QuantScheme> scheme_of_tensors(const Block& block, const std::string& first_name,
                                             const std::string& last_name) {
  const BlockTensor *first = find(block, first_name), *last = find(block, last_name);
  if (!first || !last) return std::nullopt;
  const std::optional<QuantKey> key = key_of(*first), down = key_of(*last);
  if (!key || !down) return std::nullopt;
  QuantScheme scheme{*key, std::nullopt};
  if (*down != *key) scheme.down = down;
  return scheme;
}

std::optional<QuantScheme> scheme_of_experts(const BlockLayout& layout, const Block& block) {
  const std::string suffix =
      layout.experts->storage == ExpertStorage::kPerExpert ? ".weight" : std::string();
  const auto name = [&](const std::string& pattern) {
    return tensor_name(layout.block, pattern) + suffix;
  };
  return scheme_of_tensors(block, name(layout.experts->w1), name(layout.experts->w2));
}

}  // namespace fusedmoe::checkpoint
