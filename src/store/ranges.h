// Which bytes of a file are there: a set of half-open ranges.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>

namespace beryl {

struct ByteRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const ByteRange&) const = default;
};

// Ranges neither touch nor overlap; touching ones become one.
class RangeSet {
 public:
  void add(ByteRange range) {
    if (range.begin >= range.end) return;
    auto at = ends_.upper_bound(range.begin);
    if (at != ends_.begin() && std::prev(at)->second >= range.begin) --at;
    while (at != ends_.end() && at->first <= range.end) {
      range = {std::min(range.begin, at->first), std::max(range.end, at->second)};
      at = ends_.erase(at);
    }
    ends_.emplace(range.begin, range.end);
  }

  // The first range within [0, size) that is missing here and in `also`, at most `longest` bytes of it. Empty: none.
  ByteRange first_missing(int64_t size, int64_t longest, const RangeSet& also = {}) const {
    RangeSet both = also;
    for (const auto& [begin, end] : ends_) both.add({begin, end});
    int64_t begin = 0;
    if (!both.ends_.empty() && both.ends_.begin()->first == 0) begin = both.ends_.begin()->second;
    if (begin >= size) return {size, size};
    const auto next = both.ends_.upper_bound(begin);
    const int64_t end = next == both.ends_.end() ? size : std::min(next->first, size);
    return {begin, std::min(end, begin + longest)};
  }

  int64_t bytes() const {
    int64_t sum = 0;
    for (const auto& [begin, end] : ends_) sum += end - begin;
    return sum;
  }
  bool covers(int64_t size) const {
    return size == 0 || (!ends_.empty() && ends_.begin()->first == 0 && ends_.begin()->second >= size);
  }
  void clear() { ends_.clear(); }
  const std::map<int64_t, int64_t>& ends() const { return ends_; }   // begin -> end

 private:
  std::map<int64_t, int64_t> ends_;
};

}  // namespace beryl
