// attn: the gradients of linear attention.
//
//   attn::linear_backward(q, k, v, d_out, {.q = dq, .k = dk, .v = dv}, {.causal = true}, threads);
//   attn::linear_backward(q, k, v, d_out, {.q = dq, .decay = dg}, {.causal = true, .decay = g});
//   attn::linear_backward(q, k, v, d_out, {.log_decay = dg, .bonus = du, .initial_state = ds, .d_final_state = d_end},
//                         {.causal = true, .normalise = false, .log_decay = g, .bonus = u, .initial_state = s});
//   attn::linear_backward(q, k, v, d_out, {.q = dq}, {}, attn::feature_maps::relu{});
//   attn::linear_backward(q, k, v, d_out, {.q = dq}, {}, [](float x) { return x * x; },
//                         [](float x, float d) { return 2 * x * d; });                     // own map and its derivative
//
// With n_i = 1 / (phi(q_i)^T z + eps), D_i = d_out_i . out_i and the sums S, z of the keys a query sees (linear.hpp):
//   d phi(q_i) = n_i (S d_out_i - D_i z),   R = sum_i phi(q_i) n_i d_out_i^T,   y = - sum_i phi(q_i) n_i D_i,
//   d phi(k_j) = R v_j + y,   dv_j = R^T phi(k_j),   causal: R, y over i >= j;   d g_t = <dL/dS_t, S_(t-1)>
//                                    Katharopoulos et al. 2020, appendix; decay: by the chain rule, nothing divided by it
// R and y start from d_final_state and d_final_weights, the gradients of final_state and final_weights; their values
// before the first key are the gradients of initial_state and initial_weights. Where log_decay is -infinity its
// gradient is 0.
//
// The derivative of a map of numbers is map_backward(x, d) = d map'(x); that of a map of tokens is map_backward(token,
// d_phi, d_token) on spans, which writes d_token. The maps of feature_maps need none.
//
// Shapes   q, k, v and the options as the forward call's, d_out as out. Neither out nor anything else of the forward
//          call is needed: final_state and final_weights are not read. Gradients have the shapes of what they are of;
//          dk and dv are summed over grouped queries.
// Cost     2.5 times the forward call's operations, causal about 3 times; with log_decay, a bonus, a scale or states
//          threads do not share heads. Scratch per thread: as the forward call's, causal one state of (D + 1) Dv
//          numbers per 1024 tokens and 16 more, of more than 16384 tokens at most sqrt(L) / 8 and as many more;
//          where threads share heads some 32 states and as many times 64 (D + Dv) numbers beside these; where decay is
//          per query head and keys are shared, Lk (D + Dv) numbers.
// Throws   std::invalid_argument for shapes or options that do not fit, for gradients of what was not given or that
//          share memory with an input or one another, before anything is written.
#pragma once

#include <attn/kernel/detail/kernel_backward_call.hpp>
#include <attn/kernel/detail/recurrence_backward_driver.hpp>
#include <attn/kernel/linear.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients linear_backward computes: those given. S is the element type of the call.
template <class S>
struct linear_gradients {
  using real = compute_type<S>;

  view_field<S> q{}, k{}, v{};
  view_field<real, 3> decay{};       // as decay: [B, H or Hkv, Lk]
  view_field<real> log_decay{};      // as log_decay: [B, H or Hkv, Lk, 1 or D]
  view_field<real, 2> bonus{};       // [H, D], the sum over the batch
  view_field<real> initial_state{};
  view_field<real, 3> initial_weights{};
  /// Inputs, as final_state and final_weights: 0 unless given.
  view_field<const real> d_final_state{};
  view_field<const real, 3> d_final_weights{};
  /// Add to what is there instead of writing it over.
  bool accumulate = false;
};

