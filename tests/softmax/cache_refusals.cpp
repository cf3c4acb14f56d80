// Bad input to the caches and steps: refused in one sentence; out, lse and the cache stay as they were.
#include <attn/core/paged_cache.hpp>

#include "support/call_topk_blocks.hpp"
#include "support/refused.hpp"
#include "support/run.hpp"

namespace testing::cache_refusals_tests {
namespace {

bool untouched(const tensor<float>& x) {
  return std::all_of(x.data.begin(), x.data.end(), [](float value) { return value == 7; });
}

const tensor<float> some(4, 8, 40, 40, 0.5f);  // memory for inputs of any shape
in_view<float> shaped(idx_t b, idx_t h, idx_t i, idx_t d) { return {some.data.data(), {b, h, i, d}}; }

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
    {"null", [](auto& s) { s.k = null_view(2, 2, 2, 8); }},
    {"batch", [](auto& s) { s.q = shaped(1, 4, 2, 8), s.k = shaped(1, 2, 2, 8), s.v = shaped(1, 2, 2, 5); }},
    {"heads", [](auto& s) { s.q = shaped(2, 4, 2, 8), s.k = shaped(2, 4, 2, 8), s.v = shaped(2, 4, 2, 5); }},
    {"dim", [](auto& s) { s.q = shaped(2, 4, 2, 16), s.k = shaped(2, 2, 2, 16), s.v = shaped(2, 2, 2, 5); }},
};

// Steps over one cache: refused in a sentence that names what is wrong, with nothing changed.
template <class Operator, class Cache, class Options>
struct refused_steps {
  const char* name;
  Cache& cache;
  idx_t tokens = cache.tokens();
  tensor<float> out{2, 4, 2, 5, 7}, lse{2, 4, 2, 1, 7};

  void check(const char* says, const step_inputs& in, out_view<float> to, const Options& options) {
    attn::execution serial;
    const std::string message = refusal([&] { Operator::step(cache, in.q, in.k, in.v, to, options, {}, serial); });
    INFO(message << " should mention " << says);
    CHECK(well_formed(message, name));
    CHECK(message.find(says) != std::string::npos);
    CHECK(cache.tokens() == tokens);
    CHECK(untouched(out));
    CHECK(untouched(lse));
  }
  void check(const char* says, const Options& options) { check(says, {}, view(out), options); }
  void check(const char* says, const step_inputs& in) { check(says, in, view(out), {.lse = row_view(lse)}); }

  // What all of them refuse.
  void check_common() {
    for (const auto& [says, alter] : misfits) {
      step_inputs in;
      alter(in);
      check(says, in);
    }
    const std::vector<float> three(3, 0.5f);
    check("length", {}, view(out).slice(2, 0, 1), {});
    for (float softcap : {-1.0f, 0.0f}) check("softcap", Options{.softcap = softcap});
    check("alibi_slopes", Options{.alibi_slopes = three});
    check("sinks", Options{.sinks = three});
    for (int axis : {1, 2}) check("lse", Options{.lse = row_view(lse).slice(axis, 0, 1)});
    check("overlap", Options{.lse = reshaped(out, 2, 4, 2)});
    step_inputs aliased;
    aliased.q = reshaped(out, 2, 4, 2, 8).strided(0, 0, 8, 1);
    check("overlap", aliased);
  }
};

}  // namespace

TEST_CASE("kv_cache refuses what does not fit", "[cache_refusals]") {
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

TEST_CASE("full_softmax_step refuses what does not fit", "[cache_refusals]") {
  attn::kv_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5});
  cache.append(shaped(2, 2, 3, 8), shaped(2, 2, 3, 5));
  using options = attn::full_softmax_options<float>;
  refused_steps<compiled_full_softmax<float>, attn::kv_cache<float>, options> steps{"full_softmax_step", cache};
  steps.check_common();
  steps.check("bias", options{.bias = shaped(1, 1, 2, 3)});  // not the size after the append
}

