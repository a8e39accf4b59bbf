// fusedmoe completion: what bash, zsh and fish source to complete its command lines. They offer
// commands, options, and of an option's values the names that there are, or files.
#include "completion.h"

#include <fmt/format.h>

#include <memory>

#include "commands.h"

namespace fusedmoe::cli {
namespace {

bool takes_files(const OptionInfo& option) {
  const Kind* kind = find_kind(option.kind);
  return kind && kind->files && option.choices.empty();
}

/// The first clause of a help text, for lists with little room.
std::string brief(const std::string& help) {
  const std::string clause = help.substr(0, help.find_first_of(";:("));
  return clause.substr(0, clause.find_last_not_of(' ') + 1);
}

std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char letter : text)
    result += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
  return result + "'";
}

std::string bash_script(const ProgramInfo& program) {
  std::vector<std::string> commands;
  std::string options, values, by_place;
  for (const CommandInfo& command : program.commands) {
    commands.push_back(command.name);
    std::vector<std::string> names{"--help"};
    for (const OptionInfo& option : command.options) {
      if (!option.by_place()) names.push_back(option.name);
      if (option.kind.empty()) continue;
      const std::string how = takes_files(option)
                                  ? "files=yes"
                                  : fmt::format("words='{}'{}", fmt::join(option.words(), " "),
                                                option.list ? " list=yes" : "");
      if (option.by_place()) {
        by_place += fmt::format("    '{} '*) {} ;;\n", command.name, how);
      } else {
        values += fmt::format("    '{} {}') {} ;;\n", command.name, option.name, how);
      }
    }
    options += fmt::format("    {}) options='{}' ;;\n", command.name, fmt::join(names, " "));
  }
  std::vector<std::string> first = commands;
  for (const OptionInfo& option : program.options) first.push_back(option.name);
  first.emplace_back("--help");
  return fmt::format(
      R"(# bash completion of fusedmoe
_fusedmoe() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
  local command=${{COMP_WORDS[1]}} options= words= files= list= before=
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    mapfile -t COMPREPLY < <(compgen -W '{}' -- "$current")
    return
  fi
  case $command in
{}  esac
  if [[ $current == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$options" -- "$current")
    return
  fi
  case "$command $previous" in
{}  esac
  if [[ $files ]]; then
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -f -- "$current")
    return
  fi
  if [[ $list && $current == *,* ]]; then
    before=${{current%,*}},
    current=${{current##*,}}
  fi
  mapfile -t COMPREPLY < <(compgen -P "$before" -W "$words" -- "$current")
}}
complete -F _fusedmoe fusedmoe
)",
      // What goes by its place comes where no option waits for a value.
      fmt::join(first, " "), options, values + by_place);
}

/// In [ ] and between colons of _arguments.
std::string zsh_escaped(const std::string& text) {
  std::string result;
  for (const char letter : text) {
    if (letter == '[' || letter == ']' || letter == ':' || letter == '\\') result += '\\';
    result += letter;
  }
  return result;
}

std::string zsh_value(const OptionInfo& option) {
  if (option.kind.empty()) return {};
  std::string message = ":" + zsh_escaped(option.kind) + ":";
  if (takes_files(option)) return message + "_files";
  const std::string words = fmt::format("{}", fmt::join(option.words(), " "));
  if (words.empty()) return message;
  return message + (option.list ? "_sequence compadd - " + zsh_escaped(words)
                                : "(" + zsh_escaped(words) + ")");
}

std::string zsh_script(const ProgramInfo& program) {
  std::string commands, cases;
  for (const CommandInfo& command : program.commands) {
    commands +=
        fmt::format("    {}\n", quoted(zsh_escaped(command.name) + ":" + brief(command.help)));
    cases += fmt::format("    {}) _arguments '--help[Print help]'", command.name);
    for (const OptionInfo& option : command.options) {
      const std::string head =
          option.by_place() ? "1" : option.name + "[" + zsh_escaped(brief(option.help)) + "]";
      cases += " \\\n      " + quoted(head + zsh_value(option));
    }
    cases += " ;;\n";
  }
  return fmt::format(
      R"(#compdef fusedmoe
_fusedmoe() {{
  local -a commands=(
{}  )
  if ((CURRENT == 2)); then
    _describe command commands
    return
  fi
  local command=${{words[2]}}
  shift words
  ((CURRENT--))
  case $command in
{}  esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _fusedmoe "$@"
else
  compdef _fusedmoe fusedmoe
fi
)",
      commands, cases);
}

std::string fish_script(const ProgramInfo& program) {
  std::string text = "# fish completion of fusedmoe\ncomplete -c fusedmoe -f\n";
  for (const OptionInfo& option : program.options) {
    text += fmt::format("complete -c fusedmoe -n __fish_use_subcommand -l {} -d {}\n",
                        option.name.substr(2), quoted(brief(option.help)));
  }
  for (const CommandInfo& command : program.commands) {
    text += fmt::format("complete -c fusedmoe -n __fish_use_subcommand -a {} -d {}\n", command.name,
                        quoted(brief(command.help)));
    const std::string when =
        fmt::format("complete -c fusedmoe -n '__fish_seen_subcommand_from {}'", command.name);
    for (const OptionInfo& option : command.options) {
      std::string value;
      if (!option.kind.empty()) value = takes_files(option) ? " -r -F" : " -x";
      const std::vector<std::string> words = option.words();
      if (!words.empty()) {
        const std::string list = fmt::format("{}", fmt::join(words, " "));
        value += option.list ? " -a '(__fish_append , " + list + ")'" : " -a '" + list + "'";
      }
      if (option.by_place()) {
        text += when + (takes_files(option) ? " -F" : value.substr(3)) + "\n";
      } else {
        text += fmt::format("{} -l {}{} -d {}\n", when, option.name.substr(2), value,
                            quoted(brief(option.help)));
      }
    }
  }
  return text;
}

}  // namespace

std::string completion_script(const ProgramInfo& program, const std::string& shell) {
  if (shell == "zsh") return zsh_script(program);
  return shell == "fish" ? fish_script(program) : bash_script(program);
}

void add_completion(Program& program) {
  auto shell = std::make_shared<std::string>();
  Command command = program.add_command(
      "completion", "Print what a shell sources to complete command lines of fusedmoe");
  command.add_option("shell", *shell, "NAME", "The shell")
      .one_of({"bash", "zsh", "fish"})
      .required();
  command.example("source <(fusedmoe completion bash)");
  const ProgramInfo& info = program.info();
  command.runs([shell, &info] { fmt::print("{}", completion_script(info, *shell)); });
}

}  // namespace fusedmoe::cli
