// A model as data: everything that build_step needs to know, and nothing about files.
//
// The values and formulas are those of the families' specifications (docs/numerics.md sums them up). One reader a family
// (llama.cpp, gemma3.cpp, gemma4.cpp) makes a ModelConfig from the metadata of a GGUF file or a Hugging Face folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weights/checkpoint.h"

namespace beryl {

enum class Family : uint8_t { kLlama, kGemma3, kGemma4 };

// Rope of one kind of layer. Pair j of d/2 turns by position · f_j, f_j = base^(-2j/d), then changed by `scaling`.
struct RopeSpec {
  enum class Scaling : uint8_t {
    kNone,
    kLinear,        // f / factor
    kLlama3,        // by wavelength: long ones f / factor, short ones unchanged, between them a blend
    kProportional,  // only the first `rotated_share` of the pairs turn; the exponent stays over the whole head
    kDivisors,      // f_j / divisors[j], as GGUF stores any scaling
  };
  double base = 10000;
  Scaling scaling = Scaling::kNone;
  double factor = 1;
  double low_frequency_factor = 1;      // kLlama3
  double high_frequency_factor = 4;     // kLlama3
  double original_context = 8192;       // kLlama3
  double rotated_share = 1;             // kProportional
  std::vector<float> divisors = {};     // kDivisors: [head_dim / 2]

  bool operator==(const RopeSpec&) const = default;
};

// [head_dim / 2] angles a position turns by; 0: the pair does not turn.
std::vector<double> rope_frequencies(const RopeSpec& rope, int head_dim);

struct AttentionSpec {
  int n_heads = 0;
  int n_kv_heads = 0;
  int head_dim = 0;
  int window = 0;               // keys a token sees, itself included; 0: all
  RopeSpec rope;
  double scale = 1;
  double softcap = 0;
  bool qk_norm = false;         // q and k are normed per head, with weights
  bool v_norm = false;          // v is normed per head, without weight
  bool v_from_k = false;        // v comes from the raw k projection
  int cache_layer = 0;          // whose cache is read; another layer's: this one has no k and v of its own
};

enum class Activation : uint8_t { kGeluTanh, kSilu };

struct FfnSpec {
  int64_t dim = 0;
  Activation activation = Activation::kGeluTanh;
  int n_experts = 0;            // 0: no experts beside the dense branch
  int top_k = 0;
  int64_t expert_dim = 0;
};

struct LayerSpec {
  AttentionSpec attention;
  FfnSpec ffn;
  bool post_norms = false;      // norms after attention and after the feed-forward, before the sum (Gemma)
  bool output_scale = false;    // one number multiplies the residual stream after the layer (Gemma 4)

  bool owns_cache(int layer) const { return attention.cache_layer == layer; }
};

struct ModelConfig {
  Family family = Family::kLlama;
  Container container = Container::kGguf;
  std::string architecture;     // as the file says: "gemma4", "Gemma3ForCausalLM"
  std::string name;             // the file's own name for the model; may be empty
  int64_t model_dim = 0;
  int64_t vocab = 0;            // rows of the embedding table
  int64_t context = 0;          // positions the model was made for
  double norm_eps = 1e-6;
  bool norm_plus_one = false;   // stored norm weights are around 0: the loader adds 1
  bool interleaved_rope = false;   // q and k rows come in the order of interleaved pairs: HostMatrix::interleaved_rows
  double embedding_scale = 1;
  double final_softcap = 0;     // 0: none
  bool untied_head = false;     // the file says that the head is a matrix of its own; false: it is one if it is there
  int64_t per_layer_dim = 0;    // width of per-layer embeddings; 0: none
  std::vector<int32_t> suppressed_tokens;   // never sampled
  std::vector<LayerSpec> layers;

  int n_layers() const { return static_cast<int>(layers.size()); }
};

// Throws Error(kUnsupported) for an architecture beryl does not run (it names it and those it does), Error(kBadInput)
// for a missing or absurd value (it names the key).
ModelConfig read_config(const Checkpoint& checkpoint);

// One reader a family; read_config chooses.
ModelConfig read_llama_config(const Checkpoint& checkpoint);
ModelConfig read_gemma3_config(const Checkpoint& checkpoint);
ModelConfig read_gemma4_config(const Checkpoint& checkpoint);

const char* family_name(Family family);

}  // namespace beryl
