// Communicator: gathers texts over the control plane, moves rows over the data plane, and turns
// what goes wrong on one rank into the same Error on all. The second is in communicator_steps.cpp.
//
// Names in the control plane: <prefix>g<number>/<rank> for a gather; "failure" for the reason of
// the end, which also ends all parts that were split off. The first reason counts. A rank that
// waits looks for it every few milliseconds.
//
// When a text can be forgotten: a rank posts its text of gather n after it has read all texts of
// gather n - 1. So once a rank has read all texts of gather n, every rank has read its text of
// gather n - 1, and the control plane forgets that.
#include <algorithm>
#include <sstream>
#include <utility>

#include "comm/communicator_impl.h"
#include "comm/peer_watch.h"
#include "comm/place.h"
#include "core/check.h"
#include "core/device_runtime.h"
#include "core/exception_text.h"

namespace fusedmoe {
namespace {

using std::chrono::milliseconds;

using comm::kPollInterval;

std::string list(std::span<const int> ranks) {
  return core::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", core::join(ranks, ", "));
}

}  // namespace

Communicator::Impl::Impl() = default;

/// A part's last text goes to the whole: when that has gathered once more, all members of the part
/// have read it.
Communicator::Impl::~Impl() {
  peer_watch.reset();  // it asks the control plane
  if (!read_texts_of_whole) return;
  const std::lock_guard lock(read_texts_of_whole->mutex);
  auto& names = read_texts_of_whole->names;
  names.insert(names.end(), read_texts->names.begin(), read_texts->names.end());
}

/// Why the communicator ended, empty while it has not. Another rank may know: the control plane is
/// asked. Where that is gone, this is the reason. Or kernels of this rank have given up, which the
/// others are told.
std::string Communicator::Impl::find_failure() const {
  {
    const std::lock_guard lock(mutex);
    if (!failure.empty()) return failure;
  }
  std::optional<std::string> posted;
  try {
    posted = control->read("failure", milliseconds(0));
    const std::string gave_up = posted ? std::string() : why_gave_up();
    if (!gave_up.empty()) {
      control->post("failure", gave_up);
      posted = control->read("failure", milliseconds(0)).value_or(gave_up);
    }
  } catch (...) {
    posted = core::current_exception_text();
  }
  if (!posted) return {};
  const std::lock_guard lock(mutex);
  if (failure.empty()) failure = *posted;
  return failure;
}

/// Why kernels of this rank have given up; empty: they have not.
std::string Communicator::Impl::why_gave_up() const {
  const std::lock_guard lock(mutex);
  std::string why = peers ? peers->failure() : std::string();
  const auto ask = [&](const auto& parts) {
    for (const auto& [key, part] : parts) {
      if (why.empty()) why = part->impl_->why_gave_up();
    }
  };
  ask(shared_parts);
  ask(lanes);
  return why;
}

/// Tells all ranks why the communicator ends. Returns the first reason, maybe another rank's.
std::string Communicator::Impl::end(const std::string& reason) {
  try {
    control->post("failure", reason);
  } catch (...) {
    // The others notice by themselves that the control plane is gone.
  }
  find_failure();
  const std::lock_guard lock(mutex);
  if (failure.empty()) failure = reason;  // the control plane is silent
  return failure;
}

/// Ends the communicator because of ranks that did not arrive, with their global numbers: whoever
/// reads the reason may be in another part.
void Communicator::Impl::fail(std::string_view what, std::span<const int> late) {
  const auto seconds = static_cast<double>(options.timeout.count()) / 1000;
  std::string reason = find_failure();
  if (reason.empty()) {
    const std::optional<int> silent = control->silent_rank();
    reason = core::format("{}: {} did not arrive within {} s", what,
                          silent ? list({&*silent, 1}) : list(late), seconds);
    reason = end(reason);
  }
  if (data) data->abort();
  throw Error::communication(reason);
}

/// What the hook throws ends the wait, so the other ranks would wait for this one.
void Communicator::Impl::call_hook() {
  try {
    call_wait_hook();
  } catch (...) {
    end(core::format("rank {}: {}", global(rank), core::current_exception_text()));
    throw;
  }
}

/// A name's text, or empty when the deadline has passed. Throws Error when a rank has given up.
std::string Communicator::Impl::read(const std::string& name, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    const milliseconds step = std::clamp(left, milliseconds(0), kPollInterval);
    if (std::optional<std::string> text = control->read(name, step)) return *text;
    if (std::string reason = find_failure(); !reason.empty()) throw Error::communication(reason);
    call_hook();
    if (left <= milliseconds(0)) return {};
  }
}

