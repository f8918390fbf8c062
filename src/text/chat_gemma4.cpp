// Gemma 4's conversations, as the template of July 2026 writes them.
//
//   <bos> <|turn>ROLE \n CONTENT <turn|> \n ...   roles system, user, model
//   <|channel>thought \n REASONING \n <channel|>  a thought, before calls and text of a model turn
//   <|tool>declaration:NAME{...}<tool|>           in the system turn
//   <|tool_call>call:NAME{...}<tool_call|><|tool_response>response:NAME{...}<tool_response|>   within a model turn
//
// A model turn goes on over calls and their results: results are found in the messages that follow the call, and the
// reply to them is the same turn. Where the template leaves a brace open (a schema without a type) or forgets to open
// the next turn (a call, its result and text in one message) this writes what its grammar wants.
#include <algorithm>

#include <fmt/format.h>

#include "base/error.h"
#include "text/chat_message.h"
#include "text/python_text.h"
#include "text/utf8.h"
#include "weights/quote.h"

namespace beryl {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kQuote = "<|\"|>";

// Python's truth of a JSON value.
bool truthy(const Json& value) {
  if (value.is_null()) return false;
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() != 0;
  if (value.is_string()) return !value.get_ref<const std::string&>().empty();
  return !value.empty();
}

const Json& member(const Json& object, const char* key) {
  static const Json kNull;
  if (!object.is_object()) return kNull;
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}

// Jinja's dictsort: by key without regard to case (of ASCII letters here), equal keys in the order given.
std::vector<std::pair<std::string, const Json*>> sorted_members(const Json& object) {
  std::vector<std::pair<std::string, const Json*>> members;
  for (auto entry = object.begin(); entry != object.end(); ++entry) members.emplace_back(entry.key(), &*entry);
  std::stable_sort(members.begin(), members.end(),
                   [](const auto& a, const auto& b) { return ascii_upper(a.first) < ascii_upper(b.first); });
  return members;
}

// Separates the members of a list that is written piece by piece.
class Comma {
 public:
  explicit Comma(PromptBuilder& out) : out_(out) {}
  void next() {
    if (!first_) out_.text(",");
    first_ = false;
  }

