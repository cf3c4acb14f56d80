// attn: the one engine of kernel attention, phi(q)^T sum_j phi(k_j) v_j^T, all at once or causal.
//
// All at once: every segment of keys is summed up chunk by chunk, segments are merged in order, then blocks of queries
// read the total. Causal: chunk by chunk, queries read what lies before their chunk and see their own chunk through the
// triangle. A segment has a sum of its own and is added to the total when it is done, which keeps rounding small in
// long sequences and lets threads share one head: a wave of segments is summed up at once, and once the sums before
// each are known, attended at once. Segments and chunks lie at fixed places, so bits do not depend on threads.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/kernel/detail/features.hpp>
#include <attn/kernel/detail/kernel_scratch.hpp>
#include <attn/kernel/detail/kernel_state.hpp>
#include <attn/kernel/detail/recurrent.hpp>

namespace attn::inline ATTN_ISA::detail {

inline constexpr index kernel_segment = 16 * kernel_chunk;

/// One call, after its checks. `heads` of sums: as many as there are key heads, or more, where features or gates
/// differ.
template <class S>
struct kernel_call {
  using element_type = S;
  using T = compute_type<S>;

  tensor_view<const S> q, k, v;
  tensor_view<S> out;
  attention_shape shape;
  sequence_lengths lengths;
  kernel_features<S>& map;
  index heads;
  bool causal = false, normalise = true;
  T eps = T(0);
  tensor_view<const T, 3> gate{};
  bool complement = false;
  kernel_state<T>* state = nullptr;  // where given, what came before, and then what comes after

  bool gated() const { return gate.data() != nullptr; }
  index group() const { return heads > 0 ? shape.heads / heads : 0; }
  index kv_head(index h) const { return h / (heads / shape.kv_heads); }
  T gate_at(index b, index h, index t) const {
    return gate(b, gate.extent(1) == heads ? h : h / (heads / gate.extent(1)), t);
  }

  kernel_scratch<T> scratch(arena& memory) const {
    return kernel_scratch<T>::layout(memory, map.features(), shape.dim_v, map.work(), map.leveled());
  }
  kernel_scratch<T> scratch(execution& exec, int worker) const {
    return exec.scratch(worker, [&](arena& memory) { return scratch(memory); });
  }

  /// Features of keys [begin, begin + count), and their values.
  bool load_keys(index b, index h, index begin, index count, const kernel_scratch<T>& s, T* phi) const {
    const auto keys = head_of(k, b, kv_head(h));
    map.keys(token_rows<S>(keys, begin, count), b * heads + h, phi, s.k_shift, s.work);
    const auto values = head_of(v, b, kv_head(h));
    return pack_panels<T>([&](index t) { return values.row(begin + t); }, 0, count, shape.dim_v, values.col_stride,
                          s.values, kernel_chunk);
  }

  /// The chunk of keys from `begin` on.
  coming_rows keys_ahead(index b, index h, index begin) const {
    coming_rows ahead;
    const index end = std::min<index>(begin + kernel_chunk, lengths.keys(b));
    ahead.add(head_of(k, b, kv_head(h)), begin, end);
    ahead.add(head_of(v, b, kv_head(h)), begin, end);
    return ahead;
  }

  /// Adds the keys whose features lie in s.k_phi; with gates they fade up to the end of the chunk.
  void add_chunk(const kernel_scratch<T>& s, kernel_sums<T>& sums, index count, coming_rows& ahead) const {
    const index m = map.features();
    if (gated()) {
      const T* last = s.mix + (count - 1) * kernel_chunk;
      for (index r = 0; r < m; ++r)
        for (index t = 0; t < kernel_chunk; t += width<T>)
          store<T>(s.k_phi + r * kernel_chunk + t, mul(load<T>(s.k_phi + r * kernel_chunk + t), load<T>(last + t)));
    }
    if (count < kernel_chunk)
      for (index r = 0; r < m; ++r)
        std::fill(s.k_phi + r * kernel_chunk + count, s.k_phi + (r + 1) * kernel_chunk, T(0));
    if (!sums.level) std::fill_n(s.keep, kernel_sums<T>::lanes(m), gated() ? s.decay[count - 1] : T(1));
    sum_keys(sums, s.k_phi, s.values, count, s.keep, ahead);
  }

