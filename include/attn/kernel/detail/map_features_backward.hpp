// attn: the backward pass of the feature maps of linear, the library's and the caller's, and its checks.
#pragma once

#include <attn/kernel/detail/features_backward.hpp>
#include <attn/kernel/detail/kernel_backward_call.hpp>
#include <attn/kernel/detail/linear_checks.hpp>
#include <attn/kernel/feature_maps.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

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

template <class Map, class MapBackward, class T>
constexpr bool require_map_backward() {
  using F = std::remove_cvref_t<Map>;
  using B = std::remove_cvref_t<MapBackward>;
  if constexpr (!require_feature_map<F, T>()) return false;
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
template <class S, class F, class B>
mapped_features_backward<S, F, B> map_features_backward(const mapped_features<S, F>& map, const B& map_backward) {
  return {map_backward, map.dim, map.features};
}

/// The checks that only linear_backward has.
template <class T>
void check_linear_backward(const validator& check, kernel_backward_call<T>& x, idx_t features) {
  kernel_call<T>& call = x.forward;
  check_linear(check, call, features);
  check_linear_state(check, "d_final_state", x.d_final_state, call.shape, features);
  check_linear_state(check, "d_final_weights", x.d_final_weights, call.shape, features);
  for (const idx_t heads : {x.d_final_state.extent(1), x.d_final_weights.extent(1)}) call.take_heads_of(heads);
  if (x.d_final_state) check.equal("heads of d_final_state = heads of sums", call.heads, x.d_final_state.extent(1));
  if (x.d_final_weights)
    check.equal("heads of d_final_weights = heads of sums", call.heads, x.d_final_weights.extent(1));
  // The backward pass by sums of features has no gradients of log decays and states.
  if (call.recurrence.log_decay || x.d_final_state || x.d_final_weights) call.driver = kernel_driver::recurrence;
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) struct mapped_features_backward<S, feature_maps::elu_plus_one, own_derivative>
#include <attn/core/detail/compiled.hpp>
