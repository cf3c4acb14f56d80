// attn: the backward pass of token_shift: the gradients of rows (token_shift_run.hpp) are the tokens' d_out shifted the
// other way.
#pragma once

#include <attn/layers/detail/token_shift_run.hpp>
#include <attn/layers/detail/weight_gradients.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct token_shift_backward_driver {
  token_shift_driver<T> forward;
  convolution_rows<T> d;  // row t + 1 is d_out of token t
  any_rows<T> d_final;    // may be missing
  gradient_memory<T> dx, d_initial, d_mix;

  void run(execution& exec) const {
    const auto& x = forward.rows.x;
    if (x.dim == 0 || !(rows_wanted() || d_mix.given())) return;
    const auto limit =
        exec.limit_threads({.operations = 8 * forward.numbers(), .bytes = 3 * sizeof(T) * forward.numbers()});
    const idx_t segments = ceil_div(x.length + 1, tokens_per_task), padded = round_up(x.dim, width<T>);
    const auto shared = exec.shared_scratch([&](arena& memory) {
      return std::pair{shift_rows<T>(memory, x.dim), task_sums<T>(memory, d_mix.given() ? padded : 0, exec)};
    });
    const shift_rows<T>& w = shared.first;
    w.set(forward.mix);
    const T* const total = shared.second.add_up(forward.batch() * segments, exec, [&](idx_t task, T* own, int worker) {
      T* const memory = exec.scratch(worker, [&](arena& a) { return a.allocate<T>(6 * padded); });
      run_segment(w, task / segments, task % segments * tokens_per_task, memory, own);
    });
    if (total) d_mix.put(0, 0, x.dim, total);
  }

 private:
  bool rows_wanted() const { return dx.given() || d_initial.given(); }

  /// The gradients of the rows of item b from row `begin` on, and the sums of the tokens of the same numbers.
  void run_segment(const shift_rows<T>& w, idx_t b, idx_t begin, T* memory, T* sums) const {
    const idx_t length = forward.length(b), last = (std::min)(begin + tokens_per_task, forward.rows.x.length + 1);
    const idx_t end = (std::min)(last, length + 1);  // beyond it all is 0
    T *const gradient = memory + 4 * w.padded, *const spare = memory + 5 * w.padded;
    successive_rows<T> seen{forward.rows, b, length, w.padded, w.zeros, memory};
    successive_rows<T> given{d, b, length, w.padded, w.zeros, memory + 2 * w.padded};
    if (begin < end) given.begin(begin);
    if (begin < end && sums) seen.begin(begin);
    for (idx_t e = begin; e < end; ++e) {
      given.advance(e);
      if (sums && e < length) {
        seen.advance(e);
        add_sums(given.here, seen, sums);
      }
      if (!rows_wanted()) continue;
      if (forward.mix.data)
        w.blend(given.before, given.here, gradient);
      else
        std::copy_n(given.here, w.padded, gradient);
      if (e == length && d_final.given()) {
        d_final.load(b, 0, w.dim, spare);
        add_row(gradient, spare, w.dim);
      }
      if (e > 0 && dx.given()) dx.put(forward.token(b, e - 1), 0, w.dim, gradient);
      if (e == 0 && d_initial.given()) d_initial.put(b, 0, w.dim, gradient);
    }
    for (idx_t e = (std::max)(begin, length + 1); e < last; ++e)
      if (dx.given() && !dx.accumulate) dx.put(forward.token(b, e - 1), 0, w.dim, w.zeros);
  }

  /// sums += d (row before - row)
  static void add_sums(const T* d, const successive_rows<T>& x, T* sums) {
    for (idx_t c = 0; c < x.padded; c += width<T>)
      store<T>(sums + c, fma(load<T>(d + c), sub(load<T>(x.before + c), load<T>(x.here + c)), load<T>(sums + c)));
  }
};

template <class T>
void run_token_shift_backward(const token_shift_backward_driver<T>& call, execution& exec) {
  call.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_token_shift_backward(const token_shift_backward_driver<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
