// attn: the decays of a chunk of tokens, and the scores of its tokens:
//
//   P_ij = sum_d q_id k_jd e^(gamma_id - gamma_jd)          j <= i, or k for q and j < i
//
// The decay between two tokens is the product of those in between: nothing is divided, so that a decay may be 0. Decays
// per token are factors of the scores. With decays per channel, blocks of 16 rows are multiplied with the tokens before
// them as a matrix product: q and k of the rows times the decays since the block began, k of the columns times those
// until then, both factors at most 1. Scores within a block are computed one by one.
#pragma once

#include <attn/core/detail/log_decays.hpp>
#include <attn/kernel/detail/kernel_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr idx_t score_block = 16;

/// What threads that share a head keep of a chunk once it is loaded: what is read where the state passes, or where the
/// gradient of the state does and after that. Everything else is in the scratch memory of one worker.
struct kept_for {
  static constexpr int nothing = 0, pass = 1, pass_back = 2;
};
struct chunk_memory {
  arena &own, &kept;
  int keeps;
  /// Memory of what is kept for the stages `used`.
  arena& of(int used) const { return keeps & used ? kept : own; }
};

/// The decays of a chunk: of each token, from the start of the chunk to it (its own included), and from it to the end
/// (its own excluded).
template <class T>
struct chunk_decay {
  static constexpr idx_t wide = panels<T>::wide;

  decay_kind kind = decay_kind::none;
  idx_t dim = 0;
  T *gates = nullptr, *since_start = nullptr, *gaps = nullptr;  // per token; [i][j]: of the tokens after j up to i
  panels<T> gate, start_rows;                                   // per channel, [token][dim]

  static chunk_decay layout(const chunk_memory& memory, idx_t dim, decay_kind kind) {
    chunk_decay s;
    s.kind = kind, s.dim = dim;
    arena &both = memory.of(kept_for::pass | kept_for::pass_back), &back = memory.of(kept_for::pass_back);
    if (kind == decay_kind::token) {
      s.gates = back.allocate<T>(kernel_chunk), s.since_start = both.allocate<T>(kernel_chunk);
      s.gaps = back.allocate<T>(kernel_chunk * kernel_chunk);
    } else if (kind == decay_kind::channel) {
      s.gate = panels<T>::layout(back, kernel_chunk, dim), s.start_rows = panels<T>::layout(both, kernel_chunk, dim);
    }
    return s;
  }

  void load(const tensor_view<const T>& log_decay, idx_t b, idx_t h, idx_t begin, idx_t count) const {
    const matrix_view<const T> x = head_of(log_decay, b, h);
    if (kind == decay_kind::token) {
      for (idx_t t = 0; t < kernel_chunk; ++t) gates[t] = t < count ? *x.row(begin + t) : T(0);
      for (idx_t t = 0; t < kernel_chunk; t += width<T>) store<T>(gates + t, exp<T>(detail::load<T>(gates + t)));
      multiply_gates(count);
      return;
    }
    for (idx_t t = 0; t < count; ++t) {
      const T* const row = x.row(begin + t);
      for (idx_t col = 0; col < dim; col += width<T>) {
        const packet<T> g = exp<T>(load_part<T>(row + col * x.col_stride, x.col_stride, dim - col));
        T* const start = start_rows.at(t, col);
        store<T>(gate.at(t, col), g);
        store<T>(start, t > 0 ? mul(detail::load<T>(start - wide), g) : g);
      }
    }
  }
  /// Decays per token, once `gates` are there.
  void multiply_gates(idx_t count) const { gate_factors(gates, count, false, gaps, since_start); }

  /// For the channels from col on.
  ATTN_INLINE packet<T> start(idx_t t, idx_t col) const {
    if (kind == decay_kind::none) return broadcast<T>(T(1));
    return kind == decay_kind::token ? broadcast<T>(since_start[t]) : detail::load<T>(start_rows.at(t, col));
  }
  /// Of the whole chunk, for one channel.
  ATTN_INLINE T whole(idx_t d, idx_t count) const {
    if (kind == decay_kind::none) return T(1);
    return kind == decay_kind::token ? since_start[count - 1] : *start_rows.at(count - 1, d);
  }
  ATTN_INLINE packet<T> between(idx_t i, idx_t j) const { return detail::load<T>(gaps + i * kernel_chunk + j); }

