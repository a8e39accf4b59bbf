// Experts: permute, grouped GEMM, activation, grouped GEMM, unpermute.
//
// A descriptor answers for a configuration; the instance that it creates runs it. Modular experts
// take top-k ids and weights, monolithic ones router logits. After vLLM's FusedMoEExpertsModular
// and FusedMoEExpertsMonolithic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/comm.h"
#include "fusedmoe/export.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/router.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe {

class TransportStep;
struct RowSources;
struct RowTargets;
class TunedConfigs;

/// Shape of the activations that travel between prepare, experts and finalize.
enum class ActivationFormat {
  kStandard,        ///< (num_tokens, hidden)
  kBatchedExperts,  ///< (num_local_experts, max_tokens, hidden) + expert_num_tokens
};
FUSEDMOE_API std::string_view name(ActivationFormat format);

/// What comes back from the ranks that hold a token's experts.
enum class CombineMode {
  /// One row from each rank, the weighted sum of its experts; the origin adds them in rank order in
  /// f32.
  kPerRank,
  /// One row from each expert, in f32; the origin weights and adds them in slot order, as one rank
  /// would: the same bits for every number of ranks and every placement, where the experts do not
  /// depend on the batch and weight rows when they sum them (`cpu`; GPUs but for f16).
  kPerSlot,
};
FUSEDMOE_API std::string_view name(CombineMode mode);
/// Inverse. Throws Error listing the names, "per_rank" and "per_slot".
FUSEDMOE_API CombineMode parse_combine_mode(std::string_view text);

/// Everything about a layer that an implementation may accept or refuse.
struct MoeConfig {
  std::int64_t num_experts = 0;        ///< global
  std::int64_t num_local_experts = 0;  ///< on this rank
  std::int64_t topk = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;  ///< per expert, per tensor-parallel rank
  DType dtype = DType::kBF16;     ///< of hidden states and output
  QuantScheme scheme;
  Activation activation = Activation::kSilu;
  ActivationParams activation_params;
  bool has_bias = false;
  bool has_expert_map = false;
  bool apply_router_weight_on_input = false;
  RoutingMethod routing_method = RoutingMethod::kNone;
  ActivationFormat activation_format = ActivationFormat::kStandard;
  ParallelConfig parallel;
  CombineMode combine = CombineMode::kPerRank;
  std::optional<DType> dispatch_dtype;  ///< see RankOptions
  Device device;
  /// Of a CUDA device that need not be here, as major * 10 + minor: 90 is Hopper, with the 132
  /// multiprocessors of an H200. None: that of `device`, which must then be usable.
  std::optional<int> compute_capability;
  bool batch_invariant = false;  ///< require rows that do not depend on their batch
  bool hooks = false;            ///< require injection points, see ExpertsHooks
  bool monolithic = false;       ///< the experts get router logits and route by themselves
};

/// What `weights` say of the configuration; the experts are all local. `topk`: experts per token.
FUSEDMOE_API MoeConfig moe_config(const ExpertWeights& weights, std::int64_t topk, DType dtype,
                                  Device device = {});

/// What binds a layer to the other ranks; equal on all of them.
struct RankOptions {
  /// Null: one rank, or the caller adds what the ranks compute.
  std::shared_ptr<Communicator> communicator;
  std::optional<ExpertPlacement> placement = std::nullopt;  ///< none: linear
  ReplicaChoice replica_choice = ReplicaChoice::kHash;
  /// Most tokens that any rank gives to a forward; buffers are made for it.
  std::int64_t max_tokens_per_rank = 0;
  /// Most rows that a rank receives in a forward with exact sizes; 0: as many as can come. More are
  /// an Error, unless drop_rows is set.
  std::int64_t receive_capacity = 0;
  /// Rows that do not fit into receive_capacity stay at home: the last ones in the order of (source
  /// rank, token). The experts that a token chose on that rank then add nothing to its output.
  /// ForwardOptions::dropped_rows counts such rows. Not with batch_invariant.
  bool drop_rows = false;
  /// Of rows on their way to the ranks of their experts: the layer's, or that of the scheme's
  /// activations (e4m3, i8 or e2m1): rows are then quantized before they travel, and their scales
  /// go with them. The output does not depend on it, but for f16 rows with values below 2^-14.
  /// None: on the CPU as experts read rows, quantized but for e2m1; on CUDA in the layer's dtype,
  /// or through peer memory quantized where that is predicted to be faster (rank_costs()).
  std::optional<DType> dispatch_dtype = std::nullopt;
  /// None: per slot for batch_invariant, and through the memory of GPUs where that is predicted to
  /// be faster (rank_costs() in simulation.h) and combine_dtype is none; else per rank.
  std::optional<CombineMode> combine = std::nullopt;
  std::optional<DType> combine_dtype = std::nullopt;  ///< of rows per rank: f32, or the layer's
  /// So many forwards may be in flight at the same time (ForwardOptions::lane), as of micro-batches
  /// that overlap. From 2 on only where rows, or sums, go through the memory of GPUs, of which each
  /// lane takes Selection::peer_bytes(); a kernel that waits for other ranks then leaves
  /// multiprocessors to the other lanes. At most 8.
  int lanes = 1;
};

