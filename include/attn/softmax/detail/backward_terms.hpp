// attn: the way back through the terms of a score (score_terms.hpp), and the gradients of what they are made of.
#pragma once

#include <attn/softmax/detail/score_terms.hpp>

namespace attn::inline ATTN_ISA::detail {

/// In place of the derivative of a score function where there is none.
struct no_score_backward {};

/// The terms of one head, with the gradients their parameters want. One for each task: d_slope is its own sum.
template <class T, class Score, class ScoreBackward>
struct backward_terms {
  const score_terms<T, Score>& terms;
  ScoreBackward* score_backward = nullptr;
  index_map positions{};      // of the keys
  tensor_view<T> d_bias{};    // its entries belong to this task
  T d_slope = 0;

  /// Row of query i: raw[n], the scores before the terms, and d[n], the gradients of the final ones, of the keys at slots
  /// slot + n, n < count; d becomes the gradient of the raw scores. A gradient of exactly 0 passes nothing on.
  void operator()(const T* raw, T* d, index count, index i, index slot) {
    const index p = i + terms.query_shift;
    for (index n = 0; n < count; ++n) {
      if (d[n] == T(0)) continue;
      const index j = positions[slot + n];
      T capped = raw ? raw[n] : T(0), derivative = T(1);
      if (terms.softcap) {
        const T t = std::tanh(capped / *terms.softcap);
        capped = *terms.softcap * t;
        derivative = (T(1) - t) * (T(1) + t);
      }
      const T distance = static_cast<T>(std::abs(p - j));
      if constexpr (score_terms<T, Score>::scored) {
        T s = capped;
        if (terms.bias) s += entry(terms.bias, i, j);
        if (!terms.slopes.empty()) s -= terms.slopes[static_cast<std::size_t>(terms.head)] * distance;
        d[n] = static_cast<T>((*score_backward)(s, d[n], terms.batch, terms.head, p, j));
      }
      if (d_bias) entry(d_bias, i, j) += d[n];
      d_slope -= d[n] * distance;
      d[n] *= derivative;
    }
  }

 private:
  template <class E>
  E& entry(const tensor_view<E>& x, index i, index j) const {
    return x(x.extent(0) == 1 ? 0 : terms.batch, x.extent(1) == 1 ? 0 : terms.head, x.extent(2) == 1 ? 0 : i, j);
  }
};

template <class F, class T>
concept score_derivative = requires(F& f, T s, index i) {
  { f(s, s, i, i, i, i) } -> std::convertible_to<T>;
};

/// A score function has its derivative given with it, and none else has.
template <class Score, class ScoreBackward, class T>
constexpr void require_score_backward() {
  if constexpr (std::same_as<Score, no_score>)
    static_assert(std::same_as<ScoreBackward, no_score_backward>, "attn: score_backward without a score function");
  else
    static_assert(score_derivative<ScoreBackward, T>,
                  "attn: the gradient of a score function needs its derivative: pass score_backward(s, d, batch, head, i, "
                  "j), which returns d times the derivative of score by s, after the score function");
}

/// A vector as the last axis of a view.
template <class T>
tensor_view<T> as_matrix(const tensor_view<T, 1>& x) {
  const index rows = x ? 1 : 0;
  return {x.data(), {rows, rows, rows, x.extent(0)}, {0, 0, 0, x.stride(0)}};
}

/// sum of x[d] y[d]
template <class T, class S>
T row_dot(const S* x, index x_stride, const S* y, index y_stride, index count) {
  packet<T> sum = zero<T>();
  for (index d = 0; d < count; d += width<T>)
    sum = fma(load_part<T>(x + d * x_stride, x_stride, count - d), load_part<T>(y + d * y_stride, y_stride, count - d), sum);
  return sum_lanes(sum);
}

}  // namespace attn::inline ATTN_ISA::detail
