// What: which tensor is written how; that a written folder is the same model, whatever it was made of; that synthetic
//       models load in their true shapes; that a destination is never harmed.
// How:  golden models from folders and GGUF files are written without loss, and every matrix and vector that the loader
//       makes of the copy is compared with the original's; synthetic plans are loaded as checkpoints without data.
#include "model/quantize_model.h"

#include <sys/mman.h>

#include <filesystem>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "base/float_formats.h"
#include "base/mapped_file.h"
#include "model/model.h"
#include "model/synthetic.h"
#include "model/test_checkpoints.h"
#include "weights/encode.h"

namespace beryl {
namespace {

namespace fs = std::filesystem;

QuantizeOptions go_on(bool replaces = false) {
  QuantizeOptions options;
  options.replaces = replaces;
  options.n_threads = 2;
  options.keep_going = [](const QuantizeProgress&) { return true; };
  return options;
}

std::string text_of(const std::string& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

void expect_same_values(const WeightSet& found, const WeightSet& expected) {
  ASSERT_EQ(found.matrices.size(), expected.matrices.size());
  ASSERT_EQ(found.vectors.size(), expected.vectors.size());
  for (size_t i = 0; i < expected.vectors.size(); ++i)
    EXPECT_EQ(found.vectors[i].values, expected.vectors[i].values) << expected.vectors[i].name;
  for (size_t i = 0; i < expected.matrices.size(); ++i) {
    SCOPED_TRACE(expected.matrices[i].name);
    ASSERT_EQ(found.matrices[i].parts.size(), expected.matrices[i].parts.size());
    for (size_t part = 0; part < expected.matrices[i].parts.size(); ++part) {
      const HostMatrix& a = found.matrices[i].parts[part];
      const HostMatrix& b = expected.matrices[i].parts[part];
      ASSERT_EQ(std::tuple(a.stack, a.rows, a.cols), std::tuple(b.stack, b.rows, b.cols));
      std::vector<float> row_a(static_cast<size_t>(a.cols)), row_b(row_a.size());
      for (int64_t row = 0; row < a.stack * a.rows; ++row) {
        decode_row(a, row / a.rows, row % a.rows, row_a.data());
        decode_row(b, row / a.rows, row % a.rows, row_b.data());
        ASSERT_EQ(row_a, row_b) << row;
      }
    }
  }
}

TEST(QuantizeModelTest, WithoutLossItIsTheSameModel) {
  std::vector<std::string> sources;
  for (const std::string& model : test::golden_models()) {
    sources.push_back(test::golden_folder(model));
    if (test::have_golden_gguf()) {
      sources.push_back(test::golden_gguf(model, "bf16"));
      sources.push_back(test::golden_gguf(model, "f32"));
    }
  }
  for (const std::string& source : sources) {
    SCOPED_TRACE(source);
    const test::TempFolder folder;
    QuantizeFormats formats;
    formats.layers = Format::kF32;
    EXPECT_TRUE(write_model_folder(plan_quantize(source, formats), folder.path("f32"), go_on()).finished);
    // And on, from what was written: BF16 weights went in, so they come out.
    formats.layers = Format::kBf16;
    EXPECT_TRUE(write_model_folder(plan_quantize(folder.path("f32"), formats), folder.path("bf16"), go_on()).finished);
    const Model original = open_model(source);
    const Model wide = open_model(folder.path("f32")), narrow = open_model(folder.path("bf16"));
    expect_same_values(wide.weights->set, original.weights->set);
    expect_same_values(narrow.weights->set, original.weights->set);
    EXPECT_EQ(wide.config.container, original.config.container);
    EXPECT_EQ(wide.config.name, original.config.name);
    EXPECT_EQ(wide.config.suppressed_tokens, original.config.suppressed_tokens);
  }
}

TEST(QuantizeModelTest, FormatsFollowTheRoleAndTheShape) {
  QuantizeFormats formats;
  formats.layers = Format::kNvfp4;
  const QuantizePlan plan = plan_quantize(test::golden_folder("gemma4_moe"), formats);
  std::map<Treatment, std::set<std::string>> names;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const QuantizeTensor& tensor = plan.tensors[i];
    names[plan.treatments[i]].insert(tensor.entry.name);
    const bool is_head = tensor.entry.name.find("embed_tokens") != std::string::npos;
    const Format expected = plan.treatments[i] != Treatment::kEncoded ? tensor.source.format
                            : is_head                                  ? Format::kFp8
                                                                       : Format::kNvfp4;
    EXPECT_EQ(tensor.entry.format, expected) << tensor.entry.name;
  }
  EXPECT_TRUE(names[Treatment::kSame].empty());
  for (const std::string& name : names[Treatment::kVector]) {
    const bool is_expected = name.find("norm") != std::string::npos || name.find("scal") != std::string::npos;
    EXPECT_TRUE(is_expected) << name;
  }
  for (const std::string& name : names[Treatment::kRouter])
    EXPECT_NE(name.find("router.proj"), std::string::npos) << name;
  EXPECT_FALSE(names[Treatment::kRouter].empty());
  // Rows of 32: the experts' down projections.
  for (const std::string& name : names[Treatment::kOddRows])
    EXPECT_EQ(plan.checkpoint->find(name)->shape.back() % 64, 32) << name;
  EXPECT_FALSE(names[Treatment::kOddRows].empty());
  EXPECT_GT(names[Treatment::kEncoded].size(), 10u);
  EXPECT_FALSE(plan.was_quantised);

  formats.layers = Format::kBf16;
  for (const Treatment treatment : plan_quantize(test::golden_folder("llama"), formats).treatments)
    EXPECT_TRUE(treatment == Treatment::kSame || treatment == Treatment::kVector);
}

TEST(QuantizeModelTest, TheHeadFollowsTheLayersUnlessItIsGiven) {
  const auto head_of = [](Format layers, std::optional<Format> head = {}) {
    return QuantizeFormats{layers, head}.head_format();
  };
  EXPECT_EQ(head_of(Format::kFp4G128), Format::kFp8);
  EXPECT_EQ(head_of(Format::kMxfp4), Format::kFp8);
  EXPECT_EQ(head_of(Format::kQ4_K), Format::kQ8_0);
  EXPECT_EQ(head_of(Format::kQ8_0), Format::kQ8_0);
  EXPECT_EQ(head_of(Format::kBf16), Format::kBf16);
  EXPECT_EQ(head_of(Format::kFp4G128, Format::kQ6_K), Format::kQ6_K);
}

// Quantised, written, read, and quantised again in the same formats: nothing changes any more. Experts with NVFP4's
// scale of a tensor are among them.
TEST(QuantizeModelTest, WhatWasWrittenIsReadBackAsItWasEncoded) {
  for (const Format format : {Format::kNvfp4, Format::kQ4_0, Format::kMxfp4, Format::kFp8})
    for (const std::string& model : test::golden_models()) {
      SCOPED_TRACE(fmt::format("{} {}", model, info(format).name));
      const test::TempFolder folder;
      QuantizeFormats formats;
      formats.layers = format;
      const QuantizePlan plan = plan_quantize(test::golden_folder(model), formats);
      write_model_folder(plan, folder.path("once"), go_on());
      const QuantizePlan again = plan_quantize(folder.path("once"), formats);
      EXPECT_FALSE(again.was_quantised);
      for (const Treatment treatment : again.treatments) EXPECT_NE(treatment, Treatment::kEncoded);
      write_model_folder(again, folder.path("twice"), go_on());
      EXPECT_TRUE(text_of(folder.path("once/model.safetensors")) == text_of(folder.path("twice/model.safetensors")));

      for (const QuantizeTensor& tensor : plan.tensors) {
        SCOPED_TRACE(tensor.entry.name);
        const std::vector<float> weights = floats_of(*plan.checkpoint, *plan.checkpoint->find(tensor.entry.name));
        const HostMatrix expected = encode_matrix(tensor.entry.name, tensor.entry.format, weights.data(),
                                                  tensor.source.rows, tensor.source.cols, tensor.source.stack);
        const HostMatrix found = matrix_of(*again.checkpoint, *again.checkpoint->find(tensor.entry.name));
        EXPECT_EQ(found.format, expected.format);
        EXPECT_EQ(found.tensor_scale, expected.tensor_scale);
        std::vector<float> a(static_cast<size_t>(expected.cols)), b(a.size());
        for (int64_t row = 0; row < expected.stack * expected.rows; ++row) {
          decode_row(found, row / expected.rows, row % expected.rows, a.data());
          decode_row(expected, row / expected.rows, row % expected.rows, b.data());
          ASSERT_EQ(a, b);
        }
      }
    }
}

TEST(QuantizeModelTest, TheFilesOfAFolderTravelAlong) {
  const test::TempFolder folder;
  fs::copy(test::golden_folder("llama"), folder.path("source"));
  folder.write("source/tokenizer_config.json", "{\"bos_token\": null}");
  folder.write("source/chat_template.jinja", "{{ messages }}");
  folder.write("source/notes.txt", "not for anybody else");
  write_model_folder(plan_quantize(folder.path("source"), {Format::kQ8_0, {}}), folder.path("out"), go_on());
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder.path("out"))) names.insert(entry.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"config.json", "model.safetensors", "tokenizer_config.json",
                                          "chat_template.jinja"}));
  for (const char* name : {"config.json", "tokenizer_config.json", "chat_template.jinja"})
    EXPECT_EQ(text_of(folder.path("out/" + std::string(name))), text_of(folder.path("source/" + std::string(name))));
}

