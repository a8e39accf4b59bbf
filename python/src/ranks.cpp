#include "ranks.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fusedmoe/balance.h"
#include "fusedmoe/comm.h"
#include "fusedmoe/wait_hook.h"
#include "module.h"

namespace fusedmoe::python {
namespace {

/// What a handler of signals has raised, KeyboardInterrupt for one. The other ranks learn so much.
struct Interrupted : nb::python_error {
  const char* what() const noexcept override { return "interrupted"; }
};

/// Python runs its handlers of signals in the main thread, which waits here for other ranks.
void handle_signals() {
  if (::gettid() != ::getpid()) return;
  const WithGil gil;
  if (PyErr_CheckSignals() != 0) throw Interrupted();
}

CommunicatorOptions options_of(const std::string& device, double timeout, bool shared_memory = true,
                               std::optional<bool> peer_memory = {}) {
  constexpr double kYear = 365 * 24 * 3600;
  if (!(timeout > 0 && timeout <= kYear)) {
    throw Error("timeout", std::to_string(timeout), "a positive number of seconds, at most a year");
  }
  const std::chrono::duration<double> seconds(timeout);
  return {std::chrono::ceil<std::chrono::milliseconds>(seconds), parse_device(device),
          shared_memory, peer_memory};
}

std::vector<PyCommunicator> threads(int size, const std::string& device, double timeout,
                                    std::optional<bool> peer_memory) {
  std::vector<PyCommunicator> result;
  const CommunicatorOptions options = options_of(device, timeout, true, peer_memory);
  for (auto& each : make_thread_communicators(size, options)) {
    result.emplace_back(std::move(each));
  }
  return result;
}

/// Without an address: what the launcher's variables say.
PyCommunicator join(int rank, int size, const std::string& address, int port,
                    const std::string& token, const std::string& device, double timeout,
                    bool shared_memory, std::optional<bool> peer_memory) {
  const CommunicatorOptions options = options_of(device, timeout, shared_memory, peer_memory);
  std::optional<Launch> launch;
  if (address.empty() && !token.empty()) {
    throw Error::invalid("token", "token is given without an address, at which alone it counts");
  }
  if (!address.empty()) launch = Launch{rank, size, 0, address, port, "", token};
  const WithoutGil no_gil;
  return PyCommunicator(join_processes(std::move(launch), options));
}

/// An engine's own collective: text of this rank -> list of all ranks' texts. Called without the
/// GIL, while the caller holds `gather`.
GatherCallback collective_of(const nb::callable& gather) {
  return [&gather](const std::string& text) {
    const WithGil gil;
    const nb::object returned = gather(text);
    std::vector<std::string> texts;
    if (!nb::try_cast(returned, texts)) {
      throw Error("gather", "a function that returned " + nb::cast<std::string>(nb::repr(returned)),
                  "one that returns a list of str");
    }
    return texts;
  };
}

PyCommunicator create(int rank, int size, const nb::callable& gather, const std::string& device,
                      double timeout, bool shared_memory, std::optional<bool> peer_memory) {
  const CommunicatorOptions options = options_of(device, timeout, shared_memory, peer_memory);
  const WithoutGil no_gil;
  auto control = make_control_plane(rank, size, collective_of(gather), options.timeout);
  return PyCommunicator(make_communicator(rank, size, std::move(control), options));
}

/// Texts as files in a folder.
PyCommunicator create_in_folder(int rank, int size, const std::string& folder,
                                const std::string& device, double timeout, bool shared_memory,
                                std::optional<bool> peer_memory) {
  const CommunicatorOptions options = options_of(device, timeout, shared_memory, peer_memory);
  const WithoutGil no_gil;
  return PyCommunicator(make_communicator(rank, size, make_file_control_plane(folder), options));
}

/// With a communicator of NCCL that the caller has, by its address, or with a unique id.
PyCommunicator create_with_nccl(int rank, int size, const nb::callable& gather,
                                std::optional<std::uintptr_t> comm,
                                const std::optional<nb::bytes>& unique_id,
                                const std::string& device, double timeout,
                                std::optional<bool> peer_memory) {
  constexpr std::size_t kIdBytes = 128;
  const CommunicatorOptions options = options_of(device, timeout, true, peer_memory);
  if (options.device.is_cpu()) throw Error("device", device, "a CUDA device: NCCL is of GPUs");
  if (comm && *comm == 0) throw Error("comm", "0", "the address of an ncclComm_t", Fault::kNull);
  const std::string id = unique_id ? std::string(unique_id->c_str(), unique_id->size()) : "";
  if (unique_id && id.size() != kIdBytes) {
    throw Error("unique_id", std::to_string(id.size()) + " bytes",
                std::to_string(kIdBytes) + ", an ncclUniqueId");
  }
  const WithoutGil no_gil;
  auto control = make_control_plane(rank, size, collective_of(gather), options.timeout);
  const CallersNccl nccl{reinterpret_cast<void*>(comm.value_or(0)), id};
  return PyCommunicator(make_communicator(rank, size, std::move(control), options, nccl));
}

/// (placement as JSON, before, after) of each layer.
std::vector<std::tuple<std::string, double, double>> balance_loads(
    const std::vector<double>& loads, std::int64_t num_experts, int num_ranks,
    std::int64_t redundant, int num_hosts, std::int64_t num_groups,
    const std::vector<std::string>& placements) {
  BalanceOptions options{num_ranks, redundant, num_hosts, num_groups, {}};
  for (const std::string& json : placements) {
    options.placements.push_back(ExpertPlacement::parse(json));
  }
  std::vector<std::tuple<std::string, double, double>> layers;
  for (const BalancedLayer& layer : balance(loads, num_experts, options)) {
    layers.emplace_back(layer.placement.json(), layer.before, layer.after);
  }
  return layers;
}

}  // namespace

void read_combine(const nb::dict& settings, RankOptions& ranks) {
  const auto combine = get<std::string>(settings, "combine", "");
  if (combine == "per_rank") {
    ranks.combine = CombineMode::kPerRank;
  } else if (combine == "per_slot") {
    ranks.combine = CombineMode::kPerSlot;
  } else if (!combine.empty()) {
    throw Error::unknown_name("combine", combine, "per_rank, per_slot");
  }
  const auto dtype = get<std::string>(settings, "combine_dtype", "");
  if (!dtype.empty()) ranks.combine_dtype = dtype_of(dtype, "combine_dtype");
}

void read_ranks(const nb::dict& settings, LayerOptions& options) {
  RankOptions& ranks = options.ranks;
  ranks.max_tokens_per_rank = get<std::int64_t>(settings, "max_tokens_per_rank", 0);
  ranks.receive_capacity = get<std::int64_t>(settings, "receive_capacity", 0);
  ranks.drop_rows = get(settings, "drop_rows", false);
  ranks.lanes = get(settings, "lanes", 1);
  if (get(settings, "nearest_replica", false)) ranks.replica_choice = ReplicaChoice::kNearest;
  const auto placement = get<std::string>(settings, "placement", "");
  if (!placement.empty()) ranks.placement = ExpertPlacement::parse(placement);
  read_combine(settings, ranks);
  const auto dispatch = get<std::string>(settings, "dispatch_dtype", "");
  if (!dispatch.empty()) ranks.dispatch_dtype = dtype_of(dispatch, "dispatch_dtype");
  const nb::object communicator = item(settings, "communicator");
  if (communicator.is_none()) return;
  ranks.communicator = nb::cast<PyCommunicator&>(communicator).communicator;
}

void bind_ranks(nb::module_& module) {
  set_wait_hook(&handle_signals);
  nb::class_<PyCommunicator>(module, "Communicator")
      .def("rank", [](const PyCommunicator& self) { return self.communicator->rank(); })
      .def("size", [](const PyCommunicator& self) { return self.communicator->size(); })
      .def("backend",
           [](const PyCommunicator& self) { return std::string(self.communicator->backend()); })
      .def("status",
           [](const PyCommunicator& self) {
             const WithoutGil no_gil;
             return self.communicator->status();
           })
      .def("barrier",
           [](PyCommunicator& self) {
             const WithoutGil no_gil;
             self.communicator->barrier();
           })
      .def("connect",
           [](PyCommunicator& self) {
             const WithoutGil no_gil;
             self.communicator->connect();
           })
      .def(
          "map_peers",
          [](PyCommunicator& self, std::size_t bytes) {
            const WithoutGil no_gil;
            return self.communicator->map_peers(bytes);
          },
          nb::arg("bytes"))
      .def(
          "lane",
          [](PyCommunicator& self, int number) {
            const WithoutGil no_gil;
            return PyCommunicator(self.communicator->lane(number));
          },
          nb::arg("number"), nb::keep_alive<0, 1>())
      .def("together",
           [](PyCommunicator& self, const std::string& failure) {
             const WithoutGil no_gil;
             const auto step = [&] {
               if (!failure.empty()) throw Error::communication(failure);
             };
             self.communicator->together(step, "a step of all ranks");
           })
      .def("abort", [](PyCommunicator& self, const std::string& reason) {
        const WithoutGil no_gil;
        self.communicator->abort(reason);
      });
  module.def("thread_communicators", &threads, nb::arg("size"), nb::arg("device"),
             nb::arg("timeout"), nb::arg("peer_memory").none());
  module.def("join_communicator", &join, nb::arg("rank"), nb::arg("size"), nb::arg("address"),
             nb::arg("port"), nb::arg("token"), nb::arg("device"), nb::arg("timeout"),
             nb::arg("shared_memory"), nb::arg("peer_memory").none());
  module.def("create_communicator", &create, nb::arg("rank"), nb::arg("size"), nb::arg("gather"),
             nb::arg("device"), nb::arg("timeout"), nb::arg("shared_memory"),
             nb::arg("peer_memory").none());
  module.def("create_communicator_in_folder", &create_in_folder, nb::arg("rank"), nb::arg("size"),
             nb::arg("folder"), nb::arg("device"), nb::arg("timeout"), nb::arg("shared_memory"),
             nb::arg("peer_memory").none());
  module.def("create_communicator_with_nccl", &create_with_nccl, nb::arg("rank"), nb::arg("size"),
             nb::arg("gather"), nb::arg("comm").none(), nb::arg("unique_id").none(),
             nb::arg("device"), nb::arg("timeout"), nb::arg("peer_memory").none());
  module.def("make_nccl_unique_id", [] {
    const std::string id = make_nccl_unique_id();
    return nb::bytes(id.data(), id.size());
  });
  module.def(
      "make_placement",
      [](const std::string& kind, std::int64_t num_experts, int num_ranks, std::int64_t redundant) {
        if (kind == "linear") {
          return ExpertPlacement::linear(num_experts, num_ranks, redundant).json();
        }
        return ExpertPlacement::round_robin(num_experts, num_ranks).json();
      },
      nb::arg("kind"), nb::arg("num_experts"), nb::arg("num_ranks"), nb::arg("redundant"));
  nb::class_<LoadWindow>(module, "LoadWindow")
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t>(), nb::arg("num_layers"),
           nb::arg("num_experts"), nb::arg("num_forwards"))
      .def(
          "add",
          [](LoadWindow& self, std::int64_t layer, nb::handle expert_load) {
            Kept kept;
            self.add(layer, view_of(expert_load, "expert_load", kept));
          },
          nb::arg("layer"), nb::arg("expert_load").none())
      .def(
          "loads",
          [](const LoadWindow& self, PyCommunicator* ranks) {
            const WithoutGil no_gil;
            return ranks ? self.loads(*ranks->communicator) : self.loads();
          },
          nb::arg("communicator").none())
      .def("clear", &LoadWindow::clear);
  module.def("balance", &balance_loads, nb::arg("loads"), nb::arg("num_experts"),
             nb::arg("num_ranks"), nb::arg("redundant"), nb::arg("num_hosts"),
             nb::arg("num_groups"), nb::arg("placements"));
}

}  // namespace fusedmoe::python
