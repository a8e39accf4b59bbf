// The interface between the CPU experts and the instruction-set-specific kernels: plain data and
// function pointers, so that no inline function of the standard library is compiled with flags
// that the machine may lack. Each src/cpu/isa_<name>.cpp provides one Kernels table.
//
// Packed layout (kLayoutVersion), the same for every instruction set. A tile is 64 output columns
// over the whole inner size k, padded with zeros to a multiple of 32. It is read front to back: a
// stream. Dot products read it in steps of 64 columns x 4 bytes.
//   f32    k steps of one fp32 value per column
//   bf16   k / 2 steps of two bf16 values per column (k even, k odd)
//   f16    k rows of 64 f16 values
//   codes  blocks of 256 bytes. 4-bit codes: 8 k; a column's 32-bit word has the code at
//          k = 2 j + p in bits 16 p + 4 j, so that a look-up on 16-bit lanes (vpermw) with shifts
//          by 0, 4, 8, 12 yields bf16 pairs. 8-bit integers: 4 k, a column's word in order. E4M3:
//          4 k; 16 bytes hold (k even, k odd) of four columns for the first, then the second pair,
//          so that interleaving the two halves of the bf16 values yields pairs.
//   mxfp4  a header of 64 E8M0 codes for the first and 64 for the last group of 32, then per group
//          64 bytes c = 127 + previous scale code - this scale code, and 4 blocks.
//   llama.cpp's blocks  per block of 256 or 32: 64 f16 factors of scales and, in formats with
//          offsets, 64 of those; for each group of 32 or 16 64 scales (i8; with offsets u8) and 64
//          offsets (u8); then the blocks of codes.
//   others with scales in the stream: per group 64 scales, 64 zero points (u8) if there are any,
//          and the group's blocks; the last group may be shorter.
// The first GEMM of a gated layer has 32 gate columns, then the 32 up columns of the same outputs
// in a tile, so that one task holds both operands of the activation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fusedmoe {
enum class DType : std::uint8_t;
struct QuantKey;
}  // namespace fusedmoe
namespace fusedmoe::cpu {

inline constexpr int kLayoutVersion = 3;
inline constexpr int kTileColumns = 64;
inline constexpr int kStepBytes = kTileColumns * 4;
inline constexpr int kGroup = 32;  // inner size is padded to this
inline constexpr int kMxfp4GroupBytes = kTileColumns + kTileColumns * kGroup / 2;
inline constexpr int kMxfp4HeaderBytes = 2 * kTileColumns;
inline constexpr int kMaxTiles = 4;      // tiles that one task may stream side by side
inline constexpr int kStreamedRows = 4;  // up to which kernels decode in registers (stream.h)
inline constexpr int kMaxRows = 192;     // rows of one task

/// Elements of a stream.
enum class Codes {
  kF32,
  kBF16,
  kF16,
  kMxfp4,  ///< E2M1, with chained power-of-two scales
  kE2M1,
  kInt4,  ///< unsigned minus 8, or minus a zero point
  kE4M3,
  kInt8,  ///< unsigned minus 128, or minus a zero point
  kW4A8,  ///< kInt4 times an E4M3 factor per group of 128, kept as bf16, rounded to E4M3
  kIq4,   ///< indices of 16 integers
  kQ2K,   // llama.cpp's blocks, see block_codes()
  kQ3K,
  kQ4K,
  kQ5K,
  kQ6K,
  kQ41,
  kQ51,
  kIq4Xs,
};
inline constexpr int kNumCodes = 19;

/// Codes in blocks, whose codec makes weights of them: code * scale - offset.
struct BlockCodes {
  Codes elements;  // kInt4, kInt8 or kIq4; without zero points where there are offsets
  int group = 0;   // k of a scale, which is an integer times the factor of its block; 0: no blocks
  int block = 0;   // k of a factor
  bool offsets = false;  // as many, with factors of their own

  [[gnu::always_inline]] constexpr int kinds() const { return offsets ? 2 : 1; }
  [[gnu::always_inline]] constexpr int header_bytes() const {
    return group == 0 ? 0 : kTileColumns * kinds() * (2 + block / group);
  }
};

[[gnu::always_inline]] inline constexpr BlockCodes block_codes(Codes codes) {
  switch (codes) {
    case Codes::kQ2K:
      return {Codes::kInt4, 16, 256, true};
    case Codes::kQ3K:
      return {Codes::kInt4, 16, 256, false};
    case Codes::kQ4K:
      return {Codes::kInt4, 32, 256, true};
    case Codes::kQ5K:
      return {Codes::kInt8, 32, 256, true};
    case Codes::kQ6K:
      return {Codes::kInt8, 16, 256, false};
    case Codes::kQ41:
      return {Codes::kInt4, 32, 32, true};
    case Codes::kQ51:
      return {Codes::kInt8, 32, 32, true};
    case Codes::kIq4Xs:
      return {Codes::kIq4, 32, 256, false};
    default:
      return {codes};
  }
}

/// Scales in the stream; kNone where columns have at most one each (TileJob::column_scales).
enum class ScaleType { kNone, kF32, kF16, kBF16, kE4M3, kE8M0 };

struct TileFormat {
  Codes codes = Codes::kBF16;
  ScaleType scales = ScaleType::kNone;
  bool zeros = false;
  std::int64_t group = 0;  // k of one scale

