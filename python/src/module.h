// What each file adds to the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace fusedmoe::python {

void bind_tensors(nanobind::module_& module);
void bind_layers(nanobind::module_& module);
void bind_ranks(nanobind::module_& module);
void bind_experts(nanobind::module_& module);
void bind_numbers(nanobind::module_& module);
void bind_openmp(nanobind::module_& module);
void bind_quantize_checkpoint(nanobind::module_& module);

}  // namespace fusedmoe::python
