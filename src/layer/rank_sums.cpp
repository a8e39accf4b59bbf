#include "layer/rank_sums.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/check.h"
#include "layer/backend.h"

namespace fusedmoe::layer {
namespace {

std::int64_t share_of(std::int64_t num_tokens, int num_ranks) {
  return (num_tokens + num_ranks - 1) / num_ranks;
}

/// Rank r's share of the tokens.
TensorView share_of(const TensorView& tensor, int num_ranks, int r) {
  const std::int64_t num_tokens = tensor.size(0), share = share_of(num_tokens, num_ranks);
  const auto begin_of = [&](int rank) { return std::min(num_tokens, rank * share); };
  return tensor.slice(0, begin_of(r), begin_of(r + 1));
}

/// Which rows a rank adds. Ranks tell each other before they read or send rows.
struct SumHeader {
  std::int64_t num_tokens, hidden;
  DType dtype;
  std::array<char, 64> what;  // step and layer; ends with zeros

  SumHeader() = default;
  SumHeader(const TensorView& rows, std::string_view step)
      : num_tokens(rows.size(0)), hidden(rows.size(1)), dtype(rows.dtype()), what{} {
    step.copy(what.data(), what.size() - 1);
  }
  bool operator==(const SumHeader&) const = default;
};

/// Throws Error unless all ranks add as many rows of the same kind.
void check_headers(const Communicator& ranks, std::span<const SumHeader> headers) {
  const auto describe = [&](std::size_t rank, const SumHeader& its) {
    return core::format("rank {} is at the {} with num_tokens {}, hidden {}, dtype {}",
                        ranks.global_rank(static_cast<int>(rank)), its.what.data(), its.num_tokens,
                        its.hidden, name(its.dtype));
  };
  for (std::size_t r = 1; r < headers.size(); ++r) {
    if (headers[r] == headers[0]) continue;
    // Compared with rank 0's, so that all ranks say the same.
    throw Error::communication(
        core::format("{}, but {}", describe(0, headers[0]), describe(r, headers[r])));
  }
}

/// What a rank lends the others.
struct Lent {
  const void* data;
  SumHeader header;
};

std::vector<const Lent*> check_lent(const Communicator& ranks, std::span<const void* const> lent) {
  std::vector<const Lent*> all;
  std::vector<SumHeader> headers;
  for (const void* each : lent) {
    all.push_back(static_cast<const Lent*>(each));
    headers.push_back(all.back()->header);
  }
  check_headers(ranks, headers);
  return all;
}

/// output = sum of the parts of each token, which lie one behind the other in `first` with `stride`
/// rows between a token's.
struct PartSum {
  TensorView source;  // of the parts' dtype
  TensorView output;
  bool accumulate = false;
  std::vector<const std::byte*> first;  // on the CPU, for each part: that of token 0
};

void sum_parts(const PartSum& sum, const RankSums::Buffers& buffers, std::int64_t stride,
               Stream stream) {
  const core::Backend& backend = backend_of(stream.device);
  const auto num_parts = static_cast<std::int64_t>(sum.first.size());
  const std::int64_t num_tokens = sum.output.size(0);
  core::ReduceArgs args;
  args.output = sum.output;
  args.fused_output = sum.source;
  args.router_weight_on_input = true;  // weights of one
  args.accumulate = sum.accumulate;
  args.stream = stream;
  if (!stream.device.is_cpu()) {
    args.topk_ids =
        TensorView(buffers.rows.data(), DType::kI32, {num_tokens, num_parts}, stream.device);
    backend.number_parts(args.topk_ids, stride, stream);
    return backend.reduce(args, args.topk_ids);
  }
  const std::int64_t row_bytes = bytes(sum.source.dtype(), sum.source.size(1));
  const std::byte** next = buffers.addresses;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (const std::byte* first : sum.first) *next++ = first + token * row_bytes;
  }
  args.row_addresses = buffers.addresses;
  args.rows_per_token = num_parts;
  backend.reduce(args, {});
}

}  // namespace

std::string peer_memory_of(const Communicator& ranks) {
  const std::string& slow = ranks.slow_peers();
  return slow.empty() ? std::string("peer memory") : "peer memory: " + slow;
}

void connect_for(std::string_view what, std::string_view why, Communicator& ranks) {
  ranks.connect(why.empty() ? std::string(what) : core::format("{} as messages ({})", what, why));
}

void share_gpu(Communicator& ranks, int lanes, const std::string& no_peer_memory) {
  if (no_peer_memory.empty()) return ranks.peers()->share_gpu(lanes);
  if (lanes == 1) return;
  throw Error::unsupported(
      Reason::kParallelConfig, "options.ranks.lanes",
      core::format("options.ranks.lanes {}: only through the memory of GPUs, but here not: {}",
                   lanes, no_peer_memory));
}

void RankSums::map_peers(std::int64_t hidden, std::uint32_t layer, const TensorView& placement,
                         int lanes) {
  const bool fits = bytes(DType::kF32, hidden) <= PeerMemory::most_sum_row_bytes();
  no_peer_memory_ = fits ? communicator_->map_peers(PeerMemory::head_bytes())
                         : core::format("rows of {} columns are too long", hidden);
  share_gpu(*communicator_, lanes, no_peer_memory_);
  by_peers_ = no_peer_memory_.empty();
  layer_ = layer;
  placement_ = placement.as<const std::uint32_t>();
}

void RankSums::connect() const {
  if (by_peers_) return;
  connect_for("sums of ranks with the same tokens", no_peer_memory_, *communicator_);
}

