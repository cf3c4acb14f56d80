// attn: biases by distance as T5 learns them, in buckets (Raffel et al. 2020, "Exploring the limits of transfer
// learning"), expanded to a table for the option relative_bias.
//
//   attn::t5_relative_bias<float>(weights, table);                          // [buckets, H] -> [H, 2R + 1]
//   attn::full_softmax(q, k, v, out, {.scale = 1, .relative_bias = table});   // T5 does not divide by sqrt(D)
//   attn::full_softmax_backward(q, k, v, out, d_out, {.relative_bias = d_table}, {.scale = 1, .relative_bias = table});
//   attn::t5_relative_bias_backward<float>(d_table, d_weights);
//
//   table[h, d + R] = weights[bucket(d), h] for d = j - p_i from -R to R. With R >= max_distance the table is exact for
//   all distances: those beyond R share its first and last entries.
//
// With n buckets for a direction (all of them, or half of them each where keys after the query have their own), the
// first n / 2 distances have a bucket each, and those up to max_distance share the others, at equal ratios:
//   bucket = n / 2 + floor(log(|d| / (n / 2)) / log(max_distance / (n / 2)) (n - n / 2)), at most n - 1.
// The logarithms are those of float, as in T5: a weight belongs to the distances it was trained for.
//
// Shapes   weights [buckets, H], table [H, 2R + 1]; float or double.
// Cost     H (2R + 1) copies or additions. No scratch.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/core/detail/call_views.hpp>
#include <attn/core/detail/gradients.hpp>

#include <algorithm>
#include <cmath>
#include <utility>

namespace attn { inline namespace ATTN_ISA {

struct t5_bias_options {
  /// Keys after the query have half of the buckets; otherwise they share that of distance 0, as causal attention needs.
  bool bidirectional = true;
  /// From this distance on all share the last bucket.
  idx_t max_distance = 128;
};

/// The bucket, of `buckets`, of a key at `distance` = j - p_i.
inline idx_t t5_bucket(idx_t distance, idx_t buckets, const t5_bias_options& options = {}) {
  const idx_t each = options.bidirectional ? buckets / 2 : buckets, exact = each / 2;
  const idx_t first = options.bidirectional && distance > 0 ? each : 0;
  const idx_t away = options.bidirectional ? std::abs(distance) : std::max<idx_t>(-distance, 0);
  if (away < exact) return first + away;
  const float start = static_cast<float>(exact),
              ratio =
                  std::log(static_cast<float>(away) / start) /
                  static_cast<float>(std::log(static_cast<double>(options.max_distance) / static_cast<double>(exact)));
  const auto steps = static_cast<idx_t>((std::min)(ratio * static_cast<float>(each - exact), static_cast<float>(each)));
  return first + (std::min)(exact + steps, each - 1);
}

namespace detail {

/// Checks what a table and its weights must be.
inline void check_t5_bias(call_views& views, const memory_layout& weights, const memory_layout& table,
                          const t5_bias_options& options) {
  const idx_t buckets = weights.extents[0], each = options.bidirectional ? buckets / 2 : buckets;
  views.equal("weights' heads = heads of the table", table.extents[0], weights.extents[1]);
  if (table.extents[1] % 2 == 0) views.fail("2 R + 1 entries of the table", table.extents[1]);
  if (each < 2 || (options.bidirectional && buckets % 2 != 0))
    views.fail(options.bidirectional ? "an even number of buckets, at least 4" : "at least 2 buckets", buckets);
  if (options.max_distance <= each / 2) views.fail({"max_distance > ", each / 2}, options.max_distance);
}

}  // namespace detail

/// Writes the table of weights. See the top of the file.
template <class T>
void t5_relative_bias(std::type_identity_t<tensor_view<const T, 2>> weights,
                      std::type_identity_t<tensor_view<T, 2>> table, const t5_bias_options& options = {}) {
  detail::call_views views("t5_relative_bias");
  views.read("weights", weights), views.write("table", table);
  detail::check_t5_bias(views, weights, table, options);
  for (idx_t e = 0; e < table.extent(1); ++e) {
    const idx_t bucket = t5_bucket(e - table.extent(1) / 2, weights.extent(0), options);
    for (idx_t h = 0; h < table.extent(0); ++h) table(h, e) = weights(bucket, h);
  }
}

/// The gradient of the weights from that of the table: sums over the distances of each bucket.
template <class T>
void t5_relative_bias_backward(std::type_identity_t<tensor_view<const T, 2>> d_table,
                               std::type_identity_t<tensor_view<T, 2>> d_weights, const t5_bias_options& options = {},
                               bool accumulate = false) {
  detail::call_views views("t5_relative_bias_backward");
  views.read("d_table", d_table), views.write("d_weights", d_weights);
  detail::check_t5_bias(views, d_weights, d_table, options);
  for (idx_t h = 0; h < d_weights.extent(1); ++h) {
    for (idx_t bucket = 0; !accumulate && bucket < d_weights.extent(0); ++bucket) d_weights(bucket, h) = T(0);
    double sum = 0;  // the distances of a bucket are neighbours
    for (idx_t e = 0; e < d_table.extent(1); ++e) {
      const auto bucket_of = [&](idx_t entry) {
        return t5_bucket(entry - d_table.extent(1) / 2, d_weights.extent(0), options);
      };
      sum += static_cast<double>(d_table(h, e));
      if (e + 1 < d_table.extent(1) && bucket_of(e + 1) == bucket_of(e)) continue;
      detail::store_gradient(d_weights(bucket_of(e), h), static_cast<T>(std::exchange(sum, 0.0)), true);
    }
  }
}

}}  // namespace attn::ATTN_ISA
