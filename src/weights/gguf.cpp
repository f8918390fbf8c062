// The GGUF reader. A file is:
//
//   u32 magic "GGUF"   u32 version   u64 n_tensors   u64 n_kv
//   n_kv times         string key    u32 value type  value
//   n_tensors times    string name   u32 n_dims      u64 dims[n_dims], innermost first   u32 type   u64 offset
//   padding to general.alignment (default 32), then the data; offsets count from here
//
// A string is a u64 length and its bytes; an array is u32 element type, u64 count, elements. Every length is compared
// with the bytes that are left before it is used, so nothing is allocated that the file's own size does not back.
#include "weights/gguf.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "base/mapped_file.h"
#include "weights/quote.h"
#include "weights/safetensors.h"

namespace beryl {

namespace {

enum ValueType : uint32_t {
  kTypeU8 = 0,
  kTypeI8 = 1,
  kTypeU16 = 2,
  kTypeI16 = 3,
  kTypeU32 = 4,
  kTypeI32 = 5,
  kTypeF32 = 6,
  kTypeBool = 7,
  kTypeString = 8,
  kTypeArray = 9,
  kTypeU64 = 10,
  kTypeI64 = 11,
  kTypeF64 = 12,
};
constexpr uint32_t kValueTypes = 13;
constexpr std::string_view kValueTypeNames[kValueTypes] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                           "bool", "string", "array", "u64", "i64", "f64"};
// Bytes of a value; 0 where they vary.
constexpr uint64_t kValueBytes[kValueTypes] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

// Tensor types of ggml. `format` is absent for those beryl does not run.
struct TensorType {
  uint32_t number;
  std::string_view name;
  std::optional<Format> format;
};
constexpr TensorType kTensorTypes[] = {
    {0, "F32", Format::kF32},      {1, "F16", Format::kF16},      {2, "Q4_0", Format::kQ4_0},
    {3, "Q4_1", Format::kQ4_1},    {6, "Q5_0", Format::kQ5_0},    {7, "Q5_1", Format::kQ5_1},
    {8, "Q8_0", Format::kQ8_0},    {9, "Q8_1", {}},               {10, "Q2_K", {}},
    {11, "Q3_K", {}},              {12, "Q4_K", Format::kQ4_K},   {13, "Q5_K", Format::kQ5_K},
    {14, "Q6_K", Format::kQ6_K},   {15, "Q8_K", {}},              {16, "IQ2_XXS", {}},
    {17, "IQ2_XS", {}},            {18, "IQ3_XXS", {}},           {19, "IQ1_S", {}},
    {20, "IQ4_NL", {}},            {21, "IQ3_S", {}},             {22, "IQ2_S", {}},
    {23, "IQ4_XS", {}},            {24, "I8", {}},                {25, "I16", {}},
    {26, "I32", Format::kI32},     {27, "I64", Format::kI64},     {28, "F64", {}},
    {29, "IQ1_M", {}},             {30, "BF16", Format::kBf16},   {34, "TQ1_0", {}},
    {35, "TQ2_0", {}},             {39, "MXFP4", Format::kMxfp4}, {40, "NVFP4", Format::kNvfp4},
    {41, "Q1_0", {}},
};

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

std::string_view text_at(const std::byte* from, uint64_t bytes) {
  return {reinterpret_cast<const char*>(from), static_cast<size_t>(bytes)};
}

[[noreturn]] void bad(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::kBadInput, fmt::format("{}: {}", path, what));
}

