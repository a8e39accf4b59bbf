#include "fusedmoe/checkpoint.h"

#include <algorithm>

#include "checkpoint/opened_checkpoint.h"
#include "checkpoint/problems.h"
#include "core/check.h"
#include "moe/placement.h"

namespace fusedmoe {

struct Checkpoint::Impl {
  checkpoint::OpenedCheckpoint opened;
  std::vector<std::string> files;  ///< config, index, tensors

  static Checkpoint make(checkpoint::CheckpointFiles files, std::string label,
                         const Family& family = {}) {
    auto impl = std::make_shared<Impl>();
    impl->files = files.json_paths;
    for (const checkpoint::CheckpointFile& file : files.files) impl->files.push_back(file.path);
    impl->opened = checkpoint::open_checkpoint(std::move(files), std::move(label), family);
    Checkpoint checkpoint;
    checkpoint.impl_ = std::move(impl);
    return checkpoint;
  }

  /// A layer's tensors, whose bytes are read as the files were opened: mapped or copied, from files
  /// that have not changed.
  checkpoint::Block block(std::int64_t layer) const {
    checkpoint::Block block = opened.layer(layer);
    block.read = [this, prefix = block.prefix](const std::string& name,
                                               const checkpoint::BlockTensor& entry) {
      return opened.files.files[entry.file].read(prefix + name);
    };
    return block;
  }
};

Checkpoint Checkpoint::open(const std::filesystem::path& path, const CheckpointOptions& options) {
  return Impl::make(checkpoint::open_checkpoint_files(path, {options.access}, options.family),
                    path.string(), options.family);
}

Checkpoint Checkpoint::parse(const void* data, std::size_t size, std::string label) {
  const bool gguf =
      std::string_view(static_cast<const char*>(data), std::min<std::size_t>(size, 4)) == "GGUF";
  if (gguf) return Impl::make(checkpoint::parse_gguf(data, size, label), label);
  // Named, not a temporary: gcc 12 destroys parts of one that were not made when this throws.
  SafetensorsFile contents = SafetensorsFile::parse(data, size, label);
  return Impl::make(checkpoint::single_file({label, std::move(contents)}), label);
}

const std::vector<std::string>& Checkpoint::files() const {
  return impl_->files;
}

const ModelConfig& Checkpoint::config() const {
  return impl_->opened.config;
}

ModelConfig Checkpoint::config(std::int64_t layer) const {
  return impl_->opened.layer_config(layer);
}

const ModelConfig& Checkpoint::common_config() const {
  std::vector<std::pair<QuantScheme, std::vector<std::int64_t>>> schemes;
  for (const std::int64_t layer : moe_layers()) {
    const QuantScheme scheme = config(layer).scheme;
    auto found = std::find_if(schemes.begin(), schemes.end(),
                              [&](const auto& each) { return each.first == scheme; });
    if (found == schemes.end()) found = schemes.insert(found, {scheme, {}});
    found->second.push_back(layer);
  }
  if (schemes.size() <= 1) return config();
  std::vector<std::string> texts;
  texts.reserve(schemes.size());
  for (const auto& [scheme, layers] : schemes) {
    texts.push_back(core::format("{} in {} {}", name(scheme),
                                 layers.size() == 1 ? "layer" : "layers",
                                 checkpoint::number_ranges(layers)));
  }
  throw Error::invalid("layer",
                       core::format("{}: layers have different schemes, so one must be named: {}",
                                    impl_->opened.label, core::join(texts, ", ")));
}

std::vector<std::int64_t> Checkpoint::moe_layers() const {
  std::vector<std::int64_t> numbers;
  for (const auto& [number, block] : impl_->opened.layers) numbers.push_back(number);
  return numbers;
}

ExpertWeights Checkpoint::load_expert(std::int64_t layer, std::int64_t expert) const {
  const checkpoint::OpenedCheckpoint& opened = impl_->opened;
  const ModelConfig model = opened.layer_config(layer);
  FUSEDMOE_CHECK(expert >= 0 && expert < model.router.num_experts, "expert",
                 core::to_string(expert), core::format("in [0, {})", model.router.num_experts));
  const std::vector<std::int32_t> experts{static_cast<std::int32_t>(expert)};
  return checkpoint::load_block(model, impl_->block(layer),
                                core::format("{}: layer {}", opened.label, layer), experts)
      .experts;
}

LayerWeights Checkpoint::load_layer(std::int64_t layer) const {
  return load_layer(layer, ParallelConfig{});
}

LayerWeights Checkpoint::load_layer(std::int64_t layer, const ParallelConfig& parallel,
                                    const std::optional<ExpertPlacement>& placement) const {
  const checkpoint::OpenedCheckpoint& opened = impl_->opened;
  parallel.validate();
  const checkpoint::Block block = impl_->block(layer);
  const ModelConfig model = opened.layer_config(layer);
  const std::int64_t num_experts = model.router.num_experts;
  const std::string label = core::format("{}: layer {}", opened.label, layer);
  LayerWeights weights;
  if (parallel.ep_size == 1) {
    weights = checkpoint::load_block(model, block, label);
  } else {
    const ExpertPlacement all = core::placement_of(placement, num_experts, parallel.ep_size);
    std::vector<std::int32_t> experts = all.local_experts(parallel.ep_rank);
    if (experts.empty()) experts.push_back(0);  // as local_weights() has it
    weights = checkpoint::load_block(model, block, label, experts);
    weights.expert_map = all.expert_map(parallel.ep_rank);
  }
  if (parallel.tp_size > 1) {
    ExpertWeights& experts = weights.experts;
    experts = slice_experts(experts, slice_of(experts.intermediate, slice_unit(experts.scheme),
                                              parallel.tp_size, parallel.tp_rank));
  }
  return weights;
}

Checkpoint::LayerSchemes Checkpoint::check_layer(std::int64_t layer) const {
  const checkpoint::OpenedCheckpoint& opened = impl_->opened;
  return checkpoint::check_block(opened.layer_config(layer), opened.layer(layer),
                                 core::format("{}: layer {}", opened.label, layer));
}

std::vector<UncalibratedScale> Checkpoint::uncalibrated(std::int64_t layer) const {
  const checkpoint::OpenedCheckpoint& opened = impl_->opened;
  return checkpoint::uncalibrated_scales(opened.layer_config(layer), impl_->block(layer),
                                         core::format("{}: layer {}", opened.label, layer));
}

std::vector<Checkpoint::TensorInfo> Checkpoint::layer_tensors(std::int64_t layer) const {
  const checkpoint::Block& block = impl_->opened.layer(layer);
  std::vector<TensorInfo> result;
  for (const auto& [name, entry] : block.tensors) {
    result.push_back(
        {block.prefix + name, entry.tensor.dtype(), entry.shape(), entry.tensor.nbytes(),
         impl_->opened.files.files[entry.file].path,
         std::string(entry.type ? entry.type->name : fusedmoe::name(entry.tensor.dtype()))});
  }
  return result;
}

}  // namespace fusedmoe
