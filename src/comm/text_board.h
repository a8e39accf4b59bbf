// Texts by name in one process, with waiting: the control plane of threads, and what the server of
// the TCP control plane keeps.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>

#include "fusedmoe/comm.h"

namespace fusedmoe::comm {

class TextBoard final : public ControlPlane {
 public:
  void post(const std::string& name, std::string_view text) override;
  std::optional<std::string> read(const std::string& name,
                                  std::chrono::milliseconds timeout) override;
  void forget(const std::string& name) override { drop(name); }
  /// The same. Returns how many bytes name and text had.
  std::uint64_t drop(const std::string& name);

 private:
  std::mutex mutex_;
  std::condition_variable posted_;
  std::map<std::string, std::string> texts_;
};

}  // namespace fusedmoe::comm
