// Who the ranks of a layer are and what they share (ParallelConfig), and which rank holds which
// expert (ExpertPlacement).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/export.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// How an engine runs on its ranks. Ranks are numbered flat: dp_rank * tp_size + tp_rank.
struct Deployment {
  int tp_size = 1;
  int dp_size = 1;
  bool expert_parallel = false;  ///< share whole experts instead of slices of every expert
  /// The tensor-parallel ranks of a data-parallel group split its tokens among themselves, instead
  /// of all having the same ones.
  bool sequence_parallel = false;
  int rank = 0;
};

/// Sizes of the parallel groups a layer lives in, at least 1. The layer is on tp_size * ep_size
/// ranks, one of the two being 1.
struct FUSEDMOE_API ParallelConfig {
  int tp_size = 1;  ///< ranks that each hold a slice of every expert's intermediate size
  int dp_size = 1;  ///< groups of ranks; each group has tokens of its own
  int ep_size = 1;  ///< ranks that each hold some of the experts
  int ep_rank = 0;
  int tp_rank = 0;
  bool sequence_parallel = false;

  static ParallelConfig of(const Deployment& deployment);
  bool operator==(const ParallelConfig&) const = default;
  /// Throws Error naming the member.
  void validate() const;

  int num_ranks() const { return tp_size * ep_size; }
  int rank() const { return ep_size > 1 ? ep_rank : tp_rank; }
  /// Ranks of one data-parallel group.
  int group_size() const { return num_ranks() / dp_size; }
  /// Ranks have different tokens, so that rows must travel.
  bool needs_dispatch() const { return dp_size > 1 || sequence_parallel; }
  /// Ranks that an all-gather of tokens runs over: those at the same place in each data-parallel
  /// group, or all with sequence parallelism.
  std::vector<int> gather_group() const;
  /// Ranks whose outputs still have to be added when finalize has ended; this rank alone where the
  /// output is complete. `dispatched`: what brought the rows back, see the enumerators.
  enum class Combine {
    kNone,           ///< nobody: rows did not travel
    kReduceScatter,  ///< sums over gather_group()
    kComplete,       ///< sums over all ranks, as an all-to-all has it
  };
  std::vector<int> reduce_group(Combine combine) const;
};

/// Which slice of a size a rank of tensor parallelism holds.
struct Slice {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
  bool operator==(const Slice&) const = default;
};
/// Cuts `size` into num_ranks slices on multiples of `unit` (a scale group); the first ranks have
/// one unit more where it does not divide. Throws Error where a rank would get nothing.
FUSEDMOE_API Slice slice_of(std::int64_t size, std::int64_t unit, int num_ranks, int rank);

/// Which of an expert's replicas a token goes to.
enum class ReplicaChoice {
  kHash,  ///< by a hash of the token's number: the same on every rank
  /// One on the token's own rank, else by the hash. By the hash alone where several ranks have the
  /// token and each adds what it computes.
  kNearest,
};

/// Which rank holds which experts. Physical experts are what ranks hold; each is a copy of a
/// logical one, which the router chooses. Ranks may hold any number, also none.
class FUSEDMOE_API ExpertPlacement {
 public:
  ExpertPlacement() = default;
  /// Physical expert p is a copy of logical expert physical_to_logical[p] and lies on rank
  /// rank_of[p]; the physical experts of a rank are its local ones in ascending order. Throws Error
  /// unless every one of num_experts logical experts is somewhere.
  ExpertPlacement(std::int64_t num_experts, int num_ranks,
                  std::vector<std::int32_t> physical_to_logical, std::vector<std::int32_t> rank_of);

  /// Consecutive experts; the first num_experts % num_ranks ranks have one more. With
  /// `redundant` copies of the experts 0, 1, ... behind them.
  static ExpertPlacement linear(std::int64_t num_experts, int num_ranks,
                                std::int64_t redundant = 0);
  /// Expert e on rank e % num_ranks.
  static ExpertPlacement round_robin(std::int64_t num_experts, int num_ranks);

  /// {"num_experts": 4, "num_ranks": 2, "physical_to_logical": [...], "rank_of": [...]}
  std::string json() const;
  /// Inverse. Throws Error naming what is missing or wrong.
  static ExpertPlacement parse(std::string_view json);

  std::int64_t num_experts() const { return num_experts_; }  ///< logical
  std::int64_t num_physical() const {
    return static_cast<std::int64_t>(physical_to_logical_.size());
  }
  int num_ranks() const { return num_ranks_; }
  bool has_replicas() const { return num_physical() > num_experts_; }
  const std::vector<std::int32_t>& physical_to_logical() const { return physical_to_logical_; }
  const std::vector<std::int32_t>& rank_of() const { return rank_of_; }

  /// Logical experts of a rank, in the order of its local ones.
  std::vector<std::int32_t> local_experts(int rank) const;
  /// (num_experts) i32: the rank's local expert, or -1. With replicas only an expert's first copy
  /// counts, so that over all ranks every expert is named once.
  Tensor expert_map(int rank) const;
  /// Where an expert lies: rank and local number, by ascending physical number.
  struct Replica {
    std::int32_t rank, local;
    bool operator==(const Replica&) const = default;
  };
  std::vector<Replica> replicas(std::int64_t expert) const;
  /// Physical experts grouped by their logical one: those of expert e are
  /// physical[offsets[e]] to physical[offsets[e + 1] - 1]. Of each physical expert its local
  /// number.
  struct Table {
    std::vector<std::int32_t> offsets, physical, local;
  };
  Table table() const;

  bool operator==(const ExpertPlacement&) const = default;

 private:
  std::int64_t num_experts_ = 0;
  int num_ranks_ = 0;
  std::vector<std::int32_t> physical_to_logical_;
  std::vector<std::int32_t> rank_of_;
};

}  // namespace fusedmoe
