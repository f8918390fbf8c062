#include "text/reply_parser.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "text/utf8.h"
#include "weights/json_text.h"

namespace beryl {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kCallTag = "<tool_call>", kCallEndTag = "</tool_call>";
constexpr std::string_view kThoughtName = "thought\n";
constexpr int kMaxDepth = 64;

// Empty: it is no JSON, or of a kind that would lose some of its bytes (a key twice) or go too deep.
std::optional<Json> json_of(std::string_view text) {
  try {
    return parse_json<Json>("a call", text);
  } catch (const Error&) {
    return std::nullopt;
  }
}

bool is_letter_or_digit(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || static_cast<unsigned char>(c) >= 0x80;
}

// Quotes and dashes of typography (U+2000 to U+203F) are no letters.
bool is_identifier(std::string_view text) {
  const auto fits = [](char c) { return is_letter_or_digit(c) || c == '_' || c == '-' || c == '.' || c == '$'; };
  return !text.empty() && std::all_of(text.begin(), text.end(), fits) && text.find("\xE2\x80") == std::string_view::npos;
}

bool is_bare_key(std::string_view text) {
  return !text.empty() && text.find_first_of(kNotInGemmaKeys) == std::string_view::npos && text.find("\xE2\x80") == std::string_view::npos;
}

// A quote between two letters is an apostrophe.
bool is_apostrophe(std::string_view text, size_t at) {
  return at > 0 && at + 1 < text.size() && is_letter_or_digit(text[at - 1]) && is_letter_or_digit(text[at + 1]);
}

// Whether an unquoted text can only be one value: nothing in it opens a string, a list or an object that the commas and braces around it may
// belong to, and nothing looks like a further member whose comma is missing.
bool is_plain_value(std::string_view text) {
  if (text.find_first_of("\r\n\"`{[") != std::string_view::npos) return false;
  if (std::count(text.begin(), text.end(), '(') != std::count(text.begin(), text.end(), ')')) return false;
  for (std::string_view quote : {"\u2018", "\u201C", "\u201D", "\u201E"})
    if (text.find(quote) != std::string_view::npos) return false;
  for (size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '\'' && !is_apostrophe(text, at)) return false;
    if (text[at] != ':') continue;
    const std::string_view before = trim(text.substr(0, at));
    const size_t space = before.find_last_of(" \t");
    const std::string_view word = before.substr(space == std::string_view::npos ? before.size() : space + 1);
    // "at 10:30" is a time.
    if (is_identifier(word) && !(word[0] >= '0' && word[0] <= '9')) return false;
  }
  return true;
}

// Gemma 4's values: strings between <|"|>, objects and arrays as in JSON but for unquoted keys. What models write instead is read where it
// can mean one thing only: strings in " or ', and strings without quotes. All else makes the call unreadable: it is better shown than
// made with other arguments.
class GemmaReader {
 public:
  explicit GemmaReader(std::string_view text) : text_(text) {}

  std::optional<ParsedCall> read_call() {
    if (!take("call:")) return std::nullopt;
    const size_t brace = text_.find('{', at_);
    if (brace == std::string_view::npos || brace == at_) return std::nullopt;
    ParsedCall call;
    call.name = std::string(trim(text_.substr(at_, brace - at_)));
    at_ = brace;
    const std::optional<Json> arguments = read_value(0);
    if (call.name.empty() || !arguments || !arguments->is_object() || !trim(text_.substr(at_)).empty()) return std::nullopt;
    call.arguments = arguments->dump(-1, ' ', false, Json::error_handler_t::replace);
    return call;
  }

 private:
  static constexpr std::string_view kQuote = "<|\"|>";

