// attn: the gradients of the depth-wise convolution of values along the sequence that nystrom adds to its result.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/gradients.hpp>
#include <attn/core/detail/tile_product.hpp>
#include <attn/core/execution.hpp>
#include <attn/low_rank/detail/attend_rows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The backward pass of out_i += sum over t of weights(h, t) v_(i + first + t). `first` is the position of tap 0
/// relative to row i of the queries.
template <class S>
struct convolution_backward {
  using T = compute_type<S>;
  static constexpr int together = 8;   // taps
  static constexpr idx_t chunk = 512;  // queries summed in registers

  tensor_view<const T, 2> weights;
  tensor_view<const S> v, d_out;
  attention_shape shape;
  sequence_lengths lengths;
  key_flags seen{};

  idx_t taps() const { return weights.extent(1); }
  idx_t first(idx_t b) const { return lengths.keys(b) - lengths.queries(b) - taps() / 2; }

  /// Adds to a row of sums, in whole packets, the gradient of value j from query head h.
  void add_value(idx_t b, idx_t h, idx_t j, T* to) const {
    const matrix_view<const S> d = head_of(d_out, b, h);
    const idx_t last = j - first(b);  // the query whose tap 0 it is
    const idx_t begin = std::max<idx_t>(0, last - lengths.queries(b) + 1), end = (std::min)(taps(), last + 1);
    for (idx_t c = 0; c < shape.dim_v; c += width<T>) {
      packet<T> sum = load<T>(to + c);
      for (idx_t t = begin; t < end; ++t)
        sum = fma(broadcast<T>(weights(h, t)),
                  load_part<T>(d.row(last - t) + c * d.col_stride, d.col_stride, shape.dim_v - c), sum);
      store<T>(to + c, sum);
    }
  }

  /// The gradients of the weights, summed over batch items and queries in order.
  void store_weights(const tensor_view<T, 2>& to, bool accumulate, execution& exec) const {
    const idx_t steps = ceil_div(taps(), together);
    exec.for_each(shape.heads * steps, [&](idx_t task, int) {
      const idx_t h = task / steps, t0 = task % steps * together, count = std::min<idx_t>(together, taps() - t0);
      T sums[together] = {};
      for (idx_t b = 0; b < shape.batch; ++b) add_taps(b, h, t0, count, sums);
      for (idx_t t = 0; t < count; ++t) store_gradient(to(h, t0 + t), sums[t], accumulate);
    });
  }

 private:
  void add_taps(idx_t b, idx_t h, idx_t t0, idx_t count, T* sums) const {
    const matrix_view<const S> d = head_of(d_out, b, h), x = head_of(v, b, h / shape.group());
    const idx_t queries = lengths.queries(b), keys = lengths.keys(b), at = first(b) + t0;
    const auto begin_of = [&](idx_t t) { return std::clamp<idx_t>(-(at + t), 0, queries); };
    const auto end_of = [&](idx_t t) { return std::clamp<idx_t>(keys - (at + t), begin_of(t), queries); };
    const auto add = [&](auto N, idx_t t, idx_t begin, idx_t end) {
      for (; begin < end; begin += chunk) {
        const idx_t stop = (std::min)(begin + chunk, end);
        const seen_range values = seen.range(b, begin + at + t, stop + at + t + N.value - 1);
        if (values)
          add_products<N.value, true>(d, x, values, begin, stop, at + t, sums + t);
        else
          add_products<N.value, false>(d, x, values, begin, stop, at + t, sums + t);
      }
    };
    if (count == together) {  // queries all of whose taps lie inside; the rest tap by tap
      const idx_t begin = begin_of(0), end = (std::max)(begin, end_of(together - 1));
      add(std::integral_constant<int, together>{}, 0, begin, end);
      for (idx_t t = 0; t < together; ++t) {
        add(std::integral_constant<int, 1>{}, t, begin_of(t), (std::min)(begin, end_of(t)));
        add(std::integral_constant<int, 1>{}, t, (std::max)(end, begin_of(t)), end_of(t));
      }
    } else {
      for (idx_t t = 0; t < count; ++t) add(std::integral_constant<int, 1>{}, t, begin_of(t), end_of(t));
    }
  }

  /// sums[n] += sum over i in [begin, end) of d_i . x_(i + offset + n), of those x that are seen: `values`
  template <int N, bool Hidden>
  static void add_products(const matrix_view<const S>& d, const matrix_view<const S>& x, const seen_range& values,
                           idx_t begin, idx_t end, idx_t offset, T* sums) {
    packet<T> acc[array_size<N>];
    unroll<N>([&](auto n) { acc[n] = zero<T>(); });
    for (idx_t i = begin; i < end; ++i)
      for (idx_t c = 0; c < d.cols; c += width<T>) {
        const packet<T> y = load_part<T>(d.row(i) + c * d.col_stride, d.col_stride, d.cols - c);
        unroll<N>([&](auto n) {
          if (Hidden && values.hides(i - begin + n)) return;
          acc[n] = fma(y, load_part<T>(x.row(i + offset + n) + c * x.col_stride, x.col_stride, d.cols - c), acc[n]);
        });
      }
    unroll<N>([&](auto n) { sums[n] += sum_lanes(acc[n]); });
  }
};

}}}  // namespace attn::ATTN_ISA::detail
