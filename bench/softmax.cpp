// Exact softmax over a set of keys.
#include <attn/softmax/full_softmax_backward.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/sliding_window_backward.hpp>
#include <attn/softmax/sliding_window_step.hpp>

#include <algorithm>

#include "flops.hpp"
#include "table.hpp"

namespace bench {
namespace {

double full_pairs(const problem& p) {
  const auto n = static_cast<double>(p.length);
  return p.causal ? n * (n + 1) / 2 : n * n;
}

double window_pairs(const problem& p) {
  const auto n = static_cast<double>(p.length), w = static_cast<double>(std::min(p.set.window, p.length - 1));
  const double one_side = n * w - w * (w + 1) / 2;
  return n + one_side * (p.causal ? 1 : 2);
}

double token_bytes(const problem& p) { return static_cast<double>(p.kv_heads * (p.dim + p.dim_v)) * sizeof(float); }

double seen_by_last(const problem& p) { return static_cast<double>(std::min(p.length, p.set.window + 1)); }

struct full_softmax_stream final : stream {
  attn::kv_cache<float> cache;

  explicit full_softmax_stream(const problem& p) : cache({.heads = p.kv_heads, .dim = p.dim, .value_dim = p.dim_v}) {
    cache.reserve(p.length);
  }
  std::unique_ptr<stream> copy() const override { return std::make_unique<full_softmax_stream>(*this); }
  void feed(input k, input v) override { cache.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    attn::full_softmax_step(cache, q, k, v, out, {}, exec);
  }
  void rewind(index tokens) override { cache.truncate(tokens); }
};

struct sliding_window_stream final : stream {
  attn::sliding_window_cache<float> cache;

  explicit sliding_window_stream(const problem& p)
      : cache({.heads = p.kv_heads, .dim = p.dim, .value_dim = p.dim_v}, {.left = p.set.window}) {}
  std::unique_ptr<stream> copy() const override { return std::make_unique<sliding_window_stream>(*this); }
  void feed(input k, input v) override { cache.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    attn::sliding_window_step(cache, q, k, v, out, {}, exec);
  }
  void rewind(index) override {}
};

runner prepare_full(const problem& p) {
  return [causal = p.causal](input q, input k, input v, output out, attn::execution& exec) {
    attn::full_softmax(q, k, v, out, {.causal = causal}, exec);
  };
}

runner prepare_window(const problem& p) {
  return [w = p.set.window, causal = p.causal](input q, input k, input v, output out, attn::execution& exec) {
    attn::sliding_window(q, k, v, out, {.causal = causal, .left = w, .right = w}, exec);
  };
}

training_runner train_full(const problem& p) {
  return {[causal = p.causal](const training_views& x, attn::execution& exec) {
            attn::full_softmax(x.q, x.k, x.v, x.out, {.causal = causal, .lse = x.lse}, exec);
          },
          [causal = p.causal](const training_views& x, attn::execution& exec) {
            attn::full_softmax_backward(x.q, x.k, x.v, x.out, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv},
                                        {.causal = causal, .lse = x.lse}, exec);
          }};
}

training_runner train_window(const problem& p) {
  const auto options = [w = p.set.window, causal = p.causal](const training_views& x) {
    return attn::sliding_window_options<float>{.causal = causal, .left = w, .right = w, .lse = x.lse};
  };
  return {[=](const training_views& x, attn::execution& exec) {
            attn::sliding_window(x.q, x.k, x.v, x.out, options(x), exec);
          },
          [=](const training_views& x, attn::execution& exec) {
            attn::sliding_window_backward(x.q, x.k, x.v, x.out, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv}, options(x),
                                          exec);
          }};
}

}  // namespace

std::vector<operator_entry> pattern_operators();
std::vector<decode_entry> pattern_decoders();

family softmax_family() {
  family softmax{
      .operators = {{.name = "full_softmax",
                     .cost = growth::quadratic,
                     .has_causal = true,
                     .exact = true,
                     .uses = {},
                     .flops = [](const problem& p) { return pair_flops(p, full_pairs(p)); },
                     .prepare = prepare_full,
                     .backward = {[](const problem& p) { return five_for_two(pair_flops(p, full_pairs(p)), p); },
                                  train_full}},
                    {.name = "sliding_window",
                     .cost = growth::linear,
                     .has_causal = true,
                     .exact = false,
                     .uses = {"window"},
                     .flops = [](const problem& p) { return pair_flops(p, window_pairs(p)); },
                     .prepare = prepare_window,
                     .backward = {[](const problem& p) { return five_for_two(pair_flops(p, window_pairs(p)), p); },
                                  train_window},
                     .settings = settings_of(&flags::window, {16, 32, 64, 256, 512})}},
      .decoders = {{.name = "full_softmax_decode",
                    .exact = true,
                    .uses = {},
                    .flops = [](const problem& p) { return pair_flops(p, static_cast<double>(p.length)); },
                    .cache_bytes = [](const problem& p) { return static_cast<double>(p.length) * token_bytes(p); },
                    .prepare = [](const problem& p) -> std::unique_ptr<stream> {
                      return std::make_unique<full_softmax_stream>(p);
                    }},
                   {.name = "sliding_window_decode",
                    .exact = false,
                    .uses = {"window"},
                    .flops = [](const problem& p) { return pair_flops(p, seen_by_last(p)); },
                    .cache_bytes = [](const problem& p) { return seen_by_last(p) * token_bytes(p); },
                    .prepare = [](const problem& p) -> std::unique_ptr<stream> {
                      return std::make_unique<sliding_window_stream>(p);
                    }}},
  };
  for (operator_entry& entry : pattern_operators()) softmax.operators.push_back(std::move(entry));
  for (decode_entry& entry : pattern_decoders()) softmax.decoders.push_back(std::move(entry));
  return softmax;
}

}  // namespace bench
