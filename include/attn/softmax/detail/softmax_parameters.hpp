// attn: the options that operators of softmax attention share, as their calls, checks and terms read them: one type for
// all operators, made of the fields that an operator's options say they have (shared_fields.hpp).
#pragma once

#include <attn/core/first_positions.hpp>
#include <attn/core/mask_view.hpp>
#include <attn/softmax/detail/shared_fields.hpp>
#include <attn/softmax/dropout.hpp>
#include <attn/softmax/skipped_tiles.hpp>

#include <optional>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T, int Rank>
inline constexpr tensor_view<T, Rank> no_view{};

/// Refers to the options. Fields that these have not are as if they were not given.
template <class S>
struct softmax_parameters {
  using real = compute_type<S>;

  std::optional<real> scale{}, softcap{}, skip_below{}, skip_share{};
  skipped_tiles* skipped = nullptr;
  bool causal = false;    // steps are, unless their options have the field
  bool of_cache = false;  // options with an entry for each key are checked against those of a cache
  bool rotary = false;
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  first_positions first_position{};
  idx_t span = 1;
  list_view<real> alibi_slopes{}, sinks{};
  dropout_options dropout{};
  const tensor_view<const S>* relative_queries = &no_view<const S, 4>;
  const tensor_view<const real>* bias = &no_view<const real, 4>;
  const tensor_view<const real, 2>* relative_bias = &no_view<const real, 2>;
  const tensor_view<const real, 3>*relative_keys = &no_view<const real, 3>, *position_queries = relative_keys,
                                   *log_decay = relative_keys;
  const tensor_view<const unsigned char>*mask = &no_view<const unsigned char, 4>, *key_mask = mask;
  const tensor_view<real, 3>* lse = &no_view<real, 3>;
  const tensor_view<real>* sums = &no_view<real, 4>;  // receives the results in place of out, in the compute type
};

template <class S, class Options>
softmax_parameters<S> parameters_of(const Options& x) {
  constexpr auto has = [](unsigned field) { return (Options::shared & field) != 0; };
  softmax_parameters<S> p{.scale = x.scale, .causal = has(fields::of_cache), .of_cache = has(fields::of_cache)};
  if constexpr (has(fields::causal)) p.causal = x.causal;
  if constexpr (has(fields::lengths))
    p.lengths = x.lengths, p.query_lengths = x.query_lengths, p.key_lengths = x.key_lengths;
  if constexpr (has(fields::first_position)) p.first_position = x.first_position;
  if constexpr (has(fields::span)) p.span = x.span;
  if constexpr (has(fields::rotary)) p.rotary = x.rotary.has_value();
  if constexpr (has(fields::softcap)) p.softcap = x.softcap;
  if constexpr (has(fields::alibi_slopes)) p.alibi_slopes = x.alibi_slopes;
  if constexpr (has(fields::sinks)) p.sinks = x.sinks;
  if constexpr (has(fields::dropout)) p.dropout = x.dropout;
  if constexpr (has(fields::skip)) p.skip_below = x.skip_below, p.skip_share = x.skip_share, p.skipped = x.skipped;
  if constexpr (has(fields::bias)) p.bias = &x.bias;
  if constexpr (has(fields::relative_bias)) p.relative_bias = &x.relative_bias;
  if constexpr (has(fields::relative_keys))
    p.relative_keys = &x.relative_keys, p.relative_queries = &x.relative_queries,
    p.position_queries = &x.position_queries;
  if constexpr (has(fields::log_decay)) p.log_decay = &x.log_decay;
  if constexpr (has(fields::mask)) p.mask = &x.mask.bytes();
  if constexpr (has(fields::key_mask)) p.key_mask = &x.key_mask.bytes();
  if constexpr (has(fields::lse)) p.lse = &x.lse;
  if constexpr (has(fields::sums)) p.sums = &x.sums;
  return p;
}

}}}  // namespace attn::ATTN_ISA::detail
