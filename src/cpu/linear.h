// y[t] = epilogue(W · norm(x[t])): the pieces of a Linear, which Experts and Route use too.
//
// Every W[r] · x[t] is one chain of sums in the order of vec16-inl.h over weights rounded to f32 (weights/decode.h),
// then times the matrix's tensor_scale. Two loops give these same bits:
//   few tokens (<= kFewTokens)   each weight is decoded in registers and multiplied with all tokens: a weight stream
//   more tokens                  a panel of rows is decoded once to f32, sized for the L2 cache; then tiles of 4 rows x
//                                6 tokens run over it from registers
// So a token's result depends neither on the other tokens nor on how rows and tokens are shared among threads. Weights are read
// where they are in the file, or packed as floats (packed_matrix.h), with the same bits.
//
// Matrices of integer codes that were packed are multiplied in integers instead, with activations of
// 8 bits: integer_dot.h says what the result is. Few tokens decode codes in registers, more tokens share expanded tiles;
// the same bits again. Matrices packed for bf16 are multiplied with activations rounded to bf16 (bf16_dot.h), by one loop for few
// tokens and many.
#pragma once

#include <cstdint>

#include "cpu/bf16_dot.h"
#include "cpu/integer_dot.h"
#include "cpu/packed_matrix.h"
#include "cpu/row_norm.h"
#include "ops/op.h"
#include "weights/host_matrix.h"

namespace beryl {

inline constexpr int kTokenTile = 6;
inline constexpr int kRowTile = 4;
inline constexpr int kFewTokens = 4;
inline constexpr int kMaxItemRows = 64;

// Tokens as the products read them: tiles of kTokenTile tokens (the last one of what is left), each
// [padded_cols / 16][tokens of the tile][16], zeros behind the last column.
struct PackedTokens {
  float* data = nullptr;            // packed_floats(n_tokens, cols), 64-byte aligned
  int64_t n_tokens = 0;
  int64_t cols = 0;

  static int64_t padded(int64_t cols) { return (cols + 31) / 32 * 32; }
  static int64_t packed_floats(int64_t n_tokens, int64_t cols) { return n_tokens * padded(cols); }
  int64_t n_tiles() const { return (n_tokens + kTokenTile - 1) / kTokenTile; }
  int tokens_of(int64_t tile) const {
    const int64_t left = n_tokens - tile * kTokenTile;
    return static_cast<int>(left < kTokenTile ? left : kTokenTile);
  }
  float* tile(int64_t index) const { return data + index * kTokenTile * padded(cols); }
};

// Norms and packs the tokens of tiles [tile_begin, tile_end). Token i is row (rows ? rows[i] : i) of x.
void pack_tokens(const float* x, int64_t x_stride, const int32_t* rows, const RowNorm& norm, const PackedTokens& packed,
                 int64_t tile_begin, int64_t tile_end);

// Norms and quantises the tokens [begin, end), in the form that products of x.n_tokens tokens take. Token i as above.
void quantize_tokens(const float* x, int64_t x_stride, const int32_t* rows, const RowNorm& norm, const QuantizedTokens& to,
                     int64_t begin, int64_t end);

// Norms and rounds the tokens [begin, end), in the form that the chosen target's products take. Token i as above.
void round_tokens(const float* x, int64_t x_stride, const int32_t* rows, const RowNorm& norm, const Bf16Tokens& to, int64_t begin,
                  int64_t end);

// One part of a Linear, or the two parts of a gated one.
struct Product {
  const HostMatrix* weight = nullptr;
  const HostMatrix* up = nullptr;   // gated epilogues: `weight` is the gate
  const PackedMatrix* packed = nullptr;     // of weight; null: multiply in f32, with the file's blocks
  const PackedMatrix* packed_up = nullptr;  // of up, packed just where weight is
  int64_t expert = 0;
  PackedTokens x;                           // not packed, or as floats: the tokens
  QuantizedTokens quantized;                // packed codes: the tokens
  Bf16Tokens rounded;                       // packed for bf16: the tokens
  Epilogue epilogue = Epilogue::kStore;
  float softcap = 0;
  float* y = nullptr;               // [n_tokens][rows], rows y_stride apart
  int64_t y_stride = 0;
  const float* other = nullptr;     // kGeluTimesOther, like y
  int64_t other_stride = 0;

  bool is_f32() const { return packed == nullptr || packed->form == PackedForm::kFloats; }
  bool is_bf16() const { return packed != nullptr && packed->form == PackedForm::kBf16; }
  int64_t n_tokens() const { return is_f32() ? x.n_tokens : is_bf16() ? rounded.n_tokens : quantized.n_tokens; }
  int token_tile() const { return is_f32() ? kTokenTile : is_bf16() ? kBf16TokenTile : kQuantizedTokenTile; }
  int64_t n_token_tiles() const { return (n_tokens() + token_tile() - 1) / token_tile(); }
  // What blocks of rows are multiples of.
  int row_tile() const {
    if (packed == nullptr) return kRowTile;
    if (is_bf16() || has_few_tokens()) return kTileRows;
    return is_f32() ? kFloatRows : kStripRows;
  }
  bool has_few_tokens() const { return n_tokens() <= kFewTokens; }
};
static_assert(kFewTokens == kFewQuantizedTokens && kMaxItemRows % kTileRows == 0 && kFloatRows == kRowTile);

// Most rows that one call of run_product may take: what fits a panel.
int64_t max_panel_rows(int64_t cols, bool gated);
int64_t max_expanded_rows(int64_t cols, bool gated);    // of packed products of integer codes
int64_t max_bf16_rows(int64_t cols, bool gated);        // of packed products of BF16
// Floats of the panel that each thread brings along, 64-byte aligned.
int64_t panel_floats(int64_t cols, bool gated);
int64_t expanded_floats(int64_t cols, bool gated);

// Rows [row_begin, row_end) of y for the tokens of tiles [tile_begin, tile_end). At most kMaxItemRows rows, and where
// n_tokens > kFewTokens at most max_panel_rows (max_expanded_rows, max_bf16_rows). Of packed products row_begin is a multiple of
// row_tile(). panel is not used when n_tokens <= kFewTokens, nor by products of BF16.
void run_product(const Product& product, int64_t row_begin, int64_t row_end, int64_t tile_begin, int64_t tile_end,
                 float* panel);

}  // namespace beryl
