// What the choice of a kernel configuration depends on, and which ones there are for it. The choice
// itself is KernelFamily::choose(). Needs no CUDA.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "cuda/formats/weight_format.h"
#include "cuda/mlp/kernel_family.h"

namespace fusedmoe::cuda {

/// Configurations in place: a forward allocates nothing.
class ConfigList {
 public:
  void push_back(const KernelConfig& config) { configs_[size_++] = config; }
  std::size_t size() const { return size_; }
  const KernelConfig* begin() const { return configs_.data(); }
  const KernelConfig* end() const { return configs_.data() + size_; }

 private:
  std::array<KernelConfig, kMaxTiles * std::size(kSplits) + 1> configs_;
  std::size_t size_ = 0;
};

/// What the choice depends on.
struct MlpShape {
  const KernelFamily* family = nullptr;
  const WeightFormat* format = nullptr;
  bool batched = false;          ///< num_tokens is the capacity of each expert
  bool unfused = false;          ///< hooks see the rows of GEMM 2
  bool stores_groups = false;    ///< GEMM 1 quantizes in tiles that have whole groups
  bool batch_invariant = false;  ///< only configurations that add up rows in one order at all sizes
  bool has_one_token = false;    ///< the kernel of one token has room for it
  std::int64_t num_tokens = 0;   ///< at most: what buffers hold
  std::int64_t expected_tokens = 0;  ///< of num_tokens; 0: unknown
  std::int64_t topk = 0;
  std::int64_t num_local_experts = 0;
  std::int64_t num_experts = 0;  ///< of the layer, on all ranks; 0: all are local
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  bool gated = true;  ///< only the kernel of one token asks; tiles are chosen as if all were
  int multiprocessors = 132;  ///< of the device; the default are those of an H200
  std::int64_t l2_bytes = std::int64_t{60} << 20;        ///< of the device
  std::int64_t multiprocessor_shared_bytes = 228 << 10;  ///< of the device
};

/// Tokens to choose for, as if all their slots were local: `expected_tokens` if known, else the
/// local experts' share of the tokens.
std::int64_t likely_tokens(const MlpShape& shape);
/// Whether the configuration computes the shape.
bool valid(const MlpShape& shape, const KernelConfig& config);
/// Every configuration worth measuring, the chosen one among them: the valid ones, but rows in 16
/// bits only where they cannot be in f32, which is more exact.
ConfigList valid_configs(const MlpShape& shape);
/// The same without the kernel of one token.
ConfigList valid_tiles(const MlpShape& shape);
/// Upper bound on scratch: fewest tokens to a tile, most splits. It may itself be invalid. Every
/// forward asks for it several times.
KernelConfig largest_config(const MlpShape& shape);
/// Tokens up to which rows may be in f32: where the scratch of the largest configuration is
/// largest.
std::int64_t max_tokens_f32(const MlpShape& shape);

/// What a routing at random makes of a shape.
struct Load {
  double hit_experts;  // that have rows
  double rows;         // of each of them, on average
  double spread;       // of their rows: standard deviation
};
Load expected_load(const MlpShape& shape);
/// How many times the tiles of a GEMM of so many outputs, `rows` to an expert, occupy all
/// multiprocessors.
double waves(const MlpShape& shape, const Load& load, double rows, std::int64_t width,
             const TileShape& tile);
/// K blocks of so many columns.
std::int64_t k_blocks_of(const MlpShape& shape, std::int64_t k);
/// Outputs of GEMM 1: most weights are gated.
std::int64_t gate_and_up(const MlpShape& shape);
/// Whether each split has enough of K to be worth it.
bool is_long_enough(const MlpShape& shape, int splits);

}  // namespace fusedmoe::cuda
