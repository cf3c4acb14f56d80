// pooled_tokens against its reference, its state fed step by step, and what is refused.
#include "layers/pooled_tokens.hpp"

namespace testing::pooled_tokens_tests {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();

template <class S>
tensor<S> by_library(const pooled_tokens_problem& p) {
  pooled_tokens_memory<S> m(p);
  attn::execution serial;
  m.run(serial);
  return m.out;
}

template <class S>
void check(const pooled_tokens_problem& given) {
  const pooled_tokens_problem p = rounded<S>(given);
  INFO(case_of(p).name);
  pooled_tokens_memory<S> m(p), again(p);
  attn::execution serial, threads(3, 0);
  m.run(serial), again.run(threads);
  CHECK(relative_error(m.out, p.by_reference()) <= tolerance<S>::out);
  CHECK(again.out == m.out);
}

// Feeds all tokens in pieces and puts the rows together, item by item.
template <class S>
tensor<S> fed(attn::pooled_tokens_state<S>& state, const pooled_tokens_memory<S>& m, const std::vector<idx_t>& pieces) {
  tensor<S> all(m.out.batch(), m.out.heads(), m.out.length(), m.out.dim(), S(7));
  const auto x = view(m.x);
  idx_t at = 0, done = 0;
  for (idx_t n : pieces) {
    const idx_t rows = state.rows(n);
    attn::pooled_tokens_step_options<S> options{.bias = bias_view(m.bias)};
    if (!m.logits.empty()) options.logits = view(m.logits).slice(2, at, n);
    attn::pooled_tokens_step(state, x.slice(2, at, n), view(all).slice(2, done, rows), options);
    at += n, done += rows;
  }
  CHECK(done == all.length());
  return all;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("pooled_tokens: against its reference", "[pooled_tokens]", all_types) {
  for (idx_t window : {1, 2, 4, 5, 9, 33})
    for (bool overlap : {false, true})
      for (int given : {0, 1, 2, 3})
        for (idx_t channels : {6, 16})
          check<TestType>(random_pooled_tokens({2, 2, 70, channels}, window, overlap, given));
  for (idx_t length : {0, 1, 3, 4})
    for (bool overlap : {false, true}) check<TestType>(random_pooled_tokens({2, 1, length, 2}, 4, overlap));
  check<TestType>(random_pooled_tokens({2, 3, 300, 8}, 128, false));
  check<TestType>(random_pooled_tokens({1, 1, 600, 4}, 4, true));  // several tasks of a head
  check<TestType>(random_pooled_tokens({2, 1, 9, 0}, 4, true));
  check<TestType>(random_pooled_tokens({0, 1, 9, 4}, 4, true));
}

TEMPLATE_LIST_TEST_CASE("pooled_tokens: windows of one token are the tokens", "[pooled_tokens]", all_types) {
  for (int given : {0, 1, 2, 3})
    for (idx_t channels : {16, 17}) {
      const auto p = rounded<TestType>(random_pooled_tokens({2, 2, 70, channels}, 1, false, given));
      CHECK(by_library<TestType>(p) == cast<TestType>(p.x));
    }
}

TEST_CASE("pooled_tokens: averages, of the tokens that are seen", "[pooled_tokens]") {
  for (idx_t window : {4, 8, 20})
    for (bool overlap : {false, true}) {
      auto p = random_pooled_tokens({1, 2, 60, 32}, window, overlap);
      for (double& x : p.x.data) x = 1.7;
      for (std::size_t n = 0; n < p.x.data.size(); n += 3) p.x.data[n] = nan, p.logits.data[n] = -infinity;
      for (idx_t c = 0; c < 32; ++c) p.logits(0, 0, window + 1, c) = p.logits(0, 0, window + 2, c) = 0.5;
      for (idx_t c = 0; c < 32; ++c) p.x(0, 0, window + 1, c) = p.x(0, 0, window + 2, c) = 1.7;
      for (float mean : by_library<float>(p).data) CHECK((std::abs(mean - 1.7f) <= 1e-6f || mean == 0));
    }
}

TEMPLATE_LIST_TEST_CASE("pooled_tokens: logits that rise or fall along a window", "[pooled_tokens]", all_types) {
  for (double step : {-15., -.4, .4, 5., 15.})  // weights of some rows underflow, or are those of all others so far
    for (idx_t channels : {6, 48}) {
      INFO("step " << step);
      auto p = random_pooled_tokens({1, 2, 160, channels}, 40, false);
      for (idx_t h = 0; h < 2; ++h)
        for (idx_t i = 0; i < 160; ++i)
          for (idx_t c = 0; c < channels; ++c) p.logits(0, h, i, c) += step * static_cast<double>(i % 40);
      check<TestType>(p);
    }
}

TEST_CASE("pooled_tokens: what is not finite reaches its own channel and windows", "[pooled_tokens]") {
  for (idx_t window : {4, 20}) {
    auto p = random_pooled_tokens({1, 1, 60, 32}, window, false);
    const tensor<float> clean = by_library<float>(p);
    p.x(0, 0, window + 1, 3) = nan, p.logits(0, 0, window + 2, 9) = nan, p.x(0, 0, window, 20) = infinity;
    const tensor<float> out = by_library<float>(p);
    for (idx_t w = 0; w < out.length(); ++w)
      for (idx_t c = 0; c < 32; ++c) {
        const bool reached = w == 1 && (c == 3 || c == 9 || c == 20);
        CHECK((reached ? !std::isfinite(out(0, 0, w, c)) : out(0, 0, w, c) == clean(0, 0, w, c)));
      }
  }
}

TEMPLATE_LIST_TEST_CASE("pooled_tokens: lengths, with anything in the padding", "[pooled_tokens]", all_types) {
  for (bool overlap : {false, true}) {
    auto p = random_pooled_tokens({4, 2, 21, 16}, 4, overlap);
    p.options.lengths = {21, 0, 3, 14};
    check<TestType>(p);
    auto bad = p;
    for (idx_t b = 0; b < 4; ++b)
      for (idx_t h = 0; h < 2; ++h)  // the tokens of an unfinished window, too
        for (idx_t t = p.options.lengths[static_cast<std::size_t>(b)] / 4 * 4; t < 21; ++t)
          for (idx_t c = 0; c < 16; ++c) bad.x(b, h, t, c) = nan, bad.logits(b, h, t, c) = b % 2 ? nan : infinity;
    CHECK(by_library<TestType>(bad) == by_library<TestType>(p));
  }
}

TEMPLATE_LIST_TEST_CASE("pooled_tokens: layout and independence", "[pooled_tokens]", all_types) {
  using S = TestType;
  const auto p = random_pooled_tokens({2, 3, 30, 32}, 4, true);
  const tensor<S> wanted = by_library<S>(p);
  const pooled_tokens_memory<S> m(p);
  // [length, dim, batch, head] memory
  std::vector<S> x(m.x.data.size()), z(x.size()), out(wanted.data.size(), S(7));
  const auto turned = [](auto* data, const tensor<S>& like) {
    return attn::tensor_view<std::remove_pointer_t<decltype(data)>>(
        data, like.extents, {like.heads(), 1, like.batch() * like.heads() * like.dim(), like.batch() * like.heads()});
  };
  const auto to_x = turned(x.data(), m.x), to_z = turned(z.data(), m.x), to = turned(out.data(), wanted);
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 3; ++h)
      for (idx_t t = 0; t < 30; ++t)
        for (idx_t c = 0; c < 32; ++c) to_x(b, h, t, c) = m.x(b, h, t, c), to_z(b, h, t, c) = m.logits(b, h, t, c);
  auto options = m.options();
  options.logits = attn::tensor_view<const S>(to_z);
  attn::pooled_tokens(to_x, to, options);
  bool same = true;
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 3; ++h)
      for (idx_t w = 0; w < 7; ++w)
        for (idx_t c = 0; c < 16; ++c) same = same && to(b, h, w, c) == wanted(b, h, w, c);
  CHECK(same);
  tensor<S> alone(1, 1, 7, 16);
  options = m.options();
  options.logits = view(m.logits).slice(0, 1, 1).slice(1, 2, 1), options.bias = bias_view(m.bias).slice(0, 2, 1);
  attn::pooled_tokens(view(m.x).slice(0, 1, 1).slice(1, 2, 1), view(alone), options);
  for (idx_t n = 0; n < 7 * 16; ++n) same = same && alone(0, 0, n / 16, n % 16) == wanted(1, 2, n / 16, n % 16);
  CHECK(same);
}

