#include "cuda/packed_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/check.h"
#include "core/device_runtime.h"
#include "core/parallel.h"
#include "cuda/device/strided_copy.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "quant/weight_layout.h"

namespace fusedmoe::cuda {
namespace {

/// Copies a strided matrix of `size`-byte elements to contiguous rows.
void copy_rows(const TensorView& from, std::int64_t size, std::byte* to) {
  const std::int64_t rows = from.size(0), columns = from.size(1);
  const auto* source = from.as<const std::byte>();
  core::parallel_for(default_executor(), rows, true, [&](std::int64_t r) {
    const std::byte* row = source + r * from.stride(0) * size;
    std::byte* target = to + r * columns * size;
    if (from.stride(1) == 1) {
      std::memcpy(target, row, static_cast<std::size_t>(columns * size));
      return;
    }
    for (std::int64_t c = 0; c < columns; ++c) {
      std::memcpy(target + c * size, row + c * from.stride(1) * size,
                  static_cast<std::size_t>(size));
    }
  });
}

/// A matrix of the source weights in contiguous device memory at `to`. Waits for host sources only.
void copy_to_device(const TensorView& from, std::byte* to, Stream stream) {
  if (!from.device().is_cpu()) return copy_strided(from, to, stream);
  const std::int64_t total = from.numel() * bytes(from.dtype(), 1);
  const Tensor host = Tensor::empty({total}, DType::kU8);
  copy_rows(from, bytes(from.dtype(), 1), host.as<std::byte>());
  copy(host, TensorView(to, DType::kU8, {total}, stream.device), stream);
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

/// A matrix of which the host may read scales and biases.
struct HostParts {
  Tensor scales, bias;
  WeightMatrix matrix;

  HostParts(const WeightMatrix& source, Stream stream)
      : scales(on_host(source.scales, stream)), bias(on_host(source.bias, stream)), matrix(source) {
    matrix.scales = scales;
    matrix.bias = bias;
  }
};

float read_bias(const TensorView& bias, std::int64_t index) {
  return bias ? load_f32(bias.data(), bias.dtype(), index * bias.stride(0)) : 0.0f;
}

}  // namespace

PackedMatrices::PackedMatrices(const WeightFormat& format, std::int64_t num_experts,
                               std::int64_t width, std::int64_t k, bool gated, bool bias,
                               Device device)
    : format_(&format),
      width_(width),
      k_(k),
      gated_(gated),
      grid_(format.grid(width, k, gated)),
      blocks_(
          Tensor::empty({num_experts, grid_.count() * format.block.bytes}, DType::kU8, device)) {
  if (bias) {
    bias_ = Tensor::empty({num_experts, grid_.row_blocks * kBlockRows}, DType::kF32, device);
  }
  if (format.scale_group > 0) scales_ = Tensor::empty({num_experts}, DType::kF32, device);
}

void PackedMatrices::pack(std::int64_t expert, const WeightMatrix& gate, const WeightMatrix* up,
                          Stream stream) {
  PackSource source;
  source.width = width_;
  source.k = k_;
  source.gated = gated_;
  source.exponent_shift = format_->exponent_shift(gate, up);
  const Tensor values = gather(gate.values, up ? &up->values : nullptr, stream);
  source.values = values.data();
  Tensor scales;
  if (scales_) {
    scales = gather(gate.scales, up ? &up->scales : nullptr, stream);
    source.scales = scales.as<const std::uint8_t>();
    const Tensor factor = Tensor::empty({1}, DType::kF32);
    *factor.as<float>() = std::ldexp(1.0f, source.exponent_shift);
    copy(factor, scales_.slice(0, expert, expert + 1), stream);
  }
  format_->pack(source, grid_, blocks_.select(0, expert).data(), stream);
  if (bias_) {
    const std::int64_t rows = bias_.size(1);
    const Tensor packed = Tensor::zeros({rows}, DType::kF32);
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t index = gated_ ? gated_feature(row) : row;
      if (index >= width_) continue;
      const bool is_up = gated_ && gated_is_up(row);
      packed.as<float>()[row] = read_bias(is_up ? up->bias : gate.bias, index);
    }
    copy(packed, bias_.select(0, expert), stream);
  }
  synchronize(stream);  // what was gathered ends here
}

void PackedMatrices::unpack(std::int64_t expert, WeightMatrix& gate, WeightMatrix* up,
                            std::vector<std::shared_ptr<const void>>& owners) const {
  const auto download = [&](const Tensor& all) {
    return to_device(Tensor(all.slice(0, expert, expert + 1), all.owner()), {});
  };
  const auto make = [&](Shape shape, DType dtype) {
    const Tensor tensor = Tensor::empty(shape, dtype);
    owners.push_back(tensor.owner());
    return tensor;
  };
  for (WeightMatrix* matrix : {&gate, up}) {
    if (!matrix) continue;
    matrix->values = make({width_, ceil_div(k_, format_->codes_per_value)}, format_->values);
    if (scales_) matrix->scales = make({width_, ceil_div(k_, format_->scale_group)}, DType::kU8);
    if (bias_) matrix->bias = make({width_}, DType::kF32);
  }
  const Tensor blocks = download(blocks_), bias = bias_ ? download(bias_) : Tensor();
  PackedView source{blocks.as<const std::byte>(), grid_.k_blocks, k_};
  if (scales_) source.exponent_shift = std::ilogb(*download(scales_).as<const float>());
  core::parallel_for(
      default_executor(), grid_.row_blocks * kBlockRows, true, [&](std::int64_t row) {
        const std::int64_t index = gated_ ? gated_feature(row) : row;
        if (index >= width_) return;
        const WeightMatrix& matrix = gated_ && gated_is_up(row) ? *up : gate;
        format_->unpack_row(source, row, matrix.values.select(0, index).data(),
                            scales_ ? matrix.scales.select(0, index).as<std::uint8_t>() : nullptr);
        if (bias) matrix.bias.as<float>()[index] = bias.as<const float>()[row];
      });
}

void PackedMatrices::set(GemmParams& gemm) const {
  gemm.weights = blocks_.data();
  gemm.expert_bytes = blocks_.stride(0);
  gemm.row_blocks = static_cast<int>(grid_.row_blocks);
  gemm.k_blocks = static_cast<int>(grid_.k_blocks);
  gemm.bias = bias_ ? bias_.as<const float>() : nullptr;
  gemm.scales = scales_ ? scales_.as<const float>() : nullptr;
}

std::int64_t PackedMatrices::nbytes() const {
  return blocks_.nbytes() + (bias_ ? bias_.nbytes() : 0) + (scales_ ? scales_.nbytes() : 0);
}

CudaPackedWeights::CudaPackedWeights(Info info, const WeightFormat& format,
                                     const ExpertWeights& weights, const PackOptions& options)
    : PackedWeights(std::move(info)),
      format_(&format),
      activation_params_(weights.activation_params) {
  const Info& made = this->info();
  w13_ = PackedMatrices(format, made.num_experts, made.intermediate, made.hidden,
                        is_gated(made.activation.kind), made.has_bias, made.device);
  w2_ = PackedMatrices(format, made.num_experts, made.hidden, made.intermediate, false,
                       made.has_bias, made.device);
  const Stream stream = options.stream.value_or(Stream{made.device});
  for (std::int64_t e = 0; e < made.num_experts; ++e) {
    replace(e, weights.experts[static_cast<std::size_t>(e)], stream);
    if (options.progress) options.progress(e + 1, made.num_experts);
  }
}

void CudaPackedWeights::replace(std::int64_t expert, const ExpertMatrices& given, Stream stream) {
  const ExpertMatrices matrices = core::stored_form(given);
  const core::CurrentDevice current(info().device);
  const bool gated = is_gated(info().activation.kind);
  const HostParts gate(matrices.gate, stream), up(matrices.up, stream), down(matrices.down, stream);
  const WeightMatrix* second = gated ? &up.matrix : nullptr;
  // What cannot be packed is refused before anything is written.
  format_->exponent_shift(gate.matrix, second);
  format_->exponent_shift(down.matrix, nullptr);
  w13_.pack(expert, gate.matrix, second, stream);
  w2_.pack(expert, down.matrix, nullptr, stream);
}

ExpertWeights CudaPackedWeights::unpack(std::int64_t expert) const {
  ExpertWeights weights;
  weights.scheme = info().scheme;
  weights.hidden = info().hidden;
  weights.intermediate = info().intermediate;
  weights.activation = info().activation.kind;
  weights.activation_params = activation_params_;
  ExpertMatrices& target = weights.experts.emplace_back();
  w13_.unpack(expert, target.gate, is_gated(weights.activation) ? &target.up : nullptr,
              weights.owners);
  w2_.unpack(expert, target.down, nullptr, weights.owners);
  weights.validate();
  return weights;
}

}  // namespace fusedmoe::cuda