  static constexpr int kMinGroup = 16;
  // Inlined everywhere: this header is compiled with flags that the machine may lack.
  [[gnu::always_inline]] std::int64_t scale_bytes() const;  // of 64 columns
  [[gnu::always_inline]] std::int64_t header_bytes() const {
    return scale_bytes() + (zeros ? kTileColumns : 0);
  }
  [[gnu::always_inline]] std::int64_t block_k() const {
    const Codes elements = block_codes(codes).elements;
    return elements == Codes::kE4M3 || elements == Codes::kInt8 ? 4 : 8;
  }
  /// Of `k` elements per column, header not included.
  [[gnu::always_inline]] std::int64_t code_bytes(std::int64_t k) const {
    return k / block_k() * kStepBytes;
  }
  [[gnu::always_inline]] std::int64_t group_bytes() const {
    return header_bytes() + code_bytes(group);
  }
  [[gnu::always_inline]] std::int64_t num_groups(std::int64_t k) const {
    return (k + group - 1) / group;
  }
  [[gnu::always_inline]] std::int64_t tile_bytes(std::int64_t k) const;
};

inline std::int64_t TileFormat::scale_bytes() const {
  switch (scales) {
    case ScaleType::kNone:
      return block_codes(codes).header_bytes();
    case ScaleType::kF32:
      return 4 * kTileColumns;
    case ScaleType::kF16:
    case ScaleType::kBF16:
      return 2 * kTileColumns;
    case ScaleType::kE4M3:
    case ScaleType::kE8M0:
      return kTileColumns;
  }
  return 0;
}

inline std::int64_t TileFormat::tile_bytes(std::int64_t k) const {
  switch (codes) {
    case Codes::kF32:
      return k * kStepBytes;
    case Codes::kBF16:
    case Codes::kF16:
      return k / 2 * kStepBytes;
    case Codes::kMxfp4:
      return kMxfp4HeaderBytes + k / kGroup * kMxfp4GroupBytes;
    default:
      return code_bytes(k) + (group > 0 ? num_groups(k) * header_bytes() : 0);
  }
}

/// Element type of the rows that enter a GEMM, and so of its dot products. Accumulators are fp32;
/// int8 and int16 products are added in int32 within a group.
enum class Compute { kF32, kBF16, kInt8, kInt16 };
inline constexpr int kNumComputes = 4;

/// Mirrors fusedmoe::Activation; kNone stores the fp32 accumulators.
struct Epilogue {
  enum class Kind {
    kNone,
    kSilu,
    kGelu,
    kGeluTanh,
    kSwigluOai,
    kSwigluOaiUninterleave,
    kSwigluStep,
    kSitu,
    kSiluNoMul,
    kGeluNoMul,
    kGeluTanhNoMul,
    kRelu2NoMul,
  };
  Kind kind = Kind::kNone;
  bool gated = false;
  float alpha = 1, beta = 0, limit = 0, situ_beta = 0, situ_linear_beta = 0;
  /// Round results to bf16 or f16 before they are stored (the dtype of the layer); the element
  /// type of the stored row is Compute for an activation and fp32 for kNone.
  enum class Rounding { kNone, kBF16, kF16 } rounding = Rounding::kNone;
  bool store_f32 = false;  // rows of fp32 also for an activation: they are quantized afterwards
};

/// Scales and initial accumulators of the rows, indexed like the rows; null where absent.
struct RowScales {
  const float* scales = nullptr;        // one of each row
  const float* group_scales = nullptr;  // (rows, groups), each for 2^group_shift weight groups
  int group_shift = 0;
  std::int64_t num_group_scales = 0;
  /// (rows, groups of the weights): initial accumulators. Where the stream holds zero points, the
  /// row's sum of x over the group, still to be multiplied by the negative zero point. With int8
  /// and int16 they are integers.
  const float* initial = nullptr;
  std::int64_t num_initial = 0;
};

/// Rows x consecutive tiles of one expert.
struct TileJob {
  const std::byte* tiles = nullptr;
  std::int64_t tile_bytes = 0;  // between tiles
  int num_tiles = 1;
  std::int64_t k = 0;  // padded inner size

  /// Row r is number i = slots ? slots[r] / topk : r, at rows + i * row_bytes or row_addresses[i].
  const std::byte* rows = nullptr;
  std::int64_t row_bytes = 0;
  const std::byte* const* row_addresses = nullptr;
  const std::int32_t* slots = nullptr;
  std::int64_t topk = 1;
  std::int64_t num_rows = 0;

