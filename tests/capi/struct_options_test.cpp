// Every member of the structs that describe experts, a configuration and ranks is obeyed or
// refused.
#include <memory>
#include <string>
#include <vector>

#include "../ranks/processes.h"
#include "../unit/temporary_directory.h"
#include "capi_ranks.h"
#include "option_rows.h"

namespace fusedmoe::testing::struct_options_test {

/// A layer with other experts, or nobody's.
struct Experts : TinyLayer {
  const Tensor ones = filled({kExperts, 2 * kIntermediate}, 4);
  const float number = -1;

  void refused(const std::string& word) const {
    fusedmoe_layer* layer = nullptr;
    expect_error(fusedmoe_layer_create(&weights, &options, &layer), word);
    fusedmoe_layer_destroy(layer);
  }
  /// Whether the layer gives something else than that without the change.
  bool differs() const { return !bitwise_equal(forward_alone(*this), forward_alone(TinyLayer())); }
};

TEST(CStructOptionsTest, OfExpertsAreObeyedOrRefused) {
  using T = fusedmoe_expert_weights;
#define EXPERTS(member, ...) ROW(Experts, T, member, __VA_ARGS__)
// What experts in f32 do not have.
#define OF_QUANTIZED(member) EXPERTS(member, c.experts.member = to_c(c.ones); c.refused(#member);)
#define NUMBER(member, name) EXPERTS(member, c.experts.member = &c.number; c.refused(name);)
  test_all<Experts>(
      {
        EXPERTS(w13, c.experts.w13 = {}; c.refused("w13");), OF_QUANTIZED(w13_scales),
            OF_QUANTIZED(w13_zero_points), OF_QUANTIZED(w13_global_scales),
            OF_QUANTIZED(w13_input_scales),
            EXPERTS(w13_bias, c.experts.w13_bias = to_c(c.ones); EXPECT_TRUE(c.differs());),
            EXPERTS(w2, c.experts.w2 = {}; c.refused("w2");), OF_QUANTIZED(w2_scales),
            OF_QUANTIZED(w2_zero_points), OF_QUANTIZED(w2_global_scales),
            OF_QUANTIZED(w2_input_scales),
            EXPERTS(w2_bias, c.experts.w2_bias = to_c(c.ones); EXPECT_TRUE(c.differs());),
            EXPERTS(scheme, c.experts.scheme = "fp9"; c.refused("fp9");),
            EXPERTS(activation, c.experts.activation = "gelu"; EXPECT_TRUE(c.differs());),
            NUMBER(activation_alpha, "activation.alpha"),
            NUMBER(activation_beta, "activation.beta"),
            NUMBER(activation_limit, "activation.limit"), NUMBER(situ_beta, "activation.situ_beta"),
            NUMBER(situ_linear_beta, "activation.situ_linear_beta"),
            EXPERTS(gate_up_layout, c.experts.gate_up_layout = FUSEDMOE_UP_GATE;
                    EXPECT_TRUE(c.differs()); c.experts.gate_up_layout = 3;
                    c.refused("gate_up_layout");),
            EXPERTS(transposed, c.experts.transposed = 1; c.refused("w2");),
            EXPERTS(scale_layout, c.experts.scale_layout = 2; c.refused("scale_layout");)
      },
      sizeof(T));
}

struct Config {
  fusedmoe_moe_config config = sized<fusedmoe_moe_config>();

  Config() {
    config.num_experts = 8;
    config.topk = 2;
    config.hidden = config.intermediate = 64;
  }
  std::string table() const {
    fusedmoe_selection* found = nullptr;
    EXPECT_OK(fusedmoe_explain(&config, &found));
    const Handle<fusedmoe_selection> selection(found);
    return fusedmoe_selection_table(found);
  }
  void says(const std::string& words) const {
    EXPECT_NE(table().find(words), std::string::npos) << table();
  }
  void refused(const std::string& word) const {
    fusedmoe_selection* found = nullptr;
    expect_error(fusedmoe_explain(&config, &found), word);
    fusedmoe_selection_destroy(found);
  }
};

TEST(CStructOptionsTest, OfAConfigurationAreObeyedOrRefused) {
  using T = fusedmoe_moe_config;
#define CONFIG(member, ...) ROW(Config, T, member, __VA_ARGS__)
#define NAME(member) CONFIG(member, c.config.member = "nobody"; c.refused("nobody");)
  test_all<Config>(
      {
        CONFIG(num_experts, c.config.num_experts = 1; c.says("topk 2 of 1 experts");),
            CONFIG(num_local_experts, c.config.num_local_experts = 4;
                   c.says("without an expert map");),
            CONFIG(topk, c.config.topk = 9; c.says("topk 9 of 8 experts");),
            CONFIG(hidden, c.config.hidden = -64; c.says("hidden -64");),
            CONFIG(intermediate, c.config.intermediate = -64; c.says("intermediate -64");),
            CONFIG(dtype, c.config.dtype = 99; c.refused("config.dtype");), NAME(scheme),
            NAME(activation), CONFIG(has_bias, c.config.has_bias = 1; c.says("*  cpu");),
            CONFIG(has_expert_map, c.config.num_local_experts = 4; c.config.has_expert_map = 1;
                   c.says("*  cpu");),
            CONFIG(apply_router_weight_on_input, c.config.apply_router_weight_on_input = 1;
                   c.says("router weight on input");),
            CONFIG(batch_invariant, c.config.scheme = "fp8_tensor"; c.says("*  cpu");
                   c.config.batch_invariant = 1; c.says("one activation scale");),
            CONFIG(monolithic, c.config.monolithic = 1; c.says("monolithic");),
            CONFIG(device_type, c.config.device_type = 2; c.refused("config.device");),
            CONFIG(device_index, c.config.device_index = 1; c.refused("config.device");),
            CONFIG(compute_capability, c.config.device_type = FUSEDMOE_CUDA;
                   c.config.compute_capability = 80; c.says("compute capability 8.0");),
            NAME(require), CONFIG(hooks, c.config.hooks = 1; c.says("no injection points");)
      },
      sizeof(T));
}

/// Two ranks that meet in a folder, or do not.
struct Ranks {
  const std::unique_ptr<TemporaryDirectory> folder = std::make_unique<TemporaryDirectory>();
  fusedmoe_communicator_options options = patient();
  fusedmoe_rendezvous at = sized<fusedmoe_rendezvous>();
  fusedmoe_gather gather = sized<fusedmoe_gather>();

