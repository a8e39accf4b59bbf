#include "core/numa.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string_view>

namespace fusedmoe::core {
namespace {

namespace fs = std::filesystem;

/// Reads a number from the front of the text; -1 if there is none.
int take_number(std::string_view& text) {
  int number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return error == std::errc() ? number : -1;
}

bool take_character(std::string_view& text, char character) {
  if (!text.starts_with(character)) return false;
  text.remove_prefix(1);
  return true;
}

/// Those of the ascending CPUs `allowed` that a list like "0-3,8" names; none if it is not one.
std::vector<int> cpus_in(std::string_view list, const std::vector<int>& allowed) {
  std::vector<int> cpus;
  do {
    const int first = take_number(list);
    const int last = take_character(list, '-') ? take_number(list) : first;
    if (first < 0 || last < first) return {};
    std::copy_if(allowed.begin(), allowed.end(), std::back_inserter(cpus),
                 [&](int cpu) { return first <= cpu && cpu <= last; });
  } while (take_character(list, ','));
  return list.empty() ? cpus : std::vector<int>{};
}

/// CPUs that the calling thread may use.
std::vector<int> allowed_cpus() {
  cpu_set_t set[8];  // the kernel needs a bit for each possible CPU: 8192 here
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof(set), set) != 0) return cpus;
  for (int cpu = 0; cpu < static_cast<int>(8 * sizeof(set)); ++cpu) {
    if (CPU_ISSET_S(static_cast<unsigned>(cpu), sizeof(set), set)) cpus.push_back(cpu);
  }
  return cpus;
}

/// Every CPU that a system may have.
std::vector<int> all_cpus() {
  std::vector<int> cpus(8192);
  std::iota(cpus.begin(), cpus.end(), 0);
  return cpus;
}

struct Topology {
  std::vector<NumaNode> nodes;
  std::vector<int> index_of_cpu;  // in `nodes`, of CPUs up to the highest one that has a node
};

Topology read_topology() {
  const char* variable = std::getenv("FUSEDMOE_NUMA_NODES");
  Topology topology;
  topology.nodes = read_numa_nodes(variable ? variable : "/sys/devices/system/node", all_cpus());
  if (topology.nodes.size() > kMaxNumaNodes) topology.nodes.clear();
  for (std::size_t i = 0; i < topology.nodes.size(); ++i) {
    for (const int cpu : topology.nodes[i].cpus) {
      auto& index = topology.index_of_cpu;
      index.resize(std::max(index.size(), static_cast<std::size_t>(cpu) + 1));
      index[static_cast<std::size_t>(cpu)] = static_cast<int>(i);
    }
  }
  return topology;
}

const Topology& topology() {
  static const auto& topology = *new Topology(read_topology());  // threads may outlive it
  return topology;
}

}  // namespace

std::vector<NumaNode> read_numa_nodes(const std::string& folder, const std::vector<int>& allowed) {
  std::vector<NumaNode> nodes;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::string_view rest = name;
    if (!rest.starts_with("node")) continue;
    rest.remove_prefix(4);
    const int number = take_number(rest);
    if (number < 0 || !rest.empty()) continue;
    std::ifstream file(entry->path() / "cpulist");
    std::string list;
    std::getline(file, list);
    std::vector<int> cpus = cpus_in(list, allowed);
    if (!cpus.empty()) nodes.push_back({number, std::move(cpus)});
  }
  std::sort(nodes.begin(), nodes.end(),
            [](const NumaNode& a, const NumaNode& b) { return a.number < b.number; });
  return nodes;
}

const std::vector<NumaNode>& numa_nodes() {
  return topology().nodes;
}

std::vector<NumaNode> usable_numa_nodes() {
  std::vector<NumaNode> nodes = numa_nodes();
  const std::vector<int> allowed = allowed_cpus();
  for (NumaNode& node : nodes) {
    std::erase_if(node.cpus, [&](int cpu) {
      return !std::binary_search(allowed.begin(), allowed.end(), cpu);
    });
  }
  return nodes;
}

int current_numa_node() {
  const Topology& known = topology();
  if (known.nodes.size() < 2) return 0;
  const int cpu = sched_getcpu();
  const auto index = static_cast<std::size_t>(cpu);
  return cpu >= 0 && index < known.index_of_cpu.size() ? known.index_of_cpu[index] : 0;
}

void prefer_numa_node(void* memory, std::size_t bytes, int number) {
#if defined(SYS_mbind)
  constexpr long kDefault = 0, kPreferred = 1, kMove = 2;  // MPOL_*, of <numaif.h>
  constexpr std::size_t kBits = 8 * sizeof(unsigned long);
  unsigned long nodes[1024 / kBits] = {};
  const bool some = number >= 0;
  const auto node = static_cast<std::size_t>(number);
  if (some && node >= 8 * sizeof(nodes)) return;
  if (some) nodes[node / kBits] = 1ul << (node % kBits);
  // Whole pages only.
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / page * page;
  if (begin >= end) return;
  syscall(SYS_mbind, begin, end - begin, some ? kPreferred : kDefault, some ? nodes : nullptr,
          some ? 8 * sizeof(nodes) : 0, some ? kMove : 0);
#endif
}

}  // namespace fusedmoe::core
