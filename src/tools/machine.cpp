#include "tools/machine.h"

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

/// Reads 64-byte lines; 8 independent sums leave the order of loads to the machine.
std::uint64_t read_lines(const std::uint64_t* memory, std::int64_t lines) {
  std::uint64_t sums[8] = {};
  for (std::int64_t i = 0; i < lines; ++i) {
    for (int j = 0; j < 8; ++j) sums[j] ^= memory[8 * i + j];
  }
  std::uint64_t sum = 0;
  for (std::uint64_t part : sums) sum ^= part;
  return sum;
}

}  // namespace

double measure_read_bandwidth(const TensorView& memory) {
  FUSEDMOE_CHECK(memory.defined() && memory.device().is_cpu() && memory.contiguous(), "memory",
                 core::describe(memory), "a contiguous tensor on the host");
  const std::int64_t lines = memory.nbytes() / 64;
  std::atomic<std::uint64_t> sum{0};
  const double start = seconds();
  core::parallel_ranges(default_executor(), lines, true, [&](std::int64_t begin, std::int64_t end) {
    sum ^= read_lines(memory.as<const std::uint64_t>() + 8 * begin, end - begin);
  });
  const double elapsed = seconds() - start;
  [[maybe_unused]] volatile std::uint64_t kept = sum;  // the reads must not be optimised away
  return static_cast<double>(lines * 64) / elapsed;
}

double measure_flop_rate(DType dtype) {
  const cpu::Kernels& isa = cpu::kernels();
  const auto rate = [&](cpu::Compute compute) { return isa.flops[static_cast<int>(compute)]; };
  auto work = rate(cpu::Compute::kF32);
  if (dtype == DType::kBF16 && rate(cpu::Compute::kBF16)) work = rate(cpu::Compute::kBF16);
  if (dtype == DType::kI8 && rate(cpu::Compute::kInt8)) work = rate(cpu::Compute::kInt8);
  constexpr std::int64_t kRounds = 150000;
  std::atomic<double> flops{0};
  const double start = seconds();
  core::run_tasks(default_executor(), num_threads(), [&](int) { flops += work(kRounds); });
  return flops / (seconds() - start);
}

}  // namespace fusedmoe
