// The CPU executor: looks up what an op names, cuts its work into items, and hands them to the pool. The arithmetic is
// in linear.cpp, attention.cpp, elementwise.cpp and dequant.cpp.
#include "cpu/cpu_backend.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "base/mapped_file.h"
#include "base/system_memory.h"
#include "cpu/attention.h"
#include "cpu/dequant.h"
#include "cpu/elementwise.h"
#include "cpu/huge_buffer.h"
#include "cpu/linear.h"
#include "cpu/packed_matrix.h"
#include "cpu/parallel.h"
#include "cpu/read_speed.h"
#include "cpu/simd.h"
#include "ops/host_executor.h"

namespace beryl {
namespace {

// Attention of this many tokens at most may be cut along the keys; each needs room for its partial sums.
constexpr int kMaxSplitTokens = 4;
// Rows with fewer values in all are not worth waking the workers for.
constexpr int64_t kValuesWorthAThread = 8192;

// Floats of each scratch buffer, from the largest op that uses it.
struct ScratchSizes {
  int64_t packed = 0;           // tokens as products in f32 read them
  int64_t quantized = 0;        // tokens as integer products read them
  int64_t rounded = 0;          // tokens as products of BF16 read them
  int64_t panels = 0;           // a thread
  int64_t attention = 0;        // a thread
  int64_t partials = 0;         // attention splits
  int64_t route_logits = 0;
  int64_t expert_hidden = 0;    // [routes][expert_dim]
  int64_t expert_outputs = 0;   // [routes][cols]
  int64_t expert_indices = 0;   // int32: see Routing
  int64_t table_row = 0;        // a thread: bytes of a row to be embedded, copied from the file
  int64_t n_experts = 0;
  int64_t n_attention_tasks = 0;
};

// How matrices are packed: those of Linear and Experts, codes to be multiplied in integers, floats in f32, or BF16 in bf16 where that was
// asked for; a gated pair only together.
// The router stays in f32: its choice among experts should not hang on a rounding of activations.
class PackingPlan {
 public:
  PackingPlan(const Program& program, CpuPrecision precision) {
    for (const WeightMatrix& matrix : program.weights->matrices) forms_.emplace_back(matrix.parts.size(), PackedForm::kNone);
    pairs_.resize(forms_.size());
    multiplies_in_file_.resize(forms_.size());
    const auto pack = [&](MatrixRef ref, bool gated) {
      multiplies_in_file_[static_cast<size_t>(ref.index)] = precision == CpuPrecision::kExact;
      if (precision == CpuPrecision::kExact) return;
      const WeightMatrix& matrix = program.matrix(ref);
      std::vector<PackedForm>& forms = forms_[static_cast<size_t>(ref.index)];
      for (size_t part = 0; part < matrix.parts.size(); ++part) {
        const Format format = matrix.parts[part].format;
        forms[part] = has_integer_codes(format)                                         ? PackedForm::kCodes
                      : precision == CpuPrecision::kBf16 && format == Format::kBf16 ? PackedForm::kBf16
                                                                                    : PackedForm::kFloats;
      }
      if (gated && forms[0] != forms[1]) {
        forms[0] = forms[1] = PackedForm::kNone;
        multiplies_in_file_[static_cast<size_t>(ref.index)] = true;
      }
      pairs_[static_cast<size_t>(ref.index)] = gated && forms[0] != PackedForm::kNone;
    };
    for (const Op& op : program.ops) {
      if (const auto* linear = std::get_if<Linear>(&op)) pack(linear->weight, is_gated(linear->epilogue));
      if (const auto* experts = std::get_if<Experts>(&op)) pack(experts->gate_up, true), pack(experts->down, false);
    }
  }
  PackedForm form(size_t matrix, size_t part) const { return forms_[matrix][part]; }
  // Gate and up are read together, so their tiles take turns in one stream.
  bool pairs(size_t matrix) const { return pairs_[matrix]; }
  // Whether products read the file's blocks, so that its pages should stay.
  bool multiplies_in_file(size_t matrix) const { return multiplies_in_file_[matrix]; }
  int64_t bytes(const Program& program) const {
    int64_t sum = 0;
    for (size_t m = 0; m < forms_.size(); ++m)
      for (size_t part = 0; part < forms_[m].size(); ++part)
        if (forms_[m][part] != PackedForm::kNone) sum += packed_bytes(forms_[m][part], program.weights->matrices[m].parts[part]);
    return sum;
  }

 private:
  std::vector<std::vector<PackedForm>> forms_;   // [matrices][parts]
  std::vector<bool> pairs_;                      // [matrices]
  std::vector<bool> multiplies_in_file_;         // [matrices]
};

constexpr const char* kPackedLabel = "weights, packed for products";

// All of it is written at once, and the system lends more than it has: it would end somebody's process instead of refusing.
void require_memory_to_pack(int64_t n_bytes) {
  const int64_t available = available_memory_bytes();
  if (n_bytes <= available) return;
  throw Error(ErrorCode::kOutOfMemory,
              fmt::format("{}; --exact reads them in the file instead, which is slower", out_of_memory(kPackedLabel, n_bytes).what()));
}

class ScratchCounter {
 public:
  ScratchCounter(const Program& program, const StepLimits& limits, const PackingPlan& packing)
      : program_(program), limits_(limits), packing_(packing) {
    for (const Op& op : program.ops) std::visit(*this, op);
  }
  const ScratchSizes& sizes() const { return sizes_; }

