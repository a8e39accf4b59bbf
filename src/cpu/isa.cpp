// Choice of the instruction set, once per process.
#include <cstdlib>
#include <string_view>

#include "core/check.h"
#include "cpu/kernels.h"
#include "fusedmoe/device.h"

namespace fusedmoe {
namespace cpu {
namespace {

struct Level {
  const Kernels* kernels;
  bool available;
};

const Kernels& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  const Level levels[] = {{&kAvx512Bf16Kernels, bf16},
                          {&kAvx512Kernels, avx512},
                          {&kAvx2Kernels, avx2},
                          {&kGenericKernels, true}};
#else
  const Level levels[] = {{&kGenericKernels, true}};
#endif
  const char* wanted = std::getenv("FUSEDMOE_CPU_ISA");
  std::string known;
  for (const Level& level : levels) {
    if (!level.available) continue;
    if (!wanted || *wanted == '\0' || std::string_view(wanted) == level.kernels->name) {
      return *level.kernels;
    }
    known += (known.empty() ? "" : ", ") + std::string(level.kernels->name);
  }
  throw Error("FUSEDMOE_CPU_ISA", wanted, "one that this machine has: " + known);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace cpu

std::string_view cpu_isa() {
  return cpu::kernels().name;
}

}  // namespace fusedmoe
