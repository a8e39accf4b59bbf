// Copies, streams, events and graphs on the CPU, and devices that are not there.
#include "fusedmoe/runtime.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "fusedmoe/error.h"
#include "fusedmoe/tensor.h"
#include "testing/compare.h"

namespace fusedmoe::runtime_test {

using testing::bitwise_equal;

const Device kMissing{DeviceKind::kCuda, 999};

/// Lists of parameters ask what the CPU runs before any test does. Where FUSEDMOE_CPU_ISA names a
/// level that it lacks, the program ends here with that text, by which ctest knows to skip it.
[[maybe_unused]] const std::string_view kLevel = [] {
  try {
    return cpu_isa();
  } catch (const Error& error) {
    std::fputs(error.what(), stderr);
    std::_Exit(1);
  }
}();

Tensor sequence(std::int64_t count) {
  Tensor tensor = Tensor::empty({count}, DType::kI32);
  for (std::int64_t i = 0; i < count; ++i) {
    tensor.as<std::int32_t>()[i] = static_cast<std::int32_t>(i);
  }
  return tensor;
}

#if defined(__x86_64__) && defined(__linux__)
/// What the kernel of the system says about the processor, under one name.
std::set<std::string> processor_words(std::string_view name) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name)) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

TEST(RuntimeTest, LevelsAreThoseOfTheProcessor) {
  const std::set<std::string> flags = processor_words("flags");
  const auto has = [&](std::initializer_list<const char*> needed) {
    return std::all_of(needed.begin(), needed.end(), [&](auto* flag) { return flags.count(flag); });
  };
  std::vector<std::string_view> expected;
  const auto add = [&](const char* level, bool available) {
    if (available) expected.insert(expected.begin(), level);
    return available;
  };
  add("generic", true);
  if (add("avx2", has({"avx2", "fma", "f16c"}))) {
    add("avx2_vnni", has({"avx_vnni"}));
    if (add("avx512", has({"avx512f", "avx512bw", "avx512vl", "avx512dq"})) &&
        has({"avx512_vnni"})) {
      const bool has_bf16 = has({"avx512_bf16", "avx512vbmi"});
      const bool is_intel = processor_words("vendor_id").count("GenuineIntel") > 0;
      add("avx512_bf16", has_bf16 && is_intel);
      add("avx512_vnni", true);
      add("avx512_bf16", has_bf16 && !is_intel);
      add("amx", has_bf16 && has({"amx_tile", "amx_bf16", "amx_int8"}));
    }
  }
  EXPECT_EQ(cpu_isas(), expected);
}
#endif

TEST(RuntimeTest, CopiesAndFills) {
  const Tensor source = sequence(100), target = Tensor::zeros({100}, DType::kI32);
  copy(source, target, {});
  EXPECT_TRUE(bitwise_equal(target, source));
  fill_bytes(target, 0, {});
  EXPECT_TRUE(bitwise_equal(target, Tensor::zeros({100}, DType::kI32)));
  EXPECT_EQ(to_device(source, {}).data(), source.data());
  EXPECT_NO_THROW(copy(Tensor::empty({0}, DType::kF32), Tensor::empty({0}, DType::kF32), {}));
}

TEST(RuntimeTest, CopiesOfWhatDoesNotFitAreErrors) {
  const Tensor a = sequence(8), b = sequence(7), f = Tensor::zeros({8}, DType::kF32);
  EXPECT_THROW(copy(a, b, {}), Error);
  EXPECT_THROW(copy(a, f, {}), Error);
  EXPECT_THROW(copy({}, a, {}), Error);
  EXPECT_THROW(copy(a.slice(0, 0, 8, 2), a.slice(0, 0, 4), {}), Error);
  EXPECT_THROW(fill_bytes(a, 0, Stream{kMissing}), Error);
}

TEST(RuntimeTest, EventsMeasureTime) {
  const OwnedStream stream{Device{}};
  Event start{Device{}}, end{Device{}};
  EXPECT_THROW(elapsed_ms(start, end), Error);
  start.record(stream);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  end.record(stream);
  end.wait(stream);
  synchronize(stream);
  EXPECT_GE(elapsed_ms(start, end), 5);
  EXPECT_THROW(start.record(Stream{kMissing}), Error);
}

TEST(RuntimeTest, AGraphRunsWhenLaunched) {
  int runs = 0;
  const Graph graph(Stream{}, [&] { ++runs; });
  EXPECT_EQ(runs, 0);
  graph.launch({});
  graph.launch({});
  EXPECT_EQ(runs, 2);
  EXPECT_THROW(graph.launch(Stream{kMissing}), Error);
  EXPECT_THROW(Graph(Stream{}, {}), Error);
}

TEST(RuntimeTest, AMissingDeviceHasAReasonAndIsAnError) {
  EXPECT_EQ(device_problem({}), "");
  EXPECT_NE(device_problem(kMissing), "");
  EXPECT_NE(device_problem({DeviceKind::kCuda, -1}), "");
  EXPECT_THROW(Tensor::empty({1}, DType::kU8, kMissing), Error);
  EXPECT_THROW(Tensor::zeros({1}, DType::kU8, kMissing), Error);
  EXPECT_THROW(to_device(sequence(3), kMissing), Error);
  EXPECT_THROW(OwnedStream{kMissing}, Error);
  EXPECT_THROW(Event{kMissing}, Error);
}

}  // namespace fusedmoe::runtime_test
