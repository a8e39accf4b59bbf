// The public side of a description.
#include "checkpoint/family.h"

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
