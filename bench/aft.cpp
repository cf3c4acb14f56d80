// Attention-free mixing: a softmax over tokens for every channel on its own.
#include <attn/aft/aft_conv_backward.hpp>
#include <attn/aft/aft_conv_step.hpp>
#include <attn/aft/aft_full_backward.hpp>
#include <attn/aft/aft_full_step.hpp>
#include <attn/aft/aft_local_backward.hpp>
#include <attn/aft/aft_local_step.hpp>
#include <attn/aft/aft_simple_backward.hpp>
#include <attn/aft/aft_simple_step.hpp>

#include <algorithm>
#include <memory>
#include <vector>

#include "inputs.hpp"
#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

// A key a row and channel sees: e^k v and e^k, each multiplied by e^w and added.
double seen_flops(const problem& p, double scores) { return 4.0 * scores * static_cast<double>(p.dim * p.heads); }

double all_scores(const problem& p) {
  const auto n = static_cast<double>(p.length);
  return p.causal ? n * (n + 1) / 2 : n * n;
}

// The sums of keys again, those of g = dy / den and h = y g for each key, and, for the biases, two products over the
// channels.
double backward_flops(const problem& p, double scores) { return 3 * seen_flops(p, scores); }

// Those within `side` tokens; the rest comes as running sums, one addition a token.
double near_scores(const problem& p, idx_t side) {
  const auto n = static_cast<double>(p.length), s = static_cast<double>(std::min(side, p.length - 1));
  return n + (n * s - s * (s + 1) / 2) * (p.causal ? 1 : 2) + n;
}

idx_t local_window(const flags& set) { return std::max<idx_t>(set.window, 1); }
idx_t kernel_width(const flags& set) { return 2 * (std::max<idx_t>(set.window, 2) / 2) - 1; }

double column_bytes(const problem& p) { return static_cast<double>(p.kv_heads * p.dim) * sizeof(element); }

/// Unit normal biases [1, heads, rows, columns].
input biases(idx_t heads, idx_t rows, idx_t columns) {
  return {drawn_numbers<element>(role::bias, static_cast<std::size_t>(heads * rows * columns)),
          {1, heads, rows, columns}};
}

runner prepare_full(const problem& p) {
  const input w = biases(1, p.length, p.length);
  if (p.set.far == 0)
    return [=, causal = p.causal](input q, input k, input v, output out, attn::execution& exec) {
      attn::aft_full(q, k, v, out, w, {.causal = causal}, exec);
    };
  // Row and key maxima that miss each other: a key far above the others in one channel of each head, and in some blocks
  // a row whose bias for another key is as far above its others.
  const element far_above(200);
  const element* const normal = drawn_numbers<element>(role::key, static_cast<std::size_t>(p.heads * p.length * p.dim));
  auto keys = std::make_shared<std::vector<element>>(normal, normal + p.heads * p.length * p.dim);
  for (idx_t h = 0; h < p.heads; ++h) (*keys)[static_cast<std::size_t>(h * p.length * p.dim)] = far_above;
  auto biased = std::make_shared<std::vector<element>>(w.data(), w.data() + p.length * p.length);
  constexpr idx_t rows = attn::detail::block_rows;
  double due = 1;  // at least one block
  for (idx_t row = 0; row < p.length; row += rows, due += p.set.far) {
    if (due < 1) continue;
    due -= 1;
    const idx_t last = std::min(row + rows, p.length) - 1;
    (*biased)[static_cast<std::size_t>(last * p.length + last)] = far_above;
  }
  return [=, causal = p.causal](input q, input k, input v, output out, attn::execution& exec) {
    attn::aft_full(q, input(keys->data(), k.extents()), v, out, input(biased->data(), w.extents()), {.causal = causal},
                   exec);
  };
}

runner prepare_local(const problem& p) {
  const idx_t s = local_window(p.set);
  return [w = biases(1, p.length, 2 * s - 1), s, causal = p.causal](input q, input k, input v, output out,
                                                                    attn::execution& exec) {
    attn::aft_local(q, k, v, out, w, {.causal = causal, .window = s, .band = true}, exec);
  };
}

runner prepare_simple(const problem& p) {
  return [causal = p.causal](input q, input k, input v, output out, attn::execution& exec) {
    attn::aft_simple(q, k, v, out, {.causal = causal}, exec);
  };
}

runner prepare_conv(const problem& p) {
  return [w = biases(1, p.heads, kernel_width(p.set)), causal = p.causal](input q, input k, input v, output out,
                                                                          attn::execution& exec) {
    attn::aft_conv(q, k, v, out, w, {.causal = causal}, exec);
  };
}

