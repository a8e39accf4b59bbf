// Safetensors files built by hand, so that tests can get every part of them wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fusedmoe::testing {

/// Length field, header, data.
inline std::string safetensors_bytes(const std::string& header, std::size_t data_bytes,
                                     std::uint64_t length_change = 0) {
  std::uint64_t length = header.size() + length_change;
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i) & 0xff);
  return bytes + header + std::string(data_bytes, '\1');
}

}  // namespace fusedmoe::testing
