// JSON from files that nobody vouches for: nlohmann's parser with limits, and its exceptions as one-line Errors.
#pragma once

#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "weights/quote.h"

namespace beryl {

inline constexpr int kMaxJsonDepth = 64;
// Keys of one object. nlohmann's ordered objects search linearly, so this also bounds the time.
inline constexpr size_t kMaxJsonKeys = 16384;

// "syntax error while parsing value - unexpected end of input", without nlohmann's prefix and without any byte that is
// not printable.
inline std::string json_reason(const nlohmann::json::exception& exception) {
  std::string_view text = exception.what();
  if (const size_t bracket = text.find("] "); text.starts_with("[json.exception.") && bracket != text.npos)
    text.remove_prefix(bracket + 2);
  const std::string inside = quote(text, 160);
  return inside.substr(1, inside.size() - 2);
}

// nlohmann takes a NUL byte outside strings for the end of the text, and would ignore what follows it. JSON allows none
// anywhere. name: the text, for messages ("FILE", "FILE: the header").
inline void refuse_nul(const std::string& name, std::string_view text) {
  if (const size_t at = text.find('\0'); at != text.npos)
    throw Error(ErrorCode::kBadInput, fmt::format("{}: not valid JSON: a NUL at byte {}", name, at));
}

// name: the file, for messages. Errors (all kBadInput): no JSON, a NUL byte, not UTF-8, a number beyond f64, a key that
// occurs twice in an object, nesting deeper than kMaxJsonDepth, more than max_keys keys in an object.
template <class Json>
Json parse_json(const std::string& name, std::string_view text, size_t max_keys = kMaxJsonKeys) {
  refuse_nul(name, text);
  std::vector<std::unordered_set<std::string>> open_objects;
  int depth = 0;
  const auto watch = [&](int, typename Json::parse_event_t event, Json& parsed) {
    using Event = typename Json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      if (++depth > kMaxJsonDepth)
        throw Error(ErrorCode::kBadInput, fmt::format("{}: JSON nested deeper than {} levels", name, kMaxJsonDepth));
      if (event == Event::object_start) open_objects.emplace_back();
    } else if (event == Event::object_end || event == Event::array_end) {
      --depth;
      if (event == Event::object_end) open_objects.pop_back();
    } else if (event == Event::key) {
      const auto& key = parsed.template get_ref<const std::string&>();
      if (!open_objects.back().insert(key).second)
        throw Error(ErrorCode::kBadInput, fmt::format("{}: key {} occurs twice in an object", name, quote(key)));
      if (open_objects.back().size() > max_keys)
        throw Error(ErrorCode::kBadInput, fmt::format("{}: more than {} keys in an object", name, max_keys));
    }
    return true;
  };
  if (text.empty())   // versions of the parser say it in different words
    throw Error(ErrorCode::kBadInput, fmt::format("{}: not valid JSON: unexpected end of input, it is empty", name));
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const nlohmann::json::exception& exception) {
    throw Error(ErrorCode::kBadInput, fmt::format("{}: not valid JSON: {}", name, json_reason(exception)));
  }
}

}  // namespace beryl
