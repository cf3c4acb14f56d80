#include "support/call_kernel.hpp"

template struct attn::detail::kernel_call<float>;
template struct attn::detail::sums_kernel<float>;
template struct attn::detail::sums_driver<float>;
template struct attn::detail::recurrence_driver<attn::detail::rule::add, float>;
template struct attn::detail::kernel_steps<true, float>;
template struct attn::detail::kernel_steps<false, float>;
template struct attn::detail::sums_kernel_backward<float>;
template struct attn::detail::sums_backward_driver<float>;
#if !defined(ATTN_TEST_FEW_TYPES)
template struct attn::detail::kernel_call<double>;
template struct attn::detail::sums_kernel<double>;
template struct attn::detail::sums_driver<double>;
template struct attn::detail::recurrence_driver<attn::detail::rule::add, double>;
template struct attn::detail::kernel_steps<true, double>;
template struct attn::detail::kernel_steps<false, double>;
template struct attn::detail::sums_kernel_backward<double>;
template struct attn::detail::sums_backward_driver<double>;
#endif

namespace testing {
namespace {

// More features than numbers: the map sees a whole token.
struct products {
  idx_t features(idx_t dim) const { return 2 * dim; }
  template <class T>
  void operator()(std::span<const T> token, std::span<T> phi) const {
    for (std::size_t d = 0; d < token.size(); ++d) {
      phi[2 * d] = (1 + token[d]) * (1 + token[d]);
      phi[2 * d + 1] = (1 + token[d]) * (1 + token[(d + 1) % token.size()]);
    }
  }
};

struct products_backward {
  template <class T>
  void operator()(std::span<const T> token, std::span<const T> d_phi, std::span<T> d_token) const {
    for (std::size_t d = 0; d < token.size(); ++d) d_token[d] = 2 * (1 + token[d]) * d_phi[2 * d];
    for (std::size_t d = 0; d < token.size(); ++d) {
      const std::size_t next = (d + 1) % token.size();
      d_token[d] += (1 + token[next]) * d_phi[2 * d + 1];
      d_token[next] += (1 + token[d]) * d_phi[2 * d + 1];
    }
  }
};

// The map is a type: every one is an instance of its own.
template <class T, class F>
void with_map(reference::linear_feature feature, F&& call) {
  using reference::linear_feature;
  switch (feature) {
    case linear_feature::elu_plus_one:
      return call(attn::feature_maps::elu_plus_one{}, attn::detail::own_derivative{});
    case linear_feature::relu:
      return call(attn::feature_maps::relu{}, attn::detail::own_derivative{});
    case linear_feature::identity:
      return call(attn::feature_maps::identity{}, attn::detail::own_derivative{});
    case linear_feature::square:
      return call([](T x) { return x * x; }, [](T x, T d) { return 2 * x * d; });
    case linear_feature::products:
      return call(products{}, products_backward{});
  }
}

}  // namespace

template <class S>
void compiled_linear<S>::call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options& chosen,
                              reference::linear_feature feature, attn::execution& execution) {
  if constexpr (std::is_same_v<S, real<S>>)
    with_map<real<S>>(feature,
                      [&](const auto& map, const auto&) { attn::linear(q, k, v, out, chosen, map, execution); });
  else
    attn::linear(q, k, v, out, chosen, execution);
}

template <class S>
void compiled_linear<S>::step(attn::linear_state<S>& state, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                              const attn::linear_step_options<S>& chosen, reference::linear_feature feature,
                              attn::execution& execution) {
  if constexpr (std::is_same_v<S, real<S>>)
    with_map<real<S>>(
        feature, [&](const auto& map, const auto&) { attn::linear_step(state, q, k, v, out, chosen, map, execution); });
  else
    attn::linear_step(state, q, k, v, out, chosen, execution);
}

template <class S>
void compiled_linear<S>::backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> d_out,
                                  const attn::linear_gradients<S>& gradients, const options& chosen,
                                  reference::linear_feature feature, attn::execution& execution) {
  if constexpr (std::is_same_v<S, real<S>>)
    with_map<real<S>>(feature, [&](const auto& map, const auto& derivative) {
      attn::linear_backward(q, k, v, d_out, gradients, chosen, map, derivative, execution);
    });
  else
    attn::linear_backward(q, k, v, d_out, gradients, chosen, execution);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_linear);

}  // namespace testing
