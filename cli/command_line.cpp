#include "command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "fusedmoe/error.h"
#include "fusedmoe/version.h"

namespace fusedmoe::cli {

Option& Option::required() {
  option_->required();
  return *this;
}

Option& Option::list() {
  option_->delimiter(',');
  return *this;
}

Option& Option::positive() {
  option_->check(CLI::PositiveNumber);
  return *this;
}

Option& Option::not_negative() {
  option_->check(CLI::NonNegativeNumber);
  return *this;
}

Option& Option::between(std::int64_t least, std::int64_t most) {
  option_->check(CLI::Range(least, most));
  return *this;
}

Option& Option::one_of(const std::vector<std::string>& values) {
  option_->check(CLI::IsMember(values));
  return *this;
}

Option& Option::show_default() {
  option_->capture_default_str();
  return *this;
}

Option& Option::excludes(const Option& other) {
  option_->excludes(other.option_);
  return *this;
}

Command Command::add_command(const std::string& name, const std::string& description) {
  return Command(app_->add_subcommand(name, description));
}

Command Command::add_group(const std::string& name) {
  return Command(app_->add_option_group(name));
}

void Command::require(int least, int most) {
  app_->require_option(static_cast<std::size_t>(least), static_cast<std::size_t>(most));
}

void Command::runs(std::function<void()> work) {
  app_->callback(std::move(work));
}

Option Command::add_option(const std::string& name, std::string& value, const std::string& help) {
  return Option(app_->add_option(name, value, help));
}

Option Command::add_option(const std::string& name, int& value, const std::string& help) {
  return Option(app_->add_option(name, value, help));
}

Option Command::add_option(const std::string& name, std::int64_t& value, const std::string& help) {
  return Option(app_->add_option(name, value, help));
}

Option Command::add_option(const std::string& name, std::uint64_t& value, const std::string& help) {
  return Option(app_->add_option(name, value, help));
}

Option Command::add_option(const std::string& name, double& value, const std::string& help) {
  return Option(app_->add_option(name, value, help));
}

Option Command::add_option(const std::string& name, std::vector<std::string>& value,
                           const std::string& help) {
  return Option(app_->add_option(name, value, help));
}

Option Command::add_option(const std::string& name, std::vector<std::int64_t>& value,
                           const std::string& help) {
  return Option(app_->add_option(name, value, help));
}

Option Command::add_flag(const std::string& name, bool& value, const std::string& help) {
  return Option(app_->add_flag(name, value, help));
}

namespace {

/// The message with the option that the user typed instead of the argument that it became.
std::string as_typed(const CLI::App& app, const Error& error) {
  std::string option = "--" + error.argument();
  std::replace(option.begin(), option.end(), '_', '-');
  const std::string_view message = error.what();
  for (const CLI::App* command : app.get_subcommands()) {
    if (!error.argument().empty() && message.starts_with(error.argument()) &&
        command->get_option_no_throw(option)) {
      return option + std::string(message.substr(error.argument().size()));
    }
  }
  return std::string(message);
}

}  // namespace

int run_command_line(int argc, char** argv, const std::string& description,
                     const std::function<void(Command&)>& add_commands) {
  CLI::App app(description, "fusedmoe");
  app.set_version_flag("--version", FUSEDMOE_VERSION);
  app.require_subcommand(1);
  // A repeated option overrides, so that scripts can append to a command line.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  Command program(&app);
  add_commands(program);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const Error& error) {
    throw std::runtime_error(as_typed(app, error));
  }
  return 0;
}

}  // namespace fusedmoe::cli
