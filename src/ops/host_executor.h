// What the two host backends share: buffers, inputs, page tables, rope tables, the sampler. A backend adds execute().
//
// Real is the type of activations and sums: double in the reference, float on the CPU. Caches hold it too, or f16.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "base/float_formats.h"
#include "ops/backend.h"
#include "ops/guarded_buffer.h"
#include "ops/sample.h"

namespace beryl {

// The buffers that HostExecutor<Real> allocates, in order; element_bytes = sizeof(Real), cache_bytes of a value in the cache.
std::vector<Allocation> plan_host_buffers(const Program& program, const StepLimits& limits, int element_bytes, int cache_bytes);
// Error(kBadInput) when an input does not fit the limits or names a page, id or row that does not exist.
void check_input(const Program& program, const StepLimits& limits, const StepInput& input);

template <class Real>
class HostExecutor : public Executor {
 public:
  // cache_is_f16: values beyond the range of f16 are stored as its largest. drops_rows: those that are no outputs, where only outputs
  // are read from on (output_part).
  HostExecutor(const Program& program, const StepLimits& limits, bool cache_is_f16 = false, bool drops_rows = false)
      : program_(program),
        limits_(limits),
        cache_is_f16_(cache_is_f16),
        output_part_(drops_rows ? output_part(program) : std::nullopt),
        plan_(plan_host_buffers(program, limits, sizeof(Real), cache_is_f16 ? sizeof(uint16_t) : sizeof(Real))) {
    size_t next = 0;
    const auto take = [&] {
      const Allocation& allocation = plan_[next++];
      return GuardedBuffer(allocation.label, static_cast<size_t>(allocation.bytes));
    };
    while (next < plan_.size() && plan_[next].kind != MemoryKind::kCache && plan_[next].kind != MemoryKind::kActivations)
      ++next;  // weights: the WeightSet owns them
    next += 2 * program.caches.size();
    lay_caches();
    for (size_t i = 0; i < program.rows.size(); ++i) rows_.push_back(take());
    for (size_t i = 0; i < program.ropes.size(); ++i) ropes_.push_back(take());
    ids_ = take();
    positions_ = take();
    sequences_ = take();
    output_rows_ = take();
    for (size_t i = 0; i < program.groups.size(); ++i) tables_.push_back(take());
    history_ = take();
    BERYL_CHECK(next == plan_.size(), "every planned buffer is allocated");
  }

  void set_input(const StepInput& input) override {
    check_input(program_, limits_, input);
    n_tokens_ = n_input_tokens_ = input.n_tokens();
    n_outputs_ = input.n_outputs();
    has_dropped_ = false;
    copy_in(input.ids, ids_);
    copy_in(input.positions, positions_);
    copy_in(input.sequences, sequences_);
    copy_in(input.output_rows, output_rows_);
    for (size_t group = 0; group < input.tables.size(); ++group) copy_in(input.tables[group], tables_[group]);
    sampling_ = input.sampling;
    page_copies_ = input.page_copies;
    turn_ropes();
  }

  void set_history(int sequence, std::span<const int32_t> prompt, std::span<const int32_t> reply) override {
    uint32_t* history = sequence_history(sequence);
    std::memset(history, 0, static_cast<size_t>(program_.vocab) * sizeof(uint32_t));
    for (int32_t id : prompt) history[id] |= kInPrompt;
    for (int32_t id : reply) ++history[id];
  }

  void run(OpRange range) override {
    const size_t end = std::min(range.end, program_.ops.size());
    for (size_t i = range.begin; i < end; ++i) {
      const Op& op = program_.ops[i];
      if (output_part_) place_rows(i);
      if (std::holds_alternative<Sample>(op)) {
        run_sample(std::get<Sample>(op));
      } else if (std::holds_alternative<Advance>(op)) {
        run_advance();
      } else if (std::holds_alternative<CopyPages>(op)) {
        run_copy_pages();
      } else if (!has_dropped_ || n_tokens_ > 0) {
        execute(op);
      }
    }
  }
  void synchronize() override {}
  std::vector<Sampled> samples() override { return sampled_; }

