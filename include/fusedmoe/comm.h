// How the ranks of a layer talk (Communicator). docs/expert-parallel.md follows a token from rank
// to rank and back.
//
// A communicator has two planes. The control plane moves short texts between hosts and has a
// deadline for everything; the data plane moves rows. The control plane works on when the data
// plane is stuck: that is how a missing rank gets its name. No header of CUDA, NCCL or MPI here.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/export.h"
#include "fusedmoe/parallel.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// Texts by name, which all ranks of a job can post and read: what a communicator needs to find its
/// ranks, to agree, and to say what went wrong. An engine may implement it over its own store. A
/// name keeps its first text. Calls may come from several threads. A communicator shares its plane
/// only with the communicators that split() makes of it. If making a communicator fails, a rank
/// posts the text "failure" to its plane, and the plane cannot be used again.
class FUSEDMOE_API ControlPlane {
 public:
  virtual ~ControlPlane() = default;
  virtual void post(const std::string& name, std::string_view text) = 0;
  /// Waits until somebody has posted it; none: nobody did within the time.
  virtual std::optional<std::string> read(const std::string& name,
                                          std::chrono::milliseconds timeout) = 0;
  /// All ranks have read it: the plane need not keep it. Nobody posts that name again. A plane that
  /// does nothing here grows with every gather.
  virtual void forget(const std::string& name);
  /// Throws an Error with the text of "failure" if a rank has posted that: why it has given up.
  void check_failure();
  /// As read(), but looks for that failure every few milliseconds, too.
  std::optional<std::string> read_or_fail(const std::string& name,
                                          std::chrono::milliseconds timeout);
  /// The rank that keeps the texts, while it does not answer: then nobody else is late. A number
  /// of the whole communicator.
  virtual std::optional<int> silent_rank() const { return std::nullopt; }
};