TEST_CASE("pooled_tokens: extremes", "[pooled_tokens]") {
  auto p = random_pooled_tokens({1, 1, 32, 16}, 16, false, 1);
  for (idx_t t = 0; t < 32; ++t)
    for (idx_t c = 0; c < 16; ++c) p.logits(0, 0, t, c) = c == 0 ? -infinity : t % 2 ? 1e4 + c : -1e4;
  for (idx_t t = 1; t < 16; t += 2) p.logits(0, 0, t, 1) = -infinity, p.x(0, 0, t, 1) = nan;
  const tensor<float> out = by_library<float>(p);
  for (idx_t w = 0; w < 2; ++w) {
    CHECK(out(0, 0, w, 0) == 0);  // none is seen
    for (idx_t c = 1; c < 16; ++c) {
      double mean = 0;
      for (idx_t t = w == 0 && c == 1 ? 0 : 1; t < 16; t += 2) mean += p.x(0, 0, 16 * w + t, c) / 8;
      CHECK(std::abs(static_cast<double>(out(0, 0, w, c)) - mean) <= 1e-6);
    }
  }
  p = random_pooled_tokens({1, 1, 40000, 2}, 40000, false, 1);  // compensated: as a short one
  check<float>(p);
}

TEMPLATE_LIST_TEST_CASE("pooled_tokens_state: steps and chunks give the bits of one call", "[pooled_tokens]",
                        all_types) {
  using S = TestType;
  for (idx_t window : {1, 3, 4, 11})
    for (bool overlap : {false, true})
      for (int given : {0, 1, 3}) {
        const auto p = random_pooled_tokens({2, 2, 24, 10}, window, overlap, given);
        const pooled_tokens_memory<S> m(p);
        const tensor<S> wanted = by_library<S>(p);
        attn::pooled_tokens_state<S> state({.batch = 2, .heads = 2, .channels = 10, .window = window,
                                            .overlap = overlap, .logits = given > 0});
        const idx_t of_head = (window - 1) * 10 + (overlap ? window * 5 : 0);
        CHECK(state.bytes() == static_cast<std::size_t>(4 * of_head * (given > 0 ? 2 : 1)) * sizeof(S));
        CHECK(fed(state, m, {1, 1, 2, 0, 13, 1, 6}) == wanted);
        CHECK(state.tokens() == 24);
        CHECK(state.windows(1) == 24 / window);
        state.reset();
        CHECK(fed(state, m, std::vector<idx_t>(24, 1)) == wanted);
        state.reset();
        CHECK(fed(state, m, {24}) == wanted);
      }
}

