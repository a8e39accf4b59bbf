// fusedmoe compare: the same float layer in several schemes, each against f32 on the same input.
#include "bench/compare.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/version.h"
#include "sources.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

struct CompareOptions {
  LayerSource source;
  InputSource input;
  std::int64_t max_experts = 8;
  std::vector<std::string> schemes;
  std::string dtype = "bf16", experts;
  int threads = 0, repeat = 5;
  bool json = false;
};

LayerWeights load_layer(const CompareOptions& options) {
  const LayerSource& source = options.source;
  if (!source.model.empty()) {
    return random_layer(parse_model_config(model_preset(source.model)), options.max_experts,
                        options.input.seed);
  }
  const Checkpoint checkpoint = open_checkpoint(source.checkpoint, source.family);
  const std::vector<std::int64_t> layers = moe_layers_of(checkpoint, source.checkpoint);
  return first_experts(checkpoint.load_layer(chosen_layer(source.layer, layers)),
                       options.max_experts);
}

/// Hidden states in f32, holding values that `dtype` has.
Tensor load_input(const CompareOptions& options, std::int64_t hidden, DType dtype) {
  const Tensor x = options.input.load(hidden, dtype);
  if (x.size(0) == 0) throw Error::invalid("--input", "--input holds no tokens");
  Tensor wide = Tensor::empty(x.shape(), DType::kF32);
  convert(x, wide);
  return wide;
}

void print_table(const std::vector<SchemeError>& rows) {
  std::size_t width = 6;
  for (const SchemeError& row : rows) width = std::max(width, row.scheme.size());
  fmt::print("{:<{}}  {:>10}  {:>11}  {:>9}  {:>9}  {:>10}  {:>11}  {:>6}  {}\n", "scheme", width,
             "bytes", "bits/weight", "ms", "rel_error", "cosine", "worst_error", "token", "plan");
  for (const SchemeError& row : rows) {
    fmt::print("{:<{}}  {:>10}  {:>11.2f}  {:>9.3f}  {:>9.2e}  {:>10.7f}  {:>11.2e}  {:>6}  {}\n",
               row.scheme, width, format_bytes(row.bytes), row.bits_per_weight, row.ms,
               row.relative_error, row.cosine, row.worst_token_error, row.worst_token, row.plan);
  }
}

void print_json(const CompareOptions& options, const LayerWeights& layer, std::int64_t num_tokens,
                const std::vector<SchemeError>& rows) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const SchemeError& row : rows) {
    all.push_back({{"scheme", row.scheme},
                   {"plan", row.plan},
                   {"bytes", row.bytes},
                   {"bits_per_weight", row.bits_per_weight},
                   {"ms", row.ms},
                   {"relative_error", row.relative_error},
                   {"cosine", row.cosine},
                   {"worst_token", row.worst_token},
                   {"worst_token_error", row.worst_token_error}});
  }
  const nlohmann::ordered_json object{
      {"version", FUSEDMOE_VERSION},
      {"layer", options.source.model.empty() ? options.source.checkpoint : options.source.model},
      {"num_tokens", num_tokens},
      {"num_experts", layer.experts.num_experts()},
      {"topk", layer.router.topk},
      {"hidden", layer.hidden()},
      {"intermediate", layer.experts.intermediate},
      {"dtype", options.dtype},
      {"rows", all}};
  fmt::print("{}\n", object.dump(2));
}

/// Those asked for, or all that are served.
std::vector<std::string> schemes_of(const CompareOptions& options) {
  if (options.schemes != std::vector<std::string>{"all"}) return options.schemes;
  std::vector<std::string> names;
  for (const NamedScheme& entry : named_schemes()) names.push_back(entry.name);
  return names;
}

void run(const CompareOptions& options) {
  const DType dtype = parse_float_dtype(options.dtype);
  check_experts_name(options.experts);
  set_num_threads(options.threads);
  std::vector<QuantScheme> schemes;
  for (const std::string& scheme : schemes_of(options)) schemes.push_back(parse_scheme(scheme));
  LayerWeights layer = load_layer(options);
  const Tensor x = load_input(options, layer.hidden(), dtype);
  const SchemeComparison comparison(std::move(layer), x);
  const bool all = options.schemes == std::vector<std::string>{"all"};

  std::vector<SchemeError> rows;
  Progress progress("Comparing");
  for (std::size_t i = 0; i < schemes.size(); ++i) {
    progress.update(static_cast<std::int64_t>(i), static_cast<std::int64_t>(schemes.size()));
    try {
      rows.push_back(comparison.run(schemes[i], dtype, options.experts, options.repeat));
    } catch (const Error& error) {
      if (!all) throw;
      const bool refused = error.kind() == ErrorKind::kUnsupported;
      log(Level::kWarning,
          fmt::format("{} is left out: {}", name(schemes[i]),
                      refused ? code(error.reason()) : std::string_view(error.what())));
    }
  }
  if (options.json) {
    print_json(options, comparison.layer(), x.size(0), rows);
  } else {
    print_table(rows);
  }
}

}  // namespace

void add_compare(Program& program) {
  auto options = std::make_shared<CompareOptions>();
  Command command = program.add_command(
      "compare", "Quantize one layer to several schemes and show their errors against f32");
  options->source.add_to(command, "Random weights of a model by name");
  command.add_option("--schemes", options->schemes, "SCHEME", "Schemes to compare, or all")
      .list()
      .required();
  command.add_option("--max-experts", options->max_experts, "N", "Take so many experts; 0: all")
      .not_negative()
      .show_default();
  options->input.add_to(command, 1);
  command
      .add_option("--seed", options->input.seed, "N",
                  "Seed of the random weights and hidden states")
      .show_default();
  command.add_option("--dtype", options->dtype, "DTYPE", "Of hidden states and output")
      .one_of({"bf16", "f16", "f32"})
      .show_default();
  command.add_option("--experts", options->experts, "EXPERTS",
                     "Implementation that must run (see explain); default: the best");
  command.add_option("--threads", options->threads, "N", "CPU threads; default: all")
      .between(1, kMaxThreads);
  command.add_option("--repeat", options->repeat, "N", "Forwards to take the median time of")
      .positive()
      .show_default();
  command.add_flag("--json", options->json,
                   "Print one JSON object, which scripts/plot_compare.py draws");
  command.example("fusedmoe compare --model qwen3-30b-a3b --schemes bf16,fp8_block,nvfp4");
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
