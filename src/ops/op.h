// The whole vocabulary of a step. An op is plain data and runs nothing by itself; three backends run it (reference, CPU,
// CUDA). One op is what the best decode path would launch as one kernel.
//
// Notation: n_tokens rows enter a step, n_outputs of them leave through the head. "row" is one token of one sequence.
// norm(x) = x / sqrt(mean(x²) + eps) · weight. Formulas: docs/numerics.md.
//
// What changes from token to token (ids, positions, page tables, sampling parameters) is in the StepInput on the device,
// never in an op: so a list captured once as a CUDA graph stays valid.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

namespace beryl {

// An index into Program::rows, and a range of columns there. slot < 0: absent.
struct Rows {
  int slot = -1;
  int64_t col = 0;
  int64_t cols = 0;
  bool present() const { return slot >= 0; }
  Rows slice(int64_t begin, int64_t n_cols) const { return {slot, col + begin, n_cols}; }
};

// Indices into WeightSet; < 0: absent.
struct MatrixRef {
  int index = -1;
};
struct VectorRef {
  int index = -1;
  bool present() const { return index >= 0; }
};

struct Norm {
  bool present = false;             // false: no norm at all
  VectorRef weight;                 // absent: plain norm without a weight
  float eps = 0;
};

// out[t] = table[ids[t]] · scale
struct Embed {
  MatrixRef table;                  // [vocab][cols]
  Rows out;
  float scale = 1;
};

enum class Epilogue : uint8_t {
  kStore,                           // y = W h
  kGatedGelu,                       // y = gelu_tanh(W0 h) · (W1 h)      W has two parts of equal rows
  kGatedSilu,                       // y = silu(W0 h) · (W1 h)
  kGeluTimesOther,                  // y = gelu_tanh(W h) · other
  kSoftcap,                         // y = softcap · tanh(W h / softcap)
};

// W has two parts, gate and up.
constexpr bool is_gated(Epilogue epilogue) { return epilogue == Epilogue::kGatedGelu || epilogue == Epilogue::kGatedSilu; }

// y[t] = epilogue(W · norm(x[t]))
struct Linear {
  MatrixRef weight;
  Rows x;                           // [rows of x][cols of W]
  Norm norm;
  Rows y;                           // y has as many rows as x
  Epilogue epilogue = Epilogue::kStore;
  Rows other = {};                  // kGeluTimesOther: [rows][cols of y]
  float softcap = 0;                // kSoftcap
};

// Per head: q = rope(norm(q)), k = rope(norm(k)), v = norm(v) or v; q stays in place, k and v go into the cache at the
// token's position. Sharing layers have no k and v: only q is finished.
struct QkvFinish {
  Rows qkv;                         // [n_tokens][(n_heads + n_kv·(1 or 2)) · head_dim], q then k then v; q updated in place
  int n_heads = 0;
  int n_kv_heads = 0;               // 0: a sharing layer, nothing is appended
  int head_dim = 0;
  Norm q_norm;                      // over head_dim
  Norm k_norm;
  Norm v_norm;                      // Gemma 4: present without weight
  bool v_from_k = false;            // v = v_norm of the raw k projection; qkv then holds q and k only
  int rope = -1;                    // index into Program::ropes
  int cache = -1;                   // index into Program::caches
};

// o[t] = for each head softmax over live keys m of (scale · q·k_m) times v_m; head h reads KV head h / (n_heads / n_kv).
// Live keys of a token at position p: max(0, p - window + 1) <= m <= p; window 0: all m <= p.
struct Attention {
  Rows q;                           // [n_tokens][n_heads · head_dim]
  Rows out;                         // [n_tokens][n_heads · head_dim]
  int n_heads = 0;
  int cache = -1;                   // gives n_kv_heads, head_dim, window
  float scale = 1;
  float softcap = 0;                // 0: none; else s = softcap · tanh(s / softcap) before the softmax
};

// out = (base + norm(y)) · scale, where the norm runs over each group of `group` columns (0: over the whole row).
struct AddNorm {
  Rows out;                         // may be the same rows as base
  Rows base;                        // absent: 0
  Rows y;
  Norm norm;                        // not present: plain add
  int64_t group = 0;                // its norm weight has `group` values
  float scale = 1;
};

// z = W · norm(x); p = softmax(z); the top_k largest (ties: the lower index), g = p_e / Σ p over them · expert_scale[e].
struct Route {
  Rows x;
  Norm norm;
  MatrixRef weight;                 // [n_experts][cols]
  VectorRef expert_scale;           // [n_experts], absent: 1
  Rows routes;                      // [n_tokens][2 · top_k]: expert indices (as numbers), then their weights g
  int n_experts = 0;
  int top_k = 0;
};

// y[t] = Σ over the token's routes of g · ( Wdown_e · (gelu_tanh(Wgate_e h) · (Wup_e h)) ),  h = norm(x[t])
struct Experts {
  Rows x;
  Norm norm;
  Rows routes;
  MatrixRef gate_up;                // two parts [n_experts][expert_dim][cols]
  MatrixRef down;                   // [n_experts][cols][expert_dim]
  Rows y;
  int top_k = 0;
  int64_t expert_dim = 0;
};

// out[i] = x[output_rows[i]], from n_tokens rows to n_outputs rows
struct GatherRows {
  Rows x;
  Rows out;
};

// logits → one id a row with its log-probability, by the row's SampleParams (step_input.h).
struct Sample {
  Rows logits;                      // [n_outputs][vocab]
};

// Makes the sampled ids the next step's input: id[t] = sampled[t], position[t] += 1. For steps of decode rows only
// (n_tokens == n_outputs, output row t is token t), so that the next run needs nothing from the host.
struct Advance {};

// Copies whole pages, StepInput::page_copies, in every cache of their group; first in a step.
struct CopyPages {};

using Op = std::variant<Embed, Linear, QkvFinish, Attention, AddNorm, Route, Experts, GatherRows, Sample, Advance,
                        CopyPages>;

const char* op_name(const Op& op);  // "AddNorm"

// Calls function(rows, written) for all rows that an op reads (false) and then for those that it writes (true).
template <class Function>
void for_each_rows(const Op& op, Function&& function) {
  const auto call = [&](bool written, auto... all) {
    (void)((all.present() ? function(all, written) : void()), ...);
  };
  if (const auto* o = std::get_if<Embed>(&op)) call(true, o->out);
  if (const auto* o = std::get_if<Linear>(&op)) call(false, o->x, o->other), call(true, o->y);
  if (const auto* o = std::get_if<QkvFinish>(&op)) call(false, o->qkv), call(true, o->qkv);
  if (const auto* o = std::get_if<Attention>(&op)) call(false, o->q), call(true, o->out);
  if (const auto* o = std::get_if<AddNorm>(&op)) call(false, o->base, o->y), call(true, o->out);
  if (const auto* o = std::get_if<Route>(&op)) call(false, o->x), call(true, o->routes);
  if (const auto* o = std::get_if<Experts>(&op)) call(false, o->x, o->routes), call(true, o->y);
  if (const auto* o = std::get_if<GatherRows>(&op)) call(false, o->x), call(true, o->out);
  if (const auto* o = std::get_if<Sample>(&op)) call(false, o->logits);
}

}  // namespace beryl
