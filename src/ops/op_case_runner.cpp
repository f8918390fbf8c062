// Runs an op case: placing its sequences in a batch and its positions on pages, poisoning, comparing.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include <fmt/format.h>

#include "base/error.h"
#include "ops/op_case_bounds.h"
#include "ops/op_cases.h"
#include "ops/random_matrix.h"

namespace beryl {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Multiples of 1/64 in [-2, 2): exact in bf16, so that caches of both backends start equal.
void fill_cache_values(uint64_t key, int cache, CachePart part, int64_t position, int64_t n, float* out) {
  RandomStream random(key * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(position) * 1009 +
                      static_cast<uint64_t>(cache) * 2 + (part == CachePart::kValues ? 1 : 0));
  for (int64_t i = 0; i < n; i += 8) {
    const uint64_t bits = random.bits();
    for (int64_t j = i; j < std::min(i + 8, n); ++j)
      out[j] = static_cast<float>(static_cast<int8_t>(bits >> (8 * (j - i)))) / 64;
  }
}

bool appends_to(const Program& program, int cache) {
  return std::any_of(program.ops.begin(), program.ops.end(), [cache](const Op& op) {
    const auto* finish = std::get_if<QkvFinish>(&op);
    return finish != nullptr && finish->n_kv_heads > 0 && finish->cache == cache;
  });
}

bool same_bits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

bool same_sample(const Sampled& a, const Sampled& b) {
  return a.id == b.id && a.valid == b.valid && same_bits(a.logprob, b.logprob) && a.top == b.top;
}

// ---- where things lie -------------------------------------------------------------------------------------------

enum class Variant {
  kPlain,       // the sequences in order
  kElsewhere,   // reversed and among neighbours, other pages and rows of the tables, a larger allocation
  kAlone,       // one row a step
};

struct Placement {
  StepLimits limits;
  std::vector<const CaseSequence*> order;         // of the batch
  std::vector<int64_t> first_token, first_output;   // [order]
  StepInput input;                                // all of order in one step
};

class Placer {
 public:
  Placer(const CaseData& data, CacheType cache_type, Variant variant, size_t n_neighbours) : data_(data) {
    const bool elsewhere = variant == Variant::kElsewhere;
    for (const CaseSequence& sequence : data.sequences) placement_.order.push_back(&sequence);
    if (elsewhere) {
      std::reverse(placement_.order.begin(), placement_.order.end());
      for (size_t i = 0; i < n_neighbours; ++i)
        placement_.order.insert(i % 2 == 0 ? placement_.order.begin() : placement_.order.end(), &data.neighbours[i]);
    }
    const auto n_sequences = static_cast<int>(placement_.order.size());
    StepLimits& limits = placement_.limits;
    limits.cache_type = cache_type;
    limits.max_sequences = n_sequences + (elsewhere ? 3 : 1);
    place_rows(elsewhere ? limits.max_sequences - 1 : -1);
    const bool alone = variant == Variant::kAlone;
    limits.max_tokens = alone ? 1 : static_cast<int>(placement_.input.n_tokens()) + (elsewhere ? 7 : 2);
    limits.max_outputs = alone ? 1 : static_cast<int>(placement_.input.n_outputs()) + (elsewhere ? 5 : 1);
    for (size_t group = 0; group < data.program.groups.size(); ++group) place_pages(group, elsewhere);
  }

  Placement take() { return std::move(placement_); }

 private:
  int64_t end_position(const CaseSequence& sequence) const {
    return sequence.context + sequence.n_tokens + data_.n_steps - 1;
  }

  // last_table_row >= 0: rows of the page tables are given out from there downwards.
  void place_rows(int last_table_row) {
    StepInput& input = placement_.input;
    for (size_t i = 0; i < placement_.order.size(); ++i) {
      const CaseSequence& sequence = *placement_.order[i];
      placement_.first_token.push_back(input.n_tokens());
      placement_.first_output.push_back(input.n_outputs());
      const auto row = static_cast<int32_t>(i);
      for (int output : sequence.outputs)
        input.output_rows.push_back(static_cast<int32_t>(input.n_tokens()) + output);
      for (int t = 0; t < sequence.n_tokens; ++t) {
        input.ids.push_back(sequence.ids[static_cast<size_t>(t)]);
        input.positions.push_back(static_cast<int32_t>(sequence.context + t));
        input.sequences.push_back(last_table_row < 0 ? row : last_table_row - row);
      }
      input.sampling.insert(input.sampling.end(), sequence.sampling.begin(), sequence.sampling.end());
    }
  }

