// What is wrong with a request, for its sender: a status and one line.
#pragma once

#include <stdexcept>
#include <string>

namespace beryl::server {

struct ApiError : std::runtime_error {
  ApiError(int http_status, const std::string& message, std::string field = {}, std::string error_code = {})
      : std::runtime_error(message), status(http_status), param(std::move(field)), code(std::move(error_code)) {}
  int status;
  std::string param;   // the field that it is about; may be empty
  std::string code;    // for programs: "context_length_exceeded"; may be empty
  std::string allow = {};   // of 405: the methods that there are
};

}  // namespace beryl::server
