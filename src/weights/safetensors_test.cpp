// What: safetensors files and Hugging Face folders read back as written; quantised matrices with their scale planes
//       become HostMatrix; each kind of damage is one line that names the file and what is wrong.
// How:  files built byte by byte (test_files.h) for reading; the writer against the reader, and half-written files.
#include "weights/safetensors.h"

#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/float_formats.h"
#include "base/rng.h"
#include "weights/encode.h"
#include "weights/hugging_face.h"
#include "weights/test_files.h"

namespace beryl {
namespace {

using namespace test;

std::string zeros(size_t n) { return std::string(n, '\0'); }

std::span<const std::byte> as_bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string bytes_of(std::span<const std::byte> data) {
  return {reinterpret_cast<const char*>(data.data()), data.size()};
}

// The message and code of the Error that a call throws; the message is one line.
struct Caught {
  ErrorCode code = ErrorCode::kIo;
  std::string message = "no error";
};
Caught catch_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return {error.code, error.what()};
  }
  return {};
}

void expect_caught(const Caught& caught, ErrorCode code, const std::vector<std::string>& parts) {
  EXPECT_EQ(caught.code, code) << caught.message;
  for (const std::string& part : parts)
    EXPECT_NE(caught.message.find(part), std::string::npos) << "'" << part << "' not in: " << caught.message;
}

void expect_bad(const std::string& bytes, const std::vector<std::string>& parts,
                ErrorCode code = ErrorCode::kBadInput) {
  const TempFolder folder;
  const std::string path = folder.write("x.safetensors", bytes);
  const Caught caught = catch_error([&] { SafetensorsFile{path}; });
  expect_caught(caught, code, parts);
  EXPECT_TRUE(caught.message.starts_with(path + ": ")) << caught.message;
}

void expect_bad_header(std::string_view header, const std::vector<std::string>& parts, size_t data_bytes = 8,
                       ErrorCode code = ErrorCode::kBadInput) {
  expect_bad(safetensors_bytes(header, zeros(data_bytes)), parts, code);
}

TEST(SafetensorsTest, AValidFileReadsBack) {
  const TempFolder folder;
  const std::string header =
      R"({"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]},"__metadata__":{"format":"pt","k":"é"},)"
      R"("a\u00e9":{"data_offsets":[0,8],"shape":[2,2],"dtype":"BF16"},"none":{"dtype":"F32","shape":[4,0],)"
      R"("data_offsets":[8,8]},"scalar":{"dtype":"F32","shape":[],"data_offsets":[11,15]}}   )";
  const SafetensorsFile file(folder.write("x.safetensors", safetensors_bytes(header, "01234567abcWXYZ")));
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.tensors()[0].name, "b");
  EXPECT_EQ(file.tensors()[0].format, Format::kU8);
  EXPECT_EQ(bytes_of(file.tensors()[0].data), "abc");
  ASSERT_NE(file.find("aé"), nullptr);
  EXPECT_EQ(file.find("aé")->format, Format::kBf16);
  EXPECT_EQ(file.find("aé")->shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(bytes_of(file.find("aé")->data), "01234567");
  EXPECT_EQ(file.find("none")->shape, (std::vector<int64_t>{4, 0}));
  EXPECT_EQ(file.find("scalar")->shape, std::vector<int64_t>{});
  EXPECT_EQ(bytes_of(file.find("scalar")->data), "WXYZ");
  EXPECT_EQ(file.find("a"), nullptr);
  ASSERT_EQ(file.metadata().size(), 2u);
  EXPECT_EQ(file.metadata()[1].second, "é");
}

TEST(SafetensorsTest, TheHeaderMustLieInsideTheFile) {
  expect_bad("", {"a file of 0 bytes is too short"});
  expect_bad("1234567", {"a file of 7 bytes is too short"});
  for (const uint64_t length : {uint64_t{100}, uint64_t{1} << 26})
    expect_bad(raw(length) + "{}", {fmt::format("the header's length is {}, but only 2 bytes follow", length)});
  for (const uint64_t length : {UINT64_MAX, uint64_t{1} << 63, uint64_t{1} << 32, kMaxSafetensorsHeaderBytes + 1})
    expect_bad(raw(length) + "{}", {fmt::format("the header's length is {}, at most", length)});
  expect_bad(raw<uint64_t>(0), {"the header starts with ''"});
  expect_bad(raw<uint64_t>(2) + "[]", {"the header starts with '['"});
  expect_bad(raw<uint64_t>(3) + " {}", {"the header starts with ' '"});
}

