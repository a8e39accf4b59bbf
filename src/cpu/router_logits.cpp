// The router's first half: logits (num_tokens, num_experts) = x weight^T + bias, fp32.
//
// Every dot product is computed in the same order whatever the batch: 16 accumulators, the i-th of
// elements i, i + 16, ... (padded with zeros), which are added up as a tree. A tile of 4 tokens x 4
// experts loads each operand once; 256 columns at a time are widened to fp32 on the stack. The tile
// is compiled once per instruction set from the same source.
#include <algorithm>
#include <bit>
#include <cstring>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/router.h"
#include "fusedmoe/tensor.h"
#include "moe/check_args.h"

namespace fusedmoe {
namespace {

constexpr std::int64_t kLanes = 16;
constexpr std::int64_t kColumns = 256;           // per chunk
constexpr std::int64_t kTile = 8;                // tokens and experts of one task
constexpr std::int64_t kParallelWork = 1 << 18;  // about 20 us on one thread

/// Rows of one dtype, so many elements apart.
struct Rows {
  const char* data;
  DType dtype;
  std::int64_t stride;
};

struct Problem {
  Rows x;       // (num_tokens, hidden)
  Rows weight;  // (num_experts, hidden)
  Rows bias;    // (1, num_experts), or no data
  std::int64_t num_tokens, num_experts, hidden;
  float* logits;  // (num_tokens, num_experts)
};

using Chunk = float[kTile][kColumns];
using Accumulators = float[kTile][kTile][kLanes];

[[gnu::always_inline]] inline float widen_f16(std::uint16_t code) {
  // The exponent's bias differs by 112; a multiplication also gets subnormal numbers right.
  const float scaled = std::bit_cast<float>((code & 0x7fffu) << 13) * 0x1p112f;
  std::uint32_t bits = std::bit_cast<std::uint32_t>(scaled);
  bits = (code & 0x7c00u) == 0x7c00u ? bits | 0x7f800000u : bits;
  return std::bit_cast<float>(bits | (code & 0x8000u) << 16);
}

/// Elements [begin, begin + count) of one row, zero-padded to whole groups of lanes.
[[gnu::always_inline]] inline void widen(const Rows& rows, std::int64_t row, std::int64_t begin,
                                         std::int64_t count, float* __restrict out) {
  const std::int64_t first = row * rows.stride + begin;
  if (rows.dtype == DType::kF32) {
    std::memcpy(out, rows.data + first * 4, static_cast<std::size_t>(count) * 4);
  } else {
    const auto* codes = reinterpret_cast<const std::uint16_t*>(rows.data) + first;
    if (rows.dtype == DType::kBF16) {
      for (std::int64_t i = 0; i < count; ++i) {
        out[i] = std::bit_cast<float>(std::uint32_t{codes[i]} << 16);
      }
    } else {
      for (std::int64_t i = 0; i < count; ++i) out[i] = widen_f16(codes[i]);
    }
  }
  for (std::int64_t i = count; i % kLanes != 0; ++i) out[i] = 0;
}

/// accumulators[t][e] += x[t] * w[e] for kT tokens and kE experts, `count` columns, in registers of
/// kWidth floats.
template <int kWidth, int kT, int kE>
[[gnu::always_inline]] inline void multiply(const float (*x)[kColumns], const float (*w)[kColumns],
                                            std::int64_t count, float* accumulators) {
  using Vector [[gnu::vector_size(kWidth * sizeof(float))]] = float;
  constexpr int kParts = kLanes / kWidth;
  Vector acc[kT][kE][kParts];
  for (int t = 0; t < kT; ++t) {
    for (int e = 0; e < kE; ++e) {
      for (int p = 0; p < kParts; ++p) {
        std::memcpy(&acc[t][e][p], accumulators + (t * kTile + e) * kLanes + p * kWidth,
                    sizeof(Vector));
      }
    }
  }
  for (std::int64_t i = 0; i < count; i += kLanes) {
    for (int p = 0; p < kParts; ++p) {
      for (int t = 0; t < kT; ++t) {
        Vector a;
        std::memcpy(&a, &x[t][i + p * kWidth], sizeof(Vector));
        for (int e = 0; e < kE; ++e) {
          Vector b;
          std::memcpy(&b, &w[e][i + p * kWidth], sizeof(Vector));
          acc[t][e][p] += a * b;
        }
      }
    }
  }
  for (int t = 0; t < kT; ++t) {
    for (int e = 0; e < kE; ++e) {
      for (int p = 0; p < kParts; ++p) {
        std::memcpy(accumulators + (t * kTile + e) * kLanes + p * kWidth, &acc[t][e][p],
                    sizeof(Vector));
      }
    }
  }
}

/// Adds up the lanes, as a tree, and the bias.
void store_logits(const Problem& p, const Accumulators& accumulators, std::int64_t first_token,
                  std::int64_t first_expert) {
  const std::int64_t num_t = std::min(kTile, p.num_tokens - first_token);
  const std::int64_t num_e = std::min(kTile, p.num_experts - first_expert);
  float bias[kLanes] = {};
  if (p.bias.data) widen(p.bias, 0, first_expert, num_e, bias);
  for (std::int64_t t = 0; t < num_t; ++t) {
    for (std::int64_t e = 0; e < num_e; ++e) {
      float lanes[kLanes];
      std::memcpy(lanes, accumulators[t][e], sizeof(lanes));
      for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
      }
      p.logits[(first_token + t) * p.num_experts + first_expert + e] = lanes[0] + bias[e];
    }
  }
}

/// One task: up to kTile tokens times up to kTile experts; kT x kE at a time where there are that
/// many, which changes no dot product.
template <int kWidth, int kT, int kE>
[[gnu::always_inline]] inline void compute_tile(const Problem& p, std::int64_t first_token,
                                                std::int64_t first_expert) {
  const std::int64_t num_t = std::min(kTile, p.num_tokens - first_token);
  const std::int64_t num_e = std::min(kTile, p.num_experts - first_expert);
  alignas(64) Chunk x, w;
  alignas(64) Accumulators accumulators = {};
  for (std::int64_t begin = 0; begin < p.hidden; begin += kColumns) {
    const std::int64_t count = std::min(kColumns, p.hidden - begin);
    for (std::int64_t t = 0; t < num_t; ++t) widen(p.x, first_token + t, begin, count, x[t]);
    for (std::int64_t e = 0; e < num_e; ++e) widen(p.weight, first_expert + e, begin, count, w[e]);
    std::int64_t t = 0;
    for (; t + kT <= num_t; t += kT) {
      std::int64_t e = 0;
      for (; e + kE <= num_e; e += kE) {
        multiply<kWidth, kT, kE>(x + t, w + e, count, accumulators[t][e]);
      }
      for (; e < num_e; ++e) multiply<kWidth, kT, 1>(x + t, w + e, count, accumulators[t][e]);
    }
    for (; t < num_t; ++t) {
      for (std::int64_t e = 0; e < num_e; ++e) {
        multiply<kWidth, 1, 1>(x + t, w + e, count, accumulators[t][e]);
      }
    }
  }
  store_logits(p, accumulators, first_token, first_expert);
}

using TileFunction = void (*)(const Problem&, std::int64_t, std::int64_t);

// The shapes keep all accumulators in registers.
void tile_generic(const Problem& p, std::int64_t token, std::int64_t expert) {
  compute_tile<4, 1, 2>(p, token, expert);
}

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] void tile_avx2(const Problem& p, std::int64_t token,
                                           std::int64_t expert) {
  compute_tile<8, 2, 2>(p, token, expert);
}

