// Exact softmax over a set of keys.
#include <attn/softmax/full_softmax_backward.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/sliding_window_backward.hpp>
#include <attn/softmax/sliding_window_step.hpp>

#include <algorithm>

#include "flops.hpp"
#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

double full_scores(const problem& p) {
  const auto n = static_cast<double>(p.length);
  return p.causal ? n * (n + 1) / 2 : n * n;
}

double window_scores(const problem& p) {
  const auto n = static_cast<double>(p.length), w = static_cast<double>(std::min(p.set.window, p.length - 1));
  const double one_side = n * w - w * (w + 1) / 2;
  return n + one_side * (p.causal ? 1 : 2);
}

/// Of a token in a cache of C.
template <class C>
double token_bytes(const problem& p) {
  using format = attn::detail::row_format<C>;
  return static_cast<double>(p.kv_heads * (format::elements(p.dim, true) + format::elements(p.dim_v, false))) *
         sizeof(C) / format::rows;
}

double seen_by_last(const problem& p) { return static_cast<double>(std::min(p.length, p.set.window + 1)); }

/// C: elements of the cache.
template <class C>
struct full_softmax_stream final : stream {
  attn::kv_cache<C> cache;

  explicit full_softmax_stream(const problem& p) : cache({.heads = p.kv_heads, .dim = p.dim, .value_dim = p.dim_v}) {
    cache.reserve(p.length);
  }
  std::unique_ptr<stream> copy() const override { return std::make_unique<full_softmax_stream>(*this); }
  void feed(input k, input v) override { cache.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    attn::full_softmax_step(cache, q, k, v, out, {}, exec);
  }
  void rewind(idx_t tokens) override { cache.truncate(tokens); }
};

template <class C>
struct sliding_window_stream final : stream {
  attn::sliding_window_cache<C> cache;

  explicit sliding_window_stream(const problem& p)
      : cache({.heads = p.kv_heads, .dim = p.dim, .value_dim = p.dim_v}, {.left = p.set.window}) {}
  std::unique_ptr<stream> copy() const override { return std::make_unique<sliding_window_stream>(*this); }
  void feed(input k, input v) override { cache.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    attn::sliding_window_step(cache, q, k, v, out, {}, exec);
  }
  void rewind(idx_t) override {}
};

/// Of zeros, so that results stay those of softmax.
struct bias_table {
  idx_t heads, reach;
  std::vector<real> numbers, gradient;

  explicit bias_table(const problem& p)
      : heads(p.heads), reach(p.set.relative_bias),
        numbers(static_cast<std::size_t>(reach > 0 ? heads * (2 * reach + 1) : 0)), gradient(numbers) {}
  attn::tensor_view<const real, 2> view() const { return of(numbers.data()); }
  attn::tensor_view<real, 2> gradient_view() { return of(gradient.data()); }

 private:
  template <class R>
  attn::tensor_view<R, 2> of(R* data) const {
    if (reach == 0) return {};
    return {data, {heads, 2 * reach + 1}};
  }
};

runner prepare_full(const problem& p) {
  return [causal = p.causal, bias = bias_table(p)](input q, input k, input v, output out, attn::execution& exec) {
    attn::full_softmax(q, k, v, out, {.causal = causal, .relative_bias = bias.view()}, exec);
  };
}

runner prepare_window(const problem& p) {
  return [w = p.set.window, causal = p.causal, bias = bias_table(p)](input q, input k, input v, output out,
                                                                     attn::execution& exec) {
    attn::sliding_window(q, k, v, out, {.causal = causal, .left = w, .right = w, .relative_bias = bias.view()}, exec);
  };
}

training_runner train_full(const problem& p) {
  const auto bias = std::make_shared<bias_table>(p);
  const auto options = [bias, causal = p.causal](const training_views& x) {
    return attn::full_softmax_options<element>{.causal = causal, .relative_bias = bias->view(), .lse = x.lse};
  };
  return {[=](const training_views& x, attn::execution& exec) {
            attn::full_softmax(x.q, x.k, x.v, x.out, options(x), exec);
          },
          [=](const training_views& x, attn::execution& exec) {
            attn::full_softmax_backward(
                x.q, x.k, x.v, x.out, x.d_out,
                {.q = x.dq, .k = x.dk, .v = x.dv, .relative_bias = bias->gradient_view()}, options(x), exec);
          }};
}