/// What an instance is bound to, beside its configuration.
struct Context {
  /// Threads of the CPU; 0: num_threads() when the instance is made.
  int num_threads = 0;
  /// Kernel configurations that were measured before; null: the experts choose by themselves.
  const TunedConfigs* tuned = nullptr;
  RankOptions ranks = {};
};

/// Yes, or a reason with the value that failed.
struct Support {
  Reason reason = Reason::kSupported;
  std::string text;  ///< why not; or what would be multiplied, and by which code

  explicit operator bool() const { return reason == Reason::kSupported; }
  static Support yes() { return {}; }
  static Support no(Reason reason, std::string text) { return {reason, std::move(text)}; }
};

/// Who multiplies by the router weights and sums over the top-k rows of a token.
enum class WeightAndReduce {
  kNoOp,      ///< the experts have done it; finalize only copies, if it must
  kDelegate,  ///< finalize: of (num_tokens * topk, hidden) rows in slot order, or in the batched
              ///< format of (num_local_experts, max_tokens, hidden)
};
FUSEDMOE_API std::string_view name(WeightAndReduce kind);

/// Size of one forward.
struct ProblemSize {
  /// Rows that there must be room for: tokens, or in the batched format rows of each expert.
  std::int64_t num_tokens = 0;
  /// The most tokens of any rank in this forward; 0: num_tokens.
  std::int64_t max_tokens = 0;
  /// Every rank sends max_tokens rows to each that has experts; see ForwardOptions.
  bool fixed_sizes = false;
  /// Rows of all local experts together that are likely, by which kernel configurations are chosen;
  /// 0: as many as routing at random gives.
  std::int64_t expected_rows = 0;
  /// Rows of all local experts together that there must be room for; 0: topk for each token. Only
  /// in the standard format.
  std::int64_t max_rows = 0;
  std::int64_t topk = 0;
  std::int64_t num_local_experts = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  DType dtype = DType::kBF16;         ///< of the hidden states before quantization
  DType output_dtype = DType::kBF16;  ///< dtype, or f32
  QuantScheme scheme;

  FUSEDMOE_API static ProblemSize of(const MoeConfig& config, std::int64_t num_tokens);
};

/// Scratch memory of one apply(), known before it starts; monotone in num_tokens, none for zero
/// tokens. workspace13 and the experts' output may share memory, both from offset 0: an
/// implementation writes `output` only after its last read of workspace13 and, as forwards may be
/// in place, of the hidden states. workspace2 is disjoint from both.
struct WorkspaceSizes {
  std::size_t workspace13_bytes = 0;
  std::size_t workspace2_bytes = 0;
  Shape output_shape;  ///< exact
  DType output_dtype = DType::kBF16;

  /// Bytes of the buffer that workspace13 and the output share.
  FUSEDMOE_API std::size_t common_bytes() const;
};

/// Which tokens of which rank a rank has received. Undefined and empty where tokens do not travel.
struct TokenOrigins {
  /// (num_tokens, 1) i32, on the device: each token's number among those that its own rank has
  /// given to forward.
  TensorView numbers;
  /// How many of the tokens are of each rank of the layer, in the order of the ranks.
  std::span<const std::int64_t> counts;
};

/// Rows at an injection point, in the order of the grouped GEMM: those of local expert e are
/// [expert_offsets[e], expert_offsets[e + 1]). Row r belongs to slot permuted_to_slot[r], that is,
/// to token slot / topk. On CUDA the views are of device memory that earlier work of the stream
/// fills, so a callback enqueues its own there; `rows` is then the number of slots, of which those
/// behind the last offset belong to nobody and have slot -1.
struct HookArgs {
  TensorView input;   ///< what the step before read: see ExpertsHooks
  TensorView output;  ///< (rows, width) of the layer's dtype, contiguous; to be changed in place
  TensorView expert_offsets;    ///< (num_local_experts + 1) i32
  TensorView permuted_to_slot;  ///< (rows) i32
  std::int64_t topk = 1;
  /// Across ranks a hook sees the tokens that this rank has received, ordered by the rank they come
  /// from, and this rank's experts. With CombineMode::kPerSlot a token arrives once for each of its
  /// slots; each arrival is then a token here, and topk is 1.
  TokenOrigins origins;
  Stream stream;  ///< of the forward
};

