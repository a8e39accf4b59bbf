// Communicators, and what a layer's settings say of its ranks.
#pragma once

#include "fusedmoe/layer.h"
#include "tensors.h"

namespace fusedmoe::python {

/// A communicator that Python holds; layers share what is in it. The last one to go may wait for
/// other ranks, whose threads then need the GIL.
struct PyCommunicator {
  explicit PyCommunicator(std::shared_ptr<Communicator> made) : communicator(std::move(made)) {}
  PyCommunicator(PyCommunicator&&) = default;
  ~PyCommunicator() {
    const WithoutGil no_gil;
    communicator.reset();
  }
  std::shared_ptr<Communicator> communicator;
};

/// "combine" and "combine_dtype".
void read_combine(const nb::dict& settings, RankOptions& ranks);
/// Sets the communicator and its options from the settings that belong to ranks.
void read_ranks(const nb::dict& settings, LayerOptions& options);

}  // namespace fusedmoe::python
