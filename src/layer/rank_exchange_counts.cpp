// The counts of a step across ranks: how many rows go where, which of them fit, and whether all
// ranks do the same step.
#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "fusedmoe/runtime.h"
#include "layer/backend.h"
#include "layer/rank_exchange.h"

namespace fusedmoe::layer {

/// Every rank sends the same number of rows to each that has experts.
void RankExchange::set_fixed_counts(const ExchangeLayout& layout) const {
  for (int r = 0; r < size_; ++r) {
    const bool gets = !to_all_ || std::count(owners_.begin(), owners_.end(), r) > 0;
    step_.send_counts[r] = gets ? fixed_rows(layout.sizes.max_tokens) : 0;
  }
  std::fill(step_.recv_counts.begin(), step_.recv_counts.end(), step_.send_counts[rank_]);
}

/// From how many rows every rank has for every other. Where rows are dropped, a rank takes those of
/// rank 0, then those of rank 1, and so on, until its buffer is full.
void RankExchange::set_counts(const RowCounts& counts) const {
  const auto fitting = [&](int from, int to) {
    const std::int64_t count = counts(from, to);
    std::int64_t room = receive_capacity_;
    for (int r = 0; drop_rows_ && r < from; ++r) room -= counts(r, to);
    return drop_rows_ ? std::clamp<std::int64_t>(room, 0, count) : count;
  };
  for (int r = 0; r < size_; ++r) {
    step_.send_counts[r] = fitting(rank_, r);
    step_.recv_counts[r] = fitting(r, rank_);
  }
}

/// Rows for each rank where those with experts get all tokens.
void RankExchange::count_for_all(const ExchangeLayout& layout, std::int32_t* counts) const {
  std::fill_n(counts, size_, 0);
  for (const int owner : owners_) {
    counts[owner] = static_cast<std::int32_t>(layout.sizes.num_tokens);
  }
}

/// Now that it is known how many rows go where: which ones stay, and how many come back.
void RankExchange::settle(const ForwardArgs& args, const ExchangeLayout& layout) const {
  if (drop_rows_) drop_rows(args, layout);
  if (!per_slot()) return;
  backend_of(args.stream.device)
      .number_slots(
          {layout.physical_ids, physical_ranks_, layout.returned_slots, layout.slot_counts},
          step_.slots_out, args.stream);
}

void RankExchange::drop_rows(const ForwardArgs& args, const ExchangeLayout& layout) const {
  const core::Backend& backend = backend_of(args.stream.device);
  std::vector<std::int64_t> room = step_.send_counts;
  if (to_all_) {
    // Token t is row t of what each rank gets; a rank without experts loses nothing.
    backend.number_parts(layout.send_rows, layout.sizes.max_tokens, args.stream);
    room.assign(room.size(), layout.sizes.max_tokens);
    for (const int owner : owners_) room[owner] = step_.send_counts[owner];
  }
  core::RowLimits limits;
  limits.send_rows = layout.send_rows;
  limits.row_stride = layout.sizes.max_tokens;
  limits.room = room;
  if (num_logits_ == 0) limits.physical_ids = layout.physical_ids;
  limits.physical_ranks = physical_ranks_;
  limits.dropped = args.dropped_rows;
  backend.limit_rows(limits, args.stream);
}

/// How many of its tokens this rank sends where all ranks get the same; with fixed sizes also rows
/// that nobody fills.
std::int64_t RankExchange::rows_for_all() const {
  return *std::max_element(step_.send_counts.begin(), step_.send_counts.end());
}

void RankExchange::check_received() const {
  step_.rows = step_.recv_begin(size_);
  FUSEDMOE_CHECK(receive_capacity_ == 0 || step_.rows <= receive_capacity_, "receive_capacity",
                 core::format("{} rows in {}", step_.rows, what("dispatch")),
                 core::format("at most {}", receive_capacity_));
}

StepHeader RankExchange::header(const ExchangeLayout& layout) const {
  return {step_.number, layer_, static_cast<std::int32_t>(layout.sizes.topk),
          layout.sizes.max_tokens, bytes(layout.own.values_dtype(), layout.own.value_columns())};
}

/// How many rows go where, which of them fit, and whether all ranks do the same step. With fixed
/// sizes the first is known, and on CUDA the host must not wait for the last.
void RankExchange::count(const ForwardArgs& args, const ExchangeLayout& layout) const {
  if (host_ || !fixed_sizes_) exchange_counts(layout, args.stream);
  if (fixed_sizes_) set_fixed_counts(layout);
  check_received();
  settle(args, layout);
}

/// Brings the records of all ranks to the host, which waits for them.
void RankExchange::exchange_counts(const ExchangeLayout& layout, Stream stream) const {
  const StepHeader mine = header(layout);
  auto* record = records_.as<std::byte>() + rank_ * records_.size(1);
  std::memcpy(record, &mine, sizeof mine);
  std::int64_t known = sizeof mine;
  if (to_all_) {
    count_for_all(layout, reinterpret_cast<std::int32_t*>(record + sizeof mine));
    known = records_.size(1);
  }
  const auto known_of = [&](const TensorView& records) {
    return records.select(0, rank_).slice(0, 0, known);
  };
  copy(known_of(records_), known_of(layout.records), stream);
  std::vector<Message> sends, receives;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    sends.push_back(message(r, layout.records, rank_, 1));
    receives.push_back(message(r, layout.records, r, 1));
  }
  group_->exchange(sends, receives, stream, what("counts"));
  copy(layout.records, records_, stream);
  synchronize(stream);
  std::vector<StepHeader> headers(static_cast<std::size_t>(size_));
  std::vector<const std::int32_t*> counts;
  for (int r = 0; r < size_; ++r) {
    const std::byte* record = records_.as<std::byte>() + r * records_.size(1);
    std::memcpy(&headers[r], record, sizeof headers[r]);
    counts.push_back(reinterpret_cast<const std::int32_t*>(record + sizeof headers[r]));
  }
  check_headers(headers);
  set_counts([&](int from, int to) { return counts[from][to]; });
}

void RankExchange::check_headers(std::span<const StepHeader> headers) const {
  const auto describe = [&](int rank, const StepHeader& header) {
    return core::format(
        "rank {} is at step {} of layer {} with at most {} tokens, topk {}, rows "
        "of {} bytes",
        group_->global_rank(rank), header.step, header.layer, header.max_tokens, header.topk,
        header.row_bytes);
  };
  // Compared with rank 0's, so that all ranks say the same.
  for (int r = 1; r < size_; ++r) {
    if (headers[r] == headers[0]) continue;
    if (!host_) group_->check();  // aborted kernels end, too: then nobody wrote the headers
    throw Error::communication(
        core::format("{}, but {}", describe(0, headers[0]), describe(r, headers[r])));
  }
}

}  // namespace fusedmoe::layer
