// Masks: the same as a score function that hides what they hide, forward and backward, for every operator of the family
// that takes one; on top of every other option; and what is hidden reaches nothing.
#include <functional>

#include "support/call_patterns.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"

namespace testing::mask_tests {
namespace {

struct masked_shape {
  idx_t batch = 2, heads = 4, kv_heads = 2, queries = 130, keys = 430, dim = 12, value_dim = 9;  // more than one tile
};

// Extents 1 broadcast.
struct byte_mask {
  std::vector<std::uint8_t> bytes;
  std::array<idx_t, 4> extents;

  byte_mask(std::array<idx_t, 4> e, const std::function<bool(idx_t b, idx_t h, idx_t i, idx_t j)>& sees) : extents(e) {
    for (idx_t b = 0; b < e[0]; ++b)
      for (idx_t h = 0; h < e[1]; ++h)
        for (idx_t i = 0; i < e[2]; ++i)
          for (idx_t j = 0; j < e[3]; ++j)
            bytes.push_back(static_cast<std::uint8_t>(sees(b, h, i, j) ? 1 + (i + j) % 255 : 0));
  }
  attn::tensor_view<const std::uint8_t> view() const { return {bytes.data(), extents}; }
  bool sees(idx_t b, idx_t h, idx_t i, idx_t j) const {
    const auto at = [&](int axis, idx_t n) { return extents[static_cast<std::size_t>(axis)] == 1 ? 0 : n; };
    const auto v = view();
    return v(at(0, b), at(1, h), at(2, i), j) != 0;
  }
};

// Scattered, of one row for all, in blocks of whole tiles, and with rows that see nothing.
std::vector<byte_mask> masks_of(const masked_shape& s) {
  const auto scattered = [](idx_t b, idx_t h, idx_t i, idx_t j) { return (7 * i + 13 * j + 3 * b + h) % 5 < 3; };
  return {{{s.batch, s.heads, s.queries, s.keys}, scattered},
          {{1, 1, 1, s.keys}, [](idx_t, idx_t, idx_t, idx_t j) { return j % 9 != 4 && j > 20; }},
          {{1, s.heads, s.queries, s.keys},
           [](idx_t, idx_t h, idx_t i, idx_t j) { return (i / 64 + j / 200 + h) % 2 == 0 && i % 50 != 3; }},
          {{s.batch, 1, s.queries, s.keys}, [](idx_t, idx_t, idx_t, idx_t) { return true; }}};
}

template <class S>
struct masked_run {
  tensor<S> out, dq, dk, dv;
  tensor<real<S>> lse;
  bool operator==(const masked_run&) const = default;
};

template <class S>
struct masked_inputs {
  masked_shape s;
  tensor<S> q = cast<S>(random_normal(1, s.batch, s.heads, s.queries, s.dim)),
            k = cast<S>(random_normal(2, s.batch, s.kv_heads, s.keys, s.dim)),
            v = cast<S>(random_normal(3, s.batch, s.kv_heads, s.keys, s.value_dim)),
            d_out = cast<S>(random_normal(4, s.batch, s.heads, s.queries, s.value_dim));
};

// Compiled is a wrapper of the operator; o its options but for lse.
template <class S, class Compiled, class Options>
masked_run<S> run(const masked_inputs<S>& in, Options o, const score_of<S>& score = {}, int threads = 1) {
  const masked_shape& s = in.s;
  masked_run<S> r{tensor<S>(s.batch, s.heads, s.queries, s.value_dim, S(7)), in.q, in.k, in.v,
                  tensor<real<S>>(s.batch, s.heads, s.queries, 1, real<S>(7))};
  o.lse = row_view(r.lse);
  attn::execution exec(threads, 0);
  Compiled::call(view(in.q), view(in.k), view(in.v), view(r.out), o, score, exec);
  score_backward_of<S> back;
  if (score)
    back = [&score](real<S> x, real<S> d, idx_t b, idx_t h, idx_t i, idx_t j) {
      return score(x, b, h, i, j) == -std::numeric_limits<real<S>>::infinity() ? real<S>(0) : d;
    };
  Compiled::backward(view(in.q), view(in.k), view(in.v), view(std::as_const(r.out)), view(in.d_out),
                     {.q = view(r.dq), .k = view(r.dk), .v = view(r.dv)}, o, score, back, exec);
  return r;
}

template <class S, class Compiled, class Options>
void check(const masked_shape& s, const Options& o) {
  const masked_inputs<S> in{s};
  int n = 0;
  for (const byte_mask& mask : masks_of(s)) {
    CAPTURE(n);
    Options masked = o;
    masked.mask = mask.view();
    const idx_t shift = s.keys - s.queries;  // i is a position
    const auto hides = [&](real<S> x, idx_t b, idx_t h, idx_t i, idx_t j) {
      return mask.sees(b, h, i - shift, j) ? x : -std::numeric_limits<real<S>>::infinity();
    };
    const masked_run<S> found = run<S, Compiled>(in, masked), wanted = run<S, Compiled>(in, o, hides);
    CHECK(relative_error(found.out, cast<double>(wanted.out)) <= tolerance<S>::out);
    CHECK(relative_error(found.lse, cast<double>(wanted.lse)) <= tolerance<S>::lse);
    CHECK(relative_error(found.dq, cast<double>(wanted.dq)) <= gradient_tolerance<S>::value);
    CHECK(relative_error(found.dk, cast<double>(wanted.dk)) <= gradient_tolerance<S>::value);
    CHECK(relative_error(found.dv, cast<double>(wanted.dv)) <= gradient_tolerance<S>::value);
    CHECK(run<S, Compiled>(in, masked, {}, 3) == found);
    if (++n == 4) CHECK(run<S, Compiled>(in, o) == found);  // a mask that hides nothing changes no bit
  }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("mask: full_softmax, with every other option", "[mask]", all_types) {
  using S = TestType;
  const std::vector<real<S>> slopes = {real<S>(0.5), real<S>(0.25), 0, real<S>(0.125)}, sinks(4, real<S>(0.25));
  const std::vector<idx_t> query_lengths = {130, 77}, key_lengths = {400, 430};
  tensor<real<S>> bias = cast<real<S>>(random_normal(9, 1, 4, 1, 430));
  bias(0, 1, 0, 17) = -std::numeric_limits<real<S>>::infinity();
  attn::full_softmax_options<S> o;
  check<S, compiled_full_softmax<S>>({}, o);
  o.causal = true, o.sinks = sinks;
  check<S, compiled_full_softmax<S>>({}, o);
  o.alibi_slopes = slopes, o.softcap = real<S>(1.5), o.bias = view(std::as_const(bias));
  check<S, compiled_full_softmax<S>>({}, o);
  check<S, compiled_full_softmax<S>>({.queries = 3}, o);  // the keys read in place
}

TEST_CASE("mask: with true lengths", "[mask]") {
  const std::vector<idx_t> query_lengths = {130, 77}, key_lengths = {400, 430};
  const masked_inputs<float> in{{}};
  const byte_mask mask = masks_of(in.s)[0];
  attn::full_softmax_options<float> o{.query_lengths = query_lengths, .key_lengths = key_lengths};
  o.mask = mask.view();
  const masked_run<float> found = run<float, compiled_full_softmax<float>>(in, o);
  for (idx_t b = 0; b < 2; ++b) {
    const auto item = [&](const tensor<float>& x, idx_t rows) {
      tensor<float> y(1, x.heads(), rows, x.dim());
      for (idx_t h = 0; h < x.heads(); ++h)
        for (idx_t i = 0; i < rows; ++i)
          for (idx_t d = 0; d < x.dim(); ++d) y(0, h, i, d) = x(b, h, i, d);
      return y;
    };
    const idx_t nq = query_lengths[static_cast<std::size_t>(b)], nk = key_lengths[static_cast<std::size_t>(b)];
    masked_inputs<float> one{{.batch = 1, .queries = nq, .keys = nk}};
    one.q = item(in.q, nq), one.k = item(in.k, nk), one.v = item(in.v, nk), one.d_out = item(in.d_out, nq);
    const masked_run<float> alone = run<float, compiled_full_softmax<float>>(
        one, attn::full_softmax_options<float>{.mask = mask.view().slice(0, b, 1).slice(2, 0, nq).slice(3, 0, nk)});
    CHECK(item(found.out, nq) == alone.out);
    CHECK(item(found.dk, nk) == alone.dk);
    CHECK(item(found.dq, nq) == alone.dq);
  }
}

TEMPLATE_LIST_TEST_CASE("mask: windows and patterns", "[mask]", exact_types) {
  using S = TestType;
  const std::vector<idx_t> globals = {0, 77}, dilation = {2};
  check<S, compiled_sliding_window<S>>({}, attn::sliding_window_options<S>{.left = 60, .right = 40});
  check<S, compiled_sliding_window<S>>(
      {},
      attn::sliding_window_options<S>{.causal = true, .left = 60, .dilation = dilation, .global_positions = globals});
  check<S, compiled_block<S>>({}, attn::block_options<S>{.size = 100});
  check<S, compiled_strided<S>>({}, attn::strided_options<S>{.causal = true, .stride = 20});
  check<S, compiled_bigbird<S>>({.queries = 430}, attn::bigbird_options<S>{.size = 40});
}

TEST_CASE("mask: what it hides reaches nothing, not even NaN", "[mask]") {
  const masked_inputs<float> in{{}};
  const byte_mask mask({1, 1, 1, 430}, [](idx_t, idx_t, idx_t, idx_t j) { return j % 3 != 1; });
  attn::full_softmax_options<float> o;
  o.mask = mask.view();
  masked_inputs<float> poisoned = in;
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 2; ++h)
      for (idx_t j = 1; j < 430; j += 3) {
        poisoned.k(b, h, j, j % 12) = std::numeric_limits<float>::quiet_NaN();
        poisoned.v(b, h, j, j % 9) = j % 2 ? HUGE_VALF : std::numeric_limits<float>::quiet_NaN();
      }
  const masked_run<float> clean = run<float, compiled_full_softmax<float>>(in, o),
                          dirty = run<float, compiled_full_softmax<float>>(poisoned, o);
  CHECK(clean.out == dirty.out);
  CHECK(clean.dq == dirty.dq);
  bool zero = true, same = true;
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 2; ++h)
      for (idx_t j = 0; j < 430; ++j)
        for (idx_t d = 0; d < 12; ++d) {
          if (j % 3 == 1) zero = zero && dirty.dk(b, h, j, d) == 0;
          else same = same && dirty.dk(b, h, j, d) == clean.dk(b, h, j, d);
        }
  CHECK(zero);
  CHECK(same);
}

TEST_CASE("mask: of bool, of Eigen's arrays, with any strides, in steps", "[mask]") {
  const masked_inputs<float> in{{}};
  const byte_mask mask = masks_of(in.s)[0];
  const masked_run<float> wanted =
      run<float, compiled_full_softmax<float>>(in, attn::full_softmax_options<float>{.mask = mask.view()});
  std::unique_ptr<bool[]> flags(new bool[mask.bytes.size()]);  // [keys, queries, heads, batch]
  const attn::tensor_view<bool> turned(flags.get(), {2, 4, 130, 430}, {1, 2, 8, 8 * 130});
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 4; ++h)
      for (idx_t i = 0; i < 130; ++i)
        for (idx_t j = 0; j < 430; ++j) turned(b, h, i, j) = mask.sees(b, h, i, j);
  CHECK(run<float, compiled_full_softmax<float>>(in, attn::full_softmax_options<float>{.mask = turned}) == wanted);