TEST(SafetensorsTest, TheHeaderMustBeJsonInUtf8OfTheRightShape) {
  expect_bad_header("{", {"not valid JSON at its byte", "unexpected end"});
  expect_bad_header(std::string("{}\0x", 4), {"the header: not valid JSON: a NUL at byte 2"});
  expect_bad_header(std::string("{\"a\":\0", 6), {"the header: not valid JSON: a NUL at byte 5"});
  expect_bad_header("{}x", {"not valid JSON", "expected end of input"});
  expect_bad_header("{\"a\xff\":{}}", {"not valid JSON", "invalid string: ill-formed UTF-8"});
  expect_bad_header("{\"a\n\":{}}", {"not valid JSON"});
  expect_bad_header(R"({"a":1})", {"entry 'a' is the number 1"});
  expect_bad_header(R"({"a":null})", {"entry 'a' is null"});
  expect_bad_header(R"({"a":true})", {"entry 'a' is a bool"});
  expect_bad_header(R"({"a":"x"})", {"entry 'a' is the string 'x'"});
  expect_bad_header(R"({"a":[]})", {"entry 'a' is an array"});
  expect_bad_header(R"({"a":{"dtype":{}}})", {"dtype of tensor 'a' is an object"});
  expect_bad_header(R"({"a":{"dtype":["F32"]}})", {"dtype of tensor 'a' is an array"});
  expect_bad_header(R"({"a":{"shape":"2"}})", {"shape of tensor 'a' is the string '2'"});
  expect_bad_header(R"({"a":{"shape":[[2]]}})", {"shape of tensor 'a' is an array"});
  expect_bad_header(R"({"a":{"shape":[{}]}})", {"shape of tensor 'a' is an object"});
  expect_bad_header(R"({"a":{"shape":2}})", {"shape of tensor 'a' is the number 2"});
  expect_bad_header(R"({"a":{"shape":[-2]}})", {"shape of tensor 'a': -2 is negative"});
  expect_bad_header(R"({"a":{"shape":[2.0]}})", {"shape of tensor 'a': '2.0' is no integer"});
  expect_bad_header(R"({"a":{"shape":[18446744073709551616]}})", {"'18446744073709551616' is no integer of 64 bits"});
  expect_bad_header(R"({"a":{"shape":[1e999]}})", {"not valid JSON"});
  expect_bad_header(R"({"a":{"shape":[18446744073709551615]}})",
                    {"shape of tensor 'a': dimension 18446744073709551615"});
  expect_bad_header(R"({"a":{"shape":[1,1,1,1,1,1,1,1,1]}})", {"more than 8 dimensions"});
  expect_bad_header(R"({"a":{"data_offsets":[0,1,2]}})", {"data_offsets of tensor 'a': more than 2 numbers"});
  expect_bad_header(R"({"a":{"extra":1}})", {"tensor 'a' has the key 'extra'"});
  expect_bad_header(R"({"a":{"shape":[1],"shape":[1]}})", {"tensor 'a' has the key 'shape' twice"});
  expect_bad_header(R"({"a":{}})", {"tensor 'a' lacks dtype"});
  expect_bad_header(R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", {"tensor 'a' lacks shape"});
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[2]}})", {"tensor 'a' lacks two data_offsets"});
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", {"tensor 'a' lacks two data_offsets"});
  expect_bad_header(R"({"":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", {"empty name"});
  expect_bad_header(R"({"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}})",
                    {"dtype of tensor 'a': 'F99' is no dtype"});
  expect_bad_header(R"({"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}})", {"'a' has dtype F64"}, 8,
                    ErrorCode::kUnsupported);
  expect_bad_header(R"({"__metadata__":{"k":1}})", {"'__metadata__' entry 'k' is the number 1"});
  expect_bad_header(R"({"__metadata__":{"k":{}}})", {"'__metadata__' entry 'k' is an object"});
  expect_bad_header(R"({"__metadata__":{"k":"1","k":"2"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
                    {"'__metadata__' has the key 'k' twice"});
  expect_bad_header(R"({"__metadata__":{},"__metadata__":{}})", {"'__metadata__' occurs twice"});
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += R"({"a":)";
  expect_bad_header(deep, {"tensor 'a' has the key 'a'"});
  expect_bad_header("{\"a\":" + std::string(100000, '['), {"is an array"});
}