/// Callbacks that unfused experts call between their steps: to add a LoRA delta, to observe. Called
/// once per forward by one thread, but not for no tokens; they must not allocate if the forward
/// must not. What they throw leaves the forward, with its output untouched. Unset ones cost
/// nothing.
struct ExpertsHooks {
  /// After GEMM 1. input: hidden states as the experts got them, (num_tokens, hidden), dequantized
  /// never: undefined when they are quantized. output: (rows, 2 I), gate then up; or (rows, I).
  std::function<void(const HookArgs&)> after_gemm1;
  /// After the activation. input: GEMM 1's output; output: (rows, I).
  std::function<void(const HookArgs&)> after_activation;
  /// After GEMM 2, before router weights. input: the activated rows, (rows, I), before they are
  /// quantized; output: (rows, hidden).
  std::function<void(const HookArgs&)> after_gemm2;
};

/// What prepare does to the hidden states on their way to the experts, out of place, in this order.
struct Preparation {
  bool apply_router_weight_on_input = false;  ///< topk = 1: multiply by the weight
  std::optional<QuantKey> quant;              ///< quantize; none: they keep their dtype
  std::optional<float> scale;                 ///< of a static key
  /// The experts can read rows at ForwardArgs::row_addresses, so prepare need not copy them to one
  /// place.
  bool by_address = false;
  /// The experts take quantized rows, too, where they would quantize them by themselves.
  bool takes_quantized = false;
  /// The experts can read rows from ForwardArgs::row_sources.
  bool from_sources = false;
  /// They can write rows to ForwardArgs::row_targets.
  bool to_targets = false;
};

/// The arguments of one forward: they travel from the caller through prepare, experts and finalize.
/// Views are contiguous but for the rows of hidden_states and output, which may have a stride, and
/// lie on the stream's device.
struct ForwardArgs {
  // What the caller gives.
  const PackedWeights* weights = nullptr;
  TensorView hidden_states;  ///< (num_tokens, hidden); prepare replaces it by what the experts read
  TensorView output;         ///< (num_tokens, hidden) of the dtype of hidden_states, or f32
  TensorView topk_ids;       ///< (num_tokens, topk) i32 global ids; -1 selects nothing
  TensorView topk_weights;   ///< (num_tokens, topk) f32
  TensorView expert_map;     ///< (num_experts) i32 global -> local or -1; optional
  std::int64_t num_experts = 0;         ///< global; 0 = that of the configuration
  bool inplace = false;                 ///< output may be hidden_states; they never overlap in part
  bool accumulate = false;              ///< output += instead of output =
  const ExpertsHooks* hooks = nullptr;  ///< only of a configuration with hooks
  /// Number of an Experts::kernel_configs() name; -1: the experts choose.
  int kernel_config = -1;
  std::int64_t expected_rows = 0;  ///< see ProblemSize
  std::int64_t max_rows = 0;       ///< see ProblemSize
  std::int64_t max_tokens = 0;     ///< see ProblemSize
  bool fixed_sizes = false;        ///< see ProblemSize; a captured stream implies it
  /// Nothing is enqueued between compute and finish of the forward, and no other rank is driven by
  /// its thread between them: a transport may put off until finish what it tells the others.
  bool undivided = false;
  /// (1) i32, optional: += rows of these tokens that were dropped, see RankOptions::drop_rows.
  TensorView dropped_rows;
  Stream stream;

  // Only monolithic experts, which route by themselves: they write topk_ids and topk_weights.
  const RouterConfig* router = nullptr;
  TensorView router_logits;  ///< (num_tokens, num_experts) f32, bf16 or f16
  /// If given, the experts compute the logits too: router_logits, f32, is then written.
  const RouterWeights* router_weights = nullptr;
  TensorView score_correction_bias;  ///< (num_experts) f32; optional; without router_weights
  TensorView expert_load;  ///< (num_experts) i32, optional: += tokens that chose each expert

