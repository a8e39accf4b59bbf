// JSON descriptions -> FamilyRow, and the table of the built-in ones.
#include "checkpoint/family.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "checkpoint/check_family.h"
#include "checkpoint/description_fields.h"
#include "checkpoint/embedded.h"
#include "core/check.h"
#include "files/file.h"
#include "files/json.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

using Json = nlohmann::json;
using Families = std::vector<std::shared_ptr<const FamilyRow>>;

constexpr std::array kStorages{
    std::pair{"per_expert", ExpertStorage::kPerExpert},
    std::pair{"stacked", ExpertStorage::kStacked},
    std::pair{"stacked_transposed", ExpertStorage::kStackedTransposed},
    std::pair{"rows", ExpertStorage::kRows},
    std::pair{"mxfp4", ExpertStorage::kMxfp4},
};

ExpertLayout read_layout(const Json& json, const std::string& label) {
  Fields fields(json, label);
  ExpertLayout layout;
  std::string storage;
  fields.read("name", layout.name);
  fields.read("storage", storage);
  const auto* found = std::find_if(kStorages.begin(), kStorages.end(),
                                   [&](const auto& row) { return row.first == storage; });
  FUSEDMOE_CHECK_FILE(found != kStorages.end(), fields.label("storage"), files::quote(storage),
                      "per_expert, stacked, stacked_transposed, rows or mxfp4");
  layout.storage = found->second;
  bool interleaved = false;
  fields.read("interleaved", interleaved);
  if (interleaved) layout.gate_up = GateUpLayout::kInterleaved;
  fields.read_either("gate", "gate_up", layout.w1);
  layout.both = fields.find("gate_up") != nullptr;
  fields.read("up", layout.w3);
  fields.read("down", layout.w2);
  fields.read("gate_up_scales", layout.w13_scales);
  fields.read("down_scales", layout.w2_scales);
  fields.read_either("gate_up_bias", "gate_bias", layout.w13_bias);
  fields.read("up_bias", layout.w3_bias);
  fields.read("down_bias", layout.w2_bias);
  const bool per_expert = layout.storage == ExpertStorage::kPerExpert;
  for (const std::string& name : {layout.w1, layout.w2}) {
    FUSEDMOE_CHECK_IO(!name.empty(), label,
                      core::format("{} needs gate or gate_up, and down", label));
    FUSEDMOE_CHECK_FILE(per_expert == (std::count(name.begin(), name.end(), '*') == 1), label,
                        files::quote(name),
                        per_expert ? "a name with one * for the expert" : "a name without *");
  }
  fields.finish();
  return layout;
}

/// "experts.*.gate_proj" -> "experts.gate_proj.*"; empty for another form.
std::string with_the_number_last(const std::string& pattern) {
  constexpr std::string_view kMiddle = ".*.";
  const std::size_t at = pattern.find(kMiddle);
  if (at == std::string::npos) return {};
  return pattern.substr(0, at + 1) + pattern.substr(at + kMiddle.size()) + ".*";
}

/// Some tools write the expert's number behind the matrix: the same layouts with those names.
void add_names_with_the_number_last(std::vector<ExpertLayout>& layouts) {
  const std::vector<ExpertLayout> given = layouts;
  for (ExpertLayout layout : given) {
    if (layout.storage != ExpertStorage::kPerExpert) continue;
    const bool has_up = !layout.w3.empty();
    for (std::string* name : {&layout.w1, &layout.w3, &layout.w2}) {
      *name = with_the_number_last(*name);
    }
    if (layout.w1.empty() || layout.w2.empty() || layout.w3.empty() == has_up) continue;
    layout.name.clear();
    layouts.push_back(std::move(layout));
  }
}

/// The file that holds what several families share: layouts, and config keys with a meaning.
const Json& shared_descriptions() {
  static const Json json = Json::parse(embedded_text("shared.json"));
  return json;
}

void read_experts(Fields fields, FamilyRow& row) {
  fields.read("count", row.num_experts);
  fields.read("width", row.intermediate);
  fields.read("gated", row.gated);
  if (const Json* list = fields.find("layouts")) {
    FUSEDMOE_CHECK_FILE(list->is_array() && !list->empty(), fields.label("layouts"), list->dump(),
                        "a list of layouts");
    row.layouts.clear();
    for (const Json& element : *list) {
      const Json& known = shared_descriptions()["layouts"];
      if (!element.is_string()) {
        row.layouts.push_back(read_layout(element, fields.label("layouts")));
        continue;
      }
      const auto found = known.find(element.get<std::string>());
      FUSEDMOE_CHECK_FILE(found != known.end(), fields.label("layouts"), element.dump(),
                          "the name of a shared layout, or an object");
      row.layouts.push_back(read_layout(*found, "layouts." + element.get<std::string>()));
      row.layouts.back().name = element.get<std::string>();
    }
    add_names_with_the_number_last(row.layouts);
  }
  fields.finish();
}

