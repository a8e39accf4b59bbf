// Choice of the instruction set, once per process.
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <string_view>

#include "core/check.h"
#include "cpu/kernels.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {
namespace cpu {
namespace {

struct Level {
  const Kernels* kernels;
  bool available;
};

#if defined(__x86_64__)
/// AMX with bf16 products, and the kernel's permission to use the tile registers.
bool amx_available() {
#if defined(__linux__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

/// Clang 14 does not know the name "f16c" in __builtin_cpu_supports.
bool f16c_available() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

const Kernels& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c_available();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") &&
                    __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  const bool amx = bf16 && amx_available();
  const Level levels[] = {{amx ? &amx_kernels() : nullptr, amx},
                          {&kAvx512Bf16Kernels, bf16},
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
  throw Error::unsupported(Reason::kDevice, "FUSEDMOE_CPU_ISA", wanted,
                           "one that this machine has: " + known);
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
