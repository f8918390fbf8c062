// What: rows that leave end up one behind the other, in place, whichever they are, with their positions and sequences; the ops behind
//       the last one that fills a cache are launches of their own, whose exchange rows are nobody else's.
// How:  every choice of up to 12 rows and random ones of many against a copy; a small program of two layers, the second of which shares
//       the first one's cache, planned with made-up device numbers.
#include "cuda/dropped_rows.h"

#include <set>

#include <gtest/gtest.h>

#include "cuda/device_memory.h"
#include "ops/random_matrix.h"

namespace beryl::cuda {
namespace {

// Columns of rows `stride` apart whose values tell their place.
std::vector<float> numbered(int n_rows, int64_t stride) {
  std::vector<float> values(static_cast<size_t>(n_rows * stride));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  return values;
}

void expect_moved(int n_rows, const std::vector<int32_t>& rows) {
  constexpr int64_t kStride = 3, kOtherStride = 2;
  const std::vector<float> before = numbered(n_rows, kStride);
  std::vector<float> values = before, others(static_cast<size_t>(n_rows * kOtherStride), -1.0f);
  const RowsView column = {values.data() + 1, kStride}, other = {others.data() + 1, kOtherStride};
  const int n = static_cast<int>(rows.size());
  move_column(column, column, rows.data(), n);
  move_column(other, column, nullptr, n);
  for (int i = 0; i < n_rows; ++i) {
    const bool moved = i < n;
    const auto from = static_cast<size_t>((moved ? rows[static_cast<size_t>(i)] : i) * kStride + 1);
    ASSERT_EQ(values[static_cast<size_t>(i * kStride + 1)], before[from]) << "row " << i << " of " << n;
    ASSERT_EQ(values[static_cast<size_t>(i * kStride)], before[static_cast<size_t>(i * kStride)]) << "another column";
    ASSERT_EQ(others[static_cast<size_t>(i * kOtherStride + 1)], moved ? before[from] : -1.0f);
  }
}

TEST(DroppedRows, MoveInPlace) {
  for (int n_rows = 1; n_rows <= 12; ++n_rows)
    for (uint32_t chosen = 0; chosen < 1u << n_rows; ++chosen) {
      std::vector<int32_t> rows;
      for (int row = 0; row < n_rows; ++row)
        if ((chosen >> row & 1) != 0) rows.push_back(row);
      expect_moved(n_rows, rows);
    }
  RandomStream random(7);
  for (int n_rows : {63, 64, 65, 200})
    for (int of_16 : {1, 8, 15}) {
      std::vector<int32_t> rows;
      for (int row = 0; row < n_rows; ++row)
        if (random.below(16) < of_16) rows.push_back(row);
      expect_moved(n_rows, rows);
    }
}

// Sequences of 4, 1 and 3 rows.
StepInput step_of(std::vector<int32_t> output_rows) {
  StepInput step;
  step.positions = {10, 11, 12, 13, 0, 70, 71, 72};
  step.sequences = {2, 2, 2, 2, 0, 1, 1, 1};
  step.ids.resize(8);
  step.output_rows = std::move(output_rows);
  return step;
}

TEST(DroppedRows, KeepTheirPositionsAndSequences) {
  std::vector<int32_t> positions(3, -1), sequences(3, -1);
  place_outputs(step_of({}), positions.data(), sequences.data());
  EXPECT_EQ(positions, (std::vector<int32_t>{-1, -1, -1}));
  place_outputs(step_of({1, 4, 7}), positions.data(), sequences.data());
  EXPECT_EQ(positions, (std::vector<int32_t>{11, 0, 72}));
  EXPECT_EQ(sequences, (std::vector<int32_t>{2, 0, 1}));
}

TEST(DroppedRows, AreRunsWhereEachSequencesRowsAreNeighbours) {
  for (const std::vector<int32_t>& rows : {std::vector<int32_t>{}, {0}, {7}, {0, 1}, {3, 4, 7}, {2, 3, 4, 5, 6}, {3, 7}, {0, 1, 2, 3, 4, 5, 6, 7}})
    EXPECT_TRUE(outputs_are_runs(step_of(rows)));
  for (const std::vector<int32_t>& rows : {std::vector<int32_t>{0, 2}, {5, 7}, {0, 1, 3}, {3, 4, 5, 7}})
    EXPECT_FALSE(outputs_are_runs(step_of(rows)));
}

// Two layers of 256 columns, 4 heads of 64 on 2 KV heads; the second has no keys and values of its own.
class OutputSegments : public ::testing::Test {
 protected:
  static constexpr int64_t kCols = 256, kFfn = 512, kVocab = 1024;

