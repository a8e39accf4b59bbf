// Timing of one layer on a CUDA device: of its experts, from given top-k ids to the combined
// output, or of router and experts, from hidden states.
//
// A graph of the forward is replayed between two events, each time after 256 MiB were written, so
// that the L2 is cold, and with another routing than the time before. What an empty graph costs
// (4.5 us on an H200) is contained.
#include <algorithm>
#include <deque>

#include "bench/bench_problem.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::cli {
namespace {

constexpr std::int64_t kFlushBytes = std::int64_t{256} << 20;
constexpr std::size_t kRoutings = 6;

class DeviceBench final : public LayerBench {
 public:
  DeviceBench(BenchOptions options, const PackProgress& progress)
      : problem_(std::move(options), progress),
        stream_(problem_.options().device),
        flushed_(Tensor::empty({kFlushBytes}, DType::kU8, problem_.options().device)) {}
  std::string implementation() const override { return problem_.target().implementation(); }
  BenchRow run(std::int64_t num_tokens) override;
  std::vector<BenchRow> run_kernel_configs(std::int64_t num_tokens) override;

 private:
  /// One number of tokens.
  struct Inputs {
    testing::Case spec;
    std::vector<BenchBuffers> routed;  // one for each routing; the rest is shared
    std::vector<double> distinct;      // experts hit by each
    LoadStatistics load;
    Tensor expected;  // rows of the first, by the reference
  };
  Inputs make_inputs(std::int64_t num_tokens);
  BenchRow measure(const Inputs& inputs, const std::string& kernel_config);
  double time_us(const Graph& graph);

  BenchProblem problem_;
  OwnedStream stream_;
  Tensor flushed_;
};

double DeviceBench::time_us(const Graph& graph) {
  const Device device = problem_.options().device;
  Event start(device), end(device);
  fill_bytes(flushed_, 0, stream_);
  start.record(stream_);
  graph.launch(stream_);
  end.record(stream_);
  return 1e3 * elapsed_ms(start, end);
}

DeviceBench::Inputs DeviceBench::make_inputs(std::int64_t num_tokens) {
  const BenchOptions& options = problem_.options();
  Inputs inputs;
  inputs.spec = problem_.spec(num_tokens);
  const testing::Case& spec = inputs.spec;
  BenchBuffers buffers = problem_.buffers(spec);
  std::vector<std::int32_t> all_ids;
  for (std::size_t i = 0; i < kRoutings; ++i) {
    problem_.route(buffers);
    if (options.layer) {
      problem_.target().run(buffers, stream_);  // writes the ids
      synchronize(stream_);
    }
    const Tensor ids = to_device(buffers.topk_ids, {});
    const auto* values = ids.as<const std::int32_t>();
    all_ids.insert(all_ids.end(), values, values + ids.numel());
    inputs.routed.push_back(buffers);
    // To ask for the ids takes time, too.
    if (options.layer) inputs.routed.back().topk_ids = inputs.routed.back().topk_weights = {};
    inputs.distinct.push_back(
        static_cast<double>(load_statistics(ids, spec.num_experts).distinct_experts));
  }
  const auto rows = static_cast<std::int64_t>(all_ids.size()) / spec.topk;
  inputs.load =
      load_statistics(TensorView(all_ids.data(), DType::kI32, {rows, spec.topk}), spec.num_experts);
  inputs.expected = problem_.expected_rows(spec, inputs.routed.front());
  return inputs;
}

BenchRow DeviceBench::run(std::int64_t num_tokens) {
  const std::vector<std::string> configs = problem_.target().kernel_configs(num_tokens);
  return measure(make_inputs(num_tokens), configs.empty() ? "" : configs.front());
}

std::vector<BenchRow> DeviceBench::run_kernel_configs(std::int64_t num_tokens) {
  const Inputs inputs = make_inputs(num_tokens);
  std::vector<BenchRow> rows;
  for (const std::string& config : problem_.target().kernel_configs(num_tokens)) {
    rows.push_back(measure(inputs, config));
  }
  return rows;
}

BenchRow DeviceBench::measure(const Inputs& inputs, const std::string& kernel_config) {
  const testing::Case& spec = inputs.spec;
  const BenchOptions& options = problem_.options();
  const BenchWork work(spec, problem_.weight_bytes());
  const std::optional<QuantKey>& activations = spec.scheme.activations;
  const double flops = activations && activations->value == DType::kE4M3 ? options.device_fp8_flops
                                                                         : options.device_flops;
  const int config = problem_.target().find_kernel_config(kernel_config);
  std::deque<Graph> graphs;
  for (const BenchBuffers& buffers : inputs.routed) {
    const auto forward = [&] { problem_.target().run(buffers, stream_, config); };
    forward();
    synchronize(stream_);
    graphs.emplace_back(stream_, forward);
  }

  BenchRow row;
  row.num_tokens = spec.num_tokens;
  row.load = inputs.load;
  row.kernel_config = kernel_config;
  std::vector<double> times, ratios, floors;
  const std::int64_t samples = std::max<std::int64_t>(options.min_samples, 5 * kRoutings);
  for (std::int64_t i = 0; i < samples; ++i) {
    const std::size_t now = static_cast<std::size_t>(i) % kRoutings;
    const double bytes = inputs.distinct[now] * work.expert_bytes;
    floors.push_back(1e6 * std::max(bytes / options.device_bandwidth, work.flops / flops));
    times.push_back(time_us(graphs[now]));
    ratios.push_back(times.back() / floors.back());
    row.distinct_experts += inputs.distinct[now] / static_cast<double>(samples);
  }
  row.samples = samples;
  row.median_ms = 1e-3 * median(times);
  row.floor_ms = 1e-3 * median(floors);
  row.ratio = median(ratios);
  row.gflops = work.flops / row.median_ms * 1e-6;
  row.dot_products = name(DType::kBF16);
  row.weight_bytes = row.distinct_experts * work.expert_bytes;
  row.gbytes = row.weight_bytes / row.median_ms * 1e-6;
  row.read_gbytes = options.device_bandwidth * 1e-9;
  row.peak_gflops = flops * 1e-9;
  std::sort(times.begin(), times.end());
  row.min_ms = 1e-3 * times.front();
  row.p99_ms = 1e-3 * times[(times.size() - 1) * 99 / 100];
  // What another configuration left there must not pass for a result.
  fill_bytes(inputs.routed.front().output, 0xff, stream_);
  graphs.front().launch(stream_);
  synchronize(stream_);
  row.relative_error = problem_.relative_error(spec, inputs.routed.front(), inputs.expected);
  return row;
}

}  // namespace

std::unique_ptr<LayerBench> make_device_bench(BenchOptions options, const PackProgress& progress) {
  return std::make_unique<DeviceBench>(std::move(options), progress);
}

}  // namespace fusedmoe::cli
