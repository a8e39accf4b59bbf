// Number formats and schemes as values, and their names.
#include "fusedmoe/quant.h"

#include <array>

#include "core/check.h"

namespace fusedmoe {

namespace {

constexpr std::array kScaleRules{MxScaleRule::kOcp, MxScaleRule::kEven, MxScaleRule::kCeil,
                                 MxScaleRule::kFloor};

QuantKey key(DType value, DType scale, GroupShape group, bool dynamic = false) {
  QuantKey result;
  result.value = value;
  result.scale = scale;
  result.group = group;
  result.dynamic = dynamic;
  return result;
}

}  // namespace

std::string_view name(MxScaleRule rule) {
  switch (rule) {
    case MxScaleRule::kOcp:
      return "ocp";
    case MxScaleRule::kEven:
      return "even";
    case MxScaleRule::kCeil:
      return "ceil";
    case MxScaleRule::kFloor:
      return "floor";
  }
  return "unknown";
}

namespace keys {

QuantKey e4m3_tensor(bool dynamic) {
  return key(DType::kE4M3, DType::kF32, {-1, -1}, dynamic);
}

QuantKey e4m3_row(bool dynamic) {
  return key(DType::kE4M3, DType::kF32, {1, -1}, dynamic);
}

QuantKey e4m3_block() {
  return key(DType::kE4M3, DType::kF32, {128, 128});
}

QuantKey e4m3_group(bool power_of_two) {
  return key(DType::kE4M3, power_of_two ? DType::kE8M0 : DType::kF32, {1, 128}, true);
}

QuantKey mxfp4(bool dynamic, MxScaleRule rule) {
  QuantKey result = key(DType::kE2M1, DType::kE8M0, {1, 32}, dynamic);
  result.scale_rule = rule;
  return result;
}

QuantKey mxfp8(bool dynamic) {
  QuantKey result = key(DType::kE4M3, DType::kE8M0, {1, 32}, dynamic);
  result.scale_rule = dynamic ? MxScaleRule::kCeil : MxScaleRule::kOcp;
  return result;
}

QuantKey nvfp4(bool dynamic) {
  QuantKey result = key(DType::kE2M1, DType::kE4M3, {1, 16}, dynamic);
  result.global_scale = DType::kF32;
  return result;
}

QuantKey int4(std::int64_t group, bool symmetric) {
  QuantKey result = key(DType::kI4, DType::kF32, {1, group});
  result.symmetric = symmetric;
  return result;
}

QuantKey int8(std::int64_t group, bool symmetric) {
  QuantKey result = key(DType::kU8, DType::kF32, {1, group});
  result.symmetric = symmetric;
  return result;
}

QuantKey int4_e4m3() {
  QuantKey result = key(DType::kI4, DType::kE4M3, {1, 128});
  result.global_scale = DType::kF32;
  result.global_group = {1, -1};
  return result;
}

QuantKey int8_row(bool dynamic) {
  return key(DType::kI8, DType::kF32, {1, -1}, dynamic);
}

QuantKey int8_group(std::int64_t group) {
  return key(DType::kI8, DType::kF32, {1, group}, true);
}

QuantKey int16_group(std::int64_t group) {
  return key(DType::kI16, DType::kF32, {1, group}, true);
}

namespace {

/// Groups whose scales, and zero points if they have them, are integers times a factor of their
/// block.
QuantKey blocks(DType value, std::int64_t group, bool zero_points, std::int64_t block = 256) {
  QuantKey result = key(value, zero_points ? DType::kU8 : DType::kI8, {1, group});
  result.global_scale = DType::kF16;
  result.global_group = {1, block};
  result.symmetric = !zero_points;
  return result;
}

}  // namespace

QuantKey q2_k() {
  return blocks(DType::kI4, 16, true);
}
QuantKey q3_k() {
  return blocks(DType::kI4, 16, false);
}
QuantKey q4_k() {
  return blocks(DType::kI4, 32, true);
}
QuantKey q5_k() {
  return blocks(DType::kU8, 32, true);
}
QuantKey q6_k() {
  return blocks(DType::kU8, 16, false);
}
QuantKey q4_1() {
  return blocks(DType::kI4, 32, true, 32);
}
QuantKey q5_1() {
  return blocks(DType::kU8, 32, true, 32);
}
QuantKey iq4_nl() {
  return key(DType::kIq4, DType::kF32, {1, 32});
}
QuantKey iq4_xs() {
  return blocks(DType::kIq4, 32, false);
}

}  // namespace keys

bool batch_dependent(const QuantScheme& scheme) {
  return scheme.activations && scheme.activations->dynamic &&
         scheme.activations->group == GroupShape{-1, -1};
}

namespace schemes {

QuantScheme unquantized(DType weights) {
  FUSEDMOE_CHECK(core::is_activation_dtype(weights), "weights", std::string(name(weights)),
                 "f32, f16 or bf16");
  QuantScheme scheme;
  scheme.weights.value = weights;
  return scheme;
}

QuantScheme mxfp4_w4a16() {
  return {keys::mxfp4(), std::nullopt};
}

}  // namespace schemes

namespace {

std::vector<NamedScheme> make_named_schemes() {
  std::vector<NamedScheme> table{
      {"f32", schemes::unquantized(DType::kF32)},
      {"bf16", schemes::unquantized(DType::kBF16)},
      {"f16", schemes::unquantized(DType::kF16)},
      {"fp8_tensor", {keys::e4m3_tensor(), keys::e4m3_tensor(true)}},
      {"fp8_tensor_static", {keys::e4m3_tensor(), keys::e4m3_tensor(false)}},
      {"fp8_tensor_token", {keys::e4m3_tensor(), keys::e4m3_row(true)}},
      {"fp8_tensor_w8a16", {keys::e4m3_tensor(), std::nullopt}},
      {"fp8_channel_token", {keys::e4m3_row(), keys::e4m3_row(true)}},
      {"fp8_channel_w8a16", {keys::e4m3_row(), std::nullopt}},
      {"fp8_block", {keys::e4m3_block(), keys::e4m3_group()}},
      {"fp8_block_ue8m0", {keys::e4m3_block(), keys::e4m3_group(true)}},
      {"fp8_block_w8a16", {keys::e4m3_block(), std::nullopt}},
      {"mxfp4_w4a16", schemes::mxfp4_w4a16()},
      {"mxfp4", {keys::mxfp4(), keys::mxfp4(true)}},
      {"mxfp4_mxfp8", {keys::mxfp4(), keys::mxfp8(true)}},
      {"mxfp4_fp8", {keys::mxfp4(), keys::e4m3_row(true)}},
      {"mxfp4_fp8_static", {keys::mxfp4(), keys::e4m3_tensor()}},
      {"mxfp4_int8", {keys::mxfp4(), keys::int8_group(32)}},
      {"mxfp4_int16", {keys::mxfp4(), keys::int16_group(32)}},
      {"mxfp8", {keys::mxfp8(), keys::mxfp8(true)}},
      {"mxfp8_w8a16", {keys::mxfp8(), std::nullopt}},
      {"nvfp4", {keys::nvfp4(), keys::nvfp4(true)}},
      {"nvfp4_w4a16", {keys::nvfp4(), std::nullopt}},
      {"nvfp4_int8", {keys::nvfp4(), keys::int8_group(32)}},
      {"nvfp4_int16", {keys::nvfp4(), keys::int16_group(32)}},
      {"w4a8", {keys::int4_e4m3(), keys::e4m3_row(true)}},
  };
  // Weight-only integers: "int4_g128", with zero points "int4_g128_zp", and for the 4-bit ones
  // modes with int8 and int16 activations.
  for (const bool four : {true, false}) {
    for (const std::int64_t group : {32, 64, 128, -1}) {
      const std::string base = core::format("int{}_{}", four ? 4 : 8,
                                            group < 0 ? "channel" : core::format("g{}", group));
      for (const bool symmetric : {true, false}) {
        const QuantKey weights = four ? keys::int4(group, symmetric) : keys::int8(group, symmetric);
        const std::string text = base + (symmetric ? "" : "_zp");
        table.push_back({text, {weights, std::nullopt}});
        if (four && group > 0) {
          table.push_back({text + "_int8", {weights, keys::int8_group(group)}});
          table.push_back({text + "_int16", {weights, keys::int16_group(group)}});
        }
      }
    }
  }
  table.push_back({"int8_w8a8", {keys::int8_row(), keys::int8_row(true)}});
  for (const auto& [text, weights] : {std::pair{"q2_k", keys::q2_k()},
                                      {"q3_k", keys::q3_k()},
                                      {"q4_k", keys::q4_k()},
                                      {"q5_k", keys::q5_k()},
                                      {"q6_k", keys::q6_k()},
                                      {"q4_1", keys::q4_1()},
                                      {"q5_1", keys::q5_1()},
                                      {"iq4_nl", keys::iq4_nl()},
                                      {"iq4_xs", keys::iq4_xs()}}) {
    table.push_back({text, {weights, std::nullopt}});
  }
  return table;
}

std::string describe(const QuantKey& key) {
  std::string text(name(key.value));
  if (key.scale) {
    text += core::format(" with {} {} scale per ({}, {})", key.dynamic ? "dynamic" : "static",
                         name(*key.scale), key.group.rows, key.group.cols);
  }
  if (key.global_scale) {
    text += core::format(", {} global scale", name(*key.global_scale));
    if (key.global_group.cols > 0) text += core::format(" per {}", key.global_group.cols);
  }
  if (!key.symmetric) text += ", zero points";
  return text;
}

/// The scheme with the scale rule that its name implies.
QuantScheme with_rule(QuantScheme scheme, MxScaleRule rule) {
  if (scheme.activations) scheme.activations->scale_rule = rule;
  return scheme;
}

QuantScheme with_full_range(QuantScheme scheme, bool full) {
  if (scheme.activations) scheme.activations->full_range = full;
  return scheme;
}

bool is_dynamic_int8(const QuantScheme& scheme) {
  return scheme.activations && scheme.activations->value == DType::kI8;
}

bool has_scale_rule(const QuantScheme& scheme) {
  return scheme.activations && scheme.activations->scale == DType::kE8M0 &&
         scheme.activations->group == GroupShape{1, 32};
}

}  // namespace

const std::vector<NamedScheme>& named_schemes() {
  static const std::vector<NamedScheme> table = make_named_schemes();
  return table;
}

std::string name(const QuantScheme& scheme) {
  if (scheme.down) {
    return name(QuantScheme{scheme.weights, scheme.activations}) + "+" +
           name(QuantScheme{*scheme.down, scheme.activations});
  }
  if (is_dynamic_int8(scheme) && scheme.activations->full_range) {
    return name(with_full_range(scheme, false)) + ":full";
  }
  for (const NamedScheme& entry : named_schemes()) {
    if (entry.scheme == scheme) return entry.name;
    if (!has_scale_rule(scheme) || !entry.scheme.activations) continue;
    const MxScaleRule rule = scheme.activations->scale_rule;
    if (with_rule(entry.scheme, rule) == scheme) {
      return core::format("{}:{}", entry.name, name(rule));
    }
  }
  return core::format("weights {}; activations {}", describe(scheme.weights),
                      scheme.activations ? describe(*scheme.activations) : "unquantized");
}

QuantScheme parse_scheme(std::string_view text) {
  if (const std::size_t plus = text.find('+'); plus != std::string_view::npos) {
    FUSEDMOE_CHECK(text.find('+', plus + 1) == std::string_view::npos, "scheme",
                   core::format("\"{}\"", text),
                   "one scheme, or two joined by '+': of GEMM 1 and of GEMM 2");
    QuantScheme scheme = parse_scheme(text.substr(0, plus));
    const QuantScheme down = parse_scheme(text.substr(plus + 1));
    FUSEDMOE_CHECK(scheme.activations == down.activations, "scheme", core::format("\"{}\"", text),
                   "two schemes with the same activations");
    if (down != scheme) scheme.down = down.weights;
    return scheme;
  }
  const std::size_t colon = text.find(':');
  const std::string_view base = text.substr(0, colon);
  std::string names;
  for (const NamedScheme& entry : named_schemes()) {
    if (entry.name != base) {
      names += names.empty() ? "" : ", ";
      names += entry.name;
      continue;
    }
    if (colon == std::string_view::npos) return entry.scheme;
    if (is_dynamic_int8(entry.scheme) && text.substr(colon + 1) == "full") {
      return with_full_range(entry.scheme, true);
    }
    FUSEDMOE_CHECK(has_scale_rule(entry.scheme), "scheme", core::format("\"{}\"", text),
                   core::format("\"{}\": it has no scale rule", base));
    for (const MxScaleRule rule : kScaleRules) {
      if (name(rule) == text.substr(colon + 1)) return with_rule(entry.scheme, rule);
    }
    throw Error("scheme", core::format("\"{}\"", text),
                "with the scale rule ocp, even, ceil or floor");
  }
  throw Error::unknown_name("scheme", text, names);
}

}  // namespace fusedmoe