void read_router(Fields fields, FamilyRow& row) {
  fields.read("weight", row.router);
  fields.read("bias", row.router_bias);
  fields.read("correction_bias", row.correction_bias);
  fields.read("has_correction_bias", row.has_correction_bias);
  fields.read("topk", row.topk);
  fields.read("scoring", row.scoring);
  fields.read("renormalize", row.renormalize);
  fields.read("renormalize_epsilon", row.renormalize_epsilon);
  fields.read("scaling", row.scaling);
  fields.read("groups", row.num_groups);
  fields.read("kept_groups", row.topk_group);
  fields.read("group_score_of_two", row.group_score_of_two);
  fields.read("zero_experts", row.zero_experts);
  fields.read("sparsemixer", row.sparsemixer);
  fields.read("weight_on_input", row.weight_on_input);
  if (fields.find("method")) {
    row.topk_method.emplace();
    fields.read("method", *row.topk_method);
  }
  fields.finish();
}

SharedNames read_shared_names(const Json& json, const std::string& label) {
  if (json.is_string()) {
    const auto prefix = json.get<std::string>();
    return {prefix + ".gate_proj", prefix + ".up_proj", prefix + ".down_proj"};
  }
  Fields fields(json, label);
  SharedNames names;
  fields.read_either("gate", "gate_up", names.gate);
  fields.read("up", names.up);
  fields.read("down", names.down);
  fields.finish();
  return names;
}

void read_shared(Fields fields, FamilyRow& row) {
  if (const Json* names = fields.find("names")) {
    row.shared.clear();
    const Json list = names->is_array() ? *names : Json::array({*names});
    for (const Json& element : list) {
      row.shared.push_back(read_shared_names(element, fields.label("names")));
    }
  }
  fields.read("count", row.shared_count);
  fields.read("width", row.shared_width);
  fields.read("gate", row.shared_gate);
  fields.read("average", row.average_with_shared);
  if (const Json* limit = fields.find("limit"); limit && limit->is_boolean()) {
    row.same_limit = limit->get<bool>();
  } else if (limit) {
    row.same_limit = false;
    fields.read("limit", row.shared_limit);
  }
  fields.finish();
}

void read_latent(Fields fields, FamilyRow& row) {
  fields.read("width", row.latent_width);
  fields.read("down", row.latent_down);
  fields.read("up", row.latent_up);
  fields.finish();
}

void read_activation(Fields fields, FamilyRow& row) {
  fields.read("name", row.activation);
  fields.read("alpha", row.alpha);
  fields.read("beta", row.beta);
  fields.read("limit", row.limit);
  fields.read("limited", row.limited);
  fields.finish();
}

void read_required(Fields& fields, FamilyRow& row) {
  const Json* json = fields.find("requires");
  if (!json) return;
  FUSEDMOE_CHECK_FILE(json->is_object(), fields.label("requires"), json->type_name(), "an object");
  for (const auto& [key, value] : json->items()) {
    Fields entry(value, fields.label("requires") + "." + key);
    Requirement required{key, {}, {}};
    const Json* values = entry.find("values");
    FUSEDMOE_CHECK_FILE(values && values->is_array(), entry.label("values"), "no list",
                        "a list of the values that can be served");
    for (const Json& each : *values) required.values.push_back(each.dump());
    entry.read("because", required.because);
    entry.finish();
    row.required.push_back(std::move(required));
  }
}

std::shared_ptr<const FamilyRow> read_row(const Json& json, const std::string& label) {
  auto row = std::make_shared<FamilyRow>();
  Fields fields(json, label);
  fields.find("like");
  fields.read("name", row->name);
  fields.read("types", row->types);
  fields.read("architectures", row->architectures);
  fields.read("refused", row->refused);
  FUSEDMOE_CHECK_FILE(!row->name.empty(), fields.label("name"), "absent", "a model_type");
  row->json = json.dump(2);
  if (!row->refused.empty()) {
    fields.finish();
    return row;
  }
  fields.read("config", row->config);
  fields.read("prefix", row->prefix);
  fields.read("blocks", row->blocks);
  fields.read("layers", row->num_layers);
  fields.read("hidden", row->hidden);
  read_experts(fields.object("experts"), *row);
  read_router(fields.object("router"), *row);
  read_shared(fields.object("shared"), *row);
  read_latent(fields.object("latent"), *row);
  read_activation(fields.object("activation"), *row);
  read_required(fields, *row);
  fields.read("ignores", row->ignores);
  if (const Json* tensors = fields.find("refused_tensors")) {
    FUSEDMOE_CHECK_FILE(tensors->is_object(), fields.label("refused_tensors"), tensors->type_name(),
                        "an object");
    for (const auto& [name, reason] : tensors->items()) {
      row->refused_tensors.emplace_back(name, Fields::text(reason, fields.label(name)));
    }
  }
  if (const Json* every = fields.find("every_layer")) {
    FUSEDMOE_CHECK_FILE(every->is_object(), fields.label("every_layer"), every->type_name(),
                        "an object");
    for (const auto& [key, value] : every->items())
      row->every_layer.emplace_back(key, value.dump());
  }
  fields.finish();
  check_family(*row, label);
  return row;
}

