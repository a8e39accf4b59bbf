// Any bytes as a GGUF file: an Error, or tensors of which every byte can be read, and a checkpoint
// whose layers are Errors or can be decoded.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "files/gguf.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/tensor.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // A vector of the exact size lets the sanitizer see a read past the end.
  const std::vector<std::uint8_t> bytes(data, data + size);
  try {
    const auto file = fusedmoe::files::GgufFile::parse(bytes.data(), bytes.size(), "input");
    std::int64_t total = 0;
    for (const auto& [name, entry] : file.tensors()) {
      const auto* values = entry.tensor.as<const std::uint8_t>();
      const std::int64_t count = entry.tensor.nbytes();
      for (std::int64_t i = 0; i < count; ++i) {
        const volatile std::uint8_t value = values[i];
        (void)value;
      }
      total += count;
    }
    if (total > static_cast<std::int64_t>(size)) __builtin_trap();
    const auto checkpoint = fusedmoe::Checkpoint::parse(bytes.data(), bytes.size(), "input");
    for (const std::int64_t layer : checkpoint.moe_layers()) checkpoint.load_layer(layer);
  } catch (const fusedmoe::Error&) {
  }
  return 0;
}
