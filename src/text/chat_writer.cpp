#include "text/chat_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "base/error.h"
#include "base/mapped_file.h"
#include "text/chat_message.h"
#include "text/jinja.h"
#include "text/python_text.h"
#include "weights/json_text.h"
#include "weights/quote.h"

namespace beryl {

namespace {

using Json = nlohmann::ordered_json;

class BuiltInWriter : public ChatWriter {
 public:
  // warning: why it is used, if that is worth a line.
  explicit BuiltInWriter(ChatFormat format, const std::string& warning = {}) : format_(std::move(format)) {
    if (!warning.empty()) warnings_.push_back(warning);
    warnings_.insert(warnings_.end(), format_.warnings.begin(), format_.warnings.end());
  }
  ChatPrompt write(const Json& messages, const ChatOptions& options) const override {
    return format_chat(format_, messages, options);
  }
  std::string_view name() const override { return beryl::name(format_.family); }
  bool can_think() const override { return format_.family == ChatFamily::kGemma4; }

 private:
  ChatFormat format_;
};

// The forms that a template's authors had in mind.
struct Expectations {
  bool arguments_as_text = false;
  enum class Content { kAny, kText, kParts } content = Content::kAny;
};

// What opens a thought, by the template's own words. A prompt that ends with one is continued as reasoning.
constexpr std::string_view kThoughtOpenings[] = {"<think>",      "<|channel>thought",  "[THINK]",
                                                 "<seed:think>", "<|START_THINKING|>", "<think:opensource>"};

// What looks like a turn's control token: <|x|>, <|x>, <x|>, also with DeepSeek's bars, and Gemma's without bars.
std::vector<std::string> find_markers(std::string_view text) {
  constexpr size_t kMaxMarkerBytes = 48;
  std::vector<std::string> found;
  for (size_t at = text.find('<'); at != std::string_view::npos; at = text.find('<', at + 1)) {
    const size_t end = text.find_first_of("<> \t\n\"'", at + 1);
    if (end == std::string_view::npos || text[end] != '>' || end - at > kMaxMarkerBytes) continue;
    std::string_view word = text.substr(at + 1, end - at - 1);
    bool bars = false;
    for (const std::string_view bar : {"|", "\uFF5C"}) {
      if (word.starts_with(bar)) word.remove_prefix(bar.size()), bars = true;
      if (word.ends_with(bar)) word.remove_suffix(bar.size()), bars = true;
    }
    if (!word.empty() && (bars || word == "start_of_turn" || word == "end_of_turn"))
      found.emplace_back(text.substr(at, end - at + 1));
  }
  return found;
}

// A keyword of a tool's schema that many formats have no form for.
struct RareKeyword {
  Json::json_pointer schema;   // what it stands in, within the tool
  std::string keyword;
  std::string warning;         // that it is left out
};

// parameter: whose schema it is; empty: that of all.
void find_rare_keywords(const Json& schema, const Json::json_pointer& at, const std::string& tool,
                        const std::string& parameter, std::vector<RareKeyword>& found, int depth = 0) {
  if (!schema.is_object() || depth > kMaxPythonDepth) return;
  const auto look_for = [&](std::string_view keyword) {
    if (schema.contains(keyword))
      found.push_back({at, std::string(keyword), unexpressed_warning(tool, parameter, keyword)});
  };
  if (parameter.empty()) {
    for (const std::string_view keyword : kRareRootKeywords) look_for(keyword);
  } else {
    for (const std::string_view keyword : kRareKeywords) look_for(keyword);
    // Of strings most formats can list the values.
    const auto type = schema.find("type");
    const bool of_strings =
        type != schema.end() && type->is_string() && ascii_upper(type->get<std::string>()) == "STRING";
    if (!of_strings) look_for("enum");
  }
  if (const auto properties = schema.find("properties"); properties != schema.end() && properties->is_object())
    for (const auto& [key, value] : properties->items())
      find_rare_keywords(value, at / "properties" / key, tool, key, found, depth + 1);
  if (const auto items = schema.find("items"); items != schema.end())
    find_rare_keywords(*items, at / "items", tool, parameter, found, depth + 1);
}

std::string without_space(std::string_view text) {
  std::string kept;
  for (const char c : text)
    if (c != ' ' && c != '\n' && c != '\t' && c != '\r') kept += c;
  return kept;
}

// Of letters and digits, which no notation of texts changes.
std::string_view longest_word(std::string_view text) {
  std::string_view longest;
  for (size_t begin = 0; begin < text.size(); ++begin) {
    size_t end = begin;
    while (end < text.size() && std::isalnum(static_cast<unsigned char>(text[end])) != 0) ++end;
    if (end - begin > longest.size()) longest = text.substr(begin, end - begin);
    begin = end;
  }
  return longest;
}

class TemplateWriter : public ChatWriter {
 public:
  TemplateWriter(std::string name, std::string_view source, const Tokenizer& tokenizer)
      : name_(std::move(name)), tokenizer_(tokenizer), template_(compile(name_, source)) {
    find_expectations();
    find_missing_markers();
  }

