// Which configurations the experts on CUDA serve: the same answers for the kernels of every
// architecture, from what their KernelFamily says.
#pragma once

#include "cuda/mlp/kernel_family.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

/// It answers without a GPU too, where the configuration names a compute capability.
class FamilyDescriptor final : public ExpertsDescriptor {
 public:
  FamilyDescriptor(const KernelFamily& family, std::string_view instruction_set)
      : family_(family), instruction_set_(instruction_set) {}

  std::string_view name() const override { return family_.name(); }
  Support supports(const MoeConfig& config) const override;
  bool routes_faster() const override { return true; }
  /// The experts quantize rows themselves, most where they permute them.
  bool expects_unquantized_inputs(const QuantScheme&) const override { return true; }
  bool takes_quantized_inputs(const QuantScheme& scheme) const override;
  bool reads_row_sources() const override { return family_.awaits_rows(); }
  bool writes_row_targets() const override { return true; }
  std::string_view instruction_set() const override { return instruction_set_; }
  /// Packed blocks are the same for every family.
  std::string_view layout() const override { return "cuda"; }
  int layout_version() const override { return 3; }
  std::int64_t packed_bytes(const MoeConfig& config) const override;
  std::shared_ptr<const Experts> create(const MoeConfig& config,
                                        const Context& context) const override;

 private:
  const KernelFamily& family_;
  std::string_view instruction_set_;
};

}  // namespace fusedmoe::cuda
