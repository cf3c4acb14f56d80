// attn: features that are exponentials, scaled so that they neither overflow nor underflow.
//
// The kernel has the logarithm (base 2) of such a feature: log2 phi_r(x_t) = raw[r][t] + shift[t]; or, signed (sine and
// cosine), the number raw[r][t] times 2^shift[t]. They are used in two ways:
//
//   for the sums   row r of S and z is divided by 2^log_scale[r], log_scale[r] the (rounded) largest logarithm of any
//                  key so far; a query's features are multiplied by it and divided by the largest result, so that its
//                  denominator is at least 1/2 whatever the keys are
//   for the chunk  features are divided by the largest of their own token, which becomes a factor in score_factor_ij;
//                  with log scales common to the chunk the rounding of earlier rows would depend on later keys
//
// The second can underflow completely where query and key have no large feature in common. Rows whose denominator
// underflows are recomputed with weights of their few keys from logarithms; whether that happens depends on no later
// key.
#pragma once

#include <attn/core/detail/sin_cos.hpp>
#include <attn/kernel/detail/features.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// largest[t] = max over r < count of raw[r][t] + (log_scale ? log_scale[r] : 0).
template <class T>
void largest_of(const T* raw, idx_t count, const T* log_scale, T* largest) {
  constexpr int packets = kernel_chunk / width<T>, some = packets < 4 ? packets : 4;
  for (int t = 0; t < kernel_chunk; t += some * width<T>) {
    packet<T> found[array_size<some>];
    for (int n = 0; n < some; ++n) found[n] = broadcast<T>(-std::numeric_limits<T>::infinity());
    for (idx_t r = 0; r < count; ++r)
      for (int n = 0; n < some; ++n)
        found[n] = (max)(found[n], add(load<T>(raw + r * kernel_chunk + t + n * width<T>),
                                   broadcast<T>(log_scale ? log_scale[r] : T(0))));
    for (int n = 0; n < some; ++n) store<T>(largest + t + n * width<T>, found[n]);
  }
}

/// to[r][t] = 2^(raw[r][t] + (log_scale ? log_scale[r] : 0) - maximum[t]).
template <class T>
void exp2_below(const T* raw, idx_t count, const T* log_scale, const T* maximum, T* to) {
  for (idx_t r = 0; r < count; ++r) {
    const packet<T> scale = broadcast<T>(log_scale ? log_scale[r] : T(0));
    for (idx_t t = 0; t < kernel_chunk; t += width<T>)
      store<T>(to + r * kernel_chunk + t,
               exp2_weight<T>(sub(add(load<T>(raw + r * kernel_chunk + t), scale), load<T>(maximum + t))));
  }
}

/// Numbers from 2^mantissa on are integers.
template <class T>
T nearest_whole(T x) {
  constexpr T whole = T(std::uint64_t(1) << float_bits<T>::mantissa);
  const T large = std::copysign(whole, x);
  return std::abs(x) < whole ? (x + large) - large : x;
}

/// log_weights[j] = log2 of sum over r of 2^(query[r] + raw[r][j] + shift[j]); query[r * kernel_chunk] of one lane.
template <class T>
void weigh_logarithms(const T* query, const T* raw, const T* shift, idx_t count, T* log_weights) {
  for (idx_t j = 0; j < kernel_chunk; j += width<T>) {
    packet<T> largest = broadcast<T>(no_log_scale<T>), sum = zero<T>();
    const auto log_of = [&](idx_t r) {
      return add(load<T>(raw + r * kernel_chunk + j), broadcast<T>(query[r * kernel_chunk]));
    };
    for (idx_t r = 0; r < count; ++r) largest = (max)(largest, log_of(r));
    for (idx_t r = 0; r < count; ++r) sum = add(sum, exp2_weight<T>(sub(log_of(r), largest)));
    alignas(64) T sums[width<T>], maxima[width<T>];
    store<T>(sums, sum), store<T>(maxima, largest);
    for (int n = 0; n < width<T>; ++n) log_weights[j + n] = maxima[n] + std::log2(sums[n]) + shift[j + n];
  }
}