std::string RankSums::travel() const {
  if (by_peers_) return peer_memory_of(*communicator_);
  if (communicator_->device().is_cpu() && communicator_->can_lend()) return "read in place";
  const std::string why = no_peer_memory_.empty() ? "" : ": " + no_peer_memory_;
  return core::format("messages over {}{}", communicator_->backend(), why);
}

RankSums::Buffers::Buffers(core::WorkspaceCutter& cutter, const RankSums& sums,
                           std::int64_t num_tokens, std::int64_t hidden, DType dtype,
                           Device device) {
  if (sums.by_peers_) return;
  const int num_ranks = sums.communicator_->size();
  const std::int64_t share = share_of(num_tokens, num_ranks);
  parts = cutter.take(dtype, {share * num_ranks, hidden}, device);
  rows = cutter.take(DType::kI32, {share, num_ranks}, device);
  total = cutter.take(dtype, {num_tokens, hidden}, device);
  if (!device.is_cpu()) return;
  addresses = static_cast<const std::byte**>(cutter.take(
      static_cast<std::size_t>(std::max(num_tokens, share * num_ranks)) * sizeof(std::byte*)));
}

void RankSums::tell(const TensorView& partial, Stream stream) const {
  if (by_peers_)
    communicator_->peers()->tell_parts({layer_, placement_, partial, partial, false}, stream);
}

void RankSums::run(const TensorView& partial, const TensorView& output, bool accumulate,
                   const Buffers& buffers, Stream stream, std::string_view what, bool told) const {
  if (by_peers_) {
    PeerMemory& peers = *communicator_->peers();
    if (peers.has_ended()) communicator_->check();
    return peers.add_parts({layer_, placement_, partial, output, accumulate}, told, stream);
  }
  if (stream.device.is_cpu() && communicator_->can_lend()) {
    return run_in_place(partial, output, accumulate, buffers, stream, what);
  }
  const std::int64_t num_tokens = partial.size(0);
  const int num_ranks = communicator_->size(), rank = communicator_->rank();
  const std::int64_t share = share_of(num_tokens, num_ranks);
  const auto message = [](int peer, const TensorView& view) {
    return Message{peer, view.data(), static_cast<std::size_t>(view.nbytes())};
  };
  const TensorView mine = share_of(buffers.total, num_ranks, rank);
  std::vector<Message> sends, receives;
  // A rank without tokens waits for no rows, and notices by the headers that others have some. On
  // CUDA it would have to wait for the device to read them; NCCL's labels come with rows.
  SumHeader own(partial, what);
  std::vector<SumHeader> headers(static_cast<std::size_t>(num_ranks), own);
  for (int r = 0; stream.device.is_cpu() && r < num_ranks; ++r) {
    sends.push_back({r, &own, sizeof own});
    receives.push_back({r, &headers[r], sizeof own});
  }
  PartSum sum{buffers.parts, mine};
  for (int r = 0; r < num_ranks; ++r) {
    const TensorView part = buffers.parts.slice(0, r * share, r * share + mine.size(0));
    sends.push_back(message(r, share_of(partial, num_ranks, r)));
    receives.push_back(message(r, part));
    sum.first.push_back(part.as<const std::byte>());
  }
  communicator_->exchange(sends, receives, stream, what);
  try {
    check_headers(*communicator_, headers);
  } catch (const Error& error) {
    communicator_->abort(error.what());
    throw Error::communication(communicator_->status());  // the same on every rank
  }
  sum_parts(sum, buffers, share, stream);

  sends.clear();
  receives.clear();
  for (int r = 0; r < num_ranks; ++r) {
    if (r == rank) continue;
    sends.push_back(message(r, mine));
    receives.push_back(message(r, share_of(buffers.total, num_ranks, r)));
  }
  communicator_->exchange(sends, receives, stream, what);
  // One part for each token: a copy, or an addition, that also knows strides and dtypes.
  const auto* total = buffers.total.as<const std::byte>();
  sum_parts({buffers.total, output, accumulate, {total}}, buffers, num_tokens, stream);
}

/// Reads the partial sums and the shares of the total where the other threads have them.
void RankSums::run_in_place(const TensorView& partial, const TensorView& output, bool accumulate,
                            const Buffers& buffers, Stream stream, std::string_view what) const {
  const std::int64_t num_tokens = partial.size(0);
  const int num_ranks = communicator_->size(), rank = communicator_->rank();
  const std::int64_t share = share_of(num_tokens, num_ranks);
  const auto lent_here = [&](const TensorView& rows) {
    return Lent{rows.data(), SumHeader(rows, what)};
  };
  const auto rows_of = [&](const Lent& lent, int r) {
    const SumHeader& header = lent.header;
    const TensorView there(const_cast<void*>(lent.data), header.dtype,
                           {header.num_tokens, header.hidden});
    return share_of(there, num_ranks, r);
  };
  const auto add = [&](std::span<const void* const> lent) {
    PartSum sum{partial, share_of(buffers.total, num_ranks, rank)};
    for (const Lent* each : check_lent(*communicator_, lent)) {
      sum.first.push_back(rows_of(*each, rank).as<const std::byte>());
    }
    sum_parts(sum, buffers, share, stream);
  };
  const Lent parts = lent_here(partial), totals = lent_here(buffers.total);
  communicator_->lend("partial sums", &parts, add, what);
  const auto collect = [&](std::span<const void* const> lent) {
    const std::vector<const Lent*> all = check_lent(*communicator_, lent);
    for (int r = 0; r < num_ranks; ++r) {
      const auto* first = rows_of(*all[r], r).as<const std::byte>();
      sum_parts({partial, share_of(output, num_ranks, r), accumulate, {first}}, buffers, share,
                stream);
    }
  };
  communicator_->lend("totals", &totals, collect, what);
}

}  // namespace fusedmoe::layer
