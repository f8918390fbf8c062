// What: whatever bytes a model file holds, opening it and decoding all of it either works or is one beryl::Error of one
//       line; it never crashes, never reads outside the file, and never allocates much more than the file's size.
// How:  small valid files of every kind (GGUF with all value types, nested arrays and many formats; safetensors; model
//       folders with config, index and shards) are damaged in thousands of ways: each header byte set to several
//       values, each integer to edge values, the file cut at each byte, stretches of it removed or doubled at random.
//       Built with the address and undefined-behaviour sanitizers, which end the program at the first wrong access. So
//       that they see reads past a file's end too, MappedFile is replaced by one that reads into a heap block of the
//       file's exact size. operator new counts what is live.
//
// Prints one line a kind: how many variants there were, how many opened, how many were refused. Exit 1 at a violation.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "base/mapped_file.h"
#include "base/rng.h"
#include "counted_memory.h"
#include "weights/checkpoint.h"
#include "weights/encode.h"
#include "weights/gguf.h"
#include "weights/safetensors.h"
#include "weights/test_files.h"

namespace beryl {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) throw Error(ErrorCode::kIo, fmt::format("{}: cannot open", path));
  std::fseek(file, 0, SEEK_END);
  size_ = static_cast<size_t>(std::ftell(file));
  std::rewind(file);
  auto* block = static_cast<std::byte*>(std::malloc(size_));
  const size_t n_read = std::fread(block, 1, size_, file);
  std::fclose(file);
  BERYL_CHECK(n_read == size_, "the test's own file cannot be read");
  data_ = block;
}

MappedFile::~MappedFile() { std::free(const_cast<std::byte*>(data_)); }

}  // namespace beryl

namespace {

using namespace beryl;
using namespace beryl::test;

// Room for messages, the small fixed objects of a checkpoint and the JSON parser's own tables.
constexpr size_t kAllowanceBytes = 64 << 10;

struct Tally {
  int64_t n_variants = 0;
  int64_t n_opened = 0;
  int64_t n_refused = 0;
  int64_t n_violations = 0;
};

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void complain(Tally& tally, const std::string& what, const std::string& why) {
  if (++tally.n_violations <= 10) std::fprintf(stderr, "VIOLATION %s: %s\n", what.c_str(), why.c_str());
}

// Every accessor of every key, every tensor decoded to its end. Only Errors of one line may come out.
void use_all(const Checkpoint& checkpoint, const std::function<void(const std::function<void()>&)>& guarded) {
  const Metadata& metadata = checkpoint.metadata();
  for (const std::string& key : metadata.keys()) {
    guarded([&] {
      if (metadata.describe(key).find('\n') != std::string::npos)
        throw std::runtime_error("a description of several lines");
    });
    guarded([&] { metadata.integer(key); });
    guarded([&] { metadata.number(key); });
    guarded([&] { metadata.boolean(key); });
    guarded([&] { metadata.string(key); });
    guarded([&] { metadata.integers(key); });
    guarded([&] { metadata.floats(key); });
    guarded([&] {
      if (const auto strings = metadata.strings(key))
        for (size_t i = 0; i < strings->size(); ++i) {
          volatile char last = 0;
          for (const char c : (*strings)[i]) last = c;
          (void)last;
        }
    });
  }
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    guarded([&] {
      volatile uint8_t last = 0;
      for (const std::byte value : tensor.data) last = static_cast<uint8_t>(value);
      (void)last;
    });
    guarded([&] { floats_of(checkpoint, tensor); });
    guarded([&] { companions_of(checkpoint, tensor); });
  }
}

// Opens one variant and uses all of it; true when it opened. file_bytes: of all its files together.
bool try_open(Tally& tally, const std::string& what, size_t file_bytes,
              const std::function<std::unique_ptr<Checkpoint>()>& open) {
  ++tally.n_variants;
  const auto guarded = [&](const std::function<void()>& call) {
    try {
      call();
      return true;
    } catch (const Error& error) {
      const std::string message = error.what();
      if (message.empty() || message.find('\n') != std::string::npos)
        complain(tally, what, "a message of no or several lines: " + message);
    } catch (const std::exception& exception) {
      complain(tally, what, fmt::format("another exception: {}", exception.what()));
    }
    return false;
  };
  std::unique_ptr<Checkpoint> checkpoint;
  const size_t live_before = live_bytes;
  peak_bytes = live_before;
  const bool opened = guarded([&] { checkpoint = open(); });
  const size_t used = peak_bytes - live_before;
  if (used > file_bytes + kAllowanceBytes)
    complain(tally, what, fmt::format("{} bytes allocated for files of {}", used, file_bytes));
  ++(opened ? tally.n_opened : tally.n_refused);
  if (checkpoint != nullptr) use_all(*checkpoint, guarded);
  return opened;
}

