// attn: products with projections along the sequence, x' = E x, for all heads in one pass over E.
//
// E [heads or 1, rank, length] is packed for several steps of project_step tokens at a time, once for all heads that
// share it; then every head's rows of these tokens are multiplied by it and added to the result. An element of the
// result is summed over steps in the order of the tokens, and of long sequences over pieces of 32 steps, so that
// roundings do not add up; where steps and pieces begin does not depend on threads.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/prefetch.hpp>
#include <attn/low_rank/detail/panel_product.hpp>
#include <attn/low_rank/detail/attend_rows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr idx_t project_step = 256;                // tokens summed in registers: a panel fills the L1 cache
inline constexpr idx_t project_piece = 32 * project_step;  // tokens of a piece
inline constexpr idx_t projection_rows = 8 * tile_rows;   // of E, packed by one task
template <class P>  // operands
inline constexpr idx_t project_tile = operands<P>(project_step) * tile_rows;
inline constexpr idx_t project_numbers = idx_t(1) << 19;  // of E, packed at a time, about

/// A projection as the caller gives it: [heads or 1, rank, length], or a matrix [rank, length].
template <class S, class X>
tensor_view<const S, 3> projection_view(const X& x) {
  static_assert(std::same_as<element_of<const X&>, S>, "attn: projections must have the element type of q");
  if constexpr (eigen_memory<const X&>) {
    return tensor_view<const S, 3>(x);
  } else {
    constexpr bool fits = decltype(as_view(x))::rank == 3;
    static_assert(fits, "attn: projections must be [heads or 1, rank, length], or a matrix [rank, length]");
    if constexpr (fits) return as_view(x);
  }
}

/// Only the first number of each pair: for a last pair that has one token only.
template <class P>
struct first_of_pairs {
  packed_rows<P> a;
  idx_t first;  // the pair at k = 0
  ATTN_INLINE P at(int m, idx_t k) const { return {a.at(m, first + k).bits & 0xffff}; }
};

/// to += E x for `rows` rows of E, packed in tiles, and `tokens` rows of x, packed in panels of project_step. Meanwhile
/// `next` is fetched.
template <class P>
[[gnu::noinline]] void add_projected(const P* tiles, idx_t rows, const P* panels, idx_t tokens,
                                     const matrix_view<sum_type<P>>& to, line_prefetcher next) {
  using T = sum_type<P>;
  constexpr idx_t capacity = operands<P>(project_step);
  const idx_t depth = operands<P>(tokens / numbers_of<P> * numbers_of<P>);
  const auto tile = [&](idx_t r) { return packed_rows<P>{tiles + r / tile_rows * project_tile<P>}; };
  const auto fetching_tile = [&](idx_t r) {
    if constexpr (rows_for_matrix_unit<P>)
      return tile(r);
    else
      return prefetching_rows<P>{tile(r), {next.next(depth), next.next(depth)}};
  };
  const auto add_to = [&](idx_t r, idx_t col, const auto& sum) {
    T* const c = to.row(r) + col;
    store<T>(c, add(load<T>(c), sum));
  };
  if (depth > 0) panel_product<P>(fetching_tile, rows, panels, capacity, to.cols, depth, add_to);
  if constexpr (numbers_of<P> > 1)
    if (tokens % 2 != 0)
      panel_product<P>([&](idx_t r) { return first_of_pairs<P>{tile(r), depth}; }, rows,
                       panels + depth * panel_width<P>, capacity, to.cols, operands<P>(1), add_to);
}

/// One projection E and what it is applied to, x.
template <class S, class P = product_type<S>>
struct sequence_projection {
  using T = compute_type<S>;

  const tensor_view<const S, 3>& e;
  const tensor_view<const S>& x;
  idx_t heads = 0;      // of the result: those of x where they share one E, else those of E
  key_flags seen{};
  P* packed = nullptr;  // [heads of E][step][tile of rows][project_tile]

  idx_t rank() const { return e.extent(1); }
  idx_t columns() const { return round_up(x.extent(3), panel_width<T>); }
  /// Numbers of one head's result, in whole tiles of rows.
  idx_t result_size() const { return round_up(rank(), tile_rows) * columns(); }
  /// Numbers of the results of all heads, and the sums over pieces of as many where there are several.
  idx_t sums_size() const { return heads * result_size(); }
  idx_t memory_size() const { return sums_size() * (x.extent(2) > project_piece ? 2 : 1); }
  idx_t step_size() const { return round_up(rank(), tile_rows) / tile_rows * project_tile<P>; }
  /// Number of steps that are packed at a time.
  idx_t steps() const {
    const idx_t all = std::max<idx_t>(1, ceil_div(x.extent(2), project_step));
    return std::clamp<idx_t>(project_numbers / (e.extent(0) * step_size()), 1, all);
  }
  idx_t packed_size() const { return e.extent(0) * steps() * step_size(); }

  matrix_view<T> result(T* results, idx_t head) const {
    return {results + head * result_size(), rank(), x.extent(3), columns(), 1};
  }

