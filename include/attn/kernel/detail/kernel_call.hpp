// attn: a call of kernel attention, and its segments of tokens: keys are summed up, queries read the sums.
//
// Causal: queries read the sums of the keys before their chunk and see those of their own chunk through the triangle.
// Each segment has separate sums, which keeps rounding errors small in long sequences. Segments begin at fixed tokens.
// A chunk is in chunk.hpp, whole heads and threads are in driver.hpp.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/item_state.hpp>
#include <attn/core/detail/key_flags.hpp>
#include <attn/kernel/detail/features.hpp>
#include <attn/kernel/detail/recurrence_rule.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Tokens of a segment, at least. Shorter ones let more threads share heads, but summing up 512 at a time takes 7 % of
/// the time of the causal backward pass of one thread over 1024.
inline constexpr idx_t kernel_segment = 16 * kernel_chunk;

/// Tokens of a segment of so many: about as many chunks as there are segments, so that no sum has many terms.
[[gnu::noinline]] inline idx_t segment_of(idx_t tokens) {
  const double chunks = std::sqrt(static_cast<double>(tokens) / kernel_chunk);
  return (std::max)(kernel_segment, static_cast<idx_t>(std::ceil(chunks)) * kernel_chunk);
}
/// Segments of at most so many tokens.
[[gnu::noinline]] inline idx_t most_segments(idx_t tokens) {
  const double of_many = std::ceil(std::sqrt(static_cast<double>(tokens) / kernel_chunk));
  return (std::min)(ceil_div(tokens, kernel_segment), std::max<idx_t>(16, static_cast<idx_t>(of_many)));
}

template <class T>
struct kernel_call;

/// Prefetches a few rows; not inlined, since products are compiled many times.
[[gnu::noinline]] inline void fetch_some(row_prefetcher<>& prefetch) { prefetch.next(4); }
[[gnu::noinline]] inline void fetch_all(row_prefetcher<>& prefetch) { prefetch.next(kernel_chunk); }

/// What computes a call: sums of features, decays per token included, or a recurrence.
enum class kernel_driver { sums, recurrence };

/// One call, after its checks.
template <class T>
struct kernel_call {
  stored_tensor<T> q, k, v, out;
  stored_tensor<T> projection{};  // of performer and rfa: [1, heads, features, dim]
  attention_shape shape;
  sequence_lengths lengths{};
  feature_map<T>* map = nullptr;
  idx_t heads = 0;        // of sums: as key heads or, where features or gates are per query head, as query heads
  idx_t query_heads = 0;  // of parameters: shape.heads, or those of the state for tokens without queries
  bool causal = false, normalise = true;
  T eps = T(0);
  tensor_view<const T, 3> gate{};
  bool complement = false;                      // keys enter with 1 - gate
  key_flags key_mask{};  // a hidden key adds nothing to the state; its decay applies
  item_memory<T> state{};  // where given, the sums before the call, which become those after it
  kernel_driver driver = kernel_driver::sums;
  recurrence_parameters<T> recurrence{};

