// Exact softmax over a set of keys.
#include <attn/softmax/full_softmax_backward.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/sliding_window_backward.hpp>
#include <attn/softmax/sliding_window_step.hpp>

#include <algorithm>

#include "cache_types.hpp"
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

double seen_by_last(const problem& p) { return static_cast<double>(std::min(p.length, p.set.window + 1)); }

/// C: elements of the cache.
template <class C>
struct full_softmax_stream final : stream {
  attn::kv_cache<elements_of<C>> cache;

  explicit full_softmax_stream(const problem& p) : full_softmax_stream(p, p.dim, p.dim_v) {}
  full_softmax_stream(const problem& p, idx_t dim, idx_t dim_v)
      : cache({.heads = p.kv_heads, .dim = dim, .value_dim = dim_v}, {.rotate = rotates<C>}) {
    cache.reserve(p.length);
  }
  std::unique_ptr<stream> copy() const override { return std::make_unique<full_softmax_stream>(*this); }
  void feed(input k, input v) override { cache.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    attn::full_softmax_step(cache, q, k, v, out, {}, exec);
  }
  void rewind(idx_t tokens) override { cache.truncate(tokens); }
};

/// The first numbers of a head, so many that no vector divides them, as in models with heads of 36, 72 or 100.
constexpr idx_t odd_dim(idx_t dim) { return dim > 16 ? dim - 12 : dim; }
problem with_odd_dims(problem p) {
  p.dim = odd_dim(p.dim), p.dim_v = odd_dim(p.dim_v);
  return p;
}

template <class C>
struct odd_dim_stream final : stream {
  full_softmax_stream<C> of;

  explicit odd_dim_stream(const problem& p) : of(p, odd_dim(p.dim), odd_dim(p.dim_v)) {}
  std::unique_ptr<stream> copy() const override { return std::make_unique<odd_dim_stream>(*this); }
  template <class View>
  static View part(const View& x) {
    return x.slice(3, 0, odd_dim(x.extent(3)));
  }
  void feed(input k, input v) override { of.feed(part(k), part(v)); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    of.step(part(q), part(k), part(v), part(out), exec);
  }
  void rewind(idx_t tokens) override { of.rewind(tokens); }
};

template <class C>
struct sliding_window_stream final : stream {
  attn::sliding_window_cache<elements_of<C>> cache;

  explicit sliding_window_stream(const problem& p)
      : cache({.heads = p.kv_heads, .dim = p.dim, .value_dim = p.dim_v},
              {.left = p.set.window, .rotate = rotates<C>}) {}
  std::unique_ptr<stream> copy() const override { return std::make_unique<sliding_window_stream>(*this); }
  void feed(input k, input v) override { cache.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    attn::sliding_window_step(cache, q, k, v, out, {}, exec);
  }
  void rewind(idx_t) override {}
};

/// Options beside the plain ones, such that results stay those of softmax.
struct parameters {
  bool causal;
  idx_t heads, length, dim, reach, key_reach, query_reach;
  double dropout;
  std::vector<real> bias, d_bias, keys, d_keys, queries, d_queries, decay, d_decay;
  std::vector<std::uint8_t> seen;

  explicit parameters(const problem& p)
      : causal(p.causal), heads(p.heads), length(p.length), dim(p.dim), reach(p.set.relative_bias),
        key_reach(p.set.relative_keys), query_reach(p.set.position_queries),
        dropout(static_cast<double>(p.set.dropout) / 100), bias(size(reach > 0 ? 2 * reach + 1 : 0)), d_bias(bias),
        keys(size(key_reach > 0 ? (2 * key_reach + 1) * dim : 0)), d_keys(keys),
        queries(size(query_reach > 0 ? (2 * query_reach + 1) * dim : 0)), d_queries(queries),
        decay(size(p.set.log_decay && causal ? length : 0)), d_decay(decay),
        seen(static_cast<std::size_t>(p.set.key_mask ? length : 0), 1) {}

