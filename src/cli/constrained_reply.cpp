#include "cli/constrained_reply.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"

namespace beryl::cli {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

GenerateResult generate_within(Constraint& constraint, Stepper& stepper, int sequence, const GenerateRequest& request,
                               const std::function<bool(const Sampled&)>& on_token) {
  // The prompt but its last token, by generate() itself: nothing is sampled there.
  BERYL_CHECK(!request.prompt.empty() && request.max_new > 0, "a prompt, and something to be said");
  GenerateResult result;
  const auto start = std::chrono::steady_clock::now();
  GenerateRequest head = request;
  head.prompt.pop_back();
  head.max_new = 0;
  result.held = request.held;
  if (!head.prompt.empty()) {
    result = generate(stepper, sequence, head, [](const Sampled&) { return true; });
    if (result.finish == FinishReason::kCancelled) return result;
  }
  const int64_t length = stepper.length(sequence) + 1;
  const int64_t room = stepper.context() - length;
  if (room < 0)
    throw Error(ErrorCode::kBadInput, fmt::format("the prompt ends after the context of {}", stepper.context()));
  if (!stepper.reserve(sequence, length + std::clamp<int64_t>(request.max_new, 0, room)))
    throw Error(ErrorCode::kOutOfMemory, fmt::format("no cache pages left for {} positions", length));
  result.held.push_back(request.prompt.back());
  ++result.prompt_tokens;
  stepper.executor().set_history(sequence, result.held, {});

  std::vector<uint32_t> mask(constraint.mask_words());
  SampleParams sampling = request.sampling;
  sampling.allowed = mask.data();
  int32_t next = request.prompt.back();
  auto decode_start = start;
  for (;;) {
    if (!constraint.fill_mask(mask))
      throw Error(ErrorCode::kUnsupported, "none of the model's tokens goes on with what the constraint demands here");
    const SequenceRows rows{sequence, {&next, 1}, Outputs::kLast, &sampling};
    stepper.run({&rows, 1});
    const Sampled sampled = stepper.samples().front();
    if (result.reply.empty()) {
      result.prefill_seconds = seconds_since(start);
      decode_start = std::chrono::steady_clock::now();
    } else {
      result.held.push_back(next);
      ++result.decode_tokens;
    }
    result.unseen.clear();
    if (!sampled.valid) {
      result.finish = FinishReason::kFailed;
      break;
    }
    BERYL_CHECK(constraint.accept(sampled.id), "what was sampled was allowed");
    result.unseen = {sampled.id};
    if (constraint.is_finished()) {
      result.finish = FinishReason::kStop;
      break;
    }
    result.reply.push_back(sampled.id);
    if (!on_token(sampled)) {
      result.finish = FinishReason::kCancelled;
      break;
    }
    if (static_cast<int64_t>(result.reply.size()) >= request.max_new) {
      result.finish = FinishReason::kLength;
      break;
    }
    if (stepper.length(sequence) >= stepper.context()) {
      result.finish = FinishReason::kContext;
      break;
    }
    next = sampled.id;
  }
  result.decode_seconds = seconds_since(decode_start);
  return result;
}

}  // namespace beryl::cli
