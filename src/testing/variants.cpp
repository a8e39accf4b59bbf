// Every way to run a layer; see cases.h.
#include <stdexcept>

#include "fusedmoe/selection.h"
#include "testing/cases.h"

namespace fusedmoe::testing {

std::string Variant::name() const {
  std::string text(experts->name());
  if (prepare_finalize->activation_format() == ActivationFormat::kBatchedExperts) {
    text += "_batched";
  }
  if (hooks) text += "_unfused";
  if (monolithic) text += "_monolithic";
  if (batch_invariant) text += "_batch_invariant";
  return text;
}

MoeConfig Variant::of(MoeConfig config) const {
  config.activation_format = prepare_finalize->activation_format();
  config.hooks = hooks;
  config.monolithic = monolithic;
  config.batch_invariant = batch_invariant;
  return config;
}

Support Variant::supports(const MoeConfig& config) const {
  for (const Candidate& candidate : explain(of(config)).candidates) {
    if (candidate.experts == experts && candidate.prepare_finalize == prepare_finalize) {
      return candidate.support;
    }
  }
  return Support::no(Reason::kPairing, "no pair of the registry");
}

ModularKernel Variant::create(const MoeConfig& config, const Context& context) const {
  const MoeConfig asked = of(config);
  return {prepare_finalize->create(asked, context), experts->create(asked, context)};
}

std::vector<Variant> all_variants() {
  std::vector<Variant> variants;
  for (const ExpertsDescriptor* experts : all_experts()) {
    for (const PrepareFinalizeDescriptor* prepare_finalize : all_prepare_finalize()) {
      const Variant plain{experts, prepare_finalize};
      variants.push_back(plain);
      for (bool Variant::*wish :
           {&Variant::hooks, &Variant::monolithic, &Variant::batch_invariant}) {
        Variant variant = plain;
        variant.*wish = true;
        variants.push_back(variant);
      }
    }
  }
  return variants;
}

std::vector<Variant> variants_for(const MoeConfig& config) {
  std::vector<Variant> variants = all_variants();
  std::erase_if(variants, [&](const Variant& variant) { return !variant.supports(config); });
  return variants;
}

Variant find_variant(std::string_view name) {
  for (const Variant& variant : all_variants()) {
    if (variant.name() == name) return variant;
  }
  throw std::out_of_range("no variant of this name");
}

}  // namespace fusedmoe::testing
