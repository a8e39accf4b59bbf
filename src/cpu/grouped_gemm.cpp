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
      work_offsets_(work_offsets),
      tasks_(static_cast<int>(gemm.parts.size())) {
  for (int part = 0; part < static_cast<int>(gemm.parts.size()); ++part) {
    const std::int64_t num_tiles = gemm.parts[static_cast<std::size_t>(part)].num_tiles;
    std::int64_t* offsets = offsets_of(part);
    offsets[0] = 0;
    for (std::int64_t e = 0; e < num_experts; ++e) {
      const std::int64_t rows = num_rows(e);
      const std::int64_t count =
          rows == 0 ? 0 : ceil_div(num_tiles, tiles_per_work_tile(rows)) * ceil_div(rows, kMaxRows);
      offsets[e + 1] = offsets[e] + count;
    }
    tasks_.set_count(part, offsets[num_experts]);
  }
}

GroupedGemm::WorkTile GroupedGemm::at(Task task) const {
  const TilePart& part = gemm_.parts[static_cast<std::size_t>(task.part)];
  const std::int64_t* begin = offsets_of(task.part);
  const std::int64_t expert =
      std::upper_bound(begin, begin + num_experts_ + 1, task.index) - begin - 1;
  const std::int64_t rows = num_rows(expert);
  const std::int64_t tiles = tiles_per_work_tile(rows);
  // The row blocks of one weight tile follow each other, while its stream is still in the cache.
  const std::int64_t blocks = ceil_div(rows, kMaxRows);
  const std::int64_t local = task.index - begin[expert];
  const std::int64_t block = local % blocks;
  WorkTile work;
  work.expert = expert;
  const std::int64_t tile = local / blocks * tiles;  // within the part
  work.first_tile = part.first_tile + tile;
  work.tiles = static_cast<int>(std::min(tiles, part.num_tiles - tile));
  work.first_row = rows * block / blocks;
  work.rows = rows * (block + 1) / blocks - work.first_row;
  return work;
}

}  // namespace fusedmoe::cpu
