// attn: the kernel of sums of features: keys are summed up, queries read the sums.
//
// Causal: queries read the sums of the keys before their chunk and see those of their own chunk through the triangle.
// Each segment has separate sums, which keeps rounding errors small in long sequences. Segments begin at fixed tokens.
// A chunk is in chunk.hpp, whole heads and threads are in sums_run.hpp.
#pragma once

#include <attn/kernel/detail/kernel_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct sums_kernel {
  const kernel_call<T>& call;

  kernel_scratch<T> scratch(arena& memory) const {
    return kernel_scratch<T>::layout(memory, call.map->features, call.shape.dim_v, call.map->scratch_size,
                                     call.log_scaled(), call.v.access->paired);
  }
  kernel_scratch<T> scratch(execution& exec, int worker) const {
    return exec.scratch(worker, [&](arena& memory) { return scratch(memory); });
  }
  /// The features of keys [begin, begin + count); hidden ones have none.
  void load_features(idx_t b, idx_t h, idx_t begin, idx_t count, const kernel_scratch<T>& s, T* phi) const {
    const auto rows = call.k.head(b, call.kv_head(h)).block(begin, count, 0, call.filled_lanes());
    call.map->keys(rows, b * call.heads + h, phi, s.k_shift, s.map);
    call.fill_hidden(b, begin, count, phi, call.map->features, T(0));
    if (call.log_scaled()) call.fill_hidden(b, begin, count, s.k_shift, 1, -std::numeric_limits<T>::infinity());
  }
  /// Loads the features and values of keys [begin, begin + count); returns whether the values are finite.
  bool load_keys(idx_t b, idx_t h, idx_t begin, idx_t count, const kernel_scratch<T>& s, T* phi) const {
    load_features(b, h, begin, count, s, phi);
    const bool finite = call.v.access->pack_panels(call.v.head(b, call.kv_head(h)), begin, count, s.values);
    call.each_hidden(b, begin, count, [&](idx_t t) {
      for (idx_t col = 0; col < s.stride; col += panel_width<T>)
        std::fill_n(s.values + col * kernel_chunk + t * panel_width<T>, panel_width<T>, T(0));
    });
    pair_values(s, count, call.shape.dim_v);
    return finite;
  }

  /// Adds the keys whose features are in s.k_phi; with gates they decay up to the end of the chunk.
  void add_chunk(const kernel_scratch<T>& s, kernel_sums<T>& sums, idx_t count, row_prefetcher<>& prefetch) const {
    const idx_t m = call.map->features, lanes = round_up(count, width<T>);
    if (call.gated()) {
      const T* last = s.score_factor + (count - 1) * kernel_chunk;
      for (idx_t r = 0; r < m; ++r)
        for (idx_t t = 0; t < lanes; t += width<T>)
          store<T>(s.k_phi + r * kernel_chunk + t, mul(load<T>(s.k_phi + r * kernel_chunk + t), load<T>(last + t)));
    }
    if (count < lanes)
      for (idx_t r = 0; r < m; ++r)
        std::fill(s.k_phi + r * kernel_chunk + count, s.k_phi + r * kernel_chunk + lanes, T(0));
    const T whole = call.gated() ? s.decay[count - 1] : T(1);
    if (!call.log_scaled()) std::fill_n(s.row_decay, kernel_sums<T>::lanes(m), whole);
    add_keys(sums, s, count, prefetch);
  }

  /// Adds keys [begin, end), whole chunks except the last, to sums of the same segment; `decay` is the product of the
  /// gates of both.
  [[gnu::noinline]] T add_keys_to(kernel_sums<T>& sums, T decay, idx_t b, idx_t h, idx_t begin, idx_t end,
                                  const kernel_scratch<T>& s) const {
    for (idx_t c = begin; c < end; c += kernel_chunk) {
      const idx_t count = std::min<idx_t>(kernel_chunk, end - c);
      load_keys(b, h, c, count, s, s.k_phi);
      row_prefetcher<> prefetch = call.prefetch_keys(b, h, c + count);
      decay *= prepare_gates(b, h, c, count, s);
      if (call.log_scaled()) call.map->scaling->keys_for_sums(s.k_phi, sums.log_scale, s);
      add_chunk(s, sums, count, prefetch);
    }
    return decay;
  }

  T prepare_gates(idx_t b, idx_t h, idx_t begin, idx_t count, const kernel_scratch<T>& s) const {
    if (!call.gated()) return T(1);
    for (idx_t t = 0; t < count; ++t) s.gates[t] = call.gate_at(b, h, begin + t);
    gate_factors(s.gates, count, call.complement, s.score_factor, s.decay);
    return s.decay[count - 1];
  }

  /// Causal, keys [begin, end) of one segment after those summed up in `before`. Leaves the segment's own sums in
  /// `own`, unless it is the `last` one, whose sums are not needed. `total` is scratch. Returns the product of the
  /// gates. `resumed`: `own` and `decay` are those of keys of the segment before `begin`.
  T attend_segment(idx_t b, idx_t h, idx_t begin, idx_t end, bool last, const kernel_scratch<T>& s,
                   const kernel_sums<T>& before, kernel_sums<T>& own, kernel_sums<T>& total, T decay = T(1),
                   bool resumed = false) const {
    const idx_t offset = call.lengths.keys(b) - call.lengths.queries(b);  // position of query 0
    if (!resumed && (!last || end - begin > kernel_chunk)) own.clear();
    for (idx_t c = begin; c < end; c += kernel_chunk) {
      const idx_t count = std::min<idx_t>(kernel_chunk, end - c);
      const idx_t first = (std::max)(offset - c, idx_t(0));  // lane of the first query in the chunk
      const bool finite = load_keys(b, h, c, count, s, s.k_own), keep_sums = !last || c + count < end;
      row_prefetcher<> prefetch = call.prefetch_keys(b, h, c + count);
      const kernel_sums<T>* seen =
          c == begin && !resumed ? &before : before.empty && !call.log_scaled() ? &own : &total;
      if (seen == &total && first < count) {
        if (before.empty)
          copy_sums(own, total);  // its log scales are raised before its values are
        else
          combine(before, decay, own, total, s.factors);
      }
      if (seen->empty) seen = nullptr;
      decay *= prepare_gates(b, h, c, count, s);
      if (call.log_scaled()) {
        if (keep_sums) call.map->scaling->keys_for_sums(s.k_own, own.log_scale, s);
        call.map->scaling->keys_for_chunk(count, s);
      }
      if (first < count) pair_keys(s, call.map->features, count, seen);
      for (idx_t g = 0; g < call.group() && first < count; ++g)
        attend_block(b, h, h * call.group() + g, c - offset, first, count, s, seen, count, finite);
      if (keep_sums) add_chunk(s, own, count, prefetch);
    }
    return decay;
  }

  /// Query rows origin + [first, count) of `head`, lanes [first, count) of the block, with `keys` keys of their own.
  void attend_block(idx_t b, idx_t h, idx_t head, idx_t origin, idx_t first, idx_t count, const kernel_scratch<T>& s,
                    const kernel_sums<T>* sums, idx_t keys, bool finite) const {
    const auto queries = call.q.head(b, head), to = call.out.head(b, head);
    const auto rows_of_queries = queries.block(origin, count, first, call.filled_lanes());
    call.map->queries(rows_of_queries, b * call.heads + h, s.q_own, s.q_shift, s.map);
    if (call.log_scaled()) {
      if (sums) call.map->scaling->queries_for_sums(s.q_own, sums->log_scale, s);
      if (keys > 0) call.map->scaling->queries_for_chunk(s);
      call.map->scaling->join(sums != nullptr, keys > 0, call.eps, s);
    } else {
      for (idx_t t = 0; t < kernel_chunk; ++t) {
        s.state_factor[t] = call.gated() && keys > 0 ? s.decay[t] : T(1);
        s.own_factor[t] = T(1);
        s.eps[t] = call.eps;
      }
    }
    pair_queries(s, call.map->features, count, keys > 0, sums != nullptr);
    const chunk_view<T> view{.sums = sums, .keys = keys, .weighed = call.gated() || call.log_scaled(), .finite = finite,
                             .normalise = call.normalise, .features = call.map->features, .dim_v = call.shape.dim_v};
    if (sums) read_weights(s.q_phi, sums->weights, view.features, round_up(count, width<T>), s.den);
    row_prefetcher<> prefetch;
    const idx_t next = origin + kernel_chunk, after = (std::min)(next + kernel_chunk, call.lengths.queries(b));
    call.fetch(prefetch, queries, next, after);
    call.fetch(prefetch, to, next, after);
    const bool whole_panels = to.access->computes && to.col_stride == 1 && to.cols % panel_width<T> == 0;
    T den[tile_rows];
    for (idx_t r = first / tile_rows * tile_rows; r < count; r += tile_rows) {
      const idx_t rows = std::min<idx_t>(tile_rows, count - r);
      const bool direct = whole_panels && rows % tile_step == 0 && r >= first;
      T* const rows_out = direct ? reinterpret_cast<T*>(to.row(origin + r)) : s.out;
      const idx_t stride = direct ? to.row_stride / static_cast<idx_t>(sizeof(T)) : s.stride;
      prefetch.next(2 * rows_per_tile);
      chunk_tile(view, s, r, rows, den, rows_out, stride);
      if (call.log_scaled() && keys > 0)
        for (idx_t m = 0; m < rows; ++m)
          if (r + m >= first && call.map->scaling->underflowed(den[m]) && s.running_max[r + m] > no_log_scale<T>)
            recompute_row(view, b, h, head, origin, r + m, s, rows_out + m * stride);
      for (idx_t m = 0; m < rows && !direct; ++m)
        if (r + m >= first) to.write_row(s.out + m * s.stride, origin + r + m);
    }
  }

  [[gnu::noinline]] void recompute_row(const chunk_view<T>& view, idx_t b, idx_t h, idx_t head, idx_t origin, idx_t i,
                                       const kernel_scratch<T>& s, T* row) const {
    const idx_t begin = origin + call.lengths.keys(b) - call.lengths.queries(b);
    const auto query = call.q.head(b, head).block(origin + i, 1, 0, kernel_chunk);
    call.map->queries(query, b * call.heads + h, s.q_raw, s.k_max, s.map);
    load_features(b, h, begin, i + 1, s, s.k_raw);
    call.map->scaling->recompute_row(view, i, call.eps, s, row);
  }

  /// What a worker needs to attend to segments: the sums before them, those of one, and both.
  struct segment_sums {
    kernel_sums<T> before, own, total;
  };
  segment_sums layout_sums(arena& memory) const {
    return {call.allocate_sums(memory), call.allocate_sums(memory),
            call.causal ? call.allocate_sums(memory) : kernel_sums<T>{}};
  }

  T sum_up_segment(idx_t b, idx_t h, idx_t n, const kernel_scratch<T>& s, kernel_sums<T>& sums) const {
    sums.clear();
    return add_keys_to(sums, T(1), b, h, n * call.segment(b), call.end_of_segment(b, n), s);
  }

  void attend_queries(idx_t b, idx_t h, idx_t block, const kernel_scratch<T>& s, const kernel_sums<T>& total) const {
    const idx_t begin = block * kernel_chunk, count = std::min<idx_t>(kernel_chunk, call.lengths.queries(b) - begin);
    pair_keys(s, call.map->features, 0, &total);
    for (idx_t g = h * call.group(); g < (h + 1) * call.group(); ++g)
      attend_block(b, h, g, begin, 0, count, s, &total, 0, true);
  }

  /// Adds the sums of the next segment to those before it; the former are overwritten.
  static void add_segment(kernel_sums<T>& sums, T decay, kernel_sums<T>& own, const kernel_scratch<T>& s) {
    if (sums.empty)
      std::swap(sums, own);
    else
      combine(sums, decay, own, sums, s.factors);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
