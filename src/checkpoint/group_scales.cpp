// bf16 scales of groups -> the two levels of scales that W4A8 weights have.
#include "checkpoint/linear_layouts.h"
#include "core/check.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {

void split_group_scales(const QuantKey& weights, WeightMatrix& matrix,
                        std::vector<std::shared_ptr<const void>>& owners) {
  if (weights != keys::int4_e4m3()) return;
  const bool split = matrix.global_scale.defined();
  FUSEDMOE_CHECK_FILE(is_float(matrix.scales.dtype()) != split, "weight_scale",
                      core::format("{} {} weight_chan_scale", name(matrix.scales.dtype()),
                                   split ? "beside" : "without"),
                      "e4m3 beside weight_chan_scale, or a floating type without");
  if (split) return;
  // The scales of a row become E4M3 with a scale of their own; an eighth of their size, so that
  // -8 times a scale stays in range.
  const Tensor groups = Tensor::empty(matrix.scales.shape(), DType::kF32);
  convert(matrix.scales, groups);
  const std::int64_t rows = groups.size(0);
  const Tensor codes = Tensor::empty(groups.shape(), DType::kE4M3);
  const Tensor channels = Tensor::empty({rows, 1}, DType::kF32);
  quantize(groups, keys::e4m3_row(true), codes, channels);
  for (std::int64_t i = 0; i < codes.numel(); ++i) {
    std::uint8_t& code = codes.as<std::uint8_t>()[i];
    code = f32_to_e4m3(e4m3_to_f32(code) / 8);
  }
  for (std::int64_t row = 0; row < rows; ++row) channels.as<float>()[row] *= 8;
  matrix.scales = codes;
  matrix.global_scale = channels.reshape({rows});
  owners.push_back(codes.owner());
  owners.push_back(channels.owner());
}

}  // namespace fusedmoe::checkpoint
