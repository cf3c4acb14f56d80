// attn: products with projections along the sequence, x' = E x, for all heads in one pass over E.
//
// E [heads or 1, rank, length] is packed a stretch of tokens at a time, once for all heads that share it; then every
// head's rows of that stretch are multiplied by it and added to the result. An element of the result is summed over
// stretches and steps in the order of the tokens, cut at the same places whatever the threads.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/low_rank/detail/panel_product.hpp>

namespace attn::inline ATTN_ISA::detail {

inline constexpr index project_step = 256;  // tokens between two looks at the result: a panel fills the L1 cache
inline constexpr index projection_rows = 8 * tile_rows;                // of E, packed at a time
inline constexpr index project_tile = (project_step + 4) * tile_rows;  // pack_rows writes a little beyond its rows
inline constexpr index project_stretch = index(1) << 19;               // numbers of E packed at a time, about

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

/// How messages name a projection.
struct projection_words {
  const char *name, *heads, *rank, *columns;
};
inline constexpr projection_words words_of_e{"e", "heads of e", "rank of e", "projection columns = key length"};
inline constexpr projection_words words_of_f{"f", "heads of f", "rank of f", "projection columns of f = key length"};

template <class S>
void check_projection(const validator& check, const projection_words& words, const tensor_view<const S, 3>& e,
                      const attention_shape& shape, const tensor_view<S>& out) {
  check.readable(words.name, e);
  check.broadcasts(words.heads, shape.heads, e.extent(0));
  check.at_least(words.rank, 1, e.extent(1));
  check.equal(words.columns, shape.keys, e.extent(2));
  check.no_alias("out", out, words.name, e);
}

/// E x for batch items [first, first + items) of x and `heads` heads of each: those of x where they share one E, else
/// those of E.
template <class S>
struct sequence_projection {
  using T = compute_type<S>;
  static constexpr index wide = panel_width<T>;

  const tensor_view<const S, 3>& e;
  const tensor_view<const S>& x;
  index first, items, heads;
  T* packed = nullptr;   // [heads of E][step][tile of rows][project_tile]
  T* results = nullptr;  // [items][heads][rank][columns]

  sequence_projection(const tensor_view<const S, 3>& by, const tensor_view<const S>& of, index first_item, index count,
                      index result_heads)
      : e(by), x(of), first(first_item), items(count), heads(result_heads) {}

  index rank() const { return e.extent(1); }
  index columns() const { return round_up(x.extent(3), wide); }
  index head_size() const { return round_up(rank(), tile_rows) * columns(); }
  index step_size() const { return round_up(rank(), tile_rows) / tile_rows * project_tile; }
  /// Steps that are packed at a time.
  index steps() const {
    const index all = std::max<index>(1, (x.extent(2) + project_step - 1) / project_step);
    return std::clamp<index>(project_stretch / (e.extent(0) * step_size()), 1, all);
  }

  /// `same`: whose packed E is this one's too.
  void layout(arena& memory, const sequence_projection* same = nullptr) {
    packed = same ? same->packed : memory.allocate<T>(e.extent(0) * steps() * step_size());
    results = memory.allocate<T>(items * heads * head_size());
  }

  matrix_view<const T> result(index item, index head) const {
    return {results + (item * heads + head) * head_size(), rank(), x.extent(3), columns(), 1};
  }

  /// Packs rows [r0, r0 + projection_rows) of one head of E for the tokens of one step.
  void pack(index head, index step, index r0, index begin, index end) const {
    T* const to = packed + (head * steps() + step) * step_size();
    for (index r = r0; r < std::min(r0 + projection_rows, rank()); r += tile_rows) {
      const auto row = [&](index i) { return &e(head, r + i, begin); };
      pack_rows<T>(row, std::min<index>(tile_rows, rank() - r), end - begin, e.stride(2), T(1),
                   to + r / tile_rows * project_tile);
    }
  }

  /// Adds what the tokens [begin, end) of one step give to rows [r0, r1) of a result; `panels` has room for a step.
  void accumulate(index item, index head, index step, index r0, index r1, index begin, index end, T* panels) const {
    const matrix_view<const S> from = head_of(x, first + item, head * x.extent(1) / heads);
    const auto row = [&](index i) { return from.row(begin + i); };
    pack_panels<T>(row, 0, end - begin, from.cols, from.col_stride, panels, project_step);
    const T* const left = packed + ((e.extent(0) == 1 ? 0 : head) * steps() + step) * step_size();
    T* const to = results + (item * heads + head) * head_size() + r0 * columns();
    panel_product<T>([&](index r) { return packed_rows<T>{left + (r0 + r) / tile_rows * project_tile}; }, r1 - r0,
                     panels, project_step, from.cols, end - begin,
                     [&](index r, index col, const auto& sum) {
                       T* const c = to + r * columns() + col;
                       store<T>(c, add(load<T>(c), sum));
                     });
  }
};

/// Carries the projections out, side by side; `shared` tells that they are one E.
template <class S>
void project(const std::array<sequence_projection<S>*, 2>& sides, bool shared, const sequence_lengths& lengths,
             execution& exec) {
  using T = compute_type<S>;
  const sequence_projection<S>& keys = *sides[0];
  const index first = keys.first, items = keys.items,
              row_groups = (keys.rank() + projection_rows - 1) / projection_rows;
  index longest = 0;
  for (index n = 0; n < items; ++n) longest = std::max(longest, lengths.keys(first + n));
  for (const auto* side : sides) std::fill_n(side->results, items * side->heads * side->head_size(), T(0));

  // Heads are cut into groups of rows only where they are too few to keep the threads busy.
  const index heads = items * (sides[0]->heads + sides[1]->heads);
  const index parts = exec.threads() > 1 && heads < 4 * exec.threads() ? row_groups : 1;
  const index steps = std::min(sides[0]->steps(), sides[1]->steps()), stretch = steps * project_step;
  for (index begin = 0; begin < longest; begin += stretch) {
    const auto step_end = [&](index step, index length) { return std::min(begin + (step + 1) * project_step, length); };
    for (const auto* side : sides) {
      if (shared && side != sides[0]) break;
      exec.for_each(side->e.extent(0) * steps * row_groups, [&](index task, int) {
        const index head = task / (steps * row_groups), step = task / row_groups % steps;
        const index from = begin + step * project_step, to = step_end(step, longest);
        if (from < to) side->pack(head, step, task % row_groups * projection_rows, from, to);
      });
    }
    exec.for_each(heads * parts, [&](index task, int worker) {
      index n = task / parts;
      const bool second = n >= items * sides[0]->heads;
      if (second) n -= items * sides[0]->heads;
      const sequence_projection<S>& side = *sides[second];
      const index item = n / side.heads, head = n % side.heads, part = task % parts;
      const index r0 = parts == 1 ? 0 : part * projection_rows;
      const index r1 = parts == 1 ? side.rank() : std::min(r0 + projection_rows, side.rank());
      T* const panels =
          exec.scratch(worker, [&](arena& memory) { return memory.allocate<T>(project_step * side.columns()); });
      for (index step = 0; step < steps; ++step) {
        const index from = begin + step * project_step, to = step_end(step, lengths.keys(first + item));
        if (from < to) side.accumulate(item, head, step, r0, r1, from, to, panels);
      }
    });
  }
}

}  // namespace attn::detail
