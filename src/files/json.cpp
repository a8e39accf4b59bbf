#include "files/json.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/check.h"

namespace fusedmoe::files {
namespace {

/// Hears the parser and does nothing.
class Listener : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool key(string_t&) override { return true; }
  bool start_object(std::size_t) override { return true; }
  bool end_object() override { return true; }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }
};

/// Stops where values are nested too deeply. A callback of the tree's parser would do the same, but
/// takes a time that grows with the square of an object's size.
class DepthListener final : public Listener {
 public:
  explicit DepthListener(int most) : most_(most) {}
  bool too_deep() const { return depth_ > most_; }

  bool start_object(std::size_t) override { return ++depth_ <= most_; }
  bool end_object() override { return --depth_ >= 0; }
  bool start_array(std::size_t) override { return ++depth_ <= most_; }
  bool end_array() override { return --depth_ >= 0; }

 private:
  int most_, depth_ = 0;
};

/// Keeps the keys of some objects.
class KeyListener final : public Listener {
 public:
  KeyListener(std::span<const std::string_view> within, std::span<const std::string_view> keys)
      : within_(within), keys_(keys) {}

  std::map<std::string, std::vector<std::string>> take() {
    std::map<std::string, std::vector<std::string>> result;
    for (auto& [name, object] : found_) result[name] = std::move(object.keys);
    return result;
  }

  bool start_object(std::size_t) override {
    std::vector<std::string>* target = nullptr;
    const bool inside = path_.size() > 1 && is_one(within_, path_[path_.size() - 2].key);
    if (inside && is_one(keys_, path_.back().key)) {
      Object& object = found_[path_.back().key];
      if (object.depth == 0 || path_.size() < object.depth) {
        object = {path_.size(), {}};
        target = &object.keys;
      }
    }
    path_.push_back({{}, target});
    return true;
  }
  bool key(string_t& name) override {
    path_.back().key = name;
    if (path_.back().target) path_.back().target->push_back(name);
    return true;
  }
  bool end_object() override { return pop(); }
  bool start_array(std::size_t) override {
    path_.emplace_back();
    return true;
  }
  bool end_array() override { return pop(); }

 private:
  struct Level {
    std::string key;
    std::vector<std::string>* target = nullptr;
  };
  struct Object {
    std::size_t depth = 0;
    std::vector<std::string> keys;
  };

  static bool is_one(std::span<const std::string_view> names, std::string_view name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  }
  bool pop() {
    path_.pop_back();
    return true;
  }

  std::span<const std::string_view> within_, keys_;
  std::vector<Level> path_;
  std::map<std::string, Object> found_;
};

/// What transformers writes for numbers that JSON does not have.
nlohmann::json tagged_float(std::string_view word) {
  return {{"__float__", word}};
}

/// Python writes such numbers as bare words, which published configs hold.
std::string with_tagged_floats(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  bool in_string = false;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t size = 1;
    if (in_string && text[at] == '\\') {
      size = std::min<std::size_t>(2, text.size() - at);
    } else if (text[at] == '"') {
      in_string = !in_string;
    } else if (!in_string) {
      for (const std::string_view word : {"NaN", "Infinity", "-Infinity"}) {
        if (!text.substr(at).starts_with(word)) continue;
        result += tagged_float(word).dump();
        size = 0;
        at += word.size();
        break;
      }
    }
    result += text.substr(at, size);
    at += size;
  }
  return result;
}

}  // namespace

nlohmann::json parse_json_object(std::string_view given, std::size_t max_bytes,
                                 const std::string& label) {
  constexpr int kMaxDepth = 64;
  FUSEDMOE_CHECK_FILE(given.size() <= max_bytes, label, core::format("{} bytes", given.size()),
                      core::format("at most {} bytes", max_bytes));
  const std::string text = with_tagged_floats(given);
  // The parser takes a NUL for the end and would ignore what follows.
  FUSEDMOE_CHECK_FILE(text.find('\0') == std::string::npos, label, "text with a NUL byte",
                      "valid JSON");
  DepthListener depth(kMaxDepth);
  nlohmann::json::sax_parse(text.begin(), text.end(), &depth);
  FUSEDMOE_CHECK_FILE(!depth.too_deep(), label, "nested deeper",
                      core::format("nested at most {} deep", kMaxDepth));
  nlohmann::json tree;
  try {
    tree = nlohmann::json::parse(text.begin(), text.end());
  } catch (const nlohmann::json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    std::string_view what = error.what();
    if (const std::size_t end = what.find("] "); end != what.npos) what.remove_prefix(end + 2);
    throw Error::io(label, core::format("{}: not valid JSON: {}", label, what));
  }
  FUSEDMOE_CHECK_FILE(tree.is_object(), label, tree.type_name(), "a JSON object");
  return tree;
}

nlohmann::json number_json(double value) {
  if (std::isfinite(value)) return value;
  return tagged_float(std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity");
}

std::map<std::string, std::vector<std::string>> keys_in_order(
    std::string_view given, std::span<const std::string_view> within,
    std::span<const std::string_view> keys) {
  KeyListener listener(within, keys);
  const std::string text = with_tagged_floats(given);
  nlohmann::json::sax_parse(text.begin(), text.end(), &listener);
  return listener.take();
}

}  // namespace fusedmoe::files
