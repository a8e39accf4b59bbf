// Expert weights, packed as tiles in the layout of cpu/kernels.h.
//
// On a machine with several NUMA nodes, each node gets some consecutive tiles of every expert, in
// proportion to its CPUs: whichever experts the router chooses, all nodes have work from their own
// memory. The tiles of one node, of all experts, lie together.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/numa.h"
#include "cpu/kernels.h"
#include "cpu/tile.h"
#include "cpu/tile_format.h"
#include "fusedmoe/experts.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cpu {

/// Inner size up to which int32 accumulators of unsigned codes times int8 cannot overflow.
inline constexpr std::int64_t kMaxInt8Size = 65536;

/// Consecutive tiles of every expert, which lie near one node.
struct TilePart {
  std::int64_t first_tile = 0, num_tiles = 0;
  std::int64_t offset = 0;        // of expert 0's, in the packed weights
  std::int64_t expert_bytes = 0;  // from one expert to the next
};

/// One of the two grouped GEMMs: columns x k weights per expert, as tiles.
struct PackedGemm {
  TileShape shape;
  std::int64_t k = 0;  // padded inner size
  std::int64_t num_tiles = 0;
  std::int64_t tile_bytes = 0;
  std::vector<TilePart> parts;  // at least one; some may have no tiles

  /// Where a tile lies in the packed weights. The tiles of a part follow each other.
  std::int64_t offset(std::int64_t expert, std::int64_t tile) const {
    const TilePart* part = &parts.front();
    while (tile >= part->first_tile + part->num_tiles) ++part;
    return part->offset + expert * part->expert_bytes + (tile - part->first_tile) * tile_bytes;
  }
  std::int64_t padded_columns() const { return num_tiles * kTileColumns; }
};

/// Tile formats of both GEMMs.
using TileFormats = std::array<TileFormat, 2>;

class CpuPackedWeights final : public PackedWeights {
 public:
  /// In one part for each of `nodes`, or in one, placed nowhere, if there are none.
  CpuPackedWeights(Info info, const ExpertWeights& weights, const PackOptions& options,
                   const std::vector<core::NumaNode>& nodes = {});
  /// What parts() took apart. In one part they stay where they lie.
  CpuPackedWeights(Info info, const PackedParts& parts, const std::vector<core::NumaNode>& nodes);
  /// Room for experts, of the tile formats of `like`.
  CpuPackedWeights(const Info& info, const CpuPackedWeights& like,
                   const std::vector<core::NumaNode>& nodes);

  std::int64_t nbytes() const override;
  /// "tiles", in one part; "formats" i32 (2, 2): scale type and group of both GEMMs' tiles; for
  /// each column, if there are any, "bias1", "bias2", "scales1", "scales2"; and what unpack() must
  /// know of gate, up and down: "first" i64 (E, 3, 2), "scale_dtypes" i32 (E, 3), "input_scales"
  /// f32 (E, 3).
  PackedParts parts() const override;
  std::string expert_layout() const override;
  std::shared_ptr<PackedWeights> extract_expert(std::int64_t expert) const override;
  void replace_expert(std::int64_t expert, const PackedWeights& one) override;
  const PackedGemm& gemm1() const { return gemm1_; }
  const PackedGemm& gemm2() const { return gemm2_; }
  const std::byte* tile1(std::int64_t expert, std::int64_t tile) const {
    return data_.as<std::byte>() + gemm1_.offset(expert, tile);
  }
  const std::byte* tile2(std::int64_t expert, std::int64_t tile) const {
    return data_.as<std::byte>() + gemm2_.offset(expert, tile);
  }
  /// (padded columns) in tile order, or null.
  const float* bias1(std::int64_t expert) const { return columns(bias1_, expert, gemm1_); }
  const float* bias2(std::int64_t expert) const { return columns(bias2_, expert, gemm2_); }
  const float* column_scales1(std::int64_t expert) const {
    return columns(scales1_, expert, gemm1_);
  }
  const float* column_scales2(std::int64_t expert) const {
    return columns(scales2_, expert, gemm2_);
  }
  /// Static scale of the activations that enter GEMM 1 or 2; 1 if there is none.
  float input_scale1(std::int64_t expert) const;
  float input_scale2(std::int64_t expert) const;

  /// Undoes the packing of one expert, into tensors of its own.
  ExpertWeights unpack(std::int64_t expert) const;

 private:
  /// What unpack() must know of a matrix and tiles do not hold.
  struct Origin {
    std::int64_t first_row = 0, first_col = 0;
    DType scales = DType::kF32;
    float input_scale = 0;  // 0: none
  };
  struct ExpertOrigin {
    Origin gate, up, down;
    std::array<const Origin*, 3> all() const { return {&gate, &up, &down}; }
  };

  struct ColumnPart {
    const char* name;
    Tensor& tensor;
    std::int64_t columns;
  };

  /// Without tiles.
  explicit CpuPackedWeights(const Info& info)
      : PackedWeights(info), gated_(is_gated(info.activation.kind)) {}

  std::int64_t outputs_per_tile() const { return gated_ ? kTileColumns / 2 : kTileColumns; }
  Columns columns_of(const ExpertMatrices& source, bool first, std::int64_t tile) const;
  std::int64_t lay_out(const TileFormats& formats, const std::vector<core::NumaNode>& nodes);
  std::int64_t make_parts(std::int64_t num_experts, const std::vector<core::NumaNode>& nodes);
  std::vector<ColumnPart> column_parts();
  TileFormats formats() const { return {gemm1_.shape.format, gemm2_.shape.format}; }
  /// Everything of an expert of `from`, whose tile formats are the same.
  void put(std::int64_t expert, const CpuPackedWeights& from, std::int64_t from_expert);
  static TileFormats read_formats(const QuantScheme& scheme, const PackedParts& parts);
  void read_origins(const PackedParts& parts);
  void pack_one_tile(std::int64_t expert, const ExpertMatrices& source, bool first,
                     std::int64_t tile) const;
  void pack_expert(Executor& executor, std::int64_t expert, const ExpertMatrices& source);
  static const float* columns(const Tensor& tensor, std::int64_t expert, const PackedGemm& gemm) {
    return tensor ? tensor.as<const float>() + expert * gemm.padded_columns() : nullptr;
  }

  bool gated_;
  PackedGemm gemm1_, gemm2_;
  Tensor data_;               // u8
  Tensor bias1_, bias2_;      // f32 (E, padded columns)
  Tensor scales1_, scales2_;  // the same
  std::vector<ExpertOrigin> origins_;
};

/// All tiles of an expert, from one place to another; the tile formats are the same.
void copy_tiles(const PackedGemm& from, const Tensor& source, std::int64_t from_expert,
                const PackedGemm& to, const Tensor& target, std::int64_t to_expert);

/// Bytes of packed weights of a configuration, in one part.
std::int64_t packed_bytes(const MoeConfig& config);

}  // namespace fusedmoe::cpu