training_runner train_window(const problem& p) {
  const auto bias = std::make_shared<bias_table>(p);
  const auto options = [bias, w = p.set.window, causal = p.causal](const training_views& x) {
    return attn::sliding_window_options<element>{
        .causal = causal, .left = w, .right = w, .relative_bias = bias->view(), .lse = x.lse};
  };
  return {[=](const training_views& x, attn::execution& exec) {
            attn::sliding_window(x.q, x.k, x.v, x.out, options(x), exec);
          },
          [=](const training_views& x, attn::execution& exec) {
            attn::sliding_window_backward(
                x.q, x.k, x.v, x.out, x.d_out,
                {.q = x.dq, .k = x.dk, .v = x.dv, .relative_bias = bias->gradient_view()}, options(x), exec);
          }};
}

/// Over caches of C: the decoders' own, or those --cache-type asks for, which err by `rounding`.
template <class C>
void add_decoders(std::vector<decode_entry>& to, const char* cache_type = "", double rounding = 0) {
  if constexpr (attn::detail::stores<C, element>) {
    if (*cache_type && std::same_as<C, element>) return;
    to.push_back({.name = "full_softmax_decode",
                  .exact = true,
                  .uses = {},
                  .flops = [](const problem& p) { return score_flops(p, static_cast<double>(p.length)); },
                  .cache_bytes = [](const problem& p) { return static_cast<double>(p.length) * token_bytes<C>(p); },
                  .prepare = [](const problem& p) -> std::unique_ptr<stream> {
                    return std::make_unique<full_softmax_stream<C>>(p);
                  },
                  .cache_type = cache_type,
                  .rounding = rounding});
    to.push_back({.name = "sliding_window_decode",
                  .exact = false,
                  .uses = {"window"},
                  .flops = [](const problem& p) { return score_flops(p, seen_by_last(p)); },
                  .cache_bytes = [](const problem& p) { return seen_by_last(p) * token_bytes<C>(p); },
                  .prepare = [](const problem& p) -> std::unique_ptr<stream> {
                    return std::make_unique<sliding_window_stream<C>>(p);
                  },
                  .cache_type = cache_type});
  }
}

}  // namespace

std::vector<operator_entry> pattern_operators();
std::vector<decode_entry> pattern_decoders();

family softmax_family() {
  family softmax{
      .title = "exact softmax over chosen keys",
      .operators = {{.name = "full_softmax",
                     .colour = "#1a1a1a",
                     .cost = growth::quadratic,
                     .has_causal = true,
                     .exact = true,
                     .uses = {"relative-bias"},
                     .flops = [](const problem& p) { return score_flops(p, full_scores(p)); },
                     .prepare = prepare_full,
                     .backward = {[](const problem& p) { return five_for_two(score_flops(p, full_scores(p)), p); },
                                  train_full},
                     .settings = settings_of(&flags::relative_bias, {128, 16384})},
                    {.name = "sliding_window",
                     .colour = "#1f77d0",
                     .cost = growth::linear,
                     .has_causal = true,
                     .exact = false,
                     .uses = {"window", "relative-bias"},
                     .flops = [](const problem& p) { return score_flops(p, window_scores(p)); },
                     .prepare = prepare_window,
                     .backward = {[](const problem& p) { return five_for_two(score_flops(p, window_scores(p)), p); },
                                  train_window},
                     .settings = settings_of(&flags::window, {16, 32, 64, 256, 512})}},
      .decoders = {},
  };
  add_decoders<element>(softmax.decoders);
#ifdef ATTN_BENCH_CACHE_half
  add_decoders<Eigen::half>(softmax.decoders, "half", 2e-3);
#endif
#ifdef ATTN_BENCH_CACHE_bfloat16
  add_decoders<Eigen::bfloat16>(softmax.decoders, "bfloat16", 1.5e-2);
#endif
#ifdef ATTN_BENCH_CACHE_int8
  add_decoders<std::int8_t>(softmax.decoders, "int8", 1.5e-2);
#endif
  for (operator_entry& entry : pattern_operators()) softmax.operators.push_back(std::move(entry));
  for (operator_entry& entry : softmax.operators) entry.has_fast = true;
  for (decode_entry& entry : pattern_decoders()) softmax.decoders.push_back(std::move(entry));
  return softmax;
}

}  // namespace bench::inline ATTN_BENCH_TYPE
