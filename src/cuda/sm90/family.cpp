#include "cuda/sm90/family.h"

#include "cuda/experts/descriptor.h"
#include "cuda/sm90/heuristic.h"
#include "cuda/sm90/kernel_set.h"

namespace fusedmoe::cuda {
namespace {

class Sm90Family final : public KernelFamily {
 public:
  std::string_view name() const override { return "sm90"; }
  bool runs_on(int capability) const override { return capability == 90; }
  std::string_view needs() const override { return "9.0"; }
  std::string_view instruction() const override { return "wgmma"; }
  std::string_view architectures() const override { return FUSEDMOE_SM90_ARCHITECTURES; }
  const void* kernel() const override { return sm90_probe(); }
  std::span<const TileShape> tiles(const WeightFormat& format) const override {
    return sm90::kernel_set(format).tiles;
  }
  bool keeps_order(const WeightFormat& format, const TileShape& tile) const override {
    return sm90::kernel_set(format).keeps_order(tile);
  }
  bool has_row_pass(const WeightFormat& format, const TileShape& tile) const override {
    return sm90::kernel_set(format).has_row_pass(tile);
  }
  bool fp8_as_f16() const override { return false; }
  bool awaits_rows() const override { return true; }
  KernelConfig choose(const MlpShape& shape) const override { return sm90::choose_tiles(shape); }
  std::span<const FormatLaunches> launches() const override { return sm90_launches(); }
};

}  // namespace

const KernelFamily& sm90_family() {
  static const Sm90Family family;
  return family;
}

const ExpertsDescriptor& sm90_descriptor() {
  static const FamilyDescriptor descriptor(sm90_family(), "sm_90a");
  return descriptor;
}

}  // namespace fusedmoe::cuda
