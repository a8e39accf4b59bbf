// Packed weights in files: what was saved comes back to the bit, for every scheme; memory is known
// before it is taken; and nothing else than the same layer of the same layout is accepted.
#include "fusedmoe/packed_file.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <utility>

#include "cpu/experts.h"
#include "cpu/pack.h"
#include "error_text.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/safetensors.h"
#include "layer_problem.h"
#include "reference/experts.h"
#include "small_case.h"
#include "temporary_directory.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace fusedmoe::packed_file_test {

using testing::bitwise_equal;
using testing::Case;
using testing::make_experts;
using testing::make_problem;
using testing::Problem;
using testing::small_case;
using testing::TemporaryDirectory;

void expect_same_parts(const PackedWeights& actual, const PackedWeights& expected) {
  const PackedParts a = actual.parts(), e = expected.parts();
  ASSERT_EQ(a.size(), e.size());
  for (const auto& [name, tensor] : e) {
    ASSERT_TRUE(a.contains(name)) << name;
    EXPECT_EQ(a.at(name).dtype(), tensor.dtype()) << name;
    EXPECT_TRUE(bitwise_equal(a.at(name), tensor)) << name;
  }
  EXPECT_EQ(actual.info().a1_scale, expected.info().a1_scale);
  EXPECT_EQ(actual.info().a2_scale, expected.info().a2_scale);
  EXPECT_EQ(actual.nbytes(), expected.nbytes());
}

class PackedFileTest : public ::testing::TestWithParam<NamedScheme> {};

TEST_P(PackedFileTest, ComesBackToTheBit) {
  const TemporaryDirectory folder;
  Case spec = small_case(GetParam().scheme);
  spec.scale_dtype = DType::kF32;
  const Problem problem = make_problem(spec);
  const auto experts = make_experts(spec);
  const auto packed = experts->pack(problem.weights);
  EXPECT_EQ(experts->descriptor().packed_bytes(experts->config()), packed->nbytes());
  save_packed(*experts, *packed, folder / "packed");
  for (const FileAccess access : {FileAccess::kMap, FileAccess::kRead}) {
    const auto loaded = load_packed(*experts, {folder / "packed", access});
    expect_same_parts(*loaded, *packed);
    EXPECT_TRUE(experts->accepts(*loaded));
    ExpertWeights one = problem.weights;
    one.experts.erase(one.experts.begin());
    if (access == FileAccess::kMap) {
      EXPECT_NE(
          testing::error_text([&] { experts->repack(one, 0, *loaded); }).find("FileAccess::kRead"),
          std::string::npos);
      continue;
    }
    experts->repack(one, 0, *loaded);
    experts->repack(one, 0, *packed);
    expect_same_parts(*loaded, *packed);
  }
}

/// Weights are used where the file is mapped. With several NUMA nodes they are copied, a part to
/// each; there are none here.
TEST_P(PackedFileTest, IsNotCopied) {
  const TemporaryDirectory folder;
  const Problem problem = make_problem(small_case(GetParam().scheme));
  const auto experts = make_experts(problem.spec);
  const auto packed = experts->pack(problem.weights);
  save_packed(*experts, *packed, folder / "packed");
  const SafetensorsFile file = SafetensorsFile::open(folder / "packed");
  PackedParts parts;
  for (const std::string& name : file.names()) parts[name] = file.tensor(name);
  const cpu::CpuPackedWeights mapped(packed->info(), parts, {});
  EXPECT_EQ(mapped.parts().at("tiles").data(), parts.at("tiles").data());
}

INSTANTIATE_TEST_SUITE_P(All, PackedFileTest, ::testing::ValuesIn(named_schemes()),
                         [](const auto& info) { return info.param.name; });

