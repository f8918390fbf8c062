// Index arithmetic of bands, splits, pages and groups, the same on the host and in kernels, so that a machine without a
// GPU tests it.
//
// The keys of one token are cut into splits that begin at multiples of the split's length, counted from position 0, and
// the length depends on the number of live keys alone. So a token's result depends on nothing but its own sequence: not
// on its neighbours, on the size of the cache, on the chunk in which it was processed.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/rng.h"
#include "ops/program.h"

namespace beryl::cuda {

template <class T>
constexpr T round_up(T value, std::type_identity_t<T> to) {
  return (value + to - 1) / to * to;
}
constexpr int ceil_div(int64_t value, int64_t by) { return static_cast<int>((value + by - 1) / by); }

inline constexpr int kMinSplitPositions = kPageTokens;
inline constexpr int kMaxSplits = 128;       // a band that begins within a split has one more

// Live keys of a token at `position`: [begin, end).
struct Band {
  int begin;
  int end;
};
BERYL_HOST_DEVICE inline Band live_band(int position, int window) {
  const int end = position + 1;
  return {window > 0 && end > window ? end - window : 0, end};
}

// Positions of one split, a power of two and at least a page, such that n_live keys need at most kMaxSplits whole ones.
BERYL_HOST_DEVICE inline int split_positions(int n_live) {
  int positions = kMinSplitPositions;
  while (static_cast<int64_t>(positions) * kMaxSplits < n_live) positions *= 2;
  return positions;
}

// The splits of a band: the i-th covers [first + i, first + i + 1) · positions, cut to the band.
struct Splits {
  int positions;
  int first;
  int count;
};
BERYL_HOST_DEVICE inline Splits splits_of(Band band) {
  const int positions = split_positions(band.end - band.begin);
  const int first = band.begin / positions;
  return {positions, first, (band.end + positions - 1) / positions - first};
}

// The most splits that any token at a position up to `position` has: how large a grid must be.
BERYL_HOST_DEVICE inline int most_splits(int position, int window) {
  const int64_t n_live = window > 0 && window <= position ? window : int64_t{position} + 1;
  const int64_t whole = (n_live + kMinSplitPositions - 1) / kMinSplitPositions;
  return static_cast<int>(whole < kMaxSplits ? whole : kMaxSplits) + (window > 0 ? 1 : 0);
}

// Grids are sized for buckets of the length, so that few graphs serve all lengths: the last position of the bucket.
// Beyond kMaxSplits pages the number of splits stays the same, so longer contexts share one bucket.
inline int bucket_position(int position) {
  int64_t end = 2 * kPageTokens;
  while (end <= position && end < int64_t{kMaxSplits} * kPageTokens) end *= 2;
  return position < end ? static_cast<int>(end - 1) : INT32_MAX - 1;
}

// Entry of a sequence's page table that holds a position; the table of a sliding layer wraps.
BERYL_HOST_DEVICE inline int table_entry(int position, int n_entries) { return (position / kPageTokens) % n_entries; }

// Index of the first value of a cache row: pools are [n_pages][n_kv_heads][kPageTokens][head_dim], so that the keys of
// one head on one page are one stream.
BERYL_HOST_DEVICE inline int64_t cache_offset(int64_t page, int row, int head, int n_kv_heads, int head_dim) {
  return ((page * n_kv_heads + head) * kPageTokens + row) * head_dim;
}
// Likewise of the scales of an FP8 cache: [n_pages][n_kv_heads][kPageTokens].
BERYL_HOST_DEVICE inline int64_t cache_scale_offset(int64_t page, int row, int head, int n_kv_heads) {
  return (page * n_kv_heads + head) * kPageTokens + row;
}

// ---- keys from values ----
//
// Where keys are values times a vector but for what rope turns (program.h: KeysFromValues), a key row holds only the turned columns, and the
// vector goes into the queries. So it is for Gemma 4's heads of 512, of which pairs 0 to 63 are turned: columns 0 to 63 and 256 to 319.
inline constexpr int kFromValuesDim = 512, kTurnedPairs = 64, kTurnedColumns = 2 * kTurnedPairs;
BERYL_HOST_DEVICE constexpr bool is_turned(int column) { return column % (kFromValuesDim / 2) < kTurnedPairs; }
// Of a turned column: where its key row has it.
BERYL_HOST_DEVICE constexpr int turned_column(int column) { return column / (kFromValuesDim / 2) * kTurnedPairs + column % (kFromValuesDim / 2); }

// ---- decoding: how the keys of one token are shared out (decode_attention.cuh) ----
//
// A unit is what one block multiplies at a time for one token and KV head, in tiles of a page: 64 slots, slot i holding a
// position m with m % 64 == i. Global layers: unit u has `tiles` neighbouring pages, one where there are blocks enough, since to
// merge two units takes less time than to multiply one more page. Windows of whole pages: as many units as the window has pages,
// unit u has the pages p with p % units == u, of which at most two are live: the newest one up to the token's own position, and
// for the slots above it the one that is about to leave. Other windows: a page a unit.
inline constexpr int kMaxDecodeUnits = 132;    // as many as large GPUs have multiprocessors

struct DecodeUnits {
  int count;
  int tiles;                        // pages of a unit, one after the other
  bool neighbours;                  // its pages are neighbours, all of them live
};
// Windows that a unit a page can serve.
BERYL_HOST_DEVICE constexpr bool decodes_window(int window) { return window <= (kMaxDecodeUnits - 2) * kPageTokens; }
BERYL_HOST_DEVICE constexpr int window_units(int window) {
  return window % kPageTokens == 0 ? window / kPageTokens : window / kPageTokens + 2;
}
BERYL_HOST_DEVICE inline DecodeUnits decode_units(int position, int window) {
  const int n_pages = position / kPageTokens + 1;
  if (window > 0) {
    const int units = window_units(window);
    return {n_pages < units ? n_pages : units, 1, false};
  }
  const int tiles = (n_pages + kMaxDecodeUnits - 1) / kMaxDecodeUnits;
  return {(n_pages + tiles - 1) / tiles, tiles, true};
}

// The slots [begin, end) of a tile hold positions of page `page`; those from `end` on positions of `older`; others nothing.
struct DecodeTile {
  int page;                         // position / kPageTokens, as it goes into table_entry
  int begin;
  int end;
  int older;                        // -1: none
};
BERYL_HOST_DEVICE inline DecodeTile decode_tile(int position, int window, DecodeUnits units, int unit, int tile) {
  const int last = position / kPageTokens, used = position % kPageTokens + 1;
  if (units.neighbours) {
    const int page = unit * units.tiles + tile;
    return {page, 0, page > last ? 0 : page == last ? used : kPageTokens, -1};
  }
  const int n = window_units(window), distance = (last - unit) % n;
  if (last < unit) return {0, 0, 0, -1};
  const int page = last - distance;
  DecodeTile result = {page, 0, page == last ? used : kPageTokens, -1};
  if (window % kPageTokens == 0) {
    if (page == last && used < kPageTokens && page >= n) result.older = page - n;
  } else {
    const int begin = position + 1 - window - page * kPageTokens;
    if (begin > 0) result.begin = begin < result.end ? begin : result.end;
  }
  return result;
}
// Whether `position` is in the tile.
BERYL_HOST_DEVICE inline bool tile_holds(DecodeTile tile, int position) {
  const int page = position / kPageTokens, slot = position % kPageTokens;
  return (page == tile.page && slot >= tile.begin && slot < tile.end) || (page == tile.older && slot >= tile.end);
}

// Keys or values of a tile lie in shared memory as the tensor copy engine leaves them: boxes of 16 rows; in a box the rows' first 128
// bytes, then their second, ... (a shorter row is all of that). That eight neighbouring rows can be read at once, the 16-byte pieces of
// each 128 bytes are in an order that comes from the address.
inline constexpr int kBoxRows = 16, kBoxes = kPageTokens / kBoxRows;
// Of a byte of a box's row, from the box's begin; the row has 1 << row_shift bytes.
BERYL_HOST_DEVICE inline int box_offset(int row, int byte, int row_shift) {
  return (byte >> 7) * (kBoxRows * 128) + (row << (row_shift < 7 ? row_shift : 7)) + (byte & 127);
}
BERYL_HOST_DEVICE inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70u); }

// Where the rows of a box come from: from nowhere (no slot is live), whole from a page, or a slot at a time.
enum class BoxSource { kNone, kPage, kOlder, kSlots };
BERYL_HOST_DEVICE inline BoxSource box_source(int begin, int end, bool has_older, int box) {
  const int first = box * kBoxRows, last = first + kBoxRows;
  if (begin <= first && last <= end) return BoxSource::kPage;
  if (has_older) return end <= first ? BoxSource::kOlder : BoxSource::kSlots;
  return last <= begin || end <= first || end <= begin ? BoxSource::kNone : BoxSource::kSlots;
}

// How a row of logits is cut for the sampler: groups of neighbouring ids whose largest value is kept, so that the k
// best are found by looking into k groups. At most kMaxSampleGroups of them.
inline constexpr int kMaxSampleGroups = 2048;
inline constexpr int kIdsPerThread = 8;       // the smallest group
BERYL_HOST_DEVICE inline int sample_group_ids(int64_t vocab) {
  int ids = kIdsPerThread;
  while (static_cast<int64_t>(ids) * kMaxSampleGroups < vocab) ids *= 2;
  return ids;
}

}  // namespace beryl::cuda
