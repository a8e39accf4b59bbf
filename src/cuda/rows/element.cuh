// One row element, and 16 bytes of them at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "fusedmoe/tensor.h"

#include "cuda/device/overlap.cuh"
namespace fusedmoe::cuda {

__device__ inline float to_f32(float value) {
  return value;
}
__device__ inline float to_f32(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ inline float to_f32(__half value) {
  return __half2float(value);
}

/// To nearest, ties to even.
template <typename Storage>
__device__ Storage from_f32(float value) {
  if constexpr (std::is_same_v<Storage, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else if constexpr (std::is_same_v<Storage, __half>) {
    return __float2half_rn(value);
  } else {
    return value;
  }
}

/// kWidth neighbours of a row, loaded and stored as one.
template <typename Storage, int kWidth>
struct alignas(sizeof(Storage) * kWidth) Pack {
  Storage values[kWidth];

  __device__ static Pack load(const Storage* from) { return *reinterpret_cast<const Pack*>(from); }
  __device__ void store(Storage* to) const { *reinterpret_cast<Pack*>(to) = *this; }
};

/// sums rounded to Output and stored, 16 bytes at a time or fewer; with `accumulate` what is there
/// is added first.
template <typename Output, int kWidth>
__device__ void store_sums(float (&sums)[kWidth], Output* to, bool accumulate) {
  constexpr int kPart = kWidth < 16 / static_cast<int>(sizeof(Output))
                            ? kWidth
                            : 16 / static_cast<int>(sizeof(Output));
#pragma unroll
  for (int first = 0; first < kWidth; first += kPart) {
    using Part = Pack<Output, kPart>;
    if (accumulate) {
      const Part old = Part::load(to + first);
#pragma unroll
      for (int i = 0; i < kPart; ++i) sums[first + i] += to_f32(old.values[i]);
    }
    Part part;
#pragma unroll
    for (int i = 0; i < kPart; ++i) part.values[i] = from_f32<Output>(sums[first + i]);
    part.store(to + first);
  }
}

/// Calls function(Storage{}) for an activation dtype.
template <typename Function>
void dispatch_storage(DType dtype, const Function& function) {
  if (dtype == DType::kF32) {
    function(float{});
  } else if (dtype == DType::kBF16) {
    function(__nv_bfloat16{});
  } else {
    function(__half{});
  }
}

/// Calls function(Row{}, Output{}): one of the two is f32, or both have the same dtype.
template <typename Function>
void dispatch_row_and_output(DType rows, DType output, const Function& function) {
  dispatch_storage(rows, [&](auto row) {
    if (output == DType::kF32) {
      function(row, float{});
    } else if constexpr (std::is_same_v<decltype(row), float>) {
      dispatch_storage(output, [&](auto result) { function(row, result); });
    } else {
      function(row, row);
    }
  });
}

/// Calls function(width) with the elements of a 16-byte access, if rows of `columns` elements can
/// be cut into them at all these addresses, else with 1.
template <typename Storage, typename Function, typename... Pointers>
void dispatch_width(std::int64_t columns, const Function& function, Pointers... rows) {
  constexpr int kWidth = 16 / static_cast<int>(sizeof(Storage));
  const bool aligned = ((reinterpret_cast<std::uintptr_t>(rows) % 16 == 0) && ...);
  if (aligned && columns % kWidth == 0) {
    function(std::integral_constant<int, kWidth>{});
  } else {
    function(std::integral_constant<int, 1>{});
  }
}

/// Threads of a block over the columns of one row, and blocks: (row, chunk of columns).
inline constexpr int kRowThreads = 128;
inline dim3 row_grid(std::int64_t rows, std::int64_t accesses) {
  return dim3(static_cast<unsigned>(rows),
              static_cast<unsigned>((accesses + kRowThreads - 1) / kRowThreads));
}
/// Which access of its row this thread does.
__device__ inline std::int64_t row_access() {
  return static_cast<std::int64_t>(blockIdx.y) * kRowThreads + threadIdx.x;
}

/// First in every kernel that is launched with overlap_previous: lets the next kernel start and
/// waits for the one before.
__device__ inline void order_after_previous() {
  let_next_launch_begin();
  wait_for_previous_launch();
}

}  // namespace fusedmoe::cuda
