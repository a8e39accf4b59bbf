// What several subcommands share: values of options, sizes as text, files.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "command_line.h"
#include "fusedmoe/router.h"
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

/// The whole text of a file; throws Error.
std::string read_text(const std::string& path);
/// What `parse` makes of the text of a file. Its errors name the file.
template <typename Parse>
auto parsed(const std::string& path, Parse parse) {
  const std::string text = read_text(path);
  try {
    return parse(text);
  } catch (const Error& error) {
    throw error.within(path);
  }
}

/// Writes a whole text file; throws Error.
void write_text(const std::string& path, const std::string& text);

/// "softmax, top-4, renormalized": a router's configuration in one line.
std::string describe_router(const RouterConfig& router);

/// Milliseconds that `work` takes.
double time_ms(const std::function<void()>& work);

}  // namespace fusedmoe::cli
