// One model from a hub or an address into the store: what it consists of, what is missing of it, digests, its name.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "store/download.h"
#include "store/model_source.h"
#include "store/store.h"

namespace beryl {

inline constexpr const char* kDefaultHub = "https://huggingface.co";

enum class PullStage : uint8_t { kFetching, kChecking };

struct PullProgress {
  PullStage stage = PullStage::kFetching;
  std::string file;                       // that is at work
  int64_t have_bytes = 0;                 // of all files; in kChecking: of this file
  std::optional<int64_t> all_bytes;       // likewise; empty: not known
};

struct PullOptions {
  DownloadOptions download;               // hub_origin, on_progress and on_note are set here
  std::string hub = kDefaultHub;          // HF_ENDPOINT
  std::string name;                       // empty: made from the source
  std::string sha256;                     // of the one file, when the user knows it
  // The model's format in words. Throws Error when it is no model. is_verified: its digests were those of the hub.
  std::function<std::string(const std::string& path, bool is_verified)> check;
  std::function<void(const StoredModel&, const std::vector<std::string>& others)> on_plan;   // before the first byte
  std::function<void(const PullProgress&)> on_progress;
  std::function<void(const std::string&)> on_note;
};

struct PullResult {
  bool is_cancelled = false;
  bool was_there = false;                 // nothing had to be fetched
  bool is_verified = false;
  StoredModel model;
};

// Throws Error. Whatever ends it, what has come stays for the next run, except bytes with a wrong digest.
PullResult pull(Store& store, const ModelSource& source, PullOptions options);

}  // namespace beryl