  void operator()(const Linear& op) {
    const RowCount count = program_.rows[static_cast<size_t>(op.x.slot)].count;
    const int n_rows = count == RowCount::kTokens ? limits_.max_tokens : limits_.max_outputs;
    add_product(op.weight, n_rows, op.x.cols, is_gated(op.epilogue));
  }
  void operator()(const Attention& op) {
    const CacheDecl& cache = program_.caches[static_cast<size_t>(op.cache)];
    const auto group_index = static_cast<size_t>(cache.group);
    const int64_t heads_per_kv = op.n_heads / cache.n_kv_heads;
    const int64_t n_rows = std::max<int64_t>(kAttentionRows, heads_per_kv);
    grow(sizes_.attention, attention_scratch_floats(n_rows, cache.head_dim));
    const int window = program_.groups[group_index].window;
    const int64_t n_splits =
        max_splits(int64_t{limits_.n_entries[group_index]} * kPageTokens, window, kMaxSplitTokens);
    grow(sizes_.partials,
         std::min(kMaxSplitTokens, limits_.max_tokens) * op.n_heads * n_splits * partial_floats(cache.head_dim));
    grow(sizes_.n_attention_tasks, int64_t{limits_.max_tokens} * cache.n_kv_heads);
  }
  void operator()(const Route& op) {
    add_f32_product(limits_.max_tokens, op.x.cols, false);
    grow(sizes_.route_logits, int64_t{limits_.max_tokens} * op.n_experts);
  }
  void operator()(const Experts& op) {
    const int64_t n_routes = int64_t{limits_.max_tokens} * op.top_k;
    const int64_t n_experts = program_.matrix(op.down).stack();
    add_product(op.gate_up, n_routes, op.x.cols, true);
    add_product(op.down, n_routes, op.expert_dim, false);
    grow(sizes_.expert_hidden, n_routes * op.expert_dim);
    grow(sizes_.expert_outputs, n_routes * op.y.cols);
    grow(sizes_.expert_indices, n_experts + 1 + 2 * n_routes);
    grow(sizes_.n_experts, n_experts);
  }
  void operator()(const Embed& op) {
    const HostMatrix& table = program_.matrix(op.table).parts.front();
    if (packing_.multiplies_in_file(static_cast<size_t>(op.table.index))) return;
    const int64_t n_bytes = row_bytes(table.format, table.cols) + row_scale_bytes(table.format, table.cols);
    grow(sizes_.table_row, (n_bytes + 3) / 4);
  }
  void operator()(const QkvFinish&) {}
  void operator()(const AddNorm&) {}
  void operator()(const GatherRows&) {}
  void operator()(const Sample&) {}
  void operator()(const Advance&) {}
  void operator()(const CopyPages&) {}

 private:
  static void grow(int64_t& size, int64_t needed) { size = std::max(size, needed); }
  void add_product(MatrixRef ref, int64_t n_tokens, int64_t cols, bool gated) {
    for (size_t part = 0; part < program_.matrix(ref).parts.size(); ++part) {
      switch (packing_.form(static_cast<size_t>(ref.index), part)) {
        case PackedForm::kNone:
        case PackedForm::kFloats: add_f32_product(n_tokens, cols, gated); break;
        case PackedForm::kBf16: grow(sizes_.rounded, Bf16Tokens::floats(n_tokens, cols)); break;
        case PackedForm::kCodes:
          grow(sizes_.quantized, QuantizedTokens::floats(n_tokens, cols));
          if (n_tokens > kFewTokens) grow(sizes_.panels, expanded_floats(cols, gated));
          break;
      }
    }
  }
  void add_f32_product(int64_t n_tokens, int64_t cols, bool gated) {
    grow(sizes_.packed, PackedTokens::packed_floats(n_tokens, cols));
    if (n_tokens > kFewTokens) grow(sizes_.panels, panel_floats(cols, gated));
  }

