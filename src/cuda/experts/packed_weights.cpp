#include "cuda/experts/packed_weights.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "core/copy_rows.h"
#include "core/device_runtime.h"
#include "core/parallel.h"
#include "cuda/device/strided_copy.h"
#include "cuda/experts/uploads.h"
#include "cuda/experts/weight_scales.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "moe/experts_args.h"
#include "quant/weight_layout.h"

namespace fusedmoe::cuda {
namespace {

/// A matrix of the source weights in contiguous device memory at `to`. Waits for host sources only.
void copy_to_device(const TensorView& from, std::byte* to, Stream stream) {
  if (!from.device().is_cpu()) return copy_strided(from, to, stream);
  const Tensor host = Tensor::empty(from.shape(), from.dtype());
  core::parallel_ranges(default_executor(), from.size(0), true,
                        [&](std::int64_t begin, std::int64_t end) {
                          core::copy_matrix(from.slice(0, begin, end), host.slice(0, begin, end));
                        });
  copy(host, TensorView(to, from.dtype(), from.shape(), stream.device), stream);
  synchronize(stream);
}

/// The same matrix of gate and, where there is one, of up, one behind the other, on the device.
Tensor gather(const TensorView& gate, const TensorView* up, Stream stream) {
  const std::int64_t total = gate.numel() * bytes(gate.dtype(), 1);
  Tensor both = Tensor::empty({total * (up ? 2 : 1)}, DType::kU8, stream.device);
  copy_to_device(gate, both.as<std::byte>(), stream);
  if (up) copy_to_device(*up, both.as<std::byte>() + total, stream);
  return both;
}

/// Scales and biases, which the host reads, where they lie on the device: a contiguous copy.
Tensor on_host(const TensorView& view, Stream stream) {
  if (!view || view.device().is_cpu()) return Tensor(view, nullptr);
  const bool vector = view.rank() == 1;
  const Tensor contiguous = Tensor::empty(view.shape(), view.dtype(), view.device());
  const TensorView matrix = vector ? TensorView(view.data(), view.dtype(), {view.size(0), 1},
                                                {view.stride(0), 1}, view.device())
                                   : view;
  copy_strided(matrix, contiguous.data(), stream);
  const Tensor host = Tensor::empty(view.shape(), view.dtype());
  copy(contiguous, host, stream);
  synchronize(stream);
  return host;
}

/// A matrix of which the host may read all but values.
struct HostParts {
  std::vector<Tensor> owners;
  WeightMatrix matrix;

