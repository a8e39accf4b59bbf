#include "cuda/sm80/family.h"

#include "cuda/experts/descriptor.h"
#include "cuda/sm80/heuristic.h"
#include "cuda/sm80/kernel_set.h"

namespace fusedmoe::cuda {
namespace {

class Sm80Family final : public KernelFamily {
 public:
  std::string_view name() const override { return "sm80"; }
  bool runs_on(int capability) const override { return capability >= 80; }
  std::string_view needs() const override { return "8.0 or later"; }
  std::string_view instruction() const override { return "mma.sync"; }
  std::string_view architectures() const override { return FUSEDMOE_SM80_ARCHITECTURES; }
  const void* kernel() const override { return sm80_probe(); }
  std::span<const TileShape> tiles(const WeightFormat& format) const override {
    return sm80::kernel_set(format).tiles;
  }
  bool keeps_order(const WeightFormat& format, const TileShape& tile) const override {
    return tile.k_groups == 1 || format.int8_rows;  // whose sums are exact
  }
  bool has_row_pass(const WeightFormat&, const TileShape&) const override { return false; }
  bool decodes_fp8_rows() const override { return true; }
  KernelConfig choose(const MlpShape& shape) const override { return sm80::choose_tiles(shape); }
  std::span<const FormatLaunches> launches() const override { return sm80_launches(); }
};

}  // namespace

const KernelFamily& sm80_family() {
  static const Sm80Family family;
  return family;
}

const ExpertsDescriptor& sm80_descriptor() {
  static const FamilyDescriptor descriptor(sm80_family(), "sm_80");
  return descriptor;
}

}  // namespace fusedmoe::cuda
