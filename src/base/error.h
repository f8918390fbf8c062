// The one exception type of the project, and the check for broken contracts between its own parts.
//
// Throw Error for what ends an operation: a bad file, no memory, a dead device, a malformed request. Its message is
// one line that says what, where, which value, and what would be right. It is caught in main, in the HTTP handler and
// around the engine loop, nowhere else. Expected outcomes are return values. BERYL_CHECK never fires on user input.
#pragma once

#include <stdexcept>
#include <string>

namespace beryl {

enum class ErrorCode {
  kBadInput,      // the user's file, argument or request is wrong
  kUnsupported,   // it is right, but beryl cannot do it
  kOutOfMemory,   // host or device memory
  kIo,            // the operating system failed to read or write
  kDevice,        // a device is absent, too old, busy, or failed
};

struct Error : std::runtime_error {
  Error(ErrorCode error_code, const std::string& message) : std::runtime_error(message), code(error_code) {}
  ErrorCode code;
};

// kBadInput: a model whose numbers are NaN or infinite. Who computes knows no files, so who opened the model puts its name before.
struct NotFinite : Error {
  explicit NotFinite(const std::string& message) : Error(ErrorCode::kBadInput, message) {}
};

[[noreturn]] void check_failed(const char* file, int line, const char* condition, const char* what);

// On in every build; prints one line and aborts.
#define BERYL_CHECK(condition, what) \
  ((condition) ? (void)0 : ::beryl::check_failed(__FILE__, __LINE__, #condition, what))

}  // namespace beryl
