#include <fusedmoe/comm.h>

#include <cstdio>

int main() {
  std::puts(fusedmoe::mpi_summary().c_str());
  return 0;
}
