// What: loading finds every tensor of a model, checks its shape and leaves none over; one that is missing, misshapen or
//       unknown is named. What is folded at loading is the same whatever the container and the form of the file.
// How:  the golden models, each with one tensor at a time taken out, reshaped or added; folders against GGUF, value by
//       value.
#include "model/weights.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "model/build_step.h"
#include "model/test_checkpoints.h"

namespace beryl {
namespace {

using test::EditedCheckpoint;
using test::expect_refused;

std::unique_ptr<ModelWeights> load(const Checkpoint& checkpoint) {
  return load_weights(checkpoint, read_config(checkpoint));
}

// [parts][stack · rows · cols]
std::vector<std::vector<float>> decoded(const WeightMatrix& matrix) {
  std::vector<std::vector<float>> parts;
  for (const HostMatrix& part : matrix.parts) {
    std::vector<float>& values = parts.emplace_back(static_cast<size_t>(part.stack * part.rows * part.cols));
    float* out = values.data();
    for (int64_t expert = 0; expert < part.stack; ++expert)
      for (int64_t row = 0; row < part.rows; ++row, out += part.cols) decode_row(part, expert, row, out);
  }
  return parts;
}

const WeightMatrix& matrix_of(const ModelWeights& weights, MatrixRef ref) {
  return weights.set.matrices.at(static_cast<size_t>(ref.index));
}
const std::vector<float>& values_of(const ModelWeights& weights, VectorRef ref) {
  return weights.set.vectors.at(static_cast<size_t>(ref.index)).values;
}

void expect_same_weights(const ModelWeights& a, const ModelWeights& b) {
  ASSERT_EQ(a.set.matrices.size(), b.set.matrices.size());
  for (size_t i = 0; i < a.set.matrices.size(); ++i) {
    EXPECT_EQ(a.set.matrices[i].name, b.set.matrices[i].name);
    EXPECT_TRUE(decoded(a.set.matrices[i]) == decoded(b.set.matrices[i])) << a.set.matrices[i].name;
  }
  ASSERT_EQ(a.set.vectors.size(), b.set.vectors.size());
  for (size_t i = 0; i < a.set.vectors.size(); ++i) {
    EXPECT_EQ(a.set.vectors[i].name, b.set.vectors[i].name);
    EXPECT_EQ(a.set.vectors[i].values, b.set.vectors[i].values) << a.set.vectors[i].name;
  }
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (size_t i = 0; i < a.layers.size(); ++i) EXPECT_EQ(a.layers[i].output_scale, b.layers[i].output_scale) << i;
  EXPECT_EQ(a.head.index == a.embedding.index, b.head.index == b.embedding.index);
}

std::vector<std::string> every_file() {
  std::vector<std::string> paths;
  for (const std::string& model : test::golden_models()) {
    paths.push_back(test::golden_folder(model));
    if (test::have_golden_gguf()) paths.push_back(test::golden_gguf(model));
  }
  return paths;
}

// What a file may lack: it then means another model.
bool is_optional(const std::string& path, const std::string& tensor) {
  return path == test::golden_gguf("llama") && (tensor == "output.weight" || tensor == "rope_freqs.weight");
}

// ---- missing, misshapen, unknown ----------------------------------------------------------------------------------

TEST(WeightsTest, EveryMissingTensorIsNamed) {
  for (const std::string& path : every_file()) {
    const EditedCheckpoint whole(path);
    ASSERT_GT(whole.tensors().size(), 20u);
    for (const TensorInfo& tensor : whole.tensors()) {
      SCOPED_TRACE(path + " without " + tensor.name);
      EditedCheckpoint checkpoint(path);
      checkpoint.drop(tensor.name);
      if (is_optional(path, tensor.name)) {
        EXPECT_NO_THROW(load(checkpoint));
      } else {
        expect_refused([&] { load(checkpoint); }, ErrorCode::kBadInput,
                       {path, fmt::format("'{}'", tensor.name), "is missing"});
      }
    }
  }
}

TEST(WeightsTest, EveryMisshapenTensorIsNamedWithBothShapes) {
  for (const std::string& path : every_file()) {
    const EditedCheckpoint whole(path);
    for (const TensorInfo& tensor : whole.tensors()) {
      const bool is_embedding = tensor.name == "token_embd.weight" || tensor.name.ends_with("embed_tokens.weight");
      std::vector<std::vector<int64_t>> wrong_shapes;
      for (size_t dim = is_embedding ? 1 : 0; dim < tensor.shape.size(); ++dim) {   // the vocabulary may be any
        wrong_shapes.push_back(tensor.shape);
        ++wrong_shapes.back()[dim];
      }
      if (tensor.shape.size() == 1) wrong_shapes.push_back({1, tensor.shape[0]});
      if (tensor.shape.size() == 2 && tensor.shape[0] != tensor.shape[1])
        wrong_shapes.push_back({tensor.shape[1], tensor.shape[0]});
      for (const std::vector<int64_t>& shape : wrong_shapes) {
        SCOPED_TRACE(fmt::format("{}: {} as [{}]", path, tensor.name, fmt::join(shape, ", ")));
        EditedCheckpoint checkpoint(path);
        checkpoint.drop(tensor.name).add(tensor.name, shape);
        const std::string expected = is_embedding ? fmt::format("[vocabulary, {}]", tensor.shape[1])
                                                  : fmt::format("[{}]", fmt::join(tensor.shape, ", "));
        expect_refused([&] { load(checkpoint); }, ErrorCode::kBadInput,
                       {path, fmt::format("'{}'", tensor.name), fmt::format("[{}]", fmt::join(shape, ", ")), expected});
      }
    }
  }
}

TEST(WeightsTest, ATensorThatNothingUsesIsNamed) {
  for (const std::string& path : every_file()) {
    const bool gguf = path.ends_with(".gguf");
    const std::string no_rope = gguf && path.find("gemma3") == std::string::npos ? "extra" : "rope_freqs.weight";
    for (const std::string& name :
         {std::string("model.layers.0.self_attn.q_proj.bias"), std::string("blk.0.attn_q.bias"),
          std::string(gguf ? "blk.6.attn_norm.weight" : "model.layers.6.input_layernorm.weight"), no_rope}) {
      SCOPED_TRACE(path + " with " + name);
      EditedCheckpoint checkpoint(path);
      checkpoint.add(name, {8});
      expect_refused([&] { load(checkpoint); }, ErrorCode::kBadInput,
                     {path, fmt::format("'{}'", name), "used by nothing"});
      checkpoint.add("another", {1});
      expect_refused([&] { load(checkpoint); }, ErrorCode::kBadInput, {fmt::format("'{}'", name), "1 others"});
    }
  }
}

TEST(WeightsTest, PartsThatSeeAndHearAreListedAsIgnored) {
  EditedCheckpoint checkpoint(test::golden_folder("gemma4_dense"));
  const std::vector<std::string> names = {"model.vision_tower.encoder.layers.0.weight",
                                          "model.embed_vision.embedding.weight", "model.audio_tower.conv.weight",
                                          "model.multi_modal_projector.weight",
                                          "model.layers.0.self_attn.rotary_emb.inv_freq"};
  for (const std::string& name : names) checkpoint.add(name, {3, 5});
  EXPECT_EQ(load(checkpoint)->ignored, names);
  EXPECT_TRUE(load(EditedCheckpoint(test::golden_folder("gemma4_dense")))->ignored.empty());
}

TEST(WeightsTest, WhatASharingLayerNeverUsesIsIgnored) {
  EditedCheckpoint checkpoint(test::golden_folder("gemma4_e2b"));
  const std::vector<std::string> names = {"model.layers.3.self_attn.k_proj.weight",
                                          "model.layers.3.self_attn.v_proj.weight",
                                          "model.layers.3.self_attn.k_norm.weight"};
  for (const std::string& name : names) checkpoint.add(name, {16, 64});
  const std::unique_ptr<ModelWeights> weights = load(checkpoint);
  EXPECT_EQ(weights->ignored, names);
  expect_same_weights(*weights, *load(EditedCheckpoint(test::golden_folder("gemma4_e2b"))));
}

TEST(WeightsTest, VOnSomeGlobalLayersOnlyIsADamagedFile) {
  BERYL_SKIP_WITHOUT_GGUF();
  EditedCheckpoint checkpoint(test::golden_gguf("gemma4_dense"));
  checkpoint.add("blk.2.attn_v.weight", {32, 64});
  expect_refused([&] { load(checkpoint); }, ErrorCode::kBadInput, {"'blk.5.attn_v.weight'", "is missing"});
  checkpoint.add("blk.5.attn_v.weight", {32, 64});
  EXPECT_FALSE(read_config(checkpoint).layers[2].attention.v_from_k);
  EXPECT_NO_THROW(load(checkpoint));
}

TEST(WeightsTest, NormsThatAreNotFiniteAreNamed) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    EditedCheckpoint checkpoint(test::golden_folder("llama"));
    const std::string name = "model.layers.2.input_layernorm.weight";
    std::vector<float> values = checkpoint.values(name);
    values[7] = bad;
    checkpoint.drop(name).add(name, {64}, values);
    expect_refused([&] { load(checkpoint); }, ErrorCode::kBadInput,
                   {fmt::format("'{}'", name), fmt::format("holds {}", bad)});
  }
}

