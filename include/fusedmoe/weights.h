// Expert weights in their published layout, and packed for one implementation; the activation
// between their two GEMMs.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/export.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

// Activation functions: g is the gate, u the up projection, s(x) = 1 / (1 + exp(-x)). Everything is
// computed in fp32 on the unrounded GEMM accumulator (plus bias) and rounded once. Source: vLLM's
// MoEActivation and its kernels; docs/number-formats.md, "Activation functions".

enum class Activation {
  kSilu,                   ///< g s(g) u; with a limit: g = min(g, limit), u = clamp(u, +-limit)
  kGelu,                   ///< g (1 + erf(g / sqrt 2)) / 2 u
  kGeluTanh,               ///< tanh form of kGelu
  kSwigluOai,              ///< gpt-oss: g = min(g, L), u = clamp(u, +-L): (u + 1) g s(alpha g)
  kSwigluOaiUninterleave,  ///< g = min(g, L), u = clamp(u, +-L): (u + beta) g s(alpha g)
  kSwigluStep,             ///< min(g s(g), L) clamp(u, +-L)
  kSitu,                   ///< b tanh(g / b) s(g) up, up = lb tanh(u / lb) if lb > 0, else u
  kSiluNoMul,              ///< non-gated: g s(g)
  kGeluNoMul,
  kGeluTanhNoMul,
  kRelu2NoMul,  ///< non-gated: max(g, 0)^2
};

/// Parameters; unset ones take the activation's own default (kSwigluOai: alpha 1.702, beta 1,
/// limit 7; kSwigluStep: limit 7; alpha 1, beta 0 and no limit otherwise).
struct ActivationParams {
  std::optional<float> alpha = std::nullopt;
  std::optional<float> beta = std::nullopt;
  std::optional<float> limit = std::nullopt;
  std::optional<float> situ_beta = std::nullopt;         ///< required by kSitu
  std::optional<float> situ_linear_beta = std::nullopt;  ///< optional for kSitu

  bool operator==(const ActivationParams&) const = default;
};

/// An activation with every default filled in. `limit` is infinity when there is none.
struct ResolvedActivation {
  Activation kind;
  float alpha, beta, limit, situ_beta, situ_linear_beta;
  bool operator==(const ResolvedActivation&) const = default;
};

/// Throws Error when a required parameter is missing, one is not finite, or one is set that the
/// activation does not have.
FUSEDMOE_API ResolvedActivation resolve(Activation kind, const ActivationParams& params);

/// True if GEMM 1 yields a gate and an up half, that is, if the name does not end in `_no_mul`.
FUSEDMOE_API bool is_gated(Activation activation);

/// vLLM's names: "silu", "gelu", "gelu_tanh", "swigluoai", "swigluoai_uninterleave",
/// "swiglustep", "situ", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul".
FUSEDMOE_API std::string_view name(Activation activation);

/// Inverse of `name`; also "gelu_pytorch_tanh". Throws Error listing the valid names.
FUSEDMOE_API Activation parse_activation(std::string_view text);

/// One expert. Non-gated activations use `gate` as the only first matrix and leave `up` undefined.
struct ExpertMatrices {
  WeightMatrix gate{};  ///< (intermediate, hidden)
  WeightMatrix up{};    ///< (intermediate, hidden)
  WeightMatrix down{};  ///< (hidden, intermediate)
};

/// Where gate (w1) and up (w3) rows lie in a fused w13.
enum class GateUpLayout {
  kGateUp,       ///< gate rows, then up rows
  kUpGate,       ///< up rows, then gate rows
  kInterleaved,  ///< gate, up, gate, up, ... (gpt-oss)
};

/// How engines hold the one-byte scales of MXFP4, MXFP8 and NVFP4.
enum class ScaleLayout {
  kFlat,        ///< (rows, columns), as in WeightMatrix
  kTiled128x4,  ///< tile_scales() of every expert, of any shape with that many bytes
};

/// All local experts of one layer: views of memory that `owners`, or the caller, keeps alive. Once
/// Experts::pack has returned, neither is needed: implementations copy what they need, and
/// `reference`, which reads the published form, keeps the owners or copies what is borrowed.
struct FUSEDMOE_API ExpertWeights {
  QuantScheme scheme;
  /// What says that, with which errors about it begin: "FILE: layer 0: config.KEY". Empty: the
  /// caller, or the tensors themselves.
  std::string scheme_source{};
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;  ///< per expert, after gating
  Activation activation = Activation::kSilu;
  ActivationParams activation_params;
  std::vector<ExpertMatrices> experts;
  /// Keep the viewed memory alive.
  std::vector<std::shared_ptr<const void>> owners;
  /// Some of the memory has no owner here: the caller keeps it until the weights are packed.
  bool borrowed = false;

