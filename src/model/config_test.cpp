// What: a config says what the file says, in either container and in every form that a family's files have; defaults
//       are the specification's; what beryl cannot run, or what is absurd, is refused by file, key and value.
// How:  golden folders against GGUF files of the same models; small files made with the metadata of each test.
#include "model/config.h"

#include <cmath>
#include <limits>
#include <numbers>

#include <gtest/gtest.h>

#include "model/test_checkpoints.h"

namespace beryl {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using test::TempFolder;
using test::expect_refused;

ModelConfig read_path(const std::string& path) { return read_config(*open_checkpoint(path)); }

json golden_json(const std::string& model) {
  std::ifstream stream(test::golden_folder(model) + "/config.json");
  return json::parse(stream);
}

// Reads config.json's content as a model; width: of the embedding table.
ModelConfig read_json(const json& config, int64_t width = 64) {
  const TempFolder folder;
  return read_config(*test::folder_with(folder, config, width));
}

ModelConfig read_gguf(const ordered_json& fields, int64_t width = 64, const std::vector<float>& divisors = {}) {
  const TempFolder folder;
  return read_config(*test::gguf_with(folder, fields, width, divisors));
}

ordered_json llama_fields() {
  return {{"general.architecture", "llama"}, {"llama.block_count", 2}, {"llama.context_length", 512},
          {"llama.embedding_length", 64}, {"llama.feed_forward_length", 96}, {"llama.attention.head_count", 4},
          {"llama.attention.head_count_kv", 2}, {"llama.attention.layer_norm_rms_epsilon", 1e-5},
          {"llama.rope.freq_base", 10000.0}};
}

ordered_json gemma3_fields() {
  return {{"general.architecture", "gemma3"}, {"gemma3.block_count", 7}, {"gemma3.context_length", 512},
          {"gemma3.embedding_length", 64}, {"gemma3.feed_forward_length", 96}, {"gemma3.attention.head_count", 4},
          {"gemma3.attention.head_count_kv", 2}, {"gemma3.attention.key_length", 16},
          {"gemma3.attention.value_length", 16}, {"gemma3.attention.sliding_window", 8},
          {"gemma3.attention.layer_norm_rms_epsilon", 1e-6}, {"gemma3.rope.freq_base", 1e6}};
}

ordered_json gemma4_fields() {
  return {{"general.architecture", "gemma4"}, {"gemma4.block_count", 3}, {"gemma4.context_length", 512},
          {"gemma4.embedding_length", 64}, {"gemma4.feed_forward_length", 96}, {"gemma4.attention.head_count", 4},
          {"gemma4.attention.head_count_kv", {2, 2, 1}}, {"gemma4.attention.key_length", 32},
          {"gemma4.attention.value_length", 32}, {"gemma4.attention.key_length_swa", 16},
          {"gemma4.attention.value_length_swa", 16}, {"gemma4.attention.sliding_window", 8},
          {"gemma4.attention.sliding_window_pattern", {true, true, false}},
          {"gemma4.attention.layer_norm_rms_epsilon", 1e-6}, {"gemma4.rope.freq_base", 1e6},
          {"gemma4.rope.freq_base_swa", 1e4}, {"gemma4.final_logit_softcapping", 30.0}};
}

const std::vector<float>& gemma4_divisors() {
  static const std::vector<float> divisors = {1, 1, 1, 1, 1e30f, 1e30f, 1e30f, 1e30f, 1e30f, 1e30f, 1e30f, 1e30f,
                                              1e30f, 1e30f, 1e30f, 1e30f};
  return divisors;
}

ModelConfig read_fields(const ordered_json& fields) {
  const bool gemma4 = fields.value("general.architecture", "") == "gemma4";
  return read_gguf(fields, 64, gemma4 ? gemma4_divisors() : std::vector<float>{});
}

void expect_same_layers(const ModelConfig& a, const ModelConfig& b) {
  ASSERT_EQ(a.n_layers(), b.n_layers());
  for (int i = 0; i < a.n_layers(); ++i) {
    SCOPED_TRACE(fmt::format("layer {}", i));
    const LayerSpec &x = a.layers[static_cast<size_t>(i)], &y = b.layers[static_cast<size_t>(i)];
    EXPECT_EQ(x.attention.n_heads, y.attention.n_heads);
    EXPECT_EQ(x.attention.n_kv_heads, y.attention.n_kv_heads);
    ASSERT_EQ(x.attention.head_dim, y.attention.head_dim);
    EXPECT_EQ(x.attention.window, y.attention.window);
    EXPECT_DOUBLE_EQ(x.attention.scale, y.attention.scale);
    EXPECT_EQ(x.attention.softcap, y.attention.softcap);
    EXPECT_EQ(x.attention.qk_norm, y.attention.qk_norm);
    EXPECT_EQ(x.attention.v_norm, y.attention.v_norm);
    EXPECT_EQ(x.attention.v_from_k, y.attention.v_from_k);
    EXPECT_EQ(x.attention.cache_layer, y.attention.cache_layer);
    EXPECT_EQ(x.ffn.dim, y.ffn.dim);
    EXPECT_EQ(x.ffn.activation, y.ffn.activation);
    EXPECT_EQ(x.ffn.n_experts, y.ffn.n_experts);
    EXPECT_EQ(x.ffn.top_k, y.ffn.top_k);
    EXPECT_EQ(x.ffn.expert_dim, y.ffn.expert_dim);
    EXPECT_EQ(x.post_norms, y.post_norms);
    EXPECT_EQ(x.output_scale, y.output_scale);
    const std::vector<double> f = rope_frequencies(x.attention.rope, x.attention.head_dim);
    const std::vector<double> g = rope_frequencies(y.attention.rope, y.attention.head_dim);
    for (size_t j = 0; j < f.size(); ++j) EXPECT_NEAR(f[j], g[j], 1e-7 * std::abs(f[j])) << "pair " << j;
  }
}

void expect_same_model(const ModelConfig& a, const ModelConfig& b) {
  EXPECT_EQ(a.family, b.family);
  EXPECT_EQ(a.model_dim, b.model_dim);
  EXPECT_EQ(a.vocab, b.vocab);
  EXPECT_EQ(a.context, b.context);
  EXPECT_NEAR(a.norm_eps, b.norm_eps, 1e-7 * a.norm_eps);   // GGUF has it in f32
  EXPECT_EQ(a.embedding_scale, b.embedding_scale);
  EXPECT_EQ(a.final_softcap, b.final_softcap);
  EXPECT_EQ(a.per_layer_dim, b.per_layer_dim);
  EXPECT_EQ(a.suppressed_tokens, b.suppressed_tokens);
  expect_same_layers(a, b);
}

// ---- what files say ---------------------------------------------------------------------------------------------

TEST(ConfigTest, FolderAndGgufOfAModelAreTheSame) {
  BERYL_SKIP_WITHOUT_GGUF();
  for (const std::string& model : test::golden_models()) {
    SCOPED_TRACE(model);
    const ModelConfig folder = read_path(test::golden_folder(model));
    EXPECT_EQ(folder.norm_plus_one, model == "gemma3");
    EXPECT_FALSE(folder.interleaved_rope);
    EXPECT_EQ(folder.untied_head, model == "llama");
    for (const char* type : {"f32", "bf16"}) {
      const ModelConfig gguf = read_path(test::golden_gguf(model, type));
      expect_same_model(folder, gguf);
      EXPECT_FALSE(gguf.norm_plus_one);
      EXPECT_EQ(gguf.interleaved_rope, model == "llama");
    }
  }
}

TEST(ConfigTest, GoldenGemma4E2bIsAsItsReadmeSays) {
  const ModelConfig config = read_path(test::golden_folder("gemma4_e2b"));
  const std::vector<int> sources = {0, 1, 2, 1, 1, 2}, heads = {16, 16, 32, 16, 16, 32}, windows = {8, 8, 0, 8, 8, 0};
  const std::vector<int64_t> ffn = {64, 64, 64, 128, 128, 128};
  for (size_t i = 0; i < 6; ++i) {
    const LayerSpec& layer = config.layers[i];
    EXPECT_EQ(layer.attention.cache_layer, sources[i]) << i;
    EXPECT_EQ(layer.attention.head_dim, heads[i]) << i;
    EXPECT_EQ(layer.attention.window, windows[i]) << i;
    EXPECT_EQ(layer.ffn.dim, ffn[i]) << i;
  }
  EXPECT_EQ(config.per_layer_dim, 16);
  EXPECT_EQ(config.embedding_scale, 8);
  EXPECT_EQ(config.final_softcap, 30);
}

TEST(ConfigTest, BothFormsOfGemma4ConfigAreTheSame) {
  for (const char* model : {"gemma4_dense", "gemma4_e2b"}) {
    SCOPED_TRACE(model);
    const json recent = golden_json(model);
    ASSERT_TRUE(recent.contains("per_layer_config"));
    json published = recent;
    published.erase("per_layer_config");
    published["global_head_dim"] = 32;
    if (recent.at("attention_k_eq_v")) published["num_global_key_value_heads"] = 1;
    expect_same_model(read_json(recent), read_json(published));
    // The text's keys lie one level down in multimodal checkpoints.
    const json nested = {{"model_type", "gemma4"}, {"text_config", recent}, {"vision_config", {{"hidden_size", 7}}}};
    expect_same_model(read_json(recent), read_json(nested));
  }
}

TEST(ConfigTest, Gemma4GlobalHeadsHave512ValuesWhereNeitherFormSaysSo) {
  json config = golden_json("gemma4_dense");
  config.erase("per_layer_config");
  const ModelConfig silent = read_json(config);
  EXPECT_EQ(silent.layers[2].attention.head_dim, 512);
  EXPECT_EQ(silent.layers[2].attention.n_kv_heads, 2);
  EXPECT_EQ(silent.layers[1].attention.head_dim, 16);
  // In the recent form a layer that is not listed has the flat values.
  config["per_layer_config"] = {{"5", {{"head_dim", 32}, {"num_key_value_heads", 1}}}};
  const ModelConfig partly = read_json(config);
  EXPECT_EQ(partly.layers[2].attention.head_dim, 16);
  EXPECT_EQ(partly.layers[5].attention.head_dim, 32);
  EXPECT_EQ(partly.layers[5].attention.n_kv_heads, 1);
}

TEST(ConfigTest, Gemma4GlobalKvHeadsCountOnlyWithKEqualV) {
  json config = golden_json("gemma4_dense_hd512");
  EXPECT_EQ(read_json(config, 32).layers[1].attention.n_kv_heads, 1);
  EXPECT_TRUE(read_json(config, 32).layers[1].attention.v_from_k);
  config["attention_k_eq_v"] = false;
  EXPECT_EQ(read_json(config, 32).layers[1].attention.n_kv_heads, 2);
  EXPECT_FALSE(read_json(config, 32).layers[1].attention.v_from_k);
}

TEST(ConfigTest, Gemma3GgufHasTheSpecificationsDefaults) {
  const ModelConfig config = read_gguf(gemma3_fields());
  for (int i = 0; i < config.n_layers(); ++i) {
    const AttentionSpec& attention = config.layers[static_cast<size_t>(i)].attention;
    const bool slides = i != 5;   // every sixth is global, so the seventh slides
    EXPECT_EQ(attention.window, slides ? 8 : 0) << i;
    EXPECT_EQ(attention.rope.base, slides ? 1e4 : 1e6) << i;
    EXPECT_EQ(attention.rope.scaling, RopeSpec::Scaling::kNone) << i;
    EXPECT_DOUBLE_EQ(attention.scale, 0.25) << i;
  }
  EXPECT_EQ(config.final_softcap, 0);
  EXPECT_FALSE(config.norm_plus_one);
}

TEST(ConfigTest, Gemma3GgufPatternIsAPeriodOrAList) {
  ordered_json fields = gemma3_fields();
  fields["gemma3.attention.sliding_window_pattern"] = 3;
  const std::vector<bool> by_three = {true, true, false, true, true, false, true};
  const std::vector<bool> listed = {false, true, true, true, false, true, false};
  const auto sliding = [](const ModelConfig& config) {
    std::vector<bool> slides;
    for (const LayerSpec& layer : config.layers) slides.push_back(layer.attention.window > 0);
    return slides;
  };
  EXPECT_EQ(sliding(read_gguf(fields)), by_three);
  fields["gemma3.attention.sliding_window_pattern"] = listed;
  EXPECT_EQ(sliding(read_gguf(fields)), listed);
}

TEST(ConfigTest, Gemma3LinearScalingIsForGlobalLayersOnly) {
  ordered_json fields = gemma3_fields();
  fields["gemma3.rope.scaling.type"] = "linear";
  fields["gemma3.rope.scaling.factor"] = 8.0;
  const ModelConfig config = read_gguf(fields);
  const auto slowest = [&](size_t layer) { return rope_frequencies(config.layers[layer].attention.rope, 16).back(); };
  EXPECT_DOUBLE_EQ(slowest(5), std::pow(1e6, -14.0 / 16) / 8);
  EXPECT_DOUBLE_EQ(slowest(0), std::pow(1e4, -14.0 / 16));
}

TEST(ConfigTest, Gemma3Of62LayersIsScaledByWidthOverHeads) {
  ordered_json fields = gemma3_fields();
  fields["gemma3.embedding_length"] = 5376;
  fields["gemma3.attention.head_count"] = 32;
  fields["gemma3.attention.head_count_kv"] = 16;
  fields["gemma3.attention.key_length"] = fields["gemma3.attention.value_length"] = 128;
  fields["gemma3.block_count"] = 62;
  const ModelConfig config = read_gguf(fields, 5376);
  EXPECT_DOUBLE_EQ(config.layers[0].attention.scale, 1 / std::sqrt(168.0));
  EXPECT_GT(config.layers[61].attention.window, 0);
  fields["gemma3.block_count"] = 48;
  EXPECT_DOUBLE_EQ(read_gguf(fields, 5376).layers[0].attention.scale, 1 / std::sqrt(128.0));
}

TEST(ConfigTest, Gemma3FolderMayLeaveOutWhatHasDefaults) {
  const ModelConfig config = read_json({{"model_type", "gemma3_text"}, {"hidden_size", 2560}, {"num_hidden_layers", 34},
                                        {"intermediate_size", 10240}, {"sliding_window", 1024},
                                        {"rope_scaling", {{"type", "linear"}, {"factor", 8.0}}}}, 2560);
  EXPECT_TRUE(config.norm_plus_one);
  EXPECT_FALSE(config.untied_head);
  EXPECT_EQ(config.context, 131072);
  EXPECT_EQ(config.norm_eps, 1e-6);
  const AttentionSpec &local = config.layers[33].attention, &global = config.layers[5].attention;
  EXPECT_EQ(global.n_heads, 8);
  EXPECT_EQ(global.n_kv_heads, 4);
  EXPECT_EQ(global.head_dim, 256);
  EXPECT_DOUBLE_EQ(global.scale, 1.0 / 16);
  EXPECT_EQ(global.window, 0);
  EXPECT_EQ(local.window, 1024);
  EXPECT_EQ(local.rope, (RopeSpec{.base = 1e4}));
  EXPECT_EQ(global.rope, (RopeSpec{.base = 1e6, .scaling = RopeSpec::Scaling::kLinear, .factor = 8}));
}

TEST(ConfigTest, LlamaHasItsDefaults) {
  ordered_json fields = llama_fields();
  fields.erase("llama.attention.head_count_kv");
  fields.erase("llama.rope.freq_base");
  const ModelConfig config = read_gguf(fields);
  EXPECT_EQ(config.layers[1].attention.n_kv_heads, 4);
  EXPECT_EQ(config.layers[1].attention.head_dim, 16);
  EXPECT_EQ(config.layers[1].attention.rope, RopeSpec{});
  EXPECT_DOUBLE_EQ(config.layers[1].attention.scale, 0.25);
  EXPECT_EQ(config.embedding_scale, 1);
  EXPECT_EQ(config.layers[1].ffn.dim, 96);
  EXPECT_EQ(config.layers[1].ffn.activation, Activation::kSilu);
}

TEST(ConfigTest, LlamaFoldersOldAndNewRopeKeysAreTheSame) {
  const json recent = golden_json("llama");
  json old = recent;
  old["rope_scaling"] = recent["rope_parameters"];
  old["rope_scaling"].erase("rope_theta");
  old["rope_theta"] = recent["rope_parameters"]["rope_theta"];
  old.erase("rope_parameters");
  expect_same_model(read_json(recent), read_json(old));
  old["rope_scaling"]["type"] = old["rope_scaling"]["rope_type"];
  old["rope_scaling"].erase("rope_type");
  expect_same_model(read_json(recent), read_json(old));
}

TEST(ConfigTest, SuppressedTokensComeFromBesideTheWeights) {
  const TempFolder folder;
  folder.write("generation_config.json", R"({"suppress_tokens": [1, 0]})");
  EXPECT_EQ(read_config(*test::folder_with(folder, golden_json("llama"), 64)).suppressed_tokens,
            (std::vector<int32_t>{1, 0}));
  folder.write("generation_config.json", R"({"suppress_tokens": [2]})");
  expect_refused([&] { read_config(*test::folder_with(folder, golden_json("llama"), 64)); }, ErrorCode::kBadInput,
                 {folder.path(), "suppress_tokens", "holds 2", "has 2 tokens"});
  ordered_json fields = llama_fields();
  fields["tokenizer.ggml.suppress_tokens"] = {1};
  EXPECT_EQ(read_gguf(fields).suppressed_tokens, (std::vector<int32_t>{1}));
}

// ---- rope -------------------------------------------------------------------------------------------------------

TEST(ConfigTest, Llama3ScalingHasItsThreeBands) {
  RopeSpec golden = read_path(test::golden_folder("llama")).layers[0].attention.rope;
  RopeSpec llama31 = {.base = 500000, .scaling = RopeSpec::Scaling::kLlama3, .factor = 8};
  for (const auto& [rope, head_dim] : {std::pair{golden, 16}, std::pair{llama31, 128}}) {
    const std::vector<double> scaled = rope_frequencies(rope, head_dim);
    int n_short = 0, n_long = 0, n_between = 0;
    for (int j = 0; j < head_dim / 2; ++j) {
      const double f = std::pow(rope.base, -2.0 * j / head_dim), wavelength = 2 * std::numbers::pi / f;
      double expected = 0;
      if (wavelength < rope.original_context / rope.high_frequency_factor) {
        expected = f;
        ++n_short;
      } else if (wavelength > rope.original_context / rope.low_frequency_factor) {
        expected = f / rope.factor;
        ++n_long;
      } else {
        const double t = (rope.original_context / wavelength - rope.low_frequency_factor) /
                         (rope.high_frequency_factor - rope.low_frequency_factor);
        expected = (1 - t) * f / rope.factor + t * f;
        ++n_between;
      }
      EXPECT_NEAR(scaled[static_cast<size_t>(j)], expected, 1e-14 * expected) << "pair " << j << " of " << head_dim / 2;
    }
    EXPECT_GT(n_short, 0);
    EXPECT_GT(n_between, 0);
    EXPECT_GT(n_long, 0);
  }
}

TEST(ConfigTest, ProportionalRopeTurnsTheFirstPairsOfTheWholeHead) {
  const std::vector<double> f = rope_frequencies(
      {.base = 1e6, .scaling = RopeSpec::Scaling::kProportional, .rotated_share = 0.25}, 512);
  EXPECT_EQ(f[0], 1);
  EXPECT_NEAR(f[63], 0.0334, 5e-5);   // the exponent is over the whole head
  for (size_t j = 64; j < 256; ++j) EXPECT_EQ(f[j], 0) << j;
}

TEST(ConfigTest, DivisorsDivideAndHugeOnesStop) {
  const std::vector<double> f = rope_frequencies(
      {.base = 100, .scaling = RopeSpec::Scaling::kDivisors, .divisors = {1, 2, 1e30f, 4}}, 8);
  EXPECT_EQ(f[0], 1);
  EXPECT_DOUBLE_EQ(f[1], std::pow(100, -0.25) / 2);
  EXPECT_EQ(f[2], 0);
  EXPECT_DOUBLE_EQ(f[3], std::pow(100, -0.75) / 4);
}

// ---- what is refused --------------------------------------------------------------------------------------------

TEST(ConfigTest, UnknownArchitecturesAreRefusedWithTheKnownOnes) {
  for (const char* name : {"gemma3n", "qwen3", "gemma-embedding", "two\nlines"}) {
    ordered_json fields = llama_fields();
    fields["general.architecture"] = name;
    const std::string shown = name == std::string("two\nlines") ? "two" : name;
    expect_refused([&] { read_gguf(fields); }, ErrorCode::kUnsupported,
                   {"model.gguf", shown, "llama, gemma3 and gemma4"});
    json config = golden_json("llama");
    config["model_type"] = name;
    expect_refused([&] { read_json(config); }, ErrorCode::kUnsupported,
                   {"beryl-test", shown, "llama, gemma3 and gemma4"});
  }
  json config = golden_json("gemma3");
  config.erase("model_type");
  expect_refused([&] { read_json(config); }, ErrorCode::kBadInput, {"model_type"});
}

struct Refusal {
  const char* model;    // a golden model's config.json, or the family of the GGUF fields ("gguf llama")
  const char* key;      // as a JSON pointer in config.json, the key in GGUF
  json value;           // null: the key is taken out
  ErrorCode code;
  std::vector<std::string> fragments;   // besides the file and the key's last part
};

TEST(ConfigTest, WhatBerylDoesNotRunIsRefusedByKeyAndValue) {
  constexpr ErrorCode kBad = ErrorCode::kBadInput, kNot = ErrorCode::kUnsupported;
  const json two_types = {"sliding_attention", "full_attention"};
  const json odd_types = {"sliding_attention", "full_attention", "mamba",
                          "full_attention",    "full_attention", "full_attention"};
  const Refusal refusals[] = {
      {"gguf llama", "llama.expert_count", 8, kNot, {"experts"}},
      {"gguf llama", "llama.rope.scaling.type", "yarn", kNot, {"'yarn'", "linear"}},
      {"gguf llama", "llama.attention.head_count_kv", 3, kBad, {"is 3", "4 heads"}},
      {"gguf llama", "llama.attention.head_count", 6, kBad, {"is 6", "64"}},
      {"gguf llama", "llama.attention.value_length", 8, kNot, {"is 8", "16"}},
      {"gguf llama", "llama.rope.dimension_count", 8, kNot, {"is 8", "16"}},
      {"gguf llama", "llama.block_count", nullptr, kBad, {"is missing"}},
      {"gguf llama", "llama.attention.layer_norm_rms_epsilon", nullptr, kBad, {"is missing"}},
      {"gguf gemma3", "gemma3.rope.scaling.type", "yarn", kNot, {"'yarn'"}},
      {"gguf gemma3", "gemma3.attention.head_count_kv", 3, kBad, {"is 3", "4 heads"}},
      {"gguf gemma3", "gemma3.attention.key_length", 15, kBad, {"is 15", "even"}},
      {"gguf gemma3", "gemma3.attention.value_length", 8, kNot, {"is 8", "16"}},
      {"gguf gemma3", "gemma3.attention.sliding_window_pattern", {true, false}, kBad, {"2 values", "7 layers"}},
      {"gguf gemma3", "gemma3.attention.sliding_window_pattern", {1, 1, 1, 2, 1, 1, 1}, kBad, {"is 2"}},
      {"gguf gemma3", "gemma3.attention.sliding_window", nullptr, kBad, {"is missing"}},
      {"gguf gemma4", "gemma4.attention.head_count_kv", {2, 2, 3}, kBad, {"is 3 in layer 2", "4 heads"}},
      {"gguf gemma4", "gemma4.attention.head_count_kv", {2, 2}, kBad, {"2 values", "3 layers"}},
      {"gguf gemma4", "gemma4.attention.value_length", 16, kNot, {"is 16", "32"}},
      {"gguf gemma4", "gemma4.attention.sliding_window_pattern", nullptr, kBad, {"is missing"}},
      {"gguf gemma4", "gemma4.attention.sliding_window_pattern", {1, 2, 0}, kBad, {"is 2"}},
      {"gguf gemma4", "gemma4.attention.shared_kv_layers", 3, kBad, {"is 3"}},
      {"gguf gemma4", "gemma4.attention.shared_kv_layers", 2, kBad, {"is 2", "layer 2", "no earlier layer"}},
      {"gguf gemma4", "gemma4.feed_forward_length", {96, 96}, kBad, {"2 values", "3 layers"}},
      {"llama", "/attention_bias", true, kNot, {"is true", "bias"}},
      {"llama", "/mlp_bias", true, kNot, {"is true", "bias"}},
      {"llama", "/hidden_act", "gelu", kNot, {"'gelu'", "silu"}},
      {"llama", "/num_key_value_heads", 3, kBad, {"is 3", "4 heads"}},
      {"llama", "/head_dim", 15, kNot, {"15"}},
      {"llama", "/rope_parameters/rope_type", "yarn", kNot, {"'yarn'", "llama3"}},
      {"llama", "/rope_parameters/rope_type", "longrope", kNot, {"'longrope'"}},
      {"llama", "/rope_parameters/factor", nullptr, kBad, {"is missing"}},
      {"llama", "/rope_parameters/high_freq_factor", 1.0, kBad, {"is 1", "low_freq_factor"}},
      {"gemma3", "/attention_bias", true, kNot, {"is true", "bias"}},
      {"gemma3", "/use_bidirectional_attention", true, kNot, {"is true"}},
      {"gemma3", "/hidden_activation", "relu", kNot, {"'relu'", "gelu_pytorch_tanh"}},
      {"gemma3", "/layer_types", two_types, kBad, {"2 values", "6 layers"}},
      {"gemma3", "/layer_types", odd_types, kNot, {"'mamba'", "sliding_attention"}},
      {"gemma3", "/num_key_value_heads", 3, kBad, {"is 3", "4 heads"}},
      {"gemma4_dense", "/attention_bias", true, kNot, {"is true", "bias"}},
      {"gemma4_dense", "/hidden_activation", "relu", kNot, {"'relu'"}},
      {"gemma4_dense", "/layer_types", nullptr, kBad, {"is missing"}},
      {"gemma4_dense", "/layer_types", two_types, kBad, {"2 values", "6 layers"}},
      {"gemma4_dense", "/layer_types", odd_types, kNot, {"'mamba'"}},
      {"gemma4_dense", "/num_key_value_heads", 3, kBad, {"is 3", "4 heads"}},
      {"gemma4_dense", "/per_layer_config/5/num_key_value_heads", 3, kBad, {"is 3 in layer 5", "4 heads"}},
      {"gemma4_dense", "/per_layer_config/5/head_dim", 31, kBad, {"layer 5", "31"}},
      {"gemma4_dense", "/rope_parameters/full_attention/partial_rotary_factor", 1.5, kBad, {"is 1.5"}},
      {"gemma4_e2b", "/num_kv_shared_layers", 5, kBad, {"is 5", "layer 2", "no earlier layer"}},
      {"gemma4_e2b", "/per_layer_config/5/head_dim", 64, kBad, {"is 64 in layer 5", "32 in layer 2", "cache"}},
      {"gemma4_moe", "/top_k_experts", 9, kBad, {"is 9", "8"}},
      {"gemma4_moe", "/num_experts", nullptr, kBad, {"is missing"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(fmt::format("{}: {} = {}", refusal.model, refusal.key, refusal.value.dump()));
    std::vector<std::string> fragments = refusal.fragments;
    const std::string key = refusal.key;
    if (std::string(refusal.model).starts_with("gguf ")) {
      const std::string family = std::string(refusal.model).substr(5);
      ordered_json fields = family == "llama" ? llama_fields() : family == "gemma3" ? gemma3_fields() : gemma4_fields();
      ASSERT_NO_THROW(read_fields(fields));
      if (refusal.value.is_null()) {
        fields.erase(key);
      } else {
        fields[key] = refusal.value;
      }
      fragments.insert(fragments.end(), {"model.gguf", key});
      expect_refused([&] { read_fields(fields); }, refusal.code, fragments);
    } else {
      json config = golden_json(refusal.model);
      ASSERT_NO_THROW(read_json(config));
      config[json::json_pointer(key)] = refusal.value;
      // An override's message names the key that it overrides.
      const std::string last = key.substr(key.rfind('/') + 1);
      fragments.insert(fragments.end(), {"beryl-test", last});
      expect_refused([&] { read_json(config); }, refusal.code, fragments);
    }
  }
}

// Every number that a reader looks at, put to every absurd value.
struct Numbers {
  const char* model;                     // as in Refusal
  std::vector<const char*> integers;     // from 1
  std::vector<const char*> from_zero;    // 0 means none
  std::vector<const char*> positive;     // real
};

TEST(ConfigTest, AbsurdNumbersAndWrongTypesAreRefusedByKeyAndValue) {
  const Numbers all[] = {
      {"gguf llama",
       {"llama.block_count", "llama.embedding_length", "llama.context_length", "llama.feed_forward_length",
        "llama.attention.head_count", "llama.attention.head_count_kv", "llama.attention.key_length",
        "llama.attention.value_length", "llama.rope.dimension_count"},
       {"llama.expert_count"},
       {"llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"}},
      {"gguf gemma3",
       {"gemma3.block_count", "gemma3.embedding_length", "gemma3.context_length", "gemma3.feed_forward_length",
        "gemma3.attention.head_count", "gemma3.attention.head_count_kv", "gemma3.attention.key_length",
        "gemma3.attention.value_length", "gemma3.attention.sliding_window", "gemma3.attention.sliding_window_pattern"},
       {},
       {"gemma3.attention.layer_norm_rms_epsilon", "gemma3.rope.freq_base", "gemma3.rope.freq_base_swa"}},
      {"gguf gemma4",
       {"gemma4.block_count", "gemma4.embedding_length", "gemma4.context_length", "gemma4.feed_forward_length",
        "gemma4.attention.head_count", "gemma4.attention.head_count_kv", "gemma4.attention.key_length",
        "gemma4.attention.key_length_swa", "gemma4.attention.value_length", "gemma4.attention.value_length_swa",
        "gemma4.attention.sliding_window"},
       {"gemma4.attention.shared_kv_layers", "gemma4.embedding_length_per_layer_input", "gemma4.expert_count"},
       {"gemma4.attention.layer_norm_rms_epsilon", "gemma4.rope.freq_base", "gemma4.rope.freq_base_swa"}},
      {"llama",
       {"/num_hidden_layers", "/hidden_size", "/max_position_embeddings", "/intermediate_size", "/num_attention_heads",
        "/num_key_value_heads", "/head_dim"},
       {},
       {"/rms_norm_eps", "/rope_parameters/rope_theta", "/rope_parameters/factor", "/rope_parameters/low_freq_factor",
        "/rope_parameters/high_freq_factor", "/rope_parameters/original_max_position_embeddings"}},
      {"gemma3",
       {"/num_hidden_layers", "/hidden_size", "/max_position_embeddings", "/intermediate_size", "/num_attention_heads",
        "/num_key_value_heads", "/head_dim", "/sliding_window"},
       {},
       {"/rms_norm_eps", "/rope_parameters/full_attention/rope_theta", "/rope_parameters/full_attention/factor",
        "/rope_parameters/sliding_attention/rope_theta", "/query_pre_attn_scalar"}},
      {"gemma4_e2b",
       {"/num_hidden_layers", "/hidden_size", "/max_position_embeddings", "/intermediate_size", "/num_attention_heads",
        "/num_key_value_heads", "/head_dim", "/sliding_window", "/per_layer_config/2/head_dim"},
       {"/num_kv_shared_layers", "/hidden_size_per_layer_input"},
       {"/rms_norm_eps", "/rope_parameters/full_attention/rope_theta", "/rope_parameters/sliding_attention/rope_theta",
        "/rope_parameters/full_attention/partial_rotary_factor"}},
      {"gemma4_moe",
       {"/num_experts", "/top_k_experts", "/moe_intermediate_size", "/global_head_dim", "/num_global_key_value_heads"},
       {},
       {}},
  };
  const double infinity = std::numeric_limits<double>::infinity();
  for (const Numbers& numbers : all) {
    const bool gguf = std::string(numbers.model).starts_with("gguf ");
    const auto refuses = [&](const std::string& key, const json& value, const std::string& shown) {
      SCOPED_TRACE(fmt::format("{}: {} = {}", numbers.model, key, value.dump()));
      if (gguf) {
        const std::string family = std::string(numbers.model).substr(5);
        ordered_json fields = family == "llama"    ? llama_fields()
                              : family == "gemma3" ? gemma3_fields()
                                                   : gemma4_fields();
        fields[key] = value;
        expect_refused([&] { read_fields(fields); }, ErrorCode::kBadInput, {"model.gguf", key, shown});
      } else {
        json config = golden_json(numbers.model);
        config[json::json_pointer(key)] = value;
        expect_refused([&] { read_json(config); }, ErrorCode::kBadInput,
                       {"beryl-test", key.substr(key.rfind('/') + 1), shown});
      }
    };
    std::vector<const char*> integers = numbers.integers;
    for (const char* key : numbers.integers) refuses(key, 0, "is 0");
    integers.insert(integers.end(), numbers.from_zero.begin(), numbers.from_zero.end());
    for (const char* key : integers) {
      refuses(key, -1, "is -1");
      refuses(key, int64_t{1} << 40, "1099511627776");
      refuses(key, 1.5, "1.5");
      refuses(key, "many", "many");
    }
    for (const char* key : numbers.positive) {
      refuses(key, 0.0, "is 0");
      refuses(key, -1.0, "is -1");
      refuses(key, "much", "much");
      if (!gguf) continue;   // JSON has neither
      refuses(key, std::numeric_limits<double>::quiet_NaN(), "is nan");
      refuses(key, infinity, "is inf");
    }
  }
}

TEST(ConfigTest, ScalingByAFactorThatIsNotPositiveIsRefused) {
  for (const double factor : {0.0, -8.0}) {
    for (ordered_json fields : {llama_fields(), gemma3_fields()}) {
      const std::string prefix = fields["general.architecture"].get<std::string>() + ".rope.scaling.";
      fields[prefix + "type"] = "linear";
      fields[prefix + "factor"] = factor;
      expect_refused([&] { read_gguf(fields); }, ErrorCode::kBadInput,
                     {prefix + "factor", fmt::format("is {}", factor)});
    }
    json config = golden_json("gemma3");
    config["attn_logit_softcapping"] = factor - 1;
    expect_refused([&] { read_json(config); }, ErrorCode::kBadInput,
                   {"attn_logit_softcapping", fmt::format("is {}", factor - 1)});
  }
}

TEST(ConfigTest, ARopeThatIsNoObjectOrHasLostItsKindIsRefused) {
  for (const json& wrong : {json("x"), json(true), json(5), json::array()}) {
    json config = golden_json("llama");
    config["rope_parameters"] = wrong;
    expect_refused([&] { read_json(config); }, ErrorCode::kBadInput, {"rope_parameters", "an object"});
    config.erase("rope_parameters");
    config["rope_scaling"] = wrong;
    expect_refused([&] { read_json(config); }, ErrorCode::kBadInput, {"rope_scaling", "an object"});
    for (const char* kind : {"full_attention", "sliding_attention"})
      for (const char* model : {"gemma3", "gemma4_dense"}) {
        json gemma = golden_json(model);
        gemma["rope_parameters"][kind] = wrong;
        expect_refused([&] { read_json(gemma); }, ErrorCode::kBadInput, {kind, "an object"});
      }
  }
  json config = golden_json("llama");
  config["rope_parameters"].erase("rope_type");
  expect_refused([&] { read_json(config); }, ErrorCode::kBadInput, {"rope_parameters.rope_type", "is missing", "factor"});
}

TEST(ConfigTest, AVocabularyOfAnotherSizeThanTheTableIsRefused) {
  json config = golden_json("llama");
  config["vocab_size"] = 1000;
  expect_refused([&] { read_json(config); }, ErrorCode::kBadInput, {"vocab_size", "is 1000", "has 2 rows"});
  config["vocab_size"] = "x";
  expect_refused([&] { read_json(config); }, ErrorCode::kBadInput, {"vocab_size"});
  ordered_json fields = llama_fields();
  fields["llama.vocab_size"] = 3;
  expect_refused([&] { read_gguf(fields); }, ErrorCode::kBadInput, {"llama.vocab_size", "is 3", "has 2 rows"});
}

TEST(ConfigTest, ADamagedGenerationConfigIsRefusedByItsName) {
  const TempFolder folder;
  const auto read = [&] { read_config(*test::folder_with(folder, golden_json("llama"), 64)); };
  for (const char* text : {"[1]", "{\"suppress_tokens\": 1}", "{\"suppress_tokens\": [1.5]}", "{", "",
                           "{\"suppress_tokens\": [18446744073709551615]}"}) {
    folder.write("generation_config.json", text);
    expect_refused(read, ErrorCode::kBadInput, {"generation_config.json"});
  }
  folder.write("generation_config.json", "{\"a\": \"" + std::string(2 << 20, 'x') + "\"}");
  expect_refused(read, ErrorCode::kBadInput, {"generation_config.json", "bytes"});
}

TEST(ConfigTest, DivisorsMustBeThereForGemma4AndFitTheHead) {
  expect_refused([] { read_gguf(gemma4_fields()); }, ErrorCode::kBadInput, {"rope_freqs.weight", "is missing"});
  expect_refused([] { read_gguf(gemma4_fields(), 64, {1, 1}); }, ErrorCode::kBadInput,
                 {"rope_freqs.weight", "[2]", "[16]"});
  for (const float bad : {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> divisors = gemma4_divisors();
    divisors[3] = bad;
    expect_refused([&] { read_gguf(gemma4_fields(), 64, divisors); }, ErrorCode::kBadInput,
                   {"rope_freqs.weight", fmt::format("{}", bad)});
  }
}

TEST(ConfigTest, AnEmbeddingOfAnotherWidthIsRefused) {
  expect_refused([] { read_json(golden_json("llama"), 63); }, ErrorCode::kBadInput,
                 {"model.embed_tokens.weight", "[2, 63]", "64"});
  expect_refused([] { read_gguf(llama_fields(), 63); }, ErrorCode::kBadInput, {"token_embd.weight", "[2, 63]", "64"});
}

}  // namespace
}  // namespace beryl
