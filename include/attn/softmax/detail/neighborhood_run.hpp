// attn: the plan of neighborhood.hpp. The tokens of an axis fall into cells, which see one another alone: the residues
// of a dilation, the windows of a stride as large as the kernel, the two sides of a seam. Keys are packed once, cell by
// cell, row-major within: a query sees a range of each of several rows. A row is the last axis along which not all see
// all of the cell, with those after it. Queries are attended in strips: several rows of the grid, column by column, so
// that those of a tile see nearly the same keys. Knows no element type.
#pragma once

#include <attn/softmax/detail/sparse_driver.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// One axis of the grid, and which of its tokens see one another.
struct grid_axis {
  idx_t count = 1, kernel = 1, stride = 1, dilation = 1, shift = 0;
  bool causal = false;

  /// What token t of the n of one residue sees; begin and end ascend with t.
  key_range window(idx_t t, idx_t n) const {
    const idx_t group = t / stride * stride;
    if (causal) return {std::max<idx_t>((std::min)(group + stride, n) - kernel, 0), t + 1};
    const idx_t begin = std::clamp<idx_t>(group + stride / 2 - kernel / 2, 0, n - kernel);
    return {begin, begin + kernel};
  }
};
/// Something of each of 1 to 3 axes of a grid, after others of one token: there are always two before an axis.
template <class X>
struct of_axes {
  X list[5]{};

  X& operator[](idx_t axis) { return list[axis]; }
  const X& operator[](idx_t axis) const { return list[axis]; }
  X* begin() { return list; }
  const X* begin() const { return list; }
  const X* end() const { return list + 5; }
};
using grid_axes = of_axes<grid_axis>;

/// The tokens of an axis in the order of its cells.
struct axis_cells {
  idx_t* tokens;    // [count]: their coordinates
  key_range* seen;  // [count]: the range of this order that each sees
  idx_t* first;     // [cells + 1]: where cells begin
  idx_t cells = 0, pairs = 0;

  /// Whether all tokens of a cell see all of it.
  bool whole(idx_t c) const { return seen[first[c]].end == first[c + 1] && seen[first[c + 1] - 1].begin == first[c]; }

  static axis_cells layout(arena& memory, idx_t count) {
    return {.tokens = memory.allocate<idx_t>(count), .seen = memory.allocate<key_range>(count),
            .first = memory.allocate<idx_t>(count + 1)};
  }
  void fill(const grid_axis& axis) {
    idx_t begin = 0;
    for (idx_t r = 0; begin < axis.count; ++r) {
      const idx_t n = ceil_div(axis.count - r, axis.dilation);  // tokens of the residue, and those before the seam
      const idx_t seam = std::max<idx_t>(0, ceil_div(axis.count - axis.shift - r, axis.dilation));
      idx_t reach = 0;
      for (idx_t t = 0; t < n; ++t) {
        key_range window = axis.window(t, n);
        (t < seam ? window.end : window.begin) = t < seam ? (std::min)(window.end, seam)
                                                          : (std::max)(window.begin, seam);
        if (reach <= t && window.begin == t) first[cells++] = begin + t;  // no window reaches across
        reach = (std::max)(reach, window.end);
        tokens[begin + t] = (r + t * axis.dilation + axis.shift) % axis.count;
        seen[begin + t] = {begin + window.begin, begin + window.end};
        pairs += window.end - window.begin;
      }
      begin += n;
    }
    first[cells] = begin;
  }
};

struct neighborhood_plan : row_plan {
  static constexpr bool prefetches = false;

  struct head {
    idx_t batch, head;
  };
  /// Of each axis the entries [first, first + size). Rows of `row` slots, `unit` a token, lie along axis `run`.
  struct grid_cell {
    of_axes<idx_t> first{}, size{};
    idx_t slot = 0, run = 4, row = 1, unit = 1;
  };
  /// At most max_rows rows of q, and all they see: along the two axes before that of rows, and in rows.
  struct strip {
    idx_t query, count, slot, inner_count, row;
    key_range outer, inner, slot_range;
  };
  /// What one of them sees: these slots of the rows with these inner coordinates.
  struct seen_rows {
    key_range slot_range, inner;
  };
  struct tables {
    idx_t *tokens, *queries;  // [length]: the token of each slot; the rows of q in the order of strips
    seen_rows* seen;          // [length]: of these rows
    strip* strips;
    idx_t* places;  // [length]: where tokens are in the table of a relative bias; null: there is none
  };

