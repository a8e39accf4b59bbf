#include "capi/status.h"

#include <exception>
#include <new>

namespace fusedmoe::capi {
namespace {

/// What fusedmoe_error holds, with its texts.
struct LastError {
  fusedmoe_status status = FUSEDMOE_OK;
  int fault = 0, reason = 0, device_error = 0;
  std::size_t requested_bytes = 0;
  std::string message, argument, was, must_be;
  const char* fixed_message = "";  ///< instead of `message`, where memory for a text is missing
};
thread_local LastError last_error;

LastError describe_current_exception() {
  LastError result;
  try {
    throw;
  } catch (const Error& error) {
    result.status = static_cast<fusedmoe_status>(error.kind());
    result.fault = static_cast<int>(error.fault());
    result.reason = static_cast<int>(error.reason());
    result.device_error = error.device_error();
    result.requested_bytes = error.requested_bytes();
    result.message = error.what();
    result.argument = error.argument();
    result.was = error.was();
    result.must_be = error.must_be();
  } catch (const std::bad_alloc&) {
    result.status = FUSEDMOE_OUT_OF_MEMORY;
    result.message = "out of host memory";
  } catch (const std::exception& error) {
    result.status = FUSEDMOE_INTERNAL;
    result.message = error.what();
  } catch (...) {
    result.status = FUSEDMOE_INTERNAL;
    result.message = "an exception of an unknown type";
  }
  return result;
}

const char* message_of(const LastError& error) {
  return error.message.empty() ? error.fixed_message : error.message.c_str();
}

}  // namespace

fusedmoe_status keep_current_exception() noexcept {
  try {
    last_error = describe_current_exception();
  } catch (...) {  // no memory for the texts
    last_error = LastError{};
    last_error.status = FUSEDMOE_OUT_OF_MEMORY;
    last_error.fixed_message = "out of host memory";
  }
  return last_error.status;
}

void check_struct_size(std::size_t struct_size, std::size_t known, const char* name) {
  constexpr std::size_t kMostNewMembers = 4096;  // more is no struct_size
  if (struct_size < sizeof(std::size_t) || struct_size > known + kMostNewMembers) {
    throw Error(std::string(name) + ".struct_size", std::to_string(struct_size),
                "the sizeof of the struct, here " + std::to_string(known));
  }
}

void check_unknown_members(const void* data, std::size_t struct_size, std::size_t known,
                           const char* name) {
  check_struct_size(struct_size, known, name);
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (std::size_t i = known; i < struct_size; ++i) {
    if (bytes[i] != 0) {
      throw Error::invalid(std::string(name) + ".struct_size",
                           std::string(name) + " sets a member behind its first " +
                               std::to_string(known) +
                               " bytes, which this library, older than the caller, does not know");
    }
  }
}

}  // namespace fusedmoe::capi

using fusedmoe::capi::last_error;

const char* fusedmoe_last_error(void) {
  return fusedmoe::capi::message_of(last_error);
}

fusedmoe_status fusedmoe_last_error_info(fusedmoe_error* error) {
  if (!error || error->struct_size < sizeof(std::size_t)) return FUSEDMOE_INVALID_ARGUMENT;
  fusedmoe_error values{};
  values.status = last_error.status;
  values.fault = last_error.fault;
  values.reason = last_error.reason;
  values.device_error = last_error.device_error;
  values.requested_bytes = last_error.requested_bytes;
  values.message = fusedmoe::capi::message_of(last_error);
  values.argument = last_error.argument.c_str();
  values.was = last_error.was.c_str();
  values.must_be = last_error.must_be.c_str();
  return fusedmoe::capi::guarded([&] { fusedmoe::capi::write_struct(error, values, "error"); });
}