  void place_pages(size_t group, bool elsewhere) {
    const int window = data_.program.groups[group].window;
    const auto& order = placement_.order;
    int64_t n_entries = 1;
    for (const CaseSequence* sequence : order) {
      const int64_t n_new = sequence->n_tokens + data_.n_steps - 1;
      const int64_t slots = window == 0 ? end_position(*sequence) : window + n_new - 1;
      n_entries = std::max(n_entries, (slots + kPageTokens - 1) / kPageTokens);
    }
    n_entries += data_.slack_entries + (elsewhere ? 1 : 0);

    std::vector<int32_t> table(static_cast<size_t>(placement_.limits.max_sequences * n_entries), -1);
    const auto entries_of = [&](size_t i) {
      const int32_t row = placement_.input.sequences[static_cast<size_t>(placement_.first_token[i])];
      return table.data() + row * n_entries;
    };
    int n_pages = 0;
    const auto give_pages = [&](size_t i) {
      const CaseSequence& sequence = *order[i];
      const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, sequence.context - window + 1);
      for (int64_t page = first / kPageTokens; page <= (end_position(sequence) - 1) / kPageTokens; ++page) {
        int32_t& entry = entries_of(i)[page % n_entries];
        if (entry < 0) entry = n_pages++;
      }
    };
    for (size_t i = 0; i < order.size(); ++i)
      if (order[i]->fork_of < 0) give_pages(i);
    std::vector<PageCopy> copies;
    for (size_t i = 0; i < order.size(); ++i) {
      if (order[i]->fork_of < 0) continue;
      const CaseSequence* parent = &data_.sequences[static_cast<size_t>(order[i]->fork_of)];
      const auto parent_index = static_cast<size_t>(std::find(order.begin(), order.end(), parent) - order.begin());
      std::copy_n(entries_of(parent_index), n_entries, entries_of(i));
      int32_t& entry = entries_of(i)[order[i]->context / kPageTokens % n_entries];
      copies.push_back({static_cast<int32_t>(group), entry, n_pages});
      entry = n_pages++;
    }

    // Pages in random order, some of the pool unused.
    n_pages += elsewhere ? 5 : 2;
    std::vector<int32_t> number(static_cast<size_t>(n_pages));
    std::iota(number.begin(), number.end(), 0);
    RandomStream random(elsewhere ? 77 : 7);
    for (size_t i = number.size(); i > 1; --i)
      std::swap(number[i - 1], number[static_cast<size_t>(random.below(static_cast<int>(i)))]);
    for (int32_t& page : table)
      if (page >= 0) page = number[static_cast<size_t>(page)];
    for (const PageCopy& copy : copies)
      placement_.input.page_copies.push_back({copy.group, number[static_cast<size_t>(copy.from)],
                                              number[static_cast<size_t>(copy.to)]});
    placement_.limits.n_pages.push_back(n_pages);
    placement_.limits.n_entries.push_back(static_cast<int>(n_entries));
    placement_.input.tables.push_back(std::move(table));
  }

  const CaseData& data_;
  Placement placement_;
};

// ---- what a run leaves behind -----------------------------------------------------------------------------------

struct Record {
  std::vector<std::vector<float>> rows;     // [slots], the rows of data.sequences in their order
  std::vector<float> cache;                 // rows appended, by sequence, position, cache, part
  std::vector<Sampled> samples;             // by sequence, output, step
};

std::optional<std::string> difference(const CaseData& data, const Record& a, const Record& b) {
  for (size_t slot = 0; slot < a.rows.size(); ++slot)
    for (size_t i = 0; i < a.rows[slot].size() && !only_passes(data.program, static_cast<int>(slot)); ++i)
      if (!same_bits(a.rows[slot][i], b.rows[slot][i])) {
        const auto cols = static_cast<size_t>(data.program.rows[slot].cols);
        return fmt::format("{} row {} column {}: {} and {}", data.program.rows[slot].name, i / cols, i % cols,
                           a.rows[slot][i], b.rows[slot][i]);
      }
  for (size_t i = 0; i < a.cache.size(); ++i)
    if (!same_bits(a.cache[i], b.cache[i]))
      return fmt::format("appended cache value {}: {} and {}", i, a.cache[i], b.cache[i]);
  for (size_t i = 0; i < a.samples.size(); ++i)
    if (!same_sample(a.samples[i], b.samples[i]))
      return fmt::format("sample {}: id {} and {}", i, a.samples[i].id, b.samples[i].id);
  return std::nullopt;
}

class Failures {
 public:
  void add(const std::string& what) {
    if (++count_ <= 3) text_ += (text_.empty() ? "" : "; ") + what;
  }
  bool any() const { return count_ > 0; }
  std::string text() const { return count_ <= 3 ? text_ : fmt::format("{}; and {} more", text_, count_ - 3); }

 private:
  int count_ = 0;
  std::string text_;
};

// ---- one executor with the case in it ---------------------------------------------------------------------------