/// Slices that begin inside a group, scales of other dtypes: the tiles differ, and the file says
/// how.
TEST(PackedFileTest, KeepsHowTilesDiffer) {
  const TemporaryDirectory folder;
  for (const DType scales : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::int64_t begin : {0, 32}) {
      Case spec = small_case(parse_scheme("int4_g64"));
      spec.intermediate = 128;
      spec.scale_dtype = scales;
      const Problem problem = make_problem(spec);
      ExpertWeights slice = problem.weights;
      slice.intermediate = 64;
      for (ExpertMatrices& expert : slice.experts) {
        for (WeightMatrix* matrix : {&expert.gate, &expert.up}) {
          for (TensorView* view : {&matrix->values, &matrix->scales, &matrix->bias}) {
            *view = view->slice(0, begin, begin + 64);
          }
        }
        expert.down.values = expert.down.values.slice(1, begin / 8, begin / 8 + 8);
        expert.down.scales = expert.down.scales.slice(1, 0, begin == 0 ? 1 : 2);
        expert.down.first_col = begin;
      }
      spec.intermediate = 64;
      const auto experts = make_experts(spec);
      const auto packed = experts->pack(slice);
      save_packed(*experts, *packed, folder / "packed");
      const auto loaded = load_packed(*experts, {folder / "packed"});
      expect_same_parts(*loaded, *packed);
      const ExpertWeights unpacked = experts->unpack(*loaded, 1);
      EXPECT_EQ(unpacked.experts.front().down.first_col, slice.experts[1].down.first_col);
      EXPECT_EQ(unpacked.experts.front().down.scales.dtype(), scales);
    }
  }
}

/// Files do not depend on the machine: parts of NUMA nodes are put together, and apart again.
TEST(PackedFileTest, IsTheSameForNumaNodes) {
  const Problem problem = make_problem(small_case(parse_scheme("mxfp4_w4a16")));
  const auto experts = make_experts(problem.spec);
  const auto info = experts->pack(problem.weights)->info();
  const std::vector<core::NumaNode> nodes = {{0, {0}}, {1, {1}}};
  const cpu::CpuPackedWeights one(info, problem.weights, {}), two(info, problem.weights, {}, nodes);
  ASSERT_EQ(two.gemm1().parts.size(), 2U);
  const PackedParts parts = two.parts();
  EXPECT_TRUE(bitwise_equal(parts.at("tiles"), one.parts().at("tiles")));
  const cpu::CpuPackedWeights again(info, parts, nodes);
  ASSERT_EQ(again.gemm1().parts.size(), 2U);
  expect_same_parts(again, two);
}

TEST(PackedFileTest, LayersRunWithIt) {
  const TemporaryDirectory folder;
  testing::LayerSpec spec{.experts = small_case(parse_scheme("nvfp4")), .shared_experts = true};
  const LayerWeights weights = testing::make_layer_weights(spec);
  const MoeLayer layer(weights);
  layer.save_packed(folder / "packed");
  LayerOptions options;
  options.packed_weights = {folder / "packed"};
  const MoeLayer again(weights, options);
  EXPECT_TRUE(again.packed_weights().info().read_only);
  const Tensor x = testing::random_tensor(DType::kBF16, {5, 160}, 1, 3);
  EXPECT_TRUE(bitwise_equal(again.forward(x), layer.forward(x)));
  options.packed_weights = {folder / "missing"};
  EXPECT_NE(testing::error_text([&] { MoeLayer(weights, options); }).find("missing"),
            std::string::npos);
}

TEST(PackedFileTest, ReferenceHasNoLayoutToKeep) {
  const TemporaryDirectory folder;
  const Problem problem = make_problem(small_case(parse_scheme("mxfp4_w4a16")));
  const auto experts =
      reference::descriptor().create(testing::make_config(problem.spec, DType::kBF16), {});
  const auto packed = experts->pack(problem.weights);
  EXPECT_NE(testing::error_text([&] {
              save_packed(*experts, *packed, folder / "packed");
            }).find("reference has no layout"),
            std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(folder / "packed"));
}

class RefusedPackedFileTest : public ::testing::Test {
 protected:
  RefusedPackedFileTest() {
    save_packed(*experts_, *experts_->pack(problem_.weights), path_);
    const SafetensorsFile file = SafetensorsFile::open(path_);
    tensors_ = file.tensors();
    metadata_ = {file.metadata().begin(), file.metadata().end()};
  }

  /// Of the file with other tensors or metadata.
  std::string error(bool verify = true) {
    save_safetensors(folder_ / "other", {tensors_.begin(), tensors_.end()}, metadata_);
    return testing::error_text([&] {
      load_packed(*experts_, {folder_ / "other", FileAccess::kRead, verify});
    });
  }
  void expect_error(const std::string& words, bool verify = true) {
    const std::string text = error(verify);
    EXPECT_NE(text.find(words), std::string::npos) << text;
    EXPECT_NE(text.find((folder_ / "other").string()), std::string::npos) << text;
  }

