// encoder_block_backward against the reverse pass of its reference: around attention, around Fourier mixing, in stacks.
#include "layers/gradients.hpp"
#include "reference/fnet.hpp"
#include "support/call_fourier.hpp"
#include "support/pairwise.hpp"

namespace testing::encoder_block_backward_tests {
namespace {

// The weights of a block around attention of two heads, in the order of a case's inputs.
constexpr int parameters = 12;
template <class T>
struct block_arguments {
  T gamma_1, beta_1, gamma_2, beta_2, up, down, up_bias, down_bias, query, key, value, output, residual, residual_bias;

  block_arguments(bool all, bool projected, const std::vector<T>& given, int first) {
    const std::vector<T> rest(given.begin() + first, given.end());
    next_of<T> next(rest);
    gamma_1 = next(all), beta_1 = next(all), gamma_2 = next(all), beta_2 = next(all);
    up = next(), down = next(), up_bias = next(all), down_bias = next(all);
    query = next(), key = next(), value = next(), output = next();
    residual = next(projected), residual_bias = next(projected && all);
  }
};

struct block_case {
  idx_t batch = 2, length = 21, dim = 10, hidden = 14, blocks = 1;
  bool norm_first = true, all = true, causal = false, mixed = false, fourier = false, in_place = false, rms = false;
  attn::activation f = attn::activation::gelu;
  idx_t out = 0;  // the width of out, where the residual is projected

  bool projected() const { return out > 0; }
  idx_t width() const { return projected() ? out : dim; }
};

void add_block(gradient_case& r, const block_case& a, std::uint64_t seed) {
  const auto vector_of = [&](const char* name, idx_t n, double mean) {
    if (!a.all) return;
    tensor<double> v = random_vector(++seed, n, 0.5);
    for (double& value : v.data) value += mean;
    add(r, name, v);
  };
  const idx_t width = a.width(), width_1 = a.norm_first ? a.dim : width;
  vector_of("gamma_1", width_1, 1), vector_of("beta_1", width_1, 0);
  vector_of("gamma_2", width, 1), vector_of("beta_2", width, 0);
  add(r, "up", random_weight(++seed, a.hidden, width)), add(r, "down", random_weight(++seed, width, a.hidden));
  vector_of("up_bias", a.hidden, 0), vector_of("down_bias", width, 0);
  for (const char* name : {"query", "key", "value"})
    if (!a.fourier) add(r, name, random_weight(++seed, a.dim, a.dim));
  if (!a.fourier) add(r, "output", random_weight(++seed, width, a.dim));
  if (!a.projected()) return;
  add(r, "residual", random_weight(++seed, width, a.dim));
  vector_of("residual_bias", width, 0);
}

int block_inputs(const block_case& a) {
  return (a.all ? parameters : parameters - 6) - (a.fourier ? 4 : 0) + (a.projected() ? 1 + a.all : 0);
}

constexpr double eps = 1e-2;  // where features are few, variances are small

tensor<variable> reference_block(const block_case& a, const tensor<variable>& x,
                                 const block_arguments<tensor<variable>>& in) {
  const reference::basic_encoder_block_weights<variable> w{
      in.gamma_1, in.beta_1,   in.gamma_2,      in.beta_2, {in.up, in.up_bias, in.down, in.down_bias},
      in.residual, in.residual_bias};
  const reference::basic_multi_head_weights<variable> heads{in.query, in.key, in.value, in.output, {}, {}, {}, {}};
  const auto mix = [&](const tensor<variable>& s) {
    if (a.fourier) {
      tensor<variable> scaled = s;  // the sums of fnet are as large as the square root of all its inputs
      for (auto& v : scaled.data) v = v * 0.125;
      return reference::fnet(scaled);
    }
    return reference::multi_head_around(s, s, heads, 2, 2, [&](const auto& q, const auto& k, const auto& v) {
      return attention_pair<float>{.heads = 2, .causal = a.causal}.reference(q, k, v);
    });
  };
  return reference::encoder_block(
      x, mix, w, a.norm_first, [&](const variable& v) { return activated(a.f, v); }, eps, a.rms);
}

// One block through the library, there and back.
template <class S>
struct block {
  using L = compiled_layers<S>;
  const block_case& a;
  block_arguments<tensor<S>> in;
  attention_pair<S> attention{.heads = 2, .causal = a.causal};

