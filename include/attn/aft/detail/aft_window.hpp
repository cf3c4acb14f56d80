// attn: attention-free mixing whose biases are 0 beyond a window, for tokens in one line or in the lines of an image.
//
// The rows of a block all see the keys beyond the reach of every window of the block in the same way, without a bias:
// these come as sums (key_sums). The rest, the windows and what lies between them, is a stretch of each line near the
// block and goes through the product of aft_block.hpp. Sums of what lies before and of what lies after only ever add:
// taking the window out of a total would lose every digit where the window holds most of it.
#pragma once

#include <attn/aft/detail/aft_call.hpp>
#include <attn/aft/detail/sums_array.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Tokens in `lines` lines of `columns`, row by row; a window reaches `up` lines and `side` columns to each side.
struct aft_window_grid {
  index lines = 1, columns = 0, up = 0, side = 0;
  bool causal = false;  // of one line

  index blocks() const { return (columns + block_rows - 1) / block_rows; }  // a line
  /// Columns of line r, where the first n tokens are real.
  index columns_of(index r, index n) const { return std::clamp(n - r * columns, index(0), columns); }
  index first_line(index r) const { return std::max<index>(r - up, 0); }
  index end_line(index r) const { return std::min(r + up + 1, lines); }
  /// Columns [from, to) of a line of `all` columns that block i may have a bias for; before them and after them it has
  /// none. A causal block ends there.
  index from(index i, index all) const { return std::clamp(i * block_rows - side, index(0), all); }
  index to(index i, index all) const {
    return causal ? std::min(i * block_rows, all) : std::clamp((i + 1) * block_rows + side, index(0), all);
  }
};

/// How the biases of a window lie in memory.
enum class aft_window_layout {
  square,  // row t, column t'
  band,    // row t, column t' - t + side
  kernel   // row: lines from t to t', column: columns from t to t', counted from the farthest
};

/// What the rows of block i of line r see.
template <class S>
struct aft_window_bias {
  using T = compute_type<S>;

  matrix_view<const S> w;
  aft_window_layout layout;
  aft_window_grid grid;
  index keys, r, i;

  bool has_diagonal() const { return grid.causal; }
  index diagonal() const { return i * block_rows; }

  template <class F>
  void stretches(F&& f) const {
    for (index line = grid.first_line(r); line < grid.end_line(r); ++line) {
      const index all = grid.columns_of(line, keys), from = grid.from(i, all), to = grid.to(i, all);
      if (from < to) f(line * grid.columns + from, line * grid.columns + to);
    }
  }
  index count_keys() const {
    index count = 0;
    stretches([&](index begin, index end) { count += end - begin; });
    return count;
  }

  void fill(index row, index begin, index count, T* to) const {
    const index column = i * block_rows + row, line = begin / grid.columns, first = begin - line * grid.columns;
    const index low = std::clamp(column - grid.side - first, index(0), count);
    const index high = std::clamp(column + grid.side + 1 - first, low, count);
    std::fill(to, to + low, T(0));
    std::fill(to + high, to + count, T(0));
    if (low == high) return;
    const index t = first + low;
    const S* from = w.data;
    switch (layout) {
      case aft_window_layout::square:
        from = w.row(column) + t * w.col_stride;
        break;
      case aft_window_layout::band:
        from = w.row(column) + (t - column + grid.side) * w.col_stride;
        break;
      case aft_window_layout::kernel:
        from = w.row(line - r + grid.up) + (t - column + grid.side) * w.col_stride;
        break;
    }
    copy_biases(from, w.col_stride, high - low, to + low);
  }
};

/// One call whose biases are 0 beyond a window; `matrix(h)` gives the biases of head h.
template <class S, class Matrix>
struct aft_window_call {
  using T = compute_type<S>;

  const aft_call<S>& call;
  aft_window_grid grid;
  aft_window_layout layout;
  bool shared;
  Matrix matrix;

  index place(index head, index r, index i) const { return (head * grid.lines + r) * grid.blocks() + i; }