std::optional<int64_t> load_integer(uint32_t type, const std::byte* from) {
  switch (type) {
    case kTypeU8: return load<uint8_t>(from);
    case kTypeI8: return load<int8_t>(from);
    case kTypeU16: return load<uint16_t>(from);
    case kTypeI16: return load<int16_t>(from);
    case kTypeU32: return load<uint32_t>(from);
    case kTypeI32: return load<int32_t>(from);
    case kTypeI64: return load<int64_t>(from);
    case kTypeU64: {
      const auto value = load<uint64_t>(from);
      if (value > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
      return static_cast<int64_t>(value);
    }
    default: return std::nullopt;
  }
}

bool is_integer(uint32_t type) { return type <= kTypeI32 || type == kTypeU64 || type == kTypeI64; }

std::optional<double> load_number(uint32_t type, const std::byte* from) {
  if (type == kTypeF32) return load<float>(from);
  if (type == kTypeF64) return load<double>(from);
  if (type == kTypeU64) return static_cast<double>(load<uint64_t>(from));
  if (const auto integer = load_integer(type, from)) return static_cast<double>(*integer);
  return std::nullopt;
}

// Strings of an array, found by a table of where each one's length field lies (8 bytes a string, as the file spends).
class GgufStrings final : public StringList {
 public:
  GgufStrings(const std::byte* base, std::vector<uint64_t> offsets) : base_(base), offsets_(std::move(offsets)) {}
  size_t size() const override { return offsets_.size(); }
  std::string_view operator[](size_t index) const override {
    BERYL_CHECK(index < offsets_.size(), "string index out of range");
    const std::byte* from = base_ + offsets_[index];
    return text_at(from + 8, load<uint64_t>(from));
  }

 private:
  const std::byte* base_;
  std::vector<uint64_t> offsets_;
};

struct Field {
  std::string_view key;
  uint32_t type = 0;
  uint32_t element_type = 0;            // of an array
  uint64_t count = 0;                   // elements of an array, bytes of a string
  const std::byte* data = nullptr;      // the value; first element; first byte
  std::shared_ptr<const GgufStrings> strings;  // of an array of strings
};

// Reads forward through the header; every step states what it reads, for the message when the file ends too early.
class Cursor {
 public:
  Cursor(const std::string& path, std::span<const std::byte> bytes) : path_(path), bytes_(bytes) {}

  const std::string& path() const { return path_; }
  uint64_t offset() const { return offset_; }
  uint64_t left() const { return bytes_.size() - offset_; }
  const std::byte* here() const { return bytes_.data() + offset_; }
  const std::byte* base() const { return bytes_.data(); }

  // `what` is called only to build a message: () -> std::string.
  template <class What>
  const std::byte* take(uint64_t n_bytes, const What& what) {
    if (n_bytes > left())
      bad(path_, fmt::format("{} at byte {} needs {} bytes, but the file ends at byte {}", what(), offset_, n_bytes, bytes_.size()));
    const std::byte* from = here();
    offset_ += n_bytes;
    return from;
  }

  template <class T, class What>
  T read(const What& what) {
    return load<T>(take(sizeof(T), what));
  }

  template <class What>
  std::string_view read_string(const What& what) {
    const auto length = read<uint64_t>([&] { return fmt::format("the length of {}", what()); });
    return text_at(take(length, what), length);
  }

 private:
  const std::string& path_;
  std::span<const std::byte> bytes_;
  uint64_t offset_ = 0;
};

class GgufMetadata final : public Metadata {
 public:
  explicit GgufMetadata(const std::string& path) : path_(path) {}

  void take_fields(std::vector<Field> fields) {
    fields_ = std::move(fields);
    by_key_.resize(fields_.size());
    for (uint32_t i = 0; i < by_key_.size(); ++i) by_key_[i] = i;
    std::sort(by_key_.begin(), by_key_.end(),
              [&](uint32_t a, uint32_t b) { return std::pair(fields_[a].key, a) < std::pair(fields_[b].key, b); });
    for (size_t i = 1; i < by_key_.size(); ++i)
      if (fields_[by_key_[i - 1]].key == fields_[by_key_[i]].key)
        bad(path_, fmt::format("key {} occurs twice in the metadata", quote(fields_[by_key_[i]].key)));
  }

  const Field* find(std::string_view key) const {
    const auto at = std::lower_bound(by_key_.begin(), by_key_.end(), key,
                                     [&](uint32_t i, std::string_view wanted) { return fields_[i].key < wanted; });
    return at != by_key_.end() && fields_[*at].key == key ? &fields_[*at] : nullptr;
  }

  bool has(std::string_view key) const override { return find(key) != nullptr; }

  std::optional<int64_t> integer(std::string_view key) const override {
    const Field* field = find(key);
    if (field == nullptr) return std::nullopt;
    const auto value = load_integer(field->type, field->data);
    if (!value) wrong_type(*field, is_integer(field->type) ? "an integer below 2^63" : "an integer");
    return value;
  }

  std::optional<double> number(std::string_view key) const override {
    const Field* field = find(key);
    if (field == nullptr) return std::nullopt;
    const auto value = load_number(field->type, field->data);
    if (!value) wrong_type(*field, "a number");
    return value;
  }

  std::optional<bool> boolean(std::string_view key) const override {
    const Field* field = find(key);
    if (field == nullptr) return std::nullopt;
    if (field->type != kTypeBool) wrong_type(*field, "a bool");
    return load<uint8_t>(field->data) != 0;
  }

  std::optional<std::string> string(std::string_view key) const override {
    const Field* field = find(key);
    if (field == nullptr) return std::nullopt;
    if (field->type != kTypeString) wrong_type(*field, "a string");
    return std::string(text_at(field->data, field->count));
  }

  bool is_array(std::string_view key) const override {
    const Field* field = find(key);
    return field != nullptr && field->type == kTypeArray;
  }

  std::optional<std::vector<int64_t>> integers(std::string_view key) const override {
    const Field* field = find(key);
    if (field == nullptr) return std::nullopt;
    if (field->type != kTypeArray || !(is_integer(field->element_type) || field->element_type == kTypeBool))
      wrong_type(*field, "an array of integers or bools");
    std::vector<int64_t> values(field->count);
    for (uint64_t i = 0; i < field->count; ++i) {
      const std::byte* from = field->data + i * kValueBytes[field->element_type];
      const auto value =
          field->element_type == kTypeBool ? int64_t{load<uint8_t>(from)} : load_integer(field->element_type, from);
      if (!value)
        bad(path_, fmt::format("element {} of {} is {}, expected an integer below 2^63", i, quote(field->key),
                               load<uint64_t>(from)));
      values[i] = *value;
    }
    return values;
  }

  std::optional<std::vector<float>> floats(std::string_view key) const override {
    const Field* field = find(key);
    if (field == nullptr) return std::nullopt;
    const uint32_t type = field->element_type;
    if (field->type != kTypeArray || !(is_integer(type) || type == kTypeF32 || type == kTypeF64))
      wrong_type(*field, "an array of numbers");
    std::vector<float> values(field->count);
    for (uint64_t i = 0; i < field->count; ++i)
      values[i] = static_cast<float>(*load_number(type, field->data + i * kValueBytes[type]));
    return values;
  }

  std::shared_ptr<const StringList> strings(std::string_view key) const override {
    const Field* field = find(key);
    if (field == nullptr) return nullptr;
    if (field->strings == nullptr) wrong_type(*field, "an array of strings");
    return field->strings;
  }

  std::vector<std::string> keys() const override {
    std::vector<std::string> out;
    out.reserve(fields_.size());
    for (const Field& field : fields_) out.emplace_back(field.key);
    return out;
  }

  std::string describe(std::string_view key) const override {
    const Field* field = find(key);
    return field == nullptr ? "absent" : describe(*field);
  }

 private:
  static std::string describe(const Field& field) {
    if (field.type == kTypeArray) {
      std::string text = fmt::format("array of {} {}", field.count, kValueTypeNames[field.element_type]);
      const uint64_t n_shown = std::min<uint64_t>(field.count, 4);
      for (uint64_t i = 0; i < n_shown && field.element_type != kTypeArray; ++i) {
        text += i == 0 ? ": " : ", ";
        text += field.strings != nullptr
                    ? quote((*field.strings)[i], 16)
                    : describe_scalar(field.element_type, field.data + i * kValueBytes[field.element_type]);
      }
      if (n_shown > 0 && n_shown < field.count && field.element_type != kTypeArray) text += ", ...";
      return text;
    }
    if (field.type == kTypeString) return "string " + quote(text_at(field.data, field.count), 60);
    return fmt::format("{} {}", kValueTypeNames[field.type], describe_scalar(field.type, field.data));
  }

  static std::string describe_scalar(uint32_t type, const std::byte* from) {
    if (type == kTypeBool) return load<uint8_t>(from) != 0 ? "true" : "false";
    if (type == kTypeF32) return fmt::format("{}", load<float>(from));
    if (type == kTypeF64) return fmt::format("{}", load<double>(from));
    if (type == kTypeU64) return fmt::format("{}", load<uint64_t>(from));
    return fmt::format("{}", load_integer(type, from).value_or(0));
  }

  [[noreturn]] void wrong_type(const Field& field, std::string_view wanted) const {
    bad(path_, fmt::format("{} is {}, expected {}", quote(field.key), describe(field), wanted));
  }

  const std::string path_;
  std::vector<Field> fields_;     // in file order
  std::vector<uint32_t> by_key_;  // sorted by key
};

// Steps over `count` elements of `type`; for strings, notes where each lies when `offsets` is given.
void skip_elements(Cursor& cursor, std::string_view key, uint32_t type, uint64_t count, int depth,
                   std::vector<uint64_t>* offsets) {
  if (type == kTypeString || type == kTypeArray) {
    const uint64_t least_bytes = type == kTypeString ? 8 : 12;  // a length; or element type and count
    if (count > cursor.left() / least_bytes)
      bad(cursor.path(), fmt::format("{} at byte {} claims {} elements, but only {} bytes are left", quote(key),
                                     cursor.offset(), count, cursor.left()));
  }
  if (type == kTypeString) {
    if (offsets != nullptr) offsets->reserve(count);
    for (uint64_t i = 0; i < count; ++i) {
      if (offsets != nullptr) offsets->push_back(cursor.offset());
      cursor.read_string([&] { return fmt::format("string {} of {}", i, quote(key)); });
    }
  } else if (type == kTypeArray) {
    if (depth >= kMaxGgufArrayDepth)
      bad(cursor.path(), fmt::format("{} nests arrays deeper than {}", quote(key), kMaxGgufArrayDepth));
    for (uint64_t i = 0; i < count; ++i) {
      const auto inner = cursor.read<uint32_t>([&] { return fmt::format("an element type of {}", quote(key)); });
      const auto n = cursor.read<uint64_t>([&] { return fmt::format("an element count of {}", quote(key)); });
      if (inner >= kValueTypes)
        bad(cursor.path(), fmt::format("{} has element type {}, which is none of GGUF's", quote(key), inner));
      skip_elements(cursor, key, inner, n, depth + 1, nullptr);
    }
  } else {
    const uint64_t size = kValueBytes[type];
    if (count > cursor.left() / size)
      bad(cursor.path(), fmt::format("{} at byte {} claims {} elements of {}, but only {} bytes are left", quote(key),
                                     cursor.offset(), count, kValueTypeNames[type], cursor.left()));
    const std::byte* from = cursor.take(count * size, [&] { return quote(key); });
    if (type == kTypeBool)
      for (uint64_t i = 0; i < count; ++i)
        if (load<uint8_t>(from + i) > 1)
          bad(cursor.path(), fmt::format("element {} of {} is {}, expected a bool of 0 or 1", i, quote(key),
                                         load<uint8_t>(from + i)));
  }
}

std::string_view read_name(Cursor& cursor, std::string_view kind, uint64_t index) {
  const auto what = [&] { return fmt::format("{} {}", kind, index); };
  const uint64_t at = cursor.offset();
  const std::string_view name = cursor.read_string(what);
  if (name.empty()) bad(cursor.path(), fmt::format("{} at byte {} is empty", what(), at));
  if (name.size() > kMaxGgufNameBytes)
    bad(cursor.path(),
        fmt::format("{} at byte {} has {} bytes, at most {} are allowed", what(), at, name.size(), kMaxGgufNameBytes));
  if (!is_utf8(name)) bad(cursor.path(), fmt::format("{} at byte {} is not UTF-8: {}", what(), at, quote(name)));
  return name;
}

Field read_field(Cursor& cursor, uint64_t index) {
  Field field;
  field.key = read_name(cursor, "key", index);
  const auto about = [&] { return fmt::format("the value of {}", quote(field.key)); };
  field.type = cursor.read<uint32_t>([&] { return fmt::format("the value type of {}", quote(field.key)); });
  if (field.type >= kValueTypes)
    bad(cursor.path(), fmt::format("{} has value type {}, which is none of GGUF's", quote(field.key), field.type));
  if (field.type == kTypeString) {
    const std::string_view text = cursor.read_string(about);
    field.data = reinterpret_cast<const std::byte*>(text.data());
    field.count = text.size();
  } else if (field.type == kTypeArray) {
    field.element_type = cursor.read<uint32_t>([&] { return fmt::format("the element type of {}", quote(field.key)); });
    field.count = cursor.read<uint64_t>([&] { return fmt::format("the element count of {}", quote(field.key)); });
    if (field.element_type >= kValueTypes)
      bad(cursor.path(),
          fmt::format("{} has element type {}, which is none of GGUF's", quote(field.key), field.element_type));
    field.data = cursor.here();
    std::vector<uint64_t> offsets;
    skip_elements(cursor, field.key, field.element_type, field.count, 1, &offsets);
    if (field.element_type == kTypeString)
      field.strings = std::make_shared<GgufStrings>(cursor.base(), std::move(offsets));
  } else {
    field.data = cursor.take(kValueBytes[field.type], about);
    if (field.type == kTypeBool && load<uint8_t>(field.data) > 1)
      bad(cursor.path(), fmt::format("{} is {}, expected a bool of 0 or 1", quote(field.key),
                                     load<uint8_t>(field.data)));
  }
  return field;
}

struct PlacedTensor {
  TensorInfo info;
  uint64_t offset = 0;   // from the start of the data
  uint64_t n_bytes = 0;
};

PlacedTensor read_tensor(Cursor& cursor, uint64_t index, uint32_t alignment) {
  PlacedTensor tensor;
  const std::string_view name = read_name(cursor, "the name of tensor", index);
  tensor.info.name = name;
  const auto about = [&](std::string_view part) {
    return [&, part] { return fmt::format("{} of tensor {}", part, quote(name)); };
  };
  const auto n_dims = cursor.read<uint32_t>(about("n_dims"));
  if (n_dims > 4)
    bad(cursor.path(), fmt::format("tensor {} has n_dims {}, at most 4 are allowed", quote(name), n_dims));
  uint64_t dims[4] = {1, 1, 1, 1};
  uint64_t n_weights = 1;
  for (uint32_t i = 0; i < n_dims; ++i) {
    dims[i] = cursor.read<uint64_t>(about("a dimension"));
    if (dims[i] == 0) bad(cursor.path(), fmt::format("tensor {} has dimension {} of 0", quote(name), i));
    if (__builtin_mul_overflow(n_weights, dims[i], &n_weights) || n_weights > (uint64_t{1} << 60))
      bad(cursor.path(), fmt::format("tensor {} has more than 2^60 weights: dimension {} is {}", quote(name), i,
                                     dims[i]));
  }
  for (uint32_t i = n_dims; i > 0; --i) tensor.info.shape.push_back(static_cast<int64_t>(dims[i - 1]));

  const auto type = cursor.read<uint32_t>(about("the type"));
  const auto* known = std::find_if(std::begin(kTensorTypes), std::end(kTensorTypes),
                                   [&](const TensorType& entry) { return entry.number == type; });
  if (known == std::end(kTensorTypes))
    throw Error(ErrorCode::kUnsupported, fmt::format("{}: tensor {} has type {}, which beryl does not know",
                                                     cursor.path(), quote(name), static_cast<int32_t>(type)));
  if (!known->format)
    throw Error(ErrorCode::kUnsupported, fmt::format("{}: tensor {} has type {} ({}), which beryl does not run",
                                                     cursor.path(), quote(name), known->name, type));
  tensor.info.format = *known->format;
  const FormatInfo& format = info(tensor.info.format);
  if (dims[0] % static_cast<uint64_t>(format.block_weights) != 0)
    bad(cursor.path(), fmt::format("tensor {} has rows of {} weights, expected a multiple of {} for {}", quote(name),
                                   dims[0], format.block_weights, known->name));
  // At most 2^60 weights of at most 8 bytes: no overflow.
  tensor.n_bytes =
      n_weights / static_cast<uint64_t>(format.block_weights) * static_cast<uint64_t>(format.block_bytes);

  tensor.offset = cursor.read<uint64_t>(about("the offset"));
  if (tensor.offset % alignment != 0)
    bad(cursor.path(), fmt::format("tensor {} has offset {}, expected a multiple of the alignment {}", quote(name),
                                   tensor.offset, alignment));
  return tensor;
}

uint32_t alignment_of(const std::string& path, const GgufMetadata& metadata) {
  const Field* field = metadata.find("general.alignment");
  if (field == nullptr) return 32;
  const auto value = field->type == kTypeU32 ? load_integer(field->type, field->data) : std::nullopt;
  if (!value || *value < 8 || *value > kMaxGgufAlignment || (*value & (*value - 1)) != 0)
    bad(path, fmt::format("'general.alignment' is {}, expected a u32 that is a power of two from 8 to {}",
                          metadata.describe("general.alignment"), kMaxGgufAlignment));
  return static_cast<uint32_t>(*value);
}

// A token such as <0x0A>, which stands for one byte.
bool is_byte_token(std::string_view text) {
  const auto is_hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); };
  return text.size() == 6 && text.starts_with("<0x") && text.ends_with(">") && is_hex(text[3]) && is_hex(text[4]);
}

