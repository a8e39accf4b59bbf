// This rank's block, and those of the others as it maps them.
#include "moe/peer_blocks.h"

#include <sys/random.h>

#include <map>
#include <mutex>

#include "core/device_runtime.h"
#include "core/format.h"
#include "core/waited_stream.h"
#include "cuda/device/mapped_memory.h"
#include "cuda/peers/steps.h"
#include "fusedmoe/error.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe {
namespace cuda {
namespace {

/// The blocks of this process, which its threads find by their marks.
class Lent {
 public:
  void add(std::uint64_t mark, const std::shared_ptr<MappedMemory>& block) {
    const std::lock_guard lock(mutex_);
    std::erase_if(blocks_, [](const auto& each) { return each.second.expired(); });
    blocks_[mark] = block;
  }
  std::shared_ptr<MappedMemory> find(std::uint64_t mark) const {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(mark);
    return found == blocks_.end() ? nullptr : found->second.lock();
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<MappedMemory>> blocks_;
};

Lent& lent() {
  static Lent all;
  return all;
}

std::uint64_t draw_mark() {
  std::uint64_t mark = 0;
  if (getrandom(&mark, sizeof mark, 0) != sizeof mark) {
    throw Error::communication("the system has no random numbers for a mark");
  }
  return mark;
}

class CudaPeerBlocks final : public PeerBlocks {
 public:
  CudaPeerBlocks(const PeerGroup& of, std::size_t bytes)
      : group_(of), mapped_(static_cast<std::size_t>(of.size)), stream_(of.device) {
    const auto block = std::make_shared<MappedMemory>(bytes, of.device);
    const std::uint64_t mark = draw_mark();
    blocks_.rank = of.rank;
    blocks_.size = of.size;
    set(of.rank, mark, block);
    const core::DeviceRuntime& runtime = core::runtime_of(of.device);
    runtime.fill(block->data(), 0, block->bytes(), stream_);
    runtime.copy(block->data(), &mark, sizeof mark, stream_);
    synchronize(stream_);
    lent().add(mark, block);
  }

  std::size_t bytes() const override { return own().bytes(); }
  std::byte* begin(int rank) const override {
    return reinterpret_cast<std::byte*>(blocks_.heads[rank]);
  }

  std::uint64_t mark() const override { return marks_[group_.rank]; }
  bool map(int rank, std::uint64_t mark) override {
    const std::shared_ptr<MappedMemory> block = lent().find(mark);
    if (!block) return false;
    const core::CurrentDevice current(group_.device);
    block->allow(group_.device);
    set(rank, mark, block);
    return true;
  }
  int descriptor() const override { return own().descriptor(); }
  void map_descriptor(int rank, std::uint64_t mark, int descriptor, std::size_t bytes) override {
    set(rank, mark, std::make_shared<MappedMemory>(descriptor, bytes, group_.device));
  }

  void check_marks() override {
    const core::CurrentDevice current(group_.device);
    BlockHead own;
    read_marks(blocks_, stream_);
    core::runtime_of(group_.device).copy(&own, begin(group_.rank), sizeof own, stream_);
    synchronize(stream_);
    for (int r = 0; r < group_.size; ++r) {
      if (own.found[r] == marks_[r]) continue;
      throw Error::communication(core::format(
          "its GPU does not read what the GPU of rank {} has written", group_.names[r]));
    }
  }

 private:
  static_assert(sizeof(BlockHead) <= kHeadBytes);

  const MappedMemory& own() const { return *mapped_[static_cast<std::size_t>(group_.rank)]; }
  void set(int rank, std::uint64_t mark, const std::shared_ptr<MappedMemory>& block) {
    mapped_[static_cast<std::size_t>(rank)] = block;
    marks_[rank] = mark;
    blocks_.heads[rank] = reinterpret_cast<BlockHead*>(block->data());
  }

  const PeerGroup group_;
  std::vector<std::shared_ptr<MappedMemory>> mapped_;  // of each rank
  MappedBlocks blocks_;
  std::uint64_t marks_[kMostPeers] = {};
  const core::WaitedStream stream_;  // last, as its work uses the blocks
};

}  // namespace
}  // namespace cuda

std::shared_ptr<PeerBlocks> PeerBlocks::make(const PeerGroup& group, std::size_t bytes) {
  if (group.size > cuda::kMostPeers) {
    throw Error::communication(core::format("{} ranks: at most {} can map each other's memory",
                                            group.size, cuda::kMostPeers));
  }
  return std::make_shared<cuda::CudaPeerBlocks>(group, bytes);
}

}  // namespace fusedmoe
