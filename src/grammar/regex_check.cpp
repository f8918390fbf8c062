#include "grammar/regex_check.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "weights/quote.h"

namespace beryl {
namespace {

constexpr size_t kMaxDepth = 64;
constexpr int64_t kMaxCount = 10000;     // of one quantifier
constexpr int64_t kMaxAtoms = 50000;     // characters and classes, each as often as it may be repeated
constexpr size_t kMaxGrammarDepth = 200;

class RegexCheck {
 public:
  RegexCheck(const std::string& name, std::string_view regex) : name_(name), regex_(regex) {}

  std::string run() {
    if (at('^')) ++i_;
    std::string result(regex_.substr(0, i_));
    groups_.push_back({});
    while (i_ < regex_.size()) {
      const size_t begin = i_;
      item();
      result += regex_[begin] == '.' ? "[^\\n\\r]" : regex_.substr(begin, i_ - begin);
    }
    if (groups_.size() > 1) bad(groups_.back().begin, "this bracket is not closed");
    if (total(groups_.back()) > kMaxAtoms) too_large(0);
    return result;
  }

 private:
  struct Group {
    size_t begin = 0;
    int64_t n_atoms = 0;      // of all alternatives
    int64_t last_atoms = -1;  // of what a quantifier would repeat; -1: there is nothing
  };

  [[noreturn]] void bad(size_t place, std::string_view why) const {
    throw Error(ErrorCode::kBadInput, fmt::format("{}: at byte {} of {}: {}", name_, place, quote(regex_), why));
  }
  [[noreturn]] void unsupported(size_t place, std::string_view what) const {
    throw Error(ErrorCode::kUnsupported, fmt::format("{}: at byte {} of {}: {} cannot be expressed", name_, place, quote(regex_), what));
  }
  [[noreturn]] void too_large(size_t place) const {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: at byte {} of {}: repetitions that come to more than {} characters", name_, place, quote(regex_), kMaxAtoms));
  }

  bool at(char c) const { return i_ < regex_.size() && regex_[i_] == c; }
  static int64_t total(const Group& group) { return group.n_atoms + std::max<int64_t>(group.last_atoms, 0); }

  void atom(int64_t n) {
    Group& group = groups_.back();
    group.n_atoms = total(group);
    group.last_atoms = n;
    if (total(group) > kMaxAtoms) too_large(i_);
  }

  void item() {
    const size_t begin = i_;
    const char c = regex_[i_++];
    switch (c) {
      case '(': open(begin); return;
      case ')': {
        if (groups_.size() == 1) bad(begin, "this bracket was not opened");
        const int64_t n = total(groups_.back());
        groups_.pop_back();
        atom(n);
        return;
      }
      case '|': {
        Group& group = groups_.back();
        group.n_atoms = total(group);
        group.last_atoms = -1;
        return;
      }
      case '*':
      case '+':
      case '?': quantifier(begin, c == '?' ? 1 : 2); return;
      case '{': counted(begin); return;
      case '}':
      case ']': unsupported(begin, fmt::format("'{}' that closes nothing", c));
      case '[': character_class(begin); return;
      case '\\': escape(begin, /*in_class=*/false); break;
      case '^': unsupported(begin, "'^' anywhere but at the start");
      case '$':
        if (i_ != regex_.size()) unsupported(begin, "'$' anywhere but at the end");
        groups_.back().n_atoms = total(groups_.back());
        groups_.back().last_atoms = -1;
        return;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) unsupported(begin, "a control character that is not escaped");
        while (i_ < regex_.size() && (static_cast<unsigned char>(regex_[i_]) & 0xc0) == 0x80) ++i_;   // the rest of a character
    }
    atom(1);
  }

  void open(size_t begin) {
    if (groups_.size() > kMaxDepth) unsupported(begin, fmt::format("nesting deeper than {} brackets", kMaxDepth));
    if (at('?')) {
      ++i_;
      if (at(':')) {
        ++i_;
      } else if (at('<') && i_ + 1 < regex_.size() && std::isalpha(static_cast<unsigned char>(regex_[i_ + 1])) != 0) {
        const size_t end = regex_.find('>', i_);
        if (end == regex_.npos) bad(begin, "the group's name does not end");
        for (size_t k = i_ + 1; k < end; ++k)
          if (std::isalpha(static_cast<unsigned char>(regex_[k])) == 0) unsupported(k, "a group's name of more than letters");
        i_ = end + 1;
      } else {
        unsupported(begin, "a look around, a flag or another group than (?:…) and (?<name>…)");
      }
    }
    groups_.push_back({begin, 0, -1});
  }

