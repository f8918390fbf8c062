// out[t] = table[ids[t]] · scale: gathers and decodes one row a token. Moves a row of the table a token.
#include "cuda/kernels.h"
#include "cuda/plain_codec.cuh"

namespace beryl::cuda {

namespace {

template <PlainCodes kKind>
__global__ void __launch_bounds__(128) embed_kernel(EmbedArgs args) {
  grid_wait();
  const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 8;
  if (column >= args.cols) return;
  const int64_t token = blockIdx.y;
  const PlainRow row = plain_row(args.table, args.ids[token]);
  float w[8];
  load_weights8<kKind>(args.table, row, column, w);
  float* out = args.out.values + token * args.out.stride + column;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (column + i < args.cols) out[i] = w[i] * args.table.tensor_scale * args.scale;
}

}  // namespace

void launch_embed(const LaunchContext& context, const EmbedArgs& args, int64_t n_tokens) {
  const auto blocks = static_cast<unsigned>((args.cols + 1023) / 1024);
  with_plain_codes(args.table.kind, [&]<PlainCodes kKind>() {
    launch(context, {.grid = {blocks, static_cast<unsigned>(n_tokens)}, .block = 128, .name = "Embed"}, embed_kernel<kKind>,
           args);
  });
}

}  // namespace beryl::cuda