/// Bytes that go to a peer or come from it. Both sides know how many.
struct Message {
  int peer = 0;
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// A part of `bytes` for each rank, one after the other. This rank's own part is at `own`, or,
/// where that is null, already at its place.
struct Gather {
  void* data = nullptr;
  std::size_t bytes = 0;
  const void* own = nullptr;
};

/// What a data plane asks while it waits.
class FUSEDMOE_API Waiting {
 public:
  virtual ~Waiting() = default;
  /// The step, for errors: "dispatch of step 12 of layer 3".
  virtual std::string_view what() const = 0;
  /// To be called every few milliseconds. Throws Error when the deadline has passed, naming
  /// `late`, or when a rank has given up.
  virtual void check(std::span<const int> late) = 0;
  /// Bytes have come or gone: the deadline runs from here.
  virtual void moved() {}
};

/// Moves bytes between ranks. Calls come from one thread at a time.
class FUSEDMOE_API DataPlane {
 public:
  virtual ~DataPlane() = default;
  /// "threads", "tcp", "mpi", "nccl"
  virtual std::string_view name() const = 0;
  /// Where the memory of messages lies.
  virtual Device device() const { return {}; }
  /// Collective over all ranks: connects them, where that was put off until messages are needed.
  virtual void connect() {}
  /// Sends and receives everything; the messages between two ranks keep their order. On the CPU it
  /// is done when the call returns, on CUDA it is enqueued on `stream`. Messages of no bytes do
  /// not travel. Throws Error where a peer sends another number of bytes than is expected.
  virtual void exchange(std::span<const Message> sends, std::span<const Message> receives,
                        Stream stream, Waiting& waiting) = 0;
  /// Whether the messages from one rank to another in an exchange are one stream of bytes, which
  /// the sender may cut into other messages than the receiver. Else both name the same messages.
  virtual bool is_byte_stream() const { return false; }
  /// Whether it has the two collectives below, for parts of one size.
  virtual bool has_collectives() const { return false; }
  /// Fills the buffers.
  virtual void all_gather(std::span<const Gather> buffers, Stream stream, Waiting& waiting);
  /// `data` holds `count` elements for every rank; `out` becomes the sum over the ranks of those
  /// for this one, in any order of the ranks.
  virtual void reduce_scatter(const void* data, void* out, std::int64_t count, DType dtype,
                              Stream stream, Waiting& waiting);
  /// Whether ranks can read each other's memory, so that lend() works.
  virtual bool can_lend() const { return false; }
  /// Gets what every peer lends, in the order of the peers.
  using Reader = std::function<void(std::span<const void* const> lent)>;
  /// Lends `mine` to the peers, which do the same, waits for all of them and calls `read`. Returns
  /// when every peer has read: until then `mine`, and what it points to, must not change.
  virtual void lend(const void* mine, std::span<const int> peers, const Reader& read,
                    Waiting& waiting);
  /// Ends what is in flight: no exchange comes any more.
  virtual void abort() noexcept {}
};

struct CommunicatorOptions {
  /// Of every wait; positive, at most a year.
  std::chrono::milliseconds timeout{30000};
  Device device = {};  ///< of this rank
  /// Processes of one host may share memory, see Communicator::share_memory(); the same on all.
  bool shared_memory = true;
  /// Whether rows between GPUs of one host go through their memory, see Communicator::map_peers().
  /// None, the default: where each rank has a GPU to itself, for as many tokens as that is
  /// predicted to be faster for (rank_costs() in simulation.h). False on one rank: all send
  /// messages. True: rows of every forward go so, also where ranks share a GPU. Kernels of a rank
  /// wait for those of another on that GPU, so one thread must begin the steps of all ranks before
  /// it computes any, or each rank needs a process of its own. There each rank needs a thread and a
  /// stream of its own for sums of more than 6 MiB, for those behind a transport, and for those in
  /// two shots (docs/expert-parallel.md). Where rows or sums go so, by default too, steps of one
  /// communicator that overlap are an Error, and steps or replays of graphs on several streams must
  /// be ordered by events of the caller.
  std::optional<bool> peer_memory;
};

class PeerMemory;  // internal: src/moe/peer_memory.h
class PeerBlocks;  // internal: src/moe/peer_blocks.h
struct PeerBytes;  // internal: src/moe/peer_memory.h

/// The ranks of a layer, seen from one of them. A failure is final: the rank that notices it posts
/// the reason, and from then on every call of every rank throws an Error with that reason. Make a
/// new communicator to go on. One thread at a time, except abort() and status().
class FUSEDMOE_API Communicator {
 public:
  /// Collective: all ranks make theirs. If `data` is null, nothing goes as messages. Else the
  /// communicator calls data->connect() here, or, where rows may go through the memory of GPUs,
  /// when messages are first needed.
  Communicator(int rank, int size, std::shared_ptr<ControlPlane> control,
               std::shared_ptr<DataPlane> data, CommunicatorOptions options = {});
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int size() const;
  /// Which rank of the original communicator, before any split(), is rank `r` of this one. Without
  /// a split that is `r`. Errors name ranks by these numbers.
  int global_rank(int r) const;
  Device device() const;
  /// Name of the data plane, whose ranks may not be connected yet; "none".
  std::string_view backend() const;
  std::chrono::milliseconds timeout() const;
  /// Whether CommunicatorOptions::peer_memory is true on a rank: the same on all.
  bool wants_peer_memory() const;
  /// Ranks on the host of this rank, with itself.
  const std::vector<int>& ranks_of_host() const;
  /// Whether rank `a` can read rank `b`'s memory directly: threads of one process, or two GPUs.
  bool peer_access(int a, int b) const;

