// Bad input of topk_blocks, its step and its cache: refused in one sentence; nothing is written.
#include "support/call_topk_blocks.hpp"
#include "support/refusals.hpp"

namespace testing {
namespace {

template <class Inputs>
std::vector<refused<Inputs>> block_refusals() {
  auto list = common_refusals<Inputs>();
  list.push_back({"blocks of 0", "block >= 1; found 0", [](Inputs& d) { d.options.block = 0; }});
  list.push_back({"negative blocks", "block >= 1; found -8", [](Inputs& d) { d.options.block = -8; }});
  list.push_back({"no block", "topk >= 1; found 0", [](Inputs& d) { d.options.topk = 0; }});
  list.push_back({"less than no block", "topk >= 1; found -3", [](Inputs& d) { d.options.topk = -3; }});
  return list;
}

}  // namespace

TEST_CASE("topk_blocks refuses what does not fit", "[refusals]") {
  using here = call_inputs<attn::topk_blocks_options<float>>;
  check_refused<compiled_topk_blocks<float>>("topk_blocks", block_refusals<here>());
}

TEST_CASE("topk_blocks_cache refuses what does not fit", "[refusals]") {
  const auto check = [](const char* says, const auto& call) {
    const std::string message = refusal(call);
    INFO(message << " should mention " << says);
    CHECK(well_formed(message, "topk_blocks_cache"));
    CHECK(message.find(says) != std::string::npos);
  };
  using cache_type = attn::topk_blocks_cache<float>;
  check("batch", [] { cache_type({.batch = -1, .heads = 2, .dim = 8}); });
  check("dim", [] { cache_type({.heads = 2, .dim = -8}); });
  check("block >= 1; found 0", [] { cache_type({.heads = 2, .dim = 8}, {.block = 0}); });
  cache_type cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5}, {.block = 4});
  const tensor<float> k(2, 2, 3, 8, 1), v(2, 2, 3, 5, 1), wide(2, 2, 3, 9, 1);
  cache.append(view(k), view(v));
  check("key dim", [&] { cache.append(view(wide), view(v)); });
  check("value dim", [&] { cache.append(view(k), view(k)); });
  check("overlap", [&] { cache.append(cache.keys(), view(v)); });
  check("tokens to keep", [&] { cache.truncate(4); });
  check("tokens to reserve", [&] { cache.reserve(-1); });
  CHECK(cache.tokens() == 3);
}

TEST_CASE("topk_blocks_step refuses what does not fit, and changes nothing", "[refusals]") {
  attn::topk_blocks_cache<float> cache({.batch = 2, .heads = 2, .dim = 8, .value_dim = 5}, {.block = 4});
  const tensor<float> q(2, 4, 2, 8, 1), k(2, 2, 2, 8, 1), v(2, 2, 2, 5, 1), other(2, 4, 3, 9, 1);
  tensor<float> out(2, 4, 2, 5, 7);
  cache.append(view(k), view(v));
  const auto shaped = [&](index b, index h, index i, index d) {
    return in_view<float>(other.data.data(), {b, h, i, d});
  };
  attn::execution serial;
  const auto check = [&](const char* says, in_view<float> q_, in_view<float> k_, in_view<float> v_,
                         const attn::topk_blocks_step_options<float>& options) {
    const std::string message =
        refusal([&] { compiled_topk_blocks<float>::step(cache, q_, k_, v_, view(out), options, {}, serial); });
    INFO(message << " should mention " << says);
    CHECK(well_formed(message, "topk_blocks_step"));
    CHECK(message.find(says) != std::string::npos);
    CHECK(cache.tokens() == 2);
    CHECK(out == tensor<float>(2, 4, 2, 5, 7));
  };
  const std::vector<float> three(3, 0.5f);
  check("topk >= 1; found 0", view(q), view(k), view(v), {.topk = 0});
  check("batch", shaped(1, 4, 2, 8), shaped(1, 2, 2, 8), shaped(1, 2, 2, 5), {});
  check("heads", view(q), shaped(2, 4, 2, 8), shaped(2, 4, 2, 5), {});
  check("dim", shaped(2, 4, 2, 9), shaped(2, 2, 2, 9), view(v), {});
  check("length", shaped(2, 4, 3, 8), view(k), view(v), {});
  check("sinks", view(q), view(k), view(v), {.sinks = three});
  check("overlap", {cache.keys().data(), {2, 4, 2, 8}, {0, 0, 8, 1}}, view(k), view(v), {});
  check("overlap", view(q), view(k), view(v), {.lse = {out.data.data(), {2, 4, 2}}});
  check("overlap", view(q), cache.keys(), view(v), {});
}

}  // namespace testing
