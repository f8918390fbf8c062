// The safetensors reader parses the header as a stream of events, so that memory follows the tensors that are really
// there; the writer knows all sizes beforehand, writes the header first and the planes where they belong.
#include "weights/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "weights/json_text.h"
#include "weights/quote.h"

namespace beryl {

namespace {

[[noreturn]] void bad(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::kBadInput, fmt::format("{}: {}", path, what));
}

// dtypes of the format. `format` is absent for those beryl has no use for.
struct Dtype {
  std::string_view name;
  std::optional<Format> format;
};
constexpr Dtype kDtypes[] = {
    {"F32", Format::kF32}, {"F16", Format::kF16},     {"BF16", Format::kBf16}, {"F8_E4M3", Format::kFp8},
    {"I32", Format::kI32}, {"I64", Format::kI64},     {"U8", Format::kU8},     {"BOOL", {}},
    {"I8", {}},            {"I16", {}},               {"U16", {}},             {"U32", {}},
    {"U64", {}},           {"F64", {}},               {"C64", {}},             {"F8_E5M2", {}},
    {"F8_E8M0", {}},       {"F4", {}},                {"F6_E2M3", {}},         {"F6_E3M2", {}},
    {"F8_E4M3FNUZ", {}},   {"F8_E5M2FNUZ", {}},
};

std::string_view dtype_name(Format format) {
  for (const Dtype& dtype : kDtypes)
    if (dtype.format == format) return dtype.name;
  return "U8";
}

// The GGUF reader's limit too: sizes in bytes and positions in any format fit into 64 bits then.
constexpr uint64_t kMaxTensorElements = uint64_t{1} << 60;

// A tensor of the header before its data is checked.
struct HeaderTensor {
  TensorInfo info;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Receives the events of the header. Depth 1 is the header's object, 2 a tensor's or "__metadata__", 3 its arrays.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(const std::string& path) : path_(path) {}

  std::vector<HeaderTensor> tensors;
  std::vector<std::pair<std::string, std::string>> metadata;

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a bool"); }
  bool number_integer(number_integer_t value) override {
    bad(path_, fmt::format("{}: {} is negative", where(), value));
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (depth_ != 3 || !in_array_) unexpected(fmt::format("the number {}", value));
    if (part_ == Part::kShape) {
      if (shape_.size() >= 8) bad(path_, fmt::format("{}: more than 8 dimensions", where()));
      if (value > static_cast<uint64_t>(INT64_MAX)) bad(path_, fmt::format("{}: dimension {}", where(), value));
      shape_.push_back(static_cast<int64_t>(value));
    } else {
      if (n_offsets_ >= 2) bad(path_, fmt::format("{}: more than 2 numbers", where()));
      offsets_[n_offsets_++] = value;
    }
    return true;
  }
  bool number_float(number_float_t, const string_t& text) override {
    bad(path_, fmt::format("{}: {} is no integer of 64 bits", where(), quote(text, 40)));
  }
  bool binary(binary_t&) override { unexpected("binary data"); }

  bool string(string_t& value) override {
    if (depth_ == 2 && in_metadata_) {
      metadata.emplace_back(key_, std::move(value));
    } else if (depth_ == 2 && part_ == Part::kDtype) {
      const auto* known = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                       [&](const Dtype& dtype) { return dtype.name == value; });
      if (known == std::end(kDtypes)) bad(path_, fmt::format("{}: {} is no dtype", where(), quote(value, 40)));
      dtype_ = known;
    } else {
      unexpected(fmt::format("the string {}", quote(value, 40)));
    }
    return true;
  }

  bool start_object(size_t) override {
    if (in_array_ || depth_ >= 2) unexpected("an object");
    ++depth_;
    if (depth_ == 2) {
      in_metadata_ = name_ == "__metadata__";
      if (in_metadata_ && std::exchange(metadata_seen_, true)) bad(path_, "'__metadata__' occurs twice");
      dtype_ = nullptr;
      shape_.clear();
      n_offsets_ = 0;
      seen_[0] = seen_[1] = seen_[2] = false;
    }
    part_ = Part::kNone;
    return true;
  }

