// lsh against its reference: every option alone and in combination, odd lengths, all types; what hashing is for.
#include "reference/lsh.hpp"

#include "support/call_lsh.hpp"
#include "support/catch.hpp"
#include "support/npy.hpp"
#include "support/refusals.hpp"
#include "support/run_pattern.hpp"

namespace testing::lsh_tests {
namespace {

struct lsh_problem {
  tensor<double> q, v;
  reference::lsh_options options;
};

lsh_problem problem_of(idx_t length, idx_t dim, idx_t value_dim, const reference::lsh_options& options,
                       std::uint64_t seed) {
  const idx_t batch = 2, heads = 4, kv_heads = 2;
  lsh_problem p{random_normal(seed, batch, heads, length, dim),
                random_normal(seed + 1, batch, kv_heads, length, value_dim), options};
  p.options.rotations = random_normal(seed + 2, seed % 2 ? heads : 1, options.rounds, dim, options.buckets / 2);
  return p;
}

template <class S>
lsh_problem rounded_problem(lsh_problem p) {
  p.q = rounded<S>(p.q), p.v = rounded<S>(p.v);
  p.options.rotations = rounded<real<S>>(p.options.rotations);
  p.options.norm_eps = static_cast<double>(static_cast<real<S>>(p.options.norm_eps));
  round_options<S>(p.options);
  return p;
}

template <class S>
reference::result run_lsh(const lsh_problem& p, attn::execution& execution) {
  common_softmax_options<S, attn::lsh_options<S>> stored(p.options);
  auto& o = stored.options;
  o.rounds = p.options.rounds, o.buckets = p.options.buckets, o.chunk = p.options.chunk;
  o.lookback = p.options.lookback, o.lookahead = p.options.lookahead;
  o.wrap = p.options.wrap, o.scaled = p.options.scaled, o.norm_eps = static_cast<real<S>>(p.options.norm_eps);
  const tensor<real<S>> rotations = cast<real<S>>(p.options.rotations);
  const tensor<S> q = cast<S>(p.q), v = cast<S>(p.v);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  tensor<real<S>> lse(q.batch(), q.heads(), q.length(), 1, real<S>(7));
  o.rotations = view(rotations), o.lse = row_view(lse);
  compiled_lsh<S>::call(view(q), view(v), view(out), o, stored.score, execution);
  return {cast<double>(out), cast<double>(lse)};
}

// On inputs whose buckets rounding does not decide.
template <class S>
void check(idx_t length, idx_t dim, idx_t value_dim, const reference::lsh_options& options, std::uint64_t seed = 1) {
  lsh_problem p = rounded_problem<S>(problem_of(length, dim, value_dim, options, seed));
  while (reference::lsh_gap(p.q, p.options) < 2e-5)
    p = rounded_problem<S>(problem_of(length, dim, value_dim, options, seed += 100));
  attn::execution serial;
  const reference::result actual = run_lsh<S>(p, serial), wanted = reference::lsh(p.q, p.v, p.options);
  CHECK(relative_error(actual.out, wanted.out) <= tolerance<S>::out);
  CHECK(relative_error(actual.lse, wanted.lse) <= tolerance<S>::lse);
}

reference::lsh_options chosen(int choice, idx_t length) {
  reference::lsh_options o;
  choose(o, choice, length, length);
  o.query_lengths = o.key_lengths = {};
  if (choice & 32) o.lengths = {length, length > 9 ? length - 9 : 0};
  return o;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("lsh: every combination of options", "[lsh]", exact_types) {
  for (int choice = 0; choice < 64; ++choice)
    for (bool wrap : {false, true}) {
      CAPTURE(choice, wrap);
      reference::lsh_options o = chosen(choice, 41);
      o.rounds = 2, o.buckets = 6, o.chunk = 7, o.wrap = wrap;
      check<TestType>(41, 9, 12, o);
      o.rounds = 3, o.buckets = 2, o.chunk = 4, o.lookback = 2, o.lookahead = 1, o.norm_eps = 0.01;
      o.scaled = o.scale.has_value();
      check<TestType>(41, 5, 33, o, 2);
    }
}

TEMPLATE_LIST_TEST_CASE("lsh: 16-bit storage computes in float", "[lsh]", storage_types) {
  for (int choice = 0; choice < 64; ++choice)
    if (!(choice & 10)) {
      CAPTURE(choice);
      reference::lsh_options o = chosen(choice, 33);
      o.rounds = 2, o.buckets = 4, o.chunk = 8, o.wrap = choice % 3 == 0;
      check<TestType>(33, 17, 20, o);
    }
}

TEMPLATE_LIST_TEST_CASE("lsh: odd lengths, dims, chunks and buckets", "[lsh]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  const idx_t chunks[] = {1, 3, 16, 64, 100, 1000};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t c = 0; c < std::size(chunks); ++c) {
      reference::lsh_options o;
      o.rounds = 1 + static_cast<idx_t>(n + c) % 3, o.buckets = 2 * (1 + static_cast<idx_t>(5 * n + 7 * c) % 40);
      o.chunk = chunks[c], o.causal = (n + c) % 2, o.wrap = (n + c) % 3 == 0;
      CAPTURE(lengths[n], o.rounds, o.buckets, o.chunk, o.causal, o.wrap);
      check<TestType>(lengths[n], dims[(n + c) % 8], dims[(n + 3 * c) % 8], o, n + 1);
    }
}

TEMPLATE_LIST_TEST_CASE("lsh: sequences of many segments", "[lsh]", exact_types) {
  const idx_t chunks[] = {7, 64, 100, 600};
  for (idx_t n = 0; n < 4; ++n)
    for (bool causal : {false, true}) {
      reference::lsh_options o;
      o.rounds = 2, o.buckets = 40, o.chunk = chunks[n], o.causal = causal, o.wrap = n % 2;
      o.lookback = n, o.lookahead = causal;
      CAPTURE(o.chunk, causal);
      check<TestType>(1300 + n, 8, n % 2 ? 16 : 5, o, 40);
    }
}

TEMPLATE_LIST_TEST_CASE("lsh: more chunks asked for than there are", "[lsh]", exact_types) {
  for (idx_t rounds : {1, 2})
    for (idx_t length : {3, 9, 20})
      for (idx_t both = 1; both < 9; ++both) {
        reference::lsh_options o;
        o.rounds = rounds, o.buckets = 4, o.chunk = 4, o.wrap = true, o.lookback = both, o.lookahead = both / 2;
        CAPTURE(rounds, length, both);
        check<TestType>(length, 5, 6, o, 3);
      }
}

TEST_CASE("lsh: a query sees a key that is not a number, wherever it is", "[lsh]") {
  for (idx_t rounds : {1, 3})
    for (idx_t length : {2, 5, 40}) {
      tensor<float> q = cast<float>(random_normal(1, 1, 1, length, 4)),
                    v = cast<float>(random_normal(2, 1, 1, length, 3));
      tensor<float> out(1, 1, length, 3);
      q(0, 0, length / 2, 0) = std::numeric_limits<float>::quiet_NaN();
      attn::execution serial;
      compiled_lsh<float>::call(view(q), view(v), view(out), {.rounds = rounds, .buckets = 2, .chunk = length}, {},
                                serial);
      for (idx_t i = 0; i < length; ++i) CHECK(std::isnan(out(0, 0, i, 2)));
    }
}

TEST_CASE("lsh: a seed gives what the rotations drawn from it give", "[lsh]") {
  const tensor<float> q = cast<float>(random_normal(1, 2, 3, 70, 16)), v = cast<float>(random_normal(2, 2, 3, 70, 8));
  tensor<float> by_seed(2, 3, 70, 8), by_rotations(2, 3, 70, 8), other(2, 3, 70, 8);
  const auto rotations = attn::draw_rotations<float>(4, 16, 10, {.seed = 5});
  attn::lsh_options<float> o{.buckets = 10, .chunk = 8, .seed = 5};
  attn::execution serial, two(2);
  compiled_lsh<float>::call(view(q), view(v), view(by_seed), o, {}, two);
  o.seed = 6;
  compiled_lsh<float>::call(view(q), view(v), view(other), o, {}, serial);
  o.rotations = rotations;
  compiled_lsh<float>::call(view(q), view(v), view(by_rotations), o, {}, serial);
  CHECK(by_seed == by_rotations);
  CHECK(by_seed != other);
  // the numbers themselves: the same on every machine
  const attn::tensor_view<const float> drawn = rotations;
  attn::random_numbers numbers(5, 0);
  CHECK(drawn(0, 0, 0, 0) == static_cast<float>(numbers.normal()));
  CHECK(drawn(0, 0, 0, 1) == static_cast<float>(numbers.normal()));
  CHECK(well_formed(refusal([] { attn::draw_rotations<float>(0, 4, 4); }), "draw_rotations"));
  CHECK(well_formed(refusal([] { attn::draw_rotations<float>(1, 4, 5); }), "draw_rotations"));
  CHECK(well_formed(refusal([] { attn::draw_rotations<float>(1, 4, 4, {.heads = -1}); }), "draw_rotations"));
}

TEST_CASE("lsh: more heads than a wave takes, with and without threads", "[lsh]") {
  // 0.5 MB per head with its tables: a wave takes three of the eight.
  const tensor<float> q = cast<float>(random_normal(1, 2, 4, 700, 64)),
                      v = cast<float>(random_normal(2, 2, 2, 700, 64));
  const std::vector<idx_t> lengths = {700, 555};
  for (bool wrap : {false, true}) {
    tensor<float> alone(2, 4, 700, 64, 7), shared(2, 4, 700, 64, 8);
    tensor<float> alone_lse(2, 4, 700, 1, 7), shared_lse(2, 4, 700, 1, 8);
    attn::execution serial, two(2), three(3);
    attn::lsh_options<float> o{
        .lengths = lengths, .rounds = 2, .buckets = 20, .wrap = wrap, .lse = row_view(alone_lse)};
    compiled_lsh<float>::call(view(q), view(v), view(alone), o, {}, serial);
    o.lse = row_view(shared_lse);
    for (attn::execution* threads : {&two, &three}) {
      compiled_lsh<float>::call(view(q), view(v), view(shared), o, {}, *threads);
      CHECK(alone == shared);
      CHECK(alone_lse == shared_lse);
    }
  }
}

TEST_CASE("lsh: every view with a layout of its own", "[lsh]") {
  const tensor<float> q = cast<float>(random_normal(1, 2, 4, 150, 16)),
                      v = cast<float>(random_normal(2, 2, 2, 150, 16));
  tensor<float> plain(2, 4, 150, 16), q_columns(2, 4, 16, 150), v_gaps(2, 150, 2, 32), by_token(2, 150, 4, 16);
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t i = 0; i < 150; ++i)
      for (idx_t d = 0; d < 16; ++d) {
        for (idx_t h = 0; h < 4; ++h) q_columns(b, h, d, i) = q(b, h, i, d);
        for (idx_t h = 0; h < 2; ++h) v_gaps(b, i, h, 2 * d) = v(b, h, i, d);
      }
  attn::execution serial;
  const attn::lsh_options<float> o{.rounds = 3, .buckets = 6, .chunk = 20};
  compiled_lsh<float>::call(view(q), view(v), view(plain), o, {}, serial);
  compiled_lsh<float>::call({q_columns.data.data(), {2, 4, 150, 16}, {4 * 16 * 150, 16 * 150, 1, 150}},
                            {v_gaps.data.data(), {2, 2, 150, 16}, {150 * 64, 32, 64, 2}},
                            attn::blhd_view(by_token.data.data(), 2, 150, 4, 16), o, {}, serial);
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 4; ++h)
      for (idx_t i = 0; i < 150; ++i)
        for (idx_t d = 0; d < 16; ++d) REQUIRE(by_token(b, i, h, d) == plain(b, h, i, d));
}

