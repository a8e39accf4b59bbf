#include "ranks.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "fusedmoe/comm.h"

namespace fusedmoe::python {
namespace {

CommunicatorOptions options_of(const std::string& device, double timeout) {
  const std::chrono::duration<double> seconds(timeout);
  return {std::chrono::duration_cast<std::chrono::milliseconds>(seconds), parse_device(device)};
}

std::vector<PyCommunicator> threads(int size, const std::string& device, double timeout) {
  std::vector<PyCommunicator> result;
  for (auto& each : make_thread_communicators(size, options_of(device, timeout))) {
    result.push_back({std::move(each)});
  }
  return result;
}

/// Without an address: what the launcher's variables say.
PyCommunicator join(int rank, int size, const std::string& address, int port,
                    const std::string& device, double timeout) {
  const CommunicatorOptions options = options_of(device, timeout);
  Launch launch{rank, size, 0, address, port, ""};
  if (address.empty()) {
    const std::optional<Launch> found = launch_from_environment();
    if (!found || found->address.empty()) {
      throw Error("address", "None",
                  "given, where no launcher has set MASTER_ADDR and MASTER_PORT");
    }
    launch = *found;
  }
  const nb::gil_scoped_release no_gil;
  auto control = make_tcp_control_plane(launch.rank, launch.size, launch.address, launch.port,
                                        options.timeout);
  return {make_communicator(launch.rank, launch.size, std::move(control), options)};
}

/// `gather`: text of this rank -> list of all ranks' texts.
PyCommunicator create(int rank, int size, const nb::callable& gather, const std::string& device,
                      double timeout) {
  const CommunicatorOptions options = options_of(device, timeout);
  const auto collective = [&](const std::string& text) {
    return nb::cast<std::vector<std::string>>(gather(text));
  };
  auto control = make_control_plane(rank, size, collective, options.timeout);
  const nb::gil_scoped_release no_gil;
  return {make_communicator(rank, size, std::move(control), options)};
}

}  // namespace

void read_ranks(const nb::dict& settings, LayerOptions& options) {
  RankOptions& ranks = options.ranks;
  ranks.max_tokens_per_rank = get<std::int64_t>(settings, "max_tokens_per_rank", 0);
  ranks.receive_capacity = get<std::int64_t>(settings, "receive_capacity", 0);
  ranks.fixed_sizes = get(settings, "fixed_sizes", false);
  if (get(settings, "nearest_replica", false)) ranks.replica_choice = ReplicaChoice::kNearest;
  const auto placement = get<std::string>(settings, "placement", "");
  if (!placement.empty()) ranks.placement = ExpertPlacement::parse(placement);
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
  const nb::object communicator = item(settings, "communicator");
  if (communicator.is_none()) return;
  ranks.communicator = nb::cast<PyCommunicator&>(communicator).communicator;
  if (options.parallel == ParallelConfig{}) {
    options.parallel = ParallelConfig::of({.dp_size = ranks.communicator->size(),
                                           .expert_parallel = true,
                                           .rank = ranks.communicator->rank()});
  }
}

void bind_ranks(nb::module_& module) {
  nb::class_<PyCommunicator>(module, "Communicator")
      .def("rank", [](const PyCommunicator& self) { return self.communicator->rank(); })
      .def("size", [](const PyCommunicator& self) { return self.communicator->size(); })
      .def("backend",
           [](const PyCommunicator& self) { return std::string(self.communicator->backend()); })
      .def("status", [](const PyCommunicator& self) { return self.communicator->status(); })
      .def("barrier",
           [](PyCommunicator& self) {
             const nb::gil_scoped_release no_gil;
             self.communicator->barrier();
           })
      .def("abort", [](PyCommunicator& self, const std::string& reason) {
        self.communicator->abort(reason);
      });
  module.def("thread_communicators", &threads, nb::arg("size"), nb::arg("device"),
             nb::arg("timeout"));
  module.def("join_communicator", &join, nb::arg("rank"), nb::arg("size"), nb::arg("address"),
             nb::arg("port"), nb::arg("device"), nb::arg("timeout"));
  module.def("create_communicator", &create, nb::arg("rank"), nb::arg("size"), nb::arg("gather"),
             nb::arg("device"), nb::arg("timeout"));
  module.def(
      "make_placement",
      [](const std::string& kind, std::int64_t num_experts, int num_ranks, std::int64_t redundant) {
        if (kind == "linear") {
          return ExpertPlacement::linear(num_experts, num_ranks, redundant).json();
        }
        return ExpertPlacement::round_robin(num_experts, num_ranks).json();
      },
      nb::arg("kind"), nb::arg("num_experts"), nb::arg("num_ranks"), nb::arg("redundant"));
}

}  // namespace fusedmoe::python
