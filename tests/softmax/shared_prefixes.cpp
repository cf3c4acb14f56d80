// Sequences that share pages of a cache are attended together: to the last bit as with pages of their own.
#include <attn/core/paged_cache.hpp>
#include <attn/softmax/full_softmax_step.hpp>

#include "support/catch.hpp"
#include "support/pairwise.hpp"
#include "support/random.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"

namespace testing::shared_prefixes_tests {
namespace {

using lengths = std::vector<idx_t>;

constexpr idx_t batch = 7, heads = 4, kv_heads = 2, dim = 24, value_dim = 20, longest = 2110;
constexpr idx_t stems[batch] = {0, 1, 0, 0, 1, 0, 0};               // what a sequence begins with
constexpr idx_t begun[batch] = {2100, 519, 2080, 600, 519, 0, 600};  // its first tokens

template <class C>
tensor<C> memory(idx_t pages, idx_t rows, idx_t cols, float value) {
  return {pages, kv_heads, rows, cols, static_cast<C>(value)};
}

// The same tokens twice: as copies of the sequence that began first, and each with pages of its own. Rows of pages that
// no token was stored in are NaN.
template <class S, class C = S>
struct sequences {
  tensor<S> k[2], v[2];
  std::optional<tensor<C>> keys, values;
  attn::page_pool<C> shared_pages, own_pages;
  attn::paged_cache<C> shared, own;

  static attn::page_pool_extents extents(idx_t page, idx_t pages) {
    return {.pages = pages, .page_tokens = page, .heads = kv_heads, .dim = dim, .value_dim = value_dim};
  }
  attn::page_pool<C> pool_of_nan(idx_t page, idx_t pages) {
    if constexpr (attn::detail::coded<C>) {
      return attn::page_pool<C>(extents(page, pages));
    } else {
      keys = memory<C>(pages, page, dim, std::numeric_limits<float>::quiet_NaN());
      values = memory<C>(pages, page, value_dim, std::numeric_limits<float>::quiet_NaN());
      return attn::page_pool<C>(view(*keys), view(*values));
    }
  }

