// Plans every tensor of the quantized checkpoint, then fills it expert by expert.
#include "tools/quantize_checkpoint.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/find_layout.h"
#include "checkpoint/linear_codec.h"
#include "checkpoint/opened_checkpoint.h"
#include "checkpoint/quant_config.h"
#include "core/check.h"
#include "files/file.h"
#include "files/json.h"
#include "fusedmoe/quant.h"
#include "quant/quantize.h"
#include "tools/calibrate.h"
#include "tools/quantize_target.h"

namespace fusedmoe {
namespace {

namespace fs = std::filesystem;
using checkpoint::Block;
using checkpoint::ExpertStorage;
using checkpoint::LinearLayer;
using checkpoint::PlannedTensor;

constexpr float kE4M3Max = 448, kNvfp4Max = 448 * 6;

/// One expert's matrix, quantized.
struct Quantized {
  QuantizedMatrix tensors;
  Tensor input_scale, bias;

  WeightMatrix view() const {
    WeightMatrix matrix = tensors.view();
    matrix.input_scale = input_scale;
    return matrix;
  }
};

/// A layer of the source, and what its config and that of the result say of it.
struct SourceLayer {
  std::int64_t number;
  const Block& block;
  ModelConfig from, to;
};

Tensor one_float(float value) {
  Tensor result = Tensor::empty({1}, DType::kF32);
  *result.as<float>() = value;
  return result;
}

class CheckpointQuantizer {
 public:
  CheckpointQuantizer(checkpoint::OpenedCheckpoint source, const QuantizeCheckpointOptions& options)
      : source_(std::move(source)),
        options_(options),
        model_(target_model(source_, options.scheme, options.layout, options.scale_rule)) {
    FUSEDMOE_CHECK_IO(!source_.layers.empty(), source_.label,
                      core::format("{} has no layers with experts", source_.label));
    for (const auto& [number, block] : source_.layers) add_layer(number, block);
    const checkpoint::FamilyRow& row = checkpoint::family_row(model_.family);
    const bool stacked = model_.layout == CheckpointLayout::kGptOss;
    for (const checkpoint::ExpertLayout& layout : row.layouts) {
      if (layout.storage == (stacked ? ExpertStorage::kMxfp4 : ExpertStorage::kPerExpert)) {
        layout_ = &layout;
        break;
      }
    }
    linear_ = checkpoint::find_linear_layout(model_.layout, model_.scheme.weights);
    FUSEDMOE_CHECK(layout_ && (stacked || linear_), "layout", std::string(name(model_.layout)),
                   core::format("one for {} and {}", name(model_.family), name(model_.scheme)));
    plan();
  }

  std::int64_t write(const fs::path& directory) {
    const std::vector<checkpoint::PlannedFile> shards =
        checkpoint::plan_shards(std::move(planned_), options_.max_shard_bytes);
    if (checkpoint::has_input_scale(model_.scheme)) {
      load_calibration();
    } else if (!options_.calibration.empty()) {
      throw Error::conflict("calibration", "scheme " + name(model_.scheme),
                            "it has no static activation scales");
    }
    checkpoint::CheckpointWriter writer(directory, shards, options_.progress);
    for (const auto& [name, tensor] : copied_) write_copy(name, tensor, writer);
    for (const SourceLayer& layer : layers_) write_layer(layer, writer);
    if (shards.size() > 1)
      writer.write_file(checkpoint::kIndexName, checkpoint::index_json(shards));
    writer.write_file("config.json", config_text());
    copy_other_files(writer);
    return writer.commit();
  }

 private:
  void add_layer(std::int64_t number, const Block& block) {
    SourceLayer layer{number, block, source_.layer_config(number), {}};
    const QuantScheme& scheme = layer.from.scheme;
    if (scheme.weights.quantized() || scheme.down_weights().quantized()) {
      throw Error::invalid(
          label_of(layer),
          core::format("{}: the experts are {} already; only f32, bf16 and f16 are "
                       "quantized",
                       label_of(layer), name(scheme)));
    }
    layer.to = layer.from;
    layer.to.scheme = model_.scheme;
    layer.to.layout = model_.layout;
    layer.to.quantization = model_.quantization;
    check_groups(layer.to);
    layers_.push_back(std::move(layer));
  }

  std::string label_of(const SourceLayer& layer) const {
    return core::format("{}: layer {}", source_.label, layer.number);
  }

