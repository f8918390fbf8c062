// What: sources, quantisation tags, split names and addresses are read as people write them, and nothing else passes.
// How:  tables by hand. (Whole repositories: tests/pull_test.py.)
#include "store/model_source.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "store/digest.h"
#include "store/http.h"

namespace beryl {
namespace {

const std::string kHub = "https://huggingface.co";

TEST(ModelSource, FormsOfASource) {
  struct Case {
    const char* text;
    const char* owner;
    const char* repository;
    const char* revision;
    const char* wanted;
  };
  for (const Case& c : {Case{"hf:a/b", "a", "b", "main", ""}, Case{"hf:a-1/b.c_d:Q4_K_M", "a-1", "b.c_d", "main", "Q4_K_M"},
                        Case{"hf:a/b@v1.0:sub/f-00001-of-00002.gguf", "a", "b", "v1.0", "sub/f-00001-of-00002.gguf"},
                        Case{"https://huggingface.co/a/b/resolve/main/x/f.gguf?download=true", "a", "b", "main", "x/f.gguf"},
                        Case{"https://HuggingFace.co/a/b/blob/0123/f.gguf", "", "", "", ""}}) {
    const ModelSource source = parse_source(c.text, kHub);
    if (*c.owner == '\0') continue;
    EXPECT_TRUE(source.is_hub) << c.text;
    EXPECT_EQ(source.owner, c.owner) << c.text;
    EXPECT_EQ(source.repository, c.repository) << c.text;
    EXPECT_EQ(source.revision, c.revision) << c.text;
    EXPECT_EQ(source.wanted, c.wanted) << c.text;
  }
  for (const char* text : {"https://example.com/a/b/resolve/main/f.gguf", "http://huggingface.co/a/b/resolve/main/f.gguf",
                           "https://huggingface.co:444/a/b/resolve/main/f.gguf"})
    EXPECT_FALSE(parse_source(text, kHub).is_hub) << text;
  for (const char* text : {"", "a/b", "hf:", "hf:a", "hf:a/", "hf:/b", "hf:a/b/c", "hf:a/..", "hf:a/b:", "hf:a/b:../c", "hf:a/b:/c", "hf:a/b@", "hf:a/b@..",
                           "hf:a b/c", "hf:a/b:c\n", "https://h/f.bin", "https:///f.gguf", "file:///f.gguf", "https://h"})
    EXPECT_THROW(parse_source(text, kHub), Error) << text;
}

TEST(ModelSource, QuantisationTags) {
  for (const auto& [name, tag] : std::initializer_list<std::pair<const char*, const char*>>{
           {"m-Q4_K_M.gguf", "Q4_K_M"}, {"m.q8_0.gguf", "q8_0"}, {"gemma-3-12b-it-qat-q4_0.gguf", "q4_0"}, {"m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"},
           {"BF16/m-BF16-00001-of-00002.gguf", "BF16"}, {"m_f16.gguf", "f16"}, {"m-IQ4_XS.gguf", "IQ4_XS"}, {"m-TQ1_0.gguf", "TQ1_0"},
           {"m-MXFP4_MOE.gguf", "MXFP4_MOE"}, {"ggml-model.gguf", ""}, {"m-Q4.gguf", ""}, {"mQ4_0.gguf", ""}, {"Q4_0.gguf", "Q4_0"}})
    EXPECT_EQ(quant_tag(name), tag) << name;
}

TEST(ModelSource, SplitNames) {
  const auto split = split_name("a/m-Q8_0-00002-of-00013.gguf");
  ASSERT_TRUE(split);
  EXPECT_EQ(split->stem, "a/m-Q8_0");
  EXPECT_EQ(split->number, 2);
  EXPECT_EQ(split->count, 13);
  EXPECT_EQ(split_part(*split, 7), "a/m-Q8_0-00007-of-00013.gguf");
  for (const char* name : {"m.gguf", "m-00000-of-00002.gguf", "m-00003-of-00002.gguf", "m-1-of-2.gguf", "m-00001-of-99999.gguf", "-00001-of-00002.gguf", "m-0000a-of-00002.gguf"})
    EXPECT_FALSE(split_name(name)) << name;
}

TEST(Http, AddressesAndWhereATokenMayGo) {
  EXPECT_EQ(origin_of("https://Host/x?y"), "https://host:443");
  EXPECT_NE(origin_of("https://host/"), origin_of("http://host:443/"));
  EXPECT_NE(origin_of("https://host/"), origin_of("https://host:8443/"));
  EXPECT_NE(origin_of("https://host/"), origin_of("https://host.evil.com/"));
  EXPECT_NE(origin_of("https://host/"), origin_of("https://host@evil.com/"));
  EXPECT_EQ(shown_url("https://user:word@host/a/b?key=1#c"), "https://host/a/b");
  EXPECT_EQ(redirected_url("https://host/a/b?c", "../d?e"), "https://host/d?e");
  EXPECT_EQ(redirected_url("http://host/a", "https://other/x"), "https://other/x");
  EXPECT_THROW(redirected_url("https://host/a", "http://host/a"), Error);
  EXPECT_THROW(redirected_url("https://host/a", "file:///etc/passwd"), Error);
  EXPECT_EQ(escaped_path("a/b c%é?#"), "a/b%20c%25%C3%A9%3F%23");
}

TEST(Digest, KnownValues) {
  EXPECT_EQ(sha256_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  Digest git = Digest::git_blob(6);   // echo hello | git hash-object --stdin
  git.add("hello\n");
  EXPECT_EQ(git.hex(), "ce013625030ba8dba906f756967f9e9ca394464a");
}

}  // namespace
}  // namespace beryl
