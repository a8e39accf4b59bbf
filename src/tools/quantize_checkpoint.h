// Quantizing a whole checkpoint into a published layout.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/quant.h"

namespace fusedmoe {

struct QuantizeCheckpointOptions {
  QuantScheme scheme;
  std::optional<CheckpointLayout> layout;      ///< none: the one such models usually have
  MxScaleRule scale_rule = MxScaleRule::kOcp;  ///< of MXFP4 and MXFP8 weights
  /// File with `hidden_states` (num_tokens, hidden) that static activation scales are made from;
  /// every layer sees the same. Empty: input.safetensors of the checkpoint.
  std::filesystem::path calibration;
  std::int64_t max_shard_bytes = 5'000'000'000;  ///< one tensor is never split
  std::function<void(std::int64_t done, std::int64_t total)> progress;  ///< bytes
};

/// Reads a checkpoint in f32, bf16 or f16 and writes one whose routed experts are quantized, with
/// names, dtypes and shapes as published models have them and a `quantization_config` that says so
/// and lists every other module. Layouts of per-expert tensors name linear layers as the family
/// does, or experts.N.gate_proj where it stacks them. Everything else (router, shared experts,
/// attention, the tokenizer's files, input.safetensors) is copied. The directory, which must be new
/// or empty, appears complete or not at all (files::OutputFolder); memory is bounded by one expert.
/// Returns the bytes written. Throws Error for a layout that cannot hold the scheme, for weights
/// that are not finite, and for static scales without calibration data, or such data without them.
std::int64_t quantize_checkpoint(const std::filesystem::path& source,
                                 const QuantizeCheckpointOptions& options,
                                 const std::filesystem::path& directory);

}  // namespace fusedmoe
