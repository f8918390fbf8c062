// What: every reply under load is the one given alone, whatever waits, is cancelled, fails, is put back or found in the
//       caches; each ends once, with counts that add up; no page leaks.
// How:  a backend that checks every page a token reads (text_model.h), with thousands of requests from several threads.
#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "engine/text_model.h"
#include "model/test_checkpoints.h"
#include "ops/random_matrix.h"

namespace beryl {
namespace {

using namespace std::chrono_literals;
using Ids = std::vector<int32_t>;

struct Answer {
  Ids ids;
  RequestResult result;
};

Answer read_all(Channel& channel) {
  Answer answer;
  std::vector<Sampled> tokens;
  while (channel.read(tokens, 10s)) {
    for (const Sampled& token : tokens) answer.ids.push_back(token.id);
    tokens.clear();
  }
  answer.result = channel.result();
  return answer;
}

EngineLimits limits_of(int64_t context, int n_sequences, int chunk, int64_t cache_tokens = 0) {
  EngineLimits limits;
  limits.run.context = context;
  limits.run.n_sequences = n_sequences;
  limits.run.chunk_tokens = chunk;
  limits.run.cache_tokens = cache_tokens;
  limits.run.kept_windows = 2;
  limits.always_draft = true;   // a step costs nothing here, so nothing could be said of what pays
  return limits;
}

// Beginnings that many share, and ends of their own.
Ids random_prompt(RandomStream& random, int64_t most) {
  const int family = random.below(4);
  const auto n = static_cast<size_t>(1 + random.below(static_cast<int>(most)));
  const size_t n_shared = random.below(3) == 0 ? 0 : static_cast<size_t>(random.below(static_cast<int>(most)));
  Ids ids(n);
  for (size_t i = 0; i < n; ++i)
    ids[i] = i < n_shared ? static_cast<int32_t>((i * i + static_cast<size_t>(family)) % 20) : random.below(test::kPoison);
  return ids;
}

void expect_no_page_leaked(const Engine& engine) {
  const EngineCounts counts = engine.counts();
  EXPECT_EQ(counts.n_running, 0);
  EXPECT_EQ(counts.n_waiting, 0);
  EXPECT_EQ(counts.n_free_pages, counts.n_pages);
}

struct LoadCase {
  const char* name;
  int window;
  EngineLimits limits;
};

class EngineLoadTest : public testing::TestWithParam<LoadCase> {};
INSTANTIATE_TEST_SUITE_P(Engine, EngineLoadTest,
                         testing::Values(LoadCase{"enough", 0, limits_of(512, 8, 64)},
                                         LoadCase{"sliding", 100, limits_of(512, 8, 64)},
                                         LoadCase{"short_of_pages", 100, limits_of(512, 8, 64, 600)},
                                         LoadCase{"one_at_a_time", 70, limits_of(300, 1, 33)},
                                         LoadCase{"small_chunks", 130, limits_of(400, 5, 7, 500)}),
                         [](const auto& info) { return info.param.name; });

TEST_P(EngineLoadTest, EveryReplyIsTheOneGivenAlone) {
  constexpr int kThreads = 6, kRequests = 300;
  const Program program = test::text_program(GetParam().window);
  test::TextBackend backend;
  Engine engine(program, GetParam().limits, backend);
  const int64_t context = engine.context();
  std::atomic<int> n_cancelled = 0, n_failed = 0, n_refused = 0;
  std::atomic<int64_t> n_tokens = 0, n_reused = 0, n_accepted = 0, n_preempted = 0;
  const auto client = [&](uint64_t seed) {
    RandomStream random(seed);
    struct Open {
      std::shared_ptr<Channel> channel;
      Ids expected;
      Ids seen;
      int cancel_after = -1;
      bool poisoned = false;
      int64_t n_prompt = 0;
    };
    std::vector<Open> open;
    const auto finish = [&](Open& each) {
      std::vector<Sampled> tokens;
      while (each.channel->read(tokens, 10s)) {
        for (const Sampled& token : tokens) each.seen.push_back(token.id);
        tokens.clear();
        if (each.cancel_after >= 0 && static_cast<int>(each.seen.size()) >= each.cancel_after) each.channel->cancel();
      }
      const RequestResult& result = each.channel->result();
      n_tokens += static_cast<int64_t>(each.seen.size());
      n_reused += result.timings.reused_tokens;
      n_accepted += result.timings.accepted_tokens;
      n_preempted += result.timings.preemptions;
      ASSERT_LE(result.timings.accepted_tokens, result.timings.drafted_tokens);
      ASSERT_LT(result.timings.reused_tokens, each.n_prompt);
      if (each.poisoned) {
        ASSERT_TRUE(result.finish == FinishReason::kFailed || result.finish == FinishReason::kCancelled);
        ASSERT_TRUE(each.seen.empty());
        ++n_failed;
      } else if (result.finish == FinishReason::kCancelled) {
        ASSERT_GE(each.cancel_after, 0);
        ASSERT_LE(each.seen.size(), each.expected.size());
        ASSERT_TRUE(std::equal(each.seen.begin(), each.seen.end(), each.expected.begin()));
        ++n_cancelled;
      } else {
        ASSERT_EQ(each.seen, each.expected);
        ASSERT_EQ(result.timings.reply_tokens, static_cast<int64_t>(each.seen.size()) + (result.finish == FinishReason::kStop));
      }
    };
    for (int i = 0; i < kRequests; ++i) {
      Request request;
      Open each;
      request.prompt = random_prompt(random, random.below(10) == 0 ? context : random.below(2) == 0 ? context / 3 : 30);
      request.max_new = 1 + random.below(random.below(4) == 0 ? 300 : 40);
      if (random.below(2) == 0) request.stop_ids = {3};
      request.sampling.temperature = static_cast<float>(random.below(2));
      request.sampling.seed = random.bits();
      request.reuse_prefix = random.below(8) != 0;
      request.draft = random.below(8) != 0;
      each.n_prompt = static_cast<int64_t>(request.prompt.size());
      each.poisoned = random.below(20) == 0;
      if (each.poisoned) request.prompt[static_cast<size_t>(random.below(static_cast<int>(each.n_prompt)))] = test::kPoison;
      each.expected = test::text_model_reply(request.prompt, request.max_new, request.sampling, request.stop_ids, context);
      if (random.below(6) == 0) each.cancel_after = random.below(20);
      each.channel = engine.submit(std::move(request));
      if (each.channel == nullptr) {
        ++n_refused;
      } else {
        if (each.cancel_after == 0) each.channel->cancel();
        open.push_back(std::move(each));
      }
      while (open.size() > 12 || (!open.empty() && random.below(4) == 0)) {
        const auto at = static_cast<size_t>(random.below(static_cast<int>(open.size())));
        ASSERT_NO_FATAL_FAILURE(finish(open[at]));
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
    for (Open& each : open) ASSERT_NO_FATAL_FAILURE(finish(each));
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(client, static_cast<uint64_t>(i + 1));
  for (std::thread& thread : threads) thread.join();
  const EngineCounts counts = engine.counts();
  expect_no_page_leaked(engine);
  int64_t n_ended = 0;
  for (int64_t n : counts.finished) n_ended += n;
  EXPECT_EQ(n_ended + n_refused, kThreads * kRequests);
  EXPECT_EQ(counts.finished[static_cast<size_t>(FinishReason::kCancelled)], n_cancelled + n_failed - counts.finished[static_cast<size_t>(FinishReason::kFailed)]);
  // The runs saw what they are there for; how much of it depends on how the threads met.
  EXPECT_GT(n_cancelled, 0);
  EXPECT_GT(n_failed, 0);
  EXPECT_GT(n_tokens, 5000);
  EXPECT_GT(n_reused, 0);
  EXPECT_GT(n_accepted, 0);
  EXPECT_EQ(counts.preemptions, n_preempted);
  if (GetParam().limits.run.cache_tokens > 0) {
    EXPECT_GT(n_preempted, 0);
  } else {
    EXPECT_EQ(n_preempted, 0);
  }
}

Request request_for(Ids prompt, int64_t max_new) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_new = max_new;
  return request;
}

class EngineTest : public testing::Test {
 protected:
  std::unique_ptr<Engine> engine(const EngineLimits& limits, int window = 100) {
    program_ = test::text_program(window);
    return std::make_unique<Engine>(program_, limits, backend_);
  }
  static Ids ids(size_t n, int32_t step = 1) {
    Ids all(n);
    for (size_t i = 0; i < n; ++i) all[i] = static_cast<int32_t>((i * static_cast<size_t>(step) + i / 7) % 20);
    return all;
  }

  Program program_;
  test::TextBackend backend_;
};

TEST_F(EngineTest, AConversationReadsOnlyWhatIsNew) {
  const auto each = engine(limits_of(1024, 2, 64));
  Ids text = ids(300);
  const Answer first = read_all(*each->submit(request_for(text, 30)));
  EXPECT_EQ(first.result.timings.reused_tokens, 0);
  EXPECT_EQ(first.result.timings.reuse_limit, ReuseLimit::kUnknown);
  text.insert(text.end(), first.ids.begin(), first.ids.end());
  const Ids user = ids(50, 3);
  text.insert(text.end(), user.begin(), user.end());
  const Answer second = read_all(*each->submit(request_for(text, 30)));
  EXPECT_EQ(second.result.timings.reused_tokens, 320);   // whole pages of the 329 that were read
  EXPECT_EQ(second.ids, test::text_model_reply(text, 30, {}, {}, 1024));
  // The same once more: all but the last page.
  const Answer again = read_all(*each->submit(request_for(text, 30)));
  EXPECT_EQ(again.result.timings.reused_tokens, static_cast<int64_t>((text.size() - 1) / 64 * 64));
  EXPECT_EQ(again.result.timings.reuse_limit, ReuseLimit::kWhole);
  EXPECT_EQ(again.ids, second.ids);
  Request off = request_for(text, 30);
  off.reuse_prefix = false;
  const Answer without = read_all(*each->submit(std::move(off)));
  EXPECT_EQ(without.result.timings.reused_tokens, 0);
  EXPECT_EQ(without.result.timings.reuse_limit, ReuseLimit::kOff);
  EXPECT_EQ(without.ids, second.ids);
}

TEST_F(EngineTest, ABeginningThatWasOnceMissedIsKeptForTheNext) {
  // A long text of which the window in the middle is gone by the time that another goes on from there.
  EngineLimits limits = limits_of(1024, 1, 64);
  limits.run.kept_windows = 1;
  const auto each = engine(limits, 128);
  const Ids shared = ids(400);
  const auto with_end = [&](int32_t step) {
    Ids text = shared;
    const Ids end = ids(500, step);
    text.insert(text.end(), end.begin(), end.end());
    return text;
  };
  read_all(*each->submit(request_for(with_end(3), 2)));
  const Answer second = read_all(*each->submit(request_for(with_end(5), 2)));
  EXPECT_EQ(second.result.timings.reuse_limit, ReuseLimit::kWindow);
  EXPECT_EQ(second.result.timings.known_tokens, 384);
  EXPECT_LT(second.result.timings.reused_tokens, 384);
  const Answer third = read_all(*each->submit(request_for(with_end(7), 2)));
  EXPECT_EQ(third.result.timings.reused_tokens, 384);
}

TEST_F(EngineTest, TextsThatRepeatAreGuessed) {
  const auto each = engine(limits_of(2048, 1, 64));
  // After the first hundred tokens of such a model's greedy reply, what comes is mostly what came.
  Request request = request_for(ids(20), 600);
  const Answer answer = read_all(*each->submit(std::move(request)));
  EXPECT_EQ(answer.ids, test::text_model_reply(ids(20), 600, {}, {}, 2048));
  EXPECT_GT(answer.result.timings.accepted_tokens, 100);
  EXPECT_LT(answer.result.timings.decode_steps, 599 - answer.result.timings.accepted_tokens + 1);
  Request plain = request_for(ids(20), 600);
  plain.draft = false;
  const Answer without = read_all(*each->submit(std::move(plain)));
  EXPECT_EQ(without.ids, answer.ids);
  EXPECT_EQ(without.result.timings.drafted_tokens, 0);
  EXPECT_EQ(without.result.timings.decode_steps, 599);
}

TEST_F(EngineTest, RepliesEndForTheRightReason) {
  const auto each = engine(limits_of(100, 2, 16), 0);
  const Ids prompt = ids(90);
  const Ids all = test::text_model_reply(prompt, 1000, {}, {}, 100);
  ASSERT_EQ(all.size(), 11u);   // the last one needs no place
  Answer answer = read_all(*each->submit(request_for(prompt, 1000)));
  EXPECT_EQ(answer.result.finish, FinishReason::kContext);
  EXPECT_EQ(answer.ids, all);
  answer = read_all(*each->submit(request_for(prompt, 4)));
  EXPECT_EQ(answer.result.finish, FinishReason::kLength);
  EXPECT_EQ(answer.ids, Ids(all.begin(), all.begin() + 4));
  Request stopped = request_for(prompt, 1000);
  stopped.stop_ids = {all[6]};
  answer = read_all(*each->submit(std::move(stopped)));
  EXPECT_EQ(answer.result.finish, FinishReason::kStop);
  EXPECT_EQ(answer.result.stop_id, all[6]);
  EXPECT_EQ(answer.ids, Ids(all.begin(), std::find(all.begin(), all.end(), all[6])));
  answer = read_all(*each->submit(request_for(prompt, 0)));
  EXPECT_EQ(answer.result.finish, FinishReason::kLength);
  EXPECT_TRUE(answer.ids.empty());
  answer = read_all(*each->submit(request_for(ids(100), 5)));
  EXPECT_EQ(answer.result.finish, FinishReason::kContext);
  EXPECT_EQ(answer.ids.size(), 1u);
}

TEST_F(EngineTest, WhatCanNotBeRunIsRefused) {
  EngineLimits limits = limits_of(100, 1, 16);
  limits.max_waiting = 2;
  const auto each = engine(limits);
  test::expect_refused([&] { each->submit(request_for(ids(101), 1)); }, ErrorCode::kBadInput, {"101 tokens", "100"});
  test::expect_refused([&] { each->submit(request_for({}, 1)); }, ErrorCode::kBadInput, {"empty"});
  test::expect_refused([&] { each->submit(request_for({1, test::kTextVocab}, 1)); }, ErrorCode::kBadInput, {"24", "23"});
  test::expect_refused([&] { each->submit(request_for({-1}, 1)); }, ErrorCode::kBadInput, {"-1"});
  // A full queue: null at once, and room again later.
  std::vector<std::shared_ptr<Channel>> channels;
  while (std::shared_ptr<Channel> channel = each->submit(request_for(ids(90), 10))) channels.push_back(std::move(channel));
  EXPECT_GE(channels.size(), 2u);
  for (const auto& channel : channels) EXPECT_EQ(read_all(*channel).ids.size(), 10u);
  EXPECT_NE(each->submit(request_for(ids(9), 1)), nullptr);
}

TEST_F(EngineTest, AllThatThereIsRoomForAreTakenHoweverFastTheyCome) {
  EngineLimits limits = limits_of(100, 2, 16);
  limits.max_waiting = 3;
  const auto each = engine(limits);
  for (int round = 0; round < 20; ++round) {
    backend_.most_rows = 0;   // none gets on, and so none ends, before all have asked
    std::vector<std::shared_ptr<Channel>> channels;
    for (int i = 0; i < 9; ++i)
      if (std::shared_ptr<Channel> channel = each->submit(request_for(ids(20), 5))) channels.push_back(std::move(channel));
    EXPECT_EQ(channels.size(), 2u + 3u);
    backend_.most_rows = INT64_MAX;
    for (const auto& channel : channels) EXPECT_EQ(read_all(*channel).ids.size(), 5u);
  }
}

TEST_F(EngineTest, AFailedDeviceEndsItsRequestsOnly) {
  const auto each = engine(limits_of(200, 2, 16));
  backend_.fails_at = 5;
  const Answer failed = read_all(*each->submit(request_for(ids(30), 100)));
  EXPECT_EQ(failed.result.finish, FinishReason::kFailed);
  EXPECT_EQ(failed.result.failure, Failure::kDevice);
  EXPECT_NE(failed.result.error.find("device has failed"), std::string::npos);
  const Answer after = read_all(*each->submit(request_for(ids(30), 20)));
  EXPECT_EQ(after.ids, test::text_model_reply(ids(30), 20, {}, {}, 200));
  expect_no_page_leaked(*each);
}

// Which ids may come depends on all that have come, and a reply is whole when they sum up to 0 of 397. Nothing comes before all
// requests are there.
class SumRule : public TokenConstraint {
 public:
  explicit SumRule(const std::atomic<bool>& all_came) : all_came_(all_came) {}
  Next fill(std::span<uint32_t> mask) override {
    while (!all_came_) std::this_thread::yield();
    EXPECT_EQ(mask[0], 0u);
    if (!sums_.empty() && sums_.back() % 397 == 0) return Next::kNothing;
    const int64_t sum = sums_.empty() ? 0 : sums_.back();
    if (sum % 5 == 1) return Next::kAnything;
    for (int32_t id = 0; id < test::kTextVocab; ++id) mask[0] |= (id + sum) % 3 == 0 ? 0u : 1u << id;
    return Next::kMasked;
  }
  void accept(int32_t id) override { sums_.push_back((sums_.empty() ? 0 : sums_.back()) + id + 1); }
  void rollback(int n) override {
    ASSERT_LE(n, kMaxRollback);
    ASSERT_LE(static_cast<size_t>(n), sums_.size());
    sums_.resize(sums_.size() - static_cast<size_t>(n));
  }

  // A reply within it, one id after the other; whole: it has ended by itself.
  static Ids reply(const Ids& prompt, size_t max_new, bool& whole) {
    const std::atomic<bool> all_came = true;
    SumRule rule(all_came);
    Ids reply;
    whole = false;
    while (reply.size() < max_new && !whole) {
      uint32_t mask = 0;
      SampleParams params;
      if (rule.fill({&mask, 1}) == Next::kMasked) params.allowed = &mask;
      Ids text = prompt;
      text.insert(text.end(), reply.begin(), reply.end());
      reply.push_back(test::text_model_reply(text, 1, params, {}, 1 << 20).at(0));
      rule.accept(reply.back());
      whole = rule.fill({&(mask = 0), 1}) == Next::kNothing;
    }
    return reply;
  }

 private:
  std::vector<int64_t> sums_;
  const std::atomic<bool>& all_came_;
};

TEST_F(EngineTest, AConstraintHoldsWithGuessesAndWhenPutBack) {
  const auto each = engine(limits_of(256, 4, 16, 300));
  std::vector<std::shared_ptr<Channel>> channels;
  std::atomic<bool> all_came = false;
  for (size_t i = 0; i < 12; ++i) {
    Request request = request_for(ids(40 + i), 120);
    request.constraint = std::make_unique<SumRule>(all_came);
    channels.push_back(each->submit(std::move(request)));
  }
  all_came = true;
  int64_t n_preempted = 0, n_drafted = 0, n_accepted = 0, n_whole = 0;
  for (size_t i = 0; i < channels.size(); ++i) {
    const Answer answer = read_all(*channels[i]);
    bool whole = false;
    EXPECT_EQ(answer.ids, SumRule::reply(ids(40 + i), 120, whole));
    EXPECT_EQ(answer.result.finish, whole ? FinishReason::kStop : FinishReason::kLength);
    EXPECT_EQ(answer.result.stop_id, -1);
    n_whole += whole;
    n_preempted += answer.result.timings.preemptions;
    n_drafted += answer.result.timings.drafted_tokens;
    n_accepted += answer.result.timings.accepted_tokens;
  }
  EXPECT_GT(n_preempted, 0);
  EXPECT_GT(n_whole, 0);
  EXPECT_LT(n_whole, 12);
  EXPECT_GT(n_accepted, 50);
  EXPECT_GT(n_drafted, n_accepted);
  expect_no_page_leaked(*each);
}

// Whose masks wait for the test, from the n-th on.
class SlowRule : public TokenConstraint {
 public:
  SlowRule(int n, const std::atomic<bool>& go) : n_(n), go_(go) {}
  Next fill(std::span<uint32_t>) override {
    while (--n_ <= 0 && !go_) std::this_thread::yield();
    return Next::kAnything;
  }
  void accept(int32_t) override {}
  void rollback(int) override {}

 private:
  int n_;
  const std::atomic<bool>& go_;
};

TEST_F(EngineTest, AMaskThatTakesLongHoldsUpItsRequestOnly) {
  const auto each = engine(limits_of(256, 4, 16, 800));
  std::atomic<bool> go = false;
  const auto bound = [&](int n_quick) {
    Request request = request_for(ids(30), 60);
    request.constraint = std::make_unique<SlowRule>(n_quick, go);
    return each->submit(std::move(request));
  };
  for (const int n_quick : {1, 2, 9}) {   // before it is let in; behind its first token; later
    go = false;
    const auto slow = bound(n_quick);
    std::vector<std::shared_ptr<Channel>> others;
    for (size_t i = 0; i < 5; ++i) others.push_back(i % 2 == 0 ? each->submit(request_for(ids(30), 60)) : bound(1 << 20));
    for (const auto& other : others) EXPECT_EQ(read_all(*other).ids, test::text_model_reply(ids(30), 60, {}, {}, 256));
    std::vector<Sampled> tokens;
    EXPECT_TRUE(slow->read(tokens, std::chrono::milliseconds(0)));
    EXPECT_LT(tokens.size(), 60u);
    // One that leaves meanwhile is let go at once, though its mask is still being made.
    const auto leaving = bound(n_quick);
    while (leaving->read(tokens, std::chrono::milliseconds(0)) && each->counts().n_running + each->counts().n_waiting < 2) std::this_thread::yield();
    leaving->cancel();
    EXPECT_EQ(read_all(*leaving).result.finish, FinishReason::kCancelled);
    go = true;
    EXPECT_EQ(read_all(*slow).result.finish, FinishReason::kLength);
  }
  expect_no_page_leaked(*each);
}

// Fails at its n-th call of a kind.
class FailingRule : public TokenConstraint {
 public:
  FailingRule(int fills, int accepts) : fills_(fills), accepts_(accepts) {}
  Next fill(std::span<uint32_t>) override {
    if (--fills_ == 0) throw std::runtime_error("the rule has failed, as the test wanted");
    return Next::kAnything;
  }
  void accept(int32_t) override {
    if (--accepts_ == 0) throw std::runtime_error("the rule has failed, as the test wanted");
  }
  void rollback(int) override {}

 private:
  int fills_, accepts_;
};

TEST_F(EngineTest, AConstraintThatFailsEndsItsRequestOnly) {
  const auto each = engine(limits_of(256, 4, 16));
  for (const auto& [fills, accepts] : {std::pair(1, 0), {5, 0}, {40, 0}, {0, 1}, {0, 7}, {0, 60}}) {
    Request request = request_for(ids(30), 100);
    request.constraint = std::make_unique<FailingRule>(fills, accepts);
    const auto failing = each->submit(std::move(request)), beside = each->submit(request_for(ids(31), 100));
    const Answer failed = read_all(*failing);
    EXPECT_EQ(failed.result.finish, FinishReason::kFailed);
    EXPECT_EQ(failed.result.failure, Failure::kConstraint);
    EXPECT_NE(failed.result.error.find("as the test wanted"), std::string::npos) << failed.result.error;
    EXPECT_EQ(read_all(*beside).ids, test::text_model_reply(ids(31), 100, {}, {}, 256));
  }
  expect_no_page_leaked(*each);
}

TEST_F(EngineTest, ACancelFreesWithinOneStep) {
  const auto each = engine(limits_of(1 << 16, 1, 32), 0);
  // Within its prompt: of 60,000 tokens most are never read.
  const auto channel = each->submit(request_for(ids(60'000), 1));
  while (backend_.n_rows < 64) std::this_thread::yield();
  channel->cancel();
  const Answer answer = read_all(*channel);
  EXPECT_EQ(answer.result.finish, FinishReason::kCancelled);
  const int64_t n_read = backend_.n_rows;
  EXPECT_LT(n_read, 50'000);
  expect_no_page_leaked(*each);
  EXPECT_EQ(read_all(*each->submit(request_for(ids(3), 3))).ids.size(), 3u);
}

TEST_F(EngineTest, WhoHasWhatItWantsHasStoppedTheReply) {
  const auto each = engine(limits_of(1 << 16, 1, 32), 0);
  const auto channel = each->submit(request_for(ids(40), 60'000));
  std::vector<Sampled> tokens;
  while (tokens.size() < 5) ASSERT_TRUE(channel->read(tokens, 10s));
  channel->stop(5);
  const Answer answer = read_all(*channel);
  EXPECT_EQ(answer.result.finish, FinishReason::kStop);
  EXPECT_EQ(answer.result.timings.reply_tokens, 5);
  const EngineCounts counts = each->counts();
  EXPECT_EQ(counts.finished[static_cast<size_t>(FinishReason::kStop)], 1);
  EXPECT_EQ(counts.finished[static_cast<size_t>(FinishReason::kCancelled)], 0);
  EXPECT_EQ(counts.reply_tokens, 5);
  expect_no_page_leaked(*each);
}

TEST_F(EngineTest, DrainingEndsWhatWasTakenAndTakesNoMore) {
  const auto each = engine(limits_of(300, 2, 16));
  std::vector<std::shared_ptr<Channel>> channels;
  for (int i = 0; i < 10; ++i) channels.push_back(each->submit(request_for(ids(50, i + 1), 40)));
  each->drain();
  expect_no_page_leaked(*each);
  EXPECT_EQ(each->submit(request_for(ids(5), 1)), nullptr);
  for (const auto& channel : channels) EXPECT_EQ(read_all(*channel).ids.size(), 40u);
}

TEST_F(EngineTest, AnEngineThatGoesAwayCancelsWhatRuns) {
  auto each = engine(limits_of(1 << 16, 1, 16), 0);
  const auto running = each->submit(request_for(ids(20), 1 << 15)), waiting = each->submit(request_for(ids(20), 5));
  each.reset();
  EXPECT_EQ(read_all(*running).result.finish, FinishReason::kCancelled);
  EXPECT_EQ(read_all(*waiting).result.finish, FinishReason::kCancelled);
}

}  // namespace
}  // namespace beryl