namespace detail {

/// Stands for the derivative of a map that needs none.
struct own_derivative {};

template <class B, class T>
concept number_map_backward = requires(const B& f, T x, T d) {
  { f(x, d) } -> std::convertible_to<T>;
};

template <class B, class T>
concept token_map_backward =
    requires(const B& f, std::span<const T> token, std::span<const T> d_phi, std::span<T> d_token) {
      f(token, d_phi, d_token);
    };

template <class F>
concept differentiable_map = std::same_as<F, feature_maps::elu_plus_one> || std::same_as<F, feature_maps::relu> ||
                             std::same_as<F, feature_maps::identity>;

template <class F, class B, class T>
constexpr bool require_map_backward() {
  constexpr bool fits = std::same_as<B, own_derivative>
                            ? differentiable_map<F>
                            : (token_map<F, T> ? token_map_backward<B, T> : number_map_backward<B, T>);
  static_assert(fits,
                "attn: the gradients of a feature map of yours need its derivative, after the map: callable as "
                "map_backward(x, d), which returns d map'(x), or for a map of tokens as map_backward(token, d_phi, "
                "d_token) on spans, which writes d_token");
  return fits;
}

/// The backward pass of a map, the caller's or the library's.
template <class S, class F, class B>
struct mapped_features_backward final : feature_map_backward<compute_type<S>> {
  using T = compute_type<S>;

  const B& map_backward;
  idx_t dim, features;

  mapped_features_backward(const B& f, idx_t d, idx_t count) : map_backward(f), dim(d), features(count) {
    this->by_rows = differentiable_map<F>;
    if constexpr (!differentiable_map<F>) this->scratch_size = dim * kernel_chunk + 2 * dim + count;
  }

  /// d times the derivative of the map, where phi determines it.
  static ATTN_INLINE packet<T> times_derivative(const packet<T>& phi, const packet<T>& d) {
    if constexpr (std::same_as<F, feature_maps::elu_plus_one>)  // e^x for x below 0, where phi is less than 1
      return mul(d, (min)(phi, broadcast<T>(T(1))));
    else if constexpr (std::same_as<F, feature_maps::relu>)
      return if_less(zero<T>(), phi, d, zero<T>());
    else
      return d;
  }

  void key_rows(const stored_matrix<T>& k, idx_t begin, idx_t count, T* phi, idx_t stride) const override {
    if constexpr (differentiable_map<F>)
      for (idx_t t = 0; t < count; ++t) {
        const S* const row = reinterpret_cast<const S*>(k.row(begin + t));
        for (idx_t d = 0; d < dim; d += width<T>)
          store<T>(phi + t * stride + d, map_packet<F, T>(load_part<T>(row + d * k.col_stride, k.col_stride, dim - d)));
      }
  }
  void back_rows(const T* phi, T* d, idx_t count) const override {
    for (idx_t n = 0; n < count; n += width<T>) store<T>(d + n, times_derivative(load<T>(phi + n), load<T>(d + n)));
  }

  void back_to(const tokens_back<T>& x, const stored_gradient_head<T>& to, T* dx, kernel_sums<T>* dw,
               T* work) const override {
    if constexpr (std::same_as<S, T> && differentiable_map<F>) {
      const auto at = [&](idx_t n) { return times_derivative(load<T>(x.phi + n), load<T>(x.d + n)); };
      if (to) store_columns<T>(at, matrix_of<T, S>(to), x.position, x.first, x.rows.count, to.accumulate);
    } else {
      feature_map_backward<T>::back_to(x, to, dx, dw, work);
    }
  }