// With the gradient of w. `call` takes the views, w, its gradient and the execution.
template <class Call>
training_runner train_biased(input w, Call call) {
  const auto count = static_cast<std::size_t>(w.extent(1) * w.extent(2) * w.extent(3));
  const output dw(result_memory<element>(count, parameter_slot), w.extents());
  return {{}, [=](const training_views& x, attn::execution& exec) { call(x, w, dw, exec); }};
}

training_runner train_full(const problem& p) {
  return train_biased(biases(1, p.length, p.length),
                      [causal = p.causal](const training_views& x, input w, output dw, attn::execution& exec) {
                        attn::aft_full_backward(x.q, x.k, x.v, w, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv, .w = dw},
                                                {.causal = causal}, exec);
                      });
}

training_runner train_local(const problem& p) {
  const idx_t s = local_window(p.set);
  return train_biased(biases(1, p.length, 2 * s - 1),
                      [s, causal = p.causal](const training_views& x, input w, output dw, attn::execution& exec) {
                        attn::aft_local_backward(x.q, x.k, x.v, w, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv, .w = dw},
                                                 {.causal = causal, .window = s, .band = true}, exec);
                      });
}

training_runner train_simple(const problem& p) {
  return {{}, [causal = p.causal](const training_views& x, attn::execution& exec) {
            attn::aft_simple_backward(x.q, x.k, x.v, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv}, {.causal = causal},
                                      exec);
          }};
}

training_runner train_conv(const problem& p) {
  return train_biased(biases(1, p.heads, kernel_width(p.set)),
                      [causal = p.causal](const training_views& x, input w, output dw, attn::execution& exec) {
                        attn::aft_conv_backward(x.q, x.k, x.v, w, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv, .w = dw},
                                                {.causal = causal}, exec);
                      });
}

// Decoding: every key head with one query head.
struct full_stream final : stream {
  attn::kv_cache<element> cache;
  input w;

  explicit full_stream(const problem& p) : cache({.heads = p.kv_heads, .dim = p.dim}), w(biases(1, 1, p.length)) {
    cache.reserve(p.length);
  }
  std::unique_ptr<stream> copy() const override { return std::make_unique<full_stream>(*this); }
  void feed(input k, input v) override { cache.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    const idx_t heads = k.extent(1), length = cache.tokens() + 1;  // one row of biases stands for all
    attn::aft_full_step(cache, q.slice(1, 0, heads), k, v, out.slice(1, 0, heads),
                        input(w.data(), {1, 1, length, length}, {0, 0, 0, 1}), {}, exec);
  }
  void rewind(idx_t tokens) override { cache.truncate(tokens); }
};

struct local_stream final : stream {
  attn::aft_local_state<element> state;
  input w;

  explicit local_stream(const problem& p)
      : state({.heads = p.kv_heads, .dim = p.dim}, {.window = local_window(p.set)}),
        w(biases(1, 1, 2 * state.window() - 1)) {}
  std::unique_ptr<stream> copy() const override { return std::make_unique<local_stream>(*this); }
  void feed(input k, input v) override { state.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    const idx_t heads = k.extent(1);
    const std::array<idx_t, 4> shape = {1, 1, state.tokens() + 1, 2 * state.window() - 1};
    attn::aft_local_step(state, q.slice(1, 0, heads), k, v, out.slice(1, 0, heads),
                         input(w.data(), shape, {0, 0, 0, 1}), {.band = true}, exec);
  }
  void rewind(idx_t) override {}
};

struct simple_stream final : stream {
  attn::aft_simple_state<element> state;

  explicit simple_stream(const problem& p) : state({.heads = p.kv_heads, .dim = p.dim}) {}
  std::unique_ptr<stream> copy() const override { return std::make_unique<simple_stream>(*this); }
  void feed(input k, input v) override { state.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    const idx_t heads = k.extent(1);
    attn::aft_simple_step(state, q.slice(1, 0, heads), k, v, out.slice(1, 0, heads), {}, exec);
  }
  void rewind(idx_t) override {}
};

struct conv_stream final : stream {
  attn::aft_conv_state<element> state;
  input w;

  explicit conv_stream(const problem& p)
      : state({.heads = p.kv_heads, .dim = p.dim}, {.width = kernel_width(p.set)}),
        w(biases(1, p.kv_heads, kernel_width(p.set))) {}
  std::unique_ptr<stream> copy() const override { return std::make_unique<conv_stream>(*this); }
  void feed(input k, input v) override { state.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    const idx_t heads = k.extent(1);
    attn::aft_conv_step(state, q.slice(1, 0, heads), k, v, out.slice(1, 0, heads), w, {}, exec);
  }
  void rewind(idx_t) override {}
};

