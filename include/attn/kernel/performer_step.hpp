// attn: performer token by token.
//
//   attn::performer_state<float> state({.heads = 8, .features = 256, .value_dim = 64});   // 256 rows of W
//   attn::performer_step(state, q_t, k_t, v_t, out_t, features);         // what causal performer gives
//   state.append(k, v, features);                                        // the same without queries
//
// Batch items of their own lengths, copies, merging, writing and reading: see kernel_state.hpp.
#pragma once

#include <attn/kernel/detail/kernel_step_run.hpp>
#include <attn/kernel/kernel_state.hpp>
#include <attn/kernel/performer.hpp>

namespace attn { inline namespace ATTN_ISA {

struct performer_state_options {
  performer_kernel kernel = performer_kernel::positive;
};

/// Options of performer_step: those of performer that apply to single tokens. The kernel is the state's.
template <class S>
struct performer_step_options {
  using real = compute_type<S>;

  std::optional<real> scale{};
  list_view<idx_t> lengths{};  // item b takes the first lengths[b] tokens, the rest is padding; all tokens unless given
  real eps = real(0);
  std::optional<real> feature_eps{};  // relu only
  key_mask_view key_mask{};           // [B or 1, n]

  operator detail::kernel_parameters<real>() const {
    return {.both_lengths = lengths, .eps = eps, .key_mask = key_mask, .given_scale = scale,
            .feature_eps = feature_eps};
  }
};

/// The sums of performer for elements of type S, `features` rows of W and the kernel it will be used with. Throws
/// std::invalid_argument for negative extents or sizes no memory can hold.
template <element S>
class performer_state : public kernel_state<compute_type<S>> {
 public:
  explicit performer_state(const kernel_state_extents& extents, const performer_state_options& options = {})
      : kernel_state<compute_type<S>>("performer_state",
                                      {.kind = 2, .variant = static_cast<std::uint32_t>(options.kernel),
                                       .parts = options.kernel == performer_kernel::relu
                                                    ? detail::sum_parts::weights
                                                    : detail::sum_parts::log_scales},
                                      extents, detail::features_per_row(options.kernel)) {}

  performer_kernel kernel() const { return static_cast<performer_kernel>(this->kind().variant); }

  /// performer_step without queries: feeds k [B, Hkv, n, D] and v [B, Hkv, n, Dv].
  template <viewable K, viewable V, class Features = performer_step_options<S>,
            class Options = performer_step_options<S>>
  void append(const K& k, const V& v, const Features& features = {}, Options&& options = {}, execution_ref exec = {}) {
    detail::step_random_features<detail::performer_features<compute_type<S>>>(
        "performer_state::append", detail::step_access::of(*this),
        detail::with_features(detail::without_queries<S>(k, v), features),
        detail::options_or_default<performer_step_options<S>>(options),
        detail::plain_execution_of("performer_state::append", exec, options));
  }
};

/// Feeds n tokens and computes the results of their queries q [B, H, n, D]: the next n rows of one causal performer
/// over the whole stream, always with the same features. Throws std::invalid_argument before anything, the state
/// included, changes; any other exception leaves the state reset.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Features = performer_step_options<S>,
          class Options = performer_step_options<S>>
void performer_step(performer_state<S>& state, const Q& q, const K& k, const V& v, O&& out,
                    const Features& features = {}, Options&& options = {}, execution_ref exec = {}) {
  detail::step_random_features<detail::performer_features<compute_type<S>>>(
      "performer_step", detail::step_access::of(state),
      detail::with_features(detail::views_of<S>(q, k, v, out), features),
      detail::options_or_default<performer_step_options<S>>(options),
      detail::plain_execution_of("performer_step", exec, options));
}

}}  // namespace attn::ATTN_ISA
