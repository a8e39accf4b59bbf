#include "load.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string_view>
#include <system_error>
#include <vector>

#include "fusedmoe/safetensors.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/version.h"

namespace fusedmoe::cli {
namespace {

constexpr const char* kNumExperts = "num_experts";

double mean_rows(const LoadStatistics& load) {
  return static_cast<double>(load.rows) / static_cast<double>(load.num_experts());
}

}  // namespace

std::string load_table(const LoadStatistics& load) {
  return fmt::format(
      "{:>8} {:>8} {:>8} {:>9} {:>9} {:>8} {:>9} {:>8}\n"
      "{:>8} {:>8} {:>8} {:>9} {:>9.1f} {:>8} {:>9.2f} {:>8.2f}\n",
      "tokens", "rows", "experts", "distinct", "expected", "most", "mean", "balance",
      load.num_tokens, load.rows, load.num_experts(), load.distinct_experts,
      load.expected_distinct_experts, load.most, mean_rows(load), load.balance);
}

std::string load_chart(const LoadStatistics& load) {
  constexpr std::size_t kMostBars = 64, kBusiest = 32;
  constexpr std::int64_t kWidth = 50;
  const std::vector<std::int64_t>& rows = load.rows_per_expert;
  std::vector<std::size_t> shown(rows.size());
  std::iota(shown.begin(), shown.end(), std::size_t{0});
  if (shown.size() > kMostBars) {
    std::stable_sort(shown.begin(), shown.end(),
                     [&](std::size_t a, std::size_t b) { return rows[a] > rows[b]; });
    shown.resize(kBusiest);
  }
  std::string chart;
  for (const std::size_t expert : shown) {
    const std::int64_t bar = load.most ? (rows[expert] * kWidth + load.most - 1) / load.most : 0;
    chart += fmt::format("expert {:4} {:4} {:#<{}}\n", expert, rows[expert], "", bar);
  }
  return chart +
         fmt::format("{} rows on {} of {} experts; the busiest has {}, {:.2f} times the mean\n",
                     load.rows, load.distinct_experts, load.num_experts(), load.most, load.balance);
}

std::string load_heat_map(const LoadStatistics& load) {
  constexpr std::string_view kShades = " .:-=+*#%@";  // no rows, then up to the most
  constexpr std::int64_t kPerLine = 64;
  const auto darkest = static_cast<std::int64_t>(kShades.size()) - 1;
  std::string map;
  for (std::int64_t first = 0; first < load.num_experts(); first += kPerLine) {
    const std::int64_t end = std::min(first + kPerLine, load.num_experts());
    map += fmt::format("experts {:4} - {:4} |", first, end - 1);
    for (std::int64_t expert = first; expert < end; ++expert) {
      const std::int64_t rows = load.rows_per_expert[static_cast<std::size_t>(expert)];
      const std::int64_t shade = load.most ? (rows * darkest + load.most - 1) / load.most : 0;
      map += kShades[static_cast<std::size_t>(shade)];
    }
    map += "|\n";
  }
  return map + fmt::format("blank: no rows, \"{}\" in steps up to {} rows\n", kShades.substr(1),
                           load.most);
}

std::string load_json(const LoadStatistics& load) {
  return nlohmann::ordered_json{{"num_tokens", load.num_tokens},
                                {"topk", load.topk},
                                {"rows", load.rows},
                                {"most", load.most},
                                {"balance", load.balance},
                                {"distinct_experts", load.distinct_experts},
                                {"expected_distinct_experts", load.expected_distinct_experts},
                                {"rows_per_expert", load.rows_per_expert}}
      .dump();
}

void record_routing(const std::string& path, const RecordedRouting& routing,
                    std::int64_t num_experts) {
  save_safetensors(
      path, {{"topk_ids", routing.topk_ids}, {"topk_weights", routing.topk_weights}},
      {{kNumExperts, fmt::to_string(num_experts)}, {"fusedmoe_version", FUSEDMOE_VERSION}});
}

RecordedRouting replay_routing(const std::string& path, std::int64_t num_experts,
                               std::int64_t topk) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const auto tensor = [&](const char* name, DType dtype) {
    Tensor result = file.tensor(name);
    if (result.dtype() != dtype || result.rank() != 2 || result.size(1) != topk) {
      throw Error(fmt::format("{} of {}", name, path),
                  fmt::format("{} {}", fusedmoe::name(result.dtype()), to_string(result.shape())),
                  fmt::format("{} [num_tokens, {}]", fusedmoe::name(dtype), topk));
    }
    return result;
  };
  RecordedRouting routing{tensor("topk_ids", DType::kI32), tensor("topk_weights", DType::kF32)};
  if (routing.topk_ids.size(0) != routing.topk_weights.size(0) || routing.topk_ids.size(0) == 0) {
    throw Error::invalid(
        path, fmt::format("{} holds {} rows of ids and {} of weights: as many of each are needed, "
                          "at least one",
                          path, routing.topk_ids.size(0), routing.topk_weights.size(0)));
  }
  const auto recorded = file.metadata().find(kNumExperts);
  if (recorded != file.metadata().end() && recorded->second != fmt::to_string(num_experts)) {
    throw Error::invalid(path, fmt::format("{} is a routing of {} experts, but the layer has {}",
                                           path, recorded->second, num_experts));
  }
  load_statistics(routing.topk_ids, num_experts);  // checks every id
  return routing;
}

LoadStatistics recorded_load(const std::string& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const auto recorded = file.metadata().find(kNumExperts);
  std::int64_t num_experts = 0;
  if (recorded != file.metadata().end()) {
    const std::string& text = recorded->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), num_experts);
    if (error != std::errc() || end != text.data() + text.size()) num_experts = 0;
  }
  if (num_experts < 1) {
    throw Error::invalid(path, fmt::format("{} does not say how many experts there are: its "
                                           "metadata needs {}, as --record-routing writes it",
                                           path, kNumExperts));
  }
  try {
    return load_statistics(file.tensor("topk_ids"), num_experts);
  } catch (const Error& error) {
    throw error.within(path);
  }
}

}  // namespace fusedmoe::cli
