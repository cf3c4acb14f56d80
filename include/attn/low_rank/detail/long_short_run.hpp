// attn: the driver of long_short: keys are compressed, part by part, then queries attend to their window and to the
// compressed keys.
#pragma once

#include <attn/low_rank/detail/token_softmax.hpp>
#include <attn/softmax/detail/softmax_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// gamma (x - mean) / sqrt(variance + eps) + beta over a row; x itself without gamma.
template <class T>
struct key_norm {
  const T *gamma = nullptr, *beta = nullptr;
  T eps = T(0);

  explicit operator bool() const { return gamma != nullptr; }
  /// The mean of a row as two numbers, the second of which is what the rounding of the first left, and its variance +
  /// eps; of the row times `power`, for which they are numbers.
  struct moments {
    T mean, rest, variance, power;
    T centre(T x) const { return x * power - mean - rest; }
  };
  moments measure(const T* x, idx_t dim, T power = T(1)) const {
    const T share = T(1) / static_cast<T>(dim);
    moments m{T(0), T(0), T(0), power};
    const auto sum = [&](auto&& term) {
      T all = 0;
      for (idx_t d = 0; d < dim; ++d) all += term(x[d]);
      return all * share;
    };
    const auto square = [&](T some) { return m.centre(some) * m.centre(some); };
    m.mean = sum([&](T some) { return some * power; });
    T variance = sum(square);
    if (variance < m.mean * m.mean * T(0.0625)) [[unlikely]]
      m.rest = sum([&](T some) { return m.centre(some); }), variance = sum(square);
    m.variance = variance + eps * power * power;
    if (power == T(1) && (power = power_for(x, dim, m.variance)) != T(1)) return measure(x, dim, power);
    return m;
  }
  /// In place.
  [[gnu::noinline]] void apply(T* x, idx_t dim) const {
    if (!gamma) return;
    const moments m = measure(x, dim);
    const T factor = T(1) / std::sqrt(m.variance);
    for (idx_t d = 0; d < dim; ++d) x[d] = m.centre(x[d]) * factor * gamma[d] + (beta ? beta[d] : T(0));
  }
  /// A power of two by which x must be scaled for its variance to be a number, else 1.
  static T power_for(const T* x, idx_t dim, T variance) {
    if (variance < std::numeric_limits<T>::infinity()) return T(1);
    T size = 0;
    for (idx_t d = 0; d < dim; ++d) size = (std::max)(size, std::abs(x[d]));  // NaN is no maximum
    int exponent = 0;
    if (!(size > T(1) && size < std::numeric_limits<T>::infinity())) return T(1);
    std::frexp(size, &exponent);
    return std::ldexp(T(1), (std::max)(-exponent, std::numeric_limits<T>::min_exponent));
  }
  /// The norms of the rows of x, as contiguous rows.
  template <class S>
  void apply(const matrix_view<const S>& x, idx_t begin, idx_t count, T* to) const {
    for (idx_t j = 0; j < count; ++j, to += x.cols) {
      for (idx_t d = 0; d < x.cols; ++d) to[d] = static_cast<T>(x.row(begin + j)[d * x.col_stride]);
      apply(to, x.cols);
    }
  }
};

/// Memory that the threads share for one head.
template <class P>
struct long_short_head {
  using T = sum_type<P>;

  token_sums<T> sums;
  packed_keys<P> compressed;
  unsigned char* seen;  // per row, where there is a key_mask: whether its segment has a key that is seen

  /// Packs the compressed keys of the first `segments` segments.
  [[gnu::noinline]] void pack(idx_t segments) const {
    const idx_t rows = segments * sums.rank;
    packed_keys<P> packed = compressed;
    if (rows > 0)
      packed.pack(matrix_view<const T>{sums.all_keys, rows, sums.dim, sums.padded(), 1},
                  matrix_view<const T>{sums.all_values, rows, sums.dim_v, sums.padded_v(), 1}, 0, rows);
  }
};

/// Scratch of one thread in the second phase: rows, and the keys of their windows.
template <class P>
struct long_short_scratch {
  row_block<P> block;
  packed_keys<P> window;
  sum_type<P> *keys, *values;  // [slots][dim], normed
};

/// A checked call.
template <class S>
struct long_short_call {
  using T = compute_type<S>;

  const softmax_call<S, no_score>& in;
  const tensor_view<const S>& logits;
  key_norm<T> local, global;
  idx_t causal_segment;
  idx_t left, right, block;  // the window, clamped to what can occur
  key_flags key_mask{};
};

template <class S, class P = product_type<S>>
struct long_short_driver : long_short_call<S> {
  using base = long_short_call<S>;
  using base::block, base::causal_segment, base::global, base::in, base::key_mask, base::left, base::local,
      base::logits, base::right;
  using T = compute_type<S>;

