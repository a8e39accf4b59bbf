// The fused MLP kernels of one architecture, as the experts' host side sees them.
#pragma once

#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/formats/weight_format.h"
#include "cuda/mlp/fused_mlp.h"
#include "cuda/mlp/kernel_config.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

struct MlpShape;

/// Enqueues both GEMMs of all experts and the activation between, in tiles of one shape.
using LaunchMlp = void (*)(const FusedMlpParams&, const Stream&);

/// The kernels of one format, by the tile shapes of its family.
struct FormatLaunches {
  std::string_view format;
  std::span<const LaunchMlp> launches;
};

class KernelFamily {
 public:
  /// Of the experts in the registry that run them.
  virtual std::string_view name() const = 0;
  /// The compute capabilities, as major * 10 + minor, of the GPUs that they are for.
  virtual bool runs_on(int capability) const = 0;
  /// What they need, for people: "9.0".
  virtual std::string_view needs() const = 0;
  /// Of the tensor cores: "wgmma".
  virtual std::string_view instruction() const = 0;
  /// What they were compiled for, see code_for().
  virtual std::string_view architectures() const = 0;
  /// One of them, see code_problem(): any stands for all. Null in a build without CUDA.
  virtual const void* kernel() const = 0;
  /// The tile shapes that are compiled for a format, from few tokens to many. Empty: it has no
  /// kernels here.
  virtual std::span<const TileShape> tiles(const WeightFormat& format) const = 0;
  /// Whether tiles of this shape add up a row in the order of all other such shapes, which batch
  /// invariance needs.
  virtual bool keeps_order(const WeightFormat& format, const TileShape& tile) const = 0;
  /// Whether tiles of this shape can quantize rows between the GEMMs: FusedMlpParams::pass.
  virtual bool has_row_pass(const WeightFormat& format, const TileShape& tile) const = 0;
  /// Whether they read token rows of FP8 as f16 numbers, in the order of device/e4m3_f16.cuh.
  virtual bool fp8_as_f16() const = 0;
  /// Whether GEMM 1 can begin before all of its rows are here: LaunchOrder::kBesideArrivals.
  virtual bool awaits_rows() const = 0;
  /// The configuration in tiles that is likely the fastest, and valid().
  virtual KernelConfig choose(const MlpShape& shape) const = 0;
  /// Of each format; none in a build without CUDA.
  virtual std::span<const FormatLaunches> launches() const = 0;

  /// Every configuration of every format. A place in it is what ForwardArgs::kernel_config says.
  std::span<const KernelConfig> configs() const;

 protected:
  ~KernelFamily() = default;

 private:
  std::vector<KernelConfig> list_configs() const;

  mutable std::once_flag listed_;
  mutable const std::vector<KernelConfig>* configs_ = nullptr;
};

/// Place in configs() of the one with this name; -1: there is none.
int find_config(const KernelFamily& family, std::string_view name);

}  // namespace fusedmoe::cuda
