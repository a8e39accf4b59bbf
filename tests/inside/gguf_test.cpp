// GGUF: blocks and layers against the values of llama.cpp's gguf package
// (tests/interop/gguf_files.py --vectors), down matrices in a format of their own, hostile files.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "checkpoint/gguf_blocks.h"
#include "error_text.h"
#include "files/gguf.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/quant.h"
#include "gtest/gtest.h"
#include "quant/weight_layout.h"
#include "reference/matrix.h"
#include "testing/cases.h"

namespace fusedmoe::gguf_test {

using testing::error_text;
using testing::Random;

std::filesystem::path path_of(const std::string& name) {
  return std::filesystem::path(FUSEDMOE_GGUF_DIR) / (name + ".gguf");
}

std::string bytes_of(const std::string& name) {
  std::ifstream file(path_of(name), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class GgufBlocksTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GgufBlocksTest, StandForTheValuesOfGguf) {
  const files::GgufFile file = files::GgufFile::open(path_of("blocks"));
  const files::GgufTensor& blocks = file.tensors().at(GetParam());
  const Tensor& wanted = file.tensors().at(GetParam() + ".values").tensor;
  const QuantizedMatrix matrix = checkpoint::decode_blocks(blocks.tensor, *blocks.type);
  const QuantKey key = *checkpoint::key_of(*blocks.type);
  const Tensor actual = dequantize_weights(matrix.view(), key, blocks.shape[1]);
  ASSERT_EQ(actual.shape(), wanted.shape());
  for (std::int64_t i = 0; i < wanted.numel(); ++i) {
    ASSERT_EQ(actual.as<float>()[i], wanted.as<float>()[i]) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, GgufBlocksTest,
                         ::testing::Values("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4",
                                           "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
                                           "IQ4_XS"),
                         [](const auto& info) { return info.param; });

std::vector<std::string> layer_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(FUSEDMOE_GGUF_DIR)) {
    if (entry.path().stem() != "blocks") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// The largest difference from `wanted`, relative to its largest value.
double difference(const LayerWeights& weights, const char* experts, const Tensor& x,
                  const TensorView& wanted) {
  LayerOptions options;
  options.dtype = DType::kF32;
  options.require = experts;
  const Tensor actual = MoeLayer(weights, options).forward(x);
  double largest = 0, worst = 0;
  for (std::int64_t i = 0; i < wanted.numel(); ++i) {
    const double value = wanted.as<const float>()[i];
    largest = std::max(largest, std::abs(value));
    worst = std::max(worst, std::abs(actual.as<const float>()[i] - value));
  }
  return worst / largest;
}

class GgufLayerTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GgufLayerTest, MatchesNumpy) {
  const files::GgufFile file = files::GgufFile::open(path_of(GetParam()));
  for (const FileAccess access : {FileAccess::kMap, FileAccess::kRead}) {
    const Checkpoint checkpoint = Checkpoint::open(path_of(GetParam()), {.access = access});
    const LayerWeights weights = checkpoint.load_layer(0);
    for (const char* experts : {"reference", "cpu"}) {
      EXPECT_LE(difference(weights, experts, file.tensors().at("check.input").tensor,
                           file.tensors().at("check.output").tensor),
                2e-6)
          << experts;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GgufLayerTest, ::testing::ValuesIn(layer_names()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(GgufTest, TypesOfMixedFilesAreOneScheme) {
  const Checkpoint checkpoint = Checkpoint::open(path_of("olmoe-Q8_0-Q4_0"));
  EXPECT_EQ(name(checkpoint.config().scheme), "int8_g32+int4_g32");
  EXPECT_EQ(parse_scheme("int8_g32+int4_g32"), checkpoint.config().scheme);
  EXPECT_EQ(checkpoint.layer_tensors(0).front().format, "Q4_0");
}

// The linear layers of a dense layer are called as those of an expert, without the number.
TEST(GgufTest, DenseLayersBesideExpertsInTensorsOfTheirOwnAreNone) {
  const Checkpoint checkpoint = Checkpoint::open(path_of("llama-experts-Q8_0"));
  EXPECT_EQ(checkpoint.moe_layers(), std::vector<std::int64_t>{0});
  EXPECT_EQ(name(checkpoint.config().scheme), "int8_g32");
}

/// Layers whose gate and up have one format and whose down has the same or another, as in published
/// files. Blocks have 256 columns, and files of that size are too large to be kept: so the test
/// makes the weights.
class GgufMixtureTest : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr std::int64_t kHidden = 96, kInner = 320, kExperts = 3;

  GgufMixtureTest() {
    ExpertWeights& weights = layer_.experts;
    weights.scheme = parse_scheme(GetParam());
    weights.hidden = kHidden;
    weights.intermediate = kInner;
    for (std::int64_t e = 0; e < kExperts; ++e) {
      weights.experts.push_back({matrix(kInner, kHidden, weights.scheme.weights),
                                 matrix(kInner, kHidden, weights.scheme.weights),
                                 matrix(kHidden, kInner, weights.scheme.down_weights())});
    }
    layer_.router.num_experts = kExperts;
    layer_.router.topk = 2;
    layer_.router_weights.weight = Tensor::zeros({kExperts, kHidden}, DType::kF32);
    for (std::int64_t i = 0; i < kExperts; ++i) {
      layer_.router_weights.weight.as<float>()[i * kHidden + i] = 1;
    }
  }

  Tensor normal(std::int64_t rows, std::int64_t columns, float factor) {
    const Tensor result = Tensor::empty({rows, columns}, DType::kF32);
    for (std::int64_t i = 0; i < result.numel(); ++i) {
      result.as<float>()[i] = static_cast<float>(random_.normal()) * factor;
    }
    return result;
  }

  static Tensor forward(const LayerWeights& layer, const char* experts, const Tensor& x) {
    LayerOptions options;
    options.dtype = DType::kF32;
    options.require = experts;
    return MoeLayer(layer, options).forward(x);
  }

  LayerWeights layer_;

 private:
  WeightMatrix matrix(std::int64_t out, std::int64_t in, const QuantKey& key) {
    const QuantizedMatrix q =
        quantize_weights(normal(out, in, 0.125F), key, {.scale_dtype = DType::kF16});
    for (const Tensor* part : {&q.values, &q.scales, &q.zero_points, &q.global_scale}) {
      if (*part) layer_.experts.owners.push_back(part->owner());
    }
    return q.view();
  }

  Random random_{7};
};

TEST_P(GgufMixtureTest, MatchesReference) {
  for (const std::int64_t tokens : {1, 40}) {  // decoded in registers, and in panels
    const Tensor x = normal(tokens, kHidden, 1);
    EXPECT_LE(difference(layer_, "cpu", x, forward(layer_, "reference", x)), 2e-6) << tokens;
  }
}

TEST_P(GgufMixtureTest, SlicesAddUp) {
  const Tensor x = normal(3, kHidden, 1), sum = Tensor::zeros({3, kHidden}, DType::kF32);
  for (const int rank : {0, 1}) {
    LayerWeights part = layer_;
    part.experts =
        slice_experts(layer_.experts, slice_of(kInner, slice_unit(layer_.experts.scheme), 2, rank));
    const Tensor y = forward(part, "cpu", x);
    for (std::int64_t i = 0; i < y.numel(); ++i) sum.as<float>()[i] += y.as<float>()[i];
  }
  EXPECT_LE(difference(layer_, "reference", x, sum), 2e-6);
}

INSTANTIATE_TEST_SUITE_P(All, GgufMixtureTest,
                         ::testing::Values("q2_k+q3_k", "q2_k+iq4_nl", "q3_k+q5_k", "q3_k+q4_k",
                                           "q4_k+q6_k", "q4_k+int8_g32", "q5_k+q6_k", "q5_k+q5_1",
                                           "q6_k+q5_k", "iq4_xs+q5_k", "iq4_xs+iq4_nl",
                                           "iq4_nl+mxfp4_w4a16", "q4_1+q2_k", "f16+iq4_xs"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '+', '_');
                           return name;
                         });

struct Damage {
  std::string what;
  std::string from, to;  ///< bytes of the file; `from` occurs
  std::string fault;     ///< what the message must hold
};

/// A u32 or u64 as the file has it.
std::string le(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}

TEST(GgufTest, DamagedHeadersAreErrors) {
  const std::string whole = bytes_of("qwen3moe-Q8_0");
  const std::string gate = "blk.0.ffn_gate_exps.weight";
  const auto extents = [](std::uint64_t a, std::uint64_t b, std::uint64_t c) {
    return le(3, 4) + le(a, 8) + le(b, 8) + le(c, 8);
  };
  const std::string right = gate + extents(32, 32, 4);
  for (const Damage& damage : std::vector<Damage>{
           {"magic", "GGUF", "GGUX", "header length"},
           {"version", "GGUF" + le(3, 4), "GGUF" + le(1, 4), "version: was 1"},
           {"big-endian", "GGUF" + le(3, 4), "GGUF" + le(3 << 24, 4), "little-endian"},
           {"tensors", le(3, 4) + le(6, 8), le(3, 4) + le(1ULL << 60, 8), "number of tensors"},
           {"rank", gate + le(3, 4), gate + le(5, 4), "of rank 5"},
           {"extent", right, gate + extents(~0ULL, 32, 4), "extent"},
           {"product", right, gate + extents(1ULL << 40, 1ULL << 40, 4), "extent"},
           {"zero", right, gate + extents(32, 0, 4), "extent of 0"},
           {"blocks", right, gate + extents(33, 32, 4), "whole blocks of 32"},
           {"larger", right, gate + extents(32, 32, 8), "at offset"},
           {"type", right + le(8, 4), right + le(77, 4), "ggml type 77"},
           {"smaller type", right + le(8, 4), right + le(2, 4), "behind the tensor before it"},
           {"other type", right + le(8, 4), right + le(20, 4), "behind the tensor before it"},
           {"another name", "blk.0.ffn_up_exps.weight", "blk.0.ffn_xp_exps.weight", "missing"},
           {"architecture", "general.architecture", "general.architectura", "architecture"}}) {
    std::string bytes = whole;
    const std::size_t at = bytes.find(damage.from);
    ASSERT_NE(at, std::string::npos) << damage.what;
    bytes.replace(at, damage.from.size(), damage.to);
    const std::string error = error_text(
        [&] { Checkpoint::parse(bytes.data(), bytes.size(), "file.gguf").load_layer(0); });
    EXPECT_NE(error.find(damage.fault), std::string::npos) << damage.what << ": " << error;
  }
}

TEST(GgufTest, EveryTruncationIsAnError) {
  const std::string whole = bytes_of("qwen3moe-Q4_0");
  for (std::size_t size = 4; size < whole.size(); size += size < 1200 ? 7 : 997) {
    EXPECT_NE(error_text([&] { Checkpoint::parse(whole.data(), size, "file.gguf").load_layer(0); }),
              "no error")
        << size;
  }
}

/// The error of loading these bytes.
std::string load_error(const std::string& bytes) {
  return error_text(
      [&] { Checkpoint::parse(bytes.data(), bytes.size(), "file.gguf").load_layer(0); });
}

// They would be left out of the sum, or of the choice.
TEST(GgufTest, TensorsOfExpertsThatTheFamilyDoesNotHaveAreNamed) {
  const std::string old = "check.output";
  for (const std::string name : {"blk.0.ffn_gate_shexp.weight_of_another_model",
                                 "blk.0.exp_probs_b.bias_of_no_router_in_here_",
                                 "blk.0.ffn_gate_chexps.weight_of_others_here_"}) {
    std::string bytes = bytes_of("qwen3moe-Q8_0");
    const std::size_t at = bytes.find(le(old.size(), 8) + old);
    ASSERT_NE(at, std::string::npos);
    ASSERT_EQ(name.size(), old.size() + 32) << "the data stay aligned";
    bytes.replace(at, 8 + old.size(), le(name.size(), 8) + name);
    EXPECT_NE(load_error(bytes).find(name + ": unexpected"), std::string::npos)
        << load_error(bytes);
  }
}

TEST(GgufTest, NumbersThatAreNoneAreNotTakenForAbsent) {
  for (const char* name : {"nan", "inf", "-inf"}) {
    std::string bytes = bytes_of("deepseek2-Q8_0");
    const std::string key = std::string("deepseek2.expert_weights_scale") + le(6, 4);
    const std::size_t at = bytes.find(key);
    ASSERT_NE(at, std::string::npos);
    const float value = std::strtof(name, nullptr);
    std::memcpy(bytes.data() + at + key.size(), &value, sizeof value);
    EXPECT_NE(load_error(bytes).find("config.expert_weights_scale: was "), std::string::npos)
        << load_error(bytes);
  }
}

void replace_all(std::string& bytes, const std::string& from, const std::string& to) {
  ASSERT_NE(bytes.find(from), std::string::npos) << from;
  for (std::size_t at = bytes.find(from); at != std::string::npos; at = bytes.find(from, at + 1)) {
    bytes.replace(at, from.size(), to);
  }
}

TEST(GgufTest, UnservedTypesAndArchitecturesAreNamed) {
  std::string bytes = bytes_of("nemotron_h_moe-Q4_0");
  // NVFP4 has blocks of as many bytes for each element.
  const std::string up =
      std::string("blk.0.ffn_up_exps.weight") + le(3, 4) + le(64, 8) + le(32, 8) + le(4, 8);
  replace_all(bytes, up + le(2, 4), up + le(40, 4));
  EXPECT_NE(load_error(bytes).find("type NVFP4, must be F32, F16, BF16, Q4_0"), std::string::npos)
      << load_error(bytes);
  replace_all(bytes, "nemotron_h_moe", "nemotron_hxmoe");
  EXPECT_NE(load_error(bytes).find("gguf.nemotron_hxmoe"), std::string::npos) << load_error(bytes);
}

// IQ4_NL has blocks of as many bytes as Q4_0.
TEST(GgufTest, TypesThatDoNotGoTogetherAreNamed) {
  const auto changed = [](std::string bytes, const std::string& tensor, int rank) {
    std::string extents = le(static_cast<std::uint64_t>(rank), 4) + le(32, 8) + le(32, 8);
    if (rank == 3) extents += le(4, 8);
    replace_all(bytes, tensor + extents + le(2, 4), tensor + extents + le(20, 4));
    return load_error(bytes);
  };
  const std::string expert = changed(bytes_of("llama-experts-Q4_0-F32"), "ffn_gate.1.weight", 2);
  EXPECT_NE(expert.find("ffn_up.1 is in another format than the gate"), std::string::npos)
      << expert;
  const std::string down = changed(bytes_of("qwen3moe-Q4_0"), "ffn_up_exps.weight", 3);
  EXPECT_NE(down.find("ffn_up_exps is in another format than the gate"), std::string::npos) << down;
}

TEST(GgufTest, ExpertsOfOtherTypesThanTheFirstAreNamed) {
  std::string bytes = bytes_of("llama-experts-Q4_0-F32");
  const std::string extents = le(2, 4) + le(32, 8) + le(32, 8);
  for (const std::string tensor : {"ffn_gate.2.weight", "ffn_up.2.weight"}) {
    replace_all(bytes, tensor + extents + le(2, 4), tensor + extents + le(20, 4));
  }
  const std::string error = load_error(bytes);
  EXPECT_NE(error.find("ffn_gate.2 is iq4_nl+f32, but expert 0 is int4_g32+f32"), std::string::npos)
      << error;
}

// Whatever the bytes of a block: its scales are refused, or reference and library agree on every
// weight.
TEST(GgufTest, RandomBytesOfBlocksAreRefusedOrTheirValues) {
  const files::GgufFile file = files::GgufFile::open(path_of("blocks"));
  Random random(11);
  for (const auto& [name, tensor] : file.tensors()) {
    if (!tensor.quantized()) continue;
    const QuantKey key = *checkpoint::key_of(*tensor.type);
    const std::int64_t columns = tensor.shape[1];
    int refused = 0, served = 0;
    for (int i = 0; i < 400; ++i) {
      const Tensor blocks = Tensor::empty({1, tensor.tensor.size(1)}, DType::kU8);
      for (std::int64_t b = 0; b < blocks.numel(); ++b) {
        blocks.as<std::uint8_t>()[b] = static_cast<std::uint8_t>(random.bits() >> 56);
      }
      const QuantizedMatrix q = checkpoint::decode_blocks(blocks, *tensor.type);
      const WeightMatrix matrix = q.view();
      try {
        core::check_matrix(matrix, key, "matrix", 1, columns);
      } catch (const Error&) {
        ++refused;
        continue;
      }
      ++served;
      const Tensor values = dequantize_weights(matrix, key, columns);
      for (std::int64_t c = 0; c < columns; ++c) {
        // In f32, which MXFP4 can exceed.
        const auto wanted = static_cast<float>(reference::element(matrix, key, 0, c));
        if (values.as<float>()[c] == wanted) continue;
        ASSERT_NEAR(values.as<float>()[c], wanted, std::abs(wanted) * 0x1p-23F) << name << " " << c;
      }
    }
    EXPECT_GT(served, 0) << name;
    EXPECT_GT(refused, 0) << name;
  }
}

}  // namespace fusedmoe::gguf_test