  /// Whether there is a decay or gate per token, or its logarithm.
  bool gated() const { return gate.data() != nullptr || recurrence.per_token(); }
  decay_kind decays() const {
    return recurrence.per_channel() ? decay_kind::channel : gated() ? decay_kind::token : decay_kind::none;
  }
  bool log_scaled() const { return map->scaling != nullptr; }
  sum_parts parts() const {
    return !map ? sum_parts::values : log_scaled() ? sum_parts::log_scales : sum_parts::weights;
  }
  idx_t group() const { return heads > 0 ? shape.heads / heads : 0; }
  idx_t kv_head(idx_t h) const { return h / (heads / shape.kv_heads); }
  /// Heads of q and v: as many as those of out and as key heads or, of the delta rule, the other way round.
  idx_t query_head(idx_t head) const { return head / (shape.heads / q.extents[1]); }
  idx_t value_head(idx_t h) const { return parameter_head(v.extents[1], h); }
  idx_t features() const { return map ? map->features : shape.dim; }
  /// Sums are of query heads where a parameter has `given` heads, those of the queries.
  void take_heads_of(idx_t given) {
    if (given == query_heads && given > shape.kv_heads) heads = given;
  }
  /// Which of the `given` heads of a parameter belongs to head h of the sums.
  idx_t parameter_head(idx_t given, idx_t h) const { return given == heads ? h : h / (heads / given); }
  bool hides(idx_t b, idx_t t) const { return key_mask.hides(b, t); }
  idx_t seen_keys(idx_t b) const { return key_mask.count(b, 0, lengths.keys(b)); }
  /// With a mask: f(t) for the lanes of hidden keys among `count` from `begin` on, and for those beyond the last.
  template <class F>
  void each_hidden(idx_t b, idx_t begin, idx_t count, F&& f) const {
    for (idx_t t = 0; key_mask && t < kernel_chunk; ++t)
      if (t >= count || hides(b, begin + t)) f(t);
  }
  /// Sets those lanes of columns [rows][kernel_chunk].
  [[gnu::noinline]] void fill_hidden(idx_t b, idx_t begin, idx_t count, T* columns, idx_t rows, T value) const {
    each_hidden(b, begin, count, [&](idx_t t) {
      for (idx_t r = 0; r < rows; ++r) columns[r * kernel_chunk + t] = value;
    });
  }
  /// Rows of keys from `begin` on, hidden ones replaced by one that is seen; false if there is none.
  bool replace_hidden(idx_t b, idx_t begin, token_rows<T>& rows) const {
    idx_t seen = 0;
    while (seen < rows.count && hides(b, begin + seen)) ++seen;
    for (idx_t t = 0; t < rows.count && seen < rows.count; ++t)
      if (hides(b, begin + t)) rows.at[t] = rows.at[seen];
    return seen < rows.count;
  }
  T gate_at(idx_t b, idx_t h, idx_t t) const {
    if (const auto& g = recurrence.log_decay; recurrence.per_token())
      return std::exp(g(b, parameter_head(g.extent(1), h), t, 0));
    return gate(b, parameter_head(gate.extent(1), h), t);
  }
  /// The number of lanes of a block that must be filled: features with log scales are compared across all of them.
  idx_t filled_lanes() const { return log_scaled() ? kernel_chunk : 1; }

  kernel_scratch<T> scratch(arena& memory) const {
    return kernel_scratch<T>::layout(memory, map->features, shape.dim_v, map->scratch_size, log_scaled(),
                                     v.access->paired);
  }
  kernel_scratch<T> scratch(execution& exec, int worker) const {
    return exec.scratch(worker, [&](arena& memory) { return scratch(memory); });
  }
  /// A state at a place of its item: the sums of all heads, then, but for the rules that read the state, the product of
  /// the decays of each.
  kernel_sums<T> sums_at(T* place, idx_t h) const {
    return kernel_sums<T>::over(place + h * sums_size(), features(), shape.dim_v, parts());
  }
  T& decay_at(T* place, idx_t h) const { return place[heads * sums_size() + h]; }
  idx_t sums_size() const { return kernel_sums<T>::count(features(), shape.dim_v, parts()); }
  kernel_sums<T> allocate_sums(arena& memory) const {
    return kernel_sums<T>::layout(memory, features(), shape.dim_v, parts());
  }
  kernel_sums<T> state_sums(idx_t b, idx_t h) const {
    auto sums = sums_at(state.at(b), h);
    sums.empty = state.empty(b);
    return sums;
  }

  /// The features of keys [begin, begin + count); hidden ones have none.
  void load_features(idx_t b, idx_t h, idx_t begin, idx_t count, const kernel_scratch<T>& s, T* phi) const {
    const auto rows = k.head(b, kv_head(h)).block(begin, count, 0, filled_lanes());
    map->keys(rows, b * heads + h, phi, s.k_shift, s.map);
    fill_hidden(b, begin, count, phi, map->features, T(0));
    if (log_scaled()) fill_hidden(b, begin, count, s.k_shift, 1, -std::numeric_limits<T>::infinity());
  }
  /// Loads the features and values of keys [begin, begin + count); returns whether the values are finite.
  bool load_keys(idx_t b, idx_t h, idx_t begin, idx_t count, const kernel_scratch<T>& s, T* phi) const {
    load_features(b, h, begin, count, s, phi);
    const bool finite = v.access->pack_panels(v.head(b, kv_head(h)), begin, count, s.values);
    each_hidden(b, begin, count, [&](idx_t t) {
      for (idx_t col = 0; col < s.stride; col += panel_width<T>)
        std::fill_n(s.values + col * kernel_chunk + t * panel_width<T>, panel_width<T>, T(0));
    });
    pair_values(s, count, shape.dim_v);
    return finite;
  }

