#include "comm/place.h"

#include <unistd.h>

#include <array>

#include "core/format.h"

namespace fusedmoe::comm {

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "localhost";
}

std::string describe_place(Device device) {
  return core::format("{}\n{}\n{}", host_name(), getpid(), to_string(device));
}

}  // namespace fusedmoe::comm