// ---- what loading makes of the tensors ------------------------------------------------------------------------------

// The order of llama's rows in GGUF, Gemma 3's 1 + w, the names of every norm: a folder has them otherwise.
TEST(WeightsTest, FolderAndGgufGiveTheSameWeights) {
  BERYL_SKIP_WITHOUT_GGUF();
  for (const std::string& model : test::golden_models())
    for (const char* type : {"f32", "bf16"}) {
      SCOPED_TRACE(model + " " + type);
      const EditedCheckpoint folder(test::golden_folder(model)), gguf(test::golden_gguf(model, type));
      expect_same_weights(*load(folder), *load(gguf));
    }
}

TEST(WeightsTest, LlamaRowsOfAGgufFileLieInAnotherOrder) {
  BERYL_SKIP_WITHOUT_GGUF();
  const EditedCheckpoint folder(test::golden_folder("llama")), gguf(test::golden_gguf("llama"));
  const std::vector<float> plain = folder.values("model.layers.1.self_attn.q_proj.weight"),
                           paired = gguf.values("blk.1.attn_q.weight");
  EXPECT_NE(plain, paired);
  // Row 2b + a of a head of 16 is row 8a + b there.
  const auto row = [](const std::vector<float>& values, size_t index) {
    return std::vector<float>(values.begin() + static_cast<int64_t>(index) * 64,
                              values.begin() + static_cast<int64_t>(index + 1) * 64);
  };
  EXPECT_EQ(row(paired, 16 + 2 * 3 + 1), row(plain, 16 + 8 + 3));
  const std::unique_ptr<ModelWeights> weights = load(gguf);
  EXPECT_EQ(decoded(matrix_of(*weights, weights->layers[1].qkv))[0], plain);
}

