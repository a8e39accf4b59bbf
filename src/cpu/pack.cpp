#include "cpu/pack.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/ceil_div.h"
#include "core/check.h"
#include "core/parallel.h"
#include "cpu/tile_format.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "moe/experts_args.h"
#include "quant/quantize.h"
#include "quant/weight_layout.h"

namespace fusedmoe::cpu {
namespace {

using core::round_up;

float bias_at(const Column& column) {
  if (!column.matrix || !column.matrix->bias) return 0;
  const TensorView& bias = column.matrix->bias;
  return load_f32(bias.data(), bias.dtype(), column.row * bias.stride(0));
}

float column_scale(const QuantKey& key, const Column& column) {
  if (!column.matrix) return 0;
  if (key.global_scale) {
    const TensorView& scale = column.matrix->global_scale;
    const bool per_row = key.global_group.rows == 1;
    return scale.as<const float>()[per_row ? column.row * scale.stride(0) : 0];
  }
  const TensorView& scales = column.matrix->scales;
  return load_f32(scales.data(), scales.dtype(),
                  core::scale_index(key, *column.matrix, scales, column.row, 0));
}

void store_column_scale(const QuantKey& key, const Column& column, float value) {
  const WeightMatrix& matrix = *column.matrix;
  if (key.global_scale) {
    matrix.global_scale.as<float>()[key.global_group.rows == 1 ? column.row : 0] = value;
  } else {
    matrix.scales.as<float>()[core::scale_index(key, matrix, matrix.scales, column.row, 0)] = value;
  }
}

std::vector<const WeightMatrix*> all_matrices(const ExpertWeights& weights, bool first) {
  std::vector<const WeightMatrix*> matrices;
  for (const ExpertMatrices& expert : weights.experts) {
    if (!first) {
      matrices.push_back(&expert.down);
      continue;
    }
    matrices.push_back(&expert.gate);
    if (expert.up.values) matrices.push_back(&expert.up);
  }
  return matrices;
}

/// Where tiles begin, so that no load of a kernel crosses a cache line.
constexpr std::uintptr_t kTileAlignment = 64;

/// While weights are packed, each node's part asks for pages of that node. The destructor removes
/// the NUMA policy again.
class NodeWishes {
 public:
  NodeWishes(const Tensor& data, const std::vector<TilePart>& parts,
             const std::vector<core::NumaNode>& nodes)
      : data_(data), some_(!nodes.empty()) {
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const std::int64_t end = i + 1 < nodes.size() ? parts[i + 1].offset : data.nbytes();
      prefer(parts[i].offset, end, nodes[i].number);
    }
  }
  ~NodeWishes() {
    if (some_) prefer(0, data_.nbytes(), -1);
  }
  NodeWishes(const NodeWishes&) = delete;
  NodeWishes& operator=(const NodeWishes&) = delete;

 private:
  void prefer(std::int64_t begin, std::int64_t end, int node) const {
    core::prefer_numa_node(data_.as<std::byte>() + begin, static_cast<std::size_t>(end - begin),
                           node);
  }

  const Tensor& data_;
  bool some_;
};

/// Both GEMMs of a layer, without parts.
std::array<PackedGemm, 2> make_gemms(const QuantScheme& scheme, std::int64_t hidden,
                                     std::int64_t intermediate, bool gated,
                                     const TileFormats& formats) {
  const auto gemm = [](const QuantKey& key, const TileFormat& format, std::int64_t k,
                       std::int64_t padded_k, std::int64_t tiles) {
    PackedGemm result;
    result.shape = {format, key, k, padded_k};
    result.k = padded_k;
    result.num_tiles = tiles;
    result.tile_bytes = format.tile_bytes(padded_k);
    return result;
  };
  const std::int64_t outputs = gated ? kTileColumns / 2 : kTileColumns;
  const std::int64_t tiles1 = round_up(intermediate, outputs) / outputs;
  return {gemm(scheme.weights, formats[0], hidden, round_up(hidden, kGroup), tiles1),
          gemm(scheme.down_weights(), formats[1], intermediate, tiles1 * outputs,
               round_up(hidden, kTileColumns) / kTileColumns)};
}

}  // namespace

void copy_tiles(const PackedGemm& from, const Tensor& source, std::int64_t from_expert,
                const PackedGemm& to, const Tensor& target, std::int64_t to_expert) {
  for (std::int64_t tile = 0; tile < to.num_tiles; ++tile) {
    std::memcpy(target.as<std::byte>() + to.offset(to_expert, tile),
                source.as<const std::byte>() + from.offset(from_expert, tile),
                static_cast<std::size_t>(to.tile_bytes));
  }
}

