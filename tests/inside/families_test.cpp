// A layer of every built-in family, synthesized from its description alone, loads and runs.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/family.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "gtest/gtest.h"
#include "safetensors_bytes.h"
#include "tools/synth.h"

namespace fusedmoe {
namespace {

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

std::vector<std::string> served_families() {
  std::vector<std::string> names;
  for (const auto& row : checkpoint::family_table()) {
    if (row->refused.empty()) names.push_back(row->name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, FamilyLayerTest, ::testing::ValuesIn(served_families()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace fusedmoe
