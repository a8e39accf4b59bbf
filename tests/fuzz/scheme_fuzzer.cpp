// Any text as a scheme, a layout or an activation: an Error, or a value whose name means the same.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/tensor.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fusedmoe;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const QuantScheme scheme = parse_scheme(text);
    if (!(parse_scheme(name(scheme)) == scheme)) __builtin_trap();
  } catch (const Error&) {
  }
  try {
    const CheckpointLayout layout = parse_checkpoint_layout(text);
    if (parse_checkpoint_layout(name(layout)) != layout) __builtin_trap();
  } catch (const Error&) {
  }
  try {
    const Activation activation = parse_activation(text);
    if (parse_activation(name(activation)) != activation) __builtin_trap();
  } catch (const Error&) {
  }
  return 0;
}
