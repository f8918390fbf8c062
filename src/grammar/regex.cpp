#include "grammar/regex.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "weights/quote.h"

namespace beryl {
namespace {

constexpr size_t kMaxDepth = 64;
constexpr int kMaxCountDepth = 2;
constexpr int64_t kMaxCount = 100000;  // of one quantifier
constexpr int64_t kMaxGroupCount = 100, kMaxWideCount = 10;   // likewise, of more than a class; those within each other multiplied
constexpr int64_t kWideClass = 256;    // characters
constexpr int64_t kMaxWide = 64;       // classes of more than that, each as often as groups repeat it
constexpr int kMaxQuantifiers = 200;
constexpr int64_t kMaxAtoms = 200000;  // characters and classes, each as often as it may be repeated
constexpr size_t kMaxGrammarDepth = 200;
constexpr uint32_t kLastCharacter = 0x10ffff;

// A set of characters as ranges, ascending and apart.
class CharacterSet {
 public:
  CharacterSet() = default;
  CharacterSet(std::initializer_list<std::pair<uint32_t, uint32_t>> ranges) {
    for (const auto& [first, last] : ranges) add(first, last);
  }
  void add(uint32_t first, uint32_t last) {
    std::vector<std::pair<uint32_t, uint32_t>> merged;
    for (const auto& range : ranges_) {
      if (range.second + 1 < first || last + 1 < range.first) {
        merged.push_back(range);
      } else {
        first = std::min(first, range.first);
        last = std::max(last, range.second);
      }
    }
    merged.emplace_back(first, last);
    std::sort(merged.begin(), merged.end());
    ranges_ = std::move(merged);
  }
  void add(const CharacterSet& other) {
    for (const auto& [first, last] : other.ranges_) add(first, last);
  }
  CharacterSet complement() const {
    CharacterSet result;
    uint32_t begin = 0;
    for (const auto& [first, last] : ranges_) {
      if (first > begin) result.ranges_.emplace_back(begin, first - 1);
      begin = last + 1;
    }
    if (begin <= kLastCharacter) result.ranges_.emplace_back(begin, kLastCharacter);
    return result;
  }
  CharacterSet without(const CharacterSet& other) const {
    CharacterSet rest = complement();
    rest.add(other);
    return rest.complement();
  }
  bool has(uint32_t c) const {
    return std::any_of(ranges_.begin(), ranges_.end(),
                       [&](const auto& range) { return range.first <= c && c <= range.second; });
  }
  bool empty() const { return ranges_.empty(); }
  int64_t size() const {
    int64_t n = 0;
    for (const auto& [first, last] : ranges_) n += int64_t{last} - first + 1;
    return n;
  }
  const std::vector<std::pair<uint32_t, uint32_t>>& ranges() const { return ranges_; }

 private:
  std::vector<std::pair<uint32_t, uint32_t>> ranges_;
};

const CharacterSet kDigits = {{'0', '9'}};
const CharacterSet kWord = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const CharacterSet kBlank = {{9, 13},          {' ', ' '},       {0xa0, 0xa0},     {0x1680, 0x1680}, {0x2000, 0x200a},
                             {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}, {0xfeff, 0xfeff}};
const CharacterSet kLineEnds = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};
const CharacterSet kHalves = {{0xd800, 0xdfff}};  // of pairs in UTF-16; no characters
const CharacterSet kEscapedInJson = {{0, 0x1f}, {'"', '"'}, {'\\', '\\'}};

std::string character_text(uint32_t c) {
  const bool is_plain = c < 0x80 && std::isalnum(static_cast<int>(c)) != 0;
  return is_plain ? std::string(1, static_cast<char>(c)) : fmt::format("\\U{:08x}", c);
}

// How a JSON string writes what it has to escape.
std::string json_escape(uint32_t c) {
  switch (c) {
    case '"': return R"(\")";
    case '\\': return R"(\\)";
    case '\n': return R"(\n)";
    case '\r': return R"(\r)";
    case '\t': return R"(\t)";
    case '\b': return R"(\b)";
    case '\f': return R"(\f)";
    default: return fmt::format(R"(\u{:04x})", c);
  }
}

// The same for an expression of the library's.
std::string character_regex(uint32_t c) {
  return c < 0x80 ? fmt::format("\\x{:02x}", c) : fmt::format("\\u{{{:x}}}", c);
}

// What stands for the expression so far, in two notations.
struct Both {
  std::string rule;    // the right side of a rule
  std::string regex;   // an expression of the library's: it makes one automaton of that
};

// A quoted literal.
std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + '"';
}

