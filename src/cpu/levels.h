// The levels of instructions: which a processor has, and in which order it prefers them.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "cpu/kernels.h"

namespace fusedmoe::cpu {

/// What the choice asks of a processor.
struct Processor {
  bool avx2 = false;      ///< with FMA and F16C
  bool avx_vnni = false;  ///< 256 bits wide, of processors without AVX-512
  bool avx512 = false;    ///< F, BW, VL and DQ
  bool avx512_vnni = false;
  bool avx512_bf16 = false;  ///< with VBMI
  bool amx = false;          ///< products of bf16 and of 8-bit integers, which the system allows
  bool neon = false, neon_dotprod = false, neon_i8mm = false, neon_bf16 = false;
  bool intel = false;
  bool zen3_or_4 = false;
};

/// The one that this runs on.
const Processor& processor();

/// The names of the levels that a processor has, the best first.
std::vector<std::string_view> level_names(const Processor& processor);

/// The tables of this machine's levels, the best first.
std::span<const Kernels* const> levels();

/// Whether a processor is faster if a core reads several tiles of MXFP4 side by side than if it
/// reads one and prefetches the next. As measured: Zen 4 is, Zen 5 is not. (Zen 3 lacks AVX-512,
/// and so has no kernel that could choose.)
inline bool prefers_side_by_side(const Processor& processor) {
  return processor.zen3_or_4;
}

}  // namespace fusedmoe::cpu