TEST_CASE("a cache stays as it was where a pool of threads fails", "[cache_refusals]") {
  attn::kv_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5});
  cache.append(shaped(2, 2, 3, 8), shaped(2, 2, 3, 5));
  const step_inputs in;
  tensor<float> out(2, 4, 2, 5);
  attn::execution none(3, [](int, const auto&) {}, 0);
  attn::execution twice(3, [](int, const auto& task) { task(0), task(0); }, 0);
  for (attn::execution* exec : {&none, &twice}) {
    CHECK_THROWS_AS((compiled_full_softmax<float>::step(cache, in.q, in.k, in.v, view(out), {}, {}, *exec)),
                    std::runtime_error);
    CHECK(cache.tokens() == 3);
  }
}

TEST_CASE("sliding_window_cache refuses what does not fit", "[cache_refusals]") {
  const auto check = [](const char* says, idx_t left, std::vector<idx_t> dilation, std::vector<idx_t> globals,
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

TEST_CASE("sliding_window_step refuses what does not fit", "[cache_refusals]") {
  attn::sliding_window_cache_options window;
  window.left = 4;
  attn::sliding_window_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5}, window);
  refused_steps<compiled_sliding_window<float>, attn::sliding_window_cache<float>,
                attn::sliding_window_step_options<float>>
      steps{"sliding_window_step", cache};
  steps.check_common();
}

TEST_CASE("sliding_window_step refuses a dilation per head for other heads", "[cache_refusals]") {
  attn::sliding_window_cache_options window;
  const std::vector<idx_t> per_head = {1, 2};
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

TEST_CASE("topk_blocks_cache refuses what does not fit", "[cache_refusals]") {
  const auto check = [](const char* says, const std::string& message) {
    INFO(message << " should mention " << says);
    CHECK(well_formed(message, "topk_blocks_cache"));
    CHECK(message.find(says) != std::string::npos);
  };
  const auto made = [](idx_t block, attn::state_extents extents = {.batch = 2, .heads = 2, .dim = 8, .value_dim = 5}) {
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
  check("", refusal([&] { cache.reserve(std::numeric_limits<idx_t>::max() / 2); }));
  CHECK(cache.tokens() == 3);
}

TEST_CASE("topk_blocks_step refuses what does not fit", "[cache_refusals]") {
  attn::topk_blocks_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5}, {.block = 2});
  cache.append(shaped(2, 2, 3, 8), shaped(2, 2, 3, 5));
  using options = attn::topk_blocks_step_options<float>;
  refused_steps<compiled_topk_blocks<float>, attn::topk_blocks_cache<float>, options> steps{"topk_blocks_step", cache};
  steps.check_common();
  steps.check("topk >= 1; found 0", options{.topk = 0});
  steps.check("topk >= 1; found -2", options{.topk = -2});
  steps.check("scale", options{.scale = std::numeric_limits<float>::quiet_NaN()});
  step_inputs of_cache;
  of_cache.k = cache.keys().slice(2, 0, 2);
  steps.check("separate memory", of_cache);
  of_cache = {};
  of_cache.q = reshaped(cache.keys().data(), 2, 4, 2, 8).strided(0, 0, 8, 1);
  steps.check("separate memory", of_cache);
}