TEST_CASE("pooled_tokens_state: tokens whose channels lie apart join those of the state", "[pooled_tokens]") {
  constexpr idx_t length = 23, channels = 128, window = 4, dim = channels / 2, windows = length / window;
  std::vector<float> rows(length * channels), columns(rows.size()), whole(windows * dim), steps(whole.size());
  for (idx_t t = 0; t < length; ++t)
    for (idx_t c = 0; c < channels; ++c)
      columns[static_cast<std::size_t>(c * length + t)] = rows[static_cast<std::size_t>(t * channels + c)] =
          std::sin(1.3f * static_cast<float>(t * channels + c));
  using tokens = attn::tensor_view<const float>;
  const tokens dense(rows.data(), {1, 1, length, channels}),
      apart(columns.data(), {1, 1, length, channels}, {0, 0, 1, length});
  attn::pooled_tokens(dense, attn::tensor_view<float>(whole.data(), {1, 1, windows, dim}),
                      {.window = window, .overlap = true, .logits = dense});
  for (const auto& [x, logits] : {std::pair(apart, dense), std::pair(dense, apart), std::pair(apart, apart)}) {
    attn::pooled_tokens_state<float> state({.channels = channels, .window = window, .overlap = true, .logits = true});
    float* to = steps.data();
    for (idx_t t = 0; t < length; t += 3) {
      const idx_t count = (std::min)(idx_t(3), length - t), made = state.rows(count);
      attn::pooled_tokens_step(state, x.slice(2, t, count), attn::tensor_view<float>(to, {1, 1, made, dim}),
                               {.logits = logits.slice(2, t, count)});
      to += made * dim;
    }
    CHECK(steps == whole);
  }
}

