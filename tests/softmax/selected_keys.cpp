// selected_keys against its reference: every option alone and in combination, odd lengths and blocks, lists of heads,
// key heads and all, of either type; the order of a list, what is named twice or hidden, and refusals.
#include "support/catch.hpp"
#include "support/pairwise.hpp"
#include "support/refusals.hpp"
#include "support/run_selected_keys.hpp"

namespace testing::selected_keys_tests {
namespace {

struct setting {
  idx_t block, count, lists;  // lists: 1, key heads or heads
};

selected_problem problem_of(const problem_shape& shape, const setting& s, std::uint64_t seed = 1) {
  selected_problem p = random_problem<selected_problem>(shape, seed);
  p.options.block = s.block;
  p.options.indices = random_lists(seed + 7, s.lists == 1 ? 1 : shape.batch, s.lists, shape.queries, s.count,
                                   shape.keys / s.block + (shape.keys % s.block != 0));
  return p;
}

template <class S>
void check(selected_problem p) {
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  round_options<S>(p.options);
  const reference::result actual = run_pattern<S>(p), wanted = expected(p);
  CHECK(relative_error(actual.out, wanted.out) <= tolerance<S>::out);
  CHECK(relative_error(actual.lse, wanted.lse) <= tolerance<S>::lse);
}

template <class S>
void check(const problem_shape& shape, const setting& s, std::uint64_t seed = 1) {
  CAPTURE(shape.heads, shape.kv_heads, shape.queries, shape.keys, shape.dim, shape.value_dim);
  CAPTURE(s.block, s.count, s.lists);
  check<S>(problem_of(shape, s, seed));
}

template <class S>
void check_options(int choice, idx_t queries, idx_t keys, const setting& s) {
  CAPTURE(choice, queries, keys, s.block, s.count, s.lists);
  selected_problem p = problem_of({.queries = queries, .keys = keys, .dim = 9, .value_dim = 12}, s);
  choose(p.options, choice, queries, keys);
  check<S>(p);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("selected_keys: every combination of options", "[selected_keys]", exact_types) {
  for (int bits : selected_bits(6))
    for (setting s : {setting{1, 11, 4}, {1, 40, 1}, {3, 5, 2}, {16, 2, 4}, {20, 3, 2}, {100, 1, 1}}) {
      check_options<TestType>(bits, 41, 41, s);
      check_options<TestType>(bits, 25, 38, s);
      check_options<TestType>(bits, 38, 25, s);
    }
}

TEMPLATE_LIST_TEST_CASE("selected_keys: queries at any position, keys that stand for several tokens",
                        "[selected_keys]", exact_types) {
  for (idx_t span : {1, 4})
    for (setting s : {setting{1, 11, 4}, {1, 11, 2}, {20, 3, 2}}) {
      if (span > 1 && s.block > 1) continue;
      selected_problem p = problem_of({.queries = 130, .keys = 41, .dim = 9, .value_dim = 12}, s);
      p.options.causal = true, p.options.span = span, p.options.first_positions = {-5, 17};
      p.options.sinks = {0.3, -1, 2, 0};
      CAPTURE(span, s.block, s.lists);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("selected_keys: 16-bit storage computes in float", "[selected_keys]", storage_types) {
  check<TestType>({.queries = 257, .keys = 257, .dim = 33, .value_dim = 64}, {1, 60, 4});
  check<TestType>({.queries = 257, .keys = 257, .dim = 64, .value_dim = 64}, {1, 61, 2});
  check<TestType>({.queries = 257, .keys = 257, .dim = 33, .value_dim = 64}, {32, 4, 2});
  for (int bits = 0; bits < 64; bits += 3)
    for (setting s : {setting{1, 9, 4}, {17, 2, 1}}) check_options<TestType>(bits, 29, 33, s);
}

TEMPLATE_LIST_TEST_CASE("selected_keys: odd lengths, dims and blocks", "[selected_keys]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  const setting settings[] = {{1, 0, 1}, {1, 1, 4}, {1, 70, 2}, {1, 300, 1}, {2, 9, 2}, {5, 3, 4}, {15, 4, 2},
                              {16, 3, 4}, {19, 0, 2}, {33, 4, 1}, {64, 5, 2}, {1000, 2, 4}};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t w = 0; w < std::size(settings); ++w) {
      problem_shape shape{.queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + w) % 8], shape.value_dim = dims[(n + 3 * w) % 8];
      check<TestType>(shape, settings[w], n + 1);
    }
  for (const setting& s : {setting{1, 7, 1}, {16, 2, 1}}) {
    check<TestType>({.batch = 0}, s);
    check<TestType>({.value_dim = 0}, s);
  }
}

TEMPLATE_LIST_TEST_CASE("selected_keys: many heads and names", "[selected_keys]", exact_types) {
  for (idx_t lists : {idx_t(1), idx_t(2), idx_t(40)}) {
    const problem_shape shape{.batch = 1, .heads = 40, .kv_heads = 2, .queries = 20, .keys = 90, .dim = 17};
    check<TestType>(shape, {1, 30, lists});
    check<TestType>(shape, {16, 3, lists});
  }
  check<TestType>({.batch = 1, .heads = 2, .queries = 3, .keys = 5000, .dim = 8, .value_dim = 5}, {1, 4500, 2});
  check<TestType>({.batch = 1, .heads = 2, .queries = 1500, .keys = 1600, .dim = 8, .value_dim = 16}, {16, 60, 2});
  check<TestType>({.batch = 1, .heads = 2, .queries = 1500, .keys = 1600, .dim = 8, .value_dim = 5}, {16, 4, 1});
}

TEMPLATE_LIST_TEST_CASE("selected_keys: neither order, repeats nor the type of a list changes a bit", "[selected_keys]",
                        exact_types) {
  for (idx_t block : {1, 16}) {
    selected_problem p = problem_of({.queries = 130, .keys = 200}, {block, 12, 2});
    p.options.causal = true;
    const reference::result wanted = run_pattern<TestType>(p);
    tensor<idx_t>& lists = p.options.indices;
    tensor<idx_t> others(lists.batch(), lists.heads(), lists.length(), 15, -1);
    for (idx_t b = 0; b < lists.batch(); ++b)
      for (idx_t h = 0; h < lists.heads(); ++h)
        for (idx_t i = 0; i < lists.length(); ++i)
          for (idx_t n = 0; n < 14; ++n) others(b, h, i, n) = lists(b, h, i, (n * 5 + i) % 12);
    lists = others;
    const reference::result actual = run_pattern<TestType>(p);
    CHECK(actual.out == wanted.out);
    CHECK(actual.lse == wanted.lse);
    attn::execution two(2, 0), three(3, 0);
    for (attn::execution* threads : {&two, &three}) CHECK(run_pattern<TestType>(p, *threads).out == wanted.out);

    const tensor<TestType> q = cast<TestType>(p.q), k = cast<TestType>(p.k), v = cast<TestType>(p.v);
    tensor<TestType> out = cast<TestType>(p.q);
    tensor<std::int32_t> narrow(lists.batch(), lists.length(), lists.heads(), lists.dim());  // with strides of its own
    for (idx_t b = 0; b < lists.batch(); ++b)
      for (idx_t h = 0; h < lists.heads(); ++h)
        for (idx_t i = 0; i < lists.length(); ++i)
          for (idx_t n = 0; n < lists.dim(); ++n) narrow(b, i, h, n) = static_cast<std::int32_t>(lists(b, h, i, n));
    attn::selected_keys(view(q), view(k), view(v), view(out),
                        attn::blhd_view(narrow.data.data(), lists.batch(), lists.length(), lists.heads(), lists.dim()),
                        {.causal = true, .block = block});
    CHECK(cast<double>(out) == wanted.out);
  }
}

TEMPLATE_LIST_TEST_CASE("selected_keys: what is hidden is not read", "[selected_keys]", exact_types) {
  for (auto [block, span] : {std::pair<idx_t, idx_t>{1, 1}, {16, 1}, {1, 4}}) {
    selected_problem p = problem_of({.queries = 50, .keys = 70}, {block, 9, 4});
    p.options.query_lengths = {50, 33}, p.options.key_lengths = {61, 44};
    p.options.causal = span > 1, p.options.span = span;
    if (span > 1) p.options.first_positions = {61 * 4 - 50, 44 * 4 - 33};
    const reference::result clean = run_pattern<TestType>(p);
    for (idx_t b = 0; b < 2; ++b) {
      const auto poison = [&](tensor<double>& x, idx_t from) {
        for (idx_t h = 0; h < x.heads(); ++h)
          for (idx_t i = from; i < x.length(); ++i)
            for (idx_t d = 0; d < x.dim(); ++d) x(b, h, i, d) = d % 2 ? 1e30 : std::nan("");
      };
      poison(p.q, b ? 33 : 50), poison(p.k, b ? 44 : 61), poison(p.v, b ? 44 : 61);
    }
    for (idx_t h = 0; h < 4; ++h)
      for (idx_t i = 33; i < 50; ++i)  // the lists of padding too
        for (idx_t n = 0; n < 9; ++n) p.options.indices(1, h, i, n) = n % 2 ? -900 : idx_t(1) << 40;
    const reference::result padded = run_pattern<TestType>(p);
    CHECK(padded.out == clean.out);
    CHECK(padded.lse == clean.lse);
    check<TestType>(p);
  }
}

TEST_CASE("selected_keys: keys of tokens to come are not read", "[selected_keys]") {
  selected_problem p = problem_of({.queries = 50, .keys = 70}, {1, 9, 2});
  p.options.causal = true, p.options.span = 4, p.options.first_positions = {101, -6};
  const reference::result clean = run_pattern<float>(p);
  for (idx_t b = 0; b < 2; ++b)
    for (auto* x : {&p.k, &p.v})
      for (idx_t h = 0; h < x->heads(); ++h)
        for (idx_t j = b ? 11 : 37; j < 70; ++j) (*x)(b, h, j, j % x->dim()) = std::nan("");
  const reference::result poisoned = run_pattern<float>(p);
  CHECK(poisoned.out == clean.out);
  CHECK(poisoned.lse == clean.lse);
}

TEST_CASE("selected_keys: options, score and execution may each be left out", "[selected_keys]") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(300, 8), k = Eigen::MatrixXf::Random(300, 8),
                        v = Eigen::MatrixXf::Random(300, 8);
  Eigen::MatrixXf wanted(300, 8), out(300, 8);
  const Eigen::MatrixXi lists = Eigen::MatrixXi::Random(300, 20).unaryExpr([](int x) { return std::abs(x % 300); });
  attn::execution threads(2, 0);
  const auto same = [](float s, auto, auto, auto, auto) { return s; };
  attn::selected_keys(q, k, v, wanted, lists);
  const auto is_same = [&] { return (out - wanted).norm() <= 1e-6f * wanted.norm() && (out.setZero(), true); };
  attn::selected_keys(q, k, v, out, lists, threads);
  CHECK(is_same());
  attn::selected_keys(q, k, v, out, lists, {.block = 1}, threads);
  CHECK(is_same());
  attn::selected_keys(q, k, v, out, lists, {}, same);
  CHECK(is_same());
  attn::selected_keys(q, k, v, out, lists, {.scale = 1 / std::sqrt(8.0f)}, same, attn::execution(2));
  CHECK(is_same());
}

namespace {

// A good table beside the call, which options may spoil.
struct listed_inputs : call_inputs<attn::selected_keys_options<float>> {
  tensor<idx_t> lists = random_lists(3, 2, 4, 6, 3, 2);
  attn::tensor_view<const idx_t> lists_given = lists_view(lists);
};
struct listed_call {
  using options = attn::selected_keys_options<float>;
  static void call(listed_inputs& d, attn::execution& exec) {
    with_lists<options> all{d.options};
    all.indices = d.lists_given;
    compiled_selected_keys<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, all, {}, exec);
  }
};

}  // namespace

