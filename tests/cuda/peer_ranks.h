// Ranks whose rows go through the memory of their GPUs. One thread drives them all: it begins the
// step of every rank, then computes all, then finishes all. So no kernel waits for one that has not
// been enqueued, and one GPU is enough.
#pragma once

#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "../unit/layer_problem.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/simulation.h"
#include "gpu_ranks.h"
#include "testing/compare.h"

namespace fusedmoe::testing {

/// Of one rank. Buffers stay where they are, as graphs hold their addresses.
struct PeerBuffers {
  Tensor x, output, workspace, ids, weights;

  PeerBuffers(const MoeLayer& layer, std::int64_t tokens, std::int64_t most) {
    const MoeConfig& config = layer.config();
    x = Tensor::empty({tokens, config.hidden}, config.dtype, config.device);
    output = Tensor::empty(x.shape(), config.dtype, config.device);
    const std::size_t bytes =
        std::max(layer.workspace_bytes(most), layer.workspace_bytes(most, true));
    workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, config.device);
    ids = Tensor::empty({tokens, config.topk}, DType::kI32, config.device);
    weights = Tensor::empty({tokens, config.topk}, DType::kF32, config.device);
    // NaN: a row that nobody fetched must not count.
    for (const Tensor& written : {output, workspace}) {
      fill_bytes(written, 0xff, Stream{config.device});
    }
  }
  void fill(const Tensor& rows) const { copy(rows, x, Stream{x.device()}); }
  Workspace scratch() const {
    return {workspace.data(), static_cast<std::size_t>(workspace.numel())};
  }
};

/// By all layers of this process, of which none may have been made.
inline void use_rank_costs(const RankCosts& costs) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("fusedmoe-rank-costs-" + std::to_string(::getpid()) + ".json");
  std::ofstream(path) << costs.json();
  setenv("FUSEDMOE_RANK_COSTS", path.c_str(), 1);
  rank_costs();  // reads it, once
  unsetenv("FUSEDMOE_RANK_COSTS");
  std::filesystem::remove(path);
}

/// The same, of rows that are quantized wherever they can. `floor_us`: what it costs, where a byte
/// takes the link a microsecond.
inline void bring_rows_beside_experts(double floor_us) {
  RankCosts costs = default_rank_costs();
  costs.peer_memory.dispatch.bytes_per_us = 1;
  costs.quantize = {1e-3, 1e6, ""};
  costs.beside_experts = {floor_us, 1e6, ""};
  use_rank_costs(costs);
}

class PeerRanks {
 public:
  using Weights = std::function<LayerWeights(int rank)>;
  using Options = std::function<void(int rank, LayerOptions& options)>;

  /// On so many GPUs, in turns. Only experts that move are messages. With the variable
  /// FUSEDMOE_TEST_BESIDE rows come beside the experts wherever they can.
  explicit PeerRanks(int size, int gpus = 1, std::chrono::milliseconds timeout = kPatient)
      : communicators(static_cast<std::size_t>(size)) {
    if (std::getenv("FUSEDMOE_TEST_BESIDE")) bring_rows_beside_experts(1);
    const auto control = make_thread_control_plane();
    const auto planes = make_thread_data_planes(size, Device{DeviceKind::kCuda, 0});
    run_ranks(size, [&](int rank) {
      const CommunicatorOptions options{timeout, Device{DeviceKind::kCuda, rank % gpus}, true,
                                        true};
      communicators[rank] =
          std::make_shared<Communicator>(rank, size, control, planes[rank], options);
    });
  }
  /// As nothing grows behind the first forward.
  void reserve(std::size_t bytes) const {
    run_ranks(size(), [&](int rank) { EXPECT_EQ(communicators[rank]->map_peers(bytes), ""); });
  }
  int size() const { return static_cast<int>(communicators.size()); }

  /// A layer on every rank.
  std::vector<std::unique_ptr<MoeLayer>> make(
      const LayerWeights& weights, std::int64_t most, bool batch_invariant = false,
      const Options& set = [](int, LayerOptions&) {}) const {
    std::vector<std::unique_ptr<MoeLayer>> layers(communicators.size());
    run_ranks(size(), [&](int rank) {
      LayerOptions options = options_of(communicators[rank]->device(), batch_invariant);
      options.require += "+all2all";
      options.ranks.communicator = communicators[rank];
      options.ranks.max_tokens_per_rank = most;
      set(rank, options);
      layers[rank] = std::make_unique<MoeLayer>(weights, options);
    });
    return layers;
  }

  Communicators communicators;
};

inline std::string rows_travel(const MoeLayer& layer) {
  return Plan::parse(layer.plan_json()).rows_travel;
}
/// The number of tokens that they name behind `before`; 0: they do not.
inline std::int64_t tokens_behind(const MoeLayer& layer, std::string_view before) {
  const std::string text = rows_travel(layer);
  const std::size_t found = text.find(before);
  std::int64_t tokens = 0;
  if (found != std::string::npos) {
    const char* const number = text.data() + found + before.size();
    std::from_chars(number, text.data() + text.size(), tokens);
  }
  return tokens;
}
/// All of them, before the experts or beside.
inline bool rows_travel_by_peers(const MoeLayer& layer) {
  const std::string text = rows_travel(layer);
  return text == "peer memory" || text.starts_with("peer memory; quantized from ") ||
         text.starts_with("peer memory; beside the experts from ");
}

/// One step of all ranks, enqueued. `routed`: with the ids and weights of the buffers.
inline void run_all(const std::vector<std::unique_ptr<MoeLayer>>& layers,
                    const std::vector<PeerBuffers>& buffers, const ForwardOptions& options,
                    bool routed = false) {
  std::vector<MoeLayer::Step> steps;
  for (std::size_t r = 0; r < layers.size(); ++r) {
    const PeerBuffers& own = buffers[r];
    steps.push_back(routed ? layers[r]->begin_routed(own.x, {own.ids, own.weights}, own.output,
                                                     own.scratch(), options)
                           : layers[r]->begin(own.x, own.output, own.scratch(), options));
  }
  for (MoeLayer::Step& step : steps) step.compute();
  for (MoeLayer::Step& step : steps) step.finish();
}

inline void wait_for_all(const std::vector<std::unique_ptr<MoeLayer>>& layers) {
  for (const auto& layer : layers) synchronize(Stream{layer->config().device});
}

/// One GPU for all ranks, or all GPUs.
inline std::vector<int> gpu_counts() {
  std::vector<int> counts{1};
  if (cuda_device_count() > 1) counts.push_back(cuda_device_count());
  return counts;
}

/// Against one rank: to the bit, or within what a rounding on each rank does.
inline void expect_as_one(const Tensor& output, const Tensor& expected, bool exact, int rank) {
  if (exact) {
    EXPECT_TRUE(bitwise_equal(output, expected)) << "rank " << rank;
  } else {
    EXPECT_LE(compare(output, expected).max_norm_relative, kTolerance) << "rank " << rank;
  }
}

}  // namespace fusedmoe::testing