  void from_start(const panels<T>& x, idx_t count, const panels<T>& to) const {
    each_packet(
        count, dim, [&](idx_t t, idx_t col, const auto& row) { return mul(row, start(t, col)); }, to, x);
  }
  void to_end(const panels<T>& x, idx_t count, const panels<T>& to) const {
    for (idx_t col = 0; col < dim; col += width<T>) {
      packet<T> factor = broadcast<T>(T(1));
      const T *const rows = x.at(0, col), *const gates_from = gate.data ? gate.at(0, col) : nullptr;
      T* const out = to.at(0, col);
      for (idx_t t = count - 1; t >= 0; --t) {
        if (kind == decay_kind::token) factor = broadcast<T>(gaps[(count - 1) * kernel_chunk + t]);
        store<T>(out + t * wide, mul(detail::load<T>(rows + t * wide), factor));
        if (kind == decay_kind::channel) factor = mul(factor, detail::load<T>(gates_from + t * wide));
      }
    }
  }
};

/// Prefetches the next rows as a product reaches a row and column: those of one chunk while it fills two panels.
template <class T>
void fetch_rows(row_prefetcher<>& prefetch, idx_t row, idx_t col) {
  if (row % 8 == 0 && col % panel_width<T> == 0) fetch_some(prefetch);
}

/// Scratch memory for scores with decays per channel.
template <class T>
struct score_scratch {
  panels<T> columns, columns_t, d_columns;     // the tokens before a block
  panels<T> block_rows[2], rows_t, factors;   // a block
  T* row = nullptr;

  static score_scratch layout(arena& memory, idx_t dim, decay_kind kind) {
    score_scratch s;
    if (kind != decay_kind::channel) return s;
    for (panels<T>* each : {&s.columns, &s.d_columns}) *each = panels<T>::layout(memory, kernel_chunk, dim);
    s.columns_t = panels<T>::layout(memory, dim, kernel_chunk);
    for (panels<T>* each : {&s.block_rows[0], &s.block_rows[1], &s.factors})
      *each = panels<T>::layout(memory, score_block, dim);
    s.rows_t = panels<T>::layout(memory, dim, score_block);
    s.row = memory.allocate<T>(round_up(dim, panel_width<T>));
    return s;
  }

  /// `columns` are the tokens [begin, end), times the decays until `end`. Returns the product of the decays of all of
  /// them.
  packet<T> times_later(const chunk_decay<T>& decay, const panels<T>& k, idx_t begin, idx_t end, idx_t col) const {
    constexpr idx_t wide = panels<T>::wide;
    packet<T> factor = broadcast<T>(T(1));
    const T *const from = k.at(0, col), *const gates = decay.gate.at(0, col);
    T* const to = columns.at(0, col);
    for (idx_t j = end - 1; j >= begin; --j) {
      store<T>(to + j * wide, mul(factor, load<T>(from + j * wide)));
      factor = mul(factor, load<T>(gates + j * wide));
    }
    return factor;
  }
  /// Computes the tokens before a block times the decays until it begins.
  void load_columns(const chunk_decay<T>& decay, const panels<T>& k, idx_t block) const {
    for (idx_t col = 0; col < decay.dim; col += width<T>) times_later(decay, k, 0, block, col);
  }
  /// Appends the tokens of `block` to columns_t, which has those before it; all are then multiplied by the decays until
  /// it ends.
  void add_columns(const chunk_decay<T>& decay, const panels<T>& k, idx_t block) const {
    for (idx_t col = 0; col < decay.dim; col += width<T>)
      store<T>(row + col, times_later(decay, k, block, block + score_block, col));
    each_packet(
        decay.dim, block, [&](idx_t d, idx_t, const auto& x) { return mul(x, broadcast<T>(row[d])); }, columns_t,
        columns_t);
    transpose_panels(columns.from_row(block), score_block, decay.dim, columns_t.from_col(block));
  }
  /// The decays since the block began, which are factors of its rows.
  void load_factors(const chunk_decay<T>& decay, idx_t block, idx_t count) const {
    for (idx_t col = 0; col < decay.dim; col += width<T>) {
      packet<T> factor = broadcast<T>(T(1));
      const T* const gates = decay.gate.at(block, col);
      T* const to = factors.at(0, col);
      for (idx_t r = 0; r < count * panels<T>::wide; r += panels<T>::wide)
        store<T>(to + r, factor = mul(factor, load<T>(gates + r)));
    }
  }
  void load_rows(const panels<T>& x, idx_t block, idx_t count, idx_t dim, const panels<T>& to) const {
    each_packet(
        count, dim, [](idx_t, idx_t, const auto& row_of_x, const auto& factor) { return mul(row_of_x, factor); }, to,
        x.from_row(block), factors);
  }
  /// Scores of column j and `Rows` rows from i on, the first of them if so asked. `row` is k_j times the decays up to
  /// the row before, and then those up to the last one of these.
  template <int Rows>
  void scores_of(const chunk_decay<T>& decay, const panels<T>& x, idx_t i, idx_t j, bool first,
                const panels<T>& to) const {
    packet<T> sums[array_size<Rows>];
    for (packet<T>& sum : sums) sum = zero<T>();
    for (idx_t d = 0; d < decay.dim; d += width<T>) {
      packet<T> key = load<T>(row + d);
      const T *const rows = x.at(i, d), *const gates = decay.gate.at(i, d);
      unroll<Rows>([&](auto r) {
        if (r > 0 || i > j) key = mul(key, load<T>(gates + r * panels<T>::wide));
        sums[r] = fma(key, load<T>(rows + r * panels<T>::wide), sums[r]);
      });
      store<T>(row + d, key);
    }
    T* const at = to.at(i, j);
    for (int r = first ? 0 : 1; r < Rows; ++r) at[r * panels<T>::wide] = sum_lanes(sums[r]);
  }
};

