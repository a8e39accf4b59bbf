// fusedmoe: data on stdout, messages on stderr; exit status 0 only when all went well, and 2 for a
// wrong command line.
#include <cstdio>
#include <exception>

#include "commands.h"
#include "manual.h"
#include "outputs.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

void add_commands(Program& program) {
  add_run(program);
  add_synth(program);
  add_quantize(program);
  add_inspect(program);
  add_explain(program);
  add_families(program);
  add_doctor(program);
  add_bench(program);
  add_balance(program);
  add_compare(program);
  add_simulate(program);
  add_tune(program);
  add_completion(program);
}

/// What was printed before the error stands before it, also in a file that gets both.
int fail(const std::exception& error, int status) {
  std::fflush(stdout);
  log(Level::kError, error.what());
  return status;
}

}  // namespace
}  // namespace fusedmoe::cli

int main(int argc, char** argv) {
  using namespace fusedmoe::cli;
  try {
    const int status = run_command_line(
        argc, argv, "Run, check, explain and time fused Mixture-of-Experts layers", add_commands);
    flush_stdout();
    return status;
  } catch (const UsageError& error) {
    return fail(error, kUsageStatus);
  } catch (const std::exception& error) {
    return fail(error, 1);
  }
}
