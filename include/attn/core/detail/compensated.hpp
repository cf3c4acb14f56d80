// attn: sums of many terms, as two numbers: the sum, and what its roundings lost. A sum of n terms then errs by one
// rounding instead of up to n, also where one large term has filled it.
#pragma once

#include <attn/core/detail/simd.hpp>

#include <cmath>
#include <limits>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// sum += x, whose rounding error is added to `error`. P is a packet or a number. (Knuth's two-sum)
template <class P>
ATTN_INLINE void add_compensated(P& sum, P& error, const P& x) {
  const P total = add(sum, x), added = sub(total, sum);
  error = add(error, add(sub(sum, sub(total, added)), sub(x, added)));
  sum = total;
}

/// The value of such a sum. An infinite one has no error that is a number.
template <class T>
ATTN_INLINE packet<T> compensated_sum(const packet<T>& sum, const packet<T>& error) {
  return if_less(abs(error), broadcast<T>(std::numeric_limits<T>::infinity()), add(sum, error), sum);
}
template <class T>
T compensated_number(T sum, T error) {
  return std::abs(error) < std::numeric_limits<T>::infinity() ? sum + error : sum;
}

/// sums = sums * factor + x for `count` numbers, whole packets; x becomes 0.
template <class T>
void move_compensated(T* x, idx_t count, T factor, T* sums, T* errors) {
  for (idx_t n = 0; n < count; n += width<T>) {
    packet<T> sum = mul(load<T>(sums + n), broadcast<T>(factor));
    packet<T> error = mul(load<T>(errors + n), broadcast<T>(factor));
    add_compensated(sum, error, load<T>(x + n));
    store<T>(sums + n, sum), store<T>(errors + n, error), store<T>(x + n, zero<T>());
  }
}
/// x = sums for `count` numbers, whole packets. x may be sums.
template <class T>
void settle_compensated(const T* sums, const T* errors, idx_t count, T* x) {
  for (idx_t n = 0; n < count; n += width<T>)
    store<T>(x + n, compensated_sum<T>(load<T>(sums + n), load<T>(errors + n)));
}

}}}  // namespace attn::ATTN_ISA::detail
