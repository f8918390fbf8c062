// A checkpoint that notes which metadata keys are asked for, so that `beryl inspect` can tell what nothing reads,
// without a second list of keys.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "weights/checkpoint.h"

namespace beryl::cli {

// Not thread-safe, even when only read.
class RecordingCheckpoint : public Checkpoint {
 public:
  explicit RecordingCheckpoint(std::unique_ptr<Checkpoint> checkpoint)
      : checkpoint_(std::move(checkpoint)), metadata_(checkpoint_->metadata()) {}

  const std::string& path() const override { return checkpoint_->path(); }
  Container container() const override { return checkpoint_->container(); }
  const Metadata& metadata() const override { return metadata_; }
  std::span<const TensorInfo> tensors() const override { return checkpoint_->tensors(); }
  const TensorInfo* find(std::string_view name) const override { return checkpoint_->find(name); }
  std::span<const std::string> warnings() const override { return checkpoint_->warnings(); }

  // Keys that are there and were not asked for, in file order.
  std::vector<std::string> unread_keys() const {
    std::vector<std::string> unread;
    for (std::string& key : checkpoint_->metadata().keys())
      if (!metadata_.asked.contains(key)) unread.push_back(std::move(key));
    return unread;
  }

 private:
  class RecordingMetadata : public Metadata {
   public:
    explicit RecordingMetadata(const Metadata& metadata) : metadata_(metadata) {}
    bool has(std::string_view key) const override { return metadata_.has(note(key)); }
    std::optional<int64_t> integer(std::string_view key) const override { return metadata_.integer(note(key)); }
    std::optional<double> number(std::string_view key) const override { return metadata_.number(note(key)); }
    std::optional<bool> boolean(std::string_view key) const override { return metadata_.boolean(note(key)); }
    std::optional<std::string> string(std::string_view key) const override { return metadata_.string(note(key)); }
    bool is_array(std::string_view key) const override { return metadata_.is_array(note(key)); }
    std::optional<std::vector<int64_t>> integers(std::string_view key) const override {
      return metadata_.integers(note(key));
    }
    std::optional<std::vector<float>> floats(std::string_view key) const override {
      return metadata_.floats(note(key));
    }
    std::shared_ptr<const StringList> strings(std::string_view key) const override {
      return metadata_.strings(note(key));
    }
    std::vector<std::string> keys() const override { return metadata_.keys(); }
    std::string describe(std::string_view key) const override { return metadata_.describe(key); }

    mutable std::set<std::string, std::less<>> asked;

   private:
    std::string_view note(std::string_view key) const {
      asked.emplace(key);
      return key;
    }
    const Metadata& metadata_;
  };

  std::unique_ptr<Checkpoint> checkpoint_;
  RecordingMetadata metadata_;
};

}  // namespace beryl::cli
