// ModularKernel: a pipeline, not a GPU kernel. It calls prepare, the experts and finalize in one
// block of scratch memory. The name is vLLM's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "fusedmoe/experts.h"
#include "fusedmoe/export.h"

namespace fusedmoe {

class PrepareAndFinalize;

/// What can be asked about a prepare/finalize without a device or ranks: a row of the registry.
/// Lives as long as the program.
class FUSEDMOE_API PrepareFinalizeDescriptor {
 public:
  virtual ~PrepareFinalizeDescriptor() = default;

  /// Stable name: "no_ep", "batched".
  virtual std::string_view name() const = 0;
  virtual ActivationFormat activation_format() const = 0;
  /// Whether it can serve the configuration; the format is compared by the selection.
  virtual Support supports(const MoeConfig& config) const = 0;
  /// Whether finalize knows what to do with the output of such experts.
  virtual bool accepts(WeightAndReduce kind) const = 0;
  /// The object that runs this configuration. Throws Error where supports() says no.
  virtual std::shared_ptr<const PrepareAndFinalize> create(const MoeConfig& config,
                                                           const Context& context) const = 0;
};

/// What a transport counts in one forward, from prepare to finalize. The forward owns it.
class FUSEDMOE_API TransportStep {
 public:
  TransportStep() = default;
  virtual ~TransportStep() = default;
  TransportStep(const TransportStep&) = delete;
  TransportStep& operator=(const TransportStep&) = delete;
};

/// What a transport makes of the sizes of a forward.
struct TransportSizes {
  ProblemSize caller;
  /// As the experts see them: the same, or the row capacity per expert in the batched format.
  /// Across ranks there is room for so many rows; finish_prepare() says how many have come.
  ProblemSize experts;
  std::size_t workspace_bytes = 0;  ///< scratch that lasts from prepare to finalize
  /// Memory that a forward takes beside the workspace, from what the communicator lets the other
  /// processes of this host read (Communicator::take_shared()). Scratch that others read lies there
  /// instead of in the workspace. 0 where ranks share no such memory.
  std::size_t shared_bytes = 0;
  /// What the experts leave does not lie in the workspace, but in memory of the transport, or with
  /// the ranks that add it.
  bool output_elsewhere = false;
};

/// What happens to activations before and after the experts: weight on input, quantize, dispatch;
/// weight, reduce, combine. One object, because a transport connects the halves. Prepare and
/// finalize come in two steps each, so that a transport can be in flight while something else runs:
/// start enqueues what is sent, finish what waits for it. On one rank finish does nothing.
///
/// All work is enqueued on the stream of the arguments. Every step is called for zero tokens too.
class FUSEDMOE_API PrepareAndFinalize {
 public:
  explicit PrepareAndFinalize(const PrepareFinalizeDescriptor& descriptor)
      : descriptor_(descriptor) {}
  virtual ~PrepareAndFinalize() = default;
  PrepareAndFinalize(const PrepareAndFinalize&) = delete;
  PrepareAndFinalize& operator=(const PrepareAndFinalize&) = delete;

  const PrepareFinalizeDescriptor& descriptor() const { return descriptor_; }

  /// All sizes of a forward. A transport that passes the caller's rows through does so for any
  /// number of them.
  virtual TransportSizes sizes(const ProblemSize& caller, const Preparation& preparation) const = 0;
  /// True if the experts see rows of other ranks: they then leave sums for this rank's part alone,
  /// and finalize takes the arguments as they were before prepare, but for `step` and
  /// `fused_output`.
  virtual bool moves_rows() const { return false; }

  /// Replaces hidden_states by what the experts read (and ids and weights, where rows change their
  /// rank), and sets hidden_scales and expert_num_tokens where the format has them. Throws Error
  /// for arguments that do not fit before it writes.
  void start_prepare(ForwardArgs& args) const;
  void finish_prepare(ForwardArgs& args) const { do_finish_prepare(args); }
  /// fused_output -> output.
  void start_finalize(const ForwardArgs& args) const;
  void finish_finalize(const ForwardArgs& args) const { do_finish_finalize(args); }
  /// A forward has failed on this rank, maybe before prepare, or was given up: the other ranks must
  /// not wait for it.
  virtual void abandon(std::string_view /*reason*/) const noexcept {}
  /// The experts have moved between the ranks, each of which holds as many as before: rewrites, in
  /// place, what it knows of that; on CUDA in the order of the stream, which the caller waits for.
  /// Between two forwards, on all ranks: in the next one they compare how often this was called.
  virtual void move_experts(const ExpertPlacement& /*placement*/, Stream /*stream*/) const {}
  /// Number of its layer among those of the communicator; 0 on one rank.
  virtual std::uint64_t layer() const { return 0; }
  /// How rows come to other ranks, or the parts of sums of ranks with the same tokens: "peer
  /// memory", "messages over nccl: <why not peer memory>"; empty: there are no other ranks. Where
  /// sums follow rows, both: "messages over nccl: <why>; sums: peer memory". `read` is what
  /// the experts leave to prepare. It may let many rows be quantized before they travel, or come
  /// while the experts run: "peer memory; quantized from 128 tokens on; beside the experts from
  /// 1024 tokens on".
  virtual std::string rows_travel(const Preparation& /*read*/ = {}) const { return {}; }

 private:
  friend class ModularKernel;
  virtual void do_start_prepare(ForwardArgs& args, const TransportSizes& sizes) const = 0;
  virtual void do_finish_prepare(ForwardArgs&) const {}
  virtual void do_start_finalize(const ForwardArgs& args) const = 0;
  virtual void do_finish_finalize(const ForwardArgs&) const {}

