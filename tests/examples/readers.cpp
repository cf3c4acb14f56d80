// What the examples read files with: numbers of every type, and one sentence for a file that is broken.
#include "support/npy.hpp"
#include "support/onnx_weights.hpp"
#include "support/safetensors.hpp"
#include "support/sha256.hpp"
#include "support/tfjs_weights.hpp"

#include <unistd.h>

#include <filesystem>

#include "../support/catch.hpp"
#include "decoder/tokenizer.hpp"
#include "decoder/weights.hpp"
#include "semantic_search/package.hpp"
#include "semantic_search/tokenizer.hpp"
#include "speech_to_text/package.hpp"
#include "speech_to_text/wav.hpp"

namespace {

// A folder that goes away with the test.
struct temporary_folder {
  std::filesystem::path path = std::filesystem::temp_directory_path() / ("attn_examples_" + std::to_string(getpid()));
  temporary_folder() { std::filesystem::create_directories(path); }
  ~temporary_folder() { std::filesystem::remove_all(path); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::filesystem::create_directories((path / name).parent_path());
    std::ofstream(path / name, std::ios::binary) << bytes;
    return (path / name).string();
  }
};

template <class T>
std::string bytes_of(const std::vector<T>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T)};
}

template <class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing thrown";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

using shape = std::vector<std::ptrdiff_t>;
using numbers = std::vector<float>;

std::string npy(const std::string& type, const std::string& axes, const std::string& data, bool fortran = false) {
  std::string header =
      "{'descr': '" + type + "', 'fortran_order': " + (fortran ? "True" : "False") + ", 'shape': " + axes + ", }";
  header.resize(118, ' ');
  return std::string("\x93NUMPY\x01\x00\x76\x00", 10) + header + data;
}

// A field of a protocol buffer: a number, or bytes with their length.
std::string field(unsigned number, unsigned value) {
  std::string result(1, static_cast<char>(number << 3));
  for (; value >= 128; value >>= 7) result += static_cast<char>((value & 127) | 128);
  return result + static_cast<char>(value);
}
std::string field(unsigned number, const std::string& bytes) {
  std::string result = field(number, static_cast<unsigned>(bytes.size()));
  result[0] |= 2;
  return result + bytes;
}
std::string tensor(const std::string& name, const std::string& fields) { return field(5, field(8, name) + fields); }

std::string little_endian(unsigned value, int bytes) {
  std::string result;
  for (; bytes > 0; --bytes, value >>= 8) result += static_cast<char>(value & 255);
  return result;
}
std::string chunk(const std::string& name, const std::string& bytes) {
  return name + little_endian(static_cast<unsigned>(bytes.size()), 4) + bytes + std::string(bytes.size() % 2, '\0');
}
std::string wav_format(unsigned channels, unsigned rate, unsigned bits, unsigned format = 1) {
  const unsigned block = channels * bits / 8;
  return chunk("fmt ", little_endian(format, 2) + little_endian(channels, 2) + little_endian(rate, 4) +
                           little_endian(rate * block, 4) + little_endian(block, 2) + little_endian(bits, 2));
}
std::string wav(const std::string& chunks) { return chunk("RIFF", "WAVE" + chunks); }

std::string safetensors(const std::string& header, const std::string& data) {
  return bytes_of<std::uint64_t>({header.size()}) + header + data;
}

}  // namespace

TEST_CASE("npy: types and shapes", "[npy]") {
  const temporary_folder folder;
  const auto read = [&](const std::string& bytes) { return support::read_npy(folder.write("x.npy", bytes)); };
  const auto x = read(npy("<f4", "(2, 3)", bytes_of<float>({1, 2, 3, 4, 5, 6})));
  CHECK(x.shape == shape{2, 3});
  CHECK(x.numbers == numbers{1, 2, 3, 4, 5, 6});
  CHECK(read(npy("<f8", "(2,)", bytes_of<double>({0.5, -3}))).numbers == numbers{0.5f, -3});
  const auto half = read(npy("<f2", "(1, 1, 2)", bytes_of<Eigen::half>({Eigen::half(0.25f), Eigen::half(-7)})));
  CHECK(half.shape == shape{1, 1, 2});
  CHECK(half.numbers == numbers{0.25f, -7});
  CHECK(read(npy("<f4", "()", bytes_of<float>({9}))).shape.empty());
  CHECK(read(npy("<f4", "(0, 3)", "")).numbers.empty());
}

