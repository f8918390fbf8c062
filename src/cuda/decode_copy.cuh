// The warps of the decode kernel that copy keys and values: they find their block's units, a task after the other, and fill the ring for the
// warps that compute (decode_attend.cuh).
#pragma once

#include "cuda/decode_attention_block.cuh"

namespace beryl::cuda {

// 4 bytes to shared memory, asynchronous, or a zero where n_bytes is 0.
__device__ __forceinline__ void copy4_async(uint32_t to, const void* from, int n_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(n_bytes) : "memory");
}
__device__ __forceinline__ void copiers_barrier() {
  if constexpr (kAttentionCopiers == 1) __syncwarp();
  else asm volatile("bar.sync 4, %0;" ::"n"(kAttentionCopiers * 32) : "memory");
}

// All of a task but `more`, for tiles first, first + 1, ... of a unit, by one warp.
__device__ __forceinline__ void write_task(const DecodeBlock& block, const AttentionPhase& p, const DecodeUnit& u, int n_unit_tiles, int first,
                                           AttentionTask& task) {
  const DecodeShared* small = block.small;
  const int position = small->positions[u.row], sequence = small->sequences[u.row], last_page = position / kPageTokens;
  const int32_t* table = p.table + int64_t{sequence} * p.n_entries;
  const auto first_row = [&](int page) {
    return (__ldg(table + table_entry(page * kPageTokens, p.n_entries)) * p.cache.n_kv_heads + u.kv_head) * kPageTokens;
  };
  const int n_tiles = min(n_unit_tiles - first, AttentionTask::kTiles);
  const auto holds = [&](int row, int tile_index) {
    const int at = small->positions[row];
    return p.kv.values != nullptr && small->sequences[row] == sequence && at <= position &&
           tile_holds(decode_tile(position, p.window, u.units, u.unit, tile_index), at);
  };
  if (block.lane < n_tiles) {
    const DecodeTile tile = decode_tile(position, p.window, u.units, u.unit, first + block.lane);
    uint32_t held = 0;
#pragma unroll 1
    for (int row = 0; row < block.args.n_rows; ++row) held |= holds(row, first + block.lane) ? 1u << row : 0u;
    int boxes = 0;
#pragma unroll 1
    for (int box = 0; box < kBoxes; ++box) boxes |= box_source(tile.begin, tile.end, tile.older >= 0, box) != BoxSource::kNone ? 1 << box : 0;
    task.tiles[block.lane] =
        make_int4(first_row(tile.page), tile.older < 0 ? -1 : first_row(tile.older), static_cast<int>(tile.begin | tile.end << 8 | held << 16), boxes);
  }
  // Of all tiles of the unit: a new row lies in one of them.
  bool makes = false;
  if (block.lane < block.args.n_rows) {
    const int tile_index = u.units.neighbours ? small->positions[block.lane] / kPageTokens - u.unit * u.units.tiles : 0;
    makes = tile_index >= 0 && tile_index < n_unit_tiles && holds(block.lane, tile_index);
  }
  const uint32_t new_rows = __ballot_sync(kAllLanes, makes);
  if (block.lane == 0) {
    const TileCut keys = TileCut::of_keys(p.cache, block.args.slot_bytes), values = TileCut::of_values(p.cache, block.args.slot_bytes);
    task.row = u.row;
    task.kv_head = u.kv_head;
    task.first_head = u.first_head;
    task.n_heads = u.n_heads;
    task.unit = u.unit;
    task.n_units = u.units.count;
    task.n_tiles = n_tiles;
    task.new_rows = new_rows;
    task.append_row = p.appends && u.first_tile_of_heads && (new_rows >> u.row & 1u) != 0 ? first_row(last_page) + position % kPageTokens : -1;
    task.row_shift[0] = keys.row_shift, task.row_shift[1] = values.row_shift;
    task.piece_shift[0] = keys.piece_shift, task.piece_shift[1] = values.piece_shift;
    task.begins = first == 0;
    task.ends = first + n_tiles == n_unit_tiles;
    task.pools[0] = static_cast<const uint8_t*>(p.cache.keys);
    task.pools[1] = static_cast<const uint8_t*>(p.cache.values);
    task.scales[0] = p.cache.element == CacheElement::kFp8 ? p.cache.key_scales : nullptr;
    task.scales[1] = p.cache.value_scales;
    task.maps = static_cast<const uint8_t*>(p.maps);
  }
}

