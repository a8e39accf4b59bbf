// What the kernels' templates ask of their policies. A dot product `D` multiplies rows of one
// element type by decoded weights. A codec decodes the weights of one number format for it. Both
// are classes of static functions over the vectors `S` of a level: SimdVector with the instructions
// that the level has, and its Tuning. Included by isa_*.cpp only.
//
// A step is 32 bits of each of a tile's 64 columns: one fp32 weight, two of 16 bits or four of 8.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/kernels/tuning.h"

namespace fusedmoe::cpu {
namespace {

template <class D>
concept Dot = requires(typename D::Acc acc, typename D::B weights, typename D::Simd::F values,
                       std::byte* to, const std::byte* from) {
  // The level's vectors: F of fp32, I of 32-bit words.
  D::Simd::kTuning;
  // Element type of the rows.
  requires std::same_as<decltype(D::kCompute), const Compute>;
  // Elements of k in a step.
  requires D::kPerStep == 1 || D::kPerStep == 2 || D::kPerStep == 4;
  // Rows of a block.
  requires(D::kRows > 0);
  // B, a vector of a step's weights, from a panel and to it.
  { D::load_b(from) } -> std::same_as<typename D::B>;
  D::store_b(to, weights);
  // A row's elements of a step, in all lanes.
  { D::broadcast(from) } -> std::same_as<typename D::B>;
  // acc + weights * elements.
  { D::dot(acc, weights, weights) } -> std::same_as<typename D::Acc>;
  // Acc, a vector of accumulators: what a group begins with, which is zero or RowScales::initial,
  // and its sum in fp32.
  { D::zero() } -> std::same_as<typename D::Acc>;
  { D::initial(values) } -> std::same_as<typename D::Acc>;
  { D::to_float(acc) } -> std::same_as<typename D::Simd::F>;
  // Stores activated values as elements of the rows of GEMM 2.
  D::store_element(to, std::int64_t{}, values, Epilogue::Rounding{});
};

/// What multiply.h asks beside it.
template <class D>
concept PanelDot = Dot<D> && requires {
  // How often a block of rows goes over a panel, each time for some of the columns.
  requires(D::kPasses > 0);
  // Panels begin at multiples of so many steps.
  requires(D::kStepsPerGroup > 0);
  // A block of rows times a panel, as multiply_panel_rows().
  D::multiply_block;
};

// What a dot product may have, too.

/// Takes two steps at once, in fewer instructions. Groups have an even number of steps.
template <class D>
concept AddsTwoSteps = requires(typename D::Acc acc, const typename D::B (&pair)[2]) {
  D::dot2(acc, pair, pair);
};
/// Multiplies rows by a panel of groups in its own way, in blocks of its own size (D::Groups).
template <class D>
concept MultipliesGroups = requires {
  D::multiply_groups;
};
/// Wants blocks full but for the last, not of about the same size.
template <class D>
concept FillsBlocks = requires {
  requires D::kFullBlocks;
};
/// Says by itself how many steps panels are cut into.
template <class D>
concept CutsPanels = requires(std::int64_t steps) {
  D::panel_unit(steps);
};
/// Has accumulators in scratch that are no floats yet when a row is complete.
template <class D>
concept EndsRows = requires(const TileJob& job, float* accumulators) {
  D::to_floats(job, 0, accumulators);
};

/// Can decode one step of a block at a time: `step` of what `load` returns.
template <class C>
concept DecodesSteps = requires(C codec, const std::byte* block) {
  codec.load(block, 0);
};
/// Those among them whose steps need what `prepare` has made of a group's scales.
template <class C>
concept PreparesGroups = requires(C codec, const std::byte* block) {
  codec.prepare(block, block, 0, 0);
};
template <class C, class D>
concept DecodesBlocks = requires(const C& codec, const std::byte* block,
                                 typename D::B (&steps)[C::kSteps]) {
  codec.decode(block, block, 0, steps);
};

/// C is a codec for the dot product D.
template <class C, class D>
concept CodecOf = requires(const TileFormat& format) {
  // Made once for a tile, from the format of its stream.
  C(format);
  // Elements of k in a block of 256 bytes of the stream.
  requires(C::kK > 0);
  // Steps of D that they become.
  requires(C::kSteps > 0);
}
// decode(block, header of its group, number of a vector of columns, steps), or one step at a time.
&&(DecodesBlocks<C, D> || DecodesSteps<C>);

}  // namespace
}  // namespace fusedmoe::cpu
