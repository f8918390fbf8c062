// What: whatever text a template is, compiling and rendering it either works or is one beryl::Error of one line; it
//       never crashes, never runs on, and never takes much more memory than it is allowed.
// How:  the snippets of tests/golden/template_cases.json, cut into words and put together again by chance: words
//       swapped, doubled, left out, taken from other snippets, nested into each other. Built with the address and
//       undefined-behaviour sanitizers. Small limits, so that a rendering is short; operator new counts what is live.
//
// Prints one line. Exit 1 at a violation, with the template. Arguments: number of templates, first seed.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "counted_memory.h"
#include "text/jinja.h"

namespace {

using Json = nlohmann::ordered_json;

// Names, numbers, signs, blanks: what a template's text is made of.
std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  const auto is_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; };
  for (size_t at = 0; at < text.size();) {
    size_t end = at + 1;
    if (is_word(text[at]))
      while (end < text.size() && is_word(text[end])) ++end;
    else if (end < text.size() && std::strchr("{%}#", text[at]) != nullptr && std::strchr("{%}#", text[end]) != nullptr)
      ++end;
    words.push_back(text.substr(at, end - at));
    at = end;
  }
  return words;
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  size_t below(size_t n) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<size_t>(state_ % n);
  }

 private:
  uint64_t state_;
};

std::string mutated(Random& random, const std::vector<std::vector<std::string>>& snippets,
                    const std::vector<std::string>& all_words) {
  std::vector<std::string> words = snippets[random.below(snippets.size())];
  const auto place = [&](size_t extra) {
    return words.begin() + static_cast<std::ptrdiff_t>(random.below(words.size() + extra));
  };
  for (size_t n = 1 + random.below(6); n > 0 && !words.empty(); --n) {
    switch (random.below(6)) {
      case 0: words.erase(place(0)); break;
      case 1: *place(0) = all_words[random.below(all_words.size())]; break;
      case 2: words.insert(place(1), all_words[random.below(all_words.size())]); break;
      case 3: {
        const std::string copy = *place(0);
        words.insert(place(1), copy);
        break;
      }
      case 4: {  // another snippet within this one
        const auto& other = snippets[random.below(snippets.size())];
        words.insert(place(1), other.begin(), other.end());
        break;
      }
      case 5: std::swap(*place(0), *place(0)); break;
    }
  }
  std::string text;
  for (const std::string& word : words) text += word;
  if (random.below(20) == 0 && !text.empty()) text[random.below(text.size())] = static_cast<char>(random.below(256));
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  const size_t n_templates = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 40000;
  const uint64_t first_seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  std::ifstream file(std::string(BERYL_SOURCE_DIR) + "/tests/golden/template_cases.json");
  const Json cases = Json::parse(std::string(std::istreambuf_iterator<char>(file), {}));
  std::vector<std::vector<std::string>> snippets;
  std::vector<std::string> all_words = {"100000", "-1",        "0",         "'%999999d'", "loop",
                                        "caller", "recursive", "namespace", "range"};
  for (const Json& snippet : cases["snippets"]) {
    snippets.push_back(words_of(snippet.get<std::string>()));
    all_words.insert(all_words.end(), snippets.back().begin(), snippets.back().end());
  }
  std::vector<beryl::TemplateVariable> variables;
  for (const auto& [name, value] : cases["variables"].items()) variables.push_back({.name = name, .value = value});
  constexpr beryl::TemplateLimits kLimits{.work = 20 << 20, .bytes = 8 << 20, .characters = 1 << 20};
  // Beside the values: the syntax tree, and texts and lists that are being made, which only their length limits.
  constexpr size_t kMaxLiveBytes = 64 << 20;

  size_t n_rendered = 0, n_refused = 0, n_violations = 0;
  for (size_t i = 0; i < n_templates; ++i) {
    Random random(first_seed + i);
    const std::string source = mutated(random, snippets, all_words);
    const auto violation = [&](const std::string& what) {
      ++n_violations;
      std::printf("seed %llu: %s\n%s\n", static_cast<unsigned long long>(first_seed + i), what.c_str(), source.c_str());
    };
    const size_t before = live_bytes;
    peak_bytes = before;
    try {
      const beryl::JinjaTemplate compiled(source);
      for (int again = 0; again < 2; ++again) compiled.render(variables, {}, kLimits);
      ++n_rendered;
    } catch (const beryl::Error& error) {
      const std::string_view what = error.what();
      if (what.empty() || what.size() > 700 || what.find('\n') != std::string_view::npos)
        violation(fmt::format("the error is not one short line: {}", what));
      ++n_refused;
    } catch (const std::exception& exception) {
      violation(fmt::format("another exception: {}", exception.what()));
    }
    if (peak_bytes - before > kMaxLiveBytes) violation(fmt::format("{} MiB were live", (peak_bytes - before) >> 20));
    // What is kept between renderings (tables, patterns) is small.
    if (live_bytes > before + (1 << 20)) violation(fmt::format("{} bytes stay", live_bytes - before));
  }
  std::printf("templates %zu: %zu rendered, %zu refused, %zu violations\n", n_templates, n_rendered, n_refused,
              n_violations);
  return n_violations == 0 && n_rendered > n_templates / 20 ? 0 : 1;
}
