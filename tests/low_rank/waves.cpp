// Calls of more heads and batch items than one wave takes, by threads against one thread; tensors of different layouts.
#include "support/call_low_rank.hpp"
#include "support/catch.hpp"
#include "support/run_long_short.hpp"

namespace testing::waves_tests {
namespace {

// 40 heads, enough work for threads to be used, and scratch memory per head that lets few of them into a wave.
constexpr problem_shape many_heads{
    .batch = 5, .heads = 8, .kv_heads = 8, .queries = 300, .keys = 300, .dim = 64, .value_dim = 64};

template <class T>
long_short_problem long_short_of(const problem_shape& s, idx_t rank, idx_t segment) {
  long_short_problem p = random_problem<long_short_problem>(s, 1);
  p.options.logits = random_normal(1000, s.batch, s.heads, s.keys, rank, 3);
  p.options.causal = segment > 0, p.options.segment = segment;
  p.options.left = 20, p.options.right = 5;
  return rounded<T>(p);
}

// The elements of x at other places: rows of the last axis apart, or the last two axes exchanged, with gaps.
template <class T>
struct laid_out {
  std::vector<T> memory;
  attn::tensor_view<T> view;

  laid_out(const tensor<T>& x, int layout) {
    const auto [b, h, n, d] = x.extents;
    const idx_t gap = layout == 2 ? 3 : 0;
    memory.assign(static_cast<std::size_t>(b * h * (n + gap) * (d + gap)), T(9));
    if (layout == 0)  // [batch, length, head, dim]
      view = {memory.data(), {b, h, n, d}, {h * n * d, d, h * d, 1}};
    else if (layout == 1)  // column-major
      view = {memory.data(), {b, h, n, d}, {h * n * d, n * d, 1, n}};
    else  // rows with gaps, the first last
      view = {memory.data() + (n - 1) * (d + gap),
              {b, h, n, d},
              {h * (n + gap) * (d + gap), (n + gap) * (d + gap), -(d + gap), 1}};
    for (idx_t i = 0; i < b; ++i)
      for (idx_t j = 0; j < h; ++j)
        for (idx_t r = 0; r < n; ++r)
          for (idx_t c = 0; c < d; ++c) view(i, j, r, c) = x(i, j, r, c);
  }
};

// call(q, k, v, out) with plain tensors, then with a layout of its own for each of them: the same bits.
template <class T, class Call>
void check_layouts(const problem_shape& s, Call&& call) {
  const tensor<T> q = cast<T>(random_normal(1, s.batch, s.heads, s.queries, s.dim)),
                  k = cast<T>(random_normal(2, s.batch, s.kv_heads, s.keys, s.dim)),
                  v = cast<T>(random_normal(3, s.batch, s.kv_heads, s.keys, s.value_dim));
  tensor<T> plain(s.batch, s.heads, s.queries, s.value_dim, T(7));
  call(view(q), view(k), view(v), view(plain));
  for (int first = 0; first < 3; ++first) {
    const laid_out<T> q2(q, first), k2(k, (first + 1) % 3), v2(v, (first + 2) % 3);
    const laid_out<T> out2(tensor<T>(s.batch, s.heads, s.queries, s.value_dim, T(7)), (first + 1) % 3);
    call(q2.view, k2.view, v2.view, out2.view);
    idx_t different = 0;
    for (idx_t b = 0; b < s.batch; ++b)
      for (idx_t h = 0; h < s.heads; ++h)
        for (idx_t i = 0; i < s.queries; ++i)
          for (idx_t d = 0; d < s.value_dim; ++d) different += plain(b, h, i, d) != out2.view(b, h, i, d);
    CAPTURE(first);
    CHECK(different == 0);
  }
}

constexpr problem_shape small{.batch = 2, .heads = 4, .kv_heads = 2, .queries = 70, .keys = 90, .dim = 20,
                              .value_dim = 33};

}  // namespace

TEMPLATE_LIST_TEST_CASE("nystrom: later waves, by threads as by one", "[waves]", exact_types) {
  attn::execution serial, two(2), five(5);
  for (auto inverse : {reference::pinv::per_head, reference::pinv::whole_batch, reference::pinv::exact}) {
    nystrom_problem p = random_problem<nystrom_problem>(many_heads, 1);
    p.options.landmarks = 64, p.options.iterations = 2, p.options.inverse = inverse;
    p.options.lengths = {300, 40, 0, 299, 64};
    p = rounded<TestType>(p);
    const tensor<double> alone = run<TestType>(p, serial).out;
    CHECK(run<TestType>(p, two).out == alone);
    CHECK(run<TestType>(p, five).out == alone);
  }
}

TEMPLATE_LIST_TEST_CASE("linformer: later waves, by threads as by one", "[waves]", exact_types) {
  attn::execution serial, two(2), five(5);
  for (bool per_head : {false, true}) {
    linformer_problem p = random_problem<linformer_problem>(many_heads, 1);
    p.options.e = random_normal(50, 1, per_head ? 8 : 1, 64, 300, 0.125);
    p.options.f = random_normal(51, 1, 1, 64, 300, 0.125);
    p.options.lengths = {300, 40, 0, 299, 64};
    p = rounded<TestType>(p);
    const reference::result alone = run<TestType>(p, serial), shared = run<TestType>(p, two),
                            many = run<TestType>(p, five);
    CHECK(shared.out == alone.out);
    CHECK(shared.lse == alone.lse);
    CHECK(many.out == alone.out);
    CHECK(many.lse == alone.lse);
  }
}

TEMPLATE_LIST_TEST_CASE("long_short: later waves, by threads as by one", "[waves]", exact_types) {
  attn::execution serial, two(2), five(5);
  for (idx_t segment : {0, 16}) {  // causal: 18 segments of each of 40 heads
    long_short_problem p = long_short_of<TestType>(many_heads, 16, segment);
    p.options.lengths = {300, 40, 0, 299, 64};
    const reference::result alone = run_long_short<TestType>(p, serial);
    for (attn::execution* threads : {&two, &five}) {
      const reference::result shared = run_long_short<TestType>(p, *threads);
      CHECK(shared.out == alone.out);
      CHECK(shared.lse == alone.lse);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("nystrom: a layout for each tensor", "[waves]", exact_types) {
  attn::execution serial;
  check_layouts<TestType>(small, [&](auto q, auto k, auto v, auto out) {
    attn::nystrom_options<TestType> options;
    options.landmarks = 13;
    compiled_nystrom<TestType>::call(q, k, v, out, options, serial);
  });
}

TEMPLATE_LIST_TEST_CASE("linformer: a layout for each tensor", "[waves]", exact_types) {
  attn::execution serial;
  const tensor<TestType> e = cast<TestType>(random_normal(5, 1, 4, 17, small.keys)),
                         f = cast<TestType>(random_normal(6, 1, 1, 17, small.keys));
  check_layouts<TestType>(small, [&](auto q, auto k, auto v, auto out) {
    compiled_linformer<TestType>::call(q, k, v, out, heads_view(e), heads_view(f), {}, serial);
  });
}

TEMPLATE_LIST_TEST_CASE("long_short: a layout for each tensor", "[waves]", exact_types) {
  attn::execution serial;
  const tensor<TestType> logits = cast<TestType>(random_normal(5, 2, 4, small.keys, 7));
  for (int layout = 0; layout < 3; ++layout) {
    const laid_out<TestType> other(logits, layout);
    check_layouts<TestType>(small, [&](auto q, auto k, auto v, auto out) {
      compiled_long_short<TestType>::call(q, k, v, out, other.view, {}, serial);
    });
  }
}

}  // namespace testing::waves_tests
