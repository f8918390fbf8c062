// What: a run that fits is let through, one that does not is refused in a line with what is needed, what is free and the largest
//       context that fits, which really is the largest; nothing is allocated for the answer.
// How:  a device that is not there, with the reference backend's plans and a made-up amount of memory; the answer is compared with a
//       search over every context.
#include "engine/fit.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/system_memory.h"
#include "engine/stepper.h"
#include "model/synthetic.h"

namespace beryl {
namespace {

class ImaginaryDevice : public Backend {
 public:
  std::string_view name() const override { return "imaginary"; }
  std::string device_name() const override { return "Imaginary 1"; }
  std::optional<DeviceMemory> memory() const override { return memory_; }
  int64_t taken_bytes(const std::vector<Allocation>& allocations) const override {
    return Backend::taken_bytes(allocations) + kOverhead * static_cast<int64_t>(allocations.size());
  }
  std::vector<Allocation> plan(const Program& program, const StepLimits& limits) const override {
    return plans_->plan(program, limits);
  }
  std::unique_ptr<Executor> prepare(const Program&, const StepLimits&) override {
    ++n_prepared;
    throw Error(ErrorCode::kDevice, "imaginary");
  }
  void set_memory(int64_t total_bytes, int64_t free_bytes) { memory_ = {total_bytes, free_bytes}; }

  static constexpr int64_t kOverhead = 1000;
  int n_prepared = 0;

 private:
  std::unique_ptr<Backend> plans_ = make_reference_backend(1);
  DeviceMemory memory_;
};

class FitTest : public testing::Test {
 protected:
  FitTest() : model_(make_synthetic_model("gemma3-270m", {}, 1, false)) {}

  int64_t needed(RunLimits run, int64_t context) const {
    run.context = context;
    run.chunk_tokens = static_cast<int>(std::min<int64_t>(run.chunk_tokens, context));
    return device_.taken_bytes(plan_memory(model_.program, run, device_).allocations);
  }
  std::string refusal(const RunLimits& run) {
    try {
      require_memory(model_.program, run, device_);
    } catch (const Error& error) {
      EXPECT_EQ(error.code, ErrorCode::kOutOfMemory);
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
      return error.what();
    }
    return {};
  }

  const Model model_;
  ImaginaryDevice device_;
};

TEST_F(FitTest, FindsTheLargestContextThatFits) {
  RunLimits run;
  run.context = 3000;
  for (int n_sequences : {1, 3}) {
    run.n_sequences = n_sequences;
    const int64_t least = needed(run, kPageTokens), all = needed(run, run.context);
    ASSERT_LT(least, all);
    for (int64_t free_bytes : {int64_t{0}, least - 1, least, least + 1, (least + all) / 3, (least + all) / 2, needed(run, 1024),
                               needed(run, 1024) - 1, all - 1}) {
      int64_t expected = 0;
      for (int64_t context = kPageTokens; context < run.context; context += kPageTokens)
        if (needed(run, context) <= free_bytes) expected = context;
      EXPECT_EQ(largest_context(model_.program, run, device_, free_bytes), expected)
          << free_bytes << " bytes for " << n_sequences << " sequences";
    }
  }
}

TEST_F(FitTest, RefusesWithTheNumbersAndTheContextThatFits) {
  RunLimits run;
  run.context = 32768;
  const int64_t needs = needed(run, run.context);
  device_.set_memory(needs + 1'000'000, needs);
  EXPECT_EQ(refusal(run), "");
  device_.set_memory(needs + 1'000'000, needs - 1);
  const std::string just = refusal(run);
  for (const std::string& part : {std::string("Imaginary 1"), std::string("a context of 32768 takes " + human_bytes(needs)),
                                  std::string("a context of 32704 would fit"), human_bytes(needs - 1) + " are free"})
    EXPECT_NE(just.find(part), std::string::npos) << "'" << part << "' is missing in: " << just;
  EXPECT_EQ(just.find("other programs"), std::string::npos) << just;

  run.n_sequences = 4;
  device_.set_memory(2 * needs, needs);
  const std::string many = refusal(run);
  EXPECT_NE(many.find("a context of 32768 for 4 sequences at once takes"), std::string::npos) << many;
  EXPECT_NE(many.find(human_bytes(needs) + " are held by other programs"), std::string::npos) << many;

  device_.set_memory(1000, 900);
  EXPECT_NE(refusal(run).find("no context fits"), std::string::npos) << refusal(run);
}

TEST_F(FitTest, AStepperIsRefusedBeforeAnythingIsAllocated) {
  RunLimits run;
  device_.set_memory(2000, 1000);
  try {
    Stepper stepper(model_.program, run, device_);
    FAIL() << "it fits";
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ErrorCode::kOutOfMemory) << error.what();
  }
  EXPECT_EQ(device_.n_prepared, 0);
  device_.set_memory(int64_t{1} << 40, int64_t{1} << 40);
  EXPECT_THROW(Stepper(model_.program, run, device_), Error);
  EXPECT_EQ(device_.n_prepared, 1);
}

TEST_F(FitTest, ChoosesTheLargestChunkThatTakesLittleOfTheMemory) {
  RunLimits run;
  run.context = 8192;
  const auto needed_with = [&](int chunk) {
    RunLimits with = run;
    with.chunk_tokens = chunk;
    return needed(with, run.context);
  };
  const int64_t extra = needed_with(1024) - needed_with(256);
  ASSERT_GT(extra, 0);
  const auto chosen = [&](int64_t total, int64_t free) {
    device_.set_memory(total, free);
    return fitting_chunk(model_.program, run, device_, 256);
  };
  const int64_t much = int64_t{1} << 40;
  EXPECT_EQ(chosen(much, much), 2048);
  EXPECT_EQ(chosen(16 * extra, much), 1024);
  EXPECT_EQ(chosen(16 * extra - 16, much), 512);
  EXPECT_EQ(chosen(much, needed_with(512)), 512);
  EXPECT_EQ(chosen(much, needed_with(512) - 1), 256);
  EXPECT_EQ(chosen(much, 0), 256);
  run.context = 700;
  EXPECT_EQ(chosen(much, much), 700);
  const std::unique_ptr<Backend> host = make_reference_backend(1);
  EXPECT_EQ(fitting_chunk(model_.program, run, *host, 256), 256);
}

TEST_F(FitTest, HostBackendsLeaveItToTheMachine) {
  RunLimits run;
  run.context = int64_t{1} << 20;
  EXPECT_NO_THROW(require_memory(model_.program, run, *make_reference_backend(1)));
}

TEST_F(FitTest, AHostThatRefusesSaysWhichContextWouldFit) {
  const std::unique_ptr<Backend> host = make_reference_backend(1);
  RunLimits run;
  const auto bytes_with = [&](int64_t context) {
    run.context = context;
    return plan_memory(model_.program, run, *host).total();   // without the mapped file
  };
  const int64_t of_1024 = bytes_with(1024), of_4096 = bytes_with(4096);
  EXPECT_EQ(smaller_context_words(model_.program, run, *host, of_4096), "");   // it fits: something else is wrong
  EXPECT_EQ(smaller_context_words(model_.program, run, *host, of_1024), "; a context of 1024 would fit");
  EXPECT_EQ(smaller_context_words(model_.program, run, *host, of_1024 - 1), "; a context of 960 would fit");
  EXPECT_EQ(smaller_context_words(model_.program, run, *host, 1000), "");
}

}  // namespace
}  // namespace beryl