// From one file, and from the first of a set: every key but those about the files.
TEST(QuantizeModelTest, TheMetadataOfAGgufTravelAlong) {
  BERYL_SKIP_WITHOUT_GGUF();
  const test::TempFolder folder;
  const std::string source = test::golden_gguf("gemma4_e2b", "bf16");
  write_model_folder(plan_quantize(source, {Format::kQ8_0, {}}), folder.path("out"), go_on());
  const auto before = open_checkpoint(source), after = open_checkpoint(folder.path("out"));
  std::vector<std::string> kept;
  for (const std::string& key : before->metadata().keys())
    if (key != "general.file_type" && !key.starts_with("split.")) kept.push_back(key);
  EXPECT_EQ(after->metadata().keys(), kept);
  for (const std::string& key : kept) EXPECT_EQ(after->metadata().describe(key), before->metadata().describe(key));
  EXPECT_EQ(after->container(), Container::kGguf);
  // And once more, from the folder.
  write_model_folder(plan_quantize(folder.path("out"), {Format::kF32, {}}), folder.path("again"), go_on());
  EXPECT_TRUE(text_of(folder.path("again/metadata.gguf")) == text_of(folder.path("out/metadata.gguf")));
}

TEST(QuantizeModelTest, NeitherTheSourceNorAnythingElseIsHarmed) {
  const test::TempFolder folder;
  fs::copy(test::golden_folder("llama"), folder.path("source"));
  const QuantizeFormats formats{Format::kQ8_0, {}};
  const auto write = [&](const std::string& to, bool replaces) {
    return [&, to, replaces] {
      write_model_folder(plan_quantize(folder.path("source"), formats), to, go_on(replaces));
    };
  };
  for (const bool replaces : {false, true}) {
    test::expect_refused(write(folder.path("source"), replaces), ErrorCode::kBadInput, {"the model to read"});
    test::expect_refused(write(folder.path("source/../source/"), replaces), ErrorCode::kBadInput,
                         {"the model to read"});
  }
  write(folder.path("out"), false)();
  test::expect_refused(write(folder.path("out"), false), ErrorCode::kBadInput, {"--force"});
  write(folder.path("out"), true)();
  folder.write("out/thesis.txt", "precious");
  test::expect_refused(write(folder.path("out"), true), ErrorCode::kBadInput, {"thesis.txt"});
  EXPECT_EQ(text_of(folder.path("out/thesis.txt")), "precious");
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder.path())) names.insert(entry.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"source", "out"}));
}

