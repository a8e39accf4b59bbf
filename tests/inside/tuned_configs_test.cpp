// Tuned kernel configurations: the file, the nearest number of tokens, and what hostile files get.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "error_text.h"
#include "fusedmoe/selection.h"
#include "layer/tuned_configs.h"
#include "testing/cases.h"

namespace fusedmoe::tuned_configs_test {

using testing::error_text;

TunedConfig config_for(std::int64_t num_tokens, std::string name) {
  TunedConfig config;
  config.device = "NVIDIA H200";
  config.experts = "sm90";
  config.scheme = "mxfp4_w4a16";
  config.hidden = 2880;
  config.intermediate = 2881;
  config.num_local_experts = 32;
  config.topk = 4;
  config.num_tokens = num_tokens;
  config.config = std::move(name);
  config.time_us = 21.5;
  return config;
}

/// Of those that are not called `excluded`.
std::string find(const TunedConfigs& configs, std::int64_t num_tokens,
                 const std::string& excluded = "") {
  const TunedConfig* found = nearest(configs.of_layer(config_for(1, "any")), num_tokens,
                                     [&](const TunedConfig& c) { return c.config != excluded; });
  return found ? found->config : "none";
}

TEST(TunedConfigsTest, NearestNumberOfTokensWithinAFactorOfTwo) {
  TunedConfigs configs;
  for (const std::int64_t tokens : {64, 1, 8, 4}) {
    configs.set(config_for(tokens, std::to_string(tokens)));
  }
  EXPECT_EQ(find(configs, 1), "1");
  EXPECT_EQ(find(configs, 2), "4") << "of two equally near ones the larger";
  EXPECT_EQ(find(configs, 3), "4");
  EXPECT_EQ(find(configs, 5), "4");
  EXPECT_EQ(find(configs, 6), "8");
  EXPECT_EQ(find(configs, 16), "8");
  EXPECT_EQ(find(configs, 17), "none");
  EXPECT_EQ(find(configs, 31), "none");
  EXPECT_EQ(find(configs, 32), "64");
  EXPECT_EQ(find(configs, 128), "64");
  EXPECT_EQ(find(configs, 129), "none");
  EXPECT_EQ(find(TunedConfigs(), 1), "none");
  EXPECT_EQ(find(configs, 2, "4"), "1") << "the nearest of those that fit";
  EXPECT_EQ(find(configs, 4, "4"), "8");
  EXPECT_EQ(find(configs, 1, "1"), "none");
}

TEST(TunedConfigsTest, EveryPartOfTheKeyCounts) {
  TunedConfigs configs;
  const TunedConfig config = config_for(8, "64x16");
  configs.set(config);
  EXPECT_EQ(configs.of_layer(config).size(), 1u);
  EXPECT_EQ(configs.of_layer(config_for(99, "another")).size(), 1u) << "of any number of tokens";
  for (std::string TunedConfig::*member :
       {&TunedConfig::device, &TunedConfig::experts, &TunedConfig::scheme}) {
    TunedConfig other = config;
    other.*member += "!";
    EXPECT_TRUE(configs.of_layer(other).empty());
  }
  for (std::int64_t TunedConfig::*member : {&TunedConfig::topk, &TunedConfig::num_local_experts,
                                            &TunedConfig::hidden, &TunedConfig::intermediate}) {
    for (const int change : {-1, 1}) {
      TunedConfig other = config;
      other.*member += change;
      EXPECT_TRUE(configs.of_layer(other).empty());
    }
  }
}

TEST(TunedConfigsTest, SetReplacesTheConfigurationOfTheSameProblem) {
  TunedConfigs configs;
  configs.set(config_for(8, "old"));
  configs.set(config_for(8, "new"));
  ASSERT_EQ(configs.all().size(), 1u);
  EXPECT_EQ(configs.all()[0].config, "new");
  EXPECT_NE(error_text([&] { configs.set(config_for(0, "none")); }), "no error");
}

TEST(TunedConfigsTest, FileKeepsEverything) {
  TunedConfigs configs;
  for (const std::int64_t tokens : {1, 64, 8192})
    configs.set(config_for(tokens, "64x16k4 \"\n\u00e9"));
  const auto folder = std::filesystem::path(::testing::TempDir()) / "tuned_configs_test";
  std::filesystem::remove_all(folder);
  const auto path = folder / "below" / "configs.json";
  save_tuned_configs(configs, path);
  save_tuned_configs(configs, path);
  const TunedConfigs loaded = load_tuned_configs(path);
  ASSERT_EQ(loaded.all().size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(loaded.all()[i], configs.all()[i]);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(path.parent_path()), {}), 1)
      << "a temporary file is left";
  EXPECT_TRUE(parse_tuned_configs(to_json(TunedConfigs())).all().empty());
  TunedConfigs reported;
  TunedConfig config = config_for(8, "64x16");
  config.measured_by = "Ada L.";
  reported.set(config);
  const TunedConfigs read = parse_tuned_configs(to_json(reported, R"({"cells": []})"));
  ASSERT_EQ(read.all().size(), 1u);
  EXPECT_EQ(read.all()[0], config) << "who measured it is told";
  EXPECT_NE(error_text([&] { save_tuned_configs(configs, folder / "below"); }), "no error");
}

/// The text of a file with one configuration, with a part of it exchanged.
std::string changed(const std::string& part, const std::string& by) {
  TunedConfigs configs;
  configs.set(config_for(8, "64x16"));
  std::string text = to_json(configs);
  const std::size_t at = text.find(part);
  EXPECT_NE(at, std::string::npos) << part;
  return text.replace(at, part.size(), by);
}

