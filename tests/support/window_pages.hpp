#pragma once
// Pages change no bit of a window, whatever their size.
#include <attn/core/paged_cache.hpp>
#include <attn/softmax/sliding_window_step.hpp>

#include <type_traits>

#include "support/run.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/tensor.hpp"

namespace testing {

template <class C>
void check_window_pages(std::initializer_list<attn::idx_t> pages) {
  using S = std::conditional_t<std::is_same_v<C, double>, double, float>;
  constexpr idx_t length = 600, dim = 16, heads = 4, kv_heads = 2;
  const tensor<S> k = cast<S>(random_normal(1, 1, kv_heads, length, dim)),
                  v = cast<S>(random_normal(2, 1, kv_heads, length, dim)),
                  q = cast<S>(random_normal(3, 1, heads, 40, dim));
  attn::kv_cache<C> whole({.batch = 1, .heads = kv_heads, .dim = dim});
  whole.append(view(k), view(v));
  for (const idx_t page : pages) {
    attn::page_pool<C> pool({.pages = length / page + 2, .page_tokens = page, .heads = kv_heads, .dim = dim});
    attn::paged_cache<C> paged(pool, 1);
    paged.append(view(k), view(v));
    for (const idx_t left : {50, 100, 200, 599})
      for (const idx_t queries : {1, 40})
        for (const std::vector<idx_t>& dilation : {std::vector<idx_t>{}, {3}, {1, 2, 5, 1}})
          for (const std::vector<idx_t>& globals : {std::vector<idx_t>{}, {0, 1, 2, 130, 570}}) {
            CAPTURE(page, left, queries, dilation, globals);
            tensor<S> expected(1, heads, queries, dim), found = expected;
            const attn::sliding_window_cache_options window{
                .left = left, .dilation = dilation, .global_positions = globals};
            const auto some = view(q).slice(2, 0, queries);
            attn::sliding_window_cached(whole, window, some, view(expected));
            attn::sliding_window_cached(paged, window, some, view(found));
            CHECK(found == expected);
          }
  }
}

}  // namespace testing