  /// A row's bits must not depend on how many rows the job has.
  bool batch_invariant = false;
  TileFormat format;
  RowScales row_scales;
  const float* column_scales = nullptr;  // (num_tiles, 64) in tile order, or null
  const float* bias = nullptr;           // the same
  const Epilogue* epilogue = nullptr;
  std::byte* output = nullptr;  // row r at output + r * output_bytes; first tile's first column
  std::int64_t output_bytes = 0;

  bool side_by_side = false;            // see levels.h, for kernels that can read tiles either way
  const std::byte* prefetch = nullptr;  // the tiles of the next job, or null
  std::int64_t prefetch_bytes = 0;
  std::byte* scratch = nullptr;  // kScratchBytes of the task's own, 64-byte aligned
};

inline constexpr std::int64_t kPanelSteps = 768;  // of a panel: 192 KiB of the L2
// Groups of a panel: 16 elements are 4 steps of 8-bit integers.
inline constexpr std::int64_t kPanelGroups = kPanelSteps * 4 / TileFormat::kMinGroup;
/// Scratch of a task: a panel, the accumulators of its rows, scales and zero points of its groups.
inline constexpr std::int64_t kAccumulatorsOffset = kPanelSteps * kStepBytes;
inline constexpr std::int64_t kScalesOffset = kAccumulatorsOffset + kMaxRows * kStepBytes;
inline constexpr std::int64_t kZerosOffset = kScalesOffset + kPanelGroups * kStepBytes;
inline constexpr std::size_t kScratchBytes = kZerosOffset + kPanelGroups * kStepBytes;

/// output[i] = sum over j of weights[j] * row(indices[j])[i], in order of j, rounded once. An index
/// of -1 is skipped; without weights every one is 1.
struct ReduceJob {
  const std::byte* rows = nullptr;  // fp32, padded to whole tiles
  std::int64_t row_bytes = 0;
  const std::int32_t* indices = nullptr;
  const float* weights = nullptr;
  std::int64_t num_indices = 0;
  std::int64_t begin = 0, end = 0;                       // columns; begin is a multiple of 64
  void* output = nullptr;                                // column 0 of the output row
  Epilogue::Rounding dtype = Epilogue::Rounding::kNone;  // element type of output; kNone = fp32
  bool accumulate = false;                               // output += the sum
};

/// output[i] = sum over j of weights[j] * rows[j][i], in order of j, rounded once. Rows of f32,
/// bf16 or f16 that lie anywhere; nothing behind them is read. A null row is skipped; without
/// weights every one is 1.
struct SumJob {
  const std::byte* const* rows = nullptr;
  const std::byte* const* next_rows = nullptr;  // of the next job, to be prefetched; or null
  Epilogue::Rounding row_dtype = Epilogue::Rounding::kNone;
  const float* weights = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t columns = 0;
  void* output = nullptr;
  Epilogue::Rounding dtype = Epilogue::Rounding::kNone;
  bool accumulate = false;
  bool stream = false;  // write past the caches, where rows lie so that the processor can
};

struct Kernels {
  const char* name;
  /// Rows of a job must follow each other in memory: hidden states are permuted before GEMM 1.
  bool contiguous_rows[kNumCodes][kNumComputes];
  /// Multiply functions, null where the instruction set has none.
  void (*multiply[kNumCodes][kNumComputes])(const TileJob&);
  void (*reduce)(const ReduceJob&);
  void (*sum)(const SumJob&);
  /// Converts rows of f32, bf16 or f16 (`from`) to rows of f32 or bf16, padded with zeros.
  void (*convert[2])(const void* source, Epilogue::Rounding from, std::int64_t count,
                     std::int64_t padded, void* target);
  /// core::quantize_row().
  void (*quantize_row)(const float* x, std::int64_t count, const QuantKey& key, float scale,
                       std::uint8_t* codes, void* scales);
  /// Turns codes of activations into values: values[i] = value of code i * scales[i / group]. They
  /// are fp32, or with `to_bf16` bf16; then each product must be exact in bf16.
  void (*expand_codes)(const std::uint8_t* codes, std::int64_t count, DType type,
                       const float* scales, std::int64_t group, bool to_bf16, void* values);
  /// output = activation of gate and up, `count` values each, a multiple of 64; not rounded.
  void (*activate)(const Epilogue& epilogue, const float* gate, const float* up, std::int64_t count,
                   float* output);
  /// Dot products on registers only, `rounds` times as many as there are accumulators; returns how
  /// many FLOP that was.
  double (*flops[kNumComputes])(std::int64_t rounds);
};

// One table for each level, made when first called, which only machines that have the level may do.
// A level with the vectors of another starts from its table and replaces what it does better.
const Kernels& generic_kernels();
const Kernels& avx2_kernels();
const Kernels& avx2_vnni_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_vnni_kernels();
const Kernels& avx512_bf16_kernels();
const Kernels& amx_kernels();
const Kernels& neon_kernels();
const Kernels& neon_dotprod_kernels();
const Kernels& neon_i8mm_kernels();
const Kernels& neon_bf16_kernels();

/// The table for this machine, chosen once.
const Kernels& kernels();

}  // namespace fusedmoe::cpu