// A plan as the checkpoint that its folder would be, without its gigabytes: every tensor begins at the same zeros.
class PlannedCheckpoint final : public Checkpoint {
 public:
  PlannedCheckpoint(const QuantizePlan& plan, const Metadata& metadata) : metadata_(metadata) {
    for (const QuantizeTensor& tensor : plan.tensors) {
      const HostMatrix& source = tensor.source;
      const int64_t bytes = source.stack * source.rows * row_bytes(Format::kBf16, source.cols);
      largest_ = std::max(largest_, static_cast<size_t>(bytes));
      tensors_.push_back({tensor.entry.name, Format::kBf16, tensor.entry.shape, {}});
      sizes_.push_back(static_cast<size_t>(bytes));
    }
    void* zeros = ::mmap(nullptr, largest_, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (zeros == MAP_FAILED) throw std::runtime_error("no address space");
    zeros_ = static_cast<const std::byte*>(zeros);
    for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].data = {zeros_, sizes_[i]};
  }
  ~PlannedCheckpoint() override { ::munmap(const_cast<std::byte*>(zeros_), largest_); }
  PlannedCheckpoint(const PlannedCheckpoint&) = delete;
  PlannedCheckpoint& operator=(const PlannedCheckpoint&) = delete;

  const std::string& path() const override { return path_; }
  Container container() const override { return Container::kHuggingFace; }
  const Metadata& metadata() const override { return metadata_; }
  std::span<const TensorInfo> tensors() const override { return tensors_; }
  std::span<const std::string> warnings() const override { return {}; }
  const TensorInfo* find(std::string_view name) const override {
    for (const TensorInfo& tensor : tensors_)
      if (tensor.name == name) return &tensor;
    return nullptr;
  }

