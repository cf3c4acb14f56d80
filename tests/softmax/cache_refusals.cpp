// Bad input to the caches and steps: refused in one sentence; out, lse and the cache stay as they were.
#include <algorithm>
#include <functional>

#include "support/call_topk_blocks.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"

namespace testing {
namespace {

bool untouched(const tensor<float>& x) {
  return std::all_of(x.data.begin(), x.data.end(), [](float value) { return value == 7; });
}

const tensor<float> some(4, 8, 40, 40, 0.5f);  // memory for inputs of any shape
in_view<float> shaped(index b, index h, index i, index d) { return {some.data.data(), {b, h, i, d}}; }

// q, k, v of two new tokens over a cache of 3 tokens: batch 2, heads 4 over 2, dims 8 and 5.
struct step_inputs {
  in_view<float> q = shaped(2, 4, 2, 8), k = shaped(2, 2, 2, 8), v = shaped(2, 2, 2, 5);
};
const std::pair<const char*, std::function<void(step_inputs&)>> misfits[] = {
    {"batch", [](auto& s) { s.q = shaped(1, 4, 2, 8); }},
    {"batch", [](auto& s) { s.k = shaped(1, 2, 2, 8); }},
    {"batch", [](auto& s) { s.v = shaped(3, 2, 2, 5); }},
    {"heads", [](auto& s) { s.k = shaped(2, 4, 2, 8); }},
    {"heads", [](auto& s) { s.v = shaped(2, 1, 2, 5); }},
    {"heads", [](auto& s) { s.q = shaped(2, 3, 2, 8); }},
    {"dim", [](auto& s) { s.q = shaped(2, 4, 2, 7); }},
    {"dim", [](auto& s) { s.k = shaped(2, 2, 2, 9); }},
    {"dim", [](auto& s) { s.v = shaped(2, 2, 2, 8); }},
    {"length", [](auto& s) { s.k = shaped(2, 2, 3, 8); }},
    {"length", [](auto& s) { s.v = shaped(2, 2, 1, 5); }},
    {"length", [](auto& s) { s.q = shaped(2, 4, 1, 8); }},
    {"null",
     [](auto& s) {
       s.k = {nullptr, {2, 2, 2, 8}};
     }},
    {"batch",
     [](auto& s) {
       s = {shaped(1, 4, 2, 8), shaped(1, 2, 2, 8), shaped(1, 2, 2, 5)};
     }},
    {"heads",
     [](auto& s) {
       s = {shaped(2, 4, 2, 8), shaped(2, 4, 2, 8), shaped(2, 4, 2, 5)};
     }},
    {"dim",
     [](auto& s) {
       s = {shaped(2, 4, 2, 16), shaped(2, 2, 2, 16), shaped(2, 2, 2, 5)};
     }},
};

}  // namespace

TEST_CASE("kv_cache refuses what does not fit", "[refusals]") {
  const auto check = [](const std::string& message) {
    INFO(message);
    CHECK(well_formed(message, "kv_cache"));
  };
  check(refusal([] { attn::kv_cache<float>({.batch = -1, .heads = 2, .dim = 8}); }));
  check(refusal([] { attn::kv_cache<float>({.batch = 2, .heads = -2, .dim = 8}); }));
  check(refusal([] { attn::kv_cache<float>({.batch = 2, .heads = 2, .dim = -8}); }));
  check(refusal([] { attn::kv_cache<float>({.batch = 2, .heads = 2, .dim = 8, .value_dim = -5}); }));

  attn::kv_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5});
  cache.append(shaped(2, 2, 3, 8), shaped(2, 2, 3, 5));
  check(refusal([&] { cache.append(shaped(1, 2, 3, 8), shaped(1, 2, 3, 5)); }));
  check(refusal([&] { cache.append(shaped(2, 4, 3, 8), shaped(2, 4, 3, 5)); }));
  check(refusal([&] { cache.append(shaped(2, 2, 3, 5), shaped(2, 2, 3, 5)); }));
  check(refusal([&] { cache.append(shaped(2, 2, 3, 8), shaped(2, 2, 3, 8)); }));
  check(refusal([&] { cache.append(shaped(2, 2, 3, 8), shaped(2, 2, 4, 5)); }));
  check(refusal([&] { cache.append(in_view<float>(nullptr, {2, 2, 3, 8}), shaped(2, 2, 3, 5)); }));
  check(refusal([&] { cache.truncate(4); }));
  check(refusal([&] { cache.truncate(-1); }));
  check(refusal([&] { cache.reserve(-1); }));
  CHECK(cache.tokens() == 3);
}

