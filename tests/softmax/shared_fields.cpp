// Options and gradients of softmax attention say which of the shared fields they have: one that is there and not listed
// would be ignored without a word (softmax/detail/shared_fields.hpp). complete.py sees to it that none is missing here.
#include <attn/attn.hpp>

namespace testing::shared_fields_tests {
namespace {

namespace fields = attn::detail::fields;

#define ATTN_LISTS(field, name) \
  static_assert(requires(X& x) { x.name; } == ((X::shared & (field)) != 0), #name " is listed where it is there")

// Whose fields are listed; defaults that are no constants could be used before they are made (default_options).
template <class X>
constexpr bool lists_all() {
  ATTN_LISTS(fields::bias, bias);
  ATTN_LISTS(fields::relative_bias, relative_bias);
  ATTN_LISTS(fields::relative_keys, relative_keys);
  ATTN_LISTS(fields::relative_keys, relative_queries);
  ATTN_LISTS(fields::relative_keys, position_queries);
  ATTN_LISTS(fields::log_decay, log_decay);
  ATTN_LISTS(fields::alibi_slopes, alibi_slopes);
  ATTN_LISTS(fields::k, k);
  return true;
}
template <class X>
constexpr bool options_list_all() {
  ATTN_LISTS(fields::causal, causal);
  ATTN_LISTS(fields::first_position, first_position);
  ATTN_LISTS(fields::span, span);
  ATTN_LISTS(fields::mask, mask);
  ATTN_LISTS(fields::key_mask, key_mask);
  ATTN_LISTS(fields::softcap, softcap);
  ATTN_LISTS(fields::sinks, sinks);
  ATTN_LISTS(fields::dropout, dropout);
  ATTN_LISTS(fields::lse, lse);
  ATTN_LISTS(fields::sums, sums);
  ATTN_LISTS(fields::rotary, rotary);
  ATTN_LISTS(fields::lengths, key_lengths);
  ATTN_LISTS(fields::lengths, query_lengths);
  ATTN_LISTS(fields::skip, skip_below);
  ATTN_LISTS(fields::skip, skip_share);
  ATTN_LISTS(fields::skip, skipped);
  [[maybe_unused]] constexpr X defaults{};
  return lists_all<X>();
}

template <template <class> class... All>
constexpr bool every_option = (options_list_all<All<float>>() && ...);
template <template <class> class... All>
constexpr bool every_gradient = (lists_all<All<float>>() && ...);

// The options, then the gradients.
static_assert(every_option<
    attn::full_softmax_options, attn::softmax_step_options, attn::full_softmax_cached_options,
    attn::sliding_window_options, attn::pattern_softmax_options, attn::block_options, attn::strided_options,
    attn::bigbird_options, attn::lsh_options, attn::topk_blocks_options, attn::topk_blocks_step_options,
    attn::selected_keys_options, attn::selected_keys_step_options, attn::selected_keys_cached_options,
    attn::neighborhood_options, attn::pointwise_options, attn::pointwise_step_options, attn::pointwise_cached_options,
    attn::linformer_options, attn::nystrom_options, attn::long_short_options, attn::multipole_options,
    attn::multipole_step_options, attn::latent_attention_options, attn::latent_attention_step_options>);
static_assert(every_gradient<
    attn::full_softmax_gradients, attn::sliding_window_gradients, attn::softmax_gradients, attn::pattern_gradients,
    attn::lsh_gradients, attn::neighborhood_gradients, attn::pointwise_gradients, attn::long_short_gradients,
    attn::multipole_gradients>);

}  // namespace
}  // namespace testing::shared_fields_tests
