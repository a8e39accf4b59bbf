#include "tools/machine.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/kernels.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {
namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Cache lines. On this type GCC and clang use the widest loads that the build's flags allow; the
/// width made no difference on Zen 4 and Zen 5, the number of streams did.
using Line [[gnu::vector_size(64), gnu::aligned(8), gnu::may_alias]] = std::uint64_t;

/// Reads `count` lines as `kStreams` parts side by side. The sums are independent, so the machine
/// may have many loads on their way.
template <int kStreams>
std::uint64_t read_lines(const Line* lines, std::int64_t count) {
  const std::int64_t part = count / kStreams;
  Line sums[kStreams] = {};
  for (std::int64_t i = 0; i < part; ++i) {
    for (int s = 0; s < kStreams; ++s) sums[s] ^= lines[s * part + i];
  }
  std::uint64_t sum = 0;
  for (const Line& line : sums) {
    for (int i = 0; i < 8; ++i) sum ^= line[i];
  }
  return sum;
}

using ReadLines = std::uint64_t (*)(const Line*, std::int64_t);

/// Bytes per second of all threads together. Each takes the next piece of the memory when it has
/// read its last one, as the kernels take work tiles.
double read_rate(ReadLines read, const Line* lines, std::int64_t count) {
  constexpr std::int64_t kPiece = (std::int64_t{1} << 20) / sizeof(Line);
  std::atomic<std::int64_t> next{0};
  std::atomic<std::uint64_t> sum{0};
  const double start = seconds();
  core::run_tasks(default_executor(), num_threads(), [&](int) {
    for (std::int64_t begin = next.fetch_add(kPiece); begin < count;
         begin = next.fetch_add(kPiece)) {
      sum ^= read(lines + begin, std::min(kPiece, count - begin));
    }
  });
  const double elapsed = seconds() - start;
  [[maybe_unused]] volatile std::uint64_t kept = sum;  // the reads must not be optimised away
  return static_cast<double>(count) * sizeof(Line) / elapsed;
}

}  // namespace

double measure_read_bandwidth(const TensorView& memory) {
  FUSEDMOE_CHECK(memory.defined() && memory.device().is_cpu() && memory.contiguous(), "memory",
                 core::describe(memory), "a contiguous tensor on the host");
  constexpr ReadLines kReads[] = {read_lines<1>, read_lines<2>, read_lines<4>};
  const std::int64_t part = memory.nbytes() / static_cast<std::int64_t>(sizeof(Line)) / 3;
  const auto* lines = memory.as<const Line>();
  core::run_tasks(default_executor(), num_threads(), [](int) {});  // wakes the threads
  double best = 0;
  for (const ReadLines read : kReads) {
    best = std::max(best, read_rate(read, lines, part));
    lines += part;
  }
  return best;
}

namespace {

using DotProducts = double (*)(std::int64_t rounds);

DotProducts dot_products(cpu::Compute compute) {
  return cpu::kernels().flops[static_cast<int>(compute)];
}

cpu::Compute compute_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return cpu::Compute::kBF16;
    case DType::kI8:
      return cpu::Compute::kInt8;
    case DType::kI16:
      return cpu::Compute::kInt16;
    default:
      return cpu::Compute::kF32;
  }
}

}  // namespace

DType dot_product_dtype(DType dtype) {
  return dot_products(compute_of(dtype)) ? dtype : DType::kF32;
}

double measure_flop_rate(DType dtype) {
  const DotProducts work = dot_products(compute_of(dot_product_dtype(dtype)));
  constexpr std::int64_t kRounds = 75000;
  double best = 0;
  for (int i = 0; i < 2; ++i) {
    std::atomic<double> flops{0};
    const double start = seconds();
    core::run_tasks(default_executor(), num_threads(), [&](int) { flops += work(kRounds); });
    best = std::max(best, flops / (seconds() - start));
  }
  return best;
}

}  // namespace fusedmoe