  void read_rows(int slot, int64_t row_begin, int64_t n_rows, float* out) override {
    const Real* from = row(whole(slot), row_begin);
    for (int64_t i = 0; i < n_rows * whole(slot).cols; ++i) out[i] = static_cast<float>(from[i]);
  }
  void write_rows(int slot, int64_t row_begin, int64_t n_rows, const float* values) override {
    Real* to = row(whole(slot), row_begin);
    for (int64_t i = 0; i < n_rows * whole(slot).cols; ++i) to[i] = static_cast<Real>(values[i]);
  }
  void read_cache(int cache, CachePart part, int page, int row, float* out) override {
    const CacheDecl& decl = program_.caches[static_cast<size_t>(cache)];
    for (int head = 0; head < decl.n_kv_heads; ++head, out += decl.head_dim) {
      if (cache_is_f16_) {
        const auto* from = cache_row<uint16_t>(cache, part, page, head, row);
        for (int i = 0; i < decl.head_dim; ++i) out[i] = f16_to_f32(from[i]);
      } else {
        const auto* from = cache_row<Real>(cache, part, page, head, row);
        for (int i = 0; i < decl.head_dim; ++i) out[i] = static_cast<float>(from[i]);
      }
    }
  }
  void write_cache(int cache, CachePart part, int page, int row, const float* values) override {
    const CacheDecl& decl = program_.caches[static_cast<size_t>(cache)];
    for (int head = 0; head < decl.n_kv_heads; ++head, values += decl.head_dim) {
      if (cache_is_f16_) {
        auto* to = cache_row<uint16_t>(cache, part, page, head, row);
        for (int i = 0; i < decl.head_dim; ++i) to[i] = f32_to_f16_in_range(values[i]);
      } else {
        auto* to = cache_row<Real>(cache, part, page, head, row);
        for (int i = 0; i < decl.head_dim; ++i) to[i] = static_cast<Real>(values[i]);
      }
    }
  }
  std::vector<Allocation> allocations() const override { return plan_; }
  int cache_element_bytes() const override { return cache_is_f16_ ? sizeof(uint16_t) : sizeof(Real); }
  int64_t position_bytes(int cache) const override {
    const CacheDecl& decl = this->program_.caches[static_cast<size_t>(cache)];
    return int64_t{2} * decl.n_kv_heads * decl.head_dim * cache_element_bytes();
  }
  std::vector<std::string> damaged_guards() override {
    std::vector<std::string> labels;
    const auto look = [&](const GuardedBuffer& buffer) {
      if (buffer.damaged()) labels.push_back(buffer.label());
    };
    for (const auto* list : {&pools_, &rows_, &ropes_, &tables_})
      for (const GuardedBuffer& buffer : *list) look(buffer);
    for (const auto* buffer : {&ids_, &positions_, &sequences_, &output_rows_, &history_}) look(*buffer);
    return labels;
  }

 protected:
  virtual void execute(const Op& op) = 0;   // every op but Sample, Advance and CopyPages

  Rows whole(int slot) const { return {slot, 0, program_.rows[static_cast<size_t>(slot)].cols}; }
  int64_t row_stride(Rows rows) const { return program_.rows[static_cast<size_t>(rows.slot)].cols; }
  Real* row(Rows rows, int64_t index) const {
    return rows_[static_cast<size_t>(rows.slot)].template as<Real>() + index * row_stride(rows) + rows.col;
  }
  // How many rows of this slot are live in the current step.
  int64_t n_rows(Rows rows) const {
    return program_.rows[static_cast<size_t>(rows.slot)].count == RowCount::kTokens ? n_tokens_ : n_outputs_;
  }
  int32_t id(int64_t token) const { return ids_.as<int32_t>()[input_row(token)]; }
  int32_t position(int64_t token) const { return positions_.as<int32_t>()[input_row(token)]; }
  int32_t sequence(int64_t token) const { return sequences_.as<int32_t>()[input_row(token)]; }
  int64_t output_row(int64_t index) const { return has_dropped_ ? index : output_rows_.as<int32_t>()[index]; }