  ChatPrompt write(const Json& messages, const ChatOptions& options) const override {
    const std::vector<Message> all = read_messages(messages, options.media_placeholders);  // throws for what no format can hold
    read_tools(options.tools);
    ChatPrompt prompt;
    try {
      prompt = to_prompt(render(messages, options, expectations_));
    } catch (const Error& error) {
      for (const Message& message : all)
        for (const ToolCall& call : message.tool_calls)
          if (call.arguments.is_string()) throw bad_arguments(message, call, fmt::format("can not show that: {}", error.what()));
      throw Error(error.code, fmt::format("{}: {}", name_, error.what()));
    }
    require_shown(all, prompt.text());
    report_unexpressed(options, prompt.warnings);
    return prompt;
  }
  std::string_view name() const override { return name_; }
  bool can_think() const override { return template_.reads("enable_thinking") || template_.reads("thinking"); }
  // What the template writes as control tokens, and the vocabulary has not.
  const std::vector<std::string>& missing_markers() const { return missing_markers_; }
  std::string missing_markers_line() const {
    std::string list;
    for (const std::string& marker : missing_markers_) list += (list.empty() ? "" : ", ") + quote(marker);
    return fmt::format("{}: it writes {}, which the vocabulary has no token{} for", name_, list,
                       missing_markers_.size() == 1 ? "" : "s");
  }

 private:
  static JinjaTemplate compile(const std::string& name, std::string_view source) {
    try {
      return JinjaTemplate(source);
    } catch (const Error& error) {
      throw Error(error.code, fmt::format("{}: {}", name, error.what()));
    }
  }

  static Json with_content_as(const Json& content, Expectations::Content form) {
    if (form == Expectations::Content::kText && content.is_array()) {
      std::string text;
      for (const Json& part : content) {
        if (!part.is_object() || !part.contains("text") || !part["text"].is_string()) return content;
        text += part["text"].get<std::string>();
      }
      return text;
    }
    if (form == Expectations::Content::kParts && content.is_string())
      return Json::array({{{"type", "text"}, {"text", content}}});
    return content;
  }

  static Json with_arguments_as(const Json& arguments, bool as_text) {
    if (as_text) return arguments.is_string() ? arguments : Json(python_json(arguments));
    if (!arguments.is_string()) return arguments;
    const std::string& text = arguments.get_ref<const std::string&>();
    if (text.find_first_not_of(" \t\r\n") == std::string::npos) return Json::object();
    try {
      return parse_json<Json>("arguments of a tool call", text);
    } catch (const Error&) {
      return arguments;
    }
  }

  // Of the calls whose arguments are no JSON object, that the first which the prompt does not show is an error.
  static void require_shown(const std::vector<Message>& messages, const std::string& prompt) {
    for (const Message& message : messages)
      for (const ToolCall& call : message.tool_calls)
        if (call.arguments.is_string() && prompt.find(longest_word(call.arguments.get_ref<const std::string&>())) == std::string::npos)
          throw bad_arguments(message, call, "leaves them out");
  }
  static Error bad_arguments(const Message& message, const ToolCall& call, std::string_view why_not) {
    return Error(ErrorCode::kBadInput, fmt::format("message {}: the arguments of the call of {} are no JSON object, and the chat template {}",
                                                   message.index, quote(call.name), why_not));
  }

