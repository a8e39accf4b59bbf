// Every error says what kind it is, so that it can become a status code of another language.
#include "fusedmoe/error.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <vector>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/safetensors.h"
#include "fusedmoe/selection.h"

/// AddressSanitizer would otherwise end the process for the allocation that must fail.
/// NOLINTNEXTLINE(bugprone-reserved-identifier): it calls this name.
extern "C" const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}

namespace fusedmoe::error_test {

struct Expected {
  const char* label;
  std::function<void()> call;
  ErrorKind kind;
  Fault fault;
  Reason reason;
  const char* argument;
};

class ErrorKindTest : public ::testing::TestWithParam<Expected> {};

TEST_P(ErrorKindTest, SaysKindFaultAndArgument) {
  const Expected& expected = GetParam();
  try {
    expected.call();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), expected.kind) << error.what();
    EXPECT_EQ(error.fault(), expected.fault) << error.what();
    EXPECT_EQ(error.reason(), expected.reason) << error.what();
    EXPECT_EQ(error.argument(), expected.argument);
    EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos);
  }
}

Expected invalid(const char* label, Fault fault, const char* argument, std::function<void()> call) {
  return {label, std::move(call), ErrorKind::kInvalidArgument, fault, Reason::kSupported, argument};
}

Expected other(const char* label, ErrorKind kind, const char* argument, std::function<void()> call,
               Reason reason = Reason::kSupported) {
  return {label, std::move(call), kind, Fault::kNone, reason, argument};
}

float memory[8];

TensorView floats(Shape shape) {
  return TensorView(memory, DType::kF32, shape);
}

MoeConfig odd_config() {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 4;
  config.topk = 2;
  config.hidden = config.intermediate = 65;
  config.scheme = schemes::mxfp4_w4a16();
  return config;
}

INSTANTIATE_TEST_SUITE_P(
    Calls, ErrorKindTest,
    ::testing::Values(
        invalid("rank", Fault::kShape, "shape", [] { Shape{1, 1, 1, 1, 1, 1, 1}; }),
        invalid("null_data", Fault::kNull, "data",
                [] { TensorView(static_cast<void*>(nullptr), DType::kF32, {1}); }),
        invalid("dim", Fault::kValue, "dim",
                [] {
                  floats({2, 4}).select(2, 0);
                }),
        invalid("undefined", Fault::kNull, "source", [] { copy({}, floats({2}), {}); }),
        invalid("dtype", Fault::kDType, "destination",
                [] { copy(floats({2}), borrow(memory, DType::kI32, {2}), {}); }),
        invalid("shape", Fault::kShape, "destination", [] { copy(floats({2}), floats({3}), {}); }),
        invalid("strides", Fault::kLayout, "source",
                [] {
                  copy(floats({2, 4}).transpose(0, 1), floats({4, 2}), {});
                }),
        invalid("alignment", Fault::kAlignment, "weights.experts[0].gate.values",
                [] {
                  ExpertWeights::Stacked stacked;
                  stacked.w13 = borrow(reinterpret_cast<char*>(memory) + 1, DType::kF32, {1, 2, 1});
                  stacked.w2 = borrow(memory, DType::kF32, {1, 1, 1});
                  ExpertWeights::from_stacked(stacked, schemes::unquantized(DType::kF32),
                                              Activation::kSilu);
                }),
        invalid("stream", Fault::kDevice, "stream",
                [] {
                  fill_bytes(floats({2}), 0, {{DeviceKind::kCuda, 0}});
                }),
        invalid("name", Fault::kValue, "activation", [] { parse_activation("sillu"); }),
        invalid("require", Fault::kValue, "require", [] { select(odd_config(), "fast"); }),
        other(
            "refused", ErrorKind::kUnsupported, "require",
            [] { select(odd_config(), "reference+no_ep"); }, Reason::kShape),
        other("memory", ErrorKind::kOutOfMemory, "",
              [] { Tensor::empty({std::int64_t{1} << 58}, DType::kU8); }),
        other("no_file", ErrorKind::kIo, "/no/such/file",
              [] { SafetensorsFile::open("/no/such/file"); }),
        other("malformed", ErrorKind::kIo, "x: header length",
              [] { SafetensorsFile::parse("\0\0\0\0\0\0\0\0", 8, "x"); }),
        other(
            "model", ErrorKind::kUnsupported, "config.model_type",
            [] { parse_model_config(R"({"model_type": "llama"})"); }, Reason::kModel),
        other("directory", ErrorKind::kIo, "/proc/self/fdinfo",
              [] { Checkpoint::open("/proc/self/fdinfo"); })),
    [](const auto& info) { return std::string(info.param.label); });

