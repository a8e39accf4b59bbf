#include "manual.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "fusedmoe/version.h"

namespace fusedmoe::cli {
namespace {

using Rows = std::vector<std::pair<std::string, std::string>>;

/// A variable, and the options of the commands that it concerns; none: all commands.
struct Variable {
  std::string name, text;
  std::vector<std::string> options;
};

const std::vector<Variable>& variables() {
  static const std::vector<Variable> table{
      {"FUSEDMOE_CPU_ISA",
       "level of CPU instructions to use; doctor lists those that there are",
       {"--experts", "--comm"}},
      {"FUSEDMOE_NUMA_NODES",
       "folder to read instead of /sys/devices/system/node; empty: none",
       {"--threads", "--comm"}},
      {"FUSEDMOE_TUNED_CONFIGS",
       "file of tuned kernel configurations; empty: none",
       {"--device", "--comm"}},
      {"FUSEDMOE_RANK_COSTS",
       "file of bench --calibrate, by which layers on GPUs choose how rows travel; default: H200s",
       {"--tp", "--costs"}},
      {"FUSEDMOE_TOKEN", "secret of ranks that meet at an address other hosts can reach", {"--tp"}},
      {"FUSEDMOE_NCCL", "libnccl.so.2 to load", {"--tp", "--comm"}},
      {"MASTER_ADDR, MASTER_PORT",
       "where launched ranks meet, unless the launcher says it",
       {"--tp"}},
      {"OMP_NUM_THREADS", "number of CPU threads; default: all cores", {"--threads", "--comm"}},
      {"NO_COLOR", "if set, messages have no color", {}},
  };
  return table;
}

/// Those that concern a command; all of them where it is null.
Rows environment(const CommandInfo* command) {
  Rows rows;
  for (const Variable& variable : variables()) {
    const auto has = [&](const std::string& option) { return command->find(option) != nullptr; };
    if (!command || variable.options.empty() ||
        std::any_of(variable.options.begin(), variable.options.end(), has)) {
      rows.emplace_back(variable.name, variable.text);
    }
  }
  return rows;
}

const Rows& exit_statuses() {
  static const Rows table{
      {"0", "all went well"},
      {"1", "the work failed: a file, the machine, a check"},
      {"2", "the command line is wrong; nothing was done"},
  };
  return table;
}

/// Names and explanations in two columns, below a title.
std::string section(const std::string& title, const Rows& rows, std::size_t width) {
  if (rows.empty()) return {};
  constexpr std::size_t kMost = 26;
  std::size_t column = 0;
  for (const auto& [name, text] : rows) {
    if (name.size() <= kMost) column = std::max(column, name.size());
  }
  column += 4;
  std::string result = "\n" + title + ":\n";
  for (const auto& [name, text] : rows) {
    std::string line = "  " + name;
    if (line.size() + 2 > column) {
      line += "\n" + std::string(column, ' ');
    } else {
      line.resize(column, ' ');
    }
    result += line + wrapped(text, width, column, column) + "\n";
  }
  return result;
}

std::string name_and_value(const OptionInfo& option) {
  const std::string value = option.value() + (option.list ? ",..." : "");
  if (option.by_place()) return option.value();
  return option.kind.empty() ? option.name : option.name + " " + value;
}

std::string explanation(const OptionInfo& option) {
  std::string text = option.help;
  if (!option.choices.empty() && option.value() == option.kind) {
    text += fmt::format(": {}", fmt::join(option.choices, ", "));
  }
  if (!option.default_text.empty()) text += "; default: " + option.default_text;
  return text;
}

Rows option_rows(const std::deque<OptionInfo>& options) {
  Rows rows;
  for (const OptionInfo& option : options) {
    rows.emplace_back(name_and_value(option), explanation(option));
  }
  rows.emplace_back("-h, --help", "Print help");
  return rows;
}

/// What must be given comes first, as a user would type it.
std::string usage(const ProgramInfo& program, const CommandInfo& command) {
  std::string text = program.name + " " + command.name;
  for (const OptionGroup& group : command.groups) {
    if (group.least == 0) continue;
    std::vector<std::string> choices;
    for (const std::string& name : group.options) {
      choices.push_back(name_and_value(*command.find(name)));
    }
    text += fmt::format(" ({})", fmt::join(choices, " | "));
  }
  bool others = false;
  for (const OptionInfo& option : command.options) {
    const bool grouped =
        std::any_of(command.groups.begin(), command.groups.end(), [&](const OptionGroup& group) {
          return group.least > 0 &&
                 std::count(group.options.begin(), group.options.end(), option.name) > 0;
        });
    if (option.required) text += " " + name_and_value(option);
    if (option.by_place() && !option.required) text += " [" + option.value() + "]";
    others = others || (!option.required && !grouped && !option.by_place());
  }
  return text + (others ? " [OPTIONS]" : "");
}

Rows kind_rows(const ProgramInfo& program, const CommandInfo* command) {
  Rows rows;
  const auto uses = [](const CommandInfo& info, const Kind& kind) {
    return std::any_of(info.options.begin(), info.options.end(),
                       [&](const OptionInfo& option) { return option.value() == kind.name; });
  };
  for (const Kind& kind : kinds()) {
    const bool used =
        command ? uses(*command, kind)
                : std::any_of(program.commands.begin(), program.commands.end(),
                              [&](const CommandInfo& other) { return uses(other, kind); });
    if (used && !kind.text.empty()) rows.emplace_back(kind.name, kind.text);
  }
  return rows;
}

Rows command_rows(const ProgramInfo& program) {
  Rows rows;
  for (const CommandInfo& command : program.commands) rows.emplace_back(command.name, command.help);
  return rows;
}

constexpr std::string_view kOutputs =
    "Results go to stdout, messages to stderr. An output file or folder appears complete or not at "
    "all.";

}  // namespace

std::size_t terminal_width(std::FILE* stream, std::size_t otherwise) {
  winsize size{};
  if (ioctl(fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  const char* columns = std::getenv("COLUMNS");
  const long number = columns ? std::strtol(columns, nullptr, 10) : 0;
  return number > 0 ? static_cast<std::size_t>(number) : otherwise;
}

std::string wrapped(std::string_view text, std::size_t width, std::size_t first,
                    std::size_t indent) {
  std::string result;
  std::size_t column = first;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, end);
    if (column > indent && column + 1 + word.size() > width) {
      result += "\n" + std::string(indent, ' ');
      column = indent;
    } else if (!result.empty()) {
      result += ' ';
      ++column;
    }
    result += word;
    column += word.size();
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return result;
}

std::string help_text(const ProgramInfo& program, const CommandInfo* command, std::size_t width) {
  width = std::clamp<std::size_t>(width, 60, 120);
  std::string text;
  if (command) {
    text = "Usage: " + wrapped(usage(program, *command), width, 7, 9) + "\n\n" +
           wrapped(command->help, width, 0, 0) + "\n";
    text += section("Options", option_rows(command->options), width);
    text += section(command->table_title, command->table, width);
    text += section("Values", kind_rows(program, command), width);
    text += command->examples.size() > 1 ? "\nExamples:\n" : "\nExample:\n";
    for (const std::string& example : command->examples) text += "  " + example + "\n";
  } else {
    text = "Usage: " + program.name + " COMMAND [OPTIONS]\n\n" +
           wrapped(program.help, width, 0, 0) + "\n";
    text += section("Commands", command_rows(program), width);
    text += section("Options", option_rows(program.options), width);
    text +=
        "\nExamples:\n  fusedmoe synth --model gpt-oss-20b --out gpt-oss-20b\n"
        "  fusedmoe run --checkpoint gpt-oss-20b --tokens 64\n";
  }
  text += section("Environment", environment(command), width);
  text += section("Exit status", exit_statuses(), width);
  if (!command) {
    text += "\n" + wrapped(kOutputs, width, 0, 0) + " fusedmoe COMMAND --help says more.\n";
  }
  return text;
}

namespace {

/// As text of man(7): nothing in it is a request, and a minus is one that can be copied.
std::string escaped(std::string_view text) {
  std::string result;
  for (const char letter : text) {
    if (letter == '\\') {
      result += "\\e";
    } else if (letter == '-') {
      result += "\\-";
    } else if ((letter == '.' || letter == '\'') && result.empty()) {
      result += std::string("\\&") + letter;
    } else {
      result += letter;
    }
  }
  return result;
}

std::string tagged(const Rows& rows) {
  std::string text;
  for (const auto& [name, meaning] : rows) {
    text += fmt::format(".TP\n.B {}\n{}\n", escaped(name), escaped(meaning));
  }
  return text;
}

}  // namespace

std::string manual_page(const ProgramInfo& program) {
  std::string text = fmt::format(
      ".TH FUSEDMOE 1 \"\" \"fusedmoe {}\" \"User Commands\"\n.SH NAME\nfusedmoe \\- {}\n"
      ".SH SYNOPSIS\n.B fusedmoe\n.I COMMAND\n[\\fIOPTIONS\\fR]\n.SH DESCRIPTION\n{}.\n{}\n",
      FUSEDMOE_VERSION, escaped(program.help), escaped(program.help), escaped(kOutputs));
  text += tagged(option_rows(program.options));
  text += ".SH COMMANDS\n";
  for (const CommandInfo& command : program.commands) {
    text += fmt::format(".SS \"{}\"\n.B {}\n.PP\n{}\n", escaped(command.name),
                        escaped(usage(program, command)), escaped(command.help));
    text += tagged(option_rows(command.options));
    if (!command.table.empty()) {
      text += fmt::format(".PP\n{}:\n", escaped(command.table_title)) + tagged(command.table);
    }
    for (const std::string& example : command.examples) {
      text += fmt::format(".PP\n.EX\n{}\n.EE\n", escaped(example));
    }
  }
  text += ".SH VALUES\n" + tagged(kind_rows(program, nullptr));
  text += ".SH ENVIRONMENT\n" + tagged(environment(nullptr));
  text += ".SH \"EXIT STATUS\"\n" + tagged(exit_statuses());
  return text;
}

}  // namespace fusedmoe::cli
