// Timing of the experts of one layer, from given top-k ids to the combined output.
//
// The host may move the cores of a virtual machine between placements with quite different memory
// bandwidth, and neighbours come and go. So each sample stands between two probes of bandwidth and
// dot-product rate; a sample whose probes differ is dropped, and time is judged against the floor
// that its own probes give.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>

#include "bench.h"
#include "fusedmoe/formats.h"
#include "fusedmoe/machine.h"
#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/selection.h"
#include "support.h"
#include "testing/compare.h"

namespace fusedmoe::cli {
namespace {

constexpr std::int64_t kProbeBytes = std::int64_t{256} << 20;
constexpr std::int64_t kProbeSlice = std::int64_t{64} << 20;
constexpr std::int64_t kDistinctExperts = 3;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

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

/// Buffers of one number of tokens.
struct Buffers {
  Tensor hidden_states, output, topk_ids, topk_weights, workspace;

  Buffers(const ModularKernel& kernel, const PackedWeights& packed, const testing::Case& spec,
          DType dtype)
      : hidden_states(Tensor::empty({spec.num_tokens, spec.hidden}, dtype)),
        output(Tensor::empty({spec.num_tokens, spec.hidden}, dtype)),
        topk_ids(Tensor::empty({spec.num_tokens, spec.topk}, DType::kI32)),
        topk_weights(Tensor::empty({spec.num_tokens, spec.topk}, DType::kF32)) {
    const std::size_t bytes =
        kernel.workspace_bytes(ProblemSize::of(packed.info(), spec.num_tokens, spec.topk, dtype));
    workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
    testing::Random random(2);
    for (std::int64_t i = 0; i < hidden_states.numel(); ++i) {
      store_f32(hidden_states.data(), dtype, i, static_cast<float>(random.normal()));
    }
    for (std::int64_t i = 0; i < topk_weights.numel(); ++i) {
      topk_weights.as<float>()[i] =
          static_cast<float>((0.5 + random.uniform()) / static_cast<double>(spec.topk));
    }
  }

  void run(const ModularKernel& kernel, const PackedWeights& packed,
           std::int64_t num_experts) const {
    KernelArgs args;
    args.weights = &packed;
    args.output = output;
    args.hidden_states = hidden_states;
    args.topk_ids = topk_ids;
    args.topk_weights = topk_weights;
    args.num_experts = num_experts;
    kernel.apply(args, {workspace.data(), static_cast<std::size_t>(workspace.nbytes())});
  }
};

void copy_head(const TensorView& source, const TensorView& target) {
  std::copy_n(source.as<const std::byte>(), target.nbytes(), target.as<std::byte>());
}

/// The first `rows` tokens of `all` through another kernel.
Buffers run_head(const ModularKernel& kernel, const PackedWeights& packed, testing::Case spec,
                 const Buffers& all, std::int64_t rows) {
  spec.num_tokens = std::min(rows, spec.num_tokens);
  Buffers head(kernel, packed, spec, all.output.dtype());
  copy_head(all.hidden_states, head.hidden_states);
  copy_head(all.topk_ids, head.topk_ids);
  copy_head(all.topk_weights, head.topk_weights);
  head.run(kernel, packed, spec.num_experts);
  return head;
}

}  // namespace

struct LayerBench::Impl {
  BenchOptions options;
  ExpertWeights weights;
  std::unique_ptr<ModularKernel> kernel;
  std::shared_ptr<const PackedWeights> packed;
  Tensor probe_memory = Tensor::zeros({kProbeBytes}, DType::kU8);
  std::int64_t probe_offset = 0;
  std::vector<std::int32_t> expert_order;  // walked by single tokens, so that weights are cold
  std::size_t next_expert = 0;
  std::int64_t next_row = 0;  // of the recorded routing
  testing::Random random{1};

  explicit Impl(BenchOptions chosen) : options(std::move(chosen)) {}

  double relative_error(const testing::Case& spec, const Buffers& timed) const;