  const attention_shape& shape;
  const grid_axes& grid;
  idx_t lanes;  // of a vector of scores
  of_axes<axis_cells> axes{};
  tables lists{};
  idx_t strip_count = 0;

  template <class Visit>
  void for_each_cell(const Visit& visit) const {
    of_axes<idx_t> c{};
    for (idx_t slot = 0; c[2] < axes[2].cells; ++c[2])
      for (c[3] = 0; c[3] < axes[3].cells; ++c[3])
        for (c[4] = 0; c[4] < axes[4].cells; ++c[4]) {
          grid_cell cell{.slot = slot};
          for (idx_t a = 0; a < 5; ++a) {
            cell.first[a] = axes[a].first[c[a]];
            cell.size[a] = axes[a].first[c[a] + 1] - cell.first[a];
          }
          while (cell.run > 2 && axes[cell.run].whole(c[cell.run])) cell.unit *= cell.size[cell.run--];
          cell.row = cell.size[cell.run] * cell.unit;
          visit(cell);
          slot += cell.size[cell.run - 2] * cell.size[cell.run - 1] * cell.row;
        }
  }

  /// Rows of the grid in a strip: those of the least work, counted in vectors of scores and one for each tile.
  idx_t rows_of_strip(const grid_cell& cell) const {
    const idx_t tall = grid[cell.run - 1].kernel, wide = grid[cell.run].kernel * cell.unit, tile = tile_rows;
    idx_t best = 1;
    double least = (std::numeric_limits<double>::max)();
    for (idx_t rows = 1; rows <= (std::min)(cell.size[cell.run - 1], tile); ++rows) {
      const idx_t columns = ceil_div(tile, rows) + (tile % rows != 0), tiles = ceil_div(rows * cell.row, tile);
      const double width = static_cast<double>((std::min)(cell.row, columns + wide - 1) - 1);
      const double work = (width / static_cast<double>(lanes) + 1.5) * static_cast<double>(tiles * (tall + rows - 1)) /
                          static_cast<double>(rows);
      if (work < least) least = work, best = rows;
    }
    return best;
  }

  /// visit(cell, rows, outer and first inner coordinate, first entry, end) for every strip.
  template <class Visit>
  void for_each_strip(const Visit& visit) const {
    for_each_cell([&](const grid_cell& cell) {
      const idx_t most = rows_of_strip(cell);
      for (idx_t outer = 0; outer < cell.size[cell.run - 2]; ++outer)
        for (idx_t inner = 0; inner < cell.size[cell.run - 1]; inner += most) {
          const idx_t rows = (std::min)(most, cell.size[cell.run - 1] - inner), count = rows * cell.row;
          const idx_t step = round_up(ceil_div(count, ceil_div(count, max_rows)), idx_t(tile_rows));
          for (idx_t from = 0; from < count; from += step)
            visit(cell, rows, outer, inner, from, (std::min)(from + step, count));
        }
    });
  }

