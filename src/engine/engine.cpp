#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "base/threads.h"
#include "ops/sample.h"

namespace beryl {
namespace {

using Clock = std::chrono::steady_clock;

// Rows of logits are large; more guesses at once than these would not pay.
constexpr int kDraftRows = 24;
// How long a step waits for masks, as a share of what it takes itself, and the most of it.
constexpr double kMaskShare = 0.25, kLeastMaskSeconds = 200e-6, kMostMaskSeconds = 20e-3;
// Between looks at what was cancelled and what has come, while nobody can go on.
constexpr std::chrono::milliseconds kMaskPatience{5};

double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

EngineLimits EngineLimits::complete() const {
  EngineLimits all = *this;
  all.run.shares_pages = true;
  all.run.chunk_tokens = static_cast<int>(std::min<int64_t>(run.chunk_tokens, run.context));
  all.max_draft = std::min(max_draft, all.run.chunk_tokens - 1);
  if (run.step_tokens == 0) all.run.step_tokens = all.run.chunk_tokens + run.n_sequences;
  all.run.n_outputs = run.n_sequences + std::min(run.n_sequences * all.max_draft, kDraftRows);
  return all;
}

// One request, from submit to its end.
struct Engine::Sequence {
  Request request;
  std::shared_ptr<Channel> channel;
  uint64_t arrival = 0;

  std::vector<int32_t> ids;          // the prompt and the reply
  size_t n_prompt = 0;
  int64_t n_read = 0;                // of ids, in the cache
  int slot = -1;                     // row of the page tables; -1: waits
  uint64_t last_chunk = 0;
  std::vector<int64_t> marks;        // positions whose windows are to be kept when the prompt has been read so far

  bool may_draft = false;
  Drafter drafter;
  std::vector<int32_t> guesses;      // for this step
  int n_wanted = 0;                  // of these, worth checking

  std::shared_ptr<BoundReply> bound; // of a request with a constraint
  std::vector<int32_t> unaccepted;   // ids that the constraint has not heard of
  bool needs_masks = false;          // for what comes next
  bool is_held = false;              // they are not there
  double seconds_of_masks = 0;       // BoundReply::seconds, as far as is known

  std::vector<Sampled> fresh;        // tokens of this step
  bool ended = false;
  RequestResult result;
  Clock::time_point submitted, admitted, first_token;