TEST_CASE("full_softmax_step refuses what does not fit", "[refusals]") {
  attn::kv_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5});
  cache.append(shaped(2, 2, 3, 8), shaped(2, 2, 3, 5));
  tensor<float> out(2, 4, 2, 5, 7), lse(2, 4, 2, 1, 7);
  attn::execution serial;
  const auto check = [&](const char* says, const step_inputs& in, out_view<float> to,
                         const attn::full_softmax_options<float>& options) {
    const std::string message =
        refusal([&] { compiled_full_softmax<float>::step(cache, in.q, in.k, in.v, to, options, {}, serial); });
    INFO(message << " should mention " << says);
    CHECK(well_formed(message, "full_softmax_step"));
    CHECK(message.find(says) != std::string::npos);
    CHECK(cache.tokens() == 3);
    CHECK(untouched(out));
    CHECK(untouched(lse));
  };
  for (const auto& [says, alter] : misfits) {
    step_inputs in;
    alter(in);
    check(says, in, view(out), {.lse = row_view(lse)});
  }
  const step_inputs good;
  const std::vector<float> three(3, 0.5f);
  check("length", good, view(out).slice(2, 0, 1), {});
  check("bias", good, view(out), {.bias = shaped(1, 1, 2, 3)});  // not the size after the append
  check("softcap", good, view(out), {.softcap = -1.0f});
  check("alibi_slopes", good, view(out), {.alibi_slopes = three});
  check("sinks", good, view(out), {.sinks = three});
  check("lse", good, view(out), {.lse = row_view(lse).slice(1, 0, 2)});
  check("overlap", good, view(out), {.lse = {out.data.data(), {2, 4, 2}}});
  step_inputs aliased;
  aliased.q = {out.data.data(), {2, 4, 2, 8}, {0, 0, 8, 1}};
  check("overlap", aliased, view(out), {});
}

TEST_CASE("sliding_window_cache refuses what does not fit", "[refusals]") {
  const auto check = [](const char* says, index left, std::vector<index> dilation, std::vector<index> globals,
                        attn::state_extents extents = {.batch = 2, .heads = 2, .dim = 8, .value_dim = 5}) {
    const attn::sliding_window_cache_options options{left, dilation, globals};
    const std::string message =
        refusal([&] { attn::sliding_window_cache<float>(extents, options); });
    INFO(message << " should mention " << says);
    CHECK(well_formed(message, "sliding_window_cache"));
    CHECK(message.find(says) != std::string::npos);
  };
  check("left", attn::unlimited, {}, {});
  check("left", -1, {}, {});
  check("left", attn::unlimited - 1, {}, {});  // more than any memory
  check("left", attn::unlimited / 2, {3}, {});
  check("dilation", 4, {0}, {});
  check("dilation", 4, {1, 2, -3, 1}, {});
  check("global", 4, {}, {3, -2});
  check("batch", 4, {}, {}, {-1, 2, 8, 5});
  check("heads", 4, {}, {}, {2, -2, 8, 5});
  check("dim", 4, {}, {}, {2, 2, -8, 5});
  check("dim", 4, {}, {}, {2, 2, 8, -5});

  attn::sliding_window_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5}, {.left = 4});
  CHECK(well_formed(refusal([&] { cache.append(shaped(2, 2, 3, 8), shaped(2, 2, 2, 5)); }), "sliding_window_cache"));
  CHECK(well_formed(refusal([&] { cache.append(shaped(2, 2, 3, 5), shaped(2, 2, 3, 5)); }), "sliding_window_cache"));
  CHECK(cache.tokens() == 0);
}

TEST_CASE("sliding_window_step refuses what does not fit", "[refusals]") {
  attn::sliding_window_cache_options window;
  window.left = 4;
  attn::sliding_window_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5}, window);
  tensor<float> out(2, 4, 2, 5, 7), lse(2, 4, 2, 1, 7);
  attn::execution serial;
  const auto check = [&](const char* says, const step_inputs& in, out_view<float> to,
                         const attn::sliding_window_step_options<float>& options) {
    const std::string message =
        refusal([&] { compiled_sliding_window<float>::step(cache, in.q, in.k, in.v, to, options, {}, serial); });
    INFO(message << " should mention " << says);
    CHECK(well_formed(message, "sliding_window_step"));
    CHECK(message.find(says) != std::string::npos);
    CHECK(cache.tokens() == 0);
    CHECK(untouched(out));
    CHECK(untouched(lse));
  };
  for (const auto& [says, alter] : misfits) {
    step_inputs in;
    alter(in);
    check(says, in, view(out), {.lse = row_view(lse)});
  }
  const step_inputs good;
  const std::vector<float> three(3, 0.5f);
  check("length", good, view(out).slice(2, 0, 1), {});
  check("softcap", good, view(out), {.softcap = 0.0f});
  check("alibi_slopes", good, view(out), {.alibi_slopes = three});
  check("sinks", good, view(out), {.sinks = three});
  check("lse", good, view(out), {.lse = row_view(lse).slice(2, 0, 1)});
  check("overlap", good, view(out), {.lse = {out.data.data(), {2, 4, 2}}});
}

