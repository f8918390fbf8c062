#include "text/chat_format.h"

#include <algorithm>
#include <filesystem>

#include <fmt/format.h>

#include "base/error.h"
#include "base/mapped_file.h"
#include "text/chat_message.h"
#include "weights/json_text.h"
#include "weights/quote.h"

namespace beryl {

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxTemplateBytes = 4 << 20;
constexpr std::string_view kSmolLmSystem = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";

// A format's turn markers; a vocabulary that has them all can write it.
struct Markers {
  ChatFamily family;
  std::vector<std::string_view> tokens;
};
const std::vector<Markers>& all_markers() {
  static const std::vector<Markers> markers = {
      {ChatFamily::kGemma4, {"<|turn>", "<turn|>"}},
      {ChatFamily::kGemma3, {"<start_of_turn>", "<end_of_turn>"}},
      {ChatFamily::kLlama3, {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}},
      {ChatFamily::kChatMl, {"<|im_start|>", "<|im_end|>"}},
  };
  return markers;
}

std::string read_text(const std::filesystem::path& path) {
  const MappedFile file(path.string());
  if (file.bytes().size() > kMaxTemplateBytes)
    throw Error(ErrorCode::kBadInput, fmt::format("{}: {} bytes, expected at most {}", path.string(),
                                                  file.bytes().size(), kMaxTemplateBytes));
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

// The chat template inside a tokenizer_config.json: a string, or a list of named ones.
std::optional<std::string> template_of_config(const Json& config) {
  if (!config.is_object() || !config.contains("chat_template")) return std::nullopt;
  const Json& value = config["chat_template"];
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return std::nullopt;
  std::optional<std::string> chosen;
  for (const Json& entry : value) {
    if (!entry.is_object() || !entry.contains("template") || !entry["template"].is_string()) continue;
    const bool is_default = entry.contains("name") && entry["name"] == "default";
    if (!chosen || is_default) chosen = entry["template"].get<std::string>();
  }
  return chosen;
}

std::string lower(std::string text) {
  for (char& c : text)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return text;
}

}  // namespace

std::string_view name(ChatFamily family) {
  switch (family) {
    case ChatFamily::kGemma4: return "Gemma 4";
    case ChatFamily::kGemma3: return "Gemma 3";
    case ChatFamily::kLlama3: return "Llama 3";
    case ChatFamily::kChatMl: return "ChatML";
  }
  return "";
}

std::string ChatPrompt::text() const {
  std::string all;
  for (const PromptPiece& piece : pieces) all += piece.text;
  return all;
}

ChatPrompt format_chat(const ChatFormat& format, const Json& messages, const ChatOptions& options) {
  const std::vector<Message> read = read_messages(messages, options.media_placeholders);
  switch (format.family) {
    case ChatFamily::kGemma4: return format_gemma4(format, read, options);
    case ChatFamily::kGemma3: return format_gemma3(read, options);
    case ChatFamily::kLlama3: return format_llama3(format, read, options);
    case ChatFamily::kChatMl: return format_chatml(format, read, options);
  }
  BERYL_CHECK(false, "a chat family without a formatter");
  return {};
}

std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const ChatPrompt& prompt) {
  std::vector<int32_t> ids;
  std::string text;   // neighbouring text pieces are one text: merges may cross them
  const auto flush = [&] {
    if (text.empty()) return;
    const std::vector<int32_t> encoded = tokenizer.encode(text, /*parse_special=*/false);
    ids.insert(ids.end(), encoded.begin(), encoded.end());
    text.clear();
  };
  for (const PromptPiece& piece : prompt.pieces) {
    if (!piece.control) {
      text += piece.text;
      continue;
    }
    flush();
    const std::optional<int32_t> id = tokenizer.find_token(piece.text);
    if (!id)
      throw Error(ErrorCode::kBadInput,
                  fmt::format("the chat format needs the token {}, which this model's vocabulary ({}) does not have",
                              quote(piece.text), tokenizer.family()));
    ids.push_back(*id);
  }
  flush();
  const std::optional<int32_t> bos = tokenizer.bos_id();
  if (tokenizer.adds_bos() && bos && (ids.empty() || ids.front() != *bos)) ids.insert(ids.begin(), *bos);
  return ids;
}

