// The extension module fusedmoe._core: the C++ interface for the Python code beside it, which has
// the public names, defaults and documentation.
#include "module.h"

#include <nanobind/stl/string.h>

#include "fusedmoe/error.h"
#include "fusedmoe/log.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/version.h"
#include "gil.h"

namespace fusedmoe::python {
namespace {

namespace nb = nanobind;

PyObject* exception_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return PyExc_ValueError;
    case ErrorKind::kUnsupported:
      return PyExc_NotImplementedError;
    case ErrorKind::kOutOfMemory:
      return PyExc_MemoryError;
    case ErrorKind::kIo:
      return PyExc_OSError;
    case ErrorKind::kDevice:
    case ErrorKind::kCommunication:
    case ErrorKind::kCancelled:
    case ErrorKind::kInternal:
      break;
  }
  return PyExc_RuntimeError;
}

/// The exception of the kind, with the argument at fault as its attribute.
void raise(const Error& error) {
  PyObject* type = exception_of(error.kind());
  const std::string argument(python_name(error.argument()));
  std::string text = error.what();
  if (text.starts_with(error.argument())) text.replace(0, error.argument().size(), argument);
  nb::object exception = nb::borrow(type)(text);
  exception.attr("argument") = argument;
  exception.attr("fault") = std::string(name(error.fault()));
  exception.attr("reason") = std::string(code(error.reason()));
  PyErr_SetObject(type, exception.ptr());
}

/// Calls log(level, message) of Python, as long as the program lives.
void set_log(const nb::object& log) {
  const auto* const function = new nb::object(log);  // threads may outlive the interpreter
  const auto hook = [function](LogLevel level, std::string_view message) {
    const WithGil gil;
    (*function)(static_cast<int>(level), std::string(message));
  };
  const WithoutGil no_gil;
  set_log_hook(hook);
}

void translate_errors() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace
}  // namespace fusedmoe::python

NB_MODULE(_core, module) {
  using namespace fusedmoe::python;
  nanobind::set_leak_warnings(false);  // caches live as long as the program
  translate_errors();
  bind_tensors(module);
  bind_layers(module);
  bind_ranks(module);
  bind_experts(module);
  bind_numbers(module);
  bind_openmp(module);
  bind_quantize_checkpoint(module);
  module.attr("version") = fusedmoe::version();
  module.def("set_log", &set_log, nanobind::arg("log"));
  module.def(
      "cpu_isa", [] { return std::string(fusedmoe::cpu_isa()); },
      "Instruction set of the CPU kernels: \"avx512_bf16\", ...");
  module.def("num_threads", &fusedmoe::num_threads, "Threads of CPU work.");
  module.def("set_num_threads", &fusedmoe::set_num_threads, nanobind::arg("num_threads"),
             "Sets the threads of CPU work; 0 restores the default.");
  module.def("cuda_device_count", &fusedmoe::cuda_device_count, "CUDA devices that there are.");
  module.def("cuda_device_summary", &fusedmoe::cuda_device_summary);
  module.def(
      "device_problem",
      [](const std::string& device) {
        return fusedmoe::device_problem(fusedmoe::parse_device(device));
      },
      nanobind::arg("device"), "Why a device cannot be used, in words; empty if it can.");
}