  const Program& program_;
  const StepLimits& limits_;
  const PackingPlan& packing_;
  ScratchSizes sizes_;
};

int64_t whole_lines(int64_t n_floats) { return (n_floats + 15) / 16 * 16; }

std::vector<Allocation> plan_scratch(const ScratchSizes& sizes, int n_threads) {
  std::vector<Allocation> plan;
  const auto add = [&](const char* label, int64_t n_floats) {
    plan.push_back({MemoryKind::kActivations, label, n_floats * static_cast<int64_t>(sizeof(float))});
  };
  add("scratch: packed tokens", sizes.packed);
  add("scratch: quantised tokens", sizes.quantized);
  add("scratch: rounded tokens", sizes.rounded);
  add("scratch: weight panels", whole_lines(sizes.panels) * n_threads);
  add("scratch: attention", whole_lines(sizes.attention) * n_threads);
  add("scratch: attention splits", sizes.partials);
  add("scratch: router logits", sizes.route_logits);
  add("scratch: expert hidden", sizes.expert_hidden);
  add("scratch: expert outputs", sizes.expert_outputs);
  add("scratch: expert indices", sizes.expert_indices);
  add("scratch: table rows", whole_lines(sizes.table_row) * n_threads);
  return plan;
}

// Of the cache's values: f16 unless they are to be exact or f32 is asked for.
bool cache_is_f16(CacheType type, CpuPrecision precision) {
  switch (type) {
    case CacheType::kDefault: return precision != CpuPrecision::kExact;
    case CacheType::kF16: return true;
    case CacheType::kF32: return false;
    case CacheType::kBf16:
    case CacheType::kFp8: break;
  }
  throw Error(ErrorCode::kUnsupported, fmt::format("the CPU's caches are F16 or F32, not {}", type == CacheType::kFp8 ? "FP8" : "BF16"));
}

std::vector<Allocation> plan_all(const Program& program, const StepLimits& limits, int n_threads, CpuPrecision precision) {
  const PackingPlan packing(program, precision);
  const bool is_f16 = cache_is_f16(limits.cache_type, precision);
  std::vector<Allocation> plan = plan_host_buffers(program, limits, sizeof(float), is_f16 ? sizeof(uint16_t) : sizeof(float));
  plan.push_back({MemoryKind::kWeights, kPackedLabel, packing.bytes(program)});
  for (Allocation& each : plan_scratch(ScratchCounter(program, limits, packing).sizes(), n_threads))
    plan.push_back(std::move(each));
  return plan;
}

class CpuExecutor final : public HostExecutor<float> {
 public:
  CpuExecutor(const Program& program, const StepLimits& limits, std::shared_ptr<ThreadPool> pool, CpuPrecision precision)
      : HostExecutor<float>(program, limits, cache_is_f16(limits.cache_type, precision), true),
        owned_pool_(std::move(pool)),
        pool_(*owned_pool_),
        packing_(program_, precision),
        sizes_(ScratchCounter(program_, limits_, packing_).sizes()),
        packed_weights_(kPackedLabel, static_cast<size_t>(packing_.bytes(program_))) {
    pack_weights();
    release_all_mapped_pages();   // headers, names and vocabularies were read too, and rarely will be again
    for (const Allocation& each : plan_scratch(sizes_, pool_.n_threads()))
      scratch_.emplace_back(each.label, static_cast<size_t>(each.bytes));
    jobs_.reserve(static_cast<size_t>(std::max<int64_t>(sizes_.n_experts, 16)));
    tasks_.reserve(static_cast<size_t>(sizes_.n_attention_tasks));
  }

  std::vector<Allocation> allocations() const override {
    std::vector<Allocation> all = HostExecutor<float>::allocations();
    all.push_back({MemoryKind::kWeights, kPackedLabel, static_cast<int64_t>(packed_weights_.bytes())});
    for (Allocation& each : plan_scratch(sizes_, pool_.n_threads())) all.push_back(std::move(each));
    return all;
  }
  std::vector<std::string> damaged_guards() override {
    std::vector<std::string> labels = HostExecutor<float>::damaged_guards();
    for (const GuardedBuffer& buffer : scratch_)
      if (buffer.damaged()) labels.push_back(buffer.label());
    return labels;
  }

 protected:
  void execute(const Op& op) override {
    std::visit([this](const auto& each) { run_op(each); }, op);
  }

 private:
  enum Scratch {
    kPacked, kQuantized, kRounded, kPanels, kAttention, kPartials, kRouteLogits, kExpertHidden, kExpertOutputs, kExpertIndices, kTableRow
  };
  float* scratch(Scratch which) const { return scratch_[static_cast<size_t>(which)].as<float>(); }
  float* thread_scratch(Scratch which, int64_t n_floats, int thread) const {
    return scratch(which) + thread * whole_lines(n_floats);
  }

  RowNorm row_norm(const Norm& norm) const { return {norm.present, vector_values(norm.weight), norm.eps}; }

  static int64_t rows_worth_a_thread(int64_t values_per_row) {
    return std::max<int64_t>(kValuesWorthAThread / std::max<int64_t>(values_per_row, 1), 1);
  }

