// What: a set of byte ranges is what a set of bytes is.
// How:  random ranges are added to both; every question is answered by counting bytes.
#include "store/ranges.h"

#include <set>

#include <gtest/gtest.h>

#include "base/rng.h"

namespace beryl {
namespace {

TEST(RangeSet, AgreesWithASetOfBytes) {
  constexpr int64_t kSize = 40;
  uint64_t counter = 0;
  const auto below = [&](uint32_t n) { return static_cast<int64_t>(philox(5, counter++).x[0] % n); };
  for (int round = 0; round < 2000; ++round) {
    RangeSet ranges, also;
    std::set<int64_t> bytes, others;
    for (int i = 0; i < 6; ++i) {
      const int64_t begin = below(kSize), end = begin + below(12);
      RangeSet& set = i < 4 ? ranges : also;
      set.add({begin, end});
      for (int64_t at = begin; at < end; ++at) (i < 4 ? bytes : others).insert(at);
    }
    ASSERT_EQ(ranges.bytes(), static_cast<int64_t>(bytes.size()));
    for (int64_t size = 0; size <= kSize; ++size) {
      int64_t first = 0;
      while (first < size && bytes.contains(first)) ++first;
      ASSERT_EQ(ranges.covers(size), first == size) << round << " " << size;
      int64_t begin = 0;
      while (begin < size && (bytes.contains(begin) || others.contains(begin))) ++begin;
      int64_t end = begin;
      while (end < size && end < begin + 5 && !bytes.contains(end) && !others.contains(end)) ++end;
      ASSERT_EQ(ranges.first_missing(size, 5, also), (ByteRange{begin, end})) << round << " " << size;
    }
    for (auto at = ranges.ends().begin(); at != ranges.ends().end() && std::next(at) != ranges.ends().end(); ++at)
      ASSERT_LT(at->second, std::next(at)->first);
  }
}

}  // namespace
}  // namespace beryl