/// Row i of a chunk whose scores underflowed, `query` its lane of raw features: s.log_weights becomes the weights of
/// its keys over the largest of them and of `sums_max`, whose logarithm it returns.
template <class T>
T weigh_row(const T* query, idx_t i, idx_t features, T sums_max, const kernel_scratch<T>& s) {
  T *const weights = s.log_weights, largest = sums_max;
  weigh_logarithms(query, s.k_raw, s.k_shift, features, weights);
  for (idx_t j = 0; j <= i; ++j) largest = (std::max)(largest, weights[j]);
  for (idx_t j = 0; j <= i; ++j) weights[j] = std::exp2(weights[j] - largest);
  return largest;
}

/// Exponential features, all of one sign, or signed.
template <class T>
struct exponential_scaling final : log_scaling<T> {
  idx_t features = 0;
  idx_t divisor = 1;  // of phi(q).phi(k), which features do not include
  bool is_signed = false;

  /// A feature over its log scale.
  ATTN_INLINE packet<T> feature(const packet<T>& raw, const packet<T>& shift, const packet<T>& scale) const {
    const packet<T> x = exp2_weight<T>(sub(is_signed ? shift : add(raw, shift), scale));
    return is_signed ? mul(raw, x) : x;
  }

  /// Logarithms are added up in the same order for the log scale and for phi: those of long keys are rounded by up to
  /// hundreds, and phi must not exceed the log scale.
  void keys_for_sums(const T* raw, T* log_scale, const kernel_scratch<T>& s) const override {
    T *const decay = s.row_decay, *const phi = s.k_phi;
    const T* const shift = s.k_shift;
    T highest = -std::numeric_limits<T>::infinity();
    if (is_signed)
      for (idx_t t = 0; t < kernel_chunk; t += width<T>) highest = (std::max)(highest, max_lanes(load<T>(shift + t)));
    for (idx_t r = 0; r < features; ++r) {
      const T* const from = raw + r * kernel_chunk;
      T largest = highest;
      if (!is_signed) {
        packet<T> most = add(load<T>(from), load<T>(shift));
        for (idx_t t = width<T>; t < kernel_chunk; t += width<T>)
          most = (max)(most, add(load<T>(from + t), load<T>(shift + t)));
        largest = max_lanes(most);
      }
      const T raised = (std::max)(log_scale[r], nearest_whole(largest));
      decay[r] = log_scale[r] - raised;
      log_scale[r] = raised;
      for (idx_t t = 0; t < kernel_chunk; t += width<T>) {
        const packet<T> x = load<T>(from + t), y = load<T>(shift + t);
        store<T>(phi + r * kernel_chunk + t, feature(x, y, broadcast<T>(raised)));
      }
    }
    map_packets(decay, decay, features, [](const auto& x) { return exp2_weight<T>(x); });
  }

  /// score_factor_ij = 2^(maximum_j - running_max_i).
  void keys_for_chunk(idx_t count, const kernel_scratch<T>& s) const override {
    own_keys(s.k_own, count, s);
    for (idx_t i = 0; i < count; ++i)
      for (idx_t j = 0; j <= i; j += width<T>)
        store<T>(s.score_factor + i * kernel_chunk + j,
                 exp2_weight<T>(sub(load<T>(s.k_max + j), broadcast<T>(s.running_max[i]))));
  }
  /// s.k_own, the maximum_j of each key, and running_max_i, the largest maximum_j of j <= i.
  void own_keys(const T* raw, idx_t count, const kernel_scratch<T>& s) const {
    below_own(raw, s.k_own, s.k_max);
    T highest = no_log_scale<T>;
    for (idx_t t = 0; t < kernel_chunk; ++t) {
      s.k_max[t] = is_signed ? s.k_shift[t] : s.k_max[t] + s.k_shift[t];
      s.running_max[t] = highest = (std::max)(highest, t < count ? s.k_max[t] : highest);
    }
  }
  void queries_for_sums(const T* raw, const T* log_scale, const kernel_scratch<T>& s) const override {
    if (is_signed) {
      std::copy_n(raw, features * kernel_chunk, s.q_phi);
      std::fill_n(s.q_max, kernel_chunk, log_scale[0]);
    } else {
      largest_of<T>(raw, features, log_scale, s.q_max);
      exp2_below<T>(raw, features, log_scale, s.q_max, s.q_phi);
    }
  }
  void queries_for_chunk(const kernel_scratch<T>& s) const override { below_own(s.q_own, s.q_own, s.own_max); }
  /// Features over the largest of their own token, which may be in place, and its logarithm.
  void below_own(const T* raw, T* to, T* maximum) const {
    if (is_signed) {
      std::fill_n(maximum, kernel_chunk, T(0));
      if (to != raw) std::copy_n(raw, features * kernel_chunk, to);
    } else {
      largest_of<T>(raw, features, nullptr, maximum);
      exp2_below<T>(raw, features, nullptr, maximum, to);
    }
  }