  // body(row) for each row; threads only where there is enough to do.
  template <class Body>
  void for_rows(int64_t n, int64_t values_per_row, const Body& body) {
    pool_.parallel_for(n, rows_worth_a_thread(values_per_row), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }

  void run_op(const Sample&) { BERYL_CHECK(false, "run by HostExecutor"); }
  void run_op(const Advance&) { BERYL_CHECK(false, "run by HostExecutor"); }
  void run_op(const CopyPages&) { BERYL_CHECK(false, "run by HostExecutor"); }

  // Rows of a table that products do not read in the file are copied: a prompt's rows would soon have mapped all of it, beside the packed
  // head that often has the same weights.
  void run_op(const Embed& op) {
    const HostMatrix& table = program_.matrix(op.table).parts.front();
    if (packing_.multiplies_in_file(static_cast<size_t>(op.table.index)))
      return for_rows(n_tokens_, op.out.cols,
                      [&](int64_t t) { dequantize_row_scaled(table, 0, id(t), op.scale, row(op.out, t)); });
    const auto code_bytes = static_cast<size_t>(row_bytes(table.format, table.cols));
    const auto scale_bytes = static_cast<size_t>(row_scale_bytes(table.format, table.cols));
    pool_.parallel_for(n_tokens_, rows_worth_a_thread(op.out.cols), [&](int64_t begin, int64_t end, int thread) {
      auto* const codes = reinterpret_cast<std::byte*>(thread_scratch(kTableRow, sizes_.table_row, thread));
      std::byte* const scales = table.scales == nullptr ? nullptr : codes + code_bytes;
      for (int64_t t = begin; t < end; ++t) {
        read_without_mapping({table.row_codes(0, id(t)), code_bytes}, codes);
        if (scales != nullptr) read_without_mapping({table.row_scales(0, id(t)), scale_bytes}, scales);
        dequantize_copy_scaled(table, codes, scales, op.scale, row(op.out, t));
      }
    });
  }

  void run_op(const GatherRows& op) {
    for (int64_t i = 0; i < n_outputs_; ++i) std::copy_n(row(op.x, output_row(i)), op.x.cols, row(op.out, i));
  }

  void run_op(const AddNorm& op) {
    const RowNorm norm = row_norm(op.norm);
    for_rows(n_rows(op.y), op.y.cols, [&](int64_t t) {
      add_norm_row(op.base.present() ? row(op.base, t) : nullptr, row(op.y, t), op.y.cols,
                   op.group > 0 ? op.group : op.y.cols, norm, op.scale, row(op.out, t));
    });
  }

  void run_op(const QkvFinish& op) {
    const int64_t d = op.head_dim;
    const int64_t k_begin = op.n_heads * d;
    const int64_t v_begin = op.v_from_k ? k_begin : k_begin + op.n_kv_heads * d;
    const RowNorm q_norm = row_norm(op.q_norm), k_norm = row_norm(op.k_norm), v_norm = row_norm(op.v_norm);
    for_rows(n_tokens_, op.qkv.cols, [&](int64_t t) {
      float* qkv = row(op.qkv, t);
      const float* rope = op.rope < 0 ? nullptr : rope_of(op.rope, t);
      for (int64_t head = 0; head < op.n_heads; ++head) finish_head(qkv + head * d, d, q_norm, rope, qkv + head * d);
      if (op.n_kv_heads == 0) return;
      for (int head = 0; head < op.n_kv_heads; ++head) {
        const auto append = [&](auto* key, auto* value) {
          finish_head(qkv + k_begin + head * d, d, k_norm, rope, key);
          finish_head(qkv + v_begin + head * d, d, v_norm, nullptr, value);
        };
        if (cache_is_f16_) {
          append(cache_at<uint16_t>(op.cache, CachePart::kKeys, sequence(t), head, position(t)),
                 cache_at<uint16_t>(op.cache, CachePart::kValues, sequence(t), head, position(t)));
        } else {
          append(cache_at(op.cache, CachePart::kKeys, sequence(t), head, position(t)),
                 cache_at(op.cache, CachePart::kValues, sequence(t), head, position(t)));
        }
      }
    });
  }

  // The file's pages behind packed tiles are needed no more: so at no time do both forms of a whole matrix take memory.
  static void release_tiles(const HostMatrix& part, int64_t begin, int64_t end, int64_t n_tiles) {
    const int64_t bytes = row_bytes(part.format, part.cols);
    for (int64_t tile = begin; tile < end;) {
      const int64_t expert = tile / n_tiles, last = std::min(end, (expert + 1) * n_tiles);
      int64_t row_begin = (tile - expert * n_tiles) * kTileRows, row_end = (last - expert * n_tiles) * kTileRows;
      if (const int64_t run = part.interleaved_rows; run > 0)   // whole runs: what is still wanted is mapped again
        row_begin = row_begin / run * run, row_end = (row_end + run - 1) / run * run;
      row_end = std::min(row_end, part.rows);
      release_mapped_pages({part.codes + expert * part.stack_stride_bytes + row_begin * bytes,
                            static_cast<size_t>((row_end - row_begin) * bytes)});
      tile = last;
    }
  }

  // Parts whose tiles take turns in one stream: a matrix, or a gate and its up.
  struct PackingJob {
    std::span<const HostMatrix> parts;
    PackedForm form;
    uint8_t* to;
    int64_t stride;       // bytes of a tile of each part
    int64_t n_tiles;      // of one expert
    int64_t first_item;   // an item is piece_tiles tiles, or what is left of them
    int64_t piece_tiles;
    std::span<PackedMatrix> packed;

    int64_t all_tiles() const { return parts[0].stack * n_tiles; }
    // Whether these tiles are FP8 and plain.
    bool pack(int64_t begin, int64_t end) const {
      bool is_plain = form == PackedForm::kFloats;
      for (int64_t tile = begin; tile < end; ++tile) {
        uint8_t* at = to + tile * stride;
        for (const HostMatrix& part : parts) {
          pack_tile(form, part, tile / n_tiles, tile % n_tiles, at);
          at += packed_tile_bytes(form, part.format, part.cols);
          is_plain = is_plain && part.format == Format::kFp8 && is_plain_fp8(part, tile / n_tiles, tile % n_tiles);
        }
      }
      for (const HostMatrix& part : parts) release_tiles(part, begin, end, n_tiles);
      return is_plain;
    }
  };

  // All matrices in one loop: those of a small model are not worth a thread each.
  void pack_weights() {
    constexpr int64_t kPieceBytes = 1 << 20;
    std::vector<PackingJob> jobs;
    uint8_t* to = packed_weights_.data();
    int64_t n_items = 0;
    for (size_t m = 0; m < program_.weights->matrices.size(); ++m) {
      const WeightMatrix& matrix = program_.weights->matrices[m];
      packed_.emplace_back(matrix.parts.size());
      const size_t n_together = packing_.pairs(m) ? 2 : 1;
      for (size_t first = 0; first < matrix.parts.size(); first += n_together) {
        const PackedForm form = packing_.form(m, first);
        if (form == PackedForm::kNone) continue;
        const std::span<const HostMatrix> parts = std::span(matrix.parts).subspan(first, n_together);
        const int64_t n_tiles = (parts[0].rows + kTileRows - 1) / kTileRows;
        int64_t stride = 0;
        for (size_t i = 0; i < n_together; ++i) {
          packed_[m][first + i] = {to + stride, 0, n_tiles, form, false};
          stride += packed_tile_bytes(form, parts[i].format, parts[i].cols);
        }
        for (size_t i = 0; i < n_together; ++i) packed_[m][first + i].tile_stride = stride;
        const int64_t piece_tiles = std::max<int64_t>(1, kPieceBytes / stride);
        jobs.push_back({parts, form, to, stride, n_tiles, n_items, piece_tiles, std::span(packed_[m]).subspan(first, n_together)});
        n_items += (jobs.back().all_tiles() + piece_tiles - 1) / piece_tiles;
        to += jobs.back().all_tiles() * stride;
      }
    }
    BERYL_CHECK(to == packed_weights_.data() + packed_weights_.bytes(), "all that was planned is packed");
    std::vector<uint8_t> is_plain(static_cast<size_t>(n_items));
    pool_.parallel_for(n_items, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t item = begin; item < end; ++item) {
        const PackingJob& job = item_owner(jobs, item);
        const int64_t first = (item - job.first_item) * job.piece_tiles;
        is_plain[static_cast<size_t>(item)] = job.pack(first, std::min(first + job.piece_tiles, job.all_tiles())) ? 1 : 0;
      }
    });
    for (size_t i = 0; i < jobs.size(); ++i) {
      const auto begin = is_plain.begin() + jobs[i].first_item,
                 end = i + 1 < jobs.size() ? is_plain.begin() + jobs[i + 1].first_item : is_plain.end();
      for (PackedMatrix& each : jobs[i].packed) each.is_plain_fp8 = std::all_of(begin, end, [](uint8_t plain) { return plain != 0; });
    }
  }

