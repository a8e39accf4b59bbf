// Packed weights of the CPU experts taken apart: all of them, as files keep them, and what putting
// them together reads (it is checked: it may be anybody's file); and one expert, which moves.
#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "core/check.h"
#include "cpu/pack.h"
#include "cpu/tile_format.h"
#include "moe/experts_args.h"

namespace fusedmoe::cpu {
namespace {

/// Scale type and group, as a part has them, with what the key says of the rest.
TileFormat read_format(const QuantKey& key, const std::int32_t* numbers) {
  TileFormat format = format_of(key, {});
  const auto scales = static_cast<ScaleType>(numbers[0]);
  const bool wide =
      scales == ScaleType::kF32 || scales == ScaleType::kF16 || scales == ScaleType::kBF16;
  FUSEDMOE_CHECK(scales == format.scales || (wide && format.scales == ScaleType::kF32),
                 "parts[\"formats\"]", core::to_string(numbers[0]),
                 "a type that the scales can have");
  FUSEDMOE_CHECK(numbers[1] == format.group || (numbers[1] == kGroup && format.group > kGroup),
                 "parts[\"formats\"]", core::to_string(numbers[1]),
                 "a group that the scales can have");
  format.scales = scales;
  format.group = numbers[1];
  return format;
}

DType scale_dtype(std::int32_t number) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kU8, DType::kI8,
                            DType::kE4M3, DType::kE8M0}) {
    if (number == static_cast<std::int32_t>(dtype)) return dtype;
  }
  throw Error::invalid(
      "parts[\"scale_dtypes\"]",
      core::format("parts[\"scale_dtypes\"] has {}, which is no type of scales", number));
}

}  // namespace

TileFormats CpuPackedWeights::read_formats(const QuantScheme& scheme, const PackedParts& parts) {
  const auto* numbers = core::part(parts, "formats", DType::kI32, {2, 2}).as<const std::int32_t>();
  return {read_format(scheme.weights, numbers), read_format(scheme.down_weights(), numbers + 2)};
}

PackedParts CpuPackedWeights::parts() const {
  const std::int64_t num_experts = info().num_experts;
  PackedParts parts;
  for (const auto& [name, tensor] :
       {std::pair("bias1", &bias1_), std::pair("bias2", &bias2_), std::pair("scales1", &scales1_),
        std::pair("scales2", &scales2_)}) {
    if (*tensor) parts[name] = *tensor;
  }
  const Tensor formats = Tensor::empty({2, 2}, DType::kI32);
  const TileFormat &format1 = gemm1_.shape.format, &format2 = gemm2_.shape.format;
  const std::int64_t numbers[] = {static_cast<std::int64_t>(format1.scales), format1.group,
                                  static_cast<std::int64_t>(format2.scales), format2.group};
  std::copy(std::begin(numbers), std::end(numbers), formats.as<std::int32_t>());
  parts["formats"] = formats;

  const Tensor first = parts["first"] = Tensor::empty({num_experts, 3, 2}, DType::kI64);
  const Tensor dtypes = parts["scale_dtypes"] = Tensor::empty({num_experts, 3}, DType::kI32);
  const Tensor scales = parts["input_scales"] = Tensor::empty({num_experts, 3}, DType::kF32);
  std::int64_t i = 0;
  for (const ExpertOrigin& expert : origins_) {
    for (const Origin* origin : expert.all()) {
      first.as<std::int64_t>()[2 * i] = origin->first_row;
      first.as<std::int64_t>()[2 * i + 1] = origin->first_col;
      dtypes.as<std::int32_t>()[i] = static_cast<std::int32_t>(origin->scales);
      scales.as<float>()[i++] = origin->input_scale;
    }
  }

  parts["tiles"] = data_;
  if (gemm1_.parts.size() > 1) {
    CpuPackedWeights whole(info());
    const std::int64_t size = whole.lay_out({format1, format2}, {});
    const Tensor tiles = parts["tiles"] = Tensor::empty({size}, DType::kU8);
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      copy_tiles(gemm1_, data_, expert, whole.gemm1_, tiles, expert);
      copy_tiles(gemm2_, data_, expert, whole.gemm2_, tiles, expert);
    }
  }
  return parts;
}

void CpuPackedWeights::read_origins(const PackedParts& parts) {
  const std::int64_t num_experts = info().num_experts;
  const Tensor first = core::part(parts, "first", DType::kI64, {num_experts, 3, 2});
  const Tensor dtypes = core::part(parts, "scale_dtypes", DType::kI32, {num_experts, 3});
  const Tensor scales = core::part(parts, "input_scales", DType::kF32, {num_experts, 3});
  origins_.resize(static_cast<std::size_t>(num_experts));
  std::int64_t i = 0;
  for (ExpertOrigin& expert : origins_) {
    for (Origin* origin : {&expert.gate, &expert.up, &expert.down}) {
      origin->first_row = core::slice_position(first.as<const std::int64_t>()[2 * i], "first");
      origin->first_col = core::slice_position(first.as<const std::int64_t>()[2 * i + 1], "first");
      origin->scales = scale_dtype(dtypes.as<const std::int32_t>()[i]);
      origin->input_scale = scales.as<const float>()[i++];
    }
  }
}

std::string CpuPackedWeights::expert_layout() const {
  constexpr std::array<const char*, 6> kNames{"none", "f32", "f16", "bf16", "e4m3", "e8m0"};
  const auto text = [&](const TileFormat& format) {
    return core::format("{} of {}", kNames[static_cast<std::size_t>(format.scales)], format.group);
  };
  return core::format("scales {}, {}", text(gemm1_.shape.format), text(gemm2_.shape.format));
}

std::shared_ptr<PackedWeights> CpuPackedWeights::extract_expert(std::int64_t expert) const {
  core::check_expert_index(info(), expert);
  const auto one = std::make_shared<CpuPackedWeights>(core::info_of_one(info()), *this,
                                                      std::vector<core::NumaNode>());
  one->put(0, *this, expert);
  return one;
}

void CpuPackedWeights::replace_expert(std::int64_t expert, const PackedWeights& one) {
  core::check_one_expert(info(), expert, one.info());
  const auto* of_cpu = dynamic_cast<const CpuPackedWeights*>(&one);
  FUSEDMOE_CHECK(of_cpu, "one", one.info().implementation, "packed by cpu");
  if (of_cpu->expert_layout() != expert_layout()) {
    throw Error::invalid("weights.scales",
                         "weights.scales have another dtype than those that were packed, or begin "
                         "elsewhere in a block");
  }
  put(expert, *of_cpu, 0);
}

void CpuPackedWeights::put(std::int64_t expert, const CpuPackedWeights& from,
                           std::int64_t from_expert) {
  copy_tiles(from.gemm1_, from.data_, from_expert, gemm1_, data_, expert);
  copy_tiles(from.gemm2_, from.data_, from_expert, gemm2_, data_, expert);
  const auto copy = [&](const Tensor& target, const Tensor& source) {
    if (!target) return;
    const std::int64_t columns = target.size(1);
    std::copy_n(source.as<const float>() + from_expert * columns, columns,
                target.as<float>() + expert * columns);
  };
  copy(bias1_, from.bias1_);
  copy(bias2_, from.bias2_);
  copy(scales1_, from.scales1_);
  copy(scales2_, from.scales2_);
  origins_[static_cast<std::size_t>(expert)] = from.origins_[static_cast<std::size_t>(from_expert)];
}

}  // namespace fusedmoe::cpu
