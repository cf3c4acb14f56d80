// attn: attention-free mixing with biases for all pairs, or 0 beyond a window, for tokens in one line or in the lines
// of an image.
//
// Where all pairs have a bias, the keys of a bundle are packed once for all blocks of rows. Otherwise a block packs
// those it has biases for.
//
// Keys beyond the reach of every window of a block of rows have no bias for any of these rows: their sums (key_sums)
// are computed once. The other keys, the windows and what lies between them, are a range of each line near the block
// and go through the product of aft_block.hpp. Sums before and after a range are only ever added up: subtracting the
// window from a total would lose every digit where the window holds most of it.
#pragma once

#include <attn/aft/detail/aft_tensors.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Tokens in `lines` lines of `columns`, row by row; a window reaches `up` lines and `side` columns to each side. In
/// the backward pass blocks are of keys, and the biases of a block are towards rows.
struct aft_window_grid {
  aft_window_layout layout = aft_window_layout::square;
  idx_t lines = 1, columns = 0, up = 0, side = 0;
  bool causal = false;  // of one line
  bool of_keys = false;
  bool whole = false;  // one line, all of which is within the window of every token

  idx_t blocks() const { return (columns + block_rows - 1) / block_rows; }  // a line
  /// Columns of line r, where the first n tokens are real.
  idx_t columns_of(idx_t r, idx_t n) const { return std::clamp(n - r * columns, idx_t(0), columns); }
  /// Lines, and blocks, that have any of the first n tokens.
  idx_t lines_of(idx_t n) const { return (std::min)(lines, ceil_div(n, std::max<idx_t>(1, columns))); }
  idx_t blocks_of(idx_t n) const { return lines > 1 ? lines_of(n) * blocks() : ceil_div(n, block_rows); }
  idx_t first_line(idx_t r) const { return std::max<idx_t>(r - up, 0); }
  idx_t end_line(idx_t r) const { return (std::min)(r + up + 1, lines); }
  /// The same among the lines that have any of the first n tokens.
  idx_t end_line(idx_t r, idx_t n) const { return (std::min)(r + up + 1, lines_of(n)); }
  /// A task takes some lines: where many are padding, as in an image of one column, few tasks find that out.
  idx_t task_lines() const { return std::max<idx_t>(1, ceil_div(lines, 64)); }
  idx_t line_tasks() const { return ceil_div(lines, task_lines()); }
  bool sees_before() const { return !causal || !of_keys; }
  bool sees_after() const { return !causal || of_keys; }
  /// Columns [from, to) of a line of `all` columns that block i may have a bias for; before them and after them it has
  /// none. A causal block of rows ends there, one of keys begins there.
  idx_t from(idx_t i, idx_t all) const {
    return std::clamp(i * block_rows - (sees_before() ? side : 0), idx_t(0), all);
  }
  idx_t to(idx_t i, idx_t all) const {
    return std::clamp(sees_after() ? (i + 1) * block_rows + side : i * block_rows, idx_t(0), all);
  }
};

template <class T>
aft_window_grid check_aft_full(const validator& check, const aft_tensors<T>& x) {
  check_biases(check, x);
  check.extents({{"w rows = length", x.length, x.w.extents[2]}, {"w columns = length", x.length, x.w.extents[3]}});
  return {.columns = x.length, .side = x.length, .causal = x.causal, .whole = true};
}
template <class T>
aft_window_grid check_aft_local(const validator& check, const aft_tensors<T>& x, idx_t window, bool band) {
  check.at_least("window", 1, window);
  check.fits("window", {2, window});
  check_biases(check, x);
  check.equal("w rows = length", x.length, x.w.extents[2]);
  check.equal(band ? "w columns = 2 * window - 1 =" : "w columns = length", band ? 2 * window - 1 : x.length,
              x.w.extents[3]);
  return {.layout = band ? aft_window_layout::band : aft_window_layout::square, .columns = x.length,
          .side = window - 1, .causal = x.causal};
}
template <class T, class Tokens>
aft_window_grid check_aft_conv_grid(const validator& check, aft_tensors<T>& x, const Tokens& tokens) {
  check_kernels(check, x, tokens.has_value());
  aft_window_grid grid{
      .layout = aft_window_layout::kernel, .columns = x.length, .side = x.w.extents[3] / 2, .causal = x.causal};
  if (tokens) {
    if (x.causal) check.fail("an image without causal", "causal = true");
    check.at_least("grid rows", 0, tokens->rows);
    check.at_least("grid columns", 0, tokens->columns);
    check.equal("grid rows * columns = length", x.length, check.fits("grid", {tokens->rows, tokens->columns}));
    grid.lines = tokens->rows, grid.columns = tokens->columns, grid.up = x.w.extents[2] / 2;
  }
  return grid;
}

