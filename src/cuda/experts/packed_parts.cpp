// Packed weights taken apart: all of them, as files keep them, and what putting them together reads
// (it is checked: it may be anybody's file); and one expert, which moves.
//
// Graphs hold the addresses of the arrays, and of host values scales_a_tile() and the static scales
// in PackedWeights::Info, of all experts. So an expert is replaced in place, by one for which these
// are the same. What else is of one expert alone lies in the arrays, or only unpack() reads it.
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/check.h"
#include "core/device_runtime.h"
#include "cuda/experts/packed_weights.h"
#include "fusedmoe/runtime.h"
#include "moe/experts_args.h"

namespace fusedmoe::cuda {

void PackedMatrices::add_to(PackedParts& parts, const std::string& prefix) const {
  for (const Array& each : kArrays) {
    if (this->*each.tensor) parts[prefix + each.name] = this->*each.tensor;
  }
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

void PackedMatrices::take_from(const PackedParts& parts, const std::string& prefix) {
  for (const Array& each : kArrays) {
    const Shape& shape = shapes_.*each.shape;
    if (shape.rank() == 0) continue;
    this->*each.tensor =
        to_device(core::part(parts, prefix + each.name, each.dtype, shape), device_);
    FUSEDMOE_CHECK(reinterpret_cast<std::uintptr_t>((this->*each.tensor).data()) % 16 == 0,
                   prefix + each.name, "at an odd address", "at a multiple of 16 bytes");
  }
  const auto on_host = [&](const char* name, DType dtype, const Shape& shape) {
    return to_device(core::part(parts, prefix + name, dtype, shape), {});
  };
  const auto num_experts = static_cast<std::int64_t>(origins_.size());
  const Tensor shifts = on_host("exponent_shifts", DType::kI32, {num_experts});
  std::copy_n(shifts.as<const std::int32_t>(), num_experts, exponent_shifts_.begin());
  two_scales_a_tile_ = *on_host("two_scales_a_tile", DType::kI32, {1}).as<std::int32_t>() != 0;
  const Tensor first = on_host("first", DType::kI64, {num_experts, 2, 2});
  const auto* position = first.as<const std::int64_t>();
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
        copy(to_device(given, {}), origin.*member, Stream{});
      }
    }
  }
}

CudaPackedWeights::CudaPackedWeights(Info info, const FormatKernels& kernels,
                                     const PackedParts& parts)
    : CudaPackedWeights(std::move(info), kernels) {
  const core::CurrentDevice current(this->info().device);
  w13_.take_from(parts, "w13.");
  w2_.take_from(parts, "w2.");
}

PackedParts CudaPackedWeights::parts() const {
  PackedParts parts;
  w13_.add_to(parts, "w13.");
  w2_.add_to(parts, "w2.");
  return parts;
}

CudaPackedWeights::CudaPackedWeights(Info info, const CudaPackedWeights& like)
    : CudaPackedWeights(std::move(info), *like.kernels_) {
  w13_.make_arrays();
  w2_.make_arrays();
  w13_.lay_out_as(like.w13_);
  w2_.lay_out_as(like.w2_);
}

std::string CudaPackedWeights::expert_layout() const {
  return core::format("{} with {} and {} scales a tile", format().name, w13_.scales_a_tile(),
                      w2_.scales_a_tile());
}

std::shared_ptr<PackedWeights> CudaPackedWeights::extract_expert(std::int64_t expert) const {
  core::check_expert_index(info(), expert);
  const auto one = std::make_shared<CudaPackedWeights>(core::info_of_one(info()), *this);
  const OwnedStream stream(info().device);
  one->put(0, *this, expert, stream);
  synchronize(stream);
  return one;
}

PackedParts CudaPackedWeights::expert_parts(std::int64_t expert) const {
  core::check_expert_index(info(), expert);
  CudaPackedWeights one(core::info_of_one(info()), *kernels_);
  one.w13_.view_expert(w13_, expert);
  one.w2_.view_expert(w2_, expert);
  return one.parts();
}

void CudaPackedWeights::replace_expert(std::int64_t expert, const PackedWeights& one) {
  const OwnedStream stream(info().device);
  replace_expert(expert, one, stream);
  synchronize(stream);
}

void CudaPackedWeights::replace_expert(std::int64_t expert, const PackedWeights& one,
                                       Stream stream) {
  core::check_one_expert(info(), expert, one.info());
  const auto* of_cuda = dynamic_cast<const CudaPackedWeights*>(&one);
  FUSEDMOE_CHECK(of_cuda, "one", one.info().implementation, "packed on cuda");
  FUSEDMOE_CHECK(of_cuda->expert_layout() == expert_layout(), "one", of_cuda->expert_layout(),
                 expert_layout());
  put(expert, *of_cuda, 0, stream);
}

void CudaPackedWeights::put(std::int64_t expert, const CudaPackedWeights& from,
                            std::int64_t from_expert, Stream stream) {
  const core::CurrentDevice current(info().device);
  w13_.put(expert, from.w13_, from_expert, stream);
  w2_.put(expert, from.w2_, from_expert, stream);
}

void PackedMatrices::put(std::int64_t expert, const PackedMatrices& from, std::int64_t from_expert,
                         Stream stream) {
  for (const Array& each : kArrays) {
    const Tensor &to = this->*each.tensor, &source = from.*each.tensor;
    if (to) {
      copy(source.slice(0, from_expert, from_expert + 1), to.slice(0, expert, expert + 1), stream);
    }
  }
  put_host_values(expert, from, from_expert);
}

void PackedMatrices::view_expert(const PackedMatrices& from, std::int64_t expert) {
  lay_out_as(from);
  for (const Array& each : kArrays) {
    const Tensor& all = from.*each.tensor;
    if (all) this->*each.tensor = Tensor(all.slice(0, expert, expert + 1), all.owner());
  }
  put_host_values(0, from, expert);
}

void PackedMatrices::put_host_values(std::int64_t expert, const PackedMatrices& from,
                                     std::int64_t from_expert) {
  const auto to = static_cast<std::size_t>(expert), source = static_cast<std::size_t>(from_expert);
  exponent_shifts_[to] = from.exponent_shifts_[source];
  origins_[to] = from.origins_[source];
}

}  // namespace fusedmoe::cuda
