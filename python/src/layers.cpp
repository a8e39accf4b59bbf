// Layers and their forwards.
#include "fusedmoe/layer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/runtime.h"
#include "module.h"
#include "prepared_layer.h"
#include "ranks.h"

namespace fusedmoe::python {
namespace {

/// A layer and scratch memory for its forwards. A forward has its block alone while it runs on the
/// CPU, or while it enqueues; on CUDA a block belongs to one stream, so the next user comes later,
/// and lives as long as the layer, because CUDA graphs may use it.
class PyLayer {
 public:
  PyLayer(LayerWeights weights, LayerOptions options)
      : output_dtype(options.output_dtype.value_or(options.dtype)),
        max_tokens_per_rank(options.ranks.max_tokens_per_rank),
        layer(std::move(weights), std::move(options)) {}
  /// With ranks it may wait for theirs, see PyCommunicator.
  ~PyLayer() {
    const WithoutGil no_gil;
    const MoeLayer ended(std::move(layer));
  }

  /// A block in use. It goes back where the forward fails too: a graph may have recorded it before.
  struct Lease {
    PyLayer* layer;
    void* stream;
    Tensor block;
    Workspace workspace;

    Lease(PyLayer* layer, void* stream) : layer(layer), stream(stream) {}
    Lease(Lease&& other) noexcept
        : layer(other.layer),
          stream(other.stream),
          block(std::exchange(other.block, {})),
          workspace(other.workspace) {}
    ~Lease() {
      if (!block) return;
      const std::lock_guard lock(layer->mutex_);
      try {
        layer->blocks_[stream].push_back(std::move(block));
      } catch (const std::bad_alloc&) {  // then the block is freed
      }
    }
  };

  /// Scratch memory for so many tokens: that of the Python function, or of the layer itself where
  /// it is None.
  Lease lend(std::int64_t num_tokens, const ForwardOptions& options, nb::handle scratch,
             Kept& kept) {
    const Stream stream = options.stream.value_or(Stream{layer.config().device});
    const std::size_t bytes =
        layer.workspace_bytes(num_tokens, options.fixed_sizes || is_capturing(stream));
    Lease lease(this, stream.handle);
    if (!scratch.is_none()) {
      lease.workspace = scratch_from(scratch, bytes, layer.config().device, kept);
      return lease;
    }
    lease.block = take(stream.handle);
    if (!lease.block || static_cast<std::size_t>(lease.block.nbytes()) < bytes) {
      lease.block = grow(lease.block, static_cast<std::int64_t>(bytes), stream);
    }
    lease.workspace = {lease.block.data(), static_cast<std::size_t>(lease.block.nbytes())};
    return lease;
  }

  const DType output_dtype;
  const std::int64_t max_tokens_per_rank;
  MoeLayer layer;

 private:
  /// A larger block. Where it throws, the one before stays the caller's.
  Tensor grow(const Tensor& block, std::int64_t bytes, Stream stream) {
    if (is_capturing(stream)) {
      throw Error::invalid("stream",
                           "the stream is being captured, but scratch memory is missing: make a "
                           "call with as many tokens before, or give a workspace");
    }
    const bool keeps = block && !stream.device.is_cpu();
    // At least twice the last one, so that those kept are no more than the one in use.
    if (keeps) bytes = std::max(bytes, 2 * block.nbytes());
    Tensor larger = Tensor::empty({bytes}, DType::kU8, stream.device);
    if (keeps) {
      const std::lock_guard lock(mutex_);
      outgrown_.push_back(block);
    }
    return larger;
  }
  Tensor take(void* stream) {
    const std::lock_guard lock(mutex_);
    std::vector<Tensor>& free = blocks_[stream];
    if (free.empty()) return {};
    Tensor result = std::move(free.back());
    free.pop_back();
    return result;
  }

  std::mutex mutex_;
  std::map<void*, std::vector<Tensor>> blocks_;
  std::vector<Tensor> outgrown_;
};

std::unique_ptr<PyLayer> make(PreparedLayer& prepared) {
  const WithoutGil no_gil;
  return std::make_unique<PyLayer>(std::move(prepared.weights), std::move(prepared.options));
}

void repack(PyLayer& layer, std::int64_t expert, nb::handle w13, nb::handle w2,
            const nb::dict& settings) {
  Kept kept;
  const ExpertWeights weights = experts_of(w13, w2, settings, kept);
  const WithoutGil no_gil;
  layer.layer.repack(weights, expert);
}

/// The experts that no rank has come from the checkpoint, or from `lost`, a Python function that
/// returns the settings of one expert with its w13 and w2; or both are None.
void rebind(PyLayer& layer, PyCommunicator& communicator, const std::string& placement,
            const Checkpoint* checkpoint, std::int64_t index, nb::handle lost) {
  const ExpertPlacement placed = ExpertPlacement::parse(placement);
  std::list<Kept> kept;
  ExpertSource source;
  if (checkpoint) {
    source = [=](std::int64_t expert) { return checkpoint->load_expert(index, expert); };
  } else if (!lost.is_none()) {
    source = [&](std::int64_t expert) {
      const WithGil gil;
      const auto settings = nb::cast<nb::dict>(lost(expert));
      return experts_within("lost", settings, kept.emplace_back());
    };
  }
  const WithoutGil no_gil;
  layer.layer.rebind(communicator.communicator, placed, source);
}

struct Call {
  Kept kept;
  TensorView hidden_states, output;
  ForwardOptions options;
  std::int64_t num_tokens = 0;  // that scratch memory is needed for