  bool take(std::string_view expected) {
    if (!text_.substr(at_).starts_with(expected)) return false;
    at_ += expected.size();
    return true;
  }
  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) ++at_;
  }
  // One of the three kinds of quotes, or none.
  std::string_view quote_here() const {
    for (std::string_view mark : {kQuote, std::string_view("\""), std::string_view("'")})
      if (text_.substr(at_).starts_with(mark)) return mark;
    return {};
  }
  // What stands between two of them. Only between " and ' is there an escape: JSON's, and \'.
  std::optional<std::string> read_quoted(std::string_view mark) {
    at_ += mark.size();
    size_t end = at_;
    bool escapes = false;
    for (;; ++end) {
      if (mark == kQuote) end = std::min(text_.find(mark, end), text_.size());
      if (end >= text_.size()) return std::nullopt;
      if (mark != kQuote && text_[end] == '\\') {
        escapes = true;
        ++end;
      } else if (text_.substr(end).starts_with(mark) && !(mark == "'" && end > at_ && is_apostrophe(text_, end))) {
        break;
      }
    }
    std::string value(text_.substr(at_, end - at_));
    at_ = end + mark.size();
    if (!escapes) return value;
    std::string json = "\"";
    for (size_t i = 0; i < value.size(); ++i) {
      if (value[i] == '\\' && value[i + 1] == '\'') {
        json += value[++i];
      } else if (value[i] == '\\') {
        json += value[i];
        json += value[++i];
      } else {
        if (value[i] == '"') json += '\\';
        json += value[i];
      }
    }
    const std::optional<Json> read = json_of(json + '"');
    return read && read->is_string() ? std::optional(read->get<std::string>()) : std::nullopt;
  }

  std::optional<Json> read_value(int depth) {
    if (depth > kMaxDepth) return std::nullopt;
    skip_space();
    if (const std::string_view mark = quote_here(); !mark.empty()) {
      const std::optional<std::string> value = read_quoted(mark);
      return value ? std::optional<Json>(*value) : std::nullopt;
    }
    if (take("{")) return read_members(Json::object(), '}', depth);
    if (take("[")) return read_members(Json::array(), ']', depth);
    const size_t end = std::min(text_.find_first_of(",}]", at_), text_.size());
    const std::string_view bare = trim(text_.substr(at_, end - at_));
    at_ = end;
    if (bare.empty()) return std::nullopt;
    if (std::optional<Json> value = json_of(bare)) return value;
    return is_plain_value(bare) ? std::optional<Json>(std::string(bare)) : std::nullopt;
  }
  std::optional<Json> read_members(Json whole, char end, int depth) {
    skip_space();
    if (take({&end, 1})) return whole;
    for (;;) {
      skip_space();
      std::string key;
      if (end == '}') {
        if (const std::string_view mark = quote_here(); !mark.empty()) {
          std::optional<std::string> quoted = read_quoted(mark);
          if (!quoted) return std::nullopt;
          key = std::move(*quoted);
        } else {
          const size_t colon = text_.find(':', at_);
          if (colon == std::string_view::npos) return std::nullopt;
          key = std::string(trim(text_.substr(at_, colon - at_)));
          if (!is_bare_key(key)) return std::nullopt;
          at_ = colon;
        }
        skip_space();
        if (key.empty() || whole.contains(key) || !take(":")) return std::nullopt;
      }
      std::optional<Json> value = read_value(depth + 1);
      if (!value) return std::nullopt;
      if (end == '}') {
        whole[key] = std::move(*value);
      } else {
        whole.push_back(std::move(*value));
      }
      skip_space();
      if (take({&end, 1})) return whole;
      if (!take(",")) return std::nullopt;
    }
  }

  std::string_view text_;
  size_t at_ = 0;
};

std::optional<ParsedCall> call_of(const Json& value) {
  if (!value.is_object()) return std::nullopt;
  const Json* object = &value;
  if (const auto function = value.find("function"); function != value.end() && function->is_object()) object = &*function;
  const auto name = object->find("name");
  if (name == object->end() || !name->is_string()) return std::nullopt;
  ParsedCall call;
  call.name = name->get<std::string>();
  call.arguments = "{}";
  for (const char* key : {"arguments", "parameters"}) {
    const auto found = object->find(key);
    if (found == object->end() || found->is_null()) continue;
    // Some models write the object as text.
    const std::optional<Json> inner = found->is_string() ? json_of(found->get_ref<const std::string&>()) : *found;
    if (!inner || !inner->is_object()) return std::nullopt;
    call.arguments = inner->dump(-1, ' ', false, Json::error_handler_t::replace);
  }
  return call;
}

}  // namespace

std::vector<ParsedCall> parse_gemma_call(std::string_view text) {
  std::optional<ParsedCall> call = GemmaReader(trim(text)).read_call();
  return call ? std::vector<ParsedCall>{std::move(*call)} : std::vector<ParsedCall>();
}

std::vector<ParsedCall> parse_json_calls(std::string_view text) {
  const std::optional<Json> json = json_of(text);
  if (!json) return {};
  std::vector<ParsedCall> calls;
  const Json list = json->is_array() ? *json : Json::array({*json});
  for (const Json& each : list) {
    std::optional<ParsedCall> call = call_of(each);
    if (!call) return {};
    calls.push_back(std::move(*call));
  }
  return calls;
}

ThoughtTokens find_thought_tokens(const Tokenizer& tokenizer) {
  for (const auto& [begin, end] : {std::pair("<|channel>", "<channel|>"), std::pair("<think>", "</think>")}) {
    const ThoughtTokens tokens = {tokenizer.find_token(begin), tokenizer.find_token(end)};
    if (tokens.begin && tokens.end) return tokens;
  }
  return {};
}

ReplyParser::ReplyParser(const Tokenizer& tokenizer, bool in_thought, bool finds_calls, std::vector<std::string> tool_names)
    : tokenizer_(tokenizer),
      stream_(tokenizer),
      named_stream_(tokenizer, true),
      thought_(find_thought_tokens(tokenizer)),
      tool_names_(std::move(tool_names)) {
  const auto find_calls = [&](std::string_view begin, std::string_view end) {
    call_begin_ = tokenizer.find_token(begin);
    call_end_ = tokenizer.find_token(end);
    if (!call_end_) call_begin_.reset();
    if (!call_begin_) call_end_.reset();
    return call_begin_.has_value();
  };
  if (finds_calls) {
    gemma_calls_ = find_calls("<|tool_call>", "<tool_call|>");
    if (!gemma_calls_) text_calls_ = undecided_ = !find_calls(kCallTag, kCallEndTag);
    call_begin_text_ = gemma_calls_ ? "<|tool_call>" : kCallTag;
    call_end_text_ = gemma_calls_ ? "<tool_call|>" : kCallEndTag;
  }
  if (in_thought) {
    state_ = State::kThought;
    // The prompt has written the name already.
  }
}

