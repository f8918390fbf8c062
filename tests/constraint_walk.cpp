// Random replies within constraints, for tests/constraint_test.py: what a model would write that is wrong in every way
// in which the mask lets it.
//
//   constraint_walk MODEL      a job a line on standard input, an answer a line on standard output, both JSON
//
//   {"kind": "schema", "text": "…", "n": 20, "seed": 1, "most": 400}     kind: text, json, schema, regex, grammar, nothing
//   and with calls: {…, "notation": "gemma4", "tools": "…", "single": false}     notation: gemma4, tagged, bare
//   {"error": "…", "code": "unsupported"}
//   {"notes": […], "compile_ms": 3.1, "slowest_ms": 0.2, "replies": [{"hex": "…", "ids": […], "finished": true}]}
//   hex: the text, special tokens by name; slowest_ms: of all steps, the longest
//   {"kind": "regex", "text": "…", "feed": "ab", "n": 1000}     one reply: these bytes, again and again, n tokens in all
//   {"fed": 1000, "half_ms": 2.1, "ms": 4.2}                     how many were allowed; processor time of the first half of n, and of all
//
// Each step takes one of the allowed ids: often one that ends something, or else the reply would not end. On the way,
// what the constraint promises is held against itself: a fork and a rollback go the same way, an id that is not allowed
// is not accepted.
#include <chrono>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/rng.h"
#include "grammar/constraint.h"
#include "text/tokenizer.h"
#include "weights/checkpoint.h"

namespace beryl {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point begin) { return std::chrono::duration<double, std::milli>(Clock::now() - begin).count(); }

ConstraintSpec spec_of(const Json& job) {
  using Kind = ConstraintSpec::Kind;
  static const std::map<std::string, Kind> kinds = {{"text", Kind::kText},         {"json", Kind::kJsonObject},
                                                    {"schema", Kind::kJsonSchema}, {"regex", Kind::kRegex},
                                                    {"grammar", Kind::kGrammar},   {"nothing", Kind::kNothing}};
  static const std::map<std::string, CallNotation> notations = {
      {"gemma4", CallNotation::kGemma4}, {"tagged", CallNotation::kTagged}, {"bare", CallNotation::kBare}};
  ConstraintSpec spec{kinds.at(job.at("kind")), job.at("text"), std::nullopt};
  if (job.contains("notation")) spec.calls = CallSpec{notations.at(job["notation"]), job.at("tools"), job.value("single", false)};
  return spec;
}

struct Walk {
  const Tokenizer& tokenizer;
  uint64_t seed;
  double& slowest_ms;
  uint64_t draw = 0;

  uint32_t below(uint32_t n) { return philox(seed, draw++).x[0] % n; }

  static std::vector<int32_t> ids_of(const std::vector<uint32_t>& mask) {
    std::vector<int32_t> ids;
    for (size_t word = 0; word < mask.size(); ++word)
      for (uint32_t bits = mask[word]; bits != 0; bits &= bits - 1)
        ids.push_back(static_cast<int32_t>(32 * word) + __builtin_ctz(bits));
    return ids;
  }

  int32_t choose(const std::vector<int32_t>& allowed) {
    std::vector<int32_t> ending;
    if (allowed.size() > 1 && below(3) == 0)
      for (const int32_t id : allowed) {
        const std::string text = tokenizer.token_bytes(id);
        if (tokenizer.is_stop(id) || tokenizer.is_special(id) || text == "\"" || text == "}" || text == "]" ||
            text == ",")
          ending.push_back(id);
      }
    const std::vector<int32_t>& from = ending.empty() ? allowed : ending;
    return from[below(static_cast<uint32_t>(from.size()))];
  }

