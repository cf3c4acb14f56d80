// attn: the keys of a chunk of a recurrence: rows, scores and decays, and how they change a state. What the letters
// mean: recurrence.hpp.
#pragma once

#include <attn/kernel/detail/chunk_decay.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Features of rows [begin, begin + count): those of the map; by the rules that read the state the rows themselves, of
/// unit norm if so asked, norm[t], where given, then being the factor of row t.
template <rule R, class T>
void load_rows(const kernel_call<T>& call, const stored_matrix<T>& from, idx_t begin, idx_t count, const panels<T>& to,
               T* scratch, T* norm = nullptr) {
  if constexpr (R == rule::add) {
    call.map->rows(from, begin, count, to, scratch);
  } else {
    from.access->pack_panels(from, begin, count, to.data);
    const T eps = call.recurrence.unit_norm_eps;
    for (idx_t t = 0; eps >= T(0) && t < count; ++t) {
      const T factor = T(1) / std::sqrt(dot_rows(to, to, t, from.cols) + eps);
      if (norm) norm[t] = factor;
      for (idx_t col = 0; col < from.cols; col += width<T>)
        store<T>(to.at(t, col), mul(load<T>(to.at(t, col)), broadcast<T>(factor)));
    }
  }
}

/// Allocates matrices of one shape.
template <class T>
[[gnu::noinline]] void allocate_panels(arena& memory, idx_t rows, idx_t cols, std::initializer_list<panels<T>*> all) {
  for (panels<T>* x : all) *x = panels<T>::layout(memory, rows, cols);
}
template <class T>
[[gnu::noinline]] void allocate_numbers(arena& memory, idx_t count, std::initializer_list<T**> all) {
  for (T** x : all) *x = memory.allocate<T>(count);
}

/// Row t becomes 0, where there is a matrix.
template <class T>
void clear_row(const panels<T>& x, idx_t t, idx_t cols) {
  for (idx_t col = 0; x.data && col < cols; col += panels<T>::wide) std::fill_n(x.at(t, col), panels<T>::wide, T(0));
}

/// The keys of a chunk, as the forward and the backward pass read them.
template <rule R, class T>
struct recurrence_keys {
  panels<T> k, k_t, k_end, v;        // [token][feature]; transposed; [token][column]
  panels<T> start, start_t, a, a_t;  // of the rules that read the state
  panels<T> reads, reads_t;          // of the rule of low rank: a, transposed without that of the first token
  panels<T> writes, writes_t, writes_end, w, a_k, a_k_t;  // b; as k, v and A with k for b
  panels<T> added;                                        // k_end^T v, [feature][column]
  chunk_decay<T> decay;
  score_scratch<T> scores;
  T *beta = nullptr, *map;

  [[gnu::noinline]] static recurrence_keys layout(const chunk_memory& memory, const kernel_call<T>& call, idx_t columns,
                                                  idx_t map_size) {
    constexpr bool low_rank = R == rule::low_rank;
    arena &own = memory.own, &pass = memory.of(kept_for::pass), &back = memory.of(kept_for::pass_back);
    arena& both = memory.of(kept_for::pass | kept_for::pass_back);
    recurrence_keys s;
    const idx_t chunk = kernel_chunk, m = call.features();
    const decay_kind kind = call.decays();
    const bool decayed = kind != decay_kind::none, own_start = decayed || low_rank;
    allocate_panels(own_start ? back : both, chunk, m, {&s.k});
    allocate_panels(!own_start ? both : decayed ? own : back, m, chunk, {&s.k_t});
    allocate_panels(low_rank ? both : pass, chunk, columns, {&s.v});
    s.start = s.k_end = s.k, s.start_t = s.k_t;
    if (decayed) allocate_panels(low_rank ? back : pass, chunk, m, {&s.k_end});
    if constexpr (reads_state<R>) {
      if (own_start) {
        allocate_panels(back, chunk, m, {&s.start});
        allocate_panels(pass, m, chunk, {&s.start_t});
      }
      allocate_panels(back, chunk, chunk, {&s.a});
      allocate_panels(pass, chunk, chunk, {&s.a_t});
      s.beta = both.allocate<T>(chunk);
    }
    if constexpr (low_rank) {
      allocate_panels(back, chunk + 1, m, {&s.reads});  // rows are also read beginning with the second
      s.reads.capacity = chunk;
      allocate_panels(own, m, chunk, {&s.reads_t});
      allocate_panels(decayed ? own : back, m, chunk, {&s.writes_t});
      allocate_panels(decayed ? back : both, chunk, m, {&s.writes});
      s.writes_end = s.writes;
      if (decayed) allocate_panels(pass, chunk, m, {&s.writes_end});
      allocate_panels(pass, chunk, columns, {&s.w});
      allocate_panels(back, chunk, chunk, {&s.a_k});
      allocate_panels(own, chunk, chunk, {&s.a_k_t});
      allocate_panels(pass, m, columns, {&s.added});
    }
    s.decay = chunk_decay<T>::layout(memory, m, kind);
    s.scores = score_scratch<T>::layout(own, m, kind);
    s.map = own.allocate<T>(map_size);
    return s;
  }

