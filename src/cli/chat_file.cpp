#include "cli/chat_file.h"

#include <optional>

#include <fmt/format.h>

#include "base/error.h"
#include "cli/console.h"
#include "store/files.h"
#include "weights/json_text.h"

namespace beryl::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kVersionKey = "beryl_talk";
constexpr int kVersion = 1;

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::kBadInput, fmt::format("{}: is no talk that beryl has saved: {}", path, what));
}

Json parse(const std::string& path, const std::string& text) {
  const Json json = parse_json<Json>(path, text);
  if (!json.is_object() || !json.contains(kVersionKey)) refuse(path, fmt::format("it has no \"{}\"", kVersionKey));
  if (json[kVersionKey] != kVersion)
    throw Error(ErrorCode::kUnsupported, fmt::format("{}: is of another version of beryl, which saves talks in another form", path));
  return json;
}

std::string text_in(const std::string& path, const Json& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_string()) refuse(path, fmt::format("\"{}\" is no text", key));
  return found->get<std::string>();
}

}  // namespace

void save_talk(const std::string& path, const SavedTalk& talk) {
  if (const std::optional<std::string> old = read_small_file(path, kMaxInputBytes)) {
    try {
      parse(path, *old);
    } catch (const Error&) {
      throw Error(ErrorCode::kBadInput, fmt::format("{}: is there already and is no saved talk: give another name", path));
    }
  }
  const Json json = {{kVersionKey, kVersion},
                     {"model", talk.model},
                     {"system", talk.system_text},
                     {"settings", talk.settings},
                     {"messages", talk.messages}};
  write_small_file(path, json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

SavedTalk load_talk(const std::string& path) {
  const std::optional<std::string> text = read_small_file(path, kMaxInputBytes);
  if (!text) throw Error(ErrorCode::kIo, fmt::format("{}: there is no such file", path));
  const Json json = parse(path, *text);
  SavedTalk talk;
  talk.model = text_in(path, json, "model");
  talk.system_text = text_in(path, json, "system");
  talk.settings = json.value("settings", Json::object());
  if (!talk.settings.is_object()) refuse(path, "\"settings\" is no object");
  talk.messages = json.value("messages", Json(nullptr));
  if (!talk.messages.is_array() || talk.messages.size() % 2 != 0) refuse(path, "\"messages\" is no list of messages and replies in turn");
  for (size_t i = 0; i < talk.messages.size(); ++i) {
    const Json& each = talk.messages[i];
    const char* role = i % 2 == 0 ? "user" : "assistant";
    const bool has_thought = i % 2 == 1 && each.is_object() && each.contains("reasoning_content");
    if (!each.is_object() || each.size() != (has_thought ? 3 : 2) || !each.contains("role") || each["role"] != role || !each.contains("content") ||
        !each["content"].is_string() || (has_thought && !each["reasoning_content"].is_string()))
      refuse(path, fmt::format("message {} is none with the role \"{}\" and a text as \"content\"{}", i + 1, role,
                               i % 2 == 1 ? ", at most with another as \"reasoning_content\"" : ""));
  }
  return talk;
}

}  // namespace beryl::cli
