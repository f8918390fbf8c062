// One reply: prefill the prompt in chunks, then decode until something ends it. For programs that serve one person;
// many requests at once are the engine's (engine.h).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/request.h"
#include "engine/stepper.h"

namespace beryl {

struct GenerateRequest {
  std::vector<int32_t> prompt;          // at least one id; appended to what the sequence holds
  std::vector<int32_t> held = {};       // what the sequence holds before it, for the penalties: a conversation's
                                        // earlier GenerateResult::held; empty: they look at the prompt only
  int64_t max_new = INT64_MAX;          // 0: the prompt is read, nothing is sampled
  SampleParams sampling;
  std::vector<int32_t> stop_ids;
  std::function<bool()> cancelled = {}; // asked before each chunk of the prompt; may be empty
  TokenConstraint* constraint = nullptr;   // of the reply; null: none
};

struct GenerateResult {
  // kCancelled: on_token returned false, or cancelled() true; then the reply is empty and the prompt read in part.
  // kStop: by a stop id, or the constraint lets nothing more come.
  FinishReason finish = FinishReason::kStop;
  std::vector<int32_t> reply;           // without the stop id
  std::vector<int32_t> unseen;          // the last sampled id, not yet read by a step: a continuation begins with it
  std::vector<int32_t> held;            // GenerateRequest::held, the prompt as far as it was read, the reply but unseen
  int64_t prompt_tokens = 0;            // that were read
  double prefill_seconds = 0;           // until the first token was sampled
  double decode_seconds = 0;            // for all tokens after the first
  int64_t decode_tokens = 0;            // tokens sampled after the first
};

// on_token is called for each token of the reply as it is sampled; false ends it.
// Error(kBadInput) when the prompt does not fit the context; the sequence is then as before. What the constraint throws.
GenerateResult generate(Stepper& stepper, int sequence, const GenerateRequest& request,
                        const std::function<bool(const Sampled&)>& on_token);

// Feeds ids in chunks of the stepper's chunk size; the last row of all is sampled when `sampling` is given.
void prefill(Stepper& stepper, int sequence, std::span<const int32_t> ids, const SampleParams* sampling);

}  // namespace beryl
