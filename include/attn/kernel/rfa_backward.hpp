// attn: the gradients of random feature attention.
//
//   attn::rfa_backward(q, k, v, features, d_out, {.q = dq, .k = dk, .v = dv}, {.causal = true}, threads);
//   attn::rfa_backward(q, k, v, features, d_out, {.q = dq, .gate = dg}, {.causal = true, .gate = g});
//
// The formulas of linear_backward.hpp, and with t = W x / (|x| + norm_eps), dt = cos t d sin t - sin t d cos t:
//   dx = y / (|x| + norm_eps) - x (y.x) / (|x| (|x| + norm_eps)^2),  y = W^T dt
//   d g_t = <dL/dS_t, S_(t-1) - phi(k_t) v_t^T>       Peng et al. 2021, "Random feature attention"
//
// Shapes   q, k, v, features and the options as the forward call's, d_out as out. Neither out nor anything else of the
//          forward call is needed. Gradients have the shapes of what they are of; dk and dv are summed over grouped
//          queries, those of features over what shares them.
// Cost     2.5 times the forward call's operations, causal about 3 times. Scratch per thread: about 16 m 64 numbers
//          more than the forward call's; causal one state of (2m + 1) Dv numbers per 1024 tokens and 16 more, of more
//          than 16384 tokens at most sqrt(L) / 8 and as many more, where threads share heads some 32 states and as many
//          times 64 (2m + Dv) numbers beside these; where query heads have features or gates of their own but share
//          keys, Lk (D + Dv) numbers. With the gradient of features, B H m D (Hkv, where those are shared) for all
//          threads.
// Throws   std::invalid_argument for shapes or options that do not fit, for gradients of what was not given or that
//          share memory with an input or one another, before anything is written.
//
// The gradient of a token of zeros is y / norm_eps, or zero with norm_eps 0.
#pragma once

#include <attn/kernel/detail/kernel_backward_call.hpp>
#include <attn/kernel/detail/projection_backward.hpp>
#include <attn/kernel/rfa.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients rfa_backward computes: those given. S is the element type of the call.
template <class S>
struct rfa_gradients {
  using real = compute_type<S>;

  view_field<S> q{}, k{}, v{};
  view_field<S, 3> features{};   // as features, summed over what shares them
  view_field<real, 3> gate{};    // as gate: [B, H or Hkv, Lk]
  /// Add to what is there instead of writing it over.
  bool accumulate = false;
};

namespace detail {

template <class T>
struct rfa_features_backward final : projected_features_backward<T> {
  using base = projected_features_backward<T>;
  using base::rows, base::dim;

  const rfa_features<T>& made;

  explicit rfa_features_backward(const rfa_features<T>& f) : base(f), made(f) {
    this->scratch_size += 2 * kernel_chunk;
  }

  void prepare(execution&) override { this->pack(T(1)); }

  void back(const tokens_back<T>& x, T* dx, kernel_sums<T>* dw, T* work) const override {
    const idx_t lanes = x.rows.lanes, m = rows * kernel_chunk;
    T *const columns = work, *const norm = work + (dim + 1) * kernel_chunk, *const factor = norm + kernel_chunk;
    this->features.call.k.access->pack_columns(x.rows, dim, columns);
    T powers[kernel_chunk];
    made.normalise(columns, lanes, norm, factor, powers);
    for (idx_t r = 0; r < rows; ++r)
      for (idx_t t = 0; t < lanes; t += width<T>) {
        const idx_t n = r * kernel_chunk + t;
        const packet<T> of_sine = mul(load<T>(x.d + n), load<T>(x.phi + n + m));
        store<T>(x.d + n, sub(of_sine, mul(load<T>(x.d + n + m), load<T>(x.phi + n))));
      }
    if (dx) {
      this->project_back(x.item_head, x.d, lanes, dx);
      back_norm(columns, norm, factor, powers, lanes, dx);
    }
    if (dw) this->add_features(x, x.d, columns, factor, factor + kernel_chunk, *dw);
  }

  /// From the gradients y of x^ to those of x = x^ (|x| + norm_eps).
  /// Columns are x times powers[t].
  void back_norm(const T* columns, const T* norm, const T* factor, const T* powers, idx_t lanes, T* dx) const {
    for (idx_t t = 0; t < lanes; t += width<T>) {
      const packet<T> f = load<T>(factor + t), size = load<T>(norm + t), power = load<T>(powers + t);
      const packet<T> of_x = mul(f, power);
      packet<T> along = zero<T>();
      for (idx_t d = 0; d < dim; ++d)
        along = fma(load<T>(dx + d * kernel_chunk + t), mul(load<T>(columns + d * kernel_chunk + t), f), along);
      const packet<T> less = mul(if_less(zero<T>(), size, div(mul(along, f), size), zero<T>()), power);
      for (idx_t d = 0; d < dim; ++d) {
        const idx_t n = d * kernel_chunk + t;
        store<T>(dx + n, sub(mul(load<T>(dx + n), of_x), mul(load<T>(columns + n), less)));
      }
    }
  }
};

template <class S, class T = compute_type<S>>
struct rfa_backward_operator : rfa_operator<S> {
  rfa_features_backward<T> back(const rfa_features<T>& map) const { return rfa_features_backward<T>(map); }
};

}  // namespace detail

/// The gradients of rfa; options and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable D, class Features = rfa_options<element_of<const Q&>>,
          class Options = rfa_options<element_of<const Q&>>>
void rfa_backward(const Q& q, const K& k, const V& v, const Features& features, const D& d_out,
                  const rfa_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                  execution_ref exec = {}) {
  using S = element_of<const Q&>;
  detail::run_kernel_backward(
      "rfa_backward", detail::with_features(detail::backward_views_of<S>(q, k, v, d_out), features), gradients,
      detail::rfa_backward_operator<S>{{detail::options_or_default<rfa_options<S>>(options)}},
      detail::execution_of(exec, options));
}

}}  // namespace attn::ATTN_ISA