// Fields whose damage would only be noticed far away, or as an allocation.
void check_known_fields(const std::string& path, const GgufMetadata& metadata) {
  const Field* architecture = metadata.find("general.architecture");
  if (architecture != nullptr && architecture->type != kTypeString)
    bad(path,
        fmt::format("'general.architecture' is {}, expected a string", metadata.describe("general.architecture")));
  if (architecture != nullptr) {
    const std::string key = fmt::format("{}.block_count", text_at(architecture->data, architecture->count));
    const auto n_blocks = metadata.integer(key);
    if (n_blocks && (*n_blocks < 0 || *n_blocks > kMaxGgufBlocks))
      bad(path, fmt::format("{} is {}, expected 0 to {}", quote(key), *n_blocks, kMaxGgufBlocks));
  }

  const Field* tokens = metadata.find("tokenizer.ggml.tokens");
  if (tokens != nullptr && tokens->strings == nullptr)
    bad(path, fmt::format("'tokenizer.ggml.tokens' is {}, expected an array of strings",
                          metadata.describe("tokenizer.ggml.tokens")));
  const Field* scores = metadata.find("tokenizer.ggml.scores");
  const Field* types = metadata.find("tokenizer.ggml.token_type");
  for (const Field* field : {scores, types}) {
    if (field == nullptr || tokens == nullptr) continue;
    if (field->type != kTypeArray || field->count != tokens->count)
      bad(path, fmt::format("{} is {}, expected an array of {} as 'tokenizer.ggml.tokens' has", quote(field->key),
                            metadata.describe(field->key), tokens->count));
  }
  if (types != nullptr && !is_integer(types->element_type))
    bad(path, fmt::format("'tokenizer.ggml.token_type' is {}, expected an array of integers",
                          metadata.describe("tokenizer.ggml.token_type")));
  if (tokens == nullptr || types == nullptr) return;
  constexpr int64_t kByteToken = 6;
  for (uint64_t i = 0; i < tokens->count; ++i) {
    const auto type = load_integer(types->element_type, types->data + i * kValueBytes[types->element_type]);
    if (type == kByteToken && !is_byte_token((*tokens->strings)[i]))
      bad(path, fmt::format("token {} is {} of type byte, expected <0x00> to <0xFF>", i, quote((*tokens->strings)[i])));
  }
}

