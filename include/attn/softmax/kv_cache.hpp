// attn: decoding with a cache of keys and values.
//
//   attn::kv_cache<float> cache(batch, kv_heads, 64);
//   attn::full_softmax_step(cache, q_t, k_t, v_t, out_t);      // one token, or a chunk: what causal full_softmax gives
//
// Memory   batch * kv_heads * capacity * (dim + value_dim) elements. It grows as tokens come, doubling; reserve() makes
//          the room once.
#pragma once

#include <attn/softmax/full_softmax.hpp>

#include <vector>

namespace attn {

/// Keys [B, Hkv, size, D] and values [B, Hkv, size, Dv] of the tokens so far, each head contiguous. One that was moved
/// from may only be assigned to or destroyed.
template <element S>
class kv_cache {
 public:
  /// An empty cache. Throws std::invalid_argument for a negative extent.
  kv_cache(index batch, index kv_heads, index dim, index value_dim)
      : batch_(batch), heads_(kv_heads), dim_(dim), dim_v_(value_dim) {
    detail::check_cache(detail::door("kv_cache"), batch, kv_heads, dim, value_dim);
  }
  kv_cache(index batch, index kv_heads, index dim) : kv_cache(batch, kv_heads, dim, dim) {}

  index size() const { return size_; }
  index capacity() const { return capacity_; }
  index batch() const { return batch_; }
  index kv_heads() const { return heads_; }
  index dim() const { return dim_; }
  index value_dim() const { return dim_v_; }
  std::size_t bytes() const { return (keys_.capacity() + values_.capacity()) * sizeof(S); }

  /// Room for `tokens` tokens; never shrinks. What views point to may move. Throws std::invalid_argument for sizes no
  /// memory can hold, std::bad_alloc.
  void reserve(index tokens) {
    const detail::door at("kv_cache");
    at.at_least("tokens to reserve", 0, tokens);
    if (tokens <= capacity_) return;
    std::vector<S> keys(static_cast<std::size_t>(at.fits("keys", {batch_, heads_, tokens, dim_})));
    std::vector<S> values(static_cast<std::size_t>(at.fits("values", {batch_, heads_, tokens, dim_v_})));
    for (index h = 0; h < batch_ * heads_; ++h) {
      std::copy_n(keys_.data() + h * capacity_ * dim_, size_ * dim_, keys.data() + h * tokens * dim_);
      std::copy_n(values_.data() + h * capacity_ * dim_v_, size_ * dim_v_, values.data() + h * tokens * dim_v_);
    }
    keys_ = std::move(keys);
    values_ = std::move(values);
    capacity_ = tokens;
  }

  /// Forgets all but the first `tokens` tokens; the memory stays.
  void truncate(index tokens) {
    if (tokens < 0 || tokens > size_)
      detail::door("kv_cache").refuse(detail::text({"tokens to keep from 0 to ", size_}), tokens);
    size_ = tokens;
  }
  void clear() { size_ = 0; }

  /// Adds the tokens of k [B, Hkv, n, D] and v [B, Hkv, n, Dv]: a copy, and now and then a move of what is there.
  /// Throws std::invalid_argument for shapes that do not fit or views of the cache itself, before anything changes.
  template <viewable K, viewable V>
  void append(const K& k, const V& v) {
    append_views(detail::door("kv_cache"), as_view(k), as_view(v));
  }

  tensor_view<const S> keys() const { return view(keys_.data(), dim_); }
  tensor_view<const S> values() const { return view(values_.data(), dim_v_); }

  // For the step: checks what append() would, and nothing else.
  void check(const detail::door& at, const tensor_view<const S>& k, const tensor_view<const S>& v) const {
    detail::check_tokens(at, batch_, heads_, dim_, dim_v_, k, v);
    apart(at, "k", k);
    apart(at, "v", v);
  }
  void apart(const detail::door& at, const char* what, const detail::memory_layout& x) const {
    at.apart("cache keys", whole(keys_), what, x);
    at.apart("cache values", whole(values_), what, x);
  }

 private:
  tensor_view<const S> view(const S* data, index dim) const {
    return {data, {batch_, heads_, size_, dim}, {heads_ * capacity_ * dim, capacity_ * dim, dim, 1}};
  }
  static tensor_view<const S> whole(const std::vector<S>& memory) {
    return {memory.data(), {1, 1, 1, static_cast<index>(memory.size())}};
  }