/// done(i, j, sum) for the j up to each token i, and some after it: sums over a[.][i] b[.][j].
template <class T, class Done>
void score_product(const panels<T>& a, const panels<T>& b, idx_t count, idx_t depth, Done&& done) {
  constexpr idx_t wide = panels<T>::wide;
  for (idx_t first = 0; first < count; first += wide)
    product(a.from_col(first), (std::min)(wide, count - first), b, (std::min)(first + wide, count),
            depth, [&](idx_t row, idx_t col, const packet<T>& sum) { done(first + row, col, sum); });
}

/// Scores of x = q (up to each token) or k (before it): `to` holds them as [i][j]; its other entries are undefined.
template <class T>
void chunk_scores(const chunk_decay<T>& decay, const score_scratch<T>& s, const panels<T>& x,
                   const panels<T>& x_t, const panels<T>& k, const panels<T>& k_t, idx_t count, triangle form,
                   const panels<T>& to) {
  if (decay.kind != decay_kind::channel) {
    const bool weighed = decay.kind == decay_kind::token;
    score_product(x_t, k_t, count, decay.dim, [&](idx_t i, idx_t j, const packet<T>& sum) {
      store<T>(to.at(i, j), weighed ? mul(sum, decay.between(i, j)) : sum);
    });
    return;
  }
  const idx_t own = form == triangle::up_to ? 0 : 1;
  for (idx_t block = 0; block < count; block += score_block) {
    const idx_t rows = (std::min)(score_block, count - block), end = block + rows;
    if (block > 0) {
      s.add_columns(decay, k, block - score_block);
      s.load_factors(decay, block, rows);
      s.load_rows(x, block, rows, decay.dim, s.block_rows[0]);
      transpose_panels(s.block_rows[0], rows, decay.dim, s.rows_t);
      product(s.rows_t, rows, s.columns_t, block, decay.dim, write_to(to.from_row(block)));
    }
    for (idx_t j = block; j < end; ++j) {
      for (idx_t d = 0; d < decay.dim; d += width<T>) store<T>(s.row + d, load<T>(k.at(j, d)));
      idx_t i = j;
      for (; i + 4 <= end; i += 4) s.template scores_of<4>(decay, x, i, j, i >= j + own, to);
      for (; i < end; ++i) s.template scores_of<1>(decay, x, i, j, i >= j + own, to);
    }
  }
}

}}}  // namespace attn::ATTN_ISA::detail