  [[gnu::noinline]] static void fetch(row_prefetcher<>& prefetch, const stored_matrix<T>& x, idx_t begin, idx_t end) {
    prefetch.add(matrix_view<const std::byte>{x.data, x.rows, x.cols * x.access->size, x.row_stride, x.col_stride},
                 begin, end);
  }
  /// Of a chunk; there may be none at `begin`.
  row_prefetcher<> prefetch_keys(idx_t b, idx_t h, idx_t begin) const {
    row_prefetcher<> prefetch;
    const idx_t end = begin < 0 ? begin : std::min<idx_t>(begin + kernel_chunk, lengths.keys(b));
    fetch(prefetch, k.head(b, kv_head(h)), begin, end);
    fetch(prefetch, v.head(b, value_head(h)), begin, end);
    if (const auto& g = recurrence.log_decay; recurrence.per_channel())
      prefetch.add(head_of(g, b, parameter_head(g.extent(1), h)), begin, end);
    for (const stored_tensor<T>* x : {&recurrence.a, &recurrence.b})
      if (x->data) fetch(prefetch, x->head(b, h), begin, end);
    return prefetch;
  }

  /// Adds the keys whose features are in s.k_phi; with gates they decay up to the end of the chunk.
  void add_chunk(const kernel_scratch<T>& s, kernel_sums<T>& sums, idx_t count, row_prefetcher<>& prefetch) const {
    const idx_t m = map->features, lanes = round_up(count, width<T>);
    if (gated()) {
      const T* last = s.score_factor + (count - 1) * kernel_chunk;
      for (idx_t r = 0; r < m; ++r)
        for (idx_t t = 0; t < lanes; t += width<T>)
          store<T>(s.k_phi + r * kernel_chunk + t, mul(load<T>(s.k_phi + r * kernel_chunk + t), load<T>(last + t)));
    }
    if (count < lanes)
      for (idx_t r = 0; r < m; ++r)
        std::fill(s.k_phi + r * kernel_chunk + count, s.k_phi + r * kernel_chunk + lanes, T(0));
    if (!log_scaled()) std::fill_n(s.row_decay, kernel_sums<T>::lanes(m), gated() ? s.decay[count - 1] : T(1));
    add_keys(sums, s, count, prefetch);
  }

  /// Sums up keys [begin, end): whole chunks except the last. Returns the product of their gates.
  T sum_up(idx_t b, idx_t h, idx_t begin, idx_t end, const kernel_scratch<T>& s, kernel_sums<T>& sums) const {
    sums.clear();
    return add_keys_to(sums, T(1), b, h, begin, end, s);
  }
  /// The same, added to sums of the same segment; `decay` is the product of the gates of both.
  [[gnu::noinline]] T add_keys_to(kernel_sums<T>& sums, T decay, idx_t b, idx_t h, idx_t begin, idx_t end,
                                  const kernel_scratch<T>& s) const {
    for (idx_t c = begin; c < end; c += kernel_chunk) {
      const idx_t count = std::min<idx_t>(kernel_chunk, end - c);
      load_keys(b, h, c, count, s, s.k_phi);
      row_prefetcher<> prefetch = prefetch_keys(b, h, c + count);
      decay *= prepare_gates(b, h, c, count, s);
      if (log_scaled()) map->scaling->keys_for_sums(s.k_phi, sums.log_scale, s);
      add_chunk(s, sums, count, prefetch);
    }
    return decay;
  }

  T prepare_gates(idx_t b, idx_t h, idx_t begin, idx_t count, const kernel_scratch<T>& s) const {
    if (!gated()) return T(1);
    for (idx_t t = 0; t < count; ++t) s.gates[t] = gate_at(b, h, begin + t);
    gate_factors(s.gates, count, complement, s.score_factor, s.decay);
    return s.decay[count - 1];
  }

