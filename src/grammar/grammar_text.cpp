#include "grammar/grammar_text.h"

#include <algorithm>
#include <cctype>

#include <fmt/format.h>

namespace beryl {

std::string with_literal_parts(const std::string& grammar, const std::vector<LiteralPart>& parts) {
  std::string result;
  int macro_depth = 0;
  for (size_t i = 0; i < grammar.size();) {
    const char c = grammar[i];
    if (c == '[') {  // a class, which may hold anything
      const size_t begin = i++;
      while (i < grammar.size() && grammar[i] != ']') i += grammar[i] == '\\' ? 2 : 1;
      i = std::min(i + 1, grammar.size());
      result += grammar.substr(begin, i - begin);
      continue;
    }
    if (c != '"') {
      // A name right before a bracket is a macro's.
      if (c == '(' && (macro_depth > 0 || (i > 0 && std::isalnum(static_cast<unsigned char>(grammar[i - 1])) != 0)))
        ++macro_depth;
      if (c == ')' && macro_depth > 0) --macro_depth;
      result += c;
      ++i;
      continue;
    }
    size_t end = i + 1;
    while (end < grammar.size() && grammar[end] != '"') end += grammar[end] == '\\' ? 2 : 1;
    std::string_view literal = std::string_view(grammar).substr(i + 1, std::min(end, grammar.size()) - i - 1);
    i = std::min(end + 1, grammar.size());
    std::string pieces, piece;
    const auto add = [&](const std::string& text) { pieces += fmt::format("{}{}", pieces.empty() ? "" : " ", text); };
    const auto flush = [&] {
      if (!piece.empty()) add(fmt::format("\"{}\"", piece));
      piece.clear();
    };
    while (!literal.empty()) {
      const auto part =
          macro_depth > 0 ? parts.end() : std::find_if(parts.begin(), parts.end(), [&](const LiteralPart& one) {
            return literal.starts_with(one.text);
          });
      if (part != parts.end()) {
        flush();
        add(part->replacement);
        literal.remove_prefix(part->text.size());
      } else {
        const size_t n = literal[0] == '\\' && literal.size() > 1 ? 2 : 1;
        piece += literal.substr(0, n);
        literal.remove_prefix(n);
      }
    }
    flush();
    result += pieces.empty() ? "\"\"" : pieces;
  }
  return result;
}

std::string with_rule_renamed(const std::string& grammar, std::string_view rule, std::string_view name) {
  const auto is_of_name = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-' || c == '.'; };
  std::string result;
  for (size_t i = 0; i < grammar.size();) {
    const size_t begin = i;
    const char c = grammar[i++];
    if (c == '"' || c == '[') {  // a literal or a class
      const char end = c == '"' ? '"' : ']';
      while (i < grammar.size() && grammar[i] != end) i += grammar[i] == '\\' ? 2 : 1;
      i = std::min(i + 1, grammar.size());
    } else if (is_of_name(c)) {
      while (i < grammar.size() && is_of_name(grammar[i])) ++i;
    }
    const std::string_view part = std::string_view(grammar).substr(begin, i - begin);
    result += part == rule ? name : part;
  }
  return result;
}

}  // namespace beryl