TEST(SafetensorsTest, OffsetsMustCoverTheDataOnceAndAgreeWithDtypeAndShape) {
  const auto two = [](const std::string& a, const std::string& b) {
    return fmt::format(R"({{"a":{{"dtype":"F32","shape":[2],"data_offsets":{}}},)"
                       R"("b":{{"dtype":"F32","shape":[2],"data_offsets":{}}}}})",
                       a, b);
  };
  expect_bad_header(two("[0,8]", "[0,8]"),
                    {"data_offsets [0, 8], expected it to begin at 8 (it overlaps another)"}, 16);
  expect_bad_header(two("[0,8]", "[4,12]"), {"'b'", "begin at 8 (it overlaps another)"}, 12);
  expect_bad_header(two("[0,8]", "[12,20]"), {"'b'", "begin at 8 (there is a hole)"}, 20);
  expect_bad_header(two("[8,16]", "[16,24]"), {"'a'", "begin at 0 (there is a hole)"}, 24);
  expect_bad_header(two("[0,8]", "[16,8]"), {"'b' has data_offsets [16, 8], expected 8 bytes"}, 16);
  expect_bad_header(two("[0,8]", "[8,15]"), {"'b' has data_offsets [8, 15], expected 8 bytes"}, 16);
  expect_bad_header(two("[0,8]", "[8,16]"), {"'b' ends at byte 16 of the data, but the file has 15"}, 15);
  expect_bad_header(two("[0,8]", "[8,16]"), {"1 bytes follow the last tensor"}, 17);
  expect_bad_header("{}", {"8 bytes follow the last tensor"});
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],)"
                    R"("data_offsets":[8,16]}})",
                    {"tensor 'a' occurs twice"}, 16);
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]}})",
                    {"tensor 'a' has more than 2^60 elements: shape [4294967296, 4294967296, 4294967296]"});
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}})",
                    {"tensor 'a' has more than 2^60 elements"}, 0);
  // No bytes at all, but the other dimensions' product leaves 64 bits.
  expect_bad_header(R"({"a":{"dtype":"F8_E4M3","shape":[9223372036854775807,2,0],"data_offsets":[0,0]}})",
                    {"tensor 'a' has more than 2^60 elements"}, 0);
  expect_bad_header(R"({"a":{"dtype":"U8","shape":[0,1152921504606846977],"data_offsets":[0,0]}})",
                    {"tensor 'a' has more than 2^60 elements"}, 0);
  const TempFolder folder;
  const SafetensorsFile file(folder.write(
      "x.safetensors",
      safetensors_bytes(R"({"a":{"dtype":"U8","shape":[0,1152921504606846976],"data_offsets":[0,0]}})", "")));
  EXPECT_EQ(file.tensors().size(), 1u);
  expect_bad_header(R"({"a":{"dtype":"U8","shape":[1152921504606846976],"data_offsets":[0,1152921504606846976]}})",
                    {"'a' ends at byte 1152921504606846976 of the data, but the file has 8"});
}

TEST(SafetensorsTest, FormatsOfU8TensorsAreChecked) {
  const auto with = [](const std::string& formats) {
    return fmt::format(R"({{"__metadata__":{{"beryl.formats":"{}"}},"w":{{"dtype":"U8","shape":[2,68],)"
                       R"("data_offsets":[0,136]}},"f":{{"dtype":"F32","shape":[2],"data_offsets":[136,144]}}}})",
                       formats);
  };
  expect_bad_header(with("[]"), {"'beryl.formats' is no JSON object"}, 144);
  expect_bad_header(with("{"), {"'beryl.formats'", "not valid JSON"}, 144);
  expect_bad_header(with(R"({\"w\":1})"), {"gives 'w' the format number"}, 144, ErrorCode::kUnsupported);
  expect_bad_header(with(R"({\"w\":\"q9\"})"), {"gives 'w' the format 'q9'"}, 144, ErrorCode::kUnsupported);
  expect_bad_header(with(R"({\"x\":\"q8_0\"})"), {"names 'x', but there is no such tensor"}, 144);
  expect_bad_header(with(R"({\"w\":\"q4_k\"})"), {"'w'", "expected it to be U8 in rows of a multiple of 144"}, 144);
  expect_bad_header(with(R"({\"f\":\"q8_0\"})"), {"'f'", "expected it to be U8"}, 144);
  const TempFolder folder;
  const SafetensorsFile file(
      folder.write("x.safetensors", safetensors_bytes(with(R"({\"w\":\"q8_0\"})"), zeros(144))));
  EXPECT_EQ(file.find("w")->format, Format::kQ8_0);
  EXPECT_EQ(file.find("w")->shape, (std::vector<int64_t>{2, 64}));
}

TEST(SafetensorsTest, ASingleFileIsACheckpointWithItsMetadata) {
  const TempFolder folder;
  const auto checkpoint = open_safetensors(folder.write(
      "x.safetensors", safetensors_bytes(R"({"__metadata__":{"model":"tiny"},"a":{"dtype":"I32","shape":[2],)"
                                         R"("data_offsets":[0,8]}})",
                                         zeros(8))));
  EXPECT_EQ(checkpoint->metadata().string("model"), "tiny");
  EXPECT_EQ(checkpoint->metadata().integer("absent"), std::nullopt);
  EXPECT_THROW(checkpoint->metadata().integer("model"), Error);
  EXPECT_EQ(checkpoint->find("a")->format, Format::kI32);
  EXPECT_THROW(matrix_of(*checkpoint, *checkpoint->find("a")), Error);
}

