#include "layer/rows_in_place.h"

#include <algorithm>
#include <numeric>

#include "core/copy_rows.h"
#include "core/parallel.h"
#include "fusedmoe/runtime.h"
#include "host/element.h"

namespace fusedmoe::layer {

RowsInPlace::RowsInPlace(const RankRules& rules, const StepSizes& sizes, void* memory)
    : RankStep(rules, sizes, memory, 0) {
  const std::int64_t ranks = rules.size, tokens = sizes.num_tokens;
  counted_ = take(DType::kI32, {ranks});
  lent_rows_ = static_cast<LentRows*>(cutter_.take(sizeof(LentRows)));
  lent_sums_ = static_cast<LentSums*>(cutter_.take(sizeof(LentSums)));
  begins_ = static_cast<std::int64_t*>(
      cutter_.take(static_cast<std::size_t>(ranks) * sizeof(std::int64_t)));
  if (!rules.shared) return;
  const bool made_here = sizes.sent.quant || sizes.sent.apply_router_weight_on_input;
  if (!made_here) published_.values = take(sizes.dtype, {tokens, sizes.hidden});
  if (rules.num_logits > 0) published_.logits = take(DType::kF32, {tokens, rules.num_logits});
  published_.weights = take(DType::kF32, {tokens, sizes.topk});
}

/// What the others read of these rows.
LentRows RowsInPlace::lent(const RowTensors& rows) const {
  return {header(), counted_, sizes_.to_all ? TensorView() : send_tokens_, rows};
}

/// The rows as others read them: in shared memory, where a copy of what the caller has is made.
/// Tokens that no other rank wants are left out.
RowTensors RowsInPlace::publish(const RowTensors& rows, Stream stream) const {
  RowTensors result = rows;
  const auto publish_all = [&](TensorView& view, const TensorView& place) {
    if (!view) return;
    copy(view, place, stream);
    view = place;
  };
  publish_all(result.weights, published_.weights);
  publish_all(result.logits, published_.logits);
  if (!published_.values) return result;  // they have been made there
  result.values = published_.values;
  const auto* send_rows = send_rows_.as<const std::int32_t>();
  const auto wanted = [&](std::int64_t token) {
    bool by_some = sizes_.to_all;
    for (int r = 0; r < rules_.size; ++r) {
      by_some |= r != rules_.rank && send_rows[token * rules_.size + r] >= 0;
    }
    return by_some;
  };
  const auto publish_values = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t stop = begin; begin < end; begin = ++stop) {
      while (stop < end && wanted(stop)) ++stop;
      core::copy_rows(rows.values, begin, result.values, begin, stop - begin);
    }
  };
  const bool worthwhile = rows.values.numel() >= core::kParallelElements;
  core::parallel_ranges(core::executor_of(stream), sizes_.num_tokens, worthwhile, publish_values);
  return result;
}

/// Reads the rows for this rank where every rank has them: copies them, or only their addresses.
/// When it returns, the others have read this rank's, which may change.
void RowsInPlace::send(const RowTensors& own_rows, const ForwardArgs& args) {
  if (sizes_.fixed) set_fixed_counts();
  if (sizes_.to_all) count_for_all(counted_.as<std::int32_t>());
  const LentRows own = lent(own_rows);
  *lent_rows_ = rules_.shared ? lent(publish(own_rows, args.stream)) : own;
  std::vector<StepHeader> headers;
  const auto read = [&](std::span<const void* const> lent) {
    std::vector<const LentRows*> all;
    for (const void* each : lent) all.push_back(static_cast<const LentRows*>(each));
    for (const LentRows* each : all) headers.push_back(each->header);
    if (std::count(headers.begin(), headers.end(), headers.front()) != rules_.size) return;
    if (!sizes_.fixed) {
      set_counts([&](int from, int to) { return all[from]->counts.as<const std::int32_t>()[to]; });
    }
    if (recv_begin(rules_.size) > sizes_.capacity) return;
    rows_ = recv_begin(rules_.size);
    if (received_at_ && !rules_.shared) locate_received();
    for (int r = 0; r < rules_.size; ++r) {
      copy_from(r, r == rules_.rank ? own : *all[r], args.stream);
    }
  };
  rules_.group->lend("rows", lent_rows_, read, what("dispatch"));
  check_headers(headers);
  check_received();
  settle(args);
}

void RowsInPlace::copy_from(int rank, const LentRows& lent, Stream stream) const {
  RowTensors to = received_;
  if (received_at_ && (rules_.shared || rank == rules_.rank)) {
    to.values = {};
    const auto* tokens = lent.tokens.as<const std::int32_t>();
    if (tokens) tokens += rules_.rank * lent.tokens.size(1);
    locate_kept(lent.rows.values, tokens, lent.counts.as<const std::int32_t>()[rules_.rank], rank);
  }
  const core::RowPacking::Part part{rules_.rank, 0, recv_counts_[rank], recv_begin(rank)};
  put_in_send_order(lent.rows, to, lent.tokens, lent.counts, {&part, 1}, stream);
}

/// Adds what all ranks have computed for the tokens of this one.
void RowsInPlace::sum(const ForwardArgs& args) {
  TensorView rows = args.fused_output;
  if (rules_.shared && rows.data() != output_.data()) {
    copy(rows, output_.slice(0, 0, rows.size(0)), args.stream);
    rows = output_;
  }
  const Counts& counts = rules_.per_slot() ? slots_in_ : recv_counts_;
  std::exclusive_scan(counts.begin(), counts.end(), begins_, std::int64_t{0});
  *lent_sums_ = {rows.as<const std::byte>(), begins_};
  const std::int64_t row_bytes = fusedmoe::bytes(rules_.combine_dtype, sizes_.hidden);
  const auto add = [&](std::span<const void* const> lent) {
    std::vector<const std::byte*> first;
    for (const void* each : lent) {
      const auto& other = *static_cast<const LentSums*>(each);
      first.push_back(other.rows + other.begins[rules_.rank] * row_bytes);
    }
    sum_rows(args, first);
  };
  rules_.group->lend("sums", lent_sums_, add, what("combine"));
}

}  // namespace fusedmoe::layer