  Call(const PyLayer& layer, nb::handle x, nb::handle out, bool accumulate,
       std::optional<std::uintptr_t> stream, std::int64_t max_tokens, nb::handle dropped_rows,
       bool fixed_sizes, nb::handle expert_load, nb::handle expert_map, int lane)
      : hidden_states(view_of(x, "hidden_states", kept)), output(output_view_of(out, "out", kept)) {
    if (!hidden_states || hidden_states.rank() != 2) {
      throw Error("hidden_states", to_string(hidden_states.shape()), "(num_tokens, hidden)",
                  Fault::kShape);
    }
    options.max_tokens = max_tokens;
    options.fixed_sizes = fixed_sizes;
    options.lane = lane;
    num_tokens =
        std::max(hidden_states.size(0), max_tokens > 0 ? max_tokens : layer.max_tokens_per_rank);
    options.accumulate = accumulate;
    options.stream = stream_of(stream, layer.layer.config().device);
    options.dropped_rows = output_view_of(dropped_rows, "dropped_rows", kept);
    options.expert_load = output_view_of(expert_load, "expert_load", kept);
    options.expert_map = view_of(expert_map, "expert_map", kept);
  }
};

void forward(PyLayer& layer, nb::handle x, nb::handle topk_weights, nb::handle topk_ids,
             nb::handle router_logits, nb::handle out, bool accumulate,
             std::optional<std::uintptr_t> stream, nb::handle scratch, std::int64_t max_tokens,
             nb::handle dropped_rows, bool fixed_sizes, nb::handle expert_load,
             nb::handle expert_map, int lane) {
  Call call(layer, x, out, accumulate, stream, max_tokens, dropped_rows, fixed_sizes, expert_load,
            expert_map, lane);
  call.options.topk_weights = output_view_of(topk_weights, "topk_weights", call.kept);
  call.options.topk_ids = output_view_of(topk_ids, "topk_ids", call.kept);
  call.options.router_logits = output_view_of(router_logits, "router_logits", call.kept);
  const WithoutGil no_gil;
  const auto lease = layer.lend(call.num_tokens, call.options, scratch, call.kept);
  layer.layer.forward(call.hidden_states, call.output, lease.workspace, call.options);
}

void forward_routed(PyLayer& layer, nb::handle x, nb::handle topk_weights, nb::handle topk_ids,
                    nb::handle out, bool accumulate, std::optional<std::uintptr_t> stream,
                    nb::handle scratch, std::int64_t max_tokens, nb::handle dropped_rows,
                    bool fixed_sizes, nb::handle expert_load, nb::handle expert_map, int lane) {
  Call call(layer, x, out, accumulate, stream, max_tokens, dropped_rows, fixed_sizes, expert_load,
            expert_map, lane);
  const Routing routing{view_of(topk_ids, "topk_ids", call.kept),
                        view_of(topk_weights, "topk_weights", call.kept)};
  const WithoutGil no_gil;
  const auto lease = layer.lend(call.num_tokens, call.options, scratch, call.kept);
  layer.layer.forward_routed(call.hidden_states, routing, call.output, lease.workspace,
                             call.options);
}

/// A forward between its parts, with what it reads and writes.
class PyStep {
 public:
  PyStep(Kept kept, PyLayer::Lease lease, MoeLayer::Step step)
      : kept_(std::move(kept)), lease_(std::move(lease)), step_(std::move(step)) {}
  void compute() {
    const WithoutGil no_gil;
    step_.compute();
  }
  void finish() {
    const WithoutGil no_gil;
    step_.finish();
  }

