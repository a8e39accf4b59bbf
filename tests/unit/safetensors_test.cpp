// Reading and writing safetensors: round trips, dtypes, alignment, atomic replacement.
#include "fusedmoe/safetensors.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "fusedmoe/tensor.h"
#include "gtest/gtest.h"
#include "safetensors_bytes.h"
#include "temporary_directory.h"

namespace fusedmoe::safetensors_test {

using testing::safetensors_bytes;
using testing::TemporaryDirectory;
using testing::write_file;

Tensor pattern(Shape shape, DType dtype, int seed) {
  Tensor tensor = Tensor::empty(shape, dtype);
  auto* data = tensor.as<unsigned char>();
  for (std::int64_t i = 0; i < tensor.nbytes(); ++i) {
    data[i] = static_cast<unsigned char>(i * 7 + seed);
  }
  return tensor;
}

bool same_bytes(const TensorView& a, const TensorView& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.nbytes())) == 0;
}

class SafetensorsTest : public ::testing::Test {
 protected:
  const TemporaryDirectory directory;
};

TEST_F(SafetensorsTest, RoundTripOfEveryDType) {
  std::map<std::string, Tensor> tensors;
  int seed = 0;
  for (DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kE4M3,
                      DType::kE5M2, DType::kE8M0, DType::kE2M1, DType::kI8, DType::kU8, DType::kI16,
                      DType::kI32, DType::kI64, DType::kBool}) {
    tensors.emplace("x." + std::string(name(dtype)), pattern({3, 2, 5}, dtype, ++seed));
  }
  tensors.emplace("scalar", pattern({}, DType::kF32, 90));
  tensors.emplace("empty", Tensor::empty({0, 7}, DType::kBF16));
  tensors.emplace("\"quotes\" \\ and \xc3\xa4\n", pattern({1}, DType::kU8, 91));
  const std::map<std::string, TensorView> views(tensors.begin(), tensors.end());
  const std::map<std::string, std::string> metadata{{"format", "pt"}, {"a", "\t\"b\""}};
  save_safetensors(directory / "x.safetensors", views, metadata);

  const SafetensorsFile file = SafetensorsFile::open(directory / "x.safetensors");
  EXPECT_EQ(file.names().size(), tensors.size());
  EXPECT_TRUE(std::ranges::is_sorted(file.names()));
  for (const auto& [name, tensor] : tensors) {
    ASSERT_TRUE(file.contains(name));
    EXPECT_TRUE(same_bytes(file.tensor(name), tensor)) << name;
  }
  EXPECT_EQ(file.metadata().size(), 2u);
  EXPECT_EQ(file.metadata().at("a"), "\t\"b\"");
}

TEST_F(SafetensorsTest, DataIsAlignedWhateverTheNames) {
  for (std::size_t length = 1; length < 70; length += 3) {
    const Tensor small = pattern({3}, DType::kU8, 1), wide = pattern({5}, DType::kF64, 2),
                 lines = pattern({2, 64}, DType::kU8, 3);
    const std::string name(length, 'a');  // sorts before the others
    save_safetensors(directory / "x.safetensors",
                     {{name, small}, {"lines", lines}, {"wide", wide}, {"z", lines}});
    const SafetensorsFile file = SafetensorsFile::open(directory / "x.safetensors");
    const auto address = [&](const std::string& of) {
      return reinterpret_cast<std::uintptr_t>(file.tensor(of).data());
    };
    EXPECT_EQ(address("wide") % 8, 0u);
    EXPECT_EQ(address("lines") % 64, 0u);
    EXPECT_EQ(address("z") % 64, 0u);
    EXPECT_TRUE(same_bytes(file.tensor("wide"), wide));
    EXPECT_TRUE(same_bytes(file.tensor(name), small));
    EXPECT_TRUE(same_bytes(file.tensor("z"), lines));
  }
}

// Element types need not be aligned in a valid file; tensors always are.
TEST_F(SafetensorsTest, MisalignedDataIsCopied) {
  const std::string header = R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                             R"("b":{"dtype":"F64","shape":[2],"data_offsets":[3,19]},)"
                             R"("c":{"dtype":"BF16","shape":[1],"data_offsets":[19,21]}})";
  for (std::size_t padding = 0; padding < 8; ++padding) {
    std::string bytes = safetensors_bytes(header + std::string(padding, ' '), 21);
    for (std::size_t i = 0; i < 21; ++i) bytes[bytes.size() - 21 + i] = static_cast<char>(i);
    const SafetensorsFile file = SafetensorsFile::parse(bytes.data(), bytes.size(), "bytes");
    for (const auto& [name, tensor] : file.tensors()) {
      const auto width = static_cast<std::uintptr_t>(bits(tensor.dtype()) / 8);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data()) % width, 0u) << name;
    }
    EXPECT_EQ(file.tensor("b").as<const unsigned char>()[15], 18);
    EXPECT_EQ(file.tensor("c").as<const unsigned char>()[0], 19);
  }
}

TEST_F(SafetensorsTest, ViewsOfAlignedDataPointIntoTheBytes) {
  alignas(64) char bytes[256] = {};
  std::string header = R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})";
  header.resize((header.size() + 3) / 4 * 4, ' ');
  const std::string text = safetensors_bytes(header, 16);
  ASSERT_LE(text.size(), sizeof bytes);
  std::copy(text.begin(), text.end(), bytes);
  const SafetensorsFile file = SafetensorsFile::parse(bytes, text.size(), "bytes");
  EXPECT_EQ(file.tensor("a").data(), bytes + text.size() - 16);
}

