// NUMA nodes: parts of a machine, each with CPUs and memory that these CPUs read fastest. Memory
// can be asked for on a node, and tasks be given to the threads that run there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fusedmoe::core {

struct NumaNode {
  int number = 0;         // the system's
  std::vector<int> cpus;  // ascending
};

inline constexpr int kMaxNumaNodes = 64;

/// Nodes with some of the CPUs `allowed`, by number, as the files <folder>/node<number>/cpulist
/// have them. Empty if nothing can be read.
std::vector<NumaNode> read_numa_nodes(const std::string& folder, const std::vector<int>& allowed);

/// The nodes of this machine that have CPUs, read once, from /sys/devices/system/node or the folder
/// that FUSEDMOE_NUMA_NODES names. Empty if nothing can be read, if that variable is empty, and
/// with more than kMaxNumaNodes.
const std::vector<NumaNode>& numa_nodes();

/// The same nodes, each with those of its CPUs that the calling thread may use; perhaps none.
std::vector<NumaNode> usable_numa_nodes();

/// Index in numa_nodes() of the node where the calling thread runs at this moment; 0 if unknown.
int current_numa_node();

/// Takes pages for this memory from the node as long as it has any, from now on; a negative number
/// ends that. It is a wish: some containers do not let processes say it.
void prefer_numa_node(void* memory, std::size_t bytes, int number);

/// Tasks in one part for each node, to be taken by several threads.
class NodeTasks {
 public:
  struct Task {
    int part = 0;
    std::int64_t index = 0;  // within the part
  };

  /// At most kMaxNumaNodes parts, without tasks.
  explicit NodeTasks(int num_parts) : num_parts_(num_parts) {}
  /// Before any task is taken.
  void set_count(int part, std::int64_t count) { parts_[part].count = count; }

  /// A task that nobody has taken: the next one of part `home` or, if that has none left, of the
  /// following parts. Nothing when all are taken.
  std::optional<Task> take(int home) {
    for (int i = 0; i < num_parts_; ++i) {
      const int number = (home + i) % num_parts_;
      Part& part = parts_[number];
      if (part.next.load(std::memory_order_relaxed) >= part.count) continue;
      const std::int64_t index = part.next.fetch_add(1, std::memory_order_relaxed);
      if (index < part.count) return Task{number, index};
    }
    return std::nullopt;
  }

 private:
  struct alignas(64) Part {
    std::atomic<std::int64_t> next{0};
    std::int64_t count = 0;
  };

  int num_parts_;
  Part parts_[kMaxNumaNodes];
};

}  // namespace fusedmoe::core