TEST_CASE("lsh: options, score and execution may each be left out", "[lsh]") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(20, 8), v = Eigen::MatrixXf::Random(20, 8);
  Eigen::MatrixXf wanted(20, 8), out(20, 8);
  attn::execution threads(2, 0);
  const auto same = [](float s, auto, auto, auto, auto) { return s; };
  attn::lsh(q, v, wanted);
  const auto is_same = [&] { return (out - wanted).norm() <= 1e-6f * wanted.norm() && (out.setZero(), true); };
  attn::lsh(q, v, out, threads);
  CHECK(is_same());
  attn::lsh(q, v, out, attn::execution(2));
  CHECK(is_same());
  attn::lsh(q, v, out, {.rounds = 4}, threads);
  CHECK(is_same());
  attn::lsh(q, v, out, {}, same);
  CHECK(is_same());
  attn::lsh(q, v, out, {.scale = 1 / std::sqrt(8.0f)}, same, attn::execution(2));
  CHECK(is_same());
}

TEST_CASE("lsh: on a trained model's queries the error falls with every doubling of the rounds", "[lsh][long]") {
  for (const char* layer : {"use_lite_layer0", "use_lite_layer1"}) {
    const auto load = [&](const char* name) {
      const npy_array read = read_npy(std::string(ATTN_DATA_DIR "/") + layer + "/" + name);
      tensor<double> x;
      std::copy(read.shape.begin(), read.shape.end(), x.extents.begin());
      x.data = read.values;
      return x;
    };
    const tensor<float> q = cast<float>(load("q.npy")), v = cast<float>(load("v.npy"));
    const tensor<float> k = cast<float>(reference::lsh_keys(load("q.npy"), 0));
    tensor<float> exact = v, out = v;
    attn::execution serial;
    compiled_full_softmax<float>::call(
        view(q), view(k), view(v), view(exact), {},
        [](float s, idx_t, idx_t, idx_t i, idx_t j) { return i == j ? -std::numeric_limits<float>::infinity() : s; },
        serial);
    double before = std::numeric_limits<double>::infinity();
    for (idx_t rounds : {1, 2, 4, 8, 16}) {
      const attn::lsh_options<float> o{.rounds = rounds, .buckets = 16, .chunk = 64, .seed = 1};
      compiled_lsh<float>::call(view(q), view(v), view(out), o, {}, serial);
      const double error = relative_error(out, exact);
      CAPTURE(layer, rounds, error, before);
      CHECK(error < before);
      before = error;
    }
  }
}

