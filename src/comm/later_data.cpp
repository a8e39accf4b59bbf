#include "comm/later_data.h"

#include "fusedmoe/error.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::comm {

void LaterData::connect() {
  if (made_) return;
  if (failure_) std::rethrow_exception(failure_);
  std::shared_ptr<DataPlane> made;
  try {
    made = make_();
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
  const std::lock_guard lock(mutex_);
  if (is_aborted_) made->abort();
  made_ = std::move(made);
}

void LaterData::exchange(std::span<const Message> sends, std::span<const Message> receives,
                         Stream stream, Waiting& waiting) {
  if (!made_ && is_capturing(stream)) {
    throw Error::invalid("stream",
                         "a graph cannot record the first messages between ranks, as these connect "
                         "for it: call connect() of the communicator before");
  }
  connect();
  made_->exchange(sends, receives, stream, waiting);
}

void LaterData::all_gather(std::span<const Gather> buffers, Stream stream, Waiting& waiting) {
  made_->all_gather(buffers, stream, waiting);
}

void LaterData::reduce_scatter(const void* data, void* out, std::int64_t count, DType dtype,
                               Stream stream, Waiting& waiting) {
  made_->reduce_scatter(data, out, count, dtype, stream, waiting);
}

void LaterData::abort() noexcept {
  const std::lock_guard lock(mutex_);
  is_aborted_ = true;
  if (made_) made_->abort();
}

}  // namespace fusedmoe::comm
