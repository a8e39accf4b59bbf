// MoeLayer: router + shared experts + modular kernel + weights. What most users hold. And
// fused_experts(): the experts alone, on an engine's own tensors and routing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "fusedmoe/export.h"
#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/packed_file.h"
#include "fusedmoe/router.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/weights.h"

namespace fusedmoe {

/// Dense experts that see every token (DeepSeek, Qwen2, Llama 4, GLM).
struct SharedExperts {
  ExpertWeights weights;  ///< one expert of width intermediate * number of shared experts
  Tensor gate;            ///< (1, hidden): output *= sigmoid(x gate^T) (Qwen2); optional
};

/// Linear layers around the routed experts, which work in a smaller width between them
/// (Nemotron-H). Router and shared experts see the hidden states as they are.
struct LatentProjections {
  Tensor down;  ///< (latent, hidden): the experts read x down^T
  Tensor up;    ///< (hidden, latent): their sum times up^T goes to the output
};

/// One layer's parameters as a checkpoint holds them.
struct LayerWeights {
  RouterConfig router;
  /// Without a `weight` the layer has no router: only forward_routed() then works.
  RouterWeights router_weights;
  ExpertWeights experts;  ///< those of this rank; `hidden` is the latent width, if there is one
  /// (num_experts) i32: global expert -> its place in `experts`, or -1; needed unless all are here.
  Tensor expert_map;
  std::optional<SharedExperts> shared_experts;
  std::optional<LatentProjections> latent;

