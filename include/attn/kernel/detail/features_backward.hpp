// attn: the backward pass of a feature map, as kernels call it: once per chunk.
#pragma once

#include <attn/kernel/detail/log_scales.hpp>
#include <attn/kernel/detail/stored_rows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

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
  /// Where features have log scales, as feature_map::scaling.
  const exponential_scaling<T>* exponential = nullptr;
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
