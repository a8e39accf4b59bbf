#include "command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>

#include "core/format.h"
#include "fusedmoe/error.h"
#include "fusedmoe/version.h"
#include "manual.h"

namespace fusedmoe::cli {

namespace {

/// What is wrong with the text of a value; empty: nothing.
using Check = std::function<std::string(const std::string&)>;

Check number_check(const std::string& must, const std::function<bool(double)>& is_right) {
  return [=](const std::string& text) {
    double value = 0;
    if (!CLI::detail::lexical_cast(text, value)) return "was " + text + "; must be a number";
    return is_right(value) ? std::string() : "was " + text + "; " + must;
  };
}

/// CLI11 takes the nearest value for a number that is too large for its type.
template <typename Value>
Check range_check() {
  const std::string most = with_commas(std::to_string(std::numeric_limits<Value>::max()));
  return [=](const std::string& text) {
    Value value{};
    const auto end = std::from_chars(text.data(), text.data() + text.size(), value);
    return end.ec == std::errc::result_out_of_range ? "was " + text + "; must be at most " + most
                                                    : std::string();
  };
}

// As Error::unknown_name has it.
constexpr const char* kNoSuchName = ": no such name; there are: ";

}  // namespace

Option& Option::required() {
  option_->required();
  info_->required = true;
  return *this;
}

Option& Option::list() {
  option_->delimiter(',');
  info_->list = true;
  return *this;
}

Option& Option::positive() {
  option_->check(number_check("must be positive", [](double x) { return x > 0; }));
  return *this;
}

Option& Option::not_negative() {
  option_->check(number_check("must not be negative", [](double x) { return x >= 0; }));
  return *this;
}

Option& Option::between(std::int64_t least, std::int64_t most) {
  option_->check(number_check(
      "must be from " + with_commas(std::to_string(least)) + " to " +
          with_commas(std::to_string(most)),
      [=](double x) { return x >= static_cast<double>(least) && x <= static_cast<double>(most); }));
  return *this;
}

Option& Option::one_of(const std::vector<std::string>& values) {
  info_->choices = values;
  option_->check([=](const std::string& text) {
    if (std::find(values.begin(), values.end(), text) != values.end()) return std::string();
    return text + kNoSuchName + core::join(values, ", ") + did_you_mean(text, values);
  });
  return *this;
}

Option& Option::show_default() {
  option_->capture_default_str();
  info_->default_text = option_->get_default_str();
  return *this;
}

Option& Option::excludes(const Option& other) {
  option_->excludes(other.option_);
  return *this;
}

Option& Option::alone() {
  info_->alone = true;
  return *this;
}

Option& Option::needs(const Option& other) {
  option_->needs(other.option_);
  return *this;
}

Command Program::add_command(const std::string& name, const std::string& description) {
  info_->commands.push_back({.name = name, .help = description});
  return {app_->add_subcommand(name, description), &info_->commands.back()};
}

Command Command::add_group(std::size_t least, std::size_t most) {
  Command group(*this);
  group.group_ = static_cast<int>(info_->groups.size());
  info_->groups.push_back({{}, least, most});
  return group;
}

void Command::example(const std::string& line) {
  info_->examples.push_back(line);
}

void Command::explain(const std::string& title,
                      const std::vector<std::pair<std::string, std::string>>& table) {
  info_->table_title = title;
  info_->table = table;
}

void Command::runs(std::function<void()> work) {
  info_->run = std::move(work);
}

OptionInfo* Command::describe(const std::string& name, const std::string& help, const char* kind) {
  info_->options.push_back({.name = name, .help = help, .kind = kind});
  if (group_ >= 0) info_->groups[static_cast<std::size_t>(group_)].options.push_back(name);
  return &info_->options.back();
}

template <typename Value>
Option Command::add_option(const std::string& name, Value& value, const char* kind,
                           const std::string& help) {
  CLI::Option* parsed = app_->add_option(name, value, help);
  if constexpr (std::is_integral_v<Value>) parsed->check(range_check<Value>());
  OptionInfo* info = describe(name, help, kind);
  // As of a script's variable that is not set: what was asked for must not be left out.
  parsed->check([needs = "was empty; needs a value: " + info->value()](const std::string& text) {
    return text.empty() ? needs : std::string();
  });
  Option option(parsed, info);
  if constexpr (std::is_unsigned_v<Value>) option.not_negative();  // CLI11 takes -1 for 2^64 - 1
  return option;
}

template Option Command::add_option(const std::string&, std::string&, const char*,
                                    const std::string&);
template Option Command::add_option(const std::string&, int&, const char*, const std::string&);
template Option Command::add_option(const std::string&, std::int64_t&, const char*,
                                    const std::string&);
template Option Command::add_option(const std::string&, std::uint64_t&, const char*,
                                    const std::string&);
template Option Command::add_option(const std::string&, double&, const char*, const std::string&);
template Option Command::add_option(const std::string&, std::vector<std::string>&, const char*,
                                    const std::string&);
template Option Command::add_option(const std::string&, std::vector<std::int64_t>&, const char*,
                                    const std::string&);

Option Command::add_flag(const std::string& name, bool& value, const std::string& help) {
  return {app_->add_flag(name, value, help), describe(name, help, "")};
}

namespace {

template <typename List>
std::vector<std::string> names_of(const List& list) {
  std::vector<std::string> names;
  names.reserve(list.size());
  for (const auto& entry : list) names.push_back(entry.name);
  return names;
}

/// What stands in a command line without a name before it; null: nothing may.
const OptionInfo* placed_value(const CommandInfo& command) {
  const auto found = std::find_if(command.options.begin(), command.options.end(),
                                  [](const OptionInfo& option) { return option.by_place(); });
  return found == command.options.end() ? nullptr : &*found;
}

/// Throws UsageError for a value without a name where the command has none such.
void check_no_place(const CommandInfo& command, const std::vector<std::string>& arguments) {
  const OptionInfo* before = nullptr;  // whose value may come now
  bool has_checkpoint = false;
  for (const std::string& argument : arguments) {
    const std::size_t end = argument.find('=');
    if (argument == "--") return;
    if (const OptionInfo* option = command.find(argument.substr(0, end))) {
      const bool has_value = end != std::string::npos;  // and a list may have more
      before = !option->kind.empty() && (!has_value || option->list) ? option : nullptr;
      has_checkpoint |= option->name == "--checkpoint";
    } else if (before) {
      if (!before->list) before = nullptr;
    } else if (!argument.starts_with("-")) {
      const bool is_checkpoint = command.find("--checkpoint") && !has_checkpoint;
      throw UsageError("unexpected argument: " + argument +
                       (is_checkpoint ? "; did you mean --checkpoint " + argument + "?" : ""));
    }
  }
}

std::vector<std::string> with_help(const std::deque<OptionInfo>& options) {
  std::vector<std::string> names = names_of(options);
  names.emplace_back("--help");
  return names;
}

/// Names that there are not, before CLI11 misses what they stand for.
void check_names(const ProgramInfo& program, const std::vector<std::string>& arguments) {
  const auto is_option = [](const std::string& text) { return text.starts_with("-"); };
  const auto first = std::find_if_not(arguments.begin(), arguments.end(), is_option);
  const CommandInfo* command = first == arguments.end() ? nullptr : program.find(*first);
  if (first != arguments.end() && !command) {
    const std::vector<std::string> known = names_of(program.commands);
    std::string near = did_you_mean(*first, known);
    for (const std::string& option : with_help(program.options)) {
      if (option == "--" + *first) near = "; did you mean " + option + "?";
    }
    throw UsageError("unknown command " + *first +
                     (near.empty() ? "; there are: " + core::join(known, ", ") : near));
  }
  for (auto argument = arguments.begin(); argument != arguments.end(); ++argument) {
    if (*argument == "--") return;
    const std::string name = argument->substr(0, argument->find('='));
    const bool is_number = name.find_first_not_of("-.0123456789") == std::string::npos;
    if (!is_option(name) || is_number || name == "-h") continue;  // "-" is no option either
    const std::vector<std::string> known =
        with_help(command && argument > first ? command->options : program.options);
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      const std::string near = did_you_mean(name, known);
      const OptionInfo* place = command ? placed_value(*command) : nullptr;
      const bool takes_files = place && place->kind == "PATH";
      throw UsageError("unknown option " + name +
                       (near.empty() && takes_files
                            ? "; write fusedmoe " + command->name + " " + place->value()
                            : near));
    }
  }
  if (command && !placed_value(*command)) check_no_place(*command, {first + 1, arguments.end()});
}

/// Throws UsageError where other than so many options of a group were given.
void check_groups(const CLI::App& app, const CommandInfo& command) {
  for (const OptionGroup& group : command.groups) {
    std::vector<std::string> given;
    for (const std::string& option : group.options) {
      if (app.count(option) > 0) given.push_back(option);
    }
    if (given.size() < group.least) {
      throw UsageError("one of " + core::join(group.options, ", ") + " is required");
    }
    if (given.size() > group.most) {
      throw UsageError(core::join(given, " and ") + " cannot be used together");
    }
  }
}

/// Throws UsageError where another option was given beside one that goes alone.
void check_alone(const CLI::App& app, const CommandInfo& command) {
  const auto given = [&](const OptionInfo& option) { return app.count(option.name) > 0; };
  for (const OptionInfo& option : command.options) {
    if (!option.alone || !given(option)) continue;
    for (const OptionInfo& other : command.options) {
      if (&other == &option || !given(other)) continue;
      throw UsageError(other.name + " cannot be used with " + option.name);
    }
  }
}

/// CLI11's words as ours.
std::string sentence(const CLI::ParseError& error, const CommandInfo* command) {
  std::string text = error.what();
  const auto replace = [&](std::string_view old, std::string_view by) {
    const std::size_t at = text.find(old);
    if (at != std::string::npos) text.replace(at, old.size(), by);
    return at != std::string::npos;
  };
  replace(" excludes ", " cannot be used with ");
  if (error.get_name() == "RequiredError" && command) {
    const OptionInfo* place = command->find(text.substr(0, text.find(' ')));
    if (place && place->by_place()) replace(place->name, place->value());
  }
  replace("The following argument was not expected:", "unexpected argument:");
  replace("The following arguments were not expected:", "unexpected arguments:");
  const std::string name = text.substr(0, text.find(':'));
  if (error.get_name() == "ArgumentMismatch" && command && command->find(name)) {
    return name + " needs a value: " + command->find(name)->value();
  }
  if (text.find(kNoSuchName) != std::string::npos) replace(": ", " ");  // "--skew: zpif: no such"
  if (replace("Could not convert: ", "")) {                             // "--tokens = 2.5"
    replace(" = ", ": was ");
    text += "; must be a whole number";
  }
  return text;
}

/// The option that became this argument of the library; null: the command has none.
const OptionInfo* option_of(const CommandInfo& command, std::string argument) {
  constexpr std::pair<std::string_view, std::string_view> kOtherNames[] = {
      {"scheme", "--schemes"},  {"calibration", "--calibrate"}, {"require", "--experts"},
      {"num-hosts", "--hosts"}, {"num-groups", "--groups"},     {"placements[0]", "--placement"}};
  std::replace(argument.begin(), argument.end(), '_', '-');
  const OptionInfo* option = command.find("--" + argument);
  if (!option) option = command.find(argument);  // by its place
  for (const auto& [name, other] : kOtherNames) {
    if (!option && name == argument) option = command.find(other);
  }
  return option;
}

/// did_you_mean() of a value, in quotes or not, that is none of the words.
std::string other_word(std::string was, const std::vector<std::string>& words) {
  std::erase(was, '"');
  const bool is_word = std::find(words.begin(), words.end(), was) != words.end();
  return was.empty() || is_word ? std::string() : did_you_mean(was, words);
}

/// Runs a subcommand whose options are parsed.
void run(const CommandInfo& command) {
  try {
    command.run();
  } catch (const Error& error) {
    std::string text = error.what();
    bool names_option = text.starts_with("--");
    const OptionInfo* option = option_of(command, error.argument());
    if (option && text.starts_with(error.argument())) {
      text.replace(0, error.argument().size(), option->name);  // as the user typed it
      names_option = true;
      const std::size_t word = option->name.size() + 1, end = text.find(kNoSuchName);
      if (end != std::string::npos) {
        text += did_you_mean(text.substr(word, end - word), option->words());
      } else {
        text += other_word(error.was(), option->words());
      }
    }
    // What names an option is a value that it cannot have.
    if (error.kind() == ErrorKind::kInvalidArgument && names_option) throw UsageError(text);
    throw std::runtime_error(text);
  }
}

}  // namespace

