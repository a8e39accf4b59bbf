// Options of a subcommand. CLI11 parses them, in command_line.cpp alone: its headers are most of
// the time that any other file takes to compile.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace fusedmoe::cli {

/// One declared option; each function says more about it and returns it again.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}

  Option& required();
  Option& list();  ///< values may be separated by commas
  Option& positive();
  Option& not_negative();
  Option& between(std::int64_t least, std::int64_t most);
  Option& one_of(const std::vector<std::string>& values);
  Option& show_default();  ///< in --help
  Option& excludes(const Option& other);

 private:
  CLI::Option* option_;
};

/// A subcommand, or a named group of its options. Values are stored when the command line is
/// parsed, before what runs.
class Command {
 public:
  explicit Command(CLI::App* app) : app_(app) {}

  Command add_command(const std::string& name, const std::string& description);
  Command add_group(const std::string& name);
  /// So many options of a group must be given.
  void require(int least, int most);
  void runs(std::function<void()> work);

  Option add_option(const std::string& name, std::string& value, const std::string& help);
  Option add_option(const std::string& name, int& value, const std::string& help);
  Option add_option(const std::string& name, std::int64_t& value, const std::string& help);
  Option add_option(const std::string& name, std::uint64_t& value, const std::string& help);
  Option add_option(const std::string& name, double& value, const std::string& help);
  Option add_option(const std::string& name, std::vector<std::string>& value,
                    const std::string& help);
  Option add_option(const std::string& name, std::vector<std::int64_t>& value,
                    const std::string& help);
  Option add_flag(const std::string& name, bool& value, const std::string& help);

 private:
  CLI::App* app_;
};

/// Parses the command line and runs the subcommand that it names. Returns the exit status.
int run_command_line(int argc, char** argv, const std::string& description,
                     const std::function<void(Command&)>& add_commands);

}  // namespace fusedmoe::cli
