// The signals by which the ranks of one host take a step together, in memory that all of them map.
// Host and device run the same functions: threads test on the host what kernels do.
//
// A step has two rounds. In each a rank sends a signal to every rank and waits for theirs, so
// nobody is through a round before all have come to it. Behind the first round the rows of every
// rank stand in its arena: others read them until the second one, and then they may be written
// again. Behind the second round an arena has what the experts of all ranks have left there for the
// tokens of its rank, which reads it before it sends its next signals. So one buffer for each is
// enough.
//
// A sum over ranks that have the same tokens has rounds of its own. In the first every rank has
// left its part of each token. If these are few bytes, every rank adds up all tokens, and there is
// no second round: when a rank comes to the next sum, it has read all parts of this one. So parts
// lie in two buffers by turns, and a rank may be one sum ahead of those that still wait. Otherwise
// each rank adds up a share of the tokens, and in the second round the others read these totals.
// Sums in pieces are several such sums, where a rank tells its parts of a piece when it has the
// totals of the one before and may still be reading them: so totals lie in two buffers, too.
//
// Nobody waits for ever. Who gives up a wait, because a rank is late, is in another step, or the
// host says so, writes down why and sends no signal any more: `dead`.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/host_device.h"

// Before a template whose parameter runs either on the host or on the device.
#ifdef __CUDACC__
#define FUSEDMOE_HD_EITHER _Pragma("nv_exec_check_disable")
#else
#define FUSEDMOE_HD_EITHER
#endif

namespace fusedmoe::cuda {

inline constexpr int kMostPeers = 16;

enum class Round : std::uint32_t { kDispatch, kReturn, kParts, kTotals };
inline constexpr int kRounds = 4;

/// What ranks must agree about in a step.
struct StepKey {
  std::uint32_t layer = 0;
  std::uint32_t most_tokens = 0;  ///< of any rank
  std::uint32_t topk = 0;         ///< 0: a sum
  std::uint32_t row_bytes = 0;    ///< of a row as it travels
  std::uint32_t placement = 0;    ///< version: every commit of moved experts raises it

  constexpr bool operator==(const StepKey&) const = default;
};

/// FNV-1a over the members, a word at a time, with the bits mixed once more at the end.
FUSEDMOE_HD constexpr std::uint32_t hash(const StepKey& key) {
  std::uint32_t sum = 2166136261U;
  for (const std::uint32_t word :
       {key.layer, key.most_tokens, key.topk, key.row_bytes, key.placement}) {
    sum = (sum ^ word) * 16777619U;
    sum ^= sum >> 15;
  }
  return sum;
}

/// What one rank tells another in a round: a line of the other's arena.
struct alignas(64) SignalLine {
  std::uint64_t flag = 0;  ///< the step's number, and in the lower half the hash of the key
  StepKey key;             ///< for the text of an error
};

/// The beginning of a block of memory that all ranks map.
struct BlockHead {
  std::uint64_t mark = 0;                ///< tells, when blocks are mapped, whose this is
  std::uint64_t found[kMostPeers] = {};  ///< by its rank alone: the marks of all
};

/// The beginning of a rank's arena.
struct ArenaHead : BlockHead {
  SignalLine lines[kRounds][kMostPeers];  ///< written by the ranks, each its own
  /// Of this rank alone:
  /// The step that is in round r, or comes to it next, has the number before[r] + 1; behind
  /// 2^32 - 1 numbers start again at 0. Written only while the rank is in the other round: who
  /// signals or waits finds it unchanged, also a kernel that begins while the one before still
  /// runs. Sums have numbers of their own, those of kParts: see end_sum().
  std::uint32_t before[kRounds] = {};
  std::uint32_t dead = 0;
  std::uint32_t late = 0, different = 0;  ///< ranks, as bits: those that a wait was given up for
  std::uint32_t told = 0;                 ///< the host ended a wait
  std::uint32_t ticket = 0;               ///< blocks of the kernel that runs that are done
  std::uint32_t counted = 0;              ///< the same of pull, which publish may overlap
  std::uint32_t slots = 0;                ///< of all ranks' tokens that these have counted
};

/// Why a rank gave up, for the host to read: pinned memory.
struct FailureRecord {
  std::uint64_t is_written = 0;  ///< all else stands before it
  std::uint32_t step = 0, round = 0;
  std::uint32_t late = 0, different = 0, told = 0;  ///< as in ArenaHead
  StepKey mine, theirs;                             ///< of the first rank that is different
  std::uint32_t their_step = 0;
};

/// The ranks as one of them sees them.
struct Peers {
  ArenaHead* arenas[kMostPeers] = {};  ///< as this rank maps them
  int rank = 0;
  int size = 1;