  /// Of the dot products that the kernels use: int8 codes are multiplied as such, all others as
  /// bf16 or f32.
  DType probe_dtype() const {
    if (!options.scheme.activations) return options.dtype;
    return options.scheme.activations->value == DType::kI8 ? DType::kI8 : DType::kBF16;
  }

  Probe probe() {
    probe_offset = (probe_offset + kProbeSlice) % kProbeBytes;
    Probe result;
    result.bandwidth =
        measure_read_bandwidth(probe_memory.slice(0, probe_offset, probe_offset + kProbeSlice));
    result.flops = measure_flop_rate(probe_dtype());
    return result;
  }

  testing::Case spec(std::int64_t num_tokens) const {
    testing::Case result;
    result.name = "bench";
    result.num_tokens = num_tokens;
    result.num_experts = options.model.router.num_experts;
    result.topk = options.model.router.topk;
    result.hidden = options.model.hidden;
    result.intermediate = options.model.intermediate;
    result.scheme = options.scheme;
    result.activation = options.model.activation;
    result.activation_params = options.model.activation_params;
    result.bias = options.model.has_bias;
    return result;
  }

  void make_weights(const PackProgress& progress) {
    testing::Case few = spec(1);
    few.num_experts = kDistinctExperts;
    few.topk = 1;
    weights = testing::make_problem(few).weights;
    for (std::int64_t e = kDistinctExperts; e < options.model.router.num_experts; ++e) {
      weights.experts.push_back(weights.experts[static_cast<std::size_t>(e % kDistinctExperts)]);
    }
    MoeConfig config = moe_config(options.model, options.dtype);
    config.scheme = options.scheme;
    const Selection selection = select(config, options.experts);
    kernel = std::make_unique<ModularKernel>(selection.prepare_finalize, selection.experts);
    packed = selection.experts->pack(weights, progress);
    expert_order.resize(static_cast<std::size_t>(options.model.router.num_experts));
    std::iota(expert_order.begin(), expert_order.end(), 0);
    for (std::size_t i = expert_order.size(); i > 1; --i) {
      std::swap(expert_order[i - 1],
                expert_order[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
    }
  }

  std::int32_t draw_expert(std::int64_t num_tokens) {
    const auto num_experts = static_cast<std::int64_t>(expert_order.size());
    if (options.skew == testing::RoutingSkew::kZipf) {
      // Weight 1 / (e + 1), by inversion of the continuous law.
      const double e = std::pow(static_cast<double>(num_experts + 1), random.uniform()) - 1;
      return std::min(static_cast<std::int32_t>(e), static_cast<std::int32_t>(num_experts - 1));
    }
    if (num_tokens == 1) return expert_order[next_expert++ % expert_order.size()];
    return static_cast<std::int32_t>(random.below(num_experts));
  }

  /// The next recorded rows, from the first again after the last.
  void replay(const TensorView& topk_ids, const TensorView& topk_weights) {
    const std::int64_t rows = options.replay.topk_ids.size(0), topk = topk_ids.size(1);
    for (std::int64_t token = 0; token < topk_ids.size(0); ++token) {
      const std::int64_t row = next_row++ % rows;
      std::copy_n(options.replay.topk_ids.as<const std::int32_t>() + row * topk, topk,
                  topk_ids.as<std::int32_t>() + token * topk);
      std::copy_n(options.replay.topk_weights.as<const float>() + row * topk, topk,
                  topk_weights.as<float>() + token * topk);
    }
  }

  /// Distinct experts for each token.
  void draw(const TensorView& topk_ids) {
    const std::int64_t num_tokens = topk_ids.size(0), topk = topk_ids.size(1);
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      std::int32_t* ids = topk_ids.as<std::int32_t>() + token * topk;
      for (std::int64_t j = 0; j < topk;) {
        ids[j] = draw_expert(num_tokens);
        if (std::find(ids, ids + j, ids[j]) == ids + j) ++j;
      }
    }
  }

  void route(const TensorView& topk_ids, const TensorView& topk_weights) {
    if (options.replay.topk_ids) {
      replay(topk_ids, topk_weights);
    } else {
      draw(topk_ids);
    }
  }
};

LayerBench::LayerBench(BenchOptions options, const PackProgress& progress)
    : impl_(std::make_unique<Impl>(std::move(options))) {
  impl_->make_weights(progress);
}
LayerBench::~LayerBench() = default;

std::string LayerBench::implementation() const {
  return fmt::format("{}+{}", impl_->kernel->experts().name(),
                     impl_->kernel->prepare_finalize().name());
}

/// Error of the first rows against `reference` with the same inputs; infinite where only one of
/// them has a NaN or an infinity. Rows that depend on their batch are computed again in a smaller
/// one.
double LayerBench::Impl::relative_error(const testing::Case& spec, const Buffers& timed) const {
  const std::int64_t rows = options.check_rows;
  const Selection selection = select(testing::make_config(spec, timed.output.dtype()), "reference");
  const ModularKernel reference(selection.prepare_finalize, selection.experts);
  const auto reference_weights = selection.experts->pack(weights);
  const Buffers expected = run_head(reference, *reference_weights, spec, timed, rows);
  Tensor actual(timed.output.slice(0, 0, expected.output.size(0)), nullptr);
  if (batch_dependent(spec.scheme)) {
    actual = run_head(*kernel, *packed, spec, timed, rows).output;
  }
  const testing::Difference difference = testing::compare(actual, expected.output);
  return difference.nonfinite_mismatch ? std::numeric_limits<double>::infinity()
                                       : difference.max_norm_relative;
}

namespace {

/// What a number of tokens costs at least.
struct Work {
  double flops, expert_bytes;

