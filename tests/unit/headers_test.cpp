// The header of everything, seen from user code. That each public header compiles alone is a matter
// of the build: see fusedmoe_headers in tests/CMakeLists.txt.
#include <gtest/gtest.h>

#include <cstdio>

#include "fusedmoe/layer.h"
#include "fusedmoe/version.h"

namespace {

TEST(HeadersTest, LibraryHasTheVersionOfTheHeaders) {
  int numbers[3] = {-1, -1, -1};
  char rest = 0;
  const char* text = fusedmoe::version();
  EXPECT_EQ(std::sscanf(text, "%d.%d.%d%c", numbers, numbers + 1, numbers + 2, &rest), 3) << text;
  EXPECT_EQ(numbers[0], FUSEDMOE_VERSION_MAJOR);
  EXPECT_EQ(numbers[1], FUSEDMOE_VERSION_MINOR);
  EXPECT_EQ(numbers[2], FUSEDMOE_VERSION_PATCH);
  EXPECT_STREQ(text, FUSEDMOE_VERSION);
}

TEST(HeadersTest, ErrorNamesArgumentValueAndRequirement) {
  const fusedmoe::Error error("topk_ids", "i64 [3]", "i32 [3, 2]");
  EXPECT_STREQ(error.what(), "topk_ids: was i64 [3]; must be i32 [3, 2]");
}

}  // namespace