  void fill() {
    idx_t slot = 0, query = 0;
    for_each_cell([&](const grid_cell& cell) {
      for (idx_t x = 0; x < cell.size[2]; ++x)
        for (idx_t y = 0; y < cell.size[3]; ++y)
          for (idx_t z = 0; z < cell.size[4]; ++z) lists.tokens[slot++] = token_of(cell, {0, 0, x, y, z});
    });
    strip* next = lists.strips;
    for_each_strip([&](const grid_cell& cell, idx_t rows, idx_t outer, idx_t inner, idx_t from, idx_t to) {
      const idx_t run = cell.run, unit = cell.unit, inner_count = cell.size[run - 1];
      // of the coordinates from low to high
      const auto window = [&](idx_t a, idx_t low, idx_t high, idx_t slot_count) {
        const key_range *const begin = axes[a].seen + cell.first[a] + low, *const end = begin + high - low;
        return key_range{(begin->begin - cell.first[a]) * slot_count, (end->end - cell.first[a]) * slot_count};
      };
      *next++ = {.query = query, .count = to - from, .slot = cell.slot, .inner_count = inner_count, .row = cell.row,
                 .outer = window(run - 2, outer, outer, 1), .inner = window(run - 1, inner, inner + rows - 1, 1),
                 .slot_range = window(run, from / rows / unit, (to - 1) / rows / unit, unit)};
      for (idx_t n = from; n < to; ++n, ++query) {
        const idx_t i = inner + n % rows, at = n / rows;
        lists.queries[query] = lists.tokens[cell.slot + (outer * inner_count + i) * cell.row + at];
        lists.seen[query] = {window(run, at / unit, at / unit, unit), window(run - 1, i, i, 1)};
      }
    });
  }

  head head_at(idx_t x, const item_scratch&, idx_t) const { return {x / shape.heads, x % shape.heads}; }
  idx_t stages() const { return 1; }
  idx_t capacity() const { return 0; }
  bool shared() const { return true; }
  index_map shared_positions() const { return {0, 1, lists.tokens}; }
  void mark_needed(idx_t, bool* needed) const { std::fill_n(needed, ceil_div(shape.keys, pack_step), true); }
  bool accumulates() const { return grid[2].kernel * grid[3].kernel * grid[4].kernel > long_segment; }
  double operations(idx_t per_score) const {
    double all = static_cast<double>(shape.batch * shape.heads * per_score);
    for (const axis_cells& axis : axes) all *= static_cast<double>(axis.pairs);
    return all;
  }

  idx_t tasks(idx_t, idx_t, idx_t) const { return strip_count; }
  template <class Visit>
  void sets(const head&, idx_t, idx_t task, const thread_scratch&, const Visit& visit) const {
    const strip& one = lists.strips[task];
    visit(query_set{.number = task, .rows = {0, 1, lists.queries + one.query}, .count = one.count});
  }
  idx_t parts() const { return parts_of(shape.queries, 4, 1024); }
  idx_t part_tasks(idx_t) const { return parts(); }
  template <class Visit>
  void part_sets(const head& h, idx_t, idx_t, idx_t part, const thread_scratch& s, const Visit& visit) const {
    for (idx_t n = strip_count * part / parts(); n < strip_count * (part + 1) / parts(); ++n) sets(h, 0, n, s, visit);
  }
  template <class Visit>
  void keys(const head&, const query_set& set, const thread_scratch&, const Visit& visit) const {
    const strip& one = lists.strips[set.number];
    const seen_rows* const seen = lists.seen + one.query;
    for (idx_t outer = one.outer.begin; outer < one.outer.end; ++outer)
      for (idx_t inner = one.inner.begin; inner < one.inner.end; ++inner) {
        const idx_t slot = one.slot + (outer * one.inner_count + inner) * one.row;
        visit(seen_keys{{slot + one.slot_range.begin, 1, nullptr}, one.slot_range.end - one.slot_range.begin, true},
              [&](idx_t row) {
                const seen_rows& of = seen[row];
                if (inner < of.inner.begin || inner >= of.inner.end) return key_range{};
                return key_range{slot + of.slot_range.begin, slot + of.slot_range.end};
              });
      }
  }

 private:
  idx_t token_of(const grid_cell& cell, const of_axes<idx_t>& at) const {
    idx_t token = 0, place = 0;
    for (idx_t a = 2; a < 5; ++a) {
      token = token * grid[a].count + axes[a].tokens[cell.first[a] + at[a]];
      place = place * (2 * grid[a].kernel - 1) + cell.first[a] + at[a];
    }
    if (lists.places) lists.places[token] = place;
    return token;
  }
};

