#include "testing/support_matrix.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace fusedmoe::testing {
namespace {

std::string describe(const std::optional<QuantKey>& key) {
  if (!key || !key->quantized()) return key ? std::string(name(key->value)) : "-";
  const GroupShape group = key->group;
  std::string scale = "tensor";
  if (group.rows == 1) scale = group.cols < 0 ? "row" : fmt::format("{}", group.cols);
  if (group.rows > 1) scale = fmt::format("{} x {}", group.rows, group.cols);
  return fmt::format("{}, {} per {}{}{}{}", name(key->value), name(*key->scale), scale,
                     key->global_scale ? ", f32" : "", key->symmetric ? "" : ", zero points",
                     key->dynamic ? ", dynamic" : "");
}

using Cells = std::array<std::string, 7>;

std::string table(const std::vector<Cells>& rows) {
  Cells rule;
  std::array<std::size_t, rule.size()> widths{};
  for (const Cells& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (std::size_t i = 0; i < rule.size(); ++i) rule[i] = std::string(widths[i], '-');
  std::string text;
  const auto add = [&](const Cells& row) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      text += fmt::format("| {:<{}} ", row[i], widths[i]);
    }
    text += "|\n";
  };
  add(rows.front());
  add(rule);
  std::for_each(rows.begin() + 1, rows.end(), add);
  return text;
}

}  // namespace

std::vector<SupportRow> support_matrix() {
  std::vector<SupportRow> rows;
  for (const auto& experts : all_experts()) {
    if (!runs_on_cpu(*experts)) continue;
    for (const NamedScheme& entry : named_schemes()) {
      Case spec;
      spec.name = entry.name;
      spec.num_tokens = 4;
      spec.num_experts = 2;
      spec.hidden = 128;
      spec.intermediate = 128;
      spec.scheme = entry.scheme;
      MoeConfig config = make_config(spec, DType::kBF16);
      config.activation_format = experts->activation_format();
      const Selection selection = explain(config);
      // The pair of equal formats comes first.
      const auto pair = std::find_if(selection.candidates.begin(), selection.candidates.end(),
                                     [&](const Candidate& c) { return c.experts == experts; });
      rows.push_back({entry.name, std::move(spec), *pair});
    }
  }
  return rows;
}

std::string support_matrix_markdown() {
  std::vector<Cells> rows{
      {"experts", "prepare_finalize", "format", "kind", "hooks", "scheme", "support"}};
  for (const SupportRow& row : support_matrix()) {
    const Experts& experts = *row.candidate.experts;
    const Support& support = row.candidate.support;
    rows.push_back(
        {std::string(experts.name()), std::string(row.candidate.prepare_finalize->name()),
         std::string(name(experts.activation_format())),
         experts.is_monolithic() ? "monolithic" : "modular", experts.has_hooks() ? "yes" : "no",
         row.scheme, support ? "yes" : std::string(code(support.reason))});
  }
  std::string text =
      "# Support matrix\n\n"
      "Made from the registry by `scripts/support-matrix.sh`; CI fails when it is stale. Each row "
      "is an\n"
      "implementation on the CPU with a prepare/finalize of its activation format, asked about a "
      "scheme with bf16\n"
      "hidden states: \"yes\", or the code of the reason, which `fusedmoe explain` gives in words. "
      "Each "
      "\"yes\" is a\n"
      "test, `tests/unit/support_matrix_test.cpp`.\n\n"
      "## Schemes\n\n"
      "| scheme | weights | activations |\n| --- | --- | --- |\n";
  for (const NamedScheme& entry : named_schemes()) {
    text += fmt::format("| {} | {} | {} |\n", entry.name, describe(entry.scheme.weights),
                        describe(entry.scheme.activations));
  }
  return text + "\n## Implementations\n\n" + table(rows);
}

}  // namespace fusedmoe::testing
