// Tries what the config might say instead, key by key, and counts the tensors that then do not fit.
#include "checkpoint/causes.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/causes_beside.h"
#include "checkpoint/layer_formats.h"
#include "checkpoint/model_config.h"
#include "checkpoint/named_formats.h"
#include "core/check.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {
namespace {

/// Another value of one key, and the sentence that says so.
struct Change {
  std::string text;
  ModelConfig model;
};

class Changes {
 public:
  Changes(const ModelConfig& model, const Block& block)
      : model_(model),
        block_(block),
        row_(family_row(model.family)),
        layout_(find_layout(model, block)) {
    add_number_of_experts();
    // Where most experts have no tensors, only their number explains it.
    const auto experts = static_cast<std::size_t>(model.router.num_experts);
    const bool each = layout_.experts->storage == ExpertStorage::kPerExpert;
    if (each && block.tensors.size() < experts) return;
    add_sizes();
    add_correction_bias();
    if (layout_.experts->storage != ExpertStorage::kMxfp4) add_formats();
  }

  std::vector<Change> take() { return std::move(changes_); }

 private:
  template <typename T>
  std::string key_of(const Setting<T>& setting) const {
    return block_.config ? block_.config->label(setting.keys)
                         : "config." + (setting.keys.empty() ? "" : setting.keys.front());
  }

  const Shape* shape_of(const std::string& name) const {
    const auto found = block_.tensors.find(name);
    return found == block_.tensors.end() ? nullptr : &found->second.shape();
  }

  /// Every size that the tensors of a linear layer may stand for: rows of gate and up together, and
  /// codes in bytes and words.
  std::set<std::int64_t> sizes_of(const std::string& layer) const {
    constexpr int kMostTensors = 8;
    std::set<std::int64_t> sizes;
    int count = 0;
    for (auto at = block_.tensors.lower_bound(layer);
         at != block_.tensors.end() && at->first.starts_with(layer) && count++ < kMostTensors;
         ++at) {
      for (const std::int64_t size : at->second.shape()) {
        if (size <= 0 || size > kMaxWidth) continue;
        if (size % 2 == 0) sizes.insert(size / 2);
        for (const std::int64_t codes : {1, 2, 4, 8}) sizes.insert(size * codes);
      }
    }
    return sizes;
  }

  /// `apply`: sets it in a model.
  template <typename Apply>
  void add_sizes(const std::string& key, std::int64_t was, const std::set<std::int64_t>& sizes,
                 const Apply& apply) {
    for (const std::int64_t size : sizes) {
      if (size == was || size <= 0 || size > kMaxWidth) continue;
      Change change{core::format("{} is {}, but the tensors have {}", key, was, size), model_};
      apply(change.model, size);
      changes_.push_back(std::move(change));
    }
  }

  void add_number_of_experts() {
    const Shape* router = shape_of(layout_.router);
    if (!router || router->rank() != 2) return;
    add_sizes(key_of(row_.num_experts), model_.router.num_experts,
              {(*router)[0] - model_.router.num_zero_experts},
              [](ModelConfig& model, std::int64_t size) { model.router.num_experts = size; });
  }

  void add_sizes() {
    if (const Shape* router = shape_of(layout_.router); router && router->rank() == 2) {
      add_sizes(key_of(row_.hidden), model_.hidden, {(*router)[1]},
                [](ModelConfig& model, std::int64_t size) { model.hidden = size; });
    }
    const bool shared_as_experts = row_.shared_width.keys.empty();
    add_sizes(key_of(row_.intermediate), model_.intermediate,
              sizes_of(expert_layers(model_, layout_, 0).front().name),
              [&](ModelConfig& model, std::int64_t size) {
                const std::int64_t count = model.shared_intermediate / model.intermediate;
                if (shared_as_experts) model.shared_intermediate = count * size;
                model.intermediate = size;
              });
    std::set<std::int64_t> shared, latent;
    for (const SharedNames& names : row_.shared) {
      shared.merge(sizes_of(tensor_name(layout_.block, names.gate)));
    }
    const std::string width = key_of(shared_as_experts ? row_.intermediate : row_.shared_width);
    add_sizes(row_.shared_count.keys.empty()
                  ? width
                  : core::format("{} times {}", key_of(row_.shared_count), width),
              model_.shared_intermediate, shared, [&](ModelConfig& model, std::int64_t size) {
                model.shared_intermediate = size;
                model.shared_expert_gate = !row_.shared_gate.empty();
              });
    for (const std::string& down : row_.latent_down) {
      latent.merge(sizes_of(tensor_name(layout_.block, down)));
    }
    add_sizes(key_of(row_.latent_width), model_.latent, latent,
              [](ModelConfig& model, std::int64_t size) { model.latent = size; });
  }

  void add_correction_bias() {
    if (row_.correction_bias.empty()) return;
    ModelConfig changed = model_;
    changed.has_correction_bias = !model_.has_correction_bias;
    const std::string key =
        row_.topk_method ? key_of(*row_.topk_method) : key_of(row_.has_correction_bias);
    changes_.push_back({core::format("{} means a router {} a correction bias, which the file has{}",
                                     key, model_.has_correction_bias ? "with" : "without",
                                     model_.has_correction_bias ? " not" : ""),
                        std::move(changed)});
  }

