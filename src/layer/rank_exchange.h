// The two PrepareAndFinalize across ranks, "all2all" and "allgather_reducescatter". Both do the
// same in different amounts: tell the others how many rows come, send rows, let the experts run on
// what has arrived, send sums or rows back, add them up.
#pragma once

#include <atomic>
#include <functional>
#include <optional>

#include "fusedmoe/runtime.h"
#include "layer/exchange_layout.h"
#include "layer/rank_sums.h"

namespace fusedmoe::layer {

/// How many slots of rows that were sent to a rank name one of its experts, with routing at random:
/// each row has one such slot at least. `share`: the rank's, of all experts.
std::int64_t expected_local_slots(std::int64_t rows, std::int64_t topk, double share);

/// Rows that lie one after the other.
Message message(int peer, const TensorView& rows, std::int64_t begin, std::int64_t count);

/// Copies rows into send order: row i of a part is the row of `from` whose token is tokens[i].
void put_in_send_order(const RowTensors& from, const RowTensors& to, const TensorView& tokens,
                       const TensorView& counts, std::span<const core::RowPacking::Part> parts,
                       Stream stream);

/// A rank runs one step at a time, so what it counts in prepare may wait here for finalize.
class RankExchange final : public PrepareAndFinalize {
 public:
  /// Collective: it may split the communicator.
  RankExchange(const PrepareFinalizeDescriptor& descriptor, const MoeConfig& config,
               const Context& context, bool allgather);

  bool moves_rows() const override { return true; }
  ProblemSize problem_size(const ProblemSize& caller) const override;
  std::size_t workspace_bytes(const ProblemSize& caller,
                              const Preparation& preparation) const override;
  std::size_t shared_bytes(const ProblemSize& caller,
                           const Preparation& preparation) const override;
  void abandon(std::string_view reason) const noexcept override;

 private:
  /// What one step counts.
  struct Step {
    std::uint64_t number = 0;
    bool recorded = false;                               // by a graph
    std::vector<std::int64_t> send_counts, recv_counts;  // rows, for each rank
    std::vector<std::int64_t> slots_in, slots_out;       // per slot: expert rows, for each rank
    std::int64_t rows = 0;                               // received
    std::vector<std::int64_t> origins;                   // the same by all ranks; for hooks
    RowTensors own;                                      // rows for all, sent from where they are
    bool scattered = false;  // the sums over ranks are there, made by the data plane
    void* shared = nullptr;  // the layout, in memory that processes share
    std::int64_t recv_begin(int rank) const;
  };

  void do_start_prepare(ForwardArgs& args) const override;
  void do_finish_prepare(ForwardArgs& args) const override;
  void do_start_finalize(const ForwardArgs& args) const override;
  void do_finish_finalize(const ForwardArgs& args) const override;