TEST(WeightsTest, GroupedRowsOfAnInterleavedGgufKeepTheirScales) {
  // Two planes, codes and scales: whole rows move in both. A model of one layer in FP4 g128 is made for it.
  constexpr int64_t kRows = 8, kCols = 128, kHeads = 2;
  class Source final : public TensorSource {
   public:
    bool has(Role, int) const override { return false; }
    HostMatrix matrix(Role role, int, int64_t rows, int64_t cols, int64_t) override {
      HostMatrix matrix;
      matrix.rows = rows;
      matrix.cols = cols;
      matrix.format = role == Role::kQ ? Format::kFp4G128 : Format::kF32;
      const auto code_bytes = static_cast<size_t>(rows * row_bytes(matrix.format, cols));
      const auto scale_bytes = static_cast<size_t>(rows * row_scale_bytes(matrix.format, cols));
      auto storage = std::make_shared<std::vector<std::byte>>(code_bytes + scale_bytes);
      if (role == Role::kQ)
        for (int64_t row = 0; row < rows;
             ++row) {   // every weight of row r is 1 (code 2), its scale 1 + r / 128 in bf16
          std::fill_n(storage->begin() + row * 64, 64, std::byte{0x22});
          const auto scale = static_cast<uint16_t>(0x3f80 + row);
          std::memcpy(storage->data() + code_bytes + static_cast<size_t>(row) * 2, &scale, 2);
        }
      matrix.codes = storage->data();
      if (scale_bytes > 0) matrix.scales = storage->data() + code_bytes;
      matrix.storage = std::move(storage);
      return matrix;
    }
    std::vector<float> values(Role, int, int64_t n) override {
      return std::vector<float>(static_cast<size_t>(n), 1.0f);
    }
    void ignore(Role, int) override {}
  };
  ModelConfig config;
  config.interleaved_rope = true;
  config.model_dim = kCols;
  config.vocab = 2;
  LayerSpec layer;
  layer.attention.n_heads = layer.attention.n_kv_heads = kHeads;
  layer.attention.head_dim = kRows / kHeads;
  layer.ffn.dim = 4;
  config.layers = {layer};
  Source source;
  const std::unique_ptr<ModelWeights> weights = collect_weights(source, config);
  const std::vector<float> q = decoded(matrix_of(*weights, weights->layers[0].qkv))[0];
  const int order[kRows] = {0, 2, 1, 3, 4, 6, 5, 7};   // which row of the file lies where
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t col = 0; col < kCols; ++col)
      EXPECT_EQ(q[static_cast<size_t>(row * kCols + col)], 1 + static_cast<float>(order[row]) / 128) << row;
}

