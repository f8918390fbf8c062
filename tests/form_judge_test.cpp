// What: forms whose compilation does not end, needs too much memory or brings its process down are refused, and hold up nobody's
//       for longer than their share; what a judge lets through is compiled; a judge that was killed is started anew.
// How:  judges are this program, started anew with other arguments. Hostile forms are grammars (EBNF), which nothing bounds; the server takes
//       none from strangers, but what is known of the library does not tell that nothing else of that kind gets through.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "server/api_error.h"
#include "server/form_compiler.h"
#include "server/form_judge.h"
#include "server/lent_priority.h"
#include "server/letter_tokenizer.h"

namespace beryl::server {
namespace {

using Kind = ConstraintSpec::Kind;

const std::vector<std::string> kCommand = {"/proc/self/exe", "judge"};

ConstraintSpec regex(const std::string& text) { return {Kind::kRegex, text, std::nullopt}; }
// Counts of what may be empty, within a count: gigabytes and minutes, if it ends at all.
ConstraintSpec endless(int i) {
  std::string text;
  for (int k = 0; k < 100 + i; ++k)
    text += fmt::format("{}([a-f]? [b-g]? \"{}\"?){{0,{}}}", k == 0 ? "" : "|", static_cast<char>('a' + k % 20), k + 50);
  return {Kind::kGrammar, "root ::= (" + text + "){0,90} \"j\"", std::nullopt};
}

class FormJudgeTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_constraints()) GTEST_SKIP() << "a build without structured output";
  }
  static JudgeLimits limits(double seconds, int64_t bytes = 1 << 30) {
    JudgeLimits limits;
    limits.processor_seconds = seconds;
    limits.memory_bytes = bytes;
    limits.seconds = 1e6;   // nothing hangs on how fast this machine is
    return limits;
  }
  // What it throws, or nothing.
  static std::string refusal(FormJudge& judge, const ConstraintSpec& spec, bool is_hostile) {
    static const std::atomic<bool> stopping = false;
    try {
      judge.judge(spec, stopping);
    } catch (const HostileForm& form) {
      EXPECT_TRUE(is_hostile) << form.what();
      return form.what();
    } catch (const Error& error) {
      EXPECT_FALSE(is_hostile) << error.what();
      return error.what();
    }
    return "";
  }
};

TEST_F(FormJudgeTest, SaysWhatTheCompilerSays) {
  const std::unique_ptr<Tokenizer> tokenizer = letter_tokenizer();
  ConstraintCompiler here(*tokenizer, test::kTextVocab);
  FormJudge judge(kCommand, limits(600));
  const std::string long_text(300'000, 'a');   // more than a socket takes at once
  const ConstraintSpec specs[] = {regex("(abc|de)+f{1,3}"), regex("("), regex("[x-z]\\1"), regex(".?.?.?.?"), regex(long_text),
                                  {Kind::kJsonSchema, R"({"not": {}})", std::nullopt}, {Kind::kJsonObject, "", std::nullopt},
                                  {Kind::kJsonSchema, R"({"type": "string", "maxLength": 3})", std::nullopt},
                                  {Kind::kNothing, "", CallSpec{CallNotation::kBare, R"([{"type": "function", "function": {"name": "f",
                                   "strict": true, "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}}])", true}}};
  for (const ConstraintSpec& spec : specs) {
    std::string expected;
    try {
      here.compile(spec);
    } catch (const Error& error) {
      expected = error.what();
    }
    EXPECT_EQ(refusal(judge, spec, false), expected);
  }
}

TEST_F(FormJudgeTest, EndsWhatTakesTooLong) {
  FormJudge judge(kCommand, limits(0.5, int64_t{1} << 40));
  EXPECT_NE(refusal(judge, endless(1), true).find("more than 0.5 s of a processor"), std::string::npos);
  EXPECT_EQ(judge.process(), -1);
  EXPECT_EQ(refusal(judge, regex("ab"), false), "");   // by a new one
}

TEST_F(FormJudgeTest, EndsWhatTakesTooMuchMemory) {
  FormJudge judge(kCommand, limits(600, 48 << 20));
  EXPECT_NE(refusal(judge, endless(1), true).find("more than 48 MB"), std::string::npos);
  EXPECT_EQ(refusal(judge, regex("ab"), false), "");
}

TEST_F(FormJudgeTest, OneThatWasKilledIsStartedAnew) {
  FormJudge judge(kCommand, limits(600));
  EXPECT_EQ(refusal(judge, regex("ab"), false), "");
  const pid_t first = judge.process();
  ASSERT_GT(first, 0);
  kill(first, SIGKILL);
  siginfo_t state = {};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(first), &state, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(refusal(judge, regex("ab"), false), "");
  EXPECT_NE(judge.process(), first);
}

TEST_F(FormJudgeTest, AFormThatBringsItDownIsRefused) {
  FormJudge judge({"/proc/self/exe", "crash"}, limits(600));
  for (int i = 0; i < 2; ++i) EXPECT_NE(refusal(judge, regex("ab"), true).find("ends the process"), std::string::npos);
}

TEST_F(FormJudgeTest, ACommandThatDoesNotRunIsNobodysFault) {
  const std::atomic<bool> stopping = false;
  for (const char* program : {"/nowhere/beryl", "/bin/false"}) {
    FormJudge judge({program}, limits(600));
    try {
      judge.judge(regex("ab"), stopping);
      ADD_FAILURE() << program;
    } catch (const ApiError& error) {
      EXPECT_EQ(error.status, 503) << error.what();
    }
  }
}

TEST_F(FormJudgeTest, TwoHostileFormsAtOnceHoldUpNobodyForLong) {
  const std::unique_ptr<Tokenizer> tokenizer = letter_tokenizer();
  ConstraintCompiler constraints(*tokenizer, test::kTextVocab);
  FormLimits form_limits;
  form_limits.judge = limits(0.3, int64_t{1} << 40);
  form_limits.patience = std::chrono::hours(1);   // nothing hangs on how fast this machine is
  FormCompiler forms(constraints, form_limits, kCommand);
  std::atomic<int> n_refused = 0;
  const auto ask_hostile = [&](int i) {
    try {
      forms.compile(endless(i));
      ADD_FAILURE();
    } catch (const HostileForm& form) {
      ++n_refused;
    }
  };
  std::vector<std::thread> hostile;
  for (int i = 0; i < form_limits.n_workers; ++i) hostile.emplace_back(ask_hostile, i);
  std::thread honest([&] { EXPECT_NE(forms.compile(regex("(abc|de)+")), nullptr); });
  honest.join();
  for (std::thread& thread : hostile) thread.join();
  EXPECT_EQ(n_refused, form_limits.n_workers);
  // Known by now: refused without a worker, also while both have something to do.
  std::vector<std::thread> more;
  for (int i = 2; i < 4; ++i) more.emplace_back(ask_hostile, i);
  for (int i = 0; i < 2; ++i) ask_hostile(i);
  for (std::thread& thread : more) thread.join();
  EXPECT_EQ(n_refused, form_limits.n_workers + 4);
}

TEST_F(FormJudgeTest, AnEndDoesNotWaitForAForm) {
  const std::unique_ptr<Tokenizer> tokenizer = letter_tokenizer();
  ConstraintCompiler constraints(*tokenizer, test::kTextVocab);
  FormLimits form_limits;
  form_limits.judge = limits(1e6, int64_t{1} << 40);
  form_limits.patience = std::chrono::milliseconds(200);
  FormCompiler forms(constraints, form_limits, kCommand);
  EXPECT_THROW(forms.compile(endless(1)), ApiError);
}

// Processes that this one has started and that run.
std::vector<pid_t> children() {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream file(entry.path() / "stat");
    std::string text;
    char state = 0;
    pid_t parent = 0;
    if (std::getline(file, text) && std::sscanf(text.c_str() + text.rfind(')') + 1, " %c %d", &state, &parent) == 2 && parent == getpid() && state != 'Z')
      found.push_back(std::stoi(entry.path().filename().string()));
  }
  return found;
}

