// Parsing of small JSON files (config.json, the index of a sharded checkpoint).
#pragma once

#include <cstddef>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fusedmoe::files {

/// Longest config and index accepted. A tree takes up to some 30 times its text.
/// A config may list the format of every expert's every matrix: 10 MB for 256 experts in 60 layers.
inline constexpr std::size_t kMaxConfigBytes = std::size_t{32} << 20;
inline constexpr std::size_t kMaxIndexBytes = std::size_t{64} << 20;

/// Parses an object; Error naming `label` for bad JSON, nesting deeper than 64 or another value.
/// NaN, Infinity and -Infinity, as Python writes them, become {"__float__": "NaN"}.
nlohmann::json parse_json_object(std::string_view text, std::size_t max_bytes,
                                 const std::string& label);

/// A number; one that JSON does not have becomes {"__float__": "NaN"}, too.
nlohmann::json number_json(double value);

/// The keys of the objects that lie under one of these keys, below an object under `within`, in the
/// order of the text: those that lie least deep. For text that parse_json_object accepts.
std::map<std::string, std::vector<std::string>> keys_in_order(
    std::string_view text, std::span<const std::string_view> within,
    std::span<const std::string_view> keys);

}  // namespace fusedmoe::files
