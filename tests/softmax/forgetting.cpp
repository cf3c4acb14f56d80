// Decays, dropout and masks of keys: against biases of every pair, steps, restarts, and each other.
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/run_pattern_backward.hpp"

namespace testing::forgetting_tests {
namespace {

constexpr double none = -reference::infinity;

// Log decays of [B, H, Lk]: mostly weak, some strong.
tensor<double> random_decay(std::uint64_t seed, idx_t batch, idx_t heads, idx_t keys) {
  tensor<double> x = random_normal(seed, batch, heads, keys, 1);
  for (std::size_t n = 0; n < x.data.size(); ++n) x.data[n] = -std::abs(x.data[n]) * (n % 13 == 0 ? 20 : 0.05);
  return x;
}
// The same scores by the option bias.
tensor<double> by_pairs(const tensor<double>& decay, idx_t queries) {
  const idx_t keys = decay.length();
  tensor<double> bias(decay.batch(), decay.heads(), queries, keys);
  for (idx_t b = 0; b < decay.batch(); ++b)
    for (idx_t h = 0; h < decay.heads(); ++h)
      for (idx_t i = 0; i < queries; ++i)
        for (idx_t j = 0; j < keys; ++j)
          for (idx_t t = j + 1; t <= i + keys - queries; ++t) bias(b, h, i, j) += decay(b, h, t, 0);
  return bias;
}

}  // namespace

TEST_CASE("log decays are the bias of their sums", "[forgetting]") {
  for (idx_t queries : {3, 40, 130})
    for (bool restarts : {false, true}) {
      CAPTURE(queries, restarts);
      auto p = random_problem<full_softmax_problem>(
          {.batch = 2, .queries = queries, .keys = 130, .dim = 8, .value_dim = 8}, 7);
      p.options.causal = true;
      p.options.log_decay = random_decay(3, 2, 4, 130);
      if (restarts) p.options.log_decay(0, 1, 60, 0) = p.options.log_decay(0, 1, 110, 0) = none;
      p = rounded<float>(p);
      auto pairs = p;
      pairs.options.bias = by_pairs(p.options.log_decay, queries), pairs.options.log_decay = {};
      const auto found = run<float>(p), wanted = run<float>(pairs);
      CHECK(relative_error(found.out, wanted.out) <= 2e-6);
      CHECK(relative_error(found.lse, wanted.lse) <= 1e-6);
    }
}

TEST_CASE("gradients with decays, dropout and masks of keys, beside every other term", "[forgetting]") {
  attn::execution threads(3, 0);
  for (idx_t queries : {2, 30}) {
    auto p = random_problem<full_softmax_problem>(
        {.batch = 2, .queries = queries, .keys = 40, .dim = 8, .value_dim = 8}, 5);
    p.options.causal = true;
    p.options.log_decay = random_decay(4, 2, 4, 40);
    check_backward<float>(p, true);
    check_accumulate<float>(p);
    p.options.dropout_rate = 0.3, p.options.dropout_seed = 11;
    p.options.key_mask = tensor<double>(2, 1, 1, 40, 1);
    for (idx_t j : {0, 1, 2, 17, 39}) p.options.key_mask(1, 0, 0, j) = 0;
    p.options.softcap = 3, p.options.sinks = {0, 1, -1, 2}, p.options.alibi_slopes = {.5, .25, .1, 0};
    p.options.lengths = {}, p.options.key_lengths = {37, 31}, p.options.query_lengths = {queries, queries - 1};
    check_backward<float>(p, true);
    check_backward<float>(p, true, {.saved_lse = false}, &threads);
    check_backward<widest_type>(p, true);
    p.options.score = smooth_score{};
    check_backward<float>(p, true);
  }
}

TEST_CASE("windows with decays, dropout and masks of keys", "[forgetting]") {
  attn::execution threads(3, 0);
  for (const std::vector<idx_t>& dilation : {std::vector<idx_t>{1}, {1, 3, 2, 1}, {3}})
    for (const std::vector<idx_t>& globals : {std::vector<idx_t>{}, {2, 30, 57}}) {
      CAPTURE(dilation, globals);
      auto p =
          random_problem<sliding_window_problem>({.batch = 2, .queries = 50, .keys = 60, .dim = 8, .value_dim = 8}, 4);
      p.options.causal = true, p.options.left = 6, p.options.dilation = dilation, p.options.global_positions = globals;
      p.options.log_decay = random_decay(4, 2, 4, 60);
      p.options.sinks = {0, 1, -1, 2};
      const auto e = errors_of<float>(p);
      CHECK(e.out <= tolerance<float>::out);
      check_backward<float>(p, true);
      p.options.dropout_rate = 0.4, p.options.dropout_seed = 3;
      p.options.key_mask = tensor<double>(1, 1, 1, 60, 1);
      for (idx_t j : {0, 30, 31, 50}) p.options.key_mask(0, 0, 0, j) = 0;
      p.options.relative_bias = random_normal(6, 1, 1, 4, 2 * 9 + 1);
      const auto more = errors_of<float>(p);
      CHECK(more.out <= tolerance<float>::out);
      check_backward<float>(p, true, {}, &threads);
    }
}

TEST_CASE("patterns with dropout and masks of keys", "[forgetting]") {
  const auto check = [](auto p) {
    p.options.dropout_rate = 0.2, p.options.dropout_seed = 3;
    p.options.key_mask = tensor<double>(1, 1, 1, 50, 1);
    for (idx_t j : {0, 7, 8, 49}) p.options.key_mask(0, 0, 0, j) = 0;
    p = rounded<float>(p);
    CHECK(relative_error(run_pattern<float>(p).out, reference::by_pattern(p.q, p.k, p.v, p.options).out) <=
          tolerance<float>::out);
    check_backward<float>(p, true);
  };
  const problem_shape shape{.batch = 2, .queries = 50, .keys = 50, .dim = 8, .value_dim = 8};
  auto blocks = random_problem<problem<reference::block_options>>(shape, 3);
  blocks.options.size = 8, blocks.options.neighbours = 1;
  check(blocks);
  auto strided = random_problem<problem<reference::strided_options>>(shape, 4);
  strided.options.causal = true, strided.options.stride = 6;
  check(strided);
}

TEST_CASE("dropout keeps a share of the weights, all of them on average, whatever computes them", "[forgetting]") {
  const idx_t length = 700, heads = 2;
  auto p = random_problem<full_softmax_problem>({.batch = 1, .queries = length, .keys = length, .dim = 8}, 2);
  p.options.dropout_rate = 0.25, p.options.dropout_seed = 77;
  idx_t kept = 0;
  const attn::dropout_options dropout{p.options.dropout_rate, p.options.dropout_seed};
  for (idx_t h = 0; h < heads; ++h)
    for (idx_t i = 0; i < length; ++i)
      for (idx_t j = 0; j < length; ++j) {
        const bool keeps = dropout.keeps(0, h, i, j);
        REQUIRE(keeps == reference::keeps_weight(dropout.rate, dropout.seed, 0, h, i, j));
        kept += keeps;
      }
  // A sum of independent decisions: five standard deviations.
  const double all = static_cast<double>(heads * length * length);
  CHECK(std::abs(static_cast<double>(kept) - 0.75 * all) <= 5 * std::sqrt(all * 0.75 * 0.25));
  const auto e = errors_of<float>(p);
  CHECK(e.out <= tolerance<float>::out);
  CHECK(e.lse <= tolerance<float>::lse);
  const auto of_bf16 = errors_of<Eigen::bfloat16>(p);
  CHECK(of_bf16.out <= made_keys_tolerance<Eigen::bfloat16>::out);
}

TEST_CASE("masks of keys may be matrices of bool, of one row for all", "[forgetting]") {
  const tensor<float> q = cast<float>(random_normal(1, 2, 2, 40, 8)), k = cast<float>(random_normal(2, 2, 2, 50, 8)),
                      v = cast<float>(random_normal(3, 2, 2, 50, 8));
  Eigen::Matrix<bool, Eigen::Dynamic, Eigen::Dynamic> seen(2, 50);
  tensor<std::uint8_t> pairs(2, 1, 1, 50);
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t j = 0; j < 50; ++j) pairs(b, 0, 0, j) = seen(b, j) = (j + b) % 3 != 0;
  tensor<float> out(2, 2, 40, 8), wanted(2, 2, 40, 8);
  const attn::mask_view mask(attn::tensor_view<const std::uint8_t>(pairs.data.data(), pairs.extents));
  attn::full_softmax(view(q), view(k), view(v), view(out), {.key_mask = seen});
  attn::full_softmax(view(q), view(k), view(v), view(wanted), {.mask = mask});
  CHECK(out == wanted);
  // Beside a mask of pairs, both count.
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t j = 0; j < 50; ++j) pairs(b, 0, 0, j) = j % 4 != 1;
  attn::full_softmax(view(q), view(k), view(v), view(out), {.mask = mask, .key_mask = seen});
  attn::full_softmax(view(q), view(k), view(v), view(wanted), {},
                     [](float s, idx_t b, idx_t, idx_t, idx_t j) { return (j + b) % 3 != 0 && j % 4 != 1 ? s : -INFINITY; });
  CHECK(relative_error(cast<double>(out), cast<double>(wanted)) <= 1e-6);
}

