// Memory that ranks share which are processes: here they are forked. What a layer does with it is
// in tests/mpi and tests/fuzz.
#include "comm/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <numeric>

#include "../ranks/processes.h"
#include "../ranks/ranks.h"

namespace fusedmoe::comm::shared_memory_test {

using testing::expect_late;
using testing::kDied;
using testing::kPatient;
using testing::mapped_files;
using testing::texts_of_processes;
using Memory = std::shared_ptr<SharedMemory>;

constexpr std::size_t kPage = 4096, kMiB = std::size_t{1} << 20;

/// Calls function(communicator) in so many processes. Element r is what rank r's has thrown, "" for
/// nothing.
std::vector<std::string> errors_of_processes(
    int size, const std::function<void(Communicator& communicator)>& function,
    std::chrono::milliseconds timeout = kPatient) {
  return texts_of_processes(size, [&](int rank, const std::shared_ptr<ControlPlane>& control) {
    try {
      const auto communicator = make_communicator(rank, size, control, {timeout});
      function(*communicator);
      // Who ends early would be missed.
      if (timeout == kPatient) communicator->barrier();
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string(::testing::Test::HasFailure() ? "a check above has failed" : "");
  });
}

/// The same, where no rank may throw.
void run_processes(int size, const std::function<void(Communicator& communicator)>& function) {
  const std::vector<std::string> errors = errors_of_processes(size, function);
  for (int rank = 0; rank < size; ++rank) EXPECT_EQ(errors[rank], "") << "rank " << rank;
}

SharedMemory::Gather gather_of(Communicator& communicator) {
  return [&](const std::string& text) { return communicator.gather(text, "a test"); };
}
Memory make(Communicator& communicator) {
  return SharedMemory::make(communicator.rank(), communicator.size(), gather_of(communicator));
}
Memory make_alone() {
  return SharedMemory::make(0, 1, [](const std::string& text) { return std::vector{text}; });
}

/// For where all ranks arrive.
class Patience final : public Waiting {
 public:
  std::string_view what() const override { return "a step"; }
  void check(std::span<const int> late) override {
    if (std::chrono::steady_clock::now() < end_) return;
    throw Error::communication("waited in vain for rank " + std::to_string(late.front()));
  }

 private:
  const std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + kPatient;
};

std::vector<int> all_ranks(const Communicator& communicator) {
  std::vector<int> ranks(static_cast<std::size_t>(communicator.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Distance of two blocks.
std::ptrdiff_t from(const void* begin, const void* block) {
  return static_cast<const char*>(block) - static_cast<const char*>(begin);
}

int open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<int>(std::distance(begin(files), end(files)));
}
/// The Error of taking that much, which is not there.
void expect_none(SharedMemory& memory, std::size_t bytes) {
  try {
    memory.take(bytes);
    ADD_FAILURE() << bytes << " bytes were there";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory) << error.what();
    EXPECT_GE(error.requested_bytes(), bytes);
    EXPECT_NE(std::string(error.what()).find("memory that processes share"), std::string::npos);
  }
}

TEST(SharedMemoryTest, BlocksAreWholePagesAndReused) {
  const Memory memory = make_alone();
  ASSERT_TRUE(memory);
  void* const a = memory->take(1);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % kPage, 0U);
  void* const b = memory->take(2 * kPage + 1);
  void* const c = memory->take(10);
  EXPECT_EQ(from(a, b), 1 * kPage);
  EXPECT_EQ(from(a, c), 4 * kPage);
  memory->give_back(b);
  EXPECT_EQ(from(a, memory->take(kPage + 1)), 1 * kPage) << "where b was";
  EXPECT_EQ(from(a, memory->take(kPage + 1)), 5 * kPage) << "one page is too little";
  EXPECT_EQ(from(a, memory->take(kPage)), 3 * kPage) << "one page is enough";
  memory->give_back(a);
  EXPECT_EQ(memory->take(kPage), a);
  memory->give_back(static_cast<char*>(a) + 1);  // no block
  memory->give_back(nullptr);
  EXPECT_NE(memory->take(1), a) << "it is still taken";
}

TEST(SharedMemoryTest, NoBytesAreABlockToo) {
  const Memory memory = make_alone();
  ASSERT_TRUE(memory);
  void* const a = memory->take(8);
  void* const nothing = memory->take(0);
  EXPECT_NE(nothing, a);
  memory->give_back(nothing);
  EXPECT_NE(memory->take(8), a) << "it was not given back";
}

TEST(SharedMemoryTest, MemoryGrowsBehindWhatIsTaken) {
  const Memory memory = make_alone();
  ASSERT_TRUE(memory);
  std::vector<unsigned char*> blocks;
  const std::size_t sizes[] = {100, 3 * kMiB, 1, 9 * kMiB + 5, kPage};
  for (const std::size_t bytes : sizes) {
    blocks.push_back(static_cast<unsigned char*>(memory->take(bytes)));
    std::memset(blocks.back(), static_cast<int>(blocks.size()), bytes);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto own = static_cast<std::ptrdiff_t>(sizes[i]);
    EXPECT_EQ(std::count(blocks[i], blocks[i] + own, i + 1), own) << i;
  }
}

TEST(SharedMemoryTest, ContainsOwnMemoryAlone) {
  const Memory memory = make_alone();
  ASSERT_TRUE(memory);
  auto* const block = static_cast<char*>(memory->take(kPage));
  EXPECT_TRUE(memory->contains(block));
  EXPECT_TRUE(memory->contains(block + kPage - 1));
  const std::vector<char> heap(1);
  for (const void* other : {static_cast<const void*>(nullptr), static_cast<const void*>(&heap),
                            static_cast<const void*>(heap.data())}) {
    EXPECT_FALSE(memory->contains(other));
  }
}

TEST(SharedMemoryTest, ThreadsTakeAndGiveBack) {
  const Memory memory = make_alone();
  ASSERT_TRUE(memory);
  testing::run_ranks(4, [&](int thread) {
    for (std::size_t round = 0; round < 20000; ++round) {
      const std::size_t count = 1 + round % 7 * 400;
      auto* const block = static_cast<int*>(memory->take(count * sizeof(int)));
      std::fill_n(block, count, thread);
      const auto own = std::count(block, block + count, thread);
      EXPECT_EQ(own, static_cast<std::ptrdiff_t>(count)) << "another thread has this block, too";
      memory->give_back(block);
    }
  });
}

TEST(SharedMemoryTest, AWishTooLargeLeavesEverythingAsItWas) {
  run_processes(1, [](Communicator& communicator) {
    const Memory memory = make(communicator);
    ASSERT_TRUE(memory);
    auto* const block = static_cast<int*>(memory->take(sizeof(int)));
    *block = 7;
    expect_none(*memory, std::size_t{1} << 40);  // more than there are addresses
    expect_none(*memory, std::numeric_limits<std::size_t>::max());
    // Less than the limit of a file, and of a process, but with what is there it would be more.
    for (const auto limited : {RLIMIT_FSIZE, RLIMIT_AS}) {
      rlimit before{};
      ASSERT_EQ(getrlimit(limited, &before), 0);
      rlimit limit = before;
      limit.rlim_cur = 64 * kMiB;
      if (limited == RLIMIT_AS) {
        std::size_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages;
        limit.rlim_cur += pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
      }
      ASSERT_EQ(setrlimit(limited, &limit), 0);
      void* const own = mmap(nullptr, 256 * kMiB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      const bool ignored = limited == RLIMIT_AS && own != MAP_FAILED;  // by qemu
      if (!ignored) expect_none(*memory, 256 * kMiB);
      ASSERT_EQ(setrlimit(limited, &before), 0);
    }
    EXPECT_EQ(*block, 7);
    auto* const next = static_cast<int*>(memory->take(4 * kMiB));
    EXPECT_EQ(from(block, next), kPage) << "nothing else is taken";
    std::memset(next, 1, 4 * kMiB);
    EXPECT_EQ(*block, 7);
  });
}

/// What a rank lends: numbers, and where more of them are.
struct Numbers {
  int rank, round;
  const int* more;
};

TEST(SharedMemoryTest, RanksReadWhatIsLentInStep) {
  run_processes(3, [](Communicator& communicator) {
    const Memory memory = make(communicator);
    ASSERT_TRUE(memory);
    const int rank = communicator.rank();
    auto* const mine = static_cast<Numbers*>(memory->take(sizeof(Numbers)));
    auto* const more = static_cast<int*>(memory->take(9 * kMiB));  // that the others had mapped
    int* const last = more + 9 * kMiB / sizeof(int) - 1;
    Patience waiting;
    for (int round = 0; round < 200; ++round) {
      *last = 1000 * rank + round;
      *mine = {rank, round, last};
      const std::vector<int> peers =
          round % 3 > 0 || rank == 1 ? all_ranks(communicator) : std::vector{0, 2};
      if (round % 3 == 0 && rank == 1) continue;  // the others are alone
      const std::string kind = "round " + std::to_string(round % 2);
      int reads = 0;
      const auto read = [&](std::span<const SharedMemory::Lent> lent) {
        ++reads;
        ASSERT_EQ(lent.size(), peers.size());
        for (std::size_t i = 0; i < peers.size(); ++i) {
          const auto& each = *static_cast<const Numbers*>(lent[i].data);
          EXPECT_EQ(lent[i].kind, kind);
          EXPECT_EQ(each.rank, peers[i]);
          EXPECT_EQ(each.round, round);
          EXPECT_EQ(*each.more, 1000 * peers[i] + round);
          EXPECT_EQ(memory->contains(&each), peers[i] == rank);
        }
      };
      memory->lend({kind, mine}, peers, read, waiting);
      EXPECT_EQ(reads, 1);
    }
  });
}

/// What they do then is the communicator's matter.
TEST(SharedMemoryTest, RanksSeeTheKindsThatOthersLend) {
  run_processes(2, [](Communicator& communicator) {
    const Memory memory = make(communicator);
    ASSERT_TRUE(memory);
    const std::vector<int> ranks = all_ranks(communicator);
    const std::string long_name(100, 'x');
    const std::pair<std::string, std::string> kinds[] = {
        {"rows", "sums"}, {long_name, ""}, {"", "a"}, {"numbers", "numbers"}};
    Patience waiting;
    for (const auto& [first, second] : kinds) {
      std::vector<std::string> found;
      const auto read = [&](std::span<const SharedMemory::Lent> lent) {
        for (const SharedMemory::Lent& each : lent) {
          found.push_back(each.kind);
          EXPECT_EQ(each.data, nullptr);
        }
      };
      memory->lend({communicator.rank() == 0 ? first : second, nullptr}, ranks, read, waiting);
      EXPECT_EQ(found, (std::vector{first.substr(0, 63), second.substr(0, 63)}));
    }
  });
}

/// Makes memory where rank 1 says said(its offer) instead: nobody may get any, nor keep a file.
void expect_that_none_shares(Communicator& communicator,
                             const std::function<std::string(const std::string& offer)>& said) {
  const int files = open_files();
  int calls = 0;
  const auto gather = [&](const std::string& text) {
    const bool offers = calls++ % 2 == 0;  // then the verdicts
    return communicator.gather(offers && communicator.rank() == 1 ? said(text) : text, "a test");
  };
  EXPECT_FALSE(SharedMemory::make(communicator.rank(), communicator.size(), gather));
  EXPECT_GT(calls, 0);
  EXPECT_EQ(open_files(), files);
  EXPECT_EQ(mapped_files(), 0);
}

/// As of a process in another container: its file's number is that of something else here.
TEST(SharedMemoryTest, NoneSharesWhereAnOfferIsOfAnotherFile) {
  run_processes(3, [](Communicator& communicator) {
    std::array<int, 2> ends{};
    ASSERT_EQ(pipe(ends.data()), 0);
    const int other = memfd_create("another", MFD_CLOEXEC);
    ASSERT_EQ(write(other, "no mark", 7), 7);
    for (const int file : {ends[0], other, 1 << 20}) {
      expect_that_none_shares(communicator, [&](const std::string& offer) {
        const std::size_t begin = offer.find(' ') + 1;
        return offer.substr(0, begin) + std::to_string(file) + offer.substr(offer.find(' ', begin));
      });
    }
    EXPECT_TRUE(make(communicator)) << "nothing else was in the way";
  });
}

TEST(SharedMemoryTest, NoneSharesWhereOneRankMayOpenNoFile) {
  run_processes(2, [](Communicator& communicator) {
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    if (communicator.rank() == 1) {
      const rlimit none{0, before.rlim_max};
      ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    }
    const auto gather = [&](const std::string& text) {
      setrlimit(RLIMIT_NOFILE, &before);  // for the control plane
      return communicator.gather(text, "a test");
    };
    EXPECT_FALSE(SharedMemory::make(communicator.rank(), communicator.size(), gather));
    EXPECT_TRUE(make(communicator)) << "nothing else was in the way";
  });
}

TEST(SharedMemoryTest, NoneSharesWhereAddressesDoNotSuffice) {
  const auto gather = [](const std::string&) -> std::vector<std::string> {
    throw std::logic_error("all know without asking");
  };
  EXPECT_FALSE(SharedMemory::make(3, 1000, gather));
}

/// Where one process uses what rank 0 offers, the next rank's offer counts.
TEST(SharedMemoryTest, AnAddressThatOneProcessUsesIsNotTaken) {
  run_processes(3, [](Communicator& communicator) {
    std::vector<std::string> offers;  // of the last try
    int tries = 0;
    int* used = nullptr;
    const auto address_of = [](const std::string& offer) {
      return std::stoull(offer.substr(offer.rfind(' ')));
    };
    const auto gather = [&](const std::string& text) {
      std::vector<std::string> texts = communicator.gather(text, "a test");
      if (text.ends_with("mapped")) {
        EXPECT_TRUE(tries > 1 || texts[2] == "not mapped");
        return texts;
      }
      if (++tries == 1 && communicator.rank() == 2) {
        void* const wanted = reinterpret_cast<void*>(address_of(texts[0]));
        void* const there =
            mmap(wanted, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (there == wanted) *(used = static_cast<int*>(there)) = 7;
      }
      offers = texts;
      return texts;
    };
    const Memory memory = SharedMemory::make(communicator.rank(), 3, gather);
    ASSERT_TRUE(memory);
    EXPECT_GE(tries, 2);
    EXPECT_TRUE(!used || *used == 7);
    const void* const block = memory->take(1);
    const std::string& chosen = offers[static_cast<std::size_t>(tries - 1) % 3];
    EXPECT_LT(reinterpret_cast<std::uintptr_t>(block) - address_of(chosen), std::size_t{3} << 36);
    auto* const mine = static_cast<int*>(memory->take(sizeof(int)));
    *mine = communicator.rank();
    Patience waiting;
    const auto read = [&](std::span<const SharedMemory::Lent> lent) {
      for (int r = 0; r < 3; ++r) EXPECT_EQ(*static_cast<const int*>(lent[r].data), r);
    };
    memory->lend({"number", mine}, all_ranks(communicator), read, waiting);
  });
}

TEST(SharedMemoryTest, AllGoesBackToTheSystem) {
  run_processes(2, [](Communicator& communicator) {
    const int files = open_files();
    for (int round = 0; round < 3; ++round) {
      const Memory memory = make(communicator);
      ASSERT_TRUE(memory);
      EXPECT_EQ(mapped_files(), 2);
      memory->take(3 * kMiB);
      EXPECT_EQ(open_files(), files + 1) << "this rank's own";
    }
    EXPECT_EQ(open_files(), files);
    EXPECT_EQ(mapped_files(), 0);
  });
}

/// When rank 1 dies.
enum class Death { kBeforeItLends, kWhileItReads };

class SharedMemoryDeaths : public ::testing::TestWithParam<Death> {};
INSTANTIATE_TEST_SUITE_P(Times, SharedMemoryDeaths,
                         ::testing::Values(Death::kBeforeItLends, Death::kWhileItReads),
                         [](const auto& info) {
                           return info.param == Death::kBeforeItLends ? "BeforeItLends"
                                                                      : "WhileItReads";
                         });

TEST_P(SharedMemoryDeaths, TheOthersNameTheRankWithinTheDeadline) {
  expect_late("a step: rank 1 did not arrive", {0, 2}, [](std::chrono::milliseconds timeout) {
    const auto step = [](Communicator& communicator) {
      if (!communicator.share_memory()) throw std::runtime_error("no memory is shared");
      auto* const mine = static_cast<int*>(communicator.take_shared(sizeof(int)));
      *mine = 10 + communicator.rank();
      const bool dies = communicator.rank() == 1;
      const int* of_the_dead = nullptr;
      communicator.barrier();
      if (dies && GetParam() == Death::kBeforeItLends) raise(SIGKILL);
      const auto read = [&](std::span<const void* const> lent) {
        if (dies) raise(SIGKILL);
        of_the_dead = static_cast<const int*>(lent[1]);
        if (*of_the_dead != 11) throw std::runtime_error("another number");
      };
      try {
        communicator.lend("number", mine, read, "a step");
      } catch (const Error&) {
        const bool was_read = GetParam() == Death::kWhileItReads;
        EXPECT_EQ(of_the_dead != nullptr, was_read);
        EXPECT_TRUE(!of_the_dead || *of_the_dead == 11) << "its pages are no more";
        throw;
      }
    };
    std::vector<std::string> errors = errors_of_processes(3, step, timeout);
    if (errors[1] != kDied) errors[0] = "rank 1 lives: " + errors[1];
    return errors;
  });
}

}  // namespace fusedmoe::comm::shared_memory_test
