// From what the user gives to ids: the tokenizer that text needs, prompts from the command line or standard input.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"
#include "weights/checkpoint.h"

namespace beryl::cli {

// Prints the tokenizer's warnings. Throws Error(kUnsupported) when the model has none.
std::unique_ptr<Tokenizer> require_tokenizer(const Checkpoint& checkpoint);

// A text as a model that completes texts wants it: BOS first where the vocabulary asks for one (not twice, when
// parse_special finds it in the text).
std::vector<int32_t> encode_raw_prompt(const Tokenizer& tokenizer, std::string_view text, bool parse_special);

// A vocabulary may hold more tokens than the model has embeddings. Throws Error(kBadInput) naming such a token.
void check_prompt_ids(const std::vector<int32_t>& ids, int64_t vocab, const Tokenizer& tokenizer);

}  // namespace beryl::cli
