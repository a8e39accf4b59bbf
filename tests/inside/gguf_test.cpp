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
#include "testing/cases.h"

namespace fusedmoe {
namespace {

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
                         ::testing::Values("Q4_0", "Q8_0", "MXFP4", "Q4_K", "Q6_K"),
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

// Files of 256 and more columns are too large to be kept, so Q4_K and Q6_K are made here.
TEST(GgufTest, DownMayHaveAFormatOfItsOwn) {
  constexpr std::int64_t kHidden = 96, kInner = 320, kExperts = 3;
  Random random(7);
  const auto matrix = [&](std::int64_t out, std::int64_t in, const QuantKey& key,
                          ExpertWeights& weights) {
    const Tensor values = Tensor::empty({out, in}, DType::kF32);
    for (std::int64_t i = 0; i < values.numel(); ++i) {
      values.as<float>()[i] = static_cast<float>(random.normal()) / 8;
    }
    const QuantizedMatrix q = quantize_weights(values, key);
    for (const Tensor* part : {&q.values, &q.scales, &q.zero_points, &q.global_scale}) {
      if (*part) weights.owners.push_back(part->owner());
    }
    return q.view();
  };
  LayerWeights layer;
  layer.experts.scheme = parse_scheme("q4_k+q6_k");
  layer.experts.hidden = kHidden;
  layer.experts.intermediate = kInner;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    layer.experts.experts.push_back({matrix(kInner, kHidden, keys::q4_k(), layer.experts),
                                     matrix(kInner, kHidden, keys::q4_k(), layer.experts),
                                     matrix(kHidden, kInner, keys::q6_k(), layer.experts)});
  }
  layer.router.num_experts = kExperts;
  layer.router.topk = 2;
  layer.router_weights.weight = Tensor::zeros({kExperts, kHidden}, DType::kF32);
  for (std::int64_t i = 0; i < kExperts; ++i) {
    layer.router_weights.weight.as<float>()[i * kHidden + i] = 1;
  }
  // Few rows are decoded in registers, many in panels.
  for (const std::int64_t tokens : {1, 40}) {
    const Tensor x = Tensor::empty({tokens, kHidden}, DType::kF32);
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      x.as<float>()[i] = static_cast<float>(random.normal());
    }
    LayerOptions options;
    options.dtype = DType::kF32;
    options.require = "reference";
    const Tensor wanted = MoeLayer(layer, options).forward(x);
    EXPECT_LE(difference(layer, "cpu", x, wanted), 2e-6) << tokens;
  }
}

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

TEST(GgufTest, UnservedTypesAndArchitecturesAreNamed) {
  std::string bytes = bytes_of("qwen3moe-Q4_0");
  const auto replace_all = [&](const std::string& from, const std::string& to) {
    for (std::size_t at = bytes.find(from); at != std::string::npos;
         at = bytes.find(from, at + 1)) {
      bytes.replace(at, from.size(), to);
    }
  };
  // IQ4_NL has blocks of as many bytes.
  for (const char* matrix : {"gate", "up", "down"}) {
    const std::string tensor = std::string("blk.0.ffn_") + matrix + "_exps.weight" + le(3, 4) +
                               le(32, 8) + le(32, 8) + le(4, 8);
    replace_all(tensor + le(2, 4), tensor + le(20, 4));
  }
  const auto error = [&] {
    return error_text(
        [&] { Checkpoint::parse(bytes.data(), bytes.size(), "file.gguf").load_layer(0); });
  };
  EXPECT_NE(error().find("type IQ4_NL, must be F32, F16, BF16, Q4_0"), std::string::npos)
      << error();
  replace_all("qwen3moe", "mamba2xx");
  EXPECT_NE(error().find("gguf.mamba2xx"), std::string::npos) << error();
}

}  // namespace
}  // namespace fusedmoe