  const PrepareFinalizeDescriptor& descriptor_;
};

/// Rows stay where they are, standard format. Where several ranks have the same tokens (tensor
/// parallelism, or expert parallelism without data parallelism), each computes a part of the sum:
/// with a communicator finalize adds the parts in rank order, without one the caller has to.
FUSEDMOE_API const PrepareFinalizeDescriptor& no_ep();
/// One rank, batched format (num_local_experts, capacity, hidden). prepare copies each token to the
/// rows of its experts, in ascending order of the tokens. Capacity is the number of tokens of the
/// call, so a token may name an expert only once. A duplicate id is an Error on the CPU. On CUDA,
/// where prepare cannot see the ids, the first slot of the token that names the expert counts and
/// the others are dropped. Rows of an expert from expert_num_tokens on are neither written nor
/// read.
FUSEDMOE_API const PrepareFinalizeDescriptor& batched();

/// Many ranks, standard format. Every rank sends each of its tokens once to every rank that holds
/// an expert of it, with ids, weights and scales, and gets sums or rows back (CombineMode). Rows
/// arrive ordered by (rank, token).
FUSEDMOE_API const PrepareFinalizeDescriptor& all2all();
/// Many ranks, standard format. Every rank gets all tokens of all ranks. Also for data parallelism
/// without expert parallelism.
FUSEDMOE_API const PrepareFinalizeDescriptor& allgather_reducescatter();

/// What `experts` leave to prepare; `a1_scale`: see PackedWeights::Info.
FUSEDMOE_API Preparation make_preparation(const ExpertsDescriptor& experts,
                                          const QuantScheme& scheme,
                                          bool apply_router_weight_on_input,
                                          std::optional<float> a1_scale = {});

/// A caller-owned block of scratch memory.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// The sizes of a forward, computed once by ModularKernel::sizes() and passed down.
struct ForwardSizes {
  Preparation preparation;  ///< without the static scale, on which no size depends
  TransportSizes transport;
  WorkspaceSizes experts;
  /// workspace13 and, unless it is the caller's or lies elsewhere, the output.
  std::size_t common_bytes = 0;
  std::size_t bytes = 0;  ///< of the whole workspace
};

class FUSEDMOE_API ModularKernel {
 public:
  /// Throws Error unless both are of one activation format and finalize accepts what the experts
  /// leave to it.
  ModularKernel(std::shared_ptr<const PrepareAndFinalize> prepare_finalize,
                std::shared_ptr<const Experts> experts);

  const PrepareAndFinalize& prepare_finalize() const { return *prepare_finalize_; }
  const Experts& experts() const { return *experts_; }
  /// PrepareAndFinalize::rows_travel(), to these experts.
  std::string rows_travel() const;

  ForwardSizes sizes(const ProblemSize& caller) const;
  /// Exact bytes that apply() needs for this problem (sizes as the caller sees them): monotone in
  /// num_tokens; on the CPU it depends on the number of threads of the experts' context.
  std::size_t workspace_bytes(const ProblemSize& problem) const { return sizes(problem).bytes; }
  /// The same for a number of tokens of the experts' configuration.
  std::size_t workspace_bytes(std::int64_t num_tokens) const;

  /// One forward: begin() has prepared and sent the rows, compute() runs the experts on those that
  /// arrive and sends back what they leave, finish() waits for it and writes the output. A caller
  /// may put work of its own between them; the arguments, their views and the kernel must outlive
  /// the step, and whatever other steps the ranks take meanwhile, they take in the same order. A
  /// step that ends before finish() ends the communicator, as an exception does.
  class FUSEDMOE_API Step {
   public:
    Step(Step&& other) noexcept;
    Step& operator=(Step&&) = delete;
    ~Step();
    void compute();
    void finish();

   private:
    friend class ModularKernel;
    friend class MoeLayer;
    Step(const ModularKernel& kernel, const ForwardArgs& args, const ForwardSizes& sizes,
         void* workspace);
    void begin();
    void run_experts();
    /// Runs a part of the step. What it throws, the other ranks learn.
    template <typename Part>
    void run(const Part& part);
    void abandon(std::string_view reason) noexcept;

    enum class State { kBegun, kComputed, kEnded };
    const ModularKernel* kernel_;
    State state_ = State::kBegun;
    ForwardSizes sizes_;
    ForwardArgs args_, inner_;  // of the caller, and of the experts
  };

  /// Checks every argument, then starts. `workspace` must be 64-byte aligned.
  Step begin(const ForwardArgs& args, Workspace workspace) const;

  /// begin, compute and finish: prepare -> experts -> finalize, on the stream: on CUDA
  /// asynchronous, and capturable in a graph. Checks every argument first; allocates nothing, but a
  /// few small lists across ranks. Ids outside [0, num_experts) other than -1 are an Error, and so
  /// is an expert_map with such values. On CUDA, where values cannot be checked without waiting,
  /// they select nothing. Router weights that are not finite are no error: they reach the rows of
  /// their token. Where the experts' output has the shape and dtype of `output`, they write there.
  /// Across ranks whatever it throws ends the communicator, so that the other ranks do not wait.
  void apply(const ForwardArgs& args, Workspace workspace) const;

 private:
  std::shared_ptr<const PrepareAndFinalize> prepare_finalize_;
  std::shared_ptr<const Experts> experts_;
  WeightAndReduce reduce_ = WeightAndReduce::kNoOp;  // of the experts
  bool passes_rows_ = false;                         // the experts see the caller's rows
  bool moves_rows_ = false;                          // those of other ranks
};

}  // namespace fusedmoe