// One file of a set.
struct GgufFile {
  explicit GgufFile(const std::string& path) : mapped(path), metadata(path) {}

  MappedFile mapped;
  GgufMetadata metadata;
  std::vector<TensorInfo> tensors;
  std::vector<std::string> warnings;
};

// Behind `end`, of the last tensor or the header, lies padding, or nothing. What else lies there was put there by somebody else, or is the
// rest of a larger file that was written over: it hurts nobody, and is told.
void warn_of_rest(GgufFile& file, uint64_t end, uint32_t alignment) {
  const std::span<const std::byte> rest = file.mapped.bytes().subspan(std::min<uint64_t>(end, file.mapped.bytes().size()));
  const uint64_t padding = (alignment - end % alignment) % alignment;
  const bool is_zero = std::all_of(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(std::min<uint64_t>(padding, rest.size())),
                                   [](std::byte byte) { return byte == std::byte{0}; });
  if (is_zero && rest.size() <= padding) return;
  file.warnings.push_back(fmt::format("{}: {} bytes after the last tensor belong to nothing and are ignored", file.mapped.path(),
                                      is_zero ? rest.size() - padding : rest.size()));
}

std::unique_ptr<GgufFile> read_gguf(const std::string& path) {
  auto file = std::make_unique<GgufFile>(path);
  Cursor cursor(path, file->mapped.bytes());
  if (cursor.left() < 4 || std::memcmp(cursor.here(), "GGUF", 4) != 0)
    bad(path, fmt::format("the first bytes are {}, expected 'GGUF'",
                          quote(text_at(cursor.here(), std::min<uint64_t>(cursor.left(), 4)))));
  cursor.take(4, [] { return "the magic"; });
  const auto version = cursor.read<uint32_t>([] { return "the version"; });
  if (version != 0 && (version & 0xffff) == 0)
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: version reads as {:#x}: a big-endian GGUF file; convert it to little-endian", path,
                            version));
  if (version != 2 && version != 3)
    throw Error(ErrorCode::kUnsupported, fmt::format("{}: GGUF version {}, expected 2 or 3", path, version));

  const auto n_tensors = cursor.read<uint64_t>([] { return "n_tensors"; });
  const auto n_fields = cursor.read<uint64_t>([] { return "n_kv"; });
  // The least that an entry takes: a key of one byte and a one-byte value; a name of one byte without dimensions.
  const uint64_t most_fields = std::min(kMaxGgufFields, cursor.left() / (8 + 1 + 4 + 1));
  const uint64_t most_tensors = std::min(kMaxGgufTensors, cursor.left() / (8 + 1 + 4 + 4 + 8));
  if (n_tensors > most_tensors)
    bad(path, fmt::format("n_tensors is {}, but a file of {} bytes holds at most {}", n_tensors,
                          file->mapped.bytes().size(), most_tensors));
  if (n_fields > most_fields)
    bad(path, fmt::format("n_kv is {}, but a file of {} bytes holds at most {}", n_fields, file->mapped.bytes().size(),
                          most_fields));

  std::vector<Field> fields;
  for (uint64_t i = 0; i < n_fields; ++i) fields.push_back(read_field(cursor, i));
  file->metadata.take_fields(std::move(fields));
  const uint32_t alignment = alignment_of(path, file->metadata);
  check_known_fields(path, file->metadata);

  std::vector<PlacedTensor> placed;
  for (uint64_t i = 0; i < n_tensors; ++i) placed.push_back(read_tensor(cursor, i, alignment));
  if (placed.empty()) {   // a vocabulary alone; the padding may be missing then
    warn_of_rest(*file, cursor.offset(), alignment);
    return file;
  }

  const uint64_t data_start = (cursor.offset() + alignment - 1) / alignment * alignment;
  const uint64_t file_bytes = file->mapped.bytes().size();
  const uint64_t data_bytes = file_bytes > data_start ? file_bytes - data_start : 0;
  for (PlacedTensor& tensor : placed) {
    if (tensor.offset > data_bytes || tensor.n_bytes > data_bytes - tensor.offset)
      bad(path, fmt::format("tensor {} takes {} bytes at offset {}, but the file has {} bytes of data",
                            quote(tensor.info.name), tensor.n_bytes, tensor.offset, data_bytes));
    tensor.info.data = file->mapped.bytes().subspan(data_start + tensor.offset, tensor.n_bytes);
  }

  std::vector<uint32_t> order(placed.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return placed[a].offset < placed[b].offset; });
  for (size_t i = 1; i < order.size(); ++i) {
    const PlacedTensor& before = placed[order[i - 1]];
    const PlacedTensor& after = placed[order[i]];
    if (before.offset + before.n_bytes > after.offset)
      bad(path, fmt::format("tensors {} (offset {}, {} bytes) and {} (offset {}) overlap", quote(before.info.name),
                            before.offset, before.n_bytes, quote(after.info.name), after.offset));
  }
  const PlacedTensor& last = placed[order.back()];
  warn_of_rest(*file, data_start + last.offset + last.n_bytes, alignment);
  file->tensors.reserve(placed.size());
  for (PlacedTensor& tensor : placed) file->tensors.push_back(std::move(tensor.info));
  return file;
}

