// One MoE layer as each quantization tool saves it, against that tool's own arithmetic
// (tests/interop/tools.py --vectors).
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/layer.h"
#include "gtest/gtest.h"

namespace fusedmoe {
namespace {

std::vector<std::string> vector_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(FUSEDMOE_TOOLS_DIR)) {
    names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The largest difference of each row, relative to the largest output.
std::vector<float> row_differences(const Tensor& actual, const Tensor& wanted) {
  const std::int64_t rows = wanted.size(0), columns = wanted.size(1);
  std::vector<float> differences(static_cast<std::size_t>(rows));
  float largest = 0;
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const float value = wanted.as<const float>()[i];
    float& difference = differences[static_cast<std::size_t>(i / columns)];
    largest = std::max(largest, std::abs(value));
    difference = std::max(difference, std::abs(actual.as<const float>()[i] - value));
  }
  EXPECT_GT(largest, 0);
  for (float& difference : differences) difference /= largest;
  return differences;
}

class ToolFileTest : public ::testing::TestWithParam<std::string> {};

TEST_P(ToolFileTest, LayerIsTheToolsOwn) {
  const auto path = std::filesystem::path(FUSEDMOE_TOOLS_DIR) / (GetParam() + ".safetensors");
  const SafetensorsFile file = SafetensorsFile::open(path);
  const Checkpoint checkpoint = Checkpoint::open(path);
  ASSERT_EQ(checkpoint.moe_layers().size(), 1u);
  for (const char* experts : {"reference", "cpu"}) {
    LayerOptions options;
    options.dtype = DType::kF32;
    options.require = experts;
    const std::int64_t number = checkpoint.moe_layers().front();
    const bool codes = checkpoint.check_layer(number).experts.activations.has_value();
    const MoeLayer layer(checkpoint.load_layer(number), options);
    const std::vector<float> differences =
        row_differences(layer.forward(file.tensor("check.input")), file.tensor("check.output"));
    // Sums of fp32 in another order.
    const float limit = codes ? 1e-5F : 2e-6F;
    const auto larger = [limit](float difference) { return difference > limit; };
    const auto rows = std::count_if(differences.begin(), differences.end(), larger);
    if (codes) {
      // A value beside a tie may take the other code: of eight rows in one, by one code.
      EXPECT_LE(rows, 1) << experts;
      EXPECT_LE(*std::max_element(differences.begin(), differences.end()), 2e-2F) << experts;
    } else {
      EXPECT_EQ(rows, 0) << experts;
    }
  }
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(All, ToolFileTest, ::testing::ValuesIn(vector_names()), test_name);

}  // namespace
}  // namespace fusedmoe
