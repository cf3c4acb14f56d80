// attn: the settings of multipole, defaults filled in, and their checks.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/tile_product.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr idx_t cluster_part = 1024;  // keys of a part

/// The options with defaults filled in.
struct multipole_settings {
  bool causal = false, assigned = false;  // assigned: the caller gives the cluster of every key
  idx_t block = 1, probe = 1, exact = 0, clusters = 0, candidate_clusters = 0;
  idx_t segment = 1, lookback = 1;  // causal only
  idx_t iterations = 0;
  std::uint64_t seed = 0;

  /// Number of segments of a sequence of `keys` that are clustered: all but the last, which no later query sees.
  idx_t segments(idx_t keys) const {
    if (keys == 0) return 0;
    return causal ? (keys - 1) / segment : 1;
  }
  idx_t segment_keys(idx_t keys) const { return causal ? segment : keys; }
  idx_t parts_per_segment(idx_t keys) const { return ceil_div(segment_keys(keys), cluster_part); }
  /// Number of clusters of the segments before position `past`; of all keys where not causal.
  idx_t clusters_before(idx_t past) const {
    if (past == 0) return 0;
    return causal ? past / segment * clusters : assigned ? clusters : (std::min)(clusters, past);
  }
  idx_t parts(idx_t keys) const { return segments(keys) * parts_per_segment(keys); }
};

/// The checks that multipole and its cache have in common.
inline void check_multipole_settings(const validator& check, const multipole_settings& o) {
  check.at_least("exact", 0, o.exact);
  check.at_least("clusters", 0, o.clusters);
  if (o.exact == 0 && o.clusters == 0) check.fail("exact keys or clusters", "neither");
  check.at_least("candidate_clusters", 0, o.candidate_clusters);
  check.at_least("segment", 1, o.segment);
  check.at_least("iterations", 0, o.iterations);
  constexpr idx_t most = idx_t(1) << 24;  // float, the compute type, represents these integers
  if (o.clusters > most) check.fail({"clusters <= ", most}, o.clusters);
}

}}}  // namespace attn::ATTN_ISA::detail
