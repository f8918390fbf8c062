// What: the GPU backend's ops equal the double result within a bound from the data, for BF16, FP8 and F32 caches, read nothing
//       dead, write nothing beyond their buffers, and give each row the same bits whatever stands beside it; a replayed graph
//       gives the bits of the ops run one by one.
// How:  the table of ops/op_cases.h, a test a case; skipped where there is no GPU.
#include "cuda/cuda_backend.h"

#include <cctype>
#include <string>

#include <gtest/gtest.h>

#include "base/error.h"
#include "ops/op_cases.h"

namespace beryl {
namespace {

const std::vector<OpCase>& cases() {
  static const std::vector<OpCase> table = op_cases();
  return table;
}

std::string test_name(size_t index) {
  std::string name;
  for (char c : cases()[index].name) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) name += c;
    else if (!name.empty() && name.back() != '_') name += '_';
  }
  return name;
}

Backend& gpu() {
  static const std::unique_ptr<Backend> backend = make_cuda_backend(0);
  return *backend;
}
Backend& reference() {
  static const std::unique_ptr<Backend> backend = make_reference_backend(1);
  return *backend;
}

class CudaOps : public testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  }
  void run(CacheType cache_type) {
    const OpCase& op_case = cases()[GetParam()];
    const CaseResult result = run_case(op_case, gpu(), reference(), options_for("cuda", cache_type));
    EXPECT_TRUE(result.passed) << op_case.name << ": " << result.message;
    RecordProperty("worst", std::to_string(result.worst));
  }
};

TEST_P(CudaOps, GiveTheExactResultWithinTheirRoundings) { run(CacheType::kDefault); }

class CudaCacheOps : public CudaOps {};

TEST_P(CudaCacheOps, GiveTheExactResultWithAnFp8Cache) { run(CacheType::kFp8); }
TEST_P(CudaCacheOps, GiveTheExactResultWithAnF32Cache) { run(CacheType::kF32); }

std::vector<size_t> cache_cases() {
  std::vector<size_t> indices;
  for (size_t i = 0; i < cases().size(); ++i)
    for (const char* op : {"QkvFinish", "Attention", "CopyPages", "Step"})
      if (cases()[i].op == op) indices.push_back(i);
  return indices;
}

INSTANTIATE_TEST_SUITE_P(Table, CudaOps, testing::Range(size_t{0}, cases().size()),
                         [](const auto& info) { return test_name(info.param); });
INSTANTIATE_TEST_SUITE_P(Table, CudaCacheOps, testing::ValuesIn(cache_cases()),
                         [](const auto& info) { return test_name(info.param); });

TEST(CudaBackend, TellsItsNameAndMemory) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  EXPECT_FALSE(gpu().device_name().empty());
  const std::optional<DeviceMemory> memory = gpu().memory();
  ASSERT_TRUE(memory.has_value());
  EXPECT_GT(memory->free_bytes, 0);
  EXPECT_LT(memory->free_bytes, memory->total_bytes);
  const std::vector<Allocation> small = {{MemoryKind::kWeights, "small", 100}};
  EXPECT_GE(gpu().taken_bytes(small), 100);
}

TEST(CudaBackend, SaysInOneLineThatAGpuDoesNotExist) {
  try {
    make_cuda_backend(99);
    FAIL() << "GPU 99 exists";
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ErrorCode::kDevice);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace beryl