// A variant that must open.
void open_undamaged(Tally& tally, size_t file_bytes, const std::function<std::unique_ptr<Checkpoint>()>& open) {
  if (!try_open(tally, "undamaged", file_bytes, open)) complain(tally, "undamaged", "refused");
}

// Runs over damaged variants of `bytes`. header_bytes: how far to set each byte; integers: where integers lie.
void for_each_damage(const std::string& bytes, size_t header_bytes,
                     const std::vector<std::pair<size_t, size_t>>& integers, uint64_t seed,
                     const std::function<void(const std::string& what, const std::string& damaged)>& visit) {
  std::string damaged = bytes;
  for (size_t at = 0; at < header_bytes; ++at) {
    const auto old = static_cast<uint8_t>(bytes[at]);
    for (const int value : {0x00, 0xff, 0x7f, 0x80, old ^ 0x01, old ^ 0x80, old + 1, old - 1, int{'\n'}, int{'"'}}) {
      if (static_cast<uint8_t>(value) == old) continue;
      damaged[at] = static_cast<char>(value);
      visit(fmt::format("byte {} set to {:#04x}", at, static_cast<uint8_t>(value)), damaged);
    }
    damaged[at] = bytes[at];
  }
  for (const auto& [at, size] : integers) {
    uint64_t old = 0;
    std::memcpy(&old, bytes.data() + at, size);
    for (const uint64_t value :
         {uint64_t{0}, uint64_t{1}, uint64_t{2}, UINT64_MAX, UINT64_MAX - 1, uint64_t{1} << 31, uint64_t{1} << 32,
          uint64_t{1} << 62, uint64_t{1} << 63, (uint64_t{1} << 63) - 1, (uint64_t{1} << 31) - 1,
          (uint64_t{1} << 32) - 1, uint64_t{bytes.size()}, uint64_t{bytes.size()} - at, old + 1, old - 1, old * 2,
          old + 32, old - 32, UINT64_MAX - 31, (uint64_t{1} << 61) + 1}) {
      std::memcpy(damaged.data() + at, &value, size);
      visit(fmt::format("integer of {} bytes at {} set to {}", size, at, value), damaged);
    }
    std::memcpy(damaged.data() + at, &old, size);
  }
  for (size_t length = 0; length < bytes.size(); ++length)
    visit(fmt::format("cut to {} bytes", length), bytes.substr(0, length));
  for (uint64_t i = 0; i < 2000; ++i) {
    const Random4 random = philox(seed, i);
    const size_t from = random.x[0] % bytes.size(), length = random.x[1] % 40;
    std::string edited = bytes;
    if (i % 4 == 0) {
      edited.erase(from, length);
    } else if (i % 4 == 1) {
      edited.insert(from, edited.substr(random.x[2] % bytes.size(), length));
    } else {
      for (uint32_t j = 0; j < 1 + random.x[2] % 4; ++j)
        edited[philox(seed, i, 1 + j).x[0] % header_bytes] = static_cast<char>(philox(seed, i, 1 + j).x[1]);
    }
    visit(fmt::format("random edit {}", i), edited);
  }
}

std::string random_text(size_t n, uint64_t seed) {
  std::string text(n, ' ');
  for (size_t i = 0; i < n; ++i) text[i] = static_cast<char>(philox(seed, i).x[0]);
  return text;
}

