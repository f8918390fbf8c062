#include "model/synthetic.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <new>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "base/system_memory.h"
#include "ops/random_matrix.h"

namespace beryl {
namespace {

constexpr int64_t kGemmaVocab = 262144;

// One row a size, as in the specifications' tables.
struct Gemma4Size {
  const char* name;
  int64_t width;
  int n_layers, period, n_heads, local_kv, global_kv;
  bool k_eq_v;
  int window;
  int64_t ffn_dim, shared_ffn_dim;
  int n_shared;
  int64_t per_layer_dim;
  int n_experts, top_k;
  int64_t expert_dim, context;
};
constexpr Gemma4Size kGemma4[] = {
    {"gemma4-e2b", 1536, 35, 5, 8, 1, 1, false, 512, 6144, 12288, 20, 256, 0, 0, 0, 131072},
    {"gemma4-e4b", 2560, 42, 6, 8, 2, 2, false, 512, 10240, 10240, 18, 256, 0, 0, 0, 131072},
    {"gemma4-12b", 3840, 48, 6, 16, 8, 1, true, 1024, 15360, 15360, 0, 0, 0, 0, 0, 262144},
    {"gemma4-26b-a4b", 2816, 30, 6, 16, 8, 2, true, 1024, 2112, 2112, 0, 0, 128, 8, 704, 262144},
    {"gemma4-31b", 5376, 60, 6, 32, 16, 4, true, 1024, 21504, 21504, 0, 0, 0, 0, 0, 262144},
};

struct Gemma3Size {
  const char* name;
  int64_t width;
  int n_layers, n_heads, n_kv, head_dim;
  int64_t ffn_dim;
  int window;
  double scale_dim, rope_factor;
  int64_t context;
};
constexpr Gemma3Size kGemma3[] = {
    {"gemma3-270m", 640, 18, 4, 1, 256, 2048, 512, 256, 1, 32768},
    {"gemma3-1b", 1152, 26, 4, 1, 256, 6912, 512, 256, 1, 32768},
    {"gemma3-4b", 2560, 34, 8, 4, 256, 10240, 1024, 256, 8, 131072},
    {"gemma3-12b", 3840, 48, 16, 8, 256, 15360, 1024, 256, 8, 131072},
    {"gemma3-27b", 5376, 62, 32, 16, 128, 21504, 1024, 168, 8, 131072},
};

struct LlamaSize {
  const char* name;
  int64_t width;
  int n_layers, n_heads, n_kv, head_dim;
  int64_t ffn_dim, vocab;
  double theta, rope_factor;   // rope_factor 1: no scaling
  bool tied;
  int64_t context;
};
constexpr LlamaSize kLlama[] = {
    {"llama3-8b", 4096, 32, 32, 8, 128, 14336, 128256, 500000, 1, false, 8192},
    {"llama3.1-8b", 4096, 32, 32, 8, 128, 14336, 128256, 500000, 8, false, 131072},
    {"llama3.1-70b", 8192, 80, 64, 8, 128, 28672, 128256, 500000, 8, false, 131072},
    {"llama3.2-1b", 2048, 16, 32, 8, 64, 8192, 128256, 500000, 32, true, 131072},
    {"llama3.2-3b", 3072, 28, 24, 8, 128, 8192, 128256, 500000, 32, true, 131072},
    {"smollm2-135m", 576, 30, 9, 3, 64, 1536, 49152, 100000, 1, true, 8192},
};

ModelConfig gemma4_config(const Gemma4Size& size) {
  ModelConfig config;
  config.family = Family::kGemma4;
  config.model_dim = size.width;
  config.vocab = kGemmaVocab;
  config.context = size.context;
  config.embedding_scale = std::sqrt(static_cast<double>(size.width));
  config.final_softcap = 30;
  config.per_layer_dim = size.per_layer_dim;
  const int first_shared = size.n_layers - size.n_shared;
  for (int i = 0; i < size.n_layers; ++i) {
    const bool slides = (i + 1) % size.period != 0;
    LayerSpec layer;
    layer.post_norms = layer.output_scale = true;
    layer.ffn = {i < first_shared ? size.ffn_dim : size.shared_ffn_dim, Activation::kGeluTanh, size.n_experts,
                 size.top_k, size.expert_dim};
    AttentionSpec& attention = layer.attention;
    attention.n_heads = size.n_heads;
    attention.n_kv_heads = slides ? size.local_kv : size.global_kv;
    attention.head_dim = slides ? 256 : 512;
    attention.window = slides ? size.window : 0;
    attention.rope.base = slides ? 1e4 : 1e6;
    if (!slides) {
      attention.rope.scaling = RopeSpec::Scaling::kProportional;
      attention.rope.rotated_share = 0.25;
    }
    attention.qk_norm = attention.v_norm = true;
    attention.v_from_k = size.k_eq_v && !slides;
    attention.cache_layer = i;
    if (i >= first_shared) {
      int source = first_shared - 1;
      while (((source + 1) % size.period != 0) != slides) --source;
      attention.cache_layer = source;
    }
    config.layers.push_back(layer);
  }
  return config;
}

ModelConfig gemma3_config(const Gemma3Size& size) {
  ModelConfig config;
  config.family = Family::kGemma3;
  config.model_dim = size.width;
  config.vocab = kGemmaVocab;
  config.context = size.context;
  config.embedding_scale = std::sqrt(static_cast<double>(size.width));
  for (int i = 0; i < size.n_layers; ++i) {
    const bool slides = (i + 1) % 6 != 0;
    LayerSpec layer;
    layer.post_norms = true;
    layer.ffn.dim = size.ffn_dim;
    AttentionSpec& attention = layer.attention;
    attention.n_heads = size.n_heads;
    attention.n_kv_heads = size.n_kv;
    attention.head_dim = size.head_dim;
    attention.window = slides ? size.window : 0;
    attention.rope.base = slides ? 1e4 : 1e6;
    if (!slides && size.rope_factor != 1) {
      attention.rope.scaling = RopeSpec::Scaling::kLinear;
      attention.rope.factor = size.rope_factor;
    }
    attention.scale = 1 / std::sqrt(size.scale_dim);
    attention.qk_norm = true;
    attention.cache_layer = i;
    config.layers.push_back(layer);
  }
  return config;
}

ModelConfig llama_config(const LlamaSize& size) {
  ModelConfig config;
  config.family = Family::kLlama;
  config.model_dim = size.width;
  config.vocab = size.vocab;
  config.context = size.context;
  config.norm_eps = 1e-5;
  for (int i = 0; i < size.n_layers; ++i) {
    LayerSpec layer;
    layer.ffn = {size.ffn_dim, Activation::kSilu, 0, 0, 0};
    AttentionSpec& attention = layer.attention;
    attention.n_heads = size.n_heads;
    attention.n_kv_heads = size.n_kv;
    attention.head_dim = size.head_dim;
    attention.scale = 1 / std::sqrt(static_cast<double>(size.head_dim));
    attention.rope.base = size.theta;
    if (size.rope_factor != 1) {
      attention.rope.scaling = RopeSpec::Scaling::kLlama3;
      attention.rope.factor = size.rope_factor;
    }
    attention.cache_layer = i;
    config.layers.push_back(layer);
  }
  return config;
}

bool ties_head(const std::string& name) {
  for (const LlamaSize& size : kLlama)
    if (name == size.name) return size.tied;
  return true;
}

// Makes tensors up. Two passes over the model: the first learns how large each format's block of data must be.
class SyntheticSource final : public TensorSource {
 public:
  SyntheticSource(const SyntheticFormats& formats, bool tied, uint64_t seed)
      : formats_(formats), tied_(tied), random_(seed), seed_(seed) {}