  /// Width of hidden states and output.
  FUSEDMOE_API std::int64_t hidden() const;
};

struct LayerOptions {
  Device device = {};          ///< that holds the weights and runs the layer
  DType dtype = DType::kBF16;  ///< of hidden states
  /// Of the output, where it is not dtype: f32, unrounded, for sums over ranks.
  std::optional<DType> output_dtype = std::nullopt;
  std::string require = {};  ///< see select(); empty = best
  std::string plan = {};     ///< JSON of MoeLayer::plan_json(): exactly that, or an Error
  bool batch_invariant = false;
  bool inplace = false;  ///< forward may be given the hidden states themselves as output
  bool hooks = false;    ///< only experts that call ExpertsHooks (the routed ones)
  /// True: the experts must be able to route by themselves, else Error. False: they do so where
  /// that is faster, as for few tokens on CUDA.
  bool monolithic = false;
  /// Of the ranks that share the layer. Without a communicator the output is this rank's part, and
  /// somebody has to add those of the others: rank 0 alone is given the shared experts, and adds
  /// what zero experts return. With one the output is complete: give them to every rank.
  ParallelConfig parallel = {};
  /// With a communicator of several ranks, making the layer is collective: either all ranks have
  /// made it, or all throw the same Error. A default `parallel` then means expert parallelism of
  /// ranks with different tokens, and `placement` says the expert map; weights of all experts are
  /// cut to the local ones. A forward is collective too, and one at a time; a rank that throws in
  /// it ends the communicator.
  RankOptions ranks = {};
  int num_threads = 0;  ///< of the CPU; 0: those of the executor when the layer is made
  /// Runs the packing and the forwards on the CPU, unless a forward's stream names another; must
  /// outlive the layer. Null: default_executor().
  Executor* executor = nullptr;
  /// Most bytes of scratch that a forward may ask for; 0: no limit. Longer inputs then run in
  /// chunks of tokens.
  std::size_t max_workspace_bytes = 0;
  PackProgress progress = {};
  /// The routed experts, packed before and kept by MoeLayer::save_packed(): see load_packed(). What
  /// LayerWeights::experts hold is then not read but for what it is checked for. Of a rank: its
  /// own file.
  std::optional<PackedFile> packed_weights = std::nullopt;
};

/// `parallel`, or what a default one means on the ranks of a communicator: what to load weights
/// for.
FUSEDMOE_API ParallelConfig parallel_of(const LayerOptions& options);

/// What a forward may be given beside its tensors.
struct ForwardOptions {
  /// Results that are wanted; undefined views are not filled. Logits, which the router alone knows,
  /// are an Error in forward_routed().
  TensorView router_logits = {};  ///< (num_tokens, num_choices) f32
  TensorView topk_ids = {};       ///< (num_tokens, topk) i32
  TensorView topk_weights = {};   ///< (num_tokens, topk) f32
  /// (num_choices) i32: how many tokens chose each expert. forward_routed() counts the caller's
  /// ids.
  TensorView expert_load = {};
  /// (num_experts) i32: in place of LayerWeights::expert_map in this forward, as for a cache of
  /// experts, see repack(). Only of a layer that was made with one and has no communicator.
  TensorView expert_map = {};
  /// (1) i32: how many rows of this rank's tokens found no room on the ranks they went to, see
  /// RankOptions::drop_rows. On CUDA it is filled in the order of the stream, in graphs too.
  TensorView dropped_rows = {};
  bool accumulate = false;              ///< output += instead of output =
  const ExpertsHooks* hooks = nullptr;  ///< of a layer made with LayerOptions::hooks
  /// The most tokens that any rank gives to this forward, the same on all; 0: the largest that
  /// RankOptions allows. Buffers and fixed sizes follow it.
  std::int64_t max_tokens = 0;
  /// Every rank sends max_tokens rows to each that has experts; the same on all ranks. Nothing is
  /// counted, so on CUDA the host waits for nothing and a graph can hold the forward. A forward on
  /// a stream that is captured does so in any case. No row is dropped. Not where rows of per_slot
  /// are messages, nor where experts of several ranks route by themselves.
  bool fixed_sizes = false;
  /// The lane of this forward, from 0 to RankOptions::lanes - 1; the same on all ranks. Forwards of
  /// one lane follow each other. Those of different lanes may be in flight at the same time, each
  /// on a stream and in a workspace of its own.
  int lane = 0;
  /// None: the default stream of the device; on the CPU the threads of LayerOptions::executor. On
  /// the CPU cpu_stream() names other threads for this forward.
  std::optional<Stream> stream = std::nullopt;
};

/// What one rank holds of a layer: its experts in the order of the placement (none: linear), or its
/// slice of every expert's intermediate size, cut on scale groups; router and shared experts stay.
/// Views of the same memory. A rank without experts keeps one that no token reaches.
FUSEDMOE_API LayerWeights local_weights(const LayerWeights& whole, const ParallelConfig& parallel,
                                        const std::optional<ExpertPlacement>& placement = {});
/// The same for tensors that may be this rank's slice of `intermediate` already: whole ones are
/// cut, those of other sizes refused. Biases of down stay on the rank whose slice begins at 0.
/// Throws Error where tp_size > 1 and `intermediate` is 0: the tensors alone do not tell.
FUSEDMOE_API LayerWeights own_slice(LayerWeights weights, const ParallelConfig& parallel,
                                    std::int64_t intermediate);
/// The slice of each expert: rows of gate and up, columns of down, whose bias stays with the slice
/// that begins at 0.
FUSEDMOE_API ExpertWeights slice_experts(const ExpertWeights& weights, Slice slice);
/// The slices of the intermediate size are multiples of it: scale groups and packed words whole.
FUSEDMOE_API std::int64_t slice_unit(const QuantScheme& scheme);

/// The weights of one expert, in the form and order in which a checkpoint has them.
using ExpertSource = std::function<ExpertWeights(std::int64_t expert)>;

/// forward may run on several threads with separate workspaces, but not beside repack(),
/// start_move(), commit_move() and rebind(), which alone change a layer. A layer that was moved
/// from throws Error when it is used.
///
/// Shared experts run through a kernel of their own, as one expert that every token chooses, and
/// are added to the routed output in fp32: below f32 that sum is the third rounding, after one in
/// each kernel, as in inference engines. What zero experts return is added with them.
class FUSEDMOE_API MoeLayer {
 public:
  /// Selects an implementation and packs the weights; the sources are not needed after. Throws
  /// Error for weights that do not fit each other, for custom routing on CUDA (its callback runs on
  /// the host), and as select() does.
  MoeLayer(LayerWeights weights, LayerOptions options = {});
  ~MoeLayer();
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;

