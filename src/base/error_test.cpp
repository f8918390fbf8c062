// What: an Error carries its code and message; a broken contract prints one line and aborts, in every build.
#include "base/error.h"

#include <string>

#include <gtest/gtest.h>

namespace beryl {
namespace {

TEST(Error, CarriesCodeAndMessage) {
  try {
    throw Error(ErrorCode::kUnsupported, "model.gguf: tensor type 99");
  } catch (const std::runtime_error& caught) {
    EXPECT_STREQ(caught.what(), "model.gguf: tensor type 99");
    EXPECT_EQ(dynamic_cast<const Error&>(caught).code, ErrorCode::kUnsupported);
  }
}

TEST(CheckDeathTest, NamesThePlaceTheConditionAndWhatItMeans) {
  testing::FLAGS_gtest_death_test_style = "fast";
  const int n_pages = 0;
  EXPECT_DEATH(BERYL_CHECK(n_pages > 0, "a pool has pages"),
               "^beryl: internal error at .*error_test\\.cpp:[0-9]+: a pool has pages \\(n_pages > 0\\)\n$");
}

TEST(Check, EvaluatesItsConditionOnce) {
  int n_calls = 0;
  BERYL_CHECK(++n_calls == 1, "called once");
  EXPECT_EQ(n_calls, 1);
}

}  // namespace
}  // namespace beryl