class RegexReader {
 public:
  RegexReader(const std::string& name, std::string_view regex, RegexPlace place)
      : name_(name), regex_(regex), place_(place) {}

  std::string run() {
    if (at('^')) ++i_;
    groups_.push_back({});
    while (i_ < regex_.size()) item();
    if (groups_.size() > 1) bad(groups_.back().begin, "this bracket is not closed");
    Group& root = groups_.back();
    finish_item(root);
    if (root.n_atoms > kMaxAtoms) too_large(0);
    const Both text = finished(root);
    // Rules that repeat something begin a place anew with each of their repetitions, and which of all places one may have begun at is
    // looked for at each token. In an automaton there is nothing to look for.
    const bool is_json = place_ == RegexPlace::kJsonString;
    if (is_automaton_) return fmt::format("Regex({})", quoted(is_json ? fmt::format("\\x22(?:{})\\x22", text.regex) : text.regex));
    return is_json ? fmt::format(R"("\"" ({}) "\"")", text.rule) : text.rule;
  }

 private:
  struct Group {
    size_t begin = 0;
    Both text;             // of the alternatives so far
    bool is_empty = true;  // the alternative that is being read has nothing yet
    Both item;             // what a quantifier would repeat; an empty rule: there is nothing
    int64_t n_atoms = 0;   // of all but the item
    int64_t item_atoms = 0;
    bool repeats = false;       // something in it may come more than once in a row
    bool may_be_empty = false;  // one of the alternatives before this one
    bool is_all_empty = true;   // every item so far of this alternative may be
    bool item_repeats = false, item_may_be_empty = false;
    Both item_class;            // the item is one class: its characters that need no escape
    bool is_wide = false, item_is_wide = false;   // holds a class of many characters
    int64_t n_wide = 0, item_n_wide = 0;          // how many
    int count_depth = 0, item_count_depth = 0;  // counts within each other
    int64_t count = 1, item_count = 1;          // the same, of more than a class, multiplied
  };

