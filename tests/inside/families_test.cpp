// A layer of every built-in family, synthesized from its description alone, loads and runs.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

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

std::string config_of(const FamilyRow& row, const nlohmann::json& more = nlohmann::json::object()) {
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
  config.update(more, true);
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

std::string error_with(const std::string& family, const nlohmann::json& keys) {
  return testing::error_text(
      [&] { parse_model_config(config_of(*checkpoint::find_family(family), keys)); });
}

// What published configs say beside what their family reads, with the values that they have.
TEST(UnknownKeysTest, PublishedKeysAreAccepted) {
  const nlohmann::json every{{"output_router_logits", false},
                             {"router_aux_loss_coef", 0.001},
                             {"router_z_loss_coef", 0.001},
                             {"_experts_implementation", "eager"},
                             {"moe_layer_freq", 1},
                             {"first_k_dense_replace", 1},
                             {"top_k", 50},
                             {"output_scores", false},
                             {"attn_output_gate", true},
                             {"final_logit_softcapping", 30.0},
                             {"routed_scaling_factor", 1.0},
                             {"index_topk", 2048},
                             {"num_kv_shared_layers", 2},
                             {"time_step_limit", {0.0, 1e30}}};
  for (const auto& row : checkpoint::family_table()) {
    if (!row->refused.empty()) continue;
    EXPECT_EQ(error_with(row->name, every), "no error") << row->name;
  }
  const std::vector<std::pair<const char*, const char*>> published{
      {"afmoe", R"({"num_expert_groups": 1, "num_limited_groups": 1, "n_group": 1,
                    "topk_group": 1, "route_norm": true, "route_scale": 2.826,
                    "score_func": "sigmoid", "load_balance_coeff": 0.001,
                    "use_grouped_mm": true, "num_dense_layers": 2})"},
      {"axk2", R"({"gated_norm_rank": 16, "topk_group": null})"},
      {"bailing_hybrid",
       R"({"moe_router_enable_expert_bias": true, "router_dtype": "fp32", "kda_safe_gate": true,
           "score_function": "sigmoid", "norm_topk_prob": true, "num_local_experts": 8,
           "moe_router_enable_routed_scaling": true, "moe_router_enable_shared_expert": true,
           "gated_attention_proj_granularity_type": "head_wise",
           "moe_shared_expert_intermediate_size": 32, "expert_swiglu_limit_list": [0]})"},
      {"cohere2_moe", R"({"use_gated_activation": true, "expert_selection_fn": "sigmoid",
                          "shared_expert_combination_strategy": "average"})"},
      {"dbrx", R"({"ffn_config": {"moe_jitter_eps": 0.01, "moe_loss_weight": 0.05, "top_k": 50,
                                  "moe_normalize_expert_weights": 1,
                                  "uniform_expert_assignment": false, "top_p": 1.0}})"},
      {"deepseek_v2", R"({"aux_loss_alpha": 0.001, "seq_aux": true, "ep_size": 1, "top_p": 1.0})"},
      {"deepseek_v3", R"({"moe_router_dtype": "float32", "ep_size": 1})"},
      {"deepseek_v4", R"({"expert_dtype": "fp4", "swiglu_limit": 10.0, "topk_method": "noaux_tc",
                          "norm_topk_prob": true, "router_jitter_noise": 0.0})"},
      {"ernie4_5_moe",
       R"({"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_layer_interval": 1,
           "moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_use_aux_free": true,
           "moe_norm_min": 1e-12, "moe_norm_gate_logits": true, "moe_gate_act": "softmax",
           "moe_group": "dummy", "moe_dropout_prob": 0.0, "moe_aux_loss_lambda": 0.01,
           "moe_multimodal_dispatch_use_allgather": "v2-alltoall-unpad-text",
           "moe_orthogonal_loss_lambda": 0.01, "moe_group_orthogonal_loss": true,
           "moe_use_hard_gate": false, "moe_use_bpr": false, "fuse_gate_detach_matmul": true})"},
      {"exaone_moe", R"({"is_moe_layer": [true], "scoring_func": "sigmoid"})"},
      {"glm_moe_dsa", R"({"moe_router_dtype": "float32", "index_topk_freq": 4})"},
      {"gpt_oss", R"({"experts_per_token": 2, "swiglu_limit": 7.0, "swiglu_alpha": 1.702})"},
      {"granitemoehybrid", R"({"shared_intermediate_size": 32, "mamba_expand": 2})"},
      {"hunyuan_v1_moe",
       R"({"moe_drop_tokens": false, "moe_random_routing_dropped_token": false,
           "moe_layer_num_skipped": 0, "use_mixed_mlp_moe": true, "capacity_factor": 1.0,
           "group_limited_greedy": false, "moe_intermediate_size": [32], "moe_topk": [2],
           "n_group": false, "norm_topk_prob": true, "cla_share_factor": 2})"},
      {"hy_v3", R"({"enable_moe_fp32_combine": true, "moe_router_use_sigmoid": true,
                    "moe_router_enable_expert_bias": true, "route_norm": true,
                    "expert_hidden_dim": 32, "router_scaling_factor": 2.826})"},
      {"jamba", R"({"expert_layer_period": 2, "expert_layer_offset": 1})"},
      {"kimi_linear", R"({"num_shared_experts": null, "n_shared_experts": 1})"},
      {"kimi_linear", R"({"moe_router_activation_func": "sigmoid", "use_grouped_topk": true,
                          "num_expert_group": 1, "moe_renormalize": true})"},
      {"laguna", R"({"gating": true, "moe_apply_router_weight_on_input": false,
                     "moe_router_logit_softcapping": 0.0, "moe_router_use_sigmoid": true,
                     "moe_router_score_func": "sigmoid"})"},
      {"lfm2_moe", R"({"use_expert_bias": true, "norm_topk_prob": true})"},
      {"llama4", R"({"interleave_moe_layer_step": 1, "moe_layers": [0], "router_jitter_noise": 0.0,
                     "attn_temperature_tuning": true, "floor_scale": 8192})"},
      {"longcat_flash", R"({"zero_expert_num": 2, "zero_expert_type": "identity",
                            "router_bias": false, "norm_topk_prob": false})"},
      {"minimax", R"({"shared_moe_mode": "sigmoid", "shared_intermediate_size": 0})"},
      {"minimax_m2", R"({"shared_moe_mode": "sigmoid", "shared_intermediate_size": 0,
                         "scoring_func": "sigmoid", "use_routing_bias": true,
                         "router_jitter_noise": 0.0})"},
      {"minimax_m3_vl", R"({"index_topk_blocks": 16, "swiglu_limit": 7.0})"},
      {"nemotron_h", R"({"moe_shared_expert_overlap": true, "moe_latent_size": null})"},
      {"olmoe", R"({"clip_qkv": null, "norm_topk_prob": false})"},
      {"phimoe", R"({"router_jitter_noise": 0.01, "input_jitter_noise": 0.01})"},
      {"qwen3_next", R"({"linear_num_value_heads": 32, "decoder_sparse_step": 1})"},
      {"qwen4_exp", R"({"output_gate_type": "sigmoid"})"},
      {"sarvam_moe", R"({"moe_router_enable_expert_bias": true, "router_dtype": "fp32"})"},
      {"step3p7",
       R"({"gating": true, "moe_router_activation": "sigmoid", "need_fp32_gate": true,
           "use_moe": true, "use_moe_router_bias": true, "norm_expert_weight": true,
           "moe_num_experts": 8, "moe_top_k": 2, "moe_layers_enum": "0", "moe_layer_offset": 0,
           "moe_every_n_layer": 1, "moe_dynamic_exp_p": 1, "share_expert_dims": 32,
           "share_q_dim": 2048, "use_head_wise_attn_gate": true, "swiglu_limits": [0]})"},
  };
  for (const auto& [family, keys] : published) {
    EXPECT_EQ(error_with(family, nlohmann::json::parse(keys)), "no error") << family;
  }
}