TEST(SafetensorsWriterTest, RandomFilesOfAllFormatsReadBackTheSame) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    uint64_t draws = 0;
    const auto random = [&](uint64_t bound) { return philox(seed, draws++).x[0] % bound; };
    const auto random_bytes = [&](int64_t n) {
      std::string bytes(static_cast<size_t>(n), ' ');
      for (char& c : bytes) c = static_cast<char>(random(256));
      return bytes;
    };
    std::vector<SafetensorsEntry> entries;
    std::vector<std::string> codes, scales;
    for (uint64_t i = 0, n = random(10); i < n; ++i) {
      SafetensorsEntry entry;
      entry.format = static_cast<Format>(random(kFormatCount));
      entry.name = fmt::format("layer \"{}\" é\n", i);
      int64_t n_rows = 1;
      for (uint64_t d = 0, n_dims = random(3); d < n_dims; ++d) {
        entry.shape.push_back(static_cast<int64_t>(1 + random(4)));
        n_rows *= entry.shape.back();
      }
      entry.shape.push_back(static_cast<int64_t>(1 + random(3)) * info(entry.format).block_weights);
      codes.push_back(random_bytes(n_rows * row_bytes(entry.format, entry.shape.back())));
      scales.push_back(random_bytes(n_rows * row_scale_bytes(entry.format, entry.shape.back())));
      entries.push_back(entry);
    }
    const TempFolder folder;
    const std::string path = folder.path("x.safetensors");
    const std::vector<std::pair<std::string, std::string>> metadata = {{"format", "pt"}, {"note", "a\"b\\é"}};
    {
      SafetensorsWriter writer(path, entries, metadata);
      for (size_t i = entries.size(); i-- > 0;) {  // backwards and in pieces: the order is the caller's
        if (!scales[i].empty()) writer.write_scales(i, as_bytes(scales[i]));
        const size_t cut = random(codes[i].size() + 1);
        writer.write(i, as_bytes(codes[i]).first(cut));
        writer.write(i, as_bytes(codes[i]).subspan(cut));
      }
      EXPECT_FALSE(std::filesystem::exists(path)) << "visible before it is complete";
      writer.finish();
    }
    const auto checkpoint = open_safetensors(path);
    EXPECT_EQ(checkpoint->metadata().string("note"), "a\"b\\é");
    for (size_t i = 0; i < entries.size(); ++i) {
      const TensorInfo* tensor = checkpoint->find(entries[i].name);
      ASSERT_NE(tensor, nullptr);
      EXPECT_EQ(tensor->format, entries[i].format);
      EXPECT_EQ(tensor->shape, entries[i].shape);
      EXPECT_EQ(bytes_of(tensor->data), codes[i]);
      if (tensor->format >= Format::kI32) continue;
      const HostMatrix matrix = matrix_of(*checkpoint, *tensor);
      EXPECT_EQ(matrix.bytes(), static_cast<int64_t>(codes[i].size() + scales[i].size()));
      if (scales[i].empty()) continue;
      EXPECT_EQ(std::memcmp(matrix.scales, scales[i].data(), scales[i].size()), 0);
      EXPECT_EQ(companions_of(*checkpoint, *tensor), std::vector<std::string>{entries[i].name + "_scale"});
    }
    int64_t n_files = 0;
    for ([[maybe_unused]] const auto& one : std::filesystem::directory_iterator(folder.path())) ++n_files;
    EXPECT_EQ(n_files, 1) << "a partial file is left";
  }
}

TEST(SafetensorsWriterTest, AnUnfinishedFileLeavesTheOldOneAlone) {
  const TempFolder folder;
  const std::string path = folder.write("x.safetensors", "old");
  {
    SafetensorsWriter writer(path, {{"a", Format::kF32, {2}}});
    writer.write(0, as_bytes("1234"));
  }
  std::ifstream in(path);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(SafetensorsWriterTest, NamesAndPathsAreChecked) {
  const TempFolder folder;
  const std::string path = folder.path("x.safetensors");
  const auto write = [&](std::vector<SafetensorsEntry> entries,
                         std::vector<std::pair<std::string, std::string>> metadata = {}) {
    return catch_error([&] { SafetensorsWriter(path, std::move(entries), metadata); });
  };
  expect_caught(write({{"a", Format::kF32, {1}}, {"a", Format::kF32, {1}}}), ErrorCode::kBadInput,
                {"'a' occurs twice"});
  expect_caught(write({{"a", Format::kFp8, {1}}, {"a_scale", Format::kF32, {1}}}), ErrorCode::kBadInput,
                {"'a_scale' occurs twice"});
  expect_caught(write({{"a\xff", Format::kF32, {1}}}), ErrorCode::kBadInput, {"not UTF-8"});
  expect_caught(write({}, {{"k", "1"}, {"k", "2"}}), ErrorCode::kBadInput, {"metadata key 'k' occurs twice"});
  expect_caught(catch_error([&] { SafetensorsWriter(folder.path("no/x"), {}); }), ErrorCode::kIo,
                {folder.path("no/x") + ": cannot create: No such file"});
  expect_caught(catch_error([&] { SafetensorsWriter(folder.path("no/x"), {}, {}, "model/x"); }), ErrorCode::kIo, {"model/x: cannot create"});
}

TEST(SafetensorsWriterTest, TensorsLieAtMultiplesOfTheirElement) {
  const TempFolder folder;
  const std::string path = folder.path("x.safetensors");
  const std::string three = "abc", eight = "12345678", four = "wxyz";
  const SafetensorsTensor tensors[] = {{{"odd", Format::kU8, {3}}, as_bytes(three), {}},
                                       {{"ids", Format::kI64, {1}}, as_bytes(eight), {}},
                                       {{"f", Format::kF32, {1}}, as_bytes(four), {}}};
  write_safetensors(path, tensors);
  const SafetensorsFile file(path);
  for (const TensorInfo& tensor : file.tensors())
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data.data()) % static_cast<size_t>(info(tensor.format).block_bytes),
              0u);
}