class Stage {
 public:
  Stage(const CaseData& data, Backend& backend, const Placement& placement, bool with_new_positions)
      : data_(data), placement_(placement), image_(data.program, placement.limits),
        executor_(backend.prepare(data.program, placement.limits)) {
    for (size_t i = 0; i < placement.order.size(); ++i) {
      const CaseSequence& sequence = *placement.order[i];
      if (sequence.fork_of >= 0) continue;
      for (int cache = 0; cache < n_caches(); ++cache) {
        const int window = group_of(cache).window;
        const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, sequence.context - window + 1);
        const bool filled = with_new_positions && !appends_to(data.program, cache);
        const int64_t end = sequence.context + (filled ? sequence.n_tokens : 0);
        for (int64_t position = first; position < end; ++position) fill_position(i, cache, position);
      }
    }
    for (const CaseSequence* sequence : placement.order)
      if (!sequence->prompt.empty() || !sequence->reply.empty())
        executor_->set_history(table_row(sequence), sequence->prompt, sequence->reply);
  }

  Executor& executor() { return *executor_; }
  CacheImage& image() { return image_; }

  // The whole image, NaN and all, into the executor.
  void write_image() {
    for_each_cache_row([this](int cache, CachePart part, int page, int row) {
      executor_->write_cache(cache, part, page, row, image_.row(cache, part, page, row));
    });
  }

  template <class Body>
  void for_each_cache_row(const Body& body) const {
    for (int cache = 0; cache < n_caches(); ++cache)
      for (CachePart part : {CachePart::kKeys, CachePart::kValues})
        for (int page = 0; page < image_.n_pages(cache); ++page)
          for (int row = 0; row < kPageTokens; ++row) body(cache, part, page, row);
  }

  // Keys and values of a position, into the image only. Where keys can be made from values they are what would be made.
  void fill_position(size_t order_index, int cache, int64_t position) {
    const CaseSequence& sequence = *placement_.order[order_index];
    const int page = page_of(data_.program, placement_.limits, placement_.input, cache, table_row(&sequence), position);
    for (CachePart part : {CachePart::kKeys, CachePart::kValues})
      fill_cache_values(sequence.key, cache, part, position, image_.row_values(cache),
                        image_.row(cache, part, page, static_cast<int>(position % kPageTokens)));
    const std::optional<KeysFromValues> from_values = keys_from_values(data_.program, cache);
    if (!from_values) return;
    const auto row = static_cast<int>(position % kPageTokens);
    float* keys = image_.row(cache, CachePart::kKeys, page, row);
    const float* values = image_.row(cache, CachePart::kValues, page, row);
    const std::vector<float>& weight = data_.program.vector(from_values->weight).values;
    for (int64_t i = 0; i < image_.row_values(cache); ++i) {
      const auto column = static_cast<size_t>(i) % weight.size();
      if (!from_values->is_turned[column]) keys[i] = values[i] * weight[column];
    }
  }

  // All rows of every slot: the step's from the sequences, everything else NaN.
  void write_step_rows() {
    for (size_t slot = 0; slot < data_.program.rows.size(); ++slot) {
      const auto cols = static_cast<size_t>(data_.program.rows[slot].cols);
      std::vector<float> values(static_cast<size_t>(max_rows(slot)) * cols, kNan);
      for (size_t i = 0; i < placement_.order.size(); ++i) {
        const std::vector<float>& from = placement_.order[i]->rows[slot];
        const int64_t first = is_tokens(slot) ? placement_.first_token[i] : placement_.first_output[i];
        std::copy(from.begin(), from.end(), values.begin() + first * static_cast<int64_t>(cols));
      }
      executor_->write_rows(static_cast<int>(slot), 0, max_rows(slot), values.data());
    }
  }

  std::vector<std::vector<float>> live_rows(const StepInput& input) {
    std::vector<std::vector<float>> rows;
    for (size_t slot = 0; slot < data_.program.rows.size(); ++slot) {
      const int64_t n = is_tokens(slot) ? input.n_tokens() : input.n_outputs();
      rows.emplace_back(static_cast<size_t>(n * data_.program.rows[slot].cols));
      executor_->read_rows(static_cast<int>(slot), 0, n, rows.back().data());
    }
    return rows;
  }

  // samples_of_step: [steps][outputs of the batch].
  Record record(const std::vector<std::vector<Sampled>>& samples_of_step) {
    Record record;
    const std::vector<std::vector<float>> rows = live_rows(placement_.input);
    record.rows.resize(rows.size());
    for (const CaseSequence& sequence : data_.sequences) {
      const size_t i = order_index(&sequence);
      for (size_t slot = 0; slot < rows.size(); ++slot) {
        const int64_t cols = data_.program.rows[slot].cols;
        const int64_t first = is_tokens(slot) ? placement_.first_token[i] : placement_.first_output[i];
        const int64_t n = is_tokens(slot) ? sequence.n_tokens : static_cast<int64_t>(sequence.outputs.size());
        record.rows[slot].insert(record.rows[slot].end(), rows[slot].begin() + first * cols,
                                 rows[slot].begin() + (first + n) * cols);
      }
      for (size_t output = 0; output < sequence.outputs.size(); ++output)
        for (const std::vector<Sampled>& samples : samples_of_step)
          if (!samples.empty())
            record.samples.push_back(samples[static_cast<size_t>(placement_.first_output[i]) + output]);
      record_cache(sequence, record);
    }
    return record;
  }

  void record_cache(const CaseSequence& sequence, Record& record) {
    for (int64_t position = sequence.context; position < sequence.context + sequence.n_tokens + data_.n_steps - 1;
         ++position)
      for (int cache = 0; cache < n_caches(); ++cache) {
        if (!appends_to(data_.program, cache)) continue;
        const int page =
            page_of(data_.program, placement_.limits, placement_.input, cache, table_row(&sequence), position);
        std::vector<float> row(static_cast<size_t>(image_.row_values(cache)));
        for (CachePart part : {CachePart::kKeys, CachePart::kValues}) {
          executor_->read_cache(cache, part, page, static_cast<int>(position % kPageTokens), row.data());
          record.cache.insert(record.cache.end(), row.begin(), row.end());
        }
      }
  }

  size_t order_index(const CaseSequence* sequence) const {
    return static_cast<size_t>(std::find(placement_.order.begin(), placement_.order.end(), sequence) -
                               placement_.order.begin());
  }
  int table_row(const CaseSequence* sequence) const {
    return placement_.input.sequences[static_cast<size_t>(placement_.first_token[order_index(sequence)])];
  }
  bool is_tokens(size_t slot) const { return data_.program.rows[slot].count == RowCount::kTokens; }
  int64_t max_rows(size_t slot) const {
    return is_tokens(slot) ? placement_.limits.max_tokens : placement_.limits.max_outputs;
  }
  int n_caches() const { return static_cast<int>(data_.program.caches.size()); }

 private:
  const PageGroup& group_of(int cache) const {
    return data_.program.groups[static_cast<size_t>(data_.program.caches[static_cast<size_t>(cache)].group)];
  }

  const CaseData& data_;
  const Placement& placement_;
  CacheImage image_;
  std::unique_ptr<Executor> executor_;
};

