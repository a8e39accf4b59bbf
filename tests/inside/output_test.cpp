// Outputs appear complete or not at all, and never in the place of another run's.
#include "files/output.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "error_text.h"
#include "temporary_directory.h"

namespace fusedmoe::files::output_test {

namespace fs = std::filesystem;
using testing::error_text;
using testing::TemporaryDirectory;

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::size_t num_entries(const fs::path& folder) {
  return static_cast<std::size_t>(
      std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

class OutputTest : public ::testing::Test {
 protected:
  const TemporaryDirectory directory;
};

TEST_F(OutputTest, WritersOfOneFileDoNotMix) {
  const fs::path path = directory / "x";
  {
    OutputFile first(path), second(path), third(path);
    first.write("first");
    second.write("second");
    third.write("third");
    EXPECT_FALSE(fs::exists(path));
    EXPECT_EQ(find_leftovers(path).size(), 3U);
    for (const Leftover& each : find_leftovers(path)) {
      EXPECT_EQ(each.owner, Leftover::Owner::kRuns);
      EXPECT_FALSE(remove_leftover(each.path));
    }
    second.finish();
    EXPECT_EQ(text_of(path), "second");
    first.finish();
  }
  EXPECT_EQ(text_of(path), "first");
  EXPECT_EQ(num_entries(directory.path()), 1U);
}

TEST_F(OutputTest, AFolderOfAnotherRunStays) {
  const fs::path path = directory / "model";
  {
    OutputFolder first(path), second(path);
    first.create("theirs")->write("first");
    second.create("ours")->write("second");
    first.commit("config.json");
    EXPECT_EQ(error_text([&] { second.commit("config.json"); }),
              "cannot write " + path.string() + ": another run has made it meanwhile");
  }
  EXPECT_EQ(text_of(path / "theirs"), "first");
  EXPECT_EQ(num_entries(path), 1U);
  EXPECT_EQ(num_entries(directory.path()), 1U);
}

TEST_F(OutputTest, AnEmptyFolderTakesOneRunAtATime) {
  const fs::path path = directory / "model";
  fs::create_directory(path);
  {
    OutputFolder folder(path);
    EXPECT_NE(error_text([&] { OutputFolder other(path); }).find("another run is writing there"),
              std::string::npos);
    for (const char* name : {"config.json", "a", "b"}) folder.create(name)->write("ours");
    std::ofstream(path / "b") << "theirs";
    EXPECT_NE(error_text([&] { folder.commit("config.json"); }).find("file exists"),
              std::string::npos);
    EXPECT_EQ(num_entries(path), 2U) << "what had moved moved back";
    fs::remove(path / "b");
    folder.commit("config.json");
  }
  EXPECT_EQ(num_entries(path), 3U);
  EXPECT_EQ(text_of(path / "config.json"), "ours");
}

TEST_F(OutputTest, DevicesAreWrittenToAsTheyAre) {
  OutputFile nothing("/dev/null");
  nothing.write("x");
  nothing.finish();
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  OutputFile full("/dev/full");
  EXPECT_EQ(error_text([&] { full.write("x"); }),
            "cannot write /dev/full: no space left on device");
}

TEST_F(OutputTest, OpenFilesAreWrittenToWhereTheyStand) {
  const fs::path path = directory / "stdout", link = directory / "link";
  for (const char* folder : {"/dev/fd", "/proc/self/fd"}) {
    const Descriptor descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    const fs::path number = fs::path(folder) / std::to_string(descriptor.value());
    fs::remove(link);
    fs::create_symlink(number, link);
    for (const fs::path& name : {number, link}) {
      ASSERT_EQ(::write(descriptor.value(), "text ", 5), 5);
      OutputFile file(name);
      file.write("plan ");
      file.finish();
    }
    EXPECT_EQ(text_of(path), "text plan text plan ") << folder;
  }
  EXPECT_EQ(num_entries(directory.path()), 2U);
}

TEST_F(OutputTest, PipesAreWrittenTo) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Descriptor from(ends[0]), to(ends[1]);
  // Also by the number of the process, as others name it.
  for (const std::string& process : {std::string("self"), std::to_string(::getpid())}) {
    OutputFile file("/proc/" + process + "/fd/" + std::to_string(to.value()));
    file.write("x");
    file.finish();
    char text = 0;
    ASSERT_EQ(::read(from.value(), &text, 1), 1);
    EXPECT_EQ(text, 'x');
  }
  EXPECT_EQ(error_text([] { OutputFile closed("/dev/fd/9999999"); }),
            "cannot write /dev/fd/9999999: bad file descriptor");
}

TEST_F(OutputTest, WhoLooksAtAnOutputLeavesNothingBehind) {
  const fs::path path = directory / "model";
  std::atomic<bool> done = false;
  std::thread other([&] {
    while (!done) find_leftovers(path);
  });
  for (int i = 0; i < 500; ++i) {
    const OutputFile file(path);
    const OutputFolder folder(path);
  }
  done = true;
  other.join();
  EXPECT_EQ(num_entries(directory.path()), 0U);
}

}  // namespace fusedmoe::files::output_test
