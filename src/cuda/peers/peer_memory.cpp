// This rank's arena, and those of the others as it maps them.
#include "moe/peer_memory.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <utility>

#include "core/device_runtime.h"
#include "core/format.h"
#include "cuda/device/check.h"
#include "cuda/peers/host_words.h"
#include "cuda/peers/steps.h"
#include "cuda/peers/sum_layout.h"
#include "cuda/router/kernels.h"
#include "fusedmoe/error.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/wait_hook.h"

namespace fusedmoe {
namespace cuda {
namespace {

/// What a stream that records a graph has recorded last; null: it records none, or what comes next
/// follows several things.
cudaGraphNode_t last_recorded(Stream stream) {
  if (!is_capturing(stream)) return nullptr;
  cudaStreamCaptureStatus status{};
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  std::size_t count = 0;
  const auto handle = static_cast<cudaStream_t>(stream.handle);
#if CUDART_VERSION >= 13000
  const auto ask = cudaStreamGetCaptureInfo;
#else
  const auto ask = cudaStreamGetCaptureInfo_v3;
#endif
  FUSEDMOE_CUDA_CHECK(ask(handle, &status, nullptr, nullptr, &nodes, &edges, &count));
  return count == 1 ? nodes[0] : nullptr;
}

/// Whether a node of a graph is the router's kernel. Of kernels that others have launched the CUDA
/// runtime may know nothing.
bool is_route(cudaGraphNode_t node) {
  cudaGraphNodeType type{};
  cudaKernelNodeParams params{};
  if (!node || cudaGraphNodeGetType(node, &type) != cudaSuccess ||
      type != cudaGraphNodeTypeKernel) {
    return false;
  }
  if (cudaGraphKernelNodeGetParams(node, &params) == cudaSuccess) {
    return is_route_kernel(params.func);
  }
  cudaGetLastError();  // clears it, which later calls would report as theirs
  return false;
}

bool is_at_work(Stream stream) {
  const cudaError_t state = cudaStreamQuery(static_cast<cudaStream_t>(stream.handle));
  if (state == cudaErrorNotReady) {
    cudaGetLastError();  // clears it, which later calls would report as theirs
    return true;
  }
  FUSEDMOE_CUDA_CHECK(state);
  return false;
}

class CudaPeerMemory final : public PeerMemory {
 public:
  CudaPeerMemory(const PeerGroup& of, std::chrono::nanoseconds patience,
                 std::shared_ptr<PeerBlocks> arenas, std::size_t bytes)
      : group_(of),
        pinned_(core::runtime_of(of.device).allocate_pinned(sizeof(Pinned), of.device)),
        shared_(new (pinned_.get()) Pinned),
        arenas_(std::move(arenas)),
        bytes_(bytes) {
    const core::CurrentDevice current(of.device);
    load_step_kernels();
    context_.peers.rank = of.rank;
    context_.peers.size = of.size;
    for (int r = 0; r < of.size; ++r) {
      context_.peers.arenas[r] = reinterpret_cast<ArenaHead*>(arenas_->begin(r));
    }
    context_.patience = {static_cast<std::uint64_t>(patience.count()), &shared_->abort};
    context_.record = &shared_->record;
  }
  /// Its kernels, which end at their deadline at the latest, use what it holds.
  ~CudaPeerMemory() override {
    try {
      const core::CurrentDevice current(group_.device);
      cudaDeviceSynchronize();
    } catch (const Error&) {
      // A kernel of the program has failed: none runs any more.
    }
  }

  std::size_t bytes() const override { return bytes_; }

  void time_links() override {
    constexpr std::size_t kBytes = std::size_t{64} << 20;
    constexpr int kWords = 64;
    const core::CurrentDevice current(group_.device);
    const OwnedStream stream(group_.device);
    links_.assign(static_cast<std::size_t>(group_.size), {});
    for (std::size_t i = 0; i < links_.size(); ++i) {
      // Each rank begins with another one, so that the arenas are read at the same time.
      const std::size_t rank = (static_cast<std::size_t>(group_.rank) + i) % links_.size();
      const ArenaHead& arena = *context_.peers.arenas[rank];
      const auto milliseconds = [&](const auto& read) {
        Event begin(group_.device), end(group_.device);
        begin.record(stream);
        read();
        end.record(stream);
        return elapsed_ms(begin, end);
      };
      const auto read_all = [&] { read_arena(arena, bytes(), kBytes, &shared_->sink, stream); };
      const double first = milliseconds(read_all), second = milliseconds(read_all);
      const double words = milliseconds([&] { read_words(arena, kWords, &shared_->sink, stream); });
      links_[rank] = {kBytes / std::min(first, second) * 1e3, words * 1e3 / kWords};
    }
  }
  const std::vector<PeerLink>& links() const override { return links_; }