 private:
  Kept kept_;
  PyLayer::Lease lease_;
  MoeLayer::Step step_;
};

/// topk_weights and topk_ids: the caller's routing, or None.
std::unique_ptr<PyStep> begin(PyLayer& layer, nb::handle x, nb::handle topk_weights,
                              nb::handle topk_ids, nb::handle out, bool accumulate,
                              std::optional<std::uintptr_t> stream, nb::handle scratch,
                              std::int64_t max_tokens, nb::handle dropped_rows, bool fixed_sizes,
                              nb::handle expert_load, nb::handle expert_map, int lane) {
  Call call(layer, x, out, accumulate, stream, max_tokens, dropped_rows, fixed_sizes, expert_load,
            expert_map, lane);
  const Routing routing{view_of(topk_ids, "topk_ids", call.kept),
                        view_of(topk_weights, "topk_weights", call.kept)};
  const WithoutGil no_gil;
  auto lease = layer.lend(call.num_tokens, call.options, scratch, call.kept);
  MoeLayer::Step step =
      routing.topk_ids || routing.topk_weights
          ? layer.layer.begin_routed(call.hidden_states, routing, call.output, lease.workspace,
                                     call.options)
          : layer.layer.begin(call.hidden_states, call.output, lease.workspace, call.options);
  return std::make_unique<PyStep>(std::move(call.kept), std::move(lease), std::move(step));
}

/// Binds a kind of forward. All of them take hidden states first and the same options last; `own`
/// is what this one takes between them.
template <typename... Own>
void bind_call(nb::class_<PyLayer>& layer, const char* name, auto function, const Own&... own) {
  layer.def(name, function, nb::arg("x").none(), own..., nb::arg("out").none(),
            nb::arg("accumulate"), nb::arg("stream").none(), nb::arg("scratch").none(),
            nb::arg("max_tokens"), nb::arg("dropped_rows").none(), nb::arg("fixed_sizes"),
            nb::arg("expert_load").none(), nb::arg("expert_map").none(), nb::arg("lane"));
}

void bind_layer(nb::module_& module) {
  nb::class_<PyStep>(module, "Step")
      .def("compute", &PyStep::compute)
      .def("finish", &PyStep::finish);
  nb::class_<PyLayer> layer(module, "Layer");
  const auto weights = nb::arg("topk_weights").none(), ids = nb::arg("topk_ids").none();
  bind_call(layer, "forward", &forward, weights, ids, nb::arg("router_logits").none());
  bind_call(layer, "forward_routed", &forward_routed, weights, ids);
  bind_call(layer, "begin", &begin, weights, ids, nb::keep_alive<0, 1>());
  layer
      .def("repack", &repack, nb::arg("expert"), nb::arg("w13").none(), nb::arg("w2").none(),
           nb::arg("settings"))
      .def("workspace_bytes",
           [](const PyLayer& self, std::int64_t num_tokens, bool fixed_sizes) {
             return self.layer.workspace_bytes(num_tokens, fixed_sizes);
           })
      .def("shared_bytes",
           [](const PyLayer& self, std::int64_t num_tokens) {
             return self.layer.shared_bytes(num_tokens);
           })
      .def("placement",
           [](const PyLayer& self) {
             const auto placement = self.layer.placement();
             return placement ? std::optional(placement->json()) : std::nullopt;
           })
      .def(
          "start_move",
          [](PyLayer& self, const std::string& placement, PyCommunicator* over) {
            const ExpertPlacement wanted = ExpertPlacement::parse(placement);
            const WithoutGil no_gil;
            over ? self.layer.start_move(wanted, *over->communicator)
                 : self.layer.start_move(wanted);
          },
          nb::arg("placement"), nb::arg("over").none())
      .def("commit_move",
           [](PyLayer& self) {
             const WithoutGil no_gil;
             self.layer.commit_move();
           })
      .def("rebind", &rebind, nb::arg("communicator"), nb::arg("placement"),
           nb::arg("checkpoint").none(), nb::arg("layer"), nb::arg("lost").none())
      .def("save_packed",
           [](const PyLayer& self, const std::string& path) {
             const WithoutGil no_gil;
             self.layer.save_packed(path);
           })
      .def("plan_line", [](const PyLayer& self) { return self.layer.plan_line(); })
      .def("plan_json", [](const PyLayer& self) { return self.layer.plan_json(); })
      .def("table", [](const PyLayer& self) { return self.layer.selection().table(); })
      .def("info", [](const PyLayer& self) {
        const MoeConfig& config = self.layer.config();
        nb::dict info;
        info["num_experts"] = config.num_experts;
        info["num_local_experts"] = config.num_local_experts;
        info["num_zero_experts"] = self.layer.router().num_zero_experts;
        info["topk"] = config.topk;
        info["hidden"] = self.layer.hidden();
        info["intermediate"] = config.intermediate;
        info["dtype"] = std::string(name(config.dtype));
        info["output_dtype"] = std::string(name(self.output_dtype));
        info["scheme"] = name(config.scheme);
        info["device"] = to_string(config.device);
        info["packed_bytes"] = self.layer.packed_weights().nbytes();
        return info;
      });
}

}  // namespace

void bind_layers(nb::module_& module) {
  bind_prepared_layers(module);
  nb::class_<PreparedLayer>(module, "PreparedLayer").def("make", &make);
  bind_layer(module);
}

}  // namespace fusedmoe::python