TEST(ErrorTest, MessagesAreSentences) {
  EXPECT_STREQ(Error("x", "f32", "i32").what(), "x: was f32; must be i32");
  EXPECT_STREQ(Error::unknown_name("require", "fast", "cpu, sm90").what(),
               "require fast: no such name; there are: cpu, sm90");
  EXPECT_STREQ(Error::invalid("shards", "shards has no files").what(), "shards has no files");
  EXPECT_STREQ(Error::conflict("--layer", "--skew").what(), "--layer cannot be used with --skew");
  EXPECT_STREQ(Error::conflict("hooks", "plan", "it pins other experts").what(),
               "hooks cannot be used with plan: it pins other experts");
  EXPECT_STREQ(Error::internal("tile 7 of 6").what(), "internal error: tile 7 of 6");
  EXPECT_STREQ(Error::out_of_memory(64, "cuda:0").what(),
               "out of memory: cannot allocate 64 bytes on cuda:0");
  EXPECT_EQ(Error::out_of_memory(64, "cuda:0").requested_bytes(), 64U);
  EXPECT_EQ(Error::device(700, "a kernel failed").device_error(), 700);
  try {
    SafetensorsFile::open("/no/such/file");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "cannot open /no/such/file: no such file or directory");
  }
}

TEST(ErrorTest, WithinKeepsEverythingElse) {
  const Error error =
      Error::unsupported(Reason::kHooks, "hooks", "given", "none").within("layer 3");
  EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
  EXPECT_EQ(error.reason(), Reason::kHooks);
  EXPECT_EQ(error.argument(), "layer 3: hooks");
  EXPECT_STREQ(error.what(), "layer 3: hooks: was given; must be none");
  EXPECT_EQ(error.was(), "given");
}

TEST(ErrorTest, FormsHaveAKindAndAFault) {
  const Error conflict = Error::conflict("--layer", "--skew");
  EXPECT_EQ(conflict.kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(conflict.fault(), Fault::kValue);
  EXPECT_EQ(conflict.argument(), "--layer");
  EXPECT_EQ(conflict.was(), "given with --skew");
  EXPECT_EQ(conflict.must_be(), "given without it");
  EXPECT_EQ(Error::invalid("w13", "w13 is missing", Fault::kNull).fault(), Fault::kNull);
  EXPECT_EQ(Error::internal("tile 7 of 6").kind(), ErrorKind::kInternal);
  EXPECT_EQ(Error::internal("tile 7 of 6").fault(), Fault::kNone);
}

TEST(ErrorTest, NumbersAndNamesAreStable) {
  EXPECT_EQ(static_cast<int>(ErrorKind::kDevice), 5);
  EXPECT_EQ(static_cast<int>(ErrorKind::kInternal), 100);
  EXPECT_EQ(static_cast<int>(Fault::kDevice), 9);
  EXPECT_EQ(static_cast<int>(Reason::kPairing), 13);
  EXPECT_EQ(name(ErrorKind::kInvalidArgument), "invalid argument");
  EXPECT_EQ(name(ErrorKind::kIo), "i/o");
  EXPECT_EQ(name(ErrorKind::kInternal), "internal");
  EXPECT_EQ(name(Fault::kNone), "none");
  EXPECT_EQ(name(Fault::kWorkspace), "workspace");
  EXPECT_EQ(code(Reason::kRoutingMethod), "routing_method");
  EXPECT_EQ(code(Reason::kPairing), "pairing");
  EXPECT_EQ(code(Reason::kOperation), "operation");
  EXPECT_EQ(code(static_cast<Reason>(99)), "unknown");
}

}  // namespace fusedmoe::error_test