// --- quantised matrices ----------------------------------------------------------------------------------------------

TEST(MatrixOfTest, WhatQuantisingWroteDecodesTheSame) {
  constexpr int64_t kStack = 2, kRows = 3, kCols = 256;
  std::vector<float> weights(kStack * kRows * kCols);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = to_unit_float(philox(1, i).x[0]) - 0.5f;
  for (const Format format : {Format::kFp4G128, Format::kFp8, Format::kQ4_K, Format::kBf16}) {
    const HostMatrix written = encode_matrix("experts", format, weights.data(), kRows, kCols, kStack);
    const int64_t codes_bytes = kStack * kRows * row_bytes(format, kCols);
    const TempFolder folder;
    const SafetensorsTensor tensor = {
        {"experts", format, {kStack, kRows, kCols}},
        {written.codes, static_cast<size_t>(codes_bytes)},
        {written.scales, static_cast<size_t>(written.bytes() - codes_bytes)}};
    write_safetensors(folder.path("x.safetensors"), {&tensor, 1});
    const auto checkpoint = open_safetensors(folder.path("x.safetensors"));
    const HostMatrix read = matrix_of(*checkpoint, *checkpoint->find("experts"));
    ASSERT_EQ(read.stack, kStack);
    ASSERT_EQ(read.rows, kRows);
    ASSERT_EQ(read.cols, kCols);
    std::vector<float> a(kCols), b(kCols);
    for (int64_t expert = 0; expert < kStack; ++expert)
      for (int64_t row = 0; row < kRows; ++row) {
        decode_row(written, expert, row, a.data());
        decode_row(read, expert, row, b.data());
        EXPECT_EQ(a, b) << info(format).name;
      }
  }
}

// A file with an FP8 matrix of 2 rows and 4 columns named w, and one more tensor.
std::string fp8_file(const std::string& name, const std::string& dtype, const std::string& shape,
                     const std::string& data) {
  return safetensors_bytes(
      fmt::format(R"({{"w":{{"dtype":"F8_E4M3","shape":[2,4],"data_offsets":[0,8]}},)"
                  R"("{}":{{"dtype":"{}","shape":{},"data_offsets":[8,{}]}}}})",
                  name, dtype, shape, 8 + data.size()),
      std::string("\x38\x40\xb8\x00\x38\x38\x38\x7e", 8) + data);  // 1 2 -1 0 | 1 1 1 448
}

TEST(MatrixOfTest, Fp8OfHuggingFaceHasScalesByRowOrByTensor) {
  const std::string bf16 = raw(f32_to_bf16(0.5f)) + raw(f32_to_bf16(3.0f));
  const std::string f32 = raw(0.5f) + raw(3.0f);
  const std::vector<float> by_row = {0.5f, 1.0f, -0.5f, 0.0f, 3.0f, 3.0f, 3.0f, 1344.0f};
  const std::vector<float> by_tensor = {0.5f, 1.0f, -0.5f, 0.0f, 0.5f, 0.5f, 0.5f, 224.0f};
  const struct {
    std::string dtype, shape, data;
    std::vector<float> expected;
  } cases[] = {{"F32", "[2,1]", f32, by_row},        {"F32", "[2]", f32, by_row},       {"BF16", "[2,1]", bf16, by_row},
               {"F32", "[]", raw(0.5f), by_tensor},  {"F32", "[1]", raw(0.5f), by_tensor},
               {"F16", "[1]", raw(f32_to_f16(0.5f)), by_tensor}};
  for (const auto& one : cases) {
    const TempFolder folder;
    const auto checkpoint =
        open_safetensors(folder.write("x.safetensors", fp8_file("w_scale", one.dtype, one.shape, one.data)));
    EXPECT_EQ(floats_of(*checkpoint, *checkpoint->find("w")), one.expected) << one.dtype << one.shape;
    EXPECT_EQ(companions_of(*checkpoint, *checkpoint->find("w")), std::vector<std::string>{"w_scale"});
  }
}