  /// In some options.
  template <class Options>
  Options in(Options o) const {
    o.causal = causal;
    o.relative_bias = table(bias.data());
    if (!keys.empty()) o.relative_keys = {keys.data(), {heads, 2 * key_reach + 1, dim}};
    if (!queries.empty()) o.position_queries = {queries.data(), {heads, 2 * query_reach + 1, dim}};
    if (!decay.empty()) o.log_decay = {decay.data(), {1, heads, length}};
    if (!seen.empty()) o.key_mask = attn::tensor_view<const std::uint8_t, 2>(seen.data(), {1, length});
    o.dropout = {dropout, 1};
    return o;
  }
  /// And the gradients of a backward pass.
  template <class Gradients>
  Gradients gradients(const training_views& x) {
    Gradients g{.q = x.dq, .k = x.dk, .v = x.dv};
    g.relative_bias = table(d_bias.data());
    if (!keys.empty()) g.relative_keys = {d_keys.data(), {heads, 2 * key_reach + 1, dim}};
    if (!queries.empty()) g.position_queries = {d_queries.data(), {heads, 2 * query_reach + 1, dim}};
    if (!decay.empty()) g.log_decay = {d_decay.data(), {1, heads, length}};
    return g;
  }

 private:
  std::size_t size(idx_t each) const { return static_cast<std::size_t>(heads * each); }
  template <class R>
  attn::tensor_view<R, 2> table(R* data) const {
    if (reach == 0) return {};
    return {data, {heads, 2 * reach + 1}};
  }
};

attn::full_softmax_options<element> full_options(const parameters& of) {
  return of.in(attn::full_softmax_options<element>{});
}
attn::sliding_window_options<element> window_options(const parameters& of, idx_t w) {
  return of.in(attn::sliding_window_options<element>{.left = w, .right = w});
}

runner prepare_full(const problem& p) {
  return [of = parameters(p)](input q, input k, input v, output out, attn::execution& exec) {
    attn::full_softmax(q, k, v, out, full_options(of), exec);
  };
}

/// On normal numbers nothing is left out: times that tell something are those on data (--input).
runner prepare_skip(const problem& p) {
  return [causal = p.causal, below = static_cast<real>(p.set.skip)](input q, input k, input v, output out,
                                                                    attn::execution& exec) {
    attn::full_softmax(q, k, v, out, {.causal = causal, .skip_below = below}, exec);
  };
}

runner prepare_window(const problem& p) {
  return [of = parameters(p), w = p.set.window](input q, input k, input v, output out, attn::execution& exec) {
    attn::sliding_window(q, k, v, out, window_options(of, w), exec);
  };
}

training_runner train_full(const problem& p) {
  const auto of = std::make_shared<parameters>(p);
  const auto options = [of](const training_views& x) {
    auto o = full_options(*of);
    o.lse = x.lse;
    return o;
  };
  return {[=](const training_views& x, attn::execution& exec) {
            attn::full_softmax(x.q, x.k, x.v, x.out, options(x), exec);
          },
          [=](const training_views& x, attn::execution& exec) {
            attn::full_softmax_backward(x.q, x.k, x.v, x.out, x.d_out,
                                        of->gradients<attn::full_softmax_gradients<element>>(x), options(x), exec);
          }};
}

training_runner train_window(const problem& p) {
  const auto of = std::make_shared<parameters>(p);
  const auto options = [of, w = p.set.window](const training_views& x) {
    auto o = window_options(*of, w);
    o.lse = x.lse;
    return o;
  };
  return {[=](const training_views& x, attn::execution& exec) {
            attn::sliding_window(x.q, x.k, x.v, x.out, options(x), exec);
          },
          [=](const training_views& x, attn::execution& exec) {
            attn::sliding_window_backward(x.q, x.k, x.v, x.out, x.d_out,
                                          of->gradients<attn::sliding_window_gradients<element>>(x), options(x), exec);
          }};
}

