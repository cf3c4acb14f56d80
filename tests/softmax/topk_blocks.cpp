// topk_blocks against its reference: every option alone and in combination, odd lengths and blocks, all types; ties,
// keys that are no numbers, and a choice that is the same for all.
#include "reference/full_softmax.hpp"

#include "support/catch.hpp"
#include "support/pairwise.hpp"
#include "support/refusals.hpp"
#include "support/run_topk_blocks.hpp"

namespace testing::topk_blocks_tests {
namespace {

constexpr idx_t huge = idx_t(1) << 62, most = std::numeric_limits<idx_t>::max();

struct setting {
  idx_t block, topk;
};

template <class S>
void check(const topk_problem& p, const reference::result& wanted) {
  const reference::result actual = run_pattern<S>(p);
  CHECK(relative_error(actual.out, wanted.out) <= tolerance<S>::out);
  CHECK(relative_error(actual.lse, wanted.lse) <= tolerance<S>::lse);
}
template <class S>
void check(const topk_problem& p) {
  check<S>(p, expected(p));
}

template <class S>
void check(const problem_shape& shape, const setting& s, std::uint64_t seed = 1) {
  reference::topk_blocks_options o;
  o.block = s.block, o.topk = s.topk;
  CAPTURE(shape.heads, shape.kv_heads, shape.queries, shape.keys, shape.dim, shape.value_dim, s.block, s.topk);
  check<S>(topk_of<S>(shape, o, seed));
}

template <class S>
void check_options(int bits, idx_t queries, idx_t keys, const setting& s) {
  CAPTURE(bits, queries, keys, s.block, s.topk);
  const problem_shape shape{.queries = queries, .keys = keys, .dim = 9, .value_dim = 12};
  check<S>(topk_of<S>(shape, chosen_topk(bits, s.block, s.topk, queries, keys)));
}

// A lone head whose weights are equal: row i of the result names the keys query i sees.
struct seen_keys {
  tensor<float> q, k, out;
  seen_keys(const std::vector<float>& queries, const std::vector<float>& keys, attn::topk_blocks_options<float> options)
      : q(1, 1, std::ssize(queries), 1), k(1, 1, std::ssize(keys), 1), out(1, 1, q.length(), k.length(), 7) {
    q.data = queries, k.data = keys;
    tensor<float> identity(1, 1, k.length(), k.length());
    for (idx_t j = 0; j < k.length(); ++j) identity(0, 0, j, j) = 1;
    options.scale = 0.0f;
    attn::execution serial;
    compiled_topk_blocks<float>::call(view(std::as_const(q)), view(std::as_const(k)), view(std::as_const(identity)),
                                      view(out), options, {}, serial);
  }
  std::vector<idx_t> of(idx_t i) const {
    std::vector<idx_t> seen;
    for (idx_t j = 0; j < k.length(); ++j)
      if (out(0, 0, i, j) != 0) seen.push_back(j);
    return seen;
  }
};
using key_list = std::vector<idx_t>;

// Blocks of `kinds` kinds by turns, of small integers: sums and products are exact, and blocks of a kind match equally.
template <class S>
topk_problem repeated_blocks(const problem_shape& shape, const setting& s, idx_t kinds, std::uint64_t seed) {
  topk_problem p = random_problem<topk_problem>(shape, seed);
  p.options.block = s.block, p.options.topk = s.topk;
  random_source random(seed);
  for (double& x : p.q.data) x = static_cast<double>(random.below(5) - 2);
  for (double& x : p.k.data) x = static_cast<double>(random.below(5) - 2);
  const idx_t period = kinds * s.block;
  for (idx_t b = 0; b < shape.batch; ++b)
    for (idx_t h = 0; h < shape.kv_heads; ++h)
      for (idx_t j = period; j < shape.keys; ++j)
        for (idx_t d = 0; d < shape.dim; ++d) p.k(b, h, j, d) = p.k(b, h, j % period, d);
  p.v = rounded<S>(p.v);
  return p;
}

// Rows that are no numbers in the reference are none here; the others are near. How many are none.
template <class S>
idx_t check_with_nans(const topk_problem& p) {
  const reference::result wanted = expected(p), actual = run_pattern<S>(p);
  tensor<double> numbers = wanted.out, others = actual.out;
  idx_t rows = 0;
  bool same = true;
  for (idx_t b = 0; b < p.q.batch(); ++b)
    for (idx_t h = 0; h < p.q.heads(); ++h)
      for (idx_t i = 0; i < p.q.length(); ++i) {
        rows += std::isnan(wanted.out(b, h, i, 0));
        same = same && std::isnan(wanted.lse(b, h, i, 0)) == std::isnan(actual.lse(b, h, i, 0));
        for (idx_t d = 0; d < p.v.dim(); ++d) {
          same = same && std::isnan(wanted.out(b, h, i, d)) == std::isnan(actual.out(b, h, i, d));
          if (std::isnan(wanted.out(b, h, i, d))) numbers(b, h, i, d) = others(b, h, i, d) = 0;
        }
      }
  CHECK(same);
  CHECK(relative_error(others, numbers) <= tolerance<S>::out);
  return rows;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("topk_blocks: every combination of options", "[topk_blocks]", exact_types) {
  for (int bits : selected_bits(5))
    for (setting s : {setting{5, 3}, {1, 4}, {4, 2}, {3, 1}, {2, 100}, {1000, 3}}) {
      check_options<TestType>(bits, 41, 41, s);
      check_options<TestType>(bits, 25, 38, s);
      check_options<TestType>(bits, 38, 25, s);
    }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: 16-bit storage computes in float", "[topk_blocks]", storage_types) {
  check<TestType>({.queries = 257, .keys = 257, .dim = 33, .value_dim = 64}, {16, 4});
  for (int bits = 0; bits < 32; ++bits)
    if (!(bits & 5)) check_options<TestType>(bits, 29, 33, {4, 3});
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: odd lengths, dims and blocks", "[topk_blocks]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  const setting settings[] = {{1, 1},     {1, 2},  {1, 40}, {5, 3},   {5, 1},    {16, 2},     {16, 3},
                              {16, huge}, {64, 2}, {64, 3}, {100, 2}, {1000, 5}, {huge, huge}};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t w = 0; w < std::size(settings); ++w) {
      problem_shape shape{.batch = 1, .queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + w) % 8], shape.value_dim = dims[(n + 3 * w) % 8];
      check<TestType>(shape, settings[w], n + 1);
    }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: queries and keys of different lengths", "[topk_blocks]", exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{1, 300}, {2, 129}, {48, 49},  {5, 1},   {300, 1}, {129, 60},
                                        {0, 9},   {9, 0},   {77, 530}, {16, 17}, {17, 16}, {3, 64}};
  for (auto [queries, keys] : both_lengths)
    for (setting s : {setting{11, 3}, {16, 2}, {1, 5}, {64, 4}})
      check<TestType>({.queries = queries, .keys = keys, .dim = 20, .value_dim = 24}, s);
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: grouped queries", "[topk_blocks]", exact_types) {
  for (auto [heads, kv_heads] : {std::pair<idx_t, idx_t>{1, 1}, {6, 1}, {8, 2}, {5, 5}})
    check<TestType>({.heads = heads, .kv_heads = kv_heads, .queries = 150, .keys = 160, .dim = 16, .value_dim = 8},
                    {8, 4});
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: many blocks, many of them chosen", "[topk_blocks]", exact_types) {
  const problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .dim = 8, .value_dim = 5};
  for (auto [length, block, topk] :
       {std::array<idx_t, 3>{700, 1, 150}, {1300, 3, 7}, {2000, 1, 2}, {900, 2, 300}, {1500, 100, 3}}) {
    problem_shape s = shape;
    s.queries = length, s.keys = length + 3;
    check<TestType>(s, {block, topk});
  }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: huge numbers do not overflow", "[topk_blocks]", exact_types) {
  for (setting s : {setting{huge, 3}, {7, huge}, {huge, huge}, {most, 3}, {7, most}, {most, most}})
    for (idx_t queries : {60, 90, 110}) check<TestType>({.queries = queries, .keys = 90}, s);
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: a batch of none, heads of no width", "[topk_blocks]", exact_types) {
  check<TestType>({.batch = 0}, {8, 3});
  check<TestType>({.value_dim = 0}, {8, 3});
  reference::topk_blocks_options o;  // every score is 0, and so is every match: the first blocks are chosen
  o.block = 8, o.topk = 3, o.scale = 1;
  check<TestType>(topk_of<TestType>({.dim = 0}, o));
}

