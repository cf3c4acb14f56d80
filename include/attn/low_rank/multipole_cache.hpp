// attn: keys and values of the tokens so far, and the clusters of the segments before the last token's, for
// multipole_step.
//
//   attn::multipole_cache<float> cache({.batch = batch, .heads = kv_heads, .dim = 64}, {.segment = 256});
//   cache.append(k, v);                                             // or by the step
//
// Memory   that of kv_cache; for every segment, per batch item and key head, clusters * (dim + value_dim + 2) numbers
//          of the compute type, dims rounded up to vectors, and segment + clusters of 4 bytes. It grows as tokens come,
//          by doubling; reserve() allocates once.
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/core/kv_cache.hpp>
#include <attn/low_rank/detail/multipole_clusters.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Settings of the clusters and of the choice: see multipole_options.
struct multipole_cache_options {
  idx_t exact = 128;  // keys a query takes exactly, >= 0
  idx_t clusters = 16;  // clusters of a segment, >= 0
  /// If not 0, keys are read and chosen only from so many clusters; if 0, or without clusters, from all keys.
  idx_t candidate_clusters = 32;
  idx_t segment = 256;  // tokens of a segment, >= 1
  /// Steps of k-means, >= 0, and the seed of the keys it starts from.
  idx_t iterations = 1;
  std::uint64_t seed = 0;
};

namespace detail {

/// The inside of multipole_cache: all tokens, and the clusters of the segments before the last token's.
template <class S>
class multipole_tokens : public kv_tokens<S> {
  static_assert(check_cache_element<S, true>());
  using base = kv_tokens<S>;

 public:
  using real = compute_type<S>;
  using base::batch, base::heads, base::dim, base::value_dim, base::length;

  multipole_tokens(const char* name, const state_extents& extents, const multipole_cache_options& options)
      : base(name, extents), segments_(this->lengths_) {
    settings_ = {.causal = true, .exact = options.exact,
                 .clusters = (std::min)(options.clusters, std::max<idx_t>(1, options.segment)),
                 .candidate_clusters = options.clusters > 0 ? options.candidate_clusters : 0,
                 .segment = options.segment, .iterations = options.iterations, .seed = options.seed};
    const validator check{this->name_};
    check_multipole_settings(check, settings_);
    check.at_least("candidate_clusters", 0, options.candidate_clusters);
  }

  multipole_tokens(const multipole_tokens& other)
      : base(other), settings_(other.settings_), segments_(other.segments_) {
    copy_lists(other);
  }
  multipole_tokens(multipole_tokens&&) noexcept = default;
  multipole_tokens& operator=(const multipole_tokens& other) {
    const bool same = batch() == other.batch() && heads() == other.heads() && dim() == other.dim() &&
                      value_dim() == other.value_dim() && settings_.clusters == other.settings_.clusters &&
                      settings_.segment == other.settings_.segment;
    base::operator=(other);
    settings_ = other.settings_, segments_ = other.segments_;
    if (!same) lists_ = {}, room_ = 0;
    copy_lists(other);
    return *this;
  }
  multipole_tokens& operator=(multipole_tokens&&) noexcept = default;

  std::size_t bytes() const {
    std::size_t all = base::bytes();
    each_list([&](auto list, idx_t) { all += (lists_.*list).capacity() * sizeof((lists_.*list)[0]); });
    return all;
  }
  void reserve(idx_t tokens) {
    validator(this->name_).fits(
        "tokens", {batch(), heads(), (std::max)(tokens, idx_t(0)), (std::max)(dim(), value_dim()), sizeof(S)});
    base::reserve(tokens);
    reserve_segments(tokens / settings_.segment);
  }
  void cut(idx_t b, idx_t tokens) {
    length(b) = tokens;
    segments(b) = (std::min)(segments(b), tokens / settings_.segment);
  }
  void keep(idx_t b, std::span<const idx_t> positions, idx_t first) {
    base::keep(b, positions, first);
    segments(b) = (std::min)(segments(b), first / settings_.segment);
  }
  void reset(idx_t b) { cut(b, 0); }
  void copy(idx_t from, idx_t to) {
    base::copy(from, to);
    copy_clusters(*this, from, to);
    segments(to) = segments(from);
  }
  void exchange(idx_t a, idx_t b) {
    base::exchange(a, b);
    const idx_t most = (std::max)(segments(a), segments(b));
    each_list([&](auto list, idx_t numbers) {
      for (idx_t h = 0; h < heads(); ++h) {
        auto* const from = at(list, (a * heads() + h) * room_ * numbers);
        std::swap_ranges(from, from + most * numbers, at(list, (b * heads() + h) * room_ * numbers));
      }
    });
    std::swap(segments(a), segments(b));
  }
  const multipole_settings& settings() const { return settings_; }