  /// eps over the scale 2^maximum of a denominator; features do not include their divisor and the query's shift.
  T eps_over(T eps, T maximum, T shift) const {
    return eps > T(0) ? eps * static_cast<T>(divisor) * std::exp2(-(maximum + shift)) : T(0);
  }

  void join(bool of_sums, bool of_chunk, T eps, const kernel_scratch<T>& s) const override {
    for (idx_t t = 0; t < kernel_chunk; t += width<T>) {
      const packet<T> none = broadcast<T>(no_log_scale<T>), before = of_sums ? load<T>(s.q_max + t) : none;
      const packet<T> own = of_chunk ? add(load<T>(s.own_max + t), load<T>(s.running_max + t)) : none;
      const packet<T> larger = (max)(before, own);
      store<T>(s.state_factor + t, exp2_weight<T>(sub(before, larger)));
      store<T>(s.own_factor + t, exp2_weight<T>(sub(own, larger)));
      store<T>(s.eps + t, larger);
    }
    for (idx_t t = 0; t < kernel_chunk; ++t) s.eps[t] = eps_over(eps, s.eps[t], s.q_shift[t]);
  }

  /// The largest of the positive weights could be 1, so a sum below this may have lost all its terms.
  bool underflowed(T denominator) const override {
    return !is_signed && denominator < (std::numeric_limits<T>::min)() * T(std::uint64_t(1) << 45);
  }

  void recompute_row(const chunk_view<T>& c, idx_t i, T eps, const kernel_scratch<T>& s, T* out) const override {
    const T* const weights = s.log_weights;
    const T sums_max = c.sums ? s.q_max[i] : no_log_scale<T>;
    const T largest = weigh_row(s.q_raw, i, features, sums_max, s);
    const T of_sums = c.sums ? std::exp2(sums_max - largest) : T(0);
    T denominator = c.sums ? of_sums * s.den[i] : T(0);
    for (idx_t j = 0; j <= i; ++j) denominator += weights[j];
    // It is >= 1/2, or 0 where every logarithm is below no_log_scale, or NaN.
    const T whole = denominator + eps_over(eps, largest, s.q_shift[i]),
            normal = denominator == T(0) ? T(0) : T(1) / whole;
    for (idx_t d = 0; d < c.dim_v; ++d) {
      const idx_t col = d / panel_width<T> * panel_width<T>, lane = d % panel_width<T>;
      T sum = T(0);
      for (idx_t r = 0; c.sums && r < c.features; ++r) sum += s.q_phi[r * kernel_chunk + i] * c.sums->value(r, d);
      sum *= of_sums;
      for (idx_t j = 0; j <= i; ++j) sum += weights[j] * s.values[col * kernel_chunk + j * panel_width<T> + lane];
      out[d] = sum * normal;
    }
  }

  void step_key(T* raw, T shift, T* log_scale, T* decay) const override {
    for (idx_t r = 0; r < features; ++r) {
      const T raised = (std::max)(log_scale[r], nearest_whole(is_signed ? shift : raw[r] + shift));
      decay[r] = log_scale[r] - raised;
      log_scale[r] = raised;
    }
    map_packets(decay, decay, features, [](const auto& x) { return exp2_weight<T>(x); });
    for (idx_t r = 0; r < features; r += width<T>)  // whole packets: rows are padded
      store<T>(raw + r, feature(load<T>(raw + r), broadcast<T>(shift), load<T>(log_scale + r)));
  }

  /// The query's features times the scales of the sums, over the largest.
  T step_query(T* raw, const T* log_scale, T shift, T eps) const override {
    if (is_signed) return eps_over(eps, log_scale[0], shift);
    T largest = -std::numeric_limits<T>::infinity();
    for (idx_t r = 0; r < features; ++r) largest = (std::max)(largest, raw[r] + log_scale[r]);
    for (idx_t r = 0; r < features; r += width<T>)
      store<T>(raw + r, exp2_weight<T>(sub(add(load<T>(raw + r), load<T>(log_scale + r)), broadcast<T>(largest))));
    return eps_over(eps, largest, shift);
  }
};

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) struct exponential_scaling<T>
#include <attn/core/detail/compiled.hpp>
