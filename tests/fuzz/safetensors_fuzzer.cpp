// Any bytes as a safetensors file: an Error, or tensors of which every byte can be read.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fusedmoe/safetensors.h"
#include "fusedmoe/tensor.h"

namespace {

// A vector of the exact size lets the sanitizer see a read past the end.
void parse(const std::vector<std::uint8_t>& bytes) {
  try {
    const auto file = fusedmoe::SafetensorsFile::parse(bytes.data(), bytes.size(), "input");
    std::int64_t total = 0;
    for (const auto& [name, tensor] : file.tensors()) {
      const auto* values = tensor.as<const std::uint8_t>();
      const std::int64_t count = tensor.nbytes();
      for (std::int64_t i = 0; i < count; ++i) {
        const volatile std::uint8_t value = values[i];
        (void)value;
      }
      total += count;
    }
    // No holes and no overlaps: the tensors cannot hold more than the file.
    if (total > static_cast<std::int64_t>(bytes.size())) __builtin_trap();
  } catch (const fusedmoe::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  parse({data, data + size});
  if (size == 0) return 0;
  // The same bytes as a header of the right length before data[0] bytes of data: mutations then
  // reach the checks behind the length field at once.
  const std::size_t header = size - 1;
  std::vector<std::uint8_t> file;
  for (int shift = 0; shift < 64; shift += 8) {
    file.push_back(static_cast<std::uint8_t>(std::uint64_t{header} >> shift));
  }
  file.insert(file.end(), data + 1, data + size);
  file.insert(file.end(), data[0], 0x5a);
  parse(file);
  return 0;
}