  FUSEDMOE_HD ArenaHead& own() const { return *arenas[rank]; }
};

/// When a wait ends without its signal.
struct Patience {
  std::uint64_t nanoseconds = 0;         ///< of one wait
  const std::uint32_t* abort = nullptr;  ///< not 0: the host ends all waits
};

FUSEDMOE_HD constexpr std::uint64_t flag_of(std::uint32_t step, const StepKey& key) {
  return std::uint64_t{step} << 32 | hash(key);
}

// `Words` is how memory is read and written where the code runs, for all threads that map it:
//   load(p), store(p, word)          of 32 bits, each by itself whole
//   load_acquire(p), store_release(p, word)  of 64 bits: what stands before the store is seen
//                                            behind the load
//   set_bits(p, bits)                of 32 bits, at once; returns what was there
//   nanoseconds()                    a clock
//   pause()                          between two looks

/// The number for the rank's next return: behind the waits of the dispatch, ahead of the signals of
/// the return. By one thread.
FUSEDMOE_HD_EITHER
template <typename Words>
FUSEDMOE_HD void begin_return(const Peers& peers) {
  std::uint32_t(&before)[kRounds] = peers.own().before;
  Words::store(&before[static_cast<int>(Round::kReturn)],
               Words::load(&before[static_cast<int>(Round::kDispatch)]));
}
/// The number for the rank's next dispatch: behind begin_return(), ahead of the signals of that
/// dispatch. By one thread.
FUSEDMOE_HD_EITHER
template <typename Words>
FUSEDMOE_HD void end_step(const Peers& peers) {
  std::uint32_t(&before)[kRounds] = peers.own().before;
  Words::store(&before[static_cast<int>(Round::kDispatch)],
               Words::load(&before[static_cast<int>(Round::kReturn)]) + 1);
}
/// Goes on to the number of the rank's next sum. One thread calls it, when all blocks of this rank
/// have read `before`.
FUSEDMOE_HD_EITHER
template <typename Words>
FUSEDMOE_HD void end_sum(const Peers& peers, std::uint32_t before) {
  Words::store(&peers.own().before[static_cast<int>(Round::kParts)], before + 1);
}

/// Tells a rank that this one, which is not dead, has come to the round. By any thread, behind all
/// that the rank may read then. `before`: as in ArenaHead.
FUSEDMOE_HD_EITHER
template <typename Words>
FUSEDMOE_HD void send_signal(const Peers& peers, Round round, const StepKey& key, int to,
                             std::uint32_t before) {
  SignalLine& line = peers.arenas[to]->lines[static_cast<int>(round)][peers.rank];
  Words::store_release(&line.flag, flag_of(before + 1, key));
  // The flag does not wait for its key: who wants that sees by the hash whether it has come.
  Words::store(&line.key.layer, key.layer);
  Words::store(&line.key.most_tokens, key.most_tokens);
  Words::store(&line.key.topk, key.topk);
  Words::store(&line.key.row_bytes, key.row_bytes);
  Words::store(&line.key.placement, key.placement);
}
/// The same by who has not looked yet.
FUSEDMOE_HD_EITHER
template <typename Words>
FUSEDMOE_HD void send_signal(const Peers& peers, Round round, const StepKey& key, int to) {
  const ArenaHead& own = peers.own();
  const std::uint32_t dead = Words::load(&own.dead);
  const std::uint32_t before = Words::load(&own.before[static_cast<int>(round)]);
  if (dead == 0) send_signal<Words>(peers, round, key, to, before);
}

/// By each thread of a team of at least as many as there are ranks, behind what the experts have
/// left: this rank's signals of the return.
FUSEDMOE_HD_EITHER
template <typename Words>
FUSEDMOE_HD void tell_return(const Peers& peers, const StepKey& key, int thread) {
  if (thread < peers.size) send_signal<Words>(peers, Round::kReturn, key, thread);
  if (thread == 0) end_step<Words>(peers);
}

/// The key that belongs to a flag.
FUSEDMOE_HD_EITHER
template <typename Words>
FUSEDMOE_HD StepKey key_of(const SignalLine& line, std::uint64_t flag) {
  constexpr int kTries = 100000;  // it is on its way
  StepKey key;
  for (int tries = 0; tries < kTries; ++tries) {
    key = {Words::load(&line.key.layer), Words::load(&line.key.most_tokens),
           Words::load(&line.key.topk), Words::load(&line.key.row_bytes),
           Words::load(&line.key.placement)};
    if (hash(key) == static_cast<std::uint32_t>(flag)) break;
    Words::pause();
  }
  return key;
}

/// What a flag says of its rank.
enum class Arrival { kNotYet, kHere, kDifferent };
FUSEDMOE_HD constexpr Arrival arrival(Round round, std::uint64_t flag, std::uint32_t before,
                                      const StepKey& key) {
  if (flag == flag_of(before + 1, key)) return Arrival::kHere;
  const std::uint32_t ahead = static_cast<std::uint32_t>(flag >> 32) - before;
  if (ahead == 1) return Arrival::kDifferent;
  // Through with this sum, it has found that the keys are the same.
  if (round == Round::kParts && ahead == 2) return Arrival::kHere;
  // Many sums may have had no totals.
  return ahead == 0 || round == Round::kTotals ? Arrival::kNotYet : Arrival::kDifferent;
}

/// Waits until a rank has come to the round. False: the step has failed; then some thread must
/// call give_up() behind all waits of its block. `before`: as in ArenaHead. `asks_host`: looks at
/// the host's word, which is far. Those of one block do, as a thousand looks at the same time take
/// a millisecond; the others see that these have given up.
FUSEDMOE_HD_EITHER
template <typename Words>
FUSEDMOE_HD bool await_signal(const Peers& peers, Round round, const StepKey& key, int from,
                              std::uint32_t before, const Patience& patience,
                              bool asks_host = true) {
  constexpr int kLooks = 64;  // between those at the clock and at the words that end a wait
  ArenaHead& own = peers.own();
  const std::uint64_t* flag = &own.lines[static_cast<int>(round)][from].flag;
  const std::uint32_t dead = Words::load(&own.dead);
  std::uint64_t seen = Words::load_acquire(flag);
  if (dead != 0) return false;
  const std::uint32_t bit = 1U << from;
  const std::uint64_t begin = Words::nanoseconds();
  for (int looks = 1;; ++looks) {
    const Arrival now = arrival(round, seen, before, key);
    if (now == Arrival::kHere) return true;
    if (now == Arrival::kDifferent) {
      Words::set_bits(&own.different, bit);
      return false;
    }
    if (looks % kLooks == 0) {
      if (Words::load(&own.dead) != 0) return false;
      if (asks_host && Words::load(patience.abort) != 0) {
        Words::set_bits(&own.told, 1);
        return false;
      }
      if (Words::nanoseconds() - begin > patience.nanoseconds) {
        Words::set_bits(&own.late, bit);
        return false;
      }
    }
    Words::pause();
    seen = Words::load_acquire(flag);
  }
}

/// Ends this rank's part for good. The first of several callers writes down why.
FUSEDMOE_HD_EITHER
template <typename Words>
FUSEDMOE_HD void give_up(const Peers& peers, Round round, const StepKey& key, std::uint32_t before,
                         FailureRecord& record) {
  ArenaHead& own = peers.own();
  if (Words::set_bits(&own.dead, 1) != 0) return;
  Words::store(&record.step, before + 1);
  Words::store(&record.round, static_cast<std::uint32_t>(round));
  Words::store(&record.late, Words::load(&own.late));
  const std::uint32_t different = Words::load(&own.different);
  Words::store(&record.different, different);
  Words::store(&record.told, Words::load(&own.told));
  record.mine = key;
  for (int from = 0; from < peers.size; ++from) {
    if ((different >> from & 1) == 0) continue;
    const SignalLine& line = own.lines[static_cast<int>(round)][from];
    const std::uint64_t flag = Words::load_acquire(&line.flag);
    record.their_step = static_cast<std::uint32_t>(flag >> 32);
    record.theirs = key_of<Words>(line, flag);
    break;
  }
  Words::store_release(&record.is_written, 1);
}

/// What a record that is written says of its rank: "rank 1 waited 500 ms for ranks 0, 3 in the
/// dispatch of layer 4"; "rank 2 does not match rank 1 in the return of layer 4: rank 1 has layer
/// 4, it layer 5". `names`: the number to print for each rank; empty: its own.
std::string to_string(const FailureRecord& record, int rank, const Patience& patience,
                      std::span<const int> names = {});

}  // namespace fusedmoe::cuda
