// multipole against its reference: every option alone and in combination, odd lengths, all types; its error on what a
// trained model computes.
#include "reference/multipole.hpp"
#include "reference/full_softmax.hpp"

#include <attn/low_rank/nystrom.hpp>

#include "support/call_multipole.hpp"
#include "support/catch.hpp"
#include "support/npy.hpp"
#include "support/run_multipole.hpp"

namespace testing::multipole_tests {
namespace {

template <class S>
void check(const multipole_problem& p) {
  const errors e = multipole_errors<S>(p);
  CHECK(e.out <= tolerance<S>::out);
  CHECK(e.lse <= tolerance<S>::lse);
}

}  // namespace

#if !defined(ATTN_TEST_FEW_TYPES)
TEST_CASE("multipole: every combination of options", "[multipole]") {
  for (int choice = 0; choice < 1024; ++choice) {
    if (choice & (8 | 16)) continue;  // no ALiBi, no score
    for (const auto& [queries, keys] : {std::array<idx_t, 2>{40, 40}, {25, 38}, {45, 33}}) {
      CAPTURE(choice, queries, keys);
      multipole_problem p = exact_choices({.queries = queries, .keys = keys, .dim = 9, .value_dim = 12}, 5, 3);
      choose(p.options, choice, queries, keys);
      choose_multipole(p.options, choice);
      check<double>(p);
    }
  }
}

TEST_CASE("multipole: odd lengths, dims and clusters", "[multipole]") {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257, 530}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  const idx_t clusters[] = {0, 1, 5, 12, 13, 64};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t c = 0; c < std::size(clusters); ++c)
      for (bool causal : {false, true}) {
        problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = lengths[n], .keys = lengths[n]};
        shape.dim = dims[(n + c) % 8], shape.value_dim = dims[(n + 3 * c) % 8];
        multipole_problem p = multipole_of(shape, n + 1);
        auto& o = p.options;
        o.causal = causal, o.clusters = clusters[c], o.exact = 1 + static_cast<idx_t>(13 * n + 5 * c) % 90;
        o.block = 1 + static_cast<idx_t>(11 * n + 7 * c) % 140, o.probe = 1 + static_cast<idx_t>(3 * n + c) % 20;
        o.lookback = 1 + static_cast<idx_t>(n + 3 * c) % 30, o.iterations = static_cast<idx_t>(n + c) % 4;
        if (causal) o.segment = 1 + static_cast<idx_t>(37 * n + 11 * c) % 100;
        CAPTURE(shape.queries, shape.dim, shape.value_dim, o.clusters, causal, o.segment, o.exact, o.block, o.probe);
        check<double>(p);
      }
}
#endif

