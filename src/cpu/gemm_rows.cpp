#include "cpu/gemm_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "fusedmoe/quant.h"
#include "quant/quantize.h"

namespace fusedmoe::cpu {
namespace {

bool is_nibbles(Codes codes) {
  return codes == Codes::kMxfp4 || codes == Codes::kE2M1 || codes == Codes::kInt4;
}

/// Whether the integer kernels hold twice the weight's value: then its scale is halved. (The int8
/// ones also add 12: NibblesToU8.)
bool is_doubled(Codes codes) {
  return codes == Codes::kMxfp4 || codes == Codes::kE2M1;
}

/// Which of 8 elements each byte of the two steps of a block multiplies (NibblesToU8).
constexpr int kNibbleOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};

bool adds_integers(Compute compute) {
  return compute == Compute::kInt8 || compute == Compute::kInt16;
}

std::int16_t load_i16(const void* elements, std::int64_t i) {
  std::int16_t value;
  std::memcpy(&value, static_cast<const std::byte*>(elements) + 2 * i, 2);
  return value;
}

float load(Compute compute, const std::byte* row, std::int64_t i) {
  float value;
  if (compute == Compute::kF32) {
    std::memcpy(&value, row + 4 * i, 4);
    return value;
  }
  std::uint16_t half;
  std::memcpy(&half, row + 2 * i, 2);
  return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
}

}  // namespace

GemmRows::GemmRows(const QuantScheme& scheme, const PackedGemm& gemm, Compute compute,
                   const Kernels& isa)
    : isa_(isa),
      key_(scheme.activations),
      codes_(gemm.shape.format.codes),
      compute_(compute),
      k_(gemm.shape.k),
      padded_k_(gemm.k) {
  const TileFormat& format = gemm.shape.format;
  const std::int64_t group = codes_ == Codes::kMxfp4 ? kGroup : format.group;
  weight_group_ = group > 0 ? group : padded_k_;
  const bool int8 = compute == Compute::kInt8;
  if (int8 || format.zeros) num_initial_ = (padded_k_ + weight_group_ - 1) / weight_group_;
  if (int8 && !format.zeros) {
    initial_factor_ = is_doubled(codes_) ? -12.0f : codes_ == Codes::kInt4 ? -8.0f : -128.0f;
  }
  if (!key_ || key_->group.cols < 0) return;
  // MX and NVFP4 values are exact in bf16 with their block scales; fp32 takes any product.
  fold_groups_ = compute == Compute::kF32 || key_->group.cols <= kGroup;
  if (adds_integers(compute)) fold_groups_ = false;
  if (fold_groups_) return;
  num_group_scales_ = (padded_k_ + key_->group.cols - 1) / key_->group.cols;
  group_shift_ = std::countr_zero(static_cast<std::uint64_t>(key_->group.cols / weight_group_));
}

RowScales GemmRows::scales(const float* memory, std::int64_t num_rows, std::int64_t first) const {
  RowScales result;
  if (key_ && (key_->group.cols < 0 || key_->global_scale)) result.scales = memory + first;
  const float* groups = memory + num_rows;
  if (num_group_scales_ > 0) result.group_scales = groups + first * num_group_scales_;
  result.num_group_scales = num_group_scales_;
  result.group_shift = group_shift_;
  if (num_initial_ > 0) {
    result.initial = groups + num_rows * num_group_scales_ + first * num_initial_;
  }
  result.num_initial = num_initial_;
  return result;
}

float GemmRows::group_scale(const void* scales, std::int64_t group) const {
  return load_f32(scales, *key_->scale, group);
}

void GemmRows::expand_int8(const std::uint8_t* codes, std::byte* target) const {
  std::memset(target + k_ / 8 * 8, 0, static_cast<std::size_t>(padded_k_ - k_ / 8 * 8));
  if (!is_nibbles(codes_)) {
    std::memcpy(target, codes, static_cast<std::size_t>(k_));
    return;
  }
  std::uint8_t tail[8] = {};
  for (std::int64_t begin = 0; begin < k_; begin += 8) {
    const std::uint8_t* source = codes + begin;
    if (k_ - begin < 8) {
      std::memcpy(tail, source, static_cast<std::size_t>(k_ - begin));
      source = tail;
    }
    for (int i = 0; i < 8; ++i) target[begin + i] = static_cast<std::byte>(source[kNibbleOrder[i]]);
  }
}

