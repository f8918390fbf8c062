// What: a step of a dense model is one launch of the decode kernel; ops that it does not know cut the step; what is read
//       within a launch alone goes through exchange rows, and nothing else does; shared memory is never cut too large.
// How:  small programs of the op lists that build_step makes, planned with made-up device numbers.
#include "cuda/decode_plan.h"

#include <set>

#include <gtest/gtest.h>

#include "cuda/device_memory.h"

namespace beryl::cuda {
namespace {

const DeviceProperties kDevice = [] {
  DeviceProperties device;
  device.matvec = {132, 227 * 1024, 228 * 1024};
  return device;
}();

// Layers as of Gemma: 256 columns, 4 heads of 64 on 2 KV heads, a feed-forward of 512.
class PlanTest : public ::testing::Test {
 protected:
  static constexpr int64_t kCols = 256, kQkv = (4 + 2 * 2) * 64, kFfn = 512, kVocab = 1024;

  MatrixRef matrix(std::vector<std::pair<int64_t, Format>> parts, int64_t cols) {
    WeightMatrix matrix;
    for (const auto& [rows, format] : parts) {
      HostMatrix part;
      part.name = "matrix";
      part.format = format;
      part.rows = rows;
      part.cols = cols;
      matrix.parts.push_back(part);
    }
    weights_.matrices.push_back(std::move(matrix));
    return {static_cast<int>(weights_.matrices.size()) - 1};
  }
  Rows rows(const char* name, int64_t cols, RowsKind kind = RowsKind::kActivation, RowCount count = RowCount::kTokens) {
    program_.rows.push_back({name, cols, kind, count});
    return {static_cast<int>(program_.rows.size()) - 1, 0, cols};
  }
  static Norm norm() { return {true, {}, 1e-6f}; }
  void emit(Op op) { program_.ops.push_back(std::move(op)); }

  void begin(int64_t head_dim = 64) {
    head_dim_ = head_dim;
    x_ = rows("residual", kCols, RowsKind::kResidual);
    program_.residual_slot = x_.slot;
    block_ = rows("block", kCols);
    qkv_ = rows("qkv", 8 * head_dim);
    attended_ = rows("attended", 4 * head_dim);
    hidden_ = rows("hidden", kFfn);
    gathered_ = rows("last rows", kCols, RowsKind::kResidual, RowCount::kOutputs);
    logits_ = rows("logits", kVocab, RowsKind::kLogits, RowCount::kOutputs);
    program_.groups.push_back({0});
    emit(Embed{matrix({{kVocab, Format::kFp8}}, kCols), x_, 1});
  }
  void layer(Format format = Format::kFp4G128, std::vector<std::pair<int64_t, Format>> gate_up = {}) {
    program_.caches.push_back({"layer", 2, static_cast<int>(head_dim_), 0});
    const int cache = static_cast<int>(program_.caches.size()) - 1;
    if (gate_up.empty()) gate_up = {{kFfn, format}, {kFfn, format}};
    emit(Linear{matrix({{8 * head_dim_, format}}, kCols), x_, norm(), qkv_, Epilogue::kStore, {}, 0});
    QkvFinish finish;
    finish.qkv = qkv_;
    finish.n_heads = 4;
    finish.n_kv_heads = 2;
    finish.head_dim = static_cast<int>(head_dim_);
    finish.cache = cache;
    emit(finish);
    emit(Attention{qkv_.slice(0, 4 * head_dim_), attended_, 4, cache, 0.125f, 0});
    emit(Linear{matrix({{kCols, format}}, 4 * head_dim_), attended_, {}, block_, Epilogue::kStore, {}, 0});
    emit(AddNorm{x_, x_, block_, norm(), 0, 1});
    emit(Linear{matrix(gate_up, kCols), x_, norm(), hidden_, Epilogue::kGatedGelu, {}, 0});
    emit(Linear{matrix({{kCols, format}}, kFfn), hidden_, {}, block_, Epilogue::kStore, {}, 0});
    emit(AddNorm{x_, x_, block_, norm(), 0, 0.5f});
  }
  void end() {
    emit(GatherRows{x_, gathered_});
    emit(Linear{matrix({{kVocab, Format::kFp8}}, kCols), gathered_, norm(), logits_, Epilogue::kStore, {}, 0});
    emit(Sample{logits_});
    emit(Advance{});
  }
  DecodePlan plan(bool whole_steps = true) {
    program_.weights = &weights_;
    program_.vocab = kVocab;
    StepLimits limits;
    limits.max_tokens = 8;
    limits.max_outputs = 8;
    limits.n_pages = {4};
    limits.n_entries = {4};
    DeviceProperties device = kDevice;
    device.whole_steps = whole_steps;
    return make_layout(program_, limits, device).decode;
  }

