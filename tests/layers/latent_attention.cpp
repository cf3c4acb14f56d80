// latent_attention in both forms against its reference and its laws; its step, and what is refused.
#include "layers/latent_attention.hpp"

namespace testing::latent_attention_tests {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr attn::latent_form forms[] = {attn::latent_form::expanded, attn::latent_form::absorbed};

// Of 16-bit elements keys and values, or queries and results over latents, are rounded too.
template <class S>
constexpr double form_tolerance = sizeof(S) == 2 ? 1e-2 : 2 * tolerance<S>::out;

template <class S>
void check(const latent_problem& given) {
  latent_problem p = rounded<S>(given);
  INFO(case_of(p).name);
  const reference::result wanted = p.by_reference();
  for (auto form : {forms[0], forms[1], attn::latent_form::automatic}) {
    INFO("form " << static_cast<int>(form));
    p.form = form;
    latent_memory<S> m(p), again(p);
    attn::execution serial, threads(3, 0);
    m.run(serial), again.run(threads);
    CHECK(relative_error(m.out, wanted.out) <= form_tolerance<S>);
    for (std::size_t n = 0; n < m.lse.data.size(); ++n) {
      const double x = static_cast<double>(m.lse.data[n]), y = wanted.lse.data[n];
      CHECK((x == y || std::abs(x - y) <= form_tolerance<S> * 10));
    }
    CHECK(again.out == m.out);
    CHECK(again.lse == m.lse);
  }
}

latent_problem with_everything() {
  latent_problem p = random_latent({.queries = 18, .keys = 33});
  auto& o = p.options;
  o.causal = true, o.softcap = 3, o.scale = 0.4, o.sinks = {0.3, -1, 2}, o.alibi_slopes = {0.1, 0.05, 0.2};
  o.bias = random_normal(9, 1, 3, 18, 33);
  return p;
}

// The last `queries` queries of a problem, and its rows of bias.
template <class S>
latent_inputs<S> rows(const latent_memory<S>& m, idx_t first, idx_t count) {
  latent_inputs<S> x = m.inputs();
  x.q = x.q.slice(2, first, count), x.latent = x.latent.slice(2, first, count);
  if (x.q_rotary) x.q_rotary = x.q_rotary.slice(2, first, count), x.k_rotary = x.k_rotary.slice(2, first, count);
  return x;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("latent_attention: against its reference", "[latent_attention]", all_types) {
  for (idx_t length : {1, 7, 64, 130})
    for (idx_t rotary : {0, 4})
      for (bool causal : {false, true}) {
        auto p = random_latent({.queries = length, .keys = length, .rotary = rotary});
        p.options.causal = causal;
        check<TestType>(p);
      }
  for (idx_t latent : {1, 33})
    check<TestType>(random_latent({.queries = 3, .keys = 70, .dim = 9, .rotary = 3, .latent = latent}));
  check<TestType>(with_everything());
  for (idx_t queries : {0, 9}) check<TestType>(random_latent({.queries = queries, .keys = 0}));
  check<TestType>(random_latent({.batch = 0}));
  check<TestType>(random_latent({.heads = 0}));
}

TEST_CASE("latent_attention: the form follows from lengths and dims", "[latent_attention]") {
  attn::detail::attention_shape s{1, 1, 1, 1, 1000, 192, 128};
  CHECK(attn::detail::absorbed_is_shorter(s, 512, 64, true));
  s.queries = 1000;
  CHECK(!attn::detail::absorbed_is_shorter(s, 512, 64, true));
  CHECK(attn::detail::absorbed_is_shorter(s, 64, 64, false));
}

TEMPLATE_LIST_TEST_CASE("latent_attention: lengths, with anything in the padding", "[latent_attention]", all_types) {
  using S = TestType;
  latent_problem p = random_latent({.batch = 3, .queries = 9, .keys = 12});
  p.options.causal = true, p.options.query_lengths = {9, 0, 4}, p.options.key_lengths = {11, 12, 4};
  check<S>(p);
  for (auto form : forms) {
    p.form = form;
    auto bad = p;
    for (idx_t b = 0; b < 3; ++b) {
      const auto item = static_cast<std::size_t>(b);
      for (idx_t i = p.options.query_lengths[item]; i < 9; ++i)
        for (idx_t h = 0; h < 3; ++h) bad.q(b, h, i, 1) = bad.q_rotary(b, h, i, 2) = nan;
      for (idx_t j = p.options.key_lengths[item]; j < 12; ++j) bad.latent(b, 0, j, 3) = bad.k_rotary(b, 0, j, 0) = nan;
    }
    latent_memory<S> m(p), other(bad);
    attn::execution serial;
    m.run(serial), other.run(serial);
    CHECK(other.out == m.out);
    CHECK(other.lse == m.lse);
  }
}

TEMPLATE_LIST_TEST_CASE("latent_attention: independence, layout, causality, quiet", "[latent_attention]", all_types) {
  using S = TestType;
  latent_problem p = random_latent({.queries = 40, .keys = 40});
  p.options.causal = true;
  for (auto form : forms) {
    p.form = form;
    latent_memory<S> m(p);
    attn::execution serial;
    m.run(serial);
    // One head of one item; q and q_rotary as parts of the same rows, k_rotary behind the latents.
    const tensor<S> q = reference::joined(m.q, m.q_rotary), c = reference::joined(m.latent, m.k_rotary);
    tensor<S> alone(1, 1, 40, 5);
    const auto of = [](const auto& x, idx_t h, idx_t channel, idx_t count) {
      return x.slice(0, 1, 1).slice(1, h, 1).slice(3, channel, count);
    };
    attn::latent_attention_options<S> options{.causal = true, .form = form};
    compiled_latent_attention<S>::call(
        {of(view(q), 2, 0, 8), of(view(q), 2, 8, 4), of(view(c), 0, 0, 16), of(view(c), 0, 16, 4),
         m.inputs().w_key.slice(0, 2, 1), m.inputs().w_value.slice(0, 2, 1)},
        view(alone), options, serial);
    bool same = true;
    for (idx_t n = 0; n < 40 * 5; ++n) same = same && alone(0, 0, n / 5, n % 5) == m.out(1, 2, n / 5, n % 5);
    CHECK(same);
    // A token that is NaN reaches the queries that see it, and no other.
    auto bad = p;
    bad.latent(0, 0, 30, 2) = nan;
    latent_memory<S> other(bad);
    other.run(serial);
    bool quiet = true;
    for (idx_t h = 0; h < 3; ++h)
      for (idx_t i = 0; i < 40; ++i)
        for (idx_t d = 0; d < 5; ++d)
          quiet = quiet && (i < 30 ? other.out(0, h, i, d) == m.out(0, h, i, d)
                                   : other.out(0, h, i, d) != other.out(0, h, i, d));
    CHECK(quiet);
  }
}

TEST_CASE("latent_attention: heads of several groups are what each is alone", "[latent_attention]") {
  // Keys and values of one head: 16.8 MB.
  const latent_problem p = random_latent({.batch = 1, .heads = 2, .queries = 1, .keys = 2048, .dim = 1025, .rotary = 3,
                                          .latent = 1, .value = 1027});
  latent_memory<float> m(p);
  m.options.form = attn::latent_form::expanded;
  attn::execution serial;
  m.run(serial);
  for (idx_t h = 0; h < 2; ++h) {
    latent_inputs<float> x = m.inputs();
    x.q = x.q.slice(1, h, 1), x.q_rotary = x.q_rotary.slice(1, h, 1);
    x.w_key = x.w_key.slice(0, h, 1), x.w_value = x.w_value.slice(0, h, 1);
    tensor<float> alone(1, 1, 1, 1027);
    compiled_latent_attention<float>::call(x, view(alone), {.form = attn::latent_form::expanded}, serial);
    bool same = true;
    for (idx_t d = 0; d < 1027; ++d) same = same && alone(0, 0, 0, d) == m.out(0, h, 0, d);
    CHECK(same);
  }
}

TEMPLATE_LIST_TEST_CASE("latent_attention_step: tokens and chunks give the whole", "[latent_attention_step]",
                        all_types) {
  using S = TestType;
  for (idx_t rotary : {0, 4}) {
    latent_problem p = rounded<S>(random_latent({.queries = 70, .keys = 70, .rotary = rotary}));
    p.options.causal = true, p.options.sinks = {0.3, -1, 2};
    const auto wanted = p.by_reference();
    latent_memory<S> m(p);
    attn::latent_attention_step_options<S> options{.sinks = m.sinks};
    for (const std::vector<idx_t>& pieces : {std::vector<idx_t>(70, 1), {1, 5, 0, 64}, {70}}) {
      attn::kv_cache<S> cache({.batch = 2, .dim = 16 + rotary, .value_dim = 16}, {.values_in_keys = true});
      attn::execution serial;
      idx_t at = 0;
      for (idx_t n : pieces) {
        compiled_latent_attention<S>::step(cache, rows(m, at, n), view(m.out).slice(2, at, n), options, serial);
        at += n;
      }
      CHECK(cache.tokens() == 70);
      CHECK(relative_error(m.out, wanted.out) <= form_tolerance<S>);
    }
  }
}

TEST_CASE("latent_attention_step: lengths, and a step that is refused changes nothing", "[latent_attention_step]") {
  const latent_problem p = random_latent({.queries = 4, .keys = 4});
  latent_memory<float> m(p);
  attn::kv_cache<float> cache({.batch = 2, .dim = 20, .value_dim = 16}, {.values_in_keys = true});
  attn::execution serial;
  const std::vector<idx_t> lengths = {4, 1};
  compiled_latent_attention<float>::step(cache, m.inputs(), view(m.out), {.lengths = lengths}, serial);
  CHECK(cache.tokens(0) == 4);
  CHECK(cache.tokens(1) == 1);
  for (idx_t i = 1; i < 4; ++i) CHECK(m.out(1, 2, i, 3) == 0);
  const auto refused = [&](auto& to, latent_inputs<float> x, const char* says) {
    const std::string text =
        refusal([&] { compiled_latent_attention<float>::step(to, x, view(m.out), {}, serial); });
    INFO(text);
    CHECK(well_formed(text, "latent_attention_step"));
    CHECK(text.find(says) != std::string::npos);
  };
  attn::kv_cache<float> apart({.batch = 2, .dim = 20, .value_dim = 16}),
      wide({.batch = 2, .dim = 21, .value_dim = 16}, {.values_in_keys = true}),
      values({.batch = 2, .dim = 20, .value_dim = 15}, {.values_in_keys = true}),
      heads({.batch = 2, .heads = 3, .dim = 20, .value_dim = 16}, {.values_in_keys = true}),
      items({.batch = 3, .dim = 20, .value_dim = 16}, {.values_in_keys = true});
  refused(apart, m.inputs(), "a cache with values_in_keys");
  refused(wide, m.inputs(), "cache dim = latent dim + rotary dim 20; found 21");
  refused(values, m.inputs(), "cache value dim = latent dim 16; found 15");
  refused(heads, m.inputs(), "cache heads 1; found 3");
  refused(items, m.inputs(), "key batch = cache batch 3; found 2");
  latent_inputs<float> x = m.inputs();
  x.latent = x.latent.slice(2, 0, 3), x.k_rotary = x.k_rotary.slice(2, 0, 3);
  refused(cache, x, "query length = key length 3; found 4");
  CHECK(cache.tokens(0) == 4);
}

TEST_CASE("latent_attention refuses what does not fit", "[latent_attention]") {
  const latent_memory<float> m(random_latent({}));
  const auto refused = [&](const char* says, auto change) {
    tensor<float> out = m.out;
    latent_inputs<float> x = m.inputs();
    attn::tensor_view<float> to = view(out);
    attn::latent_attention_options<float> o;
    std::vector<float> sinks;
    change(x, to, o, sinks);
    if (!sinks.empty()) o.sinks = sinks;
    attn::execution serial;
    const std::string text = refusal([&] { compiled_latent_attention<float>::call(x, to, o, serial); });
    INFO(text);
    CHECK(well_formed(text, "latent_attention"));
    CHECK(text.find(says) != std::string::npos);
    CHECK(out == m.out);
  };
  refused("q_rotary heads = query heads 3; found 2", [](auto& x, auto&...) { x.q_rotary = x.q_rotary.slice(1, 0, 2); });
  refused("q_rotary length = query length 20; found 19",
          [](auto& x, auto&...) { x.q_rotary = x.q_rotary.slice(2, 0, 19); });
  refused("latent batch = query batch 2; found 1", [](auto& x, auto&...) { x.latent = x.latent.slice(0, 0, 1); });
  refused("latent heads 1; found 3", [](auto& x, auto&...) { x.latent = x.q; });
  refused("k_rotary length = latent length 20; found 7",
          [](auto& x, auto&...) { x.k_rotary = x.k_rotary.slice(2, 0, 7); });
  refused("k_rotary dim = q_rotary dim 4; found 3", [](auto& x, auto&...) { x.k_rotary = x.k_rotary.slice(3, 0, 3); });
  refused("k_rotary dim = q_rotary dim 4; found 0", [](auto& x, auto&...) { x.k_rotary = {}; });
  refused("k_rotary heads 1; found 3", [](auto& x, auto&...) { x.k_rotary = x.q_rotary; });
  refused("w_key heads = query heads 3; found 1", [](auto& x, auto&...) { x.w_key = x.w_key.slice(0, 0, 1); });
  refused("w_key rows = query dim 8; found 7", [](auto& x, auto&...) { x.w_key = x.w_key.slice(1, 0, 7); });
  refused("w_key columns = latent dim 16; found 15", [](auto& x, auto&...) { x.w_key = x.w_key.slice(2, 0, 15); });
  refused("w_value heads = query heads 3; found 2", [](auto& x, auto&...) { x.w_value = x.w_value.slice(0, 0, 2); });
  refused("w_value columns = latent dim 16; found 15",
          [](auto& x, auto&...) { x.w_value = x.w_value.slice(2, 0, 15); });
  refused("out dim = value dim 5; found 4", [](auto&, auto& to, auto&...) { to = to.slice(3, 0, 4); });
  refused("sinks, one per head: 3; found 2", [](auto&, auto&, auto&, auto& sinks) { sinks = {1, 2}; });
  refused("lse heads = query heads 3; found 2", [](auto&, auto&, auto& o, auto&) {
    static std::vector<float> memory(80);
    o.lse = attn::tensor_view<float, 3>(memory.data(), {2, 2, 20});
  });
  refused("separate memory", [](auto& x, auto& to, auto&...) { x.w_value = {to.data(), {3, 5, 16}}; });
}

}  // namespace testing::latent_attention_tests