  LayerWeights load(const SourceLayer& layer) const {
    return checkpoint::load_block(layer.from, layer.block, label_of(layer));
  }

  // ---------------------------------------------------------------------------------------------
  // Plan

  void plan() {
    std::set<std::string, std::less<>> replaced;
    for (const SourceLayer& layer : layers_) {
      const checkpoint::BlockLayout from = checkpoint::find_layout(layer.from, layer.block);
      for (const checkpoint::TensorSpec& spec : checkpoint::block_tensors(layer.from, from)) {
        const bool bias = spec.role == checkpoint::TensorRole::kExpertBias;
        // Both stacked layouts of gpt-oss have the same biases.
        if (spec.role == checkpoint::TensorRole::kExpertWeight || (bias && linear_)) {
          replaced.insert(layer.block.prefix + spec.name);
        }
      }
    }
    for (std::size_t file = 0; file < source_.files.files.size(); ++file) {
      for (const auto& [name, tensor] : source_.files.files[file].contents.tensors()) {
        const auto mapped = source_.files.weight_map.find(name);
        const bool elsewhere = mapped != source_.files.weight_map.end() && mapped->second != file;
        if (!elsewhere && !replaced.contains(name)) copied_.emplace(name, tensor);
      }
    }
    check_copied(source_, copied_);
    for (const auto& [name, tensor] : copied_) {
      planned_.push_back({name, tensor.dtype(), tensor.shape()});
    }
    for (const SourceLayer& layer : layers_) plan_layer(layer);
  }

  void plan_layer(const SourceLayer& layer) {
    const ExpertWeights experts = load(layer).experts;
    const checkpoint::BlockLayout target = target_layout(layer);
    const std::string& prefix = layer.block.prefix;
    if (!linear_) {
      for (const checkpoint::TensorSpec& spec : checkpoint::block_tensors(layer.to, target)) {
        if (spec.role == checkpoint::TensorRole::kMxfp4Blocks ||
            spec.role == checkpoint::TensorRole::kMxfp4Scales) {
          planned_.push_back({prefix + spec.name, DType::kU8, spec.shape});
        }
      }
      return;
    }
    for (std::int64_t e = 0; e < experts.num_experts(); ++e) {
      const auto matrices = matrices_of(experts, e);
      const auto layers = checkpoint::expert_layers(layer.to, target, e);
      for (std::size_t i = 0; i < layers.size(); ++i) {
        for (const checkpoint::TensorSpec& spec : written_tensors(layers[i])) {
          planned_.push_back({prefix + spec.name, spec.stored->dtypes.front(), spec.shape});
        }
        if (!model_.has_bias) continue;
        planned_.push_back(
            {prefix + layers[i].name + ".bias", matrices[i]->bias.dtype(), {layers[i].shape.out}});
      }
    }
  }

  std::vector<checkpoint::TensorSpec> written_tensors(const LinearLayer& layer) const {
    std::vector<checkpoint::TensorSpec> specs = checkpoint::linear_tensors(
        layer, {linear_, model_.scheme}, checkpoint::TensorRole::kQuantized);
    std::erase_if(specs, [&](const checkpoint::TensorSpec& spec) {
      return !checkpoint::is_written(*spec.stored, model_.scheme);
    });
    return specs;
  }

  std::string config_text() const {
    std::vector<std::string> plain;
    constexpr std::string_view kWeight = ".weight";
    for (const auto& [name, tensor] : copied_) {
      if (tensor.rank() < 2 || !name.ends_with(kWeight)) continue;
      plain.push_back(name.substr(0, name.size() - kWeight.size()));
    }
    nlohmann::json root =
        files::parse_json_object(source_.files.config_json, files::kMaxConfigBytes, "config");
    root["quantization_config"] =
        *checkpoint::quantization_config({model_.layout, model_.scheme}, plain);
    return root.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  }

  // ---------------------------------------------------------------------------------------------
  // Contents

  void load_calibration() {
    const fs::path path = !options_.calibration.empty()
                              ? options_.calibration
                              : fs::path(source_.label) / "input.safetensors";
    FUSEDMOE_CHECK_IO(fs::is_regular_file(path), "calibration",
                      core::format("{} has static activation scales, which are made from the "
                                   "hidden_states of a file: there is no {}",
                                   name(model_.scheme), path.string()));
    calibration_ = SafetensorsFile::open(path).tensor("hidden_states");
  }

