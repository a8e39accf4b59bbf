#include "testing/support_matrix.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "fusedmoe/selection.h"

namespace fusedmoe::testing {
namespace {

constexpr const char* kIntroduction =
    R"(# Support matrix

Which experts run which scheme. `scripts/support-matrix.sh` writes this page from the registry; CI fails when
it is stale. The question to each descriptor: 2 experts of 128 x 128 with SiLU, top-2, transport `no_ep`,
hidden states in f16 for f16 weights and in bf16 for all others, and for `sm90` and `sm80` a device of compute
capability 9.0, for `sm89` one of 8.9. A cell is

* `yes`: it runs, and so do its variants: the **b**atched format (transport `batched`), **h**ooks between the
  steps, **m**onolithic experts that get router logits, batch **i**nvariance;
* `yes -i`: it runs, but not the variants whose letters follow the minus;
* else the code of the reason. `fusedmoe explain` says it in words.

Each `yes` of `reference` and `cpu`, with each of its variants, is a test:
`tests/unit/support_matrix_test.cpp`. Those of `sm90`, `sm89` and `sm80` have theirs in `tests/cuda/`,
which need a GPU: [what ran where](cuda-sm80.md).

)";

constexpr const char* kLimits =
    R"(
Beyond the scheme, an implementation may refuse a layer for its sizes (`shape`), among others:

| experts | limits |
| --- | --- |
| `reference` | chosen only when asked for by name |
| `cpu` | `int8_w8a8`: sizes whose int32 accumulators cannot overflow |
| `sm90` | compute capability 9.0; hidden states f16 for f16 weights, f16 or bf16 for integer and FP4 weights alone and for FP8 weights with FP8 activations, else bf16; hidden size a multiple of 8, the intermediate size too with hooks or FP8 activations and scales per 128 x 128; FP4: even intermediate size; at most 2048 local experts; top-k at most 64; `hidden_states` and `output` start at 16 bytes |
| `sm89` | compute capability 8.9 or 12.x; FP8 activations; else as `sm90` |
| `sm80` | compute capability 8.0 or later; `int8_w8a8`: sizes whose int32 sums cannot overflow; else as `sm90` |

`-`: not quantized; activations stay as the hidden states are. "dynamic": the scale is computed from the data.
)";

constexpr const char* kRanks =
    R"(
## Ranks

Which transport serves which deployment, asked of rank 0 with bf16 experts on the CPU; the other experts that run a
scheme give the same answers. `yes`: in both combine modes. `per_rank`: not with rows for each slot, which
batch invariance needs where rows travel. See [expert-parallel.md](expert-parallel.md).

)";

std::string describe(const std::optional<QuantKey>& key) {
  if (!key || !key->quantized()) return key ? std::string(name(key->value)) : "-";
  const GroupShape group = key->group;
  std::string scale = "tensor";
  if (group.rows == 1) scale = group.cols < 0 ? "row" : fmt::format("{}", group.cols);
  if (group.rows > 1) scale = fmt::format("{} x {}", group.rows, group.cols);
  return fmt::format("{}, {} per {}{}{}{}", name(key->value), name(*key->scale), scale,
                     key->global_group.cols > 0
                         ? fmt::format(", f16 per {}", key->global_group.cols)
                     : key->global_scale ? ", f32"
                                         : "",
                     key->symmetric ? "" : ", zero points", key->dynamic ? ", dynamic" : "");
}

/// "yes", with the letters of the variants that are refused, or the code of the reason.
std::string cell(const NamedScheme& scheme, const ExpertsDescriptor& experts) {
  const Variant plain{&experts, &no_ep()};
  const MoeConfig config = support_config(scheme, experts);
  if (const Support support = plain.supports(config); !support) {
    return std::string(code(support.reason));
  }
  std::string refused;
  const auto ask = [&](char letter, const Variant& variant) {
    if (!variant.supports(config)) refused += letter;
  };
  ask('b', {&experts, &batched()});
  ask('h', {.experts = &experts, .prepare_finalize = &no_ep(), .hooks = true});
  ask('m', {.experts = &experts, .prepare_finalize = &no_ep(), .monolithic = true});
  ask('i', {.experts = &experts, .prepare_finalize = &no_ep(), .batch_invariant = true});
  return refused.empty() ? "yes" : "yes -" + refused;
}

