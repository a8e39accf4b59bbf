// A grouped GEMM, cut into work tiles: (expert, some weight tiles, block of rows). Threads take the
// next one from a shared counter, so that one token and 8192 tokens both use every core. With
// weights on several NUMA nodes each node has a counter, and threads take those of the node they
// run on first. Results do not depend on which thread computes a work tile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/numa.h"
#include "cpu/kernels.h"
#include "cpu/pack.h"

namespace fusedmoe::cpu {

class GroupedGemm {
 public:
  struct WorkTile {
    std::int64_t expert = 0;
    std::int64_t first_tile = 0;
    std::int64_t first_row = 0;  // within the expert
    std::int64_t rows = 0;
    int tiles = 0;
  };

  using Task = core::NodeTasks::Task;  // a part of the weights, and a work tile's number in it

  /// expert_offsets: (num_experts + 1) row offsets; work_offsets: (parts of the weights,
  /// num_experts + 1), to be filled with the number of the part's work tiles before each expert.
  GroupedGemm(const PackedGemm& gemm, const std::int32_t* expert_offsets, std::int64_t num_experts,
              std::int64_t* work_offsets);

  /// The next work tile for a thread on this node.
  std::optional<Task> take(int node) { return tasks_.take(node); }
  WorkTile at(Task task) const;

  /// Called by every thread: computes work tiles until none is left. `job_of(work)` describes one,
  /// but for its scratch memory and prefetch.
  template <class JobOf>
  void run(void (*multiply)(const TileJob&), std::byte* scratch, JobOf job_of) {
    std::optional<Task> current = take(core::current_numa_node());
    while (current) {
      TileJob job = job_of(at(*current));
      job.scratch = scratch;
      // Kernels prefetch the next weights or, where they read tiles side by side, the beginnings of
      // the next tiles (prefetch_heads).
      const std::optional<Task> next = take(core::current_numa_node());
      if (next) {
        const WorkTile following = at(*next);
        if (following.first_row == 0) {
          job.prefetch = job_of(following).tiles;
          job.prefetch_bytes = following.tiles * gemm_.tile_bytes;
        }
      }
      multiply(job);
      current = next;
    }
  }

 private:
  std::int64_t num_rows(std::int64_t expert) const {
    return expert_offsets_[expert + 1] - expert_offsets_[expert];
  }
  std::int64_t* offsets_of(int part) const { return work_offsets_ + part * (num_experts_ + 1); }

  const PackedGemm& gemm_;
  const std::int32_t* expert_offsets_;
  std::int64_t num_experts_;
  std::int64_t* work_offsets_;
  core::NodeTasks tasks_;
};

}  // namespace fusedmoe::cpu