  bool has(Role role, int) const override {
    return role == Role::kExpertGateUp || (role == Role::kHead && !tied_);
  }

  HostMatrix matrix(Role role, int layer, int64_t rows, int64_t cols, int64_t stack) override {
    const bool is_head = role == Role::kEmbedding || role == Role::kHead || role == Role::kPerLayerEmbedding;
    HostMatrix matrix;
    matrix.name = fmt::format("synthetic {}.{}", layer, static_cast<int>(role));
    matrix.format = fitting(is_head ? formats_.head : formats_.layers, cols);
    if (role == Role::kRouter) matrix.format = Format::kF32;   // as files keep it
    matrix.rows = rows;
    matrix.cols = cols;
    matrix.stack = stack;
    matrix.stack_stride_bytes = rows * row_bytes(matrix.format, cols);
    matrix.stack_scale_stride_bytes = rows * row_scale_bytes(matrix.format, cols);
    Pool& pool = pools_[matrix.format];
    const int64_t code_bytes = stack * matrix.stack_stride_bytes, scale_bytes = stack * matrix.stack_scale_stride_bytes;
    if (!pool.filled) {
      pool.code_bytes = formats_.separate ? pool.code_bytes + code_bytes : std::max(pool.code_bytes, code_bytes);
      pool.scale_bytes = formats_.separate ? pool.scale_bytes + scale_bytes : std::max(pool.scale_bytes, scale_bytes);
      return matrix;
    }
    int64_t code_begin = pool.next_code, scale_begin = pool.next_scale;
    if (formats_.separate) {
      pool.next_code += code_bytes;
      pool.next_scale += scale_bytes;
    } else {
      // Neighbouring matrices begin at different places, so that they are not copies of each other.
      const auto place = static_cast<uint64_t>(role) * kVariants + static_cast<uint64_t>(layer + kVariants) % kVariants;
      const auto shift = static_cast<int64_t>(RandomStream(seed_ + place).below(kShift));
      code_begin = shift * info(matrix.format).block_bytes;
      scale_begin = shift * info(matrix.format).scale_bytes;
    }
    matrix.codes = pool.storage->data() + code_begin;
    if (scale_bytes > 0) matrix.scales = pool.storage->data() + pool.scale_begin + scale_begin;
    matrix.storage = pool.storage;
    return matrix;
  }