std::int64_t packed_bytes(const MoeConfig& config) {
  const QuantKey &key = config.scheme.weights, &down = config.scheme.down_weights();
  const auto gemms =
      make_gemms(config.scheme, config.hidden, config.intermediate, is_gated(config.activation),
                 {format_of(key, {}), format_of(down, {})});
  std::int64_t total = 0;
  for (const PackedGemm& gemm : gemms) {
    const int rows_of_columns =
        (config.has_bias ? 1 : 0) + (has_column_scales(gemm.shape.key) ? 1 : 0);
    total += gemm.num_tiles * gemm.tile_bytes +
             gemm.padded_columns() * rows_of_columns * static_cast<std::int64_t>(sizeof(float));
  }
  return total * config.num_local_experts;
}

CpuPackedWeights::CpuPackedWeights(Info info, const ExpertWeights& weights,
                                   const PackOptions& options,
                                   const std::vector<core::NumaNode>& nodes)
    : PackedWeights(std::move(info)),
      gated_(is_gated(weights.activation)),
      origins_(static_cast<std::size_t>(weights.num_experts())) {
  const QuantKey &key = weights.scheme.weights, &down = weights.scheme.down_weights();
  FUSEDMOE_CHECK_SUPPORTED(has_codes(key) && has_codes(down), kQuantScheme, "scheme",
                           name(weights.scheme), "one that the CPU experts have");
  const std::int64_t widest = std::max(weights.hidden, weights.intermediate);
  FUSEDMOE_CHECK_SUPPORTED(key.value != DType::kI8 || widest <= kMaxInt8Size, kShape, "weights",
                           core::format("{} wide", widest),
                           core::format("at most {} wide for int32 accumulators", kMaxInt8Size));
  const std::int64_t num_experts = weights.num_experts();
  data_ = Tensor::empty({lay_out({format_of(key, all_matrices(weights, true)),
                                  format_of(down, all_matrices(weights, false))},
                                 nodes)},
                        DType::kU8);
  for (const ColumnPart& part : column_parts()) {
    part.tensor = Tensor::empty({num_experts, part.columns}, DType::kF32);
  }
  const NodeWishes wishes(data_, gemm1_.parts, nodes);
  Executor& executor = core::executor_of(options.stream.value_or(Stream{}));
  for (std::int64_t expert = 0; expert < num_experts; ++expert) {
    pack_expert(executor, expert, weights.experts[static_cast<std::size_t>(expert)]);
    if (options.progress) options.progress(expert + 1, num_experts);
  }
}

CpuPackedWeights::CpuPackedWeights(Info info, const PackedParts& parts,
                                   const std::vector<core::NumaNode>& nodes)
    : PackedWeights(std::move(info)), gated_(is_gated(this->info().activation.kind)) {
  const std::int64_t num_experts = this->info().num_experts;
  const TileFormats read = read_formats(this->info().scheme, parts);
  const Tensor tiles = core::part(parts, "tiles", DType::kU8, {lay_out(read, {})});
  for (const ColumnPart& part : column_parts()) {
    part.tensor = core::part(parts, part.name, DType::kF32, {num_experts, part.columns});
  }
  read_origins(parts);
  if (nodes.empty() && reinterpret_cast<std::uintptr_t>(tiles.data()) % kTileAlignment == 0) {
    data_ = tiles;
    return;
  }
  const std::array<PackedGemm, 2> whole = {gemm1_, gemm2_};
  data_ = Tensor::empty({lay_out(read, nodes)}, DType::kU8);
  const NodeWishes wishes(data_, gemm1_.parts, nodes);
  for (std::int64_t expert = 0; expert < num_experts; ++expert) {
    copy_tiles(whole[0], tiles, expert, gemm1_, data_, expert);
    copy_tiles(whole[1], tiles, expert, gemm2_, data_, expert);
  }
}

CpuPackedWeights::CpuPackedWeights(const Info& info, const CpuPackedWeights& like,
                                   const std::vector<core::NumaNode>& nodes)
    : CpuPackedWeights(info) {
  const std::int64_t num_experts = info.num_experts;
  origins_.resize(static_cast<std::size_t>(num_experts));
  data_ = Tensor::empty({lay_out(like.formats(), nodes)}, DType::kU8);
  for (const ColumnPart& part : column_parts()) {
    part.tensor = Tensor::empty({num_experts, part.columns}, DType::kF32);
  }
  if (nodes.empty()) return;
  const NodeWishes wishes(data_, gemm1_.parts, nodes);
  fill_bytes(data_, 0, {});  // a page lies where it is first written
}