/// `base` with the fields of `json`; objects one level down are merged, null takes a field away.
Json inherit(Json base, const Json& json) {
  base.erase("types");
  base.erase("architectures");
  for (const auto& [key, value] : json.items()) {
    if (value.is_object() && base.contains(key) && base[key].is_object() && key != "requires") {
      base[key].update(value);
    } else {
      base[key] = value;
    }
  }
  return base;
}

// Later ones replace earlier ones of the same type.
std::shared_ptr<const FamilyRow> find_in(std::span<const std::shared_ptr<const FamilyRow>> families,
                                         std::string_view model_type) {
  for (std::size_t i = families.size(); i-- > 0;) {
    const std::vector<std::string>& types = families[i]->types;
    const bool listed = std::find(types.begin(), types.end(), model_type) != types.end();
    if (families[i]->name == model_type || listed) return families[i];
  }
  return nullptr;
}

/// One description, or an object with a list "families".
void add_families(const Json& json, const std::string& label, Families& families) {
  const auto found = json.find("families");
  const Json list = found == json.end() ? Json::array({json}) : *found;
  FUSEDMOE_CHECK_FILE(list.is_array() && !list.empty(), label + ": families",
                      list.is_array() ? "an empty list" : list.type_name(),
                      "a list of one description or more");
  for (const Json& element : list) {
    FUSEDMOE_CHECK_FILE(element.is_object(), label, element.type_name(), "a description");
    const auto name = element.find("name");
    const std::string path = core::format(
        "{}: {}", label,
        name != element.end() && name->is_string() ? name->get<std::string>() : "a family");
    Json whole = element;
    if (const auto like = element.find("like"); like != element.end()) {
      const std::string base_name = Fields::text(*like, path + ".like");
      const auto base = find_in(families, base_name);
      FUSEDMOE_CHECK_FILE(base && base->refused.empty(), path + ".like", files::quote(base_name),
                          "a family described before");
      whole = inherit(Json::parse(base->json), element);
    }
    families.push_back(read_row(whole, path));
  }
}

Families built_in_families() {
  Families families;
  for (const EmbeddedFile& file : embedded_files()) {
    if (!file.name.starts_with("families_")) continue;
    add_families(Json::parse(file.text), std::string(file.name), families);
  }
  return families;
}

}  // namespace

std::span<const std::shared_ptr<const FamilyRow>> family_table() {
  static const Families families = built_in_families();
  return families;
}

std::shared_ptr<const FamilyRow> find_family(std::string_view model_type) {
  return find_in(family_table(), model_type);
}

std::vector<std::shared_ptr<const FamilyRow>> parse_families(std::string_view json,
                                                             const std::string& label) {
  const auto table = family_table();
  Families families{table.begin(), table.end()};
  add_families(files::parse_json_object(json, files::kMaxConfigBytes, label), label, families);
  return {families.begin() + static_cast<std::ptrdiff_t>(table.size()), families.end()};
}

std::shared_ptr<const FamilyRow> load_family(const std::string& name_or_file) {
  if (auto row = find_family(name_or_file)) return row;
  const bool file = name_or_file.find_first_of("./") != std::string::npos;
  if (!file) {
    throw Error("family", files::quote(name_or_file),
                "a JSON file, or a name that fusedmoe families lists");
  }
  return parse_families(files::read_text(name_or_file, files::kMaxConfigBytes), name_or_file)
      .back();
}

const FamilyRow& family_row(const Family& family) {
  FUSEDMOE_CHECK(family.row(), "family", "none", "a family");
  return *family.row();
}

}  // namespace fusedmoe::checkpoint

namespace fusedmoe {

Family Family::named(std::string_view name_or_file) {
  return Family(checkpoint::load_family(std::string(name_or_file)));
}

std::vector<Family> Family::all() {
  std::vector<Family> families;
  for (const auto& row : checkpoint::family_table()) families.push_back(Family(row));
  return families;
}

std::vector<Family> Family::parse(std::string_view json, const std::string& label) {
  std::vector<Family> families;
  for (const auto& row : checkpoint::parse_families(json, label)) families.push_back(Family(row));
  return families;
}

std::string_view Family::name() const {
  return row_ ? std::string_view(row_->name) : "none";
}

std::string_view Family::refused() const {
  return row_ ? std::string_view(row_->refused) : "";
}

std::string_view Family::json() const {
  return row_ ? std::string_view(row_->json) : "";
}

std::string_view name(const Family& family) {
  return family.name();
}

}  // namespace fusedmoe