  /// Of the routed experts.
  const MoeConfig& config() const;
  /// Width of hidden states and output; config().hidden unless there are latent projections.
  std::int64_t hidden() const;
  const Selection& selection() const;
  const RouterConfig& router() const;
  const PackedWeights& packed_weights() const;
  /// Keeps these for LayerOptions::packed_weights, see save_packed(); not the shared experts.
  void save_packed(const std::filesystem::path& path) const;
  /// Replaces the routed expert at this place (num_local_experts) by the first of `weights`: new
  /// values in training, or another expert in a cache, of which ForwardOptions::expert_map then
  /// says where it lies. No forward may run meanwhile. Checks everything before it writes: throws
  /// Error for weights that do not fit, and where those of the layer lie in a mapped file.
  void repack(const ExpertWeights& weights, std::int64_t expert);
  /// One line: experts, prepare_finalize, scheme, dtype, instruction set, and threads or the
  /// device; for example "cpu+no_ep mxfp4_w4a16 bf16 isa=avx512_bf16 threads=2".
  std::string plan_line() const;
  /// The same as a JSON object that LayerOptions::plan pins; see Plan.
  std::string plan_json() const;

  /// Bytes of scratch that forward(num_tokens) needs: monotone, a function of num_tokens alone, and
  /// at most LayerOptions::max_workspace_bytes. Across ranks num_tokens is
  /// ForwardOptions::max_tokens, and forwards with fixed sizes need another number of bytes.
  std::size_t workspace_bytes(std::int64_t num_tokens, bool fixed_sizes = false) const;
  /// Bytes of memory, shared by ranks, that forward(num_tokens) takes beside the workspace. 0
  /// unless the ranks are processes of one host that share memory (Communicator::share_memory()).
  /// num_tokens is ForwardOptions::max_tokens: a rank with fewer tokens takes no more. Monotone; no
  /// limit applies. The communicator keeps the memory for the next forward of any of its layers.
  std::size_t shared_bytes(std::int64_t num_tokens) const;

  /// output = MoE(hidden_states); both (num_tokens, hidden), rows may have a stride, not
  /// overlapping unless `inplace` is set and they are the same. `workspace`:
  /// workspace_bytes(num_tokens), 64-byte aligned. All on LayerOptions::device. Checks every
  /// argument before it touches any output; only what a custom routing returns is checked when it
  /// has run, behind results of the router and, in chunks of tokens, behind the output of earlier
  /// ones. Allocates nothing,
  /// but a calling thread's first forward on the CPU starts the threads that help it. A call with
  /// zero tokens goes through every step. On CUDA it only enqueues, waits
  /// for nothing, and can be captured in a Graph; the first forward of a process must not be a
  /// captured one, as it loads the kernels.
  void forward(const TensorView& hidden_states, const TensorView& output, Workspace workspace,
               const ForwardOptions& options = {}) const;

  /// As forward, with routing given by the caller (precomputed or replayed ids): global ids or -1.
  /// Other ids are an Error; on CUDA, where they cannot be seen, they select nothing.
  void forward_routed(const TensorView& hidden_states, const Routing& routing,
                      const TensorView& output, Workspace workspace,
                      const ForwardOptions& options = {}) const;

  /// Convenience: allocates output and workspace on the device, and waits.
  Tensor forward(const TensorView& hidden_states) const;

  /// One forward in three parts: begin() routes and sends rows, compute() runs shared experts and,
  /// on the rows that arrive, the routed ones, finish() writes the output. forward() is the three.
  /// The caller may put work of its own between them. Arguments, workspace and layer must outlive
  /// the step. All ranks take the parts of their steps in one order. A step that is destroyed
  /// before finish() ends the communicator, as an exception does.
  class FUSEDMOE_API Step {
   public:
    Step(Step&&) noexcept;
    ~Step();
    void compute();
    void finish();

   private:
    friend class MoeLayer;
    struct Impl;
    explicit Step(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
  };
  /// As forward() and forward_routed(), but for forwards of one chunk (max_workspace_bytes).
  Step begin(const TensorView& hidden_states, const TensorView& output, Workspace workspace,
             const ForwardOptions& options = {}) const;
  Step begin_routed(const TensorView& hidden_states, const Routing& routing,
                    const TensorView& output, Workspace workspace,
                    const ForwardOptions& options = {}) const;