  HostParts(const WeightMatrix& source, Stream stream) : matrix(source) {
    for (TensorView WeightMatrix::*part :
         {&WeightMatrix::scales, &WeightMatrix::zero_points, &WeightMatrix::global_scale,
          &WeightMatrix::input_scale, &WeightMatrix::bias}) {
      owners.push_back(on_host(source.*part, stream));
      matrix.*part = owners.back();
    }
  }
};

/// A copy of its own.
Tensor clone(const TensorView& view) {
  if (!view) return {};
  const Tensor copy = Tensor::empty(view.shape(), view.dtype());
  if (view.rank() == 2) {
    core::copy_matrix(view, copy);
  } else {
    for (std::int64_t i = 0; i < view.numel(); ++i) {
      store_f32(copy.data(), DType::kF32, i, view.as<const float>()[i * view.stride(0)]);
    }
  }
  return copy;
}

/// Whether scales are in the packed blocks: those of groups along a row, and of integer codes.
bool has_block_scales(const WeightFormat& format, const QuantKey& key) {
  return format.group_k > 0 && key.quantized() &&
         (key.group.cols > 0 || key.value == DType::kI4 || key.value == DType::kU8);
}

/// Whether the blocks give them back. Those of several rows are kept as they are, besides.
bool gives_back_scales(const WeightFormat& format, const QuantKey& key) {
  return has_block_scales(format, key) && key.group.rows == 1;
}

float read_bias(const TensorView& bias, std::int64_t index) {
  return bias ? load_f32(bias.data(), bias.dtype(), index * bias.stride(0)) : 0.0f;
}

}  // namespace

PackedMatrices::PackedMatrices(const FormatKernels& kernels, const QuantScheme& scheme,
                               const MatrixSizes& sizes, Device device)
    : kernels_(&kernels),
      format_(&kernels.format),
      scheme_(scheme),
      width_(sizes.width),
      k_(sizes.k),
      gated_(sizes.gated),
      activation_scale_(sizes.activation_scale),
      device_(device),
      shapes_(kernels.format, scheme, sizes),
      exponent_shifts_(static_cast<std::size_t>(sizes.num_experts)),
      origins_(static_cast<std::size_t>(sizes.num_experts)) {}

void PackedMatrices::make_arrays() {
  for (const Array& each : kArrays) {
    const Shape& shape = shapes_.*each.shape;
    if (shape.rank() > 0) this->*each.tensor = Tensor::empty(shape, each.dtype, device_);
  }
}

int PackedMatrices::check(const WeightMatrix& gate, const WeightMatrix* up) const {
  if (scheme_.weights.quantized() && scheme_.weights.group.cols > 0) {
    const int columns = format_->group_k > 0 ? format_->group_k : format_->block.k;
    const int rows =
        has_k_scales(*format_, scheme_.weights) && scheme_.weights.group.rows != 1 ? 8 : 1;
    for (const WeightMatrix* matrix : {&gate, up}) {
      if (!matrix) continue;
      const auto check_first = [](const char* what, std::int64_t first, int unit) {
        if (first % unit == 0) return;
        throw Error::unsupported(
            Reason::kQuantScheme, what, core::to_string(first),
            core::format("a multiple of {}, which share a scale once packed", unit));
      };
      check_first("weights.first_col", matrix->first_col, columns);
      check_first("weights.first_row", matrix->first_row, rows);
    }
  }
  if (up && has_block_scales(*format_, scheme_.weights)) {
    // They are packed as one matrix.
    FUSEDMOE_CHECK(
        gate.scales.dtype() == up->scales.dtype(), "weights.scales",
        core::format("{} of gate, {} of up", name(gate.scales.dtype()), name(up->scales.dtype())),
        "of one dtype");
    FUSEDMOE_CHECK(gate.first_col == up->first_col, "weights.first_col",
                   core::format("{} of gate, {} of up", gate.first_col, up->first_col), "the same");
  }
  if (scales_a_tile() == 2 && !has_two_scales_a_tile(gate, up)) {
    throw Error::invalid("weights.first_row",
                         "weights.first_row lets blocks of scales begin elsewhere in a tile than "
                         "those of the experts that were packed");
  }
  if (kernels_->check_scales) kernels_->check_scales(gate, up);
  return kernels_->exponent_shift ? kernels_->exponent_shift(gate, up) : 0;
}

PackedMatrices::Origin PackedMatrices::origin_of(const WeightMatrix& matrix) const {
  Origin origin;
  if (!gives_back_scales(*format_, scheme_.weights)) origin.scales = clone(matrix.scales);
  origin.global_scale = clone(matrix.global_scale);
  origin.input_scale = clone(matrix.input_scale);
  if (format_->relative_scales)
    origin.largest_scales = largest_scales(scheme_.weights, matrix, width_);
  origin.first_row = matrix.first_row;
  origin.first_col = matrix.first_col;
  return origin;
}

/// Where a packed row of w13 comes from.
const WeightMatrix& PackedMatrices::source_of(std::int64_t row, const WeightMatrix& gate,
                                              const WeightMatrix* up) const {
  return gated_ && gated_is_up(row) ? *up : gate;
}

/// A tile has two row blocks: 64 rows of gate and 64 of up, or 128 rows of one matrix. Whether one
/// scale is enough for each of the two, because blocks of scales begin where a tile begins.
bool PackedMatrices::has_two_scales_a_tile(const WeightMatrix& gate, const WeightMatrix* up) const {
  const int rows = gated_ ? kBlockRows : 2 * kBlockRows;
  const auto begins_with_a_tile = [&](const WeightMatrix* matrix) {
    return !matrix || matrix->first_row % rows == 0;
  };
  return scheme_.weights.group.rows % (2 * kBlockRows) == 0 && begins_with_a_tile(&gate) &&
         begins_with_a_tile(up);
}

Tensor PackedMatrices::make_block_scales(const WeightMatrix& gate, const WeightMatrix* up) const {
  const GroupShape group = scheme_.weights.group;
  const Tensor host =
      Tensor::zeros({shapes_.grid.row_blocks, shapes_.grid.k_blocks, 8}, DType::kF32);
  for (std::int64_t i = 0; i < host.numel(); ++i) {
    const std::int64_t slice = i / (8 * shapes_.grid.k_blocks) * 8 + i % 8,
                       k_block = i / 8 % shapes_.grid.k_blocks;
    const std::int64_t feature = gated_ ? gated_feature(slice * 8) : slice * 8;
    if (feature >= width_) continue;
    const WeightMatrix& matrix = source_of(slice * 8, gate, up);
    const std::int64_t c = core::block_of(k_block * format_->block.k, group.cols, matrix.first_col);
    host.as<float>()[i] = scale_at(scheme_.weights, matrix, feature, c);
  }
  return host;
}

/// What the results of a row of the matrix are multiplied by, `common` times.
float PackedMatrices::row_scale(const WeightMatrix& matrix, const Origin& origin, std::int64_t row,
                                float common) const {
  const QuantKey& key = scheme_.weights;
  float scale = common;
  if (origin.largest_scales) scale *= origin.largest_scales.as<const float>()[row];
  if (matrix.global_scale) {
    scale *=
        matrix.global_scale
            .as<const float>()[key.global_group.rows < 0 ? 0 : row * matrix.global_scale.stride(0)];
  }
  if (!has_block_scales(*format_, key) && !has_k_scales(*format_, scheme_.weights)) {
    scale *= scale_at(key, matrix, row, 0);
  }
  return scale;
}

void PackedMatrices::pack(std::int64_t expert, const WeightMatrix& gate, const WeightMatrix* up,
                          int exponent_shift, Stream stream) {
  const auto index = static_cast<std::size_t>(expert);
  PackSource source;
  source.width = width_;
  source.k = k_;
  source.gated = gated_;
  source.group_k = scheme_.weights.group.cols;
  source.first_col = gate.first_col;
  source.exponent_shift = exponent_shifts_[index] = exponent_shift;
  const Tensor values = gather(gate.values, up ? &up->values : nullptr, stream);
  source.values = values.data();
  source.row_bytes = bytes(gate.values.dtype(), gate.values.size(1));
  origins_[index] = {origin_of(gate), up ? origin_of(*up) : Origin()};
  const std::array<Origin, 2>& origins = origins_[index];
  Tensor scales, zero_points, largest;
  if (has_block_scales(*format_, scheme_.weights)) {
    if (scheme_.weights.group.rows == 1) {
      scales = gather(gate.scales, up ? &up->scales : nullptr, stream);
      source.scale_dtype = gate.scales.dtype();
    } else {
      const Tensor first = scales_of_rows(scheme_.weights, gate, width_);
      const Tensor second = up ? scales_of_rows(scheme_.weights, *up, width_) : Tensor();
      scales = gather(first, up ? &second : nullptr, stream);
    }
    source.scales = scales.data();
    if (format_->relative_scales) {
      largest =
          gather(origins[0].largest_scales, up ? &origins[1].largest_scales : nullptr, stream);
      source.largest_scales = static_cast<const float*>(largest.data());
    }
    source.scale_cols = gate.scales.size(1);
    source.zero_point =
        static_cast<int>(core::weight_layout(scheme_.weights, "scheme.weights").zero);
    if (gate.zero_points) {
      zero_points = gather(gate.zero_points, up ? &up->zero_points : nullptr, stream);
      source.zero_points = zero_points.as<const std::uint8_t>();
    }
  }
  kernels_->pack(source, shapes_.grid, blocks_.select(0, expert).data(), stream);

  Uploads uploads(stream);
  float input_scale = 1;
  if (input_scales_) {
    const auto read = [](const WeightMatrix* m) { return *m->input_scale.as<const float>(); };
    input_scale = up ? std::max(read(&gate), read(up)) : read(&gate);
    const Tensor host = Tensor::empty({1}, DType::kF32);
    *host.as<float>() = input_scale;
    uploads.add(host, input_scales_.slice(0, expert, expert + 1));
  }
  const float common =
      std::ldexp(input_scale * activation_scale_, source.exponent_shift + format_->fixed_exponent);
  const auto upload = [&](const Tensor& all, const auto& of_row) {
    const std::int64_t rows = all.size(1);
    const Tensor packed = Tensor::zeros({rows}, DType::kF32);
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t feature = gated_ ? gated_feature(row) : row;
      if (feature >= width_) continue;
      packed.as<float>()[row] = of_row(source_of(row, gate, up), feature);
    }
    uploads.add(packed, all.select(0, expert));
  };
  if (scales_) {
    upload(scales_, [&](const WeightMatrix& matrix, std::int64_t row) {
      return row_scale(matrix, origins[&matrix == up ? 1 : 0], row, common);
    });
    if (kernels_->mark_nan_rows) {
      kernels_->mark_nan_rows(source, shapes_.grid, scales_.select(0, expert).as<float>(), stream);
    }
  }
  if (bias_) {
    upload(bias_, [](const WeightMatrix& matrix, std::int64_t row) {
      return read_bias(matrix.bias, row);
    });
  }
  if (block_scales_) uploads.add(make_block_scales(gate, up), block_scales_.select(0, expert));
  uploads.wait();  // what was gathered is not read any more, either
}

