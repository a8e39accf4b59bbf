// Expert weights in the tile layout of cpu/kernels.h.
#pragma once

#include <cstdint>
#include <memory>

#include "cpu/kernels.h"
#include "fusedmoe/experts.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cpu {

/// Whether the CPU experts have tiles for a scheme.
bool has_format(const QuantScheme& scheme);
/// Format of a scheme's tiles; throws Error for a scheme the CPU experts do not have.
Format format_of(const QuantScheme& scheme);
/// Element type that rows enter the GEMMs with, on this machine.
Compute compute_of(Format format, DType dtype);
inline std::int64_t element_bytes(Compute compute) {
  return compute == Compute::kBF16 ? 2 : 4;
}

/// One of the two grouped GEMMs: columns x k weights per expert, as tiles.
struct PackedGemm {
  std::int64_t k = 0;  // padded inner size
  std::int64_t num_tiles = 0;
  std::int64_t tile_bytes = 0;
  std::int64_t expert_bytes() const { return num_tiles * tile_bytes; }
  std::int64_t padded_columns() const { return num_tiles * kTileColumns; }
};

class CpuPackedWeights final : public PackedWeights {
 public:
  CpuPackedWeights(Info info, const ExpertWeights& weights, const PackProgress& progress);

  std::int64_t nbytes() const override;
  Format format() const { return format_; }
  const PackedGemm& gemm1() const { return gemm1_; }
  const PackedGemm& gemm2() const { return gemm2_; }
  const std::byte* tiles1(std::int64_t expert) const {
    return data_.as<std::byte>() + expert * expert_bytes_;
  }
  const std::byte* tiles2(std::int64_t expert) const {
    return tiles1(expert) + gemm1_.expert_bytes();
  }
  /// (padded columns) in tile order, or null.
  const float* bias1(std::int64_t expert) const { return bias(bias1_, expert, gemm1_); }
  const float* bias2(std::int64_t expert) const { return bias(bias2_, expert, gemm2_); }

 private:
  void pack_expert(std::int64_t expert, const ExpertMatrices& source);
  static const float* bias(const Tensor& tensor, std::int64_t expert, const PackedGemm& gemm) {
    return tensor ? tensor.as<const float>() + expert * gemm.padded_columns() : nullptr;
  }

  Format format_;
  bool gated_;
  PackedGemm gemm1_, gemm2_;
  std::int64_t expert_bytes_ = 0;
  Tensor data_;           // u8
  Tensor bias1_, bias2_;  // f32 (E, padded columns)
};

}  // namespace fusedmoe::cpu
