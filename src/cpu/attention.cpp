#include "cpu/attention.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "cpu/simd.h"
#include "ops/program.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/math-inl.h"
#include "cpu/tile-inl.h"
#include "hwy/cache_control.h"


HWY_BEFORE_NAMESPACE();
namespace beryl {
namespace HWY_NAMESPACE {

HWY_INLINE int64_t padded16(int64_t n) { return (n + 15) / 16 * 16; }

// Where things lie in a task's scratch.
struct Workspace {
  float* q;           // tiles of kTokenTile rows, [padded / 16][rows of the tile][16]
  float* scores;      // [n_rows][split_keys]: scores, then their exponentials
  float* split;       // [n_rows][partial_floats]
  float* total;       // [n_rows][partial_floats]
  float* padded_keys; // [kPageTokens][padded], where head_dim is not a multiple of 16
};

HWY_INLINE Workspace workspace(const AttentionTask& task, float* scratch) {
  const int64_t n_rows = int64_t{task.n_tokens} * task.group, padded = padded16(task.head_dim);
  const int64_t partial = partial_floats(task.head_dim);
  Workspace w;
  w.q = scratch;
  w.scores = w.q + n_rows * padded;
  w.split = w.scores + n_rows * task.split_keys;
  w.total = w.split + n_rows * partial;
  w.padded_keys = w.total + n_rows * partial;
  return w;
}

// A row's live keys within a split, relative to the split's first key: [begin, end), empty when begin >= end.
struct LiveRange {
  int64_t begin;
  int64_t end;
  bool empty() const { return begin >= end; }
};
HWY_INLINE LiveRange live_range(const AttentionTask& task, int64_t token, int64_t split) {
  const int64_t position = task.position + token, split_begin = split * task.split_keys;
  return {std::max<int64_t>(first_live_key(position, task.window) - split_begin, 0),
          std::min<int64_t>(position + 1 - split_begin, task.split_keys)};
}

HWY_INLINE const float* cache_row(const AttentionTask& task, const float* pool, int64_t position) {
  const int64_t page = task.table[position / kPageTokens % task.n_entries];
  return pool + page * task.page_stride + position % kPageTokens * task.head_dim;
}

HWY_INLINE int tile_rows(int64_t n_rows, int64_t tile) {
  return static_cast<int>(std::min<int64_t>(kTokenTile, n_rows - tile * kTokenTile));
}

void pack_queries(const AttentionTask& task, float* packed) {
  const int64_t n_rows = int64_t{task.n_tokens} * task.group, padded = padded16(task.head_dim);
  for (int64_t row = 0; row < n_rows; ++row) {
    const float* q = task.q + row / task.group * task.q_stride + row % task.group * task.head_dim;
    const int64_t tile = row / kTokenTile;
    const int rows = tile_rows(n_rows, tile);
    float* to = packed + tile * kTokenTile * padded + row % kTokenTile * 16;
    for (int64_t c = 0; c < task.head_dim; c += 16, to += 16 * rows) store16(load16_some(q + c, task.head_dim - c), to);
  }
}

constexpr int64_t kTouchedFloats = 4096;   // 16 KB, half of the L1 cache

// Rows of the cache in plain address order, so that the hardware's prefetcher sees a stream: the products below read several
// rows side by side, and it follows none of them.
HWY_INLINE void touch_rows(const float* rows, int64_t n_floats) {
  const FloatTag d;
  FloatPart sum = hn::Zero(d);
  for (int64_t i = 0; i < n_floats; i += 16) sum = hn::Or(sum, hn::LoadU(d, rows + i));
  [[maybe_unused]] volatile float kept = hn::GetLane(sum);
}

// With many rows a task computes longer than it reads, and other tasks have just read the same keys.
HWY_INLINE bool reads_cold_cache(const AttentionTask& task) { return task.n_tokens * task.group <= kTokenTile; }

HWY_INLINE void prefetch_lines(const float* rows, int64_t n_floats) {
  for (int64_t i = 0; i < n_floats; i += 16) hwy::Prefetch(rows + i);
}

// scores[row][m] = q · k_m for the keys [begin, end) of the split, for all rows.
void score_keys(const AttentionTask& task, int64_t split, LiveRange keys, const Workspace& w) {
  const int64_t n_rows = int64_t{task.n_tokens} * task.group, padded = padded16(task.head_dim);
  const int64_t n_tiles = (n_rows + kTokenTile - 1) / kTokenTile;
  for (int64_t m = keys.begin; m < keys.end;) {
    const int64_t position = split * task.split_keys + m;
    const int64_t n_in_page = std::min(keys.end - m, kPageTokens - position % kPageTokens);
    const float* key = cache_row(task, task.keys, position);
    int64_t stride = task.head_dim;
    if (task.head_dim % 16 != 0) {
      for (int64_t i = 0; i < n_in_page; ++i)
        for (int64_t c = 0; c < task.head_dim; c += 16)
          store16(load16_some(key + i * stride + c, task.head_dim - c), w.padded_keys + i * padded + c);
      key = w.padded_keys;
      stride = padded;
    }
    const float* value = cache_row(task, task.values, position);
    int64_t i = 0;
    const bool touches = reads_cold_cache(task);
    const int64_t touched_rows = std::max<int64_t>(kRowTile, kTouchedFloats / padded / kRowTile * kRowTile);
    for (; i + kRowTile <= n_in_page; i += kRowTile) {
      // The rows of the next block, or the first values, while this block is computed.
      if (touches && i + touched_rows < n_in_page) prefetch_lines(key + (i + touched_rows) * stride, kRowTile * stride);
      if (touches && i + touched_rows >= n_in_page) prefetch_lines(value + i * task.head_dim, kRowTile * task.head_dim);
      if (touches && i % touched_rows == 0) touch_rows(key + i * stride, std::min(touched_rows, n_in_page - i) * stride / 16 * 16);
      for (int64_t tile = 0; tile < n_tiles; ++tile)
        multiply_strided_tile(key + i * stride, stride, 16, w.q + tile * kTokenTile * padded, padded / 16,
                              tile_rows(n_rows, tile), w.scores + tile * kTokenTile * task.split_keys + m + i,
                              task.split_keys);
    }
    for (; i < n_in_page; ++i)
      for (int64_t row = 0; row < n_rows; ++row) {
        const int64_t tile = row / kTokenTile;
        multiply_piece<1, 1>(key + i * stride, 0, 16, w.q + tile * kTokenTile * padded + row % kTokenTile * 16,
                             16 * tile_rows(n_rows, tile), padded / 16, w.scores + row * task.split_keys + m + i, 0);
      }
    m += n_in_page;
  }
}

// Scores of a row to exponentials, in place; returns their largest score and their sum. Lanes are the keys' offsets in
// the split, so the order of the sum depends on absolute positions only; keys outside `live` add nothing.
HWY_INLINE void exponentiate(const AttentionTask& task, LiveRange live, float* scores, float& largest, float& sum) {
  const FloatTag d;
  const auto scale = hn::Set(d, task.scale);
  const auto cap = hn::Set(d, task.softcap), inverse_cap = hn::Set(d, task.softcap == 0 ? 0 : 1 / task.softcap);
  const auto begin = hn::Set(d, static_cast<float>(live.begin)), end = hn::Set(d, static_cast<float>(live.end));
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  const int64_t first = live.begin / 16 * 16;
  const auto is_live = [&](int64_t i) HWY_ATTR {
    const auto index = hn::Iota(d, static_cast<float>(i));
    return hn::And(hn::Ge(index, begin), hn::Lt(index, end));
  };
  auto most = lowest;
  for (int64_t i = first; i < live.end; i += kPartLanes) {
    auto s = hn::Mul(hn::LoadU(d, scores + i), scale);
    if (task.softcap > 0) s = hn::Mul(cap, tanh_part(hn::Mul(s, inverse_cap)));
    s = hn::IfThenElse(is_live(i), s, lowest);
    hn::StoreU(s, d, scores + i);
    most = hn::Max(most, s);
  }
  largest = hn::GetLane(hn::MaxOfLanes(d, most));
  const Vec16 shift = set16(largest);
  Vec16 sums = zero16();
  for (int64_t i = first; i < live.end; i += 16) {
    const Vec16 s = load16(scores + i);
    Vec16 e = exp16(s - shift);
    for (size_t p = 0; p < kParts; ++p)
      e.part[p] = hn::IfThenElseZero(is_live(i + static_cast<int64_t>(p * kPartLanes)), e.part[p]);
    store16(e, scores + i);
    sums = sums + e;
  }
  sum = sum16(sums);
}

// o[r] += Σ over keys [begin, end) of the split of p[r][m] · v_m, for kVectors · 16 dimensions; rows of o are o_stride
// apart, those of p split_keys.
template <int kRows, int kVectors>
HWY_NOINLINE void add_values(const AttentionTask& task, int64_t split, int64_t begin, int64_t end, const float* p,
                             int64_t dim, float* o, int64_t o_stride) {
  const FloatTag d;
  Vec16 sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = load16(o + r * o_stride + dim + 16 * v);
  for (int64_t m = begin; m < end;) {
    const int64_t position = split * task.split_keys + m;
    const int64_t n_in_page = std::min(end - m, kPageTokens - position % kPageTokens);
    const float* value = cache_row(task, task.values, position) + dim;
    for (int64_t i = 0; i < n_in_page; ++i, value += task.head_dim)
      for (size_t part = 0; part < kParts; ++part) {
        FloatPart columns[kVectors];
        for (int v = 0; v < kVectors; ++v) columns[v] = hn::LoadU(d, value + 16 * v + part * kPartLanes);
        for (int r = 0; r < kRows; ++r) {
          const FloatPart weight = hn::Set(d, p[r * task.split_keys + m + i]);
          for (int v = 0; v < kVectors; ++v)
            sums[r][v].part[part] = hn::MulAdd(weight, columns[v], sums[r][v].part[part]);
        }
      }
    m += n_in_page;
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store16(sums[r][v], o + r * o_stride + dim + 16 * v);
}

// The dimensions behind the last multiple of 16.
HWY_NOINLINE void add_values_tail(const AttentionTask& task, int64_t split, LiveRange live, const float* p, int64_t dim,
                                  float* o) {
  Vec16 sum = load16(o + dim);
  for (int64_t m = live.begin; m < live.end; ++m) {
    const float* value = cache_row(task, task.values, split * task.split_keys + m) + dim;
    sum = mul_add(set16(p[m]), load16_some(value, task.head_dim - dim), sum);
  }
  store16(sum, o + dim);
}

template <int kRows>
HWY_INLINE void add_values_of_keys(const AttentionTask& task, int64_t split, int64_t begin, int64_t end, const float* p,
                                   float* o, int64_t o_stride) {
  if (begin >= end) return;
  constexpr int kVectors = kParts == 1 ? 4 : 1;
  int64_t dim = 0;
  for (; dim + 16 * kVectors <= task.head_dim; dim += 16 * kVectors)
    add_values<kRows, kVectors>(task, split, begin, end, p, dim, o, o_stride);
  for (; dim + 16 <= task.head_dim; dim += 16) add_values<kRows, 1>(task, split, begin, end, p, dim, o, o_stride);
}

// In blocks of keys whose values stay in the L1 cache while all dimensions pass over them, a few at a time.
template <int kRows>
HWY_INLINE void add_values_of_rows(const AttentionTask& task, int64_t split, int64_t begin, int64_t end, const float* p,
                                   float* o, int64_t o_stride) {
  if (!reads_cold_cache(task)) {
    add_values_of_keys<kRows>(task, split, begin, end, p, o, o_stride);
    return;
  }
  const int64_t block = std::max<int64_t>(8, kTouchedFloats / task.head_dim);
  for (int64_t block_end; begin < end; begin = block_end) {
    const int64_t position = split * task.split_keys + begin;
    block_end = std::min({begin + block, end, begin + kPageTokens - position % kPageTokens});
    touch_rows(cache_row(task, task.values, position), (block_end - begin) * task.head_dim / 16 * 16);
    add_values_of_keys<kRows>(task, split, begin, block_end, p, o, o_stride);
  }
}

// partial[row] of one split, for the rows that have live keys there.
void attend_split(const AttentionTask& task, int64_t split, const Workspace& w, float* partial) {
  const int64_t n_rows = int64_t{task.n_tokens} * task.group, padded = padded16(task.head_dim);
  const int64_t stride = partial_floats(task.head_dim);
  const LiveRange first = live_range(task, 0, split), last = live_range(task, task.n_tokens - 1, split);
  score_keys(task, split, {first.begin, last.end}, w);
  for (int64_t row = 0; row < n_rows; ++row) {
    const LiveRange live = live_range(task, row / task.group, split);
    float* o = partial + row * stride;
    if (live.empty()) continue;
    exponentiate(task, live, w.scores + row * task.split_keys, o[padded], o[padded + 1]);
    for (int64_t c = 0; c < padded; c += 16) store16(zero16(), o + c);
  }
  for (int64_t row_begin = 0; row_begin < n_rows; row_begin += kTokenTile) {
    const int rows = tile_rows(n_rows, row_begin / kTokenTile);
    // Keys that are live for all rows of the tile are shared; those at the edges belong to some rows only.
    const LiveRange low = live_range(task, row_begin / task.group, split);
    const LiveRange high = live_range(task, (row_begin + rows - 1) / task.group, split);
    LiveRange common{high.begin, low.end};
    if (common.empty()) common.end = common.begin;
    const auto each_row = [&](auto&& body) HWY_ATTR {
      for (int64_t row = row_begin; row < row_begin + rows; ++row)
        body(live_range(task, row / task.group, split), w.scores + row * task.split_keys, partial + row * stride);
    };
    each_row([&](LiveRange live, const float* p, float* o) HWY_ATTR {
      add_values_of_rows<1>(task, split, live.begin, std::min(common.begin, live.end), p, o, stride);
    });
    const float* p = w.scores + row_begin * task.split_keys;
    float* o = partial + row_begin * stride;
    switch (rows) {
      case 1: add_values_of_rows<1>(task, split, common.begin, common.end, p, o, stride); break;
      case 2: add_values_of_rows<2>(task, split, common.begin, common.end, p, o, stride); break;
      case 3: add_values_of_rows<3>(task, split, common.begin, common.end, p, o, stride); break;
      case 4: add_values_of_rows<4>(task, split, common.begin, common.end, p, o, stride); break;
      case 5: add_values_of_rows<5>(task, split, common.begin, common.end, p, o, stride); break;
      default: add_values_of_rows<6>(task, split, common.begin, common.end, p, o, stride); break;
    }
    each_row([&](LiveRange live, const float* row_p, float* row_o) HWY_ATTR {
      add_values_of_rows<1>(task, split, std::max(common.end, live.begin), live.end, row_p, row_o, stride);
      if (task.head_dim % 16 != 0 && !live.empty())
        add_values_tail(task, split, live, row_p, task.head_dim / 16 * 16, row_o);
    });
  }
}

// total = total merged with the split that follows it.
HWY_INLINE void merge(float* total, const float* split, int64_t padded) {
  const float largest = std::max(total[padded], split[padded]);
  alignas(64) float factors[16] = {total[padded] - largest, split[padded] - largest};
  store16(exp16(load16(factors)), factors);
  const Vec16 keep = set16(factors[0]), add = set16(factors[1]);
  for (int64_t c = 0; c < padded; c += 16)
    store16(mul_add(load16(split + c), add, load16(total + c) * keep), total + c);
  total[padded] = largest;
  total[padded + 1] = total[padded + 1] * factors[0] + split[padded + 1] * factors[1];
}

HWY_INLINE void write_row(const AttentionTask& task, int64_t row, const float* total) {
  const int64_t padded = padded16(task.head_dim);
  float* out = task.out + row / task.group * task.out_stride + row % task.group * task.head_dim;
  const Vec16 inverse = set16(1 / total[padded + 1]);
  for (int64_t c = 0; c < task.head_dim; c += 16)
    store16_some(load16(total + c) * inverse, out + c, task.head_dim - c);
}

void attend(const AttentionTask& task, float* scratch) {
  const Workspace w = workspace(task, scratch);
  const int64_t n_rows = int64_t{task.n_tokens} * task.group, padded = padded16(task.head_dim);
  const int64_t stride = partial_floats(task.head_dim);
  pack_queries(task, w.q);
  for (int64_t split = first_split(task); split <= last_split(task); ++split) {
    attend_split(task, split, w, w.split);
    for (int64_t row = 0; row < n_rows; ++row) {
      const int64_t token = row / task.group;
      if (live_range(task, token, split).empty()) continue;
      const bool is_first = split == first_live_key(task.position + token, task.window) / task.split_keys;
      float* total = w.total + row * stride;
      if (is_first) {
        std::memcpy(total, w.split + row * stride, static_cast<size_t>(stride) * sizeof(float));
      } else {
        merge(total, w.split + row * stride, padded);
      }
    }
  }
  for (int64_t row = 0; row < n_rows; ++row) write_row(task, row, w.total + row * stride);
}

void attend_one_split(const AttentionTask& task, int64_t split, float* partial, float* scratch) {
  const Workspace w = workspace(task, scratch);
  pack_queries(task, w.q);
  attend_split(task, split, w, partial);
}

void merge_all(const AttentionTask& task, float* partials) {
  const int64_t n_rows = int64_t{task.n_tokens} * task.group, padded = padded16(task.head_dim);
  const int64_t stride = partial_floats(task.head_dim);
  for (int64_t row = 0; row < n_rows; ++row) {
    const int64_t position = task.position + row / task.group;
    const int64_t begin = first_live_key(position, task.window) / task.split_keys, end = position / task.split_keys;
    const auto partial = [&](int64_t split) {
      return partials + ((split - first_split(task)) * n_rows + row) * stride;
    };
    for (int64_t split = begin + 1; split <= end; ++split) merge(partial(begin), partial(split), padded);
    write_row(task, row, partial(begin));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace beryl
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace beryl {

static_assert(kMinSplitKeys % kPageTokens == 0);

HWY_EXPORT(attend);
HWY_EXPORT(attend_one_split);
HWY_EXPORT(merge_all);

int64_t attention_scratch_floats(int64_t n_rows, int head_dim) {
  const int64_t padded = (head_dim + 15) / 16 * 16;
  const int64_t padded_keys = head_dim % 16 == 0 ? 0 : kPageTokens * padded;
  return n_rows * (padded + kMaxSplitKeys + 2 * partial_floats(head_dim)) + padded_keys;
}

void run_attention(const AttentionTask& task, float* scratch) { HWY_DYNAMIC_DISPATCH(attend)(task, scratch); }

void run_attention_split(const AttentionTask& task, int64_t split, float* partial, float* scratch) {
  HWY_DYNAMIC_DISPATCH(attend_one_split)(task, split, partial, scratch);
}

void merge_attention_splits(const AttentionTask& task, float* partials) {
  HWY_DYNAMIC_DISPATCH(merge_all)(task, partials);
}

}  // namespace beryl
#endif  // HWY_ONCE