 private:
  PromptBuilder& out_;
  bool first_ = true;
};

void write_string(PromptBuilder& out, std::string_view text) {
  out.control(kQuote);
  out.text(text);
  out.control(kQuote);
}

// A value of a call, a result or a schema. quoted_keys: schemas quote the keys of objects, calls do not.
void write_argument(PromptBuilder& out, const Json& value, bool quoted_keys, int depth = 0) {
  if (depth > kMaxPythonDepth)
    throw Error(ErrorCode::kBadInput, fmt::format("a tool's JSON is nested deeper than {} levels", kMaxPythonDepth));
  if (value.is_null()) {
    out.text("null");
  } else if (value.is_string()) {
    write_string(out, value.get_ref<const std::string&>());
  } else if (value.is_boolean()) {
    out.text(value.get<bool>() ? "true" : "false");
  } else if (value.is_object()) {
    out.text("{");
    Comma comma(out);
    for (const auto& [key, inner] : sorted_members(value)) {
      comma.next();
      if (quoted_keys)
        write_string(out, key);
      else
        out.text(key);
      out.text(":");
      write_argument(out, *inner, quoted_keys, depth + 1);
    }
    out.text("}");
  } else if (value.is_array()) {
    out.text("[");
    Comma comma(out);
    for (const Json& inner : value) {
      comma.next();
      write_argument(out, inner, quoted_keys, depth + 1);
    }
    out.text("]");
  } else {
    out.text(python_str(value));
  }
}

void write_required(PromptBuilder& out, const Json& list, std::string_view tool) {
  if (!list.is_array())
    throw Error(ErrorCode::kBadInput, fmt::format("tool {}: 'required' is not a list", quote(tool)));
  out.text("[");
  Comma comma(out);
  for (const Json& item : list) {
    comma.next();
    write_string(out, python_str(item));
  }
  out.text("]");
}

// What a property can say that the declaration has no words for.
void report_unexpressed(PromptBuilder& out, const Json& schema, std::string_view tool, const std::string& key) {
  for (const std::string_view keyword : kRareKeywords)
    if (schema.is_object() && schema.contains(keyword)) out.warn(unexpressed_warning(tool, key, keyword));
  const Json& type = member(schema, "type");
  if (truthy(member(schema, "enum")) && !(type.is_string() && ascii_upper(type.get<std::string>()) == "STRING"))
    out.warn(unexpressed_warning(tool, key, "enum"));
}

// The members of "properties". own_keys_only: the schema of an object without "properties" is itself taken for them,
// and then the words of JSON Schema are not properties.
void write_properties(PromptBuilder& out, const Json& properties, std::string_view tool, bool own_keys_only,
                      int depth) {
  if (depth > kMaxPythonDepth)
    throw Error(ErrorCode::kBadInput,
                fmt::format("tool {}: the schema is nested deeper than {} levels", quote(tool), kMaxPythonDepth));
  Comma between(out);
  for (const auto& [key, schema_pointer] : sorted_members(properties)) {
    const Json& schema = *schema_pointer;
    if (own_keys_only &&
        (key == "description" || key == "type" || key == "properties" || key == "required" || key == "nullable"))
      continue;
    between.next();
    out.text(key + ":{");
    report_unexpressed(out, schema, tool, key);
    Comma comma(out);
    if (const Json& description = member(schema, "description"); truthy(description)) {
      comma.next();
      out.text("description:");
      write_string(out, python_str(description));
    }
    const Json& given_type = member(schema, "type");
    const std::string type = given_type.is_null() ? "" : ascii_upper(python_str(given_type));
    if (const Json& values = member(schema, "enum"); type == "STRING" && truthy(values)) {
      comma.next();
      out.text("enum:");
      write_argument(out, values, true);
    }
    if (const Json& items = member(schema, "items"); type == "ARRAY" && items.is_object() && !items.empty()) {
      comma.next();
      out.text("items:{");
      Comma item_comma(out);
      for (const auto& [item_key, item] : sorted_members(items)) {
        if (item->is_null()) continue;
        item_comma.next();
        out.text(item_key + ":");
        if (item_key == "properties") {
          out.text("{");
          if (item->is_object()) write_properties(out, *item, tool, false, depth + 1);
          out.text("}");
        } else if (item_key == "required") {
          write_required(out, *item, tool);
        } else if (item_key == "type" && item->is_string()) {
          write_string(out, ascii_upper(item->get<std::string>()));
        } else if (item_key == "type") {
          Json upper = Json::array();
          for (const Json& one : *item) upper.push_back(ascii_upper(python_str(one)));
          write_argument(out, upper, true);
        } else {
          write_argument(out, *item, true);
        }
      }
      out.text("}");
    }
    if (truthy(member(schema, "nullable"))) {
      comma.next();
      out.text("nullable:true");
    }
    if (type == "OBJECT") {
      const Json& inner = member(schema, "properties");
      comma.next();
      out.text("properties:{");
      write_properties(out, inner.is_object() ? inner : schema, tool, !inner.is_object(), depth + 1);
      out.text("}");
      if (const Json& required = member(schema, "required"); truthy(required)) {
        comma.next();
        out.text("required:");
        write_required(out, required, tool);
      }
    }
    comma.next();
    out.text("type:");
    write_string(out, type);
    out.text("}");
  }
}

void write_declaration(PromptBuilder& out, const Json& function) {
  const std::string tool = function["name"].get<std::string>();
  out.control("<|tool>");
  out.text("declaration:" + tool + "{description:");
  const Json& description = member(function, "description");
  write_string(out, description.is_null() ? "" : python_str(description));
  if (const Json& parameters = member(function, "parameters"); truthy(parameters)) {
    if (!parameters.is_object())
      throw Error(ErrorCode::kBadInput,
                  fmt::format("tool {}: parameters is a {}, expected an object", quote(tool), parameters.type_name()));
    out.text(",parameters:{");
    for (const std::string_view keyword : kRareRootKeywords)
      if (parameters.contains(keyword)) out.warn(unexpressed_warning(tool, {}, keyword));
    if (const Json& properties = member(parameters, "properties"); truthy(properties)) {
      if (!properties.is_object())
        throw Error(ErrorCode::kBadInput, fmt::format("tool {}: properties is not an object", quote(tool)));
      out.text("properties:{");
      write_properties(out, properties, tool, false, 0);
      out.text("},");
    }
    if (const Json& required = member(parameters, "required"); truthy(required)) {
      out.text("required:");
      write_required(out, required, tool);
      out.text(",");
    }
    const Json& type = member(parameters, "type");
    out.text("type:");
    write_string(out, type.is_null() ? "OBJECT" : ascii_upper(python_str(type)));
    out.text("}");
  }
  if (function.contains("response")) {
    const Json& response = function["response"];
    out.text(",response:{");
    if (const Json& said = member(response, "description"); truthy(said)) {
      out.text("description:");
      write_string(out, python_str(said));
      out.text(",");
    }
    const Json& type = member(response, "type");
    out.text("type:");
    write_string(out, type.is_null() ? "OBJECT" : ascii_upper(python_str(type)));
    out.text("}");
  }
  out.text("}");
  out.control("<tool|>");
}

void write_call(PromptBuilder& out, const ToolCall& call) {
  out.control("<|tool_call>");
  out.text("call:" + call.name);
  if (call.arguments.is_string()) {
    out.text("{");
    out.text(call.arguments.get_ref<const std::string&>());
    out.text("}");
  } else {
    write_argument(out, call.arguments, false);
  }
  out.control("<tool_call|>");
}

void write_result(PromptBuilder& out, const std::string& tool, const Json& value) {
  out.control("<|tool_response>");
  out.text("response:" + tool);
  if (value.is_object()) {
    write_argument(out, value, false);
  } else {
    out.text("{value:");
    write_argument(out, value, false);
    out.text("}");
  }
  out.control("<tool_response|>");
}

// An assistant's text without the thoughts that it was sent back with: each goes from <|channel> to <channel|>.
std::string strip_thoughts(std::string_view text) {
  constexpr std::string_view kOpen = "<|channel>", kClose = "<channel|>";
  std::string kept;
  for (;;) {
    const size_t close = text.find(kClose);
    const std::string_view part = text.substr(0, close);
    kept += part.substr(0, part.find(kOpen));
    if (close == std::string_view::npos) break;
    text.remove_prefix(close + kClose.size());
  }
  return std::string(trim(kept));
}

// Returns whether anything but white space was written.
bool write_content(PromptBuilder& out, const Message& message) {
  bool any = false;
  for (const ContentPart& part : message.parts) {
    switch (part.kind) {
      case ContentPart::Kind::kText: {
        const std::string text =
            message.role == Role::kAssistant ? strip_thoughts(part.text) : std::string(trim(part.text));
        out.text(text);
        any = any || !text.empty();
        continue;
      }
      case ContentPart::Kind::kImage: out.control("<|image|>"); break;
      case ContentPart::Kind::kAudio: out.control("<|audio|>"); break;
      case ContentPart::Kind::kVideo: out.control("<|video|>"); break;
    }
    any = true;
  }
  return any;
}

void write_media_of_result(PromptBuilder& out, const Message& message) {
  Message media;
  for (const ContentPart& part : message.parts)
    if (part.kind != ContentPart::Kind::kText) media.parts.push_back(part);
  write_content(out, media);
}

// Which call a tool's message answers: by id, else by the name it gives, else by its place among the results.
std::string answered_tool(const Message& assistant, const Message& result, size_t place) {
  if (!result.tool_call_id.empty()) {
    for (const ToolCall& call : assistant.tool_calls)
      if (call.id == result.tool_call_id) return call.name;
    return result.name.empty() ? "unknown" : result.name;
  }
  if (!result.name.empty()) return result.name;
  return place < assistant.tool_calls.size() ? assistant.tool_calls[place].name : "unknown";
}

}  // namespace

