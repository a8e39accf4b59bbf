// Communicators, and what a layer's settings say of its ranks.
#pragma once

#include "fusedmoe/layer.h"
#include "tensors.h"

namespace fusedmoe::python {

/// A communicator that Python holds; layers share what is in it.
struct PyCommunicator {
  std::shared_ptr<Communicator> communicator;
};

/// Sets the communicator and its options from the settings that belong to ranks.
void read_ranks(const nb::dict& settings, LayerOptions& options);

void bind_ranks(nb::module_& module);

}  // namespace fusedmoe::python
