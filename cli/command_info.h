// The subcommands and their options as data, from which help, the manual page, completions and
// suggestions are made.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fusedmoe::cli {

struct OptionInfo {
  std::string name;  ///< "--checkpoint"; "path" of what goes by its place
  std::string help;
  std::string kind;                  ///< of its value, see kinds(); empty: a flag
  std::vector<std::string> choices;  ///< all values that there are; empty: any of its kind
  std::string default_text;
  bool required = false;
  bool list = false;   ///< values separated by commas
  bool alone = false;  ///< excludes all others

  bool by_place() const { return !name.starts_with("--"); }
  /// "PATH", or "balanced|zipf"; empty: a flag.
  std::string value() const;
  /// What a shell may offer for its value; none: nothing, or files.
  std::vector<std::string> words() const;
};

/// Options of which so many must be given.
struct OptionGroup {
  std::vector<std::string> options;
  std::size_t least = 0, most = 1;
};

struct CommandInfo {
  std::string name, help;
  std::deque<OptionInfo> options;  // others refer to them
  std::vector<OptionGroup> groups;
  std::vector<std::string> examples;
  std::string table_title;  ///< of the rows below, which explain what is printed
  std::vector<std::pair<std::string, std::string>> table;
  std::function<void()> run;

  const OptionInfo* find(std::string_view name) const;
};

struct ProgramInfo {
  std::string name, help;
  std::deque<OptionInfo> options;
  std::deque<CommandInfo> commands;

  const CommandInfo* find(std::string_view command) const;
};

/// A kind of values.
struct Kind {
  std::string_view name;  ///< "PATH"
  std::string_view text;  ///< what such a value is; empty: its name says it
  bool files = false;     ///< a shell may offer files
  std::vector<std::string> (*words)() = nullptr;
};
const std::vector<Kind>& kinds();
const Kind* find_kind(std::string_view name);

/// "; did you mean X?" of the candidate that `word` may be a slip of; empty where none is near.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

/// "1048576" as "1,048,576".
std::string with_commas(std::string number);

}  // namespace fusedmoe::cli
