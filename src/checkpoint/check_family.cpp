#include "checkpoint/check_family.h"

#include "core/check.h"

namespace fusedmoe::checkpoint {
namespace {

/// A first matrix without a gate, gate and up in one tensor, or each in its own.
void check_matrices(const ExpertLayout& layout, bool gated, const std::string& label) {
  const auto require = [&](bool condition, const char* sentence) {
    FUSEDMOE_CHECK_IO(condition, label, core::format("{}: {}", label, sentence));
  };
  require(gated || layout.w3.empty(),
          "\"up\" cannot be used with experts without a gate: their only first matrix is \"gate\"");
  const bool rows = layout.storage == ExpertStorage::kRows;
  require(!gated || !layout.w3.empty() || (layout.both && !rows),
          "\"gate\" needs \"up\" beside it, unless \"gated\" is false");
  require(gated || !rows, "the storage \"rows\" cannot be used with experts without a gate");
  const bool both_in_one = gated && layout.w3.empty();
  require(both_in_one || layout.storage != ExpertStorage::kMxfp4,
          "the storage \"mxfp4\" needs \"gate_up\", gate and up in one tensor");
  require(both_in_one || layout.gate_up == GateUpLayout::kGateUp,
          "\"interleaved\" needs \"gate_up\", gate and up in one tensor");
}

void check_scales_and_biases(const ExpertLayout& layout, const std::string& label) {
  const bool mxfp4 = layout.storage == ExpertStorage::kMxfp4;
  const auto require = [&](bool condition, const char* sentence) {
    FUSEDMOE_CHECK_IO(condition, label, core::format("{}: {}", label, sentence));
  };
  require(layout.w13_scales.empty() != mxfp4 && layout.w2_scales.empty() != mxfp4,
          "the storage \"mxfp4\" has gate_up_scales and down_scales, and no other storage has");
  require(layout.w13_bias.empty() == layout.w2_bias.empty(),
          "gate_up_bias and down_bias are given together or not at all");
  const bool stacked = layout.storage == ExpertStorage::kStacked || layout.w3.empty();
  require(layout.w2_bias.empty() || (layout.storage != ExpertStorage::kPerExpert && stacked),
          "biases are read beside stacked experts only");
  const bool three = !layout.w3.empty() && !layout.w2_bias.empty();
  require(
      layout.w3_bias.empty() != three,
      "\"up_bias\" stands beside gate_bias and down_bias where gate and up are tensors of their "
      "own, and nowhere else");
}

/// Constants and translated values; what a config says is checked when it is read.
void check_range(const Setting<std::int64_t>& setting, std::int64_t low, std::int64_t high,
                 const std::string& label) {
  const auto check = [&](std::int64_t value) {
    FUSEDMOE_CHECK_FILE(value >= low && value <= high, label, core::to_string(value),
                        core::format("an integer from {} to {}", low, high));
  };
  if (setting.otherwise) check(*setting.otherwise);
  for (const auto& [text, value] : setting.values) check(value);
}

void check_router(const FamilyRow& row, const std::string& label) {
  const Setting<bool>& has_bias = row.has_correction_bias;
  FUSEDMOE_CHECK_IO(!row.topk_method || (has_bias.keys.empty() && !has_bias.otherwise),
                    label + ".has_correction_bias",
                    core::format("{}.has_correction_bias cannot be used with method, which says "
                                 "whether there is a correction bias",
                                 label));
  const auto is_set = [](const Setting<std::int64_t>& setting) {
    return setting.otherwise || !setting.keys.empty();
  };
  FUSEDMOE_CHECK_IO(!is_set(row.num_groups) || is_set(row.topk_group), label + ".kept_groups",
                    core::format("{}.groups needs kept_groups beside it", label));
}

}  // namespace

void check_family(const FamilyRow& row, const std::string& label) {
  FUSEDMOE_CHECK_IO(!row.layouts.empty() && !row.blocks.empty() && !row.router.empty(), label,
                    core::format("{} needs blocks, experts.layouts and router.weight", label));
  FUSEDMOE_CHECK_IO(row.layouts.front().storage != ExpertStorage::kMxfp4 || row.layouts.size() > 1,
                    label + ".experts.layouts",
                    core::format("{}.experts.layouts needs another layout beside mxfp4", label));
  for (const ExpertLayout& layout : row.layouts) {
    check_matrices(layout, row.gated, label + ".experts");
    check_scales_and_biases(layout, label + ".experts.layouts");
  }
  const bool projects = row.latent_width.otherwise || !row.latent_width.keys.empty();
  FUSEDMOE_CHECK_IO(projects == !row.latent_down.empty() && projects == !row.latent_up.empty(),
                    label + ".latent",
                    core::format("{}.latent needs width, down and up, or none of them", label));
  check_range(row.latent_width, 0, kMaxWidth, label + ".latent.width");
  check_router(row, label + ".router");
  check_range(row.num_layers, 1, kMaxLayers, label + ".layers");
  check_range(row.hidden, 1, kMaxWidth, label + ".hidden");
  check_range(row.num_experts, 1, kMaxExperts, label + ".experts.count");
  check_range(row.intermediate, 1, kMaxWidth, label + ".experts.width");
  check_range(row.topk, 1, kMaxExperts, label + ".router.topk");
  check_range(row.zero_experts, 0, kMaxExperts, label + ".router.zero_experts");
  check_range(row.num_groups, 0, kMaxExperts, label + ".router.groups");
  check_range(row.topk_group, 0, kMaxExperts, label + ".router.kept_groups");
  check_range(row.shared_count, 0, kMaxWidth, label + ".shared.count");
  check_range(row.shared_width, 0, kMaxWidth, label + ".shared.width");
}

}  // namespace fusedmoe::checkpoint
