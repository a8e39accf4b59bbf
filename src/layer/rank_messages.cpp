#include "layer/rank_messages.h"

#include <algorithm>
#include <cstring>

#include "fusedmoe/runtime.h"

namespace fusedmoe::layer {

RankMessages::RankMessages(const RankRules& rules, const StepSizes& sizes, void* memory,
                           std::int64_t packed)
    : RankStep(rules, sizes, memory, packed) {
  records_ = take(DType::kU8, {rules.size, record_bytes(rules.size)});
  if (records_) {
    auto* counts =
        reinterpret_cast<std::int32_t*>(records_.select(0, rules.rank).as<StepHeader>() + 1);
    counted_ = TensorView(counts + rules.size, DType::kI32, {rules.size}, rules.device);
  }
  const std::int64_t rows =
      rules.per_slot() ? sizes.num_tokens * sizes.topk : rules.size * sizes.max_tokens;
  returned_ = take(rules.combine_dtype, {rows, sizes.hidden});
}

/// Brings the records of all ranks to the host, which waits for them.
void RankMessages::exchange_counts(Stream stream) {
  const int rank = rules_.rank, size = rules_.size;
  const TensorView& here = rules_.records;
  const StepHeader mine = header();
  auto* record = here.select(0, rank).as<std::byte>();
  std::memcpy(record, &mine, sizeof mine);
  auto* slots = reinterpret_cast<std::int32_t*>(record + sizeof mine);
  std::copy(slots_out_.begin(), slots_out_.end(), slots);
  std::int64_t known = reinterpret_cast<std::byte*>(slots + size) - record;
  if (sizes_.to_all) {
    count_for_all(slots + size);
    known = here.size(1);
  }
  const auto known_of = [&](const TensorView& records) {
    return records.select(0, rank).slice(0, 0, known);
  };
  copy(known_of(here), known_of(records_), stream);
  std::vector<Message> sends, receives;
  for (int r = 0; r < size; ++r) {
    if (r == rank) continue;
    sends.push_back(message(r, records_, rank, 1));
    receives.push_back(message(r, records_, r, 1));
  }
  rules_.group->exchange(sends, receives, stream, what("counts"));
  copy(records_, here, stream);
  synchronize(stream);
  std::vector<StepHeader> headers(static_cast<std::size_t>(size));
  std::vector<const std::int32_t*> counts;
  for (int r = 0; r < size; ++r) {
    const auto* of_rank = here.select(0, r).as<const std::byte>();
    std::memcpy(&headers[r], of_rank, sizeof headers[r]);
    counts.push_back(reinterpret_cast<const std::int32_t*>(of_rank + sizeof headers[r]));
    slots_here_ += counts[r][rank];
  }
  check_headers(headers);
  set_counts([&](int from, int to) { return counts[from][size + to]; });
}

/// Where all ranks get the same rows, they get this rank's own.
RankStep::Parts RankMessages::parts_of_others() const {
  Parts parts;
  for (int r = 0; !sizes_.to_all && r < rules_.size; ++r) {
    if (r != rules_.rank) parts.push_back({r, 0, send_counts_[r], packed_begin(r)});
  }
  return parts;
}

void RankMessages::exchange_rows(const RowTensors* own, Stream stream) const {
  std::vector<Message> sends, receives;
  const auto add = [&](std::vector<Message>& messages, int peer, const RowTensors& rows,
                       std::int64_t begin, std::int64_t count) {
    all_rows_.each(rows, [&](const TensorView&, const TensorView& tensor) {
      messages.push_back(message(peer, tensor, begin, count));
    });
  };
  for (int r = 0; r < rules_.size; ++r) {
    if (r == rules_.rank) continue;
    const std::int64_t packed = sizes_.to_all ? recv_begin(rules_.rank) : packed_begin(r);
    add(sends, r, own ? *own : all_rows_, own ? 0 : packed, send_counts_[r]);
    add(receives, r, all_rows_, recv_begin(r), recv_counts_[r]);
  }
  rules_.group->exchange(sends, receives, stream, what("dispatch"));
}

std::int64_t RankMessages::returned_begin(int rank) const {
  const std::vector<int>& owners = rules_.owners;
  const auto place = std::find(owners.begin(), owners.end(), rank) - owners.begin();
  return (sizes_.to_all ? place : rank) * sizes_.max_tokens;
}

/// A rank's own rows stay where its experts have left them.
void RankMessages::give_back(const ForwardArgs& args) {
  if (rules_.per_slot()) return return_slots(args);
  std::vector<Message> sends, receives;
  for (int r = 0; r < rules_.size; ++r) {
    if (r == rules_.rank) continue;
    sends.push_back(message(r, args.fused_output, recv_begin(r), recv_counts_[r]));
    if (send_counts_[r] == 0) continue;
    receives.push_back(message(r, returned_, returned_begin(r), send_counts_[r]));
  }
  rules_.group->exchange(sends, receives, args.stream, what("combine"));
}

/// The same for rows of slots.
void RankMessages::return_slots(const ForwardArgs& args) const {
  std::vector<Message> sends, receives;
  std::int64_t sent = 0, back = 0;
  for (int r = 0; r < rules_.size; ++r) {
    if (r != rules_.rank) {
      sends.push_back(message(r, args.fused_output, sent, slots_in_[r]));
      receives.push_back(message(r, returned_, back, slots_out_[r]));
    }
    sent += slots_in_[r];
    back += slots_out_[r];
  }
  rules_.group->exchange(sends, receives, args.stream, what("combine"));
}

}  // namespace fusedmoe::layer
