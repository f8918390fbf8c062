// Where a request ends, and whom it calls: what a header says of that must have one meaning only. A server that takes one of two
// and a proxy before it that takes the other see different requests in the same bytes (RFC 9112, sections 3.2, 5.1 and 6.3).
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace beryl::server {

using HeaderLines = std::vector<std::pair<std::string, std::string>>;   // as they came: names in any case, repeated ones too

struct FramingFault {
  int status;            // 400, or 501 for a coding that nobody here can read
  std::string what;      // one line
};

// What is wrong with the header of a request; nothing: it may be read on. After a fault the connection has to be closed, since nobody
// knows where the next request begins. version: "HTTP/1.1".
std::optional<FramingFault> find_framing_fault(const HeaderLines& lines, std::string_view version);

// A target in absolute form, "http://HOST/PATH", as proxies send it: its host, which counts instead of the header Host, and leaves the
// path in `target`. Nothing: it is in another form.
std::optional<std::string> take_host_off(std::string& target);

// Names of headers and hosts have no case.
std::string lower_case(std::string_view text);

}  // namespace beryl::server