TEST_CASE("npy: what is broken", "[npy]") {
  const temporary_folder folder;
  const auto message = [&](const std::string& bytes) {
    return message_of([&] { support::read_npy(folder.write("x.npy", bytes)); });
  };
  const std::string good = npy("<f4", "(2, 3)", bytes_of<float>({1, 2, 3, 4, 5, 6}));
  CHECK(has(message_of([] { support::read_npy("missing.npy"); }), "missing.npy: file not found"));
  CHECK(message_of([&] { support::read_npy(folder.path.string()); }) != "nothing thrown");
  CHECK(has(message("text"), "x.npy: expected an .npy file"));
  CHECK(has(message(good.substr(0, 60)), "the file ends within its header"));
  CHECK(has(message(good.substr(0, good.size() - 1)), "expected 24 bytes for the shape [2, 3]; found 23"));
  CHECK(has(message(good + "x"), "expected 24 bytes for the shape [2, 3]; found 25"));
  CHECK(has(message(npy("<f4", "(2, 3)", "", true)), "expected C order"));
  CHECK(has(message(npy("<i4", "(2,)", "12345678")),
            "expected float16, float32 or float64, '<f2', '<f4' or '<f8'; found '<i4'"));
  CHECK(has(message(npy("<f4", "(9999999999, 9999999999)", "")), "expected the shape of an array"));
  CHECK(has(message(npy("<f4", "(99999999999999999999)", "")), "expected the shape of an array"));
  // Every file that ends early is refused.
  for (std::size_t n = 0; n < good.size(); ++n) CHECK(message(good.substr(0, n)) != "nothing thrown");
}

TEST_CASE("safetensors: types", "[safetensors]") {
  const temporary_folder folder;
  const std::string header = R"({"__metadata__":{"format":"pt"},)"
                             R"("a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
                             R"("b":{"dtype":"F16","shape":[2],"data_offsets":[8,12]},)"
                             R"("c":{"dtype":"BF16","shape":[2],"data_offsets":[12,16]},)"
                             R"("d":{"dtype":"F64","shape":[],"data_offsets":[16,24]},)"
                             R"("positions":{"dtype":"I64","shape":[1],"data_offsets":[24,32]}}  )";
  const std::string data = bytes_of<float>({1.5f, -2}) + bytes_of<Eigen::half>({Eigen::half(0.5f), Eigen::half(3)}) +
                           bytes_of<Eigen::bfloat16>({Eigen::bfloat16(-1.25f), Eigen::bfloat16(256)}) +
                           bytes_of<double>({0.125}) + std::string(8, '\0');
  const support::arrays all = support::read_safetensors(folder.write("x.safetensors", safetensors(header, data)));
  CHECK(all.size() == 4);
  CHECK(all.at("a").shape == shape{2, 1});
  CHECK(all.at("a").numbers == numbers{1.5f, -2});
  CHECK(all.at("b").numbers == numbers{0.5f, 3});
  CHECK(all.at("c").numbers == numbers{-1.25f, 256});
  CHECK(all.at("d").shape.empty());
  CHECK(all.at("d").numbers == numbers{0.125f});
}