  /// The sums over what lies beside block i of line r in its line (`beside`, `after` is for work), and over the lines
  /// beyond the reach of line r (`beyond`). Entries count by head and line, `beside` also by block.
  void sum_outside(const aft_groups<S>& groups, const sums_array<T>& beside, const sums_array<T>& after,
                   const sums_array<T>& lines, const sums_array<T>& beyond, execution& exec) const {
    const index heads = call.batch * call.heads, blocks = grid.blocks(), parts = call.parts();
    const auto length = [&](index head) { return call.true_length(aft_groups<S>::at(call, shared, head).batch); };
    exec.for_each(heads * grid.lines * blocks, [&](index task, int) {
      const index head = task / blocks / grid.lines, r = task / blocks % grid.lines, i = task % blocks;
      const index all = grid.columns_of(r, length(head)), at = r * grid.columns;
      beside.clear(task), after.clear(task);
      if (i > 0) add_line<T>(groups.heads[head], at, grid.from(i - 1, all), grid.from(i, all), parts, beside.at(task));
      if (!grid.causal)
        add_line<T>(groups.heads[head], at, grid.to(i, all), i + 1 < blocks ? grid.to(i + 1, all) : all, parts,
                    after.at(task));
    });
    exec.for_each(heads * grid.lines, [&](index task, int) {
      const index first = task * blocks;
      for (index i = 1; i < blocks; ++i) sums_array<T>::merge(beside.at(first + i), beside.at(first + i - 1), parts);
      for (index i = blocks - 2; i >= 0; --i) sums_array<T>::merge(after.at(first + i), after.at(first + i + 1), parts);
      for (index i = 0; i < blocks; ++i) sums_array<T>::merge(beside.at(first + i), after.at(first + i), parts);
      if (grid.lines == 1) return;
      const index head = task / grid.lines, r = task % grid.lines;
      lines.clear(task);
      add_line<T>(groups.heads[head], r * grid.columns, 0, grid.columns_of(r, length(head)), parts, lines.at(task));
    });
    if (grid.lines == 1) return;
    exec.for_each(heads, [&](index head, int) {
      const index first = head * grid.lines;
      for (index r = 0; r < grid.lines; ++r) {
        beyond.clear(first + r);
        if (r > 0) sums_array<T>::merge(beyond.at(first + r), beyond.at(first + r - 1), parts);
        if (r - grid.up > 0) sums_array<T>::merge(beyond.at(first + r), lines.at(first + r - grid.up - 1), parts);
      }
      // Upwards, lines[r] becomes the sum of the lines from r on: those below r are read no more.
      for (index r = grid.lines - 1; r >= 0; --r) {
        if (r + 1 < grid.lines) sums_array<T>::merge(lines.at(first + r), lines.at(first + r + 1), parts);
        if (r - grid.up - 1 >= 0) sums_array<T>::merge(beyond.at(first + r - grid.up - 1), lines.at(first + r), parts);
      }
    });
  }

  void run(execution& exec) const {
    const index heads = call.batch * call.heads, blocks = grid.blocks(), parts = call.parts();
    sums_array<T> beside, after, lines, beyond;
    const auto groups = exec.shared_scratch([&](arena& memory) {
      beside = sums_array<T>::layout(memory, heads * grid.lines * blocks, parts);
      after = sums_array<T>::layout(memory, heads * grid.lines * blocks, parts);
      lines = sums_array<T>::layout(memory, grid.lines > 1 ? heads * grid.lines : 0, parts);
      beyond = sums_array<T>::layout(memory, grid.lines > 1 ? heads * grid.lines : 0, parts);
      return aft_groups<S>::make(call, shared, memory);
    });
    sum_outside(groups, beside, after, lines, beyond, exec);
    exec.for_each(groups.count * grid.lines * blocks, [&](index task, int worker) {
      const aft_group group = groups.list[task / blocks / grid.lines];
      const index r = task / blocks % grid.lines, i = task % blocks, at = r * grid.columns;
      const index first = i * block_rows, end = std::min(first + block_rows, grid.columns);
      const index real = std::clamp(grid.columns_of(r, group.length), first, end);
      const auto members = groups.of(group);
      for (const auto& head : members) clear_rows(head.out, at + real, at + end);
      if (first == real) return;
      sums_array<T> outside;
      packed_piece<T> piece;
      auto block = exec.scratch(worker, [&](arena& memory) {
        outside = sums_array<T>::layout(memory, 1, groups.most * parts);
        piece = packed_piece<T>::layout(memory, groups.most * parts, product_keys);
        return aft_block<T>::layout(memory, groups.most * parts, grid.causal);
      });
      for (index n = 0; n < group.heads; ++n) {
        const index head = group.first + n;
        T* const to = outside.data + n * parts * key_sums<T>::size;
        std::copy_n(beside.at(place(head, r, i)), parts * key_sums<T>::size, to);
        if (grid.lines == 1) continue;
        sums_array<T>::merge(to, beyond.at(head * grid.lines + r), parts);
        for (index line = grid.first_line(r); line < grid.end_line(r); ++line)
          if (line != r) sums_array<T>::merge(to, beside.at(place(head, line, i)), parts);
      }
      block.packets = group.heads * parts;
      block.begin(real - first);
      const aft_window_bias<S> bias{
          matrix(aft_groups<S>::at(call, shared, group.first).head), layout, grid, group.length, r, i};
      const aft_rows<S, aft_window_bias<S>> rows{block, members, bias, at + first, parts, outside.data, call.gate};
      rows.find_row_tops();
      bias.stretches([&](index begin, index stop) {
        for (index j = begin; j < stop; j += product_keys) {
          const index count = std::min(product_keys, stop - j);
          for (index n = 0; n < group.heads; ++n) {
            const auto& head = members[static_cast<std::size_t>(n)];
            piece.pack(head.k, head.v, n * parts, j, count);
          }
          rows.take(piece, j, count);
        }
      });
      rows.finish(bias.count_keys());
    });
  }
};

}  // namespace attn::detail
