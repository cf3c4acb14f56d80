// attn: a call of the gradients of a norm (layer_norm, rms_norm, group_norm), its checks and its driver.
#pragma once

#include <attn/core/detail/compensated.hpp>
#include <attn/layers/detail/norm_run.hpp>
#include <attn/layers/detail/weight_gradients.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct layer_norm_gradients;

namespace detail {

/// The gradients of a norm of x: dx = residual + what d leads to, written to `dx` and, if given, to `copy`. The memory
/// of d, of the residual and of dx may be the same.
template <class T>
struct norm_backward_driver {
  const row_norm<T>& norm;
  token_sum<T> x, d;
  input_tokens<T> residual;
  gradient_memory<T> dx, copy, gamma, beta;

  idx_t dim() const { return norm.dim; }
  idx_t padded() const { return norm.padded(); }

  ATTN_INLINE void run_row(idx_t n, idx_t head, T* rows, T* sums) const {
    const idx_t count = dim(), size = padded(), first = head * count;
    T *const z = rows, *const g = rows + size, *const spare = rows + 2 * size;
    const T* const gammas = norm.gamma + head * size * norm.gamma_step;
    d.load(n, first, count, g, spare);
    if (is_zero(g, count)) return store_row(n, first, g, spare);
    x.load(n, first, count, z, spare);
    std::fill(z + count, z + size, T(0));
    const auto [factor, slope] = norm.centre(z);
    packet<T> sum = zero<T>(), squares = zero<T>(), sum_z = zero<T>();
    for (idx_t i = 0; i < size; i += width<T>) {
      const packet<T> here = load<T>(g + i), scaled = mul(here, load<T>(gammas + i * norm.gamma_step));
      const packet<T> unit = mul(load<T>(z + i), broadcast<T>(factor));
      store<T>(z + i, unit);
      store<T>(g + i, scaled);
      store<T>(sums + i, fma(here, unit, load<T>(sums + i)));
      store<T>(sums + size + i, add(here, load<T>(sums + size + i)));
      sum = add(sum, scaled);
      squares = fma(scaled, scaled, squares);
      sum_z = fma(scaled, unit, sum_z);
    }
    T mean_g = norm.centred ? sum_lanes(sum) / static_cast<T>(count) : T(0);
    if (sum_lanes(squares) < mean_g * mean_g * static_cast<T>(count) * T(1.0625)) [[unlikely]]  // as in centre()
      norm.subtract(g, T(1), mean_g), mean_g = T(2) * norm.half_mean(g);
    const packet<T> mean = broadcast<T>(mean_g);
    const packet<T> mean_z = broadcast<T>(-sum_lanes(sum_z) / static_cast<T>(count));
    for (idx_t i = 0; i < size; i += width<T>) {
      const packet<T> away = fma(mean_z, load<T>(z + i), sub(load<T>(g + i), mean));
      store<T>(z + i, mul(away, broadcast<T>(slope)));
    }
    store_row(n, first, z, spare);
    std::fill(g + count, g + size, T(0));
  }

  void store_row(idx_t n, idx_t first, T* row, T* spare) const {
    if (residual.data) {
      residual.load(n, first, dim(), spare);
      add_row(row, spare, dim());
    }
    if (dx.given()) dx.put(n, first, dim(), row);
    if (copy.given()) copy.put(n, first, dim(), row);
  }

  void run(execution& exec) const {
    const bool sums_wanted = gamma.given() || beta.given();
    if (!sums_wanted && !dx.given() && !copy.given()) return;
    const idx_t count = x.first.count, tasks = ceil_div(count, tokens_per_task);
    const double numbers = static_cast<double>(count) * static_cast<double>(norm.heads * dim());
    const auto limit = exec.limit_threads({.operations = 16 * numbers, .bytes = 3 * sizeof(T) * numbers});
    const idx_t one = norm.heads * 2 * padded();  // sums for gamma and beta of each head, in whole packets
    const task_sums<T> sums =
        exec.shared_scratch([&](arena& memory) { return task_sums<T>(memory, sums_wanted ? one : 0, exec); });
    const T* total = sums.add_up(dim() > 0 ? tasks : 0, exec, [&](idx_t task, T* own, int worker) {
      T* const rows = exec.scratch(worker, [&](arena& memory) { return memory.allocate<T>(3 * padded() + one); });
      std::fill_n(rows, 3 * padded() + (own ? 0 : one), T(0));  // numbers that fill up packets stay 0
      T* const own_sums = own ? own : rows + 3 * padded();
      for (idx_t n = task * tokens_per_task; n < (std::min)((task + 1) * tokens_per_task, count); ++n)
        for (idx_t h = 0; h < norm.heads; ++h) run_row(n, h, rows, own_sums + h * 2 * padded());
    });
    for (idx_t h = 0; total && h < norm.heads; ++h, total += 2 * padded()) {
      if (gamma.given()) gamma.put(0, h * dim(), dim(), total);
      if (beta.given()) beta.put(0, h * dim(), dim(), total + padded());
    }
  }
};

/// group_norm_backward, of one head layer_norm_backward and, without means, rms_norm_backward.
template <class S>
[[gnu::noinline]] void call_norm_backward(const char* name, bool centred, idx_t heads,
                                          const tensor_view<const S, 3>& x, const layer_norm_weights<S>& w,
                                          const tensor_view<const S, 3>& d_out, const layer_norm_gradients<S>& g,
                                          compute_type<S> eps, execution& exec) {
  using T = compute_type<S>;
  const idx_t dim = x.extent(2);
  layer_views check{name, x, d_out, layer_views::backward_pass{}};
  check.gradient("x", g.x, x);
  check.gradient("gamma", g.gamma, w.gamma);
  check.gradient("beta", g.beta, w.beta);
  check_norm<S>(check, heads, w, eps);

  auto norm = exec.workspace([=](arena& memory) { return row_norm<T>(memory, dim / heads, dim > 0 ? heads : 1); });
  norm->set(w, eps);
  norm->centred = centred;
  norm_backward_driver<T>{.norm = *norm, .x = input_tokens<T>(x), .d = input_tokens<T>(d_out),
                        .residual = tensor_view<const T, 3>(), .dx = {g.x, g.accumulate},
                        .copy = {tensor_view<T, 3>(), false}, .gamma = {g.gamma, g.accumulate},
                        .beta = {g.beta, g.accumulate}}
      .run(exec);
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
