// Tuned tile plans: the file, the nearest number of tokens, pins, and what hostile files get.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "error_text.h"
#include "fusedmoe/selection.h"
#include "moe/tuned_configs.h"

namespace fusedmoe {
namespace {

using testing::error_text;

TunedPlan plan_for(std::int64_t num_tokens, std::string name) {
  TunedPlan plan;
  plan.device = "NVIDIA H200";
  plan.experts = "sm90_mxfp4";
  plan.hidden = 2880;
  plan.intermediate = 2881;
  plan.num_local_experts = 32;
  plan.topk = 4;
  plan.num_tokens = num_tokens;
  plan.plan = std::move(name);
  plan.time_us = 21.5;
  return plan;
}

ProblemSize problem_of(const TunedPlan& plan, std::int64_t num_tokens) {
  ProblemSize problem;
  problem.num_tokens = num_tokens;
  problem.topk = plan.topk;
  problem.num_local_experts = plan.num_local_experts;
  problem.hidden = plan.hidden;
  problem.intermediate = plan.intermediate;
  return problem;
}

std::string find(const TunedPlans& plans, std::int64_t num_tokens) {
  const TunedPlan key = plan_for(1, "any");
  const TunedPlan* found = plans.find(key.device, key.experts, problem_of(key, num_tokens));
  return found ? found->plan : "none";
}

TEST(TunedPlansTest, NearestNumberOfTokensWithinAFactorOfTwo) {
  TunedPlans plans;
  for (const std::int64_t tokens : {64, 1, 8, 4})
    plans.set(plan_for(tokens, std::to_string(tokens)));
  EXPECT_EQ(find(plans, 1), "1");
  EXPECT_EQ(find(plans, 2), "4") << "of two equally near ones the larger";
  EXPECT_EQ(find(plans, 3), "4");
  EXPECT_EQ(find(plans, 5), "4");
  EXPECT_EQ(find(plans, 6), "8");
  EXPECT_EQ(find(plans, 16), "8");
  EXPECT_EQ(find(plans, 17), "none");
  EXPECT_EQ(find(plans, 31), "none");
  EXPECT_EQ(find(plans, 32), "64");
  EXPECT_EQ(find(plans, 128), "64");
  EXPECT_EQ(find(plans, 129), "none");
  EXPECT_EQ(find(TunedPlans(), 1), "none");
}

TEST(TunedPlansTest, EveryPartOfTheKeyCounts) {
  TunedPlans plans;
  const TunedPlan plan = plan_for(8, "a plan");
  plans.set(plan);
  const ProblemSize problem = problem_of(plan, 8);
  ASSERT_TRUE(plans.find(plan.device, plan.experts, problem));
  EXPECT_FALSE(plans.find("NVIDIA H100", plan.experts, problem));
  EXPECT_FALSE(plans.find(plan.device, "sm90_bf16", problem));
  for (std::int64_t ProblemSize::*member : {&ProblemSize::topk, &ProblemSize::num_local_experts,
                                            &ProblemSize::hidden, &ProblemSize::intermediate}) {
    for (const int change : {-1, 1}) {
      ProblemSize other = problem;
      other.*member += change;
      EXPECT_FALSE(plans.find(plan.device, plan.experts, other));
    }
  }
}

TEST(TunedPlansTest, SetReplacesThePlanOfTheSameProblem) {
  TunedPlans plans;
  plans.set(plan_for(8, "old"));
  plans.set(plan_for(8, "new"));
  ASSERT_EQ(plans.plans().size(), 1u);
  EXPECT_EQ(plans.plans()[0].plan, "new");
  EXPECT_NE(error_text([&] { plans.set(plan_for(0, "none")); }), "no error");
}

TEST(TunedPlansTest, FileKeepsEverything) {
  TunedPlans plans;
  for (const std::int64_t tokens : {1, 64, 8192}) plans.set(plan_for(tokens, "64x16k4 \"\n\u00e9"));
  const auto folder = std::filesystem::path(::testing::TempDir()) / "tuned_plans_test";
  std::filesystem::remove_all(folder);
  const auto path = folder / "below" / "plans.json";
  plans.save(path);
  plans.save(path);
  const TunedPlans loaded = TunedPlans::load(path);
  ASSERT_EQ(loaded.plans().size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(loaded.plans()[i], plans.plans()[i]);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(path.parent_path()), {}), 1)
      << "a temporary file is left";
  EXPECT_TRUE(TunedPlans::parse(TunedPlans().json()).plans().empty());
  EXPECT_NE(error_text([&] { plans.save(folder / "below"); }), "no error");
}

/// The text of a file with one plan, with a part of it exchanged.
std::string changed(const std::string& part, const std::string& by) {
  TunedPlans plans;
  plans.set(plan_for(8, "a plan"));
  std::string text = plans.json();
  const std::size_t at = text.find(part);
  EXPECT_NE(at, std::string::npos) << part;
  return text.replace(at, part.size(), by);
}

TEST(TunedPlansTest, MalformedFilesAreRefusedByMember) {
  const struct {
    std::string text, mentions;
  } cases[] = {
      {"", "JSON"},
      {"[]", "array"},
      {"{}", "version"},
      {R"({"version": 1})", "plans"},
      {R"({"version": 2, "plans": []})", "version"},
      {R"({"version": "1", "plans": []})", "version"},
      {R"({"version": 1, "plans": {}})", "plans"},
      {R"({"version": 1, "plans": [], "more": 0})", "3 members"},
      {R"({"version": 1, "plans": [7]})", "plans[0]"},
      {changed(R"("hidden":2880)", R"("hidden":0)"), "hidden"},
      {changed(R"("hidden":2880)", R"("hidden":-5)"), "hidden"},
      {changed(R"("hidden":2880)", R"("hidden":2880.5)"), "hidden"},
      {changed(R"("hidden":2880)", R"("hidden":18446744073709551615)"), "hidden"},
      {changed(R"("hidden":2880)", R"("hidden":1e999)"), ""},
      {changed(R"("topk":4,)", ""), "topk"},
      {changed(R"("topk":4,)", R"("topk":4,"unknown":4,)"), "members"},
      {changed(R"("time_us":21.5)", R"("time_us":-1)"), "time_us"},
      {changed(R"("time_us":21.5)", R"("time_us":"fast")"), "time_us"},
      {changed(R"("plan":"a plan")", R"("plan":"")"), "plan"},
      {changed(R"("plan":"a plan")", R"("plan":null)"), "plan"},
      {std::string(100, '['), ""},
      {std::string(5 << 20, ' '), "bytes"},
  };
  for (const auto& item : cases) {
    const std::string error = error_text([&] { TunedPlans::parse(item.text); });
    EXPECT_NE(error, "no error") << item.text.substr(0, 200);
    EXPECT_NE(error.find(item.mentions), std::string::npos) << error;
  }
  const std::string plans = changed("a plan", "a plan");
  const std::size_t begin = plans.find("{\"device"), end = plans.find('}', begin) + 1;
  const std::string object = plans.substr(begin, end - begin);
  const std::string twice = R"({"version": 1, "plans": [)" + object + "," + object + "]}";
  EXPECT_NE(error_text([&] { TunedPlans::parse(twice); }).find("plans[1]"), std::string::npos);
}

TEST(TunedPlansTest, DefaultPathFollowsTheEnvironment) {
  ::setenv("FUSEDMOE_TUNED_PLANS", "/a/file.json", 1);
  EXPECT_EQ(tuned_plans_path(), "/a/file.json");
  ::setenv("FUSEDMOE_TUNED_PLANS", "", 1);
  EXPECT_EQ(tuned_plans_path(), "");
  ::unsetenv("FUSEDMOE_TUNED_PLANS");
  ::setenv("XDG_CACHE_HOME", "/cache", 1);
  EXPECT_EQ(tuned_plans_path(), "/cache/fusedmoe/tuned_plans.json");
  ::unsetenv("XDG_CACHE_HOME");
  ::setenv("HOME", "/home/me", 1);
  EXPECT_EQ(tuned_plans_path(), "/home/me/.cache/fusedmoe/tuned_plans.json");
  ::unsetenv("HOME");
  EXPECT_EQ(tuned_plans_path(), "");
}

TEST(TunedPlansTest, FileOfTheVariableIsLoadedOnceAndMustBeThere) {
  const auto path = std::filesystem::path(::testing::TempDir()) / "tuned_plans_of_variable.json";
  std::filesystem::remove(path);
  ::setenv("FUSEDMOE_TUNED_PLANS", path.c_str(), 1);
  EXPECT_NE(error_text([] { tuned_plans(); }).find(path.string()), std::string::npos);
  TunedPlans plans;
  const TunedPlan plan = plan_for(8, "tuned");
  plans.set(plan);
  plans.save(path);
  EXPECT_EQ(tuned_plans().plans().size(), 1u);
  std::filesystem::remove(path);
  EXPECT_EQ(tuned_plans().plans().size(), 1u) << "read a second time";

  const ProblemSize problem = problem_of(plan, 8);
  const auto preferred = [&] {
    return core::preferred_tile_plan(plan.device, plan.experts, problem);
  };
  EXPECT_EQ(preferred(), "tuned");
  const PinnedTilePlan outer("outer");
  EXPECT_EQ(preferred(), "outer");
  {
    const PinnedTilePlan inner("");
    EXPECT_EQ(preferred(), "");
  }
  EXPECT_EQ(preferred(), "outer");
}

TEST(TilePlansTest, ExpertsOnTheCpuHaveOneWay) {
  for (const auto& experts : all_experts()) {
    if (experts->name().starts_with("cpu") || experts->is_reference()) {
      EXPECT_TRUE(experts->tile_plans(problem_of(plan_for(1, "any"), 8), {}).empty());
    }
  }
}

}  // namespace
}  // namespace fusedmoe
