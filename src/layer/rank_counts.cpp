// The counts of a step across ranks: how many rows go where, which of them fit, and whether all
// ranks do the same step.
#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "layer/rank_step.h"

namespace fusedmoe::layer {

std::int64_t RankStep::recv_begin(int rank) const {
  return std::accumulate(recv_counts_.begin(), recv_counts_.begin() + rank, std::int64_t{0});
}

/// How many of its tokens this rank sends where all ranks get the same; with fixed sizes also rows
/// that nobody fills.
std::int64_t RankStep::rows_for_all() const {
  return *std::max_element(send_counts_.begin(), send_counts_.end());
}

/// Every rank sends the same number of rows to each that has experts.
void RankStep::set_fixed_counts() {
  const std::vector<int>& owners = rules_.owners;
  for (int r = 0; r < rules_.size; ++r) {
    const bool gets = !sizes_.to_all || std::count(owners.begin(), owners.end(), r) > 0;
    send_counts_[r] = gets ? sizes_.max_tokens : 0;
  }
  std::fill(recv_counts_.begin(), recv_counts_.end(), send_counts_[rules_.rank]);
}

/// From how many rows every rank has for every other. Where rows are dropped, a rank takes those of
/// rank 0, then those of rank 1, and so on, until its buffer is full.
void RankStep::set_counts(const std::function<std::int64_t(int from, int to)>& counts) {
  const auto fitting = [&](int from, int to) {
    const std::int64_t count = counts(from, to);
    if (!drops()) return count;
    std::int64_t room = rules_.receive_capacity;
    for (int r = 0; r < from; ++r) room -= counts(r, to);
    return std::clamp<std::int64_t>(room, 0, count);
  };
  for (int r = 0; r < rules_.size; ++r) {
    send_counts_[r] = fitting(rules_.rank, r);
    recv_counts_[r] = fitting(r, rules_.rank);
  }
}

/// Rows for each rank where those with experts get all tokens.
void RankStep::count_for_all(std::int32_t* counts) const {
  std::fill_n(counts, rules_.size, 0);
  for (const int owner : rules_.owners) {
    counts[owner] = static_cast<std::int32_t>(sizes_.num_tokens);
  }
}

void RankStep::check_received() {
  rows_ = recv_begin(rules_.size);
  const std::int64_t capacity = rules_.receive_capacity;
  FUSEDMOE_CHECK(capacity == 0 || sizes_.fixed || rows_ <= capacity, "receive_capacity",
                 core::format("{} rows in {}", rows_, what("dispatch")),
                 core::format("at most {}", capacity));
}

/// Now that it is known how many rows go where: which ones stay, and how many come back.
void RankStep::settle(const ForwardArgs& args) {
  if (drops()) drop_rows(args);
  if (!rules_.per_slot()) return;
  backend().number_slots({physical_ids_, rules_.physical_ranks, returned_slots_, slot_counts_},
                         slots_out_, args.stream);
}

void RankStep::drop_rows(const ForwardArgs& args) {
  Counts room = send_counts_;
  if (sizes_.to_all) {
    // Token t is row t of what each rank gets; a rank without experts loses nothing.
    backend().number_parts(send_rows_, sizes_.max_tokens, args.stream);
    room.assign(room.size(), sizes_.max_tokens);
    for (const int owner : rules_.owners) room[owner] = send_counts_[owner];
  }
  core::RowLimits limits;
  limits.send_rows = send_rows_;
  limits.row_stride = sizes_.max_tokens;
  limits.room = room;
  if (rules_.num_logits == 0) limits.physical_ids = physical_ids_;
  limits.physical_ranks = rules_.physical_ranks;
  limits.dropped = args.dropped_rows;
  backend().limit_rows(limits, args.stream);
}

StepHeader RankStep::header() const {
  return {name_.step,
          rules_.layer,
          static_cast<std::int32_t>(sizes_.topk),
          sizes_.max_tokens,
          fusedmoe::bytes(own_.values_dtype(), own_.value_columns()),
          sizes_.fixed,
          static_cast<std::int64_t>(name_.moves)};
}

void RankStep::check_headers(std::span<const StepHeader> headers) const {
  const auto describe = [&](int rank, const StepHeader& header) {
    return core::format(
        "rank {} is at step {} of layer {} with at most {} tokens, topk {}, rows of {} bytes, "
        "placement {}, {} sizes",
        rules_.group->global_rank(rank), header.step, header.layer, header.max_tokens, header.topk,
        header.row_bytes, header.moves, header.fixed_sizes ? "fixed" : "exact");
  };
  // Compared with rank 0's, so that all ranks say the same.
  for (int r = 1; r < rules_.size; ++r) {
    if (headers[r] == headers[0]) continue;
    // Aborted kernels end, too: then nobody wrote the headers.
    if (!rules_.device.is_cpu()) rules_.group->check();
    throw Error::communication(
        core::format("{}, but {}", describe(0, headers[0]), describe(r, headers[r])));
  }
}

}  // namespace fusedmoe::layer
