// The JSON files of families/, compiled in; src/CMakeLists.txt writes the source that holds them.
#pragma once

#include <span>
#include <string_view>

namespace fusedmoe::checkpoint {

struct EmbeddedFile {
  std::string_view name, text;
};

std::span<const EmbeddedFile> embedded_files();
/// Of a file that is there.
std::string_view embedded_text(std::string_view name);

}  // namespace fusedmoe::checkpoint