int run_command_line(int argc, char** argv, const std::string& description,
                     const std::function<void(Program&)>& add_commands) {
  ProgramInfo info{.name = "fusedmoe", .help = description, .options = {}, .commands = {}};
  info.options.push_back({.name = "--version", .help = "Print the version"});
  info.options.push_back(
      {.name = "--man", .help = "Print the manual page: fusedmoe --man | man -l -"});
  CLI::App app(description, info.name);
  app.set_version_flag("--version", FUSEDMOE_VERSION);
  bool man = false;
  app.add_flag("--man", man);
  app.require_subcommand(0, 1);
  // A repeated option overrides, so that scripts can append to a command line.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  Program program(&app, &info);
  add_commands(program);
  const CommandInfo* command = nullptr;
  try {
    check_names(info, {argv + 1, argv + argc});
    app.parse(argc, argv);
    if (man) {
      std::fputs(manual_page(info).c_str(), stdout);
      return 0;
    }
    for (const CLI::App* chosen : app.get_subcommands()) {
      command = info.find(chosen->get_name());
      check_groups(*chosen, *command);
      check_alone(*chosen, *command);
    }
  } catch (const CLI::CallForHelp&) {
    for (const CLI::App* chosen : app.get_subcommands()) command = info.find(chosen->get_name());
    std::fputs(help_text(info, command, terminal_width(stdout)).c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --version
    for (const CLI::App* chosen : app.get_subcommands()) command = info.find(chosen->get_name());
    throw UsageError(sentence(error, command));
  }
  if (!command) {
    std::fputs(help_text(info, nullptr, terminal_width(stderr)).c_str(), stderr);
    return kUsageStatus;
  }
  run(*command);
  return 0;
}

}  // namespace fusedmoe::cli
