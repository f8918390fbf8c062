#include "cli/text_input.h"

#include <fmt/format.h>

#include "base/error.h"
#include "cli/console.h"
#include "weights/quote.h"

namespace beryl::cli {

std::unique_ptr<Tokenizer> require_tokenizer(const Checkpoint& checkpoint) {
  std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(checkpoint);
  if (tokenizer == nullptr)
    throw Error(ErrorCode::kUnsupported, fmt::format("{}: has no tokenizer, so it cannot take or give text; "
                                                     "'beryl trace --ids' works with token ids",
                                                     checkpoint.path()));
  for (const std::string& warning : tokenizer->warnings()) print_warning(warning);
  return tokenizer;
}

std::vector<int32_t> encode_raw_prompt(const Tokenizer& tokenizer, std::string_view text, bool parse_special) {
  std::vector<int32_t> ids = tokenizer.encode(text, parse_special);
  if (tokenizer.adds_bos() && tokenizer.bos_id() && (ids.empty() || ids.front() != *tokenizer.bos_id()))
    ids.insert(ids.begin(), *tokenizer.bos_id());
  return ids;
}

void check_prompt_ids(const std::vector<int32_t>& ids, int64_t vocab, const Tokenizer& tokenizer) {
  for (int32_t id : ids)
    if (id < 0 || id >= vocab)
      throw Error(ErrorCode::kBadInput,
                  fmt::format("the prompt holds token {} {}, but the model has embeddings for {} tokens", id,
                              quote(tokenizer.token_text(id)), vocab));
}

}  // namespace beryl::cli