 private:
  const std::string path_ = "planned";
  const Metadata& metadata_;
  std::vector<TensorInfo> tensors_;
  std::vector<size_t> sizes_;
  size_t largest_ = 1;
  const std::byte* zeros_ = nullptr;
};

TEST(QuantizeModelTest, SyntheticModelsLoadInTheirTrueShapes) {
  for (const std::string& name : synthetic_names()) {
    SCOPED_TRACE(name);
    const QuantizePlan plan = plan_synthetic(name, {}, 1);
    ASSERT_EQ(plan.files.size(), 1u);
    EXPECT_EQ(plan.files[0].name, "config.json");
    // The config in a folder that opens; its embedding of two rows is not looked at.
    const test::TempFolder folder;
    const auto json = nlohmann::json::parse(plan.files[0].text);
    const auto config_source = test::folder_with(folder, json, json.at("hidden_size").get<int64_t>());
    const PlannedCheckpoint checkpoint(plan, config_source->metadata());
    const ModelConfig config = read_config(checkpoint);
    const auto weights = load_weights(checkpoint, config);
    const Model expected = make_synthetic_model(name, {}, 1, false);
    ASSERT_EQ(weights->set.matrices.size(), expected.weights->set.matrices.size());
    for (size_t i = 0; i < weights->set.matrices.size(); ++i) {
      const WeightMatrix& a = weights->set.matrices[i];
      const WeightMatrix& b = expected.weights->set.matrices[i];
      EXPECT_EQ(std::tuple(a.name, a.rows(), a.cols(), a.stack()), std::tuple(b.name, b.rows(), b.cols(), b.stack()));
    }
    EXPECT_EQ(weights->head.index == weights->embedding.index,
              expected.weights->head.index == expected.weights->embedding.index);
  }
}

TEST(QuantizeModelTest, SyntheticWeightsAreNormalEnoughAndDiffer) {
  const QuantizePlan plan = plan_synthetic("gemma3-270m", {}, 1);
  std::set<std::vector<float>> rows;
  for (const QuantizeTensor& tensor : plan.tensors) {
    const int64_t cols = tensor.source.cols;
    std::vector<float> row(static_cast<size_t>(cols));
    for (int64_t r = 0; r < std::min<int64_t>(tensor.source.rows, 3); ++r) {
      tensor.make_row(r, row.data());
      EXPECT_TRUE(rows.insert(row).second) << tensor.entry.name;
      double sum = 0, squares = 0;
      for (const float value : row) {
        ASSERT_EQ(bf16_to_f32(f32_to_bf16(value)), value);
        sum += value;
        squares += double{value} * value;
      }
      if (tensor.entry.shape.size() < 2) continue;
      const auto n = static_cast<double>(cols);
      EXPECT_NEAR(squares, 1, 8 / std::sqrt(n)) << tensor.entry.name;   // a row's length, by its own 5-sigma
      EXPECT_NEAR(sum, 0, 5) << tensor.entry.name;
    }
  }
}

}  // namespace
}  // namespace beryl
