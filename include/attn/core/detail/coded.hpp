// attn: which elements of caches there are, and what is known of rows in codes where none are read: headers of steps
// include the rest (row_format.hpp, kv_memory.hpp, scattered_stream.hpp).
#pragma once

#include <attn/core/cache_elements.hpp>
#include <attn/core/tensor_view.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Bytes of blocks of rows with scales for each channel: channel_codes.hpp.
template <class C>
concept channel_coded = std::same_as<C, int4> || std::same_as<C, int8_channels>;
/// Elements that are bytes of blocks of rows: std::int8_t of quantised.hpp, and the above.
template <class C>
concept coded = std::same_as<C, std::int8_t> || channel_coded<C>;
template <class C>
concept eight_bit_float = std::same_as<C, float8_e4m3> || std::same_as<C, float8_e5m2>;
/// Element types of a cache.
template <class C>
concept cache_element = element<C> || coded<C> || eight_bit_float<C>;

/// Says in one sentence that a cache has no elements of type C; `own` where those of eight bits are not among them.
template <class C, bool own = false>
constexpr bool check_cache_element() {
  static_assert(cache_element<C>,
                "attn: the elements of this cache must be float, double, Eigen::half, Eigen::bfloat16, std::int8_t, "
                "attn::int8_channels, attn::int4, attn::float8_e4m3 or attn::float8_e5m2");
  static_assert(element<C> || !own,
                "attn: the elements of this cache must be float, double, Eigen::half or Eigen::bfloat16");
  return true;
}

/// Whether a cache with elements C takes tokens and queries of type S: it stores them as they are, or, where sums are
/// in float, in fewer bits.
template <class C, class S>
concept stores = std::same_as<C, S> || (std::same_as<S, float> && (sizeof(C) == 2 || eight_bit_float<C>)) ||
                 (coded<C> && std::same_as<compute_type<S>, float>);
template <class C, class S>
constexpr void check_stores() {
  static_assert(stores<C, S>,
                "attn: the elements of a cache must be of the type of q, k and v; for float ones also Eigen::half, "
                "Eigen::bfloat16, attn::float8_e4m3 or attn::float8_e5m2; for all but double also std::int8_t, "
                "attn::int8_channels or attn::int4");
}

template <class C>
struct row_format;
template <class C>
struct scattered_rows;
struct code_pair;
/// Rotated rows (hadamard.hpp).
inline void rotate_row(float* x, idx_t dim);
inline void rotate_row_back(float* x, idx_t dim);

/// The first `count` rows that a tile may have, which is `count` for rows that are all alike.
template <class Rows>
idx_t alike(const Rows&, idx_t count) {
  return count;
}
template <class Rows>
idx_t alike_of(const Rows& x, idx_t count) {
  return alike(x, count);
}

}}}  // namespace attn::ATTN_ISA::detail
