#include "weights/quantize.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include "base/error.h"
#include "base/threads.h"
#include "weights/encode.h"
#include "weights/quote.h"

namespace beryl {
namespace {

constexpr int64_t kPieceWeights = 1 << 18;      // what a thread takes at once: 1 MB of f32, some 20 ms of searching
constexpr int64_t kPiecesAThread = 4;           // of a chunk, so that threads of unequal speed finish together

// body(item, thread) for every item in [0, n_items). Throws what the first of the items that failed threw, by number,
// so that the message does not depend on chance.
template <class Body>
void for_each_item(int64_t n_items, int n_threads, const Body& body) {
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  int64_t failed_item = n_items;
  const auto work = [&](int thread) {
    for (int64_t item = next++; item < n_items; item = next++) {
      try {
        body(item, thread);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (item < failed_item) {
          failed_item = item;
          error = std::current_exception();
        }
        return;
      }
    }
  };
  {
    // A chunk takes long enough for starting threads to cost nothing.
    const std::vector<std::jthread> others = start_helpers(static_cast<int>(std::min<int64_t>(n_threads, n_items)), work);
    work(0);
  }
  if (error) std::rethrow_exception(error);
}

// The pages that lie under [begin, end) of a file's mapping are dropped; whoever reads them again gets them from the
// file. The last one may be read again at once, by the next chunk.
void give_pages_back(const std::byte* begin, const std::byte* end) {
  const auto page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t from = reinterpret_cast<uintptr_t>(begin) / page_bytes * page_bytes;
  const uintptr_t to = reinterpret_cast<uintptr_t>(end) / page_bytes * page_bytes;
  if (to > from) ::madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
}

// One tensor of the list, with the geometry of its rows and pieces.
class TensorRows {
 public:
  explicit TensorRows(const QuantizeTensor& tensor)
      : tensor_(tensor),
        source_(tensor.source),
        format_(tensor.entry.format),
        n_rows_(source_.stack * source_.rows),
        piece_rows_(std::max<int64_t>(1, kPieceWeights / source_.cols)) {
    int64_t n_entries = 1;
    for (const int64_t dim : tensor.entry.shape) n_entries *= dim;
    BERYL_CHECK(n_entries == n_weights(), "the entry and its source have one shape");
    BERYL_CHECK((source_.codes != nullptr) != static_cast<bool>(tensor.make_row), "rows come from one place");
    BERYL_CHECK(fits(format_, source_.cols), "rows to write are whole blocks");
  }

  const std::string& name() const { return tensor_.entry.name; }
  int64_t n_rows() const { return n_rows_; }
  int64_t cols() const { return source_.cols; }
  int64_t piece_rows() const { return piece_rows_; }
  int64_t n_weights() const { return n_rows_ * source_.cols; }
  Format format() const { return format_; }
  // A float tensor has no place for a scale of its own: it is multiplied in.
  bool is_copied() const {
    return source_.codes != nullptr && source_.format == format_ &&
           (source_.tensor_scale == 1 || info(format_).block_weights > 1);
  }

  void read(int64_t row, float* out) const {
    if (tensor_.make_row) {
      tensor_.make_row(row, out);
    } else {
      decode_row(source_, row / source_.rows, row % source_.rows, out);
    }
  }

  const std::byte* codes(int64_t row) const {
    return source_.row_codes(row / source_.rows, row % source_.rows);
  }
  const std::byte* scales(int64_t row) const {
    return source_.row_scales(row / source_.rows, row % source_.rows);
  }

  // Rows [first, first + n) have been read, in order.
  void give_back(int64_t first, int64_t n) const {
    if (!tensor_.gives_pages_back || source_.codes == nullptr || n == 0) return;
    give_pages_back(codes(first), codes(first + n - 1) + row_bytes(source_.format, source_.cols));
  }