  void write_copy(const std::string& name, const Tensor& tensor,
                  checkpoint::CheckpointWriter& writer) {
    constexpr std::int64_t kChunk = std::int64_t{16} << 20;
    for (std::int64_t begin = 0; begin < tensor.nbytes(); begin += kChunk) {
      const std::int64_t size = std::min(kChunk, tensor.nbytes() - begin);
      writer.write(name, begin, tensor.as<const char>() + begin, static_cast<std::size_t>(size));
    }
  }

  void write_layer(const SourceLayer& layer, checkpoint::CheckpointWriter& writer) {
    const LayerWeights weights = load(layer);
    const checkpoint::BlockLayout target = target_layout(layer);
    const std::string& prefix = layer.block.prefix;
    ActivationRange range;
    if (calibration_) range = activation_range(weights, calibration_);
    for (std::int64_t e = 0; e < weights.experts.num_experts(); ++e) {
      const std::vector<Quantized> expert = quantize_expert(weights.experts, e, range);
      if (!linear_) {
        write_gpt_oss(prefix, target.block, expert, e, writer);
        continue;
      }
      const auto layers = checkpoint::expert_layers(layer.to, target, e);
      for (std::size_t i = 0; i < layers.size(); ++i) {
        write_linear(prefix, layers[i], expert[i], writer);
      }
    }
  }

  std::vector<Quantized> quantize_expert(const ExpertWeights& weights, std::int64_t index,
                                         const ActivationRange& range) const {
    const QuantKey& from = weights.scheme.weights;
    const auto sources = matrices_of(weights, index);
    std::vector<Tensor> values(sources.size());
    std::vector<float> amax(sources.size());
    for (std::size_t i = 0; i < sources.size(); ++i) {
      values[i] = dequantize_weights(*sources[i], from, sources[i]->values.size(1));
      amax[i] = core::amax(values[i].as<const float>(), values[i].numel());
    }
    // Engines keep one global scale for the fused gate and up.
    if (sources.size() == 3) amax[0] = amax[1] = std::max(amax[0], amax[1]);
    std::vector<Quantized> result(sources.size());
    for (std::size_t i = 0; i < sources.size(); ++i) {
      std::optional<float> global;
      if (model_.scheme.weights == keys::nvfp4())
        global = checkpoint::amax_with_reciprocal(amax[i]);
      result[i].tensors = quantize_weights(
          values[i], checkpoint::written_key(model_.scheme.weights), quantize_options(), global);
      values[i] = Tensor();
      if (sources[i]->bias.defined()) result[i].bias = contiguous(sources[i]->bias);
      if (calibration_)
        result[i].input_scale = one_float(input_scale(range, index, i + 1 == sources.size()));
    }
    return result;
  }

  /// Gate, up and down, or without a gate the first and the last.
  static std::vector<const WeightMatrix*> matrices_of(const ExpertWeights& weights,
                                                      std::int64_t index) {
    const ExpertMatrices& expert = weights.experts[static_cast<std::size_t>(index)];
    if (!expert.up.values.defined()) return {&expert.gate, &expert.down};
    return {&expert.gate, &expert.up, &expert.down};
  }

  /// The names of the source, with the experts in the layout of the result.
  checkpoint::BlockLayout target_layout(const SourceLayer& layer) const {
    checkpoint::BlockLayout layout = checkpoint::find_layout(layer.from, layer.block);
    layout.experts = layout_;
    return layout;
  }

  QuantizeOptions quantize_options() const {
    QuantizeOptions options;
    options.scale_rule = options_.scale_rule;
    if (linear_) options.scale_dtype = checkpoint::scale_dtype(*linear_);
    return options;
  }

  static Tensor contiguous(const TensorView& bias) {
    Tensor result = Tensor::empty(bias.shape(), bias.dtype());
    convert(bias, result);
    return result;
  }

  // An expert without tokens takes the largest of the others.
  float input_scale(const ActivationRange& range, std::int64_t expert, bool down) const {
    float amax = range.hidden;
    if (down) {
      amax = range.intermediate[static_cast<std::size_t>(expert)];
      if (amax == 0) {
        amax = *std::max_element(range.intermediate.begin(), range.intermediate.end());
      }
    }
    const float scale = amax / (model_.scheme.activations->global_scale ? kNvfp4Max : kE4M3Max);
    FUSEDMOE_CHECK(std::isfinite(1 / scale), "calibration", core::format("largest value {}", amax),
                   "hidden states that are not all zero");
    return scale;
  }

