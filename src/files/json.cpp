#include "files/json.h"

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::files {

nlohmann::json parse_json_object(std::string_view text, std::size_t max_bytes,
                                 const std::string& label) {
  constexpr int kMaxDepth = 64;
  FUSEDMOE_CHECK_FILE(text.size() <= max_bytes, label, core::format("{} bytes", text.size()),
                      core::format("at most {} bytes", max_bytes));
  // The parser takes a NUL for the end and would ignore what follows.
  FUSEDMOE_CHECK_FILE(text.find('\0') == std::string_view::npos, label, "text with a NUL byte",
                      "valid JSON");
  const auto limit_depth = [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    FUSEDMOE_CHECK_FILE(depth <= kMaxDepth, label, core::format("nested {} deep", depth),
                        core::format("nested at most {} deep", kMaxDepth));
    return true;
  };
  nlohmann::json tree;
  try {
    tree = nlohmann::json::parse(text.begin(), text.end(), limit_depth);
  } catch (const nlohmann::json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    std::string_view text = error.what();
    if (const std::size_t end = text.find("] "); end != text.npos) text.remove_prefix(end + 2);
    throw Error::io(label, core::format("{}: not valid JSON: {}", label, text));
  }
  FUSEDMOE_CHECK_FILE(tree.is_object(), label, tree.type_name(), "a JSON object");
  return tree;
}

}  // namespace fusedmoe::files