void PackedMatrices::unpack(std::int64_t expert, WeightMatrix& gate, WeightMatrix* up,
                            std::vector<std::shared_ptr<const void>>& owners) const {
  const auto index = static_cast<std::size_t>(expert);
  const auto download = [&](const Tensor& all) {
    return to_device(Tensor(all.slice(0, expert, expert + 1), all.owner()), {});
  };
  const auto keep = [&](const Tensor& tensor) {
    if (tensor) owners.push_back(tensor.owner());
    return tensor;
  };
  const bool block_scales = gives_back_scales(*format_, scheme_.weights);
  for (const int half : {0, 1}) {
    WeightMatrix* matrix = half == 0 ? &gate : up;
    if (!matrix) continue;
    const Origin& origin = origins_[index][static_cast<std::size_t>(half)];
    const auto scales = block_scales ? std::optional(format_->block_scales) : std::nullopt;
    *matrix = core::make_matrix(scheme_.weights, width_, k_,
                                {origin.first_row, origin.first_col, scales}, owners);
    if (!block_scales) matrix->scales = keep(clone(origin.scales));
    matrix->global_scale = keep(clone(origin.global_scale));
    matrix->input_scale = keep(clone(origin.input_scale));
    if (bias_) matrix->bias = keep(Tensor::empty({width_}, DType::kF32));
  }
  const Tensor blocks = download(blocks_), bias = bias_ ? download(bias_) : Tensor();
  PackedView source{blocks.as<const std::byte>(), shapes_.grid.k_blocks,      k_,
                    exponent_shifts_[index],      scheme_.weights.group.cols, gate.first_col};
  core::parallel_for(
      default_executor(), shapes_.grid.row_blocks * kBlockRows, true, [&](std::int64_t row) {
        const std::int64_t feature = gated_ ? gated_feature(row) : row;
        if (feature >= width_) return;
        const WeightMatrix& matrix = gated_ && gated_is_up(row) ? *up : gate;
        UnpackedRow target;
        target.values = matrix.values.select(0, feature).data();
        if (block_scales) target.scales = matrix.scales.select(0, feature).data();
        if (matrix.zero_points) {
          target.zero_points = matrix.zero_points.select(0, feature).as<std::uint8_t>();
        }
        const Origin& origin = origins_[index][&matrix == up ? 1 : 0];
        if (origin.largest_scales) {
          target.largest_scale = origin.largest_scales.as<const float>()[feature];
        }
        kernels_->unpack_row(source, row, target);
        if (bias) matrix.bias.as<float>()[feature] = bias.as<const float>()[row];
      });
}