  block(const block_case& c, const std::vector<tensor<S>>& all, int first)
      : a(c), in(c.all, c.projected(), pad(c, all, first), first) {}
  // Fourier mixing has no weights: four that are never read.
  template <class T>
  static std::vector<T> pad(const block_case& c, std::vector<T> all, int first) {
    all.resize(static_cast<std::size_t>(first + block_inputs(c)));
    if (c.fourier) all.resize(all.size() + 4);
    return all;
  }

  attn::encoder_block_weights<S> weights() const {
    return {.norm_1 = {.gamma = vector(in.gamma_1), .beta = vector(in.beta_1)},
            .norm_2 = {.gamma = vector(in.gamma_2), .beta = vector(in.beta_2)},
            .feed_forward = {.up = matrix(in.up),
                             .down = matrix(in.down),
                             .up_bias = vector(in.up_bias),
                             .down_bias = vector(in.down_bias)},
            .residual = {.weight = matrix(in.residual), .bias = vector(in.residual_bias)}};
  }
  attn::multi_head_weights<S> heads() const {
    return {.query = matrix(in.query), .key = matrix(in.key), .value = matrix(in.value), .output = matrix(in.output)};
  }
  static void scale(in_sequence<S> x, out_sequence<S> to) {
    for (idx_t b = 0; b < x.extent(0); ++b)
      for (idx_t i = 0; i < x.extent(1); ++i)
        for (idx_t d = 0; d < x.extent(2); ++d) to(b, i, d) = static_cast<S>(static_cast<real<S>>(x(b, i, d)) / 8);
  }
  mixer_of<S> mixer() const {
    if (a.fourier)
      return [](in_sequence<S> x, out_sequence<S> out, attn::execution& exec) {
        tensor<S> scaled(x.extent(0), 1, x.extent(1), x.extent(2));
        scale(x, sequence(scaled));
        compiled_fnet<S>::call(view(std::as_const(scaled)), attn::split_heads(out, 1), {}, exec);
      };
    return [this](in_sequence<S> x, out_sequence<S> out, attn::execution& exec) {
      L::multi_head(x, out, heads(), attention.forward(), {.heads = 2}, exec);
    };
  }
  mixer_backward_of<S> mixer_backward(const block_arguments<tensor<S>*>& g, bool accumulate) const {
    if (a.fourier)
      return [](in_sequence<S>, in_sequence<S>, in_sequence<S> d_out, out_sequence<S> dx, attn::execution& exec) {
        compiled_fnet<S>::backward(attn::split_heads(d_out, 1), {.x = attn::split_heads(dx, 1)}, {}, exec);
        scale(dx, dx);
      };
    return [this, g, accumulate](in_sequence<S> x, in_sequence<S>, in_sequence<S> d_out, out_sequence<S> dx,
                                 attn::execution& exec) {
      L::multi_head_backward(x, heads(), attention.forward(), attention.backward(), d_out, {.x = dx}, {.heads = 2},
                             exec);
      L::multi_head_backward(x, heads(), attention.forward(), attention.backward(), d_out,
                             {.query = matrix_or_none(g.query),
                              .key = matrix_or_none(g.key),
                              .value = matrix_or_none(g.value),
                              .output = matrix_or_none(g.output),
                              .accumulate = accumulate},
                             {.heads = 2}, exec);
    };
  }
  attn::encoder_block_options<S> options() const {
    return {.norm_first = a.norm_first, .rms = a.rms, .activation = a.f, .eps = static_cast<real<S>>(eps)};
  }
  void forward(in_sequence<S> x, out_sequence<S> out, out_sequence<S> mixed, attn::execution& exec) const {
    auto how = options();
    how.mixed = mixed;
    L::encoder_block(x, out, weights(), mixer(), how, exec);
  }
  void backward(in_sequence<S> x, in_sequence<S> d_out, out_sequence<S> dx, const block_arguments<tensor<S>*>& g,
                bool accumulate, out_sequence<S> mixed, attn::execution& exec) const {
    auto how = options();
    how.mixed = mixed;
    const mixer_of<S> none = [](auto&&...) { FAIL("the mixer was called"); };
    L::encoder_block_backward(x, weights(), mixed ? none : mixer(), mixer_backward(g, accumulate), d_out,
                              {.x = dx,
                               .norm_1 = {.gamma = vector_or_none(g.gamma_1), .beta = vector_or_none(g.beta_1)},
                               .norm_2 = {.gamma = vector_or_none(g.gamma_2), .beta = vector_or_none(g.beta_2)},
                               .feed_forward = {.up = matrix_or_none(g.up),
                                                .down = matrix_or_none(g.down),
                                                .up_bias = vector_or_none(g.up_bias),
                                                .down_bias = vector_or_none(g.down_bias)},
                               .residual = {.weight = matrix_or_none(g.residual),
                                            .bias = vector_or_none(g.residual_bias)},
                               .accumulate = accumulate},
                              how, exec);
  }
};

template <class S>
layer_backward_case<S> case_of(const block_case& a) {
  layer_backward_case<S> c;
  auto& r = c.reference;
  r.name = "length " + std::to_string(a.length) + ", blocks " + std::to_string(a.blocks) + ", norm_first " +
           std::to_string(a.norm_first) + ", all " + std::to_string(a.all) + ", causal " + std::to_string(a.causal) +
           ", mixed " + std::to_string(a.mixed) + ", fourier " + std::to_string(a.fourier) + ", rms " +
           std::to_string(a.rms) + ", activation " + std::to_string(int(a.f));
  add(r, "x", random_sequence(1, a.batch, a.length, a.dim));
  for (idx_t n = 0; n < a.blocks; ++n) add_block(r, a, 100 + 20 * static_cast<std::uint64_t>(n));
  const int each = block_inputs(a);
  r.forward = [a, each](const std::vector<tensor<variable>>& in) {
    tensor<variable> x = in[0];
    for (int n = 0; n < a.blocks; ++n) {
      const int first = 1 + n * each;
      x = reference_block(a, x, {a.all, a.projected(), block<float>::pad(a, in, first), first});
    }
    return std::vector{x};
  };
  c.run = [a, each](const std::vector<tensor<S>>& in, const tensor<S>& d_out, const std::vector<tensor<S>*>& g,
                    bool accumulate, attn::execution& exec) {
    const auto like_x = [&] { return tensor<S>(a.batch, 1, a.length, a.dim, S(7)); };
    tensor<S> out(a.batch, 1, a.length, a.width(), S(7));
    std::vector<tensor<S>> inputs(static_cast<std::size_t>(a.blocks), like_x()), mixed(inputs.size(), out);
    inputs[0] = in[0];
    for (int n = 0; n < a.blocks; ++n) {
      const auto at = static_cast<std::size_t>(n);
      block<S>(a, in, 1 + n * each)
          .forward(sequence(std::as_const(inputs[at])), sequence(n + 1 < a.blocks ? inputs[at + 1] : out),
                   a.mixed ? sequence(mixed[at]) : out_sequence<S>(), exec);
    }
    tensor<S> d = d_out;
    for (int n = static_cast<int>(a.blocks); n-- > 0;) {
      const auto at = static_cast<std::size_t>(n);
      const int first = 1 + n * each;
      // The gradient of the sequence goes back in place, where it is not added to; the last one to where it is wanted.
      tensor<S> zeros(a.batch, 1, a.length, a.dim);
      out_sequence<S> dx = accumulate ? sequence(zeros) : sequence(d);
      if (n == 0 && !a.in_place) dx = sequence_or_none(g[0]);
      block<S>(a, in, first)
          .backward(sequence(std::as_const(inputs[at])), sequence(std::as_const(d)), dx,
                    {a.all, a.projected(), block<S>::pad(a, g, first), first}, accumulate,
                    a.mixed ? sequence(mixed[at]) : out_sequence<S>(), exec);
      if (accumulate) d = zeros;
    }
    if (a.in_place && g[0]) *g[0] = d;
  };
  return c;
}

// Norms, mixer and two products in a row, each within the tolerance of its type.
template <class S>
constexpr double factor = sizeof(S) == 2 ? 6 : 2;

}  // namespace

TEMPLATE_LIST_TEST_CASE("encoder_block_backward: options", "[encoder_block_backward]", all_types) {
  std::vector<block_case> all;
  for (int bits = 0; bits < 64; ++bits)
    for (int f = 0; f < 4; ++f) {
      block_case c;
      c.norm_first = bits & 1, c.all = bits & 2, c.causal = bits & 4, c.mixed = bits & 8, c.fourier = bits & 16;
      c.rms = bits & 32;
      c.f = static_cast<attn::activation>(f);
      // a 16-bit x + mixed has many numbers so close to 0 that rounding decides over the slope of relu
      if (sizeof(TestType) == 2 && c.f == attn::activation::relu) continue;
      all.push_back(c);
    }
  for (const auto& chosen : selected(
           all,
           [](const block_case& c) {
             return std::array{+c.norm_first, +c.all, +c.causal, +c.mixed, +c.fourier, +c.rms, static_cast<int>(c.f)};
           },
           true))
    check_layer_backward(case_of<TestType>(chosen), factor<TestType>);
}

TEMPLATE_LIST_TEST_CASE("encoder_block_backward: a projected residual", "[encoder_block_backward]", all_types) {
  for (bool norm_first : {false, true})
    for (bool mixed : {false, true})
      for (idx_t out : {6, 10, 21})
        for (idx_t length : {0, 3, 21}) {
          // as for other lengths: over three tokens the 16-bit roundings within the mixer do not average out
          if (sizeof(TestType) == 2 && length == 3) continue;
          check_layer_backward(case_of<TestType>({.length = length,
                                                  .norm_first = norm_first,
                                                  .all = mixed == (out < 10),
                                                  .mixed = mixed,
                                                  .out = out}),
                               factor<TestType>);
        }
}

TEMPLATE_LIST_TEST_CASE("encoder_block_backward: lengths", "[encoder_block_backward]", exact_types) {
  for (bool norm_first : {false, true})
    for (idx_t length : {0, 1, 2, 47, 65})
      check_layer_backward(case_of<TestType>({.length = length, .norm_first = norm_first}), factor<TestType>);
}

TEMPLATE_LIST_TEST_CASE("encoder_block_backward: several chunks of tokens", "[encoder_block_backward]", exact_types) {
  for (bool norm_first : {false, true})
    check_layer_backward(
        case_of<TestType>({.batch = 20, .length = 30, .dim = 6, .hidden = 5, .norm_first = norm_first}),
        factor<TestType>);
}

TEMPLATE_LIST_TEST_CASE("encoder_block_backward: three blocks", "[encoder_block_backward]", exact_types) {
  for (bool norm_first : {false, true})
    for (bool mixed : {false, true})
      check_layer_backward(case_of<TestType>({.blocks = 3, .norm_first = norm_first, .mixed = mixed}),
                           4 * factor<TestType>);
}

TEMPLATE_LIST_TEST_CASE("encoder_block_backward: the gradient in place of that of out", "[encoder_block_backward]",
                        all_types) {
  using S = TestType;
  for (bool norm_first : {false, true}) {
    const auto apart = case_of<S>({.norm_first = norm_first}),
               in_place = case_of<S>({.norm_first = norm_first, .in_place = true});
    std::vector<tensor<S>> inputs;
    for (const auto& x : apart.reference.inputs) inputs.push_back(cast<S>(x));
    const tensor<S> d_out = cast<S>(random_sequence(70, 2, 21, 10));
    attn::execution serial;
    CHECK(all_gradients(apart, inputs, d_out, serial) == all_gradients(in_place, inputs, d_out, serial));
  }
}

TEST_CASE("encoder_block_backward: the reverse pass against central differences", "[encoder_block_backward]") {
  for (bool norm_first : {false, true})
    check_central_differences(case_of<float>({.length = 6, .norm_first = norm_first}).reference);
}

TEST_CASE("encoder_block_backward: what the mixers throw passes through, and dx is as it was",
          "[encoder_block_backward]") {
  const block_case a;
  const auto c = case_of<float>(a);
  std::vector<tensor<float>> inputs;
  for (const auto& x : c.reference.inputs) inputs.push_back(cast<float>(x));
  const block<float> one(a, inputs, 1);
  tensor<float> d = cast<float>(random_sequence(70, 2, 21, 10));
  const tensor<float> before = d;
  attn::execution serial;
  const mixer_backward_of<float> thrower = [](auto&&...) { throw std::runtime_error("mixer"); };
  CHECK_THROWS_AS(compiled_layers<float>::encoder_block_backward(sequence(std::as_const(inputs[0])), one.weights(),
                                                                 one.mixer(), thrower, sequence(std::as_const(d)),
                                                                 {.x = sequence(d)}, {}, serial),
                  std::runtime_error);
  CHECK(d == before);
  check_layer_backward(c, factor<float>);
}

}  // namespace testing::encoder_block_backward_tests
