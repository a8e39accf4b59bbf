// Selections: what would run a configuration, or the layers of a checkpoint.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include "../unit/temporary_directory.h"
#include "capi_test.h"
#include "fusedmoe/safetensors.h"
#include "fusedmoe/simulation.h"

namespace fusedmoe::testing::selection_test {

TEST(CSelectionTest, AnswersForAGpuThatIsNotHere) {
  auto config = sized<fusedmoe_moe_config>();
  config.num_experts = 128;
  config.topk = 4;
  config.hidden = config.intermediate = 2880;
  config.scheme = "mxfp4_w4a16";
  config.activation = "swigluoai";
  fusedmoe_selection* found = nullptr;
  ASSERT_OK(fusedmoe_explain(&config, &found));
  const Handle<fusedmoe_selection> here(found);
  std::size_t small = 0, large = 0;
  ASSERT_OK(fusedmoe_selection_workspace_bytes(found, 1, 2, &small));
  ASSERT_OK(fusedmoe_selection_workspace_bytes(found, 64, 2, &large));
  EXPECT_GT(small, 0U);
  EXPECT_GT(large, small);

  config.compute_capability = 75;
  fusedmoe_selection* none = nullptr;
  EXPECT_EQ(fusedmoe_explain(&config, &none), FUSEDMOE_INVALID_ARGUMENT);
  config.device_type = FUSEDMOE_CUDA;
  ASSERT_OK(fusedmoe_explain(&config, &found));
  const Handle<fusedmoe_selection> there(found);
  ASSERT_GT(fusedmoe_selection_size(found), 0U);
  for (std::size_t i = 0; i < fusedmoe_selection_size(found); ++i) {
    auto candidate = sized<fusedmoe_candidate>();
    ASSERT_OK(fusedmoe_selection_get(found, i, &candidate));
    EXPECT_FALSE(candidate.chosen);
    if (candidate.reason != 0) {
      EXPECT_STRNE(candidate.text, "");
    }
    EXPECT_NE(std::string(fusedmoe_selection_json(found)).find(candidate.experts),
              std::string::npos);
  }
  EXPECT_NE(fusedmoe_selection_workspace_bytes(found, 1, 0, &small), FUSEDMOE_OK);
}

TEST(CSelectionTest, TellsWhatGpusLendEachOther) {
  auto config = sized<fusedmoe_moe_config>();
  config.num_experts = 8;
  config.topk = 4;
  config.hidden = config.intermediate = 512;
  config.device_type = FUSEDMOE_CUDA;
  config.compute_capability = 90;
  fusedmoe_selection* found = nullptr;
  ASSERT_OK(fusedmoe_explain(&config, &found));
  const Handle<fusedmoe_selection> selection(found);
  const auto bytes_of = [&](int32_t num_ranks, int64_t tokens, int32_t combine, int32_t dtype) {
    std::size_t bytes = 0;
    EXPECT_OK(fusedmoe_selection_peer_bytes(found, num_ranks, tokens, combine, dtype, &bytes));
    return static_cast<std::int64_t>(bytes);
  };
  const std::int64_t per_rank = bytes_of(4, 1000, 0, FUSEDMOE_NONE);
  const std::int64_t results = std::int64_t{4} * 1000 * 512;
  EXPECT_EQ(bytes_of(4, 1000, 1, FUSEDMOE_F32) - per_rank, results * 2);
  // Four slots in f32 instead of a row of each of four ranks.
  EXPECT_EQ(bytes_of(4, 1000, 2, FUSEDMOE_NONE) - per_rank, results * 4 - results * 2);
  EXPECT_EQ(bytes_of(1, 1000, 0, FUSEDMOE_NONE), 0);
  std::size_t bytes = 0;
  EXPECT_EQ(fusedmoe_selection_peer_bytes(found, 0, 1000, 0, 0, &bytes), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_STREQ(fusedmoe_last_error(), "num_ranks: was 0; must be at least 1");
  EXPECT_EQ(fusedmoe_selection_peer_bytes(found, 2, 0, 0, 0, &bytes), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_selection_peer_bytes(found, 2, 1, 3, 0, &bytes), FUSEDMOE_INVALID_ARGUMENT);
}

/// A step of two GPUs with 1000 tokens of 7168 columns each, as `costs` predict it. Null ids: each
/// token chooses experts at random.
fusedmoe_simulated_step simulate_fp8(const char* costs, const fusedmoe_tensor* topk_ids = nullptr) {
  auto config = sized<fusedmoe_moe_config>();
  config.num_experts = 4;
  config.topk = 2;
  config.hidden = 7168;
  config.intermediate = 128;
  config.scheme = "fp8_block";
  config.device_type = FUSEDMOE_CUDA;
  config.compute_capability = 90;
  fusedmoe_selection* found = nullptr;
  EXPECT_EQ(fusedmoe_explain(&config, &found), FUSEDMOE_OK);
  const Handle<fusedmoe_selection> selection(found);
  auto ranks = sized<fusedmoe_simulation>();
  ranks.num_ranks = 2;
  ranks.tokens_per_rank = 1000;
  ranks.costs = costs;
  auto step = sized<fusedmoe_simulated_step>();
  EXPECT_EQ(fusedmoe_selection_simulate(found, &ranks, topk_ids, &step), FUSEDMOE_OK);
  return step;
}

TEST(CSelectionTest, TellsHowLongRowsAreQuantizedBeforeTheyTravel) {
  RankCosts costs = default_rank_costs();
  costs.quantize = {4, 3e6, "a test"};
  const std::string json = costs.json();
  const fusedmoe_simulated_step at_random = simulate_fp8(json.c_str());
  const double bytes = 1000 * (14336 + 7392);  // bf16 is read, codes and scales are written
  EXPECT_DOUBLE_EQ(at_random.quantize_us, 4 + bytes / 3e6);
  EXPECT_GT(at_random.dispatch_us, at_random.quantize_us);
  EXPECT_EQ(at_random.balance, 1);
  const Tensor ids = Tensor::zeros({1, 2}, DType::kI32);
  const fusedmoe_tensor c_ids = to_c(ids);
  EXPECT_EQ(simulate_fp8(json.c_str(), &c_ids).balance, 2) << "all choose expert 0";
}

void check_costs_of_the_variable() {
  const TemporaryDirectory folder;
  const std::string path = folder / "costs.json";
  setenv("FUSEDMOE_RANK_COSTS", path.c_str(), 1);
  EXPECT_EQ(fusedmoe_rank_costs(), nullptr);
  EXPECT_NE(std::string(fusedmoe_last_error()).find(path), std::string::npos);
  RankCosts costs = default_rank_costs();
  costs.quantize = {4, 3e6, "a test"};
  std::ofstream(path) << costs.json();
  EXPECT_STREQ(fusedmoe_rank_costs(), costs.json().c_str());
  EXPECT_GT(simulate_fp8(nullptr).quantize_us, 4);
}

/// In a process of its own, which has read no file yet.
TEST(CSelectionDeathTest, CostsAreThoseOfTheFileOfTheVariable) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto check_and_exit = [] {
    check_costs_of_the_variable();
    std::exit(::testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(check_and_exit(), ::testing::ExitedWithCode(0), "");
}

TEST(CSelectionTest, SimulatesRanksThatAreNotHere) {
  auto config = sized<fusedmoe_moe_config>();
  config.num_experts = 4;
  config.topk = 2;
  config.hidden = config.intermediate = 128;
  fusedmoe_selection* found = nullptr;
  ASSERT_OK(fusedmoe_explain(&config, &found));
  const Handle<fusedmoe_selection> selection(found);
  const Tensor ids = Tensor::empty({2, 2}, DType::kI32);
  const std::int32_t chosen[] = {0, 2, 3, 2};
  std::copy(std::begin(chosen), std::end(chosen), ids.as<std::int32_t>());
  const fusedmoe_tensor c_ids = to_c(ids);
  auto ranks = sized<fusedmoe_simulation>();
  ranks.num_ranks = 2;
  ranks.tokens_per_rank = 1;
  auto step = sized<fusedmoe_simulated_step>();
  ASSERT_OK(fusedmoe_selection_simulate(found, &ranks, &c_ids, &step));
  EXPECT_EQ(step.inside_bytes, 2 * 128) << "the first token goes to rank 1";
  EXPECT_EQ(step.between_bytes, 0);
  EXPECT_DOUBLE_EQ(step.balance, 3 / 2.0);
  EXPECT_GT(step.dispatch_us, 0);
  EXPECT_GT(step.experts_us, 0);
  EXPECT_EQ(step.quantize_us, 0);
  const double combine_us = step.combine_us;

  ranks.placement =
      R"({"num_experts":4,"num_ranks":2,"physical_to_logical":[0,1,2,3],"rank_of":[0,1,0,1]})";
  ranks.num_hosts = 2;
  ASSERT_OK(fusedmoe_selection_simulate(found, &ranks, &c_ids, &step));
  EXPECT_EQ(step.inside_bytes, 0);
  EXPECT_EQ(step.between_bytes, 2 * 128) << "the second token goes to rank 0";
  EXPECT_DOUBLE_EQ(step.balance, 3 / 2.0);

  ranks.placement = nullptr;
  ranks.num_hosts = 0;
  ranks.costs = fusedmoe_rank_costs();
  ASSERT_OK(fusedmoe_selection_simulate(found, &ranks, &c_ids, &step));
  EXPECT_EQ(step.combine_us, combine_us);
  ranks.costs = "{}";
  EXPECT_EQ(fusedmoe_selection_simulate(found, &ranks, &c_ids, &step), FUSEDMOE_INVALID_ARGUMENT);
  ranks.costs = nullptr;
  ranks.placement = R"({"num_experts":1,"num_ranks":1,"physical_to_logical":[0],"rank_of":[0]})";
  EXPECT_EQ(fusedmoe_selection_simulate(found, &ranks, &c_ids, &step), FUSEDMOE_INVALID_ARGUMENT);
  const auto says = [](const char* text) {
    return std::string(fusedmoe_last_error()).find(text) != std::string::npos;
  };
  EXPECT_TRUE(says("placement: was of 1 experts"));
  const auto refused = [&](const fusedmoe_tensor& tensor) {
    return fusedmoe_selection_simulate(found, &ranks, &tensor, &step) == FUSEDMOE_INVALID_ARGUMENT;
  };
  ranks.placement = nullptr;
  ranks.reserved = 1;
  EXPECT_TRUE(refused(c_ids) && says("simulation.reserved"));
  ranks.reserved = 0;
  ranks.tokens_per_rank = 1LL << 40;
  EXPECT_TRUE(refused(c_ids) && says("tokens_per_rank"));
  ranks.tokens_per_rank = 1;
  fusedmoe_tensor elsewhere = c_ids;
  elsewhere.device_type = FUSEDMOE_CUDA;
  EXPECT_TRUE(refused(elsewhere) && says("topk_ids"));
  ranks.placement =
      R"({"num_experts":4,"num_ranks":2,"physical_to_logical":[0,1,2,3],"rank_of":[0,1,0,1]})";
  ranks.num_ranks = 4;
  EXPECT_TRUE(refused(c_ids) && says("simulation.num_ranks"));
}

/// Two layers, whose experts are f32 and f16.
std::string mixed_checkpoint(const TemporaryDirectory& directory) {
  constexpr std::int64_t kHidden = 32, kIntermediate = 16;
  std::map<std::string, Tensor> tensors;
  for (const int layer : {0, 1}) {
    const DType dtype = layer == 0 ? DType::kF32 : DType::kF16;
    const std::string block = "model.layers." + std::to_string(layer) + ".mlp.";
    tensors[block + "gate.weight"] = Tensor::zeros({2, kHidden}, dtype);
    for (const char* expert : {"experts.0.", "experts.1."}) {
      for (const char* matrix : {"gate_proj", "up_proj", "down_proj"}) {
        const bool down = std::string(matrix) == "down_proj";
        tensors[block + expert + matrix + ".weight"] =
            Tensor::zeros({down ? kHidden : kIntermediate, down ? kIntermediate : kHidden}, dtype);
      }
    }
  }
  const std::map<std::string, TensorView> views(tensors.begin(), tensors.end());
  const std::string path = (directory / "x.safetensors").string();
  save_safetensors(path, views, {{"config", R"({"model_type": "qwen3_moe", "num_hidden_layers": 2,
                       "hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 2,
                       "num_experts_per_tok": 1})"}});
  return path;
}

TEST(CSelectionTest, LayersOfACheckpointHaveTheirOwn) {
  const TemporaryDirectory directory;
  fusedmoe_checkpoint* opened = nullptr;
  ASSERT_OK(fusedmoe_checkpoint_open(mixed_checkpoint(directory).c_str(), nullptr, &opened));
  const Handle<fusedmoe_checkpoint> checkpoint(opened);
  fusedmoe_selection* found = nullptr;
  EXPECT_EQ(fusedmoe_explain_checkpoint(opened, 0, FUSEDMOE_CUDA, 0, 90, &found),
            FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fusedmoe_last_error()).find("f32 in layer 0, f16 in layer 1"),
            std::string::npos)
      << fusedmoe_last_error();
  const auto table = [&](std::int64_t layer) {
    EXPECT_OK(fusedmoe_explain_layer(opened, layer, FUSEDMOE_F16, FUSEDMOE_CUDA, 0, 90, &found));
    const Handle<fusedmoe_selection> selection(found);
    return std::string(fusedmoe_selection_table(found));
  };
  // sm90 has kernels for one of the two.
  EXPECT_EQ(table(0).find("*  sm90"), std::string::npos) << table(0);
  EXPECT_NE(table(1).find("*  sm90"), std::string::npos) << table(1);
  EXPECT_EQ(fusedmoe_explain_layer(opened, 7, 0, 0, 0, 0, &found), FUSEDMOE_INVALID_ARGUMENT);
}

}  // namespace fusedmoe::testing::selection_test