  /// Causal, keys [begin, end) of one segment after those summed up in `before`. Leaves the segment's own sums in
  /// `own`, unless it is the `last` one, whose sums are not needed. `total` is scratch. Returns the product of the
  /// gates. `resumed`: `own` and `decay` are those of keys of the segment before `begin`.
  T attend_segment(idx_t b, idx_t h, idx_t begin, idx_t end, bool last, const kernel_scratch<T>& s,
                   const kernel_sums<T>& before, kernel_sums<T>& own, kernel_sums<T>& total, T decay = T(1),
                   bool resumed = false) const {
    const idx_t offset = lengths.keys(b) - lengths.queries(b);  // position of query 0
    if (!resumed && (!last || end - begin > kernel_chunk)) own.clear();
    for (idx_t c = begin; c < end; c += kernel_chunk) {
      const idx_t count = std::min<idx_t>(kernel_chunk, end - c);
      const idx_t first = (std::max)(offset - c, idx_t(0));  // lane of the first query in the chunk
      const bool finite = load_keys(b, h, c, count, s, s.k_own), keep_sums = !last || c + count < end;
      row_prefetcher<> prefetch = prefetch_keys(b, h, c + count);
      const kernel_sums<T>* seen = c == begin && !resumed ? &before : before.empty && !log_scaled() ? &own : &total;
      if (seen == &total && first < count) {
        if (before.empty)
          copy(own, total);  // its log scales are raised before its values are
        else
          combine(before, decay, own, total, s.factors);
      }
      if (seen->empty) seen = nullptr;
      decay *= prepare_gates(b, h, c, count, s);
      if (log_scaled()) {
        if (keep_sums) map->scaling->keys_for_sums(s.k_own, own.log_scale, s);
        map->scaling->keys_for_chunk(count, s);
      }
      if (first < count) pair_keys(s, map->features, count, seen);
      for (idx_t g = 0; g < group() && first < count; ++g)
        attend_block(b, h, h * group() + g, c - offset, first, count, s, seen, count, finite);
      if (keep_sums) add_chunk(s, own, count, prefetch);
    }
    return decay;
  }

  /// Query rows origin + [first, count) of `head`, lanes [first, count) of the block, with `keys` keys of their own.
  void attend_block(idx_t b, idx_t h, idx_t head, idx_t origin, idx_t first, idx_t count, const kernel_scratch<T>& s,
                    const kernel_sums<T>* sums, idx_t keys, bool finite) const {
    const auto queries = q.head(b, head), to = out.head(b, head);
    map->queries(queries.block(origin, count, first, filled_lanes()), b * heads + h, s.q_own, s.q_shift, s.map);
    if (log_scaled()) {
      if (sums) map->scaling->queries_for_sums(s.q_own, sums->log_scale, s);
      if (keys > 0) map->scaling->queries_for_chunk(s);
      map->scaling->join(sums != nullptr, keys > 0, eps, s);
    } else {
      for (idx_t t = 0; t < kernel_chunk; ++t) {
        s.state_factor[t] = gated() && keys > 0 ? s.decay[t] : T(1);
        s.own_factor[t] = T(1);
        s.eps[t] = eps;
      }
    }
    pair_queries(s, map->features, count, keys > 0, sums != nullptr);
    const chunk_view<T> view{.sums = sums, .keys = keys, .weighed = gated() || log_scaled(), .finite = finite,
                             .normalise = normalise, .features = map->features, .dim_v = shape.dim_v};
    if (sums) read_weights(s.q_phi, sums->weights, view.features, round_up(count, width<T>), s.den);
    row_prefetcher<> prefetch;
    const idx_t next = origin + kernel_chunk, after = (std::min)(next + kernel_chunk, lengths.queries(b));
    fetch(prefetch, queries, next, after);
    fetch(prefetch, to, next, after);
    const bool whole_panels = to.access->computes && to.col_stride == 1 && to.cols % panel_width<T> == 0;
    T den[tile_rows];
    for (idx_t r = first / tile_rows * tile_rows; r < count; r += tile_rows) {
      const idx_t rows = std::min<idx_t>(tile_rows, count - r);
      const bool direct = whole_panels && rows % tile_step == 0 && r >= first;
      T* const rows_out = direct ? reinterpret_cast<T*>(to.row(origin + r)) : s.out;
      const idx_t stride = direct ? to.row_stride / static_cast<idx_t>(sizeof(T)) : s.stride;
      prefetch.next(2 * rows_per_tile);
      chunk_tile(view, s, r, rows, den, rows_out, stride);
      if (log_scaled() && keys > 0)
        for (idx_t m = 0; m < rows; ++m)
          if (r + m >= first && map->scaling->underflowed(den[m]) && s.running_max[r + m] > no_log_scale<T>)
            recompute_row(view, b, h, head, origin, r + m, s, rows_out + m * stride);
      for (idx_t m = 0; m < rows && !direct; ++m)
        if (r + m >= first) to.write_row(s.out + m * s.stride, origin + r + m);
    }
  }

