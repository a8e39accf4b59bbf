#include "checkpoint/matrix_reader.h"

#include <algorithm>

#include "checkpoint/linear_codec.h"
#include "core/check.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {
namespace {

/// Of a stack that has one number for all experts, one for each, or one each for gate and up.
TensorView number_of(const TensorView& all, std::int64_t experts, StackPart part) {
  const std::int64_t count = all.numel();
  const TensorView flat = all.reshape({count});
  if (count == 1) return flat;
  const std::int64_t each = count / experts;
  const std::int64_t at = part.expert * each + std::min(part.half, each - 1);
  return flat.slice(0, at, at + 1);
}

/// What a layer of its own has in the place of this tensor of a stack.
TensorView slice_of(const TensorView& all, const StoredTensor& stored, const LinearLayer& layer,
                    StackPart part) {
  if (layer.experts == 0) return all;
  if (is_number(stored)) return number_of(all, layer.experts, part);
  const TensorView one = all.select(0, part.expert);
  return layer.transposed && one.rank() == 2 ? one.transpose(0, 1) : one;
}

}  // namespace

Tensor MatrixReader::tensor(const std::string& name) const {
  if (name.empty()) return {};
  return block_.read ? block_.read(name, entry(name)) : entry(name).tensor;
}

WeightMatrix MatrixReader::matrix(const LinearLayer& layer, const LinearStorage& storage,
                                  StackPart part, Owners& owners) {
  WeightMatrix result;
  if (!storage) read_values(layer, part, owners, result);
  if (storage) {
    for (const StoredTensor& stored : storage.layout->tensors) {
      read_part(stored, layer, storage.scheme, part, owners, result);
    }
    collect(layer.name, [&] { split_group_scales(storage.scheme.weights, result, owners); });
  }
  if (layer.bias.empty()) {
    check_no_bias(layer);
    return result;
  }
  const TensorView bias = view(layer.bias, layer, owners);
  result.bias = layer.experts == 0 ? bias : bias.select(0, part.expert);
  return result;
}

Tensor MatrixReader::plain_matrix(const LinearLayer& layer, const LinearStorage& storage) {
  const std::string name = part_name(layer, ".weight");
  if (!storage && !entry(name).type) {
    check_no_bias(layer);
    const Tensor stored = tensor(name);
    return Tensor(stored.reshape({layer.shape.out, layer.shape.in}), stored.owner());
  }
  Owners owners;
  const std::size_t before = problems_.count();
  const WeightMatrix quantized = matrix(layer, storage, {}, owners);
  if (problems_.count() > before) return {};
  const QuantKey key = storage ? storage.scheme.weights : *key_of(entry(name));
  return dequantize_weights(quantized, key, layer.shape.in);
}

StoredScale MatrixReader::input_scale(const LinearLayer& layer, const LinearStorage& storage,
                                      StackPart part) const {
  StoredScale scale;
  for (const StoredTensor& stored : storage.layout->tensors) {
    if (stored.part != Part::kInputScale) continue;
    const std::string name = part_name(layer, stored.suffix);
    scale.name = block_.prefix + name;
    if (!block_.tensors.contains(name)) break;
    const Tensor all = tensor(name);
    const TensorView number = slice_of(all, stored, layer, part);
    const float value = load_f32(number.data(), number.dtype(), 0);
    scale.text = core::to_string(value);
    scale.value = stored.form == Form::kReciprocal ? 1 / value : value;
  }
  return scale;
}

void MatrixReader::check_no_bias(const LinearLayer& layer) {
  const std::string name = layer.name + ".bias";
  if (!layer.bias.empty() || !block_.tensors.contains(name)) return;
  const Tensor bias = tensor(name);
  for (std::int64_t i = 0; i < bias.numel(); ++i) {
    const float value = load_f32(bias.data(), bias.dtype(), i);
    if (value == 0) continue;
    problems_.add(block_.prefix + name,
                  core::format("{} at {}, but the model has no such bias: only zeros may lie here",
                               value, i));
    return;
  }
}

TensorView MatrixReader::stack(const std::string& name, Owners& owners) {
  Tensor& stack = stacks_[name];
  if (!stack) {
    stack = tensor(name);
    owners.push_back(stack.owner());
  }
  return stack;
}

// Consecutive tensors mostly share a file: its mapping is kept once.
TensorView MatrixReader::view(const std::string& name, const LinearLayer& layer, Owners& owners) {
  if (layer.experts > 0) return stack(name, owners);
  Tensor read = tensor(name);
  if (owners.empty() || owners.back() != read.owner()) owners.push_back(read.owner());
  return read;
}

void MatrixReader::read_values(const LinearLayer& layer, StackPart part, Owners& owners,
                               WeightMatrix& result) {
  const std::string name = part_name(layer, ".weight");
  const auto [out, in] = layer.shape;
  if (entry(name).type) {
    auto decoded = decoded_.find(name);
    if (decoded == decoded_.end()) {
      BlockTensor stored = entry(name);
      stored.tensor = tensor(name);
      decoded = decoded_.emplace(name, MatrixStack(stored)).first;
      decoded->second.keep_owners(owners);
    }
    result = decoded->second.rows(layer.experts > 0 ? part.expert * out : 0, out);
    return;
  }
  result.values = view(name, layer, owners);
  if (layer.experts == 0) return;
  const Shape one =
      layer.transposed ? Shape{layer.experts, in, out} : Shape{layer.experts, out, in};
  result.values = result.values.reshape(one).select(0, part.expert);
  if (layer.transposed) result.values = result.values.transpose(0, 1);
}

void MatrixReader::read_part(const StoredTensor& stored, const LinearLayer& layer,
                             const QuantScheme& scheme, StackPart part, Owners& owners,
                             WeightMatrix& result) {
  const std::string name = part_name(layer, stored.suffix);
  const bool used = stored.part != Part::kInputScale && is_allowed(stored, scheme);
  if (!used || !block_.tensors.contains(name)) return;
  collect(name, [&] {
    decode(stored, slice_of(view(name, layer, owners), stored, layer, part), scheme, layer.shape,
           result, owners);
  });
}

void MatrixReader::read_numbers(const LinearLayer& layer, const LinearStorage& storage,
                                StackPart part, Owners& owners, WeightMatrix& matrix) {
  if (!storage || layer.experts == 0) return;
  for (const StoredTensor& stored : storage.layout->tensors) {
    if (is_number(stored)) read_part(stored, layer, storage.scheme, part, owners, matrix);
  }
}

template <typename Function>
void MatrixReader::collect(const std::string& name, Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    problems_.add(block_.prefix + name, error.was().empty()
                                            ? std::string(error.what())
                                            : core::format("{} {}, must be {}", error.argument(),
                                                           error.was(), error.must_be()));
  }
}

}  // namespace fusedmoe::checkpoint
