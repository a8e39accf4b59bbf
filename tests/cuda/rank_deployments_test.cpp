// Layers on several ranks on GPUs: ranks that share slices, experts or tokens, experts in other
// places than the usual ones, with exact and with fixed sizes, and golden vectors.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../ranks/rank_layers.h"
#include "../unit/golden.h"
#include "gpu_ranks.h"

namespace fusedmoe::testing {
namespace {

/// A way to run a layer on ranks.
struct RankRun {
  std::string name;
  RankCase how;
  std::optional<DType> combine_dtype = {};
  bool strided = false;  ///< hidden states are columns of a wider tensor
};

LayerOptions gpu_options(const RankRun& run, const std::shared_ptr<Communicator>& communicator) {
  LayerOptions options = rank_options(run.how, DType::kBF16, kTokens, communicator);
  options.device = communicator->device();
  options.ranks.combine_dtype = run.combine_dtype;
  return options;
}

/// Which ranks have the same tokens: those with the same owner.
int owner_of(const RankRun& run, int rank) {
  if (!run.how.deployment || run.how.deployment->sequence_parallel) return rank;
  return rank / run.how.deployment->tp_size;
}

/// Outputs of one rank for several numbers of tokens.
using Outputs = std::vector<Tensor>;

/// Runs a layer on this rank, and compares it with one GPU: bit for bit if it is batch-invariant
/// and no rank rounds a part of a sum.
Outputs expect_as_one_on_rank(const RankRun& run, const LayerWeights& weights,
                              const std::shared_ptr<Communicator>& communicator) {
  SCOPED_TRACE(run.name);
  const int rank = communicator->rank(), owner = owner_of(run, rank);
  const Device device = communicator->device();
  const LayerOptions options = gpu_options(run, communicator);
  const MoeLayer alone(weights, options_of(device, run.how.batch_invariant));
  const MoeLayer layer(run.how.deployment ? local_weights(weights, parallel_of(options)) : weights,
                       options);
  EXPECT_EQ(layer.selection().prepare_finalize->name(), run.how.transport);
  const bool equal_bits = run.how.batch_invariant && !run.how.deployment;
  Outputs outputs;
  // As many as there can be, so that rows that go to all are sent from where they are; fewer; one
  // on one rank; none at all.
  for (const std::int64_t tokens :
       {kTokens, tokens_of(owner), std::int64_t{owner == 0 ? 1 : 0}, std::int64_t{0}}) {
    constexpr std::int64_t kGap = 32;
    const std::int64_t gap = run.strided ? kGap : 0;
    const Tensor all =
        to_device(random_tensor(DType::kBF16, {tokens, kHidden + 2 * gap}, 1, 70 + owner), device);
    const TensorView x = all.slice(1, gap, gap + kHidden);
    outputs.push_back(forward_there(layer, x, kTokens, nullptr, run.how.fixed_sizes));
    EXPECT_TRUE(bitwise_equal(forward_there(layer, x, kTokens, nullptr, run.how.fixed_sizes),
                              outputs.back()))
        << "rank " << rank << ", " << tokens << " tokens, again";
    const Tensor expected = forward_there(alone, x, 0);
    if (equal_bits) {
      EXPECT_TRUE(bitwise_equal(outputs.back(), expected))
          << "rank " << rank << ", " << tokens << " tokens";
    } else {
      EXPECT_LE(compare(outputs.back(), expected).max_norm_relative, kTolerance)
          << "rank " << rank << ", " << tokens << " tokens";
    }
  }
  communicator->barrier();
  return outputs;
}

/// All of them on the same communicators. Element [i][r]: what run i gave on rank r.
std::vector<std::vector<Outputs>> expect_as_one(const Setting& setting, const LayerWeights& weights,
                                                const std::vector<RankRun>& runs) {
  SCOPED_TRACE(setting.name());
  std::vector<std::vector<Outputs>> outputs(runs.size(), std::vector<Outputs>(setting.size));
  Ranks ranks(setting);
  run_ranks(setting.size, [&](int rank) {
    const auto communicator = ranks.join(rank);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      outputs[i][rank] = expect_as_one_on_rank(runs[i], weights, communicator);
    }
  });
  return outputs;
}

/// Deployments of so many ranks in which some share slices, experts or tokens.
std::vector<RankRun> deployments(int size) {
  const struct {
    const char* transport;
    Deployment deployment;
    bool fixed_sizes = false, monolithic = false;
  } rows[] = {
      {"no_ep", {.tp_size = 2}},
      {"no_ep", {.tp_size = 2, .expert_parallel = true}},
      {"no_ep", {.tp_size = 4}},
      {"no_ep", {.tp_size = 4, .expert_parallel = true}},
      {"allgather_reducescatter", {.dp_size = 2}},
      {"allgather_reducescatter", {.dp_size = 2}, true},
      {"allgather_reducescatter", {.dp_size = 2}, false, true},
      {"allgather_reducescatter", {.dp_size = 2, .expert_parallel = true}, true},
      {"all2all", {.dp_size = 2, .expert_parallel = true}, true},
      {"allgather_reducescatter", {.tp_size = 2, .dp_size = 2}},
      {"allgather_reducescatter", {.tp_size = 2, .dp_size = 2}, true},
      {"allgather_reducescatter", {.tp_size = 2, .dp_size = 2, .expert_parallel = true}},
      {"allgather_reducescatter", {.tp_size = 2, .dp_size = 2, .expert_parallel = true}, true},
      {"allgather_reducescatter",
       {.tp_size = 2, .dp_size = 2, .expert_parallel = true},
       false,
       true},
      {"allgather_reducescatter",
       {.tp_size = 2, .dp_size = 2, .expert_parallel = true, .sequence_parallel = true}},
      {"allgather_reducescatter",
       {.tp_size = 2, .dp_size = 2, .expert_parallel = true, .sequence_parallel = true},
       true},
      {"all2all", {.tp_size = 2, .dp_size = 2, .expert_parallel = true}},
      {"all2all", {.tp_size = 2, .dp_size = 2, .expert_parallel = true}, true},
      {"all2all", {.tp_size = 2, .dp_size = 2, .expert_parallel = true, .sequence_parallel = true}},
      {"all2all",
       {.tp_size = 2, .dp_size = 2, .expert_parallel = true, .sequence_parallel = true},
       true},
  };
  std::vector<RankRun> runs;
  for (const auto& row : rows) {
    const Deployment& deployment = row.deployment;
    if (deployment.tp_size * deployment.dp_size != size) continue;
    RankRun run{std::string(row.transport) + " tp " + std::to_string(deployment.tp_size) + " dp " +
                std::to_string(deployment.dp_size)};
    if (deployment.expert_parallel) run.name += " ep";
    if (deployment.sequence_parallel) run.name += " sequence_parallel";
    if (row.fixed_sizes) run.name += " fixed sizes";
    if (row.monolithic) run.name += " monolithic";
    run.how.size = size;
    run.how.transport = row.transport;
    run.how.experts = "sm90";
    run.how.deployment = deployment;
    run.how.fixed_sizes = row.fixed_sizes;
    run.how.monolithic = row.monolithic;
    runs.push_back(run);
  }
  return runs;
}

/// Ranks that have added their sums of the same tokens have the same bits.
void expect_equal_in_groups(const RankRun& run, const std::vector<Outputs>& outputs) {
  const Deployment& deployment = *run.how.deployment;
  if (run.how.transport == "all2all" || deployment.sequence_parallel) return;
  for (std::size_t rank = 0; rank < outputs.size(); ++rank) {
    const Outputs& first = outputs[rank / deployment.tp_size * deployment.tp_size];
    ASSERT_EQ(outputs[rank].size(), first.size());
    for (std::size_t step = 0; step < first.size(); ++step) {
      EXPECT_TRUE(bitwise_equal(outputs[rank][step], first[step])) << "rank " << rank;
    }
  }
}

TEST(CudaRankDeploymentsTest, EachGivesTheOutputOfOneGpu) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const char* scheme : {"bf16", "mxfp4_w4a16"}) {
    SCOPED_TRACE(scheme);
    Case spec = small_case(scheme);
    spec.bias = true;
    const LayerWeights weights = make_layer_weights({spec});
    for (const Setting& setting : all_settings()) {
      const std::vector<RankRun> runs = deployments(setting.size);
      if (runs.empty()) continue;
      const auto outputs = expect_as_one(setting, weights, runs);
      for (std::size_t i = 0; i < runs.size(); ++i) {
        SCOPED_TRACE(setting.name() + " " + runs[i].name);
        expect_equal_in_groups(runs[i], outputs[i]);
      }
    }
  }
}