 private:
  const QuantizeTensor& tensor_;
  const HostMatrix& source_;
  Format format_;
  int64_t n_rows_, piece_rows_;
};

void check_finite(const std::string& name, const float* weights, int64_t row, int64_t cols) {
  for (int64_t col = 0; col < cols; ++col)
    if (!std::isfinite(weights[col]))
      throw Error(ErrorCode::kBadInput,
                  fmt::format("tensor {} has {} at row {}, column {}; finite weights were expected", quote(name),
                              weights[col], row, col));
}

// The memory of one thread.
struct Workspace {
  std::vector<float> before, after;
};

class Stream {
 public:
  Stream(SafetensorsWriter& writer, int n_threads, int64_t n_weights,
         const std::function<bool(const QuantizeProgress&)>& keep_going)
      : writer_(writer), n_threads_(n_threads), keep_going_(keep_going) {
    progress_.n_weights = n_weights;
    workspaces_.resize(static_cast<size_t>(n_threads));
  }

  // False: stopped.
  bool write(size_t entry, const TensorRows& rows, float tensor_scale, QuantizeError& error) {
    const int64_t code_bytes = row_bytes(rows.format(), rows.cols());
    const int64_t scale_bytes = row_scale_bytes(rows.format(), rows.cols());
    const int64_t chunk_rows = rows.piece_rows() * kPiecesAThread * n_threads_;
    for (int64_t first = 0; first < rows.n_rows(); first += chunk_rows) {
      const int64_t n = std::min(chunk_rows, rows.n_rows() - first);
      const int64_t n_pieces = (n + rows.piece_rows() - 1) / rows.piece_rows();
      codes_.resize(static_cast<size_t>(n * code_bytes));
      scales_.resize(static_cast<size_t>(n * scale_bytes));
      std::vector<QuantizeError> errors(static_cast<size_t>(n_pieces));
      for_each_item(n_pieces, n_threads_, [&](int64_t piece, int thread) {
        const int64_t begin = piece * rows.piece_rows(), count = std::min(rows.piece_rows(), n - begin);
        encode_piece(rows, first + begin, count, tensor_scale, codes_.data() + begin * code_bytes,
                     scale_bytes == 0 ? nullptr : scales_.data() + begin * scale_bytes,
                     workspaces_[static_cast<size_t>(thread)], errors[static_cast<size_t>(piece)]);
      });
      for (const QuantizeError& one : errors) {
        error.squared_error += one.squared_error;
        error.squared_weights += one.squared_weights;
      }
      writer_.write(entry, codes_);
      if (scale_bytes > 0) writer_.write_scales(entry, scales_);
      rows.give_back(first, n);
      progress_.n_done += n * rows.cols();
      progress_.tensor = rows.name();
      if (!keep_going_(progress_)) return false;
    }
    return true;
  }

  // NVFP4's scale of the whole tensor, which must be known before its first row is written. nullopt: stopped.
  std::optional<float> tensor_scale(const TensorRows& rows) {
    const int64_t chunk_rows = rows.piece_rows() * kPiecesAThread * n_threads_;
    float largest = 0;
    for (int64_t first = 0; first < rows.n_rows(); first += chunk_rows) {
      const int64_t n = std::min(chunk_rows, rows.n_rows() - first);
      const int64_t n_pieces = (n + rows.piece_rows() - 1) / rows.piece_rows();
      std::vector<float> peaks(static_cast<size_t>(n_pieces));
      for_each_item(n_pieces, n_threads_, [&](int64_t piece, int thread) {
        std::vector<float>& row = workspaces_[static_cast<size_t>(thread)].before;
        row.resize(static_cast<size_t>(rows.cols()));
        const int64_t begin = first + piece * rows.piece_rows();
        for (int64_t i = begin; i < std::min(begin + rows.piece_rows(), first + n); ++i) {
          rows.read(i, row.data());
          check_finite(rows.name(), row.data(), i, rows.cols());
          for (const float weight : row)
            peaks[static_cast<size_t>(piece)] = std::max(peaks[static_cast<size_t>(piece)], std::fabs(weight));
        }
      });
      largest = std::max(largest, *std::max_element(peaks.begin(), peaks.end()));
      rows.give_back(first, n);
      if (!keep_going_(progress_)) return std::nullopt;
    }
    return nvfp4_tensor_scale(&largest, 1);
  }

