#include "text/write_conversation.h"

#include <charconv>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "text/text_tools.h"

namespace beryl {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kBlankLine = "\n\n";

struct Told {
  Json messages = Json::array();
  std::vector<size_t> origins = {};   // of each: the client's message that it comes from, or the first of these; or kNoMessage
};

std::string role_of(const Json& message) {
  const auto role = message.find("role");
  if (role == message.end() || !role->is_string()) return {};
  return *role == "developer" ? "system" : role->get<std::string>();
}

// A content as parts; of nothing there are none.
Json parts_of(const Json& content) {
  if (content.is_array()) return content;
  if (content.is_string() && !content.get_ref<const std::string&>().empty()) return Json::array({{{"type", "text"}, {"text", content}}});
  return Json::array();
}

// nullopt: there is something else than text in it.
std::optional<std::string> text_of(const Json& content) {
  std::string text;
  for (const Json& part : parts_of(content)) {
    if (!part.is_object() || !part.contains("text") || !part["text"].is_string()) return std::nullopt;
    text += part["text"].get<std::string>();
  }
  return text;
}

Json joined_contents(const Json& first, const Json& second) {
  const std::optional<std::string> a = text_of(first), b = text_of(second);
  if (a && b) return a->empty() || b->empty() ? *a + *b : fmt::format("{}{}{}", *a, kBlankLine, *b);
  Json parts = parts_of(first);
  if (!parts.empty() && !parts_of(second).empty()) parts.push_back({{"type", "text"}, {"text", kBlankLine}});
  for (const Json& part : parts_of(second)) parts.push_back(part);
  return parts;
}

void join(Json& message, const Json& next) {
  for (const auto& [key, value] : next.items()) {
    if (value.is_null() || key == "role") continue;
    Json& own = message[key];
    if (own.is_null()) {
      own = value;
    } else if (key == "content") {
      own = joined_contents(own, value);
    } else if (own.is_array() && value.is_array()) {   // calls
      own.insert(own.end(), value.begin(), value.end());
    } else if (key == "name") {
      if (own != value) own = nullptr;
    } else if (own.is_string() && value.is_string()) {   // thoughts
      own = joined_contents(own, value);
    }
  }
}

// nullopt: that is what they are already.
std::optional<Told> in_turns(const Told& told) {
  Told turns, system;
  for (size_t i = 0; i < told.messages.size(); ++i) {
    const Json& message = told.messages[i];
    const std::string role = message.is_object() ? role_of(message) : std::string();
    if (role.empty()) return std::nullopt;
    Told& list = role == "system" ? system : turns;
    const bool is_one = role == "system" || role == "user" || role == "assistant";   // results of tools are told apart by their calls
    if (is_one && !list.messages.empty() && role_of(list.messages.back()) == role) {
      join(list.messages.back(), message);
    } else {
      list.messages.push_back(message);
      list.origins.push_back(told.origins[i]);
    }
  }
  Told all = std::move(system);
  if (!turns.messages.empty() && role_of(turns.messages.front()) == "assistant") {
    all.messages.push_back({{"role", "user"}, {"content", ""}});
    all.origins.push_back(turns.origins.front());
  }
  all.messages.insert(all.messages.end(), turns.messages.begin(), turns.messages.end());
  all.origins.insert(all.origins.end(), turns.origins.begin(), turns.origins.end());
  if (all.messages == told.messages) return std::nullopt;
  return all;
}

// "message 3: why" as 3 and "why".
std::optional<std::pair<size_t, std::string>> message_and_reason(const std::string& what) {
  constexpr std::string_view kBegin = "message ";
  if (!what.starts_with(kBegin)) return std::nullopt;
  size_t index = 0;
  const char* const end = what.data() + what.size();
  const std::string_view rest(std::from_chars(what.data() + kBegin.size(), end, index).ptr, end);
  if (!rest.starts_with(": ")) return std::nullopt;
  return std::pair(index, std::string(rest.substr(2)));
}

// A template says what is wrong, and not with which message: the last one of the shortest beginning that it refuses.
std::optional<size_t> find_refused(const ChatWriter& writer, const Json& messages, const ChatOptions& options) {
  const auto refuses = [&](size_t n) {
    Json some = Json::array();
    some.insert(some.end(), messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(n));
    try {
      writer.write(some, options);
      return false;
    } catch (const Error&) {
      return true;
    }
  };
  size_t good = 0, bad = messages.size();
  while (bad - good > 1) {
    const size_t middle = good + (bad - good) / 2;
    (refuses(middle) ? bad : good) = middle;
  }
  return bad == 0 ? std::nullopt : std::optional(bad - 1);
}

Error with_client_message(const Error& error, const ChatWriter& writer, const Told& told, const ChatOptions& options) {
  std::optional<size_t> index;
  std::string reason = error.what();
  if (const auto known = message_and_reason(reason)) {
    index = known->first;
    reason = known->second;
  } else {
    index = find_refused(writer, told.messages, options);
  }
  const size_t origin = index && *index < told.origins.size() ? told.origins[*index] : kNoMessage;
  return Error(error.code, origin == kNoMessage ? reason : fmt::format("message {}: {}", origin, reason));
}

}  // namespace

ChatPrompt write_conversation(const ChatWriter& writer, bool writes_tools, const Json& messages, const ChatOptions& given) {
  ChatOptions options = given;
  Told told;
  if (writes_tools) {
    told.messages = messages;
    for (size_t i = 0; i < messages.size(); ++i) told.origins.push_back(i);
  } else {
    told.messages = with_tools_as_text(messages, std::exchange(options.tools, nullptr), &told.origins);
  }
  std::optional<Told> turns;
  std::optional<Error> first;   // of one message, with the client's number
  try {
    return writer.write(told.messages, options);
  } catch (const Error& error) {
    if (error.code != ErrorCode::kBadInput) throw;
    turns = in_turns(told);
    if (!turns) throw with_client_message(error, writer, told, options);
    if (message_and_reason(error.what())) first = with_client_message(error, writer, told, options);
  }
  try {
    ChatPrompt prompt = writer.write(turns->messages, options);
    prompt.warnings.emplace_back("the model's chat format takes user and assistant in turn only: neighbouring messages of a role are written as one, system messages in front");
    return prompt;
  } catch (const Error& error) {
    if (error.code != ErrorCode::kBadInput) throw;
    const auto reason = message_and_reason(error.what());
    // What is wrong with a message that has been joined to others.
    if (first && reason && message_and_reason(first->what()).value_or(std::pair(0, first->what())).second == reason->second) throw Error(*first);
    throw with_client_message(error, writer, *turns, options);
  }
}

}  // namespace beryl