  void quantifier(size_t begin, int64_t count) {
    Group& group = groups_.back();
    if (group.last_atoms < 0) bad(begin, "there is nothing to repeat");
    group.n_atoms += group.last_atoms * count;   // at most kMaxAtoms * kMaxCount
    group.last_atoms = -1;
    if (group.n_atoms > kMaxAtoms) too_large(begin);
    if (at('?')) ++i_;                           // lazy: the same texts
    if (at('+')) unsupported(i_, "a possessive quantifier");
    // What is repeated as a whole from here on would be a group.
  }

  int64_t number() {
    int64_t value = -1;
    for (; i_ < regex_.size() && std::isdigit(static_cast<unsigned char>(regex_[i_])) != 0; ++i_) {
      value = std::max<int64_t>(value, 0) * 10 + (regex_[i_] - '0');
      if (value > kMaxCount) unsupported(i_, fmt::format("a count above {}", kMaxCount));
    }
    return value;
  }

  void counted(size_t begin) {
    const int64_t least = number();
    int64_t most = least;
    bool is_open = false;
    if (at(',')) {
      ++i_;
      most = number();
      is_open = most < 0;
    }
    if (least < 0 || !at('}')) unsupported(begin, "'{' that begins no count");
    ++i_;
    if (!is_open && most < least) bad(begin, "the count's end is below its start");
    quantifier(begin, std::max<int64_t>(is_open ? least + 1 : most, 1));
  }

  void hex(size_t begin, size_t n) {
    for (size_t k = 0; k < n; ++k, ++i_)
      if (i_ >= regex_.size() || std::isxdigit(static_cast<unsigned char>(regex_[i_])) == 0) bad(begin, fmt::format("{} hexadecimal digits were expected", n));
  }

  void escape(size_t begin, bool in_class) {
    if (i_ >= regex_.size()) bad(begin, "the escape is not finished");
    const char c = regex_[i_++];
    if (std::string_view("dDwWsSnrtfv").find(c) != std::string_view::npos) return;
    if (c == '0' && (i_ >= regex_.size() || std::isdigit(static_cast<unsigned char>(regex_[i_])) == 0)) return;
    if (c == 'x') return hex(begin, 2);
    if (c == 'u') return hex(begin, 4);
    const bool is_punctuation = static_cast<unsigned char>(c) < 0x7f && std::ispunct(static_cast<unsigned char>(c)) != 0;
    constexpr std::string_view kOutside = "^$.*+?\\()[]{}|/-\"", kInside = "^$.*+?\\()[]{}|/-\"";
    if (is_punctuation && (in_class ? kInside : kOutside).find(c) != std::string_view::npos) return;
    unsupported(begin, fmt::format("the escape {}", quote(regex_.substr(begin, 2))));
  }

  void character_class(size_t begin) {
    if (at('^')) ++i_;
    if (at(']')) unsupported(begin, "an empty class");
    while (!at(']')) {
      if (i_ >= regex_.size()) bad(begin, "this class is not closed");
      const size_t place = i_;
      const char c = regex_[i_++];
      if (c == '\\') escape(place, /*in_class=*/true);
      if (c == '[') unsupported(place, "'[' within a class (write \\[)");
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) unsupported(place, "a control character that is not escaped");
    }
    ++i_;
    atom(1);
  }

  const std::string& name_;
  const std::string_view regex_;
  size_t i_ = 0;
  std::vector<Group> groups_;
};

}  // namespace

std::string checked_regex(const std::string& name, std::string_view regex) { return RegexCheck(name, regex).run(); }

void check_nesting(const std::string& name, std::string_view text) {
  size_t depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '(' || text[i] == '{' || text[i] == '[') ++depth;
    if ((text[i] == ')' || text[i] == '}' || text[i] == ']') && depth > 0) --depth;
    if (depth > kMaxGrammarDepth)
      throw Error(ErrorCode::kUnsupported, fmt::format("{}: at byte {}: more than {} brackets within each other", name, i, kMaxGrammarDepth));
  }
}

}  // namespace beryl