// ---- the checks -------------------------------------------------------------------------------------------------

class CaseRunner {
 public:
  CaseRunner(const CaseData& data, Backend& backend, const CaseOptions& options)
      : data_(data), backend_(backend), options_(options) {}

  // Op by op beside the reference.
  Record compare(Backend& reference) {
    const Placement placement = place(Variant::kPlain, 0);
    Stage stage(data_, backend_, placement, true), oracle(data_, reference, placement, true);
    check_plan(backend_, stage.executor(), placement.limits);
    check_plan(reference, oracle.executor(), placement.limits);
    load(stage);
    oracle.image() = stage.image();   // a cache of a narrow type starts both from what it can hold
    oracle.write_image();
    oracle.write_step_rows();

    StepInput input = placement.input;
    stage.executor().set_input(input);
    oracle.executor().set_input(input);
    std::vector<std::vector<Sampled>> samples_of_step;
    for (int step = 0; step < data_.n_steps; ++step) {
      std::vector<Sampled> samples;
      for (size_t i = 0; i < data_.program.ops.size(); ++i) {
        where_ = op_name(data_.program.ops[i]);
        if (data_.n_steps > 1) where_ += fmt::format(" in step {}", step);
        compare_op(i, placement, input, stage, oracle, samples);
      }
      samples_of_step.push_back(samples);
    }
    where_ = "compared";
    check_guards(stage.executor());
    check_guards(oracle.executor());
    return stage.record(samples_of_step);
  }

  Record run_at_once(Variant variant, size_t n_neighbours) {
    const Placement placement = place(variant, n_neighbours);
    Stage stage(data_, backend_, placement, true);
    load(stage);
    stage.executor().set_input(placement.input);
    std::vector<std::vector<Sampled>> samples_of_step;
    for (int step = 0; step < data_.n_steps; ++step) {
      stage.executor().run();
      stage.executor().synchronize();
      samples_of_step.push_back(stage.executor().samples());
    }
    check_guards(stage.executor());
    return stage.record(samples_of_step);
  }

  // Row after row; the keys and values of a later row do not exist yet when an earlier one runs.
  Record run_rows_alone() {
    const Placement placement = place(Variant::kAlone, 0);
    Stage stage(data_, backend_, placement, false);
    stage.write_image();
    Executor& executor = stage.executor();
    Record record;
    record.rows.resize(data_.program.rows.size());
    for (size_t i = 0; i < placement.order.size(); ++i) {
      const CaseSequence& sequence = *placement.order[i];
      for (int token = 0; token < sequence.n_tokens; ++token) run_row(placement, i, token, stage, record);
      stage.record_cache(sequence, record);
    }
    check_guards(executor);
    return record;
  }

  void require_same(const Record& expected, const Record& got, const char* how) {
    if (const auto where = difference(data_, expected, got))
      failures_.add(fmt::format("{} gives other bits: {}", how, *where));
  }

  const Failures& failures() const { return failures_; }
  double worst() const { return worst_; }
  int64_t n_values() const { return n_values_; }

 private:
  Placement place(Variant variant, size_t n_neighbours) const {
    return Placer(data_, options_.cache_type, variant, n_neighbours).take();
  }

  void fail(const std::string& what) { failures_.add(where_ + ": " + what); }

