// Settings that layers, experts and routers read from Python's dicts.
#pragma once

#include <string>

#include "fusedmoe/layer.h"
#include "tensors.h"

namespace fusedmoe::python {

/// w13, w2 and what belongs to them, from a dict with vLLM's names: w1_scale, w2_scale, w1_zp, ...
ExpertWeights::Stacked stacked_of(nb::handle w13, nb::handle w2, const nb::dict& settings,
                                  Kept& kept);
/// "scheme" of the dict; none: unquantized, the dtype of w13.
QuantScheme scheme_of(const nb::dict& settings, const Tensor& w13);
ActivationParams params_of(const nb::dict& settings);
RouterConfig router_of(const nb::dict& settings);

/// `text` among the names of the values 0, 1, ..., count - 1.
template <typename Enum, typename NameOf>
Enum parse_enum(const std::string& text, int count, const char* argument, NameOf name_of) {
  std::string known;
  for (int i = 0; i < count; ++i) {
    const auto value = static_cast<Enum>(i);
    if (name_of(value) == text) return value;
    known += (i > 0 ? ", " : "") + std::string(name_of(value));
  }
  throw Error::unknown_name(argument, text, known);
}

}  // namespace fusedmoe::python
