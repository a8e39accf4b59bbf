// fusedmoe run: its options, and what runs the layer, on one rank or on several.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fusedmoe/layer.h"
#include "load.h"
#include "ranks.h"
#include "sources.h"

namespace fusedmoe {
class Checkpoint;
}

namespace fusedmoe::cli {

struct RunOptions {
  std::string family, scheme;
  std::string checkpoint, output;
  InputSource input;
  std::string device = "cpu";
  std::string experts;
  std::string dtype = "bf16";
  std::int64_t layer = -1;
  int threads = 0;
  int repeat = 1;
  std::int64_t check_rows = 0;
  std::int64_t max_workspace_mib = 0;
  std::string plan, record_routing, replay_routing;
  bool hooks = false, monolithic = false, batch_invariant = false;
  bool load = false, load_chart = false, heat_map = false;
  bool json = false, force = false;
  RankOptionsOf ranks;
};

/// Everything a forward leaves behind, on the device of the layer until it is fetched.
struct RunResults {
  Tensor output;         // (num_tokens, hidden)
  Tensor router_logits;  // (num_tokens, num_choices) f32; undefined when the routing was replayed
  RecordedRouting routing;  // (num_tokens, topk)
  Tensor expert_load;       // (num_choices) i32; undefined when replayed, or on several ranks
  bool replayed = false;
  LoadStatistics load;
  double shared_with_previous = 0;                   // see shared_with_previous()
  std::vector<double> times_ms;                      // first that of the cold forward
  std::string plan_line, experts, prepare_finalize;  // of the layer, or of rank 0's

  void describe(const MoeLayer& layer);
  /// Of the forwards after the first, if there are any.
  std::optional<double> warm_ms() const;
  /// Brings the tensors to host memory.
  void fetch();
};

/// The layer, or the part of one rank; with --scheme its activations are quantized by other rules.
LayerWeights load_weights(const RunOptions& options, const Checkpoint& checkpoint,
                          std::int64_t index, const ParallelConfig& parallel = {});

/// Warns of the layer's experts that have no input scales of their own.
void warn_of_uncalibrated(const Checkpoint& checkpoint, std::int64_t index);

/// A layer of these weights on one device.
RunResults forward(const RunOptions& options, const LayerWeights& weights, const Tensor& x);
/// The layer on ranks, each of which loads what it holds. Nothing where rank 0 is another process.
RunResults forward_on_ranks(const RunOptions& options, const Checkpoint& checkpoint,
                            std::int64_t index, const Tensor& x);

}  // namespace fusedmoe::cli