  bool key(string_t& value) override {
    if (depth_ == 1) {
      name_ = value;
      return true;
    }
    if (in_metadata_) {
      key_ = value;
      return true;
    }
    part_ = value == "dtype" ? Part::kDtype : value == "shape" ? Part::kShape
          : value == "data_offsets" ? Part::kOffsets : Part::kNone;
    if (part_ == Part::kNone)
      bad(path_, fmt::format("tensor {} has the key {}, expected dtype, shape and data_offsets", quote(name_),
                             quote(value, 40)));
    if (std::exchange(seen_[static_cast<int>(part_)], true))
      bad(path_, fmt::format("tensor {} has the key {} twice", quote(name_), quote(value)));
    return true;
  }

  bool end_object() override {
    if (depth_ == 2 && !in_metadata_) finish_tensor();
    --depth_;
    part_ = Part::kNone;
    return true;
  }

  bool start_array(size_t) override {
    if (depth_ != 2 || in_metadata_ || (part_ != Part::kShape && part_ != Part::kOffsets)) unexpected("an array");
    ++depth_;
    in_array_ = true;
    return true;
  }

  bool end_array() override {
    --depth_;
    in_array_ = false;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& exception) override {
    bad(path_, fmt::format("the header is not valid JSON at its byte {}: {}", position, json_reason(exception)));
  }

 private:
  enum class Part { kDtype = 0, kShape = 1, kOffsets = 2, kNone = 3 };

  std::string where() const {
    if (depth_ == 0) return "the header";
    if (depth_ == 1) return fmt::format("entry {}", quote(name_));
    if (in_metadata_) return fmt::format("'__metadata__' entry {}", quote(key_));
    constexpr std::string_view kNames[] = {"dtype", "shape", "data_offsets", "entry"};
    return fmt::format("{} of tensor {}", kNames[static_cast<int>(part_)], quote(name_));
  }

  [[noreturn]] void unexpected(const std::string& what) const {
    bad(path_, fmt::format("{} is {}, which the format does not allow there", where(), what));
  }

  void finish_tensor() {
    if (name_.empty()) bad(path_, "a tensor has an empty name");
    if (dtype_ == nullptr || !seen_[1] || n_offsets_ != 2)
      bad(path_, fmt::format("tensor {} lacks {}", quote(name_),
                             dtype_ == nullptr ? "dtype" : !seen_[1] ? "shape" : "two data_offsets"));
    if (!dtype_->format)
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{}: tensor {} has dtype {}, which beryl does not run", path_, quote(name_),
                              dtype_->name));
    HeaderTensor& tensor = tensors.emplace_back();
    tensor.info.name = name_;
    tensor.info.format = *dtype_->format;
    tensor.info.shape = shape_;
    tensor.begin = offsets_[0];
    tensor.end = offsets_[1];
    // Dimensions of 0 are left out of the limit's product: whoever multiplies the others must not overflow either.
    uint64_t n_elements = 1;
    bool empty = false;
    for (const int64_t dim : shape_) {
      if (dim == 0)
        empty = true;
      else if (__builtin_mul_overflow(n_elements, static_cast<uint64_t>(dim), &n_elements) ||
               n_elements > kMaxTensorElements)
        bad(path_, fmt::format("tensor {} has more than 2^60 elements: shape [{}]", quote(name_),
                               fmt::join(shape_, ", ")));
    }
    // At most 2^60 elements of at most 8 bytes: no overflow.
    const uint64_t n_bytes = empty ? 0 : n_elements * static_cast<uint64_t>(info(tensor.info.format).block_bytes);
    if (tensor.end < tensor.begin || tensor.end - tensor.begin != n_bytes)
      bad(path_, fmt::format("tensor {} has data_offsets [{}, {}], expected {} bytes for its dtype and shape",
                             quote(name_), tensor.begin, tensor.end, n_bytes));
  }

  const std::string& path_;
  int depth_ = 0;
  bool in_array_ = false;
  bool in_metadata_ = false;
  bool metadata_seen_ = false;
  Part part_ = Part::kNone;
  bool seen_[3] = {};
  std::string name_;  // of the entry at depth 2
  std::string key_;   // of the "__metadata__" entry
  const Dtype* dtype_ = nullptr;
  std::vector<int64_t> shape_;
  uint64_t offsets_[2] = {};
  int n_offsets_ = 0;
};

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : mapped_(path) {
  read_header();
  apply_formats();
}

