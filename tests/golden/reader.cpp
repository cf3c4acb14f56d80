// The reader of golden cases: element types, and that nothing unknown or broken passes for a case.
#include <unistd.h>

#include <fstream>

#include "support/case_file.hpp"
#include "support/catch.hpp"

namespace testing {
namespace {

template <class Stored>
std::string npy(const std::string& type, const std::string& shape, std::vector<Stored> values,
                const std::string& order = "False") {
  std::string header = "{'descr': '" + type + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }";
  header.resize(118, ' ');
  std::string bytes("\x93NUMPY\x01\x00\x76\x00", 10);
  bytes += header;
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Stored));
  return bytes;
}

// A folder that goes away with the test.
struct temporary_folder {
  std::filesystem::path path = std::filesystem::temp_directory_path() /
                               ("attn_reader_" + std::to_string(getpid()) + "_" + std::to_string(serial()));
  temporary_folder() { std::filesystem::create_directories(path); }
  ~temporary_folder() { std::filesystem::remove_all(path); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path / name, std::ios::binary) << text;
  }
  static int serial() {
    static int n = 0;
    return ++n;
  }
};

const std::string good = "operator = full_softmax\nsource = someone # who\ntolerance = 1e-10\n";

}  // namespace

TEST_CASE("npy: every element type arrives as double", "[reader]") {
  using detail::parse_npy;
  CHECK(parse_npy(npy<double>("<f8", "(2, 3)", {1, 2, 3, 4, 5, -6.5})).values.back() == -6.5);
  CHECK(parse_npy(npy<double>("<f8", "(2, 3)", {1, 2, 3, 4, 5, -6.5})).shape == std::vector<idx_t>{2, 3});
  CHECK(parse_npy(npy<float>("<f4", "(1,)", {0.25f})).values == std::vector<double>{0.25});
  CHECK(parse_npy(npy<std::int64_t>("<i8", "(2,)", {-1, 1 << 20})).values == std::vector<double>{-1, 1 << 20});
  CHECK(parse_npy(npy<double>("<f8", "()", {8})).shape.empty());
  CHECK(parse_npy(npy<double>("<f8", "(0, 4)", {})).values.empty());
  const auto half =
      parse_npy(npy<std::uint16_t>("<f2", "(6,)", {0x3c00, 0xc000, 0x0001, 0x7c00, 0x7bff, 0x8000})).values;
  CHECK(half == std::vector<double>{1, -2, 0x1p-24, HUGE_VAL, 65504, -0.0});
  CHECK(std::isnan(parse_npy(npy<std::uint16_t>("<f2", "(1,)", {0x7e00})).values[0]));
}

TEST_CASE("npy: what is not understood is refused", "[reader]") {
  using detail::parse_npy;
  CHECK_THROWS(parse_npy("PK not numpy at all"));
  CHECK_THROWS(parse_npy(npy<double>("<f8", "(2, 2)", {1, 2, 3, 4}, "True")));
  CHECK_THROWS(parse_npy(npy<double>(">f8", "(1,)", {1})));
  CHECK_THROWS(parse_npy(npy<std::uint8_t>("|u1", "(1,)", {1})));
  CHECK_THROWS(parse_npy(npy<double>("<f8", "(3,)", {1, 2})));
  CHECK_THROWS(read_npy("/nowhere/q.npy"));
}

TEST_CASE("case.txt: numbers, lists, comments", "[reader]") {
  const temporary_folder folder;
  folder.write("case.txt", good + "\n# a comment\ncausal = true\nlengths = 3 -4\nleft=-1\n");
  const golden_case golden(folder.path);
  CHECK(golden.text("source") == "someone");
  CHECK(golden.number("tolerance") == 1e-10);
  CHECK(golden.flag("causal", false));
  CHECK(golden.integers("lengths") == std::vector<idx_t>{3, -4});
  CHECK(golden.integers("dilation").empty());
  CHECK(golden.integer("left") == -1);
  CHECK_THROWS(golden.text("scale"));
  CHECK_THROWS(golden.number("source"));
  CHECK_THROWS(golden.integer("lengths"));
  CHECK_THROWS(golden.flag("left", false));
  CHECK_THROWS(golden.array("q"));
}

TEST_CASE("case.txt: broken or missing files are refused", "[reader]") {
  const temporary_folder folder;
  CHECK_THROWS(golden_case(folder.path));
  folder.write("case.txt", good + "no equals sign\n");
  CHECK_THROWS(golden_case(folder.path));
  folder.write("case.txt", good + "tolerance = 1\n");
  CHECK_THROWS(golden_case(folder.path));
}

TEST_CASE("unknown keys and arrays are found, gradients are not", "[reader]") {
  const temporary_folder folder;
  folder.write("case.txt", good + "windo = 4\n");
  for (const char* name : {"q", "k", "d_out", "d_anything", "dq", "dropout", "bias_"})
    folder.write(std::string(name) + ".npy", npy<double>("<f8", "(1,)", {1}));
  const auto unknown = golden_case(folder.path).unknown({"operator", "source", "tolerance"}, {"q", "k"});
  CHECK(unknown == std::set<std::string>{"array bias_", "array dropout", "key windo"});
}

}  // namespace testing
