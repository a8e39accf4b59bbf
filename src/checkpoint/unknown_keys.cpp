// keys.json tells which names concern the experts, and which of those keys every family may ignore;
// shared.json which keys have a meaning in some family.
#include "checkpoint/unknown_keys.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/embedded.h"
#include "core/check.h"

namespace fusedmoe::checkpoint {
namespace {

using Json = nlohmann::json;
using Words = std::set<std::string>;

struct SaysNothing {
  Words words;  ///< of the key's name; none: every name
  Json values;
};

struct KeyTable {
  Json meaning;  ///< key -> values that change nothing
  Words experts, any_part, other_parts;
  std::vector<SaysNothing> says_nothing;
  std::set<std::string> harmless;
};

KeyTable read_table() {
  const Json json = Json::parse(embedded_text("keys.json"));
  KeyTable table;
  table.meaning = Json::parse(embedded_text("shared.json"))["meaning"];
  const auto read = [&](const char* name) { return json["words"][name].get<Words>(); };
  table.experts = read("experts");
  table.any_part = read("any_part");
  table.other_parts = read("other_parts");
  for (const Json& row : json["says_nothing"]) {
    table.says_nothing.push_back({row["words"].get<Words>(), row["values"]});
  }
  for (const Json& group : json["harmless"]) {
    for (const Json& key : group) table.harmless.insert(key.get<std::string>());
  }
  return table;
}

const KeyTable& key_table() {
  static const KeyTable table = read_table();
  return table;
}

/// Of "moe_router-topk": moe, router, topk.
Words words_of(std::string_view key) {
  Words words;
  while (!key.empty()) {
    const std::size_t end = std::min(key.find_first_of("_-. "), key.size());
    std::string word(key.substr(0, end));
    std::transform(word.begin(), word.end(), word.begin(), [](char c) {
      return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    });
    words.insert(std::move(word));
    key.remove_prefix(std::min(end + 1, key.size()));
  }
  return words;
}

bool shares_a_word(const Words& a, const Words& b) {
  return std::any_of(a.begin(), a.end(), [&](const std::string& word) { return b.contains(word); });
}

/// Words like "gate" are used of attention, too: another word of the name tells then.
bool concerns_experts(const Words& words) {
  const KeyTable& table = key_table();
  return shares_a_word(words, table.experts) ||
         (shares_a_word(words, table.any_part) && !shares_a_word(words, table.other_parts));
}

const Json& neutral_values(const Words& words) {
  const auto& rows = key_table().says_nothing;
  return std::find_if(rows.begin(), rows.end() - 1,
                      [&](const SaysNothing& row) { return shares_a_word(row.words, words); })
      ->values;
}

/// Every entry of a list with one for each layer; else the value itself.
bool is_neutral(const Json& value, const Json& neutral) {
  const auto listed = [&](const Json& each) {
    return std::find(neutral.begin(), neutral.end(), each) != neutral.end();
  };
  return value.is_array() ? std::all_of(value.begin(), value.end(), listed) : listed(value);
}

/// Every key that the family reads.
std::set<std::string> known_keys(const FamilyRow& row) {
  std::set<std::string> known(row.ignores.begin(), row.ignores.end());
  const auto add = [&](const auto&... settings) {
    (known.insert(settings.keys.begin(), settings.keys.end()), ...);
  };
  add(row.num_layers, row.latent_width, row.hidden, row.intermediate, row.num_experts, row.topk,
      row.scoring, row.renormalize, row.scaling, row.num_groups, row.topk_group, row.zero_experts,
      row.sparsemixer, row.has_correction_bias, row.shared_count, row.shared_width,
      row.average_with_shared, row.activation, row.alpha, row.beta, row.limit, row.shared_limit);
  if (row.topk_method) add(*row.topk_method);
  for (const Requirement& required : row.required) known.insert(required.key);
  return known;
}

/// Keys that say what the family does anyway.
bool says_the_same(const FamilyRow& row, const std::string& key, const nlohmann::json& value) {
  if (key == "scoring_func" || key == "score_function" || key == "score_func") {
    return value.is_string() && row.scoring.otherwise == value.get<std::string>();
  }
  if (key == "use_grouped_topk") return value == !row.num_groups.keys.empty();
  // GGUF: 1 is softmax, 2 sigmoid, 3 softmax of the chosen.
  if (key == "expert_gating_func") {
    const std::string scoring = row.scoring.otherwise.value_or("");
    return value == (scoring == "softmax" ? 1 : scoring == "sigmoid" ? 2 : 3);
  }
  if (key == "norm_topk_prob" || key == "moe_renormalize" || key == "route_norm" ||
      key == "expert_weights_norm") {
    // Dividing the weights of topk_softmax by their sum, which is 1, changes nothing.
    return row.scoring.otherwise == "topk_softmax" ||
           (value.is_boolean() && row.renormalize.otherwise == value.get<bool>());
  }
  return false;
}

/// `under`: the dotted path of the object below the family's, with its dot.
void check_object(const FamilyRow& row, const std::set<std::string>& known, const ConfigKeys& keys,
                  const std::string& under) {
  const KeyTable& table = key_table();
  for (const auto& [key, value] : keys.node().items()) {
    if (value.is_null() || known.contains(under + key) || says_the_same(row, key, value)) continue;
    const auto meaning = table.meaning.find(key);
    const Words words = words_of(key);
    const bool unknown = meaning == table.meaning.end();
    if (unknown && (table.harmless.contains(key) || !concerns_experts(words))) continue;
    if (is_neutral(value, unknown ? neutral_values(words) : *meaning)) continue;
    const std::string name = keys.label_of_unknown(key);
    const std::string begin = core::format("{} is {}", name, ConfigKeys::text(value));
    throw Error::unsupported(
        Reason::kModel, name,
        unknown ? core::format("{}: the family {} does not know that key, and by its name it may "
                               "change what the experts or the router compute",
                               begin, row.name)
                : core::format("{}, which models of the family {} do not have: this is another "
                               "model than its model_type says",
                               begin, row.name));
  }
}

}  // namespace

void check_unknown_keys(const FamilyRow& row, const ConfigKeys& keys) {
  const std::set<std::string> known = known_keys(row);
  check_object(row, known, keys, "");
  std::set<std::string> objects;
  for (const std::string& key : known) {
    if (const std::size_t dot = key.rfind('.'); dot != key.npos) objects.insert(key.substr(0, dot));
  }
  for (const std::string& path : objects) {
    const Json* node = keys.find(path);
    if (node && node->is_object()) {
      check_object(row, known, ConfigKeys(*node, keys.label(path)), path + ".");
    }
  }
}

}  // namespace fusedmoe::checkpoint