  void check_plan(const Backend& backend, const Executor& executor, const StepLimits& limits) {
    const std::vector<Allocation> plan = backend.plan(data_.program, limits), real = executor.allocations();
    const bool same = std::equal(plan.begin(), plan.end(), real.begin(), real.end(), [](const auto& a, const auto& b) {
      return a.kind == b.kind && a.label == b.label && a.bytes == b.bytes;
    });
    if (!same) failures_.add(fmt::format("{} allocated something else than it planned", backend.name()));
  }

  void check_guards(Executor& executor) {
    for (const std::string& label : executor.damaged_guards()) failures_.add("written past the end of " + label);
  }

  // Poison and contents into the executor, then what it holds back into the image: a narrow cache rounds.
  void load(Stage& stage) {
    stage.write_image();
    stage.write_step_rows();
    stage.for_each_cache_row([&](int cache, CachePart part, int page, int row) {
      float* values = stage.image().row(cache, part, page, row);
      if (std::isnan(values[0])) return;
      const std::vector<float> written(values, values + stage.image().row_values(cache));
      stage.executor().read_cache(cache, part, page, row, values);
      for (size_t i = 0; i < written.size(); ++i) {
        const double u = options_.tolerance.cache_roundoff;
        const double bound = u <= 0x1p-8 ? 0 : u * (std::abs(double{written[i]}) + 2.0 / 4096);
        if (!(std::abs(double{values[i]} - double{written[i]}) <= bound))
          failures_.add(fmt::format("write_cache of {} reads back as {}", written[i], values[i]));
      }
    });
  }

  void compare_op(size_t index, const Placement& placement, StepInput& input, Stage& stage, Stage& oracle,
                  std::vector<Sampled>& samples) {
    const Op& op = data_.program.ops[index];
    const std::vector<std::vector<float>> before = stage.live_rows(input);
    for (size_t slot = 0; slot < before.size(); ++slot)
      if (!before[slot].empty())
        oracle.executor().write_rows(static_cast<int>(slot), 0,
                                     stage.is_tokens(slot) ? input.n_tokens() : input.n_outputs(), before[slot].data());
    const Expected expected = expect(data_, op, placement.limits, input, before, stage.image(), options_.tolerance);
    for (Stage* each : {&stage, &oracle}) {
      each->executor().run({index, index + 1});
      each->executor().synchronize();
    }
    const std::vector<std::vector<float>> after = stage.live_rows(input), exact = oracle.live_rows(input);
    for (const ExpectedRows& rows : expected.rows) compare_rows(rows, after, exact);
    for (const ExpectedRoutes& routes : expected.routes) {
      compare_routes(routes, after);
      compare_routes(routes, exact);
    }
    check_untouched(op, expected, before, after);
    if (std::holds_alternative<QkvFinish>(op) || std::holds_alternative<CopyPages>(op))
      compare_caches(op, expected, input, stage, oracle);
    if (std::holds_alternative<Sample>(op)) {
      samples = stage.executor().samples();
      compare_samples(samples, oracle.executor().samples());
    }
    if (std::holds_alternative<Advance>(op)) advance(input, samples);
  }

  // A bound of zero: nothing but the value itself will do.
  // place(): where, as text; called for failures only.
  template <class Place>
  void compare_value(double value, double bound, float got, float exact, const Place& place) {
    ++n_values_;
    if (data_.holds_nan && std::isnan(value)) {
      if (!std::isnan(got) || !std::isnan(exact)) fail(fmt::format("{}: got {}, NaN is due", place(), got));
      return;
    }
    const double error = std::abs(double{got} - value);
    if (!(error <= bound)) {   // NaN too
      worst_ =
          std::max(worst_, bound > 0 && !std::isnan(error) ? error / bound : std::numeric_limits<double>::infinity());
      fail(fmt::format("{}: got {:.9g}, exact {:.9g}, error {:.3g}, bound {:.3g}", place(), got, value, error, bound));
    } else if (error > 0) {
      worst_ = std::max(worst_, error / bound);
    }
    // The two ways to the exact value may differ by the roundings of double only (and of reading it as f32).
    if (!(std::abs(double{exact} - value) <= 0x1.01p-24 * std::abs(value) + 1e-5 * bound))
      fail(fmt::format("{}: the reference has {:.9g}, {:.9g} expected: the oracle is wrong", place(), exact, value));
  }

  void compare_rows(const ExpectedRows& expected, const std::vector<std::vector<float>>& after,
                    const std::vector<std::vector<float>>& exact) {
    const auto slot = static_cast<size_t>(expected.rows.slot);
    const RowsDecl& decl = data_.program.rows[slot];
    for (size_t i = 0; i < expected.values.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / expected.rows.cols,
                    col = static_cast<int64_t>(i) % expected.rows.cols;
      const auto at = static_cast<size_t>(row * decl.cols + expected.rows.col + col);
      compare_value(expected.values[i], expected.bounds[i], after[slot][at], exact[slot][at],
                    [&] { return fmt::format("{} row {} column {}", decl.name, row, expected.rows.col + col); });
    }
  }

