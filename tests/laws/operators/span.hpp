#pragma once
// Keys that stand for several tokens each, as a stream completes them.
#include "laws/law.hpp"

namespace testing {

// A cache of the keys whose tokens are complete. A stream gets key j with token j, earlier than it may be there.
template <class T>
class span_feed {
 public:
  attn::kv_cache<T> cache;
  std::vector<idx_t> first;  // of each item, the position of the first query of the call

  span_feed(const law_shape& s, idx_t span)
      : cache({.batch = s.batch, .heads = s.kv_heads, .dim = s.dim, .value_dim = s.value_dim}),
        first(static_cast<std::size_t>(s.batch)), span_(span), tokens_(first), complete_(first),
        k_(s.batch, s.kv_heads, s.queries, s.dim), v_(s.batch, s.kv_heads, s.queries, s.value_dim), some_k_(k_),
        some_v_(v_) {
    cache.reserve(s.queries);
  }

  void append(const law_call<T>& call) {
    first = tokens_;
    idx_t most = 0;
    for (idx_t b = 0; b < call.k.extent(0); ++b) {
      const auto item = static_cast<std::size_t>(b);
      const idx_t count = call.lengths.empty() ? call.k.extent(2) : call.lengths[item];
      tokens_[item] += count;
      const idx_t begin = first[item] / span_, end = tokens_[item] / span_;
      complete_[item] = end - begin, most = std::max(most, end - begin);
      copy(call.k, k_, b, 0, first[item], count), copy(call.v, v_, b, 0, first[item], count);
      copy(view(k_), some_k_, b, begin, 0, end - begin), copy(view(v_), some_v_, b, begin, 0, end - begin);
    }
    cache.append(view(some_k_).slice(2, 0, most), view(some_v_).slice(2, 0, most), {.lengths = complete_});
  }

 private:
  static void copy(const in_view<T>& from, tensor<T>& to, idx_t b, idx_t from_row, idx_t to_row, idx_t count) {
    for (idx_t h = 0; h < to.heads(); ++h)
      for (idx_t i = 0; i < count; ++i)
        for (idx_t d = 0; d < to.dim(); ++d) to(b, h, to_row + i, d) = from(b, h, from_row + i, d);
  }

  idx_t span_;
  std::vector<idx_t> tokens_, complete_;
  tensor<T> k_, v_, some_k_, some_v_;
};

}  // namespace testing
