// What a layer is made of, from Python's arguments or from a checkpoint.
#pragma once

#include "fusedmoe/layer.h"
#include "tensors.h"

namespace fusedmoe::python {

/// What a layer is made of. Apart from making it, which needs all ranks: what fails here on one is
/// told to the others (Communicator.together in Python).
struct PreparedLayer {
  Kept kept;  // what the weights are views of
  LayerWeights weights;
  LayerOptions options;
};

/// Stacked experts with their scales and biases: `settings` has vLLM's names, see stacked_of().
ExpertWeights experts_of(nb::handle w13, nb::handle w2, const nb::dict& settings, Kept& kept);

/// The same where `settings`, the named argument, has w13 and w2 too.
ExpertWeights experts_within(const char* argument, const nb::dict& settings, Kept& kept);

/// Checkpoint, open_checkpoint(), and what makes a PreparedLayer; that is bound by layers.cpp.
void bind_prepared_layers(nb::module_& module);

}  // namespace fusedmoe::python