  // Of jobs in the order of their items, the one that an item belongs to.
  template <class AnyJob>
  static const AnyJob& item_owner(const std::vector<AnyJob>& jobs, int64_t item) {
    const auto next = std::upper_bound(jobs.begin(), jobs.end(), item, [](int64_t value, const AnyJob& each) { return value < each.first_item; });
    return *(next - 1);
  }

  // Null: not packed.
  const PackedMatrix* packed(MatrixRef ref, size_t part) const {
    const PackedMatrix& matrix = packed_[static_cast<size_t>(ref.index)][part];
    return matrix.data == nullptr ? nullptr : &matrix;
  }

  // ---- products --------------------------------------------------------------------------------------------------

  // A Product cut into blocks of rows and of token tiles, which are the items of a loop.
  struct Job {
    Product product;
    int64_t n_rows = 0;
    int64_t first_item = 0;
    int64_t block_rows = 0;
    int64_t n_row_blocks = 0;
    int64_t n_token_blocks = 0;
  };

  void add_job(const Product& product) { jobs_.push_back({product, product.weight->rows}); }

  PackedTokens pack(const float* x, int64_t x_stride, const int32_t* rows, const RowNorm& norm, int64_t n_tokens,
                    int64_t cols, float* to) {
    const PackedTokens packed{to, n_tokens, cols};
    const int64_t chunk = std::max<int64_t>(1, kValuesWorthAThread / (kTokenTile * cols));
    pool_.parallel_for(packed.n_tiles(), chunk, [&](int64_t begin, int64_t end, int) {
      pack_tokens(x, x_stride, rows, norm, packed, begin, end);
    });
    return packed;
  }

  void quantize(const float* x, int64_t x_stride, const int32_t* rows, const RowNorm& norm, const QuantizedTokens& to) {
    const int64_t chunk = std::max<int64_t>(1, kValuesWorthAThread / to.cols);
    pool_.parallel_for(to.n_tokens, chunk, [&](int64_t begin, int64_t end, int) {
      quantize_tokens(x, x_stride, rows, norm, to, begin, end);
    });
  }

  void round(const float* x, int64_t x_stride, const int32_t* rows, const RowNorm& norm, const Bf16Tokens& to) {
    const int64_t chunk = std::max<int64_t>(1, kValuesWorthAThread / to.cols);
    pool_.parallel_for(to.n_tokens, chunk, [&](int64_t begin, int64_t end, int) {
      round_tokens(x, x_stride, rows, norm, to, begin, end);
    });
  }

  // The tokens of a product of this matrix, in the forms that its parts read.
  void prepare_tokens(Product& product, MatrixRef ref, const float* x, int64_t x_stride, const RowNorm& norm, int64_t n_tokens,
                      int64_t cols) {
    bool any_integer = false, any_bf16 = false, any_f32 = false;
    const WeightMatrix& matrix = program_.matrix(ref);
    for (size_t part = 0; part < matrix.parts.size(); ++part) {
      const PackedForm form = packing_.form(static_cast<size_t>(ref.index), part);
      (form == PackedForm::kCodes ? any_integer : form == PackedForm::kBf16 ? any_bf16 : any_f32) = true;
    }
    if (any_bf16) {
      product.rounded = {scratch(kRounded), n_tokens, cols};
      round(x, x_stride, nullptr, norm, product.rounded);
    }
    if (any_integer) {
      product.quantized = QuantizedTokens::at(scratch(kQuantized), n_tokens, cols);
      quantize(x, x_stride, nullptr, norm, product.quantized);
    }
    if (any_f32) product.x = pack(x, x_stride, nullptr, norm, n_tokens, cols, scratch(kPacked));
  }

