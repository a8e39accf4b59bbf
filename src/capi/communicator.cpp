// Communicators: threads of the process, or processes that find each other.
#include "capi/communicator.h"

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "capi/convert.h"

namespace fusedmoe::capi {
namespace {

std::optional<bool> to_peer_memory(std::int32_t value) {
  switch (value) {
    case 0:
      return CommunicatorOptions().peer_memory;
    case 1:
      return std::nullopt;
    case 2:
      return true;
    case -1:
      return false;
    default:
      throw Error("options.peer_memory", std::to_string(value), "-1, 0, 1 or 2");
  }
}

CommunicatorOptions to_options(const fusedmoe_communicator_options* options) {
  const fusedmoe_communicator_options o = read_struct(options, "options");
  CommunicatorOptions result;
  result.device = to_device_id(o.device_type, o.device_index, "options.device");
  if (o.timeout_ms != 0) result.timeout = std::chrono::milliseconds(o.timeout_ms);
  result.shared_memory = o.no_shared_memory == 0;
  result.peer_memory = to_peer_memory(o.peer_memory);
  return result;
}

fusedmoe_communicator* make_handle(std::shared_ptr<Communicator> communicator) {
  const std::string backend(communicator->backend());
  return new fusedmoe_communicator{std::move(communicator), backend};
}

/// The caller's collective as ours.
GatherCallback to_gather(const fusedmoe_gather& gather, int size) {
  if (!gather.run) throw Error("gather.run", "NULL", "a function", Fault::kNull);
  return [gather, size](const std::string& text) {
    std::vector<std::string> texts(static_cast<std::size_t>(size));
    const auto give = [](void* data, std::int32_t rank, const char* part, std::size_t bytes) {
      auto& all = *static_cast<std::vector<std::string>*>(data);
      const bool known = rank >= 0 && rank < static_cast<std::int32_t>(all.size());
      if (known && part) all[static_cast<std::size_t>(rank)].assign(part, bytes);
    };
    const std::int32_t failed = gather.run(gather.context, text.data(), text.size(), give, &texts);
    if (failed)
      throw Error::communication("gather.run returned " + std::to_string(failed) + " instead of 0");
    return texts;
  };
}

void check_rendezvous(const fusedmoe_rendezvous& at, const CommunicatorOptions& options) {
  const int ways = (at.folder != nullptr) + (at.gather != nullptr) + (at.address != nullptr);
  if (ways != 1) {
    throw Error::invalid("rendezvous", "rendezvous has " + std::to_string(ways) +
                                           " of folder, gather and address: one is needed");
  }
  if (at.reserved != 0) throw Error("rendezvous.reserved", std::to_string(at.reserved), "0");
  if (at.token && !at.address) {
    throw Error::invalid("rendezvous.token",
                         "rendezvous.token is given without address, at which alone it counts");
  }
  if (at.nccl_comm && at.nccl_unique_id) {
    throw Error::conflict("rendezvous.nccl_unique_id", "rendezvous.nccl_comm");
  }
  if ((at.nccl_comm || at.nccl_unique_id) && options.device.is_cpu()) {
    throw Error::conflict(at.nccl_comm ? "rendezvous.nccl_comm" : "rendezvous.nccl_unique_id",
                          "options.device cpu", "NCCL is of GPUs");
  }
}

std::shared_ptr<Communicator> meet(int rank, int size, const fusedmoe_rendezvous& at,
                                   const CommunicatorOptions& options) {
  check_rendezvous(at, options);
  std::shared_ptr<ControlPlane> control;
  if (at.folder) {
    control = make_file_control_plane(at.folder);
  } else if (at.gather) {
    const auto gather = to_gather(read_given_struct(at.gather, "rendezvous.gather"), size);
    control = make_control_plane(rank, size, gather, options.timeout);
  } else {
    const std::string_view token = at.token ? at.token : "";
    control = make_tcp_control_plane(rank, size, at.address, at.port, options.timeout, token);
  }
  CallersNccl nccl{.comm = at.nccl_comm};
  if (at.nccl_unique_id) {
    nccl.unique_id = {static_cast<const char*>(at.nccl_unique_id), FUSEDMOE_NCCL_UNIQUE_ID_BYTES};
  }
  return make_communicator(rank, size, std::move(control), options, nccl);
}

}  // namespace
}  // namespace fusedmoe::capi

using fusedmoe::capi::given;
using fusedmoe::capi::guarded;

fusedmoe_status fusedmoe_communicator_create_threads(int32_t size,
                                                     const fusedmoe_communicator_options* options,
                                                     fusedmoe_communicator** communicators) {
  return guarded([&] {
    given(communicators, "communicators");
    std::vector<std::unique_ptr<fusedmoe_communicator>> made;
    for (auto& each :
         fusedmoe::make_thread_communicators(size, fusedmoe::capi::to_options(options))) {
      made.emplace_back(fusedmoe::capi::make_handle(std::move(each)));
    }
    for (auto& each : made) *communicators++ = each.release();
  });
}