  std::byte* own() const override { return arenas_->begin(group_.rank); }
  bool is_used() const override { return is_used_; }

  void share_gpu(int lanes) override {
    if (lanes > context_.lanes && is_used_) {
      throw Error::unsupported(
          Reason::kParallelConfig, "options.ranks.lanes",
          core::format("options.ranks.lanes {}: layers with {} have run, whose kernels may wait on "
                       "too much of the GPU: make the layer with most lanes first",
                       lanes, context_.lanes));
    }
    context_.lanes = std::max(context_.lanes, lanes);
  }
  int lanes() const override { return context_.lanes; }

  std::string failure() const override {
    const FailureRecord& record = shared_->record;
    if (HostWords::load_acquire(&record.is_written) == 0) return {};
    return to_string(record, group_.rank, context_.patience, group_.names);
  }
  void abort() noexcept override { HostWords::store(&shared_->abort, 1); }
  bool has_ended() const override {
    return HostWords::load(&shared_->abort) != 0 ||
           HostWords::load_acquire(&shared_->record.is_written) != 0;
  }

  void publish(const PeerStep& step, const PublishedRows& rows, Stream stream) override {
    is_used_ = true;
    if (in_step_.exchange(true)) throw overlapping();
    const core::CurrentDevice current(group_.device);
    publish_rows(context_, step, rows, is_route(last_recorded(stream)), stream);
    recorded_ = last_recorded(stream);
    told_ = false;
  }
  void pull(const PeerStep& step, const PulledRows& rows, Stream stream) override {
    const core::CurrentDevice current(group_.device);
    SlotCount count;
    if (rows.counts_slots) count = {&shared_->slots, ++counts_};
    pull_rows(context_, step, rows, count, follows_own(stream), stream);
  }
  RowSources sources(const PeerStep& step, std::span<const std::int64_t> row_bytes) const override {
    static_assert(RowSources::kMost >= kMostPeers);
    RowSources result;
    result.value_bytes = row_bytes[0];
    if (row_bytes.size() > 1) result.scale_bytes = row_bytes[1];
    for (int rank = 0; rank < group_.size; ++rank) {
      const std::byte* const arena = arenas_->begin(rank);
      result.values[rank] = arena + step.rows[0];
      result.scales[rank] = arena + step.rows[1];
    }
    result.rows_each = step.most_tokens;
    result.failed = &context_.peers.own().dead;
    return result;
  }
  RowTargets targets(const PeerStep& step, std::int64_t row_bytes, bool per_slot) const override {
    RowTargets result;
    result.rows_each = step.most_tokens * (per_slot ? step.topk : 1);
    // Nobody else leaves a row for a slot; for a token each rank has rows of its own.
    const std::int64_t first = per_slot ? 0 : group_.rank * step.most_tokens * row_bytes;
    for (int rank = 0; rank < group_.size; ++rank) {
      result.rows[rank] = arenas_->begin(rank) + step.results + first;
    }
    result.failed = &context_.peers.own().dead;
    return result;
  }
  void leave(const LeftRows& rows, const RowTargets& targets, Stream stream) override {
    const core::CurrentDevice current(group_.device);
    leave_rows(rows, targets, stream);
  }
  std::optional<std::int64_t> local_slots(Stream stream) override {
    const core::CurrentDevice current(group_.device);
    constexpr int kLooks = 1024;  // between those at the stream
    constexpr std::chrono::milliseconds kBetweenHooks{5};
    auto next_hook = std::chrono::steady_clock::now() + kBetweenHooks;
    for (int looks = 1;; ++looks) {
      const bool has_ended = looks % kLooks == 0 && !is_at_work(stream);
      if (looks % kLooks == 0 && std::chrono::steady_clock::now() >= next_hook) {
        call_wait_hook();
        next_hook += kBetweenHooks;
      }
      const std::uint64_t told = HostWords::load_acquire(&shared_->slots);
      if (told >> 32 == counts_) return static_cast<std::int64_t>(told & 0xFFFFFFFFU);
      if (has_ended) return std::nullopt;
      HostWords::pause();
    }
  }
  void tell_results(const PeerStep& step, Stream stream) override {
    const core::CurrentDevice current(group_.device);
    cuda::tell_results(context_, step, stream);
    recorded_ = last_recorded(stream);
    told_ = true;
  }
  void sum(const PeerStep& step, const PeerSum& sum, Stream stream) override {
    const core::CurrentDevice current(group_.device);
    const SumFollows follows = !told_                ? SumFollows::kExperts
                               : follows_own(stream) ? SumFollows::kTelling
                                                     : SumFollows::kOther;
    sum_results(context_, step, sum, follows, stream);
    in_step_ = false;
  }

