// Messages over NCCL: one group of sends and receives for each exchange, enqueued on the caller's
// stream.
#include <cstring>

#include "core/check.h"
#include "core/device_runtime.h"
#include "cuda/nccl/comm.h"
#include "cuda/nccl/watch.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe {
#if FUSEDMOE_HAVE_NCCL

using std::chrono::milliseconds;

namespace cuda {
namespace {

ncclDataType_t nccl_type(DType dtype) {
  return dtype == DType::kF32 ? ncclFloat32 : dtype == DType::kBF16 ? ncclBfloat16 : ncclFloat16;
}

class NcclData final : public DataPlane {
 public:
  NcclData(std::shared_ptr<Comm> comm, int rank, int size, Device device,
           std::shared_ptr<ControlPlane> control, milliseconds timeout)
      : comm_(std::move(comm)),
        device_(device),
        rank_(rank),
        size_(size),
        timeout_(timeout),
        labels_(std::make_shared<Labels>(rank, size, device)) {
    comm_->keep(labels_);
    watch_ = std::make_unique<Watch>(rank, size, device, std::move(control), labels_, timeout,
                                     [comm = comm_] { comm->abort(); });
  }
  ~NcclData() override {
    watch_.reset();  // what was enqueued has ended now
    comm_->destroy(timeout_);
  }

  std::string_view name() const override { return "nccl"; }
  Device device() const override { return device_; }

  void exchange(std::span<const Message> sends, std::span<const Message> receives, Stream stream,
                Waiting& waiting) override {
    const Labels::Pairs pairs{labels(waiting, sends), labels(waiting, receives)};
    enqueue(stream, waiting, pairs, [&](ncclComm_t comm, cudaStream_t handle, Labels::Slot* slot) {
      const auto send = [&](int peer, const void* data, std::size_t bytes) {
        if (bytes == 0) return;
        FUSEDMOE_NCCL_CHECK(ncclSend, data, bytes, ncclUint8, peer, comm, handle);
      };
      const auto receive = [&](int peer, void* data, std::size_t bytes) {
        if (bytes == 0) return;
        FUSEDMOE_NCCL_CHECK(ncclRecv, data, bytes, ncclUint8, peer, comm, handle);
      };
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        if (pairs.sent[peer].bytes > 0) send(peer, &slot->sent[peer], sizeof(Label));
        if (pairs.expected[peer].bytes > 0) receive(peer, &slot->received[peer], sizeof(Label));
      }
      for (const Message& each : sends) send(each.peer, each.data, each.bytes);
      for (const Message& each : receives) receive(each.peer, each.data, each.bytes);
    });
  }

  bool has_collectives() const override { return true; }

  void all_gather(std::span<const Gather> buffers, Stream stream, Waiting& waiting) override {
    std::vector<Message> messages;
    for (int peer = 0; peer < size_; ++peer) {
      for (const Gather& each : buffers) messages.push_back({peer, nullptr, each.bytes});
    }
    const Labels::Pairs pairs{labels(waiting, messages), labels(waiting, messages)};
    enqueue(stream, waiting, pairs, [&](ncclComm_t comm, cudaStream_t handle, Labels::Slot* slot) {
      const auto gather = [&](const Gather& each) {
        if (each.bytes == 0) return;
        const void* place = static_cast<const char*>(each.data) + each.bytes * rank_;
        FUSEDMOE_NCCL_CHECK(ncclAllGather, each.own ? each.own : place, each.data, each.bytes,
                            ncclUint8, comm, handle);
      };
      gather({slot->received.data(), sizeof(Label), &slot->sent[rank_]});
      for (const Gather& each : buffers) gather(each);
    });
  }

  /// Without labels: the ranks have gathered before what they add up now.
  void reduce_scatter(const void* data, void* out, std::int64_t count, DType dtype, Stream stream,
                      Waiting& waiting) override {
    enqueue(stream, waiting, {}, [&](ncclComm_t comm, cudaStream_t handle, Labels::Slot*) {
      FUSEDMOE_NCCL_CHECK(ncclReduceScatter, data, out, static_cast<std::size_t>(count),
                          nccl_type(dtype), ncclSum, comm, handle);
    });
  }

  void abort() noexcept override { comm_->abort(); }

 private:
  /// For each rank, of all its messages.
  std::vector<Label> labels(const Waiting& waiting, std::span<const Message> messages) const {
    std::vector<Label> result(static_cast<std::size_t>(size_), Label(waiting.what()));
    for (const Message& each : messages) result[each.peer].bytes += each.bytes;
    return result;
  }

