// CPU work on the OpenMP threads that another package of the process already has. Those wait awake
// for a while after each parallel region: threads of our own would share the cores with them.
#include <dlfcn.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "fusedmoe/runtime.h"
#include "module.h"
#include "tensors.h"

namespace fusedmoe::python {
namespace {

/// The threads of one loaded OpenMP runtime. GCC's and LLVM's have the same entry points.
class OpenMpExecutor final : public Executor {
 public:
  /// `path`: of the runtime, which is loaded.
  explicit OpenMpExecutor(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library) {
      parallel_ = reinterpret_cast<Parallel>(dlsym(library, "GOMP_parallel"));
      max_threads_ = reinterpret_cast<MaxThreads>(dlsym(library, "omp_get_max_threads"));
    }
    if (!parallel_ || !max_threads_) throw Error("path", path, "of a loaded OpenMP runtime");
  }

  int concurrency() const override { return max_threads_(); }
  void run(int num_tasks, Task task) override {
    if (num_tasks == 1) return task(0);
    Region region{num_tasks, task};
    const int threads = std::min(num_tasks, concurrency());
    parallel_(&Region::work, &region, static_cast<unsigned>(threads), 0);
  }

 private:
  using Parallel = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);
  using MaxThreads = int (*)();

  /// What the threads of one run() share.
  struct Region {
    const int num_tasks;
    const Task task;
    std::atomic<int> next{0};

    static void work(void* data) {
      auto& region = *static_cast<Region*>(data);
      for (int index; (index = region.next.fetch_add(1)) < region.num_tasks;) region.task(index);
    }
  };

  Parallel parallel_ = nullptr;
  MaxThreads max_threads_ = nullptr;
};

struct Executors {
  std::map<std::string, OpenMpExecutor> by_path;  // never erased: handles stay valid
  std::mutex mutex;

  static Executors& instance() {
    static auto* const executors = new Executors;  // threads may outlive static objects
    return *executors;
  }
};

std::uintptr_t openmp_stream(const std::string& path) {
  Executors& executors = Executors::instance();
  const std::lock_guard lock(executors.mutex);
  OpenMpExecutor& executor = executors.by_path.try_emplace(path, path).first->second;
  return reinterpret_cast<std::uintptr_t>(cpu_stream(executor).handle);
}

}  // namespace

bool is_openmp_stream(std::uintptr_t handle) {
  Executors& executors = Executors::instance();
  const std::lock_guard lock(executors.mutex);
  for (auto& [path, executor] : executors.by_path) {
    if (reinterpret_cast<std::uintptr_t>(cpu_stream(executor).handle) == handle) return true;
  }
  return false;
}

void bind_openmp(nb::module_& module) {
  module.def("openmp_stream", &openmp_stream, nb::arg("path"));
}

}  // namespace fusedmoe::python