  Work(const testing::Case& spec, std::int64_t weight_bytes) {
    const double matrices = is_gated(spec.activation) ? 3 : 2;
    flops = 2.0 * static_cast<double>(spec.num_tokens * spec.topk) * matrices *
            static_cast<double>(spec.hidden) * static_cast<double>(spec.intermediate);
    expert_bytes = static_cast<double>(weight_bytes) / static_cast<double>(spec.num_experts);
  }
};

void summarize(std::vector<Sample> samples, const Work& work, BenchRow& row) {
  row.samples = static_cast<std::int64_t>(samples.size());
  if (samples.empty()) {
    row.note = "no sample between two equal probes: the machine is not at rest";
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
  row.gbytes = middle.bytes / middle.ms * 1e-6;
  row.read_gbytes = middle.probe.bandwidth * 1e-9;
  row.peak_gflops = middle.probe.flops * 1e-9;
  row.floor_ms = middle.floor_ms;
}

}  // namespace

BenchRow LayerBench::run(std::int64_t num_tokens) {
  Impl& bench = *impl_;
  const testing::Case spec = bench.spec(num_tokens);
  const Buffers buffers(*bench.kernel, *bench.packed, spec, bench.options.dtype);
  const Work work(spec, bench.weights.nbytes());

  BenchRow row;
  row.num_tokens = num_tokens;
  std::vector<Sample> samples;
  std::vector<std::int32_t> all_ids;
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  bench.route(buffers.topk_ids, buffers.topk_weights);
  buffers.run(*bench.kernel, *bench.packed, spec.num_experts);  // warm-up: pages and threads
  const std::int64_t target =
      std::max<std::int64_t>(bench.options.min_samples, num_tokens <= 8 ? 101 : 0);
  while (static_cast<std::int64_t>(samples.size()) < target &&
         (elapsed() < bench.options.max_seconds || samples.size() < 3)) {
    if (elapsed() > 4 * bench.options.max_seconds) break;  // nothing stable: said in the row
    Sample sample;
    bench.route(buffers.topk_ids, buffers.topk_weights);
    const Probe before = bench.probe();
    sample.ms = time_ms([&] { buffers.run(*bench.kernel, *bench.packed, spec.num_experts); });
    const Probe after = bench.probe();
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
  row.relative_error = bench.relative_error(spec, buffers);
  summarize(std::move(samples), work, row);
  return row;
}

}  // namespace fusedmoe::cli
