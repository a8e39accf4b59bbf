// Memory on the GPUs of one host that the kernels of all ranks map: the block of each rank is its
// *arena*. Rows travel in four calls for each step of a layer: publish() own rows, pull() those of
// others, tell_results() when the experts have left theirs at targets(), sum() what all have left
// here. Where sum() follows the experts at once it also tells the results. Ranks that have the same
// tokens add their parts of each by add_parts(). The host waits in none of them, and a CUDA graph
// can record all. What the ranks tell each other is in cuda/peers/protocol.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fusedmoe/tensor.h"
#include "moe/peer_blocks.h"
#include "moe/replica.h"
#include "moe/row_places.h"

namespace fusedmoe {

/// What all ranks agree about in a step, and where its parts lie in every arena: bytes from the
/// beginning. A rank publishes its own rows there, and the ids and weights of its tokens in the
/// arenas of all. Its experts leave what they compute in the arena of the rank that has the token.
///
/// Ids, weights and rows are read from the first signals of a step to the second ones, what sum()
/// reads is written from the first signals on. So where sizes change from step to step, neither may
/// lie where the other lay in the step before: one is in the first bytes of an arena, the other in
/// the last.
struct PeerStep {
  static constexpr int kMostTensors = 2;  ///< of rows: values and scales

  std::uint32_t layer = 0;
  /// Version of the placement, on the device: graphs tell the one that there is when they run.
  const std::uint32_t* placement = nullptr;
  std::int64_t most_tokens = 0;  ///< of any rank
  std::int64_t topk = 0, row_bytes = 0;
  std::int64_t ids = 0;                  ///< (ranks, most_tokens, topk) i32, physical experts
  std::int64_t weights = 0;              ///< (ranks, most_tokens, topk) f32
  std::int64_t rows[kMostTensors] = {};  ///< (most_tokens, columns of the tensor)
  /// What experts leave for this rank's tokens: a row of each rank for each of most_tokens, or with
  /// rows per slot one for each slot.
  std::int64_t results = 0;
  std::int64_t own_ids = 0;  ///< (most_tokens, topk) i32, physical experts of this rank's tokens
};

/// What steps of a layer need at most in each arena.
struct PeerBytes {
  std::size_t published = 0;  ///< from its beginning on: ids, weights and rows
  std::size_t results = 0;    ///< at its end
  std::size_t all() const { return published + results; }
};

/// What a rank shows the others.
struct PublishedRows {
  std::span<const TensorView> tensors;  ///< (num_tokens, columns) each; rows may have a stride
  TensorView ids;                       ///< (num_tokens, topk) i32, as the router numbers experts
  TensorView weights;                   ///< (num_tokens, topk) f32
  core::ReplicaTable replicas;          ///< of the physical experts, whose ids are published
};

/// Where the rows that name an expert of this rank are put. Row t of rank r becomes row
/// r * most_tokens + t; the others stay as they are.
struct PulledRows {
  /// (ranks * most_tokens, columns), as published; none: the experts bring rows from sources().
  std::span<const TensorView> tensors;
  TensorView expert_map;  ///< (num_physical) i32; undefined: all are here
  std::int64_t num_local_experts = 0;
  /// Of every slot, where defined: its number, or -1 if its expert is another rank's, and a weight
  /// of 1; (ranks * most_tokens, topk) i32 and f32.
  TensorView slot_rows, ones;
  bool counts_slots = false;  ///< those that name an expert of this rank, for local_slots()
};

/// Rows of results that lie in one place, to be left where others add them.
struct LeftRows {
  TensorView rows;        ///< (num_rows, hidden), contiguous: for all rows of all targets
  TensorView ids;         ///< (num_rows, k) i32: rows that name no local expert stay
  TensorView expert_map;  ///< as in PulledRows
  std::int64_t num_local_experts = 0;
};

/// How a rank adds what the experts of all ranks have left for its tokens.
struct PeerSum {
  TensorView output;  ///< (num_tokens, hidden)
  bool accumulate = false;
  DType results = DType::kF32;  ///< output has the same dtype, or f32; or results are f32
  TensorView physical_ranks;    ///< (num_physical) i32
  /// True: a row of results for each slot, weighted and added in slot order. Else a row for each
  /// token, added in rank order over the ranks that have an expert of it.
  bool per_slot = false;
  TensorView weights;  ///< (num_tokens, topk) f32; undefined: 1
};

/// How a rank reads the memory of a rank's GPU.
struct PeerLink {
  double bytes_per_second = 0;
  double word_us = 0;  ///< from asking for a word until it has come
};

/// The sum of what ranks with the same tokens have.
struct PeerParts {
  std::uint32_t layer = 0;
  const std::uint32_t* placement = nullptr;  ///< as in PeerStep
  TensorView partial;                        ///< (num_tokens, hidden), contiguous: this rank's part
  TensorView output;  ///< (num_tokens, hidden), of the same dtype or f32; or `partial` is f32
  bool accumulate = false;
};

class PeerMemory {
 public:
  /// `arenas`: mapped, of `bytes` or more, of which each rank uses as many. `patience`: of each
  /// wait.
  static std::shared_ptr<PeerMemory> make(const PeerGroup& group,
                                          std::chrono::milliseconds patience,
                                          std::shared_ptr<PeerBlocks> arenas, std::size_t bytes);

