// fusedmoe: data on stdout, messages on stderr, exit status 0 only when all went well.
#include <exception>

#include "commands.h"
#include "outputs.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

void add_commands(Command& program) {
  add_run(program);
  add_synth(program);
  add_quantize(program);
  add_inspect(program);
  add_explain(program);
  add_families(program);
  add_doctor(program);
  add_bench(program);
  add_compare(program);
  add_tune(program);
}

}  // namespace
}  // namespace fusedmoe::cli

int main(int argc, char** argv) {
  using namespace fusedmoe::cli;
  try {
    const int status = run_command_line(
        argc, argv, "Fused Mixture-of-Experts layers: run, check and explain them", add_commands);
    flush_stdout();
    return status;
  } catch (const std::exception& error) {
    log(Level::kError, error.what());
    return 1;
  }
}
