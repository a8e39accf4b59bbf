// What all steps of a layer across ranks have in common: who the ranks are, which of them have
// which experts, what travels and in which form.
#pragma once

#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fusedmoe/modular_kernel.h"
#include "layer/rank_sums.h"

namespace fusedmoe::layer {

/// How rows come to other ranks and back.
enum class RowWay {
  kInPlace,         ///< ranks read each other's memory
  kHostMessages,    ///< of the data plane of CPUs
  kDeviceMessages,  ///< of that of GPUs
  kPeerMemory,      ///< GPUs of one host read each other's memory
};

/// Goes from every rank to every other before the rows, with the sender's counts behind it, of
/// slots and of rows for each rank: ranks that do not do the same say so.
struct StepHeader {
  std::uint64_t step;
  std::uint32_t layer;
  std::int32_t topk;
  std::int64_t max_tokens;
  std::int64_t row_bytes;
  std::int64_t fixed_sizes;
  std::int64_t moves;  // of experts, before this step
  bool operator==(const StepHeader&) const = default;
};

/// Bytes of a header with the counts behind it.
std::int64_t record_bytes(int num_ranks);

struct RankRules {
  /// Collective: it may split the communicator.
  RankRules(const MoeConfig& config, const Context& context, bool allgather);

  /// The experts have moved, and each rank has as many as before: rewrites who has which in place,
  /// in the order of the stream. The caller waits for it.
  void move_experts(const ExpertPlacement& placement, Stream stream);
  /// What is done to rows of a forward of so many tokens at most before they travel, where experts
  /// read them as `read` says.
  Preparation sent_as(const Preparation& read, std::int64_t max_tokens) const;
  /// Whether rows are quantized before they travel in forwards of many tokens: the experts, which
  /// would make the same codes, must take them.
  bool may_quantize(const Preparation& read) const {
    return quantized_from > 0 && read.takes_quantized && !read.quant;
  }
  /// How rows travel, in words: "peer memory"; "messages over nccl: rank 1: peer_memory is false".
  /// `read`: what the experts leave to prepare.
  std::string rows_travel(const Preparation& read) const;
  bool per_slot() const { return combine == CombineMode::kPerSlot; }
  /// That of a forward of so many tokens at most.
  RowWay way_of(std::int64_t max_tokens) const {
    const bool is_more = way == RowWay::kPeerMemory && max_tokens > peer_tokens;
    return is_more ? RowWay::kDeviceMessages : way;
  }

  const Device device;
  const bool allgather;  // this is allgather_reducescatter
  const bool drop_rows;
  const std::optional<QuantKey> activations;  // of the scheme
  const std::optional<bool> quantizes_first;  // rows travel quantized; none: see sent_as()
  CombineMode combine;
  DType combine_dtype;
  const std::int64_t receive_capacity, max_tokens_per_rank;
  const std::int64_t num_local_experts;
  const double local_share;       // of all experts
  const std::int64_t num_logits;  // of a row, for monolithic experts; 0: ids travel
  const bool hooks;               // which want hidden states in one place
  const bool one_pass;            // the experts must see all received rows at once

  std::shared_ptr<Communicator> group;  // the ranks that rows go to
  int size = 1, rank = 0;               // in the group
  std::vector<int> members;             // of the group, as numbers of all ranks
  int num_all = 1;                      // ranks of the layer
  RankSums sums;                        // over the ranks that have the same tokens
  RowWay way = RowWay::kDeviceMessages;
  std::int64_t peer_tokens = 0;     // of peer memory: forwards of more tokens send messages
  std::int64_t quantized_from = 0;  // least_quantized(), of peer memory
  std::int64_t beside_from = 0;     // least_beside_experts()
  std::string no_peer_memory;       // why rows are messages between GPUs
  std::string no_messages;          // as in RowChoice
  bool shared = false;              // in place, and the ranks are processes that share memory
  std::uint32_t layer = 0;
  Tensor records;  // of messages: (num_ranks, record_bytes), on the host, which reads them there

  const ParallelConfig parallel;
  ExpertPlacement placement;
  std::uint64_t moves = 0;  // how often experts have moved

  // On the device, in one block, which stays where it is as long as the layer lives: graphs read
  // what there is when they run.
  Tensor replica_offsets, replicas, physical_ranks;
  Tensor version;           // (1) i32: moves
  Tensor expert_map;        // physical -> local; undefined: every rank has all
  std::vector<int> owners;  // ranks of the group that have experts
  bool ids_stay = true;     // physical experts have the numbers of logical ones, until they move
  std::int32_t nearest_rank = -1;

 private:
  void join(const std::shared_ptr<Communicator>& all);
  /// Why rows cannot go through the memory of GPUs; empty: they do, and it is chosen how.
  std::string map_peers(MoeConfig config, const RankOptions& options);
  void place_experts(Stream stream);
  struct Map {
    Tensor& tensor;
    std::span<const std::int32_t> numbers;
  };
  void write(std::initializer_list<Map> maps, Stream stream);

  Tensor maps_, written_;  // the block, and what is copied to it, from pinned memory
};

}  // namespace fusedmoe::layer