  /// Which rank has which experts now; none unless ranks with a communicator share experts.
  std::optional<ExpertPlacement> placement() const;
  /// Begins to move experts between the ranks, to where `placement` wants them: brings those that
  /// arrive here to memory of their own, which is kept for later moves, and leaves everything else
  /// as it is. Forwards go on with the placement that there was, until commit_move(). Collective,
  /// between two forwards, and it takes as long as the bytes take. On a GPU it needs memory for
  /// eight experts that leave this rank, too; forwards do not wait while it takes and frees some. A
  /// move that was begun before and not committed is forgotten. Throws Error on all ranks if they
  /// give different placements, if a rank would hold more or fewer experts than now, or if one rank
  /// fails. Then nothing has changed, and the communicator can be used further unless a rank has
  /// gone.
  void start_move(const ExpertPlacement& placement);
  /// The same over another communicator of the same ranks, which nobody else uses meanwhile: so a
  /// thread of its own may call it while others call forwards. Where GPUs map each other's memory a
  /// lane() of the layer's communicator serves. commit_move() comes when it has returned on all
  /// ranks. What ends `over` ends the layer's communicator only if `over` is a lane or part of it.
  void start_move(const ExpertPlacement& placement, Communicator& over);
  /// From now on the experts are where start_move() wanted them: the layer is, to the bit, one made
  /// with that placement. Not collective, so all ranks call it between the same two forwards. In
  /// the next one a rank that has not done so is an Error of all that names both sides.
  void commit_move();
  /// After a rank has failed, or to leave some out: goes on with a new communicator of the ranks
  /// that are left. `placement` is for them, as many as before or not, and any number of experts on
  /// each. Experts come from where they are, and those that are nowhere from `lost`, which is then
  /// asked on the ranks that are to hold them. Collective over the new communicator; between two
  /// forwards. Throws Error, on all ranks, as making a layer does, and where an expert is nowhere:
  /// the layer is then as it was. Needs memory for the old and the new experts together.
  void rebind(std::shared_ptr<Communicator> communicator, const ExpertPlacement& placement,
              const ExpertSource& lost = {});

 private:
  struct Impl;
  const Impl& impl() const;
  Impl& impl();
  std::unique_ptr<Impl> impl_;
};

/// Weights that fused_experts() has packed, and its scratch memory. Owned by the caller, used by
/// one thread and on one stream at a time.
class FUSEDMOE_API PackCache {
 public:
  PackCache();
  ~PackCache();
  PackCache(PackCache&&) noexcept;
  PackCache& operator=(PackCache&&) noexcept;

  /// Forgets the packed weights, after those in memory have changed, and frees all scratch memory:
  /// no work, and no graph, may use them any more.
  void clear();
  /// Layers that it holds.
  std::size_t size() const;

 private:
  friend FUSEDMOE_API void fused_experts(const struct FusedExpertsArgs& args, PackCache& cache);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Arguments of fused_experts(), with vLLM's names and meanings.
struct FusedExpertsArgs {
  TensorView hidden_states;        ///< (num_tokens, hidden)
  ExpertWeights::Stacked weights;  ///< w13 and w2 and what belongs to them
  TensorView topk_weights;         ///< (num_tokens, topk) f32
  TensorView topk_ids;             ///< (num_tokens, topk) i32, global ids or -1
  TensorView output;               ///< (num_tokens, hidden); hidden_states itself: in place
  std::optional<QuantScheme> scheme = std::nullopt;  ///< none: unquantized, the dtype of w13
  Activation activation = Activation::kSilu;
  ActivationParams activation_params = {};
  bool apply_router_weight_on_input = false;
  std::int64_t global_num_experts = 0;  ///< 0: those of w13
  TensorView expert_map = {};           ///< (global_num_experts) i32
  std::optional<Stream> stream = std::nullopt;
  std::string require = {};  ///< see select()
  /// Gives scratch memory of at least so many bytes, 64-byte aligned, on the device and for the
  /// stream of the call, as from an engine's own allocator. None: the cache's.
  std::function<Workspace(std::size_t bytes)> workspace = {};
};

/// output = the experts' weighted sum over the routed tokens. The first call with some w13 and w2
/// packs them, which takes long and on CUDA waits; later calls with the same addresses, shapes and
/// settings reuse the result. Without `workspace`, a call with more tokens than any before
/// allocates more scratch memory. Neither call can be captured: it throws Error for `stream` and
/// leaves the capture valid. Graphs captured earlier stay valid: the cache keeps outgrown memory
/// until it is cleared.
FUSEDMOE_API void fused_experts(const FusedExpertsArgs& args, PackCache& cache);

}  // namespace fusedmoe
