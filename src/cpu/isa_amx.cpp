// Kernels for AMX: tile registers multiply many rows of an expert by bf16 or 8-bit integers. Few
// rows take the kernels of AVX-512 VNNI, which read each weight once and decode it in registers;
// there fp32 products are faster than vdpbf16ps on the processors measured.
//
// Bits: tdpbf16ps adds up 16 pairs before it adds them to the accumulator, so results are rounded
// differently from fp32 products. So a row's bits depend on the number of its expert's rows, unless
// `batch_invariant` asks for tile registers whatever the number. Integers are exact either way.
#include "cpu/kernels/dot_amx.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : Avx512 {
  static constexpr Tuning kTuning{.rows = 6,  // 24 accumulators, 4 weights, 1 of a row of 32
                                  .vectors = 4,
                                  .totals = true,
                                  .side_by_side = 4,
                                  .strips = {4, 4, 4},
                                  .keeps_scales = false};
};

using DotPairs = DotBf16<Simd, Bf16Products>;
using DotAmx = DotTiles<DotPairs, TileBf16>;
using DotAmxInt8 = DotTiles<DotIntegers<Simd, TileInt8, 4>, TileInt8>;

template <class Products, int kPerStep>
double amx_flops(std::int64_t rounds) {
  const TileJobScope scope;
  tile_config.set(kTileRows, kTileRows);
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  zero_tile<4>();
  zero_tile<6>();
  for (std::int64_t round = 0; round < rounds; ++round) {
    Products::template add<0, 4, 6>();
    Products::template add<1, 4, 6>();
    Products::template add<2, 4, 6>();
    Products::template add<3, 4, 6>();
  }
  constexpr double kFlop = 2.0 * 4 * kTileRows * kTileWidth * kTileRows * kPerStep;
  return kFlop * static_cast<double>(rounds);
}

// ---- Few rows -----------------------------------------------------------------------------------

using Multiply = void (*)(const TileJob&);

template <Codes kCodes, Compute kCompute>
Multiply vnni_kernel() {
  static const Multiply multiply =
      avx512_vnni_kernels().multiply[static_cast<int>(kCodes)][static_cast<int>(kCompute)];
  return multiply;
}

/// Rows of bf16, by fp32 kernels: rows are converted before, activated outputs after them. They
/// lie in the task's scratch memory, which those kernels do not use for so few rows.
template <Codes kCodes>
void multiply_in_f32(const TileJob& job) {
  const Epilogue& epilogue = *job.epilogue;
  TileJob few = job;
  few.rows = job.scratch;
  few.row_bytes = job.k * 4;
  for (std::int64_t r = 0; r < job.num_rows; ++r) {
    convert_to_f32<Simd>(job.rows + r * job.row_bytes, Epilogue::Rounding::kBF16, job.k, job.k,
                         job.scratch + r * few.row_bytes);
  }
  const bool back = epilogue.kind != Epilogue::Kind::kNone && !epilogue.store_f32;
  const std::int64_t columns = job.num_tiles * (kTileColumns >> (epilogue.gated ? 1 : 0));
  if (back) {
    few.output = job.scratch + job.num_rows * few.row_bytes;
    few.output_bytes = columns * 4;
  }
  vnni_kernel<kCodes, Compute::kF32>()(few);
  for (std::int64_t r = 0; back && r < job.num_rows; ++r) {
    const auto* values = reinterpret_cast<const float*>(few.output + r * few.output_bytes);
    for (std::int64_t c = 0; c < columns; c += Simd::kWidth) {
      DotPairs::store_element(job.output + r * job.output_bytes, c, Simd::load(values + c), {});
    }
  }
}

/// Up to so many rows, each weight is read once and decoded in registers, without scratch memory.
template <Codes kCodes>
constexpr std::int64_t most_few_rows() {
  constexpr bool kNibbles =
      kCodes == Codes::kMxfp4 || kCodes == Codes::kE2M1 || kCodes == Codes::kInt4;
  if constexpr (!kNibbles) return kStreamedRows;
  constexpr int kMost = kStreamedRows + 1;
  static_assert(kStreams<DotF32<Simd>, Nibbles<Simd, kCodes>, kMost>);
  return kMost;
}

/// Whether a job is one of few rows, and its rows in fp32 fit the scratch memory. (Four rows do up
/// to a k of 12032.)
template <Codes kCodes>
bool has_few_rows(const TileJob& job) {
  return job.num_rows <= most_few_rows<kCodes>() && !job.batch_invariant &&
         job.num_rows * (job.k + kMaxTiles * kTileColumns) * 4 <= kAccumulatorsOffset;
}

// ---- The table ----------------------------------------------------------------------------------

/// Weights without scales in the stream, or whose codec applies them.
template <Codes kCodes, class Panels>
void multiply_plain_tiles(const TileJob& job) {
  if (has_few_rows<kCodes>(job)) return multiply_in_f32<kCodes>(job);
  const TileJobScope scope;
  multiply<DotAmx, Panels>(job);
}

