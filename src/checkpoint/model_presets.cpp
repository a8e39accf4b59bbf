// config.json of well-known models, cut down to what concerns their MoE layers. deepseek-v3 is
// published in FP8; its preset leaves the quantization out and stands for the same model in bf16.
#include <array>

#include "core/check.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe {
namespace {

struct Preset {
  std::string_view name;
  std::string_view config_json;
};

constexpr std::array<Preset, 7> kPresets{{
    {"gpt-oss-20b", R"({
  "architectures": ["GptOssForCausalLM"],
  "model_type": "gpt_oss",
  "num_hidden_layers": 24,
  "hidden_size": 2880,
  "intermediate_size": 2880,
  "num_local_experts": 32,
  "num_experts_per_tok": 4,
  "hidden_act": "silu",
  "swiglu_limit": 7.0,
  "quantization_config": {"quant_method": "mxfp4"}
}
)"},
    {"gpt-oss-120b", R"({
  "architectures": ["GptOssForCausalLM"],
  "model_type": "gpt_oss",
  "num_hidden_layers": 36,
  "hidden_size": 2880,
  "intermediate_size": 2880,
  "num_local_experts": 128,
  "num_experts_per_tok": 4,
  "hidden_act": "silu",
  "swiglu_limit": 7.0,
  "quantization_config": {"quant_method": "mxfp4"}
}
)"},
    {"mixtral-8x7b", R"({
  "architectures": ["MixtralForCausalLM"],
  "model_type": "mixtral",
  "num_hidden_layers": 32,
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "num_local_experts": 8,
  "num_experts_per_tok": 2,
  "hidden_act": "silu",
  "torch_dtype": "bfloat16"
}
)"},
    {"qwen3-30b-a3b", R"({
  "architectures": ["Qwen3MoeForCausalLM"],
  "model_type": "qwen3_moe",
  "num_hidden_layers": 48,
  "hidden_size": 2048,
  "intermediate_size": 6144,
  "moe_intermediate_size": 768,
  "num_experts": 128,
  "num_experts_per_tok": 8,
  "norm_topk_prob": true,
  "decoder_sparse_step": 1,
  "mlp_only_layers": [],
  "hidden_act": "silu",
  "torch_dtype": "bfloat16"
}
)"},
    {"qwen3-235b-a22b", R"({
  "architectures": ["Qwen3MoeForCausalLM"],
  "model_type": "qwen3_moe",
  "num_hidden_layers": 94,
  "hidden_size": 4096,
  "intermediate_size": 12288,
  "moe_intermediate_size": 1536,
  "num_experts": 128,
  "num_experts_per_tok": 8,
  "norm_topk_prob": true,
  "decoder_sparse_step": 1,
  "mlp_only_layers": [],
  "hidden_act": "silu",
  "torch_dtype": "bfloat16"
}
)"},
    {"deepseek-v3", R"({
  "architectures": ["DeepseekV3ForCausalLM"],
  "model_type": "deepseek_v3",
  "num_hidden_layers": 61,
  "hidden_size": 7168,
  "intermediate_size": 18432,
  "moe_intermediate_size": 2048,
  "n_routed_experts": 256,
  "n_shared_experts": 1,
  "num_experts_per_tok": 8,
  "n_group": 8,
  "topk_group": 4,
  "topk_method": "noaux_tc",
  "scoring_func": "sigmoid",
  "norm_topk_prob": true,
  "routed_scaling_factor": 2.5,
  "first_k_dense_replace": 3,
  "moe_layer_freq": 1,
  "hidden_act": "silu",
  "torch_dtype": "bfloat16"
}
)"},
    {"llama4-scout", R"({
  "architectures": ["Llama4ForConditionalGeneration"],
  "model_type": "llama4",
  "text_config": {
    "model_type": "llama4_text",
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16"
  },
  "torch_dtype": "bfloat16"
}
)"},
}};

}  // namespace

std::string model_preset(std::string_view model) {
  std::string known;
  for (const Preset& preset : kPresets) {
    if (preset.name == model) return std::string(preset.config_json);
    known += (known.empty() ? "" : ", ") + std::string(preset.name);
  }
  throw Error::unknown_name("model", model, known);
}

std::vector<std::string> model_preset_names() {
  std::vector<std::string> names;
  names.reserve(kPresets.size());
  for (const Preset& preset : kPresets) names.emplace_back(preset.name);
  return names;
}

}  // namespace fusedmoe
