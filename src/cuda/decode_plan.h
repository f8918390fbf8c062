// Which ops of a program the decode kernel runs, in which launches, and what goes from phase to phase: host code that knows
// no pointers, tested without a GPU.
//
// A segment is a run of ops that one launch does. Within it an AddNorm of the residual is part of the Linear that reads the
// residual next, QkvFinish part of the Attention behind it, and rows that are read within the segment alone are exchange
// rows. Ops that the kernel does not know (experts, sampling, other head widths) end a segment.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/decode.h"
#include "ops/program.h"

namespace beryl::cuda {

struct MemoryLayout;

struct PlannedRows {
  Rows rows;                        // of the program
  int64_t exchange = -1;            // floats from the begin of a row of exchange_floats; -1: the program's own rows
};

struct PlannedPhase {
  PhaseKind kind = PhaseKind::kEnd;
  int op = -1;                      // Linear or Attention
  int piece = 0;                    // of the Linear's matrix
  bool gate_only = false;           // the first of two pieces of a gated matrix
  PlannedRows x, y, other;          // of a Linear; q, out and - of an Attention
  bool residual = false;            // x is the residual stream
  bool residual_first = false;      // which comes from the program's rows
  int add_op = -1;                  // AddNorm before it
  PlannedRows add;
  int64_t squares = -1;             // exchange floats of the sums of squares of y's row tiles, for the norm of an AddNorm; -1: none
  int squares_op = -1;              // that AddNorm
  int64_t add_squares = -1;         // and those of `add`
  int finish_op = -1;               // QkvFinish of the same layer
  int source_op = -1;               // QkvFinish that makes the new keys; -1: all are in the cache
  PlannedRows kv;                   // its rows
};

struct DecodeSegment {
  int begin = 0, end = 0;           // ops
  std::vector<PlannedPhase> phases;
  bool changes_residual = false;
  bool gathers = false;             // takes every row for an output
  DecodeNeeds needs;
};

struct DecodePlan {
  // The whole program where every row leaves through the head, in the order of ops; between segments lie the other ops.
  std::vector<DecodeSegment> segments;
  // By op: one op as a launch of its own, from and to the program's rows. Empty phases: the kernel does not know it.
  std::vector<DecodeSegment> single;
  int64_t exchange_floats = 0;      // a row of a step
  int64_t residual_cols = 0;
  int64_t partial_floats = 0, partial_states = 0;   // a row of a step

  int n_phases() const;             // of all lists, with their ends
};

// together: gate and up are packed as one matrix; else the epilogue is that of up, and gate was stored before.
DecodeEpilogue decode_epilogue(Epilogue epilogue, bool together);

// whole_steps: segments too, not only single ops.
DecodePlan plan_decode(const Program& program, const MemoryLayout& layout, bool whole_steps);

}  // namespace beryl::cuda