  OutputSegments() {
    program_.rows = {{"residual", kCols, RowsKind::kResidual, RowCount::kTokens},
                     {"block", kCols, RowsKind::kActivation, RowCount::kTokens},
                     {"qkv", 8 * 64, RowsKind::kActivation, RowCount::kTokens},
                     {"attended", 4 * 64, RowsKind::kActivation, RowCount::kTokens},
                     {"hidden", kFfn, RowsKind::kActivation, RowCount::kTokens},
                     {"last rows", kCols, RowsKind::kResidual, RowCount::kOutputs},
                     {"logits", kVocab, RowsKind::kLogits, RowCount::kOutputs}};
    program_.residual_slot = 0;
    program_.groups = {{0}};
    program_.caches = {{"layer", 2, 64, 0}};
    program_.weights = &weights_;
    program_.vocab = kVocab;
    emit(Embed{matrix(kVocab, kCols), all(0), 1});
    layer(2);
    layer(0);
    emit(GatherRows{all(0), all(5)});
    emit(Linear{matrix(kVocab, kCols), all(5), norm(), all(6)});
    emit(Sample{all(6)});
    emit(Advance{});
  }
  static Norm norm() { return {true, {}, 1e-6f}; }
  void emit(Op op) { program_.ops.push_back(std::move(op)); }
  Rows all(int slot) const { return {slot, 0, program_.rows[static_cast<size_t>(slot)].cols}; }
  MatrixRef matrix(int64_t rows, int64_t cols, int n_parts = 1) {
    HostMatrix part;
    part.name = "matrix";
    part.format = Format::kFp4G128;
    part.rows = rows;
    part.cols = cols;
    WeightMatrix matrix;
    matrix.parts.assign(static_cast<size_t>(n_parts), part);
    weights_.matrices.push_back(std::move(matrix));
    return {static_cast<int>(weights_.matrices.size()) - 1};
  }
  void layer(int n_kv_heads) {
    const Rows qkv = {2, 0, (4 + 2 * n_kv_heads) * 64};
    emit(Linear{matrix(qkv.cols, kCols), all(0), norm(), qkv});
    QkvFinish finish;
    finish.qkv = qkv;
    finish.n_heads = 4;
    finish.n_kv_heads = n_kv_heads;
    finish.head_dim = 64;
    finish.cache = 0;
    emit(finish);
    emit(Attention{qkv.slice(0, 4 * 64), all(3), 4, 0, 0.125f, 0});
    emit(Linear{matrix(kCols, 4 * 64), all(3), {}, all(1)});
    emit(AddNorm{all(0), all(0), all(1), norm(), 0, 1});
    emit(Linear{matrix(kFfn, kCols, 2), all(0), norm(), all(4), Epilogue::kGatedGelu});
    emit(Linear{matrix(kCols, kFfn), all(4), {}, all(1)});
    emit(AddNorm{all(0), all(0), all(1), norm(), 0, 1});
  }
  MemoryLayout layout(int max_tokens, bool whole_steps = true) const {
    StepLimits limits;
    limits.max_tokens = limits.max_outputs = max_tokens;
    limits.n_pages = {4};
    limits.n_entries = {4};
    DeviceProperties device;
    device.matvec = {132, 227 * 1024, 228 * 1024};
    device.whole_steps = whole_steps;
    return make_layout(program_, limits, device);
  }
  // The floats of a row that a segment's phases write.
  static std::set<int64_t> exchanged(const std::vector<DecodeSegment>& segments) {
    std::set<int64_t> places;
    for (const DecodeSegment& segment : segments)
      for (const PlannedPhase& phase : segment.phases) {
        for (int64_t i = 0; phase.y.exchange >= 0 && i < phase.y.rows.cols; ++i) places.insert(phase.y.exchange + i);
        if (phase.squares >= 0) places.insert(phase.squares);
      }
    return places;
  }

  WeightSet weights_;
  Program program_;
};

TEST_F(OutputSegments, AreWhatFollowsTheLastFilledCache) {
  const MemoryLayout layout = this->layout(80);
  ASSERT_TRUE(layout.output_part.has_value());
  EXPECT_EQ(layout.output_part->begin, 3u);                                // the first layer's Attention
  EXPECT_EQ(layout.decode.segments.size(), 1u);                            // all of a step whose rows all leave
  ASSERT_EQ(layout.output_segments.size(), 1u);
  const DecodeSegment& rest = layout.output_segments.front();
  EXPECT_EQ(rest.begin, 4);                                                // the Attention has no QkvFinish before it: it is a launch of its own
  EXPECT_EQ(rest.end, static_cast<int>(program_.ops.size()) - 2);
  EXPECT_EQ(rest.phases.size(), 3u + 5 + 1);
  EXPECT_TRUE(rest.gathers);
  EXPECT_TRUE(rest.phases[1].residual_first);
  EXPECT_EQ(layout.n_decode_phases(), layout.decode.n_phases() + static_cast<int>(rest.phases.size()) + 1);
}

TEST_F(OutputSegments, ShareNoExchangeRows) {
  const MemoryLayout layout = this->layout(80);
  const std::set<int64_t> whole = exchanged(layout.decode.segments), rest = exchanged(layout.output_segments);
  ASSERT_FALSE(whole.empty());
  ASSERT_FALSE(rest.empty());
  EXPECT_LT(*whole.rbegin(), *rest.begin());
  EXPECT_LT(*rest.rbegin(), layout.decode.exchange_floats);
  // What is read is what was written.
  for (const PlannedPhase& phase : layout.output_segments.front().phases) {
    for (int64_t place : {phase.x.exchange, phase.other.exchange, phase.add.exchange, phase.kv.exchange, phase.add_squares})
      EXPECT_TRUE(place < 0 || rest.contains(place)) << "op " << phase.op;
  }
}

TEST_F(OutputSegments, AreNotPlannedWhereNoStepHasThem) {
  EXPECT_TRUE(layout(1).output_segments.empty());
  EXPECT_TRUE(layout(80, false).output_segments.empty());
  // Without a head all rows may be read by whoever runs the list: none are dropped.
  program_.ops.resize(program_.ops.size() - 4);
  EXPECT_FALSE(layout(80).output_part.has_value());
  EXPECT_TRUE(layout(80).output_segments.empty());
}

}  // namespace
}  // namespace beryl::cuda
