// NUMA nodes: which there are, weights in a part for each, and threads that take the work of their
// own node first. Nodes are files in a folder here, so any machine will do.
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/numa.h"
#include "core/parallel.h"
#include "cpu/experts.h"
#include "cpu/grouped_gemm.h"
#include "cpu/pack.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "small_case.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace fusedmoe::numa_test {

using core::NodeTasks;
using core::NumaNode;
using core::read_numa_nodes;
using testing::bitwise_equal;
using testing::Case;
using testing::make_experts;
using testing::make_problem;
using testing::Problem;

std::vector<int> first_cpus(int count) {
  std::vector<int> cpus(static_cast<std::size_t>(count));
  std::iota(cpus.begin(), cpus.end(), 0);
  return cpus;
}

/// A folder as /sys/devices/system/node.
class NumaFolder {
 public:
  NumaFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "numa.XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~NumaFolder() { std::filesystem::remove_all(path_); }
  NumaFolder(const NumaFolder&) = delete;
  NumaFolder& operator=(const NumaFolder&) = delete;

  void add(const std::string& node, const std::string& cpulist) const {
    std::filesystem::create_directory(path_ / node);
    std::ofstream(path_ / node / "cpulist") << cpulist;
  }
  std::vector<NumaNode> read(const std::vector<int>& allowed) const {
    return read_numa_nodes(path_.string(), allowed);
  }

 private:
  std::filesystem::path path_;
};

TEST(NumaNodesTest, AreReadByNumber) {
  const NumaFolder folder;
  folder.add("node10", "8\n");
  folder.add("node2", "4-5,7\n");
  folder.add("node0", "0-3,6\n");
  folder.add("power", "0\n");
  folder.add("node", "0\n");
  folder.add("node1x", "0\n");
  const auto nodes = folder.read(first_cpus(16));
  ASSERT_EQ(nodes.size(), 3U);
  EXPECT_EQ(nodes[0].number, 0);
  EXPECT_EQ(nodes[0].cpus, (std::vector<int>{0, 1, 2, 3, 6}));
  EXPECT_EQ(nodes[1].number, 2);
  EXPECT_EQ(nodes[1].cpus, (std::vector<int>{4, 5, 7}));
  EXPECT_EQ(nodes[2].number, 10);
  EXPECT_EQ(nodes[2].cpus, (std::vector<int>{8}));
}

TEST(NumaNodesTest, WithoutCpusAreLeftOut) {
  const NumaFolder folder;
  folder.add("node0", "0-3\n");
  folder.add("node1", "\n");  // memory alone
  folder.add("node2", "4-7\n");
  const auto nodes = folder.read(first_cpus(8));
  ASSERT_EQ(nodes.size(), 2U);
  EXPECT_EQ(nodes[1].number, 2);
}

TEST(NumaNodesTest, HaveTheCpusThatAreAllowed) {
  const NumaFolder folder;
  folder.add("node0", "0-3\n");
  folder.add("node1", "4-7\n");
  const auto nodes = folder.read({2, 5, 6, 900});
  ASSERT_EQ(nodes.size(), 2U);
  EXPECT_EQ(nodes[0].cpus, (std::vector<int>{2}));
  EXPECT_EQ(nodes[1].cpus, (std::vector<int>{5, 6}));
  ASSERT_EQ(folder.read({4, 7}).size(), 1U);
  EXPECT_EQ(folder.read({4, 7})[0].number, 1);
  EXPECT_TRUE(folder.read({}).empty());
}

TEST(NumaNodesTest, ThatCannotBeReadAreNone) {
  EXPECT_TRUE(read_numa_nodes("", first_cpus(4)).empty());
  EXPECT_TRUE(read_numa_nodes("/no/such/folder", first_cpus(4)).empty());
  const NumaFolder folder;
  for (const char* list : {"x", "0-", "-3", "3-1", "0,", "0-3 ", "0;1", "99999999999"}) {
    folder.add("node0", list);
    EXPECT_TRUE(folder.read(first_cpus(4)).empty()) << list;
  }
}

/// CPUs that the calling thread may use, of all nodes.
std::size_t count_usable_cpus() {
  std::size_t count = 0;
  for (const NumaNode& node : core::usable_numa_nodes()) count += node.cpus.size();
  return count;
}

TEST(NumaNodesTest, UsableCpusAreThoseOfTheCallingThread) {
  const std::size_t all = count_usable_cpus();
  std::size_t one = all;
  std::thread([&] {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<unsigned>(sched_getcpu()), &set);
    ASSERT_EQ(sched_setaffinity(0, sizeof(set), &set), 0);
    one = count_usable_cpus();
  }).join();
  EXPECT_EQ(one, std::min<std::size_t>(all, 1));
  EXPECT_EQ(count_usable_cpus(), all);
}

