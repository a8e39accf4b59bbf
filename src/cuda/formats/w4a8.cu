// Packs and unpacks W4A8 weights, and makes their FormatKernels.
#include "cuda/formats/w4a8.cuh"

#include <array>

#include "cuda/formats/pack_decoded.cuh"

namespace fusedmoe::cuda {
namespace {

struct W4a8Scales {
  static constexpr DType kDType = DType::kE4M3;

  __device__ static std::uint32_t code(const PackSource&, std::int64_t, std::int64_t,
                                       std::uint32_t code, bool inside) {
    constexpr std::uint32_t kZero = 8;  // the code of 0
    return inside ? code : kZero;
  }
  FUSEDMOE_HD static int place(const RowInBlock& row) { return row.pair() * 2 + row.half; }
  __device__ static void store(const PackSource& s, std::int64_t row, std::int64_t k, bool inside,
                               std::uint8_t* area, const RowInBlock& to, int) {
    area[place(to)] =
        inside ? static_cast<const std::uint8_t*>(s.scales)[s.scale_index(row, k)] : 0;
  }
  static void load(const PackedView&, const std::byte* area, const RowInBlock& row, int,
                   std::int64_t scale, const UnpackedRow& target) {
    static_cast<std::uint8_t*>(target.scales)[scale] = static_cast<std::uint8_t>(area[place(row)]);
  }
};

}  // namespace

std::span<const FormatKernels> w4a8_kernels() {
  static const std::array kAll = {decoded_kernels<W4a8Operands, W4a8Scales>()};
  return kAll;
}

}  // namespace fusedmoe::cuda
