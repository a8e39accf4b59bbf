#include "io/layer_loader.h"

#include <algorithm>
#include <array>
#include <set>

#include "core/check.h"
#include "fusedmoe/formats.h"
#include "io/safetensors_header.h"

namespace fusedmoe::io {
namespace {

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

// Whole-segment match of "experts.*.w1.weight", where * stands for a number.
bool matches(std::string_view name, std::string_view pattern) {
  const std::size_t star = pattern.find('*');
  if (star == std::string_view::npos) return name == pattern;
  if (!name.starts_with(pattern.substr(0, star))) return false;
  name.remove_prefix(star);
  const std::size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
  return digits > 0 && name.substr(digits) == pattern.substr(star + 1);
}

bool holds_experts(std::string_view name, const ExpertLayout& layout) {
  for (std::string_view pattern :
       {layout.w1, layout.w3, layout.w2, layout.w13_scales, layout.w2_scales}) {
    if (!pattern.empty() && matches(name, pattern)) return true;
  }
  return false;
}

// What is wrong with the tensors of one block. Problems that differ only in the expert's index
// become one line.
class Problems {
 public:
  void add(const std::string& name, const std::string& text) {
    // "a.experts.17.b" -> head "a.experts.", index 17, tail ".b".
    constexpr std::string_view kExperts = ".experts.";
    std::string head = name, tail;
    std::int64_t index = -1;
    if (const std::size_t at = name.find(kExperts); at != std::string::npos) {
      const std::size_t begin = at + kExperts.size();
      const std::size_t end = std::min(name.find_first_not_of("0123456789", begin), name.size());
      constexpr std::size_t kMaxDigits = 9;
      if (end > begin && end - begin <= kMaxDigits) {
        head = name.substr(0, begin);
        index = std::stoll(name.substr(begin, end - begin));
        tail = name.substr(end);
      }
    }
    ++count_;
    const auto [found, is_new] = index_.emplace(std::array{head, tail, text}, lines_.size());
    if (is_new) lines_.push_back({head, tail, text, {}});
    if (index >= 0) lines_[found->second].experts.insert(index);
  }

  std::size_t count() const { return count_; }

  std::string list() const {
    std::string result;
    for (const Line& line : lines_) {
      result += "\n  " + line.head + ranges(line.experts) + line.tail + ": " + line.text;
    }
    return result;
  }

 private:
  struct Line {
    std::string head, tail, text;
    std::set<std::int64_t> experts;
  };

  // "5", or "{0-3,7}".
  static std::string ranges(const std::set<std::int64_t>& numbers) {
    if (numbers.empty()) return "";
    if (numbers.size() == 1) return fmt::to_string(*numbers.begin());
    std::string result;
    for (auto it = numbers.begin(); it != numbers.end();) {
      const std::int64_t first = *it;
      std::int64_t last = first;
      while (++it != numbers.end() && *it == last + 1) ++last;
      if (!result.empty()) result += ',';
      result += first == last ? fmt::to_string(first) : fmt::format("{}-{}", first, last);
    }
    return fmt::format("{{{}}}", result);
  }

  std::vector<Line> lines_;
  std::map<std::array<std::string, 3>, std::size_t> index_;  ///< head, tail, text -> line
  std::size_t count_ = 0;
};

class Loader {
 public:
  Loader(const ModelConfig& model, const Block& block)
      : model_(model), block_(block), layout_(find_layout(model, block)) {}

  LayerWeights load(const std::string& label) {
    for (const TensorSpec& spec : block_tensors(model_, layout_.block, *layout_.experts)) {
      claim(spec);
    }
    for (const auto& [name, entry] : block_.tensors) {
      if (claimed_.contains(name)) continue;
      problems_.add(block_.prefix + name,
                    "not claimed by any rule (" + core::describe(entry.tensor) + ")");
    }
    if (problems_.count() > 0) {
      throw Error(label,
                  fmt::format("{} tensors that do not fit:{}", problems_.count(), problems_.list()),
                  fmt::format("exactly the tensors of an MoE block of {}", name(model_.family)));
    }
    LayerWeights layer;
    layer.router = model_.router;
    layer.router_weights = router_weights();
    layer.experts = experts();
    if (model_.shared_intermediate > 0) layer.shared_experts = shared_experts();
    return layer;
  }

