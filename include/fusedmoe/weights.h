// Expert weights in their published layout, and packed for one implementation.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/activation.h"
#include "fusedmoe/export.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// One linear map of one expert: out = values (out, in) x + bias. Every published layout (separate
/// or fused tensors, gate/up in halves or interleaved, transposed) is a matter of strides, so no
/// weight is copied on the way from the file to pack().
///
/// Values by the element type of the scheme's weights:
///   f32, f16, bf16, e4m3, i8  (out, in), any strides; e4m3 also as u8
///   e2m1  u8 (out, ceil(in / 2)), rows contiguous; element 2i in the low nibble of byte i
///   i4    i32 (out, ceil(in / 8)), any strides; element i of a word in bits 4i: unsigned codes
///   u8    i32 (out, ceil(in / 4)), any strides; element i of a word in bits 8i: unsigned codes
/// A weight is (code - zero point) * scale * global scale; the zero point of symmetric integer
/// codes is 8 (4 bits) or 128 (8 bits). What is not used must be undefined.
struct WeightMatrix {
  TensorView values;
  /// One per block of the key's GroupShape: (ceil(out / rows), ceil(in / cols)), where -1 is the
  /// whole extent; any strides. f32 keys: f32, f16 or bf16. e4m3 and e8m0: that, or u8.
  TensorView scales;
  TensorView zero_points;   ///< u8, shape of scales; asymmetric keys only
  TensorView global_scale;  ///< f32; NVFP4: (1), the multiplier of the block scales; W4A8: (out)
  /// f32 (1): static scale of the activations that this matrix multiplies: x = code * scale; for
  /// NVFP4 activations x = code * block scale * this. Undefined for dynamic ones.
  TensorView input_scale;
  TensorView bias;  ///< (out), f32, bf16 or f16; optional
  /// Where values(0, 0) lies in the grid of scale blocks, for shards that begin inside a block:
  /// element (r, c) has the scale at ((first_row + r) / rows, (first_col + c) / cols).
  std::int64_t first_row = 0, first_col = 0;
};

/// One expert. Non-gated activations use `gate` as the only first matrix and leave `up` undefined.
struct ExpertMatrices {
  WeightMatrix gate;  ///< (intermediate, hidden)
  WeightMatrix up;    ///< (intermediate, hidden)
  WeightMatrix down;  ///< (hidden, intermediate)
};

/// Where gate (w1) and up (w3) rows lie in a fused w13.
enum class GateUpLayout {
  kGateUp,       ///< gate rows, then up rows
  kUpGate,       ///< up rows, then gate rows
  kInterleaved,  ///< gate, up, gate, up, ... (gpt-oss)
};

/// All local experts of one layer.
struct FUSEDMOE_API ExpertWeights {
  QuantScheme scheme;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;  ///< per expert, after gating
  Activation activation = Activation::kSilu;
  ActivationParams activation_params;
  std::vector<ExpertMatrices> experts;
  std::vector<std::shared_ptr<const void>> owners;  ///< keeps the viewed memory alive

  std::int64_t num_experts() const { return static_cast<std::int64_t>(experts.size()); }
  bool has_bias() const;
  /// Bytes of all values, scales and biases as stored.
  std::int64_t nbytes() const;
  /// Throws Error naming the first matrix whose shape, dtype or strides do not fit, or whose scales
  /// hold a NaN, an infinity or, where they divide, a zero. Reads all scales.
  void validate() const;

  /// Stacked tensors as engines hold them: w13 (E, 2I, H) or (E, H, 2I) if transposed, w2
  /// (E, H, I) or (E, I, H); non-gated: w13 (E, I, H). Packed types (e2m1, i4, u8) have the last
  /// dimension of WeightMatrix::values and are not transposed; MXFP4 also (E, 2I, H / 32, 16).
  /// Scales (E, rows, columns) as in WeightMatrix for the fused matrix; per tensor also (E), and
  /// (E, 2) for one each of gate and up. Zero points like scales. Global scales: NVFP4 (E), (E, 1)
  /// or (E, 2); W4A8 (E, 2I). Input scales (E), (E, 2) or (1). Biases (E, 2I) and (E, H).
  /// Undefined views stand for absent tensors.
  struct Stacked {
    Tensor w13, w13_scales, w13_zero_points, w13_global_scales, w13_input_scales, w13_bias;
    Tensor w2, w2_scales, w2_zero_points, w2_global_scales, w2_input_scales, w2_bias;
    GateUpLayout gate_up_layout = GateUpLayout::kGateUp;
    bool transposed = false;
  };
  /// The result is validated.
  static ExpertWeights from_stacked(const Stacked& stacked, QuantScheme scheme,
                                    Activation activation, ActivationParams params = {});
};

/// Weights in the layout that one Experts implementation streams, made once by Experts::pack.
/// Immutable and shareable between layers and threads.
class FUSEDMOE_API PackedWeights {
 public:
  /// What every implementation keeps beside its own data.
  struct Info {
    std::string implementation;  ///< name of the Experts that packed them, e.g. "cpu"
    int layout_version = 1;
    Device device;  ///< that holds them, and that runs what they are for
    QuantScheme scheme;
    std::int64_t num_experts = 0;  ///< local experts
    std::int64_t hidden = 0;
    std::int64_t intermediate = 0;
    ResolvedActivation activation{};
    bool has_bias = false;
    /// Static per-tensor scales of the activations before GEMM 1 and 2: the largest of all experts'
    /// input scales, as vLLM takes them. None when dynamic or not per tensor.
    std::optional<float> a1_scale, a2_scale;
  };

  explicit PackedWeights(Info info) : info_(std::move(info)) {}
  virtual ~PackedWeights() = default;
  PackedWeights(const PackedWeights&) = delete;
  PackedWeights& operator=(const PackedWeights&) = delete;

  const Info& info() const { return info_; }
  /// Bytes held beyond the source weights.
  virtual std::int64_t nbytes() const = 0;

 private:
  Info info_;
};

}  // namespace fusedmoe