  const TemporaryDirectory folder_;
  const Problem problem_ = make_problem(small_case(parse_scheme("int4_g32")));
  const std::shared_ptr<const Experts> experts_ = make_experts(problem_.spec);
  const std::filesystem::path path_ = folder_ / "packed";
  std::map<std::string, Tensor, std::less<>> tensors_;
  std::map<std::string, std::string> metadata_;
};

TEST_F(RefusedPackedFileTest, OfAnotherLayer) {
  const std::pair<std::function<void(Case&)>, const char*> others[] = {
      {[](Case& c) { c.scheme = parse_scheme("int4_g64"); }, "scheme int4_g32"},
      {[](Case& c) { c.num_experts = 4; }, "num_experts 3"},
      {[](Case& c) { c.hidden = 192; }, "hidden 160"},
      {[](Case& c) { c.intermediate = 64; }, "intermediate 72"},
      {[](Case& c) { c.activation = Activation::kGelu; }, "activation silu"},
      {[](Case& c) { c.activation_params.limit = 5; }, "activation_params"},
      {[](Case& c) { c.bias = false; }, "bias yes"}};
  for (const auto& [change, words] : others) {
    Case spec = problem_.spec;
    change(spec);
    const auto experts = make_experts(spec);
    const std::string text = testing::error_text([&] { load_packed(*experts, {path_}); });
    EXPECT_NE(text.find(words), std::string::npos) << text;
  }
  const auto f32 = make_experts(problem_.spec, DType::kF32);
  EXPECT_NE(testing::error_text([&] { load_packed(*f32, {path_}); }).find("dtype bf16"),
            std::string::npos);
}

TEST_F(RefusedPackedFileTest, OfAnotherLayout) {
  metadata_["layout_version"] = "1";
  expect_error("layout_version 1");
  metadata_["packed_for"] = "sm90";
  expect_error("packed_for sm90");
  metadata_.erase("format");
  expect_error("no file of packed weights");
}

TEST_F(RefusedPackedFileTest, ThatIsDamaged) {
  for (const auto& [name, tensor] : std::map(tensors_)) {
    for (const std::int64_t at : {std::int64_t{0}, tensor.nbytes() / 2, tensor.nbytes() - 1}) {
      Tensor changed = Tensor::empty(tensor.shape(), tensor.dtype());
      copy(tensor, changed, Stream{});
      changed.as<std::uint8_t>()[at] ^= 1;
      tensors_[name] = changed;
      expect_error("checksum");
    }
    tensors_[name] = tensor;
  }
  metadata_["a1_scale"] = "3";
  expect_error("checksum");
  expect_error("checksum", false);
}

/// Whatever the parts are, with a checksum of their own or none asked for: an Error, or weights.
TEST_F(RefusedPackedFileTest, WithPartsThatDoNotFit) {
  const auto info = experts_->pack(problem_.weights)->info();
  const PackedParts parts(tensors_.begin(), tensors_.end());
  for (const auto& [name, tensor] : parts) {
    PackedParts changed = parts;
    changed.erase(name);
    EXPECT_NE(testing::error_text([&] { experts_->from_parts(info, changed); }).find(name),
              std::string::npos);
    changed[name] = Tensor::zeros({3}, DType::kU8);
    EXPECT_NE(testing::error_text([&] { experts_->from_parts(info, changed); }).find(name),
              std::string::npos);
  }
  for (const auto& [name, type] : {std::pair("formats", "int"), std::pair("first", "long"),
                                   std::pair("scale_dtypes", "int")}) {
    for (std::int64_t i = 0; i < parts.at(name).numel(); ++i) {
      Tensor changed = Tensor::empty(parts.at(name).shape(), parts.at(name).dtype());
      copy(parts.at(name), changed, Stream{});
      if (std::string(type) == "int") {
        changed.as<std::int32_t>()[i] = 99;
      } else {
        changed.as<std::int64_t>()[i] = -1;
      }
      PackedParts others = parts;
      others[name] = changed;
      EXPECT_NE(testing::error_text([&] { experts_->from_parts(info, others); }).find(name),
                std::string::npos);
    }
  }
}

}  // namespace fusedmoe::packed_file_test