/// What the rows of block i of line r see.
template <class T>
struct aft_window_bias {
  matrix_view<const void> w;
  const aft_elements<T>& elements;
  aft_window_grid grid;
  idx_t keys, r, i;

  /// Whether a row may see a key without a bias; true where this is not certain.
  bool sees_beyond(idx_t row) const {
    const idx_t column = i * block_rows + row;
    return grid.first_line(r) > 0 || grid.end_line(r) < grid.lines || column > grid.side ||
           (!grid.causal && column + grid.side + 1 < grid.columns);
  }
  bool has_diagonal() const { return grid.causal; }
  idx_t diagonal() const { return i * block_rows; }

  idx_t first_line() const { return grid.first_line(r); }
  idx_t end_line() const { return grid.end_line(r, keys); }
  aft_keys keys_of(idx_t line) const {
    const idx_t all = grid.columns_of(line, keys), from = grid.from(i, all), to = (std::max)(from, grid.to(i, all));
    return {line * grid.columns + from, line * grid.columns + to};
  }
  /// Where the biases of a row towards some keys of one line lie: those of keys [low, high), from w(row, column) on.
  struct place {
    idx_t low, high, row, column;
  };
  place find(idx_t row, idx_t begin, idx_t count) const {
    const idx_t column = i * block_rows + row, line = begin / grid.columns, first = begin - line * grid.columns;
    const idx_t low = std::clamp(column - grid.side - first, idx_t(0), count), t = first + low;
    const idx_t w_row = grid.layout == aft_window_layout::kernel ? line - r + grid.up : column;
    return {low, std::clamp(column + grid.side + 1 - first, low, count), w_row,
            grid.layout == aft_window_layout::square ? t : t - column + grid.side};
  }
  void fill(idx_t row, idx_t begin, idx_t count, T* to) const {
    const auto [low, high, w_row, w_column] = find(row, begin, count);
    std::fill(to, to + low, T(0));
    std::fill(to + high, to + count, T(0));
    if (low < high) elements.numbers.load(elements.at(w, w_row, w_column), w.col_stride, high - low, to + low);
  }
};

/// The sums over what lies beside a block of some line in its line (`beside`; `after` is for work), and over the lines
/// beyond the reach of a line (`beyond`). Entries count by head and line, `beside` also by block.
template <class T>
struct aft_window_sums {
  aft_window_grid grid;
  sums_array<T> beside{}, after{}, lines{}, beyond{};

  static aft_window_sums layout(arena& memory, const aft_window_grid& grid, idx_t heads, idx_t parts) {
    const idx_t all = heads * grid.lines * grid.blocks(), by_line = grid.lines > 1 ? heads * grid.lines : 0;
    aft_window_sums s{.grid = grid};
    s.beside = sums_array<T>::layout(memory, all, parts), s.after = sums_array<T>::layout(memory, all, parts);
    s.lines = sums_array<T>::layout(memory, by_line, parts), s.beyond = sums_array<T>::layout(memory, by_line, parts);
    return s;
  }

