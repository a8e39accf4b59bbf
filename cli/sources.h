// What several subcommands read: a layer of a checkpoint and hidden states of a file. Here are the
// options that name them, and the functions that open what was named.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "command_line.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cli {

/// Declares --family of a command that opens a checkpoint.
Option add_family_option(Command& command, std::string& family);
/// Declares --layer, the number of a layer of a checkpoint. See chosen_layer().
Option add_layer_option(
    Command& command, std::int64_t& layer,
    const std::string& help = "Number of the layer; default: the first with experts");

/// A checkpoint read as a model of the family of --family; empty: of its own model_type.
Checkpoint open_checkpoint(const std::string& path, const std::string& family);

/// The layers with experts, at least one; throws Error. `path` is what the user calls it.
std::vector<std::int64_t> moe_layers_of(const Checkpoint& checkpoint, const std::string& path);

/// The one of `layers` that --layer names; negative: the first. Throws Error.
std::int64_t chosen_layer(std::int64_t layer, const std::vector<std::int64_t>& layers);

/// --checkpoint with --family and --layer, or --model.
struct LayerSource {
  std::string checkpoint, family, model;
  std::int64_t layer = -1;

  /// Returns the group of --checkpoint and --model, of which one must be given.
  Command add_to(Command& command, const std::string& model_help,
                 const std::string& layer_help =
                     "Number of the layer; default: the first with "
                     "experts");
};

/// The hidden states of --input and --input-name, or --tokens random ones of --seed.
struct InputSource {
  std::string path, name = "hidden_states";
  std::int64_t num_tokens = 64;
  std::uint64_t seed = 0;

  /// Returns --input.
  Option add_to(Command& command, std::int64_t least_tokens);
  /// (num_tokens, hidden) of `dtype`; throws Error.
  Tensor load(std::int64_t hidden, DType dtype) const;
};

}  // namespace fusedmoe::cli