  /// Waits for all ranks.
  void barrier();
  /// Every rank's text, of at most 64 MiB, over the control plane. A longer one is an Error of all
  /// ranks, and the communicator stays usable. `what` names the step in errors.
  std::vector<std::string> gather(std::string_view text, std::string_view what);
  /// Calls `step` on every rank, and returns when all have done so. If it throws on a rank, all
  /// throw an Error with that rank's text, at once instead of at the deadline of a later step; the
  /// communicator stays usable. For what can fail on one rank alone, such as reading its weights:
  /// nothing in `step` may wait for other ranks. `what` names the step in errors.
  void together(const std::function<void()>& step, std::string_view what);
  /// The ranks that give the same color, in order. Collective over all ranks of this one.
  std::shared_ptr<Communicator> split(int color);
  /// As split(), but ranks that were a part before get the same one: what layers have in it they
  /// share. It lives as long as this communicator.
  std::shared_ptr<Communicator> shared_part(int color);
  /// A second communicator of the same ranks, whose steps may overlap those of this one. It has
  /// peer memory of its own, but no data plane. `number`: which one, from 1 on. Who asks again for
  /// a number gets the same. Collective over all ranks. It lives as long as this communicator.
  std::shared_ptr<Communicator> lane(int number);
  /// Ends the communicator on all ranks, with a reason.
  void abort(std::string_view reason) noexcept;
  /// Why the communicator has ended; empty while it works.
  std::string status() const;
  /// Throws Error with the reason if it has ended.
  void check() const;

  /// See DataPlane. Layers that send messages call it when they are made; split() calls it. Before
  /// an exchange() of your own you may; else the first exchange() connects: all ranks must take
  /// part in it, and no graph can record it. Throws Error where the ranks have no data plane, or
  /// cannot connect; the communicator stays usable. `why`: what needs messages, for errors.
  void connect(std::string_view why = "messages between ranks");
  /// See DataPlane. `what` names the step in errors: "dispatch of step 12 of layer 3".
  void exchange(std::span<const Message> sends, std::span<const Message> receives, Stream stream,
                std::string_view what);
  /// See DataPlane.
  bool is_byte_stream() const;
  bool has_collectives() const;
  void all_gather(std::span<const Gather> buffers, Stream stream, std::string_view what);
  void reduce_scatter(const void* data, void* out, std::int64_t count, DType dtype, Stream stream,
                      std::string_view what);
  /// See DataPlane. `read` gets what every rank lends, this one too, in the order of the ranks.
  /// Ranks that lend another `kind` of memory at the same time get an Error instead.
  bool can_lend() const;
  void lend(std::string_view kind, const void* mine, const DataPlane::Reader& read,
            std::string_view what);
  /// Collective: on CPUs, where all ranks are processes of one host, lets each map the memory that
  /// the others take here; true if it does. Then lend() works for what lies in such memory, and
  /// points to such memory, though can_lend() is false; to lend other memory is then an Error.
  /// Parts that are split off later share it; those that were split off before never do.
  bool share_memory();
  /// A block that the other ranks can read. They may do so after this rank has failed, until they
  /// themselves are gone.
  void* take_shared(std::size_t bytes);
  void give_back_shared(const void* block) noexcept;
  /// Whether an address lies in such a block of this rank.
  bool is_shared(const void* address) const;
  /// Collective: on GPUs of one host, makes each rank's GPU lend so many bytes, or as many as
  /// before if that is more, which the kernels of all ranks then read and write. Returns why that
  /// is not possible, the same text on all ranks; empty: it is. Then no layer of this communicator
  /// needs NCCL to move rows. Layers call it themselves, and send messages where it is not
  /// possible. As graphs hold addresses, the blocks cannot grow behind the first forward: call it
  /// before, with the largest peer_bytes(), where larger layers are made later; of layers that
  /// differ in more than their tokens, with the sum of theirs. Throws Error where the ranks ask for
  /// different numbers of bytes; the communicator stays usable.
  std::string map_peers(std::size_t bytes);
  /// The same, as layers call it: the results of each lie behind what any of them publishes.
  std::string map_peers(const PeerBytes& layer);
  /// Where a rank reads another's memory at less than 2 GB/s, the text that says so, the same on
  /// all ranks: map_peers() has timed that, and rows travel so all the same.
  const std::string& slow_peers() const;
  /// What map_peers() has made; null: nothing.
  const std::shared_ptr<PeerMemory>& peers() const;
  /// Collective: where map_peers() may map, makes a block of each rank's GPU, of `bytes()` bytes at
  /// least, that all ranks map as long as they keep `blocks`. Returns why that is not possible, the
  /// same text on all ranks; empty: it is. For experts that move.
  std::string map_blocks(const std::function<std::size_t()>& bytes,
                         std::shared_ptr<PeerBlocks>& blocks);
  /// Number of the next step of any layer, and of the next layer: equal on all ranks as long as
  /// they do the same.
  std::uint64_t next_step();
  std::uint64_t next_layer();