  std::vector<float> values(Role role, int, int64_t n) override {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = role == Role::kOutputScale ? 0.9f : random_.between(0.7f, 1.3f);
    return values;
  }

  void ignore(Role, int) override {}

  // After the first pass.
  void fill_pools() {
    constexpr int64_t kCols = 4096, kRows = 509;   // odd: neighbouring rows of a matrix differ, whatever its width
    for (auto& [format, pool] : pools_) {
      const RandomMatrix unit = random_matrix(format, kRows, kCols, 1, 1, seed_ + static_cast<uint64_t>(format));
      const int64_t code_bytes = pool.code_bytes + kShift * info(format).block_bytes;
      const int64_t scale_bytes = pool.scale_bytes + kShift * info(format).scale_bytes;
      pool.scale_begin = (code_bytes + 63) / 64 * 64;
      auto storage = memory_for(pool.scale_begin + scale_bytes, format);
      repeat(unit.matrix.codes, kRows * row_bytes(format, kCols), storage->data(), code_bytes);
      if (unit.matrix.scales != nullptr)
        repeat(unit.matrix.scales, kRows * row_scale_bytes(format, kCols), storage->data() + pool.scale_begin,
               scale_bytes);
      pool.storage = std::move(storage);
      pool.filled = true;
    }
  }

 private:
  static constexpr int kVariants = 4;
  static constexpr int kShift = 1 << 12;

  struct Pool {
    int64_t code_bytes = 0, scale_bytes = 0, scale_begin = 0;
    int64_t next_code = 0, next_scale = 0;   // separate: where the next matrix begins
    std::shared_ptr<const std::vector<std::byte>> storage;
    bool filled = false;
  };

  static Format fitting(Format wanted, int64_t cols) {
    if (fits(wanted, cols)) return wanted;
    const FormatInfo& format = info(wanted);
    const bool is_small = format.block_bytes * 8 < 6 * format.block_weights;
    const Format instead = is_small ? Format::kQ4_0 : Format::kQ8_0;
    return fits(instead, cols) ? instead : Format::kBf16;
  }

  static std::shared_ptr<std::vector<std::byte>> memory_for(int64_t n_bytes, Format format) {
    try {
      return std::make_shared<std::vector<std::byte>>(static_cast<size_t>(n_bytes));
    } catch (const std::bad_alloc&) {
      throw out_of_memory(fmt::format("random weights in {}", info(format).name), n_bytes);
    }
  }

  static void repeat(const std::byte* from, int64_t from_bytes, std::byte* to, int64_t to_bytes) {
    for (int64_t done = 0; done < to_bytes; done += from_bytes)
      std::memcpy(to + done, from, static_cast<size_t>(std::min(from_bytes, to_bytes - done)));
  }

  SyntheticFormats formats_;
  bool tied_;
  RandomStream random_;
  uint64_t seed_;
  std::map<Format, Pool> pools_;
};

}  // namespace

std::vector<std::string> synthetic_names() {
  std::vector<std::string> names;
  for (const Gemma4Size& size : kGemma4) names.push_back(size.name);
  for (const Gemma3Size& size : kGemma3) names.push_back(size.name);
  for (const LlamaSize& size : kLlama) names.push_back(size.name);
  return names;
}

ModelConfig synthetic_config(const std::string& name) {
  ModelConfig config;
  for (const Gemma4Size& size : kGemma4)
    if (name == size.name) config = gemma4_config(size);
  for (const Gemma3Size& size : kGemma3)
    if (name == size.name) config = gemma3_config(size);
  for (const LlamaSize& size : kLlama)
    if (name == size.name) config = llama_config(size);
  if (config.layers.empty())
    throw Error(ErrorCode::kBadInput,
                fmt::format("no synthetic model '{}'; there are: {}", name, fmt::join(synthetic_names(), ", ")));
  config.architecture = family_name(config.family);
  config.name = "synthetic " + name;
  return config;
}

Model make_synthetic_model(const std::string& name, const SyntheticFormats& formats, uint64_t seed, bool with_data) {
  Model model;
  model.config = synthetic_config(name);
  SyntheticSource source(formats, ties_head(name), seed);
  model.weights = collect_weights(source, model.config);
  if (with_data) {
    source.fill_pools();
    model.weights = collect_weights(source, model.config);
  }
  model.program = build_step(model.config, *model.weights);
  return model;
}

}  // namespace beryl