/// Placements in which ids of rows change on their way, or ranks have no experts.
std::vector<std::pair<std::string, ExpertPlacement>> placements(int size) {
  constexpr std::int32_t kExperts = 13;
  std::vector<std::int32_t> backwards, on_last(kExperts, size - 1), copied, spread;
  for (std::int32_t e = 0; e < kExperts; ++e) backwards.push_back(kExperts - 1 - e);
  for (std::int32_t p = 0; p < kExperts + 4; ++p) {
    copied.push_back(p < kExperts ? p : p % 2 * 7);
    spread.push_back(p * 3 % size);
  }
  return {{"round robin", ExpertPlacement::round_robin(kExperts, size)},
          {"redundant experts", ExpertPlacement::linear(kExperts, size, 2 * size + 1)},
          {"all on the last rank", ExpertPlacement(kExperts, size, backwards, on_last)},
          {"copies of two", ExpertPlacement(kExperts, size, copied, spread)}};
}

TEST(CudaRankDeploymentsTest, PlacementsAndReplicasGiveTheOutputOfOneGpu) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  for (const Setting& setting : settings()) {
    std::vector<RankRun> runs;
    for (const auto& [name, placement] : placements(setting.size)) {
      for (const char* transport : {"all2all", "allgather_reducescatter"}) {
        RankRun run{name + " " + transport};
        run.how = {.size = setting.size, .transport = transport, .placement = placement};
        run.how.experts = "sm90";
        RankRun nearest = run;
        nearest.name += " nearest, batch-invariant";
        nearest.how.replica_choice = ReplicaChoice::kNearest;
        nearest.how.batch_invariant = true;
        run.name += " fixed sizes";
        run.how.fixed_sizes = true;
        runs.insert(runs.end(), {nearest, run});
      }
    }
    expect_as_one(setting, weights, runs);
  }
}

