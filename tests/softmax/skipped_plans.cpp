// Skip-softmax under every plan of keys: what is far is left out, forward, in gradients and in steps, and no more than
// that. Whether it is allowed at all is each operator's own sentence.
#include <algorithm>

#include "support/call_lsh.hpp"
#include "support/call_neighborhood.hpp"
#include "support/call_patterns.hpp"
#include "support/call_selected_keys.hpp"
#include "support/call_topk_blocks.hpp"
#include "support/catch.hpp"
#include "support/far_keys.hpp"
#include "support/refusal.hpp"

namespace testing::skipped_plans_tests {
namespace {

using namespace far_keys;

// The same calls for all: queries are keys, or the pattern is not among the options.
struct hashed : compiled_lsh<float> {
  using base = compiled_lsh<float>;
  static void call(in_view<float> q, in_view<float>, in_view<float> v, out_view<float> out, const options& o,
                   const score_of<float>& score, attn::execution& exec) {
    base::call(q, v, out, o, score, exec);
  }
  static void backward(in_view<float> q, in_view<float>, in_view<float> v, in_view<float> out, in_view<float> d_out,
                       const gradients& g, const options& o, const score_of<float>& score,
                       const score_backward_of<float>& back, attn::execution& exec) {
    base::backward(q, v, out, d_out, g, o, score, back, exec);
  }
};
struct patterned : compiled_pattern_softmax<float> {
  using base = compiled_pattern_softmax<float>;
  static inline const listed_pattern pattern{{{{0, 500}, {{{100, 800}}, {{850, 900}}}}, {{500, 900}, {{{0, 700}}}}}};
  static void call(in_view<float> q, in_view<float> k, in_view<float> v, out_view<float> out, const options& o,
                   const score_of<float>& score, attn::execution& exec) {
    base::call(q, k, v, out, pattern, o, score, exec);
  }
  static void backward(in_view<float> q, in_view<float> k, in_view<float> v, in_view<float> out, in_view<float> d_out,
                       const gradients& g, const options& o, const score_of<float>& score,
                       const score_backward_of<float>& back, attn::execution& exec) {
    base::backward(q, k, v, out, pattern, d_out, g, o, score, back, exec);
  }
};

struct gradients {
  tensor<float> q, k, v;
  bool operator==(const gradients&) const = default;

