// A model that speaks on this machine, to one person: its files, chat format and sampling, and one sequence. What `run` and
// `chat` share, with the options that both take.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "cli/console.h"
#include "cli/conversation.h"
#include "cli/device.h"
#include "cli/reply_writer.h"
#include "engine/generate.h"
#include "grammar/constraint.h"
#include "model/model.h"
#include "text/chat_writer.h"
#include "text/tokenizer.h"

namespace beryl::cli {

struct SpeakOptions {
  std::string model;
  std::string system_text;
  bool raw = false;            // no chat format; only run offers it
  std::string chat_template;   // empty: the model's own or built-in; "built-in"; or a file
  bool think = false;
  bool show_special = false;
  bool verbose = false;
  int64_t max_new = INT64_MAX;
  int64_t context = 0;         // 0: see Speaker::prepare
  int64_t chunk_tokens = 0;    // 0: chosen by the device
  double temperature = 0.7;
  int64_t top_k = 40;
  double top_p = 0.95;
  double min_p = 0;
  double repetition_penalty = 1;
  double presence_penalty = 0;
  double frequency_penalty = 0;
  int64_t seed = -1;           // -1: a random one
  DeviceOptions device;
};

// A number that says how replies are made: an option of the command line, and a setting of a chat.
struct SpeakNumber {
  const char* name;                     // --NAME
  double SpeakOptions::*real;           // one of the two
  int64_t SpeakOptions::*integer;
  double least, most;                   // integers: exact in a double, but for INT64_MAX
  const char* help;
};
std::span<const SpeakNumber> sampling_numbers();

// MODEL, and what is said of a chat and of a reply's length.
void add_speak_options(CLI::App& app, SpeakOptions& options);
// Headings "Sampling" and "Machine".
void add_sampling_options(CLI::App& app, SpeakOptions& options);
void add_machine_options(CLI::App& app, SpeakOptions& options);
CLI::Option* add_show_special(CLI::App& app, SpeakOptions& options);

std::string rate_text(int64_t n, double seconds);   // "45.3 tok/s": three digits are enough for a rate

class Speaker {
 public:
  // Opens the model and prints its warnings. The options must outlive it; those of sampling may change between replies. most_prompt: no
  // prompt will be longer, so the weights may be loaded at once, while the tokenizer is made; none: they wait for prepare().
  Speaker(const SpeakOptions& options, std::optional<int64_t> most_prompt);

  // Allocates, unless that was done. Context: --ctx; else the default, more where the prompt and -n need it, never more than the model was made for.
  void prepare(int64_t n_prompt);
  // Replies must match it, behind their thoughts. Null: none.
  void set_constraint(std::shared_ptr<const CompiledConstraint> constraint) { constraint_ = std::move(constraint); }

  // What comes for a turn: it is read, as far as the sequence does not hold it, and answered. Ctrl-C ends it at the next token, or
  // the next chunk of the prompt. on_read: before each chunk, with the tokens read of all that must be; before_token: before each
  // token is written. A reply that fails (kFailed, or an exception) leaves an empty sequence. Requires what the turn holds to fit the context.
  using OnRead = std::function<void(int64_t n_read, int64_t n)>;
  GenerateResult reply(const Turn& turn, ReplyWriter& writer, const InterruptCatcher& interrupts, const OnRead& on_read = {},
                       const std::function<void()>& before_token = {});
  // Positions that the sequence holds once the turn is read.
  int64_t length_after(const Turn& turn) const;
  // The sequence holds nothing.
  void forget();

  const Model& model() const { return model_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const ChatWriter& writer() const { return *writer_; }   // not with raw
  std::string name() const;
  int64_t context() const { return stepper_->context(); }
  int64_t length() const { return stepper_->length(kSequence); }
  double load_seconds() const { return load_seconds_; }
  std::string machine_text() const;                       // "cpu, context 4096, seed 7"
  // The seed when none was asked for.
  uint64_t seed() const { return options_.seed >= 0 ? static_cast<uint64_t>(options_.seed) : random_seed_; }

 private:
  static constexpr int kSequence = 0;
  SampleParams sampling() const;
  int64_t choose_context(int64_t n_prompt) const;
  double seconds_since_start() const;
  // Keeps what the sequence holds of a whole text, as far as that can be, and returns what is to be read behind it.
  std::vector<int32_t> keep_beginning(const std::vector<int32_t>& ids);

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const SpeakOptions& options_;
  Model model_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<ChatWriter> writer_;   // null: raw
  std::shared_ptr<const CompiledConstraint> constraint_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stepper> stepper_;
  std::vector<int32_t> held_;            // what the sequence has read
  uint64_t random_seed_ = 0;
  double load_seconds_ = 0;
};

}  // namespace beryl::cli