  /// Which matrices of the experts another format is tried for.
  struct Target {
    std::string_view words;
    bool first, down;
  };

  void add_formats() {
    constexpr Target kAll{"experts", true, true}, kFirst{"gate and up matrices", true, false},
        kDown{"down matrices", false, true};
    ExpertFormats said;
    if (model_.quantization) {
      said = LayerModules(*model_.quantization, row_, block_.prefix, layout_)
                 .experts(model_.router.num_experts);
    }
    const bool mixed = said.first.scheme != said.down.scheme;
    for (const NamedFormat& format :
         formats_like({model_.layout, layout_.storage.experts.scheme})) {
      if (!said.first.scheme && !said.down.scheme) {
        add_format(format, kAll, said, contradiction(kAll.words, {}, model_.layout, format));
        continue;
      }
      const bool one_layout = format.layout == model_.layout;
      for (const Target& target : {kAll, kFirst, kDown}) {
        const bool all = target.first && target.down;
        const ModuleFormat& was = target.first ? said.first : said.down;
        if (!was.scheme || (all ? mixed && one_layout : !one_layout)) continue;
        if (one_layout && was.scheme->weights == format.scheme.weights) continue;
        add_format(format, target, said, contradiction(target.words, was, model_.layout, format));
      }
    }
  }

  void add_format(const NamedFormat& format, const Target& target, const ExpertFormats& said,
                  std::string text) {
    QuantRules rules;
    rules.layout = format.layout;
    ModuleFormat other = target.first ? said.down : said.first;
    QuantScheme scheme = format.scheme;
    if (!target.first || !target.down) {
      if (other.scheme) scheme.activations = other.scheme->activations;
      const std::size_t same = rules.formats.add_format(std::move(other));
      const ExpertLayout& names = *layout_.experts;
      for (const std::string& pattern :
           target.down ? std::vector{names.w1, names.w3} : std::vector{names.w2}) {
        if (pattern.empty()) continue;
        // One rule for all experts: there are hundreds of changes, and thousands of experts.
        rules.formats.add_pattern(
            {ModulePattern::Kind::kGlob, "*" + pattern.substr(pattern.starts_with('/')), {}}, same);
      }
    }
    rules.formats.add_every(rules.formats.add_format({scheme, {}, {}}));
    Change change{std::move(text), model_};
    change.model.layout = format.layout;
    change.model.quantization = std::make_shared<QuantRules>(std::move(rules));
    changes_.push_back(std::move(change));
  }

  const ModelConfig& model_;
  const Block& block_;
  const FamilyRow& row_;
  const BlockLayout layout_;
  std::vector<Change> changes_;
};

}  // namespace

std::string cause_of_misfits(const ModelConfig& model, const Block& block, std::size_t misfits,
                             CountMisfits count_misfits) {
  constexpr int kMostKeys = 3;
  constexpr std::size_t kTensorsOfAnExpert = 12;  // about: four parts of three matrices
  // Tensors to look at in all tries together: a second or two.
  std::size_t budget = std::size_t{1} << 20;
  const std::optional<BesideCause> beside = cause_beside_experts(model, block);
  if (beside && beside->misfits == misfits) return beside->text;
  std::string text;
  ModelConfig now = model;
  std::size_t left = misfits;
  for (int key = 0; key < kMostKeys && left > 0; ++key) {
    std::optional<Change> best;
    for (Change& change : Changes(now, block).take()) {
      const std::size_t cost =
          block.tensors.size() +
          kTensorsOfAnExpert * static_cast<std::size_t>(change.model.router.num_experts);
      if (cost > budget) break;
      budget -= cost;
      const std::size_t count = count_misfits(change.model, block);
      if (count >= left) continue;
      left = count;
      best = std::move(change);
      if (left == 0) break;
    }
    if (!best) break;
    text += (text.empty() ? "" : "; ") + best->text;
    now = std::move(best->model);
  }
  if (left > 0 && left >= misfits / 2) text.clear();
  // What is said of the experts may be true of the layers beside them, too.
  if (!beside || (!text.empty() && !cause_beside_experts(now, block))) return text;
  return text.empty() ? beside->text : core::format("{}; {}", text, beside->text);
}

std::string cause_of_missing_input_scales(const ModelConfig& model, const Block& block,
                                          const BlockLayout& layout) {
  const QuantScheme& scheme = layout.storage.experts.scheme;
  if (!layout.storage.experts || !has_input_scale(scheme)) return {};
  for (std::int64_t e = 0; e < model.router.num_experts; ++e) {
    for (const LinearLayer& layer : expert_layers(model, layout, e)) {
      for (const StoredTensor& stored : layout.storage.experts.layout->tensors) {
        if (stored.part != Part::kInputScale) continue;
        if (block.tensors.contains(part_name(layer, stored.suffix))) return {};
      }
    }
  }
  return core::format(
      "config.quantization_config says that the experts are {}, which quantizes "
      "their inputs by scales of the file, but it holds none",
      name(scheme));
}

}  // namespace fusedmoe::checkpoint
