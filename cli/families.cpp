// fusedmoe families: the descriptions of model families, and the check of a new one.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands.h"
#include "fusedmoe/checkpoint.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

struct FamiliesOptions {
  std::string name, check;
  bool json = false;
};

void list(const FamiliesOptions& options) {
  std::vector<Family> families = Family::all();
  std::sort(families.begin(), families.end(),
            [](const Family& a, const Family& b) { return a.name() < b.name(); });
  if (options.json) {
    nlohmann::json array = nlohmann::json::array();
    for (const Family& family : families) array.push_back(nlohmann::json::parse(family.json()));
    fmt::print("{}\n", array.dump());
    return;
  }
  for (const Family& family : families) {
    if (family.refused().empty()) fmt::print("{}\n", family.name());
  }
  fmt::print("\nnot served:\n");
  for (const Family& family : families) {
    if (!family.refused().empty()) fmt::print("{:<20}  {}\n", family.name(), family.refused());
  }
}

void run(const FamiliesOptions& options) {
  if (!options.check.empty()) {
    const std::vector<Family> families = Family::parse(read_text(options.check), options.check);
    for (const Family& family : families) fmt::print("{}: {}\n", options.check, family.name());
  } else if (!options.name.empty()) {
    fmt::print("{}\n", Family::named(options.name).json());
  } else {
    list(options);
  }
}

}  // namespace

void add_families(Program& program) {
  auto options = std::make_shared<FamiliesOptions>();
  Command command = program.add_command(
      "families", "List the model families, show one's description, or check a new one");
  const Option family = command.add_option("family", options->name, "FAMILY",
                                           "Family whose description is shown, or a JSON file");
  const Option check =
      command
          .add_option("--check", options->check, "PATH", "JSON file whose descriptions are checked")
          .excludes(family);
  command.add_flag("--json", options->json, "Print every description as JSON").excludes(check);
  command.example("fusedmoe families qwen3_moe > mine.json");
  command.example("fusedmoe families --check mine.json");
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
