// beryl's server with a model that says what a test wants, for tests/native_calls_test.py: HTTP, requests, prompts by the model's template,
// engine, constraints and the reader of replies are the real ones; only the backend is a double, which gives out ids.
//
//   scripted_server VOCABULARY SCRIPTS [TEMPLATE]     VOCABULARY: a model file of which the tokenizer is used. TEMPLATE: the chat template;
//                                                     none: the built-in format
//
//   SCRIPTS: [[PROMPT_END, N, REPLY], …]. A reply comes where the text ends with the string PROMPT_END, which it holds N times, and some ids of the
//   reply. Both are written as control tokens and text; a reply ends with the token that it names last. What a mask
//   forbids is not said: then the reply fails, which a test sees.
//   It writes the port as a line and serves until its input is closed.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "engine/engine.h"
#include "engine/numberless_executor.h"
#include "grammar/constraint.h"
#include "ops/program.h"
#include "server/api.h"
#include "server/http_server.h"
#include "text/chat_writer.h"
#include "text/text_tools.h"
#include "text/tokenizer.h"
#include "weights/checkpoint.h"

namespace beryl {
namespace {

using Ids = std::vector<int32_t>;

struct Script {
  Ids prompt_end;
  int64_t n;
  Ids reply;
};

// What follows a text; -1: nothing is written for it.
int32_t next_id(const std::vector<Script>& scripts, std::span<const int32_t> text) {
  const auto ends_at = [&](const Ids& part, size_t end) {
    return end >= part.size() && std::equal(part.begin(), part.end(), text.begin() + static_cast<std::ptrdiff_t>(end - part.size()));
  };
  size_t last = 0;   // where the last of them ends
  const Ids* which = nullptr;
  for (size_t end = 1; end <= text.size(); ++end)
    for (const Script& each : scripts)
      if (ends_at(each.prompt_end, end)) last = end, which = &each.prompt_end;
  if (which == nullptr) return -1;
  int64_t n = 0;
  for (size_t end = 1; end <= last; ++end) n += ends_at(*which, end);
  const std::span<const int32_t> said = text.subspan(last);
  for (const Script& each : scripts)
    if (each.n == n && each.prompt_end == *which && said.size() < each.reply.size() && std::equal(said.begin(), said.end(), each.reply.begin()))
      return each.reply[said.size()];
  return -1;
}

class ScriptExecutor final : public test::NumberlessExecutor {
 public:
  ScriptExecutor(const std::vector<Script>& scripts, const Tokenizer& tokenizer, size_t n_ops, const StepLimits& limits)
      : NumberlessExecutor(limits), scripts_(scripts), tokenizer_(tokenizer), n_ops_(n_ops) {
    cache_.resize(static_cast<size_t>(limits.n_pages[0]) * kPageTokens);
  }

  void run(OpRange range) override {
    sampled_.clear();
    size_t next_output = 0;
    for (size_t i = 0; i < input_.ids.size(); ++i) {
      cache_at(input_.sequences[i], input_.positions[i]) = input_.ids[i];
      if (next_output >= input_.output_rows.size() || input_.output_rows[next_output] != static_cast<int32_t>(i)) continue;
      if (!input_.sampling.empty()) sample(input_.sequences[i], input_.positions[i], input_.sampling[next_output].allowed);
      ++next_output;
    }
    if (range.end < n_ops_) return;
    for (size_t i = 0; i < input_.ids.size(); ++i) {
      input_.ids[i] = std::max(0, sampled_[i].id);
      ++input_.positions[i];
    }
  }

 private:
  int32_t& cache_at(int32_t sequence, int64_t position) {
    return cache_[static_cast<size_t>(slot_of(0, sequence, position))];
  }
  void sample(int32_t sequence, int64_t position, const uint32_t* allowed) {
    Ids text;
    for (int64_t each = 0; each <= position; ++each) text.push_back(cache_at(sequence, each));
    Sampled sampled;
    sampled.id = next_id(scripts_, text);
    sampled.valid = sampled.id >= 0 && (allowed == nullptr || (allowed[sampled.id / 32] >> (sampled.id % 32) & 1u) != 0);
    if (!sampled.valid) {
      const std::string end = tokenizer_.decode(std::span(text).last(std::min<size_t>(text.size(), 200)), true);
      std::fprintf(stderr, "%s behind: ...%s\n", sampled.id < 0 ? "nothing is written" : "what is written is forbidden", end.c_str());
      sampled.id = -1;
    }
    sampled_.push_back(sampled);
  }

  const std::vector<Script>& scripts_;
  const Tokenizer& tokenizer_;
  const size_t n_ops_;
  Ids cache_;
};

class ScriptBackend final : public Backend {
 public:
  ScriptBackend(std::vector<Script> scripts, const Tokenizer& tokenizer) : scripts_(std::move(scripts)), tokenizer_(tokenizer) {}
  std::string_view name() const override { return "scripts"; }
  std::vector<Allocation> plan(const Program&, const StepLimits&) const override { return {}; }
  std::unique_ptr<Executor> prepare(const Program& program, const StepLimits& limits) override {
    return std::make_unique<ScriptExecutor>(scripts_, tokenizer_, program.ops.size(), limits);
  }

 private:
  const std::vector<Script> scripts_;
  const Tokenizer& tokenizer_;
};

// Control tokens by name are themselves, here only.
Ids ids_of(const Tokenizer& tokenizer, const std::string& text) { return tokenizer.encode(text, true); }

int run(const char* vocabulary, const char* scripts_path, const char* chat_template) {
  const auto checkpoint = open_checkpoint(vocabulary);
  const auto tokenizer = load_tokenizer(*checkpoint);
  const auto writer = make_chat_writer(*checkpoint, *tokenizer, chat_template == nullptr ? TemplateChoice::kBuiltIn : TemplateChoice::kFile,
                                       chat_template == nullptr ? "" : chat_template);
  BERYL_CHECK(writer != nullptr, "there is a chat format");
  std::ifstream file(scripts_path);
  std::vector<Script> scripts;
  for (const auto& each : nlohmann::json::parse(file))
    scripts.push_back({ids_of(*tokenizer, each[0]), each[1], ids_of(*tokenizer, each[2])});
  ScriptBackend backend(scripts, *tokenizer);

  static const WeightSet weights;
  Program program;
  program.weights = &weights;
  program.vocab = tokenizer->vocab_size();
  program.groups.push_back({0});
  program.ops = {Sample{}, Advance{}};
  EngineLimits limits;
  limits.run.context = 8192;
  limits.run.n_sequences = 4;
  limits.run.chunk_tokens = 256;
  Engine engine(program, limits, backend);
  ConstraintCompiler constraints(*tokenizer, program.vocab);
  server::FormCompiler forms(constraints);
  const server::ServedModel model = {.id = "scripted",
                                     .tokenizer = *tokenizer,
                                     .writer = writer.get(),
                                     .writes_tools = writes_tools(*writer),
                                     .notation = call_notation(*writer, *tokenizer),
                                     .forms = forms,
                                     .engine = engine,
                                     .suppressed_ids = {},
                                     .vocab = program.vocab,
                                     .longest_token_bytes = 64};
  server::Api api(model, server::ApiOptions());
  server::HttpServer http("127.0.0.1", 0, server::HttpLimits(), api.handlers());
  std::printf("%d\n", http.port());
  std::fflush(stdout);
  std::cin.ignore(std::numeric_limits<std::streamsize>::max());
  return 0;
}

}  // namespace
}  // namespace beryl

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) return 2;
  try {
    return beryl::run(argv[1], argv[2], argc > 3 ? argv[3] : nullptr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
