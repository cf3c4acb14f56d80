// What the examples read files of numbers with: every type, and one sentence for a file that is broken.
#include "readers.hpp"

#include "support/npy.hpp"
#include "support/onnx_weights.hpp"
#include "support/safetensors.hpp"
#include "support/sha256.hpp"
#include "support/tfjs_weights.hpp"

namespace testing {
namespace {

std::string npy(const std::string& type, const std::string& axes, const std::string& data, bool fortran = false) {
  std::string header =
      "{'descr': '" + type + "', 'fortran_order': " + (fortran ? "True" : "False") + ", 'shape': " + axes + ", }";
  header.resize(118, ' ');
  return std::string("\x93NUMPY\x01\x00\x76\x00", 10) + header + data;
}

std::string tensor(const std::string& name, const std::string& fields) { return field(5, field(8, name) + fields); }

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

}  // namespace testing
