// Sums over ranks that have the same tokens: what tensor parallelism ends with.
#pragma once

#include "core/workspace.h"
#include "fusedmoe/comm.h"
#include "moe/backend.h"
#include "moe/peer_memory.h"

namespace fusedmoe::layer {

/// What rows_travel() says of ranks that read each other's memory: "peer memory". If some of these
/// reads are slow, ": " and which.
std::string peer_memory_of(const Communicator& ranks);
/// Communicator::connect() for what goes as messages. `why`: not by peer memory; may be empty.
void connect_for(std::string_view what, std::string_view why, Communicator& ranks);

/// Leaves each lane its share of the GPU. Throws Error where several would need messages, or a
/// layer with fewer has run. `no_peer_memory`: why rows or sums are messages; empty: they are not.
void share_gpu(Communicator& ranks, int lanes, const std::string& no_peer_memory);

/// output = sum of `partial` over the ranks of a communicator, in rank order in f32, so that every
/// rank has the same bits. Each rank adds up a part of the tokens; the others read it where it is,
/// or get it in a message. GPUs of one host that read each other's memory do it with one kernel.
class RankSums {
 public:
  explicit RankSums(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}
  /// Collective, on GPUs: lets sums of rows of `hidden` columns go through their memory if that is
  /// possible. `layer` and `placement`: as in PeerStep. `lanes`: see share_gpu().
  void map_peers(std::int64_t hidden, std::uint32_t layer, const TensorView& placement, int lanes);
  /// Where parts are messages, all ranks of the communicator must be able to send some.
  void connect() const;

  bool needed() const { return communicator_ && communicator_->size() > 1; }
  /// How parts of sums come to other ranks, as PrepareAndFinalize::rows_travel() says it.
  std::string travel() const;
  /// Scratch, cut in one go.
  struct Buffers {     // none with peer memory
    TensorView parts;  // (ranks * share, hidden): this rank's share of every rank's partial sums
    TensorView rows;   // (share, ranks) i32: numbers of the parts of a token
    const std::byte** addresses = nullptr;  // the same as addresses, on the CPU
    TensorView total;                       // (num_tokens, hidden) f32 or as the partial sums
    Buffers(core::WorkspaceCutter& cutter, const RankSums& sums, std::int64_t num_tokens,
            std::int64_t hidden, DType dtype, Device device);
  };
  /// May come before run(), which is `told` so: what the others wait for is then on its way while
  /// something else is enqueued.
  void tell(const TensorView& partial, Stream stream) const;
  /// partial: (num_tokens, hidden), contiguous, left by a kernel of ours. output: rows may have a
  /// stride.
  void run(const TensorView& partial, const TensorView& output, bool accumulate,
           const Buffers& buffers, Stream stream, std::string_view what, bool told = false) const;
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

 private:
  void run_in_place(const TensorView& partial, const TensorView& output, bool accumulate,
                    const Buffers& buffers, Stream stream, std::string_view what) const;
  std::shared_ptr<Communicator> communicator_;
  std::uint32_t layer_ = 0;
  const std::uint32_t* placement_ = nullptr;
  bool by_peers_ = false;
  std::string no_peer_memory_;  // why parts are messages between GPUs
};

}  // namespace fusedmoe::layer