  Json reply(Constraint constraint, int most) {
    std::vector<uint32_t> mask(constraint.mask_words()), again(mask.size());
    std::string text;
    Json ids = Json::array();
    while (static_cast<int>(ids.size()) < most) {
      const Clock::time_point begin = Clock::now();
      if (!constraint.fill_mask(mask)) break;
      slowest_ms = std::max(slowest_ms, ms_since(begin));
      const std::vector<int32_t> allowed = ids_of(mask);
      if (below(8) == 0) {  // a draft that is thrown away
        Constraint fork = constraint.fork();
        int n = 0;
        for (; n < 4 && fork.fill_mask(again); ++n)
          BERYL_CHECK(fork.accept(choose(ids_of(again))), "an allowed id is accepted");
        fork.rollback(n);
        if (!fork.fill_mask(again)) again.clear();
        BERYL_CHECK(again == mask && fork.n_accepted() == constraint.n_accepted(),
                    "a rollback goes back to where it was");
        const auto other = static_cast<int32_t>(below(static_cast<uint32_t>(tokenizer.vocab_size())));
        const bool is_allowed = (mask[static_cast<size_t>(other / 32)] >> (other % 32) & 1u) != 0;
        BERYL_CHECK(fork.accept(other) == is_allowed, "the mask is what is accepted");
      }
      const int32_t id = choose(allowed);
      const Clock::time_point accepting = Clock::now();
      BERYL_CHECK(constraint.accept(id), "an allowed id is accepted");
      slowest_ms = std::max(slowest_ms, ms_since(accepting));
      ids.push_back(id);
      if (!constraint.is_finished()) text += tokenizer.token_bytes(id);
    }
    std::string hex;
    for (const char c : text) hex += fmt::format("{:02x}", static_cast<unsigned char>(c));
    return {{"hex", hex}, {"ids", ids}, {"finished", constraint.is_finished()}};
  }
};

double processor_ms() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
}

Json feed(Constraint constraint, const Tokenizer& tokenizer, const std::string& text, int n) {
  std::map<std::string, int32_t> id_of;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id)
    if (const std::string bytes = tokenizer.token_bytes(id); bytes.size() == 1 && !tokenizer.is_special(id)) id_of.emplace(bytes, id);
  std::vector<uint32_t> mask(constraint.mask_words());
  const double begin = processor_ms();
  double half = 0;
  int fed = 0;
  for (; fed < n; ++fed) {
    if (fed == n / 2) half = processor_ms() - begin;
    if (!constraint.fill_mask(mask) || !constraint.accept(id_of.at(std::string(1, text[static_cast<size_t>(fed) % text.size()])))) break;
  }
  return {{"fed", fed}, {"half_ms", half}, {"ms", processor_ms() - begin}};
}

Json answer(ConstraintCompiler& compiler, const Tokenizer& tokenizer, const Json& job) {
  try {
    const Clock::time_point begin = Clock::now();
    const auto compiled = compiler.compile(spec_of(job));
    const double compile_ms = ms_since(begin);
    if (job.contains("feed")) return feed(compiled->start(), tokenizer, job["feed"], job.at("n"));
    double slowest_ms = 0;
    Json replies = Json::array();
    for (int i = 0; i < job.at("n").get<int>(); ++i)
      replies.push_back(Walk{tokenizer, job.at("seed").get<uint64_t>() * 1000003 + static_cast<uint64_t>(i), slowest_ms}.reply(
          compiled->start(), job.at("most")));
    return {{"notes", compiled->notes()}, {"compile_ms", compile_ms}, {"slowest_ms", slowest_ms}, {"replies", replies}};
  } catch (const Error& error) {
    return {{"error", error.what()},
            {"code", error.code == ErrorCode::kUnsupported ? "unsupported"
                     : error.code == ErrorCode::kBadInput  ? "bad"
                                                           : "other"}};
  }
}

int run(const char* model) {
  const auto checkpoint = open_checkpoint(model);
  const auto tokenizer = load_tokenizer(*checkpoint);
  ConstraintCompiler compiler(*tokenizer, tokenizer->vocab_size() + 5);  // a model's padding rows
  for (std::string line; std::getline(std::cin, line);)
    std::cout << answer(compiler, *tokenizer, Json::parse(line)).dump(-1, ' ', true, Json::error_handler_t::replace)
              << std::endl;
  return 0;
}

}  // namespace
}  // namespace beryl

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  if (!beryl::has_constraints()) return 77;
  return beryl::run(argv[1]);
}