TEST(WeightsTest, GemmaNormsAreWhatTheFormulaMultipliesBy) {
  const EditedCheckpoint folder(test::golden_folder("gemma3"));
  const std::unique_ptr<ModelWeights> gemma3 = load(folder);
  const std::vector<float> stored = folder.values("model.layers.3.self_attn.k_norm.weight");
  for (size_t i = 0; i < stored.size(); ++i) EXPECT_EQ(values_of(*gemma3, gemma3->layers[3].k_norm)[i], 1 + stored[i]);
  const EditedCheckpoint other(test::golden_folder("gemma4_dense"));
  const std::unique_ptr<ModelWeights> gemma4 = load(other);
  EXPECT_EQ(values_of(*gemma4, gemma4->layers[3].k_norm), other.values("model.layers.3.self_attn.k_norm.weight"));
}

TEST(WeightsTest, ConstantFactorsAreFolded) {
  const EditedCheckpoint moe(test::golden_folder("gemma4_moe"));
  const std::unique_ptr<ModelWeights> experts = load(moe);
  const std::vector<float> scale = moe.values("model.layers.1.router.scale");
  for (size_t i = 0; i < scale.size(); ++i)
    EXPECT_FLOAT_EQ(values_of(*experts, experts->layers[1].router_norm)[i], scale[i] / std::sqrt(64.0f));
  EXPECT_EQ(values_of(*experts, experts->layers[1].expert_scale), moe.values("model.layers.1.router.per_expert_scale"));
  EXPECT_EQ(experts->layers[1].output_scale, moe.values("model.layers.1.layer_scalar").front());
  EXPECT_NE(experts->layers[1].output_scale, 1);

  const EditedCheckpoint e2b(test::golden_folder("gemma4_e2b"));
  const std::unique_ptr<ModelWeights> per_layer = load(e2b);
  const std::vector<float> projection = decoded(matrix_of(*per_layer, per_layer->per_layer_model_projection))[0];
  const std::vector<float> raw = e2b.values("model.per_layer_model_projection.weight");
  for (size_t i = 0; i < raw.size(); ++i) EXPECT_FLOAT_EQ(projection[i], raw[i] / 8);
}