  // One message as the template expects it.
  static Json adapt(const Json& message, const Expectations& expectations) {
    Json adapted = Json::object();
    const auto member = [&](const char* key) -> const Json* {
      const auto found = message.find(key);
      return found == message.end() || found->is_null() ? nullptr : &*found;
    };
    const Json* reasoning = member("reasoning_content");
    if (reasoning == nullptr) reasoning = member("thinking");
    if (reasoning == nullptr) reasoning = member("reasoning");
    if (reasoning != nullptr && member("thinking") == nullptr) adapted["thinking"] = *reasoning;
    for (const auto& [key, value] : message.items()) {
      if (value.is_null()) continue;
      if (key == "content") {
        adapted[key] = with_content_as(value, expectations.content);
      } else if (key == "tool_calls" && value.is_array()) {
        Json calls = Json::array();
        for (const Json& call : value) {
          Json& copy = calls.emplace_back(call);
          if (copy.is_object() && copy.contains("function") && copy["function"].is_object() &&
              copy["function"].contains("arguments"))
            copy["function"]["arguments"] =
                with_arguments_as(copy["function"]["arguments"], expectations.arguments_as_text);
        }
        adapted[key] = std::move(calls);
      } else {
        adapted[key] = value;
      }
    }
    if (reasoning != nullptr) adapted["reasoning_content"] = *reasoning;
    return adapted;
  }

  std::vector<RenderedPiece> render(const Json& messages, const ChatOptions& options,
                                    const Expectations& expectations) const {
    Json adapted = Json::array();
    for (const Json& message : messages) adapted.push_back(adapt(message, expectations));
    const auto token = [&](std::optional<int32_t> id) {
      return id ? std::string(tokenizer_.token_text(*id)) : std::string();
    };
    const bool has_tools = options.tools.is_array() && !options.tools.empty();
    std::vector<TemplateVariable> variables = {
        // Roles were checked: they are of a known few, and templates make control tokens of them.
        {.name = "messages", .value = std::move(adapted), .trusted = false, .trusted_members = {"role"}},
        {.name = "tools", .value = has_tools ? options.tools : Json(nullptr)},
        {.name = "documents", .value = nullptr},
        {.name = "add_generation_prompt", .value = options.add_generation_prompt, .trusted = true},
        {.name = "enable_thinking", .value = options.enable_thinking, .trusted = true},
        {.name = "thinking", .value = options.enable_thinking, .trusted = true},
        {.name = "bos_token", .value = token(tokenizer_.bos_id()), .trusted = true},
        {.name = "eos_token", .value = token(tokenizer_.eos_id()), .trusted = true},
    };
    if (options.preserve_thinking) variables.push_back({.name = "preserve_thinking", .value = true, .trusted = true});
    if (!options.template_variables.is_null()) {
      if (!options.template_variables.is_object())
        throw Error(ErrorCode::kBadInput, "the variables for the chat template are no object");
      for (const auto& [name, value] : options.template_variables.items()) {
        std::erase_if(variables,
                      [&](const TemplateVariable& known) { return known.name == name && name != "messages"; });
        if (name != "messages") variables.push_back({.name = name, .value = value});
      }
    }
    if (options.today.empty()) return template_.render(variables);
    return template_.render(variables, [&](const std::string&) { return options.today; });
  }

  ChatPrompt to_prompt(const std::vector<RenderedPiece>& pieces) const {
    PromptBuilder out;
    std::string own_tail;  // what the template itself wrote last
    for (const RenderedPiece& piece : pieces) {
      if (piece.foreign) {
        out.text(piece.text);
        own_tail.clear();
        continue;
      }
      size_t done = 0;
      for (const Tokenizer::SpecialSpan& special : tokenizer_.find_specials(piece.text)) {
        out.text(std::string_view(piece.text).substr(done, special.begin - done));
        out.control(std::string_view(piece.text).substr(special.begin, special.length));
        done = special.begin + special.length;
      }
      out.text(std::string_view(piece.text).substr(done));
      own_tail += piece.text;
    }
    while (!own_tail.empty() && (own_tail.back() == '\n' || own_tail.back() == ' ')) own_tail.pop_back();
    for (const std::string_view opening : kThoughtOpenings)
      if (own_tail.ends_with(opening)) out.set_in_thought();
    return out.take();
  }