/// "yes", the one combine mode that is served, or the code of the reason.
std::string rank_cell(const Deployment& deployment, const PrepareFinalizeDescriptor& transport) {
  MoeConfig config =
      make_config(support_case({"bf16", schemes::unquantized(DType::kBF16)}), DType::kBF16);
  config.num_experts = 8;
  config.parallel = ParallelConfig::of(deployment);
  config.num_local_experts = config.num_experts / config.parallel.ep_size;
  config.has_expert_map = config.parallel.ep_size > 1;
  config.activation_format = transport.activation_format();
  const Support per_rank = transport.supports(config);
  config.combine = CombineMode::kPerSlot;
  if (!per_rank) return std::string(code(per_rank.reason));
  return transport.supports(config) ? "yes" : "per_rank";
}

using Row = std::vector<std::string>;

std::string table(const std::vector<Row>& rows) {
  std::vector<std::size_t> widths(rows.front().size());
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      text += fmt::format("| {:<{}} ", row[i], widths[i]);
    }
    text += "|\n";
    if (&row != &rows.front()) continue;
    for (const std::size_t width : widths) text += fmt::format("| {:-<{}} ", "", width);
    text += "|\n";
  }
  return text;
}

std::string rank_table() {
  const std::pair<const char*, Deployment> deployments[] = {
      {"one rank", {}},
      {"tp 4", {.tp_size = 4}},
      {"tp 4, ep", {.tp_size = 4, .expert_parallel = true}},
      {"dp 4", {.dp_size = 4}},
      {"dp 4, ep", {.dp_size = 4, .expert_parallel = true}},
      {"tp 2, dp 2", {.tp_size = 2, .dp_size = 2}},
      {"tp 2, dp 2, ep", {.tp_size = 2, .dp_size = 2, .expert_parallel = true}},
      {"tp 2, dp 2, ep, sequence parallel",
       {.tp_size = 2, .dp_size = 2, .expert_parallel = true, .sequence_parallel = true}},
  };
  std::vector<Row> rows{{"deployment"}};
  for (const auto* transport : all_prepare_finalize()) rows[0].emplace_back(transport->name());
  for (const auto& [name, deployment] : deployments) {
    Row row{name};
    for (const auto* transport : all_prepare_finalize()) {
      row.push_back(rank_cell(deployment, *transport));
    }
    rows.push_back(std::move(row));
  }
  return table(rows);
}

}  // namespace

Case support_case(const NamedScheme& scheme) {
  Case spec;
  spec.name = scheme.name;
  spec.num_tokens = 4;
  spec.num_experts = 2;
  spec.hidden = 128;
  spec.intermediate = 128;
  spec.scheme = scheme.scheme;
  return spec;
}

MoeConfig support_config(const NamedScheme& scheme, const ExpertsDescriptor& experts) {
  const DType dtype = scheme.scheme.weights.value == DType::kF16 ? DType::kF16 : DType::kBF16;
  const MoeConfig on_cpu = make_config(support_case(scheme), dtype);
  if (experts.supports(on_cpu).reason != Reason::kDevice) return on_cpu;
  MoeConfig on_gpu = make_config(support_case(scheme), dtype, {DeviceKind::kCuda, 0});
  on_gpu.compute_capability = 90;
  if (experts.supports(on_gpu).reason == Reason::kDevice) on_gpu.compute_capability = 89;
  return on_gpu;
}

std::string support_matrix_markdown() {
  std::vector<const ExpertsDescriptor*> columns(all_experts().begin(), all_experts().end());
  std::rotate(columns.begin(), std::prev(columns.end()), columns.end());  // the reference first
  std::vector<Row> rows{{"scheme", "weights", "activations"}};
  for (const ExpertsDescriptor* experts : columns) rows[0].emplace_back(experts->name());
  for (const NamedScheme& entry : named_schemes()) {
    Row row{entry.name, describe(entry.scheme.weights), describe(entry.scheme.activations)};
    for (const ExpertsDescriptor* experts : columns) row.push_back(cell(entry, *experts));
    rows.push_back(std::move(row));
  }
  return kIntroduction + table(rows) + kLimits + kRanks + rank_table();
}

}  // namespace fusedmoe::testing
