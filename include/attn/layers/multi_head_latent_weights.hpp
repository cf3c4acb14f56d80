// attn: the weights of multi_head_latent, its step and its backward pass.
#pragma once

#include <attn/layers/weight_field.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Weights of multi_head_latent: one row for every projected number. Either query, or the three that follow.
template <class S>
struct multi_head_latent_weights {
  weight_field<S> query{};
  weight_field<S> query_down{};
  view_field<const S, 1> q_norm{};
  weight_field<S> query_up{};
  weight_field<S> latent{};
  view_field<const S, 1> latent_norm{};
  view_field<const S, 2> latent_up{};
  weight_field<S> output{};
};

}}  // namespace attn::ATTN_ISA
