// attn: the plan of neighborhood.hpp. The tokens of an axis fall into cells, which see one another alone: the residues
// of a dilation, the windows of a stride as large as the kernel, the two sides of a seam. Keys are packed once, cell by
// cell, row-major within: along the last axis of which queries do not see the whole cell, and those after it, what a
// query sees is a range of slots, one for every key along the axes before. Queries are attended in strips, several rows
// of the grid column by column, so that those of a tile see nearly the same keys. Knows no element type.
#pragma once

#include <attn/softmax/detail/sparse_driver.hpp>

#include <array>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// One axis of the grid, and which of its tokens see one another.
struct grid_axis {
  idx_t count = 1, kernel = 1, stride = 1, dilation = 1, shift = 0;
  bool causal = false;

  /// What token t of the n of one residue sees.
  key_range window(idx_t t, idx_t n) const {
    const idx_t group = t / stride * stride;
    if (causal) return {std::max<idx_t>(std::min(group + stride, n) - kernel, 0), t + 1};
    const idx_t leader = std::min(group + stride / 2, n - 1);
    const idx_t begin = std::clamp<idx_t>(leader - kernel / 2, 0, n - kernel);
    return {begin, begin + kernel};
  }
};

/// The tokens of an axis in the order of its cells.
struct axis_cells {
  idx_t* tokens;    // [count]: their coordinates
  key_range* seen;  // [count]: the range of this order that each sees
  idx_t* first;     // [cells + 1]: where cells begin
  bool* whole;      // [cells]: whether all see their whole cell
  idx_t cells = 0, pairs = 0;

  static axis_cells layout(arena& memory, idx_t count) {
    return {.tokens = memory.allocate<idx_t>(count), .seen = memory.allocate<key_range>(count),
            .first = memory.allocate<idx_t>(count + 1), .whole = memory.allocate<bool>(count)};
  }
  void fill(const grid_axis& axis) {
    idx_t begin = 0;
    for (idx_t r = 0; begin < axis.count; ++r) {
      const idx_t n = ceil_div(axis.count - r, axis.dilation);  // tokens of the residue: so many before the seam
      const idx_t seam = std::max<idx_t>(0, ceil_div(axis.count - axis.shift - r, axis.dilation));
      idx_t reach = 0;
      for (idx_t t = 0; t < n; ++t) {
        key_range window = axis.window(t, n);
        (t < seam ? window.end : window.begin) = t < seam ? std::min(window.end, seam) : std::max(window.begin, seam);
        if (reach <= t && window.begin == t) first[cells++] = begin + t;  // no window reaches across
        reach = std::max(reach, window.end);
        tokens[begin + t] = (r + t * axis.dilation + axis.shift) % axis.count;
        seen[begin + t] = {begin + window.begin, begin + window.end};
        pairs += window.end - window.begin;
      }
      begin += n;
    }
    first[cells] = begin;
    for (idx_t c = 0; c < cells; ++c)
      whole[c] = std::all_of(seen + first[c], seen + first[c + 1], [&](const key_range& window) {
        return window.begin == first[c] && window.end == first[c + 1];
      });
  }
};

struct neighborhood_plan : row_plan {
  static constexpr bool prefetches = false;

  struct head {
    idx_t batch, head;
  };
  /// Rows of q that are attended together, at most max_rows. For each outer and inner coordinate in these ranges they
  /// see slots in row outer * inner_count + inner of the keys from `slot` on, the first of its `row` slots being 0.
  struct strip {
    idx_t query, count, slot, inner_count, row;
    key_range outer, inner, slots;
  };
  /// What one of its rows sees: these slots of the rows with these inner coordinates.
  struct seen_rows {
    key_range slots, inner;
  };
  /// What does not depend on heads.
  struct tables {
    idx_t *tokens, *queries;  // [length]: the token of each slot; the rows of q in the order of strips
    seen_rows* seen;          // [length]: of these rows
    strip* strips;
    idx_t* places;  // [length]: where tokens are in the table of a relative bias; null: there is none
  };
  /// A cell of the grid: of each axis the entries [first, first + size).
  struct grid_cell {
    std::array<idx_t, 3> first{}, size{};
    idx_t slot = 0;
    // Along the axes inner + 1 and after it, a row, queries see ranges.
    int inner = 1;  // -1, where all is one row
    idx_t outer_count = 1, inner_count = 1, row = 1, unit = 1;  // unit: slots of a token of axis inner + 1
  };

  const attention_shape& shape;
  std::array<grid_axis, 3> grid;
  bool biased;
  idx_t lanes;  // of a vector of scores
  std::array<axis_cells, 3> axes{};
  tables lists{};
  idx_t strip_count = 0;

