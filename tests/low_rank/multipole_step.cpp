// multipole_step against the causal form: token by token and in chunks, after append, truncate, reset and copies.
#include "reference/multipole.hpp"

#include "support/cache_items.hpp"
#include "support/call_multipole.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/run_multipole.hpp"

namespace testing::multipole_step_tests {
namespace {

struct step_case {
  multipole_problem p;
  attn::multipole_cache_options cache;

  step_case(const problem_shape& s, idx_t seed = 1)
      : p(random_problem<multipole_problem>(s, static_cast<std::uint64_t>(seed))) {
    cache = {.exact = 7, .clusters = 5, .candidate_clusters = 3, .segment = 16, .seed = 4};
  }
  // The causal form of the whole sequence.
  template <class S>
  reference::result whole() const {
    multipole_problem all = p;
    auto& o = all.options;
    o.causal = true, o.block = o.probe = o.lookback = 1;
    o.exact = cache.exact, o.clusters = cache.clusters, o.segment = cache.segment;
    o.candidate_clusters = cache.candidate_clusters, o.iterations = cache.iterations;
    o.starts = drawn_starts(cache.seed);
    return reference::multipole(rounded<S>(all.q), rounded<S>(all.k), rounded<S>(all.v), o);
  }
};

// Feeds tokens [begin, begin + count) and writes their rows.
template <class S>
void feed(attn::multipole_cache<S>& cache, const step_case& c, idx_t begin, idx_t count, reference::result& into,
          attn::execution& exec) {
  const auto part = [&](const tensor<double>& x) {
    tensor<S> to(x.batch(), x.heads(), count, x.dim());
    for (idx_t b = 0; b < x.batch(); ++b)
      for (idx_t h = 0; h < x.heads(); ++h)
        for (idx_t i = 0; i < count; ++i)
          for (idx_t d = 0; d < x.dim(); ++d) to(b, h, i, d) = static_cast<S>(x(b, h, begin + i, d));
    return to;
  };
  const tensor<S> q = part(c.p.q), k = part(c.p.k), v = part(c.p.v);
  tensor<S> out(q.batch(), q.heads(), count, v.dim(), S(7));
  tensor<real<S>> lse(q.batch(), q.heads(), count, 1, real<S>(7));
  const std::vector<real<S>> sinks = cast<real<S>>(c.p.options.sinks);
  attn::multipole_step_options<S> options{.sinks = sinks, .lse = row_view(lse)};
  if (c.p.options.scale) options.scale = static_cast<real<S>>(*c.p.options.scale);
  if (c.p.options.softcap) options.softcap = static_cast<real<S>>(*c.p.options.softcap);
  compiled_multipole<S>::step(cache, view(q), view(k), view(v), view(out), options, exec);
  for (idx_t b = 0; b < q.batch(); ++b)
    for (idx_t h = 0; h < q.heads(); ++h)
      for (idx_t i = 0; i < count; ++i) {
        for (idx_t d = 0; d < v.dim(); ++d) into.out(b, h, begin + i, d) = static_cast<double>(out(b, h, i, d));
        into.lse(b, h, begin + i, 0) = static_cast<double>(lse(b, h, i, 0));
      }
}

template <class S>
reference::result fed(const step_case& c, idx_t chunk, attn::execution& exec) {
  attn::multipole_cache<S> cache(
      {.batch = c.p.k.batch(), .heads = c.p.k.heads(), .dim = c.p.k.dim(), .value_dim = c.p.v.dim()}, c.cache);
  reference::result into = reference::empty_result(c.p.q, c.p.v);
  const idx_t n = c.p.q.length();
  for (idx_t begin = 0; begin < n; begin += chunk) feed<S>(cache, c, begin, std::min(chunk, n - begin), into, exec);
  return into;
}

template <class S>
void check(const step_case& c, idx_t chunk = 1) {
  attn::execution serial;
  const reference::result actual = fed<S>(c, chunk, serial), wanted = c.whole<S>();
  CHECK(relative_error(actual.out, wanted.out) <= tolerance<S>::out);
  CHECK(relative_error(actual.lse, wanted.lse) <= tolerance<S>::lse);
}

}  // namespace

#if !defined(ATTN_TEST_FEW_TYPES)
TEST_CASE("multipole_step: the causal form token by token and in chunks", "[multipole_step]") {
  for (int choice = 0; choice < 64; ++choice)
    for (idx_t chunk : {1, 5, 40}) {
      step_case c({.batch = 2,
                   .heads = 4,
                   .kv_heads = choice & 1 ? 1 : 2,
                   .queries = 67,
                   .keys = 67,
                   .dim = 9,
                   .value_dim = 12},
                  choice + 1);
      if (choice & 2) c.p.options.softcap = 1.5;
      if (choice & 4) c.p.options.sinks = {0.3, -1, 2, 0};
      if (choice & 8) c.p.options.scale = -0.4;
      if (choice & 16) c.cache.candidate_clusters = 0;
      if (choice & 32) c.cache.exact = choice % 3 ? 100 : 0;
      CAPTURE(choice, chunk);
      check<double>(c, chunk);
    }
}

TEST_CASE("multipole_step: odd segments, clusters and dims", "[multipole_step]") {
  const idx_t segments[] = {1, 2, 7, 33, 500}, clusters[] = {0, 1, 3, 40}, dims[] = {1, 3, 8, 16, 33, 64, 80};
  for (std::size_t n = 0; n < std::size(segments); ++n)
    for (std::size_t m = 0; m < std::size(clusters); ++m) {
      step_case c({.batch = 1,
                   .heads = 6,
                   .kv_heads = 1,
                   .queries = 150,
                   .keys = 150,
                   .dim = dims[(n + m) % 7],
                   .value_dim = dims[(2 * n + m) % 7]});
      c.cache.segment = segments[n], c.cache.clusters = clusters[m];
      c.cache.exact = 1 + static_cast<idx_t>(11 * n + m) % 40;
      c.cache.candidate_clusters = static_cast<idx_t>(3 * n + m) % 9, c.cache.iterations = static_cast<idx_t>(m);
      CAPTURE(segments[n], clusters[m]);
      check<double>(c, 10);
    }
}
#endif

TEMPLATE_LIST_TEST_CASE("multipole_step: all types", "[multipole_step]", all_types) {
  // Every key its own cluster, of which all are chosen from: rounding does not decide.
  step_case c({.queries = 70, .keys = 70});
  c.cache.clusters = c.cache.segment, c.cache.candidate_clusters = 0, c.cache.exact = 100;
  check<TestType>(c, 3);
  c.cache.exact = 0;
  check<TestType>(c, 3);
}

TEMPLATE_LIST_TEST_CASE("multipole_step: append, truncate, reset, copies and threads", "[multipole_step]",
                        exact_types) {
  const step_case c({.queries = 90, .keys = 90});
  attn::execution serial, three(3, 0);
  const reference::result wanted = fed<TestType>(c, 1, serial);
  CHECK(fed<TestType>(c, 1, three).out == wanted.out);
  attn::multipole_cache<TestType> cache({.batch = 2, .heads = 2, .dim = 16}, c.cache);
  const tensor<TestType> k = cast<TestType>(c.p.k), v = cast<TestType>(c.p.v);
  const auto rows = [](const tensor<TestType>& x, idx_t begin, idx_t count) { return view(x).slice(2, begin, count); };
  cache.reserve(30);
  cache.append(rows(k, 0, 50), rows(v, 0, 50));
  CHECK(cache.tokens() == 50);
  CHECK(cache.capacity() >= 50);
  CHECK(cache.bytes() > 0);
  reference::result into = reference::empty_result(c.p.q, c.p.v);
  attn::multipole_cache<TestType> copy = cache;
  const auto same_from = [&](idx_t first) {
    idx_t wrong = 0;
    for (idx_t b = 0; b < 2; ++b)
      for (idx_t h = 0; h < 4; ++h)
        for (idx_t i = first; i < 90; ++i)
          for (idx_t d = 0; d < 16; ++d) wrong += into.out(b, h, i, d) != wanted.out(b, h, i, d);
    return wrong == 0;
  };
  for (idx_t t = 50; t < 90; ++t) feed<TestType>(cache, c, t, 1, into, serial);
  CHECK(same_from(50));
  cache.truncate(37);  // within a segment that was finished
  for (idx_t t = 37; t < 90; ++t) feed<TestType>(cache, c, t, 1, into, serial);
  CHECK(same_from(37));
  for (idx_t t = 50; t < 90; ++t) feed<TestType>(copy, c, t, 1, into, serial);
  CHECK(same_from(37));
  cache.reset();
  CHECK(cache.tokens() == 0);
  for (idx_t t = 0; t < 90; ++t) feed<TestType>(cache, c, t, 1, into, serial);
  CHECK(same_from(0));
}

TEMPLATE_LIST_TEST_CASE("multipole_cache: items of their own lengths", "[multipole_step]", exact_types) {
  const attn::multipole_cache_options options{
      .exact = 7, .clusters = 5, .candidate_clusters = 3, .segment = 16, .seed = 4};
  attn::multipole_cache<TestType> cache({.batch = 4, .heads = 2, .dim = 20, .value_dim = 12}, options);
  const attn::multipole_cache<TestType> alone({.heads = 2, .dim = 20, .value_dim = 12}, options);
  const attn::rotary_options<TestType> rotary{.dims = 8};
  check_items<TestType>(cache, alone, [&](auto& c, auto q, auto k, auto v, auto out, const std::vector<idx_t>& lengths) {
    attn::multipole_step(c, q, k, v, out, {.lengths = lengths, .rotary = rotary});
  });
  const std::vector<idx_t> three(3, 1);
  CHECK(well_formed(refusal([&] { cache.reset(4); }), "multipole_cache"));
  CHECK(well_formed(refusal([&] { cache.reorder(three); }), "multipole_cache"));
  CHECK(well_formed(refusal([&] { cache.copy_item(0, 4); }), "multipole_cache"));
}

}  // namespace testing::multipole_step_tests
