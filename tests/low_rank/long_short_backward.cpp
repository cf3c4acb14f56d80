// long_short_backward against the reverse pass of its reference: every option with every other, odd lengths, all types;
// what is not asked for, padding, threads, batches.
#include "support/low_rank_gradient.hpp"
#include "support/pairwise.hpp"
#include "support/run_long_short.hpp"

namespace testing::long_short_backward_tests {

namespace {

// f(name, x) for all that is given and has a gradient.
template <class Options, class F>
void each_list(Options& o, F&& f) {
  f("local_gamma", o.local_gamma), f("local_beta", o.local_beta);
  f("global_gamma", o.global_gamma), f("global_beta", o.global_beta), f("sinks", o.sinks);
}

template <class S>
struct form {
  using problem = long_short_problem;
  static constexpr bool has_lse = true;

  static gradient_case case_of(const problem& p) {
    gradient_case c{"long_short", {"q", "k", "v", "logits"}, {p.q, p.k, p.v, p.options.logits}, {}};
    each_list(p.options, [&](const char* name, const std::vector<double>& x) {
      if (x.empty()) return;
      c.names.push_back(name);
      c.inputs.emplace_back(1, 1, 1, std::ssize(x));
      c.inputs.back().data = x;
    });
    c.forward = [o = p.options](const std::vector<tensor<variable>>& x) {
      reference::basic_long_short_options<variable> options;
      reference::copy_choices(o, options);
      options.left = o.left, options.right = o.right, options.block = o.block, options.segment = o.segment;
      options.norm_eps = o.norm_eps, options.logits = x[3];
      std::vector<bool> given;
      each_list(o, [&](const char*, const auto& list) { given.push_back(!list.empty()); });
      std::size_t at = 4, n = 0;
      each_list(options, [&](const char*, std::vector<variable>& list) {
        if (given[n++]) list = x[at++].data;
      });
      const auto result = reference::long_short(x[0], x[1], x[2], options);
      return std::vector{result.out, result.lse};
    };
    return c;
  }

  struct memory {
    tensor<S> q, k, v, logits;
    std::vector<real<S>> lists[5];

