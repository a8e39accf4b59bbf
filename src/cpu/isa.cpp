// Choice of the instruction set, once per process.
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

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

Processor detect() {
  Processor found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  found.intel = __builtin_cpu_is("intel") != 0;
  found.zen3_or_4 = __builtin_cpu_is("amdfam19h") != 0;
  found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c_available();
  found.avx_vnni = avx_vnni_available();
  found.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  found.avx512_vnni = __builtin_cpu_supports("avx512vnni");
  found.avx512_bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  found.amx = found.avx512_bf16 && amx_available();
#elif defined(__aarch64__) && defined(__linux__)
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  found.neon = true;
  found.neon_dotprod = first & HWCAP_ASIMDDP;
  found.neon_i8mm = second & HWCAP2_I8MM;
  found.neon_bf16 = second & HWCAP2_BF16;
#endif
  return found;
}

/// Makes the table of a level.
const Kernels& table_of(std::string_view name) {
  struct Level {
    std::string_view name;
    const Kernels& (*table)();
  };
  static constexpr Level kLevels[] = {
#if defined(__x86_64__)
    {"avx2", avx2_kernels},
    {"avx2_vnni", avx2_vnni_kernels},
    {"avx512", avx512_kernels},
    {"avx512_vnni", avx512_vnni_kernels},
    {"avx512_bf16", avx512_bf16_kernels},
    {"amx", amx_kernels},
#elif defined(__aarch64__)
    {"neon", neon_kernels},
    {"neon_dotprod", neon_dotprod_kernels},
    {"neon_i8mm", neon_i8mm_kernels},
    {"neon_bf16", neon_bf16_kernels},
#endif
    {"generic", generic_kernels},
  };
  const Level* level = kLevels;
  while (level->name != name) ++level;
  return level->table();
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

const Processor& processor() {
  static const Processor found = detect();
  return found;
}

std::vector<std::string_view> level_names(const Processor& has) {
  // On Intel vdpbf16ps is slower than fp32 products (docs/performance-cpu.md). So there avx512_vnni
  // is better than avx512_bf16: a virtual machine without AMX takes it.
  const bool prefers_fp32 = has.intel;
  const bool avx512 = has.avx2 && has.avx512, vnni = avx512 && has.avx512_vnni;
  const bool bf16 = vnni && has.avx512_bf16;
  const bool dotprod = has.neon && has.neon_dotprod, i8mm = dotprod && has.neon_i8mm;
  const struct {
    std::string_view name;
    bool there;
  } best_first[] = {
      {"amx", bf16 && has.amx}, {"avx512_bf16", bf16 && !prefers_fp32},
      {"avx512_vnni", vnni},    {"avx512_bf16", bf16 && prefers_fp32},
      {"avx512", avx512},       {"avx2_vnni", has.avx2 && has.avx_vnni},
      {"avx2", has.avx2},       {"neon_bf16", i8mm && has.neon_bf16},
      {"neon_i8mm", i8mm},      {"neon_dotprod", dotprod},
      {"neon", has.neon},       {"generic", true},
  };
  std::vector<std::string_view> names;
  for (const auto& level : best_first) {
    if (level.there) names.push_back(level.name);
  }
  return names;
}

std::span<const Kernels* const> levels() {
  static const std::vector<const Kernels*> tables = [] {
    std::vector<const Kernels*> found;
    for (const std::string_view name : level_names(processor())) found.push_back(&table_of(name));
    return found;
  }();
  return tables;
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
