// Weights as the kernels stream them: packed blocks in device memory, biases and scales
// beside them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/experts/packed_shapes.h"
#include "cuda/formats/format_kernels.h"
#include "cuda/mlp/fused_mlp.h"
#include "fusedmoe/experts.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cuda {

/// w13 or w2 of all experts.
class PackedMatrices {
 public:
  PackedMatrices() = default;
  /// Without arrays.
  PackedMatrices(const FormatKernels& kernels, const QuantScheme& scheme, const MatrixSizes& sizes,
                 Device device);
  void make_arrays();
  /// Adds everything to `parts`, or takes it from there, under names that begin so: arrays that lie
  /// on the device as they are. Taking waits.
  void add_to(PackedParts& parts, const std::string& prefix) const;
  void take_from(const PackedParts& parts, const std::string& prefix);

  /// Everything of an expert, from matrices that have the same arrays. Only enqueued.
  void put(std::int64_t expert, const PackedMatrices& from, std::int64_t from_expert,
           Stream stream);
  /// Becomes a view of that expert alone: its arrays are parts of those of `from`.
  void view_expert(const PackedMatrices& from, std::int64_t expert);
  /// How many scales multiply the results of a tile and a K block. Kernels take that of all experts
  /// as an argument, so a graph holds it; 0: none.
  int scales_a_tile() const { return !block_scales_ ? 0 : two_scales_a_tile_ ? 2 : 16; }

  /// Room for the experts of `like`.
  void lay_out_as(const PackedMatrices& like) { two_scales_a_tile_ = like.two_scales_a_tile_; }
  /// To be told of every expert before the first is packed.
  void lay_out_for(const WeightMatrix& gate, const WeightMatrix* up) {
    two_scales_a_tile_ &= !block_scales_ || has_two_scales_a_tile(gate, up);
  }
  /// Throws Error for matrices that cannot be packed; scales are in host memory. Returns
  /// FormatKernels::exponent_shift of them.
  int check(const WeightMatrix& gate, const WeightMatrix* up) const;
  /// `up` is null unless gated; scales and biases are in host memory. Waits.
  void pack(std::int64_t expert, const WeightMatrix& gate, const WeightMatrix* up,
            int exponent_shift, Stream stream);
  /// The inverse, into host tensors that `owners` keep. Waits.
  void unpack(std::int64_t expert, WeightMatrix& gate, WeightMatrix* up,
              std::vector<std::shared_ptr<const void>>& owners) const;
  /// Fills what a GEMM must know of its weights.
  void set(GemmParams& gemm) const;
  /// (experts) global scales of the rows that these matrices multiply; null where they have none.
  const float* input_scales() const {
    return input_scales_ ? input_scales_.as<const float>() : nullptr;
  }
  std::int64_t nbytes() const;

 private:
  /// Of one source matrix what the blocks do not hold, in host memory.
  struct Origin {
    Tensor scales, global_scale, input_scale;
    Tensor largest_scales;  // of rows, where packed scales are relative to them
    std::int64_t first_row = 0, first_col = 0;

    static constexpr std::array<std::pair<const char*, Tensor Origin::*>, 4> kTensors{
        {{"scales", &Origin::scales},
         {"global_scale", &Origin::global_scale},
         {"input_scale", &Origin::input_scale},
         {"largest_scales", &Origin::largest_scales}}};
  };
  void put_host_values(std::int64_t expert, const PackedMatrices& from, std::int64_t from_expert);
  Origin origin_of(const WeightMatrix& matrix) const;
  bool has_two_scales_a_tile(const WeightMatrix& gate, const WeightMatrix* up) const;
  float row_scale(const WeightMatrix& matrix, const Origin& origin, std::int64_t row,
                  float common) const;
  Tensor make_block_scales(const WeightMatrix& gate, const WeightMatrix* up) const;
  const WeightMatrix& source_of(std::int64_t row, const WeightMatrix& gate,
                                const WeightMatrix* up) const;

  const FormatKernels* kernels_ = nullptr;
  const WeightFormat* format_ = nullptr;
  QuantScheme scheme_;
  std::int64_t width_ = 0, k_ = 0;
  bool gated_ = false;
  float activation_scale_ = 1;
  Device device_;
  PackedShapes shapes_;
  Tensor blocks_;        // u8
  Tensor bias_;          // (experts, row_blocks * 64) f32 in packed row order
  Tensor scales_;        // the same: what results are multiplied by; null where only K blocks have
                         // scales
  Tensor block_scales_;  // (experts, row_blocks, k_blocks, 8) f32, of 8 rows and a K block
  Tensor input_scales_;  // (experts) f32 of NVFP4 activations
  struct Array {
    const char* name;
    Tensor PackedMatrices::*tensor;
    Shape PackedShapes::*shape;
    DType dtype;
  };
  static constexpr std::array<Array, 5> kArrays{
      {{"blocks", &PackedMatrices::blocks_, &PackedShapes::blocks, DType::kU8},
       {"bias", &PackedMatrices::bias_, &PackedShapes::bias, DType::kF32},
       {"scales", &PackedMatrices::scales_, &PackedShapes::scales, DType::kF32},
       {"block_scales", &PackedMatrices::block_scales_, &PackedShapes::block_scales, DType::kF32},
       {"input_scales", &PackedMatrices::input_scales_, &PackedShapes::input_scales, DType::kF32}}};
  bool two_scales_a_tile_ = true;               // GemmParams
  std::vector<int> exponent_shifts_;            // of experts
  std::vector<std::array<Origin, 2>> origins_;  // gate or down, up
};

class CudaPackedWeights final : public PackedWeights {
 public:
  /// On info.device. Sources lie in host memory or there.
  CudaPackedWeights(Info info, const FormatKernels& kernels, const ExpertWeights& weights,
                    const PackOptions& options);
  /// What parts() took apart, in host memory or on the device.
  CudaPackedWeights(Info info, const FormatKernels& kernels, const PackedParts& parts);
  /// Room for experts, of the layout of `like`.
  CudaPackedWeights(Info info, const CudaPackedWeights& like);

  const WeightFormat& format() const { return kernels_->format; }
  const PackedMatrices& w13() const { return w13_; }
  const PackedMatrices& w2() const { return w2_; }
  std::int64_t nbytes() const override { return w13_.nbytes() + w2_.nbytes(); }
  /// The arrays on the device, and of each source matrix what they do not hold.
  PackedParts parts() const override;
  std::string expert_layout() const override;
  std::shared_ptr<PackedWeights> extract_expert(std::int64_t expert) const override;
  /// The same with parts of these arrays.
  PackedParts expert_parts(std::int64_t expert) const;
  void replace_expert(std::int64_t expert, const PackedWeights& one) override;
  /// Only enqueued.
  void replace_expert(std::int64_t expert, const PackedWeights& one, Stream stream);
  void replace(std::int64_t expert, const ExpertMatrices& matrices, Stream stream);
  /// One expert as it was packed, in host tensors of its own; biases come back in f32.
  ExpertWeights unpack(std::int64_t expert) const;

 private:
  /// Without arrays.
  CudaPackedWeights(Info info, const FormatKernels& kernels);
  void put(std::int64_t expert, const CudaPackedWeights& from, std::int64_t from_expert,
           Stream stream);

  const FormatKernels* kernels_;
  PackedMatrices w13_, w2_;
};

}  // namespace fusedmoe::cuda
