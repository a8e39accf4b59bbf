// A layer of every built-in family, synthesized from its description alone, loads and runs.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/block_tensors.h"
#include "checkpoint/family.h"
#include "checkpoint/layer_loader.h"
#include "error_text.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "gtest/gtest.h"
#include "temporary_directory.h"
#include "tools/synth.h"

namespace fusedmoe::families_test {

using checkpoint::FamilyRow;

/// Sets the first key of a setting, which may be a path.
template <typename T, typename Value>
void set(nlohmann::json& config, const checkpoint::Setting<T>& setting, const Value& value) {
  if (setting.keys.empty()) return;
  std::string pointer = "/" + setting.keys.front();
  std::replace(pointer.begin(), pointer.end(), '.', '/');
  config[nlohmann::json::json_pointer(pointer)] = value;
}

std::string config_of(const FamilyRow& row) {
  nlohmann::json config{{"model_type", row.name}};
  set(config, row.num_layers, 1);
  set(config, row.hidden, 64);
  set(config, row.intermediate, 32);
  set(config, row.num_experts, 8);
  set(config, row.topk, row.weight_on_input ? 1 : 2);
  set(config, row.num_groups, row.group_score_of_two ? 1 : 2);
  set(config, row.topk_group, 1);
  set(config, row.shared_count, 1);
  set(config, row.shared_width, 32);
  return config.dump();
}

class FamilyLayerTest : public ::testing::TestWithParam<std::string> {};

TEST_P(FamilyLayerTest, IsSynthesizedLoadedAndRun) {
  const auto row = checkpoint::find_family(GetParam());
  const testing::TemporaryDirectory directory;
  SynthOptions options;
  options.config_json = config_of(*row);
  options.num_tokens = 3;
  synthesize_checkpoint(options, directory / "model");
  const Checkpoint checkpoint = Checkpoint::open(directory / "model");
  ASSERT_EQ(checkpoint.moe_layers(), std::vector<std::int64_t>{0});
  const LayerWeights weights = checkpoint.load_layer(0);
  EXPECT_EQ(weights.experts.num_experts(), 8);
  EXPECT_EQ(weights.shared_experts.has_value(), !row->shared.empty());
  LayerOptions layer;
  layer.num_threads = 1;
  const Tensor x =
      SafetensorsFile::open(directory / "model" / "input.safetensors").tensor("hidden_states");
  EXPECT_EQ(MoeLayer(weights, layer).forward(x).shape(), x.shape());
}

// Biases of the first matrix have a row for each of its outputs: half as many without a gate.
TEST(FamilyTensorsTest, StackedBiasesWithoutAGate) {
  const Family mine = Family::parse(R"({"name": "mine", "like": "nemotron_h", "experts": {
    "layouts": [{"storage": "stacked", "gate": "experts.up", "down": "experts.down",
                 "gate_up_bias": "experts.up_bias", "down_bias": "experts.down_bias"}]}})",
                                    "mine.json")
                          .back();
  const ModelConfig model = parse_model_config(config_of(*mine.row()), mine);
  checkpoint::Block block;
  for (const auto& spec : checkpoint::block_tensors(model, checkpoint::published_layout(model))) {
    block.tensors[spec.name] = {Tensor::empty(spec.shape, DType::kBF16), 0};
  }
  EXPECT_EQ(block.tensors.at("mixer.experts.up").tensor.shape(), Shape({8, 32, 64}));
  const LayerWeights weights = checkpoint::load_block(model, block, "layer 0");
  EXPECT_EQ(weights.experts.experts[7].gate.bias.shape(), Shape({32}));
  EXPECT_EQ(weights.experts.experts[7].down.bias.shape(), Shape({64}));
}

std::vector<std::string> served_families() {
  std::vector<std::string> names;
  for (const auto& row : checkpoint::family_table()) {
    if (row->refused.empty()) names.push_back(row->name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, FamilyLayerTest, ::testing::ValuesIn(served_families()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '.', '_');
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace fusedmoe::families_test