void SafetensorsFile::read_header() {
  const std::string& path = mapped_.path();
  const std::span<const std::byte> bytes = mapped_.bytes();
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes))
    bad(path, fmt::format("a file of {} bytes is too short for safetensors", bytes.size()));
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  if (header_bytes > kMaxSafetensorsHeaderBytes)
    bad(path, fmt::format("the header's length is {}, at most {} are allowed", header_bytes,
                          kMaxSafetensorsHeaderBytes));
  if (header_bytes > bytes.size() - 8)
    bad(path, fmt::format("the header's length is {}, but only {} bytes follow", header_bytes, bytes.size() - 8));
  const auto* header = reinterpret_cast<const char*>(bytes.data() + 8);
  if (header_bytes == 0 || header[0] != '{')
    bad(path, fmt::format("the header starts with {}, expected '{{'",
                          quote({header, std::min<size_t>(header_bytes, 1)})));

  refuse_nul(fmt::format("{}: the header", path), {header, header_bytes});
  HeaderReader reader(path);
  nlohmann::json::sax_parse(header, header + header_bytes, &reader);  // throws, never returns false
  metadata_ = std::move(reader.metadata);

  std::vector<uint32_t> order(reader.tensors.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    const HeaderTensor& x = reader.tensors[a];
    const HeaderTensor& y = reader.tensors[b];
    return std::pair(x.begin, x.end) < std::pair(y.begin, y.end);  // empty tensors before the one that starts there
  });
  const std::span<const std::byte> data = bytes.subspan(8 + header_bytes);
  uint64_t end = 0;
  for (const uint32_t i : order) {
    HeaderTensor& tensor = reader.tensors[i];
    if (tensor.begin != end)
      bad(path, fmt::format("tensor {} has data_offsets [{}, {}], expected it to begin at {} ({})",
                            quote(tensor.info.name), tensor.begin, tensor.end, end,
                            tensor.begin < end ? "it overlaps another" : "there is a hole"));
    if (tensor.end > data.size())
      bad(path, fmt::format("tensor {} ends at byte {} of the data, but the file has {}", quote(tensor.info.name),
                            tensor.end, data.size()));
    end = tensor.end;
    tensor.info.data = data.subspan(tensor.begin, tensor.end - tensor.begin);
  }
  if (end != data.size())
    bad(path, fmt::format("{} bytes follow the last tensor, expected none", data.size() - end));

  tensors_.reserve(reader.tensors.size());
  for (HeaderTensor& tensor : reader.tensors) tensors_.push_back(std::move(tensor.info));
  by_name_.resize(tensors_.size());
  for (uint32_t i = 0; i < by_name_.size(); ++i) by_name_[i] = i;
  std::sort(by_name_.begin(), by_name_.end(),
            [&](uint32_t a, uint32_t b) { return tensors_[a].name < tensors_[b].name; });
  for (size_t i = 1; i < by_name_.size(); ++i)
    if (tensors_[by_name_[i - 1]].name == tensors_[by_name_[i]].name)
      bad(path, fmt::format("tensor {} occurs twice", quote(tensors_[by_name_[i]].name)));

  std::vector<std::string_view> keys;
  for (const auto& [key, value] : metadata_) keys.push_back(key);
  std::sort(keys.begin(), keys.end());
  if (const auto twice = std::adjacent_find(keys.begin(), keys.end()); twice != keys.end())
    bad(path, fmt::format("'__metadata__' has the key {} twice", quote(*twice)));
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto at = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                   [&](uint32_t i, std::string_view wanted) { return tensors_[i].name < wanted; });
  return at != by_name_.end() && tensors_[*at].name == name ? &tensors_[*at] : nullptr;
}