TEST_CASE("pooled_tokens_state: items, lengths, append", "[pooled_tokens]") {
  const auto p = random_pooled_tokens({2, 1, 12, 6}, 3, true);
  const pooled_tokens_memory<float> m(p);
  const tensor<float> wanted = by_library<float>(p);
  attn::pooled_tokens_state<float> state(
      {.batch = 2, .channels = 6, .window = 3, .overlap = true, .logits = true});
  const auto x = view(m.x), z = view(m.logits);
  const auto step = [&](idx_t at, idx_t n, const std::vector<idx_t>& lengths, tensor<float>& out) {
    attn::pooled_tokens_step_options<float> options{.lengths = lengths};
    options.logits = z.slice(2, at, n), options.bias = bias_view(m.bias);
    attn::pooled_tokens_step(state, x.slice(2, at, n), view(out), options);
  };
  tensor<float> out(2, 1, 2, 3, 7.0f);  // a row more than needed
  const std::vector<idx_t> uneven = {5, 2};
  CHECK(state.rows(5, uneven) == 1);
  step(0, 5, uneven, out);
  for (idx_t c = 0; c < 3; ++c) {
    CHECK(out(0, 0, 0, c) == wanted(0, 0, 0, c));
    CHECK(out(1, 0, 0, c) == 0);
    CHECK(out(0, 0, 1, c) == 0);
  }
  CHECK(state.windows(0) == 1);
  CHECK(state.windows(1) == 0);
  state.append(x.slice(2, 5, 2), z.slice(2, 5, 2), {.lengths = std::vector<idx_t>{2, 0}});
  const auto branch = state;
  state.copy_item(0, 1);
  CHECK(state.tokens(1) == 7);
  step(7, 5, {5, 0}, out);  // of item 0
  for (idx_t n = 0; n < 6; ++n) CHECK(out(0, 0, n / 3, n % 3) == wanted(0, 0, 2 + n / 3, n % 3));
  state.reorder(std::vector<idx_t>{1, 0});
  CHECK(state.tokens(0) == 7);
  CHECK(state.tokens(1) == 12);
  CHECK(branch.tokens(1) == 2);
}