ChatPrompt format_gemma4(const ChatFormat& format, const std::vector<Message>& all, const ChatOptions& options) {
  PromptBuilder out;
  const std::vector<const Json*> tools = read_tools(options.tools);
  const bool has_system = all.front().role == Role::kSystem;
  const auto end_turn = [&] {
    out.control("<turn|>");
    out.text("\n");
  };
  const auto open_thought = [&] {
    out.control("<|channel>");
    out.text("thought\n");
  };

  out.control("<bos>");
  if (options.enable_thinking || !tools.empty() || has_system) {
    out.control("<|turn>");
    out.text("system\n");
    if (options.enable_thinking) {
      out.control("<|think|>");
      out.text("\n");
    }
    if (has_system) {
      for (const ContentPart& part : all.front().parts) {
        if (part.kind != ContentPart::Kind::kText) throw bad_message(0, "a system message can hold only text");
        out.text(trim(part.text));
        if (all.front().is_list) out.text(" ");
      }
    }
    for (const Json* tool : tools) write_declaration(out, *tool);
    end_turn();
  }

  const size_t begin = has_system ? 1 : 0;
  const size_t kNone = all.size();
  size_t last_user = kNone;   // thoughts before it are history
  for (size_t i = begin; i < all.size(); ++i)
    if (all[i].role == Role::kUser) last_user = i;

  enum class Ending { kTurn, kCall, kResult } ending = Ending::kTurn;   // what the prompt ends with so far
  const Message* previous = nullptr;
  for (size_t i = begin; i < all.size(); ++i) {
    const Message& message = all[i];
    if (message.role == Role::kTool) throw bad_message(message.index, "a tool result without a tool call before it");
    const bool assistant = message.role == Role::kAssistant;
    ending = Ending::kTurn;
    if (!(assistant && previous != nullptr && previous->role == Role::kAssistant)) {
      out.control("<|turn>");
      out.text(assistant ? "model\n" : fmt::format("{}\n", name(message.role)));
    }
    const bool recent = last_user == kNone || i > last_user;
    if (!message.reasoning.empty() && (recent || (options.preserve_thinking && !message.tool_calls.empty()))) {
      open_thought();
      out.text(message.reasoning + "\n");
      out.control("<channel|>");
    }
    for (const ToolCall& call : message.tool_calls) write_call(out, call);
    if (!message.tool_calls.empty()) ending = Ending::kCall;

    for (const ToolResult& result : message.tool_results) {
      write_result(out, result.name, result.value);
      ending = Ending::kResult;
    }
    if (!message.tool_calls.empty() && message.tool_results.empty()) {
      for (size_t place = 0; i + 1 < all.size() && all[i + 1].role == Role::kTool; ++place) {
        const Message& result = all[++i];
        const bool text = result.has_content && result.value.is_null();
        write_result(out, answered_tool(message, result, place), text ? Json(result.text()) : result.value);
        write_media_of_result(out, result);
        ending = Ending::kResult;
      }
    }
    const bool has_text = write_content(out, message);

    const bool is_last = i + 1 == all.size();
    const bool goes_on = assistant && !is_last && all[i + 1].role == Role::kAssistant;
    if (ending == Ending::kCall) {
      out.control("<|tool_response>");   // the caller's turn to write the result
    } else if (!goes_on && !(ending == Ending::kResult && !has_text && is_last)) {
      end_turn();
      ending = Ending::kTurn;
    }
    previous = &message;
  }

  if (options.add_generation_prompt) {
    if (ending == Ending::kTurn) {
      out.control("<|turn>");
      out.text("model\n");
      if (!options.enable_thinking && format.empty_thought) {
        open_thought();
        out.control("<channel|>");
      }
    } else if (ending == Ending::kResult && options.enable_thinking) {
      open_thought();
      out.set_in_thought();
    }
  }
  return out.take();
}

}  // namespace beryl