  void compare_routes(const ExpectedRoutes& expected, const std::vector<std::vector<float>>& after) {
    const auto slot = static_cast<size_t>(expected.rows.slot);
    const int64_t stride = data_.program.rows[slot].cols;
    const int n_experts = expected.n_experts, top_k = expected.top_k;
    for (int64_t t = 0; t < static_cast<int64_t>(expected.logits.size()) / n_experts; ++t) {
      const float* routes = after[slot].data() + t * stride + expected.rows.col;
      const double* z = expected.logits.data() + t * n_experts;
      const double* e = expected.errors.data() + t * n_experts;
      std::vector<bool> taken(static_cast<size_t>(n_experts));
      double largest = -std::numeric_limits<double>::infinity(), total = 0, mean_error = 0;
      for (int i = 0; i < top_k; ++i) {
        const int chosen = static_cast<int>(routes[i]);
        if (!(routes[i] >= 0 && routes[i] < static_cast<float>(n_experts)) || static_cast<float>(chosen) != routes[i] ||
            taken[static_cast<size_t>(chosen)])
          return fail(fmt::format("token {} route {}: expert {}", t, i, routes[i]));
        taken[static_cast<size_t>(chosen)] = true;
        for (int other = 0; other < n_experts; ++other) {
          if (taken[static_cast<size_t>(other)]) continue;
          const bool better = z[other] - z[chosen] > e[other] + e[chosen];
          const bool equal_and_lower = z[other] == z[chosen] && other < chosen;
          if (better || equal_and_lower)
            return fail(fmt::format("token {} route {}: expert {} before {}, logits {:.9g} and {:.9g}", t, i, chosen,
                                    other, z[chosen], z[other]));
        }
        largest = std::max(largest, z[chosen]);
      }
      for (int i = 0; i < top_k; ++i) {
        const int chosen = static_cast<int>(routes[i]);
        const double p = std::exp(z[chosen] - largest);
        total += p;
        mean_error += p * e[chosen];
      }
      mean_error /= total;
      for (int i = 0; i < top_k; ++i) {
        const int chosen = static_cast<int>(routes[i]);
        const double g = std::exp(z[chosen] - largest) / total * expected.scales[static_cast<size_t>(chosen)];
        const double bound = std::abs(g) * (std::expm1(e[chosen] + mean_error) + expected.relative_bound);
        compare_value(g, bound, routes[top_k + i], static_cast<float>(g),
                      [&] { return fmt::format("token {} weight {}", t, i); });
      }
    }
  }

  void check_untouched(const Op& op, const Expected& expected, const std::vector<std::vector<float>>& before,
                       const std::vector<std::vector<float>>& after) {
    std::vector<Rows> written;
    for (const ExpectedRows& rows : expected.rows) written.push_back(rows.rows);
    for (const ExpectedRoutes& routes : expected.routes) written.push_back(routes.rows);
    if (const auto* finish = std::get_if<QkvFinish>(&op)) written.push_back(finish->qkv);   // k and v: scratch then
    for (size_t slot = 0; slot < before.size(); ++slot)
      for (size_t i = 0; i < before[slot].size(); ++i) {
        const int64_t col = static_cast<int64_t>(i) % data_.program.rows[slot].cols;
        const bool may_change = std::any_of(written.begin(), written.end(), [&](const Rows& rows) {
          return rows.slot == static_cast<int>(slot) && col >= rows.col && col < rows.col + rows.cols;
        });
        if (!may_change && !same_bits(before[slot][i], after[slot][i]))
          return fail(fmt::format("{} column {} changed from {} to {} though nothing writes it",
                                  data_.program.rows[slot].name, col, before[slot][i], after[slot][i]));
      }
  }

  // Every row of every cache: the ones to be written within their bounds, the others unchanged. Then the oracle goes
  // on from what the backend wrote.
  void compare_caches(const Op& op, const Expected& expected, const StepInput& input, Stage& stage, Stage& oracle) {
    CacheImage& image = stage.image();
    if (std::holds_alternative<CopyPages>(op))
      for (const PageCopy& copy : input.page_copies)
        for (int cache = 0; cache < stage.n_caches(); ++cache)
          if (data_.program.caches[static_cast<size_t>(cache)].group == copy.group)
            image.copy_page(cache, copy.from, copy.to);
    for (const ExpectedCacheRow& row : expected.cache) {
      float* held = image.row(row.cache, row.part, row.page, row.row);
      stage.executor().read_cache(row.cache, row.part, row.page, row.row, held);
      std::vector<float> exact(row.values.size());
      oracle.executor().read_cache(row.cache, row.part, row.page, row.row, exact.data());
      for (size_t i = 0; i < row.values.size(); ++i)
        compare_value(row.values[i], row.bounds[i], held[i], exact[i], [&] {
          return fmt::format("{} page {} row {} value {}", row.part == CachePart::kKeys ? "keys" : "values", row.page,
                             row.row, i);
        });
      oracle.executor().write_cache(row.cache, row.part, row.page, row.row, held);
    }
    std::vector<float> values;
    for (Stage* each : {&stage, &oracle})
      each->for_each_cache_row([&](int cache, CachePart part, int page, int row) {
        values.resize(static_cast<size_t>(image.row_values(cache)));
        each->executor().read_cache(cache, part, page, row, values.data());
        if (!std::equal(values.begin(), values.end(), image.row(cache, part, page, row), same_bits))
          fail(fmt::format("cache {} page {} row {} is not what it should be{}", cache, page, row,
                           each == &oracle ? " in the reference" : ""));
      });
  }

