#include "checkpoint/stacked_experts.h"

#include <utility>
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
const BlockTensor* find(const BlockLayout& layout, const Block& block, const std::string& pattern) {
  return pattern.empty() ? nullptr : find(block, tensor_name(layout.block, pattern));
}

}  // namespace

std::optional<QuantKey> key_of(const BlockTensor& tensor) {
  if (tensor.type) return key_of(*tensor.type);
  if (!is_float(tensor.tensor.dtype())) return std::nullopt;
  return schemes::unquantized(tensor.tensor.dtype()).weights;
}

void check_same_format(const BlockTensor& gate, const BlockTensor& up, const std::string& name) {
  FUSEDMOE_CHECK_SUPPORTED(key_of(gate) == key_of(up), kQuantScheme, name,
                           "in another format than the gate", "both in one format");
}

MatrixStack::MatrixStack(const BlockTensor& tensor) {
  if (tensor.type) {
    quantized_ = decode_blocks(tensor.tensor, *tensor.type);
    return;
  }
  const Shape& shape = tensor.tensor.shape();
  const int last = shape.rank() - 1;
  const std::int64_t rows = tensor.tensor.numel() / shape[last];
  plain_ = Tensor(tensor.tensor.reshape({rows, shape[last]}), tensor.tensor.owner());
}

WeightMatrix MatrixStack::rows(std::int64_t first, std::int64_t count) const {
  const auto part = [&](const Tensor& tensor) {
    return tensor ? tensor.slice(0, first, first + count) : TensorView();
  };
  WeightMatrix matrix;
  matrix.values = part(plain_ ? plain_ : quantized_.values);
  matrix.scales = part(quantized_.scales);
  matrix.zero_points = part(quantized_.zero_points);
  matrix.global_scale = part(quantized_.global_scale);
  return matrix;
}

void MatrixStack::keep_owners(std::vector<std::shared_ptr<const void>>& owners) const {
  for (const Tensor* tensor : {&plain_, &quantized_.values, &quantized_.scales,
                               &quantized_.zero_points, &quantized_.global_scale}) {
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

void load_stacks(const BlockLayout& layout, const Block& block, std::int64_t num_experts,
                 ExpertWeights& weights) {
  const ExpertLayout& names = *layout.experts;
  const auto stack = [&](const std::string& pattern) {
    MatrixStack result(*find(layout, block, pattern));
    result.keep_owners(weights.owners);
    return result;
  };
  const MatrixStack first = stack(names.w1), down = stack(names.w2);
  const std::optional<MatrixStack> up =
      names.w3.empty() ? std::nullopt : std::optional(stack(names.w3));
  const auto bias = [&](const std::string& pattern) {
    const BlockTensor* tensor = find(layout, block, pattern);
    if (tensor) weights.owners.push_back(tensor->tensor.owner());
    return tensor ? tensor->tensor : Tensor();
  };
  const Tensor first_bias = bias(names.w13_bias), up_bias = bias(names.w3_bias),
               down_bias = bias(names.w2_bias);
  const auto set_bias = [](WeightMatrix& matrix, const Tensor& all, std::int64_t expert,
                           std::int64_t begin, std::int64_t count) {
    if (all) matrix.bias = all.select(0, expert).slice(0, begin, begin + count);
  };
  const std::int64_t inner = weights.intermediate, hidden = weights.hidden;
  const bool both = is_gated(weights.activation) && !up;
  const std::int64_t rows = both ? 2 * inner : inner;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    ExpertMatrices& expert = weights.experts.emplace_back();
    expert.gate = first.rows(e * rows, inner);
    set_bias(expert.gate, first_bias, e, 0, inner);
    if (both) {
      expert.up = first.rows(e * rows + inner, inner);
      set_bias(expert.up, first_bias, e, inner, inner);
    } else if (up) {
      expert.up = up->rows(e * inner, inner);
      set_bias(expert.up, up_bias, e, 0, inner);
    }
    expert.down = down.rows(e * hidden, hidden);
    set_bias(expert.down, down_bias, e, 0, hidden);
  }
}

void keep_experts(std::span<const std::int32_t> wanted, ExpertWeights& weights) {
  std::vector<ExpertMatrices> kept;
  for (const std::int32_t e : wanted) kept.push_back(weights.experts[static_cast<std::size_t>(e)]);
  weights.experts = std::move(kept);
}

ExpertWeights some_of_stacked(
    const ExpertWeights::Stacked& stacked, std::span<const std::int32_t> wanted,
    const std::function<ExpertWeights(const ExpertWeights::Stacked&)>& make) {
  ExpertWeights weights;
  for (const std::int32_t e : wanted) {
    ExpertWeights::Stacked one = stacked;
    for (Tensor* tensor :
         {&one.w13, &one.w2, &one.w13_scales, &one.w2_scales, &one.w13_bias, &one.w2_bias}) {
      if (*tensor) *tensor = Tensor(tensor->slice(0, e, e + 1), tensor->owner());
    }
    ExpertWeights next = make(one);
    if (weights.experts.empty()) {
      weights = std::move(next);
    } else {
      weights.experts.push_back(next.experts.front());
    }
  }
  return weights;
}

}  // namespace fusedmoe::checkpoint