/// Which ranks share this host, and who can read whose memory.
void Communicator::Impl::describe_hosts(Communicator& communicator) {
  struct Place {
    std::string host, process, device, wish;
  };
  std::vector<Place> places;
  for (const std::string& text : communicator.gather(comm::describe_place(options), "joining")) {
    std::istringstream lines(text);
    Place& place = places.emplace_back();
    for (std::string* line : {&place.host, &place.process, &place.device, &place.wish}) {
      std::getline(lines, *line);
    }
  }
  const Place& here = places[rank];
  const core::DeviceRuntime& runtime = core::runtime_of(options.device);
  for (const Place& place : places) {
    devices.push_back(place.host + " " + place.device);
    wishes.push_back(place.wish);
  }
  for (int a = 0; a < size; ++a) {
    if (places[a].host == here.host) host_ranks.push_back(a);
    for (int b = 0; b < size; ++b) {
      const Place &reader = places[a], &owner = places[b];
      bool reads = a == b;
      if (options.device.is_cpu()) {
        reads |= reader.host == owner.host && reader.process == owner.process;
      } else if (reader.host == here.host && owner.host == here.host) {
        // Devices of other hosts cannot be asked from here.
        reads |= runtime.can_access(reader.device, owner.device);
      }
      access.push_back(reads);
    }
  }
}

Communicator::Communicator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Communicator::Communicator(int rank, int size, std::shared_ptr<ControlPlane> control,
                           std::shared_ptr<DataPlane> data, CommunicatorOptions options)
    : impl_(std::make_unique<Impl>()) {
  FUSEDMOE_CHECK_FAULT(control, kNull, "control", "null", "a control plane");
  impl_->rank = rank;
  impl_->size = size;
  impl_->control = std::move(control);
  impl_->data = std::move(data);
  impl_->options = options;
  try {
    comm::check_place(rank, size, options.timeout);
    FUSEDMOE_CHECK_FAULT(
        !impl_->data || impl_->data->device().kind == options.device.kind, kDevice,
        "options.device", to_string(options.device),
        core::format("that of the data plane, {}", to_string(impl_->data->device())));
    impl_->describe_hosts(*this);
    if (impl_->data && !impl_->no_peer_memory().empty()) impl_->data->connect();
  } catch (...) {
    comm::post_failure(*impl_->control, rank, core::current_exception_text());
    throw;
  }
}

Communicator::~Communicator() = default;

int Communicator::rank() const {
  return impl_->rank;
}
int Communicator::size() const {
  return impl_->size;
}
int Communicator::global_rank(int r) const {
  FUSEDMOE_CHECK(r >= 0 && r < impl_->size, "rank", core::to_string(r),
                 core::format("in [0, {})", impl_->size));
  return impl_->global(r);
}
Device Communicator::device() const {
  return impl_->options.device;
}
std::string_view Communicator::backend() const {
  return impl_->data ? impl_->data->name() : "none";
}
milliseconds Communicator::timeout() const {
  return impl_->options.timeout;
}
bool Communicator::wants_peer_memory() const {
  return std::ranges::find(impl_->wishes, "yes") != impl_->wishes.end();
}
const std::vector<int>& Communicator::ranks_of_host() const {
  return impl_->host_ranks;
}
bool Communicator::peer_access(int a, int b) const {
  FUSEDMOE_CHECK(std::min(a, b) >= 0 && std::max(a, b) < impl_->size, "rank",
                 core::format("{} and {}", a, b), core::format("in [0, {})", impl_->size));
  return impl_->access[static_cast<std::size_t>(a) * impl_->size + b];
}

void Communicator::barrier() {
  gather("", "barrier");
}

std::vector<std::string> Communicator::gather(std::string_view text, std::string_view what) {
  check();
  const bool fits = text.size() <= comm::kMostGathered;
  const std::string mine = fits ? "=" + std::string(text) : "!" + core::to_string(text.size());
  std::vector<std::string> texts = impl_->gather_marked(mine, what);
  for (int r = 0; r < impl_->size; ++r) {
    const bool too_long = texts[r].starts_with('!');
    texts[r].erase(0, 1);
    FUSEDMOE_CHECK(!too_long, core::format("text of rank {} for {}", impl_->global(r), what),
                   core::format("{} bytes", texts[r]),
                   core::format("at most {}", comm::kMostGathered));
  }
  return texts;
}

/// `text` is not empty, as read() gives an empty one where nobody has posted any.
std::vector<std::string> Communicator::Impl::gather_marked(const std::string& text,
                                                           std::string_view what) {
  const std::string name = core::format("{}g{}/", prefix, gathers++);
  const std::string own = name + core::to_string(rank);
  std::vector<std::string> read_by_all;
  {
    const std::lock_guard lock(read_texts->mutex);
    read_by_all = std::exchange(read_texts->names, {own});
  }
  control->post(own, text);
  const Clock::time_point deadline = Clock::now() + options.timeout;
  std::vector<std::string> texts;
  std::vector<int> late;
  for (int r = 0; r < size; ++r) {
    texts.push_back(read(name + core::to_string(r), deadline));
    if (texts.back().empty()) late.push_back(global(r));
  }
  if (!late.empty()) fail(what, late);
  try {
    for (const std::string& each : read_by_all) control->forget(each);
  } catch (...) {
    // All texts are here. Who keeps them may have left since.
  }
  return texts;
}