TEST(NumaNodesTest, OfThisMachine) {
  const auto& nodes = core::numa_nodes();
  EXPECT_LE(nodes.size(), static_cast<std::size_t>(core::kMaxNumaNodes));
  for (const NumaNode& node : nodes) EXPECT_FALSE(node.cpus.empty());
  const int node = core::current_numa_node();
  EXPECT_GE(node, 0);
  EXPECT_LT(node, std::max<int>(1, static_cast<int>(nodes.size())));
}

/// A wish for a node changes no byte, whether the node is there or not.
TEST(NumaNodesTest, PreferringOneKeepsTheContents) {
  Tensor memory = Tensor::zeros({1 << 20}, DType::kU8);
  auto* data = memory.as<std::uint8_t>();
  data[70000] = 1;
  for (const int node : {0, 1, 1023, 1024, 1 << 30, -1}) {
    core::prefer_numa_node(data + 1, static_cast<std::size_t>(memory.nbytes()) - 1, node);
  }
  core::prefer_numa_node(data, 1, 0);
  EXPECT_EQ(std::accumulate(data, data + memory.nbytes(), 0), 1);
}

TEST(NodeTasksTest, OwnPartComesFirst) {
  NodeTasks tasks(3);
  tasks.set_count(0, 2);
  tasks.set_count(2, 3);  // part 1 has none
  std::vector<std::pair<int, std::int64_t>> taken;
  for (const int home : {2, 0, 2, 1, 0, 0}) {
    const auto task = tasks.take(home);
    taken.emplace_back(task ? task->part : -1, task ? task->index : -1);
  }
  EXPECT_EQ(taken, (std::vector<std::pair<int, std::int64_t>>{
                       {2, 0}, {0, 0}, {2, 1}, {2, 2}, {0, 1}, {-1, -1}}));
}