GgufBuilder rich_gguf() {
  GgufBuilder file;
  file.text("general.architecture", "gemma4").scalar<uint32_t>("gemma4.block_count", kU32, 2);
  file.scalar<uint32_t>("general.alignment", kU32, 32);
  file.scalar<uint8_t>("u8", kU8, 1).scalar<int8_t>("i8", kI8, -1).scalar<uint16_t>("u16", kU16, 2);
  file.scalar<int16_t>("i16", kI16, -2).scalar<int32_t>("i32", kI32, -3).scalar<uint64_t>("u64", kU64, 4);
  file.scalar<int64_t>("i64", kI64, -4).scalar<float>("f32", kF32, 0.5f).scalar<double>("f64", kF64, 0.25);
  file.scalar<uint8_t>("bool", kBool, 1);
  file.array<int32_t>("ints", kI32, {1, 2, 3}).array<uint8_t>("flags", kBool, {1, 0});
  file.array<float>("floats", kF32, {1.0f}).array<double>("none", kF64, {});
  file.array("nested", kArray, 2, raw<uint32_t>(kU16) + raw<uint64_t>(2) + "abcd" + raw<uint32_t>(kString) +
                                      raw<uint64_t>(2) + gguf_string("x") + gguf_string(""));
  file.strings("tokenizer.ggml.tokens", {"a", "<0x0A>", "", "long token"});
  file.array<int32_t>("tokenizer.ggml.token_type", kI32, {1, 6, 3, 1});
  file.array<float>("tokenizer.ggml.scores", kF32, {0.0f, -1.0f, -2.0f, -3.0f});
  const struct {
    uint32_t type;
    Format format;
  } types[] = {{0, Format::kF32},    {1, Format::kF16},   {30, Format::kBf16}, {2, Format::kQ4_0},
               {3, Format::kQ4_1},   {6, Format::kQ5_0},  {7, Format::kQ5_1},  {8, Format::kQ8_0},
               {12, Format::kQ4_K},  {14, Format::kQ6_K}, {39, Format::kMxfp4}, {40, Format::kNvfp4},
               {26, Format::kI32}};
  for (const auto& [type, format] : types) {
    const auto cols = static_cast<uint64_t>(info(format).block_weights);
    file.tensor(fmt::format("{}.weight", info(format).name), {cols, 2}, type,
                random_text(static_cast<size_t>(2 * row_bytes(format, static_cast<int64_t>(cols))), type));
  }
  file.tensor("nvfp4.scale", {1}, 0, raw(0.5f)).tensor("scalar", {}, 0, raw(1.0f));
  file.tensor("experts.weight", {32, 2, 2}, 2, random_text(72, 5));
  return file;
}

void mutate_gguf(Tally& tally) {
  const TempFolder folder;
  for (const uint32_t version : {2u, 3u}) {
    GgufBuilder file = rich_gguf();
    file.version = version;
    const std::string bytes = file.build();
    folder.write("m.gguf", bytes);
    open_undamaged(tally, bytes.size(), [&] { return open_gguf(folder.path("m.gguf")); });
    for_each_damage(bytes, file.header_bytes, file.integers, version,
                    [&](const std::string& what, const std::string& damaged) {
                      folder.write("m.gguf", damaged);
                      try_open(tally, what, damaged.size(), [&] { return open_checkpoint(folder.path("m.gguf")); });
                    });
  }
}

// Files whose entries cost the least bytes each: what the reader keeps an entry must not exceed what the file spends.
void open_dense_gguf(Tally& tally) {
  const TempFolder folder;
  constexpr uint64_t kMany = 200'000;
  GgufBuilder strings;
  strings.array("words", kString, kMany, std::string(8 * kMany, '\0'));
  std::string empty_arrays;
  for (uint64_t i = 0; i < kMany; ++i) empty_arrays += raw<uint32_t>(kU8) + raw<uint64_t>(0);
  GgufBuilder nested;
  nested.array("arrays", kArray, kMany, empty_arrays);
  for (GgufBuilder* file : {&strings, &nested}) {
    const std::string bytes = file->build();
    folder.write("m.gguf", bytes);
    open_undamaged(tally, bytes.size(), [&] { return open_gguf(folder.path("m.gguf")); });
  }
}

std::string rich_safetensors(const TempFolder& folder) {
  std::vector<float> weights(2 * 256);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = to_unit_float(philox(3, i).x[0]) - 0.5f;
  std::vector<HostMatrix> matrices;
  std::vector<SafetensorsTensor> tensors;
  matrices.reserve(16);
  for (const Format format : {Format::kF32, Format::kBf16, Format::kFp4G128, Format::kFp8, Format::kQ4_K}) {
    const std::string name(info(format).name);
    const HostMatrix& matrix = matrices.emplace_back(encode_matrix(name, format, weights.data(), 2, 256));
    const auto codes_bytes = static_cast<size_t>(2 * row_bytes(format, 256));
    tensors.push_back({{name, format, {2, 256}},
                       {matrix.codes, codes_bytes},
                       {matrix.scales, static_cast<size_t>(matrix.bytes()) - codes_bytes}});
  }
  write_safetensors(folder.path("model.safetensors"), tensors, {{"format", "pt"}, {"text", "quote \" and \\"}});
  return read_file(folder.path("model.safetensors"));
}