  WeightSet weights_;
  Program program_;
  Rows x_, block_, qkv_, attended_, hidden_, gathered_, logits_;
  int64_t head_dim_ = 64;
};

TEST_F(PlanTest, AStepOfADenseModelIsOneLaunch) {
  begin();
  layer();
  layer();
  end();
  const DecodePlan plan = this->plan();
  ASSERT_EQ(plan.segments.size(), 1u);
  const DecodeSegment& segment = plan.segments.front();
  EXPECT_EQ(segment.begin, 1);                                             // behind Embed
  EXPECT_EQ(segment.end, static_cast<int>(program_.ops.size()) - 2);       // before Sample
  EXPECT_EQ(segment.phases.size(), 2u * 5 + 1);
  EXPECT_TRUE(segment.gathers);
  EXPECT_TRUE(segment.changes_residual);
  // Every AddNorm is in the Linear behind it.
  int added = 0;
  for (const PlannedPhase& phase : segment.phases) added += phase.add_op >= 0 ? 1 : 0;
  EXPECT_EQ(added, 4);
  EXPECT_TRUE(segment.phases.front().residual_first);
  EXPECT_FALSE(segment.phases.back().residual_first);
}

TEST_F(PlanTest, WhatIsReadWithinTheLaunchIsExchangedAndTheRestIsNot) {
  begin();
  layer();
  layer();
  end();
  const DecodePlan plan = this->plan();
  const DecodeSegment& segment = plan.segments.front();
  std::set<int64_t> places;
  for (const PlannedPhase& phase : segment.phases) {
    const bool last = &phase == &segment.phases.back();
    EXPECT_EQ(phase.y.exchange >= 0, !last);
    if (phase.y.exchange < 0) continue;
    EXPECT_EQ(phase.y.exchange % 32, 0) << "a line of its own";
    EXPECT_TRUE(places.insert(phase.y.exchange).second) << "no two phases write the same exchange rows";
    EXPECT_LE(phase.y.exchange + phase.y.rows.cols, plan.exchange_floats);
  }
  // Attention reads the queries of its own layer's projection, and makes the new keys from the same rows.
  for (size_t i = 1; i < segment.phases.size(); ++i) {
    const PlannedPhase& phase = segment.phases[i];
    if (phase.kind != PhaseKind::kAttention) continue;
    EXPECT_EQ(phase.x.exchange, segment.phases[i - 1].y.exchange);
    EXPECT_EQ(phase.kv.exchange, segment.phases[i - 1].y.exchange);
    EXPECT_EQ(phase.source_op, phase.finish_op);
  }
  for (const DecodeSegment& single : plan.single)
    for (const PlannedPhase& phase : single.phases) EXPECT_LT(phase.y.exchange, 0) << "one op writes the program's own rows";
}

TEST_F(PlanTest, WithoutWholeStepsThereAreSinglesAndNothingIsExchanged) {
  begin();
  layer();
  end();
  const DecodePlan plan = this->plan(false);
  EXPECT_TRUE(plan.segments.empty());
  EXPECT_EQ(plan.exchange_floats, 0);
  size_t singles = 0;
  for (const DecodeSegment& single : plan.single) singles += single.phases.size();
  EXPECT_EQ(singles, 6u);
}

TEST_F(PlanTest, OpsThatTheKernelDoesNotKnowCutTheStep) {
  begin();
  layer();
  const Rows routes = rows("routes", 4, RowsKind::kResidual);
  emit(Route{x_, norm(), matrix({{8, Format::kF32}}, kCols), {}, routes, 8, 2});
  layer();
  end();
  const DecodePlan plan = this->plan();
  ASSERT_EQ(plan.segments.size(), 2u);
  // The AddNorm before Route has nobody to join: it stays an op, and `down` writes the program's rows for it.
  EXPECT_TRUE(std::holds_alternative<AddNorm>(program_.ops[static_cast<size_t>(plan.segments[0].end)]));
  EXPECT_LT(plan.segments[0].phases.back().y.exchange, 0);
  EXPECT_TRUE(std::holds_alternative<Route>(program_.ops[static_cast<size_t>(plan.segments[1].begin) - 1]));
}

TEST_F(PlanTest, AHeadWidthWithoutAKernelLeavesAttentionToItsOwn) {
  begin(96);
  layer();
  end();
  const DecodePlan plan = this->plan();
  for (const DecodeSegment& segment : plan.segments)
    for (const PlannedPhase& phase : segment.phases) EXPECT_EQ(phase.kind, PhaseKind::kLinear);
  for (size_t op = 0; op < program_.ops.size(); ++op)
    if (std::holds_alternative<Attention>(program_.ops[op])) {
      EXPECT_TRUE(plan.single[op].phases.empty());
    }
}

// The kernel without code for other formats takes what has none.
TEST_F(PlanTest, AStepOfUsualFormatsHasAKernelOfItsOwn) {
  begin();
  layer();
  end();
  for (const DecodeSegment& segment : plan().segments) EXPECT_TRUE(cut_decode(segment.needs, 1, 227 * 1024).usual_formats);
}

// Held weights are code for FP4 g128.
TEST_F(PlanTest, OnlyAStepOfUsualFormatsHoldsWeights) {
  begin();
  layer();
  end();
  DecodeNeeds needs = plan().segments.front().needs;
  EXPECT_FALSE(cut_decode(needs, 1, 227 * 1024).holds_weights);
  needs.holds_weights = true;
  EXPECT_TRUE(cut_decode(needs, 1, 227 * 1024).holds_weights);
  needs.other_formats = true;
  EXPECT_FALSE(cut_decode(needs, 1, 227 * 1024).holds_weights);
}

TEST_F(PlanTest, OneMatrixOfAnotherFormatTakesTheKernelOfAllFormats) {
  begin();
  layer(Format::kFp4G128, {{kFfn, Format::kFp4G128}, {kFfn, Format::kQ8_0}});
  end();
  const DecodePlan plan = this->plan();
  ASSERT_EQ(plan.segments.size(), 1u);
  EXPECT_FALSE(cut_decode(plan.segments.front().needs, 1, 227 * 1024).usual_formats);
}

TEST_F(PlanTest, GateAndUpOfTwoFormatsAreTwoPhases) {
  begin();
  layer(Format::kQ4_0, {{kFfn, Format::kQ4_0}, {kFfn, Format::kQ8_0}});
  end();
  const DecodePlan plan = this->plan();
  ASSERT_EQ(plan.segments.size(), 1u);
  const PlannedPhase *gate = nullptr, *up = nullptr;
  for (const PlannedPhase& phase : plan.segments.front().phases) {
    if (phase.kind != PhaseKind::kLinear) continue;
    if (phase.gate_only) gate = &phase;
    else if (phase.piece == 1) up = &phase;
  }
  ASSERT_TRUE(gate != nullptr && up != nullptr);
  EXPECT_GE(gate->y.exchange, 0);
  EXPECT_EQ(up->other.exchange, gate->y.exchange);
  EXPECT_GE(gate->add_op, 0);
  EXPECT_LT(up->add_op, 0) << "the residual takes a block once";
}

TEST_F(PlanTest, SharedMemoryIsEnoughForWhatIsCut) {
  for (const int shared : {227 * 1024, 163 * 1024, 99 * 1024}) {
    for (const int x : {0, 256, 512}) {
      for (const int units : {240, 960, 4096}) {
        for (const int attention : {0, 20000, 60000}) {
          DecodeNeeds needs;
          needs.stage_bytes = 15872;
          needs.slot_bytes = 2 * 15872;
          // Formats of one form, or of both as in a model with another head.
          for (const int form : x == 0 ? std::vector<int>{0, 1} : std::vector<int>{x == 256 ? 0 : 1})
            needs.forms[form] = {true, 4 * x_chunk_bytes(1, x_group_bytes(form)), units, 2 * units};
          needs.attention_bytes = attention;
          needs.attention_row_bytes = 2048;
          needs.attention_slot_bytes = attention > 0 ? 16384 : 0;
          needs.sum_groups = 64;
          for (int rows = 1; rows <= kDecodeRows; ++rows) {
            const DecodeCut cut = cut_decode(needs, rows, shared);
            if (cut.n_slots == 0) continue;          // the ops run by other kernels
            EXPECT_LE(cut.shared_bytes, shared);
            EXPECT_GE(cut.n_slots, 2);
            EXPECT_GE(cut.slot_bytes, needs.attention_slot_bytes);
            EXPECT_EQ(cut.slot_bytes % 128, 0) << "the copy engine writes whole lines";
            EXPECT_GE(cut.scratch_bytes, attention);
            for (int form = 0; form < 2; ++form) {
              const LinearCut& linear = cut.forms[form];
              if (!needs.forms[form].used) continue;
              EXPECT_GE(linear.x_bytes, x_chunk_bytes(rows, x_group_bytes(form)));
              EXPECT_GE(linear.partial_floats, units * rows) << "a unit's sums fit";
              EXPECT_LE(linear.partials_at + 2 * linear.partial_floats * 4, cut.scratch_bytes);
              EXPECT_LE(kMatvecWarps * linear.x_bytes, linear.partials_at);
            }
          }
          EXPECT_GT(cut_decode(needs, 1, 227 * 1024).n_slots, 2) << "one row fits on a large GPU";
          DecodeNeeds alone;                           // attention by itself
          alone.attention_bytes = attention;
          alone.attention_slot_bytes = needs.attention_slot_bytes;
          if (attention > 0) {
            EXPECT_GE(cut_decode(alone, 1, shared).n_slots, 2);
          }
        }
      }
    }
  }
}

// What a form of x needs is not taken from the other: the shapes of Gemma 4 12B in FP4 with an FP8 head, on a large GPU. Else x of the
// widest matrix is taken twice. One row has a ring of four slots, with little to spare: three are 2.5 % slower (docs/performance.md).
TEST_F(PlanTest, AllUnitsOfABlockFitWhereXComesInChunks) {
  constexpr int kUnit = 15 * 4 * kTileRows;      // 15 warps, 4 chunks
  DecodeNeeds needs;
  needs.stage_bytes = 16896;
  needs.slot_bytes = 2 * 16896;
  needs.forms[0] = {true, 4 * x_chunk_bytes(1, x_group_bytes(0)), kUnit, 2 * kUnit};
  needs.forms[1] = {true, 0, 15 * kTileRows, 0};
  needs.attention_bytes = attention_scratch_bytes(512, 16);
  needs.attention_row_bytes = attention_row_bytes(512);
  needs.attention_slot_bytes = attention_slot_bytes(512);
  needs.sum_groups = 30;
  needs.residual_cols = 3840;
  needs.holds_vectors = true;
  for (int rows = 1; rows <= kWholeStepRows; ++rows) {
    const DecodeCut cut = cut_decode(needs, rows, 227 * 1024);
    EXPECT_GE(cut.n_slots, rows == 1 ? 4 : 3) << rows << " rows";
    EXPECT_EQ(cut.slot_bytes, needs.slot_bytes) << rows << " rows";
    EXPECT_GE(cut.forms[0].partial_row_floats, 2 * kUnit) << rows << " rows";
  }
}

}  // namespace
}  // namespace beryl::cuda
