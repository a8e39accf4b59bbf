// Weights as the Hopper GEMMs stream them: records in device memory, biases and scales beside them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/gemm/grouped_gemm.h"
#include "cuda/gemm/records.h"
#include "fusedmoe/experts.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cuda {

/// w13 or w2 of all experts.
class PackedMatrices {
 public:
  PackedMatrices() = default;
  PackedMatrices(WeightFormat format, std::int64_t num_experts, std::int64_t width, std::int64_t k,
                 bool gated, bool bias, Device device);

  /// `up` is null unless gated. Waits.
  void pack(std::int64_t expert, const WeightMatrix& gate, const WeightMatrix* up);
  /// The inverse, into host tensors that `owners` keep. Waits.
  void unpack(std::int64_t expert, WeightMatrix& gate, WeightMatrix* up,
              std::vector<std::shared_ptr<const void>>& owners) const;
  /// Fills what a phase must know of its weights.
  void set(GemmPhase& phase) const;
  std::int64_t nbytes() const;

 private:
  WeightFormat format_ = WeightFormat::kBF16;
  std::int64_t width_ = 0, k_ = 0;
  bool gated_ = false;
  RecordGrid grid_;
  Tensor records_;  // u8
  Tensor bias_;     // (experts, row_blocks * 64) f32 in packed row order
  Tensor scales_;   // (experts) f32
};

class CudaPackedWeights final : public PackedWeights {
 public:
  /// On the current device of the calling thread.
  CudaPackedWeights(Info info, WeightFormat format, const ExpertWeights& weights,
                    const PackProgress& progress);

  WeightFormat format() const { return format_; }
  const PackedMatrices& w13() const { return w13_; }
  const PackedMatrices& w2() const { return w2_; }
  std::int64_t nbytes() const override { return w13_.nbytes() + w2_.nbytes(); }
  void replace(std::int64_t expert, const ExpertMatrices& matrices);
  /// One expert as it was packed, in host tensors of its own; biases come back in f32.
  ExpertWeights unpack(std::int64_t expert) const;

 private:
  WeightFormat format_;
  ActivationParams activation_params_;
  PackedMatrices w13_, w2_;
};

}  // namespace fusedmoe::cuda
