// How long one MoE layer takes on ranks that need not be here, from what a few of them were
// measured to cost.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fusedmoe/export.h"
#include "fusedmoe/selection.h"

namespace fusedmoe {

/// So much before the first byte comes, and a rate for the rest: of all that leaves a rank.
struct LinkCost {
  double floor_us = 0;
  double bytes_per_us = 1;
  /// Who says so: "bench --ep 2 on NVIDIA H200".
  std::string source;

  double us(double bytes) const { return bytes > 0 ? floor_us + bytes / bytes_per_us : 0; }
};

/// Of experts: the weights that they read, and then what they multiply.
struct ExpertsCost {
  double bytes_per_us = 1;
  double flops_per_us = 1;
  std::string source;

  double us(double weight_bytes, double flops) const {
    return weight_bytes / bytes_per_us + flops / flops_per_us;
  }
};

/// How rows come to other ranks and back.
enum class RowPath {
  kPeerMemory,  ///< GPUs of one host, which read each other's memory
  kAll2all,     ///< messages; on CPUs also rows that are read in place
  kAllgather,   ///< messages to all ranks that have experts
};
/// "peer_memory", "all2all", "allgather_reducescatter"
FUSEDMOE_API std::string_view name(RowPath path);

/// Of rows on a path: there, and back by each combine mode.
struct RowCosts {
  LinkCost dispatch, per_rank, per_slot;
  const LinkCost& combine(CombineMode mode) const {
    return mode == CombineMode::kPerSlot ? per_slot : per_rank;
  }
};

/// What ranks cost: a JSON file that `bench --ep --calibrate` writes.
struct FUSEDMOE_API RankCosts {
  RowCosts peer_memory, all2all, allgather_reducescatter;  ///< between ranks of one host
  LinkCost between_hosts;  ///< either way; of one rank, which has a network card of its own
  /// How much longer the experts of a rank take if they begin while a few multiprocessors of its
  /// GPU still bring their rows. The bytes are those of all rows that the rank computes, in the
  /// form in which they travel.
  LinkCost beside_experts;
  /// What a GPU takes to quantize its rows before they travel: of bytes that it reads and writes.
  LinkCost quantize;
  ExpertsCost experts;

  const RowCosts& of(RowPath path) const;
  std::string json() const;
  /// Inverse. A path that is missing, beside_experts and quantize cost what default_rank_costs()
  /// says; one path at least must be there. Throws Error naming what else is missing, or no
  /// positive number.
  static RankCosts parse(std::string_view json);
};

/// H200s of one host, and between hosts what others publish.
FUSEDMOE_API RankCosts default_rank_costs();
/// Those of the file that the environment variable FUSEDMOE_RANK_COSTS names, read once; else
/// default_rank_costs(). Layers choose by them how their rows travel. Throws Error for a file that
/// cannot be read.
FUSEDMOE_API const RankCosts& rank_costs();

struct SimulatedLayer {
  ExpertPlacement placement;
  RowPath path = RowPath::kAll2all;
  CombineMode combine = CombineMode::kPerRank;
  int num_hosts = 1;  ///< of equally many ranks
  std::int64_t tokens_per_rank = 0;
  double sent_row_bytes = 0, returned_row_bytes = 0;  ///< as they travel
  /// Of a row that a GPU quantizes before it travels, at RankCosts::quantize; 0: it cannot.
  double quantized_row_bytes = 0;
  /// It does so in any case. Else where rows go through peer memory, if that is predicted to be
  /// faster for ids at random.
  bool quantizes = false;
  bool fixed_sizes = false;  ///< messages bring each rank's rows to every rank that has experts
  double expert_bytes = 0;   ///< weights of one expert
  double row_flops = 0;      ///< of one row in one expert
  /// A row goes to each expert, as other libraries' batched formats have it, not once to each rank.
  bool to_each_expert = false;

  /// Ranks of several hosts send messages inside them, too.
  RowPath path_inside() const {
    return num_hosts > 1 && path == RowPath::kPeerMemory ? RowPath::kAll2all : path;
  }
};

/// A layer of the configuration that was asked about, with the chosen experts: all but
/// tokens_per_rank and num_hosts. Rows of up to 16 GPUs go through peer memory. Throws Error where
/// nothing fits, or the placement is of another number of experts.
FUSEDMOE_API SimulatedLayer simulated_layer(const Selection& selection, ExpertPlacement placement);

/// Each number that of the rank with most.
struct SimulatedStep {
  double dispatch_us = 0, experts_us = 0, combine_us = 0;
  double quantize_us = 0;  ///< of dispatch_us, if rows are quantized before they travel; else 0
  double inside_bytes = 0, between_bytes = 0;  ///< rows of dispatch that leave or reach a rank
  double balance = 0;                          ///< rows of the busiest rank's experts over the mean
  double step_us() const { return dispatch_us + experts_us + combine_us; }
};

/// topk_ids: (num_tokens, topk) i32 on the host, global ids or -1; the tokens of the ranks one
/// behind the other, again from the first where there are not enough. Of copies of an expert a
/// token takes one as a layer does. Inside a host and between hosts rows travel at the same time.
/// Throws Error unless the hosts share the ranks evenly, and for ids out of range.
FUSEDMOE_API SimulatedStep simulate(const RankCosts& costs, const SimulatedLayer& layer,
                                    const TensorView& topk_ids);
/// The same for ids that are not known: what each rank sends, gets and multiplies on average, where
/// every token chooses `topk` physical experts at random.
FUSEDMOE_API SimulatedStep simulate(const RankCosts& costs, const SimulatedLayer& layer,
                                    std::int64_t topk);

}  // namespace fusedmoe
