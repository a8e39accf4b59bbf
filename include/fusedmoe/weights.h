// Expert weights in their published layout, and packed for one implementation.
#pragma once

#include <cstdint>
#include <memory>
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
struct WeightMatrix {
  TensorView values;  ///< (out, in), any strides; 4-bit types: u8 (out, in / 2), rows contiguous
  TensorView scales;  ///< MXFP4: u8 or e8m0 codes (out, in / 32), rows contiguous
  TensorView bias;    ///< (out), f32, bf16 or f16; optional
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
  /// Throws Error naming the first matrix whose shape, dtype or strides do not fit, and, for
  /// MXFP4, whose scales hold 255 (NaN). Reads all scales.
  void validate() const;

  /// Stacked tensors as engines hold them: w13 (E, 2I, H) or (E, H, 2I) if transposed, w2
  /// (E, H, I) or (E, I, H); non-gated: w13 (E, I, H). MXFP4: u8 blocks (E, 2I, H / 2) or
  /// (E, 2I, H / 32, 16) with u8 scales (E, 2I, H / 32). Biases (E, 2I) and (E, H). Undefined
  /// views stand for absent tensors.
  struct Stacked {
    Tensor w13, w13_scales, w13_bias;
    Tensor w2, w2_scales, w2_bias;
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
    QuantScheme scheme;
    std::int64_t num_experts = 0;  ///< local experts
    std::int64_t hidden = 0;
    std::int64_t intermediate = 0;
    ResolvedActivation activation{};
    bool has_bias = false;
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
