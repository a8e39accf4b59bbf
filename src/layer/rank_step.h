// One step across ranks: what it counts, and its scratch memory. A step is made by start_prepare()
// and owned by the forward. It goes: find destinations (which token goes where), send, receive;
// behind the experts give back and sum. How rows travel is left to the four that derive:
// rows_in_place.h, host_messages.h, device_messages.h and peer_rows.h.
//
// Received rows lie by (source rank, token), and everything is summed in rank or slot order, so
// that no bit depends on which rank was first.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "layer/prepared_rows.h"
#include "layer/rank_rules.h"
#include "layer/rank_sums.h"
#include "layer/step_name.h"
#include "moe/backend.h"

namespace fusedmoe::layer {

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

/// What the buffers of a step depend on.
struct StepSizes {
  StepSizes(const RankRules& rules, const ProblemSize& caller, const Preparation& read);

  std::int64_t num_tokens, max_tokens, topk, hidden;
  DType dtype;
  RowWay way;
  Preparation sent, read;  // how rows travel, and how the experts read them
  bool fixed;              // every rank sends max_tokens rows to each that has experts
  bool to_all;             // all rows go to all ranks that have experts
  std::int64_t capacity;   // rows that may arrive
  bool converts;           // rows travel in another form than experts read
  bool by_address;         // experts read rows where they lie: this rank's own are not copied
  bool beside;             // experts bring rows from where they lie, and begin meanwhile
  bool to_targets;         // experts leave what they compute with the ranks that add it
  std::int64_t max_rows;   // of this rank's experts at a time; 0: all that can come
};

/// How many slots of rows that were sent to a rank name one of its experts, with routing at random:
/// each row has one such slot at least. `share`: the rank's, of all experts.
std::int64_t expected_local_slots(std::int64_t rows, std::int64_t topk, double share);

class RankStep : public TransportStep {
 public:
  /// Of the way that the rules name. With null memory only bytes() is meaningful.
  static std::unique_ptr<RankStep> make(const RankRules& rules, const StepSizes& sizes,
                                        void* memory);
  std::size_t bytes() const { return cutter_.used(); }
  /// Bytes of the largest step of a forward of so many tokens or of fewer. A forward of fewer
  /// tokens may need more: from some number of tokens on rows are quantized, and so narrower, and
  /// from another on they come beside the experts, and take no room here.
  static std::size_t workspace_bytes(const RankRules& rules, const ProblemSize& caller,
                                     const Preparation& read);
  void* memory() const { return memory_; }

  void start_prepare(ForwardArgs& args);
  void finish_prepare(ForwardArgs& args);
  void start_finalize(const ForwardArgs& args) { give_back(args); }
  void finish_finalize(const ForwardArgs& args);

 protected:
  using Counts = std::vector<std::int64_t>;
  using Parts = std::vector<core::RowPacking::Part>;

  /// `packed`: rows for other ranks that there is room for behind those received.
  RankStep(const RankRules& rules, const StepSizes& sizes, void* memory, std::int64_t packed);

  /// Counts, and sends this rank's rows.
  virtual void send(const RowTensors& own, const ForwardArgs& args) = 0;
  virtual void receive(Stream) {}
  /// Where received rows still lie: ForwardArgs::row_sources. Null: they have come.
  virtual const RowSources* row_sources() const { return nullptr; }
  /// Where what the experts compute goes: ForwardArgs::row_targets. Null: to one place.
  virtual const RowTargets* row_targets() const { return nullptr; }
  /// A row for each slot that names an expert of this rank, with weight 1: what the experts then
  /// leave are their rows themselves.
  virtual void expand_slots(ForwardArgs& args);
  /// Sends what the experts have left back to where the rows came from.
  virtual void give_back(const ForwardArgs& args) = 0;
  /// Adds the rows of each token.
  virtual void sum(const ForwardArgs& args) = 0;
  /// How many slots of the received rows name an expert of this rank.
  virtual std::int64_t local_slots(const ForwardArgs& args) const;
  /// False if rows go with the caller's ids, and nobody needs the tokens' destinations.
  virtual bool finds_destinations() const { return true; }
  /// Of this rank's tokens: what the placement says, without results.
  core::TokenDestinations destinations_of(const TensorView& topk_ids) const;