template <class Stream>
std::unique_ptr<stream> make_stream(const problem& p) {
  return std::make_unique<Stream>(p);
}

double step_flops(const problem& p, idx_t seen) {
  return 4.0 * static_cast<double>(p.kv_heads * p.dim) * static_cast<double>(seen);
}
idx_t in_window(const problem& p, idx_t window) { return std::min(p.length, window); }

}  // namespace

family aft_family() {
  return {
      .title = "attention-free",
      .operators =
          {{.name = "aft_full",
            .colour = "#8e3bb0",
            .cost = growth::quadratic,
            .has_causal = true,
            .exact = false,
            .uses = {"far"},
            .flops = [](const problem& p) { return seen_flops(p, all_scores(p)); },
            .prepare = prepare_full,
            .parameter_bytes =
                [](const problem& p) {
                  return static_cast<double>(p.length) * static_cast<double>(p.length) * sizeof(element);
                },
            .approximates = false,
            .backward = {[](const problem& p) { return backward_flops(p, all_scores(p)); }, train_full}},
           {.name = "aft_local",
            .colour = "#c774d8",
            .cost = growth::linear,
            .has_causal = true,
            .exact = false,
            .uses = {"window"},
            .flops = [](const problem& p) { return seen_flops(p, near_scores(p, local_window(p.set) - 1)); },
            .prepare = prepare_local,
            .parameter_bytes =
                [](const problem& p) {
                  return static_cast<double>(p.length * (2 * local_window(p.set) - 1)) * sizeof(element);
                },
            .approximates = false,
            .backward = {[](const problem& p) { return backward_flops(p, near_scores(p, local_window(p.set) - 1)); },
                         train_local}},
           {.name = "aft_simple",
            .colour = "#5b2a86",
            .cost = growth::linear,
            .has_causal = true,
            .exact = false,
            .uses = {},
            .flops = [](const problem& p) { return seen_flops(p, static_cast<double>(p.length)); },
            .prepare = prepare_simple,
            .approximates = false,
            .moved_bytes = [](const problem& p) { return 4 * static_cast<double>(p.length) * column_bytes(p); },
            // Two passes of sums, no biases.
            .backward = {[](const problem& p) { return 2 * seen_flops(p, static_cast<double>(p.length)); },
                         train_simple}},
           {.name = "aft_conv",
            .colour = "#e377c2",
            .cost = growth::linear,
            .has_causal = true,
            .exact = false,
            .uses = {"window"},
            .flops = [](const problem& p) { return seen_flops(p, near_scores(p, kernel_width(p.set) / 2)); },
            .prepare = prepare_conv,
            .approximates = false,
            .backward = {[](const problem& p) { return backward_flops(p, near_scores(p, kernel_width(p.set) / 2)); },
                         train_conv}}},
      .decoders = {{.name = "aft_full_decode",
                    .exact = false,
                    .uses = {},
                    .flops = [](const problem& p) { return step_flops(p, p.length); },
                    .cache_bytes = [](const problem& p) { return 2 * static_cast<double>(p.length) * column_bytes(p); },
                    .prepare = make_stream<full_stream>,
                    .approximates = false},
                   {.name = "aft_local_decode",
                    .exact = false,
                    .uses = {"window"},
                    .flops = [](const problem& p) { return step_flops(p, in_window(p, local_window(p.set))); },
                    .cache_bytes =
                        [](const problem& p) {
                          return (2 * static_cast<double>(in_window(p, local_window(p.set))) + 3) * column_bytes(p);
                        },
                    .prepare = make_stream<local_stream>,
                    .approximates = false},
                   {.name = "aft_simple_decode",
                    .exact = false,
                    .uses = {},
                    .flops = [](const problem& p) { return step_flops(p, 1); },
                    .cache_bytes = [](const problem& p) { return 2 * 3 * column_bytes(p); },
                    .prepare = make_stream<simple_stream>,
                    .approximates = false,
                    .rewritten = true},
                   {.name = "aft_conv_decode",
                    .exact = false,
                    .uses = {"window"},
                    .flops = [](const problem& p) { return step_flops(p, in_window(p, kernel_width(p.set) / 2 + 1)); },
                    .cache_bytes =
                        [](const problem& p) {
                          return (2 * static_cast<double>(in_window(p, kernel_width(p.set) / 2 + 1)) + 3) *
                                 column_bytes(p);
                        },
                    .prepare = make_stream<conv_stream>,
                    .approximates = false}},
  };
}

}  // namespace bench::inline ATTN_BENCH_TYPE