/// Sets the GEMMs, and returns the bytes of all tiles.
std::int64_t CpuPackedWeights::lay_out(const TileFormats& formats,
                                       const std::vector<core::NumaNode>& nodes) {
  const auto gemms = make_gemms(info().scheme, info().hidden, info().intermediate, gated_, formats);
  gemm1_ = gemms[0];
  gemm2_ = gemms[1];
  return make_parts(info().num_experts, nodes);
}

/// What each column has beside its tiles.
std::vector<CpuPackedWeights::ColumnPart> CpuPackedWeights::column_parts() {
  std::vector<ColumnPart> parts;
  for (const bool first : {true, false}) {
    const PackedGemm& gemm = first ? gemm1_ : gemm2_;
    const std::int64_t columns = gemm.padded_columns();
    if (info().has_bias)
      parts.push_back({first ? "bias1" : "bias2", first ? bias1_ : bias2_, columns});
    if (has_column_scales(gemm.shape.key)) {
      parts.push_back({first ? "scales1" : "scales2", first ? scales1_ : scales2_, columns});
    }
  }
  return parts;
}

/// Gives each node its tiles of both GEMMs, and returns the size of the packed weights.
std::int64_t CpuPackedWeights::make_parts(std::int64_t num_experts,
                                          const std::vector<core::NumaNode>& nodes) {
  constexpr std::int64_t kPage = 2 << 20;  // a huge one, for which the allocator asks
  std::int64_t cpus = 0, all_cpus = 0, size = 0;
  for (const core::NumaNode& node : nodes) all_cpus += static_cast<std::int64_t>(node.cpus.size());
  const std::size_t num_parts = std::max<std::size_t>(nodes.size(), 1);
  for (std::size_t i = 0; i < num_parts; ++i) {
    if (!nodes.empty()) cpus += static_cast<std::int64_t>(nodes[i].cpus.size());
    const bool last = cpus == all_cpus;  // that has CPUs
    std::int64_t expert_bytes = 0;
    for (PackedGemm* gemm : {&gemm1_, &gemm2_}) {
      TilePart part;
      part.first_tile = i == 0 ? 0 : gemm->parts.back().first_tile + gemm->parts.back().num_tiles;
      // To the nearest tiles that a kernel reads side by side.
      const auto share = [&] {
        return (gemm->num_tiles * cpus / all_cpus + kMaxTiles / 2) / kMaxTiles * kMaxTiles;
      };
      const std::int64_t end = last ? gemm->num_tiles : std::min(gemm->num_tiles, share());
      part.num_tiles = end - part.first_tile;
      part.offset = size + expert_bytes;
      expert_bytes += part.num_tiles * gemm->tile_bytes;
      gemm->parts.push_back(part);
    }
    for (PackedGemm* gemm : {&gemm1_, &gemm2_}) gemm->parts.back().expert_bytes = expert_bytes;
    size += num_experts * expert_bytes;
    if (i + 1 < num_parts) size = round_up(size, kPage);
  }
  return size;
}

std::int64_t CpuPackedWeights::nbytes() const {
  std::int64_t total = data_.nbytes();
  for (const Tensor* tensor : {&bias1_, &bias2_, &scales1_, &scales2_}) {
    if (*tensor) total += tensor->nbytes();
  }
  return total;
}

float CpuPackedWeights::input_scale1(std::int64_t expert) const {
  const ExpertOrigin& origin = origins_[static_cast<std::size_t>(expert)];
  const float scale = std::max(origin.gate.input_scale, origin.up.input_scale);
  return scale > 0 ? scale : 1;
}

float CpuPackedWeights::input_scale2(std::int64_t expert) const {
  const float scale = origins_[static_cast<std::size_t>(expert)].down.input_scale;
  return scale > 0 ? scale : 1;
}

Columns CpuPackedWeights::columns_of(const ExpertMatrices& source, bool first,
                                     std::int64_t tile) const {
  const auto column = [](const WeightMatrix& matrix, std::int64_t row, std::int64_t rows) {
    return row < rows ? Column{&matrix, row} : Column{};
  };
  const std::int64_t outputs = outputs_per_tile();
  Columns columns;
  for (int c = 0; c < kTileColumns; ++c) {
    if (!first) {
      columns[c] = column(source.down, tile * kTileColumns + c, info().hidden);
    } else if (c < outputs) {
      columns[c] = column(source.gate, tile * outputs + c, info().intermediate);
    } else {
      columns[c] = column(source.up, tile * outputs + c - outputs, info().intermediate);
    }
  }
  return columns;
}