  virtual ~PeerMemory() = default;

  /// Bytes of each arena, its head included.
  virtual std::size_t bytes() const = 0;
  /// Set-up, by all ranks at the same time. Times reads of every arena, its own too: of 64 MiB,
  /// which takes 0.2 ms over NVLink, twice, and of words one after the other. Nobody may write
  /// there meanwhile.
  virtual void time_links() = 0;
  /// What that has found, for each rank.
  virtual const std::vector<PeerLink>& links() const = 0;

  /// This rank's arena.
  virtual std::byte* own() const = 0;
  /// Whether a step has gone through it: its address must stay.
  virtual bool is_used() const = 0;
  /// So many steps, each of an arena of its own, may wait on this GPU at the same time: kernels
  /// that wait leave multiprocessors to what ranks in other lanes wait for. The largest number that
  /// was given counts. Throws Error for a larger one behind the first step, which took more than
  /// its share, in graphs again and again.
  virtual void share_gpu(int lanes) = 0;
  virtual int lanes() const = 0;
  /// Why this rank's kernels have given up, for good; empty: they have not.
  virtual std::string failure() const = 0;
  /// Ends all waits of this rank's kernels, and all later ones.
  virtual void abort() noexcept = 0;
  /// Whether either has happened. Costs nothing.
  virtual bool has_ended() const = 0;

  // A step. Only enqueued.
  /// Shows the others this rank's tokens, of which there may be none, and tells them so. Throws
  /// Error where the step before has not come to sum(): both would lie at one place.
  virtual void publish(const PeerStep& step, const PublishedRows& rows, Stream stream) = 0;
  /// Waits for the tokens of all ranks, and fetches the rows that have an expert here.
  virtual void pull(const PeerStep& step, const PulledRows& rows, Stream stream) = 0;
  /// The rows that the ranks publish in the step, from pull() to tell_results(). `row_bytes`: of
  /// each tensor that travels.
  virtual RowSources sources(const PeerStep& step,
                             std::span<const std::int64_t> row_bytes) const = 0;
  /// Where experts leave what they compute, from pull() to tell_results(): row i for row i of those
  /// that pull() has brought, or per slot for each of their slots. `row_bytes`: of a row.
  virtual RowTargets targets(const PeerStep& step, std::int64_t row_bytes, bool per_slot) const = 0;
  /// Leaves rows there that experts have left in one place.
  virtual void leave(const LeftRows& rows, const RowTargets& targets, Stream stream) = 0;
  /// How many slots the last pull() has counted. The host waits until the ids of all ranks are
  /// here, not for rows. None: the step has failed.
  virtual std::optional<std::int64_t> local_slots(Stream stream) = 0;
  /// Tells the others that the experts have left their results. Behind the experts, with nothing
  /// between; may be left out where sum() follows them so, which then tells it.
  virtual void tell_results(const PeerStep& step, Stream stream) = 0;
  /// Waits for the results of all ranks, and adds them.
  virtual void sum(const PeerStep& step, const PeerSum& sum, Stream stream) = 0;

  // A sum, behind a kernel of ours that leaves `partial`. Only enqueued.
  /// Shows the others this rank's parts; of many the first. May be left out where add_parts()
  /// follows that kernel at once.
  virtual void tell_parts(const PeerParts& parts, Stream stream) = 0;
  /// output = or += the sum of the parts of all ranks: in rank order in f32, rounded to the dtype
  /// of the parts. A row has most_sum_row_bytes() at most. `told`: by tell_parts(), of the same.
  /// Throws Error where another sum has come between. One thread can drive ranks that share a GPU
  /// only if `told`, and one shot is enough: else such ranks need a thread and a stream each.
  virtual void add_parts(const PeerParts& parts, bool told, Stream stream) = 0;

  /// Of a communicator.
  static int most_ranks();
  /// Before what steps have in an arena: what ranks tell each other, and the parts of sums.
  static std::size_t head_bytes();
  static std::int64_t most_sum_row_bytes();
};

}  // namespace fusedmoe
