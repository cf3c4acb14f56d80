// pointwise against its naive reference: options in all pairs, functions, windows, long rows; and what is refused.
#include "support/catch.hpp"
#include "support/pairwise.hpp"
#include "support/refusals.hpp"
#include "support/run_pointwise.hpp"

namespace testing::pointwise_tests {
namespace {

using kind = reference::pointwise_kind;

struct choice {
  int f = 0, window = 0, bias = 0;  // bias: none, of pairs, by distance, both
  bool causal = false, softcap = false, slopes = false, rows = false, mask = false, lengths = false, shifted = false;
  idx_t kv_heads = 2;
};

std::vector<choice> choices() {
  std::vector<choice> drawn;
  random_source random(17);
  for (int n = 0; n < 300; ++n) {
    const auto flag = [&random] { return random.below(2) == 1; };
    const auto below = [&random](idx_t most) { return static_cast<int>(random.below(most)); };
    drawn.push_back({below(4), below(4), below(4), flag(), flag(), flag(), flag(), flag(), flag(), flag(),
                     idx_t(1) << below(3)});
  }
  return selected(drawn, [](const choice& c) {
    return std::array{c.f,      c.window, c.bias,     +c.causal,  +c.softcap,       +c.slopes,
                      +c.rows, +c.mask,  +c.lengths, +c.shifted, int(c.kv_heads)};
  });
}

pointwise_problem problem_of(const choice& c, idx_t queries = 67, idx_t keys = 90) {
  auto p = random_problem<pointwise_problem>(
      {.kv_heads = c.kv_heads, .queries = queries, .keys = keys, .dim = 9, .value_dim = 12}, 3);
  auto& o = p.options;
  o.kind = static_cast<kind>(c.f), o.causal = c.causal, o.weight = 0.5, o.shift = c.shifted ? -1.5 : 0;
  if (c.window & 1) o.left = 20;
  if (c.window & 2) o.right = 11;
  if (c.bias & 1) {
    o.bias = random_normal(5, 1, 4, 1, keys);
    for (std::size_t n = 0; n < o.bias.data.size(); n += 5) o.bias.data[n] = -reference::infinity;
  }
  if (c.bias & 2) o.relative_bias = random_normal(6, 1, 1, 4, 31);
  if (c.softcap) o.softcap = 1.5;
  if (c.slopes) o.alibi_slopes = {0.5, 0.25, 0.125, 0};
  if (c.rows) o.row_weights = random_normal(7, 1, 1, 2, queries);
  if (c.mask) o.key_mask = random_key_mask(8, 2, keys);
  if (c.lengths) o.query_lengths = {queries, queries - 9}, o.key_lengths = {keys - 6, keys};
  return p;
}

template <class S>
void check_agrees(const pointwise_problem& given) {
  const pointwise_problem p = rounded<S>(given);
  CHECK(relative_error(run<S>(p).out, expected(p).out) <= tolerance<S>::out);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("pointwise: options in all pairs", "[pointwise]", all_types) {
  for (const choice& c : choices()) {
    CAPTURE(c.f, c.window, c.bias, c.causal, c.softcap, c.slopes, c.rows, c.mask, c.lengths, c.shifted, c.kv_heads);
    check_agrees<TestType>(problem_of(c));
  }
}

TEMPLATE_LIST_TEST_CASE("pointwise: few queries, and more keys than a state takes", "[pointwise]", exact_types) {
  for (idx_t queries : {1, 3, 40, 100}) {
    CAPTURE(queries);
    check_agrees<TestType>(problem_of({.f = 1, .rows = true, .shifted = true}, queries, 2500));
  }
  check_agrees<TestType>(problem_of({.f = 2, .causal = true}, 2, 13000));
}

// What f would make of a key that is not seen, and values there, change no bit.
TEST_CASE("pointwise: hidden keys add nothing", "[pointwise]") {
  for (int f : {0, 1, 2, 3})
    for (idx_t queries : {2, 67}) {
      const pointwise_problem p = problem_of({.f = f, .mask = true}, queries);
      CHECK(run<float>(poisoned(p)).out == run<float>(p).out);
    }
}

TEST_CASE("pointwise: a function of the caller's, which is not called for hidden keys", "[pointwise]") {
  const pointwise_problem p = problem_of({.f = 1, .bias = 1, .causal = true, .mask = true});
  const stored_pointwise<float> stored(p.options);
  const tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v);
  tensor<float> out(2, 4, 67, 12);
  bool finite = true;
  attn::execution serial;
  compiled_pointwise<float>::call(view(q), view(k), view(v), view(out), stored.options(),
                                  [&](float s) {
                                    finite &= std::isfinite(s);
                                    return s / (1 + std::exp(-s));
                                  },
                                  serial);
  CHECK(finite);
  CHECK(relative_error(cast<double>(out), expected(p).out) <= tolerance<float>::out);
}

TEST_CASE("pointwise: sums over disjoint keys add up", "[pointwise]") {
  const pointwise_problem all = problem_of({.shifted = true});
  pointwise_problem first = all, rest = all;
  first.k = rows(all.k, 0, 40), first.v = rows(all.v, 0, 40);
  rest.k = rows(all.k, 40, 50), rest.v = rows(all.v, 40, 50);
  tensor<double> sum = run<float>(first).out;
  const tensor<double> more = run<float>(rest).out;
  for (std::size_t n = 0; n < sum.data.size(); ++n) sum.data[n] += more.data[n];
  CHECK(relative_error(sum, run<float>(all).out) <= 1e-6);
}

TEST_CASE("pointwise: options, f and execution may each be left out", "[pointwise]") {
  const tensor<float> q(1, 2, 6, 8, 0.5f), v(1, 2, 6, 5, 2);
  tensor<float> a(1, 2, 6, 5), b = a, c = a, d = a;
  attn::execution threads(2, 0);
  attn::pointwise(view(q), view(q), view(v), view(a));
  attn::pointwise(view(q), view(q), view(v), view(b), threads);
  attn::pointwise(view(q), view(q), view(v), view(c), {}, threads);
  attn::pointwise(view(q), view(q), view(v), view(d), {}, [](float s) { return 1 / (1 + std::exp(-s)); }, threads);
  CHECK((a == b && b == c));
  CHECK(relative_error(cast<double>(d), cast<double>(a)) <= 1e-6);
}

TEST_CASE("pointwise refuses what does not fit", "[pointwise]") {
  using options = attn::pointwise_options<float>;
  using here = call_inputs<options>;
  auto list = common_refusals<here>();
  std::erase_if(list, [](const auto& one) { return std::string(one.what) == "slopes in lse"; });  // there is none
  for (auto& one : key_mask_refusals<here>()) list.push_back(one);
  const auto rows = [](idx_t b, idx_t i) {
    return [=](here& d) { d.options.row_weights = {d.other.data.data(), {b, i}}; };
  };
  list.push_back({"factors of another batch", "row_weights batch 1 or 2; found 3", rows(3, 6)});
  list.push_back({"factors of the keys", "row_weights length = query length 6; found 9", rows(1, 9)});
  list.push_back({"factors in out", "overlap", [](here& d) { d.options.row_weights = {d.out.data.data(), {1, 6}}; }});
  list.push_back({"a negative left", "left >= 0; found -1", [](here& d) { d.options.left = -1; }});
  list.push_back({"a negative right", "right >= 0; found -2", [](here& d) { d.options.right = -2; }});
  list.push_back({"a weight of NaN", "a finite weight", [](here& d) { d.options.weight = NAN; }});
  list.push_back({"an infinite shift", "a finite shift; found -inf", [](here& d) { d.options.shift = -HUGE_VALF; }});
  list.push_back({"no activation", "an activation of pointwise_activation; found 9",
                  [](here& d) { d.options.activation = attn::pointwise_activation(9); }});
  list.push_back({"bias of another key length", "bias key length = key length 9; found 8",
                  [](here& d) { d.options.bias = d.shaped(1, 1, 6, 8); }});
  list.push_back({"a relative bias without a middle", "2 R + 1 entries of relative_bias",
                  [](here& d) { d.options.relative_bias = {d.other.data.data(), {4, 8}}; }});
  check_refused<compiled_pointwise<float>>("pointwise", list);
}

}  // namespace testing::pointwise_tests