  /// Sums up keys [begin, end): whole chunks but for the last. Returns the product of the gates.
  T sum_up(index b, index h, index begin, index end, const kernel_scratch<T>& s, kernel_sums<T>& sums) const {
    T faded = T(1);
    for (index c = begin; c < end; c += kernel_chunk) {
      const index count = std::min<index>(kernel_chunk, end - c);
      load_keys(b, h, c, count, s, s.k_phi);
      coming_rows ahead = keys_ahead(b, h, c + count);
      faded *= prepare_gates(b, h, c, count, s);
      if (map.leveled()) map.key_state(s.k_phi, s.k_shift, sums.level, s.keep, s.k_phi);
      add_chunk(s, sums, count, ahead);
    }
    return faded;
  }

  T prepare_gates(index b, index h, index begin, index count, const kernel_scratch<T>& s) const {
    if (!gated()) return T(1);
    for (index t = 0; t < count; ++t) s.gates[t] = gate_at(b, h, begin + t);
    mix_by_gates(s.gates, count, complement, s.mix, s.decay);
    return s.decay[count - 1];
  }

  /// Causal, keys [begin, end) of one segment, `before` summed up so far; the segment's own sum is left in `own`.
  /// `total` is scratch. Returns the product of the gates.
  T attend_segment(index b, index h, index begin, index end, const kernel_scratch<T>& s, const kernel_sums<T>& before,
                   kernel_sums<T>& own, kernel_sums<T>& total) const {
    const index offset = lengths.keys(b) - lengths.queries(b);  // position of query 0
    T faded = T(1);
    own.clear();
    for (index c = begin; c < end; c += kernel_chunk) {
      const index count = std::min<index>(kernel_chunk, end - c);
      const index first = std::max(offset - c, index(0));  // lane of the first query in the chunk
      const bool finite = load_keys(b, h, c, count, s, s.k_own);
      coming_rows ahead = keys_ahead(b, h, c + count);
      if (c > begin && first < count) combine(before, faded, own, total, s.factors);
      const kernel_sums<T>* const seen = c > begin ? &total : &before;
      faded *= prepare_gates(b, h, c, count, s);
      const T* mix = gated() ? s.mix : nullptr;
      if (map.leveled()) {
        map.key_state(s.k_own, s.k_shift, own.level, s.keep, s.k_phi);
        map.key_own(s.k_own, s.k_shift, s.k_top, count, s.peak, s.mix);
        mix = s.mix;
      }
      for (index g = 0; g < group() && first < count; ++g)
        attend_block(b, h, h * group() + g, c - offset, first, count, s, seen->empty ? nullptr : seen, count, finite,
                     mix);
      add_chunk(s, own, count, ahead);
    }
    return faded;
  }