  /// The clusters of the segments of one head, one after the other.
  struct head_clusters {
    idx_t stride, stride_v;
    const real *means, *value_means;  // [clusters][stride]
    const real *counts, *logs;        // [clusters]: how many keys, and log2 of it
    const cluster_number* order;      // [segments][segment]: keys of a segment by cluster
    const cluster_number* begins;     // [clusters]: where a cluster begins in its segment's order
  };
  head_clusters clusters_of(idx_t b, idx_t h) const {
    const idx_t head = b * heads() + h, row = head * room_ * settings_.clusters;
    return {stride(), stride_v(), lists_.means.data() + row * stride(), lists_.value_means.data() + row * stride_v(),
            lists_.counts.data() + row, lists_.logs.data() + row,
            lists_.order.data() + head * room_ * settings_.segment, lists_.begins.data() + row};
  }

  /// Clusters the segments that the tokens appended since have finished.
  void cluster_segments(execution& exec) {
    idx_t most = 0, finished = 0;  // new ones of an item; segments of the longest
    for (idx_t b = 0; b < batch(); ++b) {
      most = (std::max)(most, settings_.segments(length(b)) - segments(b));
      finished = (std::max)(finished, settings_.segments(length(b)));
    }
    if (most <= 0) return;
    if (finished > room_) reserve_segments((std::max)(finished, 2 * room_));
    const idx_t item_heads = batch() * heads();
    if (settings_.clusters > 0)
      exec.for_each(item_heads * most, [&](idx_t task, int worker) {
        const idx_t item_head = task % item_heads, number = segments(item_head / heads()) + task / item_heads;
        if (number < settings_.segments(length(item_head / heads()))) cluster_segment(item_head, number, exec, worker);
      });
    for (idx_t b = 0; b < batch(); ++b) segments(b) = settings_.segments(length(b));
  }

 private:
  idx_t stride() const { return cluster_sums<real>::padded(dim()); }
  idx_t stride_v() const { return cluster_sums<real>::padded(value_dim()); }

  void copy_lists(const multipole_tokens& other) {
    if (this == &other) return;
    idx_t most = 0;
    for (idx_t n : segments_) most = (std::max)(most, n);
    reserve_segments(most);
    for (idx_t b = 0; b < batch(); ++b) copy_clusters(other, b, b);
  }
  /// The clusters of the segments that an item has.
  void copy_clusters(const multipole_tokens& other, idx_t from, idx_t to) {
    const idx_t count = other.segments_[static_cast<std::size_t>(from)];
    each_list([&](auto list, idx_t numbers) {
      for (idx_t h = 0; h < heads(); ++h)
        std::copy_n((other.lists_.*list).data() + (from * heads() + h) * other.room_ * numbers, count * numbers,
                    at(list, (to * heads() + h) * room_ * numbers));
    });
  }
  idx_t& segments(idx_t b) { return segments_[static_cast<std::size_t>(b)]; }
  /// Of all segments of a head, one head after the other, with room for room_ segments each.
  struct cluster_lists {
    std::vector<real> means, value_means, counts, logs;
    std::vector<cluster_number> order, begins;
  };
  /// visit(list, its numbers for a segment)
  template <class Visit>
  void each_list(const Visit& visit) const {
    using lists = cluster_lists;
    const idx_t m = settings_.clusters;
    visit(&lists::means, m * stride()), visit(&lists::value_means, m * stride_v());
    visit(&lists::counts, m), visit(&lists::logs, m);
    visit(&lists::order, m > 0 ? settings_.segment : 0), visit(&lists::begins, m);
  }
  template <class N>
  N* at(std::vector<N> cluster_lists::*list, idx_t n) {
    return (lists_.*list).data() + n;
  }

  void reserve_segments(idx_t segments) {
    if (segments <= room_) return;
    const validator check{this->name_};
    const idx_t item_heads = batch() * heads();
    const idx_t widest = (std::max)({stride(), stride_v(), idx_t(2)});
    check.fits("clusters", {item_heads, segments, settings_.clusters, widest, sizeof(real)});
    check.fits("keys of segments", {item_heads, segments, settings_.segment, sizeof(idx_t)});
    cluster_lists grown;
    each_list([&](auto list, idx_t numbers) {
      (grown.*list).resize(static_cast<std::size_t>(item_heads * segments * numbers));
      for (idx_t h = 0; h < item_heads && room_ > 0; ++h)
        std::copy_n(at(list, h * room_ * numbers), room_ * numbers, (grown.*list).data() + h * segments * numbers);
    });
    lists_ = std::move(grown);
    room_ = segments;
  }