  /// Makes calls(communicator, stream, slot of the labels; null where there are none).
  template <typename Calls>
  void enqueue(Stream stream, const Waiting& waiting, const Labels::Pairs& labels,
               const Calls& calls) {
    const auto handle = static_cast<cudaStream_t>(stream.handle);
    const bool recorded = is_capturing(stream);
    Labels::Slot* slot = labels.sent.empty() ? nullptr : &labels_->take(labels, recorded);
    comm_->group([&](ncclComm_t comm) { calls(comm, handle, slot); });
    if (recorded) return;
    const CurrentDevice current(device_);
    watch_->enqueued(handle, waiting.what(), slot);
  }

  const std::shared_ptr<Comm> comm_;
  const Device device_;
  const int rank_, size_;
  const milliseconds timeout_;
  const std::shared_ptr<Labels> labels_;
  std::unique_ptr<Watch> watch_;
};

/// NCCL's id: the one that all ranks were given, or one that rank 0 makes.
ncclUniqueId shared_id(int rank, ControlPlane& control, Connecting& ranks, std::string_view given) {
  ncclUniqueId id{};
  if (given.empty() && rank == 0) {
    FUSEDMOE_NCCL_CHECK(ncclGetUniqueId, &id);
    control.post("NCCL/id", std::string_view(reinterpret_cast<const char*>(&id), sizeof id));
    return id;
  }
  const std::string text = given.empty() ? ranks.read("NCCL/id").value_or("") : std::string(given);
  if (text.size() != sizeof id) throw Error::communication("rank 0 did not send its id in time");
  std::memcpy(&id, text.data(), sizeof id);
  return id;
}

/// Connects the ranks. None starts before all are here, with NCCL: it itself waits without end.
std::shared_ptr<Comm> connect_all(int rank, int size, Device device, ControlPlane& control,
                                  milliseconds timeout, std::string_view unique_id) {
  Connecting ranks("NCCL", rank, size, control, timeout);
  return ranks.run([&] {
    FUSEDMOE_CHECK(unique_id.empty() || unique_id.size() == sizeof(ncclUniqueId), "nccl_unique_id",
                   core::format("{} bytes", unique_id.size()),
                   core::format("{}, an ncclUniqueId", sizeof(ncclUniqueId)));
    if (const NcclInfo info = nccl_info(); !info.problem.empty()) {
      throw Error::communication(info.problem);
    }
    ranks.meet("here");
    const ncclUniqueId id = shared_id(rank, control, ranks, unique_id);
    std::shared_ptr<Comm> comm = connect_ranks(rank, size, device, id, ranks);
    ranks.meet("connected");
    return comm;
  });
}

/// Throws Error unless the caller's communicator is of this rank, of so many, on this GPU.
void check_comm(ncclComm_t comm, int rank, int size, Device device) {
  int its_rank = 0, its_size = 0, its_gpu = 0;
  FUSEDMOE_NCCL_CHECK(ncclCommUserRank, comm, &its_rank);
  FUSEDMOE_NCCL_CHECK(ncclCommCount, comm, &its_size);
  FUSEDMOE_NCCL_CHECK(ncclCommCuDevice, comm, &its_gpu);
  const auto text = [](int r, int of, int gpu) {
    return core::format("rank {} of {} on GPU {}", r, of, gpu);
  };
  FUSEDMOE_CHECK(its_rank == rank && its_size == size && its_gpu == device.index, "nccl_comm",
                 text(its_rank, its_size, its_gpu), text(rank, size, device.index));
}

}  // namespace
}  // namespace cuda

std::shared_ptr<DataPlane> make_nccl_data_plane(int rank, int size, Device device,
                                                std::shared_ptr<ControlPlane> control,
                                                milliseconds timeout, const CallersNccl& nccl) {
  FUSEDMOE_CHECK_FAULT(control, kNull, "control", "null", "a control plane");
  if (nccl.comm && !nccl.unique_id.empty()) throw Error::conflict("nccl_unique_id", "nccl_comm");
  std::shared_ptr<cuda::Comm> comm;
  if (nccl.comm) {
    const auto callers = static_cast<ncclComm_t>(nccl.comm);
    cuda::check_comm(callers, rank, size, device);
    comm = std::make_shared<cuda::Comm>(callers, false, device);
  } else {
    comm = cuda::connect_all(rank, size, device, *control, timeout, nccl.unique_id);
  }
  return std::make_shared<cuda::NcclData>(std::move(comm), rank, size, device, std::move(control),
                                          timeout);
}

std::string make_nccl_unique_id() {
  ncclUniqueId id{};
  FUSEDMOE_NCCL_CHECK(ncclGetUniqueId, &id);
  return {reinterpret_cast<const char*>(&id), sizeof id};
}

#else

std::shared_ptr<DataPlane> make_nccl_data_plane(int, int, Device, std::shared_ptr<ControlPlane>,
                                                std::chrono::milliseconds, const CallersNccl&) {
  throw Error::unsupported(Reason::kOperation, "nccl", nccl_info().problem);
}

std::string make_nccl_unique_id() {
  throw Error::unsupported(Reason::kOperation, "nccl", nccl_info().problem);
}

#endif
}  // namespace fusedmoe
