// The types of elements of caches that decoders are measured with.
#pragma once

#include "table.hpp"

#include <attn/core/detail/row_format.hpp>

namespace bench::inline ATTN_BENCH_TYPE {

/// std::int8_t, of which keys are rotated.
enum class int8_rotated : std::int8_t {};
template <class C>
inline constexpr bool rotates = std::same_as<C, int8_rotated>;
template <class C>
using elements_of = std::conditional_t<rotates<C>, std::int8_t, C>;

/// Bytes of a token of a cache of C.
template <class C>
double token_bytes(const problem& p) {
  using format = attn::detail::row_format<elements_of<C>>;
  return static_cast<double>(p.kv_heads * (format::elements(p.dim, true) + format::elements(p.dim_v, false))) *
         sizeof(elements_of<C>) / format::rows;
}

/// visit.operator()<C>(name, rounding): the elements' own type, which has no name, and those --cache-type asks for,
/// which err by `rounding`.
template <class Visit>
void each_cache_type(Visit&& visit) {
  const auto type = [&]<class C>([[maybe_unused]] const char* name, [[maybe_unused]] double rounding) {
    if constexpr (attn::detail::stores<elements_of<C>, element> && !std::same_as<C, element>)
      visit.template operator()<C>(name, rounding);
  };
  visit.template operator()<element>("", 0);
  (void)type;
#ifdef ATTN_BENCH_CACHE_half
  type.template operator()<Eigen::half>("half", 2e-3);
#endif
#ifdef ATTN_BENCH_CACHE_bfloat16
  type.template operator()<Eigen::bfloat16>("bfloat16", 1.5e-2);
#endif
#ifdef ATTN_BENCH_CACHE_int8
  type.template operator()<std::int8_t>("int8", 1.5e-2);
#endif
#ifdef ATTN_BENCH_CACHE_int8_rotated
  type.template operator()<int8_rotated>("int8_rotated", 1.5e-2);
#endif
#ifdef ATTN_BENCH_CACHE_float8_e4m3
  type.template operator()<attn::float8_e4m3>("float8_e4m3", 0.1);
#endif
#ifdef ATTN_BENCH_CACHE_float8_e5m2
  type.template operator()<attn::float8_e5m2>("float8_e5m2", 0.2);
#endif
#ifdef ATTN_BENCH_CACHE_int8_channels
  type.template operator()<attn::int8_channels>("int8_channels", 1.5e-2);
#endif
#ifdef ATTN_BENCH_CACHE_int4
  type.template operator()<attn::int4>("int4", 0.2);
#endif
}

}  // namespace bench::inline ATTN_BENCH_TYPE
