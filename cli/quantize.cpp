// fusedmoe quantize: a checkpoint with its experts in another number format, in a published layout.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "commands.h"
#include "outputs.h"
#include "support.h"
#include "tools/quantize_checkpoint.h"

namespace fusedmoe::cli {
namespace {

struct QuantizeOptions {
  std::string checkpoint, scheme, layout, output, calibrate;
  std::string scale_rule = "ocp";
  bool json = false, force = false;
};

void run(const QuantizeOptions& options) {
  begin_outputs({options.output}, options.force);
  QuantizeCheckpointOptions quantize;
  for (const MxScaleRule rule :
       {MxScaleRule::kOcp, MxScaleRule::kEven, MxScaleRule::kCeil, MxScaleRule::kFloor}) {
    if (name(rule) == options.scale_rule) quantize.scale_rule = rule;
  }
  quantize.scheme = parse_scheme(options.scheme);
  quantize.calibration = options.calibrate;
  if (!options.layout.empty()) quantize.layout = parse_checkpoint_layout(options.layout);
  std::int64_t bytes = 0;
  double ms = 0;
  {
    Progress progress("Writing " + options.output);
    quantize.progress = [&](std::int64_t done, std::int64_t total) {
      progress.update(done, total);
    };
    ms =
        time_ms([&] { bytes = quantize_checkpoint(options.checkpoint, quantize, options.output); });
  }
  const ModelConfig config = Checkpoint::open(options.output).config();
  const std::string scheme = name(config.scheme), layout(name(config.layout));
  if (options.json) {
    fmt::print("{}\n", nlohmann::json{{"path", options.output},
                                      {"scheme", scheme},
                                      {"layout", layout},
                                      {"bytes", bytes},
                                      {"ms", ms}}
                           .dump());
  } else {
    fmt::print("{}: {} in the layout of {}, {} in {:.1f} s\n", options.output, scheme, layout,
               format_bytes(bytes), ms / 1000);
  }
}

}  // namespace

void add_quantize(Program& program) {
  auto options = std::make_shared<QuantizeOptions>();
  Command command = program.add_command(
      "quantize", "Quantize the experts of an f32, bf16 or f16 checkpoint into a published layout");
  command
      .add_option("--checkpoint", options->checkpoint, "PATH",
                  "Directory or safetensors file to read")
      .required();
  command.add_option("--scheme", options->scheme, "SCHEME", "Number format of the experts")
      .required();
  command
      .add_option("--layout", options->layout, "NAME",
                  "Published layout to write; default: the scheme's usual one")
      .one_of({"gpt-oss", "fp8", "compressed-tensors", "modelopt", "gptq", "gptq_v2", "awq"});
  command
      .add_option("--scale-rule", options->scale_rule, "NAME",
                  "How MXFP4 and MXFP8 weights choose their scales")
      .one_of({"ocp", "even", "ceil", "floor"})
      .show_default();
  command.add_option("--calibrate", options->calibrate, "PATH",
                     "File with hidden_states for static activation scales; default: "
                     "input.safetensors of the checkpoint");
  command.add_option("--output", options->output, "PATH", "Directory to make, or an empty one")
      .required();
  add_force_option(command, options->force);
  command.add_flag("--json", options->json, "Print one JSON object instead of text");
  command.example("fusedmoe quantize --checkpoint bf16-model --scheme nvfp4 --output nvfp4-model");
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
