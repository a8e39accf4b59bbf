#include "layer/host_messages.h"

#include "core/copy_rows.h"

namespace fusedmoe::layer {
namespace {

/// With fixed sizes padding rows are sent, too. Only packed rows have those.
bool goes_unpacked(const RankRules& rules, const StepSizes& sizes) {
  return !sizes.to_all && !sizes.fixed && rules.group->is_byte_stream();
}

std::int64_t rows_to_pack(const RankRules& rules, const StepSizes& sizes) {
  const bool none = sizes.to_all || goes_unpacked(rules, sizes);
  return none ? 0 : (rules.size - 1) * sizes.max_tokens;
}

/// Adds the rows from `begin` on to `messages`: one for all if nothing lies between them.
void add_rows(std::vector<Message>& messages, int peer, const TensorView& rows, std::int64_t begin,
              std::int64_t count) {
  const std::int64_t row_bytes = bytes(rows.dtype(), rows.size(1));
  const std::int64_t stride_bytes = bytes(rows.dtype(), rows.stride(0));
  const bool together = stride_bytes == row_bytes;
  for (std::int64_t row = begin; row < begin + count; row += together ? count : 1) {
    messages.push_back({peer, rows.as<std::byte>() + row * stride_bytes,
                        static_cast<std::size_t>(row_bytes * (together ? count : 1))});
  }
}

}  // namespace

HostMessages::HostMessages(const RankRules& rules, const StepSizes& sizes, void* memory)
    : RankMessages(rules, sizes, memory, rows_to_pack(rules, sizes)),
      unpacked_(goes_unpacked(rules, sizes)) {}

void HostMessages::send(const RowTensors& own, const ForwardArgs& args) {
  exchange_counts(args.stream);
  if (sizes_.fixed) set_fixed_counts();
  check_received();
  settle(args);
  const TensorView tokens = sizes_.to_all ? TensorView() : send_tokens_;
  const TensorView counts = sizes_.to_all ? TensorView() : counted_;
  RowTensors here = received_;
  if (received_at_) here.values = {};
  put_in_send_order(own, here, tokens, counts, own_part(), args.stream);
  if (!unpacked_) {
    put_in_send_order(own, all_rows_, tokens, counts, parts_of_others(), args.stream);
  }
  if (received_at_) {
    const auto* to_here =
        send_tokens_.as<const std::int32_t>() + rules_.rank * send_tokens_.size(1);
    locate_received();
    locate_kept(own.values, to_here, counted_.as<const std::int32_t>()[rules_.rank], rules_.rank);
  }
  if (unpacked_) exchange_unpacked(own, args.stream);
}

void HostMessages::receive(Stream stream) {
  if (!unpacked_) exchange_rows(nullptr, stream);
}

/// Sends rows from where they lie: all values that a rank gets, then all scales, ids and weights.
void HostMessages::exchange_unpacked(const RowTensors& rows, Stream stream) const {
  std::vector<Message> sends, receives;
  for (int r = 0; r < rules_.size; ++r) {
    if (r == rules_.rank) continue;
    const auto* tokens = send_tokens_.as<const std::int32_t>() + r * sizes_.max_tokens;
    const auto token_of = [&](std::int64_t i) { return tokens[i]; };
    const std::int64_t count = send_counts_[r];
    rows.each(received_, [&](const TensorView& from, const TensorView& to) {
      for (std::int64_t begin = 0, run = 0; begin < count; begin += run) {
        run = core::run_of(token_of, begin, count);
        add_rows(sends, r, from, tokens[begin], run);
      }
      add_rows(receives, r, to, recv_begin(r), recv_counts_[r]);
    });
  }
  rules_.group->exchange(sends, receives, stream, what("dispatch"));
}

/// Adds what give_back() has brought; this rank's own rows are where its experts left them.
void HostMessages::sum(const ForwardArgs& args) {
  const bool per_slot = rules_.per_slot();
  const std::int64_t row_bytes = fusedmoe::bytes(rules_.combine_dtype, sizes_.hidden);
  const Counts& own = per_slot ? slots_in_ : recv_counts_;
  std::vector<const std::byte*> first;
  std::int64_t slots_back = 0, own_begin = 0;
  for (int r = 0; r < rules_.size; ++r) {
    const bool here = r == rules_.rank;
    const std::int64_t back = per_slot ? slots_back : returned_begin(r);
    first.push_back((here ? args.fused_output : returned_).as<const std::byte>() +
                    (here ? own_begin : back) * row_bytes);
    slots_back += slots_out_[r];
    own_begin += own[r];
  }
  sum_rows(args, first);
}

}  // namespace fusedmoe::layer
