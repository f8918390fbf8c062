#include "text/jinja_lexer.h"

#include <fmt/format.h>

#include <cstdlib>

#include "text/jinja_syntax.h"
#include "text/utf8.h"
#include "weights/quote.h"

namespace beryl::jinja {

namespace {

constexpr size_t kMaxTokens = 400000;

constexpr std::string_view kOperators[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
                                           "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"};

// White space as regular expressions of Python see it. Non-ASCII kinds are two or three bytes.
size_t space_length(std::string_view text, size_t at) {
  const DecodedCharacter c = decode_character(text, at);
  return c.well_formed && is_space(c.code_point) ? c.length : 0;
}

// \r\n and \r become \n; the last newline goes.
std::string normalize(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      text += source[i];
      continue;
    }
    text += '\n';
    if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source)
      : source_(normalize(is_valid_utf8(source) ? std::string(source) : repair_utf8(source))) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) root();
    push(TokenKind::kEnd);
    return std::move(tokens_);
  }

 private:
  Token& push(TokenKind kind) {
    if (tokens_.size() >= kMaxTokens)
      throw syntax_error(line_, fmt::format("a template of more than {} tokens", kMaxTokens));
    Token& token = tokens_.emplace_back();
    token.kind = kind;
    token.line = line_;
    return token;
  }
  bool here(std::string_view text) const { return std::string_view(source_).substr(at_).starts_with(text); }
  void advance(size_t n) {
    for (size_t i = 0; i < n; ++i) line_ += source_[at_ + i] == '\n';
    at_ += n;
  }
  void skip_space() {
    while (at_ < source_.size()) {
      const size_t n = space_length(source_, at_);
      if (n == 0) break;
      advance(n);
    }
  }
  void push_data(std::string_view data) {
    if (!data.empty()) push(TokenKind::kData).text = to_text(data);
  }

  // The next tag of any kind, from `from` on.
  size_t find_tag(size_t from) const {
    for (size_t at = source_.find('{', from); at != std::string::npos; at = source_.find('{', at + 1))
      if (at + 1 < source_.size() && (source_[at + 1] == '{' || source_[at + 1] == '%' || source_[at + 1] == '#'))
        return at;
    return std::string::npos;
  }

  // Data that ends where a tag with this sign begins. strips_line: blanks before it on its line go.
  std::string_view cut(std::string_view data, char sign, bool strips_line) const {
    if (sign == '-') {
      while (!data.empty()) {
        size_t start = data.size() - 1;
        while (start > 0 && (static_cast<uint8_t>(data[start]) & 0xC0) == 0x80) --start;
        if (space_length(data, start) != data.size() - start) break;
        data = data.substr(0, start);
      }
    } else if (sign != '+' && strips_line) {
      const size_t newline = data.rfind('\n');
      const size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
      if (begin > 0 || line_starting_) {
        size_t at = begin;
        while (at < data.size()) {
          const size_t n = space_length(data, at);
          if (n == 0) break;
          at += n;
        }
        if (at == data.size() && at > begin) data = data.substr(0, begin);
      }
    }
    return data;
  }

  void root() {
    const size_t tag = find_tag(at_);
    const std::string_view all = source_;
    if (tag == std::string::npos) {
      push_data(all.substr(at_));
      advance(source_.size() - at_);
      return;
    }
    const char kind = source_[tag + 1];
    const std::string_view data = all.substr(at_, tag - at_);
    const char sign =
        tag + 2 < source_.size() && (source_[tag + 2] == '-' || source_[tag + 2] == '+') ? source_[tag + 2] : '\0';
    push_data(cut(data, sign, kind != '{'));
    advance(tag - at_);
    const size_t raw_end = kind == '%' ? raw_length() : 0;
    if (raw_end > 0) {
      advance(raw_end);
      raw();
      return;
    }
    advance(2 + (sign != '\0'));
    line_starting_ = false;
    if (kind == '#') {
      comment();
    } else {
      push(kind == '{' ? TokenKind::kVariableBegin : TokenKind::kBlockBegin);
      tag_tokens(kind == '%');
    }
  }

  // Length of "{%- raw %}" at at_, with the white space that its end takes; 0 when it is another tag.
  size_t raw_length() const {
    size_t at = at_ + 2;
    if (at < source_.size() && (source_[at] == '-' || source_[at] == '+')) ++at;
    const auto skip = [&] {
      while (at < source_.size()) {
        const size_t n = space_length(source_, at);
        if (n == 0) break;
        at += n;
      }
    };
    const std::string_view all = source_;
    skip();
    if (!all.substr(at).starts_with("raw")) return 0;
    at += 3;
    skip();
    if (all.substr(at).starts_with("-%}")) {
      at += 3;
      skip();
    } else if (all.substr(at).starts_with("%}")) {
      at += 2;
    } else {
      return 0;
    }
    return at - at_;
  }

  void raw() {
    line_starting_ = at_ > 0 && source_[at_ - 1] == '\n';
    const std::string_view all = source_;
    for (size_t tag = source_.find("{%", at_); tag != std::string::npos; tag = source_.find("{%", tag + 1)) {
      size_t at = tag + 2;
      const char sign = at < source_.size() && (source_[at] == '-' || source_[at] == '+') ? source_[at] : '\0';
      at += sign != '\0';
      const auto skip = [&] {
        while (at < source_.size()) {
          const size_t n = space_length(source_, at);
          if (n == 0) break;
          at += n;
        }
      };
      skip();
      if (!all.substr(at).starts_with("endraw")) continue;
      at += 6;
      skip();
      bool trims = false, newline = false;
      if (all.substr(at).starts_with("-%}")) {
        at += 3;
        trims = true;
      } else if (all.substr(at).starts_with("+%}")) {
        at += 3;
      } else if (all.substr(at).starts_with("%}")) {
        at += 2;
        newline = true;
      } else {
        continue;
      }
      if (trims) skip();
      if (newline && at < source_.size() && source_[at] == '\n') ++at;
      push_data(cut(all.substr(at_, tag - at_), sign, true));
      advance(at - at_);
      line_starting_ = source_[at_ - 1] == '\n';
      return;
    }
    throw syntax_error(line_, "Missing end of raw directive");
  }

  void comment() {
    const size_t end = source_.find("#}", at_);
    if (end == std::string::npos) throw syntax_error(line_, "Missing end of comment tag");
    const char before = end > at_ ? source_[end - 1] : '\0';
    advance(end + 2 - at_);
    after_tag(before);
  }

  // White space after a block tag or a comment, by the sign before its end.
  void after_tag(char sign) {
    if (sign == '-')
      skip_space();
    else if (sign != '+' && at_ < source_.size() && source_[at_] == '\n')
      advance(1);
    line_starting_ = source_[at_ - 1] == '\n';
  }

  void tag_tokens(bool block) {
    const std::string_view end = block ? "%}" : "}}";
    const std::string_view trimmed_end = block ? "-%}" : "-}}";
    std::string brackets;  // closing ones that are awaited
    for (;;) {
      if (at_ >= source_.size()) return;  // the parser says what is missing
      if (brackets.empty()) {
        const bool plain = here(end), trims = here(trimmed_end), keeps = block && here("+%}");
        if (plain || trims || keeps) {
          push(block ? TokenKind::kBlockEnd : TokenKind::kVariableEnd);
          advance(plain ? 2 : 3);
          if (block) {
            after_tag(trims ? '-' : keeps ? '+' : '\0');
          } else {
            if (trims) skip_space();
            line_starting_ = source_[at_ - 1] == '\n';
          }
          return;
        }
      }
      if (const size_t n = space_length(source_, at_); n > 0) {
        advance(n);
        continue;
      }
      if (number() || name() || text_literal()) continue;
      op(brackets);
    }
  }

  static bool is_word(std::string_view text, size_t at) {
    const auto byte = static_cast<uint8_t>(text[at]);
    return byte == '_' || (byte >= '0' && byte <= '9') || ((byte | 0x20) >= 'a' && (byte | 0x20) <= 'z') ||
           (byte >= 0x80 && space_length(text, at) == 0);
  }
  bool digit_at(size_t at) const { return at < source_.size() && source_[at] >= '0' && source_[at] <= '9'; }

  // Digits with single underscores between them, from `at`; returns where they end.
  size_t digits_end(size_t at, const char* allowed) const {
    size_t end = at;
    const auto is = [&](size_t i) {
      return i < source_.size() && std::string_view(allowed).find(source_[i]) != std::string_view::npos;
    };
    while (is(end) || (end > at && end < source_.size() && source_[end] == '_' && is(end + 1))) ++end;
    return end;
  }

  bool number() {
    if (!digit_at(at_)) return false;
    constexpr const char* kDecimal = "0123456789";
    // A float: digits, then a fraction or an exponent; not after a point (a.1.5 is two subscripts).
    const bool after_point = at_ > 0 && source_[at_ - 1] == '.';
    size_t end = digits_end(at_, kDecimal);
    bool is_float = false;
    if (!after_point) {
      if (end < source_.size() && source_[end] == '.' && digit_at(end + 1)) {
        end = digits_end(end + 1, kDecimal);
        is_float = true;
      }
      if (end < source_.size() && (source_[end] | 0x20) == 'e') {
        size_t exponent = end + 1;
        if (exponent < source_.size() && (source_[exponent] == '+' || source_[exponent] == '-')) ++exponent;
        if (digit_at(exponent)) {
          end = digits_end(exponent, kDecimal);
          is_float = true;
        }
      }
    }
    if (is_float) {
      std::string digits;
      for (const char c : std::string_view(source_).substr(at_, end - at_))
        if (c != '_') digits += c;
      push(TokenKind::kNumber).number = std::strtod(digits.c_str(), nullptr);
      advance(end - at_);
      return true;
    }
    int base = 10;
    size_t begin = at_;
    if (source_[at_] == '0') {
      const char mark = at_ + 1 < source_.size() ? static_cast<char>(source_[at_ + 1] | 0x20) : '\0';
      const int marked = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 0;
      const char* allowed = marked == 16 ? "0123456789abcdefABCDEF" : marked == 8 ? "01234567" : "01";
      size_t from = at_ + 2;
      if (marked != 0 && from < source_.size() && source_[from] == '_') ++from;
      if (marked != 0 && digits_end(from, allowed) > from) {
        base = marked;
        begin = from;
        end = digits_end(from, allowed);
      } else {
        end = digits_end(at_, "0");
      }
    } else {
      end = digits_end(at_, kDecimal);
    }
    Integer value = 0;
    for (const char c : std::string_view(source_).substr(begin, end - begin)) {
      if (c == '_') continue;
      value = value * base + (c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
      if (value > (Integer{1} << 100)) throw syntax_error(line_, "an integer is too large");
    }
    push(TokenKind::kNumber).number = value;
    advance(end - at_);
    return true;
  }

  bool name() {
    if (!is_word(source_, at_)) return false;
    size_t end = at_;
    while (end < source_.size() && is_word(source_, end)) ++end;
    push(TokenKind::kName).word = source_.substr(at_, end - at_);
    advance(end - at_);
    return true;
  }

  bool text_literal() {
    const char quote_mark = source_[at_];
    if (quote_mark != '\'' && quote_mark != '"') return false;
    size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != quote_mark) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) return false;
    push(TokenKind::kText).text = unescape(std::string_view(source_).substr(at_ + 1, end - at_ - 1));
    advance(end + 1 - at_);
    return true;
  }

  // Python's escapes in a text literal.
  Text unescape(std::string_view literal) const {
    Text text;
    for (size_t at = 0; at < literal.size();) {
      if (literal[at] != '\\') {
        const DecodedCharacter c = decode_character(literal, at);
        text += c.code_point;
        at += c.length;
        continue;
      }
      const char kind = at + 1 < literal.size() ? literal[at + 1] : '\0';
      at += 2;
      const auto hex = [&](size_t n) {
        uint32_t code = 0;
        for (size_t i = 0; i < n; ++i, ++at) {
          const char c = at < literal.size() ? literal[at] : '\0';
          const int digit = c >= '0' && c <= '9'                     ? c - '0'
                            : (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10
                                                                     : -1;
          if (digit < 0) throw syntax_error(line_, fmt::format("truncated \\{} escape", kind));
          code = code * 16 + static_cast<uint32_t>(digit);
        }
        if (code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF))
          throw syntax_error(line_, fmt::format("\\{} escape of what is no character", kind));
        text += code;
      };
      switch (kind) {
        case '\n': break;
        case '\\': text += U'\\'; break;
        case '\'': text += U'\''; break;
        case '"': text += U'"'; break;
        case 'a': text += U'\a'; break;
        case 'b': text += U'\b'; break;
        case 'f': text += U'\f'; break;
        case 'n': text += U'\n'; break;
        case 'r': text += U'\r'; break;
        case 't': text += U'\t'; break;
        case 'v': text += U'\v'; break;
        case 'x': hex(2); break;
        case 'u': hex(4); break;
        case 'U': hex(8); break;
        case 'N': throw syntax_error(line_, "\\N{...} escapes are not supported");
        case '0':
        case '1':
        case '2':
        case '3':
        case '4':
        case '5':
        case '6':
        case '7': {
          uint32_t code = 0;
          --at;
          for (int i = 0; i < 3 && at < literal.size() && literal[at] >= '0' && literal[at] <= '7'; ++i)
            code = code * 8 + static_cast<uint32_t>(literal[at++] - '0');
          text += code;
          break;
        }
        default:  // what is no escape stays, backslash and all
          text += U'\\';
          --at;
          if (at < literal.size()) {
            const DecodedCharacter c = decode_character(literal, at);
            if (c.code_point >= 0x80) {  // Python sees the escape that stands for it, \xe4 and the like
              text += to_text(c.code_point < 0x100     ? fmt::format("x{:02x}", c.code_point)
                              : c.code_point < 0x10000 ? fmt::format("u{:04x}", c.code_point)
                                                       : fmt::format("U{:08x}", c.code_point));
            } else {
              text += c.code_point;
            }
            at += c.length;
          }
      }
    }
    return text;
  }

  void op(std::string& brackets) {
    for (const std::string_view one : kOperators) {
      if (!here(one)) continue;
      const char c = one[0];
      if (c == '(' || c == '[' || c == '{') brackets += c == '(' ? ')' : c == '[' ? ']' : '}';
      if (c == ')' || c == ']' || c == '}') {
        if (brackets.empty()) throw syntax_error(line_, fmt::format("unexpected '{}'", c));
        if (brackets.back() != c)
          throw syntax_error(line_, fmt::format("unexpected '{}', expected '{}'", c, brackets.back()));
        brackets.pop_back();
      }
      push(TokenKind::kOperator).word = one;
      advance(one.size());
      return;
    }
    throw syntax_error(line_, fmt::format("unexpected char {}", quote(std::string_view(source_).substr(at_, 1))));
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;  // the tag before ended a line
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

}  // namespace beryl::jinja