class GgufCheckpoint final : public Checkpoint {
 public:
  explicit GgufCheckpoint(const std::string& path) : path_(path) {
    files_.push_back(read_gguf(path));
    read_other_parts();
    for (const auto& file : files_) {
      std::move(file->tensors.begin(), file->tensors.end(), std::back_inserter(tensors_));
      file->tensors = {};
      std::move(file->warnings.begin(), file->warnings.end(), std::back_inserter(warnings_));
    }
    by_name_.resize(tensors_.size());
    for (uint32_t i = 0; i < by_name_.size(); ++i) by_name_[i] = i;
    std::sort(by_name_.begin(), by_name_.end(),
              [&](uint32_t a, uint32_t b) { return tensors_[a].name < tensors_[b].name; });
    for (size_t i = 1; i < by_name_.size(); ++i)
      if (tensors_[by_name_[i - 1]].name == tensors_[by_name_[i]].name)
        bad(path_, fmt::format("tensor {} occurs twice", quote(tensors_[by_name_[i]].name)));
    if (const auto expected = metadata().integer("split.tensors.count");
        expected && *expected != static_cast<int64_t>(tensors_.size()))
      bad(path_, fmt::format("'split.tensors.count' is {}, but the files hold {} tensors", *expected, tensors_.size()));
  }

