// Checks of the arguments of a forward that every call of its path makes: experts, the modular
// kernel and the layer. All throw Error.
#pragma once

#include <cstdint>
#include <span>

#include "fusedmoe/experts.h"
#include "fusedmoe/router.h"
#include "moe/local_experts.h"

namespace fusedmoe::core {

/// Throws Error if the memory of `written` overlaps that of `other`, as overlap() says.
void check_apart(const TensorView& written, const char* argument, const TensorView& other,
                 const char* other_argument);
/// A router's callback runs on the CPU.
void check_custom_routing(const RouterConfig& router, Device device);

/// A view, where it is defined, is on `device` and aligned to its elements. Kernels on CUDA read
/// and write `rows` 16 bytes at a time: each must start at such an address.
void check_place(const TensorView& view, const char* argument, Device device, bool rows);

/// Memory of this dtype and shape (-1: any extent): on `device`, contiguous, and aligned to its
/// elements, or on CUDA, which reads 16-bit elements 16 bytes at a time, to those.
void check_buffer(const TensorView& view, const char* argument, DType dtype, const Shape& shape,
                  Device device);

/// The same for rows that may have a stride.
void check_row_buffer(const TensorView& view, const char* argument, DType dtype, const Shape& shape,
                      Device device);

/// Rows of all experts: those of `rows_per_token` for each token. Kernels count them in 32 bits.
void check_row_count(std::int64_t num_tokens, std::int64_t rows_per_token);
/// Checks the `num_tokens` of a caller who asks these experts how much memory they need.
void check_num_tokens(const Experts& experts, std::int64_t num_tokens);

/// Weights that the experts accept, a stream of their device, hooks only where the experts call
/// them, and where an expert map is given one of the right size.
void check_instance_args(const Experts& experts, const ForwardArgs& args);

/// Ids and weights of num_tokens tokens, or what monolithic experts make them from, and a map where
/// not all experts are local. Returns topk.
std::int64_t check_routing_args(const Experts& experts, const ForwardArgs& args,
                                std::int64_t num_tokens);

/// The ids of a token name no local expert twice, as the batched format needs it.
void check_distinct(std::span<const std::int32_t> ids, const LocalExperts& local_expert,
                    std::int64_t token);

/// Every argument of Experts::apply().
void check_experts_args(const Experts& experts, const ForwardArgs& args);

}  // namespace fusedmoe::core