  /// Everything that does not need the state, of head h of the states; k_t only for the rules that read it. There may
  /// be no v, start_t or a_t.
  [[gnu::noinline]] void load(const kernel_call<T>& call, idx_t b, idx_t h, idx_t begin, idx_t count,
                              T* norm = nullptr) const {
    load_rows<R>(call, call.k.head(b, call.kv_head(h)), begin, count, k, map, norm);
    const stored_matrix<T> values = call.v.head(b, call.value_head(h));
    if (v.data) values.access->pack_panels(values, begin, count, v.data);
    if constexpr (R == rule::low_rank) {
      load_rows<R>(call, call.recurrence.a.head(b, h), begin, count, reads, map);
      load_rows<R>(call, call.recurrence.b.head(b, h), begin, count, writes, map);
    }
    for (idx_t t = 0; t < count && call.key_mask; ++t)
      if (call.hides(b, begin + t)) hide(t, values.cols, norm);
    if (decay.kind != decay_kind::none) {
      if (const tensor_view<const T>& g = call.recurrence.log_decay) {
        decay.load(g, b, call.parameter_head(g.extent(1), h), begin, count);
      } else {
        for (idx_t t = 0; t < count; ++t) decay.gates[t] = call.gate_at(b, h, begin + t);
        decay.multiply_gates(count);
      }
      decay.to_end(k, count, k_end);
    }
    if constexpr (R == rule::correct) {
      const auto& given = call.recurrence.beta;
      for (idx_t t = 0; t < count; ++t) beta[t] = given ? given(b, h, begin + t) : T(1);
      transpose_keys(count);
      if (decay.kind != decay_kind::none) {
        decay.from_start(k, count, start);
        if (start_t.data) transpose_panels(start, count, decay.dim, start_t);
      }
      chunk_scores(decay, scores, k, k_t, k, k_t, count, triangle::before, a);
      if (a_t.data) transpose_panels(a, count, count, a_t, true);
    } else if constexpr (R == rule::low_rank) {
      load_reads(count);
    }
  }
  /// A hidden key is 0.
  void hide(idx_t t, idx_t columns, T* norm) const {
    for (const panels<T>* x : {&k, &reads, &writes}) clear_row(*x, t, decay.dim);
    clear_row(v, t, columns);
    if (norm) norm[t] = T(0);
  }
  /// Of the rule of low rank, whose rows a end their decays one token earlier.
  void load_reads(idx_t count) const {
    const idx_t m = decay.dim, later = count - 1;
    const panels<T> from_second = reads.from_row(1);
    for (idx_t col = 0; col < m; col += width<T>) store<T>(start.at(0, col), detail::load<T>(reads.at(0, col)));
    decay.from_start(from_second, later, start.from_row(1));
    if (start_t.data) transpose_panels(start, count, m, start_t);
    transpose_keys(count);
    if (decay.kind != decay_kind::channel) {
      transpose_panels(writes, count, m, writes_t);
      transpose_panels(from_second, later, m, reads_t);
    }
    if (decay.kind != decay_kind::none) decay.to_end(writes, count, writes_end);
    chunk_scores(decay, scores, from_second, reads_t, k, k_t, later, triangle::up_to, a_k.from_row(1));
    chunk_scores(decay, scores, from_second, reads_t, writes, writes_t, later, triangle::up_to, a.from_row(1));
    if (!a_t.data) return;
    transpose_panels(a_k, count, count, a_k_t, true);
    transpose_panels(a, count, count, a_t, true);
  }
  /// By the rule of low rank: what W, in `w`, and the state after the chunk take from the values alone.
  [[gnu::noinline]] void take_values(idx_t count, idx_t cols) const {
    if constexpr (R == rule::low_rank) {
      triangle_product<triangle::before>(a_k_t, count, v, cols, write_to(w));
      product(k_end, decay.dim, v, cols, count, write_to(added));
    }
  }
  /// By the rule of low rank: W in the columns of `to`, which has what it takes from the values, by the state before
  /// the chunk.
  [[gnu::noinline]] void read_state(idx_t count, const panels<T>& state, bool empty, const panels<T>& to,
                                    idx_t cols) const {
    if (!empty) product(start_t, count, state, cols, decay.dim, add_to(to));
    triangle_product<triangle::before>(a_t, count, to, cols, add_to(to));
  }
  /// The state after the chunk, in `after`, by that before it and U or W; by the rule of low rank with the columns from
  /// `col` on of what the values add.
  void pass(idx_t count, const panels<T>& written, idx_t col, idx_t cols, const panels<T>& before,
                              bool empty, const panels<T>& after, row_prefetcher<>& prefetch) const {
    product(R == rule::low_rank ? writes_end : k_end, decay.dim, written, cols, count,
            [&](idx_t row, idx_t c, const packet<T>& sum) {
              fetch_rows<T>(prefetch, row, c);
              packet<T> x = sum;
              if (!empty) x = fma(detail::load<T>(before.at(row, c)), broadcast<T>(decay.whole(row, count)), sum);
              if constexpr (R == rule::low_rank) x = add(x, detail::load<T>(added.at(row, col + c)));
              store<T>(after.at(row, c), x);
            });
  }
  /// k_t, for scores without decays per channel.
  void transpose_keys(idx_t count) const {
    if (decay.kind != decay_kind::channel) transpose_panels(k, count, decay.dim, k_t);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