TEST_CASE("safetensors: what is broken", "[safetensors]") {
  const temporary_folder folder;
  const auto message = [&](const std::string& bytes) {
    return message_of([&] { support::read_safetensors(folder.write("x.safetensors", bytes)); });
  };
  const std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
                    good = safetensors(header, "12345678");
  CHECK(message(good) == "nothing thrown");
  for (std::size_t n = 0; n < good.size(); ++n) CHECK(message(good.substr(0, n)) != "nothing thrown");
  CHECK(has(message("x"), "expected a safetensors file; found 1 bytes"));
  CHECK(has(message(bytes_of<std::uint64_t>({~std::uint64_t{0}}) + header), "its header ends beyond the file"));
  CHECK(has(message(safetensors("[1]", "")), "its header is no JSON object"));
  CHECK(has(message(safetensors("{\"a\"", "")), "its header is no JSON object"));
  CHECK(has(message(safetensors(R"({"a":7})", "")), "a: expected dtype, shape and data_offsets in the header"));
  CHECK(has(message(safetensors(R"({"a":{"dtype":"F32","shape":["x"],"data_offsets":[0,8]}})", "12345678")),
            "a: expected dtype, shape and data_offsets in the header"));
  for (const char* range : {"[0,9]", "[8,0]", "[0]", "[9,9]"})
    CHECK(has(message(safetensors(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":)" + std::string(range) + "}}",
                                  "12345678")),
              "a: expected data_offsets within the 8 bytes of numbers"));
  CHECK(has(message(safetensors(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", "12345678")),
            "a: expected 12 bytes for the shape [3]; found 8"));
  CHECK(has(message(safetensors(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "12345678")),
            "expected the shape of an array; found [-2]"));
}

TEST_CASE("TensorFlow.js: a manifest and its files", "[tfjs]") {
  const temporary_folder folder;
  const auto read = [&](const std::string& model) { return support::read_tfjs(folder.write("model.json", model)); };
  const auto message = [&](const std::string& model) {
    return message_of([&] { support::tfjs_weights(read(model)); });
  };
  folder.write("one", bytes_of<float>({1, 2}) + "ab");
  folder.write("two", "cd" + bytes_of<float>({3}));
  const auto model = [](const std::string& weights, const std::string& paths = R"("one","two")") {
    return R"({"weightsManifest":[{"paths":[)" + paths + R"(],"weights":[)" + weights + "]}]}";
  };
  const std::string a = R"({"name":"a","shape":[1,2],"dtype":"float32"})",
                    n = R"({"name":"n","shape":[],"dtype":"int32"})",
                    b = R"({"name":"b/c","shape":[],"dtype":"float32"})";
  const support::arrays all = support::tfjs_weights(read(model(a + "," + n + "," + b)));
  CHECK(all.size() == 2);
  CHECK(all.at("a").shape == shape{1, 2});
  CHECK(all.at("a").numbers == numbers{1, 2});
  CHECK(all.at("b/c").numbers == numbers{3});

  CHECK(has(message("{"), "model.json: expected weightsManifest in JSON"));
  CHECK(has(message("[]"), "model.json: expected weightsManifest in JSON"));
  CHECK(has(message(R"({"weightsManifest":7})"), "expected weightsManifest in JSON"));
  CHECK(has(message(R"({"weightsManifest":[{}]})"), "expected paths in every group"));
  CHECK(has(message(R"({"weightsManifest":[7]})"), "expected paths in every group"));
  CHECK(has(message(model(a, R"("missing")")), "missing: file not found"));
  CHECK(has(message(model(a, R"("../one")")), "expected files beside it in the manifest; found ../one"));
  CHECK(has(message(model("7")), "expected name, dtype and shape"));
  CHECK(has(message(model(a)), "expected 8 bytes of numbers by its manifest; found 16"));
  CHECK(has(message(model(a + "," + a + "," + a)), "a: expected 8 bytes of numbers; found 0"));
  CHECK(
      has(message(model(R"({"name":"a","shape":[4],"dtype":"uint8"})")), "a: expected float32 or int32; found uint8"));
  CHECK(has(message(model(R"({"name":"a","shape":[16],"dtype":"float32","quantization":{"dtype":"uint8"}})")),
            "a: expected float32 or int32; found quantised numbers"));
}

TEST_CASE("ONNX: tensors of every type, nodes, graphs within a graph", "[onnx]") {
  const temporary_folder folder;
  const std::string shape_of_2 = field(1, 1) + field(1, 2), packed_shape = field(1, std::string("\x01\x02"));
  const std::string node = field(1, field(1, "x") + field(1, "w") + field(2, "y") + field(4, "MatMul"));
  const std::string branch = field(5, field(1, "else_branch") + field(6, node)),
                    inner = field(1, field(2, "z") + field(4, "If") + branch);
  const std::string graph =
      tensor("raw", packed_shape + field(2, 1) + field(9, bytes_of<float>({1.5f, -2}))) +
      tensor("list", shape_of_2 + field(2, 1) + field(4, bytes_of<float>({3, 4}))) +
      tensor("codes", shape_of_2 + field(2, 2) + field(9, std::string("\xff\x01"))) +
      tensor("signed", shape_of_2 + field(2, 3) + field(9, std::string("\xff\x01"))) +
      tensor("one", field(2, 2) + field(5, std::string("\xc8\x01"))) + tensor("single", field(2, 2) + field(5, 7)) +
      tensor("half", field(1, 1) + field(2, 10) + field(9, bytes_of<Eigen::half>({Eigen::half(0.5f)}))) +
      tensor("text", field(2, 8)) + tensor("short", packed_shape + field(2, 1) + field(9, "1234")) +
      tensor("few", shape_of_2 + field(2, 2) + field(5, 7)) + tensor("bits", field(2, 10) + field(5, 7)) + inner;
  const std::string good = field(1, 8) + field(7, graph);
  const support::onnx_file file(folder.write("x.onnx", good));
  CHECK(file.tensor("raw").shape == shape{1, 2});
  CHECK(file.tensor("raw").numbers == numbers{1.5f, -2});
  CHECK(file.tensor("list").numbers == numbers{3, 4});
  CHECK(file.tensor("codes").numbers == numbers{255, 1});
  CHECK(file.tensor("signed").numbers == numbers{-1, 1});
  CHECK(file.tensor("one").numbers == numbers{200});
  CHECK(file.tensor("single").numbers == numbers{7});
  CHECK(file.tensor("half").numbers == numbers{0.5f});
  CHECK(file.node_of("y").inputs == std::vector<std::string>{"x", "w"});
  CHECK(file.node_of("z").type == "If");
  CHECK(file.bytes() == good);

  const auto message = [](auto&& f) { return message_of([&] { f(); }); };
  CHECK(has(message([&] { file.tensor("none"); }), "x.onnx: expected the tensor none; found none"));
  CHECK(has(message([&] { file.node_of("raw"); }), "expected a node that writes the tensor raw; found none"));
  CHECK(has(message([&] { file.tensor("text"); }), "text: expected floats or whole numbers; found ONNX's type 8"));
  CHECK(has(message([&] { file.tensor("short"); }), "short: expected 8 bytes for the shape [1, 2]; found 4"));
  CHECK(has(message([&] { file.tensor("few"); }), "few: expected numbers for the shape [1, 2]; found 1"));
  CHECK(has(message([&] { file.tensor("bits"); }), "bits: expected 2 bytes for the shape []; found 0"));
  const auto read = [&](const std::string& bytes) {
    return message_of([&] { support::onnx_file again(folder.write("x.onnx", bytes)); });
  };
  CHECK(has(message_of([] { support::onnx_file missing("missing.onnx"); }), "missing.onnx: file not found"));
  CHECK(has(read("text"), "x.onnx: expected an ONNX file"));
  CHECK(has(read(""), "x.onnx: expected an ONNX file; found no graph in it"));
  for (std::size_t n = 0; n < good.size(); ++n) CHECK(has(read(good.substr(0, n)), "x.onnx: expected an ONNX file"));
  std::string deep = node;
  for (int n = 0; n < 10; ++n) deep = field(1, field(5, field(6, deep)));
  CHECK(has(read(field(7, deep)), "found graphs within graphs"));
}

TEST_CASE("WAV: chunks before the samples, and what is refused", "[wav]") {
  const temporary_folder folder;
  const auto read = [&](const std::string& bytes) { return speech::read_wav(folder.write("x.wav", bytes), 3); };
  const auto message = [&](const std::string& bytes) { return message_of([&] { read(bytes); }); };
  const std::string samples = little_endian(16384, 2) + little_endian(65536 - 32768, 2) + little_endian(1, 2),
                    format = wav_format(1, 16000, 16), list = chunk("LIST", "abc"), data = chunk("data", samples);
  const numbers expected = {0.5f, -1, 1.0f / 32768};
  CHECK(read(wav(format + data)) == expected);
  CHECK(read(wav(list + format + list + data + list)) == expected);
  CHECK(has(message(wav(wav_format(2, 44100, 24) + data)),
            "x.wav: expected integers of 16 bits, 1 channel, 16000 Hz; found integers of 24 bits, 2 channels, 44100 Hz"
            ": ffmpeg -i "));
  CHECK(has(message(wav(wav_format(1, 16000, 32, 3) + data)), "found other numbers of 32 bits"));
  CHECK(has(message(wav(format + data).substr(0, 48)), "x.wav: expected 6 bytes of samples; the file ends after 4"));
  CHECK(has(message(wav(format + chunk("data", ""))), "x.wav: expected 3 samples or more; found 0"));
  CHECK(has(message(wav(format + list)), "x.wav: expected samples in a WAV file; found none"));
  CHECK(has(message(wav(data)), "x.wav: expected a WAV file with a format"));
  CHECK(has(message("text"), "x.wav: expected a WAV file"));
  CHECK(has(message(""), "x.wav: expected a WAV file"));
  CHECK(has(message_of([] { speech::read_wav("missing.wav", 3); }), "missing.wav: file not found"));
  const std::string good = wav(format + data);
  for (std::size_t n = 0; n < good.size(); ++n) CHECK(message(good.substr(0, n)) != "nothing thrown");
}

TEST_CASE("the package of speech to text", "[package]") {
  const temporary_folder folder;
  const auto open = [&] { return speech::package(folder.path.string(), "tiny"); };
  CHECK(has(message_of([&] { open(); }),
            "expected the unpacked package with dist/model/tiny/quantized/encoder_model.onnx, as made by npm pack "
            "@moonshine-ai/moonshine-js@0.1.29"));
  for (const char* name : {"encoder_model.onnx", "decoder_model_merged.onnx"})
    folder.write("dist/model/tiny/quantized/" + std::string(name), field(7, field(1, field(4, "X"))));
  CHECK(has(message_of([&] { open(); }), "expected the unpacked package with dist/moonshine.min.js"));
  std::string digits = "YQpiYg";  // a, bb
  while (digits.size() < 200004) digits += "AAAA";
  folder.write("dist/moonshine.min.js", "let x=\"" + digits + "==\";");
  const speech::package files = open();
  CHECK(files.pieces.size() == 2);
  CHECK(files.pieces[0] == "a");
  CHECK(files.pieces[1].starts_with("bb"));
  CHECK(has(message_of([&] { files.check(); }), "expected files with SHA-256 e258033a"));
}

TEST_CASE("SHA-256: the examples of FIPS 180-4", "[sha256]") {
  const auto digest = [](const std::string& text, std::size_t piece) {
    support::sha256 sum;
    for (std::size_t n = 0; n < text.size(); n += piece) sum.add(std::string_view(text).substr(n, piece));
    return sum.hex();
  };
  for (const std::size_t piece : {1u, 3u, 63u, 64u, 1000u}) {
    CHECK(digest("", piece) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(digest("abc", piece) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", piece) ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(digest(std::string(1000000, 'a'), 999 + piece) ==
          "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

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
