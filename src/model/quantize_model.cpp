#include "model/quantize_model.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "base/float_formats.h"
#include "base/new_folder.h"
#include "base/rng.h"
#include "model/config.h"
#include "model/config_json.h"
#include "model/synthetic.h"
#include "model/tensor_names.h"
#include "model/weights.h"
#include "weights/gguf.h"
#include "weights/quote.h"

namespace beryl {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWeightsFile = "model.safetensors";
constexpr const char* kConfigFile = "config.json";
// What goes with the weights of a Hugging Face folder: what beryl reads, and two files that other readers want.
constexpr std::string_view kFolderFiles[] = {kConfigFile,
                                             "generation_config.json",
                                             "tokenizer.json",
                                             "tokenizer_config.json",
                                             "chat_template.jinja",
                                             "chat_template.json",
                                             "special_tokens_map.json",
                                             "added_tokens.json"};

bool is_quantised(Format format) { return info(format).block_weights > 1 || info(format).scale_group >= 0; }

bool is_head(Role role) {
  return role == Role::kEmbedding || role == Role::kHead || role == Role::kPerLayerEmbedding;
}

Treatment treat(Role role, size_t n_dims, Format wanted, const HostMatrix& source) {
  if (n_dims < 2) return Treatment::kVector;
  if (role == Role::kRouter) return Treatment::kRouter;
  if (source.format == wanted) return Treatment::kSame;
  return fits(wanted, source.cols) ? Treatment::kEncoded : Treatment::kOddRows;
}

// The roles that decide a tensor's format, by name. Others are layers' matrices and vectors, which their shape tells.
std::unordered_map<std::string, Role> special_roles(const TensorNames& names, const ModelConfig& config) {
  std::unordered_map<std::string, Role> roles;
  for (const Role role : {Role::kEmbedding, Role::kHead, Role::kPerLayerEmbedding})
    roles[names.of(role, -1, config.family)] = role;
  for (int layer = 0; layer < config.n_layers(); ++layer)
    roles[names.of(Role::kRouter, layer, config.family)] = Role::kRouter;
  return roles;
}

void add_tensor(QuantizePlan& plan, const QuantizeFormats& formats, Role role, QuantizeTensor tensor) {
  const Format wanted = is_head(role) ? formats.head_format() : formats.layers;
  const Treatment treatment = treat(role, tensor.entry.shape.size(), wanted, tensor.source);
  const bool is_encoded = treatment == Treatment::kEncoded;
  tensor.entry.format = is_encoded ? wanted : tensor.source.format;
  // A float tensor that has a scale of its own (GGUF) is multiplied with it, for which its format may be too narrow.
  if (!is_encoded && !is_quantised(tensor.source.format) && tensor.source.tensor_scale != 1)
    tensor.entry.format = Format::kF32;
  plan.was_quantised = plan.was_quantised || (is_encoded && is_quantised(tensor.source.format));
  plan.treatments.push_back(treatment);
  plan.tensors.push_back(std::move(tensor));
}

// Names the tensors of a synthetic model and notes their shapes.
class ShapeRecorder final : public TensorSource {
 public:
  struct Tensor {
    Role role;
    std::string name;
    std::vector<int64_t> shape;
  };

  ShapeRecorder(const ModelConfig& config, bool tied)
      : names_(Container::kHuggingFace), family_(config.family), tied_(tied) {}

  bool has(Role role, int) const override {
    return role == Role::kExpertGateUp || (role == Role::kHead && !tied_);
  }

  HostMatrix matrix(Role role, int layer, int64_t rows, int64_t cols, int64_t stack) override {
    const bool stacks = role == Role::kExpertGateUp || role == Role::kExpertDown;
    tensors.push_back({role, names_.of(role, layer, family_),
                       stacks ? std::vector{stack, rows, cols} : std::vector{rows, cols}});
    return shape_of(tensors.back().shape);
  }

  std::vector<float> values(Role role, int layer, int64_t n) override {
    tensors.push_back({role, names_.of(role, layer, family_), {n}});
    return std::vector<float>(static_cast<size_t>(n), 1.0f);
  }

  void ignore(Role, int) override {}

  // A BF16 matrix without data.
  static HostMatrix shape_of(const std::vector<int64_t>& shape) {
    HostMatrix matrix;
    matrix.format = Format::kBf16;
    matrix.cols = shape.back();
    matrix.rows = shape.size() < 2 ? 1 : shape[shape.size() - 2];
    matrix.stack = shape.size() < 3 ? 1 : shape.front();
    matrix.stack_stride_bytes = matrix.rows * row_bytes(matrix.format, matrix.cols);
    return matrix;
  }

  std::vector<Tensor> tensors;

 private:
  TensorNames names_;
  Family family_;
  bool tied_;
};

float as_bf16(float value) { return bf16_to_f32(f32_to_bf16(value)); }

// Weights of a matrix: nearly normal (a sum of four uniform bytes), so wide that products keep their size.
void make_matrix_row(uint64_t seed, uint64_t tensor, int64_t row, int64_t cols, float* out) {
  constexpr float kMean = 2 * 255.0f, kDeviation = 147.8f;   // of the sum: 4 * (256^2 - 1) / 12, rooted
  const float scale = 1 / (kDeviation * std::sqrt(static_cast<float>(cols)));
  const auto draws_a_row = static_cast<uint64_t>((cols + 3) / 4);
  for (int64_t col = 0; col < cols; col += 4) {
    const uint64_t draw = static_cast<uint64_t>(row) * draws_a_row + static_cast<uint64_t>(col / 4);
    const Random4 bits = philox(seed, draw, tensor);
    for (int64_t i = 0; i < std::min<int64_t>(4, cols - col); ++i) {
      uint32_t sum = 0;
      for (int byte = 0; byte < 4; ++byte) sum += bits.x[i] >> (8 * byte) & 0xff;
      out[col + i] = as_bf16((static_cast<float>(sum) - kMean) * scale);
    }
  }
}

// Norms around 1 (stored less 1 where the family does so); Gemma 4's layers shrink the stream a little.
void make_vector(uint64_t seed, uint64_t tensor, Role role, bool less_one, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float unit = to_unit_float(philox(seed, static_cast<uint64_t>(i), tensor).x[0]);
    out[i] = as_bf16(role == Role::kOutputScale ? 0.9f : 0.7f + 0.6f * unit - (less_one ? 1.0f : 0.0f));
  }
}

}  // namespace