TEST(MatrixOfTest, WrongOrMissingScalesAreNamed) {
  const auto message = [](const std::string& bytes) {
    const TempFolder folder;
    const auto checkpoint = open_safetensors(folder.write("x.safetensors", bytes));
    return catch_error([&] { matrix_of(*checkpoint, *checkpoint->find("w")); });
  };
  expect_caught(message(fp8_file("other", "F32", "[1]", raw(1.0f))), ErrorCode::kBadInput,
                {"tensor 'w' is fp8, but its scales 'w_scale' are missing"});
  expect_caught(message(fp8_file("w_scale_inv", "F32", "[1,1]", raw(1.0f))), ErrorCode::kUnsupported,
                {"tensor 'w' has block scales ('_scale_inv')"});
  expect_caught(message(fp8_file("w_scale", "F32", "[3]", zeros(12))), ErrorCode::kBadInput,
                {"tensor 'w_scale' is f32 [3], expected 2 floats"});
  expect_caught(message(fp8_file("w_scale", "I32", "[2]", zeros(8))), ErrorCode::kBadInput, {"'w_scale' is i32 [2]"});
  expect_caught(message(safetensors_bytes(
                    R"({"__metadata__":{"beryl.formats":"{\"w\":\"fp4_g128\"}"},"w":{"dtype":"U8","shape":[1,64],)"
                    R"("data_offsets":[0,64]},"w_scale":{"dtype":"BF16","shape":[1,2],"data_offsets":[64,68]}})",
                    zeros(68))),
                ErrorCode::kBadInput, {"tensor 'w_scale' is bf16 [1, 2], expected bf16 [1, 1]"});
  expect_caught(message(safetensors_bytes(R"({"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})", zeros(8))),
                ErrorCode::kUnsupported, {"tensor 'w' holds u8 and no known weight format"});
  expect_caught(message(safetensors_bytes(R"({"w":{"dtype":"F32","shape":[0,8],"data_offsets":[0,0]}})", "")),
                ErrorCode::kBadInput, {"tensor 'w' is f32 [0, 8], which is empty"});
}

// --- folders ---------------------------------------------------------------------------------------------------------

std::string one_tensor(const std::string& name, char fill = 'x') {
  return safetensors_bytes(fmt::format(R"({{"{}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}})", name),
                           std::string(4, fill));
}

