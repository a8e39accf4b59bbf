// Ranks: threads that the program starts itself, or processes that a launcher has started.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "fusedmoe/comm.h"

namespace fusedmoe::cli {

class Command;
class Option;

/// --ep, --tp and --dp of a subcommand.
struct RankOptionsOf {
  int ep = 0, tp = 1, dp = 0;
  std::string dispatch_dtype;
  bool no_peer_memory = false;
  void add_to(Command& command);
  /// --no-peer-memory, of subcommands that run.
  Option add_no_peer_memory(Command& command);
  /// Ranks that the layer is on; 1: none of the options was given.
  int num_ranks() const;
  /// --ep N alone: N ranks with tokens of their own. Throws Error where the numbers contradict.
  Deployment deployment(int rank) const;
  /// What --dispatch-dtype says; Error for what is no dtype.
  std::optional<DType> dispatched() const;
  /// For CommunicatorOptions. Throws Error where --no-peer-memory comes without ranks.
  std::optional<bool> peer_memory() const;
};

/// Where this process stands, if mpirun, torchrun or srun has started several.
const std::optional<Launch>& launched();

/// --dispatch-dtype, of subcommands that have no RankOptionsOf, too.
void add_dispatch_dtype(Command& command, std::string& value);
std::optional<DType> parse_dispatch_dtype(const std::string& text);

using RankFunction = std::function<void(std::shared_ptr<Communicator>)>;
/// Of every wait for another rank.
inline constexpr std::chrono::seconds kRankTimeout{60};

/// Calls function with this rank's communicator and waits for the other ranks to do the same. What
/// it throws ends the others, too.
void run_rank(const std::shared_ptr<Communicator>& communicator, const RankFunction& function);

/// Calls function with each rank's communicator, on a thread of its own. "cpu": in memory; "cuda":
/// rank i on cuda:i, with NCCL for messages; "cuda:i": all on one GPU, in its memory. Throws the
/// first rank's Error when one has failed; the others then end too. `peer_memory`: see
/// CommunicatorOptions.
void run_local_ranks(int num_ranks, const std::string& device, const RankFunction& function,
                     std::chrono::seconds timeout = kRankTimeout,
                     std::optional<bool> peer_memory = {});

/// The same, but where a launcher has started the ranks as processes, this one's alone: over MPI
/// or TCP, with "cuda" on the GPU of its number on the host. There messages go over NCCL; rows
/// between GPUs of one host go through their memory, see peer_memory.
void run_on_ranks(int num_ranks, const std::string& device, const RankFunction& function,
                  std::chrono::seconds timeout = kRankTimeout,
                  std::optional<bool> peer_memory = {});

/// CPU threads for each rank of this host.
int threads_of_rank(const Communicator& communicator);

}  // namespace fusedmoe::cli
