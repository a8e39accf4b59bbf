// One benchmark cell: a model's experts, or also its router, at a number of tokens, timed against
// what the machine gave in the same moments.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/experts.h"
#include "load.h"
#include "testing/cases.h"

namespace fusedmoe::cli {

struct BenchOptions {
  ModelConfig model;
  QuantScheme scheme;
  DType dtype = DType::kBF16;
  Device device;
  std::string experts;  ///< as `require` of select(); empty = best
  bool tuned = true;    ///< with the kernel configurations tuned on this machine
  /// A MoeLayer from its hidden states: router and routed experts. Else the experts, from given
  /// top-k ids.
  bool layer = false;
  testing::RoutingSkew skew = testing::RoutingSkew::kBalanced;
  RecordedRouting replay;  ///< ids and weights to take in turn instead of drawing; optional
  std::int64_t min_samples = 11;
  double max_seconds = 10;      ///< of sampling, for each number of tokens
  std::int64_t check_rows = 4;  ///< spread over the batch
  /// On CUDA the floor is that of these limits, measured on one H200 by bench/README.md; the CPU
  /// measures its own around each sample.
  double device_bandwidth = 4.5e12;  ///< bytes/s
  double device_flops = 780e12;      ///< bf16 FLOP/s
  double device_fp8_flops = 1460e12;

  /// Of the layer that is timed.
  MoeConfig config() const;
};

/// Medians are over the samples that were kept.
struct BenchRow {
  std::int64_t num_tokens = 0;
  std::int64_t samples = 0, dropped = 0;
  double median_ms = 0, min_ms = 0, p99_ms = 0;
  double gflops = 0;              ///< 2 M topk 3 N K (2 for non-gated) / median
  double weight_bytes = 0;        ///< stored, of the distinct experts that the median sample hit
  double gbytes = 0;              ///< weight_bytes / median
  double distinct_experts = 0;    ///< mean over samples
  double read_gbytes = 0;         ///< the machine's read bandwidth around the median sample
  std::string_view dot_products;  ///< their operands: "f32", "bf16" or "i8"
  double peak_gflops = 0;         ///< the machine's rate of these, likewise
  double floor_ms = 0;        ///< max(weight_bytes / bandwidth, FLOP / rate) of the median sample
  double ratio = 0;           ///< median over samples of time / floor
  double relative_error = 0;  ///< max-norm, of check_rows tokens against `reference`
  std::string kernel_config;  ///< that ran; empty where the experts have only one
  LoadStatistics load;        ///< of the tokens of all samples together
  std::string note;           ///< why there is nothing to see, otherwise empty

  /// Of the machine's bandwidth and dot-product rate around the median sample; NaN without one.
  double percent_of_bandwidth() const { return 100 * gbytes / read_gbytes; }
  double percent_of_flops() const { return 100 * gflops / peak_gflops; }
};

/// Times one layer, or its experts.
class LayerBench {
 public:
  virtual ~LayerBench() = default;
  /// "cpu+no_ep"
  virtual std::string implementation() const = 0;
  virtual BenchRow run(std::int64_t num_tokens) = 0;
  /// A row for each kernel configuration, all with the same inputs; first the one that the experts
  /// choose. None where they have only one.
  virtual std::vector<BenchRow> run_kernel_configs(std::int64_t) { return {}; }
};

/// For the device of the options: cpu_bench.cpp for the CPU, device_bench.cpp for CUDA.
std::unique_ptr<LayerBench> make_cpu_bench(BenchOptions options, const PackProgress& progress);
std::unique_ptr<LayerBench> make_device_bench(BenchOptions options, const PackProgress& progress);

}  // namespace fusedmoe::cli
