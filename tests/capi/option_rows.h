// A row for each member of a struct of the C interface, which says how it is obeyed or refused. A
// row is missing where the rows do not cover the struct.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "capi_test.h"

namespace fusedmoe::testing {

/// The call was refused, and its error has the word.
inline void expect_error(fusedmoe_status status, const std::string& word) {
  EXPECT_TRUE(status == FUSEDMOE_INVALID_ARGUMENT || status == FUSEDMOE_UNSUPPORTED) << status;
  EXPECT_NE(std::string(fusedmoe_last_error()).find(word), std::string::npos)
      << fusedmoe_last_error();
}

/// `Case` is what a row changes one member of.
template <typename Case>
struct Row {
  const char* member;
  std::size_t offset, size, alignment;
  std::function<void(Case&)> test;
};
#define ROW(Case, type, member, ...)                                                        \
  Row<Case> {                                                                               \
#member, offsetof(type, member), sizeof(type::member), alignof(decltype(type::member)), \
        [](Case & c) { __VA_ARGS__ }                                                        \
  }

template <typename Case>
void test_all(const std::vector<Row<Case>>& rows, std::size_t size) {
  const auto aligned = [](std::size_t at, std::size_t to) { return (at + to - 1) / to * to; };
  std::size_t at = sizeof(std::size_t);
  for (const Row<Case>& row : rows) {
    SCOPED_TRACE(row.member);
    EXPECT_EQ(row.offset, aligned(at, row.alignment)) << "a member before it has no row";
    at = row.offset + row.size;
    Case c;
    row.test(c);
  }
  EXPECT_EQ(aligned(at, alignof(std::size_t)), size) << "the last members have no row";
}

}  // namespace fusedmoe::testing