  const core::Backend& backend() const;
  std::string what(std::string_view phase) const { return name_.of(phase); }
  TensorView take(DType dtype, const Shape& shape) {
    return cutter_.take(dtype, shape, rules_.device);
  }
  const std::byte** take_addresses(std::int64_t rows);
  bool drops() const { return rules_.drop_rows && !sizes_.fixed; }

  // Counts.
  StepHeader header() const;
  void check_headers(std::span<const StepHeader> headers) const;
  void check_received();
  void count_for_all(std::int32_t* counts) const;
  void set_fixed_counts();
  void set_counts(const std::function<std::int64_t(int from, int to)>& counts);
  void settle(const ForwardArgs& args);
  std::int64_t rows_for_all() const;
  std::int64_t recv_begin(int rank) const;

  // Rows.
  Parts own_part() const;
  void put_in_send_order(const RowTensors& from, const RowTensors& to, const TensorView& tokens,
                         const TensorView& counts, std::span<const core::RowPacking::Part> parts,
                         Stream stream) const;

  // On the host (host_rows.cpp).
  void locate_received() const;
  void locate_kept(const TensorView& values, const std::int32_t* tokens, std::int64_t filled,
                   int rank) const;
  void sum_rows(const ForwardArgs& args, std::span<const std::byte* const> first) const;
  core::ReduceArgs reduce_args(const ForwardArgs& args) const;

  const RankRules& rules_;
  const StepSizes sizes_;
  void* const memory_;
  StepName name_;

  // Counted.
  Counts send_counts_, recv_counts_;  // rows, for each rank
  Counts slots_in_, slots_out_;       // per slot: expert rows, for each rank
  std::int64_t rows_ = 0;             // received

  core::WorkspaceCutter cutter_;
  PreparedRows own_;
  TensorView row_scales_;    // (num_tokens, 1): one scale of all rows, where it is each rank's own
  TensorView physical_ids_;  // (num_tokens, topk) i32
  TensorView send_rows_;     // (num_tokens, num_ranks) i32
  TensorView own_rows_;      // (num_tokens, 1) i32: 0, 1, 2, ...
  TensorView send_tokens_;   // (num_ranks, max_tokens) i32; undefined: nobody needs it
  TensorView counted_;       // (num_ranks) i32: rows for each, as the backend counts them
  TensorView slot_counts_;   // (num_ranks) i32
  /// Those that arrive, and behind them, where rows are packed, those for other ranks: row
  /// packed_begin(r) + i goes to rank r.
  RowTensors all_rows_;
  std::int64_t packed_begin(int rank) const {
    return sizes_.capacity + (rank - (rank > rules_.rank ? 1 : 0)) * sizes_.max_tokens;
  }
  RowTensors received_;                   // (capacity): those of rank 0, of rank 1, ...
  const std::byte** received_at_;         // (capacity): values, by_address; null: nobody's
  TensorView output_;                     // of the experts, where they must leave it; or undefined
  TensorView read_values_, read_scales_;  // (capacity), or one scale; if rows are converted
  Routing routed_;                        // (capacity): written by experts that get logits
  TensorView slot_rows_;                  // per slot: (capacity, topk) i32, rows of the slots
  RowTensors expert_rows_;                // (capacity * topk); without values by_address
  const std::byte** expert_rows_at_;      // (capacity * topk)
  TensorView returned_slots_;             // (num_tokens, topk) i32
  const std::byte** row_addresses_;       // (num_tokens, num_ranks or topk), on the host
  TensorView partial_;                    // (num_tokens, hidden): to be added to other ranks' sums
  std::optional<RankSums::Buffers> sums_;

 private:
  void route_own(ForwardArgs& args) const;
  void find_destinations(const ForwardArgs& args) const;
  RowTensors own_rows(const ForwardArgs& own) const;
  void drop_rows(const ForwardArgs& args);
  void convert(ForwardArgs& args) const;
  void locate_slots(ForwardArgs& args, std::int64_t rows) const;
  void tell_origins(ForwardArgs& args, const TensorView& numbers, const Counts& counts);

  Counts origins_;  // rows of each rank of the layer; for hooks
};

/// Rows that lie one after the other.
Message message(int peer, const TensorView& rows, std::int64_t begin, std::int64_t count);

}  // namespace fusedmoe::layer