TEST_F(SafetensorsTest, TensorsOutliveTheFile) {
  const Tensor tensor = pattern({100}, DType::kI32, 5);
  save_safetensors(directory / "x.safetensors", {{"a", tensor}});
  Tensor kept;
  {
    const SafetensorsFile file = SafetensorsFile::open(directory / "x.safetensors");
    kept = file.tensor("a");
  }
  std::filesystem::remove(directory / "x.safetensors");
  EXPECT_TRUE(same_bytes(kept, tensor));
}

TEST_F(SafetensorsTest, FileWithoutTensors) {
  save_safetensors(directory / "x.safetensors", {});
  EXPECT_TRUE(SafetensorsFile::open(directory / "x.safetensors").names().empty());
  const std::string minimal = safetensors_bytes("{}", 0);
  EXPECT_TRUE(SafetensorsFile::parse(minimal.data(), minimal.size(), "x").names().empty());
}

TEST_F(SafetensorsTest, UnknownNameListsWhatThereIs) {
  save_safetensors(directory / "x.safetensors", {{"hidden", pattern({1}, DType::kU8, 0)}});
  const SafetensorsFile file = SafetensorsFile::open(directory / "x.safetensors");
  try {
    file.tensor("hidden_states");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("\"hidden\""), std::string::npos) << error.what();
  }
}

TEST_F(SafetensorsTest, SavingReplacesAndLeavesNoTemporaries) {
  save_safetensors(directory / "x.safetensors", {{"a", pattern({1}, DType::kU8, 0)}});
  const SafetensorsFile old = SafetensorsFile::open(directory / "x.safetensors");
  save_safetensors(directory / "x.safetensors", {{"b", pattern({2}, DType::kU8, 0)}});
  EXPECT_TRUE(SafetensorsFile::open(directory / "x.safetensors").contains("b"));
  EXPECT_EQ(old.tensor("a").as<const unsigned char>()[0], 0);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 1);
}

TEST_F(SafetensorsTest, SavingReplacesRegularFilesOnly) {
  const Tensor tensor = Tensor::zeros({3}, DType::kF32);
  const std::filesystem::path pipe = directory / "pipe", link = directory / "link";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::filesystem::create_symlink("/dev/null", link);
  for (const std::filesystem::path& path : {pipe, link, directory.path()}) {
    EXPECT_THROW(save_safetensors(path, {{"x", tensor}}), Error) << path;
  }
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 2);
}

TEST_F(SafetensorsTest, SavingRefusesWhatItCannotWrite) {
  const Tensor tensor = pattern({4, 4}, DType::kF32, 0);
  const auto save = [&](const std::string& name, const TensorView& view) {
    save_safetensors(directory / "x.safetensors", {{name, view}});
  };
  EXPECT_THROW(save("a", TensorView()), Error);
  EXPECT_THROW(save("a", tensor.transpose(0, 1)), Error);
  EXPECT_THROW(save("__metadata__", tensor), Error);
  EXPECT_THROW(save("bad \xff utf-8", tensor), Error);
  EXPECT_THROW(save("a", TensorView(tensor.data(), DType::kI4, {4})), Error);
  EXPECT_THROW(save("a", TensorView(tensor.data(), DType::kE2M1, {3})), Error);
  EXPECT_THROW(save_safetensors(directory / "no/such/directory", {{"a", tensor}}), Error);
  std::filesystem::create_directory(directory / "d");
  write_file(directory / "d/inside", "x");
  EXPECT_THROW(save_safetensors(directory / "d", {{"a", tensor}}), Error);
  EXPECT_FALSE(std::filesystem::exists(directory / "x.safetensors"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 1);
}

std::string failure_of(const SafetensorsFile& file) {
  try {
    file.tensor("x");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    return error.what();
  }
  return "no error";
}

TEST_F(SafetensorsTest, NoticesAFileThatChangedUnderIt) {
  const auto path = directory / "x.safetensors";
  for (const FileAccess access : {FileAccess::kMap, FileAccess::kRead}) {
    const Tensor tensor = pattern({100}, DType::kU8, 5);
    save_safetensors(path, {{"x", tensor}});
    const SafetensorsFile file = SafetensorsFile::open(path, {access});
    const Tensor before = file.tensor("x");
    EXPECT_TRUE(same_bytes(before, tensor));

    // Under a new name the old file is as it was.
    save_safetensors(path, {{"x", pattern({100}, DType::kU8, 6)}});
    EXPECT_TRUE(same_bytes(file.tensor("x"), tensor));

    const SafetensorsFile second = SafetensorsFile::open(path, {access});
    std::filesystem::last_write_time(
        path, std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
    EXPECT_NE(failure_of(second).find("was written to after it was opened"), std::string::npos);
    const SafetensorsFile third = SafetensorsFile::open(path, {access});
    std::filesystem::resize_file(path, 90);
    EXPECT_NE(failure_of(third).find("and has 90 now"), std::string::npos);
  }
}

TEST_F(SafetensorsTest, ReadTensorsNeedNoFile) {
  const auto path = directory / "x.safetensors";
  const Tensor tensor = pattern({3, 50}, DType::kBF16, 5);
  save_safetensors(path, {{"x", tensor}, {"empty", Tensor::empty({0, 7}, DType::kBF16)}});
  const SafetensorsFile file = SafetensorsFile::open(path, {FileAccess::kRead});
  const Tensor read = file.tensor("x");
  EXPECT_EQ(file.tensor("empty").numel(), 0);
  EXPECT_NE(read.data(), file.tensors().at("x").data());
  std::filesystem::resize_file(path, 0);
  EXPECT_TRUE(same_bytes(read, tensor));
}

}  // namespace fusedmoe::safetensors_test
