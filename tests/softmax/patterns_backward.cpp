// The gradients of block, strided, bigbird and pattern_softmax against the reverse pass of their references: options in
// all pairs, odd lengths, all types.
#include "support/listed_pattern.hpp"
#include "support/pairwise.hpp"
#include "support/run_pattern_backward.hpp"

namespace testing {

template <class S>
struct library_operator<S, reference::listed_options> : common_softmax_options<S, attn::pattern_softmax_options<S>> {
  using form = compiled_pattern_softmax<S>;
  explicit library_operator(const reference::listed_options& from)
      : common_softmax_options<S, attn::pattern_softmax_options<S>>(from), given(from) {}
  reference::listed_options given;

  void forward(const tensor<S>& q, const tensor<S>& k, const tensor<S>& v, tensor<S>& out,
               attn::execution& exec) const {
    if (given.joined_to.all.empty())
      form::call(view(q), view(k), view(v), view(out), given.pattern, this->options, this->score, exec);
    else
      form::call(view(q), view(k), view(v), view(out), joined_listed_pattern{given.pattern, given.joined_to},
                 this->options, this->score, exec);
  }
  void backward(const tensor<S>& q, const tensor<S>& k, const tensor<S>& v, const tensor<S>& out,
                const tensor<S>& d_out, const typename form::gradients& gradients,
                const score_backward_of<S>& score_backward, attn::execution& exec) const {
    if (given.joined_to.all.empty())
      form::backward(view(q), view(k), view(v), view(out), given.pattern, view(d_out), gradients, this->options,
                     this->score, score_backward, exec);
    else
      form::backward(view(q), view(k), view(v), view(out), joined_listed_pattern{given.pattern, given.joined_to},
                     view(d_out), gradients, this->options, this->score, score_backward, exec);
  }
};

}  // namespace testing