  Ranks() { at.folder = folder->path().c_str(); }
  void refused(const std::string& word) const {
    fusedmoe_communicator* made = nullptr;
    expect_error(fusedmoe_communicator_create_at(0, kRanks, &at, &options, &made), word);
    fusedmoe_communicator_destroy(made);
  }
  /// Bytes that a layer of theirs shares, where they are processes.
  std::vector<std::string> shared_bytes() const {
    return texts_of_processes(
        kRanks, [&](int rank, const std::shared_ptr<ControlPlane>&) -> std::string {
          fusedmoe_communicator* made = nullptr;
          fusedmoe_communicator_create_at(rank, kRanks, &at, &options, &made);
          const Handle<fusedmoe_communicator> communicator(made);
          TinyLayer tiny;
          tiny.options.communicator = made;
          tiny.options.max_tokens_per_rank = kTokens;
          const auto layer = tiny.create();
          std::size_t bytes = 0;
          const bool done =
              layer && fusedmoe_layer_shared_bytes(layer.get(), kTokens, &bytes) == FUSEDMOE_OK &&
              fusedmoe_communicator_barrier(made) == FUSEDMOE_OK;
          return done ? std::to_string(bytes > 0) : fusedmoe_last_error();
        });
  }
};

TEST(CStructOptionsTest, OfACommunicatorAreObeyedOrRefused) {
  using T = fusedmoe_communicator_options;
#define OPTION(member, ...) ROW(Ranks, T, member, __VA_ARGS__)
  test_all<Ranks>(
      {
        OPTION(device_type, c.options.device_type = 2; c.refused("options.device");),
            OPTION(device_index, c.options.device_index = 1; c.refused("options.device");),
            OPTION(timeout_ms, c.options.timeout_ms = -1; c.refused("timeout");),
            OPTION(
                no_shared_memory, const std::vector<std::string> yes(kRanks, "1"), no(kRanks, "0");
                EXPECT_EQ(c.shared_bytes(), yes); Ranks apart; apart.options.no_shared_memory = 1;
                EXPECT_EQ(apart.shared_bytes(), no);),
            OPTION(peer_memory, c.options.peer_memory = 3; c.refused("options.peer_memory");)
      },
      sizeof(T));
}

TEST(CStructOptionsTest, OfARendezvousAreObeyedOrRefused) {
  using T = fusedmoe_rendezvous;
#define PLACE(member, ...) ROW(Ranks, T, member, __VA_ARGS__)
  test_all<Ranks>(
      {
        PLACE(folder, c.at.folder = nullptr; c.refused("rendezvous has 0 of folder");),
            PLACE(gather, c.at.folder = nullptr; c.at.gather = &c.gather; c.refused("gather.run");),
            PLACE(address, c.at.address = "127.0.0.1"; c.refused("rendezvous has 2 of folder");),
            PLACE(port, c.at.folder = nullptr; c.at.address = "127.0.0.1"; c.at.port = 65536;
                  c.refused("port");),
            PLACE(reserved, c.at.reserved = 1; c.refused("rendezvous.reserved");),
            PLACE(nccl_comm, c.at.nccl_comm = &c; c.refused("rendezvous.nccl_comm");),
            PLACE(nccl_unique_id, c.at.nccl_unique_id = &c;
                  c.refused("rendezvous.nccl_unique_id");),
            PLACE(token, c.at.token = "the-secret-of-a-test"; c.refused("rendezvous.token");)
      },
      sizeof(T));
}

}  // namespace fusedmoe::testing::struct_options_test
