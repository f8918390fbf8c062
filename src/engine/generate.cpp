#include "engine/generate.h"

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

#include "base/error.h"

namespace beryl {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

void prefill(Stepper& stepper, int sequence, std::span<const int32_t> ids, const SampleParams* sampling) {
  const auto chunk = static_cast<size_t>(stepper.chunk_tokens());
  for (size_t begin = 0; begin < ids.size(); begin += chunk) {
    const bool last = begin + chunk >= ids.size();
    const SequenceRows rows{sequence, ids.subspan(begin, std::min(chunk, ids.size() - begin)),
                            last ? Outputs::kLast : Outputs::kNone, last ? sampling : nullptr};
    stepper.run({&rows, 1});
  }
}

GenerateResult generate(Stepper& stepper, int sequence, const GenerateRequest& request,
                        const std::function<bool(const Sampled&)>& on_token) {
  const auto n_prompt = static_cast<int64_t>(request.prompt.size());
  BERYL_CHECK(n_prompt > 0, "a prompt has at least one token");
  const int64_t begin = stepper.length(sequence);
  if (begin + n_prompt > stepper.context())
    throw Error(ErrorCode::kBadInput, fmt::format("the prompt of {} tokens after {} does not fit the context of {}",
                                                  n_prompt, begin, stepper.context()));
  // One token more than the prompt at least, so that the first decode step finds its page in the uploaded table.
  const int64_t room = stepper.context() - begin - n_prompt;
  const int64_t wanted = begin + n_prompt + std::clamp<int64_t>(request.max_new, 0, room);
  if (!stepper.reserve(sequence, wanted))
    throw Error(ErrorCode::kOutOfMemory, fmt::format("no cache pages left for {} positions", wanted));

  GenerateResult result;
  BERYL_CHECK(request.held.empty() || static_cast<int64_t>(request.held.size()) == begin,
              "held is what the sequence holds");
  result.held = request.held;
  result.held.insert(result.held.end(), request.prompt.begin(), request.prompt.end());
  stepper.executor().set_history(sequence, result.held, {});
  const auto start = std::chrono::steady_clock::now();
  const auto cancelled = [&] { return request.cancelled && request.cancelled(); };
  const auto chunk = static_cast<size_t>(stepper.chunk_tokens());
  std::span<const int32_t> rest = request.prompt;
  for (; rest.size() > chunk && !cancelled(); rest = rest.subspan(chunk))
    prefill(stepper, sequence, rest.first(chunk), nullptr);
  if (cancelled()) {
    result.finish = FinishReason::kCancelled;
    result.prompt_tokens = stepper.length(sequence) - begin;
    result.held.resize(request.held.size() + static_cast<size_t>(result.prompt_tokens));
    result.prefill_seconds = seconds_since(start);
    return result;
  }
  const bool samples = request.max_new > 0;
  SampleParams sampling = request.sampling;
  std::vector<uint32_t> mask;
  // False: the reply is whole.
  const auto constrain = [&] {
    if (request.constraint == nullptr) return true;
    mask.assign(static_cast<size_t>((stepper.program().vocab + 31) / 32), 0);
    const TokenConstraint::Next next = request.constraint->fill(mask);
    sampling.allowed = next == TokenConstraint::Next::kMasked ? mask.data() : nullptr;
    return next != TokenConstraint::Next::kNothing;
  };
  if (samples && !constrain()) throw Error(ErrorCode::kBadInput, "the constraint lets no reply come");
  prefill(stepper, sequence, rest, samples ? &sampling : nullptr);
  result.prompt_tokens = n_prompt;
  if (!samples) {
    stepper.executor().synchronize();
    result.finish = FinishReason::kLength;
    result.prefill_seconds = seconds_since(start);
    return result;
  }
  Sampled sampled = stepper.samples().front();
  result.prefill_seconds = seconds_since(start);

  const auto decode_start = std::chrono::steady_clock::now();
  bool decoding = false;
  for (;;) {
    if (!sampled.valid) {
      result.finish = FinishReason::kFailed;
      result.unseen.clear();   // the last id has been read
      break;
    }
    result.unseen = {sampled.id};
    if (request.constraint != nullptr) request.constraint->accept(sampled.id);
    if (std::find(request.stop_ids.begin(), request.stop_ids.end(), sampled.id) != request.stop_ids.end()) {
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
    if (!constrain()) {
      result.finish = FinishReason::kStop;
      break;
    }
    if (decoding && request.constraint == nullptr) {
      stepper.advance();
    } else {
      const SequenceRows rows{sequence, {&sampled.id, 1}, Outputs::kLast, &sampling};
      stepper.run({&rows, 1});
      decoding = true;
    }
    result.held.push_back(sampled.id);
    sampled = stepper.samples().front();
    ++result.decode_tokens;
  }
  result.decode_seconds = seconds_since(decode_start);
  return result;
}

}  // namespace beryl
