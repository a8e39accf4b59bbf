// What several subcommands share: sizes as text, options with checked values, files.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "command_line.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/tensor.h"
#include "log.h"

namespace fusedmoe::cli {

/// Of --threads: more than any machine has, few enough to start.
inline constexpr int kMaxThreads = 1024;

/// Throws UsageError unless `require` of --experts begins with a name of the registry; empty: the
/// best.
void check_experts_name(const std::string& require);

/// "421.3 MB", decimal units.
std::string format_bytes(std::int64_t bytes);

/// f32, bf16 or f16; throws Error otherwise.
DType parse_float_dtype(const std::string& text);

/// A floating tensor (any number of rows, columns) of a safetensors file; throws Error.
Tensor load_tensor(const std::string& path, const std::string& name, std::int64_t columns);

/// Normally distributed (rows, columns); another seed, other values.
Tensor random_hidden_states(std::int64_t rows, std::int64_t columns, DType dtype,
                            std::uint64_t seed);

/// The layers with experts, at least one; throws Error. `path` is what the user calls it.
std::vector<std::int64_t> moe_layers_of(const Checkpoint& checkpoint, const std::string& path);

/// The one of `layers` that --layer names; negative: the first. Throws Error.
std::int64_t chosen_layer(std::int64_t layer, const std::vector<std::int64_t>& layers);

/// Declares --family of a command that opens a checkpoint.
Option add_family_option(Command& command, std::string& family);
/// A checkpoint read as a model of the family of --family; empty: of its own model_type.
Checkpoint open_checkpoint(const std::string& path, const std::string& family);

/// The whole text of a file; throws Error.
std::string read_text(const std::string& path);

/// Writes a whole text file; throws Error.
void write_text(const std::string& path, const std::string& text);

/// "softmax, top-4, renormalized": a router's configuration in one line.
std::string describe_router(const RouterConfig& router);

/// Milliseconds that `work` takes.
double time_ms(const std::function<void()>& work);

}  // namespace fusedmoe::cli
