// Packed weights taken apart, as files keep them, and put together again. What is read is checked:
// it may be anybody's file.
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/check.h"
#include "core/device_runtime.h"
#include "cuda/experts/packed_weights.h"
#include "fusedmoe/runtime.h"
#include "moe/experts_args.h"

namespace fusedmoe::cuda {

/// Those that there are, by name.
std::vector<std::pair<const char*, const Tensor*>> PackedMatrices::arrays() const {
  std::vector<std::pair<const char*, const Tensor*>> arrays{{"blocks", &blocks_},
                                                            {"bias", &bias_},
                                                            {"scales", &scales_},
                                                            {"block_scales", &block_scales_},
                                                            {"input_scales", &input_scales_}};
  std::erase_if(arrays, [](const auto& array) { return !*array.second; });
  return arrays;
}

void PackedMatrices::add_to(PackedParts& parts, const std::string& prefix) const {
  for (const auto& [name, array] : arrays()) parts[prefix + name] = *array;
  const auto num_experts = static_cast<std::int64_t>(origins_.size());
  const Tensor shifts = parts[prefix + "exponent_shifts"] =
      Tensor::empty({num_experts}, DType::kI32);
  std::copy(exponent_shifts_.begin(), exponent_shifts_.end(), shifts.as<std::int32_t>());
  const Tensor two = parts[prefix + "two_scales_a_tile"] = Tensor::empty({1}, DType::kI32);
  *two.as<std::int32_t>() = two_scales_a_tile_ ? 1 : 0;
  const Tensor first = parts[prefix + "first"] = Tensor::empty({num_experts, 2, 2}, DType::kI64);
  auto* position = first.as<std::int64_t>();
  for (std::size_t expert = 0; expert < origins_.size(); ++expert) {
    for (std::size_t half = 0; half < 2; ++half) {
      const Origin& origin = origins_[expert][half];
      *position++ = origin.first_row;
      *position++ = origin.first_col;
      for (const auto& [name, member] : Origin::kTensors) {
        if (!(origin.*member)) continue;
        parts[core::format("{}{}.{}.{}", prefix, expert, half, name)] = origin.*member;
      }
    }
  }
}

void PackedMatrices::take_from(const PackedParts& parts, const std::string& prefix, Stream stream) {
  for (const auto& [name, array] : arrays()) {
    copy(core::part(parts, prefix + name, array->dtype(), array->shape()), *array, stream);
  }
  synchronize(stream);
  const auto num_experts = static_cast<std::int64_t>(origins_.size());
  const auto* shifts = core::part(parts, prefix + "exponent_shifts", DType::kI32, {num_experts})
                           .as<const std::int32_t>();
  std::copy_n(shifts, num_experts, exponent_shifts_.begin());
  two_scales_a_tile_ =
      *core::part(parts, prefix + "two_scales_a_tile", DType::kI32, {1}).as<const std::int32_t>() !=
      0;
  const auto* position = core::part(parts, prefix + "first", DType::kI64, {num_experts, 2, 2})
                             .as<const std::int64_t>();
  for (std::size_t expert = 0; expert < origins_.size(); ++expert) {
    for (std::size_t half = 0; half < 2; ++half) {
      Origin& origin = origins_[expert][half];
      origin.first_row = core::slice_position(*position++, prefix + "first");
      origin.first_col = core::slice_position(*position++, prefix + "first");
      for (const auto& [name, member] : Origin::kTensors) {
        const std::string part = core::format("{}{}.{}.{}", prefix, expert, half, name);
        const auto found = parts.find(part);
        const bool is_largest = member == &Origin::largest_scales;
        const bool exists = half == 0 || gated_;
        if (is_largest && format_->relative_scales && exists) {
          core::part(parts, part, DType::kF32, {width_, 1});
        }
        if (found == parts.end()) continue;
        const Tensor& given = found->second;
        // unpack() reads vectors as f32, and validates the shapes of what it returns.
        FUSEDMOE_CHECK_FAULT(
            exists && given.contiguous() &&
                (given.rank() == 2 || (given.rank() == 1 && given.dtype() == DType::kF32)),
            kShape, part,
            core::format("{} {}", fusedmoe::name(given.dtype()), to_string(given.shape())),
            "a matrix, or a vector of f32");
        origin.*member = Tensor::empty(given.shape(), given.dtype());
        copy(given, origin.*member, Stream{});
      }
    }
  }
}

CudaPackedWeights::CudaPackedWeights(Info info, const FormatKernels& kernels,
                                     const PackedParts& parts)
    : CudaPackedWeights(std::move(info), kernels) {
  const core::CurrentDevice current(this->info().device);
  const Stream stream{this->info().device};
  w13_.take_from(parts, "w13.", stream);
  w2_.take_from(parts, "w2.", stream);
}

PackedParts CudaPackedWeights::parts() const {
  PackedParts parts;
  w13_.add_to(parts, "w13.");
  w2_.add_to(parts, "w2.");
  return parts;
}

}  // namespace fusedmoe::cuda