  const Eigen::Matrix<bool, -1, -1> seen = Eigen::MatrixXf::Random(9, 9).array() > 0;
  const Eigen::MatrixXf x = Eigen::MatrixXf::Random(9, 5);
  Eigen::MatrixXf out(9, 5), other(9, 5);
  attn::full_softmax(x, x, x, out, {.mask = seen});
  attn::full_softmax(x, x, x, other, {}, [&](float s, idx_t, idx_t, idx_t i, idx_t j) {
    return seen(i, j) ? s : -std::numeric_limits<float>::infinity();
  });
  CHECK((out - other).norm() < 1e-5);

  // Of a step: [.., n, tokens with the new ones].
  attn::kv_cache<float> cache({.batch = 2, .heads = 2, .dim = 12, .value_dim = 9});
  tensor<float> step(2, 4, 130, 9);
  cache.append(view(in.k).slice(2, 0, 300), view(in.v).slice(2, 0, 300));
  attn::full_softmax_step(cache, view(in.q), view(in.k).slice(2, 300, 130), view(in.v).slice(2, 300, 130), view(step),
                          {.mask = mask.view()});
  const masked_run<float> causal = run<float, compiled_full_softmax<float>>(
      in, attn::full_softmax_options<float>{.causal = true, .mask = mask.view()});
  CHECK(step == causal.out);
}