  // A group's caches lie as [n_pages][caches][keys, values][n_kv_heads][kPageTokens][head_dim]: attention reads a head's part of
  // a page as one stream; and pages that are in use lie together, so that huge pages waste no memory.
  // [head_dim] of a KV head at a position of the token's sequence, through the page table. T: Real, or uint16_t for f16.
  template <class T = Real>
  T* cache_at(int cache, CachePart part, int32_t sequence, int head, int64_t position) const {
    const CacheDecl& decl = program_.caches[static_cast<size_t>(cache)];
    const int n_entries = limits_.n_entries[static_cast<size_t>(decl.group)];
    return cache_row<T>(cache, part, page_table(decl.group, sequence)[(position / kPageTokens) % n_entries], head,
                     static_cast<int>(position % kPageTokens));
  }
  const int32_t* page_table(int group, int32_t sequence) const {  // [n_entries]
    const auto index = static_cast<size_t>(group);
    return tables_[index].as<int32_t>() + int64_t{sequence} * limits_.n_entries[index];
  }
  template <class T>
  T* cache_row(int cache, CachePart part, int page, int head, int row) const {
    const CacheDecl& decl = program_.caches[static_cast<size_t>(cache)];
    const auto group = static_cast<size_t>(decl.group);
    const int64_t offset = cache_offset_[static_cast<size_t>(cache)] + (part == CachePart::kKeys ? 0 : cache_page_bytes(decl));
    return reinterpret_cast<T*>(pools_[group].template as<uint8_t>() + page * page_bytes_[group] + offset) +
           (int64_t{head} * kPageTokens + row) * decl.head_dim;
  }
  // From a row of a cache to the same one of the next page.
  int64_t page_stride_bytes(int cache) const {
    return page_bytes_[static_cast<size_t>(program_.caches[static_cast<size_t>(cache)].group)];
  }
  // cos and sin of a token's angles: [head_dim / 2] cosines, then as many sines.
  const Real* rope_of(int rope, int64_t token) const {
    const auto n_pairs = static_cast<int64_t>(program_.ropes[static_cast<size_t>(rope)].frequencies.size());
    return ropes_[static_cast<size_t>(rope)].template as<Real>() + input_row(token) * 2 * n_pairs;
  }
  const float* vector_values(VectorRef ref) const { return ref.present() ? program_.vector(ref).values.data() : nullptr; }

  const Program program_;
  const StepLimits limits_;
  const bool cache_is_f16_;
  int64_t n_tokens_ = 0;            // rows that are there now
  int64_t n_outputs_ = 0;

 private:
  // A row of the step's input: all of them, or the outputs.
  int64_t input_row(int64_t token) const { return has_dropped_ ? output_rows_.as<int32_t>()[token] : token; }

  // Before op `index`: rows that nobody reads from there on are dropped, and the others lie one behind the other. A list that is run
  // again from before that has all rows again.
  void place_rows(size_t index) {
    if (index < output_part_->begin) {
      has_dropped_ = false;
      n_tokens_ = n_input_tokens_;
    } else if (index == output_part_->begin && !has_dropped_ && n_outputs_ < n_tokens_) {
      for (int slot : output_part_->slots) {
        const Rows rows = whole(slot);
        for (int64_t i = 0; i < n_outputs_; ++i)
          if (output_row(i) != i) std::memcpy(row(rows, i), row(rows, output_row(i)), static_cast<size_t>(rows.cols) * sizeof(Real));
      }
      has_dropped_ = true;
      n_tokens_ = n_outputs_;
    }
  }

  template <class T>
  static void copy_in(const std::vector<T>& from, const GuardedBuffer& to) {
    if (!from.empty()) std::memcpy(to.as<T>(), from.data(), from.size() * sizeof(T));
  }
  uint32_t* sequence_history(int sequence) const { return history_.as<uint32_t>() + int64_t{sequence} * program_.vocab; }

