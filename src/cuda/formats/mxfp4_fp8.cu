// Packs and unpacks MXFP4 weights for FP8 activations, and makes their FormatKernels.
#include "cuda/formats/mxfp4_fp8.cuh"

#include <array>

#include "cuda/formats/pack_decoded.cuh"

namespace fusedmoe::cuda {
namespace {

/// E8M0 scales, relative to the largest of their row.
struct Mxfp4Fields {
  static constexpr DType kDType = DType::kU8;

  __device__ static Mxfp4Packed packed(const PackSource& s, std::int64_t row, std::int64_t k,
                                       std::uint32_t code) {
    return Mxfp4Table::pack(static_cast<std::uint8_t>(code),
                            static_cast<const std::uint8_t*>(s.scales)[s.scale_index(row, k)],
                            e8m0_of(s.largest_scales[row]));
  }
  __device__ static std::uint32_t code(const PackSource& s, std::int64_t row, std::int64_t k,
                                       std::uint32_t code, bool inside) {
    return inside ? packed(s, row, k, code).code : 0;
  }
  FUSEDMOE_HD static int place(const RowInBlock& row, int group) {
    return (row.pair() * 2 + row.half) * Mxfp4Fp8Operands::kGroups + group;
  }
  __device__ static void store(const PackSource& s, std::int64_t row, std::int64_t k, bool inside,
                               std::uint8_t* area, const RowInBlock& to, int group) {
    area[place(to, group)] = inside ? packed(s, row, k, 0).field : 1;
  }
  static void load(const PackedView&, const std::byte* area, const RowInBlock& row, int group,
                   std::int64_t scale, const UnpackedRow& target) {
    static_cast<std::uint8_t*>(target.scales)[scale] =
        static_cast<std::uint8_t>(Mxfp4Table::scale_of(static_cast<int>(area[place(row, group)]),
                                                       e8m0_of(target.largest_scale)));
  }
};

}  // namespace

std::span<const FormatKernels> mxfp4_fp8_kernels() {
  static const std::array kAll = {decoded_kernels<Mxfp4Fp8Operands, Mxfp4Fields>()};
  return kAll;
}

}  // namespace fusedmoe::cuda
