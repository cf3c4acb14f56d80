// Queries by distance, which the keys are multiplied with: every pair of every kernel, alone and beside relative keys.
#include <attn/softmax/deberta_relative.hpp>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/run_backward.hpp"

namespace testing::position_queries_tests {
namespace {

constexpr problem_shape shape{.batch = 2, .queries = 40, .keys = 70, .dim = 9, .value_dim = 7};

template <class Problem>
Problem with_queries(const problem_shape& s, idx_t reach, bool one_table, bool relative_keys) {
  auto p = random_problem<Problem>(s, 7);
  p.options.position_queries = random_normal(5, 1, one_table ? 1 : p.q.heads(), 2 * reach + 1, s.dim);
  if (relative_keys) p.options.relative_keys = random_normal(6, 1, 1, 2 * 11 + 1, s.dim);
  return p;
}

}  // namespace

TEST_CASE("position queries are another product of every pair, within reach and beyond", "[position_queries]") {
  attn::execution threads(3, 0);
  for (idx_t reach : {0, 3, 50, 400})
    for (idx_t queries : {2, 40, 230})
      for (bool both : {false, true}) {
        CAPTURE(reach, queries, both);
        problem_shape s = shape;
        s.queries = queries, s.keys = std::max<idx_t>(queries, 70);
        auto p = with_queries<full_softmax_problem>(s, reach, reach == 3, both);
        p.options.causal = both, p.options.softcap = reach == 50 ? std::optional<double>(4) : std::nullopt;
        const auto e = errors_of<float>(p);
        CHECK(e.out <= tolerance<float>::out);
        CHECK(e.lse <= tolerance<float>::lse);
        CHECK(errors_of<Eigen::bfloat16>(p).out <= made_keys_tolerance<Eigen::bfloat16>::out);
        if (queries > 40) continue;
        check_backward<float>(p, true);
        check_backward<float>(p, true, {.saved_lse = false}, &threads);
        check_accumulate<float>(p);
        check_backward<Eigen::bfloat16>(p);
      }
  // More rows than a block, more keys than a segment, and a table that ends among them.
  const problem_shape long_shape{.batch = 1, .queries = 130, .keys = 600, .dim = 17};
  check_backward<float>(with_queries<full_softmax_problem>(long_shape, 350, false, true), true);
}

TEST_CASE("windows with position queries, dilated and with global tokens", "[position_queries]") {
  attn::execution threads(3, 0);
  for (const std::vector<idx_t>& dilation : {std::vector<idx_t>{1}, {1, 3, 2, 1}, {3}})
    for (const std::vector<idx_t>& globals : {std::vector<idx_t>{}, {2, 30, 57}})
      for (bool both : {false, true}) {
        CAPTURE(dilation, globals, both);
        auto p = with_queries<sliding_window_problem>(shape, both ? 5 : 60, !both, both);
        p.options.left = 6, p.options.right = 3, p.options.dilation = dilation, p.options.global_positions = globals;
        CHECK(errors_of<float>(p).out <= tolerance<float>::out);
        check_backward<float>(p, true);
        if (!both) continue;
        p.options.score = smooth_score{};
        check_backward<float>(p, true, {}, &threads);
        if (globals.empty()) continue;
        p.options.score = {};
        p.options.q_global = random_normal(11, 2, 4, 40, 9), p.options.k_global = random_normal(12, 2, 2, 70, 9),
        p.options.v_global = random_normal(13, 2, 2, 70, 7);
        check_backward<float>(p, true);
      }
}

TEST_CASE("gradients of position queries alone are what they are with the others", "[position_queries]") {
  check_each_alone<float>(with_queries<full_softmax_problem>(shape, 20, false, true));
  check_each_alone<float>(with_queries<full_softmax_problem>(shape, 20, true, false));
  auto p = with_queries<sliding_window_problem>(shape, 20, true, true);
  p.options.left = 4, p.options.right = 4, p.options.global_positions = {3};
  check_each_alone<float>(p);
}

TEST_CASE("a position query or key that is NaN reaches only those that read it", "[position_queries]") {
  auto p = with_queries<full_softmax_problem>(shape, 20, false, true);
  p.options.causal = true, p.options.query_lengths = {40, 30}, p.options.key_lengths = {70, 50};
  const auto poison = [&](double x) {
    for (idx_t d = 0; d < 9; ++d) {
      p.options.position_queries(0, 1, 25, d) = x;  // 5 keys ahead, which causal hides
      p.k(1, 0, 60, d) = x;                         // padding
      p.k(0, 1, 69, d) = x;                         // only the last query sees it
    }
  };
  poison(0);
  const reference::result clean = run<float>(p);
  const gradient_case c = case_of(p, true);
  tensors d = random_gradients(c.forward(independent(c.inputs)));
  round_results<float>(d);
  for (idx_t h : {2, 3}) {
    for (idx_t x = 0; x < 7; ++x) d[0](0, h, 39, x) = 0;
    d[1](0, h, 39, 0) = 0;
  }
  const named_tensors clean_gradients = library_gradients<float>(p, c, d);
  poison(std::nan(""));
  const reference::result found = run<float>(p);
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 4; ++h)
      for (idx_t i = 0; i < 40; ++i)
        for (idx_t x = 0; x < 7; ++x)
          if (b == 1 || h < 2 || i < 39) CHECK(found.out(b, h, i, x) == clean.out(b, h, i, x));
  CHECK(std::isnan(found.out(0, 2, 39, 0)));
  // Gradients of the other item, and of the other key head, have no NaN.
  const named_tensors gradients = library_gradients<float>(p, case_of(p, true), d);
  for (const char* name : {"q", "k", "v"}) {
    CAPTURE(name);
    const tensor<double>&x = gradients.at(name), &y = clean_gradients.at(name);
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t i = 0; i < x.length(); ++i)
        for (idx_t e = 0; e < x.dim(); ++e) {
          CHECK(std::abs(x(1, h, i, e) - y(1, h, i, e)) <= 1e-5);
          if (h < x.heads() / 2) CHECK(std::abs(x(0, h, i, e) - y(0, h, i, e)) <= 1e-5);
        }
  }
}

