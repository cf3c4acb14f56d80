// States written and read: the same bits, the documented bytes, and what is wrong with a stream.
#include <attn/kernel/linear_step.hpp>

#include "kernel/machines.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"

namespace testing::state_stream_tests {
using namespace kernel_machines;
namespace {

// What reading these bytes throws: "invalid" (shape or kind), "runtime" (the stream), or nothing.
std::string reading(machine& m, const std::string& bytes) {
  std::istringstream stream(bytes);
  try {
    m.state().read(stream);
  } catch (const std::invalid_argument&) {
    return "invalid";
  } catch (const std::runtime_error&) {
    return "runtime";
  }
  return {};
}

}  // namespace

TEST_CASE("what was written is read again, to the last bit", "[state_stream]") {
  for (auto& [name, one] : machines()) {
    INFO(name);
    one->step(0, 70);
    auto other = one->fresh();
    other->step(70, 80);  // to be forgotten
    CHECK(reading(*other, written(*one)).empty());
    CHECK(other->state().tokens() == 70);
    CHECK(written(*other) == written(*one));
    one->step(70, 80), other->step(70, 80);
    CHECK(rows(other->out, 70, 80) == rows(one->out, 70, 80));
  }
}

TEST_CASE("the stream begins as documented", "[state_stream]") {
  attn::linear_state<float> state({.features = 2, .value_dim = 1});
  const tensor<float> k(1, 1, 1, 2, 1), v(1, 1, 1, 1, 3);
  tensor<float> out(1, 1, 1, 1);
  attn::linear_step(state, view(k), view(k), view(v), view(out), {.eps = 0});
  std::ostringstream stream;
  state.write(stream);
  const std::string bytes = stream.str();
  REQUIRE(bytes.size() == 8 + 4 * 4 + 5 * 8 + 4 * (1 + 2 + 2) + 8);
  CHECK(bytes.substr(0, 8) == "attnsums");
  const auto word = [&](std::size_t at) {
    return static_cast<unsigned char>(bytes[at]) | static_cast<unsigned char>(bytes[at + 1]) << 8 |
           static_cast<unsigned char>(bytes[at + 2]) << 16 |
           static_cast<unsigned>(static_cast<unsigned char>(bytes[at + 3])) << 24;
  };
  const unsigned header[] = {2, 1, 0, 4, 1, 0, 1, 0, 2, 0, 1, 0, 1, 0};  // version ... tokens, 64-bit ones in two words
  for (std::size_t n = 0; n < 14; ++n) CHECK(word(8 + 4 * n) == header[n]);
  const float body[] = {1, 2, 2, 6, 6};  // gates; z = elu(1) + 1; S = z v
  for (std::size_t n = 0; n < 5; ++n)
    CHECK(std::bit_cast<float>(static_cast<std::uint32_t>(word(64 + 4 * n))) == body[n]);
  CHECK(state.sum(0, 0, 1, 0) == 6);
  CHECK(state.weight(0, 0, 0) == 2);
}

TEST_CASE("a stream with any byte changed, or cut anywhere, is refused and changes nothing", "[state_stream]") {
  attn::linear_state<float> state({.heads = 2, .features = 3, .value_dim = 2}), reader = state;
  const auto k = cast<float>(random_normal(1, 1, 2, 5, 3)), v = cast<float>(random_normal(2, 1, 2, 5, 2));
  tensor<float> out(1, 2, 5, 2);
  attn::linear_step(state, view(k), view(k), view(v), view(out));
  attn::linear_step(reader, view(k).slice(2, 0, 2), view(k).slice(2, 1, 2), view(v).slice(2, 0, 2),
                    view(out).slice(2, 0, 2));
  const auto bytes_of = [](const attn::linear_state<float>& s) {
    std::ostringstream stream;
    s.write(stream);
    return stream.str();
  };
  const std::string good = bytes_of(state), before = bytes_of(reader);
  const auto refused = [&](const std::string& bytes) {
    std::istringstream stream(bytes);
    try {
      reader.read(stream);
    } catch (const std::exception& error) {
      return std::string(error.what()).starts_with("attn::linear_state: expected ");
    }
    return false;
  };
  bool all = true;
  for (std::size_t at = 0; at < good.size(); ++at) {
    all = all && refused(good.substr(0, at));
    for (int flipped : {1, 128}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ flipped);
      all = all && refused(bad);
    }
  }
  CHECK(all);
  CHECK(
      refused("not such a stream at all, but long enough to be one if it only began the right way: 0123456789012345"));
  CHECK(bytes_of(reader) == before);
  std::istringstream rest(good + "what follows");
  reader.read(rest);
  CHECK(bytes_of(reader) == good);
  std::string follows;
  std::getline(rest, follows);
  CHECK(follows == "what follows");
}

TEST_CASE("what is wrong with a stream is told by the exception's type", "[state_stream]") {
  auto all = machines();
  machine& linear = *all[0].second;
  linear.step(0, 5);
  for (char other : {1, 3}) {
    std::string version = written(linear);
    version[8] = other;
    CHECK(reading(linear, version) == "runtime");
  }
  CHECK(reading(linear, written(linear).substr(0, 100)) == "runtime");
  const auto sentence = [&](const char* version) {
    std::istringstream stream(written(linear).replace(8, 4, std::string(version, 4)));
    try {
      linear.state().read(stream);
    } catch (const std::runtime_error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(sentence("\x1\0\0\0") == "attn::linear_state: expected stream version 2; found 1");
  CHECK(sentence("\0\0\0\x2") == "attn::linear_state: expected numbers in little endian order; found big endian");
  for (std::size_t n = 0; n < all.size(); ++n)
    for (std::size_t other = 0; other < all.size(); ++other) {
      machine &a = *all[n].second, &b = *all[other].second;
      const std::string before = written(a);
      const bool same = attn::detail::step_access::of(a.state()).kind() == attn::detail::step_access::of(b.state()).kind();
      INFO(all[n].first << " reads " << all[other].first);
      CHECK(reading(a, written(b)) == (same ? "" : "invalid"));
      if (!same) CHECK(written(a) == before);
    }
  attn::linear_state<float> shape({.batch = batch, .heads = kv_heads, .features = dim, .value_dim = value_dim + 1});
  std::istringstream stream(written(linear));
  CHECK(well_formed(refusal([&] { shape.read(stream); }), "linear_state"));
  attn::linear_state<double> wide(linear_extents);
  std::istringstream again(written(linear));
  CHECK(well_formed(refusal([&] { wide.read(again); }), "linear_state"));
}

}  // namespace testing::state_stream_tests