TEST(TunedConfigsTest, MalformedFilesAreRefusedByMember) {
  const struct {
    std::string text, mentions;
  } cases[] = {
      {"", "JSON"},
      {"[]", "array"},
      {"{}", "version"},
      {R"({"version": 2})", "configs"},
      {R"({"version": 1, "configs": []})", "version"},
      {R"({"version": "2", "configs": []})", "version"},
      {R"({"version": 2, "configs": {}})", "configs"},
      {R"({"version": 2, "configs": [], "more": 0})", "3 members"},
      {R"({"version": 2, "configs": [7]})", "configs[0]"},
      {R"({"version": 2, "configs": [], "report": 0})", "report"},
      {changed(R"("time_us":21.5)", R"("time_us":21.5,"measured_by":7)"), "measured_by"},
      {changed(R"("hidden":2880)", R"("hidden":0)"), "hidden"},
      {changed(R"("hidden":2880)", R"("hidden":-5)"), "hidden"},
      {changed(R"("hidden":2880)", R"("hidden":2880.5)"), "hidden"},
      {changed(R"("hidden":2880)", R"("hidden":18446744073709551615)"), "hidden"},
      {changed(R"("hidden":2880)", R"("hidden":1e999)"), ""},
      {changed(R"("topk":4,)", ""), "topk"},
      {changed(R"("scheme":"mxfp4_w4a16",)", ""), "scheme"},
      {changed(R"("scheme":"mxfp4_w4a16")", R"("scheme":"")"), "scheme"},
      {changed(R"("topk":4,)", R"("topk":4,"unknown":4,)"), "members"},
      {changed(R"("time_us":21.5)", R"("time_us":-1)"), "time_us"},
      {changed(R"("time_us":21.5)", R"("time_us":"fast")"), "time_us"},
      {changed(R"("config":"64x16")", R"("config":"")"), "config"},
      {changed(R"("config":"64x16")", R"("config":null)"), "config"},
      {std::string(100, '['), ""},
      {std::string(5 << 20, ' '), "bytes"},
  };
  for (const auto& item : cases) {
    const std::string error = error_text([&] { parse_tuned_configs(item.text); });
    EXPECT_NE(error, "no error") << item.text.substr(0, 200);
    EXPECT_NE(error.find(item.mentions), std::string::npos) << error;
  }
  const std::string all = changed("64x16", "64x16");
  const std::size_t begin = all.find("{\"device"), end = all.find('}', begin) + 1;
  const std::string object = all.substr(begin, end - begin);
  const std::string twice = R"({"version": 2, "configs": [)" + object + "," + object + "]}";
  EXPECT_NE(error_text([&] { parse_tuned_configs(twice); }).find("configs[1]"), std::string::npos);
}

TEST(TunedConfigsTest, DefaultPathFollowsTheEnvironment) {
  ::setenv("FUSEDMOE_TUNED_CONFIGS", "/a/file.json", 1);
  EXPECT_EQ(tuned_configs_path(), "/a/file.json");
  ::setenv("FUSEDMOE_TUNED_CONFIGS", "", 1);
  EXPECT_EQ(tuned_configs_path(), "");
  ::unsetenv("FUSEDMOE_TUNED_CONFIGS");
  ::setenv("XDG_CACHE_HOME", "/cache", 1);
  EXPECT_EQ(tuned_configs_path(), "/cache/fusedmoe/tuned_configs.json");
  ::unsetenv("XDG_CACHE_HOME");
  ::setenv("HOME", "/home/me", 1);
  EXPECT_EQ(tuned_configs_path(), "/home/me/.cache/fusedmoe/tuned_configs.json");
  ::unsetenv("HOME");
  EXPECT_EQ(tuned_configs_path(), "");
}

void check_file_of_the_variable() {
  const auto path = std::filesystem::path(::testing::TempDir()) / "tuned_configs_of_variable.json";
  std::filesystem::remove(path);
  ::setenv("FUSEDMOE_TUNED_CONFIGS", path.c_str(), 1);
  EXPECT_NE(error_text([] { tuned_configs(); }).find(path.string()), std::string::npos);
  TunedConfigs configs;
  configs.set(config_for(8, "tuned"));
  save_tuned_configs(configs, path);
  EXPECT_EQ(tuned_configs().all().size(), 1u);
  std::filesystem::remove(path);
  EXPECT_EQ(tuned_configs().all().size(), 1u) << "read a second time";
  EXPECT_EQ(make_context().tuned, &tuned_configs());
}

/// In a process of its own, which has read no file yet.
TEST(TunedConfigsDeathTest, FileOfTheVariableIsLoadedOnceAndMustBeThere) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto check_and_exit = [] {
    check_file_of_the_variable();
    std::exit(::testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(check_and_exit(), ::testing::ExitedWithCode(0), "");
}

TEST(KernelConfigsTest, ExpertsOnTheCpuHaveOneOfTheirOwn) {
  const MoeConfig config = testing::make_config({}, DType::kBF16);
  for (const testing::Variant& variant : testing::variants_for(config)) {
    const ModularKernel kernel = variant.create(config);
    EXPECT_TRUE(kernel.experts().kernel_configs(ProblemSize::of(config, 8)).empty());
    EXPECT_EQ(kernel.experts().find_kernel_config("any"), -1);
  }
}

}  // namespace fusedmoe::tuned_configs_test