// The next task, by one warp. place: where its unit is among the phase's, first: of its tiles; both move on.
__device__ __forceinline__ void find_task(const DecodeBlock& block, const AttentionPhase& p, UnitPlace& place, int& first, AttentionTask& task) {
  DecodeUnit u;
  UnitPlace after = place;
  if (next_unit(block, p, after, u)) {
    // A unit's last pages may lie beyond the newest one.
    const int n_pages = block.small->positions[u.row] / kPageTokens + 1;
    const int n_unit_tiles = u.units.neighbours ? min(u.units.tiles, n_pages - u.unit * u.units.tiles) : u.units.tiles;
    write_task(block, p, u, n_unit_tiles, first, task);
    first += AttentionTask::kTiles;
    bool more = true;
    if (first >= n_unit_tiles) {
      first = 0;
      place = after;
      more = next_unit(block, p, after, u);
    }
    if (block.lane == 0) task.more = more;
  } else if (block.lane == 0) {
    task.n_tiles = 0;
    task.more = false;
  }
  __syncwarp();
}

// What is copied next of a task: a piece of a tile's keys (part 0) or values (1).
struct TaskPiece {
  int tile = 0, part = 0, piece = 0;
  __device__ __forceinline__ void next(const AttentionTask& task) {
    if (++piece << task.piece_shift[part] < kPageTokens) return;
    piece = 0;
    tile += part;
    part ^= 1;
  }
};

// To a slot of the ring, by all copiers: whole boxes by the copy engine, where there is one, others 16 bytes at a time, with zeros for slots
// that hold no live key. Boxes without one are left out.
__device__ __forceinline__ void copy_piece(const DecodeBlock& block, const AttentionTask& task, const TaskPiece& at, int slot_of_ring, int copier) {
  const int part = at.part, piece_shift = task.piece_shift[part], row_shift = task.row_shift[part];
  const TaskTile tile(task.tiles[at.tile]);
  const int first_row = at.piece << piece_shift, n_rows = 1 << piece_shift;
  const uint32_t to = shared_address(block.ring) + static_cast<uint32_t>(slot_of_ring * block.args.slot_bytes);
  uint64_t* full = &block.small->full[slot_of_ring];
  if (part != 0 && first_row == 0 && task.scales[0] != nullptr) {
#pragma unroll 1
    for (int index = copier * 32 + block.lane; index < 2 * kPageTokens; index += kAttentionCopiers * 32) {
      const int slot = index % kPageTokens;
      const bool live = tile.live(slot);
      const float* from = task.scales[index / kPageTokens] + (live ? (slot < tile.end ? tile.row : tile.older) + slot : 0);
      copy4_async(to + static_cast<uint32_t>(block.args.slot_bytes - TileCut::kScaleBytes + index * 4), from, live ? 4 : 0);
    }
  }
  uint32_t engine_bytes = 0;
#pragma unroll 1
  for (int row = 0; row < n_rows; row += kBoxRows) {
    const BoxSource source = box_source(tile.begin, tile.end, tile.older >= 0, (first_row + row) / kBoxRows);
    if (source == BoxSource::kNone) continue;
    if (BERYL_BULK_COPY && source != BoxSource::kSlots) {
      engine_bytes += static_cast<uint32_t>(kBoxRows << row_shift);
      continue;
    }
    // Four rows at a time by eight lanes each; what depends on a row is computed once for all its lines of 128 bytes.
    const uint32_t box_at = to + static_cast<uint32_t>(row << row_shift);
    const int first_byte = block.lane % 8 * 16;
#pragma unroll 1
    for (int box_row = copier * 4 + block.lane / 8; box_row < kBoxRows; box_row += kAttentionCopiers * 4) {
      const int slot = first_row + row + box_row;
      const bool live = tile.live(slot);
      const int64_t from_row = live ? (slot < tile.end ? tile.row : tile.older) + slot : 0;
      const uint8_t* from = task.pools[part] + (from_row << row_shift) + first_byte;
      uint32_t at_line = swizzled(box_at + static_cast<uint32_t>(box_offset(box_row, first_byte, row_shift)));
#pragma unroll 1
      for (int left = (1 << row_shift) - first_byte; left > 0; left -= 128, from += 128, at_line += kBoxRows * 128)
        copy16_async(at_line, from, live ? 16 : 0);
    }
  }
  barrier_join_copies(full);
  copiers_barrier();
#if BERYL_BULK_COPY
  if (block.lane == 0) {
    barrier_arrive_expecting(full, engine_bytes);
    const uint8_t* map = task.maps + part * kTensorMapBytes;
#pragma unroll 1
    for (int row = 0; row < n_rows; row += kBoxRows) {
      const BoxSource source = box_source(tile.begin, tile.end, tile.older >= 0, (first_row + row) / kBoxRows);
      if (source != BoxSource::kPage && source != BoxSource::kOlder) continue;
      const int from = (source == BoxSource::kPage ? tile.row : tile.older) + first_row + row;
      box_copy(to + static_cast<uint32_t>(row << row_shift), map, from >> max(7 - row_shift, 0), full);   // rows of the map have 128 bytes or more
    }
  }
#else
  if (copier == 0) barrier_arrive(full);
#endif
}