[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,fma")]] void tile_avx512(const Problem& p,
                                                                           std::int64_t token,
                                                                           std::int64_t expert) {
  compute_tile<16, 4, 4>(p, token, expert);
}
#endif

TileFunction select_tile() {
#if defined(__x86_64__)
  const std::string_view isa = cpu_isa();
  if (isa.starts_with("avx512") || isa == "amx") return tile_avx512;
  if (isa.starts_with("avx2")) return tile_avx2;
#endif
  return tile_generic;
}

void check_operand(const TensorView& view, const char* argument, const Shape& shape) {
  core::check_activation_dtype(view, argument);
  core::check_tensor(view, argument, view.dtype(), shape);
  FUSEDMOE_CHECK_FAULT(view.device().is_cpu(), kDevice, argument, to_string(view.device()),
                       "on the cpu");
}

Rows rows_of(const TensorView& view) {
  return {view.as<const char>(), view.dtype(), view.size(view.rank() - 1)};
}

}  // namespace

void cpu::router_logits(Executor& executor, const RouterWeights& weights, const TensorView& x,
                        const TensorView& logits) {
  check_operand(weights.weight, "router.weight", {-1, -1});
  const std::int64_t num_experts = weights.weight.size(0), hidden = weights.weight.size(1);
  core::check_activation_dtype(x, "hidden_states");
  core::check_rows(x, "hidden_states", x.dtype(), {-1, hidden});
  FUSEDMOE_CHECK_FAULT(x.device().is_cpu(), kDevice, "hidden_states", to_string(x.device()),
                       "on the cpu");
  const std::int64_t num_tokens = x.size(0);
  if (weights.bias) check_operand(weights.bias, "router.bias", {num_experts});
  core::check_tensor(logits, "router_logits", DType::kF32, {num_tokens, num_experts});
  FUSEDMOE_CHECK_FAULT(logits.device().is_cpu(), kDevice, "router_logits",
                       to_string(logits.device()), "on the cpu");
  core::check_apart(logits, "router_logits", x, "hidden_states");

  const Rows tokens{x.as<const char>(), x.dtype(), x.stride(0)};
  Problem problem{tokens, rows_of(weights.weight), {}, num_tokens, num_experts,
                  hidden, logits.as<float>()};
  if (weights.bias) problem.bias = rows_of(weights.bias);
  static const TileFunction tile = select_tile();
  const std::int64_t expert_tiles = (num_experts + kTile - 1) / kTile;
  const std::int64_t tiles = (num_tokens + kTile - 1) / kTile * expert_tiles;
  const bool worthwhile = num_tokens * num_experts * hidden >= kParallelWork;
  core::parallel_for(executor, tiles, worthwhile, [&](std::int64_t i) {
    tile(problem, i / expert_tiles * kTile, i % expert_tiles * kTile);
  });
}

void router_logits(const RouterWeights& weights, const TensorView& x, const TensorView& logits) {
  cpu::router_logits(default_executor(), weights, x, logits);
}

}  // namespace fusedmoe