  void compare_samples(const std::vector<Sampled>& got, const std::vector<Sampled>& exact) {
    if (got.size() != exact.size()) return fail(fmt::format("{} samples, {} expected", got.size(), exact.size()));
    const double u = options_.tolerance.accumulate_roundoff;
    for (size_t i = 0; i < got.size(); ++i) {
      if (got[i].id != exact[i].id || got[i].valid != exact[i].valid || got[i].top.size() != exact[i].top.size()) {
        fail(fmt::format("row {}: id {}{}, {}{} expected", i, got[i].id, got[i].valid ? "" : " invalid", exact[i].id,
                         exact[i].valid ? "" : " invalid"));
        continue;
      }
      ++n_values_;
      // log p = logit - log Σ exp: the sum's relative error, and the roundings of logit, logarithm and difference.
      const auto compare_logprob = [&](float a, float b) {
        compare_value(b,
                      (growth(data_.program.vocab) + 16 + 4 * std::abs(double{b})) * u + 0x1p-23 * std::abs(double{b}),
                      a, b, [&] { return fmt::format("log-probability of row {}", i); });
      };
      compare_logprob(got[i].logprob, exact[i].logprob);
      for (size_t j = 0; j < got[i].top.size(); ++j) {
        if (got[i].top[j].first != exact[i].top[j].first)
          fail(fmt::format("row {}: top {} is {}, {} expected", i, j, got[i].top[j].first, exact[i].top[j].first));
        compare_logprob(got[i].top[j].second, exact[i].top[j].second);
      }
    }
  }

  // What Advance leaves on the device, here for the host: the next step is compared by it.
  static void advance(StepInput& input, const std::vector<Sampled>& samples) {
    for (size_t i = 0; i < samples.size(); ++i) {
      if (samples[i].valid) input.ids[i] = samples[i].id;
      ++input.positions[i];
      ++input.sampling[i].draw;
    }
    input.page_copies.clear();
  }

  void run_row(const Placement& placement, size_t order_index, int token, Stage& stage, Record& record) {
    const CaseSequence& sequence = *placement.order[order_index];
    Executor& executor = stage.executor();
    const auto all = static_cast<size_t>(placement.first_token[order_index] + token);
    const auto output = std::find(sequence.outputs.begin(), sequence.outputs.end(), token);
    const bool leaves = output != sequence.outputs.end();
    const auto output_index = static_cast<size_t>(output - sequence.outputs.begin());

    StepInput input;
    input.ids = {placement.input.ids[all]};
    input.positions = {placement.input.positions[all]};
    input.sequences = {placement.input.sequences[all]};
    input.tables = placement.input.tables;
    if (leaves) input.output_rows = {0};
    if (leaves && !sequence.sampling.empty()) input.sampling = {sequence.sampling[output_index]};
    for (int cache = 0; cache < stage.n_caches(); ++cache) {
      if (appends_to(data_.program, cache)) continue;
      stage.fill_position(order_index, cache, input.positions[0]);
      const int page = page_of(data_.program, placement.limits, input, cache, input.sequences[0], input.positions[0]);
      const int row = input.positions[0] % kPageTokens;
      for (CachePart part : {CachePart::kKeys, CachePart::kValues})
        executor.write_cache(cache, part, page, row, stage.image().row(cache, part, page, row));
    }
    for (size_t slot = 0; slot < data_.program.rows.size(); ++slot) {
      const int64_t cols = data_.program.rows[slot].cols;
      std::vector<float> values(static_cast<size_t>(cols), kNan);
      const int64_t from = stage.is_tokens(slot) ? token : static_cast<int64_t>(output_index);
      if (!sequence.rows[slot].empty() && (stage.is_tokens(slot) || leaves))
        std::copy_n(sequence.rows[slot].begin() + from * cols, cols, values.begin());
      executor.write_rows(static_cast<int>(slot), 0, 1, values.data());
    }
    executor.set_input(input);
    for (int step = 0; step < data_.n_steps; ++step) {
      executor.run();
      executor.synchronize();
      if (leaves)
        for (const Sampled& sampled : executor.samples()) record.samples.push_back(sampled);
    }
    const std::vector<std::vector<float>> rows = stage.live_rows(input);
    for (size_t slot = 0; slot < rows.size(); ++slot)
      record.rows[slot].insert(record.rows[slot].end(), rows[slot].begin(), rows[slot].end());
  }

