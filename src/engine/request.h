// What is asked of the engine, and what it tells of it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/step_input.h"

namespace beryl {

enum class FinishReason : uint8_t {
  kStop,        // a stop id was sampled (it is not in the reply), or the reader has what it wants
  kLength,      // max_new tokens
  kContext,     // the context is full
  kCancelled,   // whoever asked wants no more
  kFailed,      // see Failure
};

enum class Failure : uint8_t {
  kNone,
  kNoToken,     // none could be sampled: the logits held NaN or infinity, or every token was banned
  kConstraint,  // what the request's constraint threw
  kDevice,      // the step failed, for all that were in it
};

// What may come next, by a grammar for example. Belongs to one request, used by one thread at a time, which need not be the
// engine's (mask_maker.h). What its members throw ends that request.
class TokenConstraint {
 public:
  enum class Next : uint8_t {
    kAnything,    // the mask is not looked at
    kMasked,      // what the mask holds, at least one id
    kNothing,     // the reply is whole: it ends here, without a stop id
  };
  static constexpr int kMaxRollback = 64;

  virtual ~TokenConstraint() = default;
  // Sets bit id % 32 of word id / 32 where the id may come next. All words are zero.
  virtual Next fill(std::span<uint32_t> mask) = 0;
  // This id, which may, has come; stop ids too.
  virtual void accept(int32_t id) = 0;
  // Takes back the last n accepted ids, at most kMaxRollback.
  virtual void rollback(int n) = 0;
};

struct Request {
  std::vector<int32_t> prompt;          // at least one id
  int64_t max_new = INT64_MAX;          // 0: nothing is computed
  SampleParams sampling;                // allowed: null, see constraint
  std::vector<int32_t> stop_ids;
  std::unique_ptr<TokenConstraint> constraint = nullptr;   // null: none
  bool reuse_prefix = true;
  bool follows = false;                 // belongs together with a request before it, which was taken
  bool draft = true;                    // where it pays; never with penalties, whose rows depend on those before
};

// Why no more of a prompt was found in the caches.
enum class ReuseLimit : uint8_t {
  kWhole,       // all of it but its last page
  kUnknown,     // the text goes on otherwise than all that the caches hold; so it does where it was given up for other requests
  kWindow,      // more is known, but sliding layers have let the window before its end go
  kOff,         // the request did not want any
};

struct RequestTimings {
  double queue_seconds = 0;             // until it was let in
  double prefill_seconds = 0;           // from then until the first token was sampled
  double decode_seconds = 0;            // for all tokens after the first
  int64_t prompt_tokens = 0;
  int64_t reused_tokens = 0;            // of the prompt
  ReuseLimit reuse_limit = ReuseLimit::kUnknown;
  int64_t known_tokens = 0;             // with kWindow: so many would have been there
  int64_t reply_tokens = 0;             // stop id included
  int64_t decode_steps = 0;             // that made all tokens after the first
  int64_t drafted_tokens = 0;           // guesses that were checked
  int64_t accepted_tokens = 0;          // of these, came true
  int64_t preemptions = 0;              // times it was put back
  int64_t recomputed_tokens = 0;        // because of that
};

struct RequestResult {
  FinishReason finish = FinishReason::kStop;
  int32_t stop_id = -1;                 // kStop: which; -1: none
  Failure failure = Failure::kNone;     // kFailed: why
  std::string error;                    // kFailed: one line
  RequestTimings timings;
};

}  // namespace beryl