void Communicator::together(const std::function<void()>& step, std::string_view what) {
  std::string mine;  // begins with '!' where the step has failed
  try {
    step();
  } catch (...) {
    mine = "!" + core::current_exception_text();
  }
  const std::vector<std::string> texts = gather(mine, what);
  std::vector<std::string> errors;
  for (int r = 0; r < impl_->size; ++r) {
    if (texts[r].empty()) continue;
    errors.push_back(core::format("rank {}: {}", impl_->global(r), texts[r].substr(1)));
  }
  if (!errors.empty()) throw Error::communication(core::join(errors, "; "));
}

std::shared_ptr<Communicator> Communicator::split(int color) {
  Impl& impl = *impl_;
  const std::vector<std::string> colors = gather(core::to_string(color), "split");
  try {
    // Here are all ranks, without whom a part cannot connect.
    if (impl.data) connect();
  } catch (const Error&) {
    // A part that needs messages will say so.
  }
  return std::shared_ptr<Communicator>(new Communicator(part_of(colors)));
}

/// That of the ranks with this one's color.
std::unique_ptr<Communicator::Impl> Communicator::part_of(const std::vector<std::string>& colors) {
  Impl& impl = *impl_;
  auto part = std::make_unique<Impl>();
  part->prefix = core::format("{}s{}.{}/", impl.prefix, impl.splits++, colors[impl.rank]);
  part->read_texts_of_whole = impl.read_texts;
  part->control = impl.control;
  part->data = impl.data;
  part->shared = impl.shared;
  part->asked_to_share = true;  // its memory is that of the whole, or there is none
  part->options = impl.options;
  for (int r = 0; r < impl.size; ++r) {
    if (colors[r] != colors[impl.rank]) continue;
    if (r == impl.rank) part->rank = static_cast<int>(part->members.size());
    part->members.push_back(r);
  }
  part->size = static_cast<int>(part->members.size());
  for (int a = 0; a < part->size; ++a) {
    const auto& of_host = impl.host_ranks;
    const bool here = std::find(of_host.begin(), of_host.end(), part->members[a]) != of_host.end();
    if (here) part->host_ranks.push_back(a);
    part->devices.push_back(impl.devices[part->members[a]]);
    part->wishes.push_back(impl.wishes[part->members[a]]);
    for (int b = 0; b < part->size; ++b) {
      part->access.push_back(peer_access(part->members[a], part->members[b]));
    }
  }
  for (int& member : part->members) member = impl.global(member);
  return part;
}

std::shared_ptr<Communicator> Communicator::shared_part(int color) {
  const std::shared_ptr<Communicator> part = split(color);
  const std::lock_guard lock(impl_->mutex);
  return impl_->shared_parts.emplace(part->impl_->members, part).first->second;
}

std::shared_ptr<Communicator> Communicator::lane(int number) {
  FUSEDMOE_CHECK(number >= 1, "lane", core::to_string(number), "at least 1");
  const auto found = impl_->lanes.find(number);
  if (found != impl_->lanes.end()) return found->second;
  const std::vector<std::string> colors = gather(core::format("lane{}", number), "making a lane");
  FUSEDMOE_CHECK(std::ranges::count(colors, colors[0]) == impl_->size, "lane",
                 core::to_string(number), "the same on all ranks");
  std::unique_ptr<Impl> part = part_of(colors);
  part->data = nullptr;
  std::shared_ptr<Communicator> made(new Communicator(std::move(part)));
  const std::lock_guard lock(impl_->mutex);
  return impl_->lanes.emplace(number, std::move(made)).first->second;
}

void Communicator::abort(std::string_view reason) noexcept {
  try {
    if (impl_->find_failure().empty()) {
      impl_->end(core::format("rank {}: {}", impl_->global(impl_->rank), reason));
    }
  } catch (...) {
    // No memory for the reason, or a control plane of the caller's that threw something else.
    const std::lock_guard lock(impl_->mutex);
    if (impl_->failure.empty()) impl_->failure = "aborted";
  }
  if (impl_->data) impl_->data->abort();
}

std::string Communicator::status() const {
  return impl_->find_failure();
}

void Communicator::check() const {
  if (const std::string reason = status(); !reason.empty()) throw Error::communication(reason);
}

std::uint64_t Communicator::next_step() {
  return impl_->steps++;
}
std::uint64_t Communicator::next_layer() {
  return impl_->layers++;
}

}  // namespace fusedmoe