 private:
  struct Impl;
  explicit Communicator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> part_of(const std::vector<std::string>& colors);
  std::unique_ptr<Impl> impl_;
};

// ------------------------------------------------------------------------------------------------
// How a process joins.

/// n ranks in this process, one for each of n threads; element r is rank r's. On the CPU the ranks
/// lend each other their memory, and a layer sends no messages; a message is a copy from one
/// thread's memory to another's. On a CUDA device all ranks share it, to test without a second one:
/// the host waits for every copy.
FUSEDMOE_API std::vector<std::shared_ptr<Communicator>> make_thread_communicators(
    int size, CommunicatorOptions options = {});

/// The two planes of such ranks. Element r of the data planes is rank r's.
FUSEDMOE_API std::shared_ptr<ControlPlane> make_thread_control_plane();
FUSEDMOE_API std::vector<std::shared_ptr<DataPlane>> make_thread_data_planes(int size,
                                                                             Device device = {});

/// Where this process stands among those that a launcher has started.
struct Launch {
  int rank = 0, size = 1, local_rank = 0;
  std::string address;   ///< of rank 0
  int port = 0;          ///< where rank 0 may listen; 0: not known
  std::string launcher;  ///< whose variables these are: "torchrun", "Open MPI", "MPICH", "Slurm"
  std::string token;     ///< see make_tcp_control_plane()
};
/// From the variables that torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT),
/// Open MPI, MPICH and Slurm set; none: no launcher. MASTER_ADDR and MASTER_PORT count with every
/// launcher; the port is the one behind it where torchrun keeps MASTER_PORT for itself. The address
/// is 127.0.0.1 where all ranks are on this host and FUSEDMOE_TOKEN is not set. Throws Error for
/// variables that contradict each other.
FUSEDMOE_API std::optional<Launch> launch_from_environment();

/// Rank 0 listens at the port of the address and the others connect; the control plane of processes
/// on several hosts. A process that ends is noticed at once. The address is a name, or one of IPv4
/// or IPv6; a name that is not known yet is tried until the deadline.
///
/// `token` is a secret of 16 to 64 characters, the same on all ranks; empty: that in the variable
/// FUSEDMOE_TOKEN. Who connects and does not know it is dropped. Without a token every process of
/// the host could join, so the address must then be of this host alone, as 127.0.0.1 is: else an
/// Error. Nothing is encrypted.
FUSEDMOE_API std::shared_ptr<ControlPlane> make_tcp_control_plane(
    int rank, int size, const std::string& address, int port,
    std::chrono::milliseconds timeout = std::chrono::seconds(30), std::string_view token = {});
/// Texts as files in an empty folder that all ranks see, and that only their user can write.
FUSEDMOE_API std::shared_ptr<ControlPlane> make_file_control_plane(const std::string& folder);

/// Gathers one text of every rank, as an engine's own collective does.
using GatherCallback = std::function<std::vector<std::string>(const std::string&)>;
/// A TCP control plane whose address, with a token that rank 0 draws, the ranks tell each other by
/// `gather`, which is called twice. It listens at 127.0.0.1 where all ranks are on this host.
FUSEDMOE_API std::shared_ptr<ControlPlane> make_control_plane(
    int rank, int size, const GatherCallback& gather,
    std::chrono::milliseconds timeout = std::chrono::seconds(30));

/// A TCP connection between any two ranks, which find each other over the control plane, tokens
/// with it: for processes on CPUs without MPI. Collective.
FUSEDMOE_API std::shared_ptr<DataPlane> make_tcp_data_plane(
    int rank, int size, const std::shared_ptr<ControlPlane>& control,
    std::chrono::milliseconds timeout = std::chrono::seconds(30));

/// What the caller has of NCCL: a communicator, or a unique id to make one from, or neither. All
/// ranks bring the same of the three.
struct CallersNccl {
  /// This rank's ncclComm_t, made by the libnccl.so.2 that this process has loaded. The caller
  /// keeps it until the Communicator is gone. When a rank fails, fusedmoe aborts it.
  void* comm = nullptr;
  /// The bytes of an ncclUniqueId that all ranks were given.
  std::string_view unique_id;
};

/// Processes that have a control plane: their data plane is TCP on the CPU and NCCL on CUDA. Where
/// rows may go through the memory of GPUs, and the caller brings nothing of NCCL, it is loaded when
/// messages are first needed (Communicator::connect()). Collective. Throws Error, on all ranks,
/// where nccl.comm is of another rank, number of ranks or GPU, or where something of NCCL comes
/// with a CPU.
FUSEDMOE_API std::shared_ptr<Communicator> make_communicator(int rank, int size,
                                                             std::shared_ptr<ControlPlane> control,
                                                             CommunicatorOptions options = {},
                                                             const CallersNccl& nccl = {});
/// The same over a TCP control plane, where rank 0 listens at the address and port of `launch`;
/// none: what launch_from_environment() finds. Throws Error where that does not say an address.
FUSEDMOE_API std::shared_ptr<Communicator> join_processes(std::optional<Launch> launch = {},
                                                          CommunicatorOptions options = {});

/// NCCL on a CUDA device, whose library is opened at run time. A thread watches what is enqueued:
/// when it does not end within the timeout, it finds out over the control plane which ranks are
/// late, ends NCCL's kernels and posts the reason. Replays of a graph are not watched. Throws Error
/// saying why where libnccl.so.2 cannot be used. make_communicator() also tells the other ranks.
FUSEDMOE_API std::shared_ptr<DataPlane> make_nccl_data_plane(
    int rank, int size, Device device, std::shared_ptr<ControlPlane> control,
    std::chrono::milliseconds timeout = std::chrono::seconds(30), const CallersNccl& nccl = {});
/// What there is of NCCL: the file and its version, and what this library was compiled for.
struct NcclInfo {
  std::string path;     ///< of the library; empty: not found
  int found = 0;        ///< its version, 22809 for 2.28.9
  int compiled = 0;     ///< that of the headers; 0: compiled without
  std::string problem;  ///< why it cannot be used; empty: it can
};
FUSEDMOE_API NcclInfo nccl_info();
/// The bytes of a new ncclUniqueId, for an engine that tells them to its ranks. Throws as above.
FUSEDMOE_API std::string make_nccl_unique_id();

/// The ranks of an MPI communicator, given as its Fortran handle (MPI_Comm_c2f), so that no type of
/// MPI is needed here; none: MPI_COMM_WORLD, and MPI is started where nobody has. Collective. In
/// the library fusedmoe::mpi, which a program links beside this one.
std::shared_ptr<Communicator> make_mpi_communicator(std::optional<int> fortran_handle = {},
                                                    CommunicatorOptions options = {});
/// "Open MPI v4.1.4", or "built without MPI". In the same library.
std::string mpi_summary();

}  // namespace fusedmoe
