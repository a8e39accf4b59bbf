// Sums over ranks that have the same tokens: what tensor parallelism ends with.
#pragma once

#include "core/workspace.h"
#include "fusedmoe/comm.h"
#include "moe/backend.h"

namespace fusedmoe::layer {

/// output = sum of `partial` over the ranks of a communicator, in rank order in f32, so that every
/// rank has the same bits. Each rank adds up a part of the tokens; the others read it where it is,
/// or get it in a message.
class RankSums {
 public:
  explicit RankSums(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}

  bool needed() const { return communicator_ && communicator_->size() > 1; }
  /// Scratch, cut in one go.
  struct Buffers {
    TensorView parts;  // (ranks * share, hidden): this rank's share of every rank's partial sums
    TensorView rows;   // (share, ranks) i32: numbers of the parts of a token
    const std::byte** addresses = nullptr;  // the same as addresses, on the CPU
    TensorView total;                       // (num_tokens, hidden) f32 or as the partial sums
    Buffers(core::WorkspaceCutter& cutter, std::int64_t num_tokens, std::int64_t hidden,
            DType dtype, int num_ranks, Device device);
  };
  /// partial: (num_tokens, hidden), contiguous. output: rows may have a stride.
  void run(const TensorView& partial, const TensorView& output, bool accumulate,
           const Buffers& buffers, Stream stream, std::string_view what) const;
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

 private:
  void run_in_place(const TensorView& partial, const TensorView& output, bool accumulate,
                    const Buffers& buffers, Stream stream, std::string_view what) const;
  std::shared_ptr<Communicator> communicator_;
};

}  // namespace fusedmoe::layer