/// Group scales go to the kernel 64 at a time. Where they are not folded, the whole row is one
/// group with factor 1.
void GemmRows::expand_floats(const std::uint8_t* codes, const void* scales,
                             std::byte* target) const {
  constexpr std::int64_t kGroupsAtOnce = 64;
  const std::int64_t group = fold_groups_ ? key_->group.cols : k_;
  for (std::int64_t begin = 0; begin < k_; begin += kGroupsAtOnce * group) {
    const std::int64_t count = std::min(k_ - begin, kGroupsAtOnce * group);
    float factors[kGroupsAtOnce] = {1};
    for (std::int64_t g = 0; fold_groups_ && g * group < count; ++g) {
      factors[g] = group_scale(scales, begin / group + g);
    }
    isa_.expand_codes(codes + bytes(key_->value, begin), count, key_->value, factors, group,
                      compute_ == Compute::kBF16, target + begin * element_bytes(compute_));
  }
  std::memset(target + k_ * element_bytes(compute_), 0,
              static_cast<std::size_t>((padded_k_ - k_) * element_bytes(compute_)));
}

void GemmRows::expand(const std::uint8_t* codes, const void* scales, float row_scale,
                      std::byte* target, float* memory, std::int64_t num_rows,
                      std::int64_t row) const {
  switch (compute_) {
    case Compute::kInt8:
      expand_int8(codes, target);
      break;
    case Compute::kInt16:
      std::memcpy(target, codes, static_cast<std::size_t>(2 * k_));
      std::memset(target + 2 * k_, 0, static_cast<std::size_t>(2 * (padded_k_ - k_)));
      break;
    default:
      expand_floats(codes, scales, target);
  }
  const bool per_token = key_->group == GroupShape{1, -1};
  memory[row] = per_token ? group_scale(scales, 0) : row_scale;
  float* groups = memory + num_rows + row * num_group_scales_;
  const std::int64_t used = core::scales_per_row(*key_, k_);
  for (std::int64_t g = 0; g < num_group_scales_; ++g) {
    const float scale = g < used ? group_scale(scales, g) : 0.0f;
    groups[g] = adds_integers(compute_) && is_doubled(codes_) ? 0.5f * scale : scale;
  }
  set_initial(target, memory, num_rows, row);
}

void GemmRows::copy_row(std::byte* rows, float* memory, std::int64_t num_rows, std::int64_t from,
                        std::int64_t to) const {
  std::memcpy(rows + to * row_bytes(), rows + from * row_bytes(),
              static_cast<std::size_t>(row_bytes()));
  const auto copy = [&](float* floats, std::int64_t count) {
    std::copy_n(floats + from * count, count, floats + to * count);
  };
  if (key_) copy(memory, 1);
  copy(memory + num_rows, num_group_scales_);
  copy(memory + num_rows * (1 + num_group_scales_), num_initial_);
}

void GemmRows::set_initial(const std::byte* elements, float* memory, std::int64_t num_rows,
                           std::int64_t row) const {
  float* initial = memory + num_rows * (1 + num_group_scales_) + row * num_initial_;
  for (std::int64_t g = 0; g < num_initial_; ++g) {
    const std::int64_t begin = g * weight_group_, end = std::min(begin + weight_group_, padded_k_);
    if (adds_integers(compute_)) {
      std::int32_t sum = 0;
      for (std::int64_t i = begin; i < end; ++i) {
        sum += compute_ == Compute::kInt8 ? static_cast<std::int8_t>(elements[i])
                                          : load_i16(elements, i);
      }
      initial[g] = initial_factor_ * static_cast<float>(sum);
      continue;
    }
    float sum = 0;
    for (std::int64_t i = begin; i < end; ++i) sum += load(compute_, elements, i);
    initial[g] = initial_factor_ * sum;
  }
}

}  // namespace fusedmoe::cpu
