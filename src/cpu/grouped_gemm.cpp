#include "cpu/grouped_gemm.h"

#include <algorithm>

namespace fusedmoe::cpu {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// One or two rows are bound by memory: several streams side by side.
std::int64_t tiles_per_task(std::int64_t rows) {
  return rows <= 2 ? kMaxTiles / rows : 1;
}

}  // namespace

GroupedGemm::GroupedGemm(const PackedGemm& gemm, const std::int32_t* expert_offsets,
                         std::int64_t num_experts, std::int64_t* task_offsets)
    : gemm_(gemm),
      expert_offsets_(expert_offsets),
      num_experts_(num_experts),
      task_offsets_(task_offsets) {
  task_offsets_[0] = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const std::int64_t rows = num_rows(e);
    const std::int64_t tasks =
        rows == 0 ? 0 : ceil_div(gemm.num_tiles, tiles_per_task(rows)) * ceil_div(rows, kMaxRows);
    task_offsets_[e + 1] = task_offsets_[e] + tasks;
  }
}

GroupedGemm::Task GroupedGemm::at(std::int64_t index) const {
  const std::int64_t* begin = task_offsets_;
  const std::int64_t expert = std::upper_bound(begin, begin + num_experts_ + 1, index) - begin - 1;
  const std::int64_t rows = num_rows(expert);
  const std::int64_t tiles = tiles_per_task(rows);
  // Row blocks of one tile follow each other, so that its stream is still in the cache.
  const std::int64_t blocks = ceil_div(rows, kMaxRows);
  const std::int64_t local = index - task_offsets_[expert];
  const std::int64_t block = local % blocks;
  Task task;
  task.expert = expert;
  task.first_tile = local / blocks * tiles;
  task.tiles = static_cast<int>(std::min(tiles, gemm_.num_tiles - task.first_tile));
  task.first_row = rows * block / blocks;
  task.rows = rows * (block + 1) / blocks - task.first_row;
  return task;
}

}  // namespace fusedmoe::cpu