TEST_CASE("mask: of another shape, or where results go, is refused", "[mask]") {
  const masked_inputs<float> in{{.batch = 2, .heads = 4, .queries = 5, .keys = 6}};
  tensor<float> out(2, 4, 5, 9, 7);
  const std::vector<std::uint8_t> bytes(4000, 1);
  attn::execution serial;
  const auto says = [&](const char* text, const attn::mask_view& mask) {
    const std::string message = refusal([&] {
      compiled_full_softmax<float>::call(view(in.q), view(in.k), view(in.v), view(out), {.mask = mask}, {}, serial);
    });
    INFO(message << " should mention " << text);
    CHECK(well_formed(message, "full_softmax"));
    CHECK(message.find(text) != std::string::npos);
    CHECK(out == tensor<float>(2, 4, 5, 9, 7));
  };
  const auto of = [&](idx_t b, idx_t h, idx_t i, idx_t j) {
    return attn::tensor_view<const std::uint8_t>(bytes.data(), {b, h, i, j});
  };
  says("mask batch 1 or 2; found 3", of(3, 4, 5, 6));
  says("mask heads 1 or 4; found 2", of(2, 2, 5, 6));
  says("mask query length 1 or 5; found 4", of(1, 1, 4, 6));
  says("mask key length = key length 6; found 1", of(1, 1, 5, 1));
  says("null", attn::tensor_view<const std::uint8_t>(nullptr, {1, 1, 5, 6}));
  says("overlap", attn::tensor_view<std::uint8_t>(reinterpret_cast<std::uint8_t*>(out.data.data()), {1, 1, 5, 6}));
  attn::kv_cache<float> cache({.batch = 2, .heads = 2, .dim = 12, .value_dim = 9});
  const std::string message = refusal([&] {
    attn::full_softmax_step(cache, view(in.q), view(in.k).slice(2, 0, 5), view(in.v).slice(2, 0, 5), view(out),
                            {.mask = of(1, 1, 5, 6)});
  });
  CHECK(message == "attn::full_softmax_step: expected mask key length = key length 5; found 6");
  CHECK(cache.tokens() == 0);
  const std::string backward = refusal([&] {
    compiled_full_softmax<float>::backward(view(in.q), view(in.k), view(in.v), view(std::as_const(out)), view(in.d_out),
                                           {}, {.mask = of(1, 1, 4, 6)}, {}, {}, serial);
  });
  CHECK(well_formed(backward, "full_softmax_backward"));
}

}  // namespace testing::mask_tests