namespace testing::patterns_backward_tests {
namespace {

// What the options of all of them have in common; every two values of two options meet.
struct choice {
  bool causal, softcap, alibi, sinks, score, lengths, d_lse, saved_lse;
  idx_t kv_heads;
  int pattern;  // which of an operator's own
};
constexpr int patterns = 4;

std::vector<choice> choices() {
  std::vector<choice> drawn;
  random_source random(7);
  for (int n = 0; n < 400; ++n) {
    const auto flag = [&random] { return random.below(2) == 1; };
    choice c;
    c.causal = flag(), c.softcap = flag(), c.alibi = flag(), c.sinks = flag(), c.score = flag(), c.lengths = flag();
    c.d_lse = flag(), c.saved_lse = flag();
    c.kv_heads = idx_t(1) << random.below(3), c.pattern = static_cast<int>(random.below(patterns));
    drawn.push_back(c);
  }
  return selected(
      drawn,
      [](const choice& c) {
        return std::array{+c.causal,  +c.softcap, +c.alibi,     +c.sinks,        +c.score,
                          +c.lengths, +c.d_lse,   +c.saved_lse, int(c.kv_heads), c.pattern};
      },
      true);
}

// An operator's own options for a pattern of its own: 0 to 3.
void set(reference::block_options& o, int pattern, idx_t, idx_t keys) {
  o.size = std::array<idx_t, 4>{7, 16, 5, 1000}[static_cast<std::size_t>(pattern)], o.neighbours = pattern % 2;
  if (pattern < 2) return;
  o.size = 6;
  o.permutation = block_table(0, pattern == 2 ? 4 : 1, (keys + 5) / 6, 1);
}
void set(reference::strided_options& o, int pattern, idx_t, idx_t) {
  o.fixed = pattern >= 2;
  o.stride = std::array<idx_t, 4>{5, 1, 8, 13}[static_cast<std::size_t>(pattern)], o.summary = pattern == 3 ? 13 : 2;
}
void set(reference::bigbird_options& o, int pattern, idx_t, idx_t keys) {
  o.size = std::array<idx_t, 4>{3, 8, 16, 5}[static_cast<std::size_t>(pattern)];
  o.global_blocks = pattern % 3, o.window_blocks = pattern == 1 ? 1 : 3;
  if (pattern != 1) o.random = block_table(0, pattern == 2 ? 1 : 4, (keys + o.size - 1) / o.size, 1 + pattern % 2);
}

void set(reference::listed_options& o, int pattern, idx_t queries, idx_t keys) {
  const idx_t first = -1000;  // lengths of items differ, and so do the positions of their first queries
  const std::vector<idx_t> some = {0, 3, 11, 30, 90, 1000000};
  if (pattern == 0) {  // ranges with and without a step, lists, windows, queries that see nothing
    for (idx_t step : {0, 1, 2})
      o.pattern.all.push_back({{first + step, keys / 2, 3},
                               {{.range = {-5, 3}},
                                {.range = {9 + step, 200, 7}, .except_self = true},
                                {.range = {3, 9}, .left = 9, .right = 2}}});
    const idx_t from = keys / 2 + 1;
    o.pattern.all.push_back({{from - 1, from}, {}});
    o.pattern.all.push_back({{from, keys + 30}, {{.list = some, .except_self = true}, {.range = {12, 14}}}});
  } else if (pattern == 1) {  // everything
    o.pattern.all.push_back({{first, keys}, {{.range = {0, keys}}}});
  } else {  // blocks, and of other blocks every 5th key before and a few after: joined
    for (idx_t g = first; g < keys; g += 10)
      o.pattern.all.push_back({{g, std::min(g + 10, keys)}, {{.range = {g, g + 10}}}});
    o.joined_to.all.push_back({{first, 0}, {}});
    for (idx_t g = 0; g < keys; g += 10) {
      const std::vector<idx_t> later = {g + 11, g + 13, g + 20};
      o.joined_to.all.push_back(
          {{g, std::min(g + 10, keys)}, {{.range = {g % 20 == 0 ? 0 : 1, g, 5}}, {.list = later}}});
    }
    if (pattern == 3) std::swap(o.pattern, o.joined_to);
  }
  note(o.pattern, first, keys, o), note(o.joined_to, first, keys, o);
  (void)queries;
}

template <class Options>
problem<Options> problem_of(const problem_shape& shape, int pattern, std::uint64_t seed = 1) {
  auto p = random_problem<problem<Options>>(shape, seed);
  set(p.options, pattern, shape.queries, shape.keys);
  return p;
}

template <class Options>
problem<Options> apply(const choice& c, idx_t queries, idx_t keys, idx_t dim = 9, idx_t value_dim = 12) {
  auto p = problem_of<Options>(
      {.kv_heads = c.kv_heads, .queries = queries, .keys = keys, .dim = dim, .value_dim = value_dim}, c.pattern);
  auto& o = p.options;
  o.causal = c.causal;
  if (c.softcap) o.softcap = 1.5;
  if (c.alibi) o.alibi_slopes = {0.5, 0.25, 0.125, 0};
  if (c.sinks != c.alibi) o.relative_bias = random_normal(18, 1, 1, c.sinks ? 1 : 4, 2 * 9 + 1);
  if (c.sinks) o.sinks = {0.3, -1, 2, -reference::infinity};
  if (c.score) o.score = smooth_score{};
  if (c.lengths) o.scale = 0.4, o.query_lengths = {queries, queries / 2}, o.key_lengths = {keys / 3, keys - 1};
  return p;
}

template <class S, class Options>
void check_choices(idx_t queries, idx_t keys) {
  for (const choice& c : choices()) {
    CAPTURE(c.causal, c.softcap, c.alibi, c.sinks, c.score, c.lengths, c.d_lse, c.saved_lse, c.kv_heads, c.pattern);
    problem<Options> p = apply<Options>(c, queries, keys);
    // Its gradient is a sum of numbers that nearly cancel, each rounded to bf16 in products of such elements.
    if constexpr (sizeof(S) < sizeof(float)) p.options.relative_bias = {};
    check_backward<S>(p, c.d_lse, {.saved_lse = c.saved_lse});
  }
}

template <class S, class Options>
void check_shapes() {
  const std::array<idx_t, 2> both_lengths[] = {{0, 0},   {1, 1}, {2, 2},    {63, 63}, {65, 65}, {130, 130},
                                        {1, 300}, {5, 1}, {129, 60}, {0, 9},   {9, 0},   {48, 131}};
  const idx_t dims[] = {1, 3, 16, 33, 64};
  attn::execution three(3, 0);
  for (std::size_t n = 0; n < std::size(both_lengths); ++n) {
    const auto [queries, keys] = both_lengths[n];
    for (int pattern = 0; pattern < patterns; ++pattern) {
      const std::size_t step = static_cast<std::size_t>(pattern);
      problem_shape shape{.batch = 1, .heads = 4, .kv_heads = 2, .queries = queries, .keys = keys};
      shape.dim = dims[(n + step) % 5], shape.value_dim = dims[(n + 2 * step + 1) % 5];
      if (keys > 65 || keys == 1) shape.dim = n % 2 ? 3 : 9, shape.value_dim = n % 2 ? 8 : 5;
      problem<Options> p = problem_of<Options>(shape, pattern, n + 1);
      p.options.causal = (n + step) % 2 == 0;
      CAPTURE(queries, keys, shape.dim, shape.value_dim, pattern);
      check_backward<S>(p, true, {}, pattern % 2 ? &three : nullptr);
    }
  }
}

template <class T, class Options>
void check_each() {
  for (int pattern = 0; pattern < patterns; ++pattern) {
    CAPTURE(pattern);
    check_accumulate<T>(apply<Options>({true, true, true, true, true, true, true, true, 2, pattern}, 35, 35));
    check_each_alone<T>(apply<Options>({true, false, true, true, false, false, true, true, 2, pattern}, 35, 35));
  }
}

// An operator, by its options, in an element type.
template <class S, class Options>
struct operator_of {
  using type = S;
  using options = Options;
};
template <class Types, class... Options>
struct each_operator;
template <class... S, class... Options>
struct each_operator<std::tuple<S...>, Options...> {
  template <class T>
  using all = std::tuple<operator_of<T, Options>...>;
  using type = decltype(std::tuple_cat(all<S>{}...));
};
using in_exact_types = each_operator<exact_types, reference::block_options, reference::strided_options,
                                     reference::bigbird_options, reference::listed_options>::type;
using in_storage_types = each_operator<storage_types, reference::block_options, reference::strided_options,
                                       reference::bigbird_options>::type;

}  // namespace

TEMPLATE_LIST_TEST_CASE("patterns_backward: options in all pairs", "[patterns_backward]", in_exact_types) {
  check_choices<typename TestType::type, typename TestType::options>(21, 35);
  check_choices<typename TestType::type, typename TestType::options>(30, 13);
}

TEMPLATE_LIST_TEST_CASE("patterns_backward: 16-bit storage computes in float", "[patterns_backward]",
                        in_storage_types) {
  check_choices<typename TestType::type, typename TestType::options>(9, 17);
}

TEMPLATE_LIST_TEST_CASE("patterns_backward: odd lengths and dims", "[patterns_backward]", in_exact_types) {
  check_shapes<typename TestType::type, typename TestType::options>();
}

TEMPLATE_LIST_TEST_CASE("patterns_backward: gradients added, and each alone", "[patterns_backward]", in_exact_types) {
  check_each<typename TestType::type, typename TestType::options>();
}

}  // namespace testing::patterns_backward_tests