TEMPLATE_LIST_TEST_CASE("multipole: choices are exact where arithmetic is", "[multipole]", all_types) {
  for (int choice = 0; choice < 1024; ++choice) {
    if (choice & (8 | 16 | 32 | 64 | 128)) continue;
    CAPTURE(choice);
    // Offsets do not matter to a block's choice where it has one probe.
    multipole_problem p = exact_choices({.queries = 64, .keys = 64, .dim = 16, .value_dim = 20}, 6, 4);
    choose(p.options, choice, 64, 64);
    choose_multipole(p.options, choice);
    p.options.block = 8, p.options.probe = choice & 512 ? 4 : 8;
    p.options.lookback = p.options.probe;
    if (!p.options.causal && p.options.probe != 8) p.options.block = p.options.probe;
    check<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("multipole: queries and keys of different lengths", "[multipole]", exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{1, 300},  {2, 129}, {5, 1}, {300, 1},
                                               {129, 60}, {0, 9},   {9, 0}, {77, 530}};
  for (auto [queries, keys] : both_lengths)
    for (bool causal : {false, true}) {
      multipole_problem p = exact_choices({.queries = queries, .keys = keys, .dim = 20, .value_dim = 24}, 7, 7);
      auto& o = p.options;
      o.causal = causal, o.exact = 12, o.segment = 16, o.block = 16, o.probe = 1, o.lookback = 1;
      if (!causal) o.block = 1;
      CAPTURE(queries, keys, causal);
      check<TestType>(p);
    }
}

TEST_CASE("multipole: huge numbers do not overflow", "[multipole]") {
  const idx_t most = std::numeric_limits<idx_t>::max();
  for (bool causal : {false, true}) {
    multipole_problem p = exact_choices({.queries = 64, .keys = 64}, 7), cut = p;
    for (auto* o : {&p.options, &cut.options}) o->causal = causal, o->exact = 10, o->segment = 16;
    p.options.block = p.options.probe = p.options.lookback = most;
    cut.options.block = cut.options.probe = 64, cut.options.lookback = causal ? 64 : 1;
    CHECK(relative_error(run_multipole<widest_type>(p).out,
                         reference::multipole(cut.q, cut.k, cut.v, cut.options).out) <= tolerance<widest_type>::out);
    p.options.exact = most, p.options.segment = most;
    cut.options.exact = 64, cut.options.segment = 64;
    CHECK(relative_error(run_multipole<widest_type>(p).out,
                         reference::multipole(cut.q, cut.k, cut.v, cut.options).out) <= tolerance<widest_type>::out);
  }
}

TEST_CASE("multipole: more than 32768 keys", "[multipole]") {
  constexpr idx_t keys = (idx_t(1) << 15) + 5;
  const tensor<float> q(1, 1, 1, 4, 0.5f), k = cast<float>(random_normal(3, 1, 1, keys, 4)), v(1, 1, keys, 4, 2.0f);
  tensor<float> out(1, 1, 1, 4);
  attn::execution serial;
  compiled_multipole<float>::call(view(q), view(k), view(v), view(out), {.iterations = 0}, serial);
  for (float x : out.data) CHECK(std::abs(x - 2) <= 1e-5f);  // of weights that add up to 1
}

TEMPLATE_LIST_TEST_CASE("multipole: k-means on threads and in many parts", "[multipole]", exact_types) {
  multipole_problem p = multipole_of({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 50, .keys = 2500, .dim = 8});
  p.options.clusters = 20, p.options.exact = 30;
  attn::execution serial, three(3, 0);
  const reference::result alone = run_multipole<TestType>(p, serial);
  CHECK(run_multipole<TestType>(p, three).out == alone.out);
  if (std::is_same_v<TestType, double>)
    CHECK(relative_error(alone.out, reference::multipole(p.q, p.k, p.v, p.options).out) <= tolerance<TestType>::out);
}

// The same offset of all keys changes no weight, and of clusters only where a key is between two centres: one of 512
// moves the output by some 0.01. Were the digits of |k|^2 lost, it would be 0.08.
TEST_CASE("multipole: k-means of keys far from the origin", "[multipole]") {
  multipole_problem p = multipole_of({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 64, .keys = 512, .dim = 32});
  for (idx_t j = 0; j < 512; ++j)
    for (idx_t d = 0; d < 32; ++d) p.k(0, 0, j, d) = p.k(0, 0, j, d) * 0.3 + ((j * 7 % 20 * 5 + d) % 11 < 5 ? 1 : -1);
  p.options.clusters = 20, p.options.exact = 0, p.options.iterations = 4;
  multipole_problem moved = p;
  for (double& x : moved.k.data) x += 300;
  CHECK(relative_error(run_multipole<float>(moved).out, run_multipole<float>(p).out) <= 0.03);
}

TEMPLATE_LIST_TEST_CASE("multipole: many clusters, of which few change", "[multipole]", exact_types) {
  for (idx_t exact : {0, 3, 20}) {
    multipole_problem p = exact_choices({.batch = 1, .queries = 128, .keys = 128, .dim = 12}, 8, 9);
    auto& o = p.options;
    o.causal = true, o.segment = 16, o.exact = exact, o.block = 4, o.probe = 1, o.lookback = 1;
    CAPTURE(exact);
    check<TestType>(p);
    o.causal = false, o.block = 1;
    o.clusters = 64;
    for (std::size_t n = 0; n < o.assignment.data.size(); ++n) o.assignment.data[n] = static_cast<double>(n * 7 % 64);
    check<TestType>(p);
  }
}

// Keys of a cluster whose scores are far apart, of which one outweighs all others, and clusters far below others: sums
// of powers neither overflow nor vanish.
TEMPLATE_LIST_TEST_CASE("multipole: scores within a cluster that are far apart", "[multipole]", exact_types) {
  for (double size : {1.0, 30.0, 1000.0})
    for (bool causal : {false, true})
      for (std::optional<double> softcap : {std::optional<double>(), std::optional<double>(20)}) {
        multipole_problem p = exact_choices({.batch = 1, .queries = 64, .keys = 64, .dim = 16}, 4);
        for (double& x : p.k.data) x *= size;
        auto& o = p.options;
        o.causal = causal, o.exact = 5, o.segment = 16, o.softcap = softcap;
        o.block = 8, o.probe = causal ? 8 : 4, o.lookback = 8;
        CAPTURE(size, causal, softcap.value_or(0));
        const reference::result actual = run_multipole<TestType>(p);
        for (double x : actual.out.data) CHECK(std::isfinite(x));
        // Scores are rounded: their errors are those of the weights.
        if (size == 1 || std::is_same_v<TestType, double>)
          CHECK(relative_error(actual.out, reference::multipole(p.q, p.k, p.v, o).out) <=
                tolerance<TestType>::out * std::max(1.0, size / 10));
      }
}

TEMPLATE_LIST_TEST_CASE("multipole: equal ranks go to the earlier keys", "[multipole]", exact_types) {
  multipole_problem p = exact_choices({.batch = 1, .queries = 16, .keys = 64}, 4);
  std::fill(p.k.data.begin(), p.k.data.end(), 0.5);
  p.options.exact = 10, p.options.block = p.options.probe = 8;
  check<TestType>(p);
  std::fill(p.q.data.begin(), p.q.data.end(), 0);
  check<TestType>(p);
}

TEST_CASE("multipole: its error on attention of a trained model", "[multipole]") {
  const std::filesystem::path folder = ATTN_DATA_DIR;
  const double bounds[2] = {0.07, 0.047};
  for (int layer = 0; layer < 2; ++layer) {
    const auto read = [&](const char* name) {
      const npy_array x = read_npy(folder / ("use_lite_layer" + std::to_string(layer)) / name);
      tensor<float> to(x.shape[0], x.shape[1], x.shape[2], x.shape[3]);
      for (std::size_t n = 0; n < x.values.size(); ++n) to.data[n] = static_cast<float>(x.values[n]);
      return to;
    };
    const tensor<float> q = read("q.npy"), k = read("k.npy"), v = read("v.npy");
    tensor<float> out(v.batch(), v.heads(), q.length(), v.dim()), full = out;
    attn::execution serial;
    const auto error = [&](bool causal, const attn::multipole_options<float>& o) {
      compiled_full_softmax<float>::call(view(q), view(k), view(v), view(full), {.causal = causal}, {}, serial);
      compiled_multipole<float>::call(view(q), view(k), view(v), view(out), o, serial);
      return relative_error(cast<double>(out), cast<double>(full));
    };
    CAPTURE(layer);
    // 128 + 64 + 64 / 2 of 1024 pairs: below a quarter.
    const double own = error(false, {.exact = 128, .block = 32, .probe = 16});
    attn::nystrom(view(q), view(k), view(v), view(out), {.landmarks = 64});
    CHECK(own < 0.5 * relative_error(cast<double>(out), cast<double>(full)));
    CHECK(error(false, {}) <= bounds[layer]);
    CHECK(error(false, {.exact = 384, .probe = 16}) <= bounds[layer] / 2);
    CHECK(error(true, {.causal = true}) <= (layer == 0 ? 0.06 : 0.035));
    CHECK(error(true, {.causal = true, .exact = 128, .clusters = 16, .block = 1, .candidate_clusters = 32}) <= 0.04);
  }
}

// Of equal keys every mean is one of them, however many there are.
TEST_CASE("multipole: means of large clusters", "[multipole]") {
  constexpr idx_t length = 262144;
  const tensor<float> q(1, 1, 64, 1, 0.7f), k(1, 1, length, 1, 0.7f);
  tensor<float> out(1, 1, 64, 1);
  attn::execution serial;
  compiled_multipole<float>::call(view(q), view(k), view(k), view(out), {.exact = 64, .clusters = 1}, serial);
  for (float x : out.data) CHECK(std::abs(x / 0.7f - 1) <= 2e-6f);
}

}  // namespace testing::multipole_tests
