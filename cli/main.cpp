// fusedmoe: data on stdout, messages on stderr, exit status 0 only when all went well.
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <exception>

#include "commands.h"
#include "fusedmoe/version.h"

namespace {

void log_to_stderr() {
  const char* no_color = std::getenv("NO_COLOR");
  const bool plain = no_color && *no_color;
  spdlog::set_default_logger(spdlog::stderr_color_mt(
      "fusedmoe", plain ? spdlog::color_mode::never : spdlog::color_mode::automatic));
  spdlog::set_pattern("%^%l:%$ %v");
}

}  // namespace

int main(int argc, char** argv) {
  log_to_stderr();
  CLI::App app("Fused Mixture-of-Experts layers: run, check and explain them", "fusedmoe");
  app.set_version_flag("--version", FUSEDMOE_VERSION);
  app.require_subcommand(1);
  // A repeated option overrides, so that scripts can append to a command line.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  fusedmoe::cli::add_run(app);
  fusedmoe::cli::add_synth(app);
  fusedmoe::cli::add_quantize(app);
  fusedmoe::cli::add_inspect(app);
  fusedmoe::cli::add_explain(app);
  fusedmoe::cli::add_doctor(app);
  fusedmoe::cli::add_bench(app);
  fusedmoe::cli::add_compare(app);
  fusedmoe::cli::add_tune(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    spdlog::error("{}", error.what());
    return 1;
  }
  return 0;
}
