#include "cuda/sm80/family.h"

#include "cuda/experts/descriptor.h"
#include "cuda/sm80/heuristic.h"
#include "cuda/sm80/kernel_set.h"

namespace fusedmoe::cuda {
namespace {

using sm80::Fp8;
using sm80::KernelSet;

/// What both families share.
class MmaSyncFamily : public KernelFamily {
 public:
  explicit MmaSyncFamily(Fp8 fp8) : fp8_(fp8) {}

  std::string_view instruction() const override { return "mma.sync"; }
  std::span<const TileShape> tiles(const WeightFormat& format) const override {
    return kernels(format).tiles;
  }
  bool keeps_order(const WeightFormat& format, const TileShape& tile) const override {
    return tile.k_groups == 1 || format.int8_rows;  // whose sums are exact
  }
  bool has_row_pass(const WeightFormat& format, const TileShape& tile) const override {
    return kernels(format).has_row_pass(tile);
  }
  bool fp8_as_f16() const override { return fp8_ == Fp8::kAsF16; }
  bool awaits_rows() const override { return false; }
  KernelConfig choose(const MlpShape& shape) const override {
    return sm80::choose_tiles(shape, kernels(*shape.format));
  }

 private:
  KernelSet kernels(const WeightFormat& format) const { return sm80::kernel_set(format, fp8_); }

  Fp8 fp8_;
};

class Sm80Family final : public MmaSyncFamily {
 public:
  Sm80Family() : MmaSyncFamily(Fp8::kAsF16) {}
  std::string_view name() const override { return "sm80"; }
  bool runs_on(int capability) const override { return capability >= 80; }
  std::string_view needs() const override { return "8.0 or later"; }
  std::string_view architectures() const override { return FUSEDMOE_SM80_ARCHITECTURES; }
  const void* kernel() const override { return sm80_probe(); }
  std::span<const FormatLaunches> launches() const override { return sm80_launches(); }
};

/// 9.0 and 10.x take the same instruction but convert its operands to f16 in each.
class Sm89Family final : public MmaSyncFamily {
 public:
  Sm89Family() : MmaSyncFamily(Fp8::kNative) {}
  std::string_view name() const override { return "sm89"; }
  bool runs_on(int capability) const override { return capability == 89 || capability / 10 == 12; }
  std::string_view needs() const override { return "8.9 or 12.x"; }
  std::string_view architectures() const override { return FUSEDMOE_SM89_ARCHITECTURES; }
  const void* kernel() const override { return sm89_probe(); }
  std::span<const FormatLaunches> launches() const override { return sm89_launches(); }
};

}  // namespace

const KernelFamily& sm80_family() {
  static const Sm80Family family;
  return family;
}
const KernelFamily& sm89_family() {
  static const Sm89Family family;
  return family;
}

const ExpertsDescriptor& sm80_descriptor() {
  static const FamilyDescriptor descriptor(sm80_family(), "sm_80");
  return descriptor;
}
const ExpertsDescriptor& sm89_descriptor() {
  static const FamilyDescriptor descriptor(sm89_family(), "sm_89");
  return descriptor;
}

}  // namespace fusedmoe::cuda
