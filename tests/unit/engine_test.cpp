// What an engine with its own routing and threads asks of a layer: loads, a cache of experts,
// forwards that are given up, and what was chosen.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "error_text.h"
#include "fake_experts.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/log.h"
#include "layer_problem.h"
#include "testing/compare.h"

namespace fusedmoe::engine_test {

using testing::bitwise_equal;
using testing::error_text;
using testing::layer_options;
using testing::LayerSpec;
using testing::make_hidden_states;
using testing::make_ids;
using testing::make_layer_weights;
using testing::random_tensor;
using testing::Scratch;

constexpr std::int64_t kExperts = 8, kHidden = 64, kTopk = 2;

Tensor copy_of(const TensorView& view) {
  Tensor result = Tensor::empty(view.shape(), view.dtype());
  convert(view, result);
  return result;
}

class EngineVariants : public ::testing::TestWithParam<std::string> {
 protected:
  LayerOptions options() const { return layer_options(DType::kBF16, GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Engine, EngineVariants,
                         ::testing::Values("cpu", "cpu_batched", "cpu_unfused", "reference"),
                         [](const auto& info) { return info.param; });

TEST_P(EngineVariants, LoadOfTheCallersRouting) {
  LayerSpec spec;
  spec.zero_experts = 1;
  LayerOptions limited = options();
  limited.max_workspace_bytes = MoeLayer(make_layer_weights(spec), limited).workspace_bytes(2);
  const MoeLayer layer(make_layer_weights(spec), limited);  // two chunks
  const Tensor x = make_hidden_states(DType::kBF16, 3, kHidden);
  const Tensor output = Tensor::empty(x.shape(), DType::kBF16);
  const Tensor weights = random_tensor(DType::kF32, {3, kTopk}, 1, 1);
  const Tensor load = Tensor::empty({kExperts + 1}, DType::kI32);
  testing::poison(load);
  const Scratch scratch(layer, 3);
  layer.forward_routed(x, {make_ids({3, 2}, {7, 0, -1, 7, 3, 8}), weights}, output,
                       scratch.workspace, {.expert_load = load});
  EXPECT_TRUE(bitwise_equal(load, make_ids({9}, {1, 0, 0, 1, 0, 0, 0, 2, 1})));
}

/// A layer that has the experts 0 to 3 of eight, and what its experts are.
struct Cache {
  LayerWeights whole = make_layer_weights({});
  LayerWeights weights = whole;

  Cache() {
    weights.experts.experts.resize(kExperts / 2);
    weights.expert_map = make_ids({8}, {0, 1, 2, 3, -1, -1, -1, -1});
  }
  ExpertWeights expert(std::size_t index) const {
    ExpertWeights one = whole.experts;
    one.experts = {whole.experts.experts[index]};
    return one;
  }
};

TEST_P(EngineVariants, CacheOfExperts) {
  const Cache cache;
  const MoeLayer whole(cache.whole, options());
  MoeLayer layer(cache.weights, options());
  const Tensor x = make_hidden_states(DType::kBF16, 2, kHidden);
  const Tensor weights = random_tensor(DType::kF32, {2, kTopk}, 1, 2);
  const Scratch scratch(whole, 2);
  const auto forward = [&](const MoeLayer& of, const Tensor& ids, const Tensor& map) {
    const Tensor output = Tensor::empty(x.shape(), DType::kBF16);
    of.forward_routed(x, {ids, weights}, output, scratch.workspace, {.expert_map = map});
    return output;
  };
  layer.repack(cache.expert(6), 2);
  const Tensor map = make_ids({8}, {0, 1, -1, 3, -1, -1, 2, -1});
  EXPECT_TRUE(bitwise_equal(forward(layer, make_ids({2, 2}, {6, 0, 2, 3}), map),
                            forward(whole, make_ids({2, 2}, {6, 0, -1, 3}), {})));

  EXPECT_EQ(
      error_text([&] {
        forward(whole, make_ids({2, 2}, {6, 0, 2, 3}), map);
      }),
      "options.expert_map is given to a layer that was made without LayerWeights::expert_map");
  EXPECT_EQ(
      error_text([&] {
        forward(layer, make_ids({2, 2}, {6, 0, 2, 3}), make_ids({8}, {0, 0, 1, 2, 3, -1, -1, -1}));
      }).substr(0, 35),
      "expert_map names local expert 0 twi");
  EXPECT_THROW(forward(layer, make_ids({2, 2}, {6, 0, 2, 3}), make_ids({4}, {0, 1, 2, 3})), Error);
  EXPECT_THROW(layer.repack(cache.expert(6), kExperts / 2), Error);
}

/// Gives the forward up at its call number `giving_up`, when a task has run.
class Impatient final : public Executor {
 public:
  explicit Impatient(int giving_up) : giving_up_(giving_up) {}
  int concurrency() const override { return 3; }
  void run(int num_tasks, Task task) override {
    task(num_tasks - 1);
    if (calls_++ == giving_up_) throw std::string("given up");
    for (int i = 0; i + 1 < num_tasks; ++i) task(i);
  }
  int calls() const { return calls_; }

 private:
  const int giving_up_;
  int calls_ = 0;
};

TEST_P(EngineVariants, AForwardIsGivenUpOrWritten) {
  const std::int64_t tokens = GetParam() == "reference" ? 100 : 600;
  LayerSpec specs[3];
  specs[1].shared_experts = specs[1].shared_gate = true;
  specs[1].zero_experts = 2;
  specs[2].latent = 32;
  specs[2].shared_experts = true;
  for (const LayerSpec& spec : specs) {
    const MoeLayer layer(make_layer_weights(spec), options());
    const Tensor x = make_hidden_states(DType::kBF16, tokens, kHidden);
    const Tensor before = random_tensor(DType::kBF16, x.shape(), 1, 3);
    const Scratch scratch(layer, tokens);
    const auto forward = [&](Executor& executor, const Tensor& output) {
      layer.forward(x, output, scratch.workspace,
                    {.accumulate = true, .stream = cpu_stream(executor)});
    };
    Impatient patient(-1);
    const Tensor expected = copy_of(before);
    forward(patient, expected);
    int given_up = 0;
    const int last = patient.calls() - 1, step = std::max(1, last / 12);  // reference has many
    for (int call = last; call >= 0; call -= step) {
      Impatient executor(call);
      const Tensor output = copy_of(before);
      bool ended = true;
      try {
        forward(executor, output);
      } catch (const std::string&) {
        ended = false;
        ++given_up;
      }
      EXPECT_TRUE(bitwise_equal(output, ended ? expected : before)) << "call " << call;
      if (GetParam() == "reference") continue;  // its last step is work for one thread
      EXPECT_TRUE(ended || call < last) << "the last step writes the output";
    }
    EXPECT_GT(given_up, 1);
  }
}

/// What the library says while it lives.
struct Heard {
  std::vector<std::string> messages;
  Heard() {
    set_log_hook([this](LogLevel level, std::string_view message) {
      EXPECT_EQ(level, LogLevel::kInfo);
      messages.emplace_back(message);
    });
  }
  ~Heard() { set_log_hook(nullptr); }
  Heard(const Heard&) = delete;
  Heard& operator=(const Heard&) = delete;
};

TEST(LogTest, SaysOnceWhatWasChosen) {
  const LayerWeights weights = make_layer_weights({});
  LayerOptions options;
  options.num_threads = 3;
  Heard heard;
  for (int layer = 0; layer < 2; ++layer) MoeLayer(weights, options);
  const std::string isa(cpu_isa());
  const std::string what =
      " runs 8 experts, topk 2, hidden 64, intermediate 48, bf16, silu, bf16 "
      "on cpu: isa ";
  ASSERT_EQ(heard.messages, std::vector{"cpu+no_ep" + what + isa + ", 3 threads"});
  options.require = "reference";
  // NOLINTNEXTLINE(bugprone-unused-raii)
  MoeLayer(weights, options);
  EXPECT_EQ(heard.messages.back().find("reference+no_ep" + what +
                                       "generic, 3 threads; not cpu: another was asked for"),
            0U);
  options.require = "";
  const Heard again;
  // NOLINTNEXTLINE(bugprone-unused-raii)
  MoeLayer(weights, options);
  EXPECT_EQ(again.messages.size(), 1U);
  EXPECT_EQ(heard.messages.size(), 2U);
}

TEST(LogTest, SaysKernelConfigurationsAndWhyNotTheOthers) {
  MoeConfig config =
      moe_config(make_layer_weights({}).experts, kTopk, DType::kBF16, Device{DeviceKind::kCuda, 0});
  config.hidden = config.intermediate = 512;
  config.compute_capability = 80;
  const Heard heard;
  select(config).create({});
  ASSERT_EQ(heard.messages.size(), 1U);
  for (const char* part : {"sm80+no_ep runs 8 experts", " for 1 token, ", " for 1024 tokens",
                           "; not cpu: ", "; not sm90: "}) {
    EXPECT_NE(heard.messages.front().find(part), std::string::npos) << heard.messages.front();
  }
}

TEST(LogTest, WhatAHookThrowsLeavesTheCall) {
  set_log_hook([](LogLevel, std::string_view) { throw 1; });
  EXPECT_THROW(MoeLayer(make_layer_weights({})), int);
  set_log_hook(nullptr);
  EXPECT_NO_THROW(MoeLayer(make_layer_weights({})));
}

}  // namespace fusedmoe::engine_test
