#include "capi/checkpoint.h"

#include <utility>

#include "capi/status.h"

namespace {

using fusedmoe::capi::given;
using fusedmoe::capi::guarded;
using fusedmoe::capi::write_struct;

}  // namespace

fusedmoe_checkpoint::fusedmoe_checkpoint(fusedmoe::Checkpoint opened)
    : checkpoint(std::move(opened)),
      family(name(checkpoint.config().family)),
      scheme(name(checkpoint.config().scheme)),
      activation(name(checkpoint.config().activation)),
      moe_layers(checkpoint.moe_layers()) {}

fusedmoe_status fusedmoe_checkpoint_open(const char* path,
                                         const fusedmoe_checkpoint_options* options,
                                         fusedmoe_checkpoint** checkpoint) {
  return guarded([&] {
    given(checkpoint, "checkpoint");
    const fusedmoe_checkpoint_options o = fusedmoe::capi::read_struct(options, "options");
    fusedmoe::CheckpointOptions opening;
    if (o.read_files) opening.access = fusedmoe::FileAccess::kRead;
    if (o.family) opening.family = fusedmoe::Family::named(o.family);
    *checkpoint =
        new fusedmoe_checkpoint(fusedmoe::Checkpoint::open(&given(path, "path"), opening));
  });
}

void fusedmoe_checkpoint_destroy(fusedmoe_checkpoint* checkpoint) {
  delete checkpoint;
}

fusedmoe_status fusedmoe_checkpoint_get_info(const fusedmoe_checkpoint* checkpoint,
                                             fusedmoe_checkpoint_info* info) {
  return guarded([&] {
    const fusedmoe_checkpoint& opened = given(checkpoint, "checkpoint");
    const fusedmoe::ModelConfig& model = opened.checkpoint.config();
    fusedmoe_checkpoint_info values{};
    values.family = opened.family.c_str();
    values.scheme = opened.scheme.c_str();
    values.activation = opened.activation.c_str();
    values.num_layers = model.num_layers;
    values.num_experts = model.router.num_experts;
    values.topk = model.router.topk;
    values.hidden = model.hidden;
    values.intermediate = model.intermediate;
    values.shared_intermediate = model.shared_intermediate;
    values.moe_layers = opened.moe_layers.data();
    values.num_moe_layers = opened.moe_layers.size();
    write_struct(info, values, "info");
  });
}

fusedmoe_status fusedmoe_checkpoint_get_scheme(const fusedmoe_checkpoint* checkpoint,
                                               std::int64_t layer, const char** scheme) {
  return guarded([&] {
    const fusedmoe_checkpoint& opened = given(checkpoint, "checkpoint");
    given(scheme, "scheme");
    std::string text = name(opened.checkpoint.config(layer).scheme);
    const std::lock_guard lock(opened.mutex);
    *scheme = opened.schemes.try_emplace(layer, std::move(text)).first->second.c_str();
  });
}
