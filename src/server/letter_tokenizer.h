// For tests: a vocabulary of letters.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "engine/text_model.h"
#include "text/tokenizer.h"

namespace beryl::server {

// Ids 0 to 22 are the letters a to w; 23 is x, which this model can not compute.
inline std::unique_ptr<Tokenizer> letter_tokenizer() {
  TokenizerParts parts;
  parts.source = "test";
  for (char c = 'a'; c < 'a' + test::kTextVocab; ++c) parts.vocabulary.add(std::string(1, c), TokenType::kNormal);
  parts.vocabulary.build_index();
  parts.scores.assign(parts.vocabulary.size(), 0.0f);
  return std::make_unique<Tokenizer>(std::move(parts));
}

}  // namespace beryl::server