  /// Query rows origin + [first, count) of head `head`, lanes [first, count) of the block, with `keys` keys of their
  /// own.
  void attend_block(index b, index h, index head, index origin, index first, index count, const kernel_scratch<T>& s,
                    const kernel_sums<T>* sums, index keys, bool finite, const T* mix) const {
    const auto queries = head_of(q, b, head);
    map.queries(token_rows<S>(queries, origin, count, first), b * heads + h, s.q_own, s.q_shift, s.work);
    const bool leveled = map.leveled();
    if (leveled) {
      if (sums) map.query_state(s.q_own, sums->level, s.q_phi, s.q_top);
      if (keys > 0) map.query_own(s.q_own, s.own_top);
    }
    const bool fades = gated() && keys > 0;
    for (index t = 0; t < kernel_chunk; ++t) {
      s.state_factor[t] = fades ? s.decay[t] : T(1);
      s.own_factor[t] = T(1);
      s.eps[t] = eps;
    }
    if (leveled)
      map.join(sums ? s.q_top : nullptr, keys > 0 ? s.own_top : nullptr, s.peak, s.q_shift, eps, s.state_factor,
               s.own_factor, s.eps);
    chunk_view<T> view;
    view.sums = sums, view.q_state = s.q_phi, view.state_factor = s.state_factor;
    view.keys = keys, view.q_own = s.q_own, view.k_own = s.k_own, view.own_factor = s.own_factor, view.mix = mix;
    view.values = s.values, view.finite = finite, view.eps = s.eps, view.normalise = normalise;
    view.features = map.features(), view.dim_v = shape.dim_v;
    if (sums) read_weights(s.q_phi, sums->weights, view.features, s.den);
    const auto to = head_of(out, b, head);
    coming_rows ahead;
    const index next = origin + kernel_chunk, after = std::min(next + kernel_chunk, lengths.queries(b));
    ahead.add(queries, next, after);
    ahead.add(to, next, after);
    T den[tile_rows];
    for (index r = first / tile_rows * tile_rows; r < count; r += tile_rows) {
      const index rows = std::min<index>(tile_rows, count - r);
      // Whole tiles of whole panels go straight to where they belong.
      T* rows_out = s.out;
      index stride = s.stride;
      bool direct = false;
      if constexpr (std::same_as<S, T>)
        if (to.col_stride == 1 && to.cols % panel_width<T> == 0 && rows % tile_step == 0 && r >= first)
          direct = true, rows_out = to.row(origin + r), stride = to.row_stride;
      ahead.next();
      ahead.next();
      chunk_tile(view, s.den, r, rows, s.weights, den, rows_out, stride);
      if (leveled && keys > 0)
        for (index m = 0; m < rows; ++m)
          if (r + m >= first && map.doubtful(den[m]))
            attend_carefully(view, b, h, head, origin, r + m, s, rows_out + m * stride);
      for (index m = 0; m < rows && !direct; ++m)
        if (r + m >= first) write_row(s.out + m * s.stride, to, origin + r + m);
    }
  }

  /// Row i of a block, anew: its keys in the chunk weighed in the logarithm.
  [[gnu::noinline]] void attend_carefully(const chunk_view<T>& view, index b, index h, index head, index origin,
                                          index i, const kernel_scratch<T>& s, T* row) const {
    const auto queries = head_of(q, b, head);
    const auto keys = head_of(k, b, kv_head(h));
    const index begin = origin + lengths.keys(b) - lengths.queries(b);
    map.weigh_carefully(token_rows<S>(queries, origin + i, 1), token_rows<S>(keys, begin, i + 1), b * heads + h,
                        s.work);
    map.finish_carefully(view, i, view.sums ? s.q_top[i] : no_level<T>, view.sums ? s.den[i] : T(0), s.q_shift[i], eps,
                         s.work, row);
  }

  void clear(index b, index h, index begin, index end) const {
    for (index g = h * group(); g < (h + 1) * group(); ++g) clear_rows(head_of(out, b, g), begin, end);
  }

  /// The sums a worker, or a wave of segments, keeps.
  struct held {
    kernel_sums<T> total, own, before;
    T faded;
  };
  held hold(arena& memory, bool with_total) const {
    const auto laid_out = [&](bool needed) {
      return needed ? kernel_sums<T>::layout(memory, map.features(), shape.dim_v, map.leveled()) : kernel_sums<T>{};
    };
    return {laid_out(with_total), laid_out(true), laid_out(causal), T(1)};
  }

  index segments(index b) const { return (lengths.keys(b) + kernel_segment - 1) / kernel_segment; }
  index blocks(index b) const { return (lengths.queries(b) + kernel_chunk - 1) / kernel_chunk; }

  void attend_queries(index b, index h, index block, const kernel_scratch<T>& s, const kernel_sums<T>& total) const {
    const index begin = block * kernel_chunk, count = std::min<index>(kernel_chunk, lengths.queries(b) - begin);
    for (index g = 0; g < group(); ++g)
      attend_block(b, h, h * group() + g, begin, 0, count, s, &total, 0, true, nullptr);
  }

