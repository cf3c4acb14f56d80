// attn: features that are exponentials, kept within the range of numbers.
//
// Of such a feature the engine holds the logarithm (base 2): log2 phi_r(x_t) = raw[r][t] + shift[t]; or, signed (sine
// and cosine), the number raw[r][t] times 2^shift[t]. They are used in two ways:
//
//   for the sums   row r of S and z is kept over 2^level[r], level[r] the (rounded) largest logarithm of any key so
//   far;
//                  a query's features are weighed with 2^level and divided by the largest result, so that its
//                  denominator is at least 1/2 whatever the keys are
//   for the chunk  features over the largest of their own token, and the largest put back into mix_ij; levels of the
//                  chunk would let later keys decide how earlier rows round
//
// The second can lose everything where query and key share no large feature. Rows whose denominator comes out that
// small are computed anew, their few keys weighed in the logarithm (weigh_carefully): a decision that depends on no
// later key.
#pragma once

#include <attn/core/detail/sin_cos.hpp>
#include <attn/kernel/detail/chunk.hpp>

namespace attn::inline ATTN_ISA::detail {

/// largest[t] = max over r < count of raw[r][t] + (level ? level[r] : 0).
template <class T>
void largest_of(const T* raw, index count, const T* level, T* largest) {
  constexpr int packets = kernel_chunk / width<T>, some = packets < 4 ? packets : 4;
  for (int t = 0; t < kernel_chunk; t += some * width<T>) {
    packet<T> top[some];
    for (int n = 0; n < some; ++n) top[n] = broadcast<T>(-std::numeric_limits<T>::infinity());
    for (index r = 0; r < count; ++r)
      for (int n = 0; n < some; ++n)
        top[n] =
            max(top[n], add(load<T>(raw + r * kernel_chunk + t + n * width<T>), broadcast<T>(level ? level[r] : T(0))));
    for (int n = 0; n < some; ++n) store<T>(largest + t + n * width<T>, top[n]);
  }
}

/// to[r][t] = 2^(raw[r][t] + (level ? level[r] : 0) - top[t]).
template <class T>
void exp2_below(const T* raw, index count, const T* level, const T* top, T* to) {
  for (index r = 0; r < count; ++r) {
    const packet<T> add_level = broadcast<T>(level ? level[r] : T(0));
    for (index t = 0; t < kernel_chunk; t += width<T>)
      store<T>(to + r * kernel_chunk + t,
               exp2_weight<T>(sub(add(load<T>(raw + r * kernel_chunk + t), add_level), load<T>(top + t))));
  }
}

/// Numbers from 2^mantissa on are whole.
template <class T>
T nearest_whole(T x) {
  constexpr T whole = T(std::uint64_t(1) << float_bits<T>::mantissa);
  const T large = std::copysign(whole, x);
  return std::abs(x) < whole ? (x + large) - large : x;
}

/// For the sums: raises `level` to the keys of the chunk, keep[r] = 2^(old - new), phi over the new levels. `to` may be
/// `raw`. Logarithms are added up the same way for the level and for phi: those of long keys round to steps of
/// hundreds, and phi must not come out above the level.
template <class T>
void level_keys(const T* raw, const T* shift, index count, bool is_signed, T* level, T* keep, T* to) {
  T highest = -std::numeric_limits<T>::infinity();
  if (is_signed)
    for (index t = 0; t < kernel_chunk; t += width<T>) highest = std::max(highest, max_lanes(load<T>(shift + t)));
  for (index r = 0; r < count; ++r) {
    const T* const from = raw + r * kernel_chunk;
    T top = highest;
    if (!is_signed) {
      packet<T> most = add(load<T>(from), load<T>(shift));
      for (index t = width<T>; t < kernel_chunk; t += width<T>)
        most = max(most, add(load<T>(from + t), load<T>(shift + t)));
      top = max_lanes(most);
    }
    const T raised = std::max(level[r], nearest_whole(top));
    keep[r] = level[r] - raised;
    level[r] = raised;
    for (index t = 0; t < kernel_chunk; t += width<T>) {
      const packet<T> x = load<T>(from + t), s = load<T>(shift + t), over = broadcast<T>(raised);
      store<T>(to + r * kernel_chunk + t,
               is_signed ? mul(x, exp2_weight<T>(sub(s, over))) : exp2_weight<T>(sub(add(x, s), over)));
    }
  }
  map_packets(keep, keep, count, [](const auto& x) { return exp2_weight<T>(x); });
}

/// For the chunk: mix_ij = 2^(top_j - peak_i), peak_i = the largest top_j of j <= i.
template <class T>
void mix_by_tops(const T* top, index count, T* peak, T* mix) {
  T highest = no_level<T>;
  for (index i = 0; i < kernel_chunk; ++i) peak[i] = highest = std::max(highest, i < count ? top[i] : highest);
  for (index i = 0; i < count; ++i)
    for (index j = 0; j <= i; j += width<T>)
      store<T>(mix + i * kernel_chunk + j, exp2_weight<T>(sub(load<T>(top + j), broadcast<T>(peak[i]))));
}

/// One token's key, features contiguous: raw becomes phi over the raised levels, keep = 2^(old - new).
template <class T>
void level_key(T* raw, T shift, index count, bool is_signed, T* level, T* keep) {
  for (index r = 0; r < count; ++r) {
    const T raised = std::max(level[r], nearest_whole(is_signed ? shift : raw[r] + shift));
    keep[r] = level[r] - raised;
    level[r] = raised;
  }
  map_packets(keep, keep, count, [](const auto& x) { return exp2_weight<T>(x); });
  for (index r = 0; r < count; r += width<T>) {  // whole packets: rows are padded
    const packet<T> x = load<T>(raw + r), s = broadcast<T>(shift), over = load<T>(level + r);
    store<T>(raw + r, is_signed ? mul(x, exp2_weight<T>(sub(s, over))) : exp2_weight<T>(sub(add(x, s), over)));
  }
}

/// One token's query: raw becomes phi weighed with the levels, over the largest; returns the logarithm of that.
template <class T>
T level_query(T* raw, index count, bool is_signed, const T* level) {
  if (is_signed) return level[0];
  T top = -std::numeric_limits<T>::infinity();
  for (index r = 0; r < count; ++r) top = std::max(top, raw[r] + level[r]);
  for (index r = 0; r < count; r += width<T>)
    store<T>(raw + r, exp2_weight<T>(sub(add(load<T>(raw + r), load<T>(level + r)), broadcast<T>(top))));
  return top;
}

/// log_weights[j] = log2 of sum over r of 2^(query[r] + raw[r][j] + shift[j]); query[r * kernel_chunk] of one lane.
template <class T>
void weigh_logarithms(const T* query, const T* raw, const T* shift, index count, T* log_weights) {
  for (index j = 0; j < kernel_chunk; j += width<T>) {
    packet<T> top = broadcast<T>(no_level<T>), sum = zero<T>();
    for (index r = 0; r < count; ++r)
      top = max(top, add(load<T>(raw + r * kernel_chunk + j), broadcast<T>(query[r * kernel_chunk])));
    for (index r = 0; r < count; ++r)
      sum = add(sum, exp2_weight<T>(
                         sub(add(load<T>(raw + r * kernel_chunk + j), broadcast<T>(query[r * kernel_chunk])), top)));
    alignas(64) T sums[width<T>], tops[width<T>];
    store<T>(sums, sum), store<T>(tops, top);
    for (int n = 0; n < width<T>; ++n) log_weights[j + n] = tops[n] + std::log2(sums[n]) + shift[j + n];
  }
}

}  // namespace attn::detail
