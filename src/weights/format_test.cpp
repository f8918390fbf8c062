// What: the table of formats agrees with the published sizes, names are unique, and row sizes follow from the table.
#include "weights/format.h"

#include <set>
#include <string>

#include <gtest/gtest.h>

#include "weights/host_matrix.h"

namespace beryl {
namespace {

TEST(FormatTest, NamesAreUniqueAndFindTheirFormat) {
  std::set<std::string> names;
  for (int i = 0; i < kFormatCount; ++i) {
    const auto format = static_cast<Format>(i);
    EXPECT_EQ(info(format).format, format);
    EXPECT_TRUE(names.insert(std::string(info(format).name)).second) << info(format).name;
    EXPECT_EQ(format_by_name(info(format).name), format);
  }
  EXPECT_EQ(format_by_name("q2_k"), std::nullopt);
  EXPECT_EQ(format_by_name(""), std::nullopt);
}

TEST(FormatTest, BitsAWeightAreThePublishedOnes) {
  const struct {
    Format format;
    double bits;
  } cases[] = {{Format::kF32, 32},       {Format::kF16, 16},   {Format::kBf16, 16},   {Format::kQ4_0, 4.5},
               {Format::kQ4_1, 5},       {Format::kQ5_0, 5.5}, {Format::kQ5_1, 6},    {Format::kQ8_0, 8.5},
               {Format::kQ4_K, 4.5},     {Format::kQ5_K, 5.5}, {Format::kQ6_K, 6.5625}, {Format::kMxfp4, 4.25},
               {Format::kNvfp4, 4.5},    {Format::kFp4G128, 4.125}};
  for (const auto& one : cases) {
    constexpr int64_t kCols = 1024;
    const int64_t bytes = row_bytes(one.format, kCols) + row_scale_bytes(one.format, kCols);
    EXPECT_DOUBLE_EQ(8.0 * static_cast<double>(bytes) / kCols, one.bits) << info(one.format).name;
  }
  EXPECT_EQ(row_bytes(Format::kFp8, 1000), 1000);
  EXPECT_EQ(row_scale_bytes(Format::kFp8, 1000), 4);  // one a row, however long
}

TEST(FormatTest, RowsFitOnlyInWholeBlocks) {
  EXPECT_TRUE(fits(Format::kQ4_K, 512));
  EXPECT_FALSE(fits(Format::kQ4_K, 512 + 32));
  EXPECT_TRUE(fits(Format::kQ4_0, 512 + 32));
  EXPECT_FALSE(fits(Format::kQ4_0, 16));
  EXPECT_TRUE(fits(Format::kFp4G128, 384));
  EXPECT_FALSE(fits(Format::kFp4G128, 384 + 64));
  EXPECT_TRUE(fits(Format::kFp8, 7));
  EXPECT_FALSE(fits(Format::kF32, -1));
  EXPECT_TRUE(fits(Format::kNvfp4, 64));
  EXPECT_FALSE(fits(Format::kNvfp4, 32));
}

TEST(FormatTest, BytesOfAMatrixCountCodesAndScalesOfAllExperts) {
  HostMatrix matrix;
  matrix.format = Format::kFp4G128;
  matrix.rows = 3;
  matrix.cols = 256;
  matrix.stack = 5;
  EXPECT_EQ(matrix.bytes(), 5 * 3 * (128 + 2 * 2));
  matrix.format = Format::kQ6_K;
  EXPECT_EQ(matrix.bytes(), 5 * 3 * 210);
}

}  // namespace
}  // namespace beryl