void ReplyParser::push(int32_t id, ReplyDelta& delta) {
  if (thought_.begin && id == *thought_.begin && state_ == State::kContent) {
    add(stream_.finish(), delta);
    state_ = State::kThought;
    names_thought_ = tokenizer_.token_text(id) == "<|channel>";
    return;
  }
  if (thought_.end && id == *thought_.end && state_ == State::kThought) {
    add(stream_.finish(), delta);
    delta.reasoning += held_;
    held_.clear();
    names_thought_ = false;
    state_ = State::kContent;
    return;
  }
  // A call that nobody closed ends where the next one begins; but within one that can not be read yet the token may be a string's.
  if (call_begin_ && id == *call_begin_ && (state_ != State::kCall || !parse_call(call_).empty())) {
    if (state_ == State::kCall) {
      call_ += named_stream_.finish();
      end_call(false, delta);
    }
    add(stream_.finish(), delta);
    if (state_ == State::kThought) delta.reasoning += held_, held_.clear(), names_thought_ = false;
    state_ = State::kCall;
    call_.clear();
    return;
  }
  if (call_end_ && id == *call_end_ && state_ == State::kCall) {
    call_ += named_stream_.finish();
    end_call(true, delta);
    return;
  }
  if (state_ == State::kCall) {
    // The quotes of Gemma 4's strings are tokens.
    call_ += named_stream_.push(id);
  } else {
    add(stream_.push(id), delta);
  }
}

void ReplyParser::finish(ReplyDelta& delta) {
  if (state_ == State::kCall) {
    call_ += named_stream_.finish();
    end_call(false, delta);
    return;
  }
  add(stream_.finish(), delta);
  if (state_ == State::kThought) {
    delta.reasoning += held_;
    held_.clear();
  } else {
    decide_text_call(true, delta);
  }
}

void ReplyParser::add(const std::string& text, ReplyDelta& delta) {
  if (text.empty()) return;
  if (state_ == State::kContent) return add_content(text, delta);
  if (!names_thought_) {
    delta.reasoning += text;
    return;
  }
  held_ += text;
  if (kThoughtName.starts_with(held_) && held_.size() < kThoughtName.size()) return;
  delta.reasoning += held_.starts_with(kThoughtName) ? held_.substr(kThoughtName.size()) : held_;
  held_.clear();
  names_thought_ = false;
}

void ReplyParser::add_content(const std::string& text, ReplyDelta& delta) {
  if (!undecided_) {
    delta.content += text;
    return;
  }
  held_ += text;
  decide_text_call(false, delta);
}

// held_: white space, and then perhaps calls.
void ReplyParser::decide_text_call(bool at_end, ReplyDelta& delta) {
  while (undecided_ && !held_.empty()) {
    const size_t begin = held_.find_first_not_of(" \t\r\n");
    const std::string_view rest = begin == std::string::npos ? std::string_view() : std::string_view(held_).substr(begin);
    std::vector<ParsedCall> calls;
    size_t end = std::string::npos;   // of what the calls were read from
    if (rest.starts_with(kCallTag)) {
      const size_t closing = rest.find(kCallEndTag);
      if (closing == std::string_view::npos && !at_end) return;
      calls = parse_json_calls(rest.substr(kCallTag.size(), closing == std::string_view::npos ? closing : closing - kCallTag.size()));
      end = closing == std::string_view::npos ? held_.size() : begin + closing + kCallEndTag.size();
    } else if (rest.starts_with('{')) {
      // A bare object: a call if the whole reply is one.
      if (!at_end) return;
      calls = parse_json_calls(rest);
      const auto is_known = [&](const ParsedCall& call) {
        return tool_names_.empty() || std::find(tool_names_.begin(), tool_names_.end(), call.name) != tool_names_.end();
      };
      if (!std::all_of(calls.begin(), calls.end(), is_known)) calls.clear();
      end = held_.size();
    } else if (!at_end && (rest.empty() || kCallTag.starts_with(rest))) {
      return;
    }
    if (calls.empty()) {
      undecided_ = false;
      break;
    }
    for (ParsedCall& call : calls) delta.calls.push_back(std::move(call));
    held_.erase(0, end);
  }
  if (undecided_ && !at_end) return;
  delta.content += held_;
  held_.clear();
}

std::vector<ParsedCall> ReplyParser::parse_call(std::string_view text) const {
  return gemma_calls_ ? parse_gemma_call(text) : parse_json_calls(text);
}

void ReplyParser::end_call(bool closed, ReplyDelta& delta) {
  state_ = State::kContent;
  std::vector<ParsedCall> calls = parse_call(call_);
  if (calls.empty()) delta.content += call_begin_text_ + call_ + (closed ? call_end_text_ : "");
  for (ParsedCall& call : calls) delta.calls.push_back(std::move(call));
  call_.clear();
}

}  // namespace beryl
