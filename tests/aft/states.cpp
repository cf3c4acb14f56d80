// The states of the attention-free family: chunks against the whole, long streams, append, reset, copies, what they
// refuse. That steps agree with the causal operators on many shapes is law 6.
#include <algorithm>
#include <functional>

#include "aft/cases.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"

namespace testing::states_tests {
namespace {

// Feeds the rows of p in chunks; the first `silent` of them by append().
template <class S, class Options, class State, class Step>
tensor<double> fed(const problem<Options>& p, State& state, idx_t silent, idx_t chunk, Step&& step) {
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  tensor<S> out(q.batch(), q.heads(), q.length(), q.dim());
  if (silent > 0) state.append(view(k).slice(2, 0, silent), view(v).slice(2, 0, silent));
  for (idx_t t = silent, count; t < q.length(); t += count) {
    count = std::min(chunk, q.length() - t);
    step(state, view(q).slice(2, t, count), view(k).slice(2, t, count), view(v).slice(2, t, count),
         view(out).slice(2, t, count));
  }
  return cast<double>(out);
}

template <class S, class Options>
problem<Options> causal_problem(const aft_shape& s) {
  auto p = aft_problem<Options>(s);
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  p.options.causal = true;
  return p;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("aft states: extremes, chunk by chunk, after a silent start", "[states]", all_types) {
  using S = TestType;
  attn::execution two(2, 0);
  for (double size : {1.0, 100.0}) {
    const aft_shape s{.batch = 2, .heads = 2, .length = 230, .dim = 20, .keys = size, .biases = 2 * size};
    for (idx_t silent : {0, 150}) {
      const auto check = [&](const auto& p, const tensor<double>& out) {
        const idx_t rest = s.length - silent;
        CHECK(relative_error(rows(out, silent, rest), rows(expected(p), silent, rest)) <= tolerance<S>::out);
      };
      auto full = causal_problem<S, reference::aft_full_options>(s);
      full.options.w = rounded<S>(aft_biases(s, 2, 230, 230));
      const tensor<S> w = cast<S>(full.options.w);
      attn::kv_cache<S> cache({.batch = 2, .heads = 2, .dim = 20});
      check(full, fed<S>(full, cache, silent, 7, [&](auto& state, auto q, auto k, auto v, auto out) {
              compiled_aft_full<S>::step(state, q, k, v, out, view(w), {}, two);
            }));

      auto local = causal_problem<S, reference::aft_local_options>(s);
      local.options.w = full.options.w, local.options.window = 100;
      attn::aft_local_state<S> window({.batch = 2, .heads = 2, .dim = 20}, {.window = 100});
      check(local, fed<S>(local, window, silent, 7, [&](auto& state, auto q, auto k, auto v, auto out) {
              compiled_aft_local<S>::step(state, q, k, v, out, view(w), {}, two);
            }));

      auto conv = causal_problem<S, reference::aft_conv_options>(s);
      conv.options.w = rounded<S>(aft_biases(s, 2, 1, 25));
      const tensor<S> kernels = cast<S>(conv.options.w);
      attn::aft_conv_state<S> past({.batch = 2, .heads = 2, .dim = 20}, {.width = 25});
      check(conv, fed<S>(conv, past, silent, 7, [&](auto& state, auto q, auto k, auto v, auto out) {
              compiled_aft_conv<S>::step(state, q, k, v, out, kernel_view(kernels, false), {}, two);
            }));

      const auto simple = causal_problem<S, reference::aft_simple_options>(s);
      attn::aft_simple_state<S> sums({.batch = 2, .heads = 2, .dim = 20});
      check(simple, fed<S>(simple, sums, silent, 7, [&](auto& state, auto q, auto k, auto v, auto out) {
              compiled_aft_simple<S>::step(state, q, k, v, out, {}, two);
            }));
    }
  }
}

TEST_CASE("aft states: one key a head, one row of biases for an endless stream", "[states]") {
  const aft_shape s{.batch = 1, .heads = 3, .length = 90, .dim = 5};
  auto conv = causal_problem<float, reference::aft_conv_options>(s);
  conv.k = tensor<double>(1, 3, 90, 1);
  conv.options.w = rounded<float>(aft_biases(s, 3, 1, 31));
  const tensor<float> kernels = cast<float>(conv.options.w), q = cast<float>(conv.q), k = cast<float>(conv.k),
                      v = cast<float>(conv.v);
  tensor<float> out(1, 3, 90, 5), local_out = out;
  attn::execution serial;
  attn::aft_conv_state<float> past({.heads = 3, .dim = 5}, {.width = 31});
  compiled_aft_conv<float>::step(past, view(q), view(k), view(v), view(out), kernel_view(kernels, false), {}, serial);
  CHECK(relative_error(out, expected(conv)) <= tolerance<float>::out);
  tensor<float> after = out;
  attn::aft_conv_state<float> fed({.heads = 3, .dim = 5}, {.width = 31});
  fed.append(view(k).slice(2, 0, 40), view(v).slice(2, 0, 40));
  const auto rest = [](const auto& x) { return x.slice(2, 40, 50); };
  std::fill(after.data.begin(), after.data.end(), 7.0f);
  compiled_aft_conv<float>::step(fed, rest(view(q)), rest(view(k)), rest(view(v)), rest(view(after)),
                                 kernel_view(kernels, false), {}, serial);
  CHECK(rows(after, 40, 50) == rows(out, 40, 50));

  // The same kernels as a band whose rows are one, for any length.
  const in_view<float> band(kernels.data.data(), {1, 3, idx_t(1) << 40, 31}, {0, 31, 0, 1});
  const in_view<float> keys(k.data.data(), {1, 3, 90, 5}, {0, 90, 1, 0});
  attn::aft_local_state<float> window({.heads = 3, .dim = 5}, {.window = 16});
  compiled_aft_local<float>::step(window, view(q), keys, view(v), view(local_out), band, {.band = true}, serial);
  CHECK(local_out == out);
}

TEST_CASE("aft states: reset and copies", "[states]") {
  const tensor<float> x = cast<float>(random_normal(3, 1, 2, 40, 9));
  const tensor<float> w(1, 2, 1, 9, 0.5f);
  attn::execution serial;
  const auto feed = [&](attn::aft_conv_state<float>& window, attn::aft_simple_state<float>& sums) {
    tensor<float> a(1, 2, 40, 9), b = a;
    compiled_aft_conv<float>::step(window, view(x), view(x), view(x), view(a), kernel_view(w, false), {}, serial);
    compiled_aft_simple<float>::step(sums, view(x), view(x), view(x), view(b), {}, serial);
    return std::pair(a, b);
  };
  attn::aft_conv_state<float> window({.heads = 2, .dim = 9}, {.width = 9});
  attn::aft_simple_state<float> sums({.heads = 2, .dim = 9});
  const auto first = feed(window, sums);
  auto window_copy = window;
  auto sums_copy = sums;
  const auto second = feed(window, sums);
  CHECK(first != second);
  CHECK(feed(window_copy, sums_copy) == second);
  CHECK((window.tokens() == 80 && sums.tokens() == 80));
  window.reset(), sums.reset();
  CHECK((window.tokens() == 0 && sums.tokens() == 0));
  CHECK(feed(window, sums) == first);

  constexpr std::size_t channels = 2 * static_cast<std::size_t>(attn::detail::round_up(9, attn::detail::width<float>));
  CHECK(sums.bytes() == 3 * channels * sizeof(float));
  CHECK(window.bytes() == 3 * channels * (5 + 1) * sizeof(float));
}

TEST_CASE("aft states refuse what does not fit, and stay as they were", "[states][refusals]") {
  constexpr idx_t most = std::numeric_limits<idx_t>::max(), large = idx_t(1) << 40;
  const struct {
    const char *name, *says;
    std::function<void()> make;
  } states[] = {
      {"aft_simple_state", "heads >= 0", [] { attn::aft_simple_state<float>({.heads = -2, .dim = 3}); }},
      {"aft_simple_state", "memory", [] { attn::aft_simple_state<float>({.batch = large, .dim = large}); }},
      {"aft_simple_state", "value_dim = dim 3", [] { attn::aft_simple_state<float>({.dim = 3, .value_dim = 4}); }},
      {"aft_local_state", "dim >= 0", [] { attn::aft_local_state<float>({.dim = -3}); }},
      {"aft_local_state", "window >= 1", [] { attn::aft_local_state<float>({.dim = 3}, {.window = 0}); }},
      {"aft_local_state", "memory", [] { attn::aft_local_state<float>({.dim = 3}, {.window = most}); }},
      {"aft_conv_state", "width >= 1", [] { attn::aft_conv_state<float>({.dim = 3}, {.width = -1}); }},
      {"aft_conv_state", "odd width", [] { attn::aft_conv_state<float>({.dim = 3}, {.width = 4}); }},
      {"aft_conv_state", "memory", [] { attn::aft_conv_state<float>({.dim = 3}, {.width = most}); }},
  };
  for (const auto& bad : states) {
    const std::string message = refusal(bad.make);
    INFO(message);
    CHECK(well_formed(message, bad.name));
    CHECK(message.find(bad.says) != std::string::npos);
  }

  const tensor<float> x(1, 2, 4, 3, 1), w(1, 2, 8, 8, 0);
  tensor<float> out(1, 2, 4, 3, 7);
  attn::execution serial;
  attn::aft_simple_state<float> sums({.heads = 2, .dim = 3});
  attn::aft_local_state<float> window({.heads = 2, .dim = 3}, {.window = 2});
  attn::aft_conv_state<float> past({.heads = 2, .dim = 3}, {.width = 3});
  attn::kv_cache<float> cache({.heads = 2, .dim = 3}), filled = cache;
  filled.append(view(x), view(x));
  const auto biases = [&](idx_t h, idx_t rows, idx_t columns) {
    return in_view<float>(w.data.data(), {1, h, rows, columns});
  };
  struct refused {
    const char* name;
    const char* says;
    std::function<void()> call;
  };
  const in_view<float> good = view(x), other_heads(x.data.data(), {1, 1, 4, 3}), other_dim(x.data.data(), {1, 2, 4, 2});
  const auto first_three = good.slice(2, 0, 3);
  const refused list[] = {
      {"aft_simple_step", "key heads",
       [&] { compiled_aft_simple<float>::step(sums, good, other_heads, good, view(out), {}, serial); }},
      {"aft_simple_step", "key length",
       [&] { compiled_aft_simple<float>::step(sums, good, first_three, good, view(out), {}, serial); }},
      {"aft_simple_step", "state dim",
       [&] {
         compiled_aft_simple<float>::step(sums, other_dim, other_dim, other_dim, view(out).slice(3, 0, 2), {}, serial);
       }},
      {"aft_simple_state", "key heads", [&] { sums.append(other_heads, other_heads); }},
      {"aft_local_state", "key dim", [&] { window.append(other_dim, good); }},
      {"aft_conv_state", "value heads", [&] { past.append(good, other_heads); }},
      {"aft_local_step", "w rows",
       [&] { compiled_aft_local<float>::step(window, good, good, good, view(out), biases(1, 3, 8), {}, serial); }},
      {"aft_local_step", "w columns",
       [&] { compiled_aft_local<float>::step(window, good, good, good, view(out), biases(1, 4, 3), {}, serial); }},
      {"aft_local_step", "w columns",
       [&] {
         compiled_aft_local<float>::step(window, good, good, good, view(out), biases(1, 4, 4), {.band = true}, serial);
       }},
      {"aft_conv_step", "width",
       [&] { compiled_aft_conv<float>::step(past, good, good, good, view(out), biases(1, 2, 4), {}, serial); }},
      {"aft_conv_step", "state width 3",
       [&] { compiled_aft_conv<float>::step(past, good, good, good, view(out), biases(1, 2, 5), {}, serial); }},
      {"aft_full_step", "w rows",
       [&] { compiled_aft_full<float>::step(cache, good, good, good, view(out), biases(1, 3, 4), {}, serial); }},
      {"aft_full_step", "w heads",
       [&] { compiled_aft_full<float>::step(cache, good, good, good, view(out), biases(3, 4, 4), {}, serial); }},
      {"aft_full_step", "overlap",
       [&] {
         compiled_aft_full<float>::step(cache, good, good, view(std::as_const(out)), view(out), biases(1, 4, 4), {},
                                        serial);
       }},
      {"aft_full_step", "cache keys",
       [&] {
         compiled_aft_full<float>::step(filled, filled.keys(), good, good, view(out), biases(1, 8, 8), {}, serial);
       }},
      {"aft_full_step", "cache values",
       [&] {
         const in_view<float> inside(filled.values().data(), {1, 1, 8, 8});
         compiled_aft_full<float>::step(filled, good, good, good, view(out), inside, {}, serial);
       }},
  };
  for (const auto& bad : list) {
    const std::string message = refusal(bad.call);
    INFO(bad.name << ": " << message);
    CHECK(well_formed(message, bad.name));
    CHECK(message.find(bad.says) != std::string::npos);
    CHECK((sums.tokens() == 0 && window.tokens() == 0 && past.tokens() == 0));
    CHECK((cache.tokens() == 0 && filled.tokens() == 4));
    CHECK(std::all_of(out.data.begin(), out.data.end(), [](float value) { return value == 7; }));
  }
}

}  // namespace testing::states_tests
