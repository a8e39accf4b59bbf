// A grouped GEMM as tasks: (expert, group of tiles, block of rows), claimed from a counter, so that
// one token and 8192 tokens both use every core. Who runs a task does not change its bits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/pack.h"

namespace fusedmoe::cpu {

class GroupedGemm {
 public:
  struct Task {
    std::int64_t expert = 0;
    std::int64_t first_tile = 0;
    std::int64_t first_row = 0;  // within the expert
    std::int64_t rows = 0;
    int tiles = 0;
  };

  /// expert_offsets: (num_experts + 1) row offsets; task_offsets: (num_experts + 1) to be filled.
  GroupedGemm(const PackedGemm& gemm, const std::int32_t* expert_offsets, std::int64_t num_experts,
              std::int64_t* task_offsets);

  /// Called by every thread: runs tasks until none is left. `job_of(task)` describes one task
  /// without its scratch memory and prefetch.
  template <class JobOf>
  void run(void (*multiply)(const TileJob&), std::byte* scratch, JobOf job_of) {
    const std::int64_t total = task_offsets_[num_experts_];
    for (std::int64_t current = next_.fetch_add(1); current < total;) {
      const Task task = at(current);
      TileJob job = job_of(task);
      job.scratch = scratch;
      // Many rows leave time to prefetch the next weights; one or two prefetch the heads of the
      // next streams (stream_tiles). Between them a claim ahead would only unbalance the end.
      constexpr std::int64_t kComputeBoundRows = 5, kStreamedRows = 2;
      const bool ahead = task.rows >= kComputeBoundRows || task.rows <= kStreamedRows;
      const std::int64_t next = ahead ? next_.fetch_add(1) : total;
      if (next < total) {
        const Task following = at(next);
        if (following.first_row == 0) {
          job.prefetch = job_of(following).tiles;
          job.prefetch_bytes = following.tiles * gemm_.tile_bytes;
        }
      }
      multiply(job);
      current = ahead ? next : next_.fetch_add(1);
    }
  }

 private:
  std::int64_t num_rows(std::int64_t expert) const {
    return expert_offsets_[expert + 1] - expert_offsets_[expert];
  }
  Task at(std::int64_t index) const;

  const PackedGemm& gemm_;
  const std::int32_t* expert_offsets_;
  std::int64_t num_experts_;
  std::int64_t* task_offsets_;
  std::atomic<std::int64_t> next_{0};
};

}  // namespace fusedmoe::cpu