void PackedMatrices::set(GemmParams& gemm) const {
  gemm.weights = blocks_.data();
  gemm.expert_bytes = blocks_.stride(0);
  gemm.row_blocks = static_cast<int>(shapes_.grid.row_blocks);
  gemm.k_blocks = static_cast<int>(shapes_.grid.k_blocks);
  gemm.bias = bias_ ? bias_.as<const float>() : nullptr;
  gemm.scales = scales_ ? scales_.as<const float>() : nullptr;
  gemm.block_scales = block_scales_ ? block_scales_.as<const float>() : nullptr;
  gemm.two_scales_a_tile = two_scales_a_tile_;
}

std::int64_t PackedMatrices::nbytes() const {
  return shapes_.nbytes();
}

CudaPackedWeights::CudaPackedWeights(Info info, const FormatKernels& kernels)
    : PackedWeights(std::move(info)), kernels_(&kernels) {
  const Info& made = this->info();
  w13_ = PackedMatrices(kernels, made.scheme,
                        {made.num_experts, made.intermediate, made.hidden,
                         is_gated(made.activation.kind), made.has_bias, made.a1_scale.value_or(1)},
                        made.device);
  w2_ = PackedMatrices(kernels, made.scheme,
                       {made.num_experts, made.hidden, made.intermediate, false, made.has_bias,
                        made.a2_scale.value_or(1)},
                       made.device);
}

