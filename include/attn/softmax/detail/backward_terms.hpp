// attn: the backward pass of the terms of a score (score_terms.hpp), and the gradients of their parameters.
#pragma once

#include <attn/softmax/detail/score_terms.hpp>

#include <numeric>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Stands for the derivative where there is no score function.
struct no_score_backward {};

/// Sums of the gradient of a bias by distance: entry clamp(j - p_i, -reach, reach) of `middle`; null: not wanted.
struct relative_sums {
  double* middle = nullptr;
  idx_t reach = 0;

  void add(idx_t distance, double d) const { middle[std::clamp(distance, -reach, reach)] += d; }
  /// d[n] for distance first + n, n < count.
  template <class T>
  [[gnu::noinline]] void add_row(const T* d, idx_t count, idx_t first) const {
    const idx_t nearby = std::clamp(-reach - first, idx_t(0), count),
                distant = std::clamp(reach - first, nearby, count);
    add(-reach, sum(d, nearby));
    for (idx_t n = nearby; n < distant; ++n) middle[first + n] += static_cast<double>(d[n]);
    add(reach, sum(d + distant, count - distant));
  }

 private:
  template <class T>
  static double sum(const T* d, idx_t count) {
    constexpr idx_t lanes = 16;
    double sums[lanes] = {};
    idx_t n = 0;
    for (; n + lanes <= count; n += lanes)
      for (idx_t lane = 0; lane < lanes; ++lane) sums[lane] += static_cast<double>(d[n + lane]);
    for (; n < count; ++n) sums[0] += static_cast<double>(d[n]);
    return std::accumulate(sums, sums + lanes, 0.0);
  }
};

/// The terms of one head with the gradients of their parameters. One for each task: `d_slope()` is the sum of that
/// task.
template <class T, class Score, class ScoreBackward>
struct backward_terms {
  const score_terms<T, Score>& terms;
  ScoreBackward* score_backward = nullptr;
  tensor_view<T> d_bias{};    // its entries belong to this task
  T* d_counts = nullptr;      // per slot of the counts: the sum over all queries, base e
  bool sum_slope = false;
  relative_sums relative{};  // they belong to this task
  decay_gradients decay{};
  relative_key_sums<T> by_distance{};
  T* d_positions = nullptr;  // the task's sums of the gradient of position queries, by slot
  double* rows = nullptr;    // by query: sums of the gradients of weights times these, where there is no softmax
  double slope_sum = 0;      // over all pairs of queries and keys

  /// Whether the gradients need the scores as they were before the terms.
  bool need_raw() const { return terms.scored || terms.softcap; }
  T d_slope() const { return static_cast<T>(slope_sum); }
  bool any() const { return need_raw() || d_bias || sum_slope || relative.middle || decay || d_counts; }

  /// Row of query i: raw[n], the scores before the terms, and d[n], the gradients of the final ones, of the keys at
  /// slots slot + n, n < count, a multiple of the vector width; d becomes the gradient of the raw scores, raw is
  /// overwritten. A gradient of exactly 0 stays 0, whatever the score.
  void operator()(T* raw, T* d, idx_t count, idx_t i, const index_map& positions, idx_t slot) {
    const idx_t p = i + terms.query_shift;
    if (d_counts && slot < terms.counts.slot_count) {
      T* const to = d_counts + slot;
      for (idx_t n = 0; n < (std::min)(count, terms.counts.slot_count - slot); ++n) to[n] += d[n];
    }
    if (terms.softcap) {
      const auto uncap = broadcast<T>(T(1) / *terms.softcap);
      map_packets(raw, raw, count, [&](const auto& x) { return tanh<T>(mul(x, uncap)); });
    }
    if constexpr (score_terms<T, Score>::scored)
      for (idx_t n = 0; n < count; ++n) {
        if (d[n] == T(0)) continue;
        const idx_t j = positions[slot + n];
        T s = terms.softcap ? *terms.softcap * raw[n] : raw[n];
        if (terms.bias) s += entry(terms.bias, i, j);
        if (terms.relative) s += terms.relative(terms.head, terms.relative.distance(p, j));
        if (!terms.slopes.empty()) s -= terms.slopes[static_cast<std::size_t>(terms.head)] * distance(p, j);
        if (terms.decay) s += terms.decay.head(terms.batch, terms.head)(p, j);
        d[n] = static_cast<T>((*score_backward)(s, d[n], terms.batch, terms.head, p, j));
      }
    if (decay) decay.add(d, count, i, p, positions, slot);
    const bool in_a_row = !positions.list && positions.step == 1;
    if (relative.middle && in_a_row) relative.add_row(d, count, positions[slot] - p);
    if (d_bias || sum_slope || (relative.middle && !in_a_row))
      for (idx_t n = 0; n < count; ++n) {
        if (d[n] == T(0)) continue;
        const idx_t j = positions[slot + n];
        if (d_bias) entry(d_bias, i, j) += d[n];
        if (relative.middle && !in_a_row) relative.add(terms.relative.distance(p, j), static_cast<double>(d[n]));
        if (sum_slope) slope_sum -= static_cast<double>(d[n]) * static_cast<double>(distance(p, j));
      }
    if (terms.softcap)
      for (idx_t n = 0; n < count; n += width<T>) {
        const packet<T> t = load<T>(raw + n), x = load<T>(d + n), one = broadcast<T>(T(1));
        const packet<T> derivative = mul(sub(one, t), add(one, t));
        store<T>(d + n, if_less(zero<T>(), abs(x), mul(x, derivative), x));
      }
  }

 private:
  static T distance(idx_t p, idx_t j) { return static_cast<T>(std::abs(p - j)); }
  template <class E>
  E& entry(const tensor_view<E>& x, idx_t i, idx_t j) const {
    return x(x.extent(0) == 1 ? 0 : terms.batch, x.extent(1) == 1 ? 0 : terms.head, x.extent(2) == 1 ? 0 : i, j);
  }
};

template <class F, class T>
concept score_derivative = requires(F& f, T s, idx_t i) {
  { f(s, s, i, i, i, i) } -> std::convertible_to<T>;
};

/// Checks at compile time that a derivative is given exactly where a score function is.
template <class Score, class ScoreBackward, class T>
constexpr void require_score_backward() {
  if constexpr (std::same_as<std::remove_cvref_t<Score>, no_score> || makes_weights<Score>)
    static_assert(std::same_as<std::remove_cvref_t<ScoreBackward>, no_score_backward>,
                  "attn: score_backward without a score function");
  else
    static_assert(score_derivative<ScoreBackward, T>,
                  "attn: the gradient of a score function needs its derivative: pass score_backward(s, d, batch, head, i, "
                  "j), which returns d times the derivative of score by s, after the score function");
}

}}}  // namespace attn::ATTN_ISA::detail