TEST_CASE("sliding_window_step refuses a dilation per head for other heads", "[refusals]") {
  attn::sliding_window_cache_options window;
  const std::vector<index> per_head = {1, 2};
  window.left = 4, window.dilation = per_head;
  attn::sliding_window_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5}, window);
  tensor<float> out(2, 4, 2, 5, 7);
  attn::execution serial;
  const step_inputs in;
  const std::string message =
      refusal([&] { compiled_sliding_window<float>::step(cache, in.q, in.k, in.v, view(out), {}, {}, serial); });
  CHECK(well_formed(message, "sliding_window_step"));
  CHECK(untouched(out));
}

TEST_CASE("topk_blocks_cache refuses what does not fit", "[refusals]") {
  const auto check = [](const char* says, const std::string& message) {
    INFO(message << " should mention " << says);
    CHECK(well_formed(message, "topk_blocks_cache"));
    CHECK(message.find(says) != std::string::npos);
  };
  const auto made = [](index block, attn::state_extents extents = {.batch = 2, .heads = 2, .dim = 8, .value_dim = 5}) {
    return refusal([&] { attn::topk_blocks_cache<float> cache(extents, {.block = block}); });
  };
  CHECK(made(1) == "");
  check("block >= 1; found 0", made(0));
  check("block >= 1; found -128", made(-128));
  check("batch", made(4, {-1, 2, 8, 5}));
  check("heads", made(4, {2, -2, 8, 5}));
  check("dim", made(4, {2, 2, -8, 5}));
  check("dim", made(4, {2, 2, 8, -5}));

  attn::topk_blocks_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5}, {.block = 2});
  cache.append(shaped(2, 2, 3, 8), shaped(2, 2, 3, 5));
  check("batch", refusal([&] { cache.append(shaped(1, 2, 3, 8), shaped(1, 2, 3, 5)); }));
  check("heads", refusal([&] { cache.append(shaped(2, 4, 3, 8), shaped(2, 4, 3, 5)); }));
  check("dim", refusal([&] { cache.append(shaped(2, 2, 3, 5), shaped(2, 2, 3, 5)); }));
  check("length", refusal([&] { cache.append(shaped(2, 2, 3, 8), shaped(2, 2, 4, 5)); }));
  check("null", refusal([&] { cache.append(in_view<float>(nullptr, {2, 2, 3, 8}), shaped(2, 2, 3, 5)); }));
  check("separate memory", refusal([&] { cache.append(cache.keys(), cache.values()); }));
  check("from 0 to 3; found 4", refusal([&] { cache.truncate(4); }));
  check("from 0 to 3; found -1", refusal([&] { cache.truncate(-1); }));
  check("reserve", refusal([&] { cache.reserve(-1); }));
  check("", refusal([&] { cache.reserve(std::numeric_limits<index>::max() / 2); }));
  CHECK(cache.tokens() == 3);
}

TEST_CASE("topk_blocks_step refuses what does not fit", "[refusals]") {
  attn::topk_blocks_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5}, {.block = 2});
  cache.append(shaped(2, 2, 3, 8), shaped(2, 2, 3, 5));
  tensor<float> out(2, 4, 2, 5, 7), lse(2, 4, 2, 1, 7);
  attn::execution serial;
  const auto check = [&](const char* says, const step_inputs& in, out_view<float> to,
                         const attn::topk_blocks_step_options<float>& options) {
    const std::string message =
        refusal([&] { compiled_topk_blocks<float>::step(cache, in.q, in.k, in.v, to, options, {}, serial); });
    INFO(message << " should mention " << says);
    CHECK(well_formed(message, "topk_blocks_step"));
    CHECK(message.find(says) != std::string::npos);
    CHECK(cache.tokens() == 3);
    CHECK(untouched(out));
    CHECK(untouched(lse));
  };
  for (const auto& [says, alter] : misfits) {
    step_inputs in;
    alter(in);
    check(says, in, view(out), {.lse = row_view(lse)});
  }
  const step_inputs good;
  const std::vector<float> three(3, 0.5f);
  check("topk >= 1; found 0", good, view(out), {.topk = 0, .lse = row_view(lse)});
  check("topk >= 1; found -2", good, view(out), {.topk = -2});
  check("length", good, view(out).slice(2, 0, 1), {});
  check("scale", good, view(out), {.scale = std::numeric_limits<float>::quiet_NaN()});
  check("softcap", good, view(out), {.softcap = 0.0f});
  check("alibi_slopes", good, view(out), {.alibi_slopes = three});
  check("sinks", good, view(out), {.sinks = three});
  check("lse", good, view(out), {.lse = row_view(lse).slice(2, 0, 1)});
  check("overlap", good, view(out), {.lse = {out.data.data(), {2, 4, 2}}});
  step_inputs aliased;
  aliased.q = {out.data.data(), {2, 4, 2, 8}, {0, 0, 8, 1}};
  check("overlap", aliased, view(out), {});
  step_inputs of_cache;
  of_cache.k = cache.keys().slice(2, 0, 2);
  check("separate memory", of_cache, view(out), {});
  of_cache = good;
  of_cache.q = {cache.keys().data(), {2, 4, 2, 8}, {0, 0, 8, 1}};
  check("separate memory", of_cache, view(out), {});
}

}  // namespace testing