TEST(WeightsTest, AFusedQkvIsItsThreeParts) {
  BERYL_SKIP_WITHOUT_GGUF();
  for (const char* model : {"llama", "gemma3", "gemma4_e2b"}) {
    SCOPED_TRACE(model);
    const EditedCheckpoint separate(test::golden_gguf(model));
    EditedCheckpoint fused(test::golden_gguf(model));
    const ModelConfig config = read_config(separate);
    for (int i = 0; i < config.n_layers(); ++i) {
      if (!config.layers[static_cast<size_t>(i)].owns_cache(i)) continue;
      std::vector<float> values;
      int64_t rows = 0;
      for (const char* part : {"q", "k", "v"}) {
        const std::string name = fmt::format("blk.{}.attn_{}.weight", i, part);
        const std::vector<float> more = separate.values(name);
        values.insert(values.end(), more.begin(), more.end());
        rows += separate.shape(name)[0];
        fused.drop(name);
      }
      fused.add(fmt::format("blk.{}.attn_qkv.weight", i), {rows, config.model_dim}, std::move(values));
    }
    expect_same_weights(*load(separate), *load(fused));
    EditedCheckpoint both(test::golden_gguf(model));
    both.add("blk.0.attn_qkv.weight", {128, config.model_dim});
    expect_refused([&] { load(both); }, ErrorCode::kBadInput, {"blk.0.attn_"});
  }
}

TEST(WeightsTest, SplitExpertsAreTheFusedOnes) {
  BERYL_SKIP_WITHOUT_GGUF();
  const EditedCheckpoint fused(test::golden_gguf("gemma4_moe"));
  EditedCheckpoint split(test::golden_gguf("gemma4_moe"));
  for (int i = 0; i < 2; ++i) {
    const std::string prefix = fmt::format("blk.{}.ffn_", i);
    const std::vector<float> values = fused.values(prefix + "gate_up_exps.weight");   // [8][2 · 32][64]
    std::vector<float> halves[2];
    for (size_t block = 0; block < 16; ++block)
      halves[block % 2].insert(halves[block % 2].end(), values.begin() + static_cast<int64_t>(block) * 32 * 64,
                               values.begin() + static_cast<int64_t>(block + 1) * 32 * 64);
    split.drop(prefix + "gate_up_exps.weight").add(prefix + "gate_exps.weight", {8, 32, 64}, halves[0]);
    split.add(prefix + "up_exps.weight", {8, 32, 64}, halves[1]);
  }
  expect_same_weights(*load(fused), *load(split));
  split.drop("blk.1.ffn_up_exps.weight");
  expect_refused([&] { load(split); }, ErrorCode::kBadInput, {"'blk.1.ffn_up_exps.weight'", "is missing"});
}

TEST(WeightsTest, TheHeadIsItsOwnMatrixOnlyWhereThereIsOne) {
  const std::unique_ptr<ModelWeights> llama = load(EditedCheckpoint(test::golden_folder("llama")));
  EXPECT_NE(llama->head.index, llama->embedding.index);
  EditedCheckpoint gemma(test::golden_folder("gemma4_dense"));
  const std::unique_ptr<ModelWeights> tied = load(gemma);
  EXPECT_EQ(tied->head.index, tied->embedding.index);
  gemma.add("lm_head.weight", {256, 64});
  const std::unique_ptr<ModelWeights> untied = load(gemma);
  EXPECT_NE(untied->head.index, untied->embedding.index);
  EXPECT_EQ(matrix_of(*untied, untied->head).parts.front().name, "lm_head.weight");
  if (!test::have_golden_gguf()) return;
  EditedCheckpoint gguf(test::golden_gguf("llama"));
  EXPECT_NE(load(gguf)->head.index, load(gguf)->embedding.index);
  gguf.drop("output.weight");   // in GGUF its absence is how a tied head is told
  EXPECT_EQ(load(gguf)->head.index, load(gguf)->embedding.index);
}

TEST(WeightsTest, EveryPrefixOfAFolderIsKnown) {
  for (const char* prefix : {"model.language_model.", "language_model.model."})
    for (const char* model : {"gemma3", "llama"}) {
      SCOPED_TRACE(std::string(prefix) + " " + model);
      EditedCheckpoint checkpoint(test::golden_folder(model));
      checkpoint.rename([&](const std::string& name) {
        if (name.starts_with("model.")) return fmt::format("{}{}", prefix, name.substr(6));
        return fmt::format("{}{}", prefix == std::string("language_model.model.") ? "language_model." : "", name);
      });
      expect_same_weights(*load(checkpoint), *load(EditedCheckpoint(test::golden_folder(model))));
    }
}

}  // namespace
}  // namespace beryl
