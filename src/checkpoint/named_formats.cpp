#include "checkpoint/named_formats.h"

#include <algorithm>
#include <tuple>

#include "checkpoint/linear_layouts.h"
#include "core/check.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {
namespace {

int count_differences(const QuantKey& a, const QuantKey& b) {
  return (a.value != b.value) + (a.group != b.group) + (a.symmetric != b.symmetric) +
         (a.scale != b.scale);
}

/// What the names of integer formats mean, where these differ.
std::string difference(const QuantKey& was, const QuantKey& is) {
  const auto bits = [](const QuantKey& key) {
    return key.value == DType::kI4 ? 4 : key.value == DType::kU8 ? 8 : 0;
  };
  if (bits(was) == 0 || bits(is) == 0) return {};
  if (bits(was) != bits(is)) return core::format(" ({} bits)", bits(is));
  if (was.group == is.group) return {};
  return is.group.cols < 0 ? " (one group for each row)"
                           : core::format(" (groups of {})", is.group.cols);
}

std::string in_layout(CheckpointLayout layout) {
  return core::format(" in the layout {}", name(layout));
}

}  // namespace

std::vector<NamedFormat> formats_like(const NamedFormat& like) {
  using enum CheckpointLayout;
  std::vector<NamedFormat> formats;
  for (const CheckpointLayout each : {kFp8, kCompressedTensors, kModelOpt, kGptq, kGptqV2, kAwq}) {
    for (const NamedScheme& named : named_schemes()) {
      if (linear_layouts(each, named.scheme.weights).empty()) continue;
      formats.push_back({each, named.scheme});
    }
  }
  const auto distance = [&](const NamedFormat& format) {
    return std::tuple(format.layout != like.layout,
                      count_differences(format.scheme.weights, like.scheme.weights),
                      format.scheme.activations != like.scheme.activations);
  };
  std::stable_sort(formats.begin(), formats.end(),
                   [&](const auto& a, const auto& b) { return distance(a) < distance(b); });
  // Of the schemes that store the same tensors the first one speaks for all.
  std::vector<NamedFormat> result;
  for (const NamedFormat& format : formats) {
    const bool known = std::any_of(result.begin(), result.end(), [&](const NamedFormat& other) {
      return other.layout == format.layout && other.scheme.weights == format.scheme.weights;
    });
    if (!known) result.push_back(format);
  }
  return result;
}

std::string contradiction(std::string_view modules, const ModuleFormat& said,
                          CheckpointLayout layout, const NamedFormat& found) {
  const std::string is = name(found.scheme);
  if (!said.scheme) {
    return core::format("the config has no entry that quantizes the {}, but their tensors are {}{}",
                        modules, is, in_layout(found.layout));
  }
  const bool one_layout = layout == found.layout;
  return core::format("{} says that the {} are {}{}, but their tensors are {}{}", source_of(said),
                      modules, name(*said.scheme), one_layout ? std::string() : in_layout(layout),
                      is,
                      one_layout ? difference(said.scheme->weights, found.scheme.weights)
                                 : in_layout(found.layout));
}

}  // namespace fusedmoe::checkpoint
