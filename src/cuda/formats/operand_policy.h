// What a policy of operands must have. A policy is a type of this folder for one pair of weights
// and activations; the kernels of every architecture, and that of one token, are templates over it.
#pragma once

#include <vector_types.h>

#include <concepts>
#include <cstdint>

#include "cuda/formats/packed_block.h"
#include "cuda/formats/weight_format.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// How results leave the kernel.
template <typename T>
concept OutputPolicy = requires {
  typename T::Element;                               // what results are rounded to
  { T::kWeightsRows } -> std::convertible_to<bool>;  // GEMM 2 applies router weights before that
  { T::kQuantizes } -> std::convertible_to<bool>;    // GEMM 1 may quantize and decode its rows
  { T::round(0.0F, 0.0F) } -> std::same_as<std::uint32_t>;  // two results, rounded
};

/// What all policies have.
template <typename T>
concept OperandPolicy = requires {
  { T::kFormat } -> std::convertible_to<const WeightFormat&>;  // its row of the table
  { T::kBlock } -> std::convertible_to<PackedBlock>;           // size of a packed block
  typename T::Activation;                                      // element of the token rows
  { T::kRowDType } -> std::convertible_to<DType>;              // of hidden states and results
  { T::kInstructionK } -> std::convertible_to<int>;  // columns of an instruction: 32 bytes of rows
  { T::kBlockK } -> std::convertible_to<int>;        // columns of a K block: 128 bytes of rows
  { T::kHasKScales } -> std::convertible_to<bool>;   // scales multiply the sums of each K block
  { T::kDecodes } -> std::convertible_to<bool>;      // weights are decoded in registers
  typename T::Tables;                                // what decoding looks up, made by each block
  requires OutputPolicy<typename T::Output>;
  requires T::kBlockK * sizeof(typename T::Activation) == 128;
};

/// What those have whose weights are decoded to 16 bits, `Block` being where a packed block lies:
/// StagedBlock or StreamedBlock.
template <typename T, typename Block>
concept DecodingPolicy = OperandPolicy<T> &&
    requires(const Block& block, const typename T::Codes& codes, std::uint32_t (&operands)[2][4]) {
  typename T::Layout;                                 // where codes lie (codes.h)
  { T::kCodeBytes } -> std::convertible_to<int>;      // of a packed block; scales are behind
  { T::kGroupK } -> std::convertible_to<int>;         // columns that share a scale
  { T::kFixedExponent } -> std::convertible_to<int>;  // results are times 2 to the power of it
  { T::load(block, 0) } -> std::same_as<typename T::Codes>;  // what thread 0 of 128 needs
  T::decode(codes, 0, operands);  // register operands of the first half of a K block
};

/// The same of weights that are decoded to FP8, half a K block at a time.
template <typename T, typename Block>
concept Fp8DecodingPolicy = OperandPolicy<T> &&
    requires(const Block& block, const typename T::Tables& tables, const uint4& words,
             const typename T::Scales& scales, std::uint32_t (&operands)[2][4]) {
  typename T::Layout;
  { T::kCodeBytes } -> std::convertible_to<int>;
  { T::kGroupK } -> std::convertible_to<int>;
  { T::kFixedExponent } -> std::convertible_to<int>;
  { T::kPromotedBlocks } -> std::convertible_to<int>;  // K blocks between two promotions
  { T::words(block, 0, 0) } -> std::same_as<uint4>;    // code words of thread 0, first half
  { T::load_scales(block, 0) } -> std::same_as<typename T::Scales>;  // of its two rows
  T::decode(words, scales, tables, 0, operands);  // register operands of the first half
};

}  // namespace fusedmoe::cuda