  // The text of a small conversation; nullopt when the template refuses it. own_only: without what is foreign.
  std::optional<std::string> try_out(const Json& messages, const Expectations& expectations,
                                     const ChatOptions& options = {}, bool own_only = false) const {
    try {
      std::string text;
      for (const RenderedPiece& piece : render(messages, options, expectations))
        text += own_only && piece.foreign ? "\n" : piece.text;
      return text;
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  // What is no token is tokenised as text, and a model that was trained on the token reads noise (case 1).
  void find_missing_markers() {
    const Json question = {{"role", "user"}, {"content", "beryl-question"}};
    const Json answer = {{"role", "assistant"}, {"content", "beryl-answer"}};
    ChatOptions with_tool;   // some templates are only for conversations with tools
    with_tool.tools = Json::parse(
        R"([{"type": "function", "function": {"name": "beryl_tool", "description": "", "parameters": {}}}])");
    std::optional<std::string> text;
    for (const Json& messages : {Json::array({question, answer, question}), Json::array({question})})
      for (const ChatOptions& options : {ChatOptions(), with_tool})
        if (!text) text = try_out(messages, expectations_, options, true);
    if (!text) return;
    for (std::string& marker : find_markers(*text)) {
      if (tokenizer_.find_token(marker)) continue;
      if (std::find(missing_markers_.begin(), missing_markers_.end(), marker) == missing_markers_.end())
        missing_markers_.push_back(std::move(marker));
    }
    if (!missing_markers_.empty())
      warnings_.push_back(fmt::format("{}: {} ordinary text", missing_markers_line(),
                                      missing_markers_.size() == 1 ? "it becomes" : "they become"));
  }

  // A template leaves out what its author did not think of, without a word (case 19). What makes no difference to the
  // prompt is not in it: so each tool with such keywords is written once more, alone, without them.
  void report_unexpressed(const ChatOptions& options, std::vector<std::string>& warnings) const {
    size_t budget = 4 << 20;   // bytes of tools that are written for this: a fraction of a second
    const Json question = Json::array({{{"role", "user"}, {"content", "beryl-question"}}});
    for (const Json& tool : options.tools) {   // read_tools has checked them
      const Json& function = tool["function"];
      const auto parameters = function.find("parameters");
      if (parameters == function.end()) continue;
      std::vector<RareKeyword> rare;
      find_rare_keywords(*parameters, Json::json_pointer("/function/parameters"), function["name"].get<std::string>(),
                         {}, rare);
      if (rare.empty()) continue;
      ChatOptions probe;
      probe.enable_thinking = options.enable_thinking;
      probe.template_variables = options.template_variables;
      probe.today = "01 Jan 2026";   // no difference by the clock
      probe.tools = Json::array({tool});
      const std::optional<std::string> whole = try_out(question, expectations_, probe);
      const std::string as_it_is = without_space(parameters->dump(-1, ' ', false, Json::error_handler_t::replace));
      const size_t cost = as_it_is.size() + 1000;
      // Most templates write the schema as it is.
      if (!whole || without_space(*whole).find(as_it_is) != std::string::npos) continue;
      const auto report = [&](auto&& self, size_t begin, size_t end) -> void {
        if (cost > budget) return;
        budget -= cost;
        probe.tools = Json::array({tool});
        for (size_t i = begin; i < end; ++i) probe.tools[0][rare[i].schema].erase(rare[i].keyword);
        if (try_out(question, expectations_, probe) == whole) {
          for (size_t i = begin; i < end; ++i)
            if (std::find(warnings.begin(), warnings.end(), rare[i].warning) == warnings.end())
              warnings.push_back(rare[i].warning);
        } else if (end - begin > 1) {
          self(self, begin, begin + (end - begin) / 2);
          self(self, begin + (end - begin) / 2, end);
        }
      };
      report(report, 0, rare.size());
      if (cost > budget) {
        warnings.push_back("the tools' schemas are too many to find out all that the chat template leaves out of them");
        return;
      }
    }
  }

  void find_expectations() {
    const Json question = {{"role", "user"}, {"content", "beryl-question"}};
    const auto shows = [](const std::optional<std::string>& text, std::string_view what) {
      return text && text->find(what) != std::string::npos;
    };
    const Expectations any;
    Expectations parts, text;
    parts.content = Expectations::Content::kParts;
    const std::optional<std::string> as_parts = try_out(Json::array({question}), parts);
    const bool takes_parts = shows(as_parts, "beryl-question") && !shows(as_parts, "'beryl-question'");
    const bool takes_text = shows(try_out(Json::array({question}), any), "beryl-question");
    if (takes_text && !takes_parts) expectations_.content = Expectations::Content::kText;
    if (takes_parts && !takes_text) expectations_.content = Expectations::Content::kParts;

    const Json call = {{"id", "call00001"},
                       {"type", "function"},
                       {"function", {{"name", "beryl_tool"}, {"arguments", {{"beryl_key", "beryl_value"}}}}}};
    const Json messages = Json::array(
        {question,
         {{"role", "assistant"}, {"content", ""}, {"tool_calls", Json::array({call})}},
         {{"role", "tool"}, {"tool_call_id", "call00001"}, {"name", "beryl_tool"}, {"content", "beryl-result"}},
         {{"role", "assistant"}, {"content", "beryl-answer"}},
         question});
    text = parts = expectations_;
    text.arguments_as_text = true;
    const std::optional<std::string> as_object = try_out(messages, expectations_);
    // Python's way to print a dictionary is no form that a model was trained on.
    const bool takes_object = shows(as_object, "beryl_value") && !shows(as_object, "'beryl_key': 'beryl_value'");
    if (!takes_object && shows(try_out(messages, text), "beryl_value")) expectations_ = text;
  }

  std::string name_;
  const Tokenizer& tokenizer_;
  JinjaTemplate template_;
  Expectations expectations_;
  std::vector<std::string> missing_markers_;
};

}  // namespace

std::unique_ptr<ChatWriter> make_built_in_writer(ChatFormat format) {
  return std::make_unique<BuiltInWriter>(std::move(format));
}

std::unique_ptr<ChatWriter> make_template_writer(std::string name, std::string_view source,
                                                 const Tokenizer& tokenizer) {
  return std::make_unique<TemplateWriter>(std::move(name), source, tokenizer);
}

std::unique_ptr<ChatWriter> make_chat_writer(const Checkpoint& checkpoint, const Tokenizer& tokenizer,
                                             TemplateChoice choice, const std::string& file) {
  if (choice == TemplateChoice::kFile) {
    const MappedFile mapped(file);
    return make_template_writer(file, {reinterpret_cast<const char*>(mapped.bytes().data()), mapped.bytes().size()},
                                tokenizer);
  }
  std::string why_not;
  std::unique_ptr<ChatWriter> with_missing_markers;
  if (choice == TemplateChoice::kAuto) {
    if (const auto own = find_chat_template(checkpoint)) {
      try {
        auto writer = std::make_unique<TemplateWriter>("the model's chat template", *own, tokenizer);
        // Some models are trained on ChatML's markers, or on ones of their own, as plain text; on the others' none is.
        const auto is_of_others = [](const std::string& marker) {
          const std::optional<ChatFamily> family = find_family_of_marker(marker);
          return family && *family != ChatFamily::kChatMl;
        };
        const std::vector<std::string>& missing = writer->missing_markers();
        if (std::none_of(missing.begin(), missing.end(), is_of_others)) return writer;
        why_not = writer->missing_markers_line();
        with_missing_markers = std::move(writer);
      } catch (const Error& error) {
        why_not = error.what();
      }
    }
  }
  std::optional<ChatFormat> format = detect_chat_format(checkpoint, tokenizer);
  if (!format) {
    if (with_missing_markers) return with_missing_markers;
    if (!why_not.empty()) throw Error(ErrorCode::kUnsupported, fmt::format("{}: {}", checkpoint.path(), why_not));
    return nullptr;
  }
  if (why_not.empty()) return make_built_in_writer(std::move(*format));
  const std::string warning =
      fmt::format("{}; the built-in {} format is used instead", why_not, beryl::name(format->family));
  return std::make_unique<BuiltInWriter>(std::move(*format), warning);
}

}  // namespace beryl
