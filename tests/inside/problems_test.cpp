// Lists of problems that a person can read: folded, and not longer than a screen.
#include "checkpoint/problems.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace fusedmoe::checkpoint::problems_test {

TEST(ProblemsTest, NamesThatDifferInNumbersAreOneLine) {
  Problems problems;
  for (const int layer : {3, 4, 5, 9}) {
    for (int expert = 0; expert < 256; ++expert) {
      problems.add("model.layers." + std::to_string(layer) + ".mlp.experts." +
                   std::to_string(expert) + ".down_proj.weight");
    }
  }
  EXPECT_EQ(problems.count(), 1024U);
  EXPECT_EQ(problems.list(), "\n  model.layers.{3-5,9}.mlp.experts.{0-255}.down_proj.weight");
}

TEST(ProblemsTest, NumbersThatAreNoProductStayApart) {
  Problems problems;
  for (const char* name : {"a.0.b.0", "a.0.b.1", "a.1.b.1"}) problems.add(name, "missing");
  EXPECT_EQ(problems.list(), "\n  a.0.b.{0-1}: missing\n  a.1.b.1: missing");
}

TEST(ProblemsTest, TextsStayApartInTheirOrder) {
  Problems problems;
  problems.add("w.2", "missing");
  problems.add("w.0", "unexpected");
  problems.add("w.3", "missing");
  EXPECT_EQ(problems.list(), "\n  w.{2-3}: missing\n  w.0: unexpected");
}

TEST(ProblemsTest, LongListsEndInACount) {
  Problems problems;
  const auto lines = [&] {
    const std::string list = problems.list();
    return static_cast<std::size_t>(std::count(list.begin(), list.end(), '\n')) + 1;
  };
  for (int i = 0; i < 14; ++i) problems.add(std::string(1, static_cast<char>('a' + i)));
  EXPECT_EQ(lines(), Problems::kMaxLines);
  EXPECT_TRUE(problems.list().ends_with("\n  n"));
  for (int i = 14; i < 20; ++i) problems.add(std::string(1, static_cast<char>('a' + i)));
  EXPECT_EQ(lines(), Problems::kMaxLines);
  EXPECT_TRUE(problems.list().ends_with("\n  m\n  and 7 more lines like these"));
}

// A hostile file has any number of names, and each of them any number of numbers.
TEST(ProblemsTest, FoldsTheFirstNumbersOfTheFirstNames) {
  Problems deep;
  for (const char* end : {"6.0", "5.0", "6.1"}) deep.add("a.1.1.1.1.1." + std::string(end));
  EXPECT_EQ(deep.list(), "\n  a.1.1.1.1.1.{5-6}.0\n  a.1.1.1.1.1.6.1");

  Problems many;
  for (std::size_t i = 0; i < Problems::kMaxNames; ++i) many.add("a." + std::to_string(i));
  const std::string line = "\n  a.{0-" + std::to_string(Problems::kMaxNames - 1) + "}";
  EXPECT_EQ(many.list(), line);
  for (int i = 0; i < 3; ++i) many.add("b." + std::to_string(i));
  EXPECT_EQ(many.count(), Problems::kMaxNames + 3);
  EXPECT_EQ(many.list(), line + "\n  and 3 more names");

  Problems both;
  for (std::size_t i = 0; i < Problems::kMaxNames + 7; ++i) both.add(std::to_string(i) + "a");
  EXPECT_TRUE(both.list().ends_with("\n  12a\n  and 16371 more lines like these and 7 more names"));
}

TEST(ProblemsTest, HostileNamesBreakNoLine) {
  Problems problems;
  problems.add("a\n\n0*.007.4", "missing");
  problems.add(std::string(1000, 'x'), "missing");
  EXPECT_EQ(problems.list(), "\n  \"a\\x0a\\x0a0*.007.4\": missing\n  \"" + std::string(200, 'x') +
                                 "\"...: missing");
}

}  // namespace fusedmoe::checkpoint::problems_test
