// What becomes of a row of hidden states on its way to its experts: the row transforms. Kernels
// that put rows in the order of the experts take one as a template parameter, and nothing else
// writes permuted rows.
#pragma once

#include <cstdint>

namespace fusedmoe::cuda {

/// Copies rows, one `Unit` of bytes at a time.
///
/// What every row transform has: Value, units(), read() and write(). Whole warps call read() and
/// write() with one row and with neighbouring units in neighbouring lanes, also behind the end of
/// the row, where both must do nothing. So one that quantizes can find the largest value of a group
/// with shuffles in read(), which is called once for all rows that get the same token, and in
/// write() one lane of the group stores the scale of its row.
template <typename Unit>
class CopyRows {
 public:
  using Value = Unit;

  CopyRows() = default;
  CopyRows(const void* rows, std::int64_t row_pitch, void* permuted, std::int64_t row_bytes)
      : rows_(static_cast<const char*>(rows)),
        row_pitch_(row_pitch),
        permuted_(static_cast<Unit*>(permuted)),
        units_(static_cast<int>(row_bytes / static_cast<std::int64_t>(sizeof(Unit)))) {}

  __device__ int units() const { return units_; }
  __device__ Value read(std::int64_t token, int unit) const {
    if (unit >= units_) return {};
    return reinterpret_cast<const Unit*>(rows_ + token * row_pitch_)[unit];
  }
  __device__ void write(std::int64_t row, int unit, const Value& value) const {
    if (unit < units_) permuted_[row * units_ + unit] = value;
  }

 private:
  const char* rows_ = nullptr;
  std::int64_t row_pitch_ = 0;  // bytes
  Unit* permuted_ = nullptr;
  int units_ = 0;
};

}  // namespace fusedmoe::cuda
