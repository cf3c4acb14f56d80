// linformer_backward against the reverse pass of its reference: projections for all heads and per head, lengths,
// shapes, types, lse; what is not asked for, padding, threads, batches.
#include "support/call_low_rank.hpp"
#include "support/low_rank_gradient.hpp"

namespace testing::linformer_backward_tests {
namespace {

template <class S>
struct form {
  using problem = linformer_problem;
  static constexpr bool has_lse = true;

  static gradient_case case_of(const problem& p) {
    gradient_case c{"linformer", {"q", "k", "v", "e", "f"}, {p.q, p.k, p.v, p.options.e, p.options.f}, {}};
    c.forward = [o = p.options](const std::vector<tensor<variable>>& x) {
      reference::basic_linformer_options<variable> options;
      reference::copy_choices(o, options);
      options.e = x[3], options.f = x[4];
      const auto result = reference::linformer(x[0], x[1], x[2], options);
      return std::vector{result.out, result.lse};
    };
    return c;
  }

  struct memory {
    tensor<S> q, k, v, e, f;

    memory(const problem& p, double before)
        : q(filled<S>(p.q, before)),
          k(filled<S>(p.k, before)),
          v(filled<S>(p.v, before)),
          e(filled<S>(p.options.e, before)),
          f(filled<S>(p.options.f, before)) {}
    attn::linformer_gradients<S> views() {
      return {.q = view(q), .k = view(k), .v = view(v), .e = heads_view(e), .f = heads_view(f)};
    }
    tensors all() const {
      return {cast<double>(q), cast<double>(k), cast<double>(v), cast<double>(e), cast<double>(f)};
    }
    static attn::tensor_view<S, 3> heads_view(tensor<S>& x) {
      return {x.data.data(), {x.heads(), x.length(), x.dim()}};
    }
  };
  static void keep(attn::linformer_gradients<S>& g, std::size_t n) {
    if (n != 0) g.q = {};
    if (n != 1) g.k = {};
    if (n != 2) g.v = {};
    if (n != 3) g.e = {};
    if (n != 4) g.f = {};
  }
  static void call(const problem& p, const tensors& d_results, attn::linformer_gradients<S> wanted,
                   attn::execution& execution) {
    const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), e = cast<S>(p.options.e),
                    f = cast<S>(p.options.f), d = cast<S>(d_results[0]);
    const tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(NAN));  // not read
    const tensor<real<S>> d_lse = cast<real<S>>(d_results[1]);
    wanted.d_lse = {d_lse.data.data(), {q.batch(), q.heads(), q.length()}};
    attn::linformer_options<S> options;
    const key_mask_bytes seen(p.options.key_mask);
    copy_common(p.options, options, seen);
    compiled_linformer<S>::backward(view(q), view(k), view(v), view(out), testing::heads_view(e),
                                    testing::heads_view(f), view(d), wanted, options, execution);
  }
};

enum class lengths { none, both, queries_and_keys, keys_only };

linformer_problem problem_of(const problem_shape& s, idx_t rank, bool e_per_head, bool f_per_head) {
  linformer_problem p = random_problem<linformer_problem>(s, 1);
  const double size = 1 / std::sqrt(static_cast<double>(std::max<idx_t>(1, s.keys)));
  p.options.e = random_normal(50, 1, e_per_head ? s.heads : 1, rank, s.keys, size);
  p.options.f = random_normal(51, 1, f_per_head ? s.heads : 1, rank, s.keys, size);
  return p;
}
linformer_problem with_lengths(lengths given, idx_t rank, bool e_per_head, bool f_per_head) {
  problem_shape shape{.queries = 30, .keys = 37, .dim = 9, .value_dim = 12};
  if (given == lengths::both) shape.queries = shape.keys;
  linformer_problem p = problem_of(shape, rank, e_per_head, f_per_head);
  if (given == lengths::both) p.options.lengths = {23, 37};
  if (given == lengths::queries_and_keys) p.options.query_lengths = {30, 5}, p.options.key_lengths = {7, 34};
  if (given == lengths::keys_only) p.options.key_lengths = {0, 36};
  return p;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("linformer_backward: kinds of projections and lengths", "[linformer_backward]", all_types) {
  for (bool e_per_head : {false, true})
    for (bool f_per_head : {false, true})
      for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys, lengths::keys_only}) {
        linformer_problem p = with_lengths(given, 7, e_per_head, f_per_head);
        if (e_per_head) p.options.scale = 0.3;
        CAPTURE(e_per_head, f_per_head, int(given));
        check_form<form<TestType>, TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("linformer_backward: odd lengths, dims and ranks", "[linformer_backward]", exact_types) {
  const idx_t sizes[] = {0, 1, 2, 7, 16, 63, 130, 150}, dims[] = {1, 3, 8, 16, 33, 64, 80};
  for (std::size_t n = 0; n < std::size(sizes); ++n)
    for (idx_t rank : {1, 2, 13, 70}) {
      problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = sizes[(3 * n + 1) % 8], .keys = sizes[n]};
      shape.dim = dims[(n + static_cast<std::size_t>(rank)) % 7], shape.value_dim = dims[(3 * n) % 7];
      CAPTURE(shape.queries, shape.keys, shape.dim, shape.value_dim, rank);
      check_form<form<TestType>, TestType>(problem_of(shape, rank, n % 2, n % 3));
    }
}

