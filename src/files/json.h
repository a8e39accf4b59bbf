// Parsing of small JSON files (config.json, the index of a sharded checkpoint).
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace fusedmoe::files {

/// Longest config and index accepted. A tree takes up to some 30 times its text.
inline constexpr std::size_t kMaxConfigBytes = std::size_t{4} << 20;
inline constexpr std::size_t kMaxIndexBytes = std::size_t{64} << 20;

/// Parses an object; Error naming `label` for bad JSON, nesting deeper than 64 or another value.
nlohmann::json parse_json_object(std::string_view text, std::size_t max_bytes,
                                 const std::string& label);

}  // namespace fusedmoe::files
