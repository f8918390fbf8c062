// What: bands, splits, buckets and page offsets agree with what one would count by hand, for every position.
// How:  brute force over positions and windows, compared with sets of positions.
#include "cuda/index_math.h"

#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace beryl::cuda {
namespace {

TEST(IndexMath, ABandHoldsExactlyTheLivePositions) {
  for (int window : {0, 1, 8, 64, 100, 1024})
    for (int position = 0; position < 2100; position += position < 200 ? 1 : 37) {
      const Band band = live_band(position, window);
      for (int m = 0; m <= position + 2; ++m) {
        const bool live = m <= position && (window == 0 || m > position - window);
        ASSERT_EQ(live, m >= band.begin && m < band.end) << "window " << window << " position " << position << " m " << m;
      }
    }
}

TEST(IndexMath, SplitsCoverTheBandOnceAndBeginAtAbsoluteMultiples) {
  for (int window : {0, 1, 63, 64, 65, 512, 1024, 4096})
    for (int position : {0, 1, 62, 63, 64, 65, 127, 128, 1023, 1024, 1499, 8191, 8192, 8193, 16383, 16384, 100000, 262143}) {
      const Band band = live_band(position, window);
      const Splits splits = splits_of(band);
      ASSERT_GE(splits.count, 1);
      ASSERT_LE(splits.count, kMaxSplits + 1);
      ASSERT_EQ(splits.positions % kPageTokens, 0);
      ASSERT_LE(int64_t{splits.first} * splits.positions, band.begin);
      ASSERT_GT(int64_t{splits.first + 1} * splits.positions, band.begin);
      ASSERT_GE(int64_t{splits.first + splits.count} * splits.positions, band.end);
      ASSERT_LT(int64_t{splits.first + splits.count - 1} * splits.positions, band.end);
    }
}

TEST(IndexMath, TurnedColumnsFillAKeyRowInOrder) {
  int n_turned = 0;
  for (int column = 0; column < kFromValuesDim; ++column) {
    const bool turned = column < 64 || (column >= 256 && column < 320);        // pairs (j, j + 256), j below 64
    ASSERT_EQ(is_turned(column), turned) << column;
    if (turned) {
      ASSERT_EQ(turned_column(column), n_turned++) << column;
    }
  }
  EXPECT_EQ(n_turned, kTurnedColumns);
}

TEST(IndexMath, TheGridOfABucketHoldsEveryTokenInIt) {
  for (int window : {0, 8, 64, 512, 1000, 1024, 4096})
    for (int position = 0; position < 40000; position += position < 1000 ? 1 : 61) {
      const int last = bucket_position(position);
      ASSERT_GE(last, position);
      ASSERT_LE(splits_of(live_band(position, window)).count, most_splits(last, window))
          << "window " << window << " position " << position;
    }
}

TEST(IndexMath, BucketsAreFew) {
  std::set<int> buckets;
  for (int position = 0; position < 262144; ++position) buckets.insert(bucket_position(position));
  EXPECT_LE(buckets.size(), 9u);
}

TEST(IndexMath, TheSplitOfALongerPrefixNeverMovesABoundaryOffTheOldOnes) {
  // Lengths are powers of two, so every boundary of a longer split is one of each shorter split.
  int before = split_positions(1);
  for (int n_live = 1; n_live <= 262144; n_live += 511) {
    const int positions = split_positions(n_live);
    ASSERT_EQ(positions % before, 0);
    ASSERT_LE(int64_t{positions} * kMaxSplits, 2 * std::max<int64_t>(n_live, kMaxSplits * kMinSplitPositions));
    before = positions;
  }
}

TEST(IndexMath, ATableThatWrapsIsARing) {
  const int n_entries = 5;
  for (int position = 0; position < 3000; ++position) {
    ASSERT_EQ(table_entry(position, n_entries), table_entry(position + n_entries * kPageTokens, n_entries));
    ASSERT_EQ(table_entry(position, n_entries), position / 64 % 5);
  }
}

TEST(IndexMath, CacheRowsAreDisjointAndFillThePool) {
  const int n_pages = 3, n_kv_heads = 2, head_dim = 4;
  std::vector<int> hits(static_cast<size_t>(n_pages * n_kv_heads * kPageTokens * head_dim), 0);
  for (int page = 0; page < n_pages; ++page)
    for (int head = 0; head < n_kv_heads; ++head)
      for (int row = 0; row < kPageTokens; ++row)
        for (int d = 0; d < head_dim; ++d)
          ++hits[static_cast<size_t>(cache_offset(page, row, head, n_kv_heads, head_dim) + d)];
  for (int count : hits) ASSERT_EQ(count, 1);
}

TEST(IndexMath, SamplerGroupsAreBoundedInNumber) {
  for (int64_t vocab : {1, 7, 8, 33, 256, 2048 * 8, 2048 * 8 + 1, 32000, 151936, 262144, 262145, 1000000}) {
    const int ids = sample_group_ids(vocab);
    ASSERT_EQ(ids & (ids - 1), 0);
    ASSERT_LE((vocab + ids - 1) / ids, kMaxSampleGroups);
  }
}

TEST(IndexMathTest, DecodeUnitsHoldEachLivePositionOnceAndNoOther) {
  for (const int window : {0, 64, 128, 512, 1024, 1, 8, 65, 100, 1000}) {
    ASSERT_TRUE(decodes_window(window));
    for (const int position : {0, 1, 7, 63, 64, 65, 127, 128, 500, 511, 512, 513, 575, 576, 1023, 1024, 1025, 1087, 1088, 4095, 8191,
                               8192, 20000, 131071}) {
      const Band band = live_band(position, window);
      const DecodeUnits units = decode_units(position, window);
      ASSERT_GE(units.count, 1);
      ASSERT_LE(units.count, kMaxDecodeUnits);
      std::vector<int> seen(static_cast<size_t>(position) + 1, 0);
      for (int unit = 0; unit < units.count; ++unit) {
        for (int t = 0; t < units.tiles; ++t) {
          const DecodeTile tile = decode_tile(position, window, units, unit, t);
          for (int slot = 0; slot < kPageTokens; ++slot) {
            int held = -1;
            if (slot >= tile.begin && slot < tile.end) held = tile.page * kPageTokens + slot;
            if (slot >= tile.end && tile.older >= 0) held = tile.older * kPageTokens + slot;
            if (held < 0) continue;
            ASSERT_LE(held, position) << window;
            ++seen[static_cast<size_t>(held)];
            EXPECT_TRUE(tile_holds(tile, held));
          }
        }
      }
      for (int m = 0; m <= position; ++m)
        ASSERT_EQ(seen[static_cast<size_t>(m)], m >= band.begin ? 1 : 0) << "window " << window << ", position " << position << ", key " << m;
    }
  }
}

TEST(IndexMathTest, DecodeUnitsAreFewAndAlike) {
  for (int n_pages = 1; n_pages < 5000; ++n_pages) {
    const DecodeUnits units = decode_units(n_pages * kPageTokens - 1, 0);
    ASSERT_TRUE(units.neighbours);
    ASSERT_GE(units.count * units.tiles, n_pages);
    ASSERT_LT((units.count - 1) * units.tiles, n_pages) << "no unit without a page";
    if (n_pages <= kMaxDecodeUnits) {
      ASSERT_EQ(units.tiles, 1);
    }
    if (n_pages > kMaxDecodeUnits) {
      ASSERT_GT(units.count, kMaxDecodeUnits / 2);
    }
  }
  EXPECT_EQ(decode_units(63, 1024).count, 1);
  EXPECT_EQ(decode_units(127, 1024).count, 2);
  EXPECT_EQ(decode_units(127, 100).count, 2) << "not all is live";
}

// Eight neighbouring rows are read 16 bytes each at a time: at eight places of a line of 128 bytes, whichever column it is and wherever
// the box begins; and no two bytes have the same place.
TEST(IndexMathTest, RowsOfABoxAreReadWithoutConflicts) {
  for (int row_shift = 6; row_shift <= 10; ++row_shift) {
    for (const uint32_t begin : {0u, 128u, 15872u, 33792u}) {
      std::vector<int> hits(static_cast<size_t>(kBoxRows << row_shift) / 16, 0);
      for (int row = 0; row < kBoxRows; ++row) {
        for (int col = 0; col < 1 << row_shift; col += 16) {
          const uint32_t at = swizzled(begin + static_cast<uint32_t>(box_offset(row, col, row_shift)));
          ASSERT_GE(at, begin / 1024 * 1024);
          // Lines keep their place; within a line the order is of the address.
          const uint32_t line = at / 128 - begin / 128;
          ASSERT_LT(line * 8 + at % 128 / 16, hits.size());
          ++hits[line * 8 + at % 128 / 16];
          EXPECT_EQ(swizzled(begin + static_cast<uint32_t>(box_offset(row, col + 4, row_shift))), at + 4);
        }
      }
      for (int count : hits) ASSERT_EQ(count, 1);
      for (int row = 0; row < kBoxRows; row += 8) {
        for (int col = 0; col < 1 << row_shift; col += 16) {
          uint32_t places = 0;
          for (int i = 0; i < 8; ++i) places |= 1u << swizzled(begin + static_cast<uint32_t>(box_offset(row + i, col, row_shift))) % 128 / 16;
          ASSERT_EQ(places, 0xffu);
        }
      }
    }
  }
}

// Against the slots themselves.
TEST(IndexMathTest, ABoxComesWholeFromAPageOnlyIfAllOfItIsThere) {
  for (int begin = 0; begin <= kPageTokens; ++begin) {
    for (int end = begin; end <= kPageTokens; ++end) {
      for (const bool has_older : {false, true}) {
        if (has_older && begin > 0) continue;
        for (int box = 0; box < kBoxes; ++box) {
          int newer = 0, older = 0;
          for (int slot = box * kBoxRows; slot < (box + 1) * kBoxRows; ++slot) {
            if (slot >= begin && slot < end) ++newer;
            else if (has_older && slot >= end) ++older;
          }
          const BoxSource expected = newer == kBoxRows       ? BoxSource::kPage
                                     : older == kBoxRows     ? BoxSource::kOlder
                                     : newer + older == 0    ? BoxSource::kNone
                                                             : BoxSource::kSlots;
          ASSERT_EQ(box_source(begin, end, has_older, box), expected) << begin << ' ' << end << ' ' << has_older << ' ' << box;
        }
      }
    }
  }
}

}  // namespace
}  // namespace beryl::cuda
