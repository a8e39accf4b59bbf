// Linear layers beside the experts, as quantization tools leave them: the gate of the shared
// experts and the projections around the routed ones.
#include <map>
#include <string>

#include "checkpoint/linear_codec.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/quant.h"
#include "gtest/gtest.h"
#include "testing/compare.h"
#include "tiny_checkpoint.h"

namespace fusedmoe::beside_experts_test {

using testing::bitwise_equal;
using testing::error_text;
using testing::read_json;
using testing::TemporaryDirectory;
using testing::tensors_of;
using testing::TinyCheckpoints;

constexpr auto kLayout = CheckpointLayout::kCompressedTensors;

struct Parts {
  std::map<std::string, Tensor, std::less<>> tensors;
  nlohmann::json config;

  explicit Parts(const std::filesystem::path& path)
      : tensors(tensors_of(path)), config(read_json(path / "config.json")) {}

  /// Stores "<name>.weight" as int4_g32; returns what it then means.
  Tensor quantize(const std::string& name) {
    const QuantScheme scheme = parse_scheme("int4_g32");
    const Tensor weight = tensors.at(name + ".weight");
    const checkpoint::LinearShape shape{weight.size(0), weight.size(1)};
    const checkpoint::LinearLayout& layout =
        *checkpoint::find_linear_layout(kLayout, scheme.weights);
    QuantizeOptions options;
    options.scale_dtype = checkpoint::scale_dtype(layout);
    const QuantizedMatrix matrix = quantize_weights(weight, scheme.weights, options);
    tensors.erase(name + ".weight");
    for (const checkpoint::StoredTensor& stored : layout.tensors) {
      if (!checkpoint::is_required(stored, scheme)) continue;
      tensors[name + std::string(stored.suffix)] =
          checkpoint::encode(stored, matrix.view(), scheme.weights, shape);
    }
    return dequantize_weights(matrix.view(), scheme.weights, shape.in);
  }

  LayerWeights load() const {
    const TemporaryDirectory directory;
    const std::map<std::string, TensorView> views(tensors.begin(), tensors.end());
    save_safetensors(directory / "x.safetensors", views, {{"config", config.dump()}});
    return Checkpoint::open(directory / "x.safetensors").load_layer(0);
  }
};

TEST(BesideExpertsTest, QuantizedGateIsDecoded) {
  const std::string name = "model.layers.0.mlp.shared_expert_gate";
  Parts parts(TinyCheckpoints::instance().quantized("qwen2_moe", "int4_g32", kLayout));
  parts.config["quantization_config"]["ignore"] = nullptr;
  const Tensor gate = parts.quantize(name);
  EXPECT_TRUE(bitwise_equal(parts.load().shared_experts->gate, gate));
  parts.tensors.erase(name + ".weight_scale");
  EXPECT_NE(error_text([&] { parts.load(); }).find("shared_expert_gate.weight_scale: missing"),
            std::string::npos);

  Parts dynamic(TinyCheckpoints::instance().quantized("qwen2_moe", "int8_w8a8", kLayout));
  dynamic.config["quantization_config"]["ignore"] = nullptr;
  dynamic.quantize(name);
  EXPECT_NE(error_text([&] { dynamic.load(); }).find("quantized together with its input"),
            std::string::npos);
}

TEST(BesideExpertsTest, GateOfSharedExpertsWithoutWidthIsLeftOut) {
  Parts parts(TinyCheckpoints::instance().source("qwen2_moe"));
  parts.config["shared_expert_intermediate_size"] = 0;
  std::erase_if(parts.tensors, [](const auto& tensor) {
    return tensor.first.find("shared_expert.") != std::string::npos;
  });
  EXPECT_FALSE(parts.load().shared_experts);
}

TEST(BesideExpertsTest, ProjectionsAroundQuantizedExperts) {
  const TemporaryDirectory directory;
  SynthOptions synth;
  synth.config_json = R"({"model_type": "nemotron_h", "layers_block_type": ["moe"],
    "hidden_size": 160, "moe_latent_size": 96, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 32, "n_group": 1,
    "topk_group": 1})";
  synth.num_tokens = 5;
  synthesize_checkpoint(synth, directory / "source");
  const auto quantize = [&](const char* scheme) {
    QuantizeCheckpointOptions options;
    options.scheme = parse_scheme(scheme);
    options.layout = kLayout;
    quantize_checkpoint(directory / "source", options, directory / scheme);
    return directory / scheme;
  };
  Parts parts(quantize("int4_g32"));
  parts.config["quantization_config"]["ignore"] = nullptr;
  // Static scales of the experts' inputs are calibrated behind the projection.
  const Parts calibrated(quantize("fp8_tensor_static"));
  const LayerWeights plain = parts.load();
  EXPECT_EQ(plain.experts.hidden, 96);
  EXPECT_EQ(plain.hidden(), 160);
  const std::string block = "backbone.layers.0.mixer.";
  const Tensor down = parts.quantize(block + "fc1_latent_proj");
  const Tensor up = parts.quantize(block + "fc2_latent_proj");
  const LayerWeights layer = parts.load();
  EXPECT_TRUE(bitwise_equal(layer.latent->down, down));
  EXPECT_TRUE(bitwise_equal(layer.latent->up, up));
  EXPECT_EQ(MoeLayer(layer).forward(Tensor::zeros({2, 160}, DType::kBF16)).size(1), 160);
  EXPECT_EQ(calibrated.load().experts.hidden, 96);
}

}  // namespace fusedmoe::beside_experts_test
