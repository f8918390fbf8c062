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

// Rows of the cache are scored and added in blocks that stay in the L1 cache.
constexpr int64_t kBlockFloats = 4096;   // 16 KB, half of it
HWY_INLINE int64_t block_rows(int64_t padded) {
  return std::clamp<int64_t>(kBlockFloats / padded / 16 * 16, padded < 512 ? 16 : 8, kPageTokens);
}

// Where things lie in a task's scratch.
struct Workspace {
  float* q;           // tiles of kTokenTile rows, [padded / 16][rows of the tile][16]
  float* scores;      // [n_rows][split_keys]: scores, then their exponentials
  float* split;       // [n_rows][partial_floats]
  float* total;       // [n_rows][partial_floats]
  float* block;       // [block_rows][padded]: of the cache, where it is not read in place
};

HWY_INLINE Workspace workspace(const AttentionTask& task, float* scratch) {
  const int64_t n_rows = int64_t{task.n_tokens} * task.group, padded = padded16(task.head_dim);
  const int64_t partial = partial_floats(task.head_dim);
  Workspace w;
  w.q = scratch;
  w.scores = w.q + n_rows * padded;
  w.split = w.scores + n_rows * task.split_keys;
  w.total = w.split + n_rows * partial;
  w.block = w.total + n_rows * partial;
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

// With many rows a task computes longer than it reads, and other tasks have just read the same keys.
HWY_INLINE bool reads_cold_cache(const AttentionTask& task) { return task.n_tokens * task.group <= kTokenTile; }

// Rows of the cache in plain address order, so that the hardware's prefetcher sees a stream: the products below read several
// rows side by side, and it follows none of them.
HWY_INLINE void touch_lines(const uint8_t* rows, int64_t n_bytes) {
  const hn::CappedTag<uint8_t, 16> d;
  auto sum = hn::Zero(d);
  for (int64_t i = 0; i + 16 <= n_bytes; i += 64) sum = hn::Or(sum, hn::LoadU(d, rows + i));
  [[maybe_unused]] volatile uint8_t kept = hn::GetLane(sum);
}

HWY_INLINE void prefetch_lines(const uint8_t* rows, int64_t n_bytes) {
  for (int64_t i = 0; i < n_bytes; i += 64) hwy::Prefetch(rows + i);
}

// What is asked for while something else is computed: two cache lines a turn, spread over the whole computation, since all at once
// would fill the line buffers and stop it.
class Ahead {
 public:
  Ahead() = default;
  explicit Ahead(const uint8_t* from) : from_(from), step_(128) {}
  HWY_INLINE void ask() {
    __builtin_prefetch(from_, 0, 2);
    __builtin_prefetch(from_ + 64, 0, 2);
    from_ += step_;
  }

 private:
  alignas(64) static constexpr uint8_t kNothing[128] = {};
  const uint8_t* from_ = kNothing;
  int64_t step_ = 0;
};

// n rows of a pool in f32, of consecutive positions of one page.
struct CacheRows {
  const float* values;   // [n][stride]; columns from head_dim to the next multiple of 16 are 0 where stride covers them
  int64_t stride;
};

// Reads `rows` of one element type.
template <class T>
HWY_INLINE CacheRows expand_rows(const T* from, int64_t n, int64_t head_dim, float* block) {
  const int64_t padded = padded16(head_dim);
  if (padded == head_dim) {
    for (int64_t i = 0; i < n * head_dim; i += 16) store16(load16_some(from + i, 16), block + i);
  } else {
    for (int64_t row = 0; row < n; ++row)
      for (int64_t c = 0; c < head_dim; c += 16)
        store16(load16_some(from + row * head_dim + c, head_dim - c), block + row * padded + c);
  }
  return {block, padded};
}

HWY_INLINE const uint8_t* cache_address(const AttentionTask& task, const void* pool, int64_t position) {
  const int64_t page = task.table[position / kPageTokens % task.n_entries];
  return static_cast<const uint8_t*>(pool) + page * task.page_stride_bytes +
         position % kPageTokens * task.head_dim * (task.cache_is_f16 ? 2 : 4);
}

HWY_INLINE CacheRows read_rows(const AttentionTask& task, const uint8_t* rows, int64_t n, float* block) {
  if (task.cache_is_f16) return expand_rows(reinterpret_cast<const uint16_t*>(rows), n, task.head_dim, block);
  const auto* const floats = reinterpret_cast<const float*>(rows);
  if (task.head_dim % 16 != 0) return expand_rows(floats, n, task.head_dim, block);
  if (reads_cold_cache(task)) touch_lines(rows, n * task.head_dim * int64_t{sizeof(float)});
  return {floats, task.head_dim};
}

#if HWY_MAX_BYTES >= 64
// Scores of 16 consecutive keys and kRows rows of a tile. A fold for every four keys would take longer than the products: here
// the sums of four keys are halved twice, and those of all sixteen together twice more, in the order of sum16.
template <int kRows>
HWY_NOINLINE void score_16_keys(const float* keys, int64_t stride, const float* q, int64_t n16, Ahead ahead, float* scores,
                                int64_t scores_stride) {
  const FloatTag d;
  FloatPart folded[4][kRows];
  for (int i = 0; i < 4; ++i) {
    // Keys i, 4 + i, 8 + i, 12 + i; i runs in the order in which the last fold takes them.
    constexpr int kOrder[4] = {0, 2, 1, 3};
    const float* key = keys + kOrder[i] * stride;
    FloatPart sums[4][kRows];
    for (int k = 0; k < 4; ++k)
      for (int r = 0; r < kRows; ++r) sums[k][r] = hn::Zero(d);
    const float* x = q;
    for (int64_t c = 0; c < n16; ++c, key += 16, x += 16 * kRows) {
      FloatPart columns[4];
      for (int k = 0; k < 4; ++k) columns[k] = hn::LoadU(d, key + 4 * k * stride);
      ahead.ask();
      for (int r = 0; r < kRows; ++r) {
        const FloatPart row = hn::LoadU(d, x + 16 * r);
        for (int k = 0; k < 4; ++k) sums[k][r] = hn::MulAdd(columns[k], row, sums[k][r]);
      }
    }
    for (int r = 0; r < kRows; ++r) folded[i][r] = fold_4_to_blocks(sums[0][r], sums[2][r], sums[1][r], sums[3][r]);
  }
  for (int r = 0; r < kRows; ++r)
    hn::StoreU(fold_blocks_to_sums(folded[0][r], folded[1][r], folded[2][r], folded[3][r]), d, scores + r * scores_stride);
}

HWY_INLINE void score_16(const float* keys, int64_t stride, const float* q, int64_t n16, int n_rows, Ahead ahead, float* scores,
                         int64_t scores_stride) {
  switch (n_rows) {
    case 1: return score_16_keys<1>(keys, stride, q, n16, ahead, scores, scores_stride);
    case 2: return score_16_keys<2>(keys, stride, q, n16, ahead, scores, scores_stride);
    case 3: return score_16_keys<3>(keys, stride, q, n16, ahead, scores, scores_stride);
    case 4: return score_16_keys<4>(keys, stride, q, n16, ahead, scores, scores_stride);
    case 5: return score_16_keys<5>(keys, stride, q, n16, ahead, scores, scores_stride);
    default: return score_16_keys<6>(keys, stride, q, n16, ahead, scores, scores_stride);
  }
}
#endif

// scores[row][m] = q · k_m for the keys [begin, end) of the split, for all rows.
void score_keys(const AttentionTask& task, int64_t split, LiveRange keys, const Workspace& w) {
  const int64_t n_rows = int64_t{task.n_tokens} * task.group, padded = padded16(task.head_dim);
  const int64_t n_tiles = (n_rows + kTokenTile - 1) / kTokenTile;
  const int64_t most_rows = block_rows(padded), row_bytes = task.head_dim * int64_t{task.cache_is_f16 ? 2 : 4};
  const bool is_cold = reads_cold_cache(task);
  for (int64_t m = keys.begin, n = 0; m < keys.end; m += n) {
    const int64_t position = split * task.split_keys + m;
    const int64_t n_in_page = std::min(keys.end - m, kPageTokens - position % kPageTokens);
    n = std::min(n_in_page, most_rows);
    const uint8_t* const key = cache_address(task, task.keys, position);
    const CacheRows rows = read_rows(task, key, n, w.block);
    // The next block's rows, or the first values, arrive while this block is computed.
    const uint8_t* next = n < n_in_page ? key + n * row_bytes : cache_address(task, task.values, position);
    const int64_t n_next = std::min(n < n_in_page ? n_in_page - n : n, n);
    int64_t i = 0;
#if HWY_MAX_BYTES >= 64
    for (; i + 16 <= n; i += 16) {
      const Ahead ahead = is_cold ? Ahead(next + i * row_bytes) : Ahead();
      for (int64_t tile = 0; tile < n_tiles; ++tile)
        score_16(rows.values + i * rows.stride, rows.stride, w.q + tile * kTokenTile * padded, padded / 16,
                 tile_rows(n_rows, tile), ahead, w.scores + tile * kTokenTile * task.split_keys + m + i, task.split_keys);
    }
#endif
    for (; i + kRowTile <= n; i += kRowTile) {
      if (is_cold && i < n_next) prefetch_lines(next + i * row_bytes, std::min<int64_t>(kRowTile, n_next - i) * row_bytes);
      for (int64_t tile = 0; tile < n_tiles; ++tile)
        multiply_strided_tile(rows.values + i * rows.stride, rows.stride, 16, w.q + tile * kTokenTile * padded, padded / 16,
                              tile_rows(n_rows, tile), w.scores + tile * kTokenTile * task.split_keys + m + i,
                              task.split_keys);
    }
    for (; i < n; ++i)
      for (int64_t row = 0; row < n_rows; ++row) {
        const int64_t tile = row / kTokenTile;
        multiply_piece<1, 1>(rows.values + i * rows.stride, 0, 16, w.q + tile * kTokenTile * padded + row % kTokenTile * 16,
                             16 * tile_rows(n_rows, tile), padded / 16, w.scores + row * task.split_keys + m + i, 0);
      }
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

// o[r] += Σ over n keys of p[r][m] · v_m, for kVectors · 16 dimensions; rows of o are o_stride apart, those of p p_stride.
template <int kRows, int kVectors>
HWY_NOINLINE void add_values(const float* values, int64_t stride, int64_t n, const float* p, int64_t p_stride, Ahead ahead,
                             float* o, int64_t o_stride) {
  const FloatTag d;
  Vec16 sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = load16(o + r * o_stride + 16 * v);
  for (int64_t i = 0; i < n; ++i, values += stride) {
    ahead.ask();
    for (size_t part = 0; part < kParts; ++part) {
      FloatPart columns[kVectors];
      for (int v = 0; v < kVectors; ++v) columns[v] = hn::LoadU(d, values + 16 * v + part * kPartLanes);
      for (int r = 0; r < kRows; ++r) {
        const FloatPart weight = hn::Set(d, p[r * p_stride + i]);
        for (int v = 0; v < kVectors; ++v)
          sums[r][v].part[part] = hn::MulAdd(weight, columns[v], sums[r][v].part[part]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store16(sums[r][v], o + r * o_stride + 16 * v);
}

template <int kRows>
HWY_INLINE void add_values_of_rows(const float* values, int64_t stride, int64_t padded, int64_t n, const float* p,
                                   int64_t p_stride, const uint8_t* next, float* o, int64_t o_stride) {
  constexpr int kVectors = kParts == 1 ? 4 : 1;
  int64_t dim = 0;
  for (; dim + 16 * kVectors <= padded; dim += 16 * kVectors)
    add_values<kRows, kVectors>(values + dim, stride, n, p, p_stride, next == nullptr ? Ahead() : Ahead(next + dim * n * 2),
                                o + dim, o_stride);
  for (; dim < padded; dim += 16)
    add_values<kRows, 1>(values + dim, stride, n, p, p_stride, Ahead(), o + dim, o_stride);
}

HWY_INLINE void add_values_of_tile(int n_rows, const float* values, int64_t stride, int64_t padded, int64_t n, const float* p,
                                   int64_t p_stride, const uint8_t* next, float* o, int64_t o_stride) {
  switch (n_rows) {
    case 1: return add_values_of_rows<1>(values, stride, padded, n, p, p_stride, next, o, o_stride);
    case 2: return add_values_of_rows<2>(values, stride, padded, n, p, p_stride, next, o, o_stride);
    case 3: return add_values_of_rows<3>(values, stride, padded, n, p, p_stride, next, o, o_stride);
    case 4: return add_values_of_rows<4>(values, stride, padded, n, p, p_stride, next, o, o_stride);
    case 5: return add_values_of_rows<5>(values, stride, padded, n, p, p_stride, next, o, o_stride);
    default: return add_values_of_rows<6>(values, stride, padded, n, p, p_stride, next, o, o_stride);
  }
}

// partial[row] of one split, for the rows that have live keys there.
void attend_split(const AttentionTask& task, int64_t split, const Workspace& w, float* partial) {
  const int64_t n_rows = int64_t{task.n_tokens} * task.group, padded = padded16(task.head_dim);
  const int64_t stride = partial_floats(task.head_dim);
  const LiveRange keys{live_range(task, 0, split).begin, live_range(task, task.n_tokens - 1, split).end};
  score_keys(task, split, keys, w);
  for (int64_t row = 0; row < n_rows; ++row) {
    const LiveRange live = live_range(task, row / task.group, split);
    float* o = partial + row * stride;
    if (live.empty()) continue;
    exponentiate(task, live, w.scores + row * task.split_keys, o[padded], o[padded + 1]);
    for (int64_t c = 0; c < padded; c += 16) store16(zero16(), o + c);
  }
  const int64_t most_rows = block_rows(padded);
  const bool is_cold = reads_cold_cache(task);
  for (int64_t m = keys.begin, n = 0; m < keys.end; m += n) {
    const int64_t position = split * task.split_keys + m;
    n = std::min({keys.end - m, kPageTokens - position % kPageTokens, most_rows});
    const CacheRows rows = read_rows(task, cache_address(task, task.values, position), n, w.block);
    const uint8_t* next = nullptr;
    if (is_cold) {
      const bool is_last = m + n >= keys.end;
      const int64_t following = position + n;
      if (!is_last || following < task.position)
        next = cache_address(task, is_last ? task.keys : task.values, following);
    }
    // Keys [begin, end) of the split, cut to this block, for some rows.
    const auto add = [&](int64_t row, int count, int64_t begin, int64_t end) HWY_ATTR {
      begin = std::max(begin, m);
      end = std::min(end, m + n);
      if (begin >= end) return;
      add_values_of_tile(count, rows.values + (begin - m) * rows.stride, rows.stride, padded, end - begin,
                         w.scores + row * task.split_keys + begin, task.split_keys, next, partial + row * stride, stride);
      next = nullptr;
    };
    for (int64_t row_begin = 0; row_begin < n_rows; row_begin += kTokenTile) {
      const int count = tile_rows(n_rows, row_begin / kTokenTile);
      // Keys that are live for all rows of the tile are shared; those at the edges belong to some rows only.
      const LiveRange low = live_range(task, row_begin / task.group, split);
      const LiveRange high = live_range(task, (row_begin + count - 1) / task.group, split);
      LiveRange common{high.begin, low.end};
      if (common.empty()) common.end = common.begin;
      for (int64_t row = row_begin; row < row_begin + count; ++row) {
        const LiveRange live = live_range(task, row / task.group, split);
        add(row, 1, live.begin, std::min(common.begin, live.end));
      }
      add(row_begin, count, common.begin, common.end);
      for (int64_t row = row_begin; row < row_begin + count; ++row) {
        const LiveRange live = live_range(task, row / task.group, split);
        add(row, 1, std::max(common.end, live.begin), live.end);
      }
    }
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
  // A block of the cache (block_rows): 16 KB, or 16 rows (8 of the longest) where those are more.
  const int64_t block = std::max<int64_t>(4096, padded * (padded < 512 ? 16 : 8));
  return n_rows * (padded + kMaxSplitKeys + 2 * partial_floats(head_dim)) + block;
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
