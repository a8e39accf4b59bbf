// What tests of core::Backend on the GPU share: rows of every dtype and size, at addresses that do
// and do not fit vector accesses.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "cuda_test.h"
#include "fusedmoe/tensor.h"
#include "testing/cases.h"

namespace fusedmoe::testing {

inline const Stream kGpuStream{kGpu};

/// On the GPU, `offset` elements into its allocation, so that vector accesses do not fit.
inline Tensor shifted_to_gpu(const Tensor& tensor, std::int64_t offset) {
  const Tensor memory = Tensor::empty({tensor.numel() + offset}, tensor.dtype(), kGpu);
  char* begin = memory.as<char>() + bytes(tensor.dtype(), offset);
  Tensor result(TensorView(begin, tensor.dtype(), tensor.shape(), kGpu), memory.owner());
  copy(tensor, result, kGpuStream);
  synchronize(kGpuStream);
  return result;
}

inline Tensor random_floats(DType dtype, Shape shape, std::uint64_t seed) {
  Random random(seed);
  Tensor tensor = Tensor::empty(shape, dtype);
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    store_f32(tensor.data(), dtype, i, static_cast<float>(random.normal()));
  }
  return tensor;
}

/// Distinct experts of each token, some slots -1.
inline Tensor random_ids(std::int64_t num_tokens, std::int64_t topk, std::int64_t num_experts) {
  Case spec;
  spec.num_tokens = num_tokens;
  spec.num_experts = num_experts;
  spec.topk = topk;
  spec.hidden = spec.intermediate = 2;
  spec.negative_ids = true;
  return make_problem(spec).topk_ids;
}

struct RowCase {
  DType dtype;
  std::int64_t num_tokens, hidden, offset;
};
inline void PrintTo(const RowCase& c, std::ostream* stream) {
  *stream << name(c.dtype) << ' ' << c.num_tokens << " x " << c.hidden << " at " << c.offset;
}

inline std::vector<RowCase> row_cases() {
  std::vector<RowCase> cases;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    // Below, at and beyond one access of 16 bytes, one block, several blocks; odd ones; none.
    for (const std::int64_t hidden : {1, 3, 8, 12, 64, 360, 1023, 2880}) {
      cases.push_back({dtype, 5, hidden, 0});
      cases.push_back({dtype, 5, hidden, 1});
    }
    cases.push_back({dtype, 0, 64, 0});
    cases.push_back({dtype, 1, 7168, 0});
    cases.push_back({dtype, 333, 2880, 0});
  }
  return cases;
}

class BackendRows : public CudaTestWith<RowCase> {
 protected:
  const RowCase c_ = GetParam();
  const Shape shape_{c_.num_tokens, c_.hidden};

  /// On the GPU, not aligned if the case says so.
  Tensor gpu(const Tensor& tensor) const { return shifted_to_gpu(tensor, c_.offset); }
  Tensor poisoned(const Shape& shape) const {
    const Tensor tensor = Tensor::empty(shape, c_.dtype);
    poison(tensor);
    return tensor;
  }
};

}  // namespace fusedmoe::testing
