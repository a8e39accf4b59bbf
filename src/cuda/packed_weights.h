// Weights as the Hopper kernel streams them: packed blocks in device memory, biases and scales
// beside them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/gemm/weight_format.h"
#include "fusedmoe/experts.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cuda {

/// w13 or w2 of all experts.
class PackedMatrices {
 public:
  PackedMatrices() = default;
  PackedMatrices(const WeightFormat& format, std::int64_t num_experts, std::int64_t width,
                 std::int64_t k, bool gated, bool bias, Device device);

  /// `up` is null unless gated; scales and biases are in host memory. Waits.
  void pack(std::int64_t expert, const WeightMatrix& gate, const WeightMatrix* up, Stream stream);
  /// The inverse, into host tensors that `owners` keep. Waits.
  void unpack(std::int64_t expert, WeightMatrix& gate, WeightMatrix* up,
              std::vector<std::shared_ptr<const void>>& owners) const;
  /// Fills what a GEMM must know of its weights.
  void set(GemmParams& gemm) const;
  std::int64_t nbytes() const;

 private:
  const WeightFormat* format_ = nullptr;
  std::int64_t width_ = 0, k_ = 0;
  bool gated_ = false;
  BlockGrid grid_;
  Tensor blocks_;  // u8
  Tensor bias_;    // (experts, row_blocks * 64) f32 in packed row order
  Tensor scales_;  // (experts) f32
};

class CudaPackedWeights final : public PackedWeights {
 public:
  /// On info.device. Sources lie in host memory or there.
  CudaPackedWeights(Info info, const WeightFormat& format, const ExpertWeights& weights,
                    const PackOptions& options);

  const WeightFormat& format() const { return *format_; }
  const PackedMatrices& w13() const { return w13_; }
  const PackedMatrices& w2() const { return w2_; }
  std::int64_t nbytes() const override { return w13_.nbytes() + w2_.nbytes(); }
  void replace(std::int64_t expert, const ExpertMatrices& matrices, Stream stream);
  /// One expert as it was packed, in host tensors of its own; biases come back in f32.
  ExpertWeights unpack(std::int64_t expert) const;

 private:
  const WeightFormat* format_;
  ActivationParams activation_params_;
  PackedMatrices w13_, w2_;
};

}  // namespace fusedmoe::cuda
