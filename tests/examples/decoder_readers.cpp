// What example 19 reads: a model of llama2.c, and its tokenizer.
#include "decoder/tokenizer.hpp"
#include "decoder/weights.hpp"

#include <cstdint>
#include <limits>

#include "readers.hpp"

namespace testing {

TEST_CASE("llama2.c: a model", "[decoder]") {
  const temporary_folder folder;
  const auto read = [&](const std::string& bytes) { return decoder::read_weights(folder.write("m.bin", bytes)); };
  const auto message = [&](const std::string& bytes) { return message_of([&] { read(bytes); }); };
  // width 4, hidden 3, 2 layers, 2 heads over 1, 5 tokens, 6 positions; the numbers count
  const auto file = [](std::vector<std::int32_t> sizes, int count) {
    numbers all;
    for (int n = 0; n < count; ++n) all.push_back(float(n));
    return bytes_of(sizes) + bytes_of(all);
  };
  // embedding, then for each of two layers the norms, query, key, value, output, gate, down and up; a norm; rotations
  const int count = 5 * 4 + 2 * (2 * 4 + 16 + 8 + 8 + 16 + 3 * 12) + 4 + 6 * 2;
  const std::string good = file({4, 3, 2, 2, 1, 5, 6}, count);
  const decoder::weights w = read(good);
  CHECK((w.sizes.width() == 4 && w.sizes.hidden == 3 && w.sizes.layers == 2 && w.sizes.heads == 2));
  CHECK((w.sizes.kv_heads == 1 && w.sizes.head_dim == 2 && w.sizes.vocabulary == 5 && w.sizes.positions == 6));
  CHECK((w.embedding(0, 0) == 0 && w.embedding(4, 3) == 19 && &w.classifier() == &w.embedding));
  CHECK((w.layers[0].attention_norm(0, 0) == 20 && w.layers[1].attention_norm(0, 0) == 24));
  CHECK((w.layers[0].query(0, 0) == 28 && w.layers[1].query(3, 3) == 59 && w.layers[0].key(1, 3) == 67));
  CHECK((w.layers[1].down.rows() == 4 && w.layers[1].down.cols() == 3 && w.last_norm(0, 3) == float(count - 13)));
  const decoder::weights other = read(file({4, 3, 2, 2, 1, -5, 6}, count + 20));
  CHECK((other.sizes.vocabulary == 5 && &other.classifier() != &other.embedding));
  CHECK(other.classifier()(4, 3) == float(count + 19));

  std::string nan = good;
  nan.replace(28, 4, bytes_of<float>({std::numeric_limits<float>::quiet_NaN()}));
  CHECK(has(message(nan), "m.bin: expected finite weights"));
  for (std::size_t n = 0; n < 28; ++n) CHECK(has(message(good.substr(0, n)), "m.bin: expected a model of llama2.c"));
  const std::string bytes = std::to_string(good.size());
  CHECK(has(message(good.substr(0, 28)), "expected " + bytes + " bytes, as its first numbers say; found 28"));
  CHECK(has(message(good.substr(0, good.size() - 1)), "; found " + std::to_string(good.size() - 1)));
  CHECK(has(message(good + "x"), "; found " + std::to_string(good.size() + 1)));
  for (const std::vector<std::int32_t>& sizes : std::vector<std::vector<std::int32_t>>{
           {0, 3, 2, 2, 1, 5, 6}, {4, -3, 2, 2, 1, 5, 6}, {4, 3, 1 << 30, 2, 1, 5, 6}, {4, 3, 2, 0, 1, 5, 6},
           {6, 3, 2, 2, 1, 5, 6}, {12, 3, 2, 3, 2, 5, 6}, {4, 3, 2, 2, 0, 5, 6}, {4, 3, 2, 2, 1, 0, 6},
           {4, 3, 2, 2, 1, 5, 0}, {4, 3, 2, 2, 1, std::numeric_limits<std::int32_t>::min(), 6}})
    CHECK(has(message(file(sizes, count)), "m.bin: expected a model of llama2.c"));
}

TEST_CASE("llama2.c: a tokenizer", "[decoder]") {
  const temporary_folder folder;
  std::string file = bytes_of<std::int32_t>({9});
  int pieces = 0;
  const auto add = [&](const std::string& piece, float score) {
    file += bytes_of<float>({score}) + bytes_of<std::int32_t>({std::int32_t(piece.size())}) + piece;
    return pieces++;
  };
  for (const char* mark : {"<unk>", "\n<s>\n", "\n</s>\n"}) add(mark, 0);
  const std::string short_file = file;
  constexpr const char* digits = "0123456789ABCDEF";
  for (int n = 0; n < 256; ++n) add(std::string("<0x") + digits[n / 16] + digits[n % 16] + ">", 0);
  const int space = add(" ", -1), a = add("a", -1), b = add("b", -1), c = add("c", -1), e = add("\u00e9", -1),
            bc = add("bc", -2), ab = add("ab", -3), space_a = add(" a", -4), abc = add("abc", -5);
  const auto read = [&](const std::string& bytes) { return decoder::tokenizer(folder.write("t.bin", bytes)); };
  const auto message = [&](const std::string& bytes) { return message_of([&] { read(bytes); }); };
  const decoder::tokenizer split = read(file);
  using list = std::vector<int>;
  CHECK(split.size() == pieces);
  CHECK(split.tokens_of("", 9) == list{1});
  CHECK(split.tokens_of("abc", 9) == list{1, space_a, bc});  // "bc" first, and then " a" before "abc"
  CHECK(split.tokens_of("cabc", 9) == list{1, space, c, abc});
  CHECK(split.tokens_of("ab", 9) == list{1, space, ab});
  CHECK(split.tokens_of("b \u00e9", 9) == list{1, space, b, space, e});
  CHECK(split.tokens_of("\u00e8\n", 9) == list{1, space, 3 + 0xc3, 3 + 0xa8, 3 + 0x0a});
  CHECK(split.tokens_of("a\xff", 9) == list{1, space_a, 3 + 0xff});
  for (const char* text : {"", "abc", " a", "\u00e9\u00e8 \U0001f600\n", "\xff<0x41>"})
    CHECK(split.text_of(split.tokens_of(text, 99)) == text);
  CHECK((split.is_mark(1) && split.is_mark(2) && !split.is_mark(a)));
  CHECK(split.tokens_of("bbb", 5) == list{1, space, b, b, b});
  CHECK(message_of([&] { split.tokens_of("bbb", 4); }) ==
        "prompt: expected at most 4 tokens, the positions of the model; found 5");
  CHECK(has(message_of([&] { split.tokens_of(std::string(100000, 'b'), 9); }), "; found 100000 bytes"));

  const decoder::tokenizer bytes;
  CHECK(bytes.tokens_of("a\xff", 2) == list{'a', 0xff});
  CHECK(bytes.text_of({' ', 'a', 1}) == " a\x01");
  CHECK((bytes.size() == 256 && !bytes.is_mark(1)));

  CHECK(has(message(""), "t.bin: expected a tokenizer of llama2.c; the file ends within piece 0"));
  CHECK(has(message(file.substr(0, file.size() - 1)), "the file ends within piece " + std::to_string(pieces - 1)));
  CHECK(has(message(short_file), "t.bin: expected a piece <0x00>; found none"));
}

}  // namespace testing