// Nemotron publishes "time_step_limit": [0.0, Infinity].
TEST(ConfigTextTest, NumbersThatOnlyPythonWritesAreRead) {
  std::string text =
      config_of(*checkpoint::find_family("deepseek_v3"), {{"name", "Infinity, \"NaN\" \\"}});
  text.erase(text.rfind('}'));
  const std::string time = R"(, "time_step_limit": [0.0, Infinity, -Infinity, NaN]})";
  EXPECT_EQ(parse_model_config(text + time).hidden, 64);
  const std::string error = testing::error_text(
      [&] { parse_model_config(text + R"(, "routed_scaling_factor": Infinity})"); });
  EXPECT_NE(error.find("config.routed_scaling_factor: was object; must be a finite number"),
            std::string::npos)
      << error;
  for (const char* word : {"Nan", "infinity", "InfinityNaN", "+Infinity"}) {
    EXPECT_THROW(parse_model_config(text + R"(, "time_step_limit": )" + word + "}"), Error) << word;
  }
}

TEST(UnknownKeysTest, GroupsAreChosenWhereTheFamilyDoesSo) {
  EXPECT_EQ(error_with("deepseek_v3", {{"use_grouped_topk", true}}), "no error");
  EXPECT_EQ(error_with("qwen3_moe", {{"use_grouped_topk", false}}), "no error");
  EXPECT_NE(error_with("deepseek_v3", {{"use_grouped_topk", false}}), "no error");
  EXPECT_NE(error_with("qwen3_moe", {{"use_grouped_topk", true}}), "no error");
}

