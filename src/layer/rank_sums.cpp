#include "layer/rank_sums.h"

#include <vector>

#include "layer/backend.h"

namespace fusedmoe::layer {
namespace {

std::int64_t share_of(std::int64_t num_tokens, int num_ranks) {
  return (num_tokens + num_ranks - 1) / num_ranks;
}

}  // namespace

RankSums::Buffers::Buffers(core::WorkspaceCutter& cutter, std::int64_t num_tokens,
                           std::int64_t hidden, DType dtype, int num_ranks, Device device) {
  const std::int64_t share = share_of(num_tokens, num_ranks);
  parts = cutter.take(dtype, {share * num_ranks, hidden}, device);
  rows = cutter.take(DType::kI32, {share, num_ranks}, device);
  total = cutter.take(dtype, {num_tokens, hidden}, device);
}

void RankSums::run(const TensorView& partial, const TensorView& output, bool accumulate,
                   const Buffers& buffers, Stream stream, std::string_view what) const {
  const std::int64_t num_tokens = partial.size(0);
  const int num_ranks = communicator_->size(), rank = communicator_->rank();
  const std::int64_t share = share_of(num_tokens, num_ranks);
  const auto begin_of = [&](int r) { return std::min(num_tokens, r * share); };
  const auto part = [&](const TensorView& tensor, int r) {
    return tensor.slice(0, begin_of(r), begin_of(r + 1));
  };
  const auto message = [](int peer, const TensorView& view) {
    return Message{peer, view.data(), static_cast<std::size_t>(view.nbytes())};
  };
  const TensorView mine = part(buffers.total, rank);
  std::vector<Message> sends, receives;
  for (int r = 0; r < num_ranks; ++r) {
    sends.push_back(message(r, part(partial, r)));
    receives.push_back(message(r, buffers.parts.slice(0, r * share, r * share + mine.size(0))));
  }
  communicator_->exchange(sends, receives, stream, what);

  const core::Backend& backend = backend_of(stream.device);
  const TensorView rows = buffers.rows.slice(0, 0, mine.size(0));
  const auto sum = [&](const TensorView& source, const TensorView& numbers,
                       const TensorView& target, bool add) {
    core::ReduceArgs args;
    args.output = target;
    args.fused_output = source;
    args.topk_ids = numbers;
    args.router_weight_on_input = true;  // weights of one
    args.accumulate = add;
    args.stream = stream;
    backend.reduce(args, numbers);
  };
  backend.number_parts(rows, share, stream);
  sum(buffers.parts, rows, mine, false);

  sends.clear();
  receives.clear();
  for (int r = 0; r < num_ranks; ++r) {
    if (r == rank) continue;
    sends.push_back(message(r, mine));
    receives.push_back(message(r, part(buffers.total, r)));
  }
  communicator_->exchange(sends, receives, stream, what);
  // One part for each token: a copy, or an addition, that also knows strides and dtypes.
  const TensorView whole(buffers.rows.data(), DType::kI32, {num_tokens, 1}, stream.device);
  backend.number_parts(whole, num_tokens, stream);
  sum(buffers.total, whole, output, accumulate);
}

}  // namespace fusedmoe::layer
