#include "fusedmoe/quant.h"

#include <fmt/format.h>

#include <array>

#include "core/check.h"

namespace fusedmoe {

namespace schemes {

QuantScheme unquantized(DType weights) {
  FUSEDMOE_CHECK(weights == DType::kF32 || weights == DType::kF16 || weights == DType::kBF16,
                 "weights", std::string(name(weights)), "f32, f16 or bf16");
  QuantScheme scheme;
  scheme.weights.value = weights;
  return scheme;
}

QuantScheme mxfp4_w4a16() {
  QuantScheme scheme;
  scheme.weights.value = DType::kE2M1;
  scheme.weights.scale = DType::kE8M0;
  scheme.weights.group = {1, 32};
  return scheme;
}

}  // namespace schemes

namespace {

struct NamedScheme {
  std::string_view name;
  QuantScheme scheme;
};

const std::array<NamedScheme, 4>& named_schemes() {
  static const std::array<NamedScheme, 4> table{{
      {"f32", schemes::unquantized(DType::kF32)},
      {"bf16", schemes::unquantized(DType::kBF16)},
      {"f16", schemes::unquantized(DType::kF16)},
      {"mxfp4_w4a16", schemes::mxfp4_w4a16()},
  }};
  return table;
}

std::string describe(const QuantKey& key) {
  std::string text(name(key.value));
  if (key.scale) {
    text += fmt::format(" with {} {} scale per ({}, {})", key.dynamic ? "dynamic" : "static",
                        name(*key.scale), key.group.rows, key.group.cols);
  }
  if (key.global_scale) text += fmt::format(", {} global scale", name(*key.global_scale));
  if (!key.symmetric) text += ", zero points";
  return text;
}

}  // namespace

std::string name(const QuantScheme& scheme) {
  for (const NamedScheme& entry : named_schemes()) {
    if (entry.scheme == scheme) return std::string(entry.name);
  }
  return fmt::format("weights {}; activations {}", describe(scheme.weights),
                     scheme.activations ? describe(*scheme.activations) : "unquantized");
}

QuantScheme parse_scheme(std::string_view text) {
  std::string names;
  for (const NamedScheme& entry : named_schemes()) {
    if (entry.name == text) return entry.scheme;
    names += names.empty() ? "" : ", ";
    names += entry.name;
  }
  throw Error("scheme", fmt::format("\"{}\"", text), fmt::format("one of {}", names));
}

}  // namespace fusedmoe
