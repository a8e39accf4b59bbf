// Copies from host memory that does not outlive the caller.
#pragma once

#include <vector>

#include "fusedmoe/runtime.h"

namespace fusedmoe::cuda {

/// Host memory that copies read until the stream is synchronized, also where something throws
/// before: where a GPU reads a process's pages itself, as Grace Hopper does, a copy takes nothing
/// aside when it is enqueued.
class Uploads {
 public:
  explicit Uploads(Stream stream) : stream_(stream) {}
  ~Uploads() {
    try {
      if (!sources_.empty()) wait();
    } catch (...) {
      // The device is gone, and the copies with it.
    }
  }
  Uploads(const Uploads&) = delete;
  Uploads& operator=(const Uploads&) = delete;

  void add(const Tensor& host, const TensorView& to) {
    sources_.push_back(host);
    copy(host, to, stream_);
  }
  void wait() {
    synchronize(stream_);
    sources_.clear();
  }

 private:
  const Stream stream_;
  std::vector<Tensor> sources_;
};

}  // namespace fusedmoe::cuda