  const std::string& path() const override { return path_; }
  Container container() const override { return Container::kGguf; }
  const Metadata& metadata() const override { return files_[0]->metadata; }
  std::span<const TensorInfo> tensors() const override { return tensors_; }
  std::span<const std::string> warnings() const override { return warnings_; }

  const TensorInfo* find(std::string_view name) const override {
    const auto at = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                     [&](uint32_t i, std::string_view wanted) { return tensors_[i].name < wanted; });
    return at != by_name_.end() && tensors_[*at].name == name ? &tensors_[*at] : nullptr;
  }

 private:
  // A split set: every file says "split.no" (from 0) and "split.count", and is named NAME-00001-of-0000N.gguf.
  void read_other_parts() {
    const int64_t count = metadata().integer("split.count").value_or(1);
    const int64_t number = metadata().integer("split.no").value_or(0);
    if (count < 0 || count > 99999) bad(path_, fmt::format("'split.count' is {}, expected 1 to 99999", count));
    if (count <= 1) return;
    if (number != 0)
      bad(path_, fmt::format("'split.no' is {}: part {} of {}; give the first part, ...-00001-of-{:05}.gguf", number,
                             number + 1, count, count));
    const std::string ending = fmt::format("-00001-of-{:05}.gguf", count);
    if (!path_.ends_with(ending))
      bad(path_, fmt::format("the first of {} parts must be named ...{}, so that the others are found", count, ending));
    const std::string stem = path_.substr(0, path_.size() - ending.size());
    for (int64_t i = 1; i < count; ++i) {
      const std::string part = fmt::format("{}-{:05}-of-{:05}.gguf", stem, i + 1, count);
      files_.push_back(read_gguf(part));
      const Metadata& fields = files_.back()->metadata;
      if (fields.integer("split.count") != count || fields.integer("split.no") != i)
        bad(part, fmt::format("'split.no' is {} and 'split.count' is {}, expected {} and {}",
                              fields.describe("split.no"), fields.describe("split.count"), i, count));
    }
  }

  const std::string path_;
  std::vector<std::unique_ptr<GgufFile>> files_;
  std::vector<TensorInfo> tensors_;
  std::vector<uint32_t> by_name_;  // sorted by name
  std::vector<std::string> warnings_;
};