 private:
  static void encode_piece(const TensorRows& rows, int64_t first, int64_t n, float tensor_scale, std::byte* codes,
                           std::byte* scales, Workspace& workspace, QuantizeError& error) {
    const int64_t cols = rows.cols();
    const int64_t code_bytes = row_bytes(rows.format(), cols), scale_bytes = row_scale_bytes(rows.format(), cols);
    std::vector<float>& before = workspace.before;
    std::vector<float>& after = workspace.after;
    before.resize(static_cast<size_t>(cols));
    after.resize(static_cast<size_t>(cols));
    HostMatrix encoded;   // one row of what is written
    encoded.format = rows.format();
    encoded.rows = 1;
    encoded.cols = cols;
    encoded.tensor_scale = tensor_scale;
    for (int64_t i = 0; i < n; ++i) {
      encoded.codes = codes + i * code_bytes;
      encoded.scales = scales == nullptr ? nullptr : scales + i * scale_bytes;
      rows.read(first + i, before.data());
      if (rows.is_copied()) {
        check_finite(rows.name(), before.data(), first + i, cols);
        std::memcpy(codes + i * code_bytes, rows.codes(first + i), static_cast<size_t>(code_bytes));
        if (scale_bytes > 0)
          std::memcpy(scales + i * scale_bytes, rows.scales(first + i), static_cast<size_t>(scale_bytes));
        continue;
      }
      encode_rows(rows.name(), rows.format(), before.data(), first + i, 1, cols, codes + i * code_bytes,
                  scales == nullptr ? nullptr : scales + i * scale_bytes, tensor_scale);
      decode_row(encoded, 0, 0, after.data());
      for (int64_t col = 0; col < cols; ++col) {
        const double off = double{after[static_cast<size_t>(col)]} - before[static_cast<size_t>(col)];
        error.squared_error += off * off;
        error.squared_weights += double{before[static_cast<size_t>(col)]} * before[static_cast<size_t>(col)];
      }
    }
  }

  SafetensorsWriter& writer_;
  int n_threads_;
  const std::function<bool(const QuantizeProgress&)>& keep_going_;
  QuantizeProgress progress_;
  std::vector<Workspace> workspaces_;       // one a thread
  std::vector<std::byte> codes_, scales_;   // of a chunk
};

}  // namespace

QuantizeResult write_quantized(const std::string& path, std::span<const QuantizeTensor> tensors, int n_threads,
                               const std::vector<std::pair<std::string, std::string>>& metadata,
                               const std::function<bool(const QuantizeProgress&)>& keep_going, const std::string& shown_path) {
  constexpr size_t kNone = SIZE_MAX;
  std::vector<TensorRows> rows;
  std::vector<SafetensorsEntry> entries;
  std::vector<size_t> scale_entries;        // of each tensor, where it has a scale of its own
  int64_t n_weights = 0;
  for (const QuantizeTensor& tensor : tensors) {
    const TensorRows& one = rows.emplace_back(tensor);
    n_weights += one.n_weights();
    entries.push_back(tensor.entry);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool has_scale =
        rows[i].is_copied() ? tensors[i].source.tensor_scale != 1 : rows[i].format() == Format::kNvfp4;
    scale_entries.push_back(has_scale ? entries.size() : kNone);
    if (has_scale) entries.push_back({tensors[i].entry.name + std::string(kScaleSuffix), Format::kF32, {1}});
  }

  SafetensorsWriter writer(path, std::move(entries), metadata, shown_path);
  Stream stream(writer, std::max(n_threads, 1), n_weights, keep_going);
  QuantizeResult result;
  result.errors.resize(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    float tensor_scale = 1;
    if (scale_entries[i] != kNone) {
      tensor_scale = tensors[i].source.tensor_scale;
      if (!rows[i].is_copied()) {
        const std::optional<float> found = stream.tensor_scale(rows[i]);
        if (!found) return result;
        tensor_scale = *found;
      }
      writer.write(scale_entries[i], std::as_bytes(std::span(&tensor_scale, 1)));
    }
    if (!stream.write(i, rows[i], tensor_scale, result.errors[i])) return result;
  }
  writer.finish();
  result.finished = true;
  return result;
}

}  // namespace beryl
