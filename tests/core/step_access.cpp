// What caches and states have inside for their steps cannot be reached by their users.
#include <attn/attn.hpp>

#include "support/catch.hpp"

namespace testing::step_access_tests {
namespace {

using attn::idx_t;

template <class X>
concept lengths_are_open = requires(X& x) { x.length(0) = 1; };
template <class X>
concept checks_are_open = requires(X& x, attn::detail::call_views& views) { x.list_memory(views); };
template <class X>
concept content_is_open = requires(X& x) { x.cut(0, 0); } || requires(X& x) { x.advance(1, {}); } ||
                          requires(X& x) { x.copy(0, 1); } || requires(X& x) { x.exchange(0, 1); };
template <class X>
concept memory_is_open = requires(X& x) { x.memory(); } || requires(X& x) { x.memory_; } ||
                         requires(X& x) { x.items(); } || requires(X& x) { x.sums(0, 0); } ||
                         requires(X& x) { x.pages().tables; } || requires(X& x) { x.window().globals; };
template <class X>
concept steps_are_open = requires(X& x) { x.tokens_after(1, {}); } || requires(X& x) { x.extents(); } ||
                         requires(X& x) { x.kind(); } || requires(X& x) { x.settings(); };

template <class X>
constexpr bool open =
    lengths_are_open<X> || checks_are_open<X> || content_is_open<X> || memory_is_open<X> || steps_are_open<X>;

template <class X>
using inside_of = std::remove_reference_t<decltype(attn::detail::step_access::of(std::declval<X&>()))>;

/// Open to steps alone, which shows that the names are those of today.
template <class X>
constexpr bool closed = open<inside_of<X>> && lengths_are_open<inside_of<X>> && content_is_open<inside_of<X>> &&
                        !open<X> && !std::convertible_to<X&, inside_of<X>&>;

TEST_CASE("caches and states are closed to all but steps", "[step_access]") {
  STATIC_REQUIRE(closed<attn::kv_cache<float>>);
  STATIC_REQUIRE(closed<attn::kv_cache<std::int8_t>>);
  STATIC_REQUIRE(closed<attn::paged_cache<float>>);
  STATIC_REQUIRE(closed<attn::sliding_window_cache<float>>);
  STATIC_REQUIRE(closed<attn::topk_blocks_cache<float>>);
  STATIC_REQUIRE(closed<attn::multipole_cache<float>>);
  STATIC_REQUIRE(closed<attn::linear_state<float>>);
  STATIC_REQUIRE(closed<attn::performer_state<float>>);
  STATIC_REQUIRE(closed<attn::rfa_state<float>>);
  STATIC_REQUIRE(closed<attn::delta_rule_state<float>>);
  STATIC_REQUIRE(closed<attn::dplr_state<float>>);
  STATIC_REQUIRE(closed<attn::aft_simple_state<float>>);
  STATIC_REQUIRE(closed<attn::aft_local_state<float>>);
  STATIC_REQUIRE(closed<attn::aft_conv_state<float>>);
  STATIC_REQUIRE_FALSE(memory_is_open<attn::page_pool<float>>);
  // Steps over keys and values take the caches that have all tokens and nothing else.
  STATIC_REQUIRE(attn::detail::key_value_cache<attn::kv_cache<float>>);
  STATIC_REQUIRE(attn::detail::key_value_cache<attn::paged_cache<float>>);
  STATIC_REQUIRE_FALSE(attn::detail::key_value_cache<const attn::kv_cache<float>>);
  STATIC_REQUIRE_FALSE(attn::detail::key_value_cache<attn::sliding_window_cache<float>>);
  STATIC_REQUIRE_FALSE(attn::detail::key_value_cache<attn::topk_blocks_cache<float>>);
  STATIC_REQUIRE_FALSE(attn::detail::key_value_cache<std::vector<float>>);
}

}  // namespace
}  // namespace testing::step_access_tests