TEMPLATE_LIST_TEST_CASE("linformer_backward: grouped queries, waves, empty batches and heads", "[linformer_backward]",
                        exact_types) {
  for (auto [batch, heads, kv_heads] :
       {std::array<idx_t, 3>{0, 4, 2}, {2, 0, 0}, {1, 1, 1}, {2, 6, 1}, {1, 6, 3}, {3, 3, 3}, {5, 16, 16}})
    for (bool per_head : {false, true}) {
      CAPTURE(batch, heads, kv_heads, per_head);
      const problem_shape shape{
          .batch = batch, .heads = heads, .kv_heads = kv_heads, .queries = 9, .keys = 21, .dim = 4, .value_dim = 3};
      check_form<form<TestType>, TestType>(problem_of(shape, 5, per_head && heads > 0, false));
    }
}

TEMPLATE_LIST_TEST_CASE("linformer_backward: blocks and pieces", "[linformer_backward][long]", exact_types) {
  check_form<form<TestType>, TestType>(
      problem_of({.batch = 2, .heads = 2, .kv_heads = 1, .queries = 300, .keys = 290, .dim = 16}, 40, false, true));
  check_form<form<TestType>, TestType>(problem_of(
      {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 4200, .keys = 600, .dim = 4, .value_dim = 3}, 8, true, true));
}

TEST_CASE("linformer_backward: the reference against central differences", "[linformer_backward]") {
  for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys})
    check_central_differences(form<double>::case_of(with_lengths(given, 5, true, false)));
}

TEMPLATE_LIST_TEST_CASE("linformer_backward: one gradient alone, and none", "[linformer_backward]", exact_types) {
  for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys, lengths::keys_only})
    for (bool per_head : {false, true}) check_form_alone<form<TestType>>(with_lengths(given, 7, per_head, per_head));
}

TEMPLATE_LIST_TEST_CASE("linformer_backward: adds to what is there", "[linformer_backward]", all_types) {
  for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys, lengths::keys_only})
    for (bool per_head : {false, true})
      check_form_accumulates<form<TestType>, TestType>(with_lengths(given, 7, per_head, per_head));
}

TEMPLATE_LIST_TEST_CASE("linformer_backward: padding, threads and batches change no bit", "[linformer_backward]",
                        exact_types) {
  for (bool per_head : {false, true}) {
    linformer_problem p = problem_of({.batch = 3, .queries = 150, .keys = 150}, 16, per_head, per_head);
    p.options.lengths = {150, 12, 77};
    check_form_threads_and_padding<form<TestType>>(p);
    check_form_independent<form<TestType>>(p, [&](linformer_problem& one, idx_t, idx_t first, idx_t count) {
      if (!per_head) return;
      one.options.e = heads_of_item(p.options.e, 0, first, count);
      one.options.f = heads_of_item(p.options.f, 0, first, count);
    });
  }
}