  // What the steps leave for those behind them; ModularKernel fills it.
  Preparation preparation;
  /// Scales of quantized hidden states (e4m3 or i8): (1, 1) per tensor, or (num_tokens, 1) where
  /// rows come from ranks that have a dynamic one each; (num_tokens, 1) per token, (num_tokens,
  /// groups) per group; batched (1, 1) and (E, max_tokens, ...). Undefined otherwise. The scale of
  /// a static key is that of the weights (PackedWeights::Info::a1_scale): another one is an Error
  /// on the CPU; on CUDA, where only the device could read it, it is not looked at.
  TensorView hidden_scales;
  /// (num_tokens) or null. If it is not null, row i lies at row_addresses[i] and not in
  /// hidden_states, which then gives only shape and dtype; the address of a row that no expert
  /// reads is null. Only for experts with reads_rows_by_address(). The rows stay as they are until
  /// the experts have run.
  const std::byte* const* row_addresses = nullptr;
  /// If it is not null, the rows of hidden_states, and of hidden_scales that come with rows, lie
  /// there; of these only shape and dtype are read. Rows that the experts would quantize come
  /// quantized. Only for experts with reads_row_sources(). The rows stay as they are until the
  /// experts have run.
  const RowSources* row_sources = nullptr;
  TokenOrigins origins;          ///< of hidden_states, where there are hooks
  TensorView expert_num_tokens;  ///< (E) i32: rows that are real; batched format only
  WeightAndReduce weight_and_reduce = WeightAndReduce::kNoOp;  ///< of the experts, for finalize
  TensorView fused_output;  ///< what the experts write: `output`, or for finalize to reduce
  void* prepare_workspace = nullptr;  ///< untouched from prepare to finalize
  /// Rows of hidden_states that the experts may be given at a time, one part after the other, as
  /// all of them name more experts than max_rows; 0: all. Prepare sets it.
  std::int64_t rows_at_once = 0;
  /// What the transport counts in this forward, where rows change their rank; prepare makes it.
  std::shared_ptr<TransportStep> step;
  /// Set by prepare where fused_output should lie, because other ranks read it there; null: it may
  /// lie anywhere.
  void* output_memory = nullptr;
  /// If it is not null, the rows of fused_output go there instead, but those of tokens that name no
  /// expert of this rank; of fused_output only shape and dtype count. Only for experts with
  /// writes_row_targets().
  const RowTargets* row_targets = nullptr;
  void* workspace13 = nullptr;
  void* workspace2 = nullptr;
};

/// Called after each expert: (done, total).
using PackProgress = std::function<void(std::int64_t, std::int64_t)>;

/// How Experts::pack works.
struct PackOptions {
  PackProgress progress;
  /// Of the device of the experts: on CUDA that of the copies and of the packing kernels, for which
  /// pack() waits; on the CPU its executor runs the packing. None: the device's default stream.
  std::optional<Stream> stream;
};

class Experts;

/// What can be asked about experts without weights and without a device: a row of the registry.
/// Lives as long as the program.
class FUSEDMOE_API ExpertsDescriptor {
 public:
  virtual ~ExpertsDescriptor() = default;

  /// Stable name: "reference", "cpu", "sm90".
  virtual std::string_view name() const = 0;
  virtual Support supports(const MoeConfig& config) const = 0;
  /// True if select() takes it only where its name is asked for.
  virtual bool on_request_only() const { return false; }
  /// True if monolithic experts of few tokens are faster than a router and modular ones.
  virtual bool routes_faster() const { return false; }
  /// What the kernels are compiled for: "avx512_bf16", "sm_90a", "generic".
  virtual std::string_view instruction_set() const = 0;
  /// Name of the layout of packed weights. Experts with the same name take each other's files of
  /// them. The default: name().
  virtual std::string_view layout() const { return name(); }
  /// Of that layout; another number is another one.
  virtual int layout_version() const = 0;
  /// Bytes that packed weights of the configuration will take: PackedWeights::nbytes() where the
  /// scales have the dtype that the scheme says, never less. Needs neither weights nor a device;
  /// only of a configuration that supports() accepts.
  /// The default: 0, not known.
  virtual std::int64_t packed_bytes(const MoeConfig& config) const;
  /// True if apply() quantizes the hidden states of such a scheme by itself, as block-scaled FP4
  /// does after the permutation; false if prepare must have done it. Meaningless without quantized
  /// activations.
  virtual bool expects_unquantized_inputs(const QuantScheme& scheme) const;
  /// See Preparation::takes_quantized. The default: no.
  virtual bool takes_quantized_inputs(const QuantScheme& scheme) const;
  /// See Preparation::by_address. The default: no.
  virtual bool reads_rows_by_address() const { return false; }
  /// See Preparation::from_sources. The default: no.
  virtual bool reads_row_sources() const { return false; }
  /// See Preparation::to_targets. The default: no.
  virtual bool writes_row_targets() const { return false; }
  /// Who applies the router weights and reduces over top-k, by the activation format. The default:
  /// the experts in the standard format, finalize in the batched one.
  virtual WeightAndReduce weight_and_reduce(ActivationFormat format) const;
  /// The experts that run this configuration. Throws Error where supports() says no, or the device
  /// of the context cannot be used.
  virtual std::shared_ptr<const Experts> create(const MoeConfig& config,
                                                const Context& context) const = 0;
};

