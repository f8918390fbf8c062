// What: a form that takes long holds up who asked for it and its worker, nobody else; it is compiled once, whoever asks for it.
// How:  a compiler that waits for the test where the form says "slow".
#include "server/form_compiler.h"

#include <atomic>

#include <gtest/gtest.h>

#include "base/error.h"
#include "server/api_error.h"

namespace beryl::server {
namespace {

class FormCompilerTest : public testing::Test {
 protected:
  FormCompilerTest() : forms_([](const ConstraintSpec&) { return nullptr; }, [this](const ConstraintSpec& spec) { return compile(spec); }, limits()) {}
  ~FormCompilerTest() override { go_ = true; }

  static FormLimits limits() {
    FormLimits limits;
    limits.max_waiting = 2;
    limits.patience = std::chrono::milliseconds(100);
    return limits;
  }
  static ConstraintSpec form(const std::string& text) { return {ConstraintSpec::Kind::kRegex, text, std::nullopt}; }

  std::shared_ptr<const CompiledConstraint> compile(const ConstraintSpec& spec) {
    if (spec.text == "slow 1") ++n_compiled_;
    if (spec.text == "bad") throw Error(ErrorCode::kUnsupported, "the form is bad, as the test wanted");
    while (spec.text.starts_with("slow") && !go_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // Something to point at; nobody looks into it.
    return {std::make_shared<int>(), reinterpret_cast<const CompiledConstraint*>(this)};
  }
  // Asks until it is there, as clients do that hear 503.
  std::shared_ptr<const CompiledConstraint> insist(const std::string& text) {
    for (;;) try {
        return forms_.compile(form(text));
      } catch (const ApiError& error) {
        EXPECT_EQ(error.status, 503);
      }
  }
  std::string refusal(const std::string& text) {
    try {
      forms_.compile(form(text));
    } catch (const ApiError& error) {
      EXPECT_EQ(error.status, 503);
      return error.what();
    }
    return "";
  }

  std::atomic<bool> go_ = false;
  std::atomic<int> n_compiled_ = 0;
  FormCompiler forms_;
};

TEST_F(FormCompilerTest, AFormThatTakesLongHoldsUpItsWorkerOnly) {
  EXPECT_NE(insist("quick"), nullptr);
  EXPECT_NE(refusal("slow 1").find("that goes on"), std::string::npos);
  EXPECT_NE(insist("quick"), nullptr);
  EXPECT_THROW(insist("bad"), Error);
  // The other worker too: now others wait as long as they are asked to, and some are not let in.
  EXPECT_NE(refusal("slow 2").find("that goes on"), std::string::npos);
  EXPECT_NE(refusal("quick 1").find("that goes on"), std::string::npos);
  EXPECT_NE(refusal("quick 2").find("that goes on"), std::string::npos);
  EXPECT_NE(refusal("quick 3").find("too many"), std::string::npos);
  EXPECT_NE(refusal("slow 1").find("that goes on"), std::string::npos);   // whoever asks again waits for the same work
  EXPECT_EQ(n_compiled_, 1);
  std::thread late([&] { EXPECT_NE(insist("slow 1"), nullptr); });
  go_ = true;
  late.join();
  EXPECT_NE(insist("quick 3"), nullptr);
}

}  // namespace
}  // namespace beryl::server