/// The axes that options describe. Throws std::invalid_argument for options that do not fit.
template <class Options>
grid_axes checked_grid(const validator& check, const attention_shape& shape, const Options& o) {
  const idx_t axes = o.grid.axes();
  if (axes < 1 || axes > 3) check.fail("a grid of 1 to 3 axes", axes);
  const auto one_per_axis = [&](const char* what, const auto& numbers, bool needed) {
    if ((needed || numbers.axes() > 0) && numbers.axes() != axes)
      check.fail({what, " for each of ", axes, " axes of the grid"}, numbers.axes());
  };
  one_per_axis("kernel", o.kernel, true), one_per_axis("stride", o.stride, false);
  one_per_axis("dilation", o.dilation, false), one_per_axis("causal_axes", o.causal_axes, false);
  one_per_axis("shift", o.shift, false);
  grid_axes grid{};
  std::array<idx_t, 3> counts{1, 1, 1}, offsets{1, 1, 1};
  const auto between = [&](const char* what, idx_t least, idx_t most, idx_t x) {
    if (x < least || x > most) check.fail({what, " from ", least, " to ", most}, x);
  };
  for (idx_t a = 0; a < axes; ++a) {
    const auto given = [a](const auto& of, idx_t otherwise) { return of.axes() ? of[a] : otherwise; };
    grid_axis& to = grid[a + 5 - axes];
    to = {.count = o.grid[a], .kernel = o.kernel[a], .stride = given(o.stride, 1), .dilation = given(o.dilation, 1),
          .shift = given(o.shift, 0), .causal = given(o.causal_axes, 0) != 0};
    check.at_least("grid", 0, to.count);
    const idx_t most = std::max<idx_t>(to.count, 1);  // of no tokens all is well
    between("kernel", 1, most, to.kernel);
    between("stride", 1, to.kernel, to.stride);
    between("dilation, since kernel * dilation is within the axis,", 1, most / to.kernel, to.dilation);
    between("shift", 0, most - 1, to.shift);
    between("causal_axes", 0, 1, given(o.causal_axes, 0));
    counts[static_cast<std::size_t>(a)] = to.count, offsets[static_cast<std::size_t>(a)] = 2 * to.kernel - 1;
  }
  check.equal("the product of the grid = query length", shape.queries, checked_product(counts));
  check.equal("key length = query length", shape.queries, shape.keys);
  if (o.relative_bias)
    check.equal("relative_bias entries = product of 2 kernel - 1", checked_product(offsets), o.relative_bias.extent(1));
  return grid;
}

/// body(plan) for a call on a grid, with the tables of both.
template <class S, class Score, class Body>
void with_grid(softmax_call<S, Score>& call, const grid_axes& grid, const Body& body) {
  neighborhood_plan plan{{}, call.shape, grid, width<compute_type<S>>};
  const auto axes = call.exec.workspace([&](arena& memory) {
    std::transform(grid.begin(), grid.end(), plan.axes.begin(),
                   [&](const grid_axis& axis) { return axis_cells::layout(memory, axis.count); });
    return plan.axes;
  });
  for (idx_t a = 0; a < 5; ++a) plan.axes[a].fill(grid[a]);
  plan.for_each_strip([&](auto&&...) { ++plan.strip_count; });
  const auto tables = call.exec.workspace([&, n = call.shape.keys](arena& memory) {
    return neighborhood_plan::tables{
        .tokens = memory.allocate<idx_t>(n), .queries = memory.allocate<idx_t>(n),
        .seen = memory.allocate<neighborhood_plan::seen_rows>(n),
        .strips = memory.allocate<neighborhood_plan::strip>(plan.strip_count),
        .places = call.terms.relative ? memory.allocate<idx_t>(n) : nullptr};
  });
  plan.lists = *tables;
  plan.fill();
  call.terms.relative.places = plan.lists.places;
  body(plan);
}

template <class S, class Score>
void run_neighborhood(softmax_call<S, Score>& call, const grid_axes& grid) {
  with_grid(call, grid, [&](const neighborhood_plan& plan) { run_plan(call, plan); });
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_neighborhood(softmax_call<S, no_score>&, const grid_axes&)
#include <attn/core/detail/compiled.hpp>