  void append_views(const detail::door& at, const tensor_view<const S>& k, const tensor_view<const S>& v) {
    check(at, k, v);
    const index tokens = k.extent(2);
    if (size_ + tokens > capacity_) reserve(std::max({size_ + tokens, 2 * capacity_, index(16)}));
    const auto copy = [&](const tensor_view<const S>& from, std::vector<S>& to, index dim) {
      for (index b = 0; b < batch_; ++b)
        for (index h = 0; h < heads_; ++h)
          for (index i = 0; i < tokens; ++i) {
            S* row = to.data() + ((b * heads_ + h) * capacity_ + size_ + i) * dim;
            for (index d = 0; d < dim; ++d) row[d] = from(b, h, i, d);
          }
    };
    copy(k, keys_, dim_);
    copy(v, values_, dim_v_);
    size_ += tokens;
  }

  index batch_, heads_, dim_, dim_v_;
  index size_ = 0, capacity_ = 0;
  std::vector<S> keys_, values_;
};

/// Appends k [B, Hkv, n, D] and v [B, Hkv, n, Dv] to the cache, then attends the n queries q [B, H, n, D], which stand
/// at the end, to all tokens up to their own: the last n rows of one causal full_softmax over the whole sequence. In
/// `score` i and j count from the start of the sequence; `bias` is [B or 1, H or 1, n or 1, cache size with the n new
/// tokens]. Lengths are refused: items of a batch go in step. Up to four tokens cost one reading of the cache and
/// scratch memory that does not depend on its size; longer chunks are attended as full_softmax does. Throws
/// std::invalid_argument before anything, the cache included, changes.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void full_softmax_step(kv_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out,
                       const std::type_identity_t<full_softmax_options<S>>& options, Score&& score, execution& where) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the cache and q must have one element type");
  detail::require_score<Score, compute_type<S>>();
  const detail::door at("full_softmax_step");
  const tensor_view<const S> queries = as_view(q), keys = as_view(k), values = as_view(v);
  const tensor_view<S> to = as_view(out);
  cache.check(at, keys, values);
  at.equal("query length = key length", keys.extent(2), queries.extent(2));
  if (!options.lengths.empty() || !options.query_lengths.empty() || !options.key_lengths.empty())
    at.refuse("no lengths, since all items of a batch go in step", "some");
  full_softmax_options<S> causal = options;
  causal.causal = true;
  const index before = cache.size();
  // What the attention would refuse it refuses before the cache changes, against views of the coming shape.
  auto all = [&](const tensor_view<const S>& part) {
    return tensor_view<const S>(
        part.data(), {part.extent(0), part.extent(1), part.extent(2) ? before + part.extent(2) : 0, part.extent(3)},
        {part.stride(0), part.stride(1), 0, part.stride(3)});
  };
  const auto [shape, lengths] = detail::check_full_softmax<S>(at, queries, all(keys), all(values), to, causal);
  at.apart("out", to, "k", keys);
  at.apart("out", to, "v", values);
  at.apart("lse", options.lse, "k", keys);
  at.apart("lse", options.lse, "v", values);
  for (const auto& [what, x] : std::initializer_list<std::pair<const char*, detail::memory_layout>>{
           {"q", queries}, {"out", to}, {"bias", options.bias}, {"lse", options.lse}})
    cache.apart(at, what, x);
  cache.append(keys, values);
  try {
    detail::run_full_softmax(queries, cache.keys(), cache.values(), to, causal, shape, lengths, score, where, before);
  } catch (...) {
    cache.truncate(before);
    throw;
  }
}

template <element S, viewable Q, viewable K, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void full_softmax_step(kv_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out,
                       const std::type_identity_t<full_softmax_options<S>>& options, Score&& score) {
  execution serial;
  full_softmax_step(cache, q, k, v, out, options, score, serial);
}

template <element S, viewable Q, viewable K, viewable V, viewable O>
void full_softmax_step(kv_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out,
                       const std::type_identity_t<full_softmax_options<S>>& options, execution& where) {
  full_softmax_step(cache, q, k, v, out, options, detail::no_score{}, where);
}

template <element S, viewable Q, viewable K, viewable V, viewable O>
void full_softmax_step(kv_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out,
                       const std::type_identity_t<full_softmax_options<S>>& options = {}) {
  execution serial;
  full_softmax_step(cache, q, k, v, out, options, detail::no_score{}, serial);
}

}  // namespace attn