 private:
  void claim(const TensorSpec& spec) {
    const std::string full_name = block_.prefix + spec.name;
    const auto found = block_.tensors.find(spec.name);
    if (found == block_.tensors.end()) {
      problems_.add(full_name, "missing, must be " + to_string(spec.shape));
      return;
    }
    claimed_.insert(found->first);
    const Tensor& tensor = found->second.tensor;
    if (!(tensor.shape() == spec.shape)) {
      problems_.add(full_name,
                    "shape " + to_string(tensor.shape()) + ", must be " + to_string(spec.shape));
    }
    check_dtype(full_name, tensor.dtype(), spec.role);
  }

  void check_dtype(const std::string& full_name, DType dtype, TensorRole role) {
    const auto complain = [&](const std::string& wanted) {
      problems_.add(full_name, fmt::format("dtype {}, must be {}", name(dtype), wanted));
    };
    switch (role) {
      case TensorRole::kMxfp4Blocks:
        if (dtype != DType::kU8) complain("u8");
        return;
      case TensorRole::kMxfp4Scales:
        if (dtype != DType::kU8 && dtype != DType::kE8M0) complain("u8 or e8m0");
        return;
      default:
        break;
    }
    if (!is_float(dtype)) return complain("f32, bf16 or f16");
    // One dtype for all expert weights, one for the shared ones.
    if (role != TensorRole::kExpertWeight && role != TensorRole::kSharedWeight) return;
    std::optional<DType>& common =
        role == TensorRole::kExpertWeight ? expert_dtype_ : shared_dtype_;
    if (!common) common = dtype;
    if (dtype != *common) complain(std::string(name(*common)) + " like the others of its kind");
  }

  Tensor tensor(std::string_view pattern, std::int64_t expert = 0) const {
    return block_.tensors.find(tensor_name(layout_.block, pattern, expert))->second.tensor;
  }
  Tensor optional_tensor(std::string_view pattern, bool present) const {
    return present && !pattern.empty() ? tensor(pattern) : Tensor();
  }

  RouterWeights router_weights() const {
    const FamilyRow& row = family_row(model_.family);
    RouterWeights weights;
    weights.weight = tensor(row.router);
    weights.bias = optional_tensor(row.router_bias, model_.has_bias);
    if (const Tensor bias = optional_tensor(row.correction_bias, model_.has_correction_bias)) {
      weights.score_correction_bias = bias;
      if (bias.dtype() != DType::kF32) {
        weights.score_correction_bias = Tensor::empty(bias.shape(), DType::kF32);
        convert(bias, weights.score_correction_bias);
      }
    }
    return weights;
  }

  ExpertWeights experts() const {
    const ExpertLayout& layout = *layout_.experts;
    if (layout.storage == ExpertStorage::kPerExpert) {
      ExpertWeights weights = empty_weights(model_.intermediate, *expert_dtype_);
      for (std::int64_t e = 0; e < model_.router.num_experts; ++e) {
        add_expert(weights, {tensor(layout.w1, e), tensor(layout.w3, e), tensor(layout.w2, e)});
      }
      weights.validate();
      return weights;
    }
    const bool mxfp4 = layout.storage == ExpertStorage::kMxfp4;
    ExpertWeights::Stacked stacked;
    stacked.w13 = tensor(layout.w1);
    stacked.w2 = tensor(layout.w2);
    stacked.w13_scales = optional_tensor(layout.w13_scales, mxfp4);
    stacked.w2_scales = optional_tensor(layout.w2_scales, mxfp4);
    stacked.w13_bias = optional_tensor(layout.w13_bias, model_.has_bias);
    stacked.w2_bias = optional_tensor(layout.w2_bias, model_.has_bias);
    stacked.gate_up_layout = layout.gate_up;
    stacked.transposed = layout.storage == ExpertStorage::kStackedTransposed;
    const QuantScheme scheme =
        mxfp4 ? schemes::mxfp4_w4a16() : schemes::unquantized(*expert_dtype_);
    return ExpertWeights::from_stacked(stacked, scheme, model_.activation,
                                       model_.activation_params);
  }

