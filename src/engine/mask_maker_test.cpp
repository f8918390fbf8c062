// What: masks are those of the constraint, guesses included; replies whose masks are slow wait for each other and leave a worker
//       to the others.
// How:  constraints that say what was asked of them, and wait for the test.
#include "engine/mask_maker.h"

#include <stdexcept>

#include <gtest/gtest.h>

namespace beryl {
namespace {

// Allows the id that is one more than the last, up to `last`; then the reply is whole.
class CountUp : public TokenConstraint {
 public:
  explicit CountUp(int32_t last) : last_(last) {}
  Next fill(std::span<uint32_t> mask) override {
    if (next_ > last_) return Next::kNothing;
    mask[static_cast<size_t>(next_) / 32] |= 1u << (next_ % 32);
    return Next::kMasked;
  }
  void accept(int32_t id) override {
    if (id != next_) throw std::runtime_error("that was not the next number");
    ++next_;
  }
  void rollback(int n) override { next_ -= n; }

 private:
  int32_t next_ = 0, last_;
};

class Waits : public TokenConstraint {
 public:
  Waits(std::atomic<int>& n_waiting, const std::atomic<bool>& go) : n_waiting_(n_waiting), go_(go) {}
  Next fill(std::span<uint32_t>) override {
    ++n_waiting_;
    while (!go_) std::this_thread::yield();
    return Next::kAnything;
  }
  void accept(int32_t) override {}
  void rollback(int) override {}

 private:
  std::atomic<int>& n_waiting_;
  const std::atomic<bool>& go_;
};

void make(MaskMaker& maker, const std::shared_ptr<BoundReply>& reply) {
  maker.ask(reply);
  const BoundReply* const one = reply.get();
  while (!reply->is_ready()) maker.wait({&one, 1}, 1, std::chrono::seconds(1));
}

TEST(MaskMakerTest, GuessesAreCheckedAndTakenBack) {
  MaskMaker maker(2, 50);
  const auto reply = std::make_shared<BoundReply>(std::make_unique<CountUp>(40));
  reply->guesses = {0, 1, 2, 9, 3};
  make(maker, reply);
  EXPECT_EQ(reply->n_guesses, 3);
  for (int i = 0; i <= 3; ++i) {
    const Mask& mask = reply->masks[static_cast<size_t>(i)];
    EXPECT_TRUE(mask.allows(i));
    EXPECT_FALSE(mask.allows(i + 1));
    ASSERT_NE(mask.allowed(), nullptr);
  }
  // Two of them came, and one more. Behind the last number nothing may come, so it is the last guess whose successor is bound.
  reply->fresh = {0, 1, 2};
  for (int32_t id = 4; id < 40; ++id) reply->fresh.push_back(id - 1);
  reply->guesses = {39, 40, 41};
  make(maker, reply);
  EXPECT_EQ(reply->n_guesses, 1);
  EXPECT_TRUE(reply->masks[1].allows(40));
  reply->fresh = {39, 40};
  reply->guesses = {};
  make(maker, reply);
  EXPECT_EQ(reply->masks[0].next, TokenConstraint::Next::kNothing);
  EXPECT_FALSE(reply->masks[0].allows(41));
  reply->fresh = {7};
  make(maker, reply);
  EXPECT_EQ(reply->error, "that was not the next number");
}

TEST(MaskMakerTest, SlowOnesLeaveAWorkerToTheOthers) {
  std::atomic<bool> go = false;
  std::atomic<int> n_waiting = 0;
  MaskMaker maker(2, 50);
  std::vector<std::shared_ptr<BoundReply>> slow;
  for (int i = 0; i < 3; ++i) {
    slow.push_back(std::make_shared<BoundReply>(std::make_unique<Waits>(n_waiting, go)));
    slow.back()->seconds = 1;   // as they were the last time
    maker.ask(slow.back());
  }
  for (int i = 0; i < 20; ++i) make(maker, std::make_shared<BoundReply>(std::make_unique<CountUp>(3)));
  EXPECT_LE(n_waiting, 1);
  slow.pop_back();   // nobody wants it any more
  go = true;
  std::vector<const BoundReply*> all = {slow[0].get(), slow[1].get()};
  while (!slow[0]->is_ready() || !slow[1]->is_ready()) maker.wait(all, 2, std::chrono::seconds(1));
  EXPECT_EQ(n_waiting, 2);
}

}  // namespace
}  // namespace beryl
