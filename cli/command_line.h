// Options of a subcommand. CLI11 parses them, in command_line.cpp alone: its headers are most of
// the time that any other file takes to compile.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "command_info.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace fusedmoe::cli {

/// The command line itself is wrong, whatever its files hold.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// One declared option; each function says more about it and returns it again.
class Option {
 public:
  Option(CLI::Option* option, OptionInfo* info) : option_(option), info_(info) {}

  Option& required();
  Option& list();  ///< values may be separated by commas
  Option& positive();
  Option& not_negative();
  Option& between(std::int64_t least, std::int64_t most);
  Option& one_of(const std::vector<std::string>& values);
  Option& show_default();  ///< in --help
  Option& excludes(const Option& other);
  Option& needs(const Option& other);
  Option& alone();  ///< no other option of the command may be given

 private:
  CLI::Option* option_;
  OptionInfo* info_;
};

/// A subcommand, or options of it of which so many must be given. Values are stored when the
/// command line is parsed, before what runs.
class Command {
 public:
  Command(CLI::App* app, CommandInfo* info) : app_(app), info_(info) {}

  /// Of the options that are added to what is returned, so many must be given.
  Command add_group(std::size_t least, std::size_t most);
  /// A line as a user would type it.
  void example(const std::string& line);
  /// What the words in the output mean.
  void explain(const std::string& title,
               const std::vector<std::pair<std::string, std::string>>& table);
  void runs(std::function<void()> work);

  /// `kind` of its value, one of kinds(). A Value is text, a number or a list of either.
  template <typename Value>
  Option add_option(const std::string& name, Value& value, const char* kind,
                    const std::string& help);
  Option add_flag(const std::string& name, bool& value, const std::string& help);

 private:
  OptionInfo* describe(const std::string& name, const std::string& help, const char* kind);

  CLI::App* app_;
  CommandInfo* info_;
  int group_ = -1;
};

/// To declare subcommands on.
class Program {
 public:
  Program(CLI::App* app, ProgramInfo* info) : app_(app), info_(info) {}
  Command add_command(const std::string& name, const std::string& description);
  const ProgramInfo& info() const { return *info_; }

 private:
  CLI::App* app_;
  ProgramInfo* info_;
};

/// Parses the command line and runs the subcommand that it names. Returns the exit status. Throws
/// UsageError for a wrong command line.
int run_command_line(int argc, char** argv, const std::string& description,
                     const std::function<void(Program&)>& add_commands);

}  // namespace fusedmoe::cli
