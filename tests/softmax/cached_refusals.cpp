// What is refused of calls that attend a cache without appending.
#include <attn/core/tensor.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/selected_keys_step.hpp>
#include <attn/softmax/sliding_window_step.hpp>
#include <attn/softmax/topk_blocks_step.hpp>

#include "softmax/cached.hpp"
#include "support/refusals.hpp"

namespace testing::cached_tests {
namespace {

// Calls over a cache of the keys and values.
template <class Options>
struct cached_call {
  using options = Options;
  static void call(call_inputs<Options>& d, attn::execution& exec) {
    attn::kv_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5});
    cache.append(d.k_view, d.v_view);
    static const attn::tensor<std::int32_t> lists({1, 1, 6, 3});
    if constexpr (requires { d.options.block; })
      attn::selected_keys_cached(cache, d.q_view, d.out_view_, lists, d.options, exec);
    else
      attn::full_softmax_cached(cache, d.q_view, d.out_view_, d.options, exec);
  }
};
template <class Options>
void check_span_refused(const std::string& name) {
  check_refused<cached_call<Options>>(name, span_refusals<call_inputs<Options>>());
}

}  // namespace

TEST_CASE("full_softmax_cached, selected_keys_cached refuse what does not fit keys of several tokens", "[cached]") {
  check_span_refused<attn::full_softmax_cached_options<float>>("full_softmax_cached");
  check_span_refused<attn::selected_keys_cached_options<float>>("selected_keys_cached");
}

TEST_CASE("full_softmax_cached, sliding_window_cached refuse what does not fit", "[cached]") {
  const inputs memory(1, 8), x(9, 2);
  attn::kv_cache<float> cache(extents);
  cache.append(view(memory.k), view(memory.v));
  results r(2);
  const auto says = [&](const std::string& message, const char* name, const char* text) {
    CHECK(well_formed(message, name));
    CAPTURE(message, text);
    CHECK(message.find(text) != std::string::npos);
    CHECK(r.out.data == results(2).out.data);
  };
  const auto full = [&](const attn::full_softmax_cached_options<float>& o, auto q, const char* text) {
    says(refusal([&] { attn::full_softmax_cached(cache, q, view(r.out), o); }), "full_softmax_cached", text);
  };
  const auto window = [&](const attn::sliding_window_cache_options& w,
                          const attn::sliding_window_step_options<float>& o, const char* text) {
    says(refusal([&] { attn::sliding_window_cached(cache, w, view(x.q), view(r.out), o); }), "sliding_window_cached",
         text);
  };
  const tensor<std::uint8_t> mask(1, 1, 1, 9, 1);
  const tensor<float> decays(batch, heads, 8, 1);
  const std::vector<idx_t> two = {1, 2}, long_ones = {1, 2, 3};
  full({}, view(x.q).slice(0, 0, 2), "batch");
  full({}, view(x.q).slice(1, 0, 3), "heads");
  full({}, view(x.q).slice(3, 0, 19), "dim");
  full({.lengths = two}, view(x.q), "lengths");
  full({.lengths = long_ones}, view(x.q), "lengths from 0 to 2; found 3");
  full({.key_mask = attn::tensor_view<const std::uint8_t, 2>(mask.data.data(), {1, 9})}, view(x.q),
       "key_mask length = key length 8; found 9");
  full({.causal = false, .log_decay = {decays.data.data(), {batch, heads, 8}}}, view(x.q), "causal attention");
  window({.left = -1}, {}, "left >= 0; found -1");
  window({.dilation = two}, {}, "query heads");
  window({}, {.rotary = attn::rotary_options<float>{}}, "no rotary");
  window({}, {.key_mask = attn::tensor_view<const std::uint8_t, 2>(mask.data.data(), {1, 9})}, "key_mask length");

  attn::topk_blocks_cache<float> blocks(extents, {.block = 4});
  blocks.append(view(memory.k), view(memory.v));
  const std::vector<std::int32_t> list = {0, 8};
  const attn::tensor_view<const std::int32_t> beyond(list.data(), {1, 1, 2, 1});
  const auto listed = [&](const attn::selected_keys_cached_options<float>& o, const char* text) {
    says(refusal([&] { attn::selected_keys_cached(cache, view(x.q), view(r.out), beyond, o); }), "selected_keys_cached",
         text);
  };
  listed({}, "found 8");
  const auto chosen = [&](const attn::topk_blocks_step_options<float>& o, const char* text) {
    says(refusal([&] { attn::topk_blocks_cached(blocks, view(x.q), view(r.out), o); }), "topk_blocks_cached", text);
  };
  chosen({.topk = 0}, "topk");
  chosen({.rotary = attn::rotary_options<float>{}}, "no rotary");

  tensor<float> keys(batch, kv_heads, 8, dim), values(batch, kv_heads, 8, value_dim);
  attn::kv_cache<float> given(view(keys), view(values), std::vector<idx_t>{8, 8, 8});
  const attn::tensor_view<float> inside(values.data.data(), {batch, heads, 2, value_dim});
  says(refusal([&] { attn::full_softmax_cached(given, view(x.q), inside); }), "full_softmax_cached", "overlap");
}

}  // namespace testing::cached_tests