    memory(const problem& p, double before)
        : q(filled<S>(p.q, before)),
          k(filled<S>(p.k, before)),
          v(filled<S>(p.v, before)),
          logits(filled<S>(p.options.logits, before)) {
      std::size_t n = 0;
      each_list(p.options,
                [&](const char*, const auto& x) { lists[n++].assign(x.size(), static_cast<real<S>>(before)); });
    }
    attn::long_short_gradients<S> views() {
      attn::long_short_gradients<S> g{.q = view(q), .k = view(k), .v = view(v), .logits = view(logits)};
      std::size_t n = 0;
      each_list(g, [&](const char*, auto& x) {
        if (auto& list = lists[n++]; !list.empty()) x = list;
      });
      return g;
    }
    tensors all() const {
      tensors all{cast<double>(q), cast<double>(k), cast<double>(v), cast<double>(logits)};
      for (const auto& x : lists)
        if (!x.empty()) {
          all.emplace_back(1, 1, 1, std::ssize(x));
          all.back().data = cast<double>(x);
        }
      return all;
    }
  };
  static void keep(attn::long_short_gradients<S>& g, std::size_t n) {
    if (n != 0) g.q = {};
    if (n != 1) g.k = {};
    if (n != 2) g.v = {};
    if (n != 3) g.logits = {};
    std::size_t at = 4;
    each_list(g, [&](const char*, auto& x) {
      if (x && at++ != n) x = {};
    });
  }
  static void call(const problem& p, const tensors& d_results, attn::long_short_gradients<S> wanted,
                   attn::execution& execution) {
    common_softmax_options<S, attn::long_short_options<S>> stored(p.options);
    const auto& from = p.options;
    auto& o = stored.options;
    o.left = from.left, o.right = from.right, o.block = from.block, o.segment = from.segment;
    const std::vector<real<S>> lists[] = {cast<real<S>>(from.local_gamma), cast<real<S>>(from.local_beta),
                                          cast<real<S>>(from.global_gamma), cast<real<S>>(from.global_beta)};
    o.local_gamma = lists[0], o.local_beta = lists[1], o.global_gamma = lists[2], o.global_beta = lists[3];
    o.norm_eps = static_cast<real<S>>(from.norm_eps);
    const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), logits = cast<S>(from.logits),
                    d = cast<S>(d_results[0]);
    tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
    tensor<real<S>> lse(q.batch(), q.heads(), q.length(), 1, real<S>(7));
    o.lse = row_view(lse);
    attn::execution of_forward;
    compiled_long_short<S>::call(view(q), view(k), view(v), view(out), view(logits), o, of_forward);
    if (without_lse) o.lse = {};
    const tensor<real<S>> d_lse = cast<real<S>>(d_results[1]);
    wanted.d_lse = {d_lse.data.data(), {q.batch(), q.heads(), q.length()}};
    compiled_long_short<S>::backward(view(q), view(k), view(v), view(std::as_const(out)), view(logits), view(d), wanted,
                                     o, execution);
  }
  static inline bool without_lse = false;
};

long_short_problem problem_of(const problem_shape& s, idx_t rank, std::uint64_t seed = 1) {
  long_short_problem p = random_problem<long_short_problem>(s, seed);
  p.options.logits = random_normal(seed + 1000, s.batch, s.heads, s.keys, rank);
  return p;
}

// Bits beyond the common ones: 64 block, 128 local norm, 256 global norm, 512 their shifts.
long_short_problem problem_of_choice(int choice, idx_t queries, idx_t keys) {
  const bool norms = choice & (128 | 256);
  long_short_problem p =
      problem_of({.queries = queries, .keys = keys, .dim = 9, .value_dim = norms ? idx_t(9) : idx_t(12)}, 3);
  auto& o = p.options;
  choose(o, choice, queries, keys);
  o.alibi_slopes = {}, o.score = {};
  o.left = 4, o.right = 3;
  if (o.causal) o.segment = 8;
  if (choice & 64) o.block = 5;
  if (choice & 128) o.local_gamma = random_values(1, 9);
  if (choice & 256) o.global_gamma = random_values(2, 9);
  if ((choice & 512) && (choice & 128)) o.local_beta = random_values(3, 9);
  if ((choice & 512) && (choice & 256)) o.global_beta = random_values(4, 9);
  return p;
}
std::vector<int> choices() {
  std::vector<int> list;
  for (int choice : selected_bits(10, true))
    if (!(choice & (8 | 16))) list.push_back(choice);
  for (int choice : {0, 1, 128, 256, 129, 257, 960, 1023 - 24}) list.push_back(choice);
  return list;
}

// Sums of one number per head, and of one per channel over all tokens, in which most cancels; and what passes norms.
template <class S>
void check(const long_short_problem& p) {
  check_form<form<S>, S>(p, sizeof(S) == 2 ? 1 : 4);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("long_short_backward: combinations of options", "[long_short_backward]", all_types) {
  for (int choice : choices()) {
    form<TestType>::without_lse = choice & 2;
    CAPTURE(choice);
    check<TestType>(problem_of_choice(choice, 30, 30));
    check<TestType>(problem_of_choice(choice, 21, 28));
  }
  form<TestType>::without_lse = false;
}

TEMPLATE_LIST_TEST_CASE("long_short_backward: odd lengths, dims, ranks and segments", "[long_short_backward]",
                        exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 130, 290}, dims[] = {1, 3, 8, 16, 33, 64}, ranks[] = {0, 1, 5, 13, 40};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t c = 0; c < std::size(ranks); ++c) {
      problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + c) % 6], shape.value_dim = dims[(n + 3 * c) % 6];
      if (c == 2) shape.queries = lengths[(n + 3) % 8];
      long_short_problem p = problem_of(shape, ranks[c], n + 1);
      auto& o = p.options;
      o.left = 20, o.right = 9, o.block = c % 2 ? 0 : 24;
      if ((n + c) % 2) o.causal = true, o.segment = 1 + static_cast<idx_t>(37 * n + 11 * c) % 200;
      CAPTURE(shape.queries, shape.keys, shape.dim, shape.value_dim, ranks[c], o.causal, o.segment);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("long_short_backward: blocks, parts and pieces", "[long_short_backward][long]", exact_types) {
  for (bool causal : {false, true}) {
    long_short_problem p =
        problem_of({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 4200, .keys = 4300, .dim = 3, .value_dim = 3}, 2);
    auto& o = p.options;
    o.left = 12, o.right = 7;
    o.local_gamma = random_values(1, 3), o.global_gamma = random_values(2, 3), o.global_beta = random_values(3, 3);
    if (causal) o.causal = true, o.segment = 600;
    check<TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("long_short_backward: grouped queries, empty batches and heads", "[long_short_backward]",
                        exact_types) {
  for (auto [batch, heads, kv_heads] :
       {std::array<idx_t, 3>{0, 4, 2}, {2, 0, 0}, {1, 1, 1}, {2, 6, 1}, {1, 6, 3}, {3, 3, 3}}) {
    long_short_problem p = problem_of(
        {.batch = batch, .heads = heads, .kv_heads = kv_heads, .queries = 25, .keys = 31, .dim = 8, .value_dim = 8}, 5);
    p.options.left = 6, p.options.right = 2;
    p.options.global_gamma = random_values(2, 8);
    CAPTURE(batch, heads, kv_heads);
    check<TestType>(p);
  }
}

TEST_CASE("long_short_backward: the reference against central differences", "[long_short_backward]") {
  for (int choice : {0, 33, 6, 64 + 128 + 512, 1 + 256 + 512, 960 + 6}) {
    CAPTURE(choice);
    check_central_differences(form<double>::case_of(problem_of_choice(choice, 21, 28)));
  }
}

TEMPLATE_LIST_TEST_CASE("long_short_backward: one gradient alone, and none", "[long_short_backward]", exact_types) {
  for (int choice : {0, 33, 4, 4 + 64 + 128 + 512, 1 + 4 + 256 + 512, 4 + 32 + 960}) {
    CAPTURE(choice);
    check_form_alone<form<TestType>>(problem_of_choice(choice, 21, 28));
  }
}

TEMPLATE_LIST_TEST_CASE("long_short_backward: adds to what is there", "[long_short_backward]", all_types) {
  for (int choice : {0, 33, 4 + 64 + 128 + 512, 1 + 256 + 512})
    check_form_accumulates<form<TestType>, TestType>(problem_of_choice(choice, 21, 28));
}

TEMPLATE_LIST_TEST_CASE("long_short_backward: padding, threads and batches change no bit", "[long_short_backward]",
                        exact_types) {
  for (bool causal : {false, true})
    for (bool norms : {false, true}) {
      long_short_problem p = problem_of({.batch = 3, .queries = 500, .keys = 500, .dim = 16}, 10);
      auto& o = p.options;
      o.lengths = {500, 12, 377};
      o.left = 40, o.right = 9;
      if (causal) o.causal = true, o.segment = 20;
      if (norms) o.local_gamma = random_values(1, 16), o.global_gamma = random_values(2, 16);
      CAPTURE(causal, norms);
      check_form_threads_and_padding<form<TestType>>(p);
      check_form_independent<form<TestType>>(p, [&](long_short_problem& one, idx_t b, idx_t first, idx_t count) {
        one.options.logits = heads_of_item(p.options.logits, b, first, count);
      });
    }
}

TEMPLATE_LIST_TEST_CASE("long_short_backward: keys that are hidden", "[long_short_backward][key_mask]", all_types) {
  for (int choice : choices())
    for (idx_t hidden : {-1, 1}) {
      // With few keys left, the gradient of one number nearly cancels: beside its rounding to 16 bits nothing shows.
      if (sizeof(TestType) < sizeof(float) && hidden > 0) continue;
      form<TestType>::without_lse = choice & 2;
      long_short_problem p = problem_of_choice(choice, 21, 28);
      p.options.key_mask = gapped_key_mask(hidden < 0 && (choice & 1) ? 1 : 2, 28, hidden);
      CAPTURE(choice, hidden);
      check<TestType>(p);
      if (choice & (2 | 256)) check_form_hidden<form<TestType>>(p);
    }
  form<TestType>::without_lse = false;
  for (bool causal : {false, true}) {
    long_short_problem p = problem_of({.batch = 3, .heads = 4, .kv_heads = 1, .queries = 130, .keys = 600, .dim = 16}, 5);
    auto& o = p.options;
    o.left = 30, o.right = 9, o.local_gamma = random_values(1, 16), o.global_gamma = random_values(2, 16);
    if (causal) o.causal = true, o.segment = 20;
    o.key_mask = random_key_mask(1, 3, 600);
    check<TestType>(p);
    check_form_accumulates<form<TestType>, TestType>(p);
    check_form_hidden<form<TestType>>(p);
  }
}

TEST_CASE("long_short_backward: through norms of keys and values without spread", "[long_short_backward]") {
  long_short_problem p = problem_of({.queries = 20, .keys = 20, .dim = 77, .value_dim = 77}, 3);
  for (tensor<double>* x : {&p.k, &p.v})  // every other token
    for (std::size_t n = 0; n < x->data.size(); ++n)
      if (n / 77 % 2 == 0) x->data[n] = 3.3;
  p.options.local_gamma.assign(77, 1), p.options.global_gamma.assign(77, 1), p.options.norm_eps = 1e-12;
  check<float>(p);
}

TEST_CASE("long_short_backward: on Eigen matrices, as a caller writes it", "[long_short_backward]") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(90, 8), v = Eigen::MatrixXf::Random(90, 8),
                        p = Eigen::MatrixXf::Random(90, 3), d_out = Eigen::MatrixXf::Random(90, 8);
  const std::vector<float> gamma(8, 1.5f);
  Eigen::VectorXf d_gamma(8);
  Eigen::MatrixXf out(90, 8), dq(90, 8), dp(90, 3), more(90, 3);
  attn::long_short(q, q, v, out, p, {.left = 5, .local_gamma = gamma});
  attn::long_short_backward(q, q, v, out, p, d_out, {.q = dq, .logits = dp, .local_gamma = d_gamma},
                            {.left = 5, .local_gamma = gamma});
  attn::execution serial;
  attn::long_short_backward(q, q, v, out, p, d_out, {.logits = more}, {.left = 5, .local_gamma = gamma}, serial);
  CHECK(dp == more);
  attn::long_short_backward(q, q, v, out, p, d_out, {.logits = more}, serial);  // another window, no norm
  CHECK(dp != more);
}

TEST_CASE("long_short_backward: extremes", "[long_short_backward]") {
  long_short_problem p = problem_of_choice(64, 30, 30);
  for (double& x : p.q.data) x *= 3000;
  for (double& x : p.options.logits.data) x *= 3000;
  for (idx_t t = 0; t < 30; ++t) p.options.logits(0, 0, t, 1) = -reference::infinity;  // a compressed key of no token
  attn::execution serial;
  for (const auto& g : run_gradients<form<float>>(p, random_d_results<form<float>>(p), serial)) CHECK(all_finite(g));
}

}  // namespace testing::long_short_backward_tests
