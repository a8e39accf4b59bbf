#include "cpu/pack.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>

#include "core/check.h"
#include "fusedmoe/device.h"
#include "fusedmoe/formats.h"

namespace fusedmoe::cpu {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::int64_t tile_bytes(Format format, std::int64_t k) {
  switch (format) {
    case Format::kF32:
      return k * kStepBytes;
    case Format::kBF16:
      return k / 2 * kStepBytes;
    case Format::kMxfp4:
      return kMxfp4HeaderBytes + k / kGroup * kMxfp4GroupBytes;
  }
  return 0;
}

/// One tile column: a row of a weight matrix, or nothing (padding).
struct Column {
  const WeightMatrix* matrix = nullptr;
  std::int64_t row = 0;
};
using Columns = std::array<Column, kTileColumns>;

/// Elements of type T in steps of kPair per column: k fastest inside a step.
template <typename T, int kPair>
void pack_plain(const Columns& columns, std::int64_t k, std::byte* tile) {
  auto* target = reinterpret_cast<T*>(tile);
  for (int c = 0; c < kTileColumns; ++c) {
    if (!columns[c].matrix) continue;
    const TensorView& values = columns[c].matrix->values;
    const T* row = values.as<const T>() + columns[c].row * values.stride(0);
    const std::int64_t stride = values.stride(1);
    for (std::int64_t i = 0; i < k; ++i) {
      target[(i / kPair * kTileColumns + c) * kPair + i % kPair] = row[i * stride];
    }
  }
}

/// The even nibbles of 8 codes to the low, the odd ones to the high 16 bits.
std::uint32_t split_parity(std::uint32_t codes) {
  const auto compress = [](std::uint32_t x) {
    x = (x | (x >> 4)) & 0x00FF00FFu;
    return (x | (x >> 8)) & 0xFFFFu;
  };
  return compress(codes & 0x0F0F0F0Fu) | compress((codes >> 4) & 0x0F0F0F0Fu) << 16;
}

// Scales inside bf16 exponents (Mxfp4ToBf16) and sums in units of a scale (stream_tiles) need room
// in the exponent range: 2^-62 to 2^62, and no more than 2^48 between the blocks of one row, so
// that such a sum stays finite and normal wherever the plain one is below 2^79 and above 2^-78.
// Real weights are far inside.
constexpr int kMinScaleCode = 127 - 62;
constexpr int kMaxScaleCode = 127 + 62;
constexpr int kMaxScaleSpread = 48;

/// The scale codes of one tile column: those of blocks of zeros do not matter and follow their
/// neighbours.
class ColumnScales {
 public:
  /// Takes the stored code of a block with a non-zero value.
  int use(int stored, std::int64_t row, std::int64_t block) {
    FUSEDMOE_CHECK(stored >= kMinScaleCode && stored <= kMaxScaleCode, "scales",
                   fmt::format("E8M0 code {} (row {}, block {})", stored, row, block),
                   fmt::format("in [{}, {}] for a block with non-zero values; experts "
                               "'reference' take any",
                               kMinScaleCode, kMaxScaleCode));
    if (first_ < 0) first_ = low_ = high_ = stored;
    low_ = std::min(low_, stored);
    high_ = std::max(high_, stored);
    FUSEDMOE_CHECK(
        high_ - low_ <= kMaxScaleSpread, "scales",
        fmt::format("E8M0 codes {} to {} in row {}", low_, high_, row),
        fmt::format("within {} of each other; experts 'reference' take any", kMaxScaleSpread));
    return stored;
  }
  int first() const { return first_ < 0 ? 127 : first_; }

 private:
  int first_ = -1, low_ = 0, high_ = 0;
};

/// Column c of a tile of `groups` groups, of which the matrix has the first `used`.
void pack_mxfp4_column(const Column& column, std::int64_t used, std::int64_t groups, int c,
                       std::byte* tile) {
  ColumnScales codes;
  int previous = -1;
  std::byte* group = tile + kMxfp4HeaderBytes;
  for (std::int64_t g = 0; g < groups; ++g, group += kMxfp4GroupBytes) {
    std::array<std::uint32_t, 4> words{};
    int relative = 0;
    if (g < used) {
      const TensorView &values = column.matrix->values, &scales = column.matrix->scales;
      std::memcpy(words.data(),
                  values.as<const std::byte>() + column.row * values.stride(0) + g * 16, 16);
      const bool zero = ((words[0] | words[1] | words[2] | words[3]) & 0x77777777u) == 0;
      if (!zero) {
        const int code = codes.use(
            scales.as<const std::uint8_t>()[column.row * scales.stride(0) + g * scales.stride(1)],
            column.row, g);
        relative = previous < 0 ? 0 : previous - code;
        previous = code;
      }
    }
    group[c] = static_cast<std::byte>(127 + relative);
    for (int q = 0; q < 4; ++q) {
      const std::uint32_t split = split_parity(words[q]);
      std::memcpy(group + kTileColumns + (q * kTileColumns + c) * 4, &split, 4);
    }
  }
  tile[c] = static_cast<std::byte>(codes.first());
  tile[kTileColumns + c] = static_cast<std::byte>(previous < 0 ? codes.first() : previous);
}

void pack_mxfp4(const Columns& columns, std::int64_t k, std::int64_t padded_k, std::byte* tile) {
  for (int c = 0; c < kTileColumns; ++c) {
    const std::int64_t used = columns[c].matrix ? k / kGroup : 0;
    pack_mxfp4_column(columns[c], used, padded_k / kGroup, c, tile);
  }
}

void pack_tile(Format format, const Columns& columns, std::int64_t k, std::int64_t padded_k,
               std::byte* tile) {
  if (k != padded_k || !columns.back().matrix || !columns.front().matrix) {
    std::memset(tile, 0, static_cast<std::size_t>(tile_bytes(format, padded_k)));
  }
  switch (format) {
    case Format::kF32:
      return pack_plain<std::uint32_t, 1>(columns, k, tile);
    case Format::kBF16:
      return pack_plain<std::uint16_t, 2>(columns, k, tile);
    case Format::kMxfp4:
      return pack_mxfp4(columns, k, padded_k, tile);
  }
}

float bias_at(const Column& column) {
  if (!column.matrix || !column.matrix->bias) return 0;
  const TensorView& bias = column.matrix->bias;
  return load_f32(bias.data(), bias.dtype(), column.row * bias.stride(0));
}

}  // namespace

