// Whole checkpoints, quantized.
#include "tools/quantize_checkpoint.h"

#include <nanobind/stl/string.h>

#include "gil.h"
#include "module.h"
#include "settings.h"

namespace fusedmoe::python {
namespace {

/// `progress` is called with the GIL; what it raises, Ctrl-C too, ends the work.
std::int64_t quantize_checkpoint_of(const std::string& checkpoint, const std::string& output,
                                    const nb::dict& settings, nb::handle progress) {
  QuantizeCheckpointOptions options;
  options.scheme = parse_scheme(get<std::string>(settings, "scheme", ""));
  const auto layout = get<std::string>(settings, "layout", "");
  if (!layout.empty()) options.layout = parse_checkpoint_layout(layout);
  options.scale_rule =
      parse_enum<MxScaleRule>(get<std::string>(settings, "scale_rule", "ocp"), 4, "scale_rule",
                              [](MxScaleRule rule) { return name(rule); });
  options.calibration = get<std::string>(settings, "calibration", "");
  options.max_shard_bytes = get<std::int64_t>(settings, "max_shard_bytes", options.max_shard_bytes);
  options.progress = [&](std::int64_t done, std::int64_t total) {
    const WithGil gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (!progress.is_none()) progress(done, total);
  };
  const WithoutGil no_gil;
  return quantize_checkpoint(checkpoint, options, output);
}

}  // namespace

void bind_quantize_checkpoint(nb::module_& module) {
  module.def("quantize_checkpoint", &quantize_checkpoint_of, nb::arg("checkpoint"),
             nb::arg("output"), nb::arg("settings"), nb::arg("progress").none());
}

}  // namespace fusedmoe::python