  /// One head of sums from first to last, by one worker.
  void run_head(index b, index h, const kernel_scratch<T>& s, held& x) const {
    const index keys = lengths.keys(b);
    kernel_sums<T>& sums = causal ? x.before : x.total;
    if (state)
      copy(state->sums(b, h), sums);
    else
      sums.clear();
    for (index n = 0; n < segments(b); ++n) {
      const index begin = n * kernel_segment, end = std::min(begin + kernel_segment, keys);
      T faded = T(1);
      if (causal) {
        faded = attend_segment(b, h, begin, end, s, sums, x.own, x.total);
      } else {
        x.own.clear();
        sum_up(b, h, begin, end, s, x.own);
      }
      combine(sums, faded, x.own, sums, s.factors);
      if (state) state->gates(b, h) *= faded;
    }
    if (state) {
      auto kept = state->sums(b, h);
      copy(sums, kept);
    }
    if (!causal && !sums.empty)
      for (index block = 0; block < blocks(b); ++block) attend_queries(b, h, block, s, sums);
    pad(b, h);
  }

  /// Zeros for the rows of padding and those that see no key.
  void pad(index b, index h) const {
    const index keys = lengths.keys(b), queries = lengths.queries(b);
    if (keys == 0)
      clear(b, h, 0, queries);
    else if (causal && keys < queries)
      clear(b, h, 0, queries - keys);
    clear(b, h, queries, shape.queries);
  }

  /// One head of sums by all threads.
  void share_head(index b, index h, execution& exec, held* wave, index most) const {
    held& total = wave[most];
    kernel_sums<T>& sums = total.total;
    sums.clear();
    const index keys = lengths.keys(b), all = segments(b);
    for (index first = 0; first < all; first += most) {
      const index count = std::min(most, all - first);
      exec.for_each(count, [&](index n, int worker) {
        const auto s = scratch(exec, worker);
        const index begin = (first + n) * kernel_segment, end = std::min(begin + kernel_segment, keys);
        wave[n].own.clear();
        wave[n].faded = sum_up(b, h, begin, end, s, wave[n].own);
      });
      const auto s = scratch(exec, 0);
      for (index n = 0; n < count; ++n) {
        if (causal) copy(sums, wave[n].before);
        combine(sums, wave[n].faded, wave[n].own, sums, s.factors);
      }
      if (!causal) continue;
      exec.for_each(count, [&](index n, int worker) {
        const auto mine = scratch(exec, worker);
        const index begin = (first + n) * kernel_segment, end = std::min(begin + kernel_segment, keys);
        attend_segment(b, h, begin, end, mine, wave[n].before, wave[n].own, wave[n].total);
      });
    }
    if (!causal && !sums.empty)
      exec.for_each(blocks(b),
                     [&](index block, int worker) { attend_queries(b, h, block, scratch(exec, worker), sums); });
    pad(b, h);
  }
  static void copy(const kernel_sums<T>& from, kernel_sums<T>& to) {
    std::copy_n(from.values, kernel_sums<T>::count(from.features, from.dim_v, from.level != nullptr), to.values);
    to.empty = from.empty;
  }

  void run(execution& exec) const {
    const index pairs = shape.batch * heads, threads = exec.threads();
    const bool few = state && shape.keys <= few_tokens,
               share = !state && threads > 1 && pairs < 2 * threads && pairs % threads != 0;
    // Waves are long, since threads meet at their ends; causal ones hold three sums a segment.
    const index most = share ? (causal ? 4 : 16) * threads : threads - 1, slot_count = few ? 0 : most + 1;
    const auto slots = exec.shared_scratch([&](arena& memory) {
      map.layout(memory, pairs);
      auto* list = memory.allocate<held>(slot_count);
      for (index n = 0; n < slot_count; ++n) {
        const held x = hold(memory, causal || !share || n == most);
        if (list) new (list + n) held(x);
      }
      return list;
    });
    map.prepare(exec);
    if (few)
      recurrent_steps<kernel_call>{*this}.run(exec);
    else if (share)
      for (index pair = 0; pair < pairs; ++pair) share_head(pair / heads, pair % heads, exec, slots, most);
    else
      exec.for_each(pairs, [&](index pair, int worker) {
        run_head(pair / heads, pair % heads, scratch(exec, worker), slots[worker]);
      });
  }
};

}  // namespace attn::detail