  [[gnu::noinline]] void recompute_row(const chunk_view<T>& view, idx_t b, idx_t h, idx_t head, idx_t origin, idx_t i,
                                       const kernel_scratch<T>& s, T* row) const {
    const idx_t begin = origin + lengths.keys(b) - lengths.queries(b);
    const auto query = q.head(b, head).block(origin + i, 1, 0, kernel_chunk);
    map->queries(query, b * heads + h, s.q_raw, s.k_max, s.map);
    load_features(b, h, begin, i + 1, s, s.k_raw);
    map->scaling->recompute_row(view, i, eps, s, row);
  }

  /// What a worker needs to attend to segments: the sums before them, those of one, and both.
  struct segment_sums {
    kernel_sums<T> before, own, total;
  };
  segment_sums layout_sums(arena& memory) const {
    return {allocate_sums(memory), allocate_sums(memory), causal ? allocate_sums(memory) : kernel_sums<T>{}};
  }

  /// Tokens of a segment of keys, and the number of segments.
  idx_t segment(idx_t b) const { return segment_of(lengths.keys(b)); }
  idx_t segments(idx_t b) const { return ceil_div(lengths.keys(b), segment(b)); }
  idx_t end_of_segment(idx_t b, idx_t n) const { return (std::min)((n + 1) * segment(b), lengths.keys(b)); }
  idx_t blocks(idx_t b) const { return ceil_div(lengths.queries(b), kernel_chunk); }
  T sum_up_segment(idx_t b, idx_t h, idx_t n, const kernel_scratch<T>& s, kernel_sums<T>& sums) const {
    return sum_up(b, h, n * segment(b), end_of_segment(b, n), s, sums);
  }

  void attend_queries(idx_t b, idx_t h, idx_t block, const kernel_scratch<T>& s, const kernel_sums<T>& total) const {
    const idx_t begin = block * kernel_chunk, count = std::min<idx_t>(kernel_chunk, lengths.queries(b) - begin);
    pair_keys(s, map->features, 0, &total);
    for (idx_t g = 0; g < group(); ++g) attend_block(b, h, h * group() + g, begin, 0, count, s, &total, 0, true);
  }

  /// Adds the sums of the next segment to those before it; the former are overwritten.
  static void add_segment(kernel_sums<T>& sums, T decay, kernel_sums<T>& own, const kernel_scratch<T>& s) {
    if (sums.empty)
      std::swap(sums, own);
    else
      combine(sums, decay, own, sums, s.factors);
  }

  /// The first queries of item b, which see no key.
  idx_t unseeing(idx_t b) const {
    const idx_t keys = lengths.keys(b), queries = lengths.queries(b);
    return keys == 0 ? queries : causal ? std::max<idx_t>(queries - keys, 0) : 0;
  }
  /// Sets the rows of padding and those that see no key to zero.
  void pad(idx_t b, idx_t h) const {
    for (idx_t g = h * group(); g < (h + 1) * group(); ++g) {
      out.head(b, g).clear_rows(0, unseeing(b));
      out.head(b, g).clear_rows(lengths.queries(b), shape.queries);
    }
  }

  static void copy(const kernel_sums<T>& from, kernel_sums<T>& to) {
    to.empty = from.empty;
    const sum_parts parts = from.log_scale ? sum_parts::log_scales : sum_parts::weights;
    if (!from.empty) std::copy_n(from.values, kernel_sums<T>::count(from.features, from.dim_v, parts), to.values);
  }

  work_estimate work() const {
    const auto tokens = static_cast<double>(shape.batch * (shape.heads * shape.queries + heads * shape.keys));
    const auto features = static_cast<double>(map->features), dim_v = static_cast<double>(shape.dim_v);
    const double triangle = causal ? kernel_chunk * (features + dim_v) : 0;
    const double sums = state ? static_cast<double>(shape.batch * heads) * features * dim_v : 0;
    return {.operations = tokens * (2 * features * dim_v + triangle + static_cast<double>(map->operations)),
            .bytes = tokens * (static_cast<double>(shape.dim) + dim_v) * static_cast<double>(q.access->size) +
                     2 * sums * sizeof(T)};
  }
};

}}}  // namespace attn::ATTN_ISA::detail