TEST_CASE("caches of several sequences refuse what does not fit", "[cache_refusals]") {
  const tensor<float> q(4, 4, 3, 20, 0.5f), k(4, 2, 3, 20, 0.5f), v(4, 2, 3, 12, 0.5f);
  tensor<float> out(4, 4, 3, 12, 7);
  const attn::state_extents four{.batch = 4, .heads = 2, .dim = 20, .value_dim = 12};
  const std::vector<idx_t> three(3, 1), negative = {0, 1, -1, 0}, long_one = {3, 4, 0, 0};
  const auto says = [&](const std::string& message, const char* name, const char* text) {
    INFO(message << " should mention " << text);
    CHECK(well_formed(message, name));
    CHECK(message.find(text) != std::string::npos);
    CHECK(out == tensor<float>(4, 4, 3, 12, 7));
  };
  const auto check_step = [&](auto& cache, const char* text, const attn::full_softmax_step_options<float>& o) {
    const std::vector<idx_t> before(cache.lengths().begin(), cache.lengths().end());
    says(refusal([&] { attn::full_softmax_step(cache, view(q), view(k), view(v), view(out), o); }),
         "full_softmax_step", text);
    CHECK(std::equal(before.begin(), before.end(), cache.lengths().begin()));
  };
  attn::kv_cache<float> cache(four);
  cache.append(view(k), view(v));
  const auto check_items_of = [&](auto& cache_of_items, const char* name) {
    says(refusal([&] { cache_of_items.reset(4); }), name, "a batch item from 0 to 3; found 4");
    says(refusal([&] { cache_of_items.copy_item(0, -1); }), name, "a batch item");
    says(refusal([&] { cache_of_items.copy_item(4, 0); }), name, "a batch item");
    says(refusal([&] { cache_of_items.tokens(9); }), name, "a batch item");
    says(refusal([&] { cache_of_items.reorder(three); }), name, "order");
    says(refusal([&] { cache_of_items.reorder(negative); }), name, "batch items from 0 to 3; found -1");
    says(refusal([&] { cache_of_items.append(view(k), view(v), {.lengths = three}); }), name, "lengths");
    says(refusal([&] { cache_of_items.append(view(k), view(v), {.lengths = negative}); }), name, "lengths");
    CHECK(cache_of_items.tokens() == 3);
  };
  check_items_of(cache, "kv_cache");
  says(refusal([&] { cache.truncate(1, 4); }), "kv_cache", "tokens to keep from 0 to 3; found 4");
  check_step(cache, "lengths", {.lengths = three});
  check_step(cache, "lengths", {.lengths = negative});
  check_step(cache, "lengths from 0 to 3; found 4", {.lengths = long_one});
  check_step(cache, "an even number of dims", {.rotary = attn::rotary_options<float>{.dims = 3}});
  attn::sliding_window_cache<float> ring(four, {.left = 4});
  ring.append(view(k), view(v));
  check_items_of(ring, "sliding_window_cache");
  const std::vector<idx_t> below = {5, -1}, two = {1, 2}, four_counts = {1, 0, 2, 0}, falling_counts = {3, -1, 0, 0};
  const auto check_window = [&](const char* text, const attn::sliding_window_cache_options& window) {
    says(refusal([&] { attn::sliding_window_step(cache, window, view(q), view(k), view(v), view(out)); }),
         "sliding_window_step", text);
    CHECK(cache.tokens() == 3);
  };
  check_window("left >= 0; found -1", {.left = -1});
  check_window("global positions >= 0; found -1", {.global_positions = below});
  check_window("global_counts, one per batch item: 4; found 2", {.global_positions = two, .global_counts = two});
  check_window("global counts >= 0; found -1", {.global_positions = two, .global_counts = falling_counts});
  check_window("sum of global_counts = global positions 2; found 3",
               {.global_positions = two, .global_counts = four_counts});
  check_window("query heads", {.dilation = two});
  attn::topk_blocks_cache<float> topk(four, {.block = 4});
  topk.append(view(k), view(v));
  check_items_of(topk, "topk_blocks_cache");

  // Memory of the caller's: of one shape, apart, and large enough.
  tensor<float> keys(4, 2, 5, 20), values(4, 2, 5, 12);
  const auto made = [&](auto x, auto y, const std::vector<idx_t>& lengths = {}) {
    return refusal([&] { attn::kv_cache<float>(x, y, lengths); });
  };
  says(made(view(keys), view(values).slice(2, 0, 4)), "kv_cache", "value length");
  says(made(view(keys), view(values).slice(1, 0, 1)), "kv_cache", "value heads");
  says(made(view(keys), view(keys).slice(3, 1, 12)), "kv_cache", "overlap");
  says(made(view(keys), view(values), three), "kv_cache", "lengths");
  says(made(view(keys), view(values), {6, 0, 0, 0}), "kv_cache", "lengths from 0 to 5; found 6");
  attn::kv_cache<float> given(view(keys), view(values), std::vector<idx_t>{3, 0, 0, 0});
  check_step(given, "tokens up to the 5 there is room for; found 6", {});
  says(refusal([&] { given.reserve(6); }), "kv_cache", "room");
  const auto longer = view(std::as_const(keys)).slice(2, 0, 3);
  says(refusal([&] { attn::full_softmax_step(given, longer, view(k), view(v), view(out)); }),
       "full_softmax_step", "heads");
  says(refusal([&] {
         attn::sliding_window_cache<float>(view(keys), view(values), {.left = 5});
       }),
       "sliding_window_cache", "rows of the caller's memory >= 6; found 5");
  says(refusal([&] { attn::kv_cache<float>({.dim = 4, .value_dim = 5}, {.values_in_keys = true}); }), "kv_cache",
       "a value dim up to the key dim 4; found 5");

  // Pages.
  says(refusal([] { attn::page_pool<float>({.pages = -1}); }), "page_pool", "pages >= 0; found -1");
  constexpr idx_t huge = std::numeric_limits<idx_t>::max();
  says(refusal([] { attn::page_pool<float>({.pages = huge, .dim = 0}); }), "page_pool", "pages that memory can hold");
  says(refusal([] { attn::kv_cache<float>({.batch = huge, .dim = 4}); }), "kv_cache", "batch items");
  says(refusal([] { attn::sliding_window_cache<float>({.batch = huge, .dim = 4}); }), "sliding_window_cache",
       "batch items");
  says(refusal([] { attn::page_pool<float>({.pages = 1, .page_tokens = 0}); }), "page_pool", "tokens of a page");
  attn::page_pool<float> pool({.pages = 9, .page_tokens = 2, .heads = 2, .dim = 20, .value_dim = 12});
  attn::paged_cache<float> paged(pool, 4);
  paged.append(view(k), view(v), {.lengths = std::vector<idx_t>{3, 3, 0, 3}});
  check_items_of(paged, "paged_cache");
  check_step(paged, "new pages as the 3 that are free; found 5", {});
  CHECK(pool.free_pages() == 3);
  paged.copy_item(0, 2);  // shares a page that is not full: one copy more
  check_step(paged, "new pages as the 3 that are free; found 4", {.lengths = std::vector<idx_t>{3, 0, 3, 2}});
  says(refusal([&] { paged.copy_item(0, 1, 4); }), "paged_cache", "tokens to keep");
  const idx_t used = paged.table(0)[0], other = paged.table(1)[0];
  says(refusal([&] { paged.assign(3, std::vector<idx_t>{used, 9}, 4); }), "paged_cache", "pages from 0 to 8; found 9");
  says(refusal([&] { paged.assign(3, std::vector<idx_t>{used, -1}, 4); }), "paged_cache", "pages from 0 to 8");
  says(refusal([&] { paged.assign(3, std::vector<idx_t>{used, used}, 4); }), "paged_cache", "every page once");
  says(refusal([&] { paged.assign(3, std::vector<idx_t>{used, other}, 2); }), "paged_cache", "pages for the tokens 1");
  says(refusal([&] { paged.assign(3, std::vector<idx_t>{used}, -1); }), "paged_cache", "tokens >= 0");
  says(refusal([&] { paged.assign(3, std::vector<idx_t>{used}, huge); }), "paged_cache", "pages for the tokens");
  const idx_t free = pool.allocate();
  pool.release(free);
  says(refusal([&] { paged.assign(3, std::vector<idx_t>{used, free}, 4); }), "paged_cache", "pages in use");
  says(refusal([&] { pool.release(free); }), "page_pool", "a page in use");
  says(refusal([&] { pool.retain(10); }), "page_pool", "a page from 0 to 8");
  while (pool.free_pages() > 0) pool.allocate();
  says(refusal([&] { pool.allocate(); }), "page_pool", "free pages >= 1; found 0");
  CHECK(paged.tokens(3) == 3);
}

}  // namespace testing::cache_refusals_tests