// Gives the tensors listed in beryl.formats their format and logical shape: a U8 row of row_bytes(format, cols) bytes
// is a row of cols weights.
void SafetensorsFile::apply_formats() {
  const auto entry = std::find_if(metadata_.begin(), metadata_.end(),
                                  [](const auto& pair) { return pair.first == kFormatsKey; });
  if (entry == metadata_.end()) return;
  const std::string where = fmt::format("{}: '{}'", path(), kFormatsKey);
  const auto formats = parse_json<nlohmann::json>(where, entry->second, SIZE_MAX);
  if (!formats.is_object()) throw Error(ErrorCode::kBadInput, fmt::format("{} is no JSON object", where));
  for (const auto& [name, value] : formats.items()) {
    const auto format = value.is_string() ? format_by_name(value.get_ref<const std::string&>()) : std::nullopt;
    if (!format)
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{} gives {} the format {}, which beryl does not know", where, quote(name),
                              value.is_string() ? quote(value.get_ref<const std::string&>()) : value.type_name()));
    auto* tensor = const_cast<TensorInfo*>(find(name));
    if (tensor == nullptr)
      throw Error(ErrorCode::kBadInput, fmt::format("{} names {}, but there is no such tensor", where, quote(name)));
    if (tensor->format == *format) continue;
    const FormatInfo& wanted = info(*format);
    if (tensor->format != Format::kU8 || tensor->shape.empty() || tensor->shape.back() % wanted.block_bytes != 0)
      throw Error(ErrorCode::kBadInput,
                  fmt::format("{} gives {} the format {}, expected it to be U8 in rows of a multiple of {} bytes",
                              where, quote(name), wanted.name, wanted.block_bytes));
    // A block has at most 2 weights a byte, so at most 2^61 in all: no overflow.
    tensor->shape.back() = tensor->shape.back() / wanted.block_bytes * wanted.block_weights;
    tensor->format = *format;
  }
}

namespace {

// "__metadata__": strings only.
class StringMetadata final : public Metadata {
 public:
  StringMetadata(const std::string& path, std::span<const std::pair<std::string, std::string>> entries)
      : path_(path), entries_(entries.begin(), entries.end()) {}

  bool has(std::string_view key) const override { return find(key) != nullptr; }
  std::optional<int64_t> integer(std::string_view key) const override { return absent<int64_t>(key, "an integer"); }
  std::optional<double> number(std::string_view key) const override { return absent<double>(key, "a number"); }
  std::optional<bool> boolean(std::string_view key) const override { return absent<bool>(key, "a bool"); }
  std::optional<std::string> string(std::string_view key) const override {
    const std::string* value = find(key);
    return value == nullptr ? std::nullopt : std::optional(*value);
  }
  bool is_array(std::string_view) const override { return false; }
  std::optional<std::vector<int64_t>> integers(std::string_view key) const override {
    return absent<std::vector<int64_t>>(key, "an array of integers or bools");
  }
  std::optional<std::vector<float>> floats(std::string_view key) const override {
    return absent<std::vector<float>>(key, "an array of numbers");
  }
  std::shared_ptr<const StringList> strings(std::string_view key) const override {
    absent<bool>(key, "an array of strings");
    return nullptr;
  }
  std::vector<std::string> keys() const override {
    std::vector<std::string> out;
    for (const auto& [key, value] : entries_) out.push_back(key);
    return out;
  }
  std::string describe(std::string_view key) const override {
    const std::string* value = find(key);
    return value == nullptr ? "absent" : "string " + quote(*value, 60);
  }

 private:
  const std::string* find(std::string_view key) const {
    for (const auto& [name, value] : entries_)
      if (name == key) return &value;
    return nullptr;
  }
  template <class T>
  std::optional<T> absent(std::string_view key, std::string_view wanted) const {
    if (find(key) != nullptr)
      bad(path_, fmt::format("{} is {}, expected {}", quote(key), describe(key), wanted));
    return std::nullopt;
  }