  std::size_t layout_bytes(const ProblemSize& caller, const Preparation& preparation) const;
  ExchangeLayout layout(const ForwardArgs& args) const;
  void join(const ParallelConfig& parallel, const std::shared_ptr<Communicator>& all);
  void place_experts(const MoeConfig& config, const RankOptions& options);
  ExchangeSizes sizes(const ProblemSize& caller, const Preparation& preparation) const;
  Preparation sent_as(const Preparation& read) const;
  std::string what(std::string_view phase) const;
  void find_destinations(const ForwardArgs& args, const ExchangeLayout& layout) const;
  void count(const ForwardArgs& args, const ExchangeLayout& layout) const;
  void exchange_counts(const ExchangeLayout& layout, Stream stream) const;
  void count_for_all(const ExchangeLayout& layout, std::int32_t* counts) const;
  bool keeps_ids() const;
  void set_fixed_counts(const ExchangeLayout& layout) const;
  std::int64_t fixed_rows(std::int64_t max_tokens) const;
  using RowCounts = std::function<std::int64_t(int from, int to)>;
  void set_counts(const RowCounts& counts) const;
  void settle(const ForwardArgs& args, const ExchangeLayout& layout) const;
  void drop_rows(const ForwardArgs& args, const ExchangeLayout& layout) const;
  std::int64_t rows_for_all() const;
  void check_headers(std::span<const StepHeader> headers) const;
  using Parts = std::vector<core::RowPacking::Part>;
  Parts own_part() const;
  Parts parts_of_others(const ExchangeLayout& layout) const;
  void exchange_rows(const ExchangeLayout& layout, Stream stream) const;
  void convert(ForwardArgs& args, const ExchangeLayout& layout) const;
  void expand_slots(ForwardArgs& args, const ExchangeLayout& layout) const;
  void tell_origins(ForwardArgs& args, const TensorView& numbers,
                    std::span<const std::int64_t> counts) const;
  void return_rows(const ForwardArgs& args, const ExchangeLayout& layout) const;
  void return_slots(const ForwardArgs& args, const ExchangeLayout& layout) const;
  std::int64_t returned_begin(const ExchangeLayout& layout, int rank) const;
  StepHeader header(const ExchangeLayout& layout) const;
  void check_received() const;
  void route_own(ForwardArgs& args) const;
  RowTensors own_rows(const ForwardArgs& own, const ExchangeLayout& layout) const;
  // The steps on CUDA.
  bool gathers() const;
  bool fills_all(const ExchangeLayout& layout) const;
  void prepare_on_device(const ForwardArgs& args, const RowTensors& rows,
                         const ExchangeLayout& layout) const;
  void gather_rows(const ExchangeLayout& layout, Stream stream) const;
  void exchange_on_device(const ExchangeLayout& layout, Stream stream) const;
  void return_on_device(const ForwardArgs& args, const ExchangeLayout& layout) const;
  void sum_on_device(const ForwardArgs& args, const ExchangeLayout& layout) const;
  bool sums_into_output(const ForwardArgs& args, const ExchangeLayout& layout) const;
  TensorView number_all(const ExchangeLayout& layout, Stream stream) const;
  // The steps on the CPU.
  void receive_in_place(const RowTensors& rows, const ExchangeLayout& layout, Stream stream) const;
  void pack_on_host(const RowTensors& rows, const ExchangeLayout& layout, Stream stream) const;
  void exchange_unpacked(const RowTensors& rows, const ExchangeLayout& layout, Stream stream) const;
  LentRows lent(const RowTensors& rows, const ExchangeLayout& layout) const;
  RowTensors publish(const RowTensors& rows, const ExchangeLayout& layout, Stream stream) const;
  void locate_received(const ExchangeLayout& layout) const;
  void locate_lent(int rank, const LentRows& lent, const ExchangeLayout& layout) const;
  void locate_slots(ForwardArgs& args, const ExchangeLayout& layout, std::int64_t rows) const;
  void sum_in_place(const ForwardArgs& args, const ExchangeLayout& layout) const;
  void sum_messages(const ForwardArgs& args, const ExchangeLayout& layout) const;
  void sum_rows(const ForwardArgs& args, const ExchangeLayout& layout,
                std::span<const std::byte* const> first) const;
  void end_step() const noexcept;
  bool per_slot() const { return combine_ == CombineMode::kPerSlot; }

  const bool allgather_;  // this is allgather_reducescatter
  const bool drop_rows_;
  const bool to_all_;                          // all rows go to all ranks that have experts
  const std::optional<QuantKey> activations_;  // of the scheme
  const std::optional<bool> quantizes_first_;  // rows travel quantized; none: as experts read them
  const CombineMode combine_;
  const DType combine_dtype_;
  const bool fixed_sizes_;
  const std::int64_t receive_capacity_, max_tokens_per_rank_;
  const double local_share_;       // of all experts
  const std::int64_t num_logits_;  // of a row, for monolithic experts; 0: ids travel
  std::shared_ptr<Communicator> group_;
  bool whole_ = true;  // the group is all ranks
  const bool host_;
  bool shared_ = false;    // the ranks are processes that share memory
  bool in_place_ = false;  // ranks read each other's rows where they lie
  bool unpacked_ = false;  // messages take rows from where they lie
  const bool hooks_;       // which want hidden states in one place
  int size_ = 1, rank_ = 0;
  std::vector<int> members_;  // of the group, as numbers of all ranks
  RankSums sums_;             // over the ranks that have the same tokens
  std::uint32_t layer_ = 0;
  // On the device.
  Tensor replica_offsets_, replicas_, physical_ranks_;
  Tensor expert_map_;        // physical -> local; undefined: every rank has all
  std::vector<int> owners_;  // ranks of the group that have experts
  bool ids_stay_ = false;    // physical experts have the numbers of logical ones
  std::int32_t nearest_rank_ = -1;
  mutable Step step_;
  Tensor records_;  // ExchangeLayout::records, on the host
  mutable std::atomic_flag busy_;
};

}  // namespace fusedmoe::layer