TEST(HuggingFaceTest, AFolderGivesConfigAndTensors) {
  const TempFolder folder;
  folder.write("model.safetensors", one_tensor("a"));
  folder.write("config.json", R"({"hidden_size": 64, "rope_parameters": {"full_attention": {"rope_theta": 1e6, "n": 3}},
    "layer_types": ["s", "f"], "tie": true, "none": null, "eos_token_id": [1, 106], "flags": [true, false],
    "floats": [0.5, 2], "a.b": {"c.d": 5}, "name": "gemma", "one": ["x"], "empty": {}, "big": 18446744073709551615})");
  const auto checkpoint = open_checkpoint(folder.path());
  EXPECT_EQ(checkpoint->container(), Container::kHuggingFace);
  EXPECT_EQ(checkpoint->tensors().size(), 1u);
  const Metadata& m = checkpoint->metadata();
  EXPECT_EQ(m.integer("hidden_size"), 64);
  EXPECT_EQ(m.number("hidden_size"), 64.0);
  EXPECT_EQ(m.number("rope_parameters.full_attention.rope_theta"), 1e6);
  EXPECT_EQ(m.integer("rope_parameters.full_attention.n"), 3);
  EXPECT_EQ(m.boolean("tie"), true);
  EXPECT_EQ(m.string("name"), "gemma");
  EXPECT_EQ(m.integers("eos_token_id"), (std::vector<int64_t>{1, 106}));
  EXPECT_EQ(m.integers("flags"), (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(m.floats("floats"), (std::vector<float>{0.5f, 2.0f}));
  EXPECT_EQ((*m.strings("layer_types"))[1], "f");
  EXPECT_EQ(m.integer("a.b.c.d"), 5);
  EXPECT_FALSE(m.has("none"));
  EXPECT_EQ(m.integer("none"), std::nullopt);
  EXPECT_FALSE(m.has("rope_parameters.full_attention.absent"));
  EXPECT_FALSE(m.has("hidden_size.x"));
  EXPECT_TRUE(m.is_array("layer_types"));
  EXPECT_TRUE(m.has("rope_parameters"));
  EXPECT_EQ(m.describe("rope_parameters"), "object of 1 keys");
  EXPECT_EQ(m.describe("none"), "null");
  EXPECT_EQ(m.describe("absent"), "absent");
  EXPECT_EQ(m.describe("eos_token_id"), "array of 2: 1, ...");
  EXPECT_EQ(m.describe("one"), "array of 1: string 'x'");
  EXPECT_EQ(m.keys()[1], "rope_parameters.full_attention.rope_theta");
  const std::string prefix = folder.path("config.json") + ": ";
  const auto message = [](const std::function<void()>& call) { return catch_error(call).message; };
  EXPECT_EQ(message([&] { m.integer("name"); }), prefix + "'name' is string 'gemma', expected an integer below 2^63");
  EXPECT_EQ(message([&] { m.integer("big"); }),
            prefix + "'big' is 18446744073709551615, expected an integer below 2^63");
  EXPECT_EQ(message([&] { m.boolean("hidden_size"); }), prefix + "'hidden_size' is 64, expected a bool");
  EXPECT_EQ(message([&] { m.integers("name"); }),
            prefix + "'name' is string 'gemma', expected an array of integers or bools");
  EXPECT_EQ(message([&] { m.strings("flags"); }),
            prefix + "'flags' is array of 2: true, ..., expected an array of strings");
}

TEST(HuggingFaceTest, FaultyConfigsAreOneLine) {
  const auto message = [](std::string_view config) {
    const TempFolder folder;
    folder.write("model.safetensors", one_tensor("a"));
    folder.write("config.json", config);
    const Caught caught = catch_error([&] { open_checkpoint(folder.path()); });
    EXPECT_TRUE(caught.message.starts_with(folder.path("config.json") + ": ")) << caught.message;
    return caught;
  };
  expect_caught(message(""), ErrorCode::kBadInput, {"not valid JSON", "unexpected end of input"});
  expect_caught(message("{\n\n"), ErrorCode::kBadInput, {"not valid JSON"});
  expect_caught(message(std::string("{}\n\0{}", 6)), ErrorCode::kBadInput, {"not valid JSON: a NUL at byte 3"});
  expect_caught(message("[1]"), ErrorCode::kBadInput, {"holds a JSON array, expected an object"});
  expect_caught(message("{\"a\": \"\xff\xfe\"}"), ErrorCode::kBadInput, {"not valid JSON", "ill-formed UTF-8"});
  expect_caught(message("\xff\xfe{}"), ErrorCode::kBadInput, {"not valid JSON"});
  expect_caught(message(R"({"a": 1e999})"), ErrorCode::kBadInput, {"not valid JSON", "number overflow"});
  expect_caught(message(R"({"a": NaN})"), ErrorCode::kBadInput, {"not valid JSON"});
  expect_caught(message(R"({"a": {"b": 1, "b": 2}})"), ErrorCode::kBadInput, {"key 'b' occurs twice"});
  expect_caught(message(R"({"a": )" + std::string(100000, '[')), ErrorCode::kBadInput,
                {"nested deeper than 64 levels"});
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += R"({"a":)";
  expect_caught(message(deep), ErrorCode::kBadInput, {"nested deeper than 64 levels"});
  std::string wide = "{";
  for (int i = 0; i < 20000; ++i) wide += fmt::format("\"k{}\":1,", i);
  expect_caught(message(wide + "\"z\":1}"), ErrorCode::kBadInput, {"more than 16384 keys in an object"});
  expect_caught(message("{}" + std::string(kMaxConfigBytes, ' ')), ErrorCode::kBadInput, {"4194306 bytes, at most"});
}

TEST(HuggingFaceTest, ShardsAreFoundByTheirIndex) {
  const auto open = [](const std::string& index, const TempFolder& folder) {
    folder.write("config.json", "{}");
    folder.write("model.safetensors.index.json", index);
    folder.write("one.safetensors", one_tensor("a", '1'));
    folder.write("two.safetensors", one_tensor("b", '2'));
    folder.write("copy.safetensors", one_tensor("a", '3'));
    return open_checkpoint(folder.path());
  };
  {
    const TempFolder folder;
    const auto checkpoint =
        open(R"({"metadata":{"total_size":8},"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})", folder);
    ASSERT_EQ(checkpoint->tensors().size(), 2u);
    EXPECT_EQ(bytes_of(checkpoint->find("b")->data), "2222");
    EXPECT_TRUE(checkpoint->warnings().empty());
  }
  const auto fault = [&](const std::string& index, const std::vector<std::string>& parts) {
    const TempFolder folder;
    expect_caught(catch_error([&] { open(index, folder); }), ErrorCode::kBadInput, parts);
  };
  fault("{}", {"has no object 'weight_map'"});
  fault("[]", {"has no object 'weight_map'"});
  fault(R"({"weight_map":[]})", {"has no object 'weight_map'"});
  fault(R"({"weight_map":{}})", {"'weight_map' is empty"});
  fault(R"({"weight_map":{"a":1}})", {"'weight_map' gives 'a' a number"});
  fault(R"({"weight_map":{"a":"gone.safetensors"}})", {"shard 'gone.safetensors' is missing"});
  fault(R"({"weight_map":{"a":"../x/one.safetensors"}})", {"expected a plain file name"});
  fault(R"({"weight_map":{"a":"/etc/passwd"}})", {"expected a plain file name"});
  fault(R"({"weight_map":{"a":".."}})", {"expected a plain file name"});
  fault(R"({"weight_map":{"a":""}})", {"expected a plain file name"});
  fault(R"({"weight_map":{"a":"one.safetensors\u0000"}})", {"expected a plain file name"});
  fault(R"({"weight_map":{"b":"one.safetensors"}})", {"tensor 'b' should lie in 'one.safetensors', but does not"});
  fault(R"({"weight_map":{"a":"one.safetensors","a":"two.safetensors"}})", {"key 'a' occurs twice"});
  fault(R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors","A":"copy.safetensors"}})",
        {"tensor 'A' should lie in 'copy.safetensors', but does not"});
}

