// The interface between the CPU experts and the instruction-set-specific kernels: plain data and
// function pointers, so that no inline function of the standard library is compiled with flags
// that the machine may lack. Each src/cpu/isa_<name>.cpp provides one Kernels table.
//
// Packed layout (version 1), the same for every instruction set. A tile is 64 output columns over
// the whole inner size k, padded with zeros to a multiple of 32; it is one sequential stream. The
// unit of a stream is the step: 64 columns x 4 bytes.
//   f32    k steps of one fp32 value per column
//   bf16   k / 2 steps of two bf16 values per column (k even, k odd)
//   mxfp4  a header of 64 E8M0 codes for the first and 64 for the last group of 32, then per group
//          64 bytes c = 127 + previous scale code - this scale code, and 16 x 64 bytes of E2M1
//          codes. Vector 4 q + b holds columns 16 b .. 16 b + 15, two 16-bit words each; nibble j
//          of word p is the code at k = 32 g + 8 q + 2 j + p. So a table look-up on 16-bit lanes
//          (vpermw) with shifts by 0, 4, 8, 12 yields the bf16 pairs of four steps.
// The first GEMM of a gated layer has 32 gate columns, then the 32 up columns of the same outputs
// in a tile, so that one task holds both operands of the activation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fusedmoe::cpu {

inline constexpr int kTileColumns = 64;
inline constexpr int kStepBytes = kTileColumns * 4;
inline constexpr int kGroup = 32;  // inner size is padded to this
inline constexpr int kMxfp4GroupBytes = kTileColumns + kTileColumns * kGroup / 2;
inline constexpr int kMxfp4HeaderBytes = 2 * kTileColumns;
inline constexpr int kMaxTiles = 4;   // tiles that one task may stream side by side
inline constexpr int kMaxRows = 192;  // rows of one task

enum class Format { kF32, kBF16, kMxfp4 };
inline constexpr int kNumFormats = 3;

/// Element type of the rows that enter a GEMM, and so of its dot products. Sums are fp32.
enum class Compute { kF32, kBF16 };
inline constexpr int kNumComputes = 2;

/// Mirrors fusedmoe::Activation; kNone stores the fp32 sums.
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
};

/// Rows x consecutive tiles of one expert.
struct TileJob {
  const std::byte* tiles = nullptr;
  std::int64_t tile_bytes = 0;  // between tiles
  int num_tiles = 1;
  std::int64_t k = 0;  // padded inner size

  /// Row r is at rows + (slots ? slots[r] / topk : r) * row_bytes.
  const std::byte* rows = nullptr;
  std::int64_t row_bytes = 0;
  const std::int32_t* slots = nullptr;
  std::int64_t topk = 1;
  std::int64_t num_rows = 0;

  const float* bias = nullptr;  // (num_tiles, 64) in tile order, or null
  const Epilogue* epilogue = nullptr;
  std::byte* output = nullptr;  // row r at output + r * output_bytes; first tile's first column
  std::int64_t output_bytes = 0;

  const std::byte* prefetch = nullptr;  // what the thread streams next, or null
  std::int64_t prefetch_bytes = 0;
  std::byte* scratch = nullptr;  // scratch_bytes, one per thread, 64-byte aligned
};

inline constexpr std::int64_t kPanelSteps = 768;  // of a panel: 192 KiB of the L2
inline constexpr std::size_t kScratchBytes =
    kPanelSteps * kStepBytes + std::size_t{kMaxRows} * kStepBytes;

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
};

struct Kernels {
  const char* name;
  /// Rows of a job must follow each other in memory: hidden states are permuted before GEMM 1.
  bool contiguous_rows;
  /// Multiply functions, null where the instruction set has none.
  void (*multiply[kNumFormats][kNumComputes])(const TileJob&);
  void (*reduce)(const ReduceJob&);
  /// Rows of f32, bf16 or f16 (`from`) to padded rows of a Compute type; the tail becomes zero.
  void (*convert[kNumComputes])(const void* source, Epilogue::Rounding from, std::int64_t count,
                                std::int64_t padded, void* target);
  /// Dot products on registers only, `rounds` times as many as there are accumulators; returns how
  /// many FLOP that was.
  double (*flops[kNumComputes])(std::int64_t rounds);
};

extern const Kernels kGenericKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512Bf16Kernels;
extern const Kernels kAmxKernels;

/// The table for this machine, chosen once.
const Kernels& kernels();

}  // namespace fusedmoe::cpu
