// Timing of one layer on the CPU: of its experts, from given top-k ids to the combined output, or
// of router and experts, from hidden states.
//
// The host may move the cores of a virtual machine between placements with quite different memory
// bandwidth, and neighbours come and go. So each sample stands between two probes of bandwidth and
// dot-product rate; a sample whose probes differ is dropped, and time is judged against the floor
// that its own probes give.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "bench/bench_problem.h"
#include "support.h"
#include "tools/machine.h"

namespace fusedmoe::cli {
namespace {

constexpr std::int64_t kProbeBytes = std::int64_t{384} << 20;
constexpr std::int64_t kProbeSlice = std::int64_t{96} << 20;

/// Bandwidth and dot-product rate of this moment.
struct Probe {
  double bandwidth = 0, flops = 0;
  bool agrees(const Probe& other) const {
    const auto close = [](double a, double b, double tolerance) {
      return std::abs(a - b) <= tolerance * std::max(a, b);
    };
    return close(bandwidth, other.bandwidth, 0.08) && close(flops, other.flops, 0.05);
  }
};

struct Sample {
  double ms = 0, floor_ms = 0, bytes = 0, distinct = 0;
  Probe probe;
};

class CpuBench final : public LayerBench {
 public:
  CpuBench(BenchOptions options, const PackProgress& progress)
      : problem_(std::move(options), progress) {}
  std::string implementation() const override { return problem_.target().implementation(); }
  BenchRow run(std::int64_t num_tokens) override;

 private:
  /// The type of the operands that the scheme asks for, whether or not this machine has a kernel
  /// for it: int8 or int16 activations stay what they are, other quantized ones are exact in bf16.
  DType probe_dtype() const {
    const BenchOptions& options = problem_.options();
    if (!options.scheme.activations) return options.dtype;
    const DType value = options.scheme.activations->value;
    return value == DType::kI8 || value == DType::kI16 ? value : DType::kBF16;
  }

  Probe probe() {
    probe_offset_ = (probe_offset_ + kProbeSlice) % kProbeBytes;
    Probe result;
    result.bandwidth =
        measure_read_bandwidth(probe_memory_.slice(0, probe_offset_, probe_offset_ + kProbeSlice));
    result.flops = measure_flop_rate(probe_dtype());
    return result;
  }

  BenchProblem problem_;
  Tensor probe_memory_ = Tensor::zeros({kProbeBytes}, DType::kU8);
  std::int64_t probe_offset_ = 0;
};

void summarize(std::vector<Sample> samples, const BenchWork& work, BenchRow& row) {
  row.samples = static_cast<std::int64_t>(samples.size());
  if (samples.empty()) {
    row.note =
        "no sample between two equal probes: the machine is not at rest, or --max-seconds is too "
        "short";
    return;
  }
  std::vector<double> ratios;
  for (const Sample& sample : samples) {
    ratios.push_back(sample.ms / sample.floor_ms);
    row.distinct_experts += sample.distinct / static_cast<double>(samples.size());
  }
  row.ratio = median(ratios);
  std::sort(samples.begin(), samples.end(),
            [](const Sample& a, const Sample& b) { return a.ms < b.ms; });
  const Sample& middle = samples[samples.size() / 2];
  row.median_ms = middle.ms;
  row.min_ms = samples.front().ms;
  row.p99_ms = samples[(samples.size() - 1) * 99 / 100].ms;
  row.gflops = work.flops / middle.ms * 1e-6;
  row.weight_bytes = middle.bytes;
  row.gbytes = middle.bytes / middle.ms * 1e-6;
  row.read_gbytes = middle.probe.bandwidth * 1e-9;
  row.peak_gflops = middle.probe.flops * 1e-9;
  row.floor_ms = middle.floor_ms;
}

BenchRow CpuBench::run(std::int64_t num_tokens) {
  const testing::Case spec = problem_.spec(num_tokens);
  const BenchOptions& options = problem_.options();
  BenchBuffers buffers = problem_.buffers(spec);
  const BenchWork work(spec, problem_.weight_bytes());
  const auto forward = [&] { problem_.target().run(buffers, {}); };

  BenchRow row;
  row.num_tokens = num_tokens;
  row.dot_products = name(dot_product_dtype(probe_dtype()));
  std::vector<Sample> samples;
  std::vector<std::int32_t> all_ids;
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  problem_.route(buffers);
  forward();  // warm-up: pages and threads
  probe();
  const std::int64_t target =
      std::max<std::int64_t>(options.min_samples, num_tokens <= 8 ? 101 : 0);
  while (static_cast<std::int64_t>(samples.size()) < target &&
         (elapsed() < options.max_seconds || samples.size() < 3)) {
    if (elapsed() > 4 * options.max_seconds) break;  // nothing stable: said in the row
    Sample sample;
    problem_.route(buffers);
    const Probe before = probe();
    sample.ms = time_ms(forward);
    const Probe after = probe();
    const auto* ids = buffers.topk_ids.as<const std::int32_t>();
    all_ids.insert(all_ids.end(), ids, ids + buffers.topk_ids.numel());
    if (!before.agrees(after)) {
      ++row.dropped;
      continue;
    }
    sample.distinct =
        static_cast<double>(load_statistics(buffers.topk_ids, spec.num_experts).distinct_experts);
    sample.probe = {std::max(before.bandwidth, after.bandwidth),
                    std::max(before.flops, after.flops)};
    sample.bytes = sample.distinct * work.expert_bytes;
    sample.floor_ms =
        1e3 * std::max(sample.bytes / sample.probe.bandwidth, work.flops / sample.probe.flops);
    samples.push_back(sample);
  }
  const auto rows = static_cast<std::int64_t>(all_ids.size()) / spec.topk;
  row.load =
      load_statistics(TensorView(all_ids.data(), DType::kI32, {rows, spec.topk}), spec.num_experts);
  row.relative_error =
      problem_.relative_error(spec, buffers, problem_.expected_rows(spec, buffers));
  summarize(std::move(samples), work, row);
  return row;
}

}  // namespace

std::unique_ptr<LayerBench> make_cpu_bench(BenchOptions options, const PackProgress& progress) {
  return std::make_unique<CpuBench>(std::move(options), progress);
}

}  // namespace fusedmoe::cli