// Metadata from one file, tensors from another.
class GgufFolderCheckpoint final : public Checkpoint {
 public:
  explicit GgufFolderCheckpoint(const std::string& folder)
      : folder_(folder),
        metadata_(read_gguf(folder + "/" + kGgufMetadataFile)),
        tensors_(folder + "/model.safetensors") {
    if (!metadata_->tensors.empty())
      bad(metadata_->mapped.path(), fmt::format("holds {} tensors, expected none: they lie in model.safetensors",
                                                metadata_->tensors.size()));
  }

  const std::string& path() const override { return folder_; }
  Container container() const override { return Container::kGguf; }
  const Metadata& metadata() const override { return metadata_->metadata; }
  std::span<const TensorInfo> tensors() const override { return tensors_.tensors(); }
  const TensorInfo* find(std::string_view name) const override { return tensors_.find(name); }
  std::span<const std::string> warnings() const override { return metadata_->warnings; }

 private:
  const std::string folder_;
  std::unique_ptr<GgufFile> metadata_;
  SafetensorsFile tensors_;
};

}  // namespace

std::unique_ptr<Checkpoint> open_gguf(const std::string& path) { return std::make_unique<GgufCheckpoint>(path); }

std::unique_ptr<Checkpoint> open_gguf_folder(const std::string& folder) {
  return std::make_unique<GgufFolderCheckpoint>(folder);
}

std::string gguf_metadata_alone(const std::string& path) {
  const std::unique_ptr<GgufFile> file = read_gguf(path);   // checks all that is read again below
  Cursor cursor(path, file->mapped.bytes());
  cursor.take(4 + sizeof(uint32_t) + sizeof(uint64_t), [] { return "the header"; });
  const auto n_fields = cursor.read<uint64_t>([] { return "n_kv"; });
  std::string fields;
  uint64_t n_kept = 0;
  for (uint64_t i = 0; i < n_fields; ++i) {
    const std::byte* begin = cursor.here();
    const Field field = read_field(cursor, i);
    if (field.key.starts_with("split.") || field.key == "general.file_type") continue;
    fields += text_at(begin, static_cast<uint64_t>(cursor.here() - begin));
    ++n_kept;
  }
  constexpr uint32_t kVersion = 3;   // its metadata lie as version 2's do
  constexpr uint64_t kNoTensors = 0;
  std::string bytes = "GGUF";
  const auto put = [&](const auto& number) { bytes.append(reinterpret_cast<const char*>(&number), sizeof(number)); };
  put(kVersion);
  put(kNoTensors);
  put(n_kept);
  return bytes + fields;
}

}  // namespace beryl