TEST_CASE("topk_blocks: the keys a query sees", "[topk_blocks]") {
  // Means 2, 2.5, 2, -1; the last block is not complete.
  const std::vector<float> k = {1, 3, 0, 5, 4, 0, -2, 0, 9}, forward(9, 1.0f), backward(9, -1.0f);
  const seen_keys one(forward, k, {.block = 2, .topk = 1}), two(forward, k, {.block = 2, .topk = 2}),
      three(forward, k, {.block = 2, .topk = 3}), least(backward, k, {.block = 2, .topk = 2}),
      all(forward, k, {.block = 2, .topk = 9});
  CHECK(one.of(8) == key_list{8});
  CHECK(one.of(7) == key_list{6, 7});
  CHECK(two.of(1) == key_list{0, 1});
  CHECK(two.of(2) == key_list{0, 1, 2});
  CHECK(two.of(5) == key_list{2, 3, 4, 5});
  CHECK(two.of(8) == key_list{2, 3, 8});
  CHECK(three.of(7) == key_list{0, 1, 2, 3, 6, 7});  // of two that match equally the earlier
  CHECK(three.of(8) == key_list{0, 1, 2, 3, 8});
  CHECK(least.of(7) == key_list{0, 1, 6, 7});
  CHECK(least.of(8) == key_list{6, 7, 8});
  CHECK(all.of(7) == key_list{0, 1, 2, 3, 4, 5, 6, 7});
  // Queries at the last positions; those before the first key see none.
  const seen_keys late({1, -1}, k, {.block = 2, .topk = 2});
  CHECK(late.of(0) == key_list{2, 3, 6, 7});
  CHECK(late.of(1) == key_list{6, 7, 8});
  const seen_keys early(forward, {1, 3, 5}, {.block = 2, .topk = 2});
  CHECK(early.of(5) == key_list{});
  CHECK(early.of(6) == key_list{0});
  CHECK(early.of(8) == key_list{0, 1, 2});
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: of blocks that match equally the earlier are chosen", "[topk_blocks]",
                        all_types) {
  const problem_shape shape{.queries = 150, .keys = 157, .dim = 8, .value_dim = 12};
  for (idx_t kinds : {1, 2, 3, 7})
    for (setting s : {setting{1, 3}, {4, 2}, {5, 4}, {16, 3}, {3, 20}}) {
      CAPTURE(kinds, s.block, s.topk);
      check<TestType>(repeated_blocks<TestType>(shape, s, kinds, static_cast<std::uint64_t>(kinds)));
    }
  const problem_shape longer{
      .batch = 1, .heads = 2, .kv_heads = 1, .queries = 900, .keys = 900, .dim = 4, .value_dim = 5};
  check<TestType>(repeated_blocks<TestType>(longer, {2, 3}, 1, 4));
  check<TestType>(repeated_blocks<TestType>(longer, {2, 3}, 200, 5));
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: a key that is not a number is seen only where it must be", "[topk_blocks]",
                        exact_types) {
  const problem_shape shape{.batch = 1, .heads = 4, .kv_heads = 2, .queries = 60, .keys = 60, .dim = 8, .value_dim = 6};
  for (idx_t topk : {1, 2, 3, 4, 100}) {
    CAPTURE(topk);
    reference::topk_blocks_options o;
    o.block = 5, o.topk = topk;
    topk_problem p = topk_of<TestType>(shape, o);
    p.k(0, 1, 12, 3) = std::numeric_limits<double>::quiet_NaN();
    const idx_t nans = check_with_nans<TestType>(p);
    // Of both heads of the group: its own block from it on, and later blocks that see all before them.
    const idx_t rows = topk == 100 ? 48 : topk == 4 ? 8 : 3;
    CHECK(nans == 2 * rows);
    p.k(0, 1, 27, 0) = std::numeric_limits<double>::quiet_NaN();  // of two the earlier
    CHECK(check_with_nans<TestType>(p) >= nans);
  }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: what lies in the padding is not read", "[topk_blocks]", exact_types) {
  reference::topk_blocks_options o;
  o.block = 8, o.topk = 3, o.query_lengths = {50, 33}, o.key_lengths = {61, 44};
  topk_problem p = topk_of<TestType>({.queries = 50, .keys = 70}, o);
  const reference::result clean = run_pattern<TestType>(p);
  for (tensor<double>* x : {&p.q, &p.k, &p.v})
    for (idx_t b = 0; b < 2; ++b)
      for (idx_t h = 0; h < x->heads(); ++h)
        for (idx_t i = (x == &p.q ? o.query_lengths : o.key_lengths)[static_cast<std::size_t>(b)]; i < x->length(); ++i)
          for (idx_t d = 0; d < 16; ++d)
            (*x)(b, h, i, d) = d % 2 ? reference::infinity : std::numeric_limits<double>::quiet_NaN();
  const reference::result padded = run_pattern<TestType>(p);
  CHECK(padded.out == clean.out);
  CHECK(padded.lse == clean.lse);
  check<TestType>(p);
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: with as many blocks as there are it is causal full softmax", "[topk_blocks]",
                        exact_types) {
  for (int bits : selected_bits(5))
    for (setting s : {setting{8, 6}, {1, 41}, {41, 1}, {huge, 2}}) {
      CAPTURE(bits, s.block, s.topk);
      const topk_problem p = topk_of<TestType>({.queries = 41, .keys = 41, .dim = 9, .value_dim = 12},
                                               chosen_topk(bits, s.block, s.topk, 41, 41));
      reference::full_softmax_options full;
      static_cast<reference::softmax_options&>(full) = p.options;
      full.causal = true;
      check<TestType>(p, reference::full_softmax(p.q, p.k, p.v, full));
    }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: one block that all queries choose, with and without threads", "[topk_blocks]",
                        exact_types) {
  for (setting s : {setting{64, 2}, {16, 4}, {100, 3}}) {
    CAPTURE(s.block, s.topk);
    // Queries share a direction, which the keys of block 0 have.
    topk_problem p =
        random_problem<topk_problem>({.queries = 1150, .keys = 1150, .dim = 24, .value_dim = s.topk == 2 ? 32 : 21});
    p.options.block = s.block, p.options.topk = s.topk, p.options.key_lengths = {1150, 1150};
    p.options.query_lengths = {1150, 700};
    for (double& x : p.q.data) x = 0.3 * x + 0.5;
    for (idx_t b = 0; b < 2; ++b)
      for (idx_t h = 0; h < 2; ++h)
        for (idx_t j = 0; j < s.block; ++j)
          for (idx_t d = 0; d < 24; ++d) p.k(b, h, j, d) += 2;
    p.q = rounded<TestType>(p.q), p.k = rounded<TestType>(p.k), p.v = rounded<TestType>(p.v);
    const reference::block_matches<double> blocks(p.q, p.k, 1150, 0, 0, s.block);
    bool first = true;
    for (idx_t i = s.block; i < 1150; ++i) first = first && blocks.ranked(0, 1, i, i / s.block)[0] == 0;
    CHECK(first);
    if (s.topk == 2) check<TestType>(p);

    attn::execution serial, two(2, 0), three(3, 0), five(5, 0);
    const reference::result alone = run_pattern<TestType>(p, serial);
    for (attn::execution* threads : {&two, &three, &five}) {
      const reference::result shared = run_pattern<TestType>(p, *threads);
      CHECK(shared.out == alone.out);
      CHECK(shared.lse == alone.lse);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: the promised accuracy at length 4096", "[topk_blocks][long]", exact_types) {
  check<TestType>({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 4096, .keys = 4096, .dim = 64, .value_dim = 64},
                  {64, 4});
}

TEST_CASE("topk_blocks: options, score and execution may each be left out", "[topk_blocks]") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(300, 8), k = Eigen::MatrixXf::Random(300, 8),
                        v = Eigen::MatrixXf::Random(300, 8);
  Eigen::MatrixXf wanted(300, 8), out(300, 8);
  attn::execution threads(2, 0);
  const auto same = [](float s, auto, auto, auto, auto) { return s; };
  attn::topk_blocks(q, k, v, wanted, {.block = 128, .topk = 3});
  const auto is_same = [&] { return (out - wanted).norm() <= 1e-6f * wanted.norm() && (out.setZero(), true); };
  attn::topk_blocks(q, k, v, out);
  CHECK(is_same());
  attn::topk_blocks(q, k, v, out, threads);
  CHECK(is_same());
  attn::topk_blocks(q, k, v, out, attn::execution(2));
  CHECK(is_same());
  attn::topk_blocks(q, k, v, out, {.topk = 3}, threads);
  CHECK(is_same());
  attn::topk_blocks(q, k, v, out, {}, same);
  CHECK(is_same());
  attn::topk_blocks(q, k, v, out, {.scale = 1 / std::sqrt(8.0f)}, same, attn::execution(2));
  CHECK(is_same());
}

TEST_CASE("topk_blocks refuses what does not fit", "[refusals]") {
  using here = call_inputs<attn::topk_blocks_options<float>>;
  auto list = common_refusals<here>();
  list.push_back({"blocks of 0", "block >= 1; found 0", [](here& d) { d.options.block = 0; }});
  list.push_back({"negative blocks", "block >= 1; found -3", [](here& d) { d.options.block = -3; }});
  list.push_back({"no own block", "topk >= 1; found 0", [](here& d) { d.options.topk = 0; }});
  list.push_back({"a negative topk", "topk >= 1; found -1", [](here& d) { d.options.topk = -1; }});
  check_refused<compiled_topk_blocks<float>>("topk_blocks", list);
}

}  // namespace testing::topk_blocks_tests