  void write_linear(const std::string& prefix, const LinearLayer& layer, const Quantized& matrix,
                    checkpoint::CheckpointWriter& writer) const {
    for (const checkpoint::TensorSpec& spec : written_tensors(layer)) {
      const Tensor tensor =
          checkpoint::encode(*spec.stored, matrix.view(), model_.scheme.weights, layer.shape);
      writer.write(prefix + spec.name, 0, tensor.data(), static_cast<std::size_t>(tensor.nbytes()));
    }
    if (!model_.has_bias) return;
    writer.write(prefix + layer.name + ".bias", 0, matrix.bias.data(),
                 static_cast<std::size_t>(matrix.bias.nbytes()));
  }

  // Blocks and scales of one expert at its place in the stack, gate and up rows interleaved.
  void write_gpt_oss(const std::string& prefix, std::string_view segment,
                     const std::vector<Quantized>& expert, std::int64_t index,
                     checkpoint::CheckpointWriter& writer) const {
    const auto write = [&](std::string_view pattern, const Tensor& tensor) {
      writer.write(prefix + checkpoint::tensor_name(segment, pattern), index * tensor.nbytes(),
                   tensor.data(), static_cast<std::size_t>(tensor.nbytes()));
    };
    const Quantized &gate = expert[0], &up = expert[1], &down = expert[2];
    write(layout_->w1, interleave(gate.tensors.values, up.tensors.values));
    write(layout_->w13_scales, interleave(gate.tensors.scales, up.tensors.scales));
    write(layout_->w2, down.tensors.values);
    write(layout_->w2_scales, down.tensors.scales);
  }

  static Tensor interleave(const Tensor& gate, const Tensor& up) {
    const std::int64_t rows = gate.size(0), width = gate.size(1);
    Tensor result = Tensor::empty({2 * rows, width}, gate.dtype());
    for (std::int64_t row = 0; row < rows; ++row) {
      std::copy_n(gate.as<const char>() + row * width, width, result.as<char>() + 2 * row * width);
      std::copy_n(up.as<const char>() + row * width, width,
                  result.as<char>() + (2 * row + 1) * width);
    }
    return result;
  }

  // What else a model's directory holds: the tokenizer and generation settings, input.safetensors.
  void copy_other_files(checkpoint::CheckpointWriter& writer) const {
    if (!fs::is_directory(source_.label)) return;
    constexpr std::array<std::string_view, 4> kExtensions{".json", ".txt", ".model", ".jinja"};
    std::set<fs::path> paths;
    for (const fs::directory_entry& entry : fs::directory_iterator(source_.label)) {
      const std::string name = entry.path().filename().string();
      const std::string extension = entry.path().extension().string();
      if (!entry.is_regular_file() || name == "config.json" || name == checkpoint::kIndexName)
        continue;
      if (name.starts_with('.')) continue;
      const bool known =
          std::find(kExtensions.begin(), kExtensions.end(), extension) != kExtensions.end();
      if (known || name == "input.safetensors") paths.insert(entry.path());
    }
    for (const fs::path& path : paths) {
      const files::MappedFile file(path);
      writer.write_file(path.filename().string(), file.data(), file.size());
    }
  }

  const checkpoint::OpenedCheckpoint source_;
  const QuantizeCheckpointOptions& options_;
  const ModelConfig model_;  ///< family, layout and scheme of the result, the same in all layers
  std::vector<SourceLayer> layers_;
  const checkpoint::ExpertLayout* layout_ = nullptr;
  const checkpoint::LinearLayout* linear_ = nullptr;  ///< null: gpt-oss
  std::map<std::string, Tensor> copied_;
  std::vector<PlannedTensor> planned_;
  Tensor calibration_;  ///< undefined for dynamic scales
};

}  // namespace

std::int64_t quantize_checkpoint(const fs::path& source, const QuantizeCheckpointOptions& options,
                                 const fs::path& directory) {
  FUSEDMOE_CHECK(options.max_shard_bytes >= 1, "max_shard_bytes",
                 core::to_string(options.max_shard_bytes), "positive");
  FUSEDMOE_CHECK(!directory.empty(), "directory", "empty", "a path");
  try {
    checkpoint::OpenedCheckpoint opened =
        checkpoint::open_checkpoint(checkpoint::open_checkpoint_files(source), source.string());
    return CheckpointQuantizer(std::move(opened), options).write(directory);
  } catch (const fs::filesystem_error& error) {
    files::fail_system(directory, "write", error);
  }
}

}  // namespace fusedmoe
