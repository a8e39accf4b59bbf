#include "checkpoint/problems.h"

#include <algorithm>

#include "core/check.h"

namespace fusedmoe::checkpoint {
namespace {

// "5", or "{0-3,7}".
std::string ranges(const std::set<std::int64_t>& numbers) {
  if (numbers.empty()) return "";
  if (numbers.size() == 1) return core::to_string(*numbers.begin());
  std::string result;
  for (auto it = numbers.begin(); it != numbers.end();) {
    const std::int64_t first = *it;
    std::int64_t last = first;
    while (++it != numbers.end() && *it == last + 1) ++last;
    if (!result.empty()) result += ',';
    result += first == last ? core::to_string(first) : core::format("{}-{}", first, last);
  }
  return core::format("{{{}}}", result);
}

}  // namespace

void Problems::add(const std::string& name, const std::string& text) {
  // "a.experts.17.b" -> head "a.experts.", index 17, tail ".b".
  constexpr std::string_view kExperts = ".experts.";
  std::string head = name, tail;
  std::int64_t index = -1;
  if (const std::size_t at = name.find(kExperts); at != std::string::npos) {
    const std::size_t begin = at + kExperts.size();
    const std::size_t end = std::min(name.find_first_not_of("0123456789", begin), name.size());
    constexpr std::size_t kMaxDigits = 9;
    if (end > begin && end - begin <= kMaxDigits) {
      head = name.substr(0, begin);
      index = std::stoll(name.substr(begin, end - begin));
      tail = name.substr(end);
    }
  }
  ++count_;
  const auto [found, is_new] = index_.emplace(std::array{head, tail, text}, lines_.size());
  if (is_new) lines_.push_back({head, tail, text, {}});
  if (index >= 0) lines_[found->second].experts.insert(index);
}

std::string Problems::list() const {
  std::string result;
  for (const Line& line : lines_) {
    result += "\n  " + line.head + ranges(line.experts) + line.tail + ": " + line.text;
  }
  return result;
}

}  // namespace fusedmoe::checkpoint