  // Runs and forgets all jobs.
  void run_jobs() {
    constexpr int64_t kItemsPerThread = 6;   // so that the last ones to finish do not leave the others idle for long
    constexpr int64_t kTilesWorthAPanel = 16;  // tokens that pay for decoding a panel once more
    int64_t total_rows = 0, n_items = 0;
    for (const Job& job : jobs_) total_rows += job.n_rows;
    const int64_t n_threads = pool_.n_threads();
    for (Job& job : jobs_) {
      const Product& p = job.product;
      const int64_t row_tile = p.row_tile();
      int64_t rows = total_rows / (n_threads * kItemsPerThread) / row_tile * row_tile;
      const bool few = p.has_few_tokens();
      const int64_t most_rows = few           ? kMaxItemRows
                                : p.is_f32()  ? max_panel_rows(p.x.cols, p.up != nullptr)
                                : p.is_bf16() ? max_bf16_rows(p.rounded.cols, p.up != nullptr)
                                              : max_expanded_rows(p.quantized.cols, p.up != nullptr);
      rows = std::clamp<int64_t>(rows, row_tile, most_rows);
      job.block_rows = rows;
      job.n_row_blocks = (job.n_rows + rows - 1) / rows;
      job.n_token_blocks = 1;
      const int64_t row_blocks_of_all = total_rows / rows + 1;
      if (!few && row_blocks_of_all < n_threads * kItemsPerThread)
        job.n_token_blocks = std::clamp<int64_t>(p.n_token_tiles() / kTilesWorthAPanel, 1,
                                                 n_threads * kItemsPerThread / row_blocks_of_all + 1);
      job.first_item = n_items;
      n_items += job.n_row_blocks * job.n_token_blocks;
    }
    pool_.parallel_for(n_items, 1, [&](int64_t begin, int64_t end, int thread) {
      float* panel = thread_scratch(kPanels, sizes_.panels, thread);
      for (int64_t item = begin; item < end; ++item) {
        const Job& job = item_owner(jobs_, item);
        const int64_t row_block = (item - job.first_item) / job.n_token_blocks;
        const int64_t token_block = (item - job.first_item) % job.n_token_blocks;
        const int64_t n_tiles = job.product.n_token_tiles();
        run_product(job.product, row_block * job.block_rows, std::min((row_block + 1) * job.block_rows, job.n_rows),
                    n_tiles * token_block / job.n_token_blocks, n_tiles * (token_block + 1) / job.n_token_blocks,
                    panel);
      }
    });
    jobs_.clear();
  }

  void run_op(const Linear& op) {
    const WeightMatrix& weight = program_.matrix(op.weight);
    Product product;
    prepare_tokens(product, op.weight, row(op.x, 0), row_stride(op.x), row_norm(op.norm), n_rows(op.x), op.x.cols);
    product.epilogue = op.epilogue;
    product.softcap = op.softcap;
    product.y = row(op.y, 0);
    product.y_stride = row_stride(op.y);
    if (op.epilogue == Epilogue::kGeluTimesOther) {
      product.other = row(op.other, 0);
      product.other_stride = row_stride(op.other);
    }
    if (is_gated(op.epilogue)) {
      product.weight = &weight.parts[0];
      product.up = &weight.parts[1];
      product.packed = packed(op.weight, 0);
      product.packed_up = packed(op.weight, 1);
      add_job(product);
    } else {
      for (size_t i = 0; i < weight.parts.size(); ++i) {
        const HostMatrix& part = weight.parts[i];
        product.weight = &part;
        product.packed = packed(op.weight, i);
        add_job(product);
        product.y += part.rows;
        if (product.other != nullptr) product.other += part.rows;
      }
    }
    run_jobs();
  }

  void run_op(const Route& op) {
    Product product;
    product.x = pack(row(op.x, 0), row_stride(op.x), nullptr, row_norm(op.norm), n_tokens_, op.x.cols,
                     scratch(kPacked));
    product.weight = &program_.matrix(op.weight).parts.front();
    product.y = scratch(kRouteLogits);
    product.y_stride = op.n_experts;
    add_job(product);
    run_jobs();
    const float* expert_scale = vector_values(op.expert_scale);
    for_rows(n_tokens_, op.n_experts * op.top_k, [&](int64_t t) {
      const float* z = scratch(kRouteLogits) + t * op.n_experts;
      float* routes = row(op.routes, t);
      // Selection by the logits, which order as the probabilities do; Σ over all experts cancels in p_e / Σ p.
      for (int i = 0; i < op.top_k; ++i) {
        int best = -1;
        for (int e = 0; e < op.n_experts; ++e) {
          const bool is_taken = std::find(routes, routes + i, static_cast<float>(e)) != routes + i;
          if (!is_taken && (best < 0 || z[e] > z[best])) best = e;
        }
        routes[i] = static_cast<float>(best);
      }
      double sum = 0;
      const double largest = z[static_cast<int>(routes[0])];
      for (int i = 0; i < op.top_k; ++i) sum += std::exp(z[static_cast<int>(routes[i])] - largest);
      for (int i = 0; i < op.top_k; ++i) {
        const int expert = static_cast<int>(routes[i]);
        const double share = std::exp(z[expert] - largest) / sum;
        routes[op.top_k + i] = static_cast<float>(share * (expert_scale == nullptr ? 1.0 : expert_scale[expert]));
      }
    });
  }