  const std::string path_;
  const std::vector<std::pair<std::string, std::string>> entries_;
};

class SingleFileCheckpoint final : public Checkpoint {
 public:
  explicit SingleFileCheckpoint(const std::string& path) : file_(path), metadata_(path, file_.metadata()) {}
  const std::string& path() const override { return file_.path(); }
  Container container() const override { return Container::kHuggingFace; }
  const Metadata& metadata() const override { return metadata_; }
  std::span<const TensorInfo> tensors() const override { return file_.tensors(); }
  const TensorInfo* find(std::string_view name) const override { return file_.find(name); }
  std::span<const std::string> warnings() const override { return {}; }

 private:
  SafetensorsFile file_;
  StringMetadata metadata_;
};

}  // namespace

std::unique_ptr<Checkpoint> open_safetensors(const std::string& path) {
  return std::make_unique<SingleFileCheckpoint>(path);
}

// --- writing ---------------------------------------------------------------------------------------------------------

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries,
                                     const std::vector<std::pair<std::string, std::string>>& metadata, const std::string& shown_path)
    : path_(path), partial_path_(fmt::format("{}.partial-{}", path, ::getpid())), shown_path_(shown_path.empty() ? path : shown_path) {
  nlohmann::json formats = nlohmann::json::object();
  for (const SafetensorsEntry& entry : entries) {
    const FormatInfo& format = info(entry.format);
    const int64_t cols = entry.shape.empty() ? 1 : entry.shape.back();
    BERYL_CHECK(fits(entry.format, cols), "a row to write must be whole blocks");
    int64_t n_rows = 1;
    for (size_t i = 0; i + 1 < entry.shape.size(); ++i) n_rows *= entry.shape[i];

    Plane codes;
    codes.name = entry.name;
    codes.dtype = dtype_name(entry.format);
    codes.shape = entry.shape;
    const bool packed = codes.dtype == "U8" && entry.format != Format::kU8;
    codes.element_bytes = packed ? 1 : format.block_bytes;
    if (packed) {
      BERYL_CHECK(!entry.shape.empty(), "a quantised matrix has columns");
      codes.shape.back() = row_bytes(entry.format, cols);
    }
    codes.n_bytes = static_cast<uint64_t>(n_rows * row_bytes(entry.format, cols));
    if (packed || format.scale_group >= 0) formats[entry.name] = format.name;
    const size_t codes_index = planes_.size();
    planes_.push_back(std::move(codes));

    size_t scales_index = SIZE_MAX;
    if (format.scale_group >= 0) {
      Plane scales;
      scales.name = entry.name + std::string(kScaleSuffix);
      scales.dtype = format.scale_bytes == 2 ? "BF16" : "F32";
      scales.element_bytes = format.scale_bytes;
      scales.shape = entry.shape;
      if (scales.shape.empty()) scales.shape.push_back(1);
      scales.shape.back() = row_scale_bytes(entry.format, cols) / format.scale_bytes;
      scales.n_bytes = static_cast<uint64_t>(n_rows * row_scale_bytes(entry.format, cols));
      scales_index = planes_.size();
      planes_.push_back(std::move(scales));
    }
    planes_of_entry_.emplace_back(codes_index, scales_index);
  }

  // The format knows no padding between tensors; laying wide elements first keeps every tensor aligned to its element.
  std::vector<size_t> order(planes_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return planes_[a].element_bytes > planes_[b].element_bytes; });
  std::vector<std::pair<std::string, nlohmann::ordered_json>> fields;
  nlohmann::ordered_json strings = nlohmann::ordered_json::object();
  for (const auto& [key, value] : metadata) {
    if (strings.contains(key)) bad(shown_path_, fmt::format("metadata key {} occurs twice", quote(key)));
    strings[key] = value;
  }
  if (!formats.empty()) strings[std::string(kFormatsKey)] = formats.dump();
  if (!strings.empty()) fields.emplace_back("__metadata__", strings);
  uint64_t begin = 0;
  for (const size_t i : order) {
    Plane& plane = planes_[i];
    plane.begin = begin;
    begin += plane.n_bytes;
    fields.emplace_back(plane.name, nlohmann::ordered_json{{"dtype", plane.dtype},
                                                           {"shape", plane.shape},
                                                           {"data_offsets", {plane.begin, begin}}});
  }
  std::vector<std::string_view> names;
  for (const Plane& plane : planes_) names.push_back(plane.name);
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end())
    bad(shown_path_, fmt::format("tensor {} occurs twice", quote(*twice)));

  std::string header = "{";
  try {
    for (const auto& [name, value] : fields) {
      if (header.size() > 1) header += ',';
      header += nlohmann::json(name).dump() + ':' + value.dump();
    }
  } catch (const nlohmann::json::exception& exception) {
    bad(shown_path_, fmt::format("a name or a metadata string is not UTF-8: {}", json_reason(exception)));
  }
  header += '}';
  header.append((8 - header.size() % 8) % 8, ' ');  // so that the data starts at a multiple of 8
  BERYL_CHECK(header.size() <= kMaxSafetensorsHeaderBytes, "safetensors header too long");

  fd_ = ::open(partial_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0)
    throw Error(ErrorCode::kIo, fmt::format("{}: cannot create: {}", shown_path_, std::strerror(errno)));
  const uint64_t header_bytes = header.size();
  data_start_ = 8 + header_bytes;
  try {
    write_at(0, std::as_bytes(std::span(&header_bytes, 1)));
    write_at(8, std::as_bytes(std::span(header)));
  } catch (...) {
    ::close(fd_);
    ::unlink(partial_path_.c_str());
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(partial_path_.c_str());
}