Format QuantizeFormats::head_format() const {
  if (head) return *head;
  switch (layers) {
    case Format::kFp4G128:
    case Format::kMxfp4:
    case Format::kNvfp4: return Format::kFp8;
    case Format::kQ4_0:
    case Format::kQ4_1:
    case Format::kQ5_0:
    case Format::kQ5_1:
    case Format::kQ4_K:
    case Format::kQ5_K:
    case Format::kQ6_K: return Format::kQ8_0;
    default: return layers;
  }
}

QuantizePlan plan_quantize(const std::string& source, const QuantizeFormats& formats) {
  QuantizePlan plan;
  plan.checkpoint = open_checkpoint(source);
  const Checkpoint& checkpoint = *plan.checkpoint;
  ModelConfig config = read_config(checkpoint);
  {
    // All of the loader's checks; but reordering rows would copy them, and here they stay as they are.
    ModelConfig in_file_order = config;
    in_file_order.interleaved_rope = false;
    plan.dropped = load_weights(checkpoint, in_file_order)->ignored;
  }
  std::unordered_set<std::string> left_out(plan.dropped.begin(), plan.dropped.end());
  for (const TensorInfo& tensor : checkpoint.tensors())
    if (!left_out.contains(tensor.name))
      for (std::string& companion : companions_of(checkpoint, tensor)) left_out.insert(std::move(companion));

  const std::unordered_map<std::string, Role> roles = special_roles(TensorNames(checkpoint), config);
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (left_out.contains(tensor.name)) continue;
    const auto special = roles.find(tensor.name);
    QuantizeTensor one;
    one.entry = {tensor.name, tensor.format, tensor.shape};
    one.source = matrix_of(checkpoint, tensor);
    one.gives_pages_back = true;
    add_tensor(plan, formats, special == roles.end() ? Role::kQ : special->second, std::move(one));
  }

  const fs::path folder = source;
  std::error_code ignored;
  if (checkpoint.container() == Container::kHuggingFace) {
    for (const std::string_view name : kFolderFiles)
      if (fs::exists(folder / name, ignored)) plan.files.push_back({std::string(name), (folder / name).string(), {}});
  } else if (fs::is_directory(folder, ignored)) {
    plan.files.push_back({kGgufMetadataFile, (folder / kGgufMetadataFile).string(), {}});
  } else {
    plan.files.push_back({kGgufMetadataFile, {}, gguf_metadata_alone(source)});
  }
  return plan;
}

QuantizePlan plan_synthetic(const std::string& name, const QuantizeFormats& formats, uint64_t seed) {
  const ModelConfig config = synthetic_config(name);
  bool tied = false;
  {
    const Model model = make_synthetic_model(name, {}, seed, /*with_data=*/false);
    tied = model.weights->head.index == model.weights->embedding.index;
  }
  ShapeRecorder recorder(config, tied);
  collect_weights(recorder, config);

  QuantizePlan plan;
  const bool less_one = config.family == Family::kGemma3;   // as its folders store norms
  for (size_t i = 0; i < recorder.tensors.size(); ++i) {
    const auto& [role, tensor_name, shape] = recorder.tensors[i];
    QuantizeTensor tensor;
    tensor.entry = {tensor_name, Format::kBf16, shape};
    tensor.source = ShapeRecorder::shape_of(shape);
    tensor.make_row = [=, role = role, n_dims = shape.size(), cols = shape.back()](int64_t row, float* out) {
      if (n_dims < 2) {
        make_vector(seed, i, role, less_one, cols, out);
      } else {
        make_matrix_row(seed, i, row, cols, out);
      }
    };
    add_tensor(plan, formats, role, std::move(tensor));
  }
  plan.files.push_back({kConfigFile, {}, config_json(config, tied)});
  return plan;
}

QuantizeResult write_model_folder(const QuantizePlan& plan, const std::string& destination,
                                  const QuantizeOptions& options) {
  std::error_code ignored;
  if (plan.checkpoint != nullptr && fs::equivalent(plan.checkpoint->path(), destination, ignored))
    throw Error(ErrorCode::kBadInput, fmt::format("{}: is the model to read; it cannot be written to", destination));
  std::vector<std::string_view> own_names(std::begin(kFolderFiles), std::end(kFolderFiles));
  own_names.push_back(kGgufMetadataFile);
  own_names.push_back(kWeightsFile);
  NewFolder folder(destination, options.replaces, own_names);
  for (const ModelFile& file : plan.files) {
    if (file.copied_from.empty()) {
      folder.write_file(file.name, file.text);
    } else {
      folder.copy_file(file.name, file.copied_from);
    }
  }
  // "format" is what transformers looks for; a folder of floats is a model for it too.
  QuantizeResult result = write_quantized(folder.partial_path() + "/" + kWeightsFile, plan.tensors, options.n_threads,
                                          {{"format", "pt"}}, options.keep_going, folder.path() + "/" + kWeightsFile);
  if (result.finished) folder.commit();
  return result;
}

}  // namespace beryl