TEST_CASE("lsh refuses what does not fit", "[refusals]") {
  struct form {
    using options = attn::lsh_options<float>;
    static void call(in_view<float> q, in_view<float>, in_view<float> v, out_view<float> out, const options& chosen,
                     const score_of<float>& score, attn::execution& execution) {
      compiled_lsh<float>::call(q, v, out, chosen, score, execution);
    }
  };
  using here = call_inputs<form::options, 6>;
  std::vector<refused<here>> list;
  const auto rotations = [](idx_t h, idx_t rounds, idx_t dim, idx_t half) {
    return [=](here& d) {
      d.options.rounds = 2, d.options.buckets = 6;
      d.options.rotations = d.shaped(h, rounds, dim, half);
    };
  };
  const auto with = [](auto set) { return [=](here& d) { set(d.options); }; };
  list.push_back({"another batch of v", "batch", [](here& d) { d.v_view = d.shaped(3, 2, 6, 5); }});
  list.push_back({"heads of v that do not divide", "heads", [](here& d) { d.v_view = d.shaped(2, 3, 6, 5); }});
  list.push_back({"another length of v", "length", [](here& d) { d.v_view = d.shaped(2, 2, 9, 5); }});
  list.push_back({"another dim of out", "dim", [](here& d) { d.out_view_ = d.out_view_.slice(3, 0, 4); }});
  list.push_back({"out that is q", "overlap", [](here& d) {
                    d.q_view = {d.out.data.data(), {2, 4, 6, 8}, {0, 0, 0, 1}};
                  }});
  list.push_back({"lse in v", "overlap", [](here& d) { d.options.lse = {d.v.data.data(), {2, 4, 6}}; }});
  list.push_back({"a null v", "null", [](here& d) { d.v_view = {nullptr, {2, 2, 6, 5}}; }});
  list.push_back({"no rounds", "rounds >= 1; found 0", with([](auto& o) { o.rounds = 0; })});
  list.push_back({"negative rounds", "rounds >= 1; found -4", with([](auto& o) { o.rounds = -4; })});
  list.push_back({"odd buckets", "an even number of buckets; found 7", with([](auto& o) { o.buckets = 7; })});
  list.push_back({"no buckets", "buckets >= 2; found 0", with([](auto& o) { o.buckets = 0; })});
  list.push_back({"too many buckets", "buckets <= 16777216", with([](auto& o) { o.buckets = (1 << 24) + 2; })});
  list.push_back({"a chunk of 0", "chunk >= 1; found 0", with([](auto& o) { o.chunk = 0; })});
  list.push_back({"a negative chunk", "chunk >= 1; found -64", with([](auto& o) { o.chunk = -64; })});
  list.push_back({"a negative lookback", "lookback", with([](auto& o) { o.lookback = -1; })});
  list.push_back({"a negative lookahead", "lookahead", with([](auto& o) { o.lookahead = -1; })});
  list.push_back({"a negative norm_eps", "norm_eps", with([](auto& o) { o.norm_eps = -1; })});
  list.push_back({"a scale and scaled = false", "scale", with([](auto& o) { o.scale = 1, o.scaled = false; })});
  list.push_back({"rotations of other rounds", "rotations rounds", rotations(1, 3, 8, 3)});
  list.push_back({"rotations of another dim", "rotations rows", rotations(1, 2, 7, 3)});
  list.push_back({"rotations of other buckets", "rotations columns", rotations(1, 2, 8, 6)});
  list.push_back({"rotations of some heads", "rotations heads", rotations(2, 2, 8, 3)});
  list.push_back({"a length beyond the buffer", "lengths", [](here& d) { d.options.lengths = d.list(7, 0); }});
  list.push_back({"a softcap of 0", "softcap", with([](auto& o) { o.softcap = 0.0f; })});
  list.push_back({"too few sinks", "sinks", [](here& d) { d.options.sinks = d.values(2); }});
  for (float x : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    list.push_back({"sinks that are no numbers", "sinks", [=](here& d) {
                      d.options.sinks = d.values(4), d.numbers[2] = x;
                    }});
    list.push_back({"slopes that are no numbers", "alibi_slopes", [=](here& d) {
                      d.options.alibi_slopes = d.values(4), d.numbers[1] = x;
                    }});
  }
  check_refused<form, 6>("lsh", list);
}

}  // namespace testing::lsh_tests
