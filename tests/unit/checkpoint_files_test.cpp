// Checkpoints as directories and shards; strictness about every tensor.
#include <algorithm>
#include <map>

#include "checkpoint_parts.h"
#include "fusedmoe/checkpoint.h"
#include "gtest/gtest.h"
#include "temporary_directory.h"
#include "testing/compare.h"

namespace fusedmoe::checkpoint_files_test {

using testing::error_text;
using testing::occurrences;
using testing::Parts;
using testing::TemporaryDirectory;
using testing::write_file;

// Spreads the tensors over three files.
std::vector<std::string> write_shards(const Parts& parts, const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (std::size_t shard = 0; shard < 3; ++shard) {
    std::map<std::string, TensorView> tensors;
    std::size_t i = 0;
    for (const auto& [name, view] : parts.with_prefix("model.layers.2.")) {
      if (i++ % 3 == shard) tensors[name] = view;
    }
    names.push_back("model-0000" + std::to_string(shard + 1) + "-of-00003.safetensors");
    save_safetensors(directory / names.back(), tensors);
  }
  write_file(directory / "config.json", parts.config);
  return names;
}

std::string index_of(const Parts& parts, const std::vector<std::string>& shards) {
  std::string entries;
  std::size_t i = 0;
  for (const auto& [name, view] : parts.with_prefix("model.layers.2.")) {
    entries += (entries.empty() ? "" : ", ") + ("\"" + name + "\": \"" + shards[i++ % 3] + "\"");
  }
  return "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {" + entries + "}}";
}

class CheckpointFilesTest : public ::testing::Test {
 protected:
  const TemporaryDirectory directory;
};

TEST_F(CheckpointFilesTest, ShardedDirectoryWithAndWithoutIndex) {
  const Parts parts("mixtral");
  const std::vector<std::string> shards = write_shards(parts, directory.path());
  EXPECT_EQ(Checkpoint::open(directory.path()).load_layer(2).experts.num_experts(), 8);
  write_file(directory / "model.safetensors.index.json", index_of(parts, shards));
  const LayerWeights layer = Checkpoint::open(directory.path()).load_layer(2);
  EXPECT_EQ(layer.experts.num_experts(), 8);
  EXPECT_TRUE(testing::bitwise_equal(layer.experts.experts[5].up.values,
                                     parts.tensors.at("block_sparse_moe.experts.5.w3.weight")));
}

TEST_F(CheckpointFilesTest, IndexThatDisagreesWithTheFiles) {
  const Parts parts("mixtral");
  std::vector<std::string> shards = write_shards(parts, directory.path());
  std::swap(shards[0], shards[1]);
  write_file(directory / "model.safetensors.index.json", index_of(parts, shards));
  const std::string swapped = error_text([&] { Checkpoint::open(directory.path()); });
  EXPECT_NE(swapped.find("that are not in their files"), std::string::npos) << swapped;

  for (const char* name : {"../outside.safetensors", "/etc/passwd", "..", ""}) {
    write_file(directory / "model.safetensors.index.json",
               std::string("{\"weight_map\": {\"x\": \"") + name + "\"}}");
    const std::string text = error_text([&] { Checkpoint::open(directory.path()); });
    EXPECT_NE(text.find("a file in the same directory"), std::string::npos) << text;
  }
  write_file(directory / "model.safetensors.index.json", "{\"weight_map\": {\"x\": \"y\"}}");
  EXPECT_NE(error_text([&] { Checkpoint::open(directory.path()); }).find("cannot open"),
            std::string::npos);
}

TEST_F(CheckpointFilesTest, OneErrorListsEveryProblem) {
  Parts parts("deepseek_v3");
  auto& tensors = parts.tensors;
  tensors.erase("mlp.gate.e_score_correction_bias");
  tensors.erase("mlp.experts.3.up_proj.weight");
  tensors.erase("mlp.experts.4.up_proj.weight");
  tensors["mlp.experts.0.gate_proj.weight_scale_inv"] = tensors.at("mlp.gate.weight");
  tensors["mlp.experts.7.gate_proj.weight"] =
      tensors.at("mlp.experts.7.gate_proj.weight").reshape({128, 48});
  const TensorView down = tensors.at("mlp.experts.9.down_proj.weight");
  tensors["mlp.experts.9.down_proj.weight"] = TensorView(down.data(), DType::kI16, down.shape());
  tensors["mlp.experts.32.up_proj.weight"] = down;
  tensors["mlp.shared_expert_gate.weight"] = down;
  parts.save(directory / "x.safetensors");

  const Checkpoint checkpoint = Checkpoint::open(directory / "x.safetensors");
  const std::string text = error_text([&] { checkpoint.load_layer(0); });
  for (const char* part : {"layer 0: 8 tensors do not fit an MoE block of deepseek_v3:",
                           "mlp.gate.e_score_correction_bias: missing",
                           "mlp.experts.{3-4}.up_proj.weight: missing, must be [48, 128]",
                           "mlp.experts.0.gate_proj.weight_scale_inv: unexpected (bf16 [32, 128])",
                           "mlp.experts.7.gate_proj.weight: shape [128, 48], must be [48, 128]",
                           "mlp.experts.9.down_proj.weight: dtype i16, must be f32, bf16 or f16",
                           "mlp.experts.32.up_proj.weight: unexpected",
                           "mlp.shared_expert_gate.weight: unexpected", "x.safetensors: layer 0"}) {
    EXPECT_EQ(occurrences(text, part), 1u) << part << "\n" << text;
  }
}

TEST_F(CheckpointFilesTest, ExpertsOutsideTheFamilysBlockAreUnclaimed) {
  const Parts parts("mixtral");
  auto tensors = parts.with_prefix("model.layers.0.");
  const TensorView any = tensors.begin()->second;
  tensors["model.layers.0.moe.experts.0.w1.weight"] = any;
  tensors["model.layers.0.self_attn.q_proj.weight"] = any;
  tensors["model.layers.1.moe.experts.0.w1.weight"] = any;
  save_safetensors(directory / "x.safetensors", tensors, {{"config", parts.config}});
  const Checkpoint checkpoint = Checkpoint::open(directory / "x.safetensors");
  EXPECT_EQ(checkpoint.moe_layers(), std::vector<std::int64_t>{0});
  const std::string text = error_text([&] { checkpoint.load_layer(0); });
  EXPECT_EQ(occurrences(text, "1 tensor does not fit"), 1u) << text;
  EXPECT_EQ(occurrences(text, "model.layers.0.moe.experts.0.w1.weight: unexpected"), 1u) << text;
}

TEST_F(CheckpointFilesTest, EveryFileOfADirectoryWithoutIndexCounts) {
  const Parts parts("mixtral");
  parts.save(directory / "model.safetensors", "model.layers.0.");
  write_file(directory / "config.json", parts.config);
  const TensorView any = parts.tensors.begin()->second;
  for (const char* name : {"input", "other_input"}) {  // of `fusedmoe run`
    save_safetensors(directory / (std::string(name) + ".safetensors"), {{"hidden_states", any}});
  }
  const Checkpoint checkpoint = Checkpoint::open(directory.path());
  EXPECT_EQ(checkpoint.load_layer(0).experts.num_experts(), 8);
  EXPECT_EQ(checkpoint.files(),
            (std::vector<std::string>{directory / "config.json", directory / "model.safetensors"}));

  const auto error_with = [&](const std::string& name) {
    save_safetensors(directory / "extra.safetensors", {{name, any}});
    return error_text([&] { Checkpoint::open(directory.path()).load_layer(0); });
  };
  const std::string unclaimed = "model.layers.0.block_sparse_moe.experts.0.w1.scale";
  EXPECT_NE(error_with(unclaimed).find(unclaimed + ": unexpected"), std::string::npos);
  const std::string twice = error_with("model.layers.0.block_sparse_moe.gate.weight");
  EXPECT_NE(twice.find("extra.safetensors and "), std::string::npos) << twice;
}

TEST_F(CheckpointFilesTest, MixedDtypesOfExpertsAreRefused) {
  Parts parts("olmoe");
  TensorView& view = parts.tensors.at("mlp.experts.5.up_proj.weight");
  view = TensorView(view.data(), DType::kF16, view.shape());
  parts.save(directory / "x.safetensors");
  const Checkpoint checkpoint = Checkpoint::open(directory / "x.safetensors");
  const std::string text = error_text([&] { checkpoint.load_layer(0); });
  EXPECT_NE(text.find("mlp.experts.5.up_proj.weight: dtype f16, must be bf16 like the others"),
            std::string::npos)
      << text;
}

TEST_F(CheckpointFilesTest, ScalesMissingOrNan) {
  Parts parts("gpt_oss_mxfp4");
  const TensorView scales = parts.tensors.at("mlp.experts.gate_up_proj_scales");
  Tensor changed = Tensor::empty(scales.shape(), DType::kU8);
  std::copy_n(scales.as<const std::uint8_t>(), scales.numel(), changed.as<std::uint8_t>());
  changed.as<std::uint8_t>()[5 * scales.stride(0) + 6 * scales.stride(1) + 7] = 255;
  parts.tensors["mlp.experts.gate_up_proj_scales"] = changed;
  parts.save(directory / "x.safetensors");
  const std::string nan =
      error_text([&] { Checkpoint::open(directory / "x.safetensors").load_layer(0); });
  EXPECT_NE(nan.find("layer 0: mlp.experts.gate_up_proj_scales: was 255 (NaN) at row 3, block 7 "
                     "(gate of expert 5); must be E8M0 codes"),
            std::string::npos)
      << nan;

  parts.tensors.erase("mlp.experts.gate_up_proj_scales");
  parts.save(directory / "x.safetensors");
  const std::string missing =
      error_text([&] { Checkpoint::open(directory / "x.safetensors").load_layer(0); });
  EXPECT_NE(missing.find("mlp.experts.gate_up_proj_scales: missing, must be [8, 256, 8]"),
            std::string::npos)
      << missing;
}

TEST_F(CheckpointFilesTest, DirectoryWithoutConfigOrWeights) {
  EXPECT_NE(error_text([&] { Checkpoint::open(directory.path()); }).find("no config.json"),
            std::string::npos);
  write_file(directory / "config.json", Parts("olmoe").config);
  EXPECT_NE(error_text([&] { Checkpoint::open(directory.path()); }).find("no *.safetensors"),
            std::string::npos);
  EXPECT_NE(error_text([&] { Checkpoint::open(directory / "absent"); }).find("no such file"),
            std::string::npos);
  save_safetensors(directory / "plain.safetensors", {});
  EXPECT_NE(error_text([&] {
              Checkpoint::open(directory / "plain.safetensors");
            }).find("no model config in its metadata"),
            std::string::npos);
}

}  // namespace fusedmoe::checkpoint_files_test