bool has_format(const QuantScheme& scheme) {
  return scheme == schemes::unquantized(DType::kF32) ||
         scheme == schemes::unquantized(DType::kBF16) || scheme == schemes::mxfp4_w4a16();
}

Format format_of(const QuantScheme& scheme) {
  FUSEDMOE_CHECK(has_format(scheme), "scheme", name(scheme), "f32, bf16 or mxfp4_w4a16");
  if (scheme == schemes::mxfp4_w4a16()) return Format::kMxfp4;
  return scheme.weights.value == DType::kF32 ? Format::kF32 : Format::kBF16;
}

Compute compute_of(Format format, DType dtype) {
  const bool bf16 = dtype == DType::kBF16 &&
                    kernels().multiply[static_cast<int>(format)][static_cast<int>(Compute::kBF16)];
  return bf16 ? Compute::kBF16 : Compute::kF32;
}

CpuPackedWeights::CpuPackedWeights(Info info, const ExpertWeights& weights,
                                   const PackProgress& progress)
    : PackedWeights(std::move(info)),
      format_(format_of(weights.scheme)),
      gated_(is_gated(weights.activation)) {
  const std::int64_t outputs_per_tile = gated_ ? kTileColumns / 2 : kTileColumns;
  gemm1_.k = round_up(weights.hidden, kGroup);
  gemm1_.num_tiles = round_up(weights.intermediate, outputs_per_tile) / outputs_per_tile;
  gemm1_.tile_bytes = tile_bytes(format_, gemm1_.k);
  gemm2_.k = gemm1_.num_tiles * outputs_per_tile;
  gemm2_.num_tiles = round_up(weights.hidden, kTileColumns) / kTileColumns;
  gemm2_.tile_bytes = tile_bytes(format_, gemm2_.k);
  expert_bytes_ = gemm1_.expert_bytes() + gemm2_.expert_bytes();

  const std::int64_t num_experts = weights.num_experts();
  data_ = Tensor::empty({num_experts * expert_bytes_}, DType::kU8);
  if (weights.has_bias()) {
    bias1_ = Tensor::empty({num_experts, gemm1_.padded_columns()}, DType::kF32);
    bias2_ = Tensor::empty({num_experts, gemm2_.padded_columns()}, DType::kF32);
  }
  for (std::int64_t expert = 0; expert < num_experts; ++expert) {
    pack_expert(expert, weights.experts[static_cast<std::size_t>(expert)]);
    if (progress) progress(expert + 1, num_experts);
  }
}

std::int64_t CpuPackedWeights::nbytes() const {
  return data_.nbytes() + (bias1_ ? bias1_.nbytes() + bias2_.nbytes() : 0);
}

void CpuPackedWeights::pack_expert(std::int64_t expert, const ExpertMatrices& source) {
  std::byte* base = data_.as<std::byte>() + expert * expert_bytes_;
  const std::int64_t hidden = info().hidden, intermediate = info().intermediate;
  const std::int64_t outputs_per_tile = gated_ ? kTileColumns / 2 : kTileColumns;
  const auto column = [](const WeightMatrix& matrix, std::int64_t row, std::int64_t rows) {
    return row < rows ? Column{&matrix, row} : Column{};
  };
  std::exception_ptr failure;
#pragma omp parallel for schedule(dynamic, 4) num_threads(num_threads())
  for (std::int64_t index = 0; index < gemm1_.num_tiles + gemm2_.num_tiles; ++index) {
    const bool first = index < gemm1_.num_tiles;
    const PackedGemm& gemm = first ? gemm1_ : gemm2_;
    const std::int64_t tile = first ? index : index - gemm1_.num_tiles;
    Columns columns;
    for (int c = 0; c < kTileColumns; ++c) {
      if (!first) {
        columns[c] = column(source.down, tile * kTileColumns + c, hidden);
      } else if (c < outputs_per_tile) {
        columns[c] = column(source.gate, tile * outputs_per_tile + c, intermediate);
      } else {
        columns[c] =
            column(source.up, tile * outputs_per_tile + c - outputs_per_tile, intermediate);
      }
    }
    try {
      pack_tile(format_, columns, first ? hidden : intermediate, gemm.k,
                base + (first ? 0 : gemm1_.expert_bytes()) + tile * gemm.tile_bytes);
    } catch (...) {
#pragma omp critical(fusedmoe_pack_failure)
      failure = std::current_exception();
    }
    if (bias1_) {
      float* bias = (first ? bias1_ : bias2_).as<float>() + expert * gemm.padded_columns();
      for (int c = 0; c < kTileColumns; ++c) bias[tile * kTileColumns + c] = bias_at(columns[c]);
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace fusedmoe::cpu
