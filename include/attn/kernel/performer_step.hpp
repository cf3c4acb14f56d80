// attn: performer token by token.
//
//   attn::performer_state<float> state(heads, 256, 64);                   // heads, features, value dim
//   attn::performer_step(state, q_t, k_t, v_t, out_t, features);          // what causal performer gives
//
// Copies, merging, writing and reading: see kernel_state.hpp.
#pragma once

#include <attn/kernel/linear_step.hpp>
#include <attn/kernel/performer.hpp>

namespace attn::inline ATTN_ISA {

/// The sums of performer for elements of type S, `features` rows of W and the kernel it will be used with. `heads` are
/// the key heads, or, where every query head has features of its own, the query heads. Throws std::invalid_argument for
/// negative extents or sizes no memory can hold.
template <element S>
class performer_state : public kernel_state<compute_type<S>> {
 public:
  performer_state(index batch, index heads, index features, index value_dim,
                  performer_kernel kernel = performer_kernel::positive)
      : kernel_state<compute_type<S>>("performer_state",
                                      {2, static_cast<std::uint32_t>(kernel), kernel != performer_kernel::relu}, batch,
                                      heads, rows_of(features, kernel), value_dim) {}
  performer_state(index heads, index features, index value_dim, performer_kernel kernel = performer_kernel::positive)
      : performer_state(1, heads, features, value_dim, kernel) {}

  performer_kernel kernel() const { return static_cast<performer_kernel>(this->kind().variant); }

 private:
  static index rows_of(index features, performer_kernel kernel) {
    const bool twice = kernel == performer_kernel::hyperbolic || kernel == performer_kernel::trigonometric;
    return twice && features > 0 && features < std::numeric_limits<index>::max() / 2 ? 2 * features : features;
  }
};

/// Options of performer_step: those of performer that make sense for tokens as they come. The kernel is the state's.
template <class S>
struct performer_step_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  std::optional<real> scale{};
  real eps = real(0);
  /// relu only
  std::optional<real> feature_eps{};
};

/// Feeds n tokens, k [B, Hkv, n, D] and v [B, Hkv, n, Dv], and answers their queries q [B, H, n, D] causally: the next
/// n rows of one causal performer over the whole stream, always with the same features. Throws std::invalid_argument
/// before anything, the state included, changes. Should anything else be thrown, for want of memory, the state is
/// reset.
template <element S, viewable Q, viewable K, viewable V, viewable O>
void performer_step(performer_state<S>& state, const Q& q, const K& k, const V& v, O&& out,
                    const std::type_identity_t<tensor_view<const compute_type<S>, 3>>& features,
                    const std::type_identity_t<performer_step_options<S>>& options, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the state and q must have one element type");
  const detail::validator check("performer_step");
  const tensor_view<const S> queries = as_view(q), keys = as_view(k), values = as_view(v);
  const tensor_view<S> to = as_view(out);
  performer_options<S> causal;
  causal.kernel = state.kernel(), causal.causal = true, causal.scale = options.scale, causal.eps = options.eps;
  causal.feature_eps = options.feature_eps;
  const auto [shape, lengths] = detail::check_performer(check, queries, keys, values, to, features, causal);
  const index heads = detail::heads_of_sums(shape, {features.extent(0)});
  auto map = detail::make_performer_features<S>(features, causal, shape.dim, state.heads());
  detail::check_state(check, state, shape, heads, map.features(), queries, keys, values, to);
  check.no_alias("the state", state.memory(), "features", features);
  const detail::kernel_call<S> call{queries,       keys, values, to,          shape, lengths, map,
                                    state.heads(), true, true,   options.eps, {},    false,   &state};
  detail::run_step(call, exec);
}

template <element S, viewable Q, viewable K, viewable V, viewable O>
void performer_step(performer_state<S>& state, const Q& q, const K& k, const V& v, O&& out,
                    const std::type_identity_t<tensor_view<const compute_type<S>, 3>>& features,
                    const std::type_identity_t<performer_step_options<S>>& options = {}) {
  execution serial;
  performer_step(state, q, k, v, out, features, options, serial);
}

}  // namespace attn
