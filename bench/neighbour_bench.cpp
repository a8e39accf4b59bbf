// What a busy neighbour costs: forwards of one layer, first with the machine to themselves, then
// while another process spins on one core, pinned there. Prints the median, the mean and the 99th
// percentile of both, and how many times the quiet ones the others are.
//
//   neighbour_bench [SCHEME] [SECONDS] [THREADS] [PAUSE_US]
//
// SECONDS for each number of tokens and each half; a program that does something else for PAUSE_US
// between two forwards finds the library's threads asleep or awake.
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "testing/cases.h"

namespace {

using namespace fusedmoe;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Times {
  double median = 0, mean = 0, p99 = 0;
};

Times summarize(std::vector<double> ms) {
  std::sort(ms.begin(), ms.end());
  const auto count = static_cast<double>(ms.size());
  return {ms[ms.size() / 2], std::accumulate(ms.begin(), ms.end(), 0.0) / count,
          ms[(ms.size() - 1) * 99 / 100]};
}

/// A process that spins on the last core that this one may use, until the object ends.
class Neighbour {
 public:
  Neighbour() : process_(fork()) {
    if (process_ < 0) throw std::system_error(errno, std::generic_category(), "fork");
    if (process_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    cpu_set_t cores, one;
    sched_getaffinity(0, sizeof(cores), &cores);
    CPU_ZERO(&one);
    for (int core = CPU_SETSIZE - 1; core >= 0 && CPU_COUNT(&one) == 0; --core) {
      if (CPU_ISSET(core, &cores)) CPU_SET(core, &one);
    }
    sched_setaffinity(0, sizeof(one), &one);
    volatile bool spinning = true;
    while (spinning) {
    }
    _exit(0);
  }
  ~Neighbour() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  Neighbour(const Neighbour&) = delete;
  Neighbour& operator=(const Neighbour&) = delete;

 private:
  pid_t process_;
};

/// A layer of gpt-oss's kind. Its weights are larger than the caches; tokens draw new experts for
/// each forward.
class Layer {
 public:
  explicit Layer(const QuantScheme& scheme) {
    spec_.num_experts = 2;
    spec_.topk = 1;
    spec_.hidden = spec_.intermediate = 1440;
    spec_.scheme = scheme;
    ExpertWeights weights = testing::make_problem(spec_).weights;
    spec_.num_experts = 24;
    spec_.topk = 4;
    while (static_cast<std::int64_t>(weights.experts.size()) < spec_.num_experts) {
      weights.experts.push_back(weights.experts[weights.experts.size() % 2]);
    }
    kernel_ = std::make_unique<ModularKernel>(
        select(testing::make_config(spec_, DType::kBF16)).create(Context{}));
    packed_ = kernel_->experts().pack(weights);
  }

  std::vector<double> times(std::int64_t num_tokens, double seconds, double pause_us) {
    const Tensor x = Tensor::zeros({num_tokens, spec_.hidden}, DType::kBF16);
    const Tensor output = Tensor::empty(x.shape(), x.dtype());
    const Tensor ids = Tensor::empty({num_tokens, spec_.topk}, DType::kI32);
    const Tensor weights = Tensor::zeros(ids.shape(), DType::kF32);
    const auto bytes = static_cast<std::int64_t>(kernel_->workspace_bytes(num_tokens));
    const Tensor workspace = Tensor::empty({bytes}, DType::kU8);
    ForwardArgs args;
    args.weights = packed_.get();
    args.output = output;
    args.hidden_states = x;
    args.topk_ids = ids;
    args.topk_weights = weights;
    std::vector<double> result;
    const Clock::time_point start = Clock::now();
    while (seconds_since(start) < seconds || result.size() < 5) {
      draw(ids);
      const Clock::time_point pause = Clock::now();
      while (seconds_since(pause) < 1e-6 * pause_us) {
      }
      const Clock::time_point begin = Clock::now();
      kernel_->apply(args, {workspace.data(), static_cast<std::size_t>(bytes)});
      result.push_back(1e3 * seconds_since(begin));
    }
    result.erase(result.begin(), result.begin() + 2);  // pages and threads
    return result;
  }

 private:
  void draw(const TensorView& ids) {
    for (std::int64_t slot = 0; slot < ids.numel(); ++slot) {
      // Four neighbours, so a token's experts are distinct.
      if (slot % spec_.topk == 0) first_ = random_.below(spec_.num_experts);
      ids.as<std::int32_t>()[slot] =
          static_cast<std::int32_t>((first_ + slot % spec_.topk) % spec_.num_experts);
    }
  }

  testing::Case spec_;
  std::unique_ptr<ModularKernel> kernel_;
  std::shared_ptr<const PackedWeights> packed_;
  testing::Random random_{1};
  std::int64_t first_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const char* scheme = argc > 1 ? argv[1] : "mxfp4_w4a16";
  const double seconds = argc > 2 ? std::atof(argv[2]) : 2;
  if (argc > 3) set_num_threads(std::atoi(argv[3]));
  const double pause_us = argc > 4 ? std::atof(argv[4]) : 0;
  Layer layer(parse_scheme(scheme));
  fmt::print("{}, {}, {} threads, {} us between forwards; ms: median / mean / p99\n", scheme,
             cpu_isa(), num_threads(), pause_us);
  fmt::print("{:>6}  {:>26}  {:>26}  {}\n", "tokens", "quiet", "with a neighbour", "times as long");
  for (const std::int64_t tokens : {1, 8, 32, 128, 512}) {
    const Times quiet = summarize(layer.times(tokens, seconds, pause_us));
    Times busy;
    {
      const Neighbour neighbour;
      busy = summarize(layer.times(tokens, seconds, pause_us));
    }
    fmt::print(
        "{:>6}  {:>8.3f} {:>8.3f} {:>8.3f}  {:>8.3f} {:>8.3f} {:>8.3f}  {:.2f} {:.2f} {:.2f}\n",
        tokens, quiet.median, quiet.mean, quiet.p99, busy.median, busy.mean, busy.p99,
        busy.median / quiet.median, busy.mean / quiet.mean, busy.p99 / quiet.p99);
  }
}