TEST(HuggingFaceTest, TensorsMustBeUniqueAmongShards) {
  const TempFolder folder;
  folder.write("config.json", "{}");
  folder.write("model.safetensors.index.json",
               R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})");
  folder.write("one.safetensors", one_tensor("a"));
  const std::string both =
      safetensors_bytes(R"({"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                        R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                        zeros(8));
  folder.write("two.safetensors", both);
  expect_caught(catch_error([&] { open_checkpoint(folder.path()); }), ErrorCode::kBadInput,
                {"tensor 'a' lies in two shards"});
  folder.write("model.safetensors.index.json", R"({"weight_map":{"b":"two.safetensors"}})");
  const auto checkpoint = open_checkpoint(folder.path());
  EXPECT_EQ(checkpoint->tensors().size(), 2u);
  ASSERT_EQ(checkpoint->warnings().size(), 1u);
  EXPECT_NE(checkpoint->warnings()[0].find("1 tensors of 'two.safetensors' are not in the index"), std::string::npos);
}

TEST(OpenCheckpointTest, WhatIsNoModelIsNamed) {
  const TempFolder folder;
  expect_caught(catch_error([&] { open_checkpoint(folder.path("nothing")); }), ErrorCode::kIo,
                {"nothing: cannot open: No such file or directory"});
  expect_caught(catch_error([&] { open_checkpoint(folder.path()); }), ErrorCode::kBadInput, {"config.json: missing"});
  folder.write("config.json", "{}");
  expect_caught(catch_error([&] { open_checkpoint(folder.path()); }), ErrorCode::kBadInput,
                {"holds neither model.safetensors nor model.safetensors.index.json"});
  const std::string file = folder.write("model.safetensors", one_tensor("a"));
  expect_caught(catch_error([&] { open_checkpoint(file); }), ErrorCode::kBadInput,
                {"give the folder with config.json"});
  const std::string text = folder.write("notes.txt", "hello world");
  expect_caught(catch_error([&] { open_checkpoint(text); }), ErrorCode::kBadInput,
                {"the first bytes are 'hell', expected 'GGUF'"});
  expect_caught(catch_error([&] { open_checkpoint(text + "/"); }), ErrorCode::kIo,
                {"notes.txt/: cannot open: Not a directory"});
  const std::string loop = folder.path("loop");
  std::filesystem::create_symlink(loop, loop);
  expect_caught(catch_error([&] { open_checkpoint(loop); }), ErrorCode::kIo,
                {"loop: cannot open: Too many levels of symbolic links"});
  const TempFolder looped;
  std::filesystem::create_symlink(looped.path("config.json"), looped.path("config.json"));
  expect_caught(catch_error([&] { open_checkpoint(looped.path()); }), ErrorCode::kIo,
                {"config.json: cannot open: Too many levels of symbolic links"});
}

// Opening one in the ordinary way waits for a writer, for ever.
TEST(OpenCheckpointTest, FifosAreRefusedAtOnce) {
  const TempFolder folder;
  const auto make_fifo = [&](const std::string& name) {
    ASSERT_EQ(::mkfifo(folder.path(name).c_str(), 0600), 0);
  };
  make_fifo("model.gguf");
  expect_caught(catch_error([&] { open_checkpoint(folder.path("model.gguf")); }), ErrorCode::kIo,
                {"model.gguf: not a regular file"});
  make_fifo("config.json");
  expect_caught(catch_error([&] { open_checkpoint(folder.path()); }), ErrorCode::kIo,
                {"config.json: not a regular file"});
  folder.write("config.json", "{}");
  make_fifo("model.safetensors");
  expect_caught(catch_error([&] { open_checkpoint(folder.path()); }), ErrorCode::kIo,
                {"model.safetensors: not a regular file"});
}

}  // namespace
}  // namespace beryl