  void tell_parts(const PeerParts& parts, Stream stream) override {
    is_used_ = true;
    if (parts_told_.exchange(true)) throw overlapping();
    const core::CurrentDevice current(group_.device);
    add_piece(parts, 0, SumPhases::kTell, stream);
  }
  void add_parts(const PeerParts& parts, bool told, Stream stream) override {
    is_used_ = true;
    if (parts_told_.exchange(false) != told) throw overlapping();
    const core::CurrentDevice current(group_.device);
    // Without tokens too: the ranks compare how many they have.
    std::int64_t first = add_piece(parts, 0, told ? SumPhases::kAdd : SumPhases::kAll, stream);
    while (first < parts.partial.size(0)) {
      first = add_piece(parts, first, SumPhases::kNext, stream);
    }
  }

 private:
  /// In host memory that the device reads and writes.
  struct Pinned {
    FailureRecord record;
    std::uint32_t abort = 0;
    std::uint64_t slots = 0;  // as in SlotCount
    std::uint32_t sink = 0;   // what nobody reads
  };

  static Error overlapping() {
    return Error::communication(
        "a step begins before the one before it has finished: with rows in peer memory, steps of a "
        "communicator cannot overlap. CommunicatorOptions::peer_memory false allows it");
  }
  /// As many tokens from `begin` on as a launch may have. Returns where they end.
  std::int64_t add_piece(const PeerParts& parts, std::int64_t begin, SumPhases phases,
                         Stream stream) {
    const std::int64_t num_tokens = parts.partial.size(0);
    const std::int64_t most =
        most_sum_rows(fusedmoe::bytes(parts.partial.dtype(), parts.partial.size(1)));
    const std::int64_t end = std::min(num_tokens, begin + most);
    PeerParts piece = parts;
    piece.partial = parts.partial.slice(0, begin, end);
    piece.output = parts.output.slice(0, begin, end);
    sum_parts(context_, piece, num_tokens - end, phases, stream);
    return end;
  }
  /// Whether what is recorded next comes right behind the kernel that this rank has recorded last:
  /// only then may it begin early, and a caller may put work of its own between the parts of a
  /// step. False without a graph, where a step waits for the host anyway.
  bool follows_own(Stream stream) const { return recorded_ && recorded_ == last_recorded(stream); }

  const PeerGroup group_;
  const std::shared_ptr<void> pinned_;
  Pinned* const shared_;
  const std::shared_ptr<PeerBlocks> arenas_;
  const std::size_t bytes_;
  std::vector<PeerLink> links_;  // to each rank
  PeerContext context_;
  cudaGraphNode_t recorded_ = nullptr;  // of publish() or tell_results(), whichever came last
  std::uint32_t counts_ = 0;            // of slots, by pull()
  bool told_ = false;                   // tell_results() has come in this step
  std::atomic<bool> is_used_{false}, in_step_{false}, parts_told_{false};
};

}  // namespace
}  // namespace cuda

std::shared_ptr<PeerMemory> PeerMemory::make(const PeerGroup& group,
                                             std::chrono::milliseconds patience,
                                             std::shared_ptr<PeerBlocks> arenas,
                                             std::size_t bytes) {
  return std::make_shared<cuda::CudaPeerMemory>(group, patience, std::move(arenas), bytes);
}

}  // namespace fusedmoe
