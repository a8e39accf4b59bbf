// fusedmoe synth: a checkpoint of true size in the published layout, with random weights.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "commands.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/tensor.h"
#include "outputs.h"
#include "support.h"
#include "tools/synth.h"

namespace fusedmoe::cli {
namespace {

struct SynthCommand {
  std::string model, config, out;
  SynthOptions synth;
  bool json = false, force = false;
};

void run(const SynthCommand& options) {
  begin_outputs({options.out}, options.force);
  SynthOptions synth = options.synth;
  synth.config_json =
      options.model.empty() ? read_text(options.config) : model_preset(options.model);
  std::int64_t bytes = 0;
  double ms = 0;
  {
    Progress progress("Writing " + options.out);
    synth.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
    ms = time_ms([&] { bytes = synthesize_checkpoint(synth, options.out); });
  }
  if (options.json) {
    fmt::print("{}\n", nlohmann::json{{"path", options.out}, {"bytes", bytes}, {"ms", ms}}.dump());
  } else {
    fmt::print("{}: {} in {:.1f} s\n", options.out, format_bytes(bytes), ms / 1000);
  }
}

}  // namespace

void add_synth(Program& program) {
  auto options = std::make_shared<SynthCommand>();
  Command command = program.add_command(
      "synth", "Write a checkpoint of true size in its published layout, with random weights");
  Command source = command.add_group(1, 1);
  source.add_option("--model", options->model, "MODEL", "Model whose shapes it has")
      .one_of(model_preset_names());
  source.add_option("--config", options->config, "PATH", "Any config.json of a supported family");
  command.add_option("--layers", options->synth.num_layers, "N", "Number of MoE layers")
      .positive()
      .show_default();
  command.add_option("--tokens", options->synth.num_tokens, "N", "Rows of input.safetensors")
      .not_negative()
      .show_default();
  command.add_option("--seed", options->synth.seed, "N", "Seed of the random numbers")
      .show_default();
  command.add_option("--out", options->out, "PATH", "Directory to make, or an empty one")
      .required();
  add_force_option(command, options->force);
  command.add_flag("--json", options->json, "Print one JSON object instead of text");
  command.example("fusedmoe synth --model gpt-oss-20b --tokens 64 --out gpt-oss-20b");
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