/// Over caches of C.
template <class C>
void add_decoders(std::vector<decode_entry>& to, const char* cache_type, double rounding) {
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
  to.push_back({.name = "full_softmax_odd_dim_decode",
                .exact = false,
                .uses = {},
                .flops = [](const problem& p) {
                  return score_flops(with_odd_dims(p), static_cast<double>(p.length));
                },
                .cache_bytes = [](const problem& p) {
                  return static_cast<double>(p.length) * token_bytes<C>(with_odd_dims(p));
                },
                .prepare = [](const problem& p) -> std::unique_ptr<stream> {
                  return std::make_unique<odd_dim_stream<C>>(p);
                },
                .approximates = false,
                .cache_type = cache_type});
  if constexpr (attn::detail::row_format<elements_of<C>>::tail == 0) {
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
std::vector<operator_entry> pointwise_operators();
std::vector<operator_entry> latent_operators();
std::vector<decode_entry> latent_decoders();
std::vector<operator_entry> selected_operators();
std::vector<operator_entry> block_list_operators();
std::vector<decode_entry> selected_decoders();
std::vector<operator_entry> compressed_operators();
std::vector<decode_entry> compressed_decoders();

family softmax_family() {
  family softmax{
      .title = "exact softmax over chosen keys",
      .operators = {{.name = "full_softmax",
                     .colour = "#1a1a1a",
                     .cost = growth::quadratic,
                     .has_causal = true,
                     .exact = true,
                     .uses = {"relative-bias", "relative-keys", "position-queries", "log-decay", "key-mask", "dropout"},
                     .flops = [](const problem& p) { return score_flops(p, full_scores(p)); },
                     .prepare = prepare_full,
                     .backward = {[](const problem& p) { return five_for_two(score_flops(p, full_scores(p)), p); },
                                  train_full},
                     .settings = {{{&flags::relative_bias, 128}},
                                  {{&flags::relative_bias, 16384}},
                                  {{&flags::relative_keys, 16384}},
                                  {{&flags::position_queries, 16384}},
                                  {{&flags::key_mask, 1}},
                                  {{&flags::dropout, 10}}},
                     .causal_settings = {{{&flags::relative_bias, 128}},
                                         {{&flags::relative_bias, 16384}},
                                         {{&flags::log_decay, 1}}}},
                    {.name = "skip_softmax",
                     .colour = "#6a6a6a",
                     .cost = growth::quadratic,
                     .has_causal = true,
                     .exact = false,
                     .uses = {"skip"},
                     .flops = [](const problem& p) { return score_flops(p, full_scores(p)); },
                     .prepare = prepare_skip,
                     .settings = settings_of(&flags::skip, {3, 4, 5, 10})},
                    {.name = "sliding_window",
                     .colour = "#1f77d0",
                     .cost = growth::linear,
                     .has_causal = true,
                     .exact = false,
                     .uses = {"window", "relative-bias", "relative-keys", "position-queries", "log-decay", "key-mask",
                              "dropout"},
                     .flops = [](const problem& p) { return score_flops(p, window_scores(p)); },
                     .prepare = prepare_window,
                     .backward = {[](const problem& p) { return five_for_two(score_flops(p, window_scores(p)), p); },
                                  train_window},
                     .settings = settings_of(&flags::window, {16, 32, 64, 256, 512})}},
      .decoders = {},
  };
  each_cache_type([&]<class C>(const char* name, double rounding) {
    add_decoders<C>(softmax.decoders, name, rounding);
  });
  for (operator_entry& entry : pattern_operators()) softmax.operators.push_back(std::move(entry));
  for (operator_entry& entry : softmax.operators) entry.has_fast = true;
  for (decode_entry& entry : pattern_decoders()) softmax.decoders.push_back(std::move(entry));
  for (operator_entry& entry : pointwise_operators()) softmax.operators.push_back(std::move(entry));
  for (operator_entry& entry : latent_operators()) softmax.operators.push_back(std::move(entry));
  for (decode_entry& entry : latent_decoders()) softmax.decoders.push_back(std::move(entry));
  for (operator_entry& entry : selected_operators()) softmax.operators.push_back(std::move(entry));
  for (operator_entry& entry : block_list_operators()) softmax.operators.push_back(std::move(entry));
  for (decode_entry& entry : selected_decoders()) softmax.decoders.push_back(std::move(entry));
  for (operator_entry& entry : compressed_operators()) softmax.operators.push_back(std::move(entry));
  for (decode_entry& entry : compressed_decoders()) softmax.decoders.push_back(std::move(entry));
  return softmax;
}

}  // namespace bench::inline ATTN_BENCH_TYPE