TEST_CASE("steps with masks, biases, decays and dropout are rows of the whole call", "[forgetting]") {
  const idx_t length = 30;
  const tensor<float> q = cast<float>(random_normal(1, 1, 4, length, 8)),
                      k = cast<float>(random_normal(2, 1, 2, length, 8)),
                      v = cast<float>(random_normal(3, 1, 2, length, 8)),
                      decay = cast<float>(random_decay(5, 1, 4, length)),
                      bias = cast<float>(random_normal(6, 1, 1, length, length));
  tensor<std::uint8_t> mask(1, 1, length, length), key_mask(1, 1, 1, length, 1);
  for (idx_t i = 0; i < length; ++i)
    for (idx_t j = 0; j < length; ++j) mask(0, 0, i, j) = i == j || (3 * i + j) % 4 != 0;
  key_mask(0, 0, 0, 2) = key_mask(0, 0, 0, 11) = 0;
  const attn::tensor_view<const float, 3> decays(decay.data.data(), {1, 4, length});
  const attn::tensor_view<const std::uint8_t> pairs(mask.data.data(), mask.extents);
  const attn::tensor_view<const std::uint8_t, 2> keys(key_mask.data.data(), {1, length});
  const attn::dropout_options dropout{0.2, 9};
  tensor<float> out(1, 4, length, 8), stepped(1, 4, length, 8), wanted(1, 4, length, 8);
  attn::full_softmax(view(q), view(k), view(v), view(wanted),
                     {.causal = true, .bias = view(bias), .log_decay = decays, .mask = pairs, .key_mask = keys,
                      .dropout = dropout});
  const auto part = [](auto x, idx_t from, idx_t count) { return x.slice(2, from, count); };
  attn::kv_cache<float> cache({.batch = 1, .heads = 2, .dim = 8}), second = cache;
  attn::sliding_window_cache<float> ring({.batch = 1, .heads = 2, .dim = 8}, {.left = length});
  for (idx_t t = 0, n; t < length; t += n) {
    n = std::min<idx_t>(t % 7 + 1, length - t);
    const auto seen = [&](auto x) { return part(x, t, n).slice(3, 0, t + n); };
    const auto now = [&](auto& to) { return part(view(to), t, n); };
    const auto some_decays = decays.slice(2, 0, t + n);
    const auto some_keys = keys.slice(1, 0, t + n);
    attn::full_softmax_step(cache, part(view(q), t, n), part(view(k), t, n), part(view(v), t, n), now(out),
                            {.bias = seen(view(bias)), .log_decay = some_decays, .mask = seen(pairs),
                             .key_mask = some_keys, .dropout = dropout});
    const attn::sliding_window_step_options<float> options{
        .bias = seen(view(bias)), .log_decay = some_decays, .mask = seen(pairs), .key_mask = some_keys,
        .dropout = dropout};
    attn::sliding_window_step(ring, part(view(q), t, n), part(view(k), t, n), part(view(v), t, n), now(stepped),
                              options);
    CHECK(relative_error(cast<double>(testing::rows(stepped, t, n)), cast<double>(testing::rows(wanted, t, n))) <= 1e-6);
    attn::sliding_window_step(second, {.left = length}, part(view(q), t, n), part(view(k), t, n),
                              part(view(v), t, n), now(stepped), options);
    CHECK(relative_error(cast<double>(testing::rows(stepped, t, n)), cast<double>(testing::rows(wanted, t, n))) <= 1e-6);
  }
  CHECK(relative_error(cast<double>(out), cast<double>(wanted)) <= 1e-6);
}

