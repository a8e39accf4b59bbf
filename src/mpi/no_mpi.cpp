// Stands for mpi_communicator.cpp in a build without MPI.
#include "fusedmoe/comm.h"

namespace fusedmoe {

std::shared_ptr<Communicator> make_mpi_communicator(std::optional<int>, CommunicatorOptions) {
  throw Error::unsupported(Reason::kOperation, "mpi", mpi_summary());
}

std::string mpi_summary() {
  return "built without MPI";
}

}  // namespace fusedmoe
