// attn: the relative positions of DeBERTa (He et al. 2021, "DeBERTa: decoding-enhanced BERT with disentangled
// attention"), in buckets, spread to the distances that relative_keys and position_queries take.
//
//   attn::deberta_relative<float>(key_buckets, keys_by_distance, {.max_position = 512});  // [H, 2n, D] -> [H, 2R + 1, D]
//   attn::deberta_relative<float>(query_buckets, queries_by_distance, {.max_position = 512});
//   attn::full_softmax(q, k, v, out, {.scale = 1 / std::sqrt(3.0f * dim), .relative_keys = keys_by_distance,
//                                     .position_queries = queries_by_distance});
//   attn::deberta_relative_backward<float>(d_keys_by_distance, d_key_buckets, {.max_position = 512});
//
//   table[h, e] = buckets[h, clamp(b(d) + n, 0, 2n - 1)], where e = R - d, d = p_i - j from R to -R:
//     b(d) = d for |d| <= n / 2 =: m (rounded down)
//     b(d) = sign(d) (m + ceil((m - 1) log(|d| / m) / log((max_position - 1) / m))) beyond, |d| <= max_position - 1
//   without max_position b(d) = d. With max_position row 0 is never used.
//
// key_buckets are the rows of the shared embedding times the weights of the keys (content to position), query_buckets
// times those of the queries (position to content). With R >= max_position - 1, or n, the table is exact for all
// distances.
//
// Shapes   buckets [H or 1, 2n, D], table [H or 1, 2R + 1, D], H as there; float or double.
// Cost     H (2R + 1) D copies or additions. No scratch.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/core/detail/call_views.hpp>
#include <attn/core/detail/gradients.hpp>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

namespace attn { inline namespace ATTN_ISA {

struct deberta_relative_options {
  /// From this distance on, less one, all share a bucket (max_relative_positions of a model with position_buckets);
  /// absent: each distance has its own, up to n.
  std::optional<idx_t> max_position{};
};

/// The row, of 2 n, of a key that is `distance` = p_i - j before the query.
inline idx_t deberta_bucket(idx_t distance, idx_t n, const deberta_relative_options& options = {}) {
  idx_t bucket = distance;
  if (const idx_t middle = n / 2; options.max_position && std::abs(distance) > middle) {
    const auto ratio = [&](idx_t x) { return std::log(static_cast<double>(x) / static_cast<double>(middle)); };
    const idx_t most = *options.max_position - 1, away = (std::min)(std::abs(distance), most);
    const auto beyond = static_cast<idx_t>(std::ceil(ratio(away) / ratio(most) * static_cast<double>(middle - 1)));
    bucket = distance > 0 ? middle + beyond : -(middle + beyond);
  }
  return std::clamp(bucket + n, idx_t(0), 2 * n - 1);
}

namespace detail {

/// Checks what a table and its buckets must be; returns n.
inline idx_t check_deberta_relative(call_views& views, const memory_layout& buckets, const memory_layout& table,
                                    const deberta_relative_options& options) {
  views.equal("heads of the table = heads of the buckets", buckets.extents[0], table.extents[0]);
  views.equal("dim of the table = dim of the buckets", buckets.extents[2], table.extents[2]);
  const idx_t rows = buckets.extents[1], n = rows / 2;
  if (table.extents[1] % 2 == 0) views.fail("2 R + 1 rows of the table", table.extents[1]);
  if (rows % 2 != 0 || n < (options.max_position ? 2 : 1))
    views.fail(options.max_position ? "an even number of buckets, at least 4" : "an even number of buckets, at least 2",
               rows);
  if (options.max_position && *options.max_position - 1 <= n / 2)
    views.fail({"max_position > ", n / 2 + 1}, *options.max_position);
  return n;
}

}  // namespace detail

/// Writes the table of buckets. See the top of the file.
template <class T>
void deberta_relative(std::type_identity_t<tensor_view<const T, 3>> buckets,
                      std::type_identity_t<tensor_view<T, 3>> table, const deberta_relative_options& options = {}) {
  detail::call_views views("deberta_relative");
  views.read("buckets", buckets), views.write("table", table);
  const idx_t n = detail::check_deberta_relative(views, buckets, table, options);
  for (idx_t e = 0; e < table.extent(1); ++e) {
    const idx_t bucket = deberta_bucket(table.extent(1) / 2 - e, n, options);
    for (idx_t h = 0; h < table.extent(0); ++h)
      for (idx_t d = 0; d < table.extent(2); ++d) table(h, e, d) = buckets(h, bucket, d);
  }
}

/// The gradient of the buckets from that of the table: sums over the distances of each.
template <class T>
void deberta_relative_backward(std::type_identity_t<tensor_view<const T, 3>> d_table,
                               std::type_identity_t<tensor_view<T, 3>> d_buckets,
                               const deberta_relative_options& options = {}, bool accumulate = false) {
  detail::call_views views("deberta_relative_backward");
  views.read("d_table", d_table), views.write("d_buckets", d_buckets);
  const idx_t n = detail::check_deberta_relative(views, d_buckets, d_table, options), entries = d_table.extent(1);
  for (idx_t h = 0; h < d_buckets.extent(0); ++h)
    for (idx_t d = 0; d < d_buckets.extent(2); ++d) {
      for (idx_t bucket = 0; !accumulate && bucket < 2 * n; ++bucket) d_buckets(h, bucket, d) = T(0);
      double sum = 0;  // the distances of a bucket are neighbours
      for (idx_t e = 0, bucket = deberta_bucket(entries / 2, n, options); e < entries; ++e) {
        sum += static_cast<double>(d_table(h, e, d));
        const idx_t next = deberta_bucket(entries / 2 - e - 1, n, options);
        if (e + 1 == entries || next != bucket)
          detail::store_gradient(d_buckets(h, bucket, d), static_cast<T>(std::exchange(sum, 0.0)), true);
        bucket = next;
      }
    }
}

}}  // namespace attn::ATTN_ISA