TEST_CASE("steps with position queries are rows of the whole call", "[position_queries]") {
  const idx_t length = 30;
  const tensor<float> q = cast<float>(random_normal(1, 1, 4, length, 8)),
                      k = cast<float>(random_normal(2, 1, 2, length, 8)),
                      v = cast<float>(random_normal(3, 1, 2, length, 8)),
                      r = cast<float>(random_normal(5, 1, 4, 2 * 11 + 1, 8));
  const attn::tensor_view<const float, 3> table(r.data.data(), {4, r.length(), 8});
  tensor<float> out(1, 4, length, 8), wanted(1, 4, length, 8);
  attn::full_softmax(view(q), view(k), view(v), view(wanted), {.causal = true, .position_queries = table});
  attn::kv_cache<float> cache({.batch = 1, .heads = 2, .dim = 8});
  attn::kv_cache<Eigen::half> small({.batch = 1, .heads = 2, .dim = 8});
  attn::kv_cache<std::int8_t> codes({.batch = 1, .heads = 2, .dim = 8});
  attn::sliding_window_cache<float> ring({.batch = 1, .heads = 2, .dim = 8}, {.left = length});
  for (idx_t t = 0, n; t < length; t += n) {
    n = std::min<idx_t>(t % 7 + 1, length - t);
    const auto part = [&](auto x) { return x.slice(2, t, n); };
    const auto check = [&](auto& to, double tolerance) {
      if constexpr (std::is_same_v<decltype(to), decltype(ring)&>)
        attn::sliding_window_step(to, part(view(q)), part(view(k)), part(view(v)), part(view(out)),
                                  {.position_queries = table});
      else
        attn::full_softmax_step(to, part(view(q)), part(view(k)), part(view(v)), part(view(out)),
                                {.position_queries = table});
      CHECK(relative_error(cast<double>(rows(out, t, n)), cast<double>(rows(wanted, t, n))) <= tolerance);
    };
    check(cache, 1e-6), check(ring, 1e-6);
    check(small, 2e-3);  // keys and values in half: 2^-11 of them
    check(codes, 5e-2);  // in 8 bits
  }
}