TEST(ActivationNamesTest, OthersAreRefusedByTheirKey) {
  for (const char* name : {"SiLU", "swiglu", "swiglu_exact", "tanh_no_mul", "situ"}) {
    const std::string error = error_with("qwen3_moe", {{"hidden_act", name}});
    EXPECT_NE(error.find(std::string("config.hidden_act: was \"") + name + "\"; must be silu"),
              std::string::npos)
        << error;
  }
}

TEST(UnknownKeysTest, EveryFamilyRefusesKeysOfTheExpertsThatItDoesNotKnow) {
  const nlohmann::json invented{
      {"expert_output_scale", 0.5}, {"router_logit_scale", 2},       {"moe_score_func", "tanh"},
      {"router_temperature", 0.7},  {"moe_norm_weights", false},     {"experts_top_p", 0.9},
      {"gate_bias_init", true},     {"shared_scale", {1, 2}},        {"mlp_gate_softcap", 4.0},
      {"some_swiglu_clamp", 3},     {"routing_order", "expert"},     {"activation_limit", 7},
      {"MoE-capacity", 1.25},       {"moe_config", {{"layers", 1}}}, {"moe_attention_scale", 2},
      {"swiglu_clamp_exp", {0, 4}}};
  for (const auto& row : checkpoint::family_table()) {
    if (!row->refused.empty()) continue;
    for (const auto& [key, value] : invented.items()) {
      const std::string error = error_with(row->name, {{key, value}});
      EXPECT_NE(error.find("config." + key + " is "), std::string::npos) << row->name << error;
      EXPECT_NE(error.find("the family " + row->name + " does not know that key"),
                std::string::npos)
          << error;
    }
  }
  // Values that say nothing, names of other parts, and words that only begin alike.
  EXPECT_EQ(error_with("qwen3_moe", {{"expert_output_scale", 1.0},
                                     {"router_bias_scale", {1, 1.0, nullptr}},
                                     {"moe_offset", 0},
                                     {"moe_norm_weights", nullptr},
                                     {"score_func", nullptr},
                                     {"use_router_tanh", false},
                                     {"moe_notes", nlohmann::json::array()},
                                     {"attn_gate_limit", 3},
                                     {"gated_attention", true},
                                     {"aggregate", true},
                                     {"expertise", "law"}}),
            "no error");
  for (const auto& [family, keys] : std::vector<std::pair<const char*, nlohmann::json>>{
           {"dbrx", {{"ffn_config", {{"moe_output_scale", 2}}}}},
           {"ernie4_5_moe", {{"moe_gate_act", "sigmoid"}}},
           {"hy_v3", {{"moe_router_use_sigmoid", false}}},
           {"laguna", {{"moe_router_score_func", "sqrtsoftplus"}}},
           {"kimi_linear", {{"moe_router_activation_func", "tanh"}}}}) {
    EXPECT_NE(error_with(family, keys), "no error") << family;
  }
  // Keys of the whole model beside those of its language model.
  nlohmann::json whole{{"model_type", "qwen3_vl_moe"}, {"moe_output_scale", 2}};
  whole["text_config"] = nlohmann::json::parse(config_of(*checkpoint::find_family("qwen3_vl_moe")));
  EXPECT_NE(testing::error_text([&] {
              parse_model_config(whole.dump());
            }).find("config.moe_output_scale is 2"),
            std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(All, FamilyLayerTest, ::testing::ValuesIn(served_families()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '.', '_');
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace fusedmoe::families_test
