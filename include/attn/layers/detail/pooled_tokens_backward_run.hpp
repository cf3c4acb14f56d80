// attn: the backward pass of pooled_tokens.
//
// Tasks are segments of the windows of a head. Each window is pooled again, then its rows are read once more: a number
// of x belongs to one window at most, so that tasks write separate memory. The gradient of the bias is summed over
// windows, tasks and batch items in order.
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
  void run_segment(head of, idx_t begin, idx_t end, bool last, const pooling_memory<T>& m, T* sums) const {
    const auto& f = forward;
    if (!f.weighted()) of.distance = 0;  // gradients are then all that takes time: 6.5 ns a packet, prefetching 8.3
    for (idx_t w = begin; w < (std::min)(end, of.windows); ++w) {
      pooled_rows<T> tile;
      f.pool(of, w, m, tile, m.mean);
      // Shares in the place of sums; where no token is seen, all weights are 0.
      for (idx_t c = 0; c < m.padded; c += width<T>)
        store<T>(m.sum + c, div(broadcast<T>(T(1)), (max)(load<T>(m.sum + c), broadcast<T>(T(0.5)))));
      const T* const g = d.load(d.at(of.b, of.h, w, 0), f.dim, m.spare);
      const idx_t rows = f.rows(of, w);
      for (idx_t n = 0; n < rows; n += tile.count) {
        if (rows > pooling_tile) f.load_rows(of, w, n, m, tile);
        for (int r = 0; r < tile.count; ++r) {
          const auto place = f.place_of(of, w, n + r);
          const idx_t sum = place.row + (f.overlap && place.channel > 0 ? f.window : 0);
          char* const x = at(dx, of, place), * const logit = at(d_logits, of, place);
          T *const d_x = row(dx, x, m.sum_error), *const d_logit = row(d_logits, logit, m.mean_error);
          add_row(tile, r, g, m, d_x, d_logit, sums ? sums + sum * m.padded : nullptr);
          if (x) dx.store(d_x, f.dim, x, accumulate);
          if (logit) d_logits.store(d_logit, f.dim, logit, accumulate);
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

  /// Where the gradient of a row lies, if it is wanted, and where it is computed: there or in `spare`.
  static char* at(const rows_of_heads<T>& to, const head& of, const typename pooled_tokens_driver<T>::place& p) {
    return to.data ? to.at(of.b, of.h, p.token, p.channel) : nullptr;
  }
  T* row(const rows_of_heads<T>& to, char* at, T* spare) const {
    return at && !accumulate && to.in_place(forward.dim) ? reinterpret_cast<T*>(at) : spare;
  }

  /// The gradients of a row: of x, of its logits, and those added to the sums.
  void add_row(const pooled_rows<T>& rows, int r, const T* g, const pooling_memory<T>& m, T* to_x, T* to_logit,
               T* sums) const {
    const bool weighted = forward.weighted();
    for (idx_t c = 0; c < m.padded; c += width<T>) {
      packet<T> weight = load<T>(m.sum + c), x = load<T>(rows.x[r] + c);
      if (weighted) {
        const packet<T> logit = rows.logit(r, c);
        weight = mul(weight, pooling_weight<T>(logit, load<T>(m.reference + c))), x = seen_number<T>(x, logit);
      }
      const packet<T> d_x = mul(weight, load<T>(g + c)), d_logit = mul(d_x, sub(x, load<T>(m.mean + c)));
      store<T>(to_x + c, d_x), store<T>(to_logit + c, d_logit);
      if (sums) store<T>(sums + c, add(load<T>(sums + c), d_logit));
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
