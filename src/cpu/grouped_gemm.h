// A grouped GEMM, cut into work tiles: (expert, some weight tiles, block of rows). Threads take the
// next one from a shared counter, so that one token and 8192 tokens both use every core. Results do
// not depend on which thread computes a work tile.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

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

  /// expert_offsets: (num_experts + 1) row offsets; work_offsets: (num_experts + 1), to be filled
  /// with the number of work tiles before each expert.
  GroupedGemm(const PackedGemm& gemm, const std::int32_t* expert_offsets, std::int64_t num_experts,
              std::int64_t* work_offsets);

  /// Called by every thread: computes work tiles until none is left. `job_of(work)` describes one,
  /// but for its scratch memory and prefetch.
  template <class JobOf>
  void run(void (*multiply)(const TileJob&), std::byte* scratch, JobOf job_of) {
    const std::int64_t total = work_offsets_[num_experts_];
    for (std::int64_t current = next_.fetch_add(1); current < total;) {
      const WorkTile work = at(current);
      TileJob job = job_of(work);
      job.scratch = scratch;
      // Kernels prefetch the next weights or, where they read tiles side by side, the beginnings of
      // the next tiles (prefetch_heads).
      const std::int64_t next = next_.fetch_add(1);
      if (next < total) {
        const WorkTile following = at(next);
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
  WorkTile at(std::int64_t index) const;

  const PackedGemm& gemm_;
  const std::int32_t* expert_offsets_;
  std::int64_t num_experts_;
  std::int64_t* work_offsets_;
  std::atomic<std::int64_t> next_{0};
};

}  // namespace fusedmoe::cpu
