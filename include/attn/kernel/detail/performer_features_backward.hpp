// attn: the backward pass of the features of performer.
//
// With u = W x~ and h = |x~|^2 / 2, x~ = sqrt(scale) (x - centre), the kernel gives d, the gradients of the logarithms
// u - h or -u - h; of sin u and cos u, whose scale e^h is in d; or, of relu and with feature_eps, of the features:
//   dx = sqrt(scale) W^T du -+ scale (x - centre) dh,   dh = sum_r d_r (times the feature where that is no logarithm)
// With feature_eps the maximum is part of the formula: its gradient, - dh, goes to the u that is the maximum. The
// gradient of the mean key is minus the mean of the gradients of all keys.
#pragma once

#include <attn/kernel/detail/performer_features.hpp>
#include <attn/kernel/detail/projection_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct performer_features_backward final : projected_features_backward<T> {
  using base = projected_features_backward<T>;
  using base::rows, base::dim;

  const performer_features<T>& made;
  struct place {
    idx_t key, row;
    T sum;  // of dh over all keys
  };
  place* largest = nullptr;  // [batch * heads]: where the maximum over all keys is

  explicit performer_features_backward(const performer_features<T>& f) : base(f), made(f) {
    this->scratch_size += 3 * kernel_chunk + (made.published ? made.raw_size() : 0);
    this->finishes_keys = made.centred || made.published;
    if (made.scaling) this->exponential = &made.exponential;
  }

  void layout(arena& memory, idx_t item_heads) override {
    base::layout(memory, item_heads);
    largest = memory.allocate<place>(made.published ? item_heads : 0);
  }

  void prepare(execution& exec) override {
    this->pack(std::sqrt(made.scale));
    if (!made.published) return;
    std::fill_n(largest, made.item_heads(), place{0, 0, T(0)});
    made.each_block(exec, [&](idx_t item_head, idx_t begin, idx_t count, const T* raw) {
      for (idx_t r = 0; r < rows; ++r)
        for (idx_t t = 0; t < count; ++t)
          if (raw[r * kernel_chunk + t] == made.maxima[item_head] &&
              !made.call.hides(item_head / made.call.heads, begin + t)) {
            largest[item_head] = {begin + t, r, T(0)};
            return false;
          }
      return true;
    });
  }

  void back(const tokens_back<T>& x, T* dx, kernel_sums<T>* dw, T* work) const override {
    const idx_t lanes = x.rows.lanes;
    T *const columns = work, *const half = work + (dim + 1) * kernel_chunk, *const maximum = half + kernel_chunk;
    T* const panels = maximum + 2 * kernel_chunk;
    const T* const centre = x.of_keys ? made.centre_of(x.item_head) : nullptr;
    if (made.published)
      back_published(x, centre, columns, half, maximum, panels + base::panels_size());
    else
      made.pack_centred(x.rows, centre, columns);
    if (made.is_signed) {  // the scales of long tokens are clamped
      sum_squares(columns, dim, lanes, half);
      if (has_long_tokens(half, lanes)) [[unlikely]] made.shorten(columns, lanes, half);
    }
    to_projections(x, lanes, half);
    if (dx) {
      this->project_back(x.item_head, x.d, lanes, dx);
      for (idx_t d = 0; d < dim && !made.relu; ++d)
        for (idx_t t = 0; t < lanes; t += width<T>) {
          const idx_t n = d * kernel_chunk + t;
          store<T>(dx + n, fma(load<T>(half + t), load<T>(columns + n), load<T>(dx + n)));
        }
    }
    if (!dw) return;
    std::fill_n(maximum, kernel_chunk, std::sqrt(made.scale));
    this->add_features(x, x.d, columns, maximum, panels, *dw);
  }

  /// x.d becomes du; half[t] the factor of x: -+ scale dh.
  void to_projections(const tokens_back<T>& x, idx_t lanes, T* half) const {
    const idx_t m = rows * kernel_chunk, all = this->features.features;
    const packet<T> sign = broadcast<T>(made.is_signed ? made.scale : -made.scale);
    const auto at = [&](idx_t r, idx_t t) { return x.d + r * kernel_chunk + t; };
    for (idx_t t = 0; t < lanes; t += width<T>) {
      packet<T> sum = zero<T>();
      if (made.is_signed) {
        for (idx_t r = 0; r < rows; ++r) {
          const packet<T> sine = load<T>(x.phi + r * kernel_chunk + t),
                          cosine = load<T>(x.phi + r * kernel_chunk + m + t);
          const packet<T> ds = load<T>(at(r, t)), dc = load<T>(at(r, t) + m);
          sum = fma(ds, sine, fma(dc, cosine, sum));
          store<T>(at(r, t), sub(mul(ds, cosine), mul(dc, sine)));
        }
      } else if (made.relu) {
        const packet<T> least = broadcast<T>(made.feature_eps);
        for (idx_t r = 0; r < rows; ++r)
          store<T>(at(r, t), if_less(least, load<T>(x.phi + r * kernel_chunk + t), load<T>(at(r, t)), zero<T>()));
      } else if (made.published) {
        continue;
      } else {
        for (idx_t r = 0; r < all; ++r) sum = add(sum, load<T>(at(r, t)));
        for (idx_t r = 0; r < rows && made.kernel == performer_kernel::hyperbolic; ++r)
          store<T>(at(r, t), sub(load<T>(at(r, t)), load<T>(at(r, t) + m)));
      }
      store<T>(half + t, mul(sum, sign));
    }
  }

  /// With feature_eps: from the gradients of features to du, and the factor of x.
  void back_published(const tokens_back<T>& x, const T* centre, T* columns, T* half, T* maximum, T* raw) const {
    T* const shift = columns + dim * kernel_chunk;
    made.raw_of(x.rows, x.item_head, centre, raw, shift, columns);
    if (x.of_keys)
      std::fill_n(maximum, kernel_chunk, made.maxima[x.item_head]);
    else
      largest_of<T>(raw, rows, nullptr, maximum);
    for (idx_t t = 0; t < kernel_chunk; t += width<T>) {
      const packet<T> less = sub(load<T>(shift + t), load<T>(maximum + t));
      packet<T> sum = zero<T>();
      for (idx_t r = 0; r < rows; ++r) {
        const idx_t n = r * kernel_chunk + t;
        const packet<T> d = mul(load<T>(x.d + n), exp2_weight<T>(add(load<T>(raw + n), less)));
        store<T>(x.d + n, d);
        sum = add(sum, d);
      }
      store<T>(half + t, sum);
    }
    for (idx_t t = 0; t < x.rows.count && !x.of_keys; ++t)
      for (idx_t r = 0; r < rows; ++r)
        if (raw[r * kernel_chunk + t] == maximum[t]) {
          x.d[r * kernel_chunk + t] -= half[t];
          break;
        }
    for (idx_t t = 0; t < x.rows.count && x.of_keys; ++t) largest[x.item_head].sum += half[t];
    for (idx_t t = 0; t < kernel_chunk; ++t) half[t] *= -made.scale;
  }

  void finish_head(idx_t item_head, T* rows_of_keys, kernel_sums<T>* dw, T* work) const override {
    const kernel_call<T>& call = made.call;
    const idx_t b = item_head / call.heads, h = item_head % call.heads;
    if (!made.published || call.hides(b, largest[item_head].key)) return;
    const place& at = largest[item_head];
    const T factor = std::sqrt(made.scale) * at.sum;
    if (rows_of_keys) {
      made.w.head(0, h / (call.heads / made.matrices)).read_row(at.row, work);
      for (idx_t d = 0; d < dim; ++d) rows_of_keys[at.key * dim + d] -= factor * work[d];
    }
    if (!dw) return;
    call.k.head(b, call.kv_head(h)).read_row(at.key, work);
    const T* const centre = made.centre_of(item_head);
    for (idx_t d = 0; d < dim; ++d) dw->value(at.row, d) -= factor * (work[d] - (centre ? centre[d] : T(0)));
  }

  void finish_keys(T* rows_of_keys, idx_t b) const override {
    const kernel_call<T>& call = made.call;
    const idx_t count = call.lengths.keys(b), seen = call.seen_keys(b);
    for (idx_t d = 0; d < dim && made.centred; ++d) {
      double sum = 0;
      for (idx_t j = 0; j < count; ++j) sum += static_cast<double>(rows_of_keys[j * dim + d]);
      const T mean = static_cast<T>(sum / static_cast<double>(seen));
      for (idx_t j = 0; j < count; ++j)
        if (!call.hides(b, j)) rows_of_keys[j * dim + d] -= mean;
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) struct performer_features_backward<T>
#include <attn/core/detail/compiled.hpp>