  void cluster_segment(idx_t item_head, idx_t number, execution& exec, int worker) {
    const multipole_settings& o = settings_;
    const idx_t size = o.segment, m = o.clusters, keys = size + 1;  // one segment, and a query after it
    struct buffers {
      multipole_clusters<real> clusters;
      cluster_scratch<real> scratch;
      cluster_number* next;  // [clusters]
    };
    const buffers p = exec.scratch(worker, [&](arena& memory) {
      return buffers{multipole_clusters<real>::layout(memory, o, keys, dim(), value_dim()),
                     cluster_scratch<real>::layout(memory, m, dim(), value_dim(), size),
                     memory.allocate<cluster_number>(m)};
    });
    const auto rows_of = [&](const tensor_view<const S>& x) {
      return head_of(x.slice(2, number * size, size), item_head / heads(), item_head % heads());
    };
    const matrix_view<const S> k = rows_of(this->keys()), v = rows_of(this->values());
    p.clusters.cluster_one(o, k, v, keys, number, p.scratch);

    const cluster_sums<real>& sums = p.clusters.sums;
    const idx_t segment = item_head * room_ + number, row = segment * m;
    cluster_number* const order = at(&cluster_lists::order, segment * size);
    cluster_number* const begins = at(&cluster_lists::begins, row);
    cluster_number next = 0;
    for (idx_t c = 0; c < m; ++c) {
      const real count = sums.counts[c], factor = count > 0 ? 1 / count : real(0);
      const auto divide = [&](const real* from, idx_t numbers, real* to) {
        for (idx_t d = 0; d < numbers; ++d) to[d] = factor > 0 ? from[d] * factor : real(0);
      };
      divide(sums.key(c), stride(), at(&cluster_lists::means, (row + c) * stride()));
      divide(sums.value(c), stride_v(), at(&cluster_lists::value_means, (row + c) * stride_v()));
      *at(&cluster_lists::counts, row + c) = count;
      *at(&cluster_lists::logs, row + c) = count > 0 ? std::log2(count) : -std::numeric_limits<real>::infinity();
      begins[c] = next;
      next += static_cast<cluster_number>(count);
    }
    std::copy_n(begins, m, p.next);
    for (idx_t j = 0; j < size; ++j) order[p.next[p.clusters.cluster[j]]++] = static_cast<cluster_number>(j);
  }

  multipole_settings settings_;
  std::vector<idx_t> segments_;  // clustered, of every item
  idx_t room_ = 0;               // segments there is room for
  cluster_lists lists_;
};

}  // namespace detail

/// Keys [B, Hkv, tokens, D] and values [B, Hkv, tokens, Dv] with their clusters. A moved-from cache may only be
/// assigned to or destroyed.
template <class S>
class multipole_cache : public detail::cached_sequences<detail::multipole_tokens<S>> {
  using base = detail::cached_sequences<detail::multipole_tokens<S>>;

 public:
  using real = compute_type<S>;

  /// An empty cache; heads are key heads. Throws std::invalid_argument for a negative extent or options that do not
  /// fit.
  explicit multipole_cache(const state_extents& extents, const multipole_cache_options& options = {})
      : base("multipole_cache", extents, options) {}

  // As in kv_cache.
  using base::capacity, base::bytes, base::reserve, base::keys, base::values;

  /// Adds the tokens of k [B, Hkv, n, D] and v [B, Hkv, n, Dv] and clusters segments that lie before the last of them.
  /// Throws std::invalid_argument for shapes that do not fit or views of the cache itself, before anything changes.
  template <viewable K, viewable V, class Options = append_options>
  void append(const K& k, const V& v, Options&& options = {}, execution_ref exec = {}) {
    const tensor_view<const S> k_new = as_view(k), v_new = as_view(v);
    const auto& given = detail::options_or_default<append_options>(options);
    this->check_append(k_new, v_new, given.lengths);
    auto& inside = detail::step_access::of(*this);
    detail::append_and(inside, k_new, v_new, given.lengths, [&] {
      inside.cluster_segments(detail::plain_execution_of("multipole_cache::append", exec, options));
    });
  }
};

}}  // namespace attn::ATTN_ISA