  explicit sequences(idx_t page)
      : shared_pages(pool_of_nan(page, 2 * longest / page + 60)), own_pages(extents(page, 7 * longest / page + 30)),
        shared(shared_pages, batch), own(own_pages, batch) {
    for (idx_t stem : {0, 1}) {
      const auto seed = static_cast<std::uint64_t>(stem);
      k[stem] = cast<S>(random_normal(seed + 1, 1, kv_heads, 2100, dim));
      v[stem] = cast<S>(random_normal(seed + 3, 1, kv_heads, 2100, value_dim));
    }
    for (idx_t b = 0; b < batch; ++b) {
      lengths taken(batch, 0);
      taken[static_cast<std::size_t>(b)] = begun[b];
      const auto rows = [&](const tensor<S>& x) {
        return attn::tensor_view<const S>(x.data.data(), {batch, kv_heads, 2100, x.dim()},
                                          {0, 2100 * x.dim(), x.dim(), 1});
      };
      own.append(rows(k[stems[b]]), rows(v[stems[b]]), {.lengths = taken});
      if (b < 2)
        shared.append(rows(k[stems[b]]), rows(v[stems[b]]), {.lengths = taken});
      else
        shared.copy_item(stems[b], b, begun[b]);
    }
  }
};

template <class S>
struct results {
  tensor<S> out;
  tensor<attn::compute_type<S>> lse;
  explicit results(idx_t count) : out(batch, heads, count, value_dim, S(7)), lse(batch, heads, count, 1, 7) {}
  bool operator==(const results& x) const { return out.data == x.out.data && lse.data == x.lse.data; }
};

template <class S>
struct chunk {
  tensor<S> q, k, v;
  chunk(std::uint64_t seed, idx_t count)
      : q(cast<S>(random_normal(seed, batch, heads, count, dim))),
        k(cast<S>(random_normal(seed + 1, batch, kv_heads, count, dim))),
        v(cast<S>(random_normal(seed + 2, batch, kv_heads, count, value_dim))) {}
};

// Few queries are attended in place, more of them by blocks, others as in a call without a cache.
const lengths of_steps[] = {
    {1, 1, 1, 1, 1, 1, 1}, {3, 0, 4, 1, 2, 3, 4}, {9, 5, 7, 8, 6, 9, 5}, {2, 9, 5, 66, 0, 1, 6}};

template <class S, class Cache, class Options, class Score>
results<S> step(Cache cache, const chunk<S>& x, Options options, Score&& score, attn::execution& exec) {
  results<S> r(x.q.length());
  options.lse = row_view(r.lse);
  attn::full_softmax_step(cache, view(x.q), view(x.k), view(x.v), view(r.out), options, score, exec);
  return r;
}

template <class S, class C = S>
void check_steps(idx_t page) {
  using T = attn::compute_type<S>;
  CAPTURE(page);
  sequences<S, C> s(page);
  attn::execution one, two(2, 0), three(3, 0);
  std::uint64_t seed = 10;
  for (const lengths& taken : of_steps) {
    const idx_t count = *std::max_element(taken.begin(), taken.end());
    CAPTURE(count);
    const chunk<S> x(seed += 5, count);
    attn::full_softmax_step_options<S> options{.lengths = taken};
    const results<S> wanted = step(s.own, x, options, attn::detail::no_score(), one);
    CHECK(step(s.shared, x, options, attn::detail::no_score(), one) == wanted);
    const std::size_t bytes = one.scratch_bytes();
    CHECK(step(s.shared, x, options, attn::detail::no_score(), two) == wanted);
    if (!few_shapes) CHECK(step(s.shared, x, options, attn::detail::no_score(), three) == wanted);
    CHECK(step(s.shared, x, options, attn::detail::no_score(), one) == wanted);
    CHECK(one.scratch_bytes() == bytes);
    attn::skipped_tiles tiles;  // with what is below the largest score so far left out
    options.skip_below = T(0), options.skipped = &tiles;
    const results<S> of_kept = step(s.own, x, options, attn::detail::no_score(), one);
    CHECK(tiles.skipped > 0);
    CHECK_FALSE(of_kept == wanted);
    CHECK(step(s.shared, x, options, attn::detail::no_score(), two) == of_kept);
  }
  // Copies whose last page is theirs too, and queries that lie in what is shared.
  const chunk<S> x(seed += 5, 6);
  for (const bool causal : {true, false})
    for (const lengths& taken : {lengths(batch, 3), lengths(batch, 6)}) {
      results<S> a(6), b(6);
      const auto ask = [&](const auto& cache, results<S>& r) {
        attn::full_softmax_cached(cache, view(x.q), view(r.out),
                                  {.causal = causal, .lengths = taken, .lse = row_view(r.lse)}, two);
      };
      ask(s.own, a), ask(s.shared, b);
      CHECK(a == b);
    }
}

// A sequence gets the bits that it gets where no other one shares its pages. In codes with a scale for each channel a
// copy that is cut is rounded as pages of its own are not, so that only this can be asked of it.
template <class C>
void check_alone(idx_t page) {
  sequences<float, C> s(page);
  attn::execution one;
  for (const lengths& taken : of_steps) {
    const chunk<float> x(11, *std::max_element(taken.begin(), taken.end()));
    attn::full_softmax_step_options<float> options{.lengths = taken};
    const results<float> together = step(s.shared, x, options, attn::detail::no_score(), one);
    for (const idx_t b : {1, 2, 3, 6}) {
      attn::paged_cache<C> alone = s.shared;
      lengths of_one(batch, 0);
      of_one[static_cast<std::size_t>(b)] = taken[static_cast<std::size_t>(b)];
      for (idx_t other = 0; other < batch; ++other)
        if (other != b) alone.reset(other);
      options.lengths = of_one;
      const results<float> wanted = step(alone, x, options, attn::detail::no_score(), one);
      bool same = true;
      for (idx_t h = 0; h < heads; ++h)
        for (idx_t i = 0; i < of_one[static_cast<std::size_t>(b)]; ++i) {
          same &= together.lse(b, h, i, 0) == wanted.lse(b, h, i, 0);
          for (idx_t d = 0; d < value_dim; ++d) same &= together.out(b, h, i, d) == wanted.out(b, h, i, d);
        }
      CAPTURE(b, x.q.length());
      CHECK(same);
    }
  }
}

// Law 13 over caches: pages, shared or not, give the bits of a contiguous cache that is fed token by token.
template <class S>
void check_invariance(idx_t page) {
  CAPTURE(page);
  sequences<S> s(page);
  attn::execution one, three(3, 0);
  one.set_invariant(true), three.set_invariant(true);
  const lengths taken = of_steps[2];
  const chunk<S> x(11, 9);
  const attn::full_softmax_step_options<S> options{.lengths = taken};
  const results<S> together = step(s.shared, x, options, attn::detail::no_score(), one);
  CHECK(step(s.own, x, options, attn::detail::no_score(), three) == together);
  for (const idx_t b : {0, 3, 5, 6}) {
    attn::kv_cache<S> alone({.batch = 1, .heads = kv_heads, .dim = dim, .value_dim = value_dim});
    alone.append(view(s.k[stems[b]]).slice(2, 0, begun[b]), view(s.v[stems[b]]).slice(2, 0, begun[b]));
    bool same = true;
    for (idx_t t = 0; t < taken[static_cast<std::size_t>(b)]; ++t) {
      const auto token = [&](const auto& all) { return view(all).slice(0, b, 1).slice(2, t, 1); };
      tensor<S> out(1, heads, 1, value_dim);
      attn::full_softmax_step(alone, token(x.q), token(x.k), token(x.v), view(out), one);
      for (idx_t h = 0; h < heads; ++h)
        for (idx_t d = 0; d < value_dim; ++d) same &= out(0, h, 0, d) == together.out(b, h, t, d);
    }
    CAPTURE(b);
    CHECK(same);
  }
}

// Skip-softmax decides tile by tile: pages of whole tiles leave out what contiguous memory does.
template <class S, class C = S>
void check_skipped(idx_t page) {
  const sequences<S, C> s(page);
  attn::kv_cache<C> whole({.batch = batch, .heads = kv_heads, .dim = dim, .value_dim = value_dim});
  for (idx_t b = 0; b < batch; ++b) {
    lengths taken(batch, 0);
    taken[static_cast<std::size_t>(b)] = begun[b];
    const auto rows = [](const tensor<S>& x) {
      return attn::tensor_view<const S>(x.data.data(), {batch, kv_heads, 2100, x.dim()},
                                        {0, 2100 * x.dim(), x.dim(), 1});
    };
    whole.append(rows(s.k[stems[b]]), rows(s.v[stems[b]]), {.lengths = taken});
  }
  attn::execution one;
  for (const lengths& taken : of_steps) {
    const chunk<S> x(11, *std::max_element(taken.begin(), taken.end()));
    CAPTURE(page, x.q.length());
    const attn::full_softmax_step_options<S> options{.lengths = taken, .skip_below = 0};
    const attn::detail::no_score none;
    CHECK(step(s.own, x, options, none, one) == step(whole, x, options, none, one));
  }
}

// The options that know of which item and position a row is.
template <class S, class C = S>
void check_options(idx_t page) {
  using T = attn::compute_type<S>;
  CAPTURE(page);
  sequences<S, C> s(page);
  attn::execution exec(2, 0);
  const auto keys = [&](const lengths& taken) {
    idx_t most = 0;
    for (idx_t b = 0; b < batch; ++b) most = std::max(most, begun[b] + taken[static_cast<std::size_t>(b)]);
    return most;
  };
  for (const lengths& taken : {of_steps[1], of_steps[2]}) {
    const idx_t count = *std::max_element(taken.begin(), taken.end()), all = keys(taken);
    const chunk<S> x(77, count);
    const tensor<T> bias = cast<T>(random_normal(4, batch, heads, count, all)),
                    table = cast<T>(random_normal(5, 1, heads, 41, dim)),
                    near = cast<T>(random_normal(6, 1, heads, 1, 61));
    tensor<T> decays = cast<T>(random_normal(7, batch, heads, 1, all));
    for (T& decay : decays.data) decay = -std::abs(decay) / 100;
    const tensor<S> relative = cast<S>(random_normal(8, batch, heads, count, dim));
    tensor<std::uint8_t> mask(batch, heads, count, all, 1), there(1, 1, batch, all, 1);
    for (std::size_t n = 0; n < mask.data.size(); n += 3) mask.data[n] = 0;
    for (std::size_t n = 0; n < there.data.size(); n += 5) there.data[n] = 0;
    for (idx_t j = 0; j < 1000; ++j) mask(2, 1, 0, j) = mask(3, 1, 0, j) = 0;  // whole tiles
    const std::vector<T> slopes = {T(.5), T(.25), 0, 1}, sinks = {0, -1, 1, T(.5)};
    const auto check = [&](const attn::full_softmax_step_options<S>& given, auto&& score) {
      attn::full_softmax_step_options<S> options = given;
      options.lengths = taken;
      CHECK(step(s.shared, x, options, score, exec) == step(s.own, x, options, score, exec));
    };
    const attn::detail::no_score none;
    check({.bias = view(bias), .softcap = T(3), .alibi_slopes = slopes, .sinks = sinks}, none);
    check({.rotary = attn::rotary_options<S>{}, .relative_bias = {near.data.data(), {heads, 61}}, .mask = view(mask)},
          none);
    check({.relative_keys = {table.data.data(), {heads, 41, dim}}, .relative_queries = view(relative),
           .dropout = {.rate = 0.3, .seed = 4}},
          none);
    check({.log_decay = {decays.data.data(), {batch, heads, all}},
           .key_mask = attn::tensor_view<const std::uint8_t, 2>(there.data.data(), {batch, all})},
          none);
    check({.scale = T(.4)}, [](auto score, idx_t b, idx_t h, idx_t i, idx_t j) {
      return (i + 2 * j + h + 3 * b) % 7 == 0 ? -std::numeric_limits<T>::infinity() : score + T(b) / T(1 + i - j);
    });
  }
}

}  // namespace

TEST_CASE("Shared pages give the bits of own ones", "[shared_prefixes]") {
  SECTION("float") {
    for (idx_t page : {5, 64, 300})
      if (!few_shapes || page != 64) check_steps<float>(page);  // whole tiles: in two cases below, too
  }
  SECTION("bfloat16") { check_steps<Eigen::bfloat16>(48); }
  SECTION("half for float") { check_steps<float, Eigen::half>(7); }
  SECTION("eight bits") { check_steps<float, std::int8_t>(48); }
  SECTION("four bits") {
    for (idx_t page : {48, 256}) check_alone<attn::int4>(page);
  }
  SECTION("eight bits, channels") { check_alone<attn::int8_channels>(64); }
  if constexpr (std::tuple_size_v<exact_types> > 1) {
    SECTION("double") { check_steps<double>(16); }
  }
}

TEST_CASE("Pages of whole tiles leave out what contiguous memory does", "[shared_prefixes]") {
  check_skipped<float>(64);
  check_skipped<Eigen::bfloat16>(256);
  check_skipped<float, std::int8_t>(48);
}

TEST_CASE("Shared pages: the bits of a contiguous cache", "[shared_prefixes]") {
  SECTION("float") {
    for (idx_t page : {5, 64}) check_invariance<float>(page);
  }
  SECTION("bfloat16") { check_invariance<Eigen::bfloat16>(48); }
  if constexpr (std::tuple_size_v<exact_types> > 1) {
    SECTION("double") { check_invariance<double>(16); }
  }
  SECTION("codes are refused") {
    sequences<float, std::int8_t> s(48);
    attn::execution exec;
    exec.set_invariant(true);
    const chunk<float> x(11, 1);
    const std::string message =
        refusal([&] { step(s.own, x, attn::full_softmax_step_options<float>{}, attn::detail::no_score(), exec); });
    CAPTURE(message);
    CHECK(well_formed(message, "full_softmax_step"));
    CHECK(message.find("a cache of numbers, since the execution is invariant") != std::string::npos);
  }
}

TEST_CASE("Shared pages: every option is that of its item", "[shared_prefixes]") {
  SECTION("float") { check_options<float>(16); }
  SECTION("bfloat16") { check_options<Eigen::bfloat16>(64); }
  SECTION("eight bits") { check_options<float, std::int8_t>(16); }
}

TEST_CASE("Shared pages: the naive reference", "[shared_prefixes]") {
  sequences<float> s(30);
  const chunk<float> x(3, 9);
  attn::execution exec;
  for (const lengths& taken : {of_steps[1], of_steps[2]}) {
    const results<float> found =
        step(s.shared, x, attn::full_softmax_step_options<float>{.lengths = taken}, attn::detail::no_score(), exec);
    for (idx_t b = 0; b < batch; ++b) {
      const idx_t count = taken[static_cast<std::size_t>(b)], keys = begun[b] + count;
      const auto item = [&](const tensor<float>& before, const tensor<float>& all, idx_t rows) {
        tensor<double> one(1, all.heads(), rows, all.dim());
        for (idx_t h = 0; h < all.heads(); ++h)
          for (idx_t t = 0; t < rows; ++t)
            for (idx_t d = 0; d < all.dim(); ++d) {
              const idx_t fed = t - (rows - count);
              one(0, h, t, d) = static_cast<double>(fed < 0 ? before(0, h, t, d) : all(b, h, fed, d));
            }
        return one;
      };
      full_softmax_problem p{
          item(x.q, x.q, count), item(s.k[stems[b]], x.k, keys), item(s.v[stems[b]], x.v, keys), {}};
      p.options.causal = true;
      CAPTURE(b, count);
      CHECK(relative_error(item(found.out, found.out, count), expected(p).out) <= 2e-6);
    }
  }
}

// Beyond long_segment keys sums are moved, and some keys attended again: at places that sharing does not change, nor
// longer sequences beside them, whatever the size of pages.
TEST_CASE("Shared pages: long sequences", "[shared_prefixes]") {
  constexpr idx_t long_item = 12800, short_item = 6000, size = 3;  // the second is no long one
  tensor<float> k = cast<float>(random_normal(1, 1, kv_heads, long_item, dim));
  const tensor<float> v = cast<float>(random_normal(2, 1, kv_heads, long_item, value_dim));
  for (idx_t d = 0; d < dim; ++d) k(0, 0, 64, d) = 4;  // has nearly all weight
  const auto rows = [](const tensor<float>& x) {
    return attn::tensor_view<const float>(x.data.data(), {size, kv_heads, x.length(), x.dim()},
                                          {0, x.length() * x.dim(), x.dim(), 1});
  };
  attn::execution exec;
  tensor<float> q = cast<float>(random_normal(3, size, heads, 2, dim));
  for (float& x : q.data) x = 1 + x / 8;
  const auto ask = [&](const attn::paged_cache<float>& cache) {
    tensor<float> out(size, heads, 2, value_dim, 7);
    attn::full_softmax_cached(cache, view(q), view(out), {}, attn::detail::no_score(), exec);
    return out;
  };
  for (const idx_t page : {64, 48, 1500}) {
    attn::page_pool<float> pool(sequences<float>::extents(page, 4 * (long_item / page + 1)));
    attn::paged_cache<float> shared(pool, size);
    shared.append(rows(k), rows(v), {.lengths = lengths{long_item, 0, 0}});
    shared.copy_item(0, 1, short_item), shared.copy_item(0, 2, long_item - 100);
    const tensor<float> together = ask(shared);
    for (const idx_t b : {0, 1, 2}) {
      if (b != 1 && page != 64) continue;  // the short one is what pages may change
      attn::paged_cache<float> alone = shared;
      for (idx_t other = 0; other < size; ++other)
        if (other != b) alone.reset(other);
      const tensor<float> one = ask(alone);
      CAPTURE(page, b);
      CHECK(std::equal(&one(b, 0, 0, 0), &one(b, 0, 0, 0) + heads * 2 * value_dim, &together(b, 0, 0, 0)));
    }
  }
}

TEST_CASE("Shared pages: which items are attended together", "[shared_prefixes]") {
  const std::vector<lengths> tables = {{4, 5, 6, 7}, {}, {4, 5, 9}, {8}, {4, 5, 6, 3}, {8, 2}, {4, 5, 6, 7}};
  std::byte room[1024];
  attn::detail::arena arena(room);
  auto found = attn::detail::shared_prefixes::layout(arena, 7);
  const auto list = [](const idx_t* from, idx_t count) { return lengths(from, from + count); };
  std::fill_n(found.kinds(), 7, 0);
  found.find({tables.data(), 64}, 7, 10);
  CHECK(list(found.items, 7) == lengths{1, 4, 0, 6, 2, 3, 5});
  CHECK(list(found.common, 7) == lengths{0, 0, 192, 256, 128, 0, 64});
  CHECK(list(found.first, found.sets + 1) == lengths{0, 1, 5, 7});
  CHECK(found.largest == 4);
  for (idx_t b = 0; b < 7; ++b) found.kinds()[b] = b == 6 ? 0 : 1;
  found.find({tables.data(), 64}, 7, 3);
  CHECK(list(found.items, 7) == lengths{6, 1, 4, 0, 2, 3, 5});
  CHECK(list(found.first, found.sets + 1) == lengths{0, 1, 2, 5, 7});
  found.find({}, 3, 10);
  CHECK(list(found.first, found.sets + 1) == lengths{0, 1, 2, 3});
}

}  // namespace testing::shared_prefixes_tests
