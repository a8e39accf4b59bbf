// MoE layers as quantization tools save them, against these tools' own arithmetic, and in the other
// forms that models are published in, against NumPy (tests/interop: tools.py and published_forms.py
// with --vectors).
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/layer.h"
#include "gtest/gtest.h"

namespace fusedmoe::tool_files_test {

std::vector<std::filesystem::path> files_of(const char* directory) {
  const std::filesystem::directory_iterator entries(directory);
  std::vector<std::filesystem::path> files(begin(entries), end(entries));
  std::sort(files.begin(), files.end());
  return files;
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

bool quantizes_activations(const Checkpoint::LayerSchemes& schemes) {
  return schemes.experts.activations ||
         (schemes.shared_experts && schemes.shared_experts->activations);
}

class FileTest : public ::testing::TestWithParam<std::filesystem::path> {};

// The first layer has the output "check.output", any other "check.output.<number>".
TEST_P(FileTest, LayersAreTheWantedOnes) {
  const SafetensorsFile file = SafetensorsFile::open(GetParam());
  const Checkpoint checkpoint = Checkpoint::open(GetParam());
  std::string wanted = "check.output";
  for (const std::int64_t number : checkpoint.moe_layers()) {
    // Sums of fp32 in another order.
    const bool codes = quantizes_activations(checkpoint.check_layer(number));
    const float limit = codes ? 1e-5F : 2e-6F;
    for (const char* experts : {"reference", "cpu"}) {
      SCOPED_TRACE(experts + (" layer " + std::to_string(number)));
      LayerOptions options;
      options.dtype = DType::kF32;
      options.require = experts;
      const MoeLayer layer(checkpoint.load_layer(number), options);
      const std::vector<float> differences =
          row_differences(layer.forward(file.tensor("check.input")), file.tensor(wanted));
      const auto larger = [limit](float difference) { return difference > limit; };
      const auto rows = std::count_if(differences.begin(), differences.end(), larger);
      if (codes) {
        // A value beside a tie may take the other code: of eight rows in one, by one code.
        EXPECT_LE(rows, 1);
        EXPECT_LE(*std::max_element(differences.begin(), differences.end()), 2e-2F);
      } else {
        EXPECT_EQ(rows, 0);
      }
    }
    wanted = "check.output." + std::to_string(number + 1);
  }
}

std::string test_name(const ::testing::TestParamInfo<std::filesystem::path>& info) {
  std::string name = info.param.stem().string();
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(OfTools, FileTest, ::testing::ValuesIn(files_of(FUSEDMOE_TOOLS_DIR)),
                         test_name);
INSTANTIATE_TEST_SUITE_P(OfOtherForms, FileTest, ::testing::ValuesIn(files_of(FUSEDMOE_FORMS_DIR)),
                         test_name);

}  // namespace fusedmoe::tool_files_test