  // Routes sorted by expert: those of expert e are [first_of_expert[e], first_of_expert[e + 1]).
  struct Routing {
    int32_t* first_of_expert;   // [n_experts + 1]
    int32_t* token_of_route;    // [n_routes], sorted; ascending tokens within an expert
    int32_t* route_of_term;     // [n_tokens][top_k]: where in the sorted order the token's i-th route is
  };

  Routing sort_routes(const Experts& op, int64_t n_experts) const {
    Routing routing;
    routing.first_of_expert = scratch_[kExpertIndices].as<int32_t>();
    routing.token_of_route = routing.first_of_expert + n_experts + 1;
    routing.route_of_term = routing.token_of_route + n_tokens_ * op.top_k;
    std::fill_n(routing.first_of_expert, n_experts + 1, 0);
    for (int64_t t = 0; t < n_tokens_; ++t)
      for (int i = 0; i < op.top_k; ++i) ++routing.first_of_expert[static_cast<int>(row(op.routes, t)[i]) + 1];
    std::partial_sum(routing.first_of_expert, routing.first_of_expert + n_experts + 1, routing.first_of_expert);
    for (int64_t t = 0; t < n_tokens_; ++t)
      for (int i = 0; i < op.top_k; ++i) {
        const int32_t route = routing.first_of_expert[static_cast<int>(row(op.routes, t)[i])]++;
        routing.token_of_route[route] = static_cast<int32_t>(t);
        routing.route_of_term[t * op.top_k + i] = route;
      }
    for (int64_t e = n_experts; e > 0; --e) routing.first_of_expert[e] = routing.first_of_expert[e - 1];
    routing.first_of_expert[0] = 0;
    return routing;
  }

  void run_op(const Experts& op) {
    const WeightMatrix& gate_up = program_.matrix(op.gate_up);
    const HostMatrix& down = program_.matrix(op.down).parts.front();
    const Routing routing = sort_routes(op, down.stack);
    // Routes [begin, end): the rows of x that belong to one expert.
    const auto prepare_expert = [&](Product& product, MatrixRef ref, int64_t begin, int64_t end, const float* x, int64_t stride,
                                    const int32_t* rows, const RowNorm& norm, int64_t cols) {
      product.packed = packed(ref, 0);
      if (product.is_f32()) {
        product.x = pack(x, stride, rows, norm, end - begin, cols, scratch(kPacked) + begin * PackedTokens::padded(cols));
        return;
      }
      if (product.is_bf16()) {
        product.rounded = {scratch(kRounded) + Bf16Tokens::floats(begin, cols), end - begin, cols};
        round(x, stride, rows, norm, product.rounded);
        return;
      }
      QuantizedTokens all = QuantizedTokens::at(scratch(kQuantized), n_tokens_ * op.top_k, cols);
      product.quantized = {all.values + begin * cols, all.groups + begin * (cols / kGroupCols), end - begin, cols};
      quantize(x, stride, rows, norm, product.quantized);
    };
    const auto for_experts = [&](const auto& body) {
      for (int64_t e = 0; e < down.stack; ++e)
        if (routing.first_of_expert[e] < routing.first_of_expert[e + 1])
          body(e, routing.first_of_expert[e], routing.first_of_expert[e + 1]);
    };
    float* hidden = scratch(kExpertHidden);
    for_experts([&](int64_t expert, int64_t begin, int64_t end) {
      Product product;
      prepare_expert(product, op.gate_up, begin, end, row(op.x, 0), row_stride(op.x), routing.token_of_route + begin,
                     row_norm(op.norm), op.x.cols);
      product.expert = expert;
      product.weight = &gate_up.parts[0];
      product.up = &gate_up.parts[1];
      product.packed_up = packed(op.gate_up, 1);
      product.epilogue = Epilogue::kGatedGelu;
      product.y = hidden + begin * op.expert_dim;
      product.y_stride = op.expert_dim;
      add_job(product);
    });
    run_jobs();
    float* outputs = scratch(kExpertOutputs);
    for_experts([&](int64_t expert, int64_t begin, int64_t end) {
      Product product;
      prepare_expert(product, op.down, begin, end, hidden + begin * op.expert_dim, op.expert_dim, nullptr, RowNorm{},
                     op.expert_dim);
      product.expert = expert;
      product.weight = &down;
      product.y = outputs + begin * op.y.cols;
      product.y_stride = op.y.cols;
      add_job(product);
    });
    run_jobs();
    for_rows(n_tokens_, op.y.cols * op.top_k, [&](int64_t t) {
      weighted_sum_row(outputs, op.y.cols, routing.route_of_term + t * op.top_k, row(op.routes, t) + op.top_k, op.top_k,
                       op.y.cols, row(op.y, t));
    });
  }

  // ---- attention -------------------------------------------------------------------------------------------------