  const attention_shape& shape() const { return in.shape; }
  idx_t length(idx_t b) const { return in.lengths.keys(b); }
  idx_t rank() const { return logits.extent(3); }
  /// The number of visible keys of all queries of one head, and of the tokens of all compressed keys; roughly.
  double scores() const {
    const idx_t seen = (std::min)(left + right + block, shape().keys) + rank();
    return static_cast<double>(rank()) * static_cast<double>(shape().keys) +
           static_cast<double>(shape().queries) * static_cast<double>(seen);
  }
  /// Number of queries of a task.
  idx_t chunk() const {
    return round_up(std::clamp<idx_t>(left + right + block, 4 * max_rows, 20 * max_rows), max_rows);
  }
  idx_t segment(idx_t keys) const { return in.causal ? causal_segment : std::max<idx_t>(1, keys); }
  /// Number of segments that are finished after `tokens` tokens of a sequence of `keys`.
  idx_t finished(idx_t keys, idx_t tokens) const {
    return keys == 0 ? 0 : std::clamp<idx_t>(tokens, 0, keys) / segment(keys);
  }
  idx_t segments(idx_t b) const { return finished(length(b), length(b)); }
  idx_t parts(idx_t b) const { return segments(b) * token_sums<T>::parts(segment(length(b))); }
  idx_t slot_count() const { return (std::min)(shape().keys, chunk() + left + right + 2 * block); }

  long_short_head<P> head_layout(arena& memory) const {
    const idx_t most = finished(shape().keys, shape().keys), dim = shape().dim, dim_v = shape().dim_v;
    return {token_sums<T>::layout(memory, most, segment(shape().keys), rank(), dim, dim_v),
            packed_keys<P>::layout(memory, most * rank(), dim, dim_v),
            memory.allocate<unsigned char>(key_mask ? most * rank() : 0)};
  }
  long_short_scratch<P> scratch_layout(arena& memory) const {
    const idx_t normed = local ? slot_count() : 0, dim = shape().dim, dim_v = shape().dim_v;
    return {row_block<P>::layout(memory, dim, dim_v), packed_keys<P>::layout(memory, slot_count(), dim, dim_v),
            memory.allocate<T>(normed * dim), memory.allocate<T>(normed * dim_v)};
  }

  /// A part of the sums of one query head; `value` are the values of its key head.
  void sum_part(const token_sums<T>& sums, const matrix_view<const S>& value, idx_t b, idx_t h, idx_t part,
                int worker) const {
    if (part >= parts(b)) return;
    const auto scratch = in.exec.scratch(
        worker, [&](arena& memory) { return token_sums_scratch<T>::layout(memory, sums.dim, sums.dim_v); });
    sums.add_part(part, segment(length(b)), head_of(logits, b, h), in.key(b, h), value, key_mask, b, scratch);
  }

  // The steps of a wave, in order: step(head, batch item, its query head, number of the step, worker).

  void add_part(const long_short_head<P>& head, idx_t b, idx_t h, idx_t part, int worker) const {
    sum_part(head.sums, in.value(b, h), b, h, part, worker);
  }
  /// Finishes the compressed keys of one segment: adds up its parts and applies the norm.
  void finish_segment(const long_short_head<P>& head, idx_t b, idx_t, idx_t n, int) const {
    if (n >= segments(b)) return;
    head.sums.merge(n, segment(length(b)));
    for (idx_t c = 0; c < rank(); ++c) {
      global.apply(head.sums.keys(n, c), shape().dim);
      global.apply(head.sums.values(n, c), shape().dim_v);
    }
  }
  void pack_compressed(const long_short_head<P>& head, idx_t b, idx_t, idx_t, int) const {
    head.pack(segments(b));
    mark_seen(head.seen, b);
  }
  /// A chunk of queries.
  void attend_chunk(const long_short_head<P>& head, idx_t b, idx_t h, idx_t n, int worker) const {
    const idx_t begin = n * chunk(), end = (std::min)(begin + chunk(), in.lengths.queries(b));
    if (begin < end) {
      auto scratch = in.exec.scratch(worker, [&](arena& memory) { return scratch_layout(memory); });
      attend_rows(head, b, h, begin, end, scratch);
    }
    in.clear_padding(b, h, begin, begin + chunk());
  }

  /// Compressed keys of segments in which every key is hidden are hidden.
  void mark_seen(unsigned char* rows, idx_t b) const {
    const idx_t size = segment(length(b));
    for (idx_t n = 0; key_mask && n < segments(b); ++n)
      std::fill_n(rows + n * rank(), rank(), static_cast<unsigned char>(key_mask.any(b, n * size, (n + 1) * size)));
  }
  template <class Terms>
  Terms compressed_terms(Terms of_window, const unsigned char* rows, idx_t b) const {
    if (key_mask) of_window.mask = {rows, {1, 1, 1, segments(b) * rank()}};
    return of_window;
  }

