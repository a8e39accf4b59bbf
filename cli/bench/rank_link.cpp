#include "bench/rank_link.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <utility>

#include "bench/bench_problem.h"
#include "fusedmoe/runtime.h"
#include "ranks.h"

namespace fusedmoe::cli {

ValuesByRank gather_values(Communicator& communicator, const std::vector<double>& mine) {
  ValuesByRank result;
  const std::string text = fmt::format("{:.17g}", fmt::join(mine, " "));
  for (const std::string& other : communicator.gather(text, "bench")) {
    std::istringstream numbers(other);
    std::vector<double>& values = result.emplace_back(mine.size());
    for (double& each : values) numbers >> each;
  }
  return result;
}
std::vector<double> values_of(const ValuesByRank& all, std::size_t index) {
  std::vector<double> result;
  for (const std::vector<double>& rank : all) result.push_back(rank[index]);
  return result;
}
double largest_of(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

RankLink measure_link(Communicator& communicator) {
  constexpr std::int64_t kBytes = std::int64_t{64} << 20;
  constexpr int kCopies = 7;
  const Device device = communicator.device();
  const int size = communicator.size(), next = (communicator.rank() + 1) % size;
  const Tensor from = Tensor::empty({kBytes}, DType::kU8, device);
  const Tensor to = Tensor::empty({kBytes}, DType::kU8, device);
  const OwnedStream stream(device);
  fill_bytes(from, 1, stream);
  fill_bytes(to, 2, stream);
  synchronize(stream);
  RankLink link{device.is_cpu() ? "memcpy" : launched() ? "long messages" : "peer copy", 0};
  // Addresses are good in this process alone.
  const auto address =
      fmt::format("{} {}", reinterpret_cast<std::uintptr_t>(from.data()), device.index);
  std::istringstream other(communicator.gather(address, "bench")[next]);
  std::uintptr_t data = 0;
  Device there = device;
  other >> data >> there.index;
  void* const memory = reinterpret_cast<void*>(data);  // NOLINT(performance-no-int-to-ptr)
  const TensorView source(memory, DType::kU8, {kBytes}, there);
  std::vector<double> seconds;
  for (int i = 0; i < kCopies; ++i) {
    communicator.barrier();
    const auto start = std::chrono::steady_clock::now();
    if (device.is_cpu()) {
      std::memcpy(to.data(), from.data(), kBytes);
    } else if (!launched()) {
      copy(source, to, stream);
    } else {
      const Message out{(communicator.rank() + size - 1) % size, from.data(), kBytes};
      const Message in{next, to.data(), kBytes};
      communicator.exchange({&out, 1}, {&in, 1}, stream, "bench");
    }
    synchronize(stream);
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  communicator.barrier();  // nobody reads the next rank's memory any more
  const ValuesByRank all = gather_values(communicator, {median(std::move(seconds))});
  link.bytes_per_second = static_cast<double>(kBytes) / largest_of(values_of(all, 0));
  return link;
}

}  // namespace fusedmoe::cli
