// The weights of full_softmax: of queries, and summed for every key. The reference gives them as its result over values
// that are the identity.
#include <attn/softmax/attention_weights.hpp>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"

namespace testing::attention_weights_tests {
namespace {

full_softmax_problem problem_of(idx_t queries, idx_t keys, int options) {
  auto p = random_problem<full_softmax_problem>(
      {.queries = queries, .keys = keys, .dim = 16 + options % 3, .value_dim = keys}, 3);
  for (idx_t b = 0; b < p.v.batch(); ++b)
    for (idx_t h = 0; h < p.v.heads(); ++h)
      for (idx_t j = 0; j < keys; ++j)
        for (idx_t d = 0; d < keys; ++d) p.v(b, h, j, d) = j == d;
  p.options.causal = options % 2;
  if (options & 2) p.options.sinks = {1, 0, -1, 2}, p.options.softcap = 3;
  if (options & 4) p.options.alibi_slopes = {0.5, 0.25, 0.125, 0}, p.options.bias = random_normal(9, 1, 4, 1, keys);
  if (options & 8) p.options.query_lengths = {queries, queries / 2}, p.options.key_lengths = {keys / 3, keys};
  if (options & 16) p.options.relative_bias = random_normal(8, 1, 1, 1, 41), p.options.scale = 0.4;
  return p;
}

template <class S>
void check_weights(idx_t queries, idx_t keys, int options, double allowed) {
  CAPTURE(queries, keys, options);
  const full_softmax_problem p = rounded<S>(problem_of(queries, keys, options));
  const tensor<double> wanted = expected(p).out;
  tensor<double> sums(2, 4, 1, keys);
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 4; ++h)
      for (idx_t i = 0; i < queries; ++i)
        for (idx_t j = 0; j < keys; ++j) sums(b, h, 0, j) += wanted(b, h, i, j);

  stored_options<S, reference::full_softmax_options> stored(p.options);
  tensor<S> q = cast<S>(p.q), k = cast<S>(p.k);
  if (options & 8)  // padding
    for (idx_t h = 0; h < 4; ++h)
      for (idx_t d = 0; d < q.dim(); ++d)
        q(1, h, queries - 1, d) = k(0, h / 2, keys - 1, d) = S(std::numeric_limits<float>::quiet_NaN());
  const tensor<S> v = cast<S>(p.v);
  tensor<S> out(2, 4, queries, keys);
  tensor<real<S>> lse(2, 4, queries, 1), weights(2, 4, queries, keys, real<S>(7)), found(2, 4, 1, keys, real<S>(7)),
      again = weights, sums_again = found;
  stored.options.lse = row_view(lse);
  attn::execution exec;
  compiled_full_softmax<S>::call(view(q), view(k), view(v), view(out), stored.options, {}, exec);
  const attn::tensor_view<real<S>, 3> to(found.data.data(), {2, 4, keys}),
      to_again(sums_again.data.data(), {2, 4, keys});
  attn::attention_weights(view(q), view(k), {}, view(weights), stored.options);
  attn::key_weights(view(q), view(k), to, stored.options);
  CHECK(relative_error(cast<double>(weights), wanted) <= allowed);
  CHECK(relative_error(cast<double>(found), sums) <= allowed);

  // Without lse, by threads; and of some rows, one of them twice.
  attn::execution three(3, 0);
  stored.options.lse = {};
  attn::attention_weights(view(q), view(k), {}, view(again), stored.options, three);
  attn::key_weights(view(q), view(k), to_again, stored.options, three);
  CHECK(relative_error(cast<double>(again), wanted) <= allowed);
  CHECK(relative_error(cast<double>(sums_again), sums) <= allowed);
  tensor<real<S>> serial = sums_again;
  attn::key_weights(view(q), view(k), {serial.data.data(), {2, 4, keys}}, stored.options);
  CHECK(serial.data == sums_again.data);
  const std::vector<idx_t> rows = {queries - 1, 0, queries / 2, 0};
  tensor<real<S>> few(2, 4, 4, keys, real<S>(7));
  attn::attention_weights(view(q), view(k), rows, view(few), stored.options, three);
  bool same = true;
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 4; ++h)
      for (idx_t n = 0; n < 4; ++n)
        for (idx_t j = 0; j < keys; ++j) same &= few(b, h, n, j) == again(b, h, rows[static_cast<std::size_t>(n)], j);
  CHECK(same);
}

}  // namespace