TEST_CASE("pooled_tokens, its step and its state refuse what does not fit", "[pooled_tokens]") {
  const tensor<float> x(2, 2, 9, 8), z = x, b(1, 2, 4, 8);
  const auto refused = [&](const char* says, auto change) {
    tensor<float> out(2, 2, 2, 4, 7.0f);
    attn::tensor_view<float> to = view(out);
    attn::tensor_view<const float> from = view(x);
    std::vector<idx_t> lengths;
    attn::pooled_tokens_options<float> o{.window = 4, .overlap = true};
    o.logits = view(z), o.bias = bias_view(b);
    change(o, from, to, lengths);
    if (!lengths.empty()) o.lengths = lengths;
    const std::string text = refusal([&] { attn::pooled_tokens(from, to, o); });
    INFO(text);
    CHECK(well_formed(text, "pooled_tokens"));
    CHECK(text.find(says) != std::string::npos);
    CHECK(out == tensor<float>(2, 2, 2, 4, 7.0f));
  };
  refused("an even number of channels of x, where windows overlap; found 7",
          [](auto&, auto& from, auto&, auto&) { from = from.slice(3, 0, 7); });
  refused("window >= 1; found 0", [](auto& o, auto&, auto&, auto&) { o.window = 0; });
  refused("logits of the shape of x", [&](auto& o, auto&, auto&, auto&) { o.logits = view(z).slice(2, 0, 8); });
  refused("bias heads 1 or 2; found 0", [&](auto& o, auto&, auto&, auto&) { o.bias = bias_view(b).slice(0, 0, 0); });
  refused("bias length = window 4; found 3",
          [&](auto& o, auto&, auto&, auto&) { o.bias = bias_view(b).slice(1, 0, 3); });
  refused("bias channels = x channels 8; found 4",
          [&](auto& o, auto&, auto&, auto&) { o.bias = bias_view(b).slice(2, 0, 4); });
  refused("out length = complete windows of x 2; found 1",
          [](auto&, auto&, auto& to, auto&) { to = to.slice(2, 0, 1); });
  refused("out dim = half of x channels 4; found 3", [](auto&, auto&, auto& to, auto&) { to = to.slice(3, 0, 3); });
  refused("out dim = x channels 8; found 4", [](auto& o, auto&, auto&, auto&) { o.overlap = false; });
  refused("lengths from 0 to 9; found 10", [](auto&, auto&, auto&, auto& lengths) { lengths = {10, 1}; });
  refused("lengths, one per batch item: 2; found 1", [](auto&, auto&, auto&, auto& lengths) { lengths = {1}; });
  refused("separate memory", [](auto& o, auto& from, auto& to, auto&) {
    from = attn::tensor_view<const float>(to.data(), from.extents()), o.logits = {};
  });

  attn::pooled_tokens_state<float> state({.batch = 2, .heads = 2, .channels = 8, .window = 4, .overlap = true,
                                          .logits = true});
  tensor<float> out(2, 2, 2, 4);
  const auto step = [&](auto from, auto to, const attn::pooled_tokens_step_options<float>& o) {
    const std::string text = refusal([&] { attn::pooled_tokens_step(state, from, to, o); });
    CHECK(well_formed(text, "pooled_tokens_step"));
    return text.substr(text.find("expected"));
  };
  attn::pooled_tokens_step_options<float> o;
  CHECK(step(view(x), view(out), o) == "expected logits, since the state has them; found none");
  o.logits = view(z);
  CHECK(step(view(x), view(out).slice(2, 0, 1), o) == "expected out length >= 2; found 1");
  CHECK(step(view(x).slice(1, 0, 1), view(out), o) == "expected x heads = heads of the state 2; found 1");
  CHECK(state.tokens() == 0);
  CHECK(well_formed(refusal([&] { state.append(view(x)); }), "pooled_tokens_state::append"));
  const auto refused_state = [](const attn::pooled_tokens_state_extents& e) {
    return refusal([&] { attn::pooled_tokens_state<float> one(e); });
  };
  CHECK(refused_state({.channels = 8, .window = 0}) == "attn::pooled_tokens_state: expected window >= 1; found 0");
  CHECK(well_formed(refused_state({.channels = 7, .overlap = true}), "pooled_tokens_state"));
  CHECK(well_formed(refused_state({.channels = idx_t(1) << 40, .window = 1 << 20}), "pooled_tokens_state"));
}

}  // namespace testing::pooled_tokens_tests
