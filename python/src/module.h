// What each file adds to the extension module.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

namespace fusedmoe::python {

void bind_tensors(nanobind::module_& module);
void bind_layers(nanobind::module_& module);
void bind_ranks(nanobind::module_& module);
void bind_experts(nanobind::module_& module);
void bind_numbers(nanobind::module_& module);
void bind_openmp(nanobind::module_& module);
void bind_quantize_checkpoint(nanobind::module_& module);

/// What Python calls an argument of the library: w1_scale is w13_scales there.
std::string_view python_name(std::string_view argument);

}  // namespace fusedmoe::python