  /// Packs rows [r0, r0 + projection_rows) of one head of E for the tokens [begin, end) of one step.
  void pack(idx_t head, idx_t step, idx_t r0, idx_t begin, idx_t end) const {
    P* const to = packed + (head * steps() + step) * step_size();
    for (idx_t r = r0; r < (std::min)(r0 + projection_rows, rank()); r += tile_rows) {
      const auto row = [&](idx_t i) { return &e(head, r + i, begin); };
      pack_rows<P>(row, std::min<idx_t>(tile_rows, rank() - r), end - begin, e.stride(2), T(1),
                   to + r / tile_rows * project_tile<P>);
    }
  }

  /// Adds rows [r0, r1) of a head's result, which become 0, to the sum over its pieces.
  void end_piece(idx_t head, idx_t r0, idx_t r1, T* results) const {
    T* const from = results + head * result_size();
    for (idx_t n = r0 * columns(); n < r1 * columns(); ++n) from[sums_size() + n] += from[n], from[n] = T(0);
  }

  /// Adds the tokens [begin, end) of one step to rows [r0, r1) of a head's result; `panels` has room for a step. Tokens
  /// [end, next_end) come next.
  void accumulate(idx_t item, idx_t head, idx_t step, idx_t r0, idx_t r1, idx_t begin, idx_t end, idx_t next_end,
                  P* panels, T* results) const {
    const matrix_view<const S> from = head_of(x, item, head * x.extent(1) / heads);
    pack_panels<P>([&](idx_t i) { return from.row(begin + i); }, 0, end - begin, from.cols, from.col_stride, panels,
                   project_step);
    seen.range(item, begin, end).clear_panels(panels, project_step, end - begin, from.cols);
    const P* const tiles = packed + ((e.extent(0) == 1 ? 0 : head) * steps() + step) * step_size();
    matrix_view<T> to = result(results, head);
    to.data = to.row(r0);
    line_prefetcher next;
    next.add(from, end, next_end);
    add_projected<P>(tiles + r0 / tile_rows * project_tile<P>, r1 - r0, panels, end - begin, to, next);
  }
};

/// Projects keys and values of a wave of batch items, side by side; `shared`: they have one E. Results are `keys` and
/// `values` of an item's scratch memory: [heads][result_size], of memory_size numbers.
template <class S, class P, class Item>
void project(const sequence_projection<S, P>& keys, const sequence_projection<S, P>& values, bool shared,
             const sequence_lengths& lengths, const wave<Item>& w) {
  using T = compute_type<S>;
  const idx_t row_groups = ceil_div(keys.rank(), projection_rows), steps = (std::min)(keys.steps(), values.steps());
  idx_t longest = 0;
  for (idx_t n = 0; n < w.count; ++n) {
    longest = (std::max)(longest, lengths.keys(w.first + n));
    std::fill_n(w.scratch[n].keys, keys.memory_size(), T(0));
    std::fill_n(w.scratch[n].values, values.memory_size(), T(0));
  }
  // Heads are divided into ranges of rows only where they are too few to keep the threads busy.
  const idx_t heads = w.count * (keys.heads + values.heads), threads = w.exec.active_threads();
  const idx_t parts = threads > 1 && heads < 4 * threads ? row_groups : 1;
  for (idx_t begin = 0; begin < longest; begin += steps * project_step) {
    const auto step_end = [&](idx_t step, idx_t length) {
      return (std::min)(begin + (step + 1) * project_step, length);
    };
    const auto pack = [&](const sequence_projection<S, P>& side) {
      w.exec.for_each(side.e.extent(0) * steps * row_groups, [&](idx_t task, int) {
        const idx_t head = task / (steps * row_groups), step = task / row_groups % steps;
        const idx_t from = begin + step * project_step, to = step_end(step, longest);
        if (from < to) side.pack(head, step, task % row_groups * projection_rows, from, to);
      });
    };
    pack(keys);
    if (!shared) pack(values);
    w.exec.for_each(heads * parts, [&](idx_t task, int worker) {
      const idx_t n = task / parts % w.count, h = task / parts / w.count, item = w.first + n;
      const bool second = h >= keys.heads;
      const sequence_projection<S, P>& side = second ? values : keys;
      T* const results = second ? w.scratch[n].values : w.scratch[n].keys;
      const idx_t r0 = task % parts * projection_rows;
      const idx_t r1 = parts == 1 ? side.rank() : (std::min)(r0 + projection_rows, side.rank());
      P* const panels = w.exec.scratch(
          worker, [&](arena& memory) { return memory.allocate<P>(operands<P>(project_step) * side.columns()); });
      for (idx_t step = 0; step < steps; ++step) {
        const idx_t from = begin + step * project_step, to = step_end(step, lengths.keys(item));
        const idx_t next_to = step + 1 < steps ? step_end(step + 1, lengths.keys(item)) : to;
        if (from < to)
          side.accumulate(item, second ? h - keys.heads : h, step, r0, r1, from, to, next_to, panels, results);
        if (from < to && to < lengths.keys(item) && to % project_piece == 0)
          side.end_piece(second ? h - keys.heads : h, r0, r1, results);
      }
    });
  }
  for (idx_t n = 0; n < w.count && longest > project_piece; ++n)
    for (const auto& [side, results] : {std::pair{&keys, w.scratch[n].keys}, std::pair{&values, w.scratch[n].values}})
      for (idx_t i = 0; i < side->sums_size(); ++i) results[i] += results[side->sums_size() + i];
}

}}}  // namespace attn::ATTN_ISA::detail