  void turn_ropes() {
    for (size_t i = 0; i < program_.ropes.size(); ++i) {
      const std::vector<double>& frequencies = program_.ropes[i].frequencies;
      const auto n_pairs = static_cast<int64_t>(frequencies.size());
      for (int64_t token = 0; token < n_tokens_; ++token) {
        Real* table = ropes_[i].template as<Real>() + token * 2 * n_pairs;
        for (int64_t pair = 0; pair < n_pairs; ++pair) {
          const double angle = position(token) * frequencies[static_cast<size_t>(pair)];
          table[pair] = static_cast<Real>(std::cos(angle));
          table[n_pairs + pair] = static_cast<Real>(std::sin(angle));
        }
      }
    }
  }

  void run_sample(const Sample& op) {
    sampled_.clear();
    if (sampling_.empty()) return;
    for (int64_t i = 0; i < n_outputs_; ++i) {
      const SampleParams& params = sampling_[static_cast<size_t>(i)];
      uint32_t* history = uses_history(params) ? sequence_history(sequence(output_row(i))) : nullptr;
      sampled_.push_back(sample_row(row(op.logits, i), op.logits.cols, params, history, scratch_));
      if (history != nullptr && sampled_.back().valid) ++history[sampled_.back().id];
    }
  }

  void run_advance() {
    if (sampled_.empty()) return;
    for (int64_t i = 0; i < n_outputs_; ++i) {
      // An invalid row keeps its id: the engine sees `valid` and ends the sequence; its neighbours go on.
      if (sampled_[static_cast<size_t>(i)].valid) ids_.as<int32_t>()[i] = sampled_[static_cast<size_t>(i)].id;
      ++positions_.as<int32_t>()[i];
      ++sampling_[static_cast<size_t>(i)].draw;
    }
    page_copies_.clear();
    turn_ropes();
  }

  void run_copy_pages() {
    for (const PageCopy& copy : page_copies_) {
      const int64_t bytes = page_bytes_[static_cast<size_t>(copy.group)];
      auto* const pool = pools_[static_cast<size_t>(copy.group)].template as<uint8_t>();
      std::memcpy(pool + copy.to * bytes, pool + copy.from * bytes, static_cast<size_t>(bytes));
    }
  }

  int64_t cache_page_bytes(const CacheDecl& decl) const {   // of its keys, or its values
    return kPageTokens * int64_t{decl.n_kv_heads} * decl.head_dim * cache_element_bytes();
  }
  void lay_caches() {
    page_bytes_.assign(program_.groups.size(), 0);
    for (const CacheDecl& decl : program_.caches) {
      int64_t& bytes = page_bytes_[static_cast<size_t>(decl.group)];
      cache_offset_.push_back(bytes);
      bytes += 2 * cache_page_bytes(decl);
    }
    for (size_t group = 0; group < program_.groups.size(); ++group)
      pools_.emplace_back(fmt::format("caches of group {}", group),
                          static_cast<size_t>(page_bytes_[group] * limits_.n_pages[group]), PageSize::kHuge);
  }

  const std::optional<OutputPart> output_part_;
  int64_t n_input_tokens_ = 0;
  bool has_dropped_ = false;
  std::vector<Allocation> plan_;
  std::vector<GuardedBuffer> pools_;        // [groups]
  std::vector<int64_t> page_bytes_;         // [groups] of all its caches
  std::vector<int64_t> cache_offset_;       // [caches] from the beginning of a page
  std::vector<GuardedBuffer> rows_, ropes_, tables_;
  GuardedBuffer ids_, positions_, sequences_, output_rows_, history_;
  std::vector<SampleParams> sampling_;
  std::vector<PageCopy> page_copies_;
  std::vector<Sampled> sampled_;
  SampleScratch scratch_;
};

}  // namespace beryl
