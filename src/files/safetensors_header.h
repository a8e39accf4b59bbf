// The JSON header of a safetensors file: parsing with every check, and writing.
//
// File = u64 little-endian length n, n bytes of JSON, data. JSON = {name: {dtype, shape,
// data_offsets: [begin, end]}, ..., "__metadata__": {string: string}}; offsets count from the
// start of the data. Source: the format description of the safetensors project.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/tensor.h"

namespace fusedmoe::files {

/// Longest header accepted, as in the reference implementation of the format.
inline constexpr std::int64_t kMaxHeaderBytes = 100'000'000;

struct HeaderEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  std::int64_t begin = 0;  ///< in bytes from the start of the data
  std::int64_t end = 0;
};

struct Header {
  std::vector<HeaderEntry> tensors;  ///< in the order of their data
  std::map<std::string, std::string, std::less<>> metadata;
};

/// Parses header JSON and checks it against the size of the data section. Errors name `label`.
Header parse_header(std::string_view json, std::int64_t data_bytes, const std::string& label);

/// Length and JSON, padded with spaces so that data after it starts at a multiple of 64 bytes.
std::string serialize_header(std::span<const HeaderEntry> tensors,
                             const std::map<std::string, std::string>& metadata);

/// Quoted for a message: control characters escaped, at most ~200 characters.
std::string quote(std::string_view text);

}  // namespace fusedmoe::files
