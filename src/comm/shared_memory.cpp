#include "comm/shared_memory.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>

#include "core/ceil_div.h"
#include "core/check.h"
#include "core/thread_team.h"

namespace fusedmoe::comm {
namespace {

// Addresses that are reserved for each rank. Pages are there only for what ranks take.
constexpr std::size_t kReserved = std::size_t{1} << 36;
constexpr std::size_t kHugePage = std::size_t{1} << 21;
constexpr std::size_t kPage = 4096;
// On 64-bit Linux libraries and heaps lie elsewhere. Where a processor or a sanitizer has no such
// addresses, the system offers others.
constexpr std::uintptr_t kFreeBegin = std::uintptr_t{1} << 45;
constexpr std::uintptr_t kFreeEnd = kFreeBegin + (kFreeBegin >> 1);
constexpr std::size_t kMostRanks = (kFreeEnd - kFreeBegin) / kReserved / 2;
constexpr int kTries = 6;           // to find addresses that are free in every process
constexpr std::size_t kMark = 128;  // bytes for a file's mark; behind it the slots
constexpr int kSpins = 1000;        // some 50 us
constexpr std::uint64_t kSpinsPerLook = 64;

/// 128 random bits, which no other file begins with. Empty: the system has none.
std::string random_mark() {
  std::array<std::uint64_t, 2> bits{};
  if (getrandom(bits.data(), sizeof bits, 0) != sizeof bits) return {};
  return core::format("{}.{}", bits[0], bits[1]);
}

/// Another rank's file, read-only. -1: it cannot be opened, or is not that rank's, as processes of
/// another container have other numbers.
int open_file(const std::string& process, const std::string& number, const std::string& mark) {
  const std::string path = core::format("/proc/{}/fd/{}", process, number);
  struct stat status {};  // to open a pipe or a device of somebody else's would not be harmless
  if (stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return -1;
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file < 0) return -1;
  std::string found(mark.size(), '\0');
  const ssize_t size = pread(file, found.data(), found.size(), 0);
  if (size == static_cast<ssize_t>(mark.size()) && found == mark) return file;
  close(file);
  return -1;
}

/// Whether this process may have so many more bytes, in a file as long as that. Otherwise the
/// system would not refuse them but kill: it counts a file's pages only when they are touched, and
/// a file that is longer than the limit is a signal.
bool allowed(std::size_t file_bytes, std::size_t more) {
  rlimit most{};
  if (getrlimit(RLIMIT_FSIZE, &most) == 0 && file_bytes > most.rlim_cur) return false;
  void* const own = mmap(nullptr, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (own == MAP_FAILED) return false;
  munmap(own, more);
  return true;
}

/// The words of a text.
std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

}  // namespace

/// What a rank tells one other. Only its owner writes it.
struct alignas(128) SharedMemory::Slot {
  std::atomic<std::uint64_t> lent{0};  // how often the owner has lent the peer something
  std::atomic<std::uint64_t> read{0};  // how often it has read what the peer lent
  std::atomic<int> core{0};            // where the owner ran, from 1 on
  const void* data = nullptr;
  std::array<char, 64> kind{};  // ends with zeros
  static constexpr std::size_t kKindLength = 63;
};

SharedMemory::SharedMemory(int rank, int size)
    : rank_(rank),
      size_(size),
      file_(memfd_create("fusedmoe", MFD_CLOEXEC)),
      mark_(random_mark()),
      header_bytes_(core::round_up(kMark + size * sizeof(Slot), kPage)),
      lendings_(static_cast<std::size_t>(size)) {
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
  const auto mark_bytes = static_cast<ssize_t>(mark_.size());
  if (file_ >= 0 && (ftruncate(file_, static_cast<off_t>(header_bytes_)) != 0 ||
                     pwrite(file_, mark_.data(), mark_.size(), 0) != mark_bytes)) {
    mark_.clear();
  }
}

std::shared_ptr<SharedMemory> SharedMemory::make(int rank, int size, const Gather& gather) {
  if (static_cast<std::size_t>(size) > kMostRanks) return nullptr;
  std::shared_ptr<SharedMemory> memory(new SharedMemory(rank, size));
  for (int i = 0; i < kTries; ++i) {
    const bool mapped = memory->map(gather(memory->offer(i >= kTries / 2)), i % size);
    const std::vector<std::string> verdicts = gather(mapped ? "mapped" : "not mapped");
    if (std::count(verdicts.begin(), verdicts.end(), "mapped") == size) return memory;
    memory->unmap();
  }
  return nullptr;
}

SharedMemory::~SharedMemory() {
  unmap();
  if (file_ >= 0) close(file_);
}

/// Process, file, mark, and an address that may be free in all processes.
std::string SharedMemory::offer(bool anywhere) const {
  const std::size_t bytes = kReserved * size_ + kHugePage;
  std::uintptr_t address = 0;
  if (!anywhere) {
    if (getrandom(&address, sizeof address, 0) != sizeof address) address = 0;
    address = kFreeBegin + address % (kFreeEnd - kFreeBegin - bytes);
  } else if (void* const found = mmap(nullptr, bytes, PROT_NONE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
             found != MAP_FAILED) {
    munmap(found, bytes);
    address = reinterpret_cast<std::uintptr_t>(found);
  }
  address = core::round_up(static_cast<std::int64_t>(address), kHugePage);
  return core::format("{} {} {} {}", getpid(), file_, mark_, address);
}

/// Maps the files of all ranks, this one's to be written, at the address that one rank offers.
/// False where that cannot be done.
bool SharedMemory::map(const std::vector<std::string>& offers, int chosen) {
  const std::string address = words_of(offers[chosen]).at(3);
  std::uintptr_t begin = 0;
  std::from_chars(address.data(), address.data() + address.size(), begin);
  if (file_ < 0 || mark_.empty() || begin == 0) return false;
  void* const wanted = reinterpret_cast<void*>(begin);  // NOLINT(performance-no-int-to-ptr)
  // Where these addresses are not free the system takes others. (MAP_FIXED_NOREPLACE would refuse,
  // but ThreadSanitizer makes the address 0 of one that it does not have.)
  void* const reserved = mmap(wanted, kReserved * size_, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return false;
  base_ = static_cast<char*>(reserved);
  if (reserved != wanted) return false;
  for (int r = 0; r < size_; ++r) {
    const std::vector<std::string> words = words_of(offers[r]);
    const bool mine = r == rank_;
    const int file = mine ? file_ : open_file(words.at(0), words.at(1), words.at(2));
    if (file < 0) return false;
    void* const mapped = mmap(memory_of(r), kReserved, mine ? PROT_READ | PROT_WRITE : PROT_READ,
                              MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, 0);
    if (!mine) close(file);
    if (mapped == MAP_FAILED) return false;
    madvise(mapped, kReserved, MADV_HUGEPAGE);  // where the system allows it for such files
  }
  return true;
}

void SharedMemory::unmap() noexcept {
  if (base_) munmap(base_, kReserved * size_);
  base_ = nullptr;
}

char* SharedMemory::memory_of(int rank) const {
  return base_ + kReserved * rank;
}

bool SharedMemory::contains(const void* address) const {
  const auto* byte = static_cast<const char*>(address);
  return std::less_equal<>()(memory_of(rank_), byte) &&
         std::less<>()(byte, memory_of(rank_) + kReserved);
}

void* SharedMemory::take(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  bytes = std::max<std::size_t>(bytes, 1);  // so that no two blocks have one address
  std::size_t begin = header_bytes_;
  auto next = blocks_.begin();
  while (next != blocks_.end() && next->begin - begin < bytes) begin = next++->end;
  if (bytes > kReserved - begin) throw Error::out_of_memory(bytes, "memory that processes share");
  const std::size_t end = begin + core::round_up(bytes, kPage);
  grow(end);
  blocks_.insert(next, {begin, end});
  return memory_of(rank_) + begin;
}

void SharedMemory::give_back(const void* block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto begin = static_cast<std::size_t>(static_cast<const char*>(block) - memory_of(rank_));
  std::erase_if(blocks_, [&](const Block& each) { return each.begin == begin; });
}

/// Makes the file as long as that, with pages, so that a system without memory says so here, not by
/// killing a process that touches one.
void SharedMemory::grow(std::size_t bytes) {
  if (bytes <= file_bytes_) return;
  const std::size_t size = core::round_up(bytes, kHugePage);
  char* const added = memory_of(rank_) + file_bytes_;
  const bool there = allowed(size, size - file_bytes_) &&
                     ftruncate(file_, static_cast<off_t>(size)) == 0 &&
                     (madvise(added, size - file_bytes_, MADV_POPULATE_WRITE) == 0 ||
                      posix_fallocate(file_, 0, static_cast<off_t>(size)) == 0);
  if (!there) {
    const std::size_t before = std::max(file_bytes_, header_bytes_);
    // Where the file stays longer, the next call that grows it sets its length.
    [[maybe_unused]] const int cut = ftruncate(file_, static_cast<off_t>(before));
    throw Error::out_of_memory(size, "memory that processes share");
  }
  file_bytes_ = size;
}

SharedMemory::Slot& SharedMemory::slot(int owner, int peer) const {
  return reinterpret_cast<Slot*>(memory_of(owner) + kMark)[peer];
}

/// Returns when condition() is true. Two ranks that share a core offer it to each other.
template <typename Condition>
void SharedMemory::wait(int peer, Waiting& waiting, const Condition& condition) const {
  const int core = slot(peer, rank_).core.load(std::memory_order_relaxed);
  const bool spins = core != sched_getcpu() + 1;
  for (std::uint64_t tries = 1; !condition(); ++tries) {
    if (spins && tries < kSpins) {
      core::pause();
      continue;
    }
    if (tries % kSpinsPerLook == 0) waiting.check({&peer, 1});
    sched_yield();
  }
}

void SharedMemory::lend(const Lent& mine, std::span<const int> peers, const Reader& read,
                        Waiting& waiting) {
  const int core = sched_getcpu() + 1;
  for (const int peer : peers) {
    if (peer == rank_) continue;
    Slot& out = slot(rank_, peer);
    out.core.store(core, std::memory_order_relaxed);
    out.data = mine.data;
    out.kind = {};
    mine.kind.copy(out.kind.data(), Slot::kKindLength);
    out.lent.store(++lendings_[peer], std::memory_order_release);
  }
  std::vector<Lent> all;
  for (const int peer : peers) {
    if (peer == rank_) {
      all.push_back({mine.kind.substr(0, Slot::kKindLength), mine.data});
      continue;
    }
    const Slot& in = slot(peer, rank_);
    wait(peer, waiting, [&] { return in.lent.load(std::memory_order_acquire) >= lendings_[peer]; });
    all.push_back({in.kind.data(), in.data});
  }
  read(all);
  for (const int peer : peers) {
    if (peer != rank_) slot(rank_, peer).read.store(lendings_[peer], std::memory_order_release);
  }
  for (const int peer : peers) {
    if (peer == rank_) continue;
    wait(peer, waiting,
         [&] { return slot(peer, rank_).read.load(std::memory_order_acquire) >= lendings_[peer]; });
  }
}

}  // namespace fusedmoe::comm