/// Sums in f32, and rows between which something lies: with fixed sizes neither a rank's own rows
/// nor the sums of a data plane are then taken as they are.
TEST(CudaRankDeploymentsTest, SumsInF32AndStridedRowsGiveTheOutputOfOneGpu) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const char* scheme : {"bf16", "mxfp4_w4a16"}) {
    SCOPED_TRACE(scheme);
    const LayerWeights weights = make_layer_weights({small_case(scheme)});
    for (const Setting& setting : settings()) {
      std::vector<RankRun> runs;
      for (const char* transport : {"all2all", "allgather_reducescatter"}) {
        for (const bool fixed_sizes : {false, true}) {
          RankRun run{std::string(transport) + (fixed_sizes ? " fixed sizes" : "")};
          run.how = {.size = setting.size, .transport = transport, .fixed_sizes = fixed_sizes};
          run.how.experts = "sm90";
          RankRun sums = run, rows = run;
          sums.name += " f32 sums";
          sums.combine_dtype = DType::kF32;
          rows.name += " strided rows";
          rows.strided = true;
          runs.insert(runs.end(), {sums, rows});
        }
        RankRun invariant{std::string(transport) + " strided rows, batch-invariant"};
        invariant.how = {.size = setting.size, .transport = transport, .batch_invariant = true};
        invariant.how.experts = "sm90";
        invariant.strided = true;
        runs.push_back(invariant);
      }
      expect_as_one(setting, weights, runs);
    }
  }
}

/// Each rank loads its part of a checkpoint and has a part of the tokens.
TEST(CudaRankDeploymentsTest, GoldenVectors) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  constexpr std::int64_t kMost = 7;
  const Setting setting{2, false};
  for (const char* name : {"gpt_oss_mxfp4", "deepseek_v3"}) {
    const Checkpoint checkpoint = Checkpoint::open(golden_path(name));
    const SafetensorsFile file = SafetensorsFile::open(golden_path(name));
    const Golden golden(file, kMost);
    Ranks ranks(setting);
    run_ranks(setting.size, [&](int rank) {
      const auto communicator = ranks.join(rank);
      const std::int64_t begin = kMost * rank / setting.size;
      const std::int64_t end = kMost * (rank + 1) / setting.size;
      const Tensor x = Tensor::empty({end - begin, golden.hidden_states.size(1)}, DType::kBF16);
      convert(golden.hidden_states.slice(0, begin, end), x);
      for (const char* transport : {"all2all", "allgather_reducescatter"}) {
        for (const bool fixed_sizes : {false, true}) {
          RankRun run{transport};
          run.how = {.size = setting.size, .transport = transport, .fixed_sizes = fixed_sizes};
          run.how.experts = "sm90";
          LayerOptions options = gpu_options(run, communicator);
          options.ranks.max_tokens_per_rank = kMost;
          options.parallel = parallel_of(options);
          const MoeLayer layer(
              checkpoint.load_layer(checkpoint.moe_layers().front(), options.parallel), options);
          // The bound of one GPU, and one more rounding of the parts of a sum.
          EXPECT_LE(compare(forward(layer, x, kMost, nullptr, fixed_sizes),
                            golden.output.slice(0, begin, end))
                        .max_norm_relative,
                    2e-2)
              << name << " " << transport << ", rank " << rank;
        }
      }
      communicator->barrier();
    });
  }
}

}  // namespace
}  // namespace fusedmoe::testing
