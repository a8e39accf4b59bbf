// Sums of rows that are written past the caches have the bits of those that are not.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "fusedmoe/quant.h"
#include "testing/cases.h"

namespace fusedmoe::cpu_sums_test {

using Rounding = cpu::Epilogue::Rounding;

Tensor random_row(DType dtype, std::int64_t columns, std::uint64_t seed) {
  testing::Random random(seed);
  Tensor row = Tensor::empty({columns}, dtype);
  for (std::int64_t i = 0; i < columns; ++i) {
    store_f32(row.data(), dtype, i, static_cast<float>(random.normal()));
  }
  return row;
}

TEST(CpuSumsTest, StreamedRowsHaveTheSameBits) {
  const std::pair<DType, Rounding> dtypes[] = {{DType::kBF16, Rounding::kBF16},
                                               {DType::kF16, Rounding::kF16},
                                               {DType::kF32, Rounding::kNone}};
  for (const auto& [row_dtype, row_rounding] : dtypes) {
    for (const auto& [dtype, rounding] : dtypes) {
      for (const std::int64_t columns : {7, 128, 1000}) {
        for (const std::int64_t begin : {0, 3, 32}) {  // only some are aligned
          const Tensor first = random_row(row_dtype, columns, 1);
          const Tensor second = random_row(row_dtype, columns, 2);
          const std::byte* rows[] = {first.as<const std::byte>(), nullptr,
                                     second.as<const std::byte>()};
          const float weights[] = {0.3f, 1.0f, 0.7f};
          for (const bool accumulate : {false, true}) {
            Tensor outputs[2];
            for (const bool stream : {false, true}) {
              outputs[stream] = random_row(dtype, begin + columns, 3);
              cpu::SumJob job;
              job.rows = rows;
              job.row_dtype = row_rounding;
              job.weights = weights;
              job.num_rows = 3;
              job.columns = columns;
              job.output = outputs[stream].as<std::byte>() + bytes(dtype, begin);
              job.dtype = rounding;
              job.accumulate = accumulate;
              job.stream = stream;
              cpu::kernels().sum(job);
            }
            EXPECT_EQ(std::memcmp(outputs[0].data(), outputs[1].data(),
                                  static_cast<std::size_t>(outputs[0].nbytes())),
                      0)
                << name(row_dtype) << " to " << name(dtype) << ", " << columns << " from " << begin;
          }
        }
      }
    }
  }
}

}  // namespace fusedmoe::cpu_sums_test