  void make_attention_tasks(const Attention& op) {
    const CacheDecl& cache = program_.caches[static_cast<size_t>(op.cache)];
    const int group = op.n_heads / cache.n_kv_heads;
    const int64_t max_tokens = std::max(1, kAttentionRows / group);
    const int window = program_.groups[static_cast<size_t>(cache.group)].window;
    const auto fits = [&](int64_t token, int64_t first) {
      return token < n_tokens_ && token - first < max_tokens && sequence(token) == sequence(first) &&
             position(token) - position(first) == token - first &&
             split_keys(position(token), window) == split_keys(position(first), window);
    };
    tasks_.clear();
    for (int64_t begin = 0; begin < n_tokens_;) {
      int64_t end = begin + 1;
      while (fits(end, begin)) ++end;
      AttentionTask task;
      task.n_tokens = static_cast<int>(end - begin);
      task.q_stride = row_stride(op.q);
      task.out_stride = row_stride(op.out);
      task.group = group;
      task.head_dim = cache.head_dim;
      task.cache_is_f16 = cache_is_f16_;
      task.page_stride_bytes = page_stride_bytes(op.cache);
      task.table = page_table(cache.group, sequence(begin));
      task.n_entries = limits_.n_entries[static_cast<size_t>(cache.group)];
      task.position = position(begin);
      task.window = window;
      task.split_keys = split_keys(task.position, window);
      task.scale = op.scale;
      task.softcap = op.softcap;
      for (int kv_head = 0; kv_head < cache.n_kv_heads; ++kv_head) {
        const int64_t q_offset = int64_t{kv_head} * group * cache.head_dim;
        task.q = row(op.q, begin) + q_offset;
        task.out = row(op.out, begin) + q_offset;
        const auto pool = [&](CachePart part) -> const void* {
          if (cache_is_f16_) return cache_row<uint16_t>(op.cache, part, 0, kv_head, 0);
          return cache_row<float>(op.cache, part, 0, kv_head, 0);
        };
        task.keys = pool(CachePart::kKeys);
        task.values = pool(CachePart::kValues);
        tasks_.push_back(task);
      }
      begin = end;
    }
  }

  void run_op(const Attention& op) {
    make_attention_tasks(op);
    const auto n_tasks = static_cast<int64_t>(tasks_.size());
    int64_t n_splits = 0;
    for (const AttentionTask& task : tasks_) n_splits += last_split(task) - first_split(task) + 1;
    if (n_tokens_ <= kMaxSplitTokens && n_tasks < 4 * pool_.n_threads() && n_splits > n_tasks)
      return attend_by_splits(n_splits);
    pool_.parallel_for(n_tasks, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; ++i)
        run_attention(tasks_[static_cast<size_t>(i)], thread_scratch(kAttention, sizes_.attention, thread));
    });
  }

  void attend_by_splits(int64_t n_splits) {
    // Item i is split i of the tasks' splits put end to end; its partial sums lie in that order too.
    const auto locate = [&](int64_t item, const auto& body) {
      float* partials = scratch(kPartials);
      for (const AttentionTask& task : tasks_) {
        const int64_t n = last_split(task) - first_split(task) + 1;
        const int64_t split_floats = int64_t{task.n_tokens} * task.group * partial_floats(task.head_dim);
        if (item < n) return body(task, first_split(task) + item, partials + item * split_floats);
        item -= n;
        partials += n * split_floats;
      }
    };
    pool_.parallel_for(n_splits, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; ++i)
        locate(i, [&](const AttentionTask& task, int64_t split, float* partial) {
          run_attention_split(task, split, partial, thread_scratch(kAttention, sizes_.attention, thread));
        });
    });
    float* partials = scratch(kPartials);
    for (const AttentionTask& task : tasks_) {
      merge_attention_splits(task, partials);
      partials += (last_split(task) - first_split(task) + 1) * int64_t{task.n_tokens} * task.group *
                  partial_floats(task.head_dim);
    }
  }

  const std::shared_ptr<ThreadPool> owned_pool_;   // shared with the backend, which may end first
  ThreadPool& pool_;
  const PackingPlan packing_;
  const ScratchSizes sizes_;
  const HugeBuffer packed_weights_;
  std::vector<std::vector<PackedMatrix>> packed_;   // [matrices][parts]
  std::vector<GuardedBuffer> scratch_;   // in the order of enum Scratch
  std::vector<Job> jobs_;                // of the op that runs; capacity set at the start
  std::vector<AttentionTask> tasks_;
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(int n_threads, CpuPrecision precision)
      : pool_(std::make_shared<ThreadPool>(n_threads)), precision_(precision) {}
  std::string_view name() const override {
    switch (precision_) {
      case CpuPrecision::kExact: return "cpu-exact";
      case CpuPrecision::kBf16: return "cpu-bf16";
      case CpuPrecision::kFast: break;
    }
    return "cpu";
  }
  std::vector<Allocation> plan(const Program& program, const StepLimits& limits) const override {
    return plan_all(program, limits, pool_->n_threads(), precision_);
  }
  std::unique_ptr<Executor> prepare(const Program& program, const StepLimits& limits) override {
    check_shapes(program);
    require_memory_to_pack(PackingPlan(program, precision_).bytes(program));
    return std::make_unique<CpuExecutor>(program, limits, pool_, precision_);
  }
  double read_ceiling() override {
    constexpr int64_t kBytes = 512 << 20;
    constexpr int kPasses = 5;
    std::vector<double> speeds = measure_read_speed(pool_->n_threads(), kBytes, kPasses);
    std::nth_element(speeds.begin(), speeds.begin() + kPasses / 2, speeds.end());
    return speeds[kPasses / 2];
  }

 private:
  std::shared_ptr<ThreadPool> pool_;
  CpuPrecision precision_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int n_threads, CpuPrecision precision) {
  choose_cpu_target_from_environment();
  return std::make_unique<CpuBackend>(n_threads, precision);
}

}  // namespace beryl