std::optional<ChatFamily> find_family_of_marker(std::string_view token) {
  for (const Markers& markers : all_markers())
    if (markers.tokens.front() == token) return markers.family;
  return std::nullopt;
}

std::optional<std::string> find_chat_template(const Checkpoint& checkpoint) {
  if (checkpoint.container() == Container::kGguf) return checkpoint.metadata().string("tokenizer.chat_template");
  namespace fs = std::filesystem;
  const fs::path folder = checkpoint.path();
  if (fs::exists(folder / "chat_template.jinja")) return read_text(folder / "chat_template.jinja");
  for (const char* file : {"chat_template.json", "tokenizer_config.json"}) {
    const fs::path path = folder / file;
    if (!fs::exists(path)) continue;
    if (auto found = template_of_config(parse_json<Json>(path.string(), read_text(path)))) return found;
  }
  return std::nullopt;
}

std::optional<ChatFormat> detect_chat_format(const Checkpoint& checkpoint, const Tokenizer& tokenizer) {
  const Metadata& metadata = checkpoint.metadata();
  const bool gguf = checkpoint.container() == Container::kGguf;
  const std::string architecture = metadata.string(gguf ? "general.architecture" : "model_type").value_or("");
  const std::optional<std::string> model_template = find_chat_template(checkpoint);

  std::vector<const Markers*> possible;
  for (const Markers& markers : all_markers())
    if (std::all_of(markers.tokens.begin(), markers.tokens.end(),
                    [&](auto t) { return tokenizer.find_token(t).has_value(); }))
      possible.push_back(&markers);
  if (possible.empty()) return std::nullopt;

  // The template names its markers; the architecture has one format that its models were trained on; else the first.
  const Markers* chosen = nullptr;
  if (model_template)
    for (const Markers* markers : possible)
      if (chosen == nullptr && contains(*model_template, markers->tokens.front())) chosen = markers;
  const bool by_template = chosen != nullptr;
  const ChatFamily expected = architecture.starts_with("gemma4")  ? ChatFamily::kGemma4
                              : architecture.starts_with("gemma") ? ChatFamily::kGemma3
                                                                  : ChatFamily::kLlama3;
  for (const Markers* markers : possible)
    if (chosen == nullptr && markers->family == expected) chosen = markers;
  if (chosen == nullptr) chosen = possible.front();

  ChatFormat format;
  format.family = chosen->family;
  if (!by_template)
    format.warnings.push_back(fmt::format(
        "{}: {}; the built-in {} format is used, by the architecture '{}' and the markers in the vocabulary",
        checkpoint.path(), model_template ? "the chat template uses other turn markers" : "there is no chat template",
        name(format.family), architecture));
  if (format.family == ChatFamily::kGemma3 && expected == ChatFamily::kGemma4)
    format.warnings.push_back(
        fmt::format("{}: the vocabulary has no <|turn>, Gemma 4's turn marker; Gemma 3's are used", checkpoint.path()));

  switch (format.family) {
    case ChatFamily::kGemma4: {
      // The templates of E2B and E4B never write an empty thought; without a template their per-layer inputs tell.
      const std::string key = gguf ? architecture + ".embedding_length_per_layer_input" : "hidden_size_per_layer_input";
      const int64_t per_layer =
          metadata.integer(key).value_or(gguf ? 0 : metadata.integer("text_config." + key).value_or(0));
      format.empty_thought = by_template ? contains(*model_template, "<|channel>thought\\n<channel|>") ||
                                               contains(*model_template, "<|channel>thought\n<channel|>")
                                         : per_layer == 0;
      break;
    }
    case ChatFamily::kLlama3:
      format.dated_system = by_template ? contains(*model_template, "Cutting Knowledge Date")
                                        : tokenizer.find_token("<|eom_id|>").has_value();   // since 3.1
      format.todays_date = by_template && contains(*model_template, "strftime_now");
      break;
    case ChatFamily::kChatMl: {
      const std::string model_name = lower(metadata.string(gguf ? "general.name" : "_name_or_path").value_or(""));
      if (by_template ? contains(*model_template, kSmolLmSystem) : contains(model_name, "smollm"))
        format.default_system = kSmolLmSystem;
      break;
    }
    case ChatFamily::kGemma3:
      break;
  }
  return format;
}

}  // namespace beryl
