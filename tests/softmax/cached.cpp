// Attending what a cache has, without appending: to the last bit what the step gave that appended its last tokens.
#include <attn/core/paged_cache.hpp>
#include <attn/core/tensor.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/lightning_indexer_step.hpp>
#include <attn/softmax/selected_keys.hpp>
#include <attn/softmax/selected_keys_step.hpp>
#include <attn/softmax/sliding_window_step.hpp>
#include <attn/softmax/topk_blocks_step.hpp>

#include "softmax/cached.hpp"
#include "support/catch.hpp"
#include "support/window_pages.hpp"

namespace testing::cached_tests {
namespace {

// Steps of some sizes, each followed by the same queries over what is there by then.
template <class Cache>
void check_steps(Cache cache) {
  const std::vector<idx_t> positions = {2, 0, 3, 1}, counts = {2, 0, 2}, dilation = {1, 2, 3, 1};
  const std::vector<float> slopes = {.5f, .25f, 0, 1}, sinks = {0, -1, 1, .5f};
  std::uint64_t seed = 1;
  for (const std::vector<idx_t>& lengths : {std::vector<idx_t>{9, 4, 0}, {1, 1, 1}, {3, 0, 2}, {12, 12, 1}}) {
    const idx_t count = *std::max_element(lengths.begin(), lengths.end());
    const inputs x(seed += 10, count);
    results stepped(count), again(count), of_window(count), of_window_again(count);
    const tensor<float> bias = cast<float>(random_normal(seed + 5, 1, heads, count, room));
    tensor<std::uint8_t> seen(batch, 1, 1, room, 1);
    for (idx_t j = 0; j < room; j += 5) seen(1, 0, 0, j) = 0;
    idx_t tokens = 0;
    for (idx_t b = 0; b < batch; ++b) tokens = std::max(tokens, cache.tokens(b) + lengths[static_cast<std::size_t>(b)]);
    const attn::tensor_view<const float> all_bias = view(bias).slice(3, 0, tokens);
    const attn::tensor_view<const std::uint8_t, 2> all_seen(seen.data.data(), {batch, tokens}, {room, 1});
    Cache windowed = cache;
    attn::full_softmax_step(cache, view(x.q), view(x.k), view(x.v), view(stepped.out),
                            {.scale = 0.3f, .lengths = lengths, .bias = all_bias, .key_mask = all_seen, .softcap = 3.0f,
                             .alibi_slopes = slopes, .sinks = sinks, .lse = stepped.lse_view()});
    attn::full_softmax_cached(std::as_const(cache), view(x.q), view(again.out),
                              {.scale = 0.3f, .lengths = lengths, .bias = all_bias, .key_mask = all_seen,
                               .softcap = 3.0f, .alibi_slopes = slopes, .sinks = sinks, .lse = again.lse_view()});
    CHECK(again == stepped);
    const attn::sliding_window_cache_options window{
        .left = 3, .dilation = dilation, .global_positions = positions, .global_counts = counts};
    attn::sliding_window_step(windowed, window, view(x.q), view(x.k), view(x.v), view(of_window.out),
                              {.lengths = lengths, .key_mask = all_seen, .sinks = sinks, .lse = of_window.lse_view()});
    attn::sliding_window_cached(
        std::as_const(windowed), window, view(x.q), view(of_window_again.out),
        {.lengths = lengths, .key_mask = all_seen, .sinks = sinks, .lse = of_window_again.lse_view()});
    CHECK(of_window_again == of_window);
    CHECK(cache.tokens() == tokens);
  }
}

// Windows: a chunk of many tokens is attended by another kernel than the same tokens in smaller ones.
template <class Cache>
void check_window_chunks(Cache cache, double tolerance) {
  const std::vector<idx_t> positions = {2, 0, 45, 3, 1}, counts = {3, 0, 2}, dilation = {1, 2, 3, 1};
  const std::vector<float> slopes = {.5f, .25f, 0, 1}, sinks = {0, -1, 1, .5f};
  const attn::sliding_window_cache_options window{
      .left = 7, .dilation = dilation, .global_positions = positions, .global_counts = counts};
  const std::vector<idx_t> before = {9, 3, 0}, lengths = {40, 23, 17};
  constexpr idx_t count = 40, most = 49;
  const inputs first(1, 9), x(2, count);
  const tensor<float> bias = cast<float>(random_normal(5, 1, heads, 1, most)),
                      by_distance = cast<float>(random_normal(6, 1, 1, heads, 9));
  tensor<float> decays = cast<float>(random_normal(7, 1, batch, heads, most));
  for (float& d : decays.data) d = -std::abs(d) / 20;
  tensor<std::uint8_t> seen(batch, 1, 1, most, 1);
  for (idx_t j = 0; j < most; j += 5) seen(1, 0, 0, j) = 0;
  cache.append(view(first.k), view(first.v), {.lengths = before});
  Cache small = cache;
  const auto score = [](float s, idx_t b, idx_t h, idx_t i, idx_t j) {
    return s + .01f * static_cast<float>((3 * b + h) % 5) * static_cast<float>(i - j);
  };
  const auto step = [&](Cache& to, idx_t begin, idx_t end, results& r) {
    std::vector<idx_t> some;
    for (idx_t n : lengths) some.push_back(std::clamp(n - begin, idx_t(0), end - begin));
    idx_t tokens = 0;
    for (idx_t b = 0; b < batch; ++b) tokens = std::max(tokens, to.tokens(b) + some[static_cast<std::size_t>(b)]);
    const auto part = [&](const tensor<float>& t) { return view(t).slice(2, begin, end - begin); };
    attn::sliding_window_step(
        to, window, part(x.q), part(x.k), part(x.v), view(r.out).slice(2, begin, end - begin),
        {.scale = 0.3f, .lengths = some, .bias = attn::tensor_view<const float>(view(bias)).slice(3, 0, tokens),
         .relative_bias = {by_distance.data.data(), {heads, 9}},
         .log_decay = {decays.data.data(), {batch, heads, tokens}, {heads * most, most, 1}},
         .key_mask = {attn::tensor_view<const std::uint8_t, 2>(seen.data.data(), {batch, tokens}, {most, 1})},
         .softcap = 3.0f, .alibi_slopes = slopes, .sinks = sinks, .lse = r.lse_view().slice(2, begin, end - begin)},
        score);
  };
  results whole(count), in_parts(count);
  step(cache, 0, count, whole);
  for (idx_t begin = 0; begin < count; begin += 8) step(small, begin, begin + 8, in_parts);
  for (float& s : whole.lse.data) s = std::max(s, -100.0f);  // no number less itself is 0 for -infinity
  for (float& s : in_parts.lse.data) s = std::max(s, -100.0f);
  CHECK(relative_error(whole.out, in_parts.out) <= tolerance);
  CHECK(relative_error(whole.lse, in_parts.lse) <= tolerance);
}

// q attends the first n[b] tokens of x that the cache has, those that a mask leaves; the naive reference by a bias.
template <class Cache>
void check_naive(Cache cache, double tolerance) {
  const inputs x(1, 40);
  const std::vector<idx_t> lengths = {40, 7, 0};
  cache.append(view(x.k), view(x.v), {.lengths = lengths});
  tensor<std::uint8_t> mask(batch, 1, 13, 40, 1);
  for (idx_t b = 0; b < batch; ++b)
    for (idx_t i = 0; i < 13; ++i)
      for (idx_t j = 0; j < 40; ++j) mask(b, 0, i, j) = (3 * i + 5 * j + b) % 4 != 0;
  for (const idx_t count : {1, 3, 13})
    for (const bool causal : {false, true}) {
      CAPTURE(count, causal);
      const tensor<float> q = cast<float>(random_normal(9, batch, heads, count, dim));
      results found(count);
      attn::full_softmax_cached(std::as_const(cache), view(q), view(found.out),
                                {.causal = causal,
                                 .mask = attn::tensor_view<const std::uint8_t>(view(mask)).slice(2, 0, count),
                                 .lse = found.lse_view()});
      for (idx_t b = 0; b < batch; ++b) {
        const idx_t keys = lengths[static_cast<std::size_t>(b)];
        const auto item = [&](const tensor<float>& all, idx_t rows) {
          tensor<double> one(1, all.heads(), rows, all.dim());
          for (idx_t h = 0; h < all.heads(); ++h)
            for (idx_t t = 0; t < rows; ++t)
              for (idx_t d = 0; d < all.dim(); ++d) one(0, h, t, d) = static_cast<double>(all(b, h, t, d));
          return one;
        };
        full_softmax_problem p{item(q, count), item(x.k, keys), item(x.v, keys), {}};
        p.options.bias = tensor<double>(1, 1, count, keys);
        for (idx_t i = 0; i < count; ++i)
          for (idx_t j = 0; j < keys; ++j) {
            const bool future = causal && j > keys - count + i;
            p.options.bias(0, 0, i, j) = future || mask(b, 0, i, j) == 0 ? -reference::infinity : 0;
          }
        const reference::result wanted = expected(p);
        CHECK(relative_error(item(found.out, count), wanted.out) <= tolerance);
        for (idx_t h = 0; h < heads; ++h)
          for (idx_t i = 0; i < count; ++i)
            CHECK((found.lse(b, h, i, 0) == -std::numeric_limits<float>::infinity()) ==
                  (wanted.lse(0, h, i, 0) == -reference::infinity));
      }
    }
}

}  // namespace

TEST_CASE("full_softmax_cached and sliding_window_cached give what the step gave", "[cached]") {
  SECTION("float") { check_steps(attn::kv_cache<float>(extents)); }
  SECTION("eight bits") { check_steps(attn::kv_cache<std::int8_t>(extents)); }
  SECTION("pages") {
    attn::page_pool<float> pool(
        {.pages = 60, .page_tokens = 5, .heads = kv_heads, .dim = dim, .value_dim = value_dim});
    check_steps(attn::paged_cache<float>(pool, batch));
  }
}

TEST_CASE("sliding_window_step: chunks of many tokens, with all options", "[cached]") {
  // Both round as float does; in 16 bits queries and weights are rounded by the streaming kernel where bf16 multiplies.
  SECTION("float") { check_window_chunks(attn::kv_cache<float>(extents), 2e-6); }
  SECTION("half") { check_window_chunks(attn::kv_cache<Eigen::half>(extents), 2e-6); }
  SECTION("bfloat16") { check_window_chunks(attn::kv_cache<Eigen::bfloat16>(extents), 8e-3); }
  SECTION("eight bits") { check_window_chunks(attn::kv_cache<std::int8_t>(extents), 2e-6); }
  SECTION("pages") {
    attn::page_pool<float> pool(
        {.pages = 60, .page_tokens = 5, .heads = kv_heads, .dim = dim, .value_dim = value_dim});
    check_window_chunks(attn::paged_cache<float>(pool, batch), 2e-6);
  }
}

TEST_CASE("sliding_window_cached: pages change no bit", "[cached]") { check_window_pages<float>({64, 192, 7}); }

TEST_CASE("sliding_window_cached: an item is attended as it is alone, a head as with one dilation for all", "[cached]") {
  const inputs memory(1, 60), x(9, 40);
  attn::kv_cache<float> cache(extents);
  cache.append(view(memory.k), view(memory.v));
  const std::vector<idx_t> together = {40, 17, 3}, dilation = {1, 2, 1, 2};
  results all(40);
  attn::sliding_window_cached(cache, {.left = 9, .dilation = dilation}, view(x.q), view(all.out),
                              {.lengths = together, .lse = all.lse_view()});
  for (idx_t b = 0; b < batch; ++b)
    for (const idx_t d : {1, 2}) {
      std::vector<idx_t> one(batch, 0), stride = {d};
      const idx_t count = one[static_cast<std::size_t>(b)] = together[static_cast<std::size_t>(b)];
      results alone(count);
      attn::sliding_window_cached(cache, {.left = 9, .dilation = stride}, view(x.q).slice(2, 0, count),
                                  view(alone.out), {.lengths = one, .lse = alone.lse_view()});
      bool same = true;
      for (idx_t h = d - 1; h < heads; h += 2)
        for (idx_t i = 0; i < count; ++i) {
          same &= all.lse(b, h, i, 0) == alone.lse(b, h, i, 0);
          for (idx_t c = 0; c < value_dim; ++c) same &= all.out(b, h, i, c) == alone.out(b, h, i, c);
        }
      CAPTURE(b, d);
      CHECK(same);
    }
  for (idx_t h = 0; h < heads; ++h) CHECK(all.out(2, h, 3, 0) == 0);
}

TEST_CASE("selected_keys_cached and topk_blocks_cached give what the step gave", "[cached]") {
  constexpr idx_t listed = 6;
  attn::kv_cache<float> rows(extents);
  attn::topk_blocks_cache<float> blocks(extents, {.block = 4});
  const std::vector<float> slopes = {.5f, .25f, 0, 1}, sinks = {0, -1, 1, .5f};
  std::uint64_t seed = 1;
  for (const std::vector<idx_t>& lengths : {std::vector<idx_t>{9, 4, 0}, {1, 1, 1}, {12, 30, 1}, {3, 0, 2}}) {
    const idx_t count = *std::max_element(lengths.begin(), lengths.end());
    const inputs x(seed += 10, count);
    results stepped(count), again(count), chosen(count), chosen_again(count);
    std::vector<std::int32_t> list(static_cast<std::size_t>(batch * kv_heads * count * listed));
    for (std::size_t n = 0; n < list.size(); ++n) list[n] = n % listed == 5 ? -1 : static_cast<std::int32_t>(n % 5 * 2);
    const attn::tensor_view<const std::int32_t> indices(list.data(), {batch, kv_heads, count, listed});
    attn::selected_keys_step(rows, view(x.q), view(x.k), view(x.v), view(stepped.out), indices,
                             {.scale = 0.3f, .lengths = lengths, .softcap = 3.0f, .alibi_slopes = slopes,
                              .sinks = sinks, .lse = stepped.lse_view()});
    attn::selected_keys_cached(std::as_const(rows), view(x.q), view(again.out), indices,
                               {.scale = 0.3f, .lengths = lengths, .softcap = 3.0f, .alibi_slopes = slopes,
                                .sinks = sinks, .lse = again.lse_view()});
    CHECK(again == stepped);
    attn::topk_blocks_step(blocks, view(x.q), view(x.k), view(x.v), view(chosen.out),
                           {.lengths = lengths, .topk = 2, .alibi_slopes = slopes, .lse = chosen.lse_view()});
    attn::topk_blocks_cached(std::as_const(blocks), view(x.q), view(chosen_again.out),
                             {.lengths = lengths, .topk = 2, .alibi_slopes = slopes, .lse = chosen_again.lse_view()});
    CHECK(chosen_again == chosen);
  }
}

TEST_CASE("full_softmax_cached, selected_keys_cached, lightning_indexer_cached: caches of pooled keys", "[cached]") {
  const inputs memory(1, 40);
  attn::kv_cache<float> cache(extents), index_cache({.batch = batch, .dim = dim, .value_dim = 0});
  cache.append(view(memory.k), view(memory.v));
  const auto index_keys = view(memory.k).slice(1, 0, 1);
  index_cache.append(index_keys, index_keys.slice(3, 0, 0));
  const std::vector<idx_t> first = {100, 7, -4};
  for (const idx_t count : {2, 13}) {
    const inputs x(9, count);
    results cached(count), called(count), chosen(count), chosen_called(count);
    attn::full_softmax_cached(cache, view(x.q), view(cached.out),
                              {.first_position = first, .span = 4, .lse = cached.lse_view()});
    attn::full_softmax(view(x.q), view(memory.k), view(memory.v), view(called.out),
                       {.causal = true, .first_position = first, .span = 4, .lse = called.lse_view()});
    CHECK(relative_error(cached.out, called.out) <= 1e-6);

    attn::tensor<std::int32_t> lists({batch, 1, count, 6}), lists_called({batch, 1, count, 6});
    attn::lightning_indexer_cached(index_cache, view(x.q), lists,
                                   {.first_position = first, .span = 4, .topk = 5, .tail = true});
    attn::lightning_indexer(view(x.q), index_keys, lists_called,
                            {.causal = true, .first_position = first, .span = 4, .topk = 5, .tail = true});
    CHECK(std::equal(lists.data(), lists.data() + batch * count * 6, lists_called.data()));
    const auto without_tail = lists.view().slice(3, 0, 5);
    attn::selected_keys_cached(cache, view(x.q), view(chosen.out), without_tail,
                               {.first_position = first, .span = 4, .lse = chosen.lse_view()});
    attn::selected_keys(view(x.q), view(memory.k), view(memory.v), view(chosen_called.out), without_tail,
                        {.causal = true, .first_position = first, .span = 4, .lse = chosen_called.lse_view()});
    CHECK(relative_error(chosen.out, chosen_called.out) <= 1e-6);
    CHECK(chosen.out(0, 0, 0, 0) != 0);
    CHECK(chosen.out(2, 0, 0, 0) == 0);
  }
}

TEST_CASE("full_softmax_cached: the naive reference, in pages and in fewer bits", "[cached]") {
  const auto pages_of = [](idx_t page) {
    return attn::page_pool_extents{
        .pages = 60, .page_tokens = page, .heads = kv_heads, .dim = dim, .value_dim = value_dim};
  };
  check_naive(attn::kv_cache<float>(extents), 2e-6);
  for (const idx_t page : {1, 3, 16}) {
    CAPTURE(page);
    attn::page_pool<float> pool(pages_of(page));
    check_naive(attn::paged_cache<float>(pool, batch), 2e-6);
  }
  // The tokens are rounded to the elements of the cache, some queries and weights too.
  check_naive(attn::kv_cache<Eigen::half>(extents), 1e-3);
  check_naive(attn::kv_cache<std::int8_t>(extents), 1e-2);
  attn::page_pool<Eigen::bfloat16> pool(pages_of(3));
  check_naive(attn::paged_cache<Eigen::bfloat16>(pool, batch), 8e-3);
  attn::page_pool<std::int8_t> compact(pages_of(16));
  check_naive(attn::paged_cache<std::int8_t>(compact, batch), 1e-2);
}

TEST_CASE("full_softmax_cached: cross attention over items of their own lengths", "[cached]") {
  const inputs memory(1, 40), x(9, 13);
  const std::vector<idx_t> lengths = {40, 7, 0};
  attn::kv_cache<float> cache(extents);
  cache.append(view(memory.k), view(memory.v), {.lengths = lengths});
  results cached(13), called(13);
  attn::full_softmax_cached(cache, view(x.q), view(cached.out), {.causal = false, .lse = cached.lse_view()});
  attn::full_softmax(view(x.q), view(memory.k), view(memory.v), view(called.out),
                     {.key_lengths = lengths, .lse = called.lse_view()});
  CHECK(cached == called);
  // Few queries are attended by another kernel.
  const inputs few(9, 3);
  results of_few(3), of_few_called(3);
  attn::full_softmax_cached(cache, view(few.q), view(of_few.out), {.causal = false, .lse = of_few.lse_view()});
  attn::full_softmax(view(few.q), view(memory.k), view(memory.v), view(of_few_called.out),
                     {.key_lengths = lengths, .lse = of_few_called.lse_view()});
  CHECK(relative_error(of_few.out, of_few_called.out) <= 1e-6);
  for (idx_t h = 0; h < heads; ++h) CHECK(of_few.lse(2, h, 1, 0) == -std::numeric_limits<float>::infinity());
}

TEST_CASE("full_softmax_cached, sliding_window_cached: queries before the first token see none", "[cached]") {
  const inputs memory(1, 2), x(9, 6);
  attn::kv_cache<float> cache(extents);
  cache.append(view(memory.k), view(memory.v));
  for (const bool windowed : {false, true}) {
    results r(6);
    if (windowed)
      attn::sliding_window_cached(cache, {.left = 3}, view(x.q), view(r.out), {.lse = r.lse_view()});
    else
      attn::full_softmax_cached(cache, view(x.q), view(r.out), {.lse = r.lse_view()});
    for (idx_t i = 0; i < 6; ++i) {
      CHECK((r.lse(0, 1, i, 0) == -std::numeric_limits<float>::infinity()) == (i < 4));
      CHECK((r.out(0, 1, i, 3) == 0) == (i < 4));
    }
  }
}

TEST_CASE("selected_keys_cached, topk_blocks_cached: queries before the first token see none", "[cached]") {
  const inputs memory(1, 2), x(9, 40);
  attn::kv_cache<float> rows(extents);
  attn::topk_blocks_cache<float> blocks(extents, {.block = 4});
  rows.append(view(memory.k), view(memory.v));
  blocks.append(view(memory.k), view(memory.v));
  const std::vector<std::int32_t> first_key(40, 0);
  const attn::tensor_view<const std::int32_t> indices(first_key.data(), {1, 1, 40, 1});
  for (const idx_t count : {3, 40})
    for (const bool listed : {false, true}) {
      CAPTURE(count, listed);
      results r(count);
      const auto q = view(x.q).slice(2, 0, count);
      if (listed)
        attn::selected_keys_cached(rows, q, view(r.out), indices.slice(2, 0, count), {.lse = r.lse_view()});
      else
        attn::topk_blocks_cached(blocks, q, view(r.out), {.lse = r.lse_view()});
      for (idx_t i = 0; i < count; ++i) {
        CHECK((r.lse(0, 1, i, 0) == -std::numeric_limits<float>::infinity()) == (i < count - 2));
        CHECK((r.out(0, 1, i, 3) == 0) == (i < count - 2));
      }
    }
}

}  // namespace testing::cached_tests