  SharedExperts shared_experts() const {
    const FamilyRow& row = family_row(model_.family);
    const auto projection = [&](const char* name) {
      return tensor(fmt::format("{}.{}.weight", row.shared, name));
    };
    SharedExperts shared;
    shared.weights = empty_weights(model_.shared_intermediate, *shared_dtype_);
    add_expert(shared.weights,
               {projection("gate_proj"), projection("up_proj"), projection("down_proj")});
    shared.weights.validate();
    shared.gate = optional_tensor(row.shared_gate, model_.shared_expert_gate);
    return shared;
  }

  ExpertWeights empty_weights(std::int64_t intermediate, DType dtype) const {
    ExpertWeights weights;
    weights.scheme = schemes::unquantized(dtype);
    weights.hidden = model_.hidden;
    weights.intermediate = intermediate;
    weights.activation = model_.activation;
    weights.activation_params = model_.activation_params;
    return weights;
  }

  // Gate, up, down. Consecutive tensors mostly share a file: its mapping is kept once.
  static void add_expert(ExpertWeights& weights, const std::array<Tensor, 3>& tensors) {
    const auto matrix = [](const Tensor& values) {
      WeightMatrix matrix;
      matrix.values = values;
      return matrix;
    };
    weights.experts.push_back({matrix(tensors[0]), matrix(tensors[1]), matrix(tensors[2])});
    for (const Tensor& tensor : tensors) {
      if (weights.owners.empty() || weights.owners.back() != tensor.owner()) {
        weights.owners.push_back(tensor.owner());
      }
    }
  }

  const ModelConfig& model_;
  const Block& block_;
  const BlockLayout layout_;
  Problems problems_;
  std::set<std::string_view> claimed_;
  std::optional<DType> expert_dtype_, shared_dtype_;
};

}  // namespace

BlockLayout find_layout(const ModelConfig& model, const Block& block) {
  const FamilyRow& row = family_row(model.family);
  BlockLayout best{row.blocks.front(), &row.layouts.front()};
  std::int64_t most = 0;
  for (std::string_view segment : row.blocks) {
    for (const ExpertLayout& layout : row.layouts) {
      std::int64_t count = 0;
      for (const auto& [name, entry] : block.tensors) {
        const std::string_view view = name;
        count += view.starts_with(segment) && view.substr(segment.size()).starts_with('.') &&
                 holds_experts(view.substr(segment.size() + 1), layout);
      }
      if (count > most) {
        most = count;
        best = {segment, &layout};
      }
    }
  }
  return best;
}

QuantScheme stored_scheme(const ModelConfig& model, const Block& block) {
  const BlockLayout layout = find_layout(model, block);
  if (layout.experts->storage == ExpertStorage::kMxfp4) return schemes::mxfp4_w4a16();
  const auto first = block.tensors.find(tensor_name(layout.block, layout.experts->w1));
  return first != block.tensors.end() && is_float(first->second.tensor.dtype())
             ? schemes::unquantized(first->second.tensor.dtype())
             : model.scheme;
}

LayerWeights load_block(const ModelConfig& model, const Block& block, const std::string& label) {
  LayerWeights layer;
  try {
    layer = Loader(model, block).load(label);
  } catch (const Error& error) {
    if (error.argument() == label) throw;
    throw Error(label + ": " + error.argument(), error.was(), error.must_be());
  }
  return layer;
}

}  // namespace fusedmoe::io
