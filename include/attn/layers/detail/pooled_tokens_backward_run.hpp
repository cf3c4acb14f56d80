// attn: the backward pass of pooled_tokens.
//
// Tasks are segments of the windows of a head. A short window is read once, a longer one is pooled again, then its rows
// are read once more. A number of x belongs to one window at most, so that tasks write separate memory. The gradient of
// the bias is summed over windows, tasks and batch items in order.
#pragma once

#include <attn/layers/detail/pooled_tokens_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct pooled_tokens_backward_driver {
  pooled_tokens_driver<T> forward;
  rows_of_heads<T> d, dx, d_logits, d_bias;  // gradients may be missing
  idx_t bias_heads;
  bool accumulate;

  void run(execution& exec) const {
    const auto& f = forward;
    const bool sums_wanted = d_bias.data != nullptr;
    if (f.dim == 0 || !(dx.data || d_logits.data || sums_wanted)) return;
    const idx_t windows = f.length / f.window, padded = round_up(f.dim, width<T>);
    // Where sums are added up after a task, it has many windows for it.
    const idx_t segment = std::max<idx_t>(pooling_segment(f.window), sums_wanted ? 16 : 1);
    const idx_t segments = std::max<idx_t>(1, ceil_div(windows, segment)), tasks = f.batch * f.heads * segments;
    const auto limit = exec.limit_threads({.operations = 64 * f.numbers(), .bytes = 5 * sizeof(T) * f.numbers()});
    const idx_t one = sums_wanted ? (f.overlap ? 2 : 1) * f.window * padded : 0, groups = sums_wanted ? bias_heads : 0;
    const idx_t together = !sums_wanted ? tasks : exec.active_threads() > 1 ? 4 * exec.active_threads() : 1;
    T* const sums = exec.shared_scratch([&](arena& memory) {
      return memory.allocate<T>(sums_wanted ? (together + 2 * groups) * one : 0);
    });
    T *const total = sums + (sums_wanted ? together * one : 0), *const errors = total + groups * one;
    std::fill_n(total, 2 * groups * one, T(0));
    for (idx_t first = 0; first < tasks; first += together) {
      const idx_t here = (std::min)(together, tasks - first);
      exec.for_each(here, [&](idx_t n, int worker) {
        const auto memory = exec.scratch(worker, [&](arena& from) { return pooling_memory<T>(from, padded); });
        memory.clear();
        T* const own = sums_wanted ? sums + n * one : nullptr;
        if (own) std::fill_n(own, one, T(0));
        const idx_t task = first + n, at = task % segments * segment;
        run_segment(f.head_of(task / segments), at, (std::min)(at + segment, windows),
                    task % segments == segments - 1, memory, own);
      });
      for (idx_t n = 0; n < here && sums_wanted; ++n) {
        const idx_t group = bias_heads == 1 ? 0 : (first + n) / segments % f.heads;
        move_compensated(sums + n * one, one, T(1), total + group * one, errors + group * one);
      }
    }
    if (!sums_wanted) return;
    settle_compensated(total, errors, groups * one, total);
    for (idx_t g = 0; g < groups; ++g)
      for (idx_t n = 0; n < one / padded; ++n)
        d_bias.store(total + g * one + n * padded, f.dim,
                     d_bias.at(0, g, n % f.window, f.overlap && n >= f.window ? f.dim : 0), accumulate);
  }

 private:
  using head = typename pooled_tokens_driver<T>::head;

  /// Windows [begin, end) of a head; `last` clears what no window has.
  void run_segment(const head& of, idx_t begin, idx_t end, bool last, const pooling_memory<T>& m, T* sums) const {
    const auto& f = forward;
    const auto in_place = [&](const rows_of_heads<T>& to) { return to.data && !accumulate && to.in_place(f.dim); };
    const bool alike = d.in_place(f.dim) && (!dx.data || in_place(dx)) && (!d_logits.data || in_place(d_logits));
    pooled_rows<T> tile;
    tile.result_step = d.strides[2], tile.d_x_step = dx.data ? f.window * dx.strides[2] : 0;
    tile.d_logits_step = d_logits.data ? f.window * d_logits.strides[2] : 0;
    end = (std::min)(end, of.windows);
    for (idx_t w = begin; w < end; w += tile.windows) {
      const idx_t rows = f.rows(of, w);
      const bool at_once = f.weighted() && rows <= pooling_tile;
      tile.windows = at_once && alike ? f.windows_together(of, w, end) : 1;
      tile.d_result = d.load(d.at(of.b, of.h, w, 0), f.dim, m.spare);
      tile.sums = sums && f.overlap && f.earlier_rows(of, w) == 0 ? sums + f.window * m.padded : sums;
      if (!f.weighted())
        std::fill_n(m.sum, m.padded, static_cast<T>(rows));
      else if (!at_once)
        f.pool_by_rows(of, w, m, m.mean);
      // Shares in the place of sums; where no token is seen, all weights are 0.
      for (idx_t c = 0; c < m.padded && !at_once; c += width<T>)
        store<T>(m.sum + c, div(broadcast<T>(T(1)), (max)(load<T>(m.sum + c), broadcast<T>(T(0.5)))));
      for (idx_t n = 0; n < rows; n += tile.count) {
        f.load_rows(of, w, n, m, tile);
        // Computed where they lie, or in the places of copies of what they are of.
        for (int r = 0; r < tile.count; ++r) {
          tile.d_x[r] = in_place(dx) ? reinterpret_cast<T*>(at(dx, of, w, n + r)) : m.slot(0, r);
          tile.d_logits[r] = in_place(d_logits) ? reinterpret_cast<T*>(at(d_logits, of, w, n + r)) : m.slot(1, r);
        }
        if (at_once)
          pool_short<true>(tile, f.prefetch(of, w, 0), m.padded);
        else
          for (int r = 0; r < tile.count; ++r) add_row(tile, r, m, sums ? tile.sums + (n + r) * m.padded : nullptr);
        for (int r = 0; r < tile.count; ++r) {
          if (dx.data) dx.store(tile.d_x[r], f.dim, at(dx, of, w, n + r), accumulate);
          if (d_logits.data) d_logits.store(tile.d_logits[r], f.dim, at(d_logits, of, w, n + r), accumulate);
        }
      }
    }
    if (!last || accumulate) return;
    const idx_t complete = of.windows * f.window;
    for (const rows_of_heads<T>* to : {&dx, &d_logits})
      for (idx_t half = 0; half < (f.overlap ? 2 : 1) && to->data; ++half)
        for (idx_t i = std::max<idx_t>(0, f.overlap && half == 0 ? complete - f.window : complete); i < f.length; ++i)
          to->store(m.zeros, f.dim, to->at(of.b, of.h, i, half * f.dim));
  }

  /// Where the gradient of row n of a window lies.
  char* at(const rows_of_heads<T>& to, const head& of, idx_t w, idx_t n) const {
    const auto place = forward.place_of(of, w, n);
    return to.at(of.b, of.h, place.token, place.channel);
  }

  /// The gradients of a row, given shares in the place of sums: of x, of its logits, and those added to the sums.
  void add_row(const pooled_rows<T>& rows, int r, const pooling_memory<T>& m, T* sums) const {
    for (idx_t c = 0; c < m.padded; c += width<T>) {
      packet<T> d_x = mul(load<T>(m.sum + c), load<T>(rows.d_result + c));
      if (forward.weighted()) {
        const packet<T> logit = rows.logit(r, c), x = seen_number<T>(load<T>(rows.x[r] + c), logit);
        d_x = mul(d_x, pooling_weight<T>(logit, load<T>(m.reference + c)));
        const packet<T> d_logit = mul(d_x, sub(x, load<T>(m.mean + c)));
        store<T>(rows.d_logits[r] + c, d_logit);
        if (sums) store<T>(sums + c, add(load<T>(sums + c), d_logit));
      }
      store<T>(rows.d_x[r] + c, d_x);
    }
  }
};

template <class T>
void run_pooled_tokens_backward(const pooled_tokens_backward_driver<T>& call, execution& exec) {
  call.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_pooled_tokens_backward(const pooled_tokens_backward_driver<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
