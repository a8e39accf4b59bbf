// A window of the router's histograms: a ring of them for each layer, and their sums.
#include <cstring>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/device_runtime.h"
#include "fusedmoe/balance.h"
#include "fusedmoe/comm.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe {

struct LoadWindow::Impl {
  std::int64_t num_layers, num_experts, num_forwards;
  std::vector<std::int32_t> ring;      // (num_layers, num_forwards, num_experts)
  std::vector<std::int64_t> sums;      // (num_layers, num_experts)
  std::vector<std::int64_t> forwards;  // (num_layers): how many were added

  Impl(std::int64_t layers, std::int64_t experts, std::int64_t each)
      : num_layers(layers), num_experts(experts), num_forwards(each) {
    constexpr std::int64_t kMost = std::int64_t{1} << 31;
    const std::pair<const char*, std::int64_t> sizes[] = {
        {"num_layers", layers}, {"num_experts", experts}, {"num_forwards", each}};
    std::int64_t counts = 1;
    for (const auto& [name, size] : sizes) {
      FUSEDMOE_CHECK(size >= 1 && size <= kMost / counts, name, core::to_string(size),
                     core::format("in [1, {}]", kMost / counts));
      counts *= size;
    }
    clear();
  }
  void clear() {
    ring.assign(static_cast<std::size_t>(num_layers * num_forwards * num_experts), 0);
    sums.assign(static_cast<std::size_t>(num_layers * num_experts), 0);
    forwards.assign(static_cast<std::size_t>(num_layers), 0);
  }
};

LoadWindow::LoadWindow(std::int64_t num_layers, std::int64_t num_experts, std::int64_t num_forwards)
    : impl_(std::make_unique<Impl>(num_layers, num_experts, num_forwards)) {}
LoadWindow::~LoadWindow() = default;
LoadWindow::LoadWindow(LoadWindow&&) noexcept = default;
LoadWindow& LoadWindow::operator=(LoadWindow&&) noexcept = default;

void LoadWindow::add(std::int64_t layer, const TensorView& expert_load) {
  Impl& impl = *impl_;
  FUSEDMOE_CHECK(layer >= 0 && layer < impl.num_layers, "layer", core::to_string(layer),
                 core::format("in [0, {})", impl.num_layers));
  const bool fits = expert_load && expert_load.dtype() == DType::kI32 && expert_load.rank() == 1 &&
                    expert_load.contiguous() && expert_load.numel() >= impl.num_experts;
  FUSEDMOE_CHECK_FAULT(fits, kShape, "expert_load", core::describe(expert_load),
                       core::format("contiguous i32 ({}), or longer", impl.num_experts));
  if (const Device device = expert_load.device(); !device.is_cpu()) {
    core::runtime_of(device).synchronize_device(device);
  }
  const Tensor host = to_device(Tensor(expert_load, nullptr), {});
  const auto* counts = host.as<const std::int32_t>();
  const std::int64_t place = impl.forwards[layer]++ % impl.num_forwards;
  auto* kept = impl.ring.data() + (layer * impl.num_forwards + place) * impl.num_experts;
  auto* sums = impl.sums.data() + layer * impl.num_experts;
  for (std::int64_t e = 0; e < impl.num_experts; ++e) {
    sums[e] += counts[e] - std::exchange(kept[e], counts[e]);
  }
}

std::vector<double> LoadWindow::loads() const {
  return {impl_->sums.begin(), impl_->sums.end()};
}

std::vector<double> LoadWindow::loads(Communicator& ranks) const {
  constexpr std::string_view kWhat = "loads of experts";
  const std::vector<std::int64_t>& mine = impl_->sums;
  const std::string bytes(reinterpret_cast<const char*>(mine.data()),
                          mine.size() * sizeof(std::int64_t));
  const std::vector<std::string> texts = ranks.gather(bytes, kWhat);
  std::vector<std::int64_t> total(mine.size()), other(mine.size());
  for (std::size_t r = 0; r < texts.size(); ++r) {
    FUSEDMOE_CHECK(texts[r].size() == texts[0].size(),
                   core::format("loads of rank {}", ranks.global_rank(static_cast<int>(r))),
                   core::format("{} bytes", texts[r].size()),
                   core::format("{}, as rank {} has", texts[0].size(), ranks.global_rank(0)));
  }
  for (const std::string& text : texts) {
    std::memcpy(other.data(), text.data(), text.size());
    for (std::size_t i = 0; i < total.size(); ++i) total[i] += other[i];
  }
  return {total.begin(), total.end()};
}

void LoadWindow::clear() {
  impl_->clear();
}

}  // namespace fusedmoe
