// What: a valid GGUF file reads back as it was written, and each kind of damage is one line that names the file, the
//       field and the value.
// How:  files are built byte by byte (test_files.h); random valid files are read back and compared field by field.
#include "weights/gguf.h"

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/rng.h"
#include "weights/test_files.h"

namespace beryl {
namespace {

using namespace test;

constexpr uint32_t kTensorF32 = 0, kTensorQ4_0 = 2, kTensorQ4_K = 12, kTensorNvfp4 = 40;

std::string zeros(size_t n) { return std::string(n, '\0'); }

std::string bytes_of(std::span<const std::byte> data) {
  return {reinterpret_cast<const char*>(data.data()), data.size()};
}

// A small valid model file.
GgufBuilder small() {
  GgufBuilder file;
  file.text("general.architecture", "llama").scalar<uint32_t>("llama.block_count", kU32, 2);
  file.tensor("a.weight", {32, 2}, kTensorQ4_0, zeros(36)).tensor("b.weight", {8}, kTensorF32, zeros(32));
  return file;
}

// The Error that opening these bytes throws; the test fails when there is none.
Error error_of(const std::string& bytes) {
  const TempFolder folder;
  const std::string path = folder.write("model.gguf", bytes);
  try {
    open_gguf(path);
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_TRUE(message.starts_with(path + ": ")) << message;
    EXPECT_EQ(message.find('\n'), message.npos) << message;
    return error;
  }
  ADD_FAILURE() << "no error";
  return Error(ErrorCode::kIo, "");
}

void expect_error(const std::string& bytes, ErrorCode code, const std::vector<std::string>& parts) {
  const Error error = error_of(bytes);
  EXPECT_EQ(error.code, code) << error.what();
  for (const std::string& part : parts)
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << "'" << part << "' not in: " << error.what();
}

void expect_bad(const std::string& bytes, const std::vector<std::string>& parts) {
  expect_error(bytes, ErrorCode::kBadInput, parts);
}

std::unique_ptr<Checkpoint> open(const TempFolder& folder, GgufBuilder& file) {
  return open_gguf(folder.write("model.gguf", file.build()));
}

TEST(GgufTest, EveryValueTypeReadsBack) {
  const TempFolder folder;
  GgufBuilder file;
  file.scalar<uint8_t>("u8", kU8, 200).scalar<int8_t>("i8", kI8, -100).scalar<uint16_t>("u16", kU16, 60000);
  file.scalar<int16_t>("i16", kI16, -30000).scalar<uint32_t>("u32", kU32, 4000000000u).scalar<int32_t>("i32", kI32, -7);
  file.scalar<uint64_t>("u64", kU64, uint64_t{1} << 62).scalar<int64_t>("i64", kI64, INT64_MIN);
  file.scalar<float>("f32", kF32, 0.1f).scalar<double>("f64", kF64, 1e300).scalar<uint8_t>("yes", kBool, 1);
  file.text("text", std::string_view("a\0b\xff", 4)).text("empty", "");
  file.array<int32_t>("ints", kI32, {3, -1}).array<uint8_t>("flags", kBool, {1, 0, 1});
  file.array<float>("floats", kF32, {0.5f, -2.0f}).array<double>("doubles", kF64, {0.25});
  file.array<float>("none", kF32, {});
  file.strings("words", {"one", "", "three"});
  file.scalar<uint64_t>("huge", kU64, UINT64_MAX);
  file.array("nested", kArray, 2, raw<uint32_t>(kI8) + raw<uint64_t>(2) + "ab" + raw<uint32_t>(kString) +
                                      raw<uint64_t>(1) + gguf_string("x"));
  const auto checkpoint = open(folder, file);
  const Metadata& m = checkpoint->metadata();
  EXPECT_EQ(m.integer("u8"), 200);
  EXPECT_EQ(m.integer("i8"), -100);
  EXPECT_EQ(m.integer("u16"), 60000);
  EXPECT_EQ(m.integer("i16"), -30000);
  EXPECT_EQ(m.integer("u32"), 4000000000);
  EXPECT_EQ(m.integer("i32"), -7);
  EXPECT_EQ(m.integer("u64"), int64_t{1} << 62);
  EXPECT_EQ(m.integer("i64"), INT64_MIN);
  EXPECT_EQ(m.number("f32"), double{0.1f});
  EXPECT_EQ(m.number("f64"), 1e300);
  EXPECT_EQ(m.number("i32"), -7.0);
  EXPECT_EQ(m.number("huge"), static_cast<double>(UINT64_MAX));
  EXPECT_EQ(m.boolean("yes"), true);
  EXPECT_EQ(m.string("text"), std::string("a\0b\xff", 4));
  EXPECT_EQ(m.string("empty"), "");
  EXPECT_EQ(m.integers("ints"), (std::vector<int64_t>{3, -1}));
  EXPECT_EQ(m.integers("flags"), (std::vector<int64_t>{1, 0, 1}));
  EXPECT_EQ(m.floats("floats"), (std::vector<float>{0.5f, -2.0f}));
  EXPECT_EQ(m.floats("doubles"), (std::vector<float>{0.25f}));
  EXPECT_EQ(m.floats("ints"), (std::vector<float>{3.0f, -1.0f}));
  EXPECT_EQ(m.floats("none"), std::vector<float>{});
  ASSERT_NE(m.strings("words"), nullptr);
  ASSERT_EQ(m.strings("words")->size(), 3u);
  EXPECT_EQ((*m.strings("words"))[1], "");
  EXPECT_EQ((*m.strings("words"))[2], "three");
  EXPECT_TRUE(m.is_array("nested"));
  EXPECT_FALSE(m.is_array("u8"));
  EXPECT_TRUE(m.has("u8"));
  EXPECT_FALSE(m.has("u"));
  EXPECT_EQ(m.integer("absent"), std::nullopt);
  EXPECT_EQ(m.strings("absent"), nullptr);
  EXPECT_EQ(m.describe("ints"), "array of 2 i32: 3, -1");
  EXPECT_EQ(m.describe("nested"), "array of 2 array");
  EXPECT_EQ(m.describe("text"), "string 'a\\x00b\\xff'");
  EXPECT_EQ(m.keys().front(), "u8");
  EXPECT_EQ(m.keys().size(), file.fields.size());
}

TEST(GgufTest, AValueOfAnotherTypeIsAnErrorThatNamesKeyTypeAndWish) {
  const TempFolder folder;
  GgufBuilder file;
  file.text("text", "x").scalar<uint64_t>("huge", kU64, UINT64_MAX).array<int32_t>("ints", kI32, {1});
  file.strings("words", {"a"}).array<uint64_t>("huges", kU64, {1, UINT64_MAX});
  const auto checkpoint = open(folder, file);
  const Metadata& m = checkpoint->metadata();
  const auto message = [](const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code, ErrorCode::kBadInput);
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const std::string prefix = checkpoint->path() + ": ";
  EXPECT_EQ(message([&] { m.integer("text"); }), prefix + "'text' is string 'x', expected an integer");
  EXPECT_EQ(message([&] { m.integer("huge"); }),
            prefix + "'huge' is u64 18446744073709551615, expected an integer below 2^63");
  EXPECT_EQ(message([&] { m.integer("ints"); }), prefix + "'ints' is array of 1 i32: 1, expected an integer");
  EXPECT_EQ(message([&] { m.boolean("huge"); }), prefix + "'huge' is u64 18446744073709551615, expected a bool");
  EXPECT_EQ(message([&] { m.number("words"); }), prefix + "'words' is array of 1 string: 'a', expected a number");
  EXPECT_EQ(message([&] { m.string("ints"); }), prefix + "'ints' is array of 1 i32: 1, expected a string");
  EXPECT_EQ(message([&] { m.strings("ints"); }), prefix + "'ints' is array of 1 i32: 1, expected an array of strings");
  EXPECT_EQ(message([&] { m.integers("words"); }),
            prefix + "'words' is array of 1 string: 'a', expected an array of integers or bools");
  EXPECT_EQ(message([&] { m.floats("text"); }), prefix + "'text' is string 'x', expected an array of numbers");
  EXPECT_EQ(message([&] { m.integers("huges"); }),
            prefix + "element 1 of 'huges' is 18446744073709551615, expected an integer below 2^63");
}

// Random valid files read back the same: names, shapes (reversed), formats, data, for both versions and all alignments.
TEST(GgufTest, RandomValidFilesReadBackTheSame) {
  const struct {
    uint32_t type;
    Format format;
  } types[] = {{0, Format::kF32},   {1, Format::kF16},   {30, Format::kBf16}, {2, Format::kQ4_0},  {3, Format::kQ4_1},
               {6, Format::kQ5_0},  {7, Format::kQ5_1},  {8, Format::kQ8_0},  {12, Format::kQ4_K}, {13, Format::kQ5_K},
               {14, Format::kQ6_K}, {39, Format::kMxfp4}, {40, Format::kNvfp4}, {26, Format::kI32}, {27, Format::kI64}};
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    uint64_t draws = 0;
    const auto random = [&](uint64_t bound) { return philox(seed, draws++).x[0] % bound; };
    const auto random_text = [&](size_t n) {
      std::string text(n, ' ');
      for (char& c : text) c = static_cast<char>(random(256));
      return text;
    };
    GgufBuilder file;
    file.version = 2 + static_cast<uint32_t>(random(2));
    if (random(2) == 0) {
      file.alignment = 8u << random(8);
      file.scalar("general.alignment", kU32, file.alignment);
    }
    std::vector<int64_t> integers;
    std::vector<std::vector<std::string>> lists;
    for (uint64_t i = 0, n = random(20); i < n; ++i) {
      integers.push_back(static_cast<int32_t>(random(UINT32_MAX)));
      file.scalar(fmt::format("i{}", i), kI64, integers.back());
      auto& list = lists.emplace_back(random(9));
      for (std::string& word : list) word = random_text(random(6));
      file.strings(fmt::format("s{}", i), list);
    }
    std::vector<Format> formats;
    for (uint64_t i = 0, n = random(12); i < n; ++i) {
      const auto& type = types[random(std::size(types))];
      formats.push_back(type.format);
      std::vector<uint64_t> dims = {(1 + random(3)) * static_cast<uint64_t>(info(type.format).block_weights)};
      uint64_t n_rows = 1;
      for (uint64_t d = 0, n_more = random(4); d < n_more; ++d) {
        dims.push_back(1 + random(3));
        n_rows *= dims.back();
      }
      const auto n_bytes = static_cast<uint64_t>(row_bytes(type.format, static_cast<int64_t>(dims[0]))) * n_rows;
      file.tensor(fmt::format("tensor {} \xc3\xa9", i), dims, type.type, random_text(n_bytes));
    }
    const TempFolder folder;
    const auto checkpoint = open(folder, file);
    for (size_t i = 0; i < integers.size(); ++i) {
      EXPECT_EQ(checkpoint->metadata().integer(fmt::format("i{}", i)), integers[i]);
      const auto list = checkpoint->metadata().strings(fmt::format("s{}", i));
      ASSERT_EQ(list->size(), lists[i].size());
      for (size_t j = 0; j < lists[i].size(); ++j) EXPECT_EQ((*list)[j], lists[i][j]);
    }
    ASSERT_EQ(checkpoint->tensors().size(), file.tensors.size()) << "seed " << seed;
    for (size_t i = 0; i < file.tensors.size(); ++i) {
      const TensorInfo& tensor = checkpoint->tensors()[i];
      const GgufTensor& written = file.tensors[i];
      EXPECT_EQ(tensor.name, written.name);
      EXPECT_EQ(tensor.format, formats[i]);
      EXPECT_EQ(tensor.shape, std::vector<int64_t>(written.dims.rbegin(), written.dims.rend()));
      EXPECT_EQ(bytes_of(tensor.data), written.data);
      EXPECT_EQ(checkpoint->find(written.name), &tensor);
    }
    EXPECT_EQ(checkpoint->find("tensor"), nullptr);
    EXPECT_TRUE(checkpoint->warnings().empty());
  }
}

TEST(GgufTest, AVocabularyWithoutTensorsOpens) {
  const TempFolder folder;
  GgufBuilder file;
  file.strings("tokenizer.ggml.tokens", {"a", "<0x0A>", "<0xfF>"});
  file.array<int32_t>("tokenizer.ggml.token_type", kI32, {1, 6, 6});
  EXPECT_EQ(open(folder, file)->tensors().size(), 0u);
}

TEST(GgufTest, AnotherMagicOrVersionIsRefused) {
  expect_bad("", {"the first bytes are ''", "expected 'GGUF'"});
  expect_bad("GGU", {"the first bytes are 'GGU'"});
  expect_bad("GGUF", {"the version at byte 4 needs 4 bytes, but the file ends at byte 4"});
  expect_bad(std::string("PK\3\4\n", 5) + zeros(50), {"'PK\\x03\\x04'"});
  GgufBuilder file = small();
  file.version = 1;
  expect_error(file.build(), ErrorCode::kUnsupported, {"GGUF version 1, expected 2 or 3"});
  file.version = 4;
  expect_error(file.build(), ErrorCode::kUnsupported, {"version 4"});
  file.version = 0;
  expect_error(file.build(), ErrorCode::kUnsupported, {"version 0"});
  file.version = 3u << 24;  // 3, big-endian
  expect_error(file.build(), ErrorCode::kUnsupported, {"big-endian", "convert it to little-endian"});
}

TEST(GgufTest, CountsThatTheFileCannotHoldAreRefused) {
  for (const int64_t count : {int64_t{1000}, INT64_MAX, int64_t{1} << 32}) {
    GgufBuilder file = small();
    file.n_fields = count;
    expect_bad(file.build(), {fmt::format("n_kv is {}", count), "holds at most"});
    file = small();
    file.n_tensors = count;
    expect_bad(file.build(), {fmt::format("n_tensors is {}", count), "holds at most"});
  }
  GgufBuilder file = small();
  file.n_fields = 3;  // fits, but the third "key" is a tensor's info
  expect_bad(file.build(), {});
  file = small();
  file.n_tensors = 3;
  expect_bad(file.build(), {});
}

TEST(GgufTest, LengthsPastTheFileAreRefused) {
  for (const uint64_t length : {UINT64_MAX, UINT64_MAX - 7, uint64_t{1} << 63, uint64_t{1} << 32, uint64_t{5000}}) {
    GgufBuilder file;
    file.fields.push_back(raw(length) + "key" + raw<uint32_t>(kU32) + raw<uint32_t>(1));
    expect_bad(file.build(), {"key 0", fmt::format("needs {} bytes", length)});
    file = GgufBuilder();
    file.field("name", kString, raw(length) + "abc");
    expect_bad(file.build(), {"the value of 'name'", fmt::format("needs {} bytes", length)});
    file = GgufBuilder();
    file.array("list", kString, 2, gguf_string("ok") + raw(length) + "abc");
    expect_bad(file.build(), {"string 1 of 'list'", fmt::format("needs {} bytes", length)});
    file = GgufBuilder();
    file.array("list", kString, length, gguf_string("ok"));
    expect_bad(file.build(), {"'list'", fmt::format("claims {} elements", length)});
    file = GgufBuilder();
    file.array("numbers", kF64, length, zeros(16));  // length * 8 wraps
    expect_bad(file.build(), {"'numbers'", fmt::format("claims {} elements of f64", length)});
    file = GgufBuilder();
    file.array("nested", kArray, length, raw<uint32_t>(kU8) + raw<uint64_t>(0));
    expect_bad(file.build(), {"'nested'", fmt::format("claims {} elements", length)});
    file = small();
    file.tensors[0].name = std::string(100, 'n');
    std::string bytes = file.build();
    const size_t at = bytes.find(file.tensors[0].name) - 8;
    bytes.replace(at, 8, raw(length));
    expect_bad(bytes, {"the name of tensor 0", fmt::format("needs {} bytes", length)});
  }
}

TEST(GgufTest, KeysMustBeUniqueNamedAndText) {
  GgufBuilder file = small();
  file.scalar<uint32_t>("llama.block_count", kU32, 3);
  expect_bad(file.build(), {"key 'llama.block_count' occurs twice"});
  file = small();
  file.scalar<uint32_t>("", kU32, 3);
  expect_bad(file.build(), {"key 2", "is empty"});
  file = small();
  file.scalar<uint32_t>("a\xffz\n", kU32, 3);
  expect_bad(file.build(), {"key 2", "not UTF-8", "'a\\xffz\\x0a'"});
  file = small();
  file.scalar<uint32_t>(std::string(kMaxGgufNameBytes + 1, 'k'), kU32, 3);
  expect_bad(file.build(), {"key 2", "65537 bytes"});
}

TEST(GgufTest, ValueTypesMustBeKnown) {
  GgufBuilder file;
  file.field("x", 13, zeros(8));
  expect_bad(file.build(), {"'x' has value type 13"});
  file = GgufBuilder();
  file.array("x", 0xffffffff, 1, zeros(8));
  expect_bad(file.build(), {"'x' has element type 4294967295"});
  file = GgufBuilder();
  file.array("x", kArray, 1, raw<uint32_t>(99) + raw<uint64_t>(1) + zeros(8));
  expect_bad(file.build(), {"'x' has element type 99"});
  file = GgufBuilder();
  file.scalar<uint8_t>("x", kBool, 2);
  expect_bad(file.build(), {"'x' is 2, expected a bool"});
  file = GgufBuilder();
  file.array<uint8_t>("x", kBool, {1, 255});
  expect_bad(file.build(), {"element 1 of 'x' is 255, expected a bool"});
  std::string nested = raw<uint32_t>(kU8) + raw<uint64_t>(0);
  for (int i = 0; i < 20; ++i) nested = raw<uint32_t>(kArray) + raw<uint64_t>(1) + nested;
  file = GgufBuilder();
  file.field("x", kArray, nested);
  expect_bad(file.build(), {"'x' nests arrays deeper than 8"});
}

TEST(GgufTest, DimensionsAreChecked) {
  const auto with = [](std::vector<uint64_t> dims, uint32_t type = kTensorF32) {
    GgufBuilder file;
    file.tensor("t", std::move(dims), type, zeros(64));
    return file.build();
  };
  expect_bad(with({1, 1, 1, 1, 1}), {"'t' has n_dims 5"});
  GgufBuilder file;
  file.tensor("t", {1}, kTensorF32, zeros(64));
  std::string bytes = file.build();
  bytes.replace(24 + 9, 4, raw<uint32_t>(0xffffffff));
  expect_bad(bytes, {"'t' has n_dims 4294967295"});
  expect_bad(with({0}), {"'t' has dimension 0 of 0"});
  expect_bad(with({4, 0}), {"'t' has dimension 1 of 0"});
  expect_bad(with({uint64_t{1} << 32, uint64_t{1} << 32}), {"'t' has more than 2^60 weights", "4294967296"});
  expect_bad(with({uint64_t{1} << 63, 2}), {"'t' has more than 2^60 weights"});
  expect_bad(with({UINT64_MAX}), {"'t' has more than 2^60 weights"});
  expect_bad(with({uint64_t{1} << 59, 2}), {"'t' takes 4611686018427387904 bytes", "64 bytes of data"});
  expect_bad(with({33}, kTensorQ4_0), {"'t' has rows of 33 weights, expected a multiple of 32 for Q4_0"});
  expect_bad(with({128}, kTensorQ4_K), {"rows of 128 weights, expected a multiple of 256 for Q4_K"});
  expect_bad(with({32}, kTensorNvfp4), {"rows of 32 weights, expected a multiple of 64 for NVFP4"});
}

TEST(GgufTest, ATensorWithoutDimensionsIsAScalar) {
  const TempFolder folder;
  GgufBuilder file;
  file.tensor("t", {}, kTensorF32, raw(2.5f));
  const auto checkpoint = open(folder, file);
  EXPECT_EQ(checkpoint->tensors()[0].shape, std::vector<int64_t>{});
  EXPECT_EQ(floats_of(*checkpoint, checkpoint->tensors()[0]), std::vector<float>{2.5f});
}

TEST(GgufTest, TensorTypesBeyondOursAreRefusedByName) {
  const auto with = [](uint32_t type) {
    GgufBuilder file;
    file.tensor("t", {256}, type, zeros(1024));
    return file.build();
  };
  expect_error(with(10), ErrorCode::kUnsupported, {"'t' has type Q2_K (10)"});
  expect_error(with(23), ErrorCode::kUnsupported, {"'t' has type IQ4_XS (23)"});
  expect_error(with(28), ErrorCode::kUnsupported, {"'t' has type F64 (28)"});
  expect_error(with(4), ErrorCode::kUnsupported, {"'t' has type 4, which beryl does not know"});
  expect_error(with(1000), ErrorCode::kUnsupported, {"'t' has type 1000"});
  expect_error(with(0xffffffff), ErrorCode::kUnsupported, {"'t' has type -1"});
}

TEST(GgufTest, AlignmentMustBeAModeratePowerOfTwoOfTypeU32) {
  for (const uint32_t alignment : {0u, 1u, 3u, 48u, 1u << 30, 1u << 31, UINT32_MAX}) {
    GgufBuilder file = small();
    file.scalar("general.alignment", kU32, alignment);
    expect_bad(file.build(), {fmt::format("'general.alignment' is u32 {}", alignment), "power of two from 8 to 65536"});
  }
  GgufBuilder file = small();
  file.text("general.alignment", "32");
  expect_bad(file.build(), {"'general.alignment' is string '32'"});
  file = small();
  file.scalar<uint64_t>("general.alignment", kU64, 32);
  expect_bad(file.build(), {"'general.alignment' is u64 32"});
}

TEST(GgufTest, OffsetsMustBeAlignedApartAndInside) {
  GgufBuilder file;
  file.tensor("a", {8}, kTensorF32, zeros(32), 0).tensor("b", {8}, kTensorF32, zeros(32), 0);
  expect_bad(file.build(), {"tensors", "'a'", "'b'", "overlap"});
  file = GgufBuilder();
  file.tensor("a", {16}, kTensorF32, zeros(64), 0).tensor("b", {8}, kTensorF32, zeros(32), 32);
  expect_bad(file.build(), {"'a' (offset 0, 64 bytes)", "'b' (offset 32)", "overlap"});
  file = GgufBuilder();
  file.tensor("a", {8}, kTensorF32, zeros(32), 16);
  expect_bad(file.build(), {"'a' has offset 16, expected a multiple of the alignment 32"});
  file = GgufBuilder();
  file.tensor("a", {8}, kTensorF32, zeros(31));
  expect_bad(file.build(), {"'a' takes 32 bytes at offset 0, but the file has 31 bytes of data"});
  for (const uint64_t offset : {uint64_t{1} << 32, uint64_t{1} << 63, UINT64_MAX - 31}) {
    file = GgufBuilder();
    file.tensor("a", {8}, kTensorF32, zeros(32));
    std::string bytes = file.build();
    bytes.replace(file.header_bytes - 8, 8, raw(offset));
    expect_bad(bytes, {"'a' takes 32 bytes", fmt::format("at offset {}", offset)});
  }
  file = GgufBuilder();
  file.tensor("a", {8}, kTensorF32, zeros(32)).tensor("a", {8}, kTensorF32, zeros(32));
  expect_bad(file.build(), {"tensor 'a' occurs twice"});
  file = GgufBuilder();
  file.tensor("", {8}, kTensorF32, zeros(32));
  expect_bad(file.build(), {"the name of tensor 0", "is empty"});
}

TEST(GgufTest, BytesAfterTheLastTensorAreToleratedWithAWarning) {
  const TempFolder folder;
  GgufBuilder file = small();
  const auto checkpoint = open_gguf(folder.write("m.gguf", file.build() + zeros(100)));
  ASSERT_EQ(checkpoint->warnings().size(), 1u);
  EXPECT_NE(checkpoint->warnings()[0].find("100 bytes after the last tensor"), std::string::npos);
}

// The last tensor ends 20 bytes into a unit of 32: up to 12 bytes of zeros behind it are padding.
TEST(GgufTest, PaddingIsNoRestAndAnythingElseIs) {
  const TempFolder folder;
  const auto warnings_of = [&](const std::string& behind) {
    GgufBuilder file;
    file.tensor("a", {5}, kTensorF32, zeros(20));
    const auto checkpoint = open_gguf(folder.write("m.gguf", file.build() + behind));
    return std::vector<std::string>(checkpoint->warnings().begin(), checkpoint->warnings().end());
  };
  for (const size_t n : {size_t{0}, size_t{1}, size_t{12}}) EXPECT_TRUE(warnings_of(zeros(n)).empty()) << n;
  const std::vector<std::pair<std::string, std::string>> rests = {
      {zeros(13), ": 1 bytes after"}, {zeros(12) + "x", ": 1 bytes after"}, {"x", ": 1 bytes after"}, {zeros(11) + "x", ": 12 bytes after"},
      {zeros(12) + "appended text", ": 13 bytes after"}};
  for (const auto& [behind, expected] : rests) {
    const std::vector<std::string> warnings = warnings_of(behind);
    ASSERT_EQ(warnings.size(), 1u) << expected;
    EXPECT_NE(warnings[0].find("m.gguf" + expected), std::string::npos) << warnings[0];
  }
}

TEST(GgufTest, BytesAfterAHeaderWithoutTensorsAreToldToo) {
  const TempFolder folder;
  GgufBuilder file;
  file.text("general.architecture", "llama");
  const std::string header = file.build();
  EXPECT_TRUE(open_gguf(folder.write("m.gguf", header))->warnings().empty());
  EXPECT_EQ(open_gguf(folder.write("m.gguf", header + std::string(64, 'x')))->warnings().size(), 1u);
}

TEST(GgufTest, BlockCountMustBeAModerateInteger) {
  const auto with = [](const std::function<void(GgufBuilder&)>& add) {
    GgufBuilder file;
    file.text("general.architecture", "gemma4");
    add(file);
    return file.build();
  };
  expect_bad(with([](auto& f) { f.text("gemma4.block_count", "30"); }), {"'gemma4.block_count' is string '30'"});
  expect_bad(with([](auto& f) { f.template scalar<float>("gemma4.block_count", kF32, 30.0f); }), {"is f32 30"});
  expect_bad(with([](auto& f) { f.template scalar<uint32_t>("gemma4.block_count", kU32, 513); }),
             {"'gemma4.block_count' is 513, expected 0 to 512"});
  expect_bad(with([](auto& f) { f.template scalar<int32_t>("gemma4.block_count", kI32, -1); }), {"is -1"});
  expect_bad(with([](auto& f) { f.template scalar<uint64_t>("gemma4.block_count", kU64, UINT64_MAX); }),
             {"'gemma4.block_count' is u64 18446744073709551615"});
  GgufBuilder file;
  file.scalar<uint32_t>("general.architecture", kU32, 1);
  expect_bad(file.build(), {"'general.architecture' is u32 1, expected a string"});
}

TEST(GgufTest, TheVocabularyMustBeConsistent) {
  for (const std::string token : {"<0x-1>", "<0xGG>", "<0x1>", "<0x100>", "0x0A", "<0x0A", ""}) {
    GgufBuilder file;
    file.strings("tokenizer.ggml.tokens", {"a", token}).array<int32_t>("tokenizer.ggml.token_type", kI32, {1, 6});
    expect_bad(file.build(), {fmt::format("token 1 is '{}' of type byte", token)});
  }
  GgufBuilder file;
  file.strings("tokenizer.ggml.tokens", {"a", "b"}).array<int32_t>("tokenizer.ggml.token_type", kI32, {1});
  expect_bad(file.build(), {"'tokenizer.ggml.token_type' is array of 1 i32: 1, expected an array of 2"});
  file = GgufBuilder();
  file.strings("tokenizer.ggml.tokens", {"a"}).array<float>("tokenizer.ggml.scores", kF32, {1, 2});
  expect_bad(file.build(), {"'tokenizer.ggml.scores' is array of 2 f32"});
  file = GgufBuilder();
  file.strings("tokenizer.ggml.tokens", {"a"}).strings("tokenizer.ggml.token_type", {"normal"});
  expect_bad(file.build(),
             {"'tokenizer.ggml.token_type' is array of 1 string: 'normal', expected an array of integers"});
  file = GgufBuilder();
  file.array<int32_t>("tokenizer.ggml.tokens", kI32, {1});
  expect_bad(file.build(), {"'tokenizer.ggml.tokens' is array of 1 i32: 1, expected an array of strings"});
}

// A set of parts, each with its number, and a tensor of its own.
GgufBuilder part(uint16_t number, uint16_t count) {
  GgufBuilder file;
  file.scalar("split.no", kU16, number).scalar("split.count", kU16, count);
  file.scalar<int32_t>("split.tensors.count", kI32, count);
  file.tensor(fmt::format("t{}", number), {8}, kTensorF32, std::string(32, static_cast<char>('a' + number)));
  return file;
}

TEST(GgufTest, ASplitSetOpensByItsFirstPart) {
  const TempFolder folder;
  for (uint16_t i = 0; i < 3; ++i)
    folder.write(fmt::format("m-{:05}-of-00003.gguf", i + 1), part(i, 3).build());
  const auto checkpoint = open_gguf(folder.path("m-00001-of-00003.gguf"));
  ASSERT_EQ(checkpoint->tensors().size(), 3u);
  EXPECT_EQ(bytes_of(checkpoint->find("t2")->data), std::string(32, 'c'));

  const auto message = [&](const std::string& name) -> std::string {
    try {
      open_gguf(folder.path(name));
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message("m-00002-of-00003.gguf").find("part 2 of 3; give the first part"), std::string::npos);
  folder.write("m-00003-of-00003.gguf", part(1, 3).build());
  EXPECT_NE(message("m-00001-of-00003.gguf").find("'split.no' is u16 1"), std::string::npos);
  GgufBuilder wrong = part(2, 3);
  wrong.tensors[0].name = "t0";
  folder.write("m-00003-of-00003.gguf", wrong.build());
  EXPECT_NE(message("m-00001-of-00003.gguf").find("tensor 't0' occurs twice"), std::string::npos);
  wrong = part(2, 3);
  wrong.tensor("extra", {8}, kTensorF32, zeros(32));
  folder.write("m-00003-of-00003.gguf", wrong.build());
  EXPECT_NE(message("m-00001-of-00003.gguf").find("'split.tensors.count' is 3, but the files hold 4"),
            std::string::npos);
  std::filesystem::remove(folder.path("m-00003-of-00003.gguf"));
  EXPECT_NE(message("m-00001-of-00003.gguf").find("m-00003-of-00003.gguf: cannot open"), std::string::npos);
  folder.write("m.gguf", part(0, 3).build());
  EXPECT_NE(message("m.gguf").find("the first of 3 parts must be named ...-00001-of-00003.gguf"), std::string::npos);
}

TEST(GgufTest, AOneElementScaleBesideAMatrixBecomesItsTensorScale) {
  const TempFolder folder;
  GgufBuilder file;
  file.tensor("a.weight", {64, 2}, kTensorNvfp4, zeros(72)).tensor("a.scale", {1}, kTensorF32, raw(0.25f));
  file.tensor("router.weight", {8, 2}, kTensorF32, zeros(64)).tensor("router.scale", {8}, kTensorF32, zeros(32));
  file.tensor("experts.weight", {8, 2, 3}, kTensorF32, zeros(192)).tensor("experts.scale", {3}, kTensorF32, zeros(12));
  file.tensor("bad.weight", {8, 2}, kTensorF32, zeros(64)).tensor("bad.scale", {1}, kTensorF32, raw(NAN));
  file.tensor("a.input_scale", {1}, kTensorF32, raw(3.0f));
  file.tensor("ids", {4}, 26, zeros(16)).tensor("deep", {1, 1, 1, 1}, kTensorF32, zeros(4));
  const auto checkpoint = open(folder, file);
  const auto matrix = [&](std::string_view name) { return matrix_of(*checkpoint, *checkpoint->find(name)); };
  EXPECT_EQ(matrix("a.weight").tensor_scale, 0.25f);
  EXPECT_EQ(companions_of(*checkpoint, *checkpoint->find("a.weight")),
            (std::vector<std::string>{"a.scale", "a.input_scale"}));
  EXPECT_EQ(matrix("router.weight").tensor_scale, 1.0f);
  EXPECT_TRUE(companions_of(*checkpoint, *checkpoint->find("router.weight")).empty());
  const HostMatrix experts = matrix("experts.weight");
  EXPECT_EQ(experts.stack, 3);
  EXPECT_EQ(experts.rows, 2);
  EXPECT_EQ(experts.cols, 8);
  EXPECT_EQ(experts.stack_stride_bytes, 64);
  EXPECT_EQ(experts.tensor_scale, 1.0f);
  EXPECT_EQ(experts.codes, checkpoint->find("experts.weight")->data.data());
  EXPECT_THROW(matrix("bad.weight"), Error);
  EXPECT_THROW(matrix("ids"), Error);
  EXPECT_THROW(matrix("deep"), Error);
  EXPECT_EQ(matrix("a.scale").rows, 1);
}

}  // namespace
}  // namespace beryl