// Finds this block's tasks and copies their keys and values into the ring; by kAttentionCopiers warps, copier: which of them. They look
// up the phase, its first unit and where its tiles lie before it is their turn: then the warp that copies weights hands over the ring
// (decode.cu) and waits for it. These warps have few registers, so each step looks up what it needs.
__device__ __forceinline__ void copy_attention(const DecodeArgs& args, unsigned char* shared, int copier) {
  const auto now = [&] { return DecodeBlock(args, afresh(shared)); };
  const WeightStream* at = args.streams;
  uint32_t n_tasks = 0;
#pragma unroll 1
  for (uint32_t turn = 0;; turn ^= 1) {
    while (at->weights != nullptr && at->n_stages != 0) ++at;
    if (at->weights == nullptr) return;
    const AttentionPhase& p = *reinterpret_cast<const AttentionPhase*>((at++)->weights);
#if BERYL_BULK_COPY
    if (now().lane < 2) take_tensor_map(static_cast<const uint8_t*>(p.maps) + now().lane * kTensorMapBytes);
    __syncwarp();
#endif
    UnitPlace place = {0, block_index()};
    RingPlace ring;
    bool has_turn = false, filled = false;
    int first = 0;                   // tile of the unit
#pragma unroll 1
    for (bool more = true; more; ++n_tasks) {
      if (copier == 0) {
        const DecodeBlock block = now();
        DecodeShared* small = block.small;
        barrier_wait_suspended(&small->task_empty[n_tasks & 1], (n_tasks >> 1 & 1) ^ 1);
        find_task(block, p, place, first, small->tasks[n_tasks & 1]);
        if (block.lane == 0) barrier_arrive(&small->task_full[n_tasks & 1]);
        if (!has_turn) {
          barrier_wait_suspended(&small->hand_over, turn);
          // What the last attention phase's merge put back is there before anything that this block makes from here on, and so before the sums of
          // the next attention phase but one, which come to the same place.
          __threadfence();
        }
      }
      copiers_barrier();
      if (!has_turn) {
        const DecodeShared* small = now().small;
        ring = {small->handed.slot, small->handed.parity};
        filled = small->handed.filled;
        has_turn = true;
      }
      more = now().small->tasks[n_tasks & 1].more;
      TaskPiece piece;
#pragma unroll 1
      for (;;) {
        const DecodeBlock block = now();
        const AttentionTask& task = block.small->tasks[n_tasks & 1];
        if (piece.tile >= task.n_tiles) break;
        if (filled) barrier_wait_suspended(&block.small->empty[ring.slot], ring.parity ^ 1);
        copy_piece(block, task, piece, ring.slot, copier);
        piece.next(task);
        ring.next(args.n_slots);
        if (ring.slot == 0) filled = true;
      }
    }
    copiers_barrier();               // all have read what was handed over
    const DecodeBlock block = now();
    if (copier == 0 && block.lane == 0) {
      block.small->handed.slot = ring.slot;
      block.small->handed.parity = ring.parity;
      block.small->handed.filled = filled;
      barrier_arrive(&block.small->hand_back);
    }
  }
}

}  // namespace beryl::cuda