TEST_CASE("log decays above 0 and NaN are refused, but not in padding", "[forgetting]") {
  constexpr idx_t length = 9, heads = 2;
  constexpr float nan = std::numeric_limits<float>::quiet_NaN(), infinite = std::numeric_limits<float>::infinity();
  const tensor<float> x = cast<float>(random_normal(1, 2, heads, length, 8));
  tensor<float> out(2, heads, length, 8), dv = out, decay(2, heads, length, 1);
  // As [B, H, L], or beside each other as [B, L, H].
  const attn::tensor_view<const float, 3> rows(decay.data.data(), {2, heads, length}),
      columns(decay.data.data(), {2, heads, length}, {heads * length, 1, heads});
  const std::vector<idx_t> lengths = {length, 4};
  attn::kv_cache<float> cache({.batch = 2, .heads = heads, .dim = 8}), shorter = cache;
  attn::sliding_window_cache<float> ring({.batch = 2, .heads = heads, .dim = 8}, {.left = 3});
  const auto part = [&](idx_t begin, idx_t count) { return view(x).slice(2, begin, count); };
  using full_form = compiled_full_softmax<float>;
  using window_form = compiled_sliding_window<float>;
  attn::execution exec;
  const auto in = view(x);
  const auto to = view(out), one = view(out).slice(2, 0, 1);
  cache.append(view(x), view(x));
  shorter.append(part(0, length - 1), part(0, length - 1), {.lengths = std::vector<idx_t>{length - 1, 3}});
  attn::sliding_window_step(ring, part(0, length - 1), part(0, length - 1), part(0, length - 1),
                            to.slice(2, 0, length - 1), {.lengths = std::vector<idx_t>{length - 1, 3}});
  const auto each_call = [&](const attn::tensor_view<const float, 3>& d, const auto& check) {
    const attn::full_softmax_options<float> full{.causal = true, .lengths = lengths, .log_decay = d};
    const attn::sliding_window_options<float> window{.causal = true, .lengths = lengths, .left = 3, .log_decay = d};
    check([&] { full_form::call(in, in, in, to, full, {}, exec); });
    check([&] { window_form::call(in, in, in, to, window, {}, exec); });
    check([&] { full_form::backward(in, in, in, to, in, {.v = view(dv)}, full, {}, {}, exec); });
    check([&] { window_form::backward(in, in, in, to, in, {.v = view(dv)}, window, {}, {}, exec); });
    auto step = shorter;
    const auto token = part(0, 1);
    check([&] { attn::full_softmax_step(step, token, token, token, one, {.log_decay = d}); });
    check([&] { attn::full_softmax_cached(shorter, token, one, {.log_decay = d.slice(2, 0, length - 1)}); });
    auto window_of = ring;
    check([&] { attn::sliding_window_step(window_of, token, token, token, one, {.log_decay = d}); });
    step = shorter;
    check([&] { attn::sliding_window_step(step, {.left = 3}, token, token, token, one, {.log_decay = d}); });
    check([&] {
      attn::sliding_window_cached(shorter, {.left = 3}, token, one, {.log_decay = d.slice(2, 0, length - 1)});
    });
  };
  for (const auto& d : {rows, columns})
    for (const float wrong : {0.5f, infinite, nan}) {
      CAPTURE(wrong);
      std::fill(decay.data.begin(), decay.data.end(), -1.0f);
      const std::ptrdiff_t of_item = d.data() + d.stride(0) - decay.data.data();
      const auto at = [&](idx_t b, idx_t h, idx_t t) -> float& {
        return decay.data[static_cast<std::size_t>(b * of_item + h * d.stride(1) + t * d.stride(2))];
      };
      at(0, 1, 3) = -infinite;
      at(1, 1, 4) = wrong, at(1, 0, length - 1) = wrong;  // padding
      each_call(d, [](const auto& call) { CHECK(refusal(call) == ""); });
      at(0, 1, 5) = wrong;
      out.data[0] = 7;
      each_call(d, [](const auto& call) {
        CHECK(refusal(call).find(": expected log_decay <= 0; found ") != std::string::npos);
      });
      CHECK(out.data[0] == 7);
    }
}

}  // namespace testing::forgetting_tests
