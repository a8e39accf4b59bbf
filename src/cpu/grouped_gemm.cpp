#include "cpu/grouped_gemm.h"

#include <algorithm>

#include "core/ceil_div.h"

namespace fusedmoe::cpu {
namespace {

using core::ceil_div;

/// One or two rows are bound by memory, so they read several weight tiles side by side.
std::int64_t tiles_per_work_tile(std::int64_t rows) {
  return rows <= 2 ? kMaxTiles / rows : 1;
}

}  // namespace

GroupedGemm::GroupedGemm(const PackedGemm& gemm, const std::int32_t* expert_offsets,
                         std::int64_t num_experts, std::int64_t* work_offsets)
    : gemm_(gemm),
      expert_offsets_(expert_offsets),
      num_experts_(num_experts),
      work_offsets_(work_offsets) {
  work_offsets_[0] = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const std::int64_t rows = num_rows(e);
    const std::int64_t count =
        rows == 0 ? 0
                  : ceil_div(gemm.num_tiles, tiles_per_work_tile(rows)) * ceil_div(rows, kMaxRows);
    work_offsets_[e + 1] = work_offsets_[e] + count;
  }
}

GroupedGemm::WorkTile GroupedGemm::at(std::int64_t index) const {
  const std::int64_t* begin = work_offsets_;
  const std::int64_t expert = std::upper_bound(begin, begin + num_experts_ + 1, index) - begin - 1;
  const std::int64_t rows = num_rows(expert);
  const std::int64_t tiles = tiles_per_work_tile(rows);
  // The row blocks of one weight tile follow each other, while its stream is still in the cache.
  const std::int64_t blocks = ceil_div(rows, kMaxRows);
  const std::int64_t local = index - work_offsets_[expert];
  const std::int64_t block = local % blocks;
  WorkTile work;
  work.expert = expert;
  work.first_tile = local / blocks * tiles;
  work.tiles = static_cast<int>(std::min(tiles, gemm_.num_tiles - work.first_tile));
  work.first_row = rows * block / blocks;
  work.rows = rows * (block + 1) / blocks - work.first_row;
  return work;
}

}  // namespace fusedmoe::cpu