TEST_F(FormJudgeTest, OneIsThereBeforeTheFirstFormAndStays) {
  const std::unique_ptr<Tokenizer> tokenizer = letter_tokenizer();
  ConstraintCompiler constraints(*tokenizer, test::kTextVocab);
  FormLimits form_limits;
  form_limits.judge = limits(600);
  form_limits.judge_idle = std::chrono::seconds(1);
  form_limits.patience = std::chrono::hours(1);
  FormCompiler forms(constraints, form_limits, kCommand);
  forms.prepare();
  std::vector<pid_t> first;
  while ((first = children()).empty()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  for (int i = 0; i < 3; ++i) {
    EXPECT_NE(forms.compile(regex("ab" + std::to_string(i))), nullptr);
    EXPECT_EQ(children(), first);   // one form at a time is its work
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  EXPECT_EQ(children(), first);
  kill(first.front(), SIGKILL);
  while (children() == first || children().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(5));   // and one that was killed is replaced
}

TEST(LentPriorityTest, WhatIsShortHasPlainPriorityAndWhatIsLongALowerOne) {
  const auto burn = [](double seconds) {
    timespec time = {};
    do {
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    } while (static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec) < seconds);
  };
  const auto nice_now = [] { return getpriority(PRIO_PROCESS, 0); };
  const int plain = nice_now();
  LentPriority priority(0.2, 0);
  int begin = -100, end = -100;
  priority.run([&] { begin = nice_now(), burn(0.05), end = nice_now(); });
  EXPECT_EQ(begin, plain);
  EXPECT_EQ(end, plain);
  priority.run([&] {
    begin = nice_now();
    while ((end = nice_now()) == plain) burn(0.3);
  });
  EXPECT_EQ(begin, plain);
  EXPECT_GT(end, plain);   // 19 is the lowest there is
  EXPECT_EQ(priority.seconds_in_hand(), 0);
  priority.run([&] {   // nothing is left
    while ((end = nice_now()) == plain) burn(0.01);
  });
  EXPECT_EQ(nice_now(), plain);
  EXPECT_THROW(priority.run([] { throw Error(ErrorCode::kUnsupported, "as the test wanted"); }), Error);
  LentPriority refilled(0.5, 1000);
  for (int i = 0; i < 2; ++i) refilled.run([&] { burn(0.01), end = nice_now(); });
  EXPECT_EQ(end, plain);
}

}  // namespace
}  // namespace beryl::server

int main(int argc, char** argv) {
  using namespace beryl;
  if (argc == 2 && std::strcmp(argv[1], "judge") == 0) {
    const std::unique_ptr<Tokenizer> tokenizer = server::letter_tokenizer();
    ConstraintCompiler constraints(*tokenizer, test::kTextVocab);
    server::judge_forms(constraints, 0);
    return 0;
  }
  if (argc == 2 && std::strcmp(argv[1], "crash") == 0) {
    char byte = 0;
    return write(0, "0 0\n", 4) == 4 && read(0, &byte, 1) == 1 ? 1 : 2;   // ready, and gone with the first form
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
