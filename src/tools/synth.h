// Checkpoints of random weights, as published.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace fusedmoe {

/// Random weights of plausible scale in the published names and layout: config.json,
/// model.safetensors (or shards with an index), and input.safetensors with `hidden_states`
/// (num_tokens, hidden) bf16, N(0, 1). MXFP4 stays MXFP4; everything else is written in bf16, also
/// models published in FP8. Layers are numbered from 0 and all have experts; config.json says so.
struct SynthOptions {
  std::string config_json;  ///< see model_preset
  std::int64_t num_layers = 1;
  std::int64_t num_tokens = 64;
  std::uint64_t seed = 0;
  std::int64_t max_shard_bytes = 5'000'000'000;  ///< one tensor is never split
  std::function<void(std::int64_t done, std::int64_t total)> progress;  ///< bytes
};
/// Returns the bytes written. The directory, which must be new or empty, appears complete or not at
/// all. Memory stays bounded whatever the model's size; the same options give the same bytes.
std::int64_t synthesize_checkpoint(const SynthOptions& options,
                                   const std::filesystem::path& directory);

}  // namespace fusedmoe