TEST(NodeTasksTest, EachIsTakenOnce) {
  constexpr std::array<std::int64_t, 3> kCounts = {1000, 1, 3000};
  NodeTasks tasks(3);
  std::array<std::vector<std::atomic<int>>, 3> taken;
  for (std::size_t part = 0; part < kCounts.size(); ++part) {
    tasks.set_count(static_cast<int>(part), kCounts[part]);
    taken[part] = std::vector<std::atomic<int>>(static_cast<std::size_t>(kCounts[part]));
  }
  std::vector<std::thread> threads;
  for (int home = 0; home < 4; ++home) {
    threads.emplace_back([&, home] {
      while (const auto task = tasks.take(home % 3)) {
        ++taken[static_cast<std::size_t>(task->part)][static_cast<std::size_t>(task->index)];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& part : taken) {
    for (const auto& count : part) ASSERT_EQ(count, 1);
  }
}

std::vector<NumaNode> nodes_with(const std::vector<int>& counts) {
  std::vector<NumaNode> nodes;
  for (const int count : counts) {
    nodes.push_back({static_cast<int>(nodes.size()), first_cpus(count)});
  }
  return nodes;
}

/// 21 tiles in GEMM 1, 11 in GEMM 2.
Case case_of(std::string_view scheme) {
  Case spec;
  spec.num_tokens = 1;
  spec.num_experts = 3;
  spec.hidden = 672;
  spec.intermediate = 648;
  spec.scheme = parse_scheme(scheme);
  spec.bias = true;
  return spec;
}

/// Tiles of each part.
std::vector<std::int64_t> sizes(const cpu::PackedGemm& gemm) {
  std::vector<std::int64_t> result;
  for (const cpu::TilePart& part : gemm.parts) result.push_back(part.num_tiles);
  return result;
}

class NumaPackTest : public ::testing::Test {
 protected:
  std::shared_ptr<cpu::CpuPackedWeights> pack(const std::vector<NumaNode>& nodes) {
    return std::make_shared<cpu::CpuPackedWeights>(experts_->pack(problem_.weights)->info(),
                                                   problem_.weights, PackOptions(), nodes);
  }

  const Case spec_ = case_of("mxfp4_w4a16");
  const Problem problem_ = make_problem(spec_);
  const std::shared_ptr<const Experts> experts_ = make_experts(spec_);
};

TEST_F(NumaPackTest, NodesGetTilesByTheirCpus) {
  using Sizes = std::vector<std::int64_t>;
  EXPECT_EQ(sizes(pack({})->gemm1()), Sizes({21}));
  EXPECT_EQ(sizes(pack(nodes_with({4}))->gemm1()), Sizes({21}));
  EXPECT_EQ(sizes(pack(nodes_with({4, 4}))->gemm1()), Sizes({12, 9}));
  EXPECT_EQ(sizes(pack(nodes_with({4, 4}))->gemm2()), Sizes({4, 7}));
  EXPECT_EQ(sizes(pack(nodes_with({1, 3}))->gemm1()), Sizes({4, 17}));
  EXPECT_EQ(sizes(pack(nodes_with({1, 63}))->gemm1()), Sizes({0, 21}));
  EXPECT_EQ(sizes(pack(nodes_with({63, 1, 64}))->gemm2()), Sizes({4, 0, 7}));
  EXPECT_EQ(sizes(pack(nodes_with({64, 1}))->gemm2()), Sizes({11, 0}));
}

TEST_F(NumaPackTest, PartsHoldTheSameTiles) {
  const auto whole = pack({});
  for (const auto& counts : {std::vector{1, 1}, {1, 3}, {63, 1, 64}, {1, 1, 1, 1, 1}}) {
    const auto parted = pack(nodes_with(counts));
    for (std::int64_t expert = 0; expert < spec_.num_experts; ++expert) {
      for (std::int64_t tile = 0; tile < whole->gemm1().num_tiles; ++tile) {
        ASSERT_EQ(std::memcmp(whole->tile1(expert, tile), parted->tile1(expert, tile),
                              static_cast<std::size_t>(whole->gemm1().tile_bytes)),
                  0);
      }
      for (std::int64_t tile = 0; tile < whole->gemm2().num_tiles; ++tile) {
        ASSERT_EQ(std::memcmp(whole->tile2(expert, tile), parted->tile2(expert, tile),
                              static_cast<std::size_t>(whole->gemm2().tile_bytes)),
                  0);
      }
    }
  }
}

TEST_F(NumaPackTest, PartsComeApartAgainAndCanBeReplaced) {
  const auto same = [&](const ExpertWeights& weights, std::size_t expert) {
    const ExpertMatrices &a = weights.experts[0], &b = problem_.weights.experts[expert];
    return bitwise_equal(a.up.values, b.up.values) && bitwise_equal(a.down.values, b.down.values);
  };
  const auto parted = pack(nodes_with({1, 3}));
  EXPECT_TRUE(same(parted->unpack(2), 2));
  ExpertWeights one = problem_.weights;
  one.experts.resize(1);
  experts_->repack(one, 2, *parted);
  EXPECT_TRUE(same(parted->unpack(2), 0));
  EXPECT_TRUE(same(parted->unpack(1), 1));
}

/// Threads of two callers, each on a node of its own, share the work tiles of uneven parts.
TEST_F(NumaPackTest, WorkTilesAreComputedOnce) {
  const auto weights = pack(nodes_with({1, 3}));
  const cpu::PackedGemm& gemm = weights->gemm1();
  const std::array<std::int32_t, 4> expert_offsets = {0, 1, 1, 401};  // 1, 0 and 400 rows
  std::vector<std::int64_t> work_offsets(2 * 4);
  cpu::GroupedGemm work(gemm, expert_offsets.data(), 3, work_offsets.data());
  std::vector<std::atomic<int>> done(static_cast<std::size_t>(401 * gemm.num_tiles));
  const auto help = [&](int node) {
    bool own = true;  // until the node's part has no work tiles left
    while (const auto task = work.take(node)) {
      if (task->part != node) own = false;
      EXPECT_TRUE(own || task->part != node);
      const auto tile = work.at(*task);
      const cpu::TilePart& part = gemm.parts[static_cast<std::size_t>(task->part)];
      EXPECT_GE(tile.first_tile, part.first_tile);
      EXPECT_LE(tile.first_tile + tile.tiles, part.first_tile + part.num_tiles);
      for (std::int64_t row = 0; row < tile.rows; ++row) {
        const std::int64_t number =
            expert_offsets[static_cast<std::size_t>(tile.expert)] + tile.first_row + row;
        for (int i = 0; i < tile.tiles; ++i) {
          ++done[static_cast<std::size_t>(number * gemm.num_tiles + tile.first_tile + i)];
        }
      }
    }
  };
  std::thread other(help, 1);
  help(0);
  other.join();
  for (const auto& count : done) ASSERT_EQ(count, 1);
}

}  // namespace fusedmoe::numa_test