  // Filled in by with_plan_of_grid() ---------------------------------------------------------------------------------

  tables layout_tables(arena& memory) const {
    const idx_t n = shape.keys;
    return {.tokens = memory.allocate<idx_t>(n), .queries = memory.allocate<idx_t>(n),
            .seen = memory.allocate<seen_rows>(n), .strips = memory.allocate<strip>(strip_count),
            .places = memory.allocate<idx_t>(biased ? n : 0)};
  }

  template <class Visit>
  void for_each_cell(const Visit& visit) const {
    idx_t slot = 0;
    std::array<idx_t, 3> c{};
    for (c[0] = 0; c[0] < axes[0].cells; ++c[0])
      for (c[1] = 0; c[1] < axes[1].cells; ++c[1])
        for (c[2] = 0; c[2] < axes[2].cells; ++c[2]) {
          grid_cell cell{.slot = slot};
          for (std::size_t a = 0; a < 3; ++a) {
            cell.first[a] = axes[a].first[c[a]];
            cell.size[a] = axes[a].first[c[a] + 1] - cell.first[a];
          }
          while (cell.inner >= 0 && axes[cell.inner + 1].whole[c[cell.inner + 1]]) cell.unit *= cell.size[1 + cell.inner--];
          cell.row = cell.unit * cell.size[cell.inner + 1];
          if (cell.inner >= 0) cell.inner_count = cell.size[cell.inner];
          if (cell.inner == 1) cell.outer_count = cell.size[0];
          visit(cell);
          slot += cell.row * cell.inner_count * cell.outer_count;
        }
  }

  /// Rows of the grid in a strip: those of the least work, counted in vectors of scores.
  idx_t rows_of_strip(const grid_cell& cell) const {
    if (cell.inner < 0) return 1;
    const idx_t tall = grid[cell.inner].kernel, wide = grid[cell.inner + 1].kernel * cell.unit;
    idx_t best = 1;
    double least = std::numeric_limits<double>::max();
    for (idx_t rows = 1; rows <= std::min<idx_t>(cell.inner_count, tile_rows); ++rows) {
      const idx_t columns = ceil_div(idx_t(tile_rows), rows) + (tile_rows % rows != 0);
      const idx_t width = std::min(cell.row, columns + wide - 1), tiles = ceil_div(rows * cell.row, idx_t(tile_rows));
      const double vectors = static_cast<double>(width - 1) / static_cast<double>(lanes) + 1.5;
      const double work = vectors * static_cast<double>(tiles * (tall + rows - 1)) / static_cast<double>(rows);
      if (work < least) least = work, best = rows;
    }
    return best;
  }

  /// visit(cell, rows of a strip, outer coordinate, first inner one, first entry, end) for every strip.
  template <class Visit>
  void for_each_strip(const Visit& visit) const {
    for_each_cell([&](const grid_cell& cell) {
      const idx_t most = rows_of_strip(cell);
      for (idx_t outer = 0; outer < cell.outer_count; ++outer)
        for (idx_t inner = 0; inner < cell.inner_count; inner += most) {
          const idx_t rows = std::min(most, cell.inner_count - inner), count = rows * cell.row;
          const idx_t step = round_up(ceil_div(count, ceil_div(count, max_rows)), idx_t(tile_rows));
          for (idx_t from = 0; from < count; from += step)
            visit(cell, rows, outer, inner, from, std::min(from + step, count));
        }
    });
  }

  void fill() {
    idx_t token_count = 0;
    for_each_cell([&](const grid_cell& cell) {
      for (idx_t x = 0; x < cell.size[0]; ++x)
        for (idx_t y = 0; y < cell.size[1]; ++y)
          for (idx_t z = 0; z < cell.size[2]; ++z) lists.tokens[token_count++] = token_of(cell, {x, y, z});
    });
    idx_t query = 0;
    strip* next = lists.strips;
    for_each_strip([&](const grid_cell& cell, idx_t rows, idx_t outer, idx_t inner, idx_t from, idx_t to) {
      const auto seen_of = [&](int axis, idx_t at) {
        if (axis < 0) return key_range{0, 1};
        const key_range window = axes[axis].seen[cell.first[axis] + at];
        return key_range{window.begin - cell.first[axis], window.end - cell.first[axis]};
      };
      const auto join = [](key_range& all, const key_range& one) {
        all = all.end == 0 ? one : key_range{std::min(all.begin, one.begin), std::max(all.end, one.end)};
      };
      strip one{.query = query, .count = to - from, .slot = cell.slot, .inner_count = cell.inner_count, .row = cell.row,
                .outer = seen_of(cell.inner - 1, outer), .inner = {}, .slots = {}};
      for (idx_t n = from; n < to; ++n, ++query) {
        const idx_t i = inner + n % rows, at = n / rows;
        const key_range of_row = seen_of(cell.inner + 1, at / cell.unit);
        lists.queries[query] = lists.tokens[cell.slot + (outer * cell.inner_count + i) * cell.row + at];
        lists.seen[query] = {{of_row.begin * cell.unit, of_row.end * cell.unit}, seen_of(cell.inner, i)};
        join(one.inner, lists.seen[query].inner), join(one.slots, lists.seen[query].slots);
      }
      *next++ = one;
    });
  }

