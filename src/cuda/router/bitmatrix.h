// The bit matrix of fusedmoe/routing_data.h on a CUDA device: a utility for transports and tools
// that ask which experts a token chose. The routing data is not made from it: that sort reads 8
// bytes a slot, while the matrix takes as much to make, its columns would have to be counted again,
// and it forgets the order of a token's slots and its duplicates.
#pragma once

#include <cstdint>

#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// As fusedmoe::build_bitmatrix() on device memory, asynchronous on `stream`: bit e % 32 of word
/// e / 32 in row t of bitmatrix (num_tokens, ceil(num_local_experts / 32)) i32 is set when token t
/// chose local expert e. topk_ids: (num_tokens, topk) i32; expert_map (num_experts) i32, global ->
/// local or -1, may be undefined. Throws Error before any work on what does not fit.
void build_bitmatrix(const TensorView& topk_ids, const TensorView& expert_map,
                     std::int64_t num_local_experts, const TensorView& bitmatrix, Stream stream);

}  // namespace fusedmoe::cuda
