// Choice of the instruction set, once per process.
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <array>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "cpu/kernels.h"
#include "cpu/levels.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {
namespace cpu {
namespace {

#if defined(__x86_64__)
/// AMX with products of bf16 and of 8-bit integers, and the kernel's permission to use the tile
/// registers.
bool amx_available() {
#if defined(__linux__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  constexpr unsigned kNeeded = kAmxBf16 | kAmxTile | kAmxInt8;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kNeeded) != kNeeded) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

/// The 256-bit dot products of processors without AVX-512.
bool avx_vnni_available() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAvxVnni = 1u << 4;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kAvxVnni);
}

/// Clang 14 does not know the name "f16c" in __builtin_cpu_supports.
bool f16c_available() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

/// Finds the levels of instructions that this machine has, and keeps the kernel table of each.
class Levels {
 public:
  Levels();
  std::span<const Kernels* const> best_first() const { return {first_, tables_.end()}; }

 private:
  void add(const Kernels& table) { *--first_ = &table; }

  std::array<const Kernels*, 8> tables_ = {};
  decltype(tables_)::iterator first_ = tables_.end();
};

Levels::Levels() {
  add(generic_kernels());
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !f16c_available()) {
    return;
  }
  add(avx2_kernels());
  if (avx_vnni_available()) add(avx2_vnni_kernels());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    add(avx512_kernels());
    if (__builtin_cpu_supports("avx512vnni")) {
      const bool has_bf16 =
          __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
      // On Intel vdpbf16ps is slower than fp32 products (docs/performance-cpu.md). So there
      // avx512_vnni is better than avx512_bf16: a virtual machine without AMX takes it.
      const bool prefers_fp32 = __builtin_cpu_is("intel");
      if (has_bf16 && prefers_fp32) add(avx512_bf16_kernels());
      add(avx512_vnni_kernels());
      if (has_bf16 && !prefers_fp32) add(avx512_bf16_kernels());
      if (has_bf16 && amx_available()) add(amx_kernels());
    }
  }
#elif defined(__aarch64__) && defined(__linux__)
  add(neon_kernels());
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  if (first & HWCAP_ASIMDDP) {
    add(neon_dotprod_kernels());
    if (second & HWCAP2_I8MM) {
      add(neon_i8mm_kernels());
      if (second & HWCAP2_BF16) add(neon_bf16_kernels());
    }
  }
#endif
}

const Kernels& choose() {
  const char* wanted = std::getenv("FUSEDMOE_CPU_ISA");
  std::string known;
  for (const Kernels* level : levels()) {
    if (!wanted || *wanted == '\0' || std::string_view(wanted) == level->name) return *level;
    known += (known.empty() ? "" : ", ") + std::string(level->name);
  }
  throw Error::unsupported(Reason::kDevice, "FUSEDMOE_CPU_ISA", wanted,
                           "one that this machine has: " + known);
}

}  // namespace

std::span<const Kernels* const> levels() {
  static const Levels all;
  return all.best_first();
}

bool prefers_side_by_side() {
#if defined(__x86_64__)
  // Zen 4, and Zen 3, which lacks AVX-512 and so has no kernel that could choose.
  static const bool prefers = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("amdfam19h") != 0;
  }();
  return prefers;
#else
  return false;
#endif
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace cpu

std::string_view cpu_isa() {
  return cpu::kernels().name;
}

std::vector<std::string_view> cpu_isas() {
  std::vector<std::string_view> names;
  for (const cpu::Kernels* level : cpu::levels()) names.emplace_back(level->name);
  return names;
}

}  // namespace fusedmoe