  int64_t n_unread() const { return static_cast<int64_t>(ids.size()) - n_read; }
  int64_t n_reply() const { return static_cast<int64_t>(ids.size() - n_prompt); }
  bool was_admitted() const { return admitted != Clock::time_point(); }
};

Engine::Engine(const Program& program, const EngineLimits& limits, Backend& backend)
    : limits_(limits.complete()), vocab_(program.vocab), stepper_(program, limits_.run, backend), masks_(limits_.mask_workers, vocab_) {
  BERYL_CHECK(limits_.run.step_tokens > limits_.run.n_sequences, "a step has room for every sequence and a prompt");
  for (int slot = limits_.run.n_sequences - 1; slot >= 0; --slot) free_slots_.push_back(slot);
  publish();
  thread_ = start_thread("the engine's thread", [this] { run(); });
}

Engine::~Engine() {
  {
    const std::lock_guard lock(mutex_);
    draining_ = stopping_ = true;
  }
  work_.notify_one();
  thread_.join();
}

std::shared_ptr<Channel> Engine::submit(Request request) {
  const auto n_prompt = static_cast<int64_t>(request.prompt.size());
  if (n_prompt == 0) throw Error(ErrorCode::kBadInput, "the prompt is empty, at least one token was expected");
  if (n_prompt > limits_.run.context)
    throw Error(ErrorCode::kBadInput,
                fmt::format("the prompt has {} tokens, the context {}", n_prompt, limits_.run.context));
  for (int32_t id : request.prompt)
    if (id < 0 || id >= vocab_)
      throw Error(ErrorCode::kBadInput, fmt::format("the prompt holds token id {}, the model's ids go from 0 to {}", id, vocab_ - 1));

  auto sequence = std::make_unique<Sequence>();
  sequence->channel = std::make_shared<Channel>();
  sequence->submitted = Clock::now();
  sequence->n_prompt = request.prompt.size();
  sequence->ids = request.prompt;
  sequence->result.timings.prompt_tokens = n_prompt;
  sequence->may_draft = limits_.max_draft > 0 && request.draft && !uses_history(request.sampling);
  if (sequence->may_draft) sequence->drafter.read(sequence->ids);
  if (request.constraint != nullptr) {
    sequence->bound = std::make_shared<BoundReply>(std::move(request.constraint));
    sequence->needs_masks = true;
  }
  sequence->request = std::move(request);
  std::shared_ptr<Channel> channel = sequence->channel;
  if (sequence->request.max_new <= 0) {
    sequence->result.finish = FinishReason::kLength;
    channel->finish(std::move(sequence->result));
    return channel;
  }
  {
    const std::lock_guard lock(mutex_);
    // All that have not ended are counted: how many of the latest will be computed at once is not known before the next step.
    const int n_here = published_.n_running + published_.n_waiting + static_cast<int>(inbox_.size());
    const int room = limits_.run.n_sequences + limits_.max_waiting + (sequence->request.follows ? limits_.max_followers : 0);
    if (draining_ || n_here >= room) return nullptr;
    sequence->arrival = next_arrival_++;
    inbox_.push_back(std::move(sequence));
  }
  work_.notify_one();
  return channel;
}

void Engine::drain() {
  std::unique_lock lock(mutex_);
  draining_ = true;
  idle_.wait(lock, [&] { return !busy_ && inbox_.empty(); });
}

EngineCounts Engine::counts() const {
  const std::lock_guard lock(mutex_);
  EngineCounts counts = published_;
  counts.n_waiting += static_cast<int>(inbox_.size());
  return counts;
}

// ---- the engine's thread ---------------------------------------------------------------------------------------------

void Engine::run() {
  while (take_inbox()) {
    end_cancelled();
    if (!running_.empty() || !waiting_.empty()) {
      try {
        step();
      } catch (const Error& error) {
        end_failed_step(error.what());
      } catch (const std::bad_alloc&) {
        end_failed_step("not enough memory");
      }
    }
    remove_ended();
    publish();
  }
  for (SequencePtr& sequence : running_) end(*sequence, FinishReason::kCancelled);
  for (SequencePtr& sequence : waiting_) end(*sequence, FinishReason::kCancelled);
  remove_ended();
  publish();
}

// Waits while there is nothing to do. False: the engine ends.
bool Engine::take_inbox() {
  std::unique_lock lock(mutex_);
  if (running_.empty() && waiting_.empty() && inbox_.empty()) {
    busy_ = false;
    idle_.notify_all();
    work_.wait(lock, [&] { return stopping_ || !inbox_.empty(); });
  }
  busy_ = true;
  for (SequencePtr& sequence : inbox_) waiting_.push_back(std::move(sequence));
  published_.n_waiting += static_cast<int>(inbox_.size());
  inbox_.clear();
  return !stopping_;
}

void Engine::end_cancelled() {
  const auto end_one = [&](Sequence& sequence) {
    if (!sequence.channel->cancelled()) return;
    const int64_t n_wanted = sequence.channel->stopped_at();
    int64_t& n_reply = sequence.result.timings.reply_tokens;
    if (n_wanted >= 0) n_reply = std::min(n_reply, n_wanted);   // those behind it were sampled before the reader said so
    end(sequence, n_wanted >= 0 ? FinishReason::kStop : FinishReason::kCancelled);
  };
  for (SequencePtr& sequence : running_) end_one(*sequence);
  for (SequencePtr& sequence : waiting_) end_one(*sequence);
  remove_ended();
}

void Engine::step() {
  propose_drafts();
  ask_for_masks();
  await_masks();
  take_masks();
  remove_ended();
  if (running_.empty() && waiting_.empty()) return;
  plan();
  if (plan_.rows.empty()) return await_any_mask();
  run_rows();
}

void Engine::propose_drafts() {
  int n_rows = 0;
  for (const SequencePtr& each : running_) n_rows += each->n_unread() == 1;
  for (const SequencePtr& each : running_) {
    Sequence& sequence = *each;
    if (sequence.bound != nullptr && !sequence.needs_masks) continue;   // there are masks for those that it has
    sequence.guesses.clear();
    sequence.n_wanted = 0;
    if (!sequence.may_draft || sequence.n_unread() != 1) continue;
    sequence.drafter.read(sequence.ids);
    // The last token of a reply needs no place in the context, and none is guessed beyond it.
    const int64_t most = std::min({int64_t{limits_.max_draft}, limits_.run.context - sequence.n_read - 1,
                                   sequence.request.max_new - sequence.n_reply() - 1});
    if (most <= 0) continue;
    const std::span<const int32_t> guesses = sequence.drafter.propose(sequence.ids, static_cast<size_t>(most));
    sequence.guesses.assign(guesses.begin(), guesses.end());
    sequence.n_wanted = limits_.always_draft ? static_cast<int>(guesses.size())
                                             : sequence.drafter.worthwhile(guesses.size(), n_rows, cost_);
  }
}

void Engine::ask_for_masks() {
  const auto ask = [&](Sequence& sequence) {
    if (!sequence.needs_masks || !sequence.bound->is_ready() || !sequence.bound->error.empty()) return;
    sequence.bound->fresh = std::exchange(sequence.unaccepted, {});
    sequence.bound->guesses.assign(sequence.guesses.begin(), sequence.guesses.begin() + sequence.n_wanted);
    sequence.needs_masks = false;
    masks_.ask(sequence.bound);
  };
  for (const SequencePtr& each : running_) ask(*each);
  for (const SequencePtr& each : waiting_) ask(*each);   // so that they are let in with their masks
}

// A step waits a little for masks that are likely to come soon: a sequence that sits out loses a whole one.
void Engine::await_masks() {
  const double most = std::clamp(kMaskShare * decode_seconds_, kLeastMaskSeconds, kMostMaskSeconds);
  awaited_.clear();
  for (const SequencePtr& each : running_)
    if (each->bound != nullptr && !each->bound->is_ready() && each->seconds_of_masks < most) awaited_.push_back(each->bound.get());
  if (!awaited_.empty())
    masks_.wait(awaited_, awaited_.size(), std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(most)));
}

void Engine::take_masks() {
  const auto take = [&](Sequence& sequence) {
    if (sequence.bound == nullptr) return;
    sequence.is_held = !sequence.bound->is_ready();
    if (sequence.is_held) return;
    sequence.n_wanted = sequence.bound->n_guesses;
    sequence.seconds_of_masks = sequence.bound->seconds;
    if (!sequence.bound->error.empty()) {
      fail(sequence, Failure::kConstraint, sequence.bound->error);
    } else if (sequence.bound->masks[0].next == TokenConstraint::Next::kNothing) {
      end(sequence, FinishReason::kStop);
    }
  };
  for (const SequencePtr& each : running_) take(*each);
  for (const SequencePtr& each : waiting_) take(*each);
}

// Nobody can go on before a mask is there.
void Engine::await_any_mask() {
  awaited_.clear();
  for (const SequencePtr& each : running_)
    if (each->is_held) awaited_.push_back(each->bound.get());
  for (const SequencePtr& each : waiting_)
    if (each->is_held) awaited_.push_back(each->bound.get());
  BERYL_CHECK(!awaited_.empty(), "the oldest sequence that is not held gets on");
  masks_.wait(awaited_, 1, kMaskPatience);
}

void Engine::plan() {
  const SchedulerLimits limits = {limits_.run.n_sequences, limits_.run.step_tokens, limits_.run.chunk_tokens,
                                  limits_.run.n_outputs};
  for (;;) {
    running_views_.clear();
    waiting_views_.clear();
    for (const SequencePtr& each : running_)
      running_views_.push_back({each->n_read, stepper_.pages().n_pages(each->slot), each->n_unread(), each->n_wanted, each->last_chunk, each->is_held});
    // Who waits for a mask has not come yet, as it were.
    for (size_t i = 0; i < waiting_.size() && waiting_views_.size() < free_slots_.size(); ++i) {
      const Sequence& sequence = *waiting_[i];
      if (sequence.is_held) continue;
      const PrefixMatch match = sequence.request.reuse_prefix ? stepper_.match(sequence.ids) : PrefixMatch();
      waiting_views_.push_back({static_cast<int64_t>(sequence.ids.size()), match.n_tokens, match.n_idle});
    }
    plan_step(running_views_, waiting_views_, stepper_.pages().free_global_pages(), limits, plan_);
    if (plan_.preempted < 0) break;
    put_back(static_cast<size_t>(plan_.preempted));
  }
  admit(plan_.n_admitted);
}

void Engine::put_back(size_t index) {
  SequencePtr sequence = std::move(running_[index]);
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
  stepper_.reset(sequence->slot);
  free_slots_.push_back(sequence->slot);
  sequence->slot = -1;
  sequence->result.timings.recomputed_tokens += sequence->n_read;   // less what will be found again
  sequence->n_read = 0;
  ++sequence->result.timings.preemptions;
  const auto place = std::find_if(waiting_.begin(), waiting_.end(),
                                  [&](const SequencePtr& each) { return each->arrival > sequence->arrival; });
  waiting_.insert(place, std::move(sequence));
}

// Lets the first n in that are not held, and puts them behind the running ones. Only then into their order: the plan counts so.
void Engine::admit(int n) {
  for (int i = 0; i < n; ++i) {
    const auto first = std::find_if(waiting_.begin(), waiting_.end(), [](const SequencePtr& each) { return !each->is_held; });
    SequencePtr sequence = std::move(*first);
    waiting_.erase(first);
    sequence->slot = free_slots_.back();
    free_slots_.pop_back();
    RequestTimings& timings = sequence->result.timings;
    const PrefixMatch match = sequence->request.reuse_prefix ? stepper_.adopt(sequence->slot, sequence->ids) : PrefixMatch();
    sequence->n_read = match.n_tokens;
    sequence->marks.clear();
    const auto prompt_pages = static_cast<int64_t>((sequence->n_prompt - 1) / kPageTokens);
    for (int64_t mark : {match.n_known, prompt_pages * kPageTokens})
      if (mark > match.n_tokens) sequence->marks.push_back(mark);
    if (match.n_tokens > 0 && match.n_tokens == prompt_pages * kPageTokens)
      stepper_.keep_window(sequence->slot, match.n_tokens);
    if (!sequence->was_admitted()) {
      sequence->admitted = Clock::now();
      timings.queue_seconds = seconds_between(sequence->submitted, sequence->admitted);
      timings.reused_tokens = match.n_tokens;
      timings.known_tokens = match.n_known;
      timings.reuse_limit = !sequence->request.reuse_prefix             ? ReuseLimit::kOff
                            : match.n_tokens == prompt_pages * kPageTokens ? ReuseLimit::kWhole
                            : match.n_known > match.n_tokens              ? ReuseLimit::kWindow
                                                                          : ReuseLimit::kUnknown;
    } else {
      timings.recomputed_tokens -= match.n_tokens;
    }
    if (uses_history(sequence->request.sampling))
      stepper_.executor().set_history(sequence->slot, std::span(sequence->ids).first(sequence->n_prompt),
                                      std::span(sequence->ids).subspan(sequence->n_prompt));
    running_.push_back(std::move(sequence));
  }
}

void Engine::run_rows() {
  ++n_steps_;
  rows_.clear();
  slots_.clear();
  allowed_.clear();
  int n_rows = 0;
  bool prompts = false, plain = true;
  // The ids of a step are the tails of what sequences know; guesses are put behind them for the time of the step.
  for (const PlannedRows& row : plan_.rows) {
    Sequence& sequence = *running_[static_cast<size_t>(row.sequence)];
    const bool samples = row.n_ids == sequence.n_unread();
    prompts = prompts || row.n_ids > 1 || sequence.n_reply() == 0;
    n_rows += row.n_ids + row.n_draft;
    allowed_.emplace_back();
    if (samples && sequence.bound != nullptr)
      for (int i = 0; i <= row.n_draft; ++i) allowed_.back().push_back(sequence.bound->masks[static_cast<size_t>(i)].allowed());
    plain = plain && row.n_ids == 1 && row.n_draft == 0 && samples && sequence.bound == nullptr;
    sequence.ids.insert(sequence.ids.end(), sequence.guesses.begin(), sequence.guesses.begin() + row.n_draft);
    rows_.push_back({sequence.slot,
                     std::span(sequence.ids).subspan(static_cast<size_t>(sequence.n_read), static_cast<size_t>(row.n_ids + row.n_draft)),
                     row.n_draft > 0 ? Outputs::kAll
                     : samples       ? Outputs::kLast
                                     : Outputs::kNone,
                     samples ? &sequence.request.sampling : nullptr, allowed_.back()});
    slots_.push_back(sequence.slot);
  }
  const Clock::time_point begin = Clock::now();
  const auto take_guesses_off = [&] {
    for (const PlannedRows& row : plan_.rows) {
      std::vector<int32_t>& ids = running_[static_cast<size_t>(row.sequence)]->ids;
      ids.resize(ids.size() - static_cast<size_t>(row.n_draft));
    }
  };
  std::vector<Sampled> samples;
  try {
    if (plain && stepper_.can_advance(slots_)) {
      stepper_.advance();
    } else {
      stepper_.run(rows_);
    }
    samples = stepper_.samples();
  } catch (...) {
    take_guesses_off();
    throw;
  }
  take_guesses_off();
  const Clock::time_point now = Clock::now();
  const double seconds = seconds_between(begin, now);
  if (!prompts) {
    cost_.add(n_rows, seconds);
    decode_seconds_ = seconds;
  }
  ++totals_.steps;
  totals_.step_seconds += seconds;

  size_t next = 0;
  for (const PlannedRows& row : plan_.rows) {
    Sequence& sequence = *running_[static_cast<size_t>(row.sequence)];
    if (row.n_ids > 1) sequence.last_chunk = n_steps_;
    const size_t n = row.n_ids == sequence.n_unread() ? static_cast<size_t>(row.n_draft) + 1 : 0;
    take_samples(sequence, row, std::span(samples).subspan(next, n));
    next += n;
  }
  std::sort(running_.begin(), running_.end(),
            [](const SequencePtr& a, const SequencePtr& b) { return a->arrival < b->arrival; });
}

// samples: of the last id and of each guess; none where the prompt goes on.
void Engine::take_samples(Sequence& sequence, const PlannedRows& row, std::span<const Sampled> samples) {
  const int64_t n_before = sequence.n_read;
  sequence.n_read += row.n_ids;
  if (samples.empty()) return after_reading(sequence, n_before);

  RequestTimings& timings = sequence.result.timings;
  const Clock::time_point now = Clock::now();
  if (sequence.n_reply() == 0 && timings.reply_tokens == 0) {
    sequence.first_token = now;
    timings.prefill_seconds = seconds_between(sequence.admitted, now);
  } else {
    ++timings.decode_steps;
  }
  timings.decode_seconds = seconds_between(sequence.first_token, now);

  // A sample counts as long as the guesses before it were right.
  size_t n_right = 0;
  while (n_right + 1 < samples.size() && samples[n_right].valid && samples[n_right].id == sequence.guesses[n_right]) ++n_right;
  std::optional<FinishReason> finish;
  size_t n_kept = 0;
  sequence.fresh.clear();
  for (; n_kept <= n_right && !finish; ++n_kept) {
    const Sampled& sampled = samples[n_kept];
    if (!sampled.valid) {
      finish = FinishReason::kFailed;
      break;
    }
    ++timings.reply_tokens;
    if (std::find(sequence.request.stop_ids.begin(), sequence.request.stop_ids.end(), sampled.id) !=
        sequence.request.stop_ids.end()) {
      sequence.result.stop_id = sampled.id;
      finish = FinishReason::kStop;
      break;
    }
    sequence.fresh.push_back(sampled);
    sequence.ids.push_back(sampled.id);
    if (sequence.n_reply() >= sequence.request.max_new) {
      finish = FinishReason::kLength;
    } else if (static_cast<int64_t>(sequence.ids.size()) > limits_.run.context) {
      finish = FinishReason::kContext;
    }
  }
  if (sequence.bound != nullptr) {
    for (const Sampled& sampled : sequence.fresh) sequence.unaccepted.push_back(sampled.id);
    sequence.needs_masks = true;
  }
  timings.drafted_tokens += row.n_draft;
  timings.accepted_tokens += static_cast<int64_t>(std::min(n_right, n_kept));
  if (row.n_draft > 0) {
    sequence.drafter.learn(n_right, static_cast<size_t>(row.n_draft));
  } else if (!sequence.guesses.empty() && row.n_ids == 1) {
    sequence.drafter.learn(samples[0].id == sequence.guesses[0] ? 1 : 0, 1);
  }
  sequence.n_read += static_cast<int64_t>(std::min(n_right, n_kept));
  BERYL_CHECK(row.n_draft == 0 || stepper_.rewind(sequence.slot, sequence.n_read), "guesses are no more than a chunk");
  if (!sequence.fresh.empty()) sequence.channel->push(sequence.fresh);
  if (finish == FinishReason::kFailed)
    return fail(sequence, Failure::kNoToken, "the model computes no finite numbers for this text, or every token was banned");
  after_reading(sequence, n_before);
  if (finish) end(sequence, *finish);
}

void Engine::after_reading(Sequence& sequence, int64_t n_before) {
  if (!sequence.request.reuse_prefix) return;
  stepper_.commit(sequence.slot, std::span(sequence.ids).first(static_cast<size_t>(sequence.n_read)));
  for (int64_t mark : sequence.marks)
    if (n_before < mark && mark <= sequence.n_read) stepper_.keep_window(sequence.slot, mark);
}

// Its pages are free from here on; remove_ended takes it off the lists.
void Engine::end(Sequence& sequence, FinishReason finish) {
  if (sequence.ended) return;
  sequence.ended = true;
  if (sequence.slot >= 0) {
    // What it computed may be wrong, so nobody shall find it.
    if (finish == FinishReason::kFailed) stepper_.hide_prefix(sequence.slot);
    stepper_.reset(sequence.slot);
    free_slots_.push_back(sequence.slot);
    sequence.slot = -1;
  }
  sequence.result.finish = finish;
  const RequestTimings& timings = sequence.result.timings;
  ++totals_.finished[static_cast<size_t>(finish)];
  totals_.prompt_tokens += timings.prompt_tokens;
  totals_.reused_tokens += timings.reused_tokens;
  totals_.reply_tokens += timings.reply_tokens;
  totals_.drafted_tokens += timings.drafted_tokens;
  totals_.accepted_tokens += timings.accepted_tokens;
  totals_.preemptions += timings.preemptions;
  totals_.recomputed_tokens += timings.recomputed_tokens;
}

void Engine::fail(Sequence& sequence, Failure failure, const std::string& error) {
  if (sequence.ended) return;
  sequence.result.failure = failure;
  sequence.result.error = error;
  end(sequence, FinishReason::kFailed);
}

void Engine::end_failed_step(const std::string& error) {
  for (SequencePtr& sequence : running_) fail(*sequence, Failure::kDevice, error);
}

// The result goes out only when the sequence holds nothing any more and the counts tell of it.
void Engine::remove_ended() {
  std::vector<SequencePtr> ended;
  const auto take_from = [&](auto& list) {
    for (SequencePtr& sequence : list)
      if (sequence->ended) ended.push_back(std::move(sequence));
    std::erase(list, nullptr);
  };
  take_from(running_);
  take_from(waiting_);
  if (ended.empty()) return;
  publish();
  for (SequencePtr& sequence : ended) sequence->channel->finish(std::move(sequence->result));
}

void Engine::publish() {
  const PageTables& pages = stepper_.pages();
  totals_.n_running = static_cast<int>(running_.size());
  totals_.n_waiting = static_cast<int>(waiting_.size());
  totals_.n_pages = totals_.n_free_pages = totals_.n_known_pages = 0;
  for (int group = 0; group < pages.n_groups(); ++group) {
    totals_.n_pages += pages.pool(group).n_pages();
    totals_.n_free_pages += pages.free_pages(group);
    totals_.n_known_pages += pages.pool(group).n_idle();
  }
  const std::lock_guard lock(mutex_);
  published_ = totals_;
}

}  // namespace beryl
