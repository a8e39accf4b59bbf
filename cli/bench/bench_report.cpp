#include "bench/bench_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "fusedmoe/runtime.h"
#include "fusedmoe/version.h"

namespace fusedmoe::cli {
namespace {

using Row = ReportRow;

struct Column {
  const char* name;
  int rank;  ///< where not all columns fit, those of the lowest ranks are shown
  const char* meaning;
  std::string (*text)(const Row&);
};

/// Of a measured value; a dash where no sample was kept.
std::string number(const Row& row, double value, int digits) {
  return row.result.samples ? fmt::format("{:.{}f}", value, digits) : "-";
}

std::string or_dash(const std::string& text) {
  return text.empty() ? "-" : text;
}

const std::vector<Column>& columns() {
  static const std::vector<Column> table{
      {"model", 0, "model or shape", [](const Row& r) { return r.model; }},
      {"scheme", 0, "number format of weights and activations",
       [](const Row& r) { return r.scheme; }},
      {"dtype", 9, "of the hidden states", [](const Row& r) { return r.dtype; }},
      {"experts", 7, "implementation and transport", [](const Row& r) { return r.implementation; }},
      {"tokens", 0, "tokens in the batch",
       [](const Row& r) { return fmt::format("{}", r.result.num_tokens); }},
      {"kernel_config", 10, "kernel configuration that ran",
       [](const Row& r) { return or_dash(r.result.kernel_config); }},
      {"distinct", 8, "experts that the tokens chose, mean over samples",
       [](const Row& r) { return number(r, r.result.distinct_experts, 1); }},
      {"median_ms", 0, "time of a forward, median over samples",
       [](const Row& r) { return number(r, r.result.median_ms, 4); }},
      {"floor_ms", 1,
       "least time that the machine's bandwidth and arithmetic allow for the median sample",
       [](const Row& r) { return number(r, r.result.floor_ms, 4); }},
      {"min_ms", 11, "shortest sample", [](const Row& r) { return number(r, r.result.min_ms, 3); }},
      {"p99_ms", 6, "99th percentile of the samples",
       [](const Row& r) { return number(r, r.result.p99_ms, 3); }},
      {"GFLOP/s", 5, "arithmetic of the experts by the median",
       [](const Row& r) { return number(r, r.result.gflops, 0); }},
      {"weight_MB", 12, "stored weights of the experts that the median sample chose",
       [](const Row& r) { return number(r, 1e-6 * r.result.weight_bytes, 2); }},
      {"GB/s", 4, "weight_MB by the median",
       [](const Row& r) { return number(r, r.result.gbytes, 1); }},
      {"read_GB/s", 13, "what the machine reads, measured around the median sample",
       [](const Row& r) { return number(r, r.result.read_gbytes, 1); }},
      {"dots", 14, "operands of the machine's dot products",
       [](const Row& r) { return std::string(r.result.dot_products); }},
      {"peak_GFLOP/s", 15, "rate of these, measured around the median sample",
       [](const Row& r) { return number(r, r.result.peak_gflops, 0); }},
      {"%bandwidth", 3, "GB/s of read_GB/s",
       [](const Row& r) { return number(r, r.result.percent_of_bandwidth(), 0); }},
      {"%flops", 3, "GFLOP/s of peak_GFLOP/s",
       [](const Row& r) { return number(r, r.result.percent_of_flops(), 0); }},
      {"time/floor", 1, "median over samples; 1 is the limit",
       [](const Row& r) { return number(r, r.result.ratio, 3); }},
      {"rel_error", 2, "largest difference from `reference` over its largest value",
       [](const Row& r) { return fmt::format("{:.1e}", r.result.relative_error); }},
      {"samples", 8, "kept and, in brackets, dropped: the machine was disturbed",
       [](const Row& r) { return fmt::format("{} (-{})", r.result.samples, r.result.dropped); }},
  };
  return table;
}

using Lines = std::vector<std::vector<std::string>>;  // [row][column]; first the names

Lines lines_of(const std::vector<Row>& rows) {
  Lines lines(1);
  for (const Column& column : columns()) lines[0].emplace_back(column.name);
  for (const Row& row : rows) {
    lines.emplace_back();
    for (const Column& column : columns()) lines.back().push_back(column.text(row));
  }
  return lines;
}

std::vector<std::size_t> widths_of(const Lines& lines) {
  std::vector<std::size_t> widths(columns().size());
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  return widths;
}

/// Columns that are shown: by rank as many as fit, and whatever the width those of rank 0.
std::vector<std::size_t> fitting(const std::vector<std::size_t>& widths, std::size_t width) {
  std::vector<std::size_t> order(widths.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [](std::size_t a, std::size_t b) {
    return columns()[a].rank < columns()[b].rank;
  });
  std::vector<std::size_t> shown;
  std::size_t used = 0;
  for (const std::size_t column : order) {
    used += widths[column] + 2;
    if (width > 0 && used > width + 2 && columns()[column].rank > 0) break;
    shown.push_back(column);
  }
  std::sort(shown.begin(), shown.end());
  return shown;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> column_meanings() {
  std::vector<std::pair<std::string, std::string>> meanings;
  for (const Column& column : columns()) meanings.emplace_back(column.name, column.meaning);
  return meanings;
}

void print_table(const std::vector<ReportRow>& rows, std::size_t width) {
  const Lines lines = lines_of(rows);
  const std::vector<std::size_t> widths = widths_of(lines);
  const std::vector<std::size_t> shown = fitting(widths, width);
  for (const auto& line : lines) {
    std::string text;
    for (const std::size_t i : shown) {
      text += fmt::format("{}{:>{}}", text.empty() ? "" : "  ", line[i], widths[i]);
    }
    std::cout << text << '\n';
  }
}

void print_markdown(const std::vector<ReportRow>& rows) {
  const Lines lines = lines_of(rows);
  const std::vector<std::size_t> widths = widths_of(lines);
  for (std::size_t n = 0; n < lines.size(); ++n) {
    std::string text = "|", rule = "|";
    for (std::size_t i = 0; i < widths.size(); ++i) {
      text += fmt::format(" {:>{}} |", lines[n][i], widths[i]);
      rule += fmt::format(" {:->{}}: |", "", widths[i] - 1);
    }
    std::cout << text << '\n' << (n == 0 ? rule + "\n" : "");
  }
}

void print_csv(const std::vector<ReportRow>& rows) {
  for (const auto& line : lines_of(rows)) std::cout << fmt::format("{}\n", fmt::join(line, ","));
}

void print_json(const std::vector<ReportRow>& rows) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const ReportRow& row : rows) {
    const BenchRow& r = row.result;
    const auto measured = [&](double value) {  // null without samples, which is no time of 0
      return r.samples > 0 ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
    };
    all.push_back({{"model", row.model},
                   {"scheme", row.scheme},
                   {"dtype", row.dtype},
                   {"experts", row.implementation},
                   {"num_tokens", r.num_tokens},
                   {"kernel_config", r.kernel_config},
                   {"distinct_experts", measured(r.distinct_experts)},
                   {"median_ms", measured(r.median_ms)},
                   {"min_ms", measured(r.min_ms)},
                   {"p99_ms", measured(r.p99_ms)},
                   {"gflops", measured(r.gflops)},
                   {"weight_bytes", measured(r.weight_bytes)},
                   {"weight_gbytes_per_s", measured(r.gbytes)},
                   {"machine_read_gbytes_per_s", measured(r.read_gbytes)},
                   {"dot_products", r.dot_products},
                   {"machine_gflops", measured(r.peak_gflops)},
                   {"floor_ms", measured(r.floor_ms)},
                   {"time_over_floor", measured(r.ratio)},
                   {"relative_error", r.relative_error},
                   {"samples", r.samples},
                   {"dropped_samples", r.dropped},
                   {"load", nlohmann::ordered_json::parse(load_json(r.load))},
                   {"note", r.note}});
  }
  const nlohmann::ordered_json context{
      {"version", FUSEDMOE_VERSION}, {"isa", cpu_isa()}, {"threads", num_threads()}};
  std::cout << nlohmann::ordered_json{{"context", context}, {"rows", all}}.dump(2) << '\n';
}

}  // namespace fusedmoe::cli