  // Values that no query takes anything of.
  idx_t unread() const {
    idx_t count = 0;
    for (idx_t h = 0; h < v.heads(); ++h)
      for (idx_t j = 0; j < v.length(); ++j) count += v(0, h, j, 0) == 0;
    return count;
  }
};

template <class Operator>
gradients differentiate(const inputs<float>& x, const result<float>& r, typename Operator::options options,
                        attn::execution& exec) {
  gradients g{tensor<float>(x.batch, x.heads, x.queries, dim), tensor<float>(x.batch, x.kv_heads, x.keys, dim),
              tensor<float>(x.batch, x.kv_heads, x.keys, dim)};
  typename Operator::gradients to;
  to.q = view(g.q), to.v = view(g.v);
  if constexpr (requires { to.k; }) to.k = view(g.k);
  const tensor<float> d_out = cast<float>(random_normal(9, x.batch, x.heads, x.queries, dim));
  tensor<float> lse = r.lse;
  options.scale = 1, options.lse = row_view(lse), options.skipped = nullptr;
  Operator::backward(view(x.q), view(x.k), view(x.v), view(r.out), view(d_out), to, options, {}, {}, exec);
  return g;
}

// Nothing of far keys is left in float: what leaves them out changes no more than the order of sums.
template <class Operator>
void check(const char* name, typename Operator::options options) {
  INFO(name);
  const inputs<float> x(1, 2, 2, 900, 900, 40);
  attn::execution serial, two(2, 0);
  attn::skipped_tiles tiles, again;
  const result<float> exact = run<float, Operator>(x, options, serial);
  const gradients of_exact = differentiate<Operator>(x, exact, options, serial);
  options.skip_below = HUGE_VALF, options.skipped = &tiles;
  CHECK(run<float, Operator>(x, options, serial) == exact);
  CHECK(differentiate<Operator>(x, exact, options, serial) == of_exact);
  CHECK(tiles.skipped == 0);
  CHECK(tiles.seen > 0);
  options.skip_below = 12;
  const result<float> r = run<float, Operator>(x, options, serial);
  CHECK(tiles.skipped > 0);
  CHECK(relative_error(r.out, exact.out) <= 4e-6);
  CHECK(relative_error(r.lse, exact.lse) <= 4e-6);
  const gradients g = differentiate<Operator>(x, r, options, serial);
  CHECK_FALSE(g == of_exact);
  if (!std::same_as<Operator, hashed>) CHECK(g.unread() > of_exact.unread());  // there tokens near it see each key
  for (const auto member : {&gradients::q, &gradients::k, &gradients::v})
    CHECK(relative_error(g.*member, of_exact.*member) <= 1e-5);
  tiles = {}, options.skipped = &again;
  CHECK(run<float, Operator>(x, options, two) == r);
  options.skipped = &tiles;
  run<float, Operator>(x, options, serial);
  CHECK(again.seen == tiles.seen);
  CHECK(again.skipped == tiles.skipped);

  // Tiles depend on the number of queries, and what is left out on tiles.
  serial.set_invariant(true);
  const auto check_refused = [&](const std::string& of, const auto& call) {
    const std::string message = refusal(call);
    CAPTURE(message);
    CHECK(well_formed(message, of));
    CHECK(message.find("invariant") != std::string::npos);
  };
  check_refused(name, [&] { run<float, Operator>(x, options, serial); });
  check_refused(name + std::string("_backward"), [&] { differentiate<Operator>(x, r, options, serial); });
}

}  // namespace

TEST_CASE("skip: every plan of keys leaves out what is far", "[skip]") {
  check<compiled_sliding_window<float>>("sliding_window", {.left = 300, .right = 200});
  const std::vector<idx_t> globals = {3, 640};
  check<compiled_sliding_window<float>>("sliding_window", {.left = 300, .right = 200, .global_positions = globals});
  check<compiled_block<float>>("block", {.size = 450});
  check<compiled_strided<float>>("strided", {.stride = 2});
  check<compiled_bigbird<float>>("bigbird", {.size = 100, .window_blocks = 5});
  check<patterned>("pattern_softmax", {});
  check<compiled_topk_blocks<float>>("topk_blocks", {.block = 64, .topk = 14});
  check<compiled_neighborhood<float>>("neighborhood", {.grid = {900}, .kernel = {601}});
  check<compiled_neighborhood<float>>("neighborhood", {.grid = {30, 30}, .kernel = {25, 25}});
  const std::vector<float> slopes = {1, 1};  // whose keys have one size: far is what stands far away
  check<hashed>("lsh", {.buckets = 2, .chunk = 256, .alibi_slopes = slopes});
  std::vector<std::int32_t> blocks, singles;
  for (idx_t i = 0; i < 900; ++i)
    for (std::int32_t n = 0; n < 256; ++n) {
      if (n < 14) blocks.push_back(n);
      singles.push_back(2 * n);
    }
  compiled_selected_keys<float>::options by_block, one_by_one;
  by_block.block = 64, by_block.indices = attn::tensor_view<const std::int32_t>(blocks.data(), {1, 1, 900, 14});
  one_by_one.indices = attn::tensor_view<const std::int32_t>(singles.data(), {1, 1, 900, 256});
  check<compiled_selected_keys<float>>("selected_keys", by_block);
  check<compiled_selected_keys<float>>("selected_keys", one_by_one);
}

namespace {

// feed(k, v) gives the cache all tokens but the last; step(options) feeds that one. The same with a threshold that
// leaves out nothing, with one that leaves out what is far, and with two that are refused, nothing written.
template <class Cache, class Options, class Feed, class Step>
void check_step(const char* name, const Cache& empty, Options options, const Feed& feed, const Step& step) {
  INFO(name);
  const inputs<float> x(1, 2, 1, 1, 900, 40);
  attn::execution serial;
  attn::skipped_tiles tiles;
  options.scale = 1;
  const auto out_of = [&](const Options& given) {
    Cache cache = empty;
    tensor<float> out(1, 2, 1, dim, 7.F);
    feed(cache, view(x.k).slice(2, 0, 899), view(x.v).slice(2, 0, 899));
    const std::string message = refusal([&] {
      step(cache, view(x.q), view(x.k).slice(2, 899, 1), view(x.v).slice(2, 899, 1), view(out), given, serial);
    });
    return std::pair(out, message);
  };
  const tensor<float> exact = out_of(options).first;
  options.skip_below = HUGE_VALF, options.skipped = &tiles;
  CHECK(out_of(options).first == exact);
  options.skip_below = 12;
  CHECK(relative_error(out_of(options).first, exact) <= 4e-6);
  CHECK(tiles.skipped > 0);
  const auto check_refused = [&](const char* says) {
    const auto [out, message] = out_of(options);
    CAPTURE(message);
    CHECK(well_formed(message, name));
    CHECK(message.find(says) != std::string::npos);
    CHECK(std::count(out.data.begin(), out.data.end(), 7.F) == std::ssize(out.data));
  };
  serial.set_invariant(true);
  check_refused("invariant");
  serial.set_invariant(false);
  options.skip_below = -1;
  check_refused("skip_below >= 0; found -1");
}

}  // namespace

TEST_CASE("skip: steps and calls over caches", "[skip]") {
  const attn::state_extents extents{.heads = 1, .dim = dim};
  const auto append = [](auto& cache, const auto& k, const auto& v) { cache.append(k, v); };
  const attn::kv_cache<float> empty(extents);
  using full = compiled_full_softmax<float>;
  check_step("full_softmax_step", empty, full::options{}, append,
             [](auto& cache, auto q, auto k, auto v, auto out, const auto& o, attn::execution& exec) {
               full::step(cache, q, k, v, out, o, {}, exec);
             });
  check_step("full_softmax_cached", empty, full::cached_options{}, append,
             [](auto& cache, auto q, auto k, auto v, auto out, const auto& o, attn::execution& exec) {
               cache.append(k, v);
               full::cached(cache, q, out, o, exec);
             });
  check_step("sliding_window_step", attn::sliding_window_cache<float>(extents, {.left = 700}),
             attn::sliding_window_step_options<float>{}, append,
             [](auto& cache, auto q, auto k, auto v, auto out, const auto& o, attn::execution& exec) {
               compiled_sliding_window<float>::step(cache, q, k, v, out, o, {}, exec);
             });
  check_step("topk_blocks_step", attn::topk_blocks_cache<float>(extents, {.block = 64}),
             attn::topk_blocks_step_options<float>{.topk = 15}, append,
             [](auto& cache, auto q, auto k, auto v, auto out, const auto& o, attn::execution& exec) {
               compiled_topk_blocks<float>::step(cache, q, k, v, out, o, {}, exec);
             });
  std::vector<std::int32_t> blocks;
  for (std::int32_t n = 0; n < 15; ++n) blocks.push_back(n);
  const attn::tensor_view<const std::int32_t> lists(blocks.data(), {1, 1, 1, 15});
  using selected = compiled_selected_keys<float>;
  const auto listed = [&](auto options) {
    options.block = 64, options.indices = lists;
    return options;
  };
  check_step("selected_keys_step", empty, listed(selected::step_options{}), append,
             [](auto& cache, auto q, auto k, auto v, auto out, const auto& o, attn::execution& exec) {
               selected::step(cache, q, k, v, out, o, {}, exec);
             });
  check_step("selected_keys_cached", empty, listed(selected::cached_options{}), append,
             [](auto& cache, auto q, auto k, auto v, auto out, const auto& o, attn::execution& exec) {
               cache.append(k, v);
               selected::cached(cache, q, out, o, exec);
             });
}

// Sinks are no scores: they leave out nothing forward, and join what is kept. Backward they do (skipped_tiles.hpp).
TEST_CASE("skip: lse of a large sink and of what is kept", "[skip]") {
  const std::vector<float> sinks = {25, -2};
  attn::execution serial;
  for (idx_t queries : {1, 130}) {
    const inputs<float> x(1, 2, 2, queries, 900, 40);
    attn::full_softmax_options<float> options{.sinks = sinks};
    using full = compiled_full_softmax<float>;
    const result<float> exact = run<float, full>(x, options, serial);
    const gradients of_exact = differentiate<full>(x, exact, options, serial);
    options.skip_below = 12;
    const result<float> r = run<float, full>(x, options, serial);
    CHECK(relative_error(r.out, exact.out) <= 4e-6);
    CHECK(relative_error(r.lse, exact.lse) <= 4e-6);
    for (idx_t i = 0; i < queries; ++i) CHECK(std::abs(r.lse(0, 0, i, 0) - 25) < 1e-4);
    const gradients g = differentiate<full>(x, r, options, serial);
    for (idx_t j = 0; j < x.keys; ++j) CHECK(g.v(0, 0, j, 0) == 0);
    CHECK(std::all_of(g.q.data.begin(), g.q.data.end(), [](float value) { return std::isfinite(value); }));
    double most = 0, error = 0;  // of the head with a small sink
    for (std::size_t n = g.v.data.size() / 2; n < g.v.data.size(); ++n) {
      most = std::max(most, static_cast<double>(std::abs(of_exact.v.data[n])));
      error = std::max(error, static_cast<double>(std::abs(of_exact.v.data[n] - g.v.data[n])));
    }
    CHECK(error <= 1e-5 * most);
  }
}

}  // namespace testing::skipped_plans_tests