TEST_CASE("DeBERTa's buckets", "[position_queries]") {
  // Of 8 on each side for 16 positions, as the model's own function has them: 4 + ceil(3 log(d / 4) / log(15 / 4)).
  const idx_t buckets[] = {0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7};
  for (idx_t distance = 0; distance < 18; ++distance) {
    CAPTURE(distance);
    CHECK(attn::deberta_bucket(distance, 8, {.max_position = 16}) == 8 + buckets[distance]);
    CHECK(attn::deberta_bucket(-distance, 8, {.max_position = 16}) == 8 - buckets[distance]);
    CHECK(attn::deberta_bucket(distance, 8) == std::min<idx_t>(8 + distance, 15));
    CHECK(attn::deberta_bucket(-distance, 8) == std::max<idx_t>(8 - distance, 0));
  }
  CHECK(attn::deberta_bucket(129, 256, {.max_position = 512}) == 256 + 129);
  CHECK(attn::deberta_bucket(100000, 256, {.max_position = 512}) == 511);
  CHECK(attn::deberta_bucket(-511, 256, {.max_position = 512}) == 1);

  const idx_t heads = 3, n = 8, reach = 20, dim = 5, rows = 2 * reach + 1;
  std::vector<double> rows_of(heads * 2 * n * dim), table(heads * rows * dim), d_table(table.size()),
      d_rows(rows_of.size(), 7);
  random_source random(3);
  for (auto* x : {&rows_of, &d_table})
    for (double& number : *x) number = random.normal();
  const auto product = [](const std::vector<double>& x, const std::vector<double>& y) {
    double sum = 0;
    for (std::size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
    return sum;
  };
  for (const attn::deberta_relative_options& options :
       {attn::deberta_relative_options{}, attn::deberta_relative_options{.max_position = 16}}) {
    const attn::tensor_view<double, 3> to(table.data(), {heads, rows, dim}), back(d_rows.data(), {heads, 2 * n, dim});
    attn::deberta_relative<double>({rows_of.data(), {heads, 2 * n, dim}}, to, options);
    CHECK(to(1, reach - 7, 2) == rows_of[static_cast<std::size_t>((2 * n + n + (options.max_position ? 6 : 7)) * dim + 2)]);
    for (int times : {1, 2}) {
      attn::deberta_relative_backward<double>({d_table.data(), {heads, rows, dim}}, back, options, times == 2);
      CHECK(std::abs(product(rows_of, d_rows) - times * product(table, d_table)) <=
            1e-12 * static_cast<double>(table.size()));
    }
    const auto refuses = [&](idx_t h, idx_t some, idx_t d, idx_t entries, std::optional<idx_t> max_position) {
      const std::string message = refusal([&] {
        attn::deberta_relative<double>({rows_of.data(), {h, some, d}}, {table.data(), {heads, entries, dim}},
                                       {.max_position = max_position});
      });
      INFO(message);
      CHECK(well_formed(message, "deberta_relative"));
      CHECK(well_formed(refusal([&] {
                          attn::deberta_relative_backward<double>({table.data(), {heads, entries, dim}},
                                                                  {d_rows.data(), {h, some, d}},
                                                                  {.max_position = max_position});
                        }),
                        "deberta_relative_backward"));
    };
    refuses(1, 2 * n, dim, rows, 16);
    refuses(heads, 2 * n, dim - 1, rows, 16);
    refuses(heads, 2 * n, dim, rows - 1, 16);
    refuses(heads, 2 * n - 1, dim, rows, std::nullopt);
    refuses(heads, 0, dim, rows, std::nullopt);
    refuses(heads, 2, dim, rows, 16);
    refuses(heads, 2 * n, dim, rows, 5);
  }
}

}  // namespace testing::position_queries_tests
