#include "server/json_fields.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "server/api_error.h"
#include "text/utf8.h"
#include "weights/quote.h"

namespace beryl::server {
namespace {

constexpr int kMaxDepth = 64;
constexpr size_t kShownBytes = 40;

// Where the text is nested too deeply, so that nothing behind this needs to be afraid of it. npos: nowhere.
size_t too_deep_at(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxDepth) return i;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return std::string_view::npos;
}

std::string number_text(double value) {
  return std::abs(value) < 1e15 && value == std::floor(value) ? fmt::format("{:.0f}", value) : fmt::format("{}", value);
}

// The member that the parser is at when it gives up: its keys from the outermost on. Places in arrays are not named.
std::string place_of_last_key(const std::string& body) {
  std::vector<std::string> keys;
  const auto follow = [&](int depth, Json::parse_event_t event, Json& parsed) {
    const auto n = static_cast<size_t>(depth);
    if (event == Json::parse_event_t::key) {
      keys.resize(n);
      keys.back() = parsed.get<std::string>();
    } else if (event == Json::parse_event_t::object_end) {
      keys.resize(std::min(keys.size(), n));
    }
    return true;
  };
  try {
    static_cast<void>(Json::parse(body, follow));
  } catch (const Json::exception&) {
  }
  return fmt::format("{}", fmt::join(keys, "."));
}

}  // namespace

Json parse_object(const std::string& body) {
  if (body.empty()) throw ApiError(400, "the body is empty, a JSON object was expected");
  for (size_t at = 0; at < body.size();) {
    const DecodedCharacter character = decode_character(body, at);
    if (!character.well_formed) throw ApiError(400, fmt::format("the body is not UTF-8 at byte {}", at));
    if (body[at] == '\0') throw ApiError(400, fmt::format("the body is no JSON: a NUL at byte {} of {}", at, body.size()));   // the parser would end there
    at += character.length;
  }
  if (const size_t at = too_deep_at(body); at != std::string::npos)
    throw ApiError(400, fmt::format("the body is nested deeper than {} levels at byte {}", kMaxDepth, at));
  Json json;
  try {
    json = Json::parse(body);
  } catch (const nlohmann::json::parse_error& error) {
    throw ApiError(400, fmt::format("the body is no JSON: it goes wrong at byte {} of {}", error.byte == 0 ? 0 : error.byte - 1, body.size()));
  } catch (const nlohmann::json::out_of_range&) {
    const std::string place = place_of_last_key(body);
    throw ApiError(400, fmt::format("'{}' holds a number that is too large for any computer", place), place);
  }
  if (!json.is_object()) throw ApiError(400, fmt::format("the body is {}, a JSON object was expected", in_words(json)));
  return json;
}

std::string to_line(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

std::string in_words(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null: return "null";
    case Json::value_t::boolean: return value.get<bool>() ? "true" : "false";
    case Json::value_t::string: {
      const std::string& text = value.get_ref<const std::string&>();
      std::string shown = text.substr(0, kShownBytes);
      shown.resize(shown.size() - incomplete_suffix(shown));
      return fmt::format("the text {}{}", quote(shown), text.size() > kShownBytes ? "..." : "");
    }
    case Json::value_t::array: return value.empty() ? "an empty array" : fmt::format("an array of {}", value.size());
    case Json::value_t::object: return "an object";
    default: return fmt::format("the number {}", value.dump());
  }
}

const Json* Fields::find(const char* name) const {
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void Fields::refuse(const char* name, std::string_view expected) const {
  const Json* value = find(name);
  throw ApiError(400, fmt::format("'{}{}' is {}, {} was expected", path_, name, value == nullptr ? "missing" : in_words(*value), expected),
                 path_ + name);
}

double Fields::number(const char* name, double otherwise, double least, double most) const {
  const Json* value = find(name);
  if (value == nullptr) return otherwise;
  // Written so that NaN would be refused.
  if (!value->is_number() || !(value->get<double>() >= least && value->get<double>() <= most))
    refuse(name, fmt::format("a number from {} to {}", number_text(least), number_text(most)));
  return value->get<double>();
}

int64_t Fields::integer(const char* name, int64_t otherwise, int64_t least, int64_t most) const {
  const Json* value = find(name);
  if (value == nullptr) return otherwise;
  bool fits = false;
  if (value->is_number_unsigned()) {
    fits = value->get<uint64_t>() <= static_cast<uint64_t>(std::max<int64_t>(most, 0)) &&
           value->get<int64_t>() >= least;
  } else if (value->is_number_integer()) {
    fits = value->get<int64_t>() >= least && value->get<int64_t>() <= most;
  } else if (value->is_number_float()) {
    // 3.0 is a whole number too.
    const double number = value->get<double>();
    fits = number == std::floor(number) && number >= static_cast<double>(least) && number <= static_cast<double>(most) &&
           std::abs(number) <= 0x1p53;
  }
  if (!fits) refuse(name, fmt::format("a whole number from {} to {}", least, most));
  return value->is_number_float() ? static_cast<int64_t>(value->get<double>()) : value->get<int64_t>();
}

bool Fields::boolean(const char* name, bool otherwise) const {
  const Json* value = find(name);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) refuse(name, "true or false");
  return value->get<bool>();
}

std::optional<std::string> Fields::string(const char* name) const {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) refuse(name, "a text");
  return value->get<std::string>();
}

std::string Fields::required_string(const char* name) const {
  std::optional<std::string> value = string(name);
  if (!value) refuse(name, "a text");
  return *value;
}

const Json* Fields::array(const char* name) const {
  const Json* value = find(name);
  if (value != nullptr && !value->is_array()) refuse(name, "an array");
  return value;
}

const Json* Fields::object(const char* name) const {
  const Json* value = find(name);
  if (value != nullptr && !value->is_object()) refuse(name, "an object");
  return value;
}

std::vector<std::string> Fields::strings(const char* name, size_t most) const {
  const Json* value = find(name);
  if (value == nullptr) return {};
  if (value->is_string()) return {value->get<std::string>()};
  std::vector<std::string> all;
  const auto is_text = [](const Json& each) { return each.is_string(); };
  if (!value->is_array() || value->size() > most || !std::all_of(value->begin(), value->end(), is_text))
    refuse(name, fmt::format("a text or a list of at most {} texts", most));
  for (const Json& each : *value) all.push_back(each.get<std::string>());
  return all;
}

}  // namespace beryl::server
