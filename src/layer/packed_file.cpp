#include "fusedmoe/packed_file.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe {
namespace {

using Metadata = std::map<std::string, std::string, std::less<>>;

constexpr const char* kFormat = "fusedmoe_packed_weights";

/// What a reader must have the same of, in the order in which it is asked.
std::vector<std::pair<std::string, std::string>> describe(const Experts& experts,
                                                          const PackedWeights::Info& info) {
  const ResolvedActivation& a = info.activation;
  return {{"format", kFormat},
          {"packed_for", std::string(experts.descriptor().layout())},
          {"layout_version", core::to_string(experts.descriptor().layout_version())},
          {"scheme", name(info.scheme)},
          {"num_experts", core::to_string(info.num_experts)},
          {"hidden", core::to_string(info.hidden)},
          {"intermediate", core::to_string(info.intermediate)},
          {"activation", std::string(name(a.kind))},
          {"activation_params",
           core::format("alpha {}, beta {}, limit {}, situ_beta {}, "
                        "situ_linear_beta {}",
                        a.alpha, a.beta, a.limit, a.situ_beta, a.situ_linear_beta)},
          {"bias", info.has_bias ? "yes" : "no"},
          {"dtype", std::string(name(experts.config().dtype))}};
}

/// A chain of steps, each of which tells any two words apart.
constexpr std::uint64_t kPrime = 0x9E3779B97F4A7C15;
std::uint64_t mix(std::uint64_t sum, std::uint64_t word) {
  sum = (sum ^ word) * kPrime;
  return sum ^ (sum >> 29);
}

/// Of any bytes: eight chains side by side, as one would wait for its multiplications.
std::uint64_t sum_of(const std::byte* data, std::int64_t size) {
  std::array<std::uint64_t, 8> sums{1, 2, 3, 4, 5, 6, 7, 8};
  constexpr std::int64_t kStep = sizeof sums;
  std::array<std::uint64_t, 8> words;
  for (; size > 0; data += kStep, size -= kStep) {
    if (size < kStep) words.fill(0);
    std::memcpy(words.data(), data, static_cast<std::size_t>(std::min(size, kStep)));
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = mix(sums[i], words[i]);
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t one : sums) sum = mix(sum, one);
  return sum;
}

std::uint64_t sum_of(const TensorView& tensor) {
  constexpr std::int64_t kPiece = 1 << 20;
  const auto* data = tensor.as<const std::byte>();
  const std::int64_t size = tensor.nbytes(), pieces = (size + kPiece - 1) / kPiece;
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(pieces));
  core::parallel_for(default_executor(), pieces, pieces > 4, [&](std::int64_t i) {
    sums[static_cast<std::size_t>(i)] =
        sum_of(data + i * kPiece, std::min(kPiece, size - i * kPiece));
  });
  std::uint64_t sum = static_cast<std::uint64_t>(size);
  for (const std::uint64_t one : sums) sum = mix(sum, one);
  return sum;
}

/// Of the metadata and of each part, with its name.
template <typename Parts>
std::string checksum(const Metadata& metadata, const Parts& parts, bool with_contents) {
  std::uint64_t sum = 0;
  const auto add = [&](std::string_view text) {
    sum = mix(sum, sum_of(reinterpret_cast<const std::byte*>(text.data()),
                          static_cast<std::int64_t>(text.size())));
  };
  for (const auto& [key, value] : metadata) add(key), add(value);
  for (const auto& [name, tensor] : parts) {
    add(name);
    add(core::format("{} {}", fusedmoe::name(tensor.dtype()), to_string(tensor.shape())));
    if (with_contents) sum = mix(sum, sum_of(tensor));
  }
  return core::format("{:016x}", sum);
}

constexpr const char* kSums[] = {"checksum", "checksum_of_header"};

std::string scale_text(const std::optional<float>& scale) {
  return scale ? core::format("{}", *scale) : "none";
}

std::optional<float> read_scale(const std::string& text, const std::string& where) {
  if (text == "none") return std::nullopt;
  float scale = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, scale);
  if (error != std::errc() || stop != end || !(scale > 0) || std::isinf(scale)) {
    throw Error::malformed(where, text, "a finite number above 0");
  }
  return scale;
}

}  // namespace

void save_packed(const Experts& experts, const PackedWeights& packed,
                 const std::filesystem::path& path) {
  FUSEDMOE_CHECK(experts.accepts(packed), "packed", packed.info().implementation,
                 core::format("packed by {} for this configuration", experts.descriptor().name()));
  std::map<std::string, Tensor> parts;
  for (const auto& [name, tensor] : packed.parts()) parts[name] = to_device(tensor, {});
  Metadata metadata;
  for (const auto& [key, value] : describe(experts, packed.info())) metadata[key] = value;
  metadata["a1_scale"] = scale_text(packed.info().a1_scale);
  metadata["a2_scale"] = scale_text(packed.info().a2_scale);
  std::map<std::string, std::string> written(metadata.begin(), metadata.end());
  written["checksum"] = checksum(metadata, parts, true);
  written["checksum_of_header"] = checksum(metadata, parts, false);
  save_safetensors(path, {parts.begin(), parts.end()}, written);
}

std::shared_ptr<PackedWeights> load_packed(const Experts& experts, const PackedFile& packed) {
  const std::string path = packed.path.string();
  const SafetensorsFile file = SafetensorsFile::open(packed.path, {packed.access});
  Metadata metadata = file.metadata();
  const auto take = [&](const std::string& key) {
    const auto found = metadata.find(key);
    if (found == metadata.end()) {
      throw Error::invalid(path, core::format("{} is no file of packed weights: its metadata lacks "
                                              "\"{}\"",
                                              path, key));
    }
    return found->second;
  };
  const MoeConfig& config = experts.config();
  PackedWeights::Info info;
  info.implementation = experts.descriptor().name();
  info.device = config.device;
  info.scheme = config.scheme;
  info.num_experts = config.num_local_experts;
  info.hidden = config.hidden;
  info.intermediate = config.intermediate;
  info.activation = resolve(config.activation, config.activation_params);
  info.activation_params = config.activation_params;
  info.has_bias = config.has_bias;
  info.read_only = config.device.is_cpu() && packed.access == FileAccess::kMap;
  for (const auto& [key, wanted] : describe(experts, info)) {
    const std::string given = take(key);
    if (given == wanted) continue;
    throw Error::invalid(path, core::format("{} was packed with {} {}, and the experts want {}: "
                                            "pack the weights again",
                                            path, key, given, wanted));
  }
  info.a1_scale = read_scale(take("a1_scale"), path + " a1_scale");
  info.a2_scale = read_scale(take("a2_scale"), path + " a2_scale");

  PackedParts parts;
  for (const std::string& name : file.names()) parts[name] = file.tensor(name);
  const std::string of_all = take("checksum"), of_header = take("checksum_of_header");
  for (const char* key : kSums) metadata.erase(key);
  if (checksum(metadata, parts, packed.verify) != (packed.verify ? of_all : of_header)) {
    throw Error::invalid(path, core::format("{} is damaged: its checksum differs from that of its "
                                            "contents",
                                            path));
  }
  try {
    return experts.from_parts(std::move(info), parts);
  } catch (const Error& error) {
    throw error.within(path);
  }
}

}  // namespace fusedmoe