size_t header_end(const std::string& safetensors) {
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, safetensors.data(), 8);
  return 8 + static_cast<size_t>(header_bytes);
}

void mutate_safetensors(Tally& tally) {
  const TempFolder folder;
  const std::string bytes = rich_safetensors(folder);
  open_undamaged(tally, bytes.size(), [&] { return open_safetensors(folder.path("model.safetensors")); });
  const auto visit = [&](const std::string& what, const std::string& damaged) {
    folder.write("model.safetensors", damaged);
    try_open(tally, what, damaged.size(), [&] { return open_safetensors(folder.path("model.safetensors")); });
  };
  for_each_damage(bytes, header_end(bytes), {{0, 8}}, 7, visit);
  // Each number of the header replaced by edge values, the header's length kept true.
  const std::string header = bytes.substr(8, header_end(bytes) - 8), data = bytes.substr(header_end(bytes));
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  for (size_t at = 0; at < header.size(); ++at) {
    if (!is_digit(header[at]) || is_digit(header[at - 1])) continue;
    size_t end = at;
    while (is_digit(header[end])) ++end;
    for (const char* value :
         {"0", "1", "-1", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808",
          "18446744073709551615", "18446744073709551614", "18446744073709551616", "1e400", "1.5", "null", "[]", "{}",
          "\"x\"", "true", ""})
      visit(fmt::format("number at {} is {}", at, value),
            safetensors_bytes(header.substr(0, at) + value + header.substr(end), data));
  }
}

// A folder in which one of the files is damaged at a time.
void mutate_folder(Tally& tally) {
  const TempFolder folder;
  const auto shard = [](const std::string& name, const std::string& dtype, int bytes) {
    return safetensors_bytes(fmt::format(R"({{"{}":{{"dtype":"{}","shape":[2,2],"data_offsets":[0,{}]}}}})", name,
                                         dtype, bytes),
                             std::string(static_cast<size_t>(bytes), '\x38'));
  };
  const std::vector<std::pair<std::string, std::string>> files = {
      {"config.json",
       R"({"model_type": "gemma3", "n": 12, "f": 1e-6, "list": [1, 2, true], "words": ["a", "é\n"], "no": null,)"
       R"( "nested": {"a": {"b": -3}, "a.b": 4}, "yes": false})"},
      {"model.safetensors.index.json",
       R"({"metadata": {"total_size": 40}, "weight_map": {"w": "1.safetensors", "v": "2.safetensors"}})"},
      {"1.safetensors", shard("w", "F32", 16)},
      {"2.safetensors", shard("v", "BF16", 8)}};
  size_t all_bytes = 0;
  for (const auto& [name, bytes] : files) {
    folder.write(name, bytes);
    all_bytes += bytes.size();
  }
  open_undamaged(tally, all_bytes, [&] { return open_checkpoint(folder.path()); });
  for (const auto& [name, bytes] : files) {
    for_each_damage(bytes, bytes.size(), {}, 9, [&, &name = name](const std::string& what, const std::string& damaged) {
      folder.write(name, damaged);
      try_open(tally, name + ": " + what, all_bytes + damaged.size(), [&] { return open_checkpoint(folder.path()); });
    });
    folder.write(name, bytes);
    std::filesystem::remove(folder.path(name));
    try_open(tally, name + ": missing", all_bytes, [&] { return open_checkpoint(folder.path()); });
    folder.write(name, bytes);
  }
}

}  // namespace

int main() {
  const struct {
    const char* name;
    void (*run)(Tally&);
  } kinds[] = {{"gguf", mutate_gguf},
               {"gguf, dense", open_dense_gguf},
               {"safetensors", mutate_safetensors},
               {"folder", mutate_folder}};
  int64_t n_violations = 0;
  for (const auto& kind : kinds) {
    Tally tally;
    kind.run(tally);
    std::printf("%-12s %6lld variants: %lld opened, %lld refused, %lld violations\n", kind.name,
                static_cast<long long>(tally.n_variants), static_cast<long long>(tally.n_opened),
                static_cast<long long>(tally.n_refused), static_cast<long long>(tally.n_violations));
    n_violations += tally.n_violations;
  }
  return n_violations == 0 ? 0 : 1;
}