TEST_CASE("attention_weights and key_weights are the reference's", "[attention_weights]") {
  for (int options = 0; options < 32; options += 3) check_weights<float>(40, 101, options, 2e-6);
  check_weights<float>(1, 1, 1, 2e-6);
  check_weights<float>(2, 2100, 16, 2e-6);
  check_weights<Eigen::bfloat16>(40, 65, 7, tolerance<Eigen::bfloat16>::out);
}

TEST_CASE("attention_weights and key_weights take a score function, and no keys", "[attention_weights]") {
  const tensor<float> q(1, 1, 5, 4, 0.5f), k(1, 1, 6, 4, 0.5f);
  tensor<float> weights(1, 1, 5, 6, 7), sums(1, 1, 1, 6, 7);
  const auto only_even = [](float s, idx_t, idx_t, idx_t, idx_t j) {
    return j % 2 ? -std::numeric_limits<float>::infinity() : s;
  };
  attn::attention_weights(view(q), view(k), {}, view(weights), {}, only_even);
  attn::key_weights(view(q), view(k), {sums.data.data(), {1, 1, 6}}, {}, only_even);
  for (idx_t j = 0; j < 6; ++j) {
    CHECK(std::abs(weights(0, 0, 3, j) - (j % 2 ? 0 : 1.0f / 3)) <= 1e-6f);
    CHECK(std::abs(sums(0, 0, 0, j) - (j % 2 ? 0 : 5.0f / 3)) <= 1e-6f);
  }
  attn::key_weights(view(q).slice(2, 0, 0), view(k), {sums.data.data(), {1, 1, 6}});
  CHECK(std::all_of(sums.data.begin(), sums.data.end(), [](float x) { return x == 0; }));
  attn::attention_weights(view(q), view(k).slice(2, 0, 0), {}, view(weights).slice(3, 0, 0));
}

TEST_CASE("attention_weights and key_weights refuse what does not fit", "[attention_weights]") {
  const tensor<float> q(2, 4, 5, 8, 1), k(2, 2, 6, 8, 1);
  tensor<float> weights(2, 4, 5, 6, 7);
  const auto refuses = [&](const char* name, auto&& call) {
    const std::string message = refusal(call);
    INFO(message);
    CHECK(well_formed(message, name));
    CHECK(std::all_of(weights.data.begin(), weights.data.end(), [](float x) { return x == 7; }));
  };
  const auto sums = [&](idx_t heads, idx_t keys) {
    return attn::tensor_view<float, 3>(weights.data.data(), {2, heads, keys});
  };
  const std::vector<idx_t> low = {0, -1}, high = {5}, two = {0, 1};
  refuses("attention_weights", [&] { attn::attention_weights(view(q), view(k), low, view(weights).slice(2, 0, 2)); });
  refuses("attention_weights", [&] { attn::attention_weights(view(q), view(k), high, view(weights).slice(2, 0, 1)); });
  refuses("attention_weights", [&] { attn::attention_weights(view(q), view(k), two, view(weights)); });
  refuses("attention_weights", [&] { attn::attention_weights(view(q), view(k), {}, view(weights).slice(3, 0, 5)); });
  refuses("attention_weights", [&] {
    attn::attention_weights(view(q), view(k), {}, view(weights), {.lse = {weights.data.data(), {2, 4, 5}}});
  });
  refuses("key_weights", [&] { attn::key_weights(view(q), view(k), sums(2, 6)); });
  refuses("key_weights", [&] { attn::key_weights(view(q), view(k), sums(4, 5)); });
  refuses("key_weights", [&] { attn::key_weights(view(q), view(k), sums(4, 6), {.softcap = -1.0f}); });
  refuses("key_weights", [&] { attn::key_weights(view(q), view(k), {const_cast<float*>(k.data.data()), {2, 4, 6}}); });
}

}  // namespace testing::attention_weights_tests
