// attn: the backward pass of features that are exponentials; see log_scales.hpp.
//
// The sums R of queries have log scales as those of keys do: their features are phi(q_i) over the denominator of the
// row, whose logarithm takes the place of `shift`. The product of a feature of a key and one of R is thus a weight, at
// most about 1.
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

}}}  // namespace attn::ATTN_ISA::detail
