// attn: the backward pass of a feature map, as kernels call it: once per chunk.
#pragma once

#include <attn/kernel/detail/chunk_backward.hpp>
#include <attn/kernel/detail/log_scales.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// From s.k_raw the keys' features for the chunk: k_own, and factors[j][i] = 2^(maximum_j - running_max_i) for i >= j.
template <class T>
void scale_keys(const exponential_scaling<T>& e, idx_t count, const kernel_scratch<T>& s, T* factors) {
  e.own_keys(s.k_raw, count, s);
  for (idx_t j = 0; j < count; ++j) {
    T* const row = factors + j * kernel_chunk;
    const idx_t begin = j / width<T> * width<T>;
    for (idx_t t = begin; t < count; t += width<T>)
      store<T>(row + t, exp2_weight<T>(sub(broadcast<T>(s.k_max[j]), load<T>(s.running_max + t))));
    std::fill(row + begin, row + j, T(0));  // masked entries must not be NaN
  }
}

/// The keys' features times those of R, 2^log_scale[r] phi_r(k_j), from s.k_raw; where signed, key_factor[j] is the
/// power of two. A weight cannot exceed 1, as the key is part of the denominator of every query that sees it: larger
/// results, from rounding logarithms in the thousands, are clamped.
template <class T>
void weigh_keys(const exponential_scaling<T>& e, const T* log_scale, idx_t lanes, const kernel_scratch<T>& s,
                T* weighed, T* key_factor) {
  const packet<T> most = broadcast<T>(T(2));
  if (e.is_signed)
    map_packets(s.k_shift, key_factor, kernel_chunk,
                [&](const auto& p) { return exp2_weight<T>((min)(add(p, broadcast<T>(log_scale[0])), most)); });
  each_packet<T>(e.features, lanes, [&](idx_t r, idx_t t, idx_t n) {
    const packet<T> raw = load<T>(s.k_raw + n);
    const packet<T> log = add(add(raw, load<T>(s.k_shift + t)), broadcast<T>(log_scale[r]));
    store<T>(weighed + n, e.is_signed ? mul(raw, load<T>(key_factor + t)) : exp2_weight<T>((min)(log, most)));
  });
}

/// The tokens of a chunk, in the backward pass of the map that computed their features.
template <class T>
struct tokens_back {
  token_rows<T> rows;
  idx_t item_head;      // as for feature_map
  bool of_keys;
  idx_t first;     // lanes before it have no token
  idx_t position;  // of lane 0 among the real tokens of its sequence
  const T* phi;    // as the map computed them: features, or raw ones where it has a scaling
  T* d;  // [feature][chunk]: the gradients of features; of their natural logarithms where they are logarithms;
         // of the raw numbers, times their scale, where those are signed. May be overwritten.
};

template <class T>
struct feature_map_backward {
  const exponential_scaling<T>* exponential = nullptr;  // where features have log scales, as feature_map::scaling
  idx_t scratch_size = 0;     // numbers of scratch memory a worker needs, the forward map's included
  bool finishes_keys = false;  // gradients of keys depend on all keys
  bool by_rows = false;        // features are computed number by number: key_rows() and back_rows() may be called

  feature_map_backward() = default;
  feature_map_backward(const feature_map_backward&) = delete;

  /// Allocates and fills shared memory of the call, after the map's own.
  virtual void layout(arena&, idx_t /*item_heads*/) {}
  virtual void prepare(execution&) {}
  /// dx [dim][chunk] from x.d, where dx is given; adds to dw, sums of rows of W [row][dim], where given.
  virtual void back(const tokens_back<T>& x, T* dx, kernel_sums<T>* dw, T* scratch) const = 0;
  /// The same, with the gradients of the tokens in memory, where wanted; dx is scratch.
  virtual void back_to(const tokens_back<T>& x, const stored_gradient_head<T>& to, T* dx, kernel_sums<T>* dw,
                       T* scratch) const {
    back(x, to ? dx : nullptr, dw, scratch);
    if (to) to.store_columns(dx, x.position, x.first, x.rows.count);
  }
  /// Features of keys [begin, begin + count), as rows; d times their derivatives, in place.
  virtual void key_rows(const stored_matrix<T>&, idx_t /*begin*/, idx_t /*count*/, T* /*phi*/,
                        idx_t /*stride*/) const {}
  virtual void back_rows(const T* /*phi*/, T* /*d*/, idx_t /*count*/) const {}
  /// For all `count` keys of a head of sums: the terms that back() left out, added to rows [count][dim] (where given)
  /// and dw.
  virtual void finish_head(idx_t /*item_head*/, T* /*rows*/, kernel_sums<T>* /*dw*/, T* /*scratch*/) const {}
  /// For all keys of a key head of batch item b, after all of its heads of sums were added.
  virtual void finish_keys(T* /*rows*/, idx_t /*b*/) const {}

 protected:
  ~feature_map_backward() = default;
};

}}}  // namespace attn::ATTN_ISA::detail
