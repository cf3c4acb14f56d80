// Layers with weights. They have no heads: they are timed on what a model's tokens are before they are split into
// heads, x [length, heads * dim], which q's memory holds.
#include <attn/core/detail/pages.hpp>
#include <attn/core/random.hpp>
#include <attn/layers/feed_forward_backward.hpp>
#include <attn/layers/packed_weights.hpp>
#include <attn/layers/pooled_tokens_backward.hpp>
#include <attn/layers/project_backward.hpp>
#include <attn/layers/short_convolution_backward.hpp>
#include <attn/softmax/attention_weights.hpp>

#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

constexpr idx_t hidden_for_one = 4;  // hidden numbers of the feed-forward layer for one input
constexpr idx_t taps = 4;            // of the short convolution, as models have them
constexpr idx_t pooled_window = 4;   // as DeepSeek-V4's compressed sparse attention has it

/// A weight [outputs, inputs] that keeps the size of what it is multiplied by; in memory as the inputs' is.
struct random_weight {
  using memory = attn::detail::memory_vector<element>;
  idx_t outputs, inputs;
  std::shared_ptr<memory> numbers;

  random_weight(idx_t m, idx_t n, std::uint64_t seed)
      : outputs(m), inputs(n), numbers(std::make_shared<memory>(static_cast<std::size_t>(m * n))) {
    attn::random_numbers draw(seed, 1);
    const double size = 1 / std::sqrt(static_cast<double>(n));
    for (element& x : *numbers) x = static_cast<element>(static_cast<float>(size * draw.normal()));
  }
  attn::tensor_view<const element, 2> view() const { return {numbers->data(), {outputs, inputs}}; }
};

/// A weight as --weights has it, which copies share.
struct given_weight {
  attn::weight_field<element> field;
  std::shared_ptr<const void> owner;

  given_weight(idx_t m, idx_t n, std::uint64_t seed, const std::string& form) {
    const bool columns = form == "columns";
    const random_weight numbers(columns ? n : m, columns ? m : n, seed);
    const auto view = numbers.view();
    if (form == "rows") field = view, owner = numbers.numbers;
    else if (columns) field = {view.data(), {m, n}, {1, m}}, owner = numbers.numbers;
    else if (form == "packed") pack<element>(view);
    else if (form == "half") pack<Eigen::half>(view);
    else if (form == "bfloat16") pack<Eigen::bfloat16>(view);
    else if (form == "int8") pack<std::int8_t>(view);
    if (!owner)
      throw std::invalid_argument("attn_bench: --weights expects rows, columns, packed, half, bfloat16 or int8, which "
                                  "serves the type of elements; found \"" + form + "\"");
  }

 private:
  template <class Stored>
  void pack(const attn::tensor_view<const element, 2>& view) {
    if constexpr (attn::detail::stores_for<Stored, element>) {
      const auto packed = std::make_shared<const attn::packed_weights<Stored>>(view);
      field = *packed, owner = packed;
    }
  }
};

template <class T>
attn::tensor_view<T, 3> sequence(const attn::tensor_view<T>& x, idx_t channels) {
  return {x.data(), {1, x.extent(2), channels}};
}

double project_flops(const problem& p) {
  const auto channels = static_cast<double>(p.heads * p.dim);
  return 2 * static_cast<double>(p.length) * channels * channels;
}
double feed_forward_flops(const problem& p) { return 2 * hidden_for_one * project_flops(p); }
double twice(double (*flops)(const problem&), const problem& p) { return 2 * flops(p); }  // of inputs and of weights

runner prepare_project(const problem& p) {
  const idx_t channels = p.heads * p.dim;
  return [=, w = given_weight(channels, channels, 1, p.set.weights)](input q, input, input, output out,
                                                                     attn::execution& exec) {
    attn::project(sequence(q, channels), sequence(out, channels), {.weight = w.field}, exec);
  };
}

training_runner train_project(const problem& p) {
  const idx_t channels = p.heads * p.dim;
  return {{},
          [=, w = random_weight(channels, channels, 1), dw = random_weight(channels, channels, 2)](
              const training_views& x, attn::execution& exec) {
            attn::project_backward(
                sequence(x.q, channels), {.weight = w.view()}, sequence(x.d_out, channels),
                {.x = sequence(x.dq, channels), .weight = {dw.numbers->data(), {channels, channels}}}, exec);
          }};
}

runner prepare_feed_forward(const problem& p) {
  const idx_t channels = p.heads * p.dim, hidden = hidden_for_one * channels;
  return [=, up = given_weight(hidden, channels, 1, p.set.weights),
          down = given_weight(channels, hidden, 2, p.set.weights)](input q, input, input, output out,
                                                                   attn::execution& exec) {
    attn::feed_forward(sequence(q, channels), sequence(out, channels), {.up = up.field, .down = down.field}, {}, exec);
  };
}

training_runner train_feed_forward(const problem& p) {
  const idx_t channels = p.heads * p.dim, hidden = hidden_for_one * channels;
  return {{},
          [=, up = random_weight(hidden, channels, 1), down = random_weight(channels, hidden, 2),
           d_up = random_weight(hidden, channels, 3),
           d_down = random_weight(channels, hidden, 4)](const training_views& x, attn::execution& exec) {
            attn::feed_forward_backward(sequence(x.q, channels), {.up = up.view(), .down = down.view()},
                                        sequence(x.d_out, channels),
                                        {.x = sequence(x.dq, channels),
                                         .up = {d_up.numbers->data(), {hidden, channels}},
                                         .down = {d_down.numbers->data(), {channels, hidden}}},
                                        {}, exec);
          }};
}