/// Weights whose groups have scales in the stream, or one scale per column.
template <Codes kCodes, class Codec>
void multiply_code_tiles(const TileJob& job) {
  if (job.format.scales == ScaleType::kNone) {
    return multiply_plain_tiles<kCodes, CodecPanels<DotAmx, Codec>>(job);
  }
  if (has_few_rows<kCodes>(job)) return multiply_in_f32<kCodes>(job);
  const TileJobScope scope;
  multiply_groups<DotAmx, Codec>(job);
}

/// NVFP4 is multiplied without groups, as its scales can be multiplied into the weights.
void multiply_e2m1_tiles(const TileJob& job) {
  using Nvfp4 = ScaledPanels<DotAmx, Nibbles<Simd, Codes::kE2M1>, Nvfp4Scales<Simd>>;
  const TileFormat& format = job.format;
  if (format.scales == ScaleType::kE4M3 && format.group == Nvfp4Scales<Simd>::kGroupK) {
    multiply_plain_tiles<Codes::kE2M1, Nvfp4>(job);
  } else {
    multiply_code_tiles<Codes::kE2M1, NibblesToBf16<Codes::kE2M1>>(job);
  }
}

/// Up to so many rows, vpdpbusd is faster for 8-bit activations.
constexpr std::int64_t kFewRowsOfInt4Int8 = 32, kFewRowsOfW8A8 = 16;
/// And for smaller groups, whatever the rows: storing each group's accumulators takes too long.
constexpr std::int64_t kLeastGroupOfInt8 = 128;

void multiply_int4_int8_tiles(const TileJob& job) {
  if (job.num_rows <= kFewRowsOfInt4Int8 || job.format.group < kLeastGroupOfInt8) {
    return vnni_kernel<Codes::kInt4, Compute::kInt8>()(job);
  }
  const TileJobScope scope;
  multiply_groups<DotAmxInt8, NibblesToU8<Simd, Codes::kInt4>>(job);
}

/// W8A8: all of k is one group, whose accumulators are int32 until its end.
struct DotAmxW8A8 : DotAmxInt8 {
  using DotAmxInt8::Acc;
  static std::int64_t panel_unit(std::int64_t steps) { return steps_of_tile(steps); }

  static void to_floats(const TileJob& job, std::int64_t row, float* accumulators) {
    const GroupRow of_row = group_row(job, row);
    const Acc initial = DotAmxInt8::initial(Simd::set1(of_row.initial[0]));
    const auto scale = Simd::set1(of_row.scales ? of_row.scales[0] : 1.0f);
    for (int c = 0; c < kTileColumns; c += Simd::kWidth) {
      Acc acc;
      std::memcpy(&acc, accumulators + c, sizeof acc);
      Simd::store(accumulators + c, to_float(acc + initial) * scale);
    }
  }
};

void multiply_w8a8_tiles(const TileJob& job) {
  if (job.num_rows <= kFewRowsOfW8A8) return vnni_kernel<Codes::kInt8, Compute::kInt8>()(job);
  const TileJobScope scope;
  multiply<DotAmxW8A8, Undecoded>(job);
}

/// The AVX-512 kernels, those replaced for which AMX is faster.
Kernels make_kernels() {
  Kernels table = avx512_vnni_kernels();
  table.name = "amx";
  const auto set = [&](Compute compute, Codes codes, Multiply multiply) {
    table.multiply[static_cast<int>(codes)][static_cast<int>(compute)] = multiply;
    table.contiguous_rows[static_cast<int>(codes)][static_cast<int>(compute)] = true;
  };
  constexpr Compute bf16 = Compute::kBF16, int8 = Compute::kInt8;
  set(bf16, Codes::kBF16, multiply_plain_tiles<Codes::kBF16, Undecoded>);
  set(bf16, Codes::kMxfp4, multiply_plain_tiles<Codes::kMxfp4, Mxfp4ToBf16>);
  set(bf16, Codes::kE2M1, multiply_e2m1_tiles);
  set(bf16, Codes::kInt4, multiply_code_tiles<Codes::kInt4, NibblesToBf16<Codes::kInt4>>);
  set(bf16, Codes::kE4M3, multiply_code_tiles<Codes::kE4M3, E4m3ToBf16>);
  set(bf16, Codes::kInt8, multiply_code_tiles<Codes::kInt8, Int8ToBf16>);
  set(bf16, Codes::kW4A8, multiply_plain_tiles<Codes::kW4A8, CodecPanels<DotAmx, W4A8ToBf16>>);
  set(int8, Codes::kInt4, multiply_int4_int8_tiles);
  set(int8, Codes::kInt8, multiply_w8a8_tiles);
  table.convert[static_cast<int>(bf16)] = convert_to_bf16;
  table.flops[static_cast<int>(bf16)] = amx_flops<TileBf16, 2>;
  table.flops[static_cast<int>(int8)] = amx_flops<TileInt8, 4>;
  return table;
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels table = make_kernels();
  return table;
}

}  // namespace fusedmoe::cpu
