#include "checkpoint/tensor_checks.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "checkpoint/gguf_blocks.h"
#include "checkpoint/linear_codec.h"
#include "core/check.h"
#include "quant/weight_layout.h"

namespace fusedmoe::checkpoint {
namespace {

/// With its last two dimensions exchanged.
Shape across(const Shape& shape) {
  std::vector<std::int64_t> extents(shape.begin(), shape.end());
  if (extents.size() >= 2) std::swap(extents[extents.size() - 2], extents.back());
  return Shape(std::span<const std::int64_t>(extents));
}

Shape without_first(const Shape& shape) {
  return Shape(std::span(shape.begin() + 1, shape.end()));
}

/// Numbers may be one for all experts, one for each, or one each for gate and up.
bool stack_fits(const TensorSpec& spec, const Shape& shape) {
  const std::int64_t experts = spec.experts;
  if (is_number(*spec.stored)) {
    if (shape.rank() <= 2 && shape.numel() == 1) return true;
    if (shape == Shape{experts} || shape == Shape{experts, 1}) return true;
    return spec.gate_and_up && shape == Shape{experts, 2};
  }
  if (shape == spec.shape) return true;
  return shape.rank() > 0 && shape[0] == experts &&
         accepts_shape(*spec.stored, without_first(spec.shape), without_first(shape));
}

bool fits(const TensorSpec& spec, const Shape& shape) {
  if (spec.stored && spec.experts > 0) return stack_fits(spec, shape);
  if (spec.stored) return accepts_shape(*spec.stored, spec.shape, shape);
  // ERNIE has one row for each group of experts, and one group.
  if (spec.role == TensorRole::kCorrectionBias && shape == Shape({1, spec.shape[0]})) return true;
  if (spec.role == TensorRole::kSharedGate && shape == Shape({spec.shape[1]})) return true;
  return shape == spec.shape;
}

std::string type_problem(const TensorSpec& spec, const files::GgmlType& type) {
  const bool weight = spec.role == TensorRole::kExpertWeight ||
                      spec.role == TensorRole::kSharedWeight ||
                      spec.role == TensorRole::kLatentWeight;
  if (weight && key_of(type)) return {};
  return core::format("type {}, must be {}", type.name,
                      weight ? served_types() : "F32, BF16 or F16");
}

/// What is stored in parts ("gate.qweight", "gate.scales") or in FP8.
void check_router(const BlockLayout& layout, const Block& block, const std::string& label) {
  const auto weight = block.tensors.find(layout.router);
  if (weight != block.tensors.end() &&
      (weight->second.type || is_float(weight->second.tensor.dtype()))) {
    return;
  }
  const std::string module = module_of(layout.router);
  std::string parts;
  for (const auto& [name, entry] : block.tensors) {
    if (!name.starts_with(module + ".") || is_float(entry.tensor.dtype())) continue;
    parts += (parts.empty() ? "" : ", ") + name.substr(module.size() + 1);
  }
  if (parts.empty()) return;
  throw Error::unsupported(
      Reason::kQuantScheme, label,
      core::format("{}: the router {}{} is quantized ({}): routers are read in f32, bf16 and f16 "
                   "only, so leave it out when quantizing",
                   label, block.prefix, module, parts));
}

}  // namespace

std::string module_of(const std::string& tensor) {
  return tensor.substr(0, tensor.rfind('.'));
}

void check_served(const ModelConfig& model, const BlockLayout& layout, const Block& block,
                  const std::string& label) {
  for (const auto& [name, reason] : family_row(model.family).refused_tensors) {
    if (!block.tensors.contains(tensor_name(layout.block, name))) continue;
    throw Error::unsupported(Reason::kModel, label, core::format("{}: {}", label, reason));
  }
  const std::pair<const LinearStorage&, const std::string&> others[] = {
      {layout.storage.shared_gate, layout.shared_gate},
      {layout.storage.latent, layout.latent_down}};
  for (const auto& [storage, layer] : others) {
    if (!storage || !storage.scheme.activations) continue;
    throw Error::unsupported(
        Reason::kModel, label,
        core::format("{}: {} is quantized together with its input, which is computed for experts "
                     "only: leave it out when quantizing",
                     label, layer));
  }
  check_router(layout, block, label);
}

std::string TensorChecks::dtype_problem(const TensorSpec& spec, DType dtype) {
  const auto unless = [&](bool fits, const std::string& wanted) {
    return fits ? std::string() : core::format("dtype {}, must be {}", name(dtype), wanted);
  };
  if (spec.role == TensorRole::kMxfp4Blocks) return unless(dtype == DType::kU8, "u8");
  if (spec.role == TensorRole::kMxfp4Scales) {
    return unless(dtype == DType::kU8 || dtype == DType::kE8M0, "u8 or e8m0");
  }
  if (spec.role == TensorRole::kQuantized) {
    const std::span<const DType> accepted = spec.stored->dtypes;
    return unless(std::find(accepted.begin(), accepted.end(), dtype) != accepted.end(),
                  core::names(accepted));
  }
  if (!is_float(dtype)) return unless(false, "f32, bf16 or f16");
  const bool expert = spec.role == TensorRole::kExpertWeight;
  if (!expert && spec.role != TensorRole::kSharedWeight) return {};
  std::optional<DType>& common = expert ? expert_dtype_ : shared_dtype_;
  if (!common) common = dtype;
  return unless(dtype == *common, std::string(name(*common)) + " like the others of its kind");
}

std::string TensorChecks::problem(const TensorSpec& spec, const BlockTensor& tensor) {
  std::string found;
  if (!fits(spec, tensor.shape())) {
    found = "shape " + to_string(tensor.shape()) + ", must be " + to_string(spec.shape);
    if (tensor.shape() == across(spec.shape)) found += ": its matrices lie across";
  }
  const std::string kind =
      tensor.type ? type_problem(spec, *tensor.type) : dtype_problem(spec, tensor.tensor.dtype());
  return found + (found.empty() || kind.empty() ? "" : "; ") + kind;
}

}  // namespace fusedmoe::checkpoint