  /// add(head, begin, end, sums) adds tokens [begin, end) of a head; length_of(head) are its true tokens.
  template <class Add, class Length>
  void sum(idx_t heads, execution& exec, Add&& add, Length&& length_of) const {
    const idx_t blocks = grid.blocks(), tasks = grid.line_tasks();
    const auto for_each_line = [&](idx_t head, idx_t task, auto&& f) {
      const idx_t first = task * grid.task_lines();
      for (idx_t r = first, end = (std::min)(first + grid.task_lines(), grid.lines_of(length_of(head))); r < end; ++r)
        f((head * grid.lines + r) * blocks, r, grid.columns_of(r, length_of(head)));
    };
    exec.for_each(heads * tasks * blocks, [&](idx_t task, int) {
      const idx_t head = task / blocks / tasks, i = task % blocks;
      for_each_line(head, task / blocks % tasks, [&](idx_t first, idx_t r, idx_t all) {
        const idx_t n = first + i, at = r * grid.columns;
        beside.clear(n), after.clear(n);
        if (grid.sees_before() && i > 0) add(head, at + grid.from(i - 1, all), at + grid.from(i, all), beside.at(n));
        if (grid.sees_after())
          add(head, at + grid.to(i, all), at + (i + 1 < blocks ? grid.to(i + 1, all) : all), after.at(n));
      });
    });
    exec.for_each(heads * tasks, [&](idx_t task, int) {
      const idx_t head = task / tasks;
      for_each_line(head, task % tasks, [&](idx_t first, idx_t r, idx_t all) {
        beside.accumulate(first, blocks);
        after.accumulate(first + blocks - 1, blocks, -1);
        for (idx_t i = 0; i < blocks; ++i) beside.merge(first + i, after.at(first + i));
        if (grid.lines == 1) return;
        const idx_t line = head * grid.lines + r, at = r * grid.columns;
        lines.clear(line);
        add(head, at, at + all, lines.at(line));
      });
    });
    if (grid.lines == 1) return;
    exec.for_each(heads, [&](idx_t head, int) {
      const idx_t first = head * grid.lines, end = grid.lines_of(length_of(head));
      for (idx_t r = 0; r < end; ++r) {
        beyond.clear(first + r);
        if (r > 0) beyond.merge(first + r, beyond.at(first + r - 1));
        if (r - grid.up > 0) beyond.merge(first + r, lines.at(first + r - grid.up - 1));
      }
      // Upwards, lines[r] becomes the sum of the lines from r on: those below r are read no more.
      for (idx_t r = end - 1; r >= 0; --r) {
        if (r + 1 < end) lines.merge(first + r, lines.at(first + r + 1));
        if (r - grid.up - 1 >= 0) beyond.merge(first + r - grid.up - 1, lines.at(first + r));
      }
    });
  }

  /// Of one head, of `length` tokens: the sum over what block i of line r has no bias for.
  void outside(idx_t head, idx_t length, idx_t r, idx_t i, const sums_array<T>& to, idx_t n) const {
    const auto place = [&](idx_t line) { return (head * grid.lines + line) * grid.blocks() + i; };
    std::copy_n(beside.at(place(r)), beside.parts, to.at(n));
    if (grid.lines == 1) return;
    to.merge(n, beyond.at(head * grid.lines + r));
    for (idx_t line = grid.first_line(r), end = grid.end_line(r, length); line < end; ++line)
      if (line != r) to.merge(n, beside.at(place(line)));
  }
};

template <class T>
struct aft_window_driver {
  const aft_tensors<T>& x;
  aft_window_grid grid;
  head_bundles<T> bundles{};
  aft_window_sums<T> sums{};
  packed_chunk<T>* packed = nullptr;  // all keys of a bundle, where the whole line is within the window

  work_estimate work() const {
    const double window = static_cast<double>((std::min)(2 * grid.side + 94, grid.columns));
    const double lines_seen = static_cast<double>((std::min)(2 * grid.up + 1, grid.lines));
    return x.work(static_cast<double>(x.length) * window * lines_seen);
  }

  // Keys of a product. Where a causal block sees chunks of all keys, they end where blocks of rows end.
  idx_t step() const { return grid.whole && grid.causal ? block_rows : product_keys; }

  void allocate(arena& memory) {
    if (!grid.whole) sums = aft_window_sums<T>::layout(memory, grid, x.batch * x.heads, x.parts());
    bundles = head_bundles<T>::make(x, memory);
    packed = memory.allocate_list(grid.whole ? ceil_div(x.length, step()) : 0, [&](auto& m) {
      return packed_chunk<T>::layout(m, bundles.most * x.parts(), step());
    });
  }

  void sum_outside(execution& exec) const {
    if (grid.whole) return;
    sums.sum(
        x.batch * x.heads, exec,
        [&](idx_t head, idx_t begin, idx_t end, key_sums<T>* to) {
          x.elements->add_rows(bundles.heads[head], begin, end, x.parts(), to);
        },
        [&](idx_t head) { return bundles.heads[head].length; });
  }

  void pack_bundle(const head_bundle& bundle, execution& exec) const {
    const idx_t length = bundle[0].length, heads = std::ssize(bundle);
    exec.for_each(ceil_div(length, step()) * heads, [&](idx_t task, int) {
      const idx_t n = task / heads, head = task % heads, begin = n * step();
      packed[n].pack(*x.elements, bundle.data()[head], head * x.parts(), begin, (std::min)(step(), length - begin));
    });
  }