/// Experts for one configuration, bound to their resources. Immutable: several threads may use one.
class FUSEDMOE_API Experts {
 public:
  Experts(const ExpertsDescriptor& descriptor, MoeConfig config, Context context);
  virtual ~Experts() = default;
  Experts(const Experts&) = delete;
  Experts& operator=(const Experts&) = delete;

  const ExpertsDescriptor& descriptor() const { return descriptor_; }
  const MoeConfig& config() const { return config_; }
  const Context& context() const { return context_; }
  bool batched() const { return config_.activation_format == ActivationFormat::kBatchedExperts; }

  /// Workspace sizes: an upper bound over all kernel configurations.
  virtual WorkspaceSizes workspace_sizes(const ProblemSize& problem) const = 0;
  /// Names of the kernel configurations that can run the problem, the one that would run now first.
  /// Empty: there is only one.
  virtual std::vector<std::string> kernel_configs(const ProblemSize& problem) const;
  /// Number of a name, for ForwardArgs::kernel_config; -1: there is none such.
  virtual int find_kernel_config(std::string_view name) const;

  /// Published layout -> this implementation's layout, expert by expert: extra memory beyond the
  /// result is at most one expert. The source may lie in host memory or on the context's device.
  /// Throws Error for weights that are not of the configuration or cannot be packed. Waits.
  virtual std::shared_ptr<PackedWeights> pack(const ExpertWeights& weights,
                                              const PackOptions& options = {}) const = 0;
  /// The weights that PackedWeights::parts() took apart; `parts` lie in host memory, or on the
  /// device. Parts on the experts' device are used without a copy, the others are copied to it.
  /// All parts are checked: throws Error if one is missing or does not fit. load_packed()
  /// (packed_file.h) reads them from a file. Waits. The default throws Error: the implementation
  /// cannot.
  virtual std::shared_ptr<PackedWeights> from_parts(PackedWeights::Info info,
                                                    const PackedParts& parts) const;
  /// The inverse for one expert, in tensors of its own, as WeightMatrix describes them; zero codes
  /// may come back with the other sign, scales of blocks of zeros as any scale.
  /// The default throws Error: the implementation cannot.
  virtual ExpertWeights unpack(const PackedWeights& packed, std::int64_t expert) const;
  /// Replaces one expert by the first of `weights`, in place (weight updates between training and
  /// inference). No forward may run meanwhile. Checks everything before it writes.
  /// The default throws Error: the implementation cannot.
  virtual void repack(const ExpertWeights& weights, std::int64_t expert,
                      PackedWeights& packed) const;
  /// The parts of PackedWeights::extract_expert(), for who copies them elsewhere. The default
  /// copies them first; on CUDA arrays are views of the packed ones.
  virtual PackedParts expert_parts(const PackedWeights& packed, std::int64_t expert) const;
  /// PackedWeights::replace_expert() in the order of a stream: on CUDA it is only enqueued, and
  /// `one` must live until it is done. The default does it at once.
  virtual void replace_expert(PackedWeights& packed, std::int64_t expert, const PackedWeights& one,
                              Stream stream) const;
  /// Room for the experts of config(), of the layout of `like`, which may have another number of
  /// them: PackedWeights::replace_expert() and repack() fill it.
  /// The default throws Error: the implementation cannot.
  virtual std::shared_ptr<PackedWeights> make_room(const PackedWeights& like) const;
  /// Whether apply() can use these weights.
  virtual bool accepts(const PackedWeights& weights) const = 0;

  /// hidden_states -> fused_output, of WorkspaceSizes::output_shape, written completely. Checks
  /// every argument first; allocates nothing. num_tokens = 0 is legal.
  void apply(const ForwardArgs& args) const;

 private:
  friend class ModularKernel;
  /// The same with arguments that were checked.
  virtual void run(const ForwardArgs& args) const = 0;

  const ExpertsDescriptor& descriptor_;
  MoeConfig config_;
  Context context_;
};

}  // namespace fusedmoe
