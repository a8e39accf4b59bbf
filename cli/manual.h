// Help and the manual page, from what the commands declare.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>

#include "command_info.h"

namespace fusedmoe::cli {

/// Exit status of a wrong command line; of every other failure 1.
inline constexpr int kUsageStatus = 2;

/// Columns of the terminal that the stream is, else of the variable COLUMNS, else `otherwise`.
std::size_t terminal_width(std::FILE* stream, std::size_t otherwise = 80);

/// `text` in lines of at most `width` columns, the first of which begins at column `first` and all
/// others at `indent`.
std::string wrapped(std::string_view text, std::size_t width, std::size_t first,
                    std::size_t indent);

/// Of a command, or of the whole program.
std::string help_text(const ProgramInfo& program, const CommandInfo* command, std::size_t width);

/// In the language of man(7).
std::string manual_page(const ProgramInfo& program);

}  // namespace fusedmoe::cli