double short_convolution_flops(const problem& p) {
  return 2 * taps * static_cast<double>(p.length) * static_cast<double>(p.heads * p.dim);
}

runner prepare_short_convolution(const problem& p) {
  const idx_t channels = p.heads * p.dim;
  return [=, w = random_weight(channels, taps, 1)](input q, input, input, output out, attn::execution& exec) {
    attn::short_convolution(sequence(q, channels), sequence(out, channels), {.weight = w.view()},
                            {.activation = attn::activation::silu}, exec);
  };
}

training_runner train_short_convolution(const problem& p) {
  const idx_t channels = p.heads * p.dim;
  return {{},
          [=, w = random_weight(channels, taps, 1), dw = random_weight(channels, taps, 2)](const training_views& x,
                                                                                           attn::execution& exec) {
            attn::short_convolution_backward(
                sequence(x.q, channels), {.weight = w.view()}, sequence(x.d_out, channels),
                {.x = sequence(x.dq, channels), .weight = {dw.numbers->data(), {channels, taps}}},
                {.activation = attn::activation::silu}, exec);
          }};
}

/// A token of every window of q, with logits.
double pooled_tokens_flops(const problem& p) {
  return 3 * static_cast<double>(p.length) * static_cast<double>(p.heads * p.dim);
}
/// The first windows of memory of the shape of out.
template <class T>
attn::tensor_view<T> pooled(const problem& p, T* memory) {
  return {memory, {1, p.heads, p.length / pooled_window, p.dim}};
}

runner prepare_pooled_tokens(const problem& p) {
  return [p, z = random_weight(p.heads * p.length, p.dim, 1)](input q, input, input, output out,
                                                              attn::execution& exec) {
    attn::pooled_tokens(q, pooled(p, out.data()),
                        {.window = pooled_window, .logits = input(z.numbers->data(), q.extents())}, exec);
  };
}

training_runner train_pooled_tokens(const problem& p) {
  return {{},
          [p, z = random_weight(p.heads * p.length, p.dim, 1), dz = random_weight(p.heads * p.length, p.dim, 2)](
              const training_views& x, attn::execution& exec) {
            attn::pooled_tokens_backward(
                x.q, pooled(p, x.d_out.data()), {.x = x.dq, .logits = output(dz.numbers->data(), x.q.extents())},
                {.window = pooled_window, .logits = input(z.numbers->data(), x.q.extents())}, exec);
          }};
}

/// Scores twice: for lse, which is not given, and for the weights.
double key_weights_flops(const problem& p) {
  const auto n = static_cast<double>(p.length);
  return 4 * (p.causal ? n * (n + 1) / 2 : n * n) * static_cast<double>(p.heads * p.dim);
}

runner prepare_key_weights(const problem& p) {
  return [causal = p.causal, sums = std::make_shared<std::vector<real>>(static_cast<std::size_t>(p.heads * p.length))](
             input q, input k, input, output, attn::execution& exec) {
    attn::key_weights(q, k, attn::tensor_view<real, 3>(sums->data(), {1, q.extent(1), k.extent(2)}),
                      {.causal = causal}, attn::detail::no_score{}, exec);
  };
}

}  // namespace

family layers_family() {
  return {.title = "layers",
          .operators = {{.name = "project",
                         .colour = "#c05780",
                         .cost = growth::linear,
                         .has_causal = false,
                         .exact = false,
                         .uses = {"weights"},
                         .flops = project_flops,
                         .prepare = prepare_project,
                         .approximates = false,
                         .backward = {[](const problem& p) { return twice(project_flops, p); }, train_project},
                         .has_fast = true},
                        {.name = "feed_forward",
                         .colour = "#a3a300",
                         .cost = growth::linear,
                         .has_causal = false,
                         .exact = false,
                         .uses = {"weights"},
                         .flops = feed_forward_flops,
                         .prepare = prepare_feed_forward,
                         .approximates = false,
                         // the hidden numbers are computed once more
                         .backward = {[](const problem& p) { return 2.5 * feed_forward_flops(p); }, train_feed_forward},
                         .has_fast = true},
                        {.name = "key_weights",
                         .colour = "#556b2f",
                         .cost = growth::quadratic,
                         .has_causal = true,
                         .exact = false,
                         .uses = {},
                         .flops = key_weights_flops,
                         .prepare = prepare_key_weights,
                         .approximates = false},
                        {.name = "short_convolution",
                         .colour = "#d3722c",
                         .cost = growth::linear,
                         .has_causal = false,
                         .exact = false,
                         .uses = {},
                         .flops = short_convolution_flops,
                         .prepare = prepare_short_convolution,
                         .approximates = false,
                         .moved_bytes =
                             [](const problem& p) {
                               return 2 * sizeof(element) * static_cast<double>(p.length * p.heads * p.dim);
                             },
                         // of inputs and of weights, and the convolution once more
                         .backward = {[](const problem& p) { return 3 * short_convolution_flops(p); },
                                      train_short_convolution}},
                        {.name = "pooled_tokens",
                         .colour = "#b39ddb",
                         .cost = growth::linear,
                         .has_causal = false,
                         .exact = false,
                         .uses = {},
                         .flops = pooled_tokens_flops,
                         .prepare = prepare_pooled_tokens,
                         .approximates = false,
                         .moved_bytes =
                             [](const problem& p) {
                               return (2 + 1.0 / pooled_window) * sizeof(element) *
                                      static_cast<double>(p.length * p.heads * p.dim);
                             },
                         .backward = {[](const problem& p) { return 3 * pooled_tokens_flops(p); },
                                      train_pooled_tokens}}},
          .decoders = {}};
}

}  // namespace bench::inline ATTN_BENCH_TYPE
