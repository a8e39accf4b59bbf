// The workspace of one step across ranks: what is packed, what arrives, what returns.
#pragma once

#include <type_traits>

#include "layer/prepared_rows.h"
#include "layer/rank_sums.h"

namespace fusedmoe::layer {

/// Goes from every rank to every other before the rows, with the sender's counts behind it: ranks
/// that do not do the same say so.
struct StepHeader {
  std::uint64_t step;
  std::uint32_t layer;
  std::int32_t topk;
  std::int64_t max_tokens;
  std::int64_t row_bytes;
  bool operator==(const StepHeader&) const = default;
};

/// What the layout depends on.
struct ExchangeSizes {
  std::int64_t num_tokens, max_tokens, topk, hidden;
  std::int64_t capacity;  // rows that may arrive
  int num_ranks, rank;
  std::int64_t num_logits;  // that travel with a row instead of ids; 0: ids do
  bool numbers;             // of tokens travel with their rows
  int sum_ranks;            // that have the same tokens; 1: nothing to add
  bool to_all, per_slot;
  bool packs;       // rows for other ranks are packed before they are sent
  bool host;        // the steps of rank_exchange_host.cpp
  bool in_place;    // ranks read each other's memory: nothing is packed, nothing returns
  bool shared;      // which is memory that processes share: all that others read lies there
  bool by_address;  // experts read rows where they lie: this rank's own are not copied
  bool converts;    // rows travel in another form than experts read
  DType combine_dtype;
};

/// The tensors that travel with the rows; row i of each belongs to row i. An undefined one does not
/// travel.
struct RowTensors {
  TensorView values, scales, ids, weights, logits, numbers;
  RowTensors slice(std::int64_t begin, std::int64_t end) const {
    const auto part = [&](const TensorView& all) {
      return all ? all.slice(0, begin, end) : TensorView();
    };
    return {part(values), part(scales), part(ids), part(weights), part(logits), part(numbers)};
  }
  /// Calls function(tensor of this, tensor of other) for what rows have.
  template <typename Function>
  void each(const RowTensors& other, const Function& function) const {
    if (values) function(values, other.values);
    if (scales) function(scales, other.scales);
    if (numbers) function(numbers, other.numbers);
    if (logits) return function(logits, other.logits);
    function(ids, other.ids);
    function(weights, other.weights);
  }
};

/// What a rank lends the others in dispatch.
struct LentRows {
  StepHeader header;
  TensorView counts;  // (num_ranks) i32: rows for each
  TensorView tokens;  // (num_ranks, stride) i32, of each; undefined: all of them, for every rank
  RowTensors rows;
};

/// And in combine: where the rows for each rank begin.
struct LentSums {
  const std::byte* rows;
  const std::int64_t* begins;
};

// They are assigned where memory has no object, and read by other processes.
static_assert(std::is_trivially_copyable_v<LentRows> && std::is_trivially_copyable_v<LentSums>);

struct ExchangeLayout {
  static std::int64_t record_bytes(int num_ranks);
  std::byte* record(int rank) const {
    return records.as<std::byte>() + rank * record_bytes(sizes.num_ranks);
  }
  /// `sent`: how rows travel. `read`: how the experts read them.
  ExchangeLayout(void* workspace, const ProblemSize& problem, const ExchangeSizes& sizes,
                 const Preparation& sent, const Preparation& read, Device device);

  core::WorkspaceCutter cutter;
  ExchangeSizes sizes;
  PreparedRows own;
  TensorView row_scales;    // (num_tokens, 1): one scale of all rows, where it is each rank's own
  TensorView physical_ids;  // (num_tokens, topk) i32
  TensorView send_rows;     // (num_tokens, num_ranks) i32
  TensorView own_rows;      // (num_tokens, 1) i32: 0, 1, 2, ...
  TensorView send_tokens;   // (num_ranks, max_tokens) i32
  TensorView records;       // (num_ranks, bytes) u8: of every rank its header and its counts
  TensorView send_counts;   // (num_ranks) i32: those of this rank's record
  TensorView slot_counts;   // (num_ranks) i32
  /// Those that arrive, and behind them, where rows are packed, those for other ranks: row
  /// packed_begin(r) + i goes to rank r.
  RowTensors rows;
  std::int64_t packed_begin(int rank) const {
    return sizes.capacity + (rank - (rank > sizes.rank ? 1 : 0)) * sizes.max_tokens;
  }
  RowTensors received;  // (capacity): those of rank 0, of rank 1, ...; shared and by_address the
                        // values give only shape and dtype
  const std::byte** received_at = nullptr;  // (capacity): values, by_address; null: nobody's
  TensorView read_values, read_scales;      // (capacity), or one scale; if sizes.converts
  Routing routed;                           // (capacity): written by experts that get logits
  // Per slot.
  TensorView slot_rows;    // (capacity, topk) i32: expert row of a received row's slot
  RowTensors expert_rows;  // (capacity * topk); without values by_address
  const std::byte** expert_rows_at = nullptr;  // (capacity * topk)
  TensorView returned_slots;                   // (num_tokens, topk) i32
  const std::byte** row_addresses = nullptr;   // (num_tokens, num_ranks or topk), on the host
  // Returned: of rank r from row r * max_tokens on; per slot one behind the other.
  TensorView returned;
  // In place.
  LentRows* lent_rows = nullptr;
  LentSums* lent_sums = nullptr;
  std::int64_t* lent_begins = nullptr;  // (num_ranks)
  // Shared.
  RowTensors published;  // (num_tokens): own rows that do not lie in this layout anyway
  TensorView output;     // (capacity, or times topk; hidden): the experts'
  TensorView partial;    // (num_tokens, hidden): this rank's part, where sum_ranks > 1
  std::optional<RankSums::Buffers> sums;
};

}  // namespace fusedmoe::layer