void CpuPackedWeights::pack_expert(Executor& executor, std::int64_t expert,
                                   const ExpertMatrices& given) {
  const ExpertMatrices source = core::stored_form(given);
  const auto origin = [](const WeightMatrix& matrix) {
    return Origin{matrix.first_row, matrix.first_col,
                  matrix.scales ? matrix.scales.dtype() : DType::kF32,
                  matrix.input_scale ? *matrix.input_scale.as<const float>() : 0};
  };
  origins_[static_cast<std::size_t>(expert)] = {origin(source.gate), origin(source.up),
                                                origin(source.down)};
  // Each node's own threads pack its tiles, so that these lie there even where the system refuses
  // prefer_numa_node(): a page lies where it is first written.
  core::NodeTasks tasks(static_cast<int>(gemm1_.parts.size()));
  for (std::size_t i = 0; i < gemm1_.parts.size(); ++i) {
    tasks.set_count(static_cast<int>(i), gemm1_.parts[i].num_tiles + gemm2_.parts[i].num_tiles);
  }
  core::run_tasks(executor, std::max(1, executor.concurrency()), [&](int) {
    while (const auto task = tasks.take(core::current_numa_node())) {
      const auto number = static_cast<std::size_t>(task->part);
      const TilePart &part1 = gemm1_.parts[number], &part2 = gemm2_.parts[number];
      const bool first = task->index < part1.num_tiles;
      pack_one_tile(expert, source, first,
                    first ? part1.first_tile + task->index
                          : part2.first_tile + task->index - part1.num_tiles);
    }
  });
}

void CpuPackedWeights::pack_one_tile(std::int64_t expert, const ExpertMatrices& source, bool first,
                                     std::int64_t tile) const {
  const PackedGemm& gemm = first ? gemm1_ : gemm2_;
  const Columns columns = columns_of(source, first, tile);
  pack_tile(gemm.shape, columns, data_.as<std::byte>() + gemm.offset(expert, tile));
  const auto fill = [&](const Tensor& tensor, auto value) {
    if (!tensor) return;
    float* target = tensor.as<float>() + expert * gemm.padded_columns() + tile * kTileColumns;
    for (int c = 0; c < kTileColumns; ++c) target[c] = value(columns[c]);
  };
  fill(first ? bias1_ : bias2_, bias_at);
  fill(first ? scales1_ : scales2_,
       [&](const Column& column) { return column_scale(gemm.shape.key, column); });
}

ExpertWeights CpuPackedWeights::unpack(std::int64_t expert) const {
  const ExpertOrigin& origin = origins_[static_cast<std::size_t>(expert)];
  const QuantScheme& scheme = info().scheme;
  ExpertWeights weights;
  weights.scheme = info().scheme;
  weights.hidden = info().hidden;
  weights.intermediate = info().intermediate;
  weights.activation = info().activation.kind;
  weights.activation_params = info().activation_params;
  const auto matrix = [&](const QuantKey& key, std::int64_t out, std::int64_t in,
                          const Origin& from) {
    const bool as_given = key.scale == DType::kF32 && !has_column_scales(key);
    WeightMatrix result = core::make_matrix(
        key, out, in,
        {from.first_row, from.first_col, as_given ? std::optional(from.scales) : std::nullopt},
        weights.owners);
    const auto tensor = [&](std::int64_t size) {
      Tensor made = Tensor::empty({size}, DType::kF32);
      weights.owners.push_back(made.owner());
      return made;
    };
    if (bias1_) result.bias = tensor(out);
    if (from.input_scale > 0) {
      result.input_scale = tensor(1);
      *result.input_scale.as<float>() = from.input_scale;
    }
    return result;
  };
  ExpertMatrices& target = weights.experts.emplace_back();
  target.gate = matrix(scheme.weights, weights.intermediate, weights.hidden, origin.gate);
  if (gated_) {
    target.up = matrix(scheme.weights, weights.intermediate, weights.hidden, origin.up);
  }
  target.down = matrix(scheme.down_weights(), weights.hidden, weights.intermediate, origin.down);

  for (const bool first : {true, false}) {
    const PackedGemm& gemm = first ? gemm1_ : gemm2_;
    const float* bias = first ? bias1(expert) : bias2(expert);
    const float* scales = first ? column_scales1(expert) : column_scales2(expert);
    for (std::int64_t tile = 0; tile < gemm.num_tiles; ++tile) {
      const Columns columns = columns_of(target, first, tile);
      unpack_tile(gemm.shape, columns, data_.as<std::byte>() + gemm.offset(expert, tile));
      for (int c = 0; c < kTileColumns; ++c) {
        const Column& column = columns[c];
        if (!column.matrix) continue;
        const std::int64_t index = tile * kTileColumns + c;
        if (bias) column.matrix->bias.as<float>()[column.row] = bias[index];
        if (scales) store_column_scale(gemm.shape.key, column, scales[index]);
      }
    }
  }
  weights.validate();
  return weights;
}

}  // namespace fusedmoe::cpu
