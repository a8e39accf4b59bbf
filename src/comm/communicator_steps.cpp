// The steps of a Communicator that move bytes: messages, collectives, and memory that ranks lend
// each other. What goes wrong in one ends the communicator on all ranks.
#include <algorithm>
#include <utility>

#include "comm/communicator_impl.h"
#include "core/check.h"
#include "core/exception_text.h"

namespace fusedmoe {
namespace {

Error without_collectives(std::string_view plane) {
  return Error::unsupported(Reason::kOperation, "collective",
                            core::format("{} has messages only, no collectives", plane));
}

}  // namespace

void DataPlane::all_gather(std::span<const Gather>, Stream, Waiting&) {
  throw without_collectives(name());
}
void DataPlane::reduce_scatter(const void*, void*, std::int64_t, DType, Stream, Waiting&) {
  throw without_collectives(name());
}

void DataPlane::lend(const void*, std::span<const int>, const Reader&, Waiting&) {
  throw Error::unsupported(Reason::kOperation, "lend",
                           core::format("the ranks of {} cannot read each other's memory", name()));
}

/// Watches one step of the data plane.
class Communicator::Impl::Watch final : public Waiting {
 public:
  Watch(Impl& impl, std::string_view what)
      : impl_(impl), what_(what), deadline_(Clock::now() + impl.options.timeout) {}
  std::string_view what() const override { return what_; }
  void moved() override { moved_ = true; }
  void check(std::span<const int> late) override {
    const Clock::time_point now = Clock::now();
    if (std::exchange(moved_, false)) deadline_ = now + impl_.options.timeout;
    if (now >= deadline_) impl_.fail(what_, late);  // numbers of the data plane
    if (now < next_look_) return;
    next_look_ = now + comm::kPollInterval;
    if (const std::string reason = impl_.find_failure(); !reason.empty()) {
      impl_.data->abort();
      throw Error::communication(reason);
    }
    call_wait_hook();
  }

