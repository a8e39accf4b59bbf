#include "checkpoint/weight_faults.h"

#include <array>
#include <charconv>
#include <optional>
#include <string_view>
#include <utility>

#include "core/check.h"

namespace fusedmoe::checkpoint {
namespace {

/// "weights.experts[2].up.scales", taken apart.
struct Place {
  std::size_t expert = 0;
  std::string_view matrix, part;
};

std::optional<Place> place_of(std::string_view argument) {
  constexpr std::string_view kBegin = "weights.experts[", kAfterNumber = "].";
  if (!argument.starts_with(kBegin)) return std::nullopt;
  Place place;
  const char* end = argument.data() + argument.size();
  const auto number = std::from_chars(argument.data() + kBegin.size(), end, place.expert);
  const std::string_view rest(number.ptr, static_cast<std::size_t>(end - number.ptr));
  const std::size_t dot = rest.find('.', kAfterNumber.size());
  if (!rest.starts_with(kAfterNumber) || dot == rest.npos) return std::nullopt;
  place.matrix = rest.substr(kAfterNumber.size(), dot - kAfterNumber.size());
  place.part = rest.substr(dot + 1);
  return place;
}

constexpr std::array<std::pair<std::string_view, Part>, 4> kParts{
    {{"values", Part::kValues},
     {"scales", Part::kScales},
     {"zero_points", Part::kZeroPoints},
     {"global_scale", Part::kGlobalScale}}};

/// The tensor with this part of a linear layer; empty if no tensor is that part alone.
std::string tensor_of(const LinearLayer& layer, const LinearStorage& storage,
                      std::string_view part) {
  if (part == "bias") return layer.bias;
  if (!storage) return part_name(layer, ".weight");
  for (const auto& [text, kind] : kParts) {
    if (text != part) continue;
    for (const StoredTensor& stored : storage.layout->tensors) {
      if (stored.part == kind) return part_name(layer, stored.suffix);
    }
  }
  return {};
}

}  // namespace

void validate_stored(const ExpertWeights& weights, const std::vector<std::int32_t>& experts,
                     const ExpertNames& names, const std::string& prefix) {
  try {
    weights.validate();
  } catch (const Error& error) {
    const std::optional<Place> place = place_of(error.argument());
    if (!place || place->expert >= experts.size() || error.was().empty()) throw;
    const std::int32_t expert = experts[place->expert];
    const bool down = place->matrix == "down";
    const std::string of_stack =
        core::format("{} ({} of expert {})", error.was(), place->matrix, expert);
    const ExpertLayout& stacks = *names.layout.experts;
    if (stacks.storage == ExpertStorage::kMxfp4 && place->part == "scales") {
      const std::string& scales = down ? stacks.w2_scales : stacks.w13_scales;
      throw Error::malformed(prefix + tensor_name(names.layout.block, scales), of_stack,
                             error.must_be());
    }
    const std::vector<LinearLayer> layers = names.layers_of(expert);
    const bool own_up = place->matrix == "up" && layers.size() == 3;
    const LinearLayer& layer = down ? layers.back() : layers[own_up ? 1 : 0];
    const std::string name = tensor_of(layer, down ? names.down : names.first, place->part);
    if (name.empty()) throw;
    throw Error::malformed(prefix + name, layer.experts > 0 ? of_stack : error.was(),
                           error.must_be());
  }
}

}  // namespace fusedmoe::checkpoint