TEMPLATE_LIST_TEST_CASE("linformer_backward: keys that are hidden", "[linformer_backward][key_mask]", all_types) {
  for (bool per_head : {false, true})
    for (idx_t hidden : {-1, 0, 1})
      for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys}) {
        linformer_problem p = with_lengths(given, 7, per_head, false);
        p.options.key_mask = gapped_key_mask(given == lengths::none && hidden < 0 ? 1 : 2, 37, hidden);
        CAPTURE(per_head, hidden, int(given));
        check_form<form<TestType>, TestType>(p);
        check_form_hidden<form<TestType>>(p);
      }
  linformer_problem p =
      problem_of({.batch = 3, .heads = 4, .kv_heads = 1, .queries = 130, .keys = 300, .dim = 16}, 40, false, true);
  p.options.key_mask = random_key_mask(1, 3, 300);
  check_form<form<TestType>, TestType>(p);
  check_form_accumulates<form<TestType>, TestType>(p);
  check_form_hidden<form<TestType>>(p);
}

TEST_CASE("linformer_backward: columns of E and F of keys that nobody sees", "[linformer_backward][key_mask]") {
  linformer_problem p = with_lengths(lengths::none, 7, true, false);
  p.options.key_mask = gapped_key_mask(1, 37);
  for (double& x : p.q.data) x = std::numeric_limits<double>::quiet_NaN();  // then no gradient of a projection is finite
  attn::execution serial;
  const tensors all = run_gradients<form<float>>(p, random_d_results<form<float>>(p), serial);
  for (std::size_t n : {3, 4})
    for (idx_t h = 0; h < all[n].heads(); ++h)
      for (idx_t r = 0; r < 7; ++r)
        for (idx_t j = 0; j < 37; ++j)
          CHECK((all[n](0, h, r, j) == 0) == reference::key_hidden(p.options.key_mask, 0, j));
}

TEST_CASE("linformer_backward: E that is F has a gradient of each", "[linformer_backward]") {
  linformer_problem p = problem_of({.batch = 2, .queries = 40, .keys = 50}, 9, false, false);
  p.options.f = p.options.e;
  attn::execution serial;
  const tensors apart = run_gradients<form<float>>(p, random_d_results<form<float>>(p), serial);
  const tensors d_results = random_d_results<form<float>>(p);
  const tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v), e = cast<float>(p.options.e),
                      d = cast<float>(d_results[0]), d_lse = cast<float>(d_results[1]);
  const tensor<float> out(q.batch(), q.heads(), q.length(), v.dim());
  form<float>::memory stored(p, 7);
  auto wanted = stored.views();
  wanted.d_lse = {d_lse.data.data(), {2, 4, 40}};
  compiled_linformer<float>::backward(view(q), view(k), view(v), view(out), heads_view(e), heads_view(e), view(d),
                                      wanted, {}, serial);
  CHECK(stored.all() == apart);
}

TEST_CASE("linformer_backward: on Eigen matrices, as a caller writes it", "[linformer_backward]") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(90, 8), v = Eigen::MatrixXf::Random(90, 5),
                        e = Eigen::MatrixXf::Random(7, 90), d_out = Eigen::MatrixXf::Random(90, 5);
  Eigen::MatrixXf out(90, 5), dq(90, 8), de(7, 90), more(7, 90);
  attn::linformer(q, q, v, out, e, e);
  attn::linformer_backward(q, q, v, out, e, e, d_out, {.q = dq, .e = de}, {.scale = 0.4f});
  attn::execution serial;
  attn::linformer_backward(q, q, v, out, e, e, d_out, {.e = more}, {.scale = 0.4f}, serial);
  CHECK(de == more);
  attn::linformer_backward(q, q, v, out, e, e, d_out, {.e = more}, serial);
  CHECK(de != more);
}

TEST_CASE("linformer_backward: extreme scores", "[linformer_backward]") {
  linformer_problem p = problem_of({.batch = 1, .queries = 40, .keys = 50}, 9, false, false);
  for (double& x : p.q.data) x *= 3000;
  attn::execution serial;
  for (const auto& g : run_gradients<form<float>>(p, random_d_results<form<float>>(p), serial)) CHECK(all_finite(g));
}

}  // namespace testing::linformer_backward_tests