  // What the drivers ask (row_plan.hpp) ------------------------------------------------------------------------------

  head head_of(idx_t x, const item_scratch&, idx_t) const { return {x / shape.heads, x % shape.heads}; }
  idx_t stages() const { return 1; }
  idx_t capacity() const { return 0; }
  bool shared() const { return true; }
  index_map shared_positions() const { return {0, 1, lists.tokens}; }
  void mark_needed(idx_t, bool* needed) const { std::fill_n(needed, ceil_div(shape.keys, pack_step), true); }
  bool sums_apart() const { return grid[0].kernel * grid[1].kernel * grid[2].kernel > long_segment; }
  double operations(idx_t per_score) const {
    double pairs = static_cast<double>(shape.batch * shape.heads * per_score);
    for (const axis_cells& axis : axes) pairs *= static_cast<double>(axis.pairs);
    return pairs;
  }
  static idx_t numbers(const attention_shape& s) { return s.keys * (s.dim + s.dim_v); }

  /// A task is a strip.
  idx_t tasks(idx_t, idx_t, idx_t) const { return strip_count; }
  template <class Visit>
  void sets(const head&, idx_t, idx_t task, const thread_scratch&, const Visit& visit) const {
    const strip& one = lists.strips[task];
    visit(query_set{.number = task, .rows = {0, 1, lists.queries + one.query}, .count = one.count});
  }
  idx_t parts() const { return parts_of(shape.queries, 4); }
  idx_t part_tasks(idx_t) const { return parts(); }
  template <class Visit>
  void part_sets(const head& h, idx_t stage, idx_t, idx_t part, const thread_scratch& scratch,
                 const Visit& visit) const {
    for (idx_t n = strip_count * part / parts(); n < strip_count * (part + 1) / parts(); ++n)
      sets(h, stage, n, scratch, visit);
  }
  template <class Visit>
  void keys(const head&, const query_set& set, const thread_scratch&, const Visit& visit) const {
    const strip& one = lists.strips[set.number];
    const seen_rows* const seen = lists.seen + one.query;
    for (idx_t outer = one.outer.begin; outer < one.outer.end; ++outer)
      for (idx_t inner = one.inner.begin; inner < one.inner.end; ++inner) {
        const idx_t slot = one.slot + (outer * one.inner_count + inner) * one.row;
        visit(seen_keys{.positions = {slot + one.slots.begin, 1, nullptr}, .slots = one.slots.end - one.slots.begin,
                        .in_place = true},
              [&](idx_t row) {
                const auto& [slots, rows] = seen[row];
                return inner < rows.begin || inner >= rows.end ? key_range{}
                                                               : key_range{slot + slots.begin, slot + slots.end};
              });
      }
  }

 private:
  idx_t token_of(const grid_cell& cell, const std::array<idx_t, 3>& at) const {
    idx_t token = 0, place = 0;
    for (std::size_t a = 0; a < 3; ++a) {
      token = token * grid[a].count + axes[a].tokens[cell.first[a] + at[a]];
      place = place * (2 * grid[a].kernel - 1) + cell.first[a] + at[a];
    }
    if (biased) lists.places[token] = place;
    return token;
  }
};

/// body(plan), the plan of a call, which has its tables as long.
template <class T, class Body>
void with_plan_of_grid(const attention_shape& shape, const std::array<grid_axis, 3>& grid, bool biased, execution& exec,
                       const Body& body) {
  neighborhood_plan plan{{}, shape, grid, biased, width<T>};
  const auto axes = exec.workspace([&](arena& memory) {
    return std::array{axis_cells::layout(memory, grid[0].count), axis_cells::layout(memory, grid[1].count),
                      axis_cells::layout(memory, grid[2].count)};
  });
  plan.axes = *axes;
  for (std::size_t a = 0; a < 3; ++a) plan.axes[a].fill(grid[a]);
  plan.for_each_strip([&](auto&&...) { ++plan.strip_count; });
  const auto tables = exec.workspace([&](arena& memory) { return plan.layout_tables(memory); });
  plan.lists = *tables;
  plan.fill();
  body(plan);
}

}}}  // namespace attn::ATTN_ISA::detail
