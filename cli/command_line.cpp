#include "command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "fusedmoe/error.h"
#include "fusedmoe/version.h"
#include "log.h"

namespace fusedmoe::cli {

namespace {

/// Says what is wrong with a number; empty: nothing.
std::function<std::string(const std::string&)> number_check(
    const std::string& must, const std::function<bool(double)>& is_right) {
  return [=](const std::string& text) {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && is_right(value)) return std::string();
    return "was " + text + "; " + must;
  };
}

}  // namespace

Option& Option::required() {
  option_->required();
  return *this;
}

Option& Option::list() {
  option_->delimiter(',');
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
      "must be from " + std::to_string(least) + " to " + std::to_string(most),
      [=](double x) { return x >= static_cast<double>(least) && x <= static_cast<double>(most); }));
  return *this;
}

Option& Option::one_of(const std::vector<std::string>& values) {
  option_->check([=](const std::string& text) {
    if (std::find(values.begin(), values.end(), text) != values.end()) return std::string();
    std::string names;
    for (const std::string& value : values) names += (names.empty() ? "" : ", ") + value;
    return text + ": no such name; there are: " + names;
  });
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

/// CLI11's words as ours: "--layer excludes --skew".
std::string sentence(const CLI::ParseError& error) {
  std::string text = error.what();
  constexpr std::string_view kExcludes = " excludes ";
  if (const std::size_t at = text.find(kExcludes); at != std::string::npos) {
    text.replace(at, kExcludes.size(), " cannot be used with ");
  }
  return text;
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
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    log(Level::kError, sentence(error));
    return error.get_exit_code();
  } catch (const Error& error) {
    throw std::runtime_error(as_typed(app, error));
  }
  return 0;
}

}  // namespace fusedmoe::cli
