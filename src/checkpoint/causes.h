// Why the tensors of a block do not fit what the config says of it.
#pragma once

#include <cstddef>
#include <string>

#include "checkpoint/find_layout.h"

namespace fusedmoe::checkpoint {

/// How many tensors of a block do not fit a model.
using CountMisfits = std::size_t (*)(const ModelConfig& model, const Block& block);

/// The keys of the config that explain why so many tensors do not fit: with other values of them
/// most would. "config.hidden_size is 128, but the tensors have 160"; empty: no key explains it.
std::string cause_of_misfits(const ModelConfig& model, const Block& block, std::size_t misfits,
                             CountMisfits count_misfits);

/// The key of the config that says that inputs have static scales, if the file has none for any
/// expert; else empty.
std::string cause_of_missing_input_scales(const ModelConfig& model, const Block& block,
                                          const BlockLayout& layout);

}  // namespace fusedmoe::checkpoint