  std::int64_t num_experts() const { return static_cast<std::int64_t>(experts.size()); }
  bool has_bias() const;
  /// Bytes of all values, scales and biases as stored.
  std::int64_t nbytes() const;
  /// Where the values of the first expert are; everything must be there.
  Device device() const;
  /// Throws Error naming the first matrix whose shape, dtype, strides or device do not fit, or
  /// whose scales hold a NaN, an infinity or, where they divide, a zero. Reads all scales in host
  /// memory; device memory is not touched, so values there are not checked.
  void validate() const;

  /// Stacked tensors as engines hold them: w13 (E, 2I, H) or (E, H, 2I) if transposed, w2
  /// (E, H, I) or (E, I, H); non-gated: w13 (E, I, H). Packed types (e2m1, i4, u8) have the last
  /// dimension of WeightMatrix::values and are not transposed; MXFP4 also (E, 2I, H / 32, 16).
  /// Scales (E, rows, columns) as in WeightMatrix for the fused matrix; per tensor also (E), and
  /// (E, 2) for one each of gate and up. Zero points like scales. Global scales: NVFP4 (E), (E, 1)
  /// or (E, 2); W4A8 (E, 2I). Input scales (E), (E, 2) or (1). Biases (E, 2I) and (E, H).
  /// Undefined views stand for absent tensors; tensors without an owner (borrow()) are used where
  /// they lie and must live until the weights are packed. e2m1 may be given as e2m1 (E, 2I, H) or
  /// as its bytes.
  struct Stacked {
    Tensor w13{}, w13_scales{}, w13_zero_points{}, w13_global_scales{}, w13_input_scales{},
        w13_bias{};
    Tensor w2{}, w2_scales{}, w2_zero_points{}, w2_global_scales{}, w2_input_scales{}, w2_bias{};
    GateUpLayout gate_up_layout = GateUpLayout::kGateUp;
    bool transposed = false;
    /// Of w13_scales and w2_scales. Tiled ones are copied to flat ones and must be in host memory.
    ScaleLayout scale_layout = ScaleLayout::kFlat;
  };
  /// The result is validated. It is views: nothing else is copied.
  static ExpertWeights from_stacked(const Stacked& stacked, QuantScheme scheme,
                                    Activation activation, ActivationParams params = {});
};

/// FP8 per-tensor weights whose gate and up differ in scale, as engines hold them that keep one
/// scale for the fused w13: the half with the smaller scale becomes codes e4m3(code * own scale *
/// (1 / larger scale)), fp32 products from left to right, in a tensor of its own; both halves then
/// have the larger scale. It loses precision, which is why nothing here does it unasked. Throws
/// Error for weights of another format. Experts without `up` stay as they are.
FUSEDMOE_API void merge_gate_up_scales(ExpertWeights& weights);

/// What packed weights consist of beside PackedWeights::Info, by name: tensors in the memory of
/// their device or of the host. What the names mean depends on the layout
/// (ExpertsDescriptor::layout_version).
using PackedParts = std::map<std::string, Tensor, std::less<>>;

/// Weights in the layout that one Experts implementation streams, made once by Experts::pack.
/// Immutable and shareable between layers and threads.
class FUSEDMOE_API PackedWeights {
 public:
  /// What every implementation keeps beside its own data.
  struct Info {
    std::string implementation;  ///< name of the Experts that packed them, e.g. "cpu"
    Device device;               ///< that holds them, and that runs what they are for
    QuantScheme scheme;
    std::int64_t num_experts = 0;  ///< local experts
    std::int64_t hidden = 0;
    std::int64_t intermediate = 0;
    ResolvedActivation activation{};
    ActivationParams activation_params{};  ///< as they were given
    bool has_bias = false;
    /// In memory that nobody may write to, as a mapped file is; Experts::repack then throws Error.
    bool read_only = false;
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
  /// Views of everything, from which Experts::from_parts() makes the same weights again. The
  /// default throws Error: the implementation has no layout of its own.
  virtual PackedParts parts() const;

  // Experts that move from one such object to another, on this rank or on others. The defaults
  // throw Error: those of the implementation do not move.

  /// What both must have the same of beside Info: "scales f32 of 128, f32 of 128".
  virtual std::string expert_layout() const;
  /// One expert as it is packed, copied to weights of it alone.
  virtual std::shared_ptr<PackedWeights> extract_expert(std::int64_t expert) const;
  /// Overwrites an expert by the only one of `one`, in place. No forward may run meanwhile. Throws
  /// Error, before it writes, for one of another layout or size.
  virtual void replace_expert(std::int64_t expert, const PackedWeights& one);

 private:
  Info info_;
};

}  // namespace fusedmoe
