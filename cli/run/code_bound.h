// How far quantized activations let two right results lie apart.
#pragma once

#include <cstdint>
#include <vector>

#include "fusedmoe/layer.h"

namespace fusedmoe::cli {

/// Sums in another order bring a number that GEMM 2 reads across the middle between two codes now
/// and then. For each token of x: the most by which its output then changes, if that happens to one
/// number of each of its experts' rows. With a code's step s, the row's largest number a, the
/// router weight p and the largest weight w of the down matrix that is the sum of p s a w over the
/// experts. `x` (num_tokens, hidden) and `routing` are those of the run. 0 where nothing is
/// quantized. Rows between latent projections are not bounded: what their experts read is a sum
/// already.
std::vector<double> bounds_of_one_code(const LayerWeights& weights, const TensorView& x,
                                       const Routing& routing);

/// Most of `rows` whose output changes by that: the sums' noise of about 1e-6 of a row's largest
/// number crosses the middle of a code's step s with a chance of 2e-6 / s for each number. With
/// three standard deviations and one row more.
std::int64_t most_rows_with_other_codes(const LayerWeights& weights, std::int64_t rows);

}  // namespace fusedmoe::cli