  [[noreturn]] void bad(size_t place, std::string_view why) const {
    throw Error(ErrorCode::kBadInput, fmt::format("{}: at byte {} of {}: {}", name_, place, quote(regex_), why));
  }
  [[noreturn]] void unsupported(size_t place, std::string_view what) const {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: at byte {} of {}: {} cannot be expressed", name_, place, quote(regex_), what));
  }
  [[noreturn]] void too_large(size_t place) const {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: at byte {} of {}: repetitions that come to more than {} characters", name_, place,
                            quote(regex_), kMaxAtoms));
  }

  bool at(char c) const { return i_ < regex_.size() && regex_[i_] == c; }

  static void append(Group& group, const Both& text) {
    if (!group.is_empty) group.text.rule += ' ';
    group.text.rule += text.rule;
    group.text.regex += text.regex;
    group.is_empty = false;
  }
  static void finish_item(Group& group) {
    if (!group.item.rule.empty()) {
      append(group, group.item);
      group.is_all_empty = group.is_all_empty && group.item_may_be_empty;
      group.repeats = group.repeats || group.item_repeats;
      group.count_depth = std::max(group.count_depth, group.item_count_depth);
      group.count = std::max(group.count, group.item_count);
      group.is_wide = group.is_wide || group.item_is_wide;
    }
    group.item = {};
    group.item_class = {};
    group.n_atoms += group.item_atoms;
    group.item_atoms = 0;
    group.n_wide += std::exchange(group.item_n_wide, 0);
  }
  // The whole group, its last alternative ended.
  static Both finished(Group& group) {
    if (group.is_empty) append(group, {"\"\"", ""});
    return std::move(group.text);
  }

  void atom(Both text, int64_t n, bool is_wide, bool repeats = false, bool may_be_empty = false, int count_depth = 0, int64_t count = 1) {
    Group& group = groups_.back();
    finish_item(group);
    group.item = std::move(text);
    group.item_atoms = n;
    group.item_is_wide = is_wide;
    group.item_count = count;
    group.item_repeats = repeats;
    group.item_may_be_empty = may_be_empty;
    group.item_count_depth = count_depth;
    if (group.n_atoms + n > kMaxAtoms) too_large(i_);
  }

  void set(size_t begin, const CharacterSet& all) {
    const CharacterSet characters = all.without(kHalves);
    const CharacterSet plain = place_ == RegexPlace::kJsonString ? characters.without(kEscapedInJson) : characters;
    Both text;
    if (!plain.empty()) text = {class_text(plain), class_regex(plain)};
    const Both its_class = text;
    if (place_ == RegexPlace::kJsonString)
      for (const auto& [first, last] : kEscapedInJson.ranges())
        for (uint32_t c = first; c <= last; ++c)
          if (characters.has(c)) {
            const char* const bar = text.rule.empty() ? "" : "|";
            text.rule += fmt::format("{}{}", bar, quoted(json_escape(c)));
            text.regex += bar;
            for (const char part : json_escape(c)) text.regex += character_regex(static_cast<unsigned char>(part));
          }
    if (text.rule.empty()) unsupported(begin, "a class of no characters");
    atom({fmt::format("({})", text.rule), fmt::format("(?:{})", text.regex)}, 1, characters.size() > kWideClass);
    groups_.back().item_class = its_class;
    groups_.back().item_n_wide = groups_.back().item_is_wide;
  }

  // Halves of pairs may be in it, no token can write them (constraint.cpp). The library is much faster with few ranges.
  static std::string class_text(const CharacterSet& characters) {
    const CharacterSet others = characters.complement().without(kHalves);
    const bool is_negated = !others.empty() && others.ranges().size() < characters.ranges().size();
    std::string text = is_negated ? "[^" : "[";
    for (const auto& [first, last] : (is_negated ? others : characters).ranges()) {
      text += character_text(first);
      if (last > first) text += fmt::format("-{}", character_text(last));
    }
    return text + ']';
  }
  // Ranges end where characters begin to be longer in UTF-8: within one across that the library finds bytes that are no UTF-8.
  static std::string class_regex(const CharacterSet& characters) {
    constexpr uint32_t kEnds[] = {0x7f, 0x7ff, 0xffff, kLastCharacter};
    std::string text;
    uint32_t begin = 0;
    for (const uint32_t end : kEnds) {
      std::string part;
      for (const auto& [first, last] : characters.ranges()) {
        if (last < begin || first > end) continue;
        const uint32_t from = std::max(first, begin), to = std::min(last, end);
        part += character_regex(from);
        if (to > from) part += fmt::format("-{}", character_regex(to));
      }
      if (!part.empty()) text += fmt::format("{}[{}]", text.empty() ? "" : "|", part);
      begin = end + 1;
    }
    return fmt::format("(?:{})", text);
  }

  void item() {
    const size_t begin = i_;
    const char c = regex_[i_];
    switch (c) {
      case '(':
        ++i_;
        open(begin);
        return;
      case ')': {
        ++i_;
        if (groups_.size() == 1) bad(begin, "this bracket was not opened");
        Group group = std::move(groups_.back());
        groups_.pop_back();
        finish_item(group);
        const int64_t n = group.n_atoms;
        const bool may_be_empty = group.may_be_empty || group.is_all_empty, repeats = group.repeats;
        const bool is_wide = group.is_wide;
        const int64_t n_wide = group.n_wide;
        const Both text = finished(group);
        atom({fmt::format("({})", text.rule), fmt::format("(?:{})", text.regex)}, n, is_wide, repeats, may_be_empty, group.count_depth, group.count);
        groups_.back().item_n_wide = n_wide;
        return;
      }
      case '|': {
        ++i_;
        Group& group = groups_.back();
        finish_item(group);
        if (group.is_empty) append(group, {"\"\"", ""});
        group.text.rule += " | ";
        group.text.regex += '|';
        group.is_empty = true;
        group.may_be_empty = group.may_be_empty || group.is_all_empty;
        group.is_all_empty = true;
        return;
      }
      case '*':
        ++i_;
        quantifier(begin, "*", 2, /*is_counted=*/false, /*least=*/0, /*is_endless=*/true);
        return;
      case '+':
        ++i_;
        quantifier(begin, "+", 2, /*is_counted=*/false, /*least=*/1, /*is_endless=*/true);
        return;
      case '?':
        ++i_;
        quantifier(begin, "?", 1, /*is_counted=*/false, /*least=*/0, /*is_endless=*/false);
        return;
      case '{':
        ++i_;
        counted(begin);
        return;
      case '}':
      case ']': unsupported(begin, fmt::format("'{}' that closes nothing", c));
      case '[':
        ++i_;
        character_class(begin);
        return;
      case '^': unsupported(begin, "'^' anywhere but at the start");
      case '$':
        if (i_ + 1 != regex_.size()) unsupported(begin, "'$' anywhere but at the end");
        ++i_;
        finish_item(groups_.back());
        return;
      case '.':
        ++i_;
        set(begin, kLineEnds.complement());
        return;
      case '\\':
        ++i_;
        set(begin, escape(begin));
        return;
      default: {
        const uint32_t character = next_character();
        set(begin, {{character, character}});
      }
    }
  }

  uint32_t next_character() {
    const size_t n = static_cast<size_t>(utf8_sequence(regex_.substr(i_)));
    if (n == 0) bad(i_, "this is not UTF-8");
    const auto lead = static_cast<unsigned char>(regex_[i_]);
    uint32_t character = n == 1 ? lead : lead & (0xffu >> (n + 1));
    for (size_t k = 1; k < n; ++k) character = character << 6 | (static_cast<unsigned char>(regex_[i_ + k]) & 0x3fu);
    i_ += n;
    return character;
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
          if (std::isalnum(static_cast<unsigned char>(regex_[k])) == 0 && regex_[k] != '_')
            bad(k, "a group's name has letters, digits and _");
        i_ = end + 1;
      } else {
        unsupported(begin, "a look around, a flag or another group than (?:…) and (?<name>…)");
      }
    }
    groups_.push_back({});
    groups_.back().begin = begin;
  }

  void quantifier(size_t begin, std::string_view text, int64_t count, bool is_counted, int64_t least, bool is_endless) {
    Group& group = groups_.back();
    if (group.item.rule.empty()) bad(begin, "there is nothing to repeat");
    // Each of the many ways to count such a text is a state of its own, and their number grows without bounds that one
    // could wait for.
    if (is_counted && count > 1 && group.item_may_be_empty && group.item_repeats)
      unsupported(begin, "a count of what may be empty and repeats something itself");
    const int depth = group.item_count_depth + (is_counted && count > 1 ? 1 : 0);
    if (depth > kMaxCountDepth) unsupported(begin, "a count of counts of counts");
    group.count_depth = std::max(group.count_depth, depth);
    group.repeats = group.repeats || group.item_repeats || count > 1;
    group.is_all_empty = group.is_all_empty && (least == 0 || group.item_may_be_empty);
    // The library counts the characters of one class well, anything else by looking at each token anew. So counted
    // characters of a JSON string are those that need no escape.
    const bool counts = is_counted && count > 1;
    const bool counts_group = counts && group.item_class.rule.empty();
    const int64_t product = group.item_count * (counts_group ? count : 1);
    if (const int64_t most = group.item_is_wide ? kMaxWideCount : kMaxGroupCount; counts_group && product > most)
      unsupported(begin, fmt::format("a count above {} of more than one class of characters{}", most, group.item_is_wide ? ", a large one among them," : ""));
    group.count = std::max(group.count, product);
    group.n_wide += std::exchange(group.item_n_wide, 0) * (counts_group ? count : 1);
    if (group.n_wide > kMaxWide)
      unsupported(begin, fmt::format("more than {} classes of many characters, those that groups repeat counted as often,", kMaxWide));
    if (++n_quantifiers_ > kMaxQuantifiers) unsupported(begin, fmt::format("more than {} repetitions", kMaxQuantifiers));
    // Rules do for one repetition of a class that is not repeated itself.
    if (is_endless) is_automaton_ = is_automaton_ || n_endless_++ > 0 || groups_.size() > 1 || group.item_class.rule.empty();
    const Both& item = counts && !group.item_class.rule.empty() ? group.item_class : group.item;
    append(group, {fmt::format("{}{}", item.rule, text), repeated(item.regex, text, is_endless, least)});
    group.is_wide = group.is_wide || group.item_is_wide;
    group.item = {};
    group.item_class = {};
    group.n_atoms += group.item_atoms * count;  // at most kMaxAtoms * kMaxCount
    group.item_atoms = 0;
    if (group.n_atoms > kMaxAtoms) too_large(begin);
    if (at('?')) ++i_;  // lazy: the same texts
    if (at('+')) unsupported(i_, "a possessive quantifier");
  }

  // As the library reads it rightly: its own "?" is entered from behind where the item ends with a loop, its "{2,}" where the item has
  // several ends.
  static std::string repeated(const std::string& item, std::string_view text, bool is_endless, int64_t least) {
    if (text == "?") return fmt::format("(?:{}|)", item);
    if (!is_endless || text == "*" || text == "+") return fmt::format("{}{}", item, text);
    return least == 0 ? fmt::format("{}*", item) : fmt::format("{0}{{{1}}}{0}*", item, least);
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
    if (!is_open && most == 0) {  // nothing, however it is written
      Group& group = groups_.back();
      if (group.item.rule.empty()) bad(begin, "there is nothing to repeat");
      group.item = {"\"\"", "(?:)"};
      group.item_may_be_empty = true;
      quantifier(begin, "", 1, /*is_counted=*/false, /*least=*/0, /*is_endless=*/false);
      return;
    }
    quantifier(begin, is_open ? fmt::format("{{{},}}", least) : fmt::format("{{{},{}}}", least, most),
               is_open ? least + 1 : most, /*is_counted=*/true, least, is_open);
  }

  uint32_t hex(size_t begin, size_t n) {
    uint32_t value = 0;
    for (size_t k = 0; k < n; ++k, ++i_) {
      if (i_ >= regex_.size() || std::isxdigit(static_cast<unsigned char>(regex_[i_])) == 0)
        bad(begin, fmt::format("{} hexadecimal digits were expected", n));
      const char c = regex_[i_];
      value = value * 16 + static_cast<uint32_t>(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    return value;
  }

  // Behind the backslash.
  CharacterSet escape(size_t begin) {
    if (i_ >= regex_.size()) bad(begin, "the escape is not finished");
    const char c = regex_[i_++];
    const auto one = [](uint32_t character) { return CharacterSet{{character, character}}; };
    switch (c) {
      case 'd': return kDigits;
      case 'D': return kDigits.complement();
      case 'w': return kWord;
      case 'W': return kWord.complement();
      case 's': return kBlank;
      case 'S': return kBlank.complement();
      case 'n': return one('\n');
      case 'r': return one('\r');
      case 't': return one('\t');
      case 'f': return one('\f');
      case 'v': return one('\v');
      case 'x': return one(hex(begin, 2));
      case 'u': return one(hex(begin, 4));
      case '0':
        if (i_ >= regex_.size() || std::isdigit(static_cast<unsigned char>(regex_[i_])) == 0) return one(0);
        break;
      default:
        if (std::string_view("^$.*+?\\()[]{}|/-\"'#&~@!%,:;<=>_` ").find(c) != std::string_view::npos)
          return one(static_cast<unsigned char>(c));
    }
    unsupported(begin, fmt::format("the escape {}", quote(regex_.substr(begin, 2))));
  }

  void character_class(size_t begin) {
    const bool is_negated = at('^');
    if (is_negated) ++i_;
    if (at(']')) unsupported(begin, "an empty class");
    CharacterSet all;
    while (!at(']')) {
      if (i_ >= regex_.size()) bad(begin, "this class is not closed");
      const size_t place = i_;
      const CharacterSet first = class_item(begin);
      // "-" between two characters is a range; as the first, the last or beside \d it is itself.
      if (at('-') && i_ + 1 < regex_.size() && regex_[i_ + 1] != ']') {
        ++i_;
        const CharacterSet last = class_item(begin);
        const auto is_one = [](const CharacterSet& set) {
          return set.ranges().size() == 1 && set.ranges()[0].first == set.ranges()[0].second;
        };
        if (!is_one(first) || !is_one(last)) unsupported(place, "a range that begins or ends with a class");
        if (last.ranges()[0].first < first.ranges()[0].first) bad(place, "this range ends before it begins");
        all.add(first.ranges()[0].first, last.ranges()[0].first);
      } else {
        all.add(first);
      }
    }
    ++i_;
    set(begin, is_negated ? all.complement() : all);
  }

  CharacterSet class_item(size_t begin) {
    if (i_ >= regex_.size()) bad(begin, "this class is not closed");
    const size_t place = i_;
    if (regex_[i_] == '\\') {
      ++i_;
      return escape(place);
    }
    if (regex_[i_] == '[') unsupported(place, "'[' within a class (write \\[)");
    const uint32_t character = next_character();
    return {{character, character}};
  }

  const std::string& name_;
  const std::string_view regex_;
  const RegexPlace place_;
  size_t i_ = 0;
  int n_quantifiers_ = 0;
  int n_endless_ = 0;           // repetitions without an end
  bool is_automaton_ = false;   // the library is given an expression, no rules
  std::vector<Group> groups_;
};

}  // namespace

std::string rule_of_regex(const std::string& name, std::string_view regex, RegexPlace place) {
  return RegexReader(name, regex, place).run();
}

void check_nesting(const std::string& name, std::string_view text) {
  size_t depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '(' || text[i] == '{' || text[i] == '[') ++depth;
    if ((text[i] == ')' || text[i] == '}' || text[i] == ']') && depth > 0) --depth;
    if (depth > kMaxGrammarDepth)
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{}: at byte {}: more than {} brackets within each other", name, i, kMaxGrammarDepth));
  }
}

}  // namespace beryl