  const CaseData& data_;
  Backend& backend_;
  const CaseOptions& options_;
  Failures failures_;
  std::string where_;
  double worst_ = 0;
  int64_t n_values_ = 0;
};

int64_t n_rows(const std::vector<CaseSequence>& sequences, size_t n) {
  int64_t total = 0;
  for (size_t i = 0; i < n; ++i) total += sequences[i].n_tokens;
  return total;
}

}  // namespace

CaseResult run_case(const OpCase& op_case, Backend& backend, Backend& reference, const CaseOptions& options) {
  CaseResult result;
  try {
    const std::unique_ptr<CaseData> data = op_case.build();
    CaseRunner runner(*data, backend, options);
    const Record record = runner.compare(reference);
    runner.require_same(record, runner.run_at_once(Variant::kPlain, 0), "running the list at once");

    const int64_t own_rows = n_rows(data->sequences, data->sequences.size());
    size_t n_neighbours = data->neighbours.size();
    while (n_neighbours > 0 && own_rows + n_rows(data->neighbours, n_neighbours) > options.independent_rows)
      --n_neighbours;
    runner.require_same(record, runner.run_at_once(Variant::kElsewhere, n_neighbours),
                        fmt::format("another place with {} neighbours", n_neighbours).c_str());
    const bool forked = std::any_of(data->sequences.begin(), data->sequences.end(),
                                    [](const CaseSequence& sequence) { return sequence.fork_of >= 0; });
    if (!forked && own_rows <= options.independent_rows)
      runner.require_same(record, runner.run_rows_alone(), "each row alone");

    result.worst = runner.worst();
    result.n_values = runner.n_values();
    result.message = runner.failures().text();
    result.passed = !runner.failures().any();
    if (result.passed && result.n_values == 0) {
      result.passed = false;
      result.message = "nothing was compared";
    }
  } catch (const Error& error) {
    result.message = error.what();
  }
  return result;
}

std::vector<uint32_t> output_bits(const OpCase& op_case, Backend& backend, CacheType cache_type) {
  const std::unique_ptr<CaseData> data = op_case.build();
  CaseOptions options;
  options.cache_type = cache_type;
  options.tolerance.cache_roundoff = 1;   // no reason here to judge what the cache holds
  CaseRunner runner(*data, backend, options);
  const Record record = runner.run_at_once(Variant::kPlain, 0);
  std::vector<uint32_t> bits;
  const auto add = [&bits](float value) {
    bits.push_back(std::isnan(value) ? 0x7fc00000u : std::bit_cast<uint32_t>(value));
  };
  for (const std::vector<float>& rows : record.rows)
    for (float value : rows) add(value);
  for (float value : record.cache) add(value);
  for (const Sampled& sampled : record.samples) {
    bits.push_back(static_cast<uint32_t>(sampled.id));
    bits.push_back(sampled.valid ? 1 : 0);
    add(sampled.logprob);
    for (const auto& [id, logprob] : sampled.top) {
      bits.push_back(static_cast<uint32_t>(id));
      add(logprob);
    }
  }
  return bits;
}

CaseOptions options_for(std::string_view backend_name, CacheType cache_type) {
  CaseOptions options;
  options.cache_type = cache_type;
  if (backend_name == "cuda") {
    // Operands of products are pairs of bf16, or integers of 16 bits relative to the largest of their group; sums are f32.
    options.tolerance.activation_roundoff = 0x1p-16;
    options.tolerance.operand_fixed_point = 0x1p-16;
    options.tolerance.weight_roundoff = 0x1p-17;
    // Where the GPU has a product for prompts; others are well within that.
    options.tolerance.exact_rows = 64;
    // bf16; of an FP8 cache keys and values are rounded to it too.
    options.tolerance.prompt_roundoff = cache_type == CacheType::kF32 ? 0 : cache_type == CacheType::kFp8 ? 0x1p-7 : 0x1p-8;
    options.tolerance.cache_roundoff =
        cache_type == CacheType::kF32 ? 0x1p-24 : cache_type == CacheType::kFp8 ? 0x1p-4 : 0x1p-8;
    options.independent_rows = 8;
  }
  // Integers of 8 bits, and a little for the two roundings on the way to one; caches of f16; x in bf16 where weights are, if asked for.
  const bool is_coarse_cpu = backend_name == "cpu" || backend_name == "cpu-bf16";
  if (is_coarse_cpu) options.tolerance.integer_step = (1.0 + 0x1p-12) / 254;
  if (backend_name == "cpu-bf16") options.tolerance.bf16_operand_roundoff = 0x1p-8;
  const bool is_cpu = is_coarse_cpu || backend_name == "cpu-exact";
  if (is_cpu && (cache_type == CacheType::kF16 || (cache_type == CacheType::kDefault && is_coarse_cpu)))
    options.tolerance.cache_roundoff = 0x1p-11;
  return options;
}

}  // namespace beryl