  /// Block i of the rows of line r.
  template <class Finish>
  void attend_block(const head_bundle& bundle, idx_t r, idx_t i, execution& exec, int worker, Finish&& finish) const {
    const idx_t at = r * grid.columns, parts = x.parts();
    const idx_t first = i * block_rows, end = (std::min)(first + block_rows, grid.columns);
    const idx_t length = bundle[0].length, real = std::clamp(grid.columns_of(r, length), first, end);
    if (first == real) return;
    sums_array<T> outside;
    packed_chunk<T> chunk;
    auto block = exec.scratch(worker, [&](arena& memory) {
      if (!grid.whole) {
        outside = sums_array<T>::layout(memory, bundles.most, parts);
        chunk = packed_chunk<T>::layout(memory, bundles.most * parts, product_keys);
      }
      return aft_block<T>::layout(memory, bundles.most * parts, grid.causal);
    });
    for (idx_t n = 0; n < std::ssize(bundle) && !grid.whole; ++n)
      sums.outside(bundle.data() + n - bundles.heads, length, r, i, outside, n);
    block.packets = std::ssize(bundle) * parts;
    block.begin(real - first);
    const aft_window_bias<T> bias{
        .w = bundle[0].w, .elements = *x.elements, .grid = grid, .keys = length, .r = r, .i = i};
    const aft_rows<T, aft_window_bias<T>> rows{
        .block = block, .elements = *x.elements, .heads = bundle, .bias = bias,
        .first = at + first, .parts = parts, .outside = outside.data, .gate = x.gate};
    rows.find_row_exponents();
    idx_t keys = 0;
    for (idx_t line = bias.first_line(); line < bias.end_line(); ++line) {
      const auto [begin, stop] = bias.keys_of(line);
      keys += stop - begin;
      for (idx_t j = begin; j < stop; j += step()) {
        const idx_t count = (std::min)(step(), stop - j);
        for (idx_t n = 0; n < std::ssize(bundle) && !grid.whole; ++n)
          chunk.pack(*x.elements, bundle.data()[n], n * parts, j, count);
        rows.add_chunk(grid.whole ? packed[j / step()] : chunk, j, count);
      }
    }
    finish(rows, keys);
  }

  /// The sums of rows of bundles [first_bundle, end_bundle), of one where keys are packed for all blocks; finish(rows,
  /// keys) is called for each block of them.
  template <class Finish>
  void attend(idx_t first_bundle, idx_t end_bundle, execution& exec, Finish&& finish) const {
    const idx_t blocks = grid.blocks();
    if (grid.whole) pack_bundle(bundles.list[first_bundle], exec);
    const idx_t tasks = grid.line_tasks();
    exec.for_each((end_bundle - first_bundle) * tasks * blocks, [&](idx_t task, int worker) {
      const head_bundle bundle = bundles.list[first_bundle + task / blocks / tasks];
      const idx_t begin = task / blocks % tasks * grid.task_lines();
      const idx_t i = grid.whole ? blocks - 1 - task : task % blocks;  // the longest go first
      for (idx_t r = begin, end = (std::min)(begin + grid.task_lines(), grid.lines_of(bundle[0].length)); r < end; ++r)
        attend_block(bundle, r, i, exec, worker, finish);
    });
  }

  void run(execution& exec) {
    const auto limit = exec.limit_threads(work());
    exec.shared_scratch([&](arena& memory) { return allocate(memory), 0; });
    sum_outside(exec);
    const idx_t together = grid.whole ? 1 : bundles.count;
    for (idx_t b = 0; b < bundles.count; b += together)
      attend(b, b + together, exec, [](const auto& rows, idx_t keys) { rows.finish(keys); });
    if (x.lengths.empty()) return;
    exec.for_each(x.batch * x.heads, [&](idx_t n, int) {
      x.clear_padding(bundles.heads[n], bundles.heads[n].length, x.length);
    });
  }
};

template <class T>
void run_aft_window(const aft_tensors<T>& call, const aft_window_grid& grid, execution& exec) {
  aft_window_driver<T>{call, grid}.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_aft_window(const aft_tensors<T>&, const aft_window_grid&, execution&)
#include <attn/core/detail/compiled.hpp>
