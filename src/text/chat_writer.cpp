#include "text/chat_writer.h"

#include <fmt/format.h>

#include <algorithm>

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

class TemplateWriter : public ChatWriter {
 public:
  TemplateWriter(std::string name, std::string_view source, const Tokenizer& tokenizer)
      : name_(std::move(name)), tokenizer_(tokenizer), template_(compile(name_, source)) {
    find_expectations();
  }

  ChatPrompt write(const Json& messages, const ChatOptions& options) const override {
    read_messages(messages, options.media_placeholders);  // throws for what no format can hold
    read_tools(options.tools);
    try {
      return to_prompt(render(messages, options, expectations_));
    } catch (const Error& error) {
      throw Error(error.code, fmt::format("{}: {}", name_, error.what()));
    }
  }
  std::string_view name() const override { return name_; }
  bool can_think() const override { return template_.reads("enable_thinking") || template_.reads("thinking"); }

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
    return parse_json<Json>("arguments of a tool call", text);
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

  // The text of a small conversation; nullopt when the template refuses it.
  std::optional<std::string> try_out(const Json& messages, const Expectations& expectations) const {
    try {
      std::string text;
      for (const RenderedPiece& piece : render(messages, {}, expectations)) text += piece.text;
      return text;
    } catch (const Error&) {
      return std::nullopt;
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
  if (choice == TemplateChoice::kAuto) {
    if (const auto own = find_chat_template(checkpoint)) {
      try {
        return make_template_writer("the model's chat template", *own, tokenizer);
      } catch (const Error& error) {
        why_not = error.what();
      }
    }
  }
  std::optional<ChatFormat> format = detect_chat_format(checkpoint, tokenizer);
  if (!format) {
    if (!why_not.empty()) throw Error(ErrorCode::kUnsupported, fmt::format("{}: {}", checkpoint.path(), why_not));
    return nullptr;
  }
  if (why_not.empty()) return make_built_in_writer(std::move(*format));
  const std::string warning =
      fmt::format("{}; the built-in {} format is used instead", why_not, beryl::name(format->family));
  return std::make_unique<BuiltInWriter>(std::move(*format), warning);
}

}  // namespace beryl
