// What is fastest on the processors of a level: the shapes of its loops. No value changes a bit of
// the results. Each isa_*.cpp has its own, as `kTuning` of its vectors.
#pragma once

#include <cstdint>

namespace fusedmoe::cpu {

struct Tuning {
  // ---- Panels (multiply.h, multiply_groups.h)

  /// The accumulators of so many rows times vectors of columns fill the registers.
  int rows, vectors;
  /// Where groups have scales: whether registers hold the totals beside a group's accumulators, so
  /// that blocks have half as many rows, with integer or bf16 products and with fp32 ones.
  bool totals = false, f32_totals = false;
  /// Up to so many rows, decoding a panel takes about as long as using it. Such a panel has fewer
  /// steps, so that it never leaves the L1 (24 KiB, beside its rows).
  std::int64_t few_rows = 48, few_rows_panel_steps = 96;

  // ---- Few rows (stream.h)

  /// Tiles that one row reads side by side; two rows read half as many, more rows one.
  int side_by_side = 1;
  /// How many vectors of a tile's columns are computed at a time: with one row, two rows, more.
  int strips[3];
  /// Integers are converted to fp32, not looked up.
  bool converts_integers = false;
  /// What the factors of a group make is made once and kept in the L1, not anew for each block.
  bool keeps_scales = true;
  /// Vectors whose fp32 products take turns, so that no product waits for the one before it: up to
  /// three rows of 4-bit codes.
  int vectors_in_turn = 1;
  /// Vectors that two rows decode step by step together.
  int stepwise_vectors = 4;
  /// The loop over the blocks of a group is a function of its own: else GCC 12 has accumulators on
  /// the stack.
  bool loop_apart = false;

  // ---- Rows of a job up to which decoding a tile again for each four of them is faster than
  // decoding it to a panel

  std::int64_t most_halves = 16;  ///< bf16 and f16 weights, fp32 products
  std::int64_t most_int8 = 8;     ///< 8-bit weights, fp32 products
  std::int64_t most_nibbles = 4;  ///< 4-bit weights, int8 products
  std::int64_t most_w8a8 = 48;

  constexpr int strip(int num_rows) const { return strips[num_rows > 2 ? 2 : num_rows - 1]; }
  constexpr int tiles(int num_rows) const {
    return num_rows == 1 ? side_by_side : num_rows == 2 ? (side_by_side + 1) / 2 : 1;
  }
};

}  // namespace fusedmoe::cpu
