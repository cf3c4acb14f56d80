// The laws (tests/README.md) for lightning_indexer with keys that stand for several tokens: its lists, their scores and
// the gradients of these, bit by bit. selected_keys_step.cpp feeds it token by token.
#include <attn/softmax/lightning_indexer_backward.hpp>

#include "support/call.hpp"
#include "support/catch.hpp"
#include "support/measure.hpp"
#include "support/run.hpp"

namespace testing::lightning_indexer_span_tests {
namespace {

constexpr idx_t batch = 3, heads = 3, queries = 37, keys = 20, dim = 9, topk = 4, span = 4;
const std::vector<idx_t> first = {3, 41, -2};  // of the third item the first queries see no key

template <class S>
struct inputs {
  tensor<S> q = cast<S>(random_normal(1, batch, heads, queries, dim));
  tensor<S> k = cast<S>(random_normal(2, batch, 1, keys, dim));
  tensor<S> w = cast<S>(random_normal(3, 1, batch, queries, heads));
};
template <class S>
struct results {
  tensor<idx_t> indices;
  tensor<S> scores;
  bool operator==(const results&) const = default;

  results item(idx_t b, idx_t rows_of_item) const {
    results one{tensor<idx_t>(1, 1, rows_of_item, topk + 1), tensor<S>(1, 1, rows_of_item, topk + 1)};
    for (idx_t i = 0; i < rows_of_item; ++i)
      for (idx_t n = 0; n <= topk; ++n)
        one.indices(0, 0, i, n) = indices(b, 0, i, n), one.scores(0, 0, i, n) = scores(b, 0, i, n);
    return one;
  }
};

template <class S>
attn::lightning_indexer_options<S> plain_options() {
  return {.causal = true, .first_position = first, .span = span, .topk = topk, .tail = true};
}

template <class S>
results<S> choose(const in_view<S>& q, const in_view<S>& k, const attn::tensor_view<const S, 3>& w,
                  attn::lightning_indexer_options<S> options, attn::execution& exec) {
  results<S> r{tensor<idx_t>(q.extent(0), 1, q.extent(2), options.topk + options.tail, 99),
               tensor<S>(q.extent(0), 1, q.extent(2), options.topk + options.tail, S(99))};
  options.w = w, options.scores = view(r.scores);
  attn::lightning_indexer(q, k, attn::tensor_view<idx_t>(r.indices.data.data(), r.indices.extents), options, exec);
  return r;
}
template <class S>
attn::tensor_view<const S, 3> weights(const tensor<S>& w) {
  return {w.data.data(), {w.heads(), w.length(), w.dim()}};
}
template <class S>
results<S> choose(const inputs<S>& in, const attn::lightning_indexer_options<S>& options = plain_options<S>()) {
  attn::execution serial;
  return choose<S>(view(in.q), view(in.k), weights(in.w), options, serial);
}

// Rows [begin, end) of an item become NaN.
template <class S>
void poison(tensor<S>& x, idx_t b, idx_t begin, idx_t end) {
  for (idx_t h = 0; h < x.heads(); ++h)
    for (idx_t i = begin; i < end; ++i)
      for (idx_t d = 0; d < x.dim(); ++d) x(b, h, i, d) = std::numeric_limits<S>::quiet_NaN();
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("lightning_indexer, keys of several tokens: padding, items, threads, layout",
                        "[lightning_indexer]", exact_types) {
  using S = TestType;
  const inputs<S> in;
  const std::vector<idx_t> query_lengths = {30, queries, 12}, key_lengths = {7, keys, 5};
  auto options = plain_options<S>();
  options.query_lengths = query_lengths, options.key_lengths = key_lengths;
  const results<S> whole = choose(in), padded = choose(in, options);
  inputs<S> poisoned = in;
  for (idx_t b : {0, 2}) {
    poison(poisoned.q, b, query_lengths[static_cast<std::size_t>(b)], queries);
    poison(poisoned.k, b, key_lengths[static_cast<std::size_t>(b)], keys);
  }
  CHECK(choose(poisoned, options) == padded);
  attn::execution serial;
  for (idx_t b = 0; b < batch; ++b) {
    const auto n = static_cast<std::size_t>(b);
    const auto alone = [&](idx_t q_length, idx_t k_length) {
      auto o = plain_options<S>();
      o.first_position = first[n];
      return choose<S>(view(in.q).slice(0, b, 1).slice(2, 0, q_length), view(in.k).slice(0, b, 1).slice(2, 0, k_length),
                       weights(in.w).slice(0, b, 1).slice(1, 0, q_length), o, serial);
    };
    CHECK(alone(queries, keys) == whole.item(b, queries));
    CHECK(alone(query_lengths[n], key_lengths[n]) == padded.item(b, query_lengths[n]));
    for (idx_t i = query_lengths[n]; i < queries; ++i) CHECK(padded.indices(b, 0, i, 0) == -1);
  }
  attn::execution three(3, 0), seven(7, 0);
  for (attn::execution* threads : {&three, &seven})
    CHECK(choose<S>(view(in.q), view(in.k), weights(in.w), plain_options<S>(), *threads) == whole);
  const auto reversed = [](const tensor<S>& x, std::vector<S>& to) {  // the batch item fastest
    to.resize(x.data.size());
    const in_view<S> laid(to.data(), x.extents, {1, x.batch(), x.batch() * x.heads(), x.size() / x.dim()});
    for (idx_t b = 0; b < x.batch(); ++b)
      for (idx_t h = 0; h < x.heads(); ++h)
        for (idx_t i = 0; i < x.length(); ++i)
          for (idx_t d = 0; d < x.dim(); ++d)
            to[static_cast<std::size_t>(&laid(b, h, i, d) - to.data())] = x(b, h, i, d);
    return laid;
  };
  std::vector<S> q, k;
  CHECK(choose<S>(reversed(in.q, q), reversed(in.k, k), weights(in.w), plain_options<S>(), serial) == whole);
}

TEMPLATE_LIST_TEST_CASE("lightning_indexer, keys of several tokens: the future, and a NaN", "[lightning_indexer]",
                        exact_types) {
  using S = TestType;
  const inputs<S> in;
  const results<S> whole = choose(in);
  constexpr idx_t key = 5, complete = (key + 1) * span - 1;  // the position it is complete at
  inputs<S> changed = in, one = in;
  for (idx_t b = 0; b < batch; ++b) {
    poison(changed.k, b, key, keys);
    poison(changed.q, b, std::clamp<idx_t>(complete - first[static_cast<std::size_t>(b)], 0, queries), queries);
  }
  poison(one.k, 1, key, key + 1), poison(one.k, 2, key, key + 1);
  poison(one.q, 0, 17, 18);
  const results<S> before = choose(changed), quiet = choose(one);
  for (idx_t b = 0; b < batch; ++b)
    for (idx_t i = 0; i < queries; ++i)
      for (idx_t n = 0; n <= topk; ++n) {
        const bool complete_at = first[static_cast<std::size_t>(b)] + i >= complete;
        const auto same = [&](const results<S>& x) {
          return x.indices(b, 0, i, n) == whole.indices(b, 0, i, n) && x.scores(b, 0, i, n) == whole.scores(b, 0, i, n);
        };
        if (!complete_at && !same(before)) FAIL_CHECK("the future changes item " << b << ", query " << i);
        if ((b == 0 ? i != 17 : !complete_at) && !same(quiet))
          FAIL_CHECK("a NaN reaches item " << b << ", query " << i);
      }
}

TEMPLATE_LIST_TEST_CASE("lightning_indexer: a token a key is plain causal, to the bit", "[lightning_indexer]",
                        exact_types) {
  using S = TestType;
  const inputs<S> in;
  const attn::lightning_indexer_options<S> plain{.causal = true, .topk = topk},
      placed{.causal = true, .first_position = keys - queries, .span = 1, .topk = topk};
  const results<S> wanted = choose(in, plain);
  CHECK(choose(in, placed) == wanted);
  const tensor<S> d = cast<S>(random_normal(4, batch, 1, queries, topk));
  const auto gradients = [&](attn::lightning_indexer_options<S> options) {
    tensor<S> dq(batch, heads, queries, dim), dk(batch, 1, keys, dim), dw(1, batch, queries, heads);
    options.w = weights(in.w);
    attn::lightning_indexer_backward(
        view(in.q), view(in.k), attn::tensor_view<const idx_t>(wanted.indices.data.data(), wanted.indices.extents),
        view(d), {.q = view(dq), .k = view(dk), .w = attn::tensor_view<S, 3>(dw.data.data(), {batch, queries, heads})},
        options);
    return std::array{dq.data, dk.data, dw.data};
  };
  CHECK(gradients(plain) == gradients(placed));
}

TEMPLATE_LIST_TEST_CASE("lightning_indexer, keys of several tokens: scores of 1e4 and more", "[lightning_indexer]",
                        exact_types) {
  using S = TestType;
  inputs<S> in;
  for (S& x : in.q.data) x = x < 0 ? S(-100) : S(100);  // sums of which are exact
  for (S& x : in.k.data) x = x < 0 ? S(-100) : S(100);
  for (S& x : in.w.data) x = x < 0 ? S(-1) : S(1);
  auto options = plain_options<S>();
  options.scale = S(0.5), options.activation = attn::indexer_activation::none;
  const results<S> found = choose(in, options);
  for (idx_t b = 0; b < batch; ++b)
    for (idx_t i = 0; i < queries; ++i)
      for (idx_t n = 0; n < topk; ++n) {
        const idx_t j = found.indices(b, 0, i, n);
        const idx_t seen = std::clamp<idx_t>((first[static_cast<std::size_t>(b)] + i + 1) / span, 0, keys);
        if (n >= seen || found.scores(b, 0, i, n) == -std::numeric_limits<S>::infinity()) {
          CHECK(n >= seen);
          continue;
        }
        S score = 0;
        for (idx_t h = 0; h < heads; ++h)
          for (idx_t e = 0; e < dim; ++e) score += in.w(0, b, i, h) * in.q(b, h, i, e) * in.k(b, 0, j, e) / 2;
        if (found.scores(b, 0, i, n) != score) FAIL_CHECK("item " << b << ", query " << i << ", key " << j);
      }
}

}  // namespace testing::lightning_indexer_span_tests