fusedmoe_status fusedmoe_communicator_join(int32_t rank, int32_t size, const char* address,
                                           int32_t port,
                                           const fusedmoe_communicator_options* options,
                                           fusedmoe_communicator** communicator) {
  return guarded([&] {
    given(communicator, "communicator");
    const fusedmoe::CommunicatorOptions o = fusedmoe::capi::to_options(options);
    std::optional<fusedmoe::Launch> launch;
    if (address) launch = fusedmoe::Launch{rank, size, 0, address, port, "", ""};
    *communicator = fusedmoe::capi::make_handle(fusedmoe::join_processes(std::move(launch), o));
  });
}

fusedmoe_status fusedmoe_communicator_create(int32_t rank, int32_t size,
                                             const fusedmoe_gather* gather,
                                             const fusedmoe_communicator_options* options,
                                             fusedmoe_communicator** communicator) {
  return guarded([&] {
    given(communicator, "communicator");
    const fusedmoe::CommunicatorOptions o = fusedmoe::capi::to_options(options);
    const auto collective =
        fusedmoe::capi::to_gather(fusedmoe::capi::read_given_struct(gather, "gather"), size);
    *communicator = fusedmoe::capi::make_handle(fusedmoe::make_communicator(
        rank, size, fusedmoe::make_control_plane(rank, size, collective, o.timeout), o));
  });
}

fusedmoe_status fusedmoe_communicator_create_at(int32_t rank, int32_t size,
                                                const fusedmoe_rendezvous* rendezvous,
                                                const fusedmoe_communicator_options* options,
                                                fusedmoe_communicator** communicator) {
  return guarded([&] {
    given(communicator, "communicator");
    const fusedmoe::CommunicatorOptions o = fusedmoe::capi::to_options(options);
    const auto at = fusedmoe::capi::read_given_struct(rendezvous, "rendezvous");
    *communicator = fusedmoe::capi::make_handle(fusedmoe::capi::meet(rank, size, at, o));
  });
}

fusedmoe_status fusedmoe_make_nccl_unique_id(void* id, size_t bytes) {
  return guarded([&] {
    if (!id) throw fusedmoe::Error("id", "NULL", "memory", fusedmoe::Fault::kNull);
    if (bytes != FUSEDMOE_NCCL_UNIQUE_ID_BYTES) {
      throw fusedmoe::Error("bytes", std::to_string(bytes),
                            std::to_string(FUSEDMOE_NCCL_UNIQUE_ID_BYTES));
    }
    const std::string made = fusedmoe::make_nccl_unique_id();
    made.copy(static_cast<char*>(id), bytes);
  });
}

void fusedmoe_communicator_destroy(fusedmoe_communicator* communicator) {
  delete communicator;
}

fusedmoe_status fusedmoe_communicator_get_info(const fusedmoe_communicator* communicator,
                                               fusedmoe_communicator_info* info) {
  return guarded([&] {
    const fusedmoe::Communicator& made = *given(communicator, "communicator").communicator;
    fusedmoe_communicator_info values{};
    values.rank = made.rank();
    values.size = made.size();
    values.backend = communicator->backend.c_str();
    fusedmoe::capi::write_struct(info, values, "info");
  });
}

fusedmoe_status fusedmoe_communicator_barrier(fusedmoe_communicator* communicator) {
  return guarded([&] { given(communicator, "communicator").communicator->barrier(); });
}

fusedmoe_status fusedmoe_communicator_connect(fusedmoe_communicator* communicator) {
  return guarded([&] { given(communicator, "communicator").communicator->connect(); });
}

fusedmoe_status fusedmoe_communicator_map_peers(fusedmoe_communicator* communicator, size_t bytes,
                                                const char** why) {
  return guarded([&] {
    fusedmoe_communicator& ranks = given(communicator, "communicator");
    given(why, "why");
    ranks.without_peers = ranks.communicator->map_peers(bytes);
    *why = ranks.without_peers.c_str();
  });
}

fusedmoe_status fusedmoe_communicator_lane(fusedmoe_communicator* communicator, int32_t number,
                                           fusedmoe_communicator** lane) {
  return guarded([&] {
    const fusedmoe_communicator& ranks = given(communicator, "communicator");
    given(lane, "lane");
    *lane = new fusedmoe_communicator{ranks.communicator->lane(number), ranks.backend, {}};
  });
}

void fusedmoe_communicator_abort(fusedmoe_communicator* communicator, const char* reason) {
  if (communicator) communicator->communicator->abort(reason ? reason : "aborted");
}

fusedmoe_status fusedmoe_communicator_status(const fusedmoe_communicator* communicator) {
  return guarded([&] { given(communicator, "communicator").communicator->check(); });
}
