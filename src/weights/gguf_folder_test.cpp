// What: a folder of metadata.gguf and model.safetensors is a GGUF checkpoint; metadata.gguf is what the source said.
// How:  metadata of every value type are taken from a file, from one of version 2 and from a split set, and read back;
//       folders that are no such folders are refused with the file that is wrong.
#include "weights/gguf.h"

#include <limits>

#include <gtest/gtest.h>

#include "base/error.h"
#include "weights/encode.h"
#include "weights/safetensors.h"
#include "weights/test_files.h"

namespace beryl {
namespace {

using namespace test;

GgufBuilder builder_with_all_types() {
  GgufBuilder builder;
  builder.text("general.architecture", "llama")
      .scalar<uint32_t>("general.file_type", kU32, 15)
      .scalar<uint16_t>("split.no", kU16, 0)
      .scalar<uint16_t>("split.count", kU16, 0)
      .scalar<int8_t>("a.i8", kI8, -3)
      .scalar<uint64_t>("a.u64", kU64, 1ull << 40)
      .scalar<double>("a.f64", kF64, 0.1)
      .scalar<uint8_t>("a.bool", kBool, 1)
      .array<float>("a.floats", kF32, {1.5f, -2.0f})
      .strings("a.strings", {"", "one", std::string("a\0b", 3)})
      .text("last.key", "text");
  builder.tensor("w", {2}, 0, raw(1.0f) + raw(2.0f));
  return builder;
}

// Error's message; empty when nothing is thrown.
std::string refusal(const std::string& path) {
  try {
    const auto checkpoint = open_checkpoint(path);
    for (const TensorInfo& tensor : checkpoint->tensors()) matrix_of(*checkpoint, tensor);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(GgufFolderTest, MetadataComeBackValueByValue) {
  for (const uint32_t version : {3u, 2u}) {
    const TempFolder folder;
    GgufBuilder builder = builder_with_all_types();
    builder.version = version;
    const std::string source = folder.write("source.gguf", builder.build());
    const std::vector<float> weights(256, 0.5f);
    write_safetensors(folder.path("model.safetensors"),
                      std::vector<SafetensorsTensor>{{{"blk.0.w", Format::kF32, {2, 128}},
                                                      std::as_bytes(std::span(weights)), {}}});
    folder.write("metadata.gguf", gguf_metadata_alone(source));
    const auto before = open_gguf(source), after = open_checkpoint(folder.path());
    EXPECT_EQ(after->container(), Container::kGguf);
    EXPECT_EQ(after->path(), folder.path());
    EXPECT_EQ(after->metadata().keys(),
              (std::vector<std::string>{"general.architecture", "a.i8", "a.u64", "a.f64", "a.bool", "a.floats",
                                        "a.strings", "last.key"}));
    for (const std::string& key : after->metadata().keys())
      EXPECT_EQ(after->metadata().describe(key), before->metadata().describe(key));
    const auto strings = after->metadata().strings("a.strings");
    ASSERT_EQ(strings->size(), 3u);
    EXPECT_EQ((*strings)[2], std::string_view("a\0b", 3));
    EXPECT_EQ(floats_of(*after, *after->find("blk.0.w")), weights);
    EXPECT_EQ(after->find("w"), nullptr);
    EXPECT_EQ(gguf_metadata_alone(folder.path("metadata.gguf")), gguf_metadata_alone(source));
  }
}

TEST(GgufFolderTest, ASetsMetadataAreThoseOfItsFirstFile) {
  const TempFolder folder;
  for (const int part : {0, 1}) {
    GgufBuilder builder;
    builder.scalar<uint16_t>("split.no", kU16, static_cast<uint16_t>(part)).scalar<uint16_t>("split.count", kU16, 2);
    if (part == 0) builder.text("general.name", "first").scalar<int32_t>("split.tensors.count", kI32, 2);
    builder.tensor(part == 0 ? "a" : "b", {1}, 0, raw(1.0f));
    folder.write(part == 0 ? "m-00001-of-00002.gguf" : "m-00002-of-00002.gguf", builder.build());
  }
  const std::string path = folder.write("alone.gguf", gguf_metadata_alone(folder.path("m-00001-of-00002.gguf")));
  EXPECT_EQ(open_gguf(path)->metadata().keys(), std::vector<std::string>{"general.name"});
}

TEST(GgufFolderTest, ConfigJsonMakesItAHuggingFaceFolder) {
  const TempFolder folder;
  folder.write("metadata.gguf", gguf_metadata_alone(folder.write("source.gguf", builder_with_all_types().build())));
  write_safetensors(folder.path("model.safetensors"), {});
  folder.write("config.json", "{\"model_type\": \"llama\"}");
  EXPECT_EQ(open_checkpoint(folder.path())->container(), Container::kHuggingFace);
}

TEST(GgufFolderTest, WhatIsWrongIsNamed) {
  const TempFolder folder;
  const std::string source = folder.write("source.gguf", builder_with_all_types().build());
  folder.write("metadata.gguf", "GGUG");
  EXPECT_NE(refusal(folder.path()).find("metadata.gguf: the first bytes are"), std::string::npos);
  folder.write("metadata.gguf", gguf_metadata_alone(source));
  EXPECT_NE(refusal(folder.path()).find("model.safetensors: cannot open"), std::string::npos);
  write_safetensors(folder.path("model.safetensors"), {});
  EXPECT_EQ(refusal(folder.path()), "");
  folder.write("metadata.gguf", builder_with_all_types().build());
  EXPECT_NE(refusal(folder.path()).find("metadata.gguf: holds 1 tensors, expected none"), std::string::npos);
}

// "NAME_scale" beside a block-quantised NAME multiplies it, in both kinds of folder.
TEST(GgufFolderTest, AScaleOfItsOwnMultipliesATensor) {
  const std::vector<float> weights(2 * 64, 0.5f);
  const HostMatrix matrix = encode_matrix("w", Format::kQ8_0, weights.data(), 2, 64);
  const auto write = [&](const TempFolder& folder, const std::vector<float>& scale, bool gguf) {
    if (gguf)
      folder.write("metadata.gguf", gguf_metadata_alone(folder.write("source.gguf", builder_with_all_types().build())));
    else
      folder.write("config.json", "{}");
    write_safetensors(
        folder.path("model.safetensors"),
        std::vector<SafetensorsTensor>{
            {{"w", Format::kQ8_0, {2, 64}}, *matrix.storage, {}},
            {{"w_scale", Format::kF32, {static_cast<int64_t>(scale.size())}}, std::as_bytes(std::span(scale)), {}}});
  };
  for (const bool gguf : {false, true}) {
    const TempFolder folder;
    write(folder, {0.25f}, gguf);
    const auto checkpoint = open_checkpoint(folder.path());
    EXPECT_EQ(matrix_of(*checkpoint, *checkpoint->find("w")).tensor_scale, 0.25f);
    EXPECT_EQ(companions_of(*checkpoint, *checkpoint->find("w")), std::vector<std::string>{"w_scale"});
    const TempFolder sick;
    write(sick, {std::numeric_limits<float>::infinity()}, gguf);
    EXPECT_NE(refusal(sick.path()).find("'w_scale' is f32 inf, expected one finite float"), std::string::npos);
    const TempFolder longer;   // no scale of the tensor: somebody else's
    write(longer, {2, 2}, gguf);
    const auto other = open_checkpoint(longer.path());
    EXPECT_EQ(matrix_of(*other, *other->find("w")).tensor_scale, 1.0f);
    EXPECT_TRUE(companions_of(*other, *other->find("w")).empty());
  }
}

}  // namespace
}  // namespace beryl