  /// The keys of the window of the query at position p.
  key_range window(idx_t p, idx_t keys) const {
    const idx_t first = block ? floor_div(p, block) * block : p, last = block ? first + block - 1 : p;
    const idx_t end = std::clamp(in.causal ? p + 1 : last + right + 1, idx_t(0), keys);
    return {std::clamp(first - left, idx_t(0), end), end};
  }

  /// Packs slots [from, to) of the windows whose first key is `first`, normed in memory for that, by pack(keys,
  /// values).
  template <class Pack>
  void pack_window(const matrix_view<const S>& key, const matrix_view<const S>& value, idx_t first, idx_t from,
                   idx_t to, T* keys, T* values, index_map& positions, const Pack& pack) const {
    positions = {local ? -from : first, 1, nullptr};
    if (from < to && local) {
      local.apply(key, first + from, to - from, keys);
      local.apply(value, first + from, to - from, values);
      pack(matrix_view<const T>{keys, to - from, key.cols, key.cols, 1},
           matrix_view<const T>{values, to - from, value.cols, value.cols, 1});
    } else if (from < to) {
      pack(key, value);
    }
    positions.first = first;
  }

  /// Queries [begin, end) of one head.
  void attend_rows(const long_short_head<P>& head, idx_t b, idx_t h, idx_t begin, idx_t end,
                   long_short_scratch<P>& s) const {
    const idx_t n = length(b), shift = in.shift(b);
    const auto of_window = in.terms.for_head(b, h, shift), of_compressed = compressed_terms(of_window, head.seen, b);
    const matrix_view<const S> query = in.query(b, h), key = in.key(b, h), value = in.value(b, h);
    const idx_t first = window(begin + shift, n).begin;
    // The number of keys that queries before i see. They are packed block by block: meanwhile the products of the block
    // before fetch them.
    const auto seen_before = [&](idx_t i) { return window((std::min)(i, end) - 1 + shift, n).end - first; };
    for (idx_t i = begin, packed = 0; i < end; i += max_rows) {
      const idx_t rows = (std::min)(max_rows, end - i), stop = i + rows;
      const idx_t needed = (std::min)(round_up(seen_before(stop), s.window.wide), seen_before(end));
      pack_window(key, value, first, packed, needed, s.keys, s.values, s.window.positions,
                  [&](const auto& k, const auto& v) { s.window.pack(k, v, packed, needed); });
      packed = needed;
      line_prefetcher next;
      next.add(key, first + packed, first + seen_before(stop + max_rows));
      next.add(value, first + packed, first + seen_before(stop + max_rows));
      next.add(query, stop, (std::min)(stop + max_rows, end));
      next.add(in.result(b, h), i, stop);
      s.window.next = &next;
      s.block.begin(query, {i, 1, nullptr}, rows, in.terms.query_factor());
      for (idx_t r = 0; r < rows; ++r) {
        const key_range seen = window(i + r + shift, n);
        s.block.ranges[r] = {seen.begin - first, seen.end - first};
      }
      attend(s.block, s.window, of_window);
      for (idx_t r = 0; r < rows; ++r) s.block.ranges[r] = {0, rank() * finished(n, in.causal ? i + r + shift + 1 : n)};
      attend(s.block, head.compressed, of_compressed);
      in.finish(s.block, b, h);
    }
  }

  void run_wave(const wave<long_short_head<P>>& w) const {
    const idx_t heads = shape().heads;
    idx_t most_segments = 0, most_parts = 0;
    for (idx_t b = w.first / heads; b <= (w.first + w.count - 1) / heads; ++b) {
      most_segments = (std::max)(most_segments, segments(b));
      most_parts = (std::max)(most_parts, parts(b));
    }
    using self = long_short_driver;
    const auto each = [&](idx_t steps, auto step) { for_each_head(w, heads, steps, *this, step); };
    each(most_parts, &self::add_part);
    each(most_segments, &self::finish_segment);
    each(1, &self::pack_compressed);
    each(ceil_div(shape().queries, chunk()), &self::attend_chunk);
  }

  void run() const {
    const auto limit = in.exec.limit_threads({.operations = scores() * shape().operations_per_score()});
    const auto layout_item = [&](arena& memory) { return head_layout(memory); };
    for (const auto& w : waves_of(in.exec, shape().batch * shape().heads, layout_item)) run_wave(w);
  }
};

template <class S>
void run_long_short(const long_short_call<S>& call) {
  with_products<S>(call.in.exec, [&]<class P>(std::type_identity<P>) { long_short_driver<S, P>{call}.run(); });
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_long_short(const long_short_call<S>&)
#include <attn/core/detail/compiled.hpp>
