#include "server/request_framing.h"

#include <algorithm>

#include <fmt/format.h>

#include "weights/quote.h"

namespace beryl::server {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// RFC 9110, section 5.6.2.
bool is_token(std::string_view text) {
  constexpr std::string_view kMarks = "!#$%&'*+-.^_`|~";
  return !text.empty() && std::all_of(text.begin(), text.end(), [&](char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || kMarks.find(c) != std::string_view::npos;
  });
}

// A line break that only some read as one, for example.
bool has_control(std::string_view text) {
  return std::any_of(text.begin(), text.end(), [](unsigned char c) { return (c < 0x20 && c != '\t') || c == 0x7f; });
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// The codings are a list; there may be several lines of it.
std::optional<FramingFault> find_coding_fault(const std::vector<std::string_view>& values) {
  for (std::string_view value : values)
    for (size_t begin = 0; begin <= value.size();) {
      const size_t end = std::min(value.find(',', begin), value.size());
      const std::string_view coding = trimmed(value.substr(begin, end - begin));
      if (lower_case(coding) != "chunked")
        return FramingFault{501, fmt::format("the transfer coding {} is unknown here: chunked is what this server reads", quote(coding))};
      begin = end + 1;
    }
  // Of several lines the library looks at the first, and at that with its blanks.
  if (values.size() > 1 || values[0].size() != std::string_view("chunked").size())
    return FramingFault{400, "Transfer-Encoding is given more than once, 'chunked' by itself was expected"};
  return std::nullopt;
}

}  // namespace

std::string lower_case(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return result;
}

std::optional<FramingFault> find_framing_fault(const HeaderLines& lines, std::string_view version) {
  std::vector<std::string_view> lengths, codings;
  int n_hosts = 0;
  for (const auto& [name, value] : lines) {
    if (!is_token(name)) return FramingFault{400, fmt::format("a header is named {}: a name has no blanks, and the colon is right behind it", quote(name))};
    if (has_control(value)) return FramingFault{400, fmt::format("the header {} holds a control character", quote(name))};
    const std::string known = lower_case(name);
    if (known == "content-length") lengths.push_back(value);
    if (known == "transfer-encoding") codings.push_back(value);
    n_hosts += known == "host";
  }
  const bool is_old = version == "HTTP/1.0";
  if (n_hosts > 1) return FramingFault{400, "there are several Host headers, one was expected"};
  if (n_hosts == 0 && !is_old) return FramingFault{400, "there is no Host header, one was expected"};
  if (lengths.size() > 1) return FramingFault{400, "there are several Content-Length headers, one was expected"};
  if (!lengths.empty() && (lengths[0].empty() || !std::all_of(lengths[0].begin(), lengths[0].end(), is_digit)))
    return FramingFault{400, fmt::format("Content-Length is {}, a whole number was expected", quote(lengths[0]))};
  if (codings.empty()) return std::nullopt;
  if (!lengths.empty()) return FramingFault{400, "there are Content-Length and Transfer-Encoding, one of them was expected"};
  if (is_old) return FramingFault{400, "there is a Transfer-Encoding, which HTTP/1.0 has not"};
  return find_coding_fault(codings);
}

std::optional<std::string> take_host_off(std::string& target) {
  const std::string start = lower_case(std::string_view(target).substr(0, 8));
  const size_t begin = start.starts_with("http://") ? 7 : start.starts_with("https://") ? 8 : 0;
  if (begin == 0) return std::nullopt;
  const size_t end = std::min(target.find('/', begin), target.size());
  std::string host = target.substr(begin, end - begin);
  target.erase(0, end);
  if (target.empty()) target.push_back('/');
  return host;
}

}  // namespace beryl::server