TEST_CASE("selected_keys refuses what does not fit", "[refusals]") {
  using here = listed_inputs;
  auto list = common_refusals<here>();
  list.push_back({"blocks of 0", "block >= 1; found 0", [](here& d) { d.options.block = 0; }});
  list.push_back({"negative blocks", "block >= 1; found -3", [](here& d) { d.options.block = -3; }});
  list.push_back({"a key beyond the array", "keys from -1 to 8; found 9", [](here& d) { d.lists(1, 3, 5, 2) = 9; }});
  list.push_back({"a key below -1", "keys from -1 to 8; found -2", [](here& d) { d.lists(0, 0, 0, 0) = -2; }});
  list.push_back({"a block beyond the array", "blocks from -1 to 2; found 3", [](here& d) {
                    d.options.block = 4, d.lists(0, 1, 2, 0) = 3;
                  }});
  list.push_back({"no table", "index batch 1 or 2; found 0", [](here& d) { d.lists_given = {}; }});
  list.push_back({"a table of nothing", "null", [](here& d) { d.lists_given = {nullptr, {2, 4, 6, 3}}; }});
  list.push_back({"lists of another batch", "index batch 1 or 2; found 3", [](here& d) {
                    d.lists = random_lists(3, 3, 4, 6, 3, 2), d.lists_given = lists_view(d.lists);
                  }});
  list.push_back({"lists of other heads", "index heads 1, 2 or 4; found 3", [](here& d) {
                    d.lists_given = d.lists_given.slice(1, 0, 3);
                  }});
  list.push_back({"lists of other queries", "index rows = query length 6; found 5", [](here& d) {
                    d.lists_given = d.lists_given.slice(2, 0, 5);
                  }});
  list.push_back({"lists in out", "overlap", [](here& d) {
                    d.lists_given = {reinterpret_cast<const idx_t*>(d.out.data.data()), {1, 1, 6, 3}};
                  }});
  check_refused<listed_call, 9, here>("selected_keys", list);
}

}  // namespace testing::selected_keys_tests