 private:
  Impl& impl_;
  std::string_view what_;
  bool moved_ = false;
  Clock::time_point deadline_, next_look_ = Clock::now() + comm::kPollInterval;
};

template <typename Step>
void Communicator::Impl::run(Communicator& communicator, std::string_view what, const Step& step) {
  FUSEDMOE_CHECK_FAULT(data, kNull, "communicator", "without a data plane", "one with it");
  {
    const std::lock_guard lock(mutex);
    if (!failure.empty()) throw Error::communication(failure);
  }
  Watch watch(*this, what);
  try {
    step(watch);
  } catch (const Error& error) {
    communicator.abort(core::format("{}: {}", what, error.what()));
    throw Error::communication(communicator.status());  // the same on every rank
  } catch (...) {  // of who reads what is lent: no memory, for one
    communicator.abort(core::format("{}: {}", what, core::current_exception_text()));
    throw;
  }
}

std::vector<Message> Communicator::Impl::outside(std::span<const Message> messages) const {
  std::vector<Message> result(messages.begin(), messages.end());
  for (Message& message : result) {
    FUSEDMOE_CHECK(message.peer >= 0 && message.peer < size, "message.peer",
                   core::to_string(message.peer), core::format("in [0, {})", size));
    message.peer = global(message.peer);
  }
  return result;
}

void Communicator::connect(std::string_view why) {
  check();
  const std::shared_ptr<DataPlane>& data = impl_->data;
  FUSEDMOE_CHECK_FAULT(data, kNull, "communicator", "without a data plane",
                       core::format("one with it, for {}", why));
  try {
    data->connect();
  } catch (const Error& error) {
    check();  // a rank has failed: every call throws that reason
    throw Error::communication(core::format("{}: {}", why, error.what()));
  } catch (...) {  // of a wait hook, for one
    abort(core::current_exception_text());
    throw;
  }
}

void Communicator::exchange(std::span<const Message> sends, std::span<const Message> receives,
                            Stream stream, std::string_view what) {
  Impl& impl = *impl_;
  impl.run(*this, what, [&](Waiting& waiting) {
    impl.data->exchange(impl.outside(sends), impl.outside(receives), stream, waiting);
  });
}

bool Communicator::is_byte_stream() const {
  return impl_->data && impl_->data->is_byte_stream();
}

bool Communicator::can_lend() const {
  return impl_->data && impl_->data->can_lend();
}

void Communicator::lend(std::string_view kind, const void* mine, const DataPlane::Reader& read,
                        std::string_view what) {
  using Lent = comm::SharedMemory::Lent;
  Impl& impl = *impl_;
  std::vector<int> peers(impl.size);
  for (int r = 0; r < impl.size; ++r) peers[r] = impl.global(r);
  const auto check_and_read = [&](std::span<const Lent> all) {
    std::vector<const void*> lent;
    for (const Lent& each : all) {
      if (each.kind != all.front().kind) {  // compared with rank 0's, so that all say the same
        throw Error::communication(core::format("rank {} lends {}, but rank {} lends {}",
                                                peers.front(), all.front().kind, peers[lent.size()],
                                                each.kind));
      }
      lent.push_back(each.data);
    }
    read(lent);
  };
  FUSEDMOE_CHECK(!impl.shared || impl.shared->contains(mine), "memory to lend",
                 "of this process alone", "in a block of take_shared()");
  const Lent own{std::string(kind), mine};
  impl.run(*this, what, [&](Waiting& waiting) {
    if (impl.shared) return impl.shared->lend(own, peers, check_and_read, waiting);
    const auto read_there = [&](std::span<const void* const> others) {
      std::vector<Lent> all;
      for (const void* each : others) all.push_back(*static_cast<const Lent*>(each));
      check_and_read(all);
    };
    impl.data->lend(&own, peers, read_there, waiting);
  });
}

bool Communicator::share_memory() {
  Impl& impl = *impl_;
  if (impl.asked_to_share) return impl.shared != nullptr;
  impl.asked_to_share = true;
  const auto size = static_cast<std::size_t>(impl.size);
  const bool processes =
      std::count(impl.access.begin(), impl.access.end(), true) == static_cast<std::ptrdiff_t>(size);
  if (size == 1 || !processes || impl.host_ranks.size() != size) return false;
  const bool wanted = impl.options.shared_memory && impl.options.device.is_cpu();
  const std::vector<std::string> wishes = gather(wanted ? "yes" : "no", "sharing memory");
  if (std::count(wishes.begin(), wishes.end(), "yes") != impl.size) return false;
  impl.shared = comm::SharedMemory::make(impl.rank, impl.size, [&](const std::string& text) {
    return gather(text, "sharing memory");
  });
  return impl.shared != nullptr;
}

void* Communicator::take_shared(std::size_t bytes) {
  Impl& impl = *impl_;
  FUSEDMOE_CHECK_FAULT(impl.shared, kNull, "communicator", "without shared memory", "one with it");
  {
    const std::lock_guard lock(impl.mutex);
    if (!impl.failure.empty()) throw Error::communication(impl.failure);
  }
  return impl.shared->take(bytes);
}

void Communicator::give_back_shared(const void* block) noexcept {
  if (impl_->shared) impl_->shared->give_back(block);
}

bool Communicator::is_shared(const void* address) const {
  return impl_->shared && impl_->shared->contains(address);
}

bool Communicator::has_collectives() const {
  return impl_->members.empty() && impl_->data && impl_->data->has_collectives();
}

void Communicator::all_gather(std::span<const Gather> buffers, Stream stream,
                              std::string_view what) {
  if (!has_collectives()) throw without_collectives(backend());
  impl_->run(*this, what,
             [&](Waiting& waiting) { impl_->data->all_gather(buffers, stream, waiting); });
}

void Communicator::reduce_scatter(const void* data, void* out, std::int64_t count, DType dtype,
                                  Stream stream, std::string_view what) {
  if (!has_collectives()) throw without_collectives(backend());
  impl_->run(*this, what, [&](Waiting& waiting) {
    impl_->data->reduce_scatter(data, out, count, dtype, stream, waiting);
  });
}

}  // namespace fusedmoe