  void back(const tokens_back<T>& x, T* dx, kernel_sums<T>*, T* work) const override {
    if (!dx) return;
    if constexpr (differentiable_map<F>) {
      for (idx_t r = 0; r < dim; ++r)
        for (idx_t t = 0; t < x.rows.lanes; t += width<T>) {
          const idx_t n = r * kernel_chunk + t;
          store<T>(dx + n, times_derivative(load<T>(x.phi + n), load<T>(x.d + n)));
        }
    } else {
      T *const columns = work, *const token = work + dim * kernel_chunk, *const d_token = token + dim;
      access_to<S, T>.pack_columns(x.rows, dim, columns);
      if constexpr (token_map<F, T>) {
        T* const d_phi = d_token + dim;
        for (idx_t t = x.first; t < x.rows.count; ++t) {
          for (idx_t d = 0; d < dim; ++d) token[d] = columns[d * kernel_chunk + t];
          for (idx_t r = 0; r < features; ++r) d_phi[r] = x.d[r * kernel_chunk + t];
          map_backward(std::span<const T>(token, static_cast<std::size_t>(dim)),
                       std::span<const T>(d_phi, static_cast<std::size_t>(features)),
                       std::span<T>(d_token, static_cast<std::size_t>(dim)));
          for (idx_t d = 0; d < dim; ++d) dx[d * kernel_chunk + t] = d_token[d];
        }
      } else {
        for (idx_t d = 0; d < dim; ++d)
          for (idx_t n = d * kernel_chunk + x.first; n < d * kernel_chunk + x.rows.count; ++n)
            dx[n] = static_cast<T>(map_backward(columns[n], x.d[n]));
      }
    }
  }
};

/// The same of its backward call.
template <class S, class F, class B, class T = compute_type<S>>
struct linear_backward_operator : linear_operator<S, F> {
  const B& map_backward;
  const linear_gradients<S>& gradients;

  static constexpr bool usable() { return require_feature_map<F, T>() && require_map_backward<F, B, T>(); }
  void validate(const validator& check, kernel_call<T>& call) {
    linear_options<S> given = this->options;
    given.final_state = {}, given.final_weights = {};  // are not computed
    linear_operator<S, F> forward{given, this->feature};
    forward.validate(check, call);
    const idx_t features = this->count = forward.count;
    const attention_shape& s = call.shape;
    const linear_gradients<S>& g = gradients;
    check_linear_state(check, "d_final_state", g.d_final_state, s, features);
    check_linear_state(check, "d_final_weights", g.d_final_weights, s, features);
    for (const idx_t heads : {g.d_final_state.extent(1), g.d_final_weights.extent(1)}) call.take_heads_of(heads);
    if (g.d_final_state) check.equal("heads of d_final_state = heads of sums", call.heads, g.d_final_state.extent(1));
    if (g.d_final_weights)
      check.equal("heads of d_final_weights = heads of sums", call.heads, g.d_final_weights.extent(1));
    // The backward pass by sums of features has no gradients of log decays and states.
    if (given.log_decay || g.d_final_state || g.d_final_weights) call.driver = kernel_driver::recurrence;
  }
  mapped_features_backward<S, F, B> back(const mapped_features<S, F>& map) const {
    return {map_backward, map.dim, map.features};
  }
};
template <class S, class F, class B>
linear_backward_operator<S, F, B> linear_backward_of(const linear_options<S>& options, const F& map, const B& back,
                                                     const linear_gradients<S>& gradients) {
  return {{options, map}, back, gradients};
}

}  // namespace detail

/// The gradients of linear; options, feature map, its derivative and execution may each be left out. See the top of the
/// file.
template <viewable Q, viewable K, viewable V, viewable D, class Options = linear_options<element_of<const Q&>>,
          class Map = feature_maps::elu_plus_one, class MapBackward = detail::own_derivative>
void linear_backward(const Q& q, const K& k, const V& v, const D& d_out,
                     const linear_gradients<element_of<const Q&>>& gradients, Options&& options = {}, Map&& map = {},
                     MapBackward&& map_backward = {}, execution_ref exec = {}) {
  using S = element_of<const Q&>;
  detail::run_kernel_backward(
      "linear_backward", detail::backward_views_of<S>(q, k, v, d_out), gradients,
      detail::linear_backward_of<S>(detail::options_or_default<linear_options<S>>(options),
                                    detail::callable_or_default<feature_maps::elu_plus_one>(map),
                                    detail::callable_or_default<detail::own_derivative>(map_backward), gradients),
      detail::execution_of(exec, options, map, map_backward));
}

}}  // namespace attn::ATTN_ISA