CudaPackedWeights::CudaPackedWeights(Info info, const FormatKernels& kernels,
                                     const ExpertWeights& weights, const PackOptions& options)
    : CudaPackedWeights(std::move(info), kernels) {
  const Stream stream = options.stream.value_or(Stream{this->info().device});
  const std::int64_t num_experts = this->info().num_experts;
  const bool gated = is_gated(this->info().activation.kind);
  w13_.make_arrays();
  w2_.make_arrays();
  for (const ExpertMatrices& expert : weights.experts) {
    w13_.lay_out_for(expert.gate, gated ? &expert.up : nullptr);
    w2_.lay_out_for(expert.down, nullptr);
  }
  for (std::int64_t e = 0; e < num_experts; ++e) {
    replace(e, weights.experts[static_cast<std::size_t>(e)], stream);
    if (options.progress) options.progress(e + 1, num_experts);
  }
}

void CudaPackedWeights::replace(std::int64_t expert, const ExpertMatrices& given, Stream stream) {
  const ExpertMatrices matrices = core::stored_form(given);
  const core::CurrentDevice current(info().device);
  const bool gated = is_gated(info().activation.kind);
  const HostParts gate(matrices.gate, stream), up(matrices.up, stream), down(matrices.down, stream);
  const WeightMatrix* second = gated ? &up.matrix : nullptr;
  // What cannot be packed is refused before anything is written. Validation has not seen values
  // that lie on the device.
  if (!matrices.gate.values.device().is_cpu()) {
    core::check_scale_values(gate.matrix, info().scheme, "weights.gate");
    if (second) core::check_scale_values(*second, info().scheme, "weights.up");
    core::check_scale_values(down.matrix, info().scheme, "weights.down");
  }
  const int of_w13 = w13_.check(gate.matrix, second), of_w2 = w2_.check(down.matrix, nullptr);
  w13_.pack(expert, gate.matrix, second, of_w13, stream);
  w2_.pack(expert, down.matrix, nullptr, of_w2, stream);
}

ExpertWeights CudaPackedWeights::unpack(std::int64_t expert) const {
  ExpertWeights weights;
  weights.scheme = info().scheme;
  weights.hidden = info().hidden;
  weights.intermediate = info().intermediate;
  weights.activation = info().activation.kind;
  weights.activation_params = info().activation_params;
  ExpertMatrices& target = weights.experts.emplace_back();
  w13_.unpack(expert, target.gate, is_gated(weights.activation) ? &target.up : nullptr,
              weights.owners);
  w2_.unpack(expert, target.down, nullptr, weights.owners);
  weights.validate();
  return weights;
}

}  // namespace fusedmoe::cuda
