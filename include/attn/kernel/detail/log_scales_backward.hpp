// attn: the backward pass of features that are exponentials; see log_scales.hpp.
//
// The sums R of queries have log scales as those of keys do: their features are phi(q_i) over the denominator of the row,
// whose logarithm takes the place of `shift`. The product of a feature of a key and one of R is thus a weight, at most
// about 1.
#pragma once

#include <attn/kernel/detail/chunk_backward.hpp>
#include <attn/kernel/detail/log_scales.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// From s.q_raw the queries' features for the sums (q_phi, q_max), unless there are none, and for the chunk (q_own,
/// own_max).
template <class T>
void scale_queries(const exponential_scaling<T>& e, const T* log_scale, bool of_chunk, const kernel_scratch<T>& s) {
  if (e.is_signed) {
    if (log_scale) std::copy_n(s.q_raw, e.features * kernel_chunk, s.q_phi);
    if (log_scale) std::fill_n(s.q_max, kernel_chunk, log_scale[0]);
    if (of_chunk) std::copy_n(s.q_raw, e.features * kernel_chunk, s.q_own);
    if (of_chunk) std::fill_n(s.own_max, kernel_chunk, T(0));
    return;
  }
  if (log_scale) {
    largest_of<T>(s.q_raw, e.features, log_scale, s.q_max);
    exp2_below<T>(s.q_raw, e.features, log_scale, s.q_max, s.q_phi);
  }
  if (of_chunk) {
    largest_of<T>(s.q_raw, e.features, nullptr, s.own_max);
    exp2_below<T>(s.q_raw, e.features, nullptr, s.own_max, s.q_own);
  }
}

/// From s.k_raw the keys' features for the chunk: k_own, and factors[j][i] = 2^(maximum_j - running_max_i) for i >= j.
template <class T>
void scale_keys(const exponential_scaling<T>& e, idx_t count, const kernel_scratch<T>& s, T* factors) {
  if (e.is_signed) {
    std::copy_n(s.k_raw, e.features * kernel_chunk, s.k_own);
    std::copy_n(s.k_shift, kernel_chunk, s.k_max);
  } else {
    largest_of<T>(s.k_raw, e.features, nullptr, s.k_max);
    exp2_below<T>(s.k_raw, e.features, nullptr, s.k_max, s.k_own);
    for (idx_t t = 0; t < kernel_chunk; ++t) s.k_max[t] += s.k_shift[t];
  }
  T highest = no_log_scale<T>;
  for (idx_t t = 0; t < kernel_chunk; ++t)
    s.running_max[t] = highest = std::max(highest, t < count ? s.k_max[t] : highest);
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
                [&](const auto& p) { return exp2_weight<T>(min(add(p, broadcast<T>(log_scale[0])), most)); });
  each_packet<T>(e.features, lanes, [&](idx_t r, idx_t t, idx_t n) {
    const packet<T> raw = load<T>(s.k_raw + n);
    const packet<T> log = add(add(raw, load<T>(s.k_shift + t)), broadcast<T>(log_scale[r]));
    store<T>(weighed + n, e.is_signed ? mul(raw, load<T>(key_factor + t)) : exp2_weight<T>(min(log, most)));
  });
}

/// Row i of a chunk whose scores underflowed: s.log_weights becomes the weights of its keys over the largest of them and
/// of `sums_max`, whose logarithm it returns.
template <class T>
T weigh_row(idx_t i, idx_t features, T sums_max, const kernel_scratch<T>& s) {
  T *const weights = s.log_weights, largest = sums_max;
  weigh_logarithms(s.q_raw + i, s.k_raw, s.k_shift, features, weights);
  for (idx_t j = 0; j <= i; ++j) largest = std::max(largest, weights[j]);
  for (idx_t j = 0; j <= i; ++j) weights[j] = std::exp2(weights[j] - largest);
  return largest;
}

}}}  // namespace attn::ATTN_ISA::detail
