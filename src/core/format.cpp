#include "core/format.h"

#include <fmt/args.h>
#include <fmt/format.h>

namespace fusedmoe::core {

std::string format_args(std::string_view text, const FormatArg* args, std::size_t count) {
  using Kind = FormatArg::Kind;
  fmt::dynamic_format_arg_store<fmt::format_context> store;
  for (const FormatArg* arg = args; arg != args + count; ++arg) {
    switch (arg->kind) {
      case Kind::kInt:
        store.push_back(arg->as_int);
        break;
      case Kind::kUint:
        store.push_back(arg->as_uint);
        break;
      case Kind::kFloat:
        store.push_back(arg->as_float);
        break;
      case Kind::kDouble:
        store.push_back(arg->as_double);
        break;
      case Kind::kBool:
        store.push_back(arg->as_bool);
        break;
      case Kind::kChar:
        store.push_back(arg->as_char);
        break;
      case Kind::kText:
        store.push_back(fmt::string_view(arg->as_text.data(), arg->as_text.size()));
        break;
      case Kind::kPointer:
        store.push_back(arg->as_pointer);
        break;
    }
  }
  return fmt::vformat(text, store);
}

}  // namespace fusedmoe::core