void SafetensorsWriter::write_at(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      throw Error(ErrorCode::kIo, fmt::format("{}: cannot write {} bytes: {}", shown_path_, bytes.size(),
                                              std::strerror(errno)));
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
}

void SafetensorsWriter::append(Plane& plane, std::span<const std::byte> bytes) {
  BERYL_CHECK(bytes.size() <= plane.n_bytes - plane.written, "more bytes than the tensor has");
  write_at(data_start_ + plane.begin + plane.written, bytes);
  plane.written += bytes.size();
}

void SafetensorsWriter::write(size_t entry, std::span<const std::byte> bytes) {
  append(planes_.at(planes_of_entry_.at(entry).first), bytes);
}

void SafetensorsWriter::write_scales(size_t entry, std::span<const std::byte> bytes) {
  const size_t plane = planes_of_entry_.at(entry).second;
  BERYL_CHECK(plane != SIZE_MAX, "the format has no scale plane");
  append(planes_.at(plane), bytes);
}

void SafetensorsWriter::finish() {
  for (const Plane& plane : planes_) BERYL_CHECK(plane.written == plane.n_bytes, "a tensor was not written to its end");
  if (::fsync(fd_) != 0)
    throw Error(ErrorCode::kIo, fmt::format("{}: cannot sync: {}", shown_path_, std::strerror(errno)));
  if (::rename(partial_path_.c_str(), path_.c_str()) != 0)
    throw Error(ErrorCode::kIo, fmt::format("{}: cannot be given its name: {}", shown_path_, std::strerror(errno)));
  ::close(fd_);
  fd_ = -1;
}

void write_safetensors(const std::string& path, std::span<const SafetensorsTensor> tensors,
                       const std::vector<std::pair<std::string, std::string>>& metadata) {
  std::vector<SafetensorsEntry> entries;
  for (const SafetensorsTensor& tensor : tensors) entries.push_back(tensor.entry);
  SafetensorsWriter writer(path, std::move(entries), metadata);
  for (size_t i = 0; i < tensors.size(); ++i) {
    writer.write(i, tensors[i].data);
    if (info(tensors[i].entry.format).scale_group >= 0) writer.write_scales(i, tensors[i].scales);
  }
  writer.finish();
}

}  // namespace beryl
