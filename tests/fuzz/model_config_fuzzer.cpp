// Any text as a config.json: an Error, or a configuration whose tensors have sensible sizes.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "checkpoint/block_tensors.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/tensor.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto model = fusedmoe::parse_model_config({reinterpret_cast<const char*>(data), size});
    // Per-expert layouts list every expert; some thousands are enough.
    constexpr std::int64_t kMaxExperts = 64;
    if (model.router.num_experts > kMaxExperts) return 0;
    const auto& row = fusedmoe::checkpoint::family_row(model.family);
    for (const auto& layout : row.layouts) {
      for (const auto& spec : fusedmoe::checkpoint::block_tensors(
               model, fusedmoe::checkpoint::published_names(model, layout))) {
        if (spec.shape.numel() <= 0) __builtin_trap();
      }
    }
  } catch (const fusedmoe::Error&) {
  }
  return 0;
}
