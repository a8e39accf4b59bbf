#include "bench/bench_subject.h"

#include <charconv>

#include "fusedmoe/tensor.h"

namespace fusedmoe::cli {
namespace {

/// "2880x2880x32x4": hidden, intermediate, experts, topk.
BenchSubject parse_shape(const std::string& text) {
  BenchSubject subject{text, {}};
  ModelConfig& model = subject.model;
  std::int64_t* const sizes[] = {&model.hidden, &model.intermediate, &model.router.num_experts,
                                 &model.router.topk};
  const char* begin = text.data();
  const char* const end = begin + text.size();
  for (std::int64_t* size : sizes) {
    const auto [rest, error] = std::from_chars(begin, end, *size);
    const bool last = size == sizes[3];
    if (error != std::errc() || *size < 1 || (last ? rest != end : rest == end || *rest != 'x')) {
      throw Error("--shape", text, "HIDDENxINTERMEDIATExEXPERTSxTOPK, positive numbers");
    }
    begin = rest + 1;
  }
  try {
    model.router.validate();
  } catch (const Error& error) {
    throw Error::invalid("--shape", "--shape " + text + ": " + error.what());
  }
  return subject;
}

}  // namespace

Command BenchSubjects::add_to(Command& command) {
  Command subject = command.add_group(1, 1);
  subject.add_option("--model", models_, "MODEL", "Models by name")
      .list()
      .one_of(model_preset_names());
  subject.add_option("--shape", shape_, "SHAPE", "A layer of these sizes");
  return subject;
}

std::vector<BenchSubject> BenchSubjects::get() const {
  std::vector<BenchSubject> subjects;
  if (!shape_.empty()) subjects.push_back(parse_shape(shape_));
  for (const std::string& model : models_) {
    subjects.push_back({model, parse_model_config(model_preset(model))});
  }
  return subjects;
}

}  // namespace fusedmoe::cli
