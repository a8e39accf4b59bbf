// What fusedmoe bench prints: a row for each timed cell.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "bench/layer_bench.h"

namespace fusedmoe::cli {

struct ReportRow {
  std::string model, scheme, dtype, implementation;
  BenchRow result;
};

/// Names of the columns and what they mean.
std::vector<std::pair<std::string, std::string>> column_meanings();

/// The columns that fit into `width`, the most telling ones; 0: all.
void print_table(const std::vector<ReportRow>& rows, std::size_t width);
void print_markdown(const std::vector<ReportRow>& rows);
void print_csv(const std::vector<ReportRow>& rows);
void print_json(const std::vector<ReportRow>& rows);

}  // namespace fusedmoe::cli
