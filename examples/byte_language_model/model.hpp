// A stack of blocks between the embedding of bytes and their logits: forward, backward, and steps of Adam.
#pragma once

#include "operators.hpp"

#include <deque>
#include <numbers>

namespace byte_model {

using attn::split_heads;
using tensor = attn::tensor<float, 3>;  // [batch, length, width]
using sequence = attn::tensor_view<const float, 3>;
using sequence_out = attn::tensor_view<float, 3>;

struct parameter {
  std::string name;
  matrix value, gradient, mean, square;  // the last two are Adam's
};

struct block {
  parameter &gamma_1, &beta_1, &query, &key, &value, &output, &own, &gamma_2, &beta_2, &up, &down;
};

constexpr int byte_count = 256, mask = byte_count;  // the mask is one more token

// What a pass stores. For training, the input of every block and the result of its operator; otherwise, and with
// reversible blocks, those of one block.
struct activations {
  idx_t length;
  bool keep;
  list<tensor> x, mixed, attended, lse;
  tensor remainder, sum, normed, logits, dx, d_normed;

  activations(const sizes& s, idx_t batch, idx_t tokens, bool train) : length(tokens), keep(train && !s.reversible) {
    const auto make = [&](idx_t width) { return tensor({batch, length, width}); };
    const idx_t kept = keep ? s.layers : 1, stream = s.reversible ? 2 * s.width : s.width;
    const auto add = [](list<tensor>& some, idx_t count, const tensor& one) {
      for (idx_t n = 0; n < count; ++n) some.push_back(one);
    };
    add(x, keep ? kept + 1 : 1, make(stream));
    add(mixed, keep ? kept : 0, make(s.width));
    add(attended, kept, make(s.width));
    add(lse, kept, tensor({batch, s.heads, length}));
    if (s.reversible) remainder = make(stream), sum = make(s.width);
    normed = make(s.width);
    logits = make(byte_count);
    if (train) dx = make(stream), d_normed = make(s.width);
  }
  double bytes() const {
    double numbers = 0;
    for (const tensor* t : {&remainder, &sum, &normed, &logits, &dx, &d_normed}) numbers += double(t->size());
    for (const auto* some : {&x, &mixed, &attended, &lse})
      for (const tensor& t : *some) numbers += double(t.size());
    return sizeof(float) * numbers;
  }
};

// Tokens as the rows of a matrix.
inline auto rows_of(tensor& t) { return matrix::Map(t.data(), t.extent(0) * t.extent(1), t.extent(2)); }

// One block at work, as the layers of the library take it.
struct working_block {
  const sizes& s;
  const mixer& op;
  const operation& mix_heads;  // that of op, or a stream
  activations& a;
  block& b;
  idx_t n;  // of the block

  idx_t slot() const { return a.keep ? n : 0; }
  attn::multi_head_weights<float> attention() const {
    return {.query = b.query.value, .key = b.key.value, .value = b.value.value, .output = b.output.value};
  }
  attn::encoder_block_weights<float> weights() const {
    return {.norm_1 = {b.gamma_1.value.row(0), b.beta_1.value.row(0)},
            .norm_2 = {b.gamma_2.value.row(0), b.beta_2.value.row(0)},
            .feed_forward = {.up = b.up.value, .down = b.down.value}};
  }
  attn::encoder_block_gradients<float> gradients() const {
    return {.x = a.dx,
            .norm_1 = {b.gamma_1.gradient.row(0), b.beta_1.gradient.row(0)},
            .norm_2 = {b.gamma_2.gradient.row(0), b.beta_2.gradient.row(0)},
            .feed_forward = {.up = b.up.gradient, .down = b.down.gradient}};
  }
  call call_of(in q, in k, in v, to out, execution& exec) const {
    return {.q = q, .k = k, .v = v, .out = out, .lse = a.lse[slot()], .own = b.own.value, .exec = exec};
  }
  call call_of(in q, in k, in v, to out, in d_out, to dq, to dk, to dv, execution& exec) const {
    call c = call_of(q, k, v, out, exec);
    c.d_out = d_out, c.dq = dq, c.dk = dk, c.dv = dv, c.d_own = &b.own.gradient;
    return c;
  }

  // Attention, or what is in its place.
  void mix(sequence x, sequence_out out, execution& exec) const {
    if (!op.projects) return mix_heads(call_of(split_heads(x, 1), {}, {}, split_heads(out, 1), exec));
    const auto attend = [this](in q, in k, in v, to o, execution& e) { mix_heads(call_of(q, k, v, o, e)); };
    attn::multi_head(x, out, attention(), attend, {.heads = s.heads, .attended = a.attended[slot()]}, exec);
  }
  void mix_backward(sequence x, sequence d_out, sequence_out dx, execution& exec) const {
    if (!op.projects)
      return op.backward(
          call_of(split_heads(x, 1), {}, {}, {}, split_heads(d_out, 1), split_heads(dx, 1), {}, {}, exec));
    const auto attend = [this](in q, in k, in v, to o, execution& e) { mix_heads(call_of(q, k, v, o, e)); };
    const auto attend_backward = [this](in q, in k, in v, in, in d, to dq, to dk, to dv, execution& e) {
      op.backward(call_of(q, k, v, split_heads(a.attended[slot()].view(), s.heads), d, dq, dk, dv, e));
    };
    attn::multi_head_backward(x, attention(), attend, attend_backward, d_out,
                              {.x = dx,
                               .query = b.query.gradient,
                               .key = b.key.gradient,
                               .value = b.value.gradient,
                               .output = b.output.gradient},
                              {.heads = s.heads, .attended = a.attended[slot()]}, exec);
  }

  // The halves of a reversible block. Each is computed once more just before it goes backward, so that a.normed is
  // there.
  auto mixing() const {
    return [this](sequence x, sequence_out out, execution& e) {
      attn::layer_norm(x, a.normed, weights().norm_1, {}, e);
      mix(a.normed, out, e);
    };
  }
  auto feeding() const {
    return [this](sequence x, sequence_out out, execution& e) {
      attn::layer_norm(x, a.normed, weights().norm_2, {}, e);
      attn::feed_forward(a.normed, out, weights().feed_forward, {}, e);
    };
  }
  auto mixing_backward() const {
    return [this](sequence x, sequence, sequence d_out, sequence_out dx, execution& e) {
      mix_backward(a.normed, d_out, a.d_normed, e);
      const auto [gamma, beta] = gradients().norm_1;
      attn::layer_norm_backward(x, weights().norm_1, a.d_normed, {.x = dx, .gamma = gamma, .beta = beta}, {}, e);
    };
  }
  auto feeding_backward() const {
    return [this](sequence x, sequence, sequence d_out, sequence_out dx, execution& e) {
      const auto fed = gradients().feed_forward;
      attn::feed_forward_backward(a.normed, weights().feed_forward, d_out,
                                  {.x = a.d_normed, .up = fed.up, .down = fed.down}, {}, e);
      const auto [gamma, beta] = gradients().norm_2;
      attn::layer_norm_backward(x, weights().norm_2, a.d_normed, {.x = dx, .gamma = gamma, .beta = beta}, {}, e);
    };
  }

  // From the block's input to its output, and back from the gradient of that, in a.dx.
  void forward(execution& exec) const {
    if (s.reversible)
      return attn::reversible_block(a.x[0], a.x[0], mixing(), feeding(), {.remainder = a.remainder}, exec);
    attn::encoder_block_options<float> options;
    if (a.keep) options.mixed = a.mixed[n];
    const auto mixer = [this](sequence x, sequence_out out, execution& e) { mix(x, out, e); };
    attn::encoder_block(a.x[slot()], a.x[a.keep ? n + 1 : 0], weights(), mixer, options, exec);
  }
  void backward(execution& exec) const {
    if (s.reversible)
      return attn::reversible_block_backward(a.x[0], a.x[0], mixing(), feeding(), mixing_backward(), feeding_backward(),
                                             a.dx, {.x = a.dx}, {.remainder = a.remainder}, exec);
    const auto mixer = [this](sequence x, sequence_out out, execution& e) { mix(x, out, e); };
    const auto mixer_backward = [this](sequence x, sequence, sequence d_out, sequence_out dx, execution& e) {
      mix_backward(x, d_out, dx, e);
    };
    attn::encoder_block_backward(a.x[n], weights(), mixer, mixer_backward, a.dx, gradients(), {.mixed = a.mixed[n]},
                                 exec);
  }
};

struct model {
  sizes s;
  mixer op;
  std::deque<parameter> parameters{};  // a deque, so that addresses stay valid
  list<block> blocks{};
  idx_t updates = 0;
  times spent{};

  model(const sizes& given, const mixer& chosen, std::uint64_t seed) : s(given), op(chosen) {
    const auto timed = [this](const operation& f) -> operation {
      return [this, f](const call& c) {
        const stopwatch watch(spent.mixing);
        f(c);
      };
    };
    op.forward = timed(op.forward);
    op.backward = timed(op.backward);
    attn::random_numbers random(seed);
    const auto add = [&](std::string name, idx_t rows, idx_t columns, double deviation, double mean = 0) -> parameter& {
      const matrix zeros = matrix::Zero(rows, columns);
      parameter& p = parameters.emplace_back(parameter{name, zeros, zeros, zeros, zeros});
      for (idx_t n = 0; n < p.value.size(); ++n) p.value.data()[n] = float(mean + deviation * random.normal());
      return p;
    };
    const idx_t w = s.width, projected = op.projects ? w : 0, keyed = op.keys ? projected : 0;
    const double unit = 0.4 / std::sqrt(double(w)), last = unit / std::sqrt(2. * double(s.layers));
    add("embedding", byte_count + 1, w, 0.03);
    add("positions", s.context, w, 0);
    add("gamma", 1, w, 0, 1);
    add("beta", 1, w, 0);
    for (idx_t n = 0; n < s.context; ++n)  // learning starts from the waves of Vaswani et al. 2017
      for (idx_t d = 0; d < w; ++d) {
        const double angle = double(n) * std::pow(1e-4, double(d / 2) / double(w / 2));
        positions().value(n, d) = float(0.03 * (d % 2 ? std::cos(angle) : std::sin(angle)));
      }
    for (idx_t n = 0; n < s.layers; ++n) {
      const std::string name = "block_" + std::to_string(n) + "_";
      blocks.push_back({.gamma_1 = add(name + "gamma_1", 1, w, 0, 1),
                        .beta_1 = add(name + "beta_1", 1, w, 0),
                        .query = add(name + "query", projected, w, unit),
                        .key = add(name + "key", keyed, keyed, unit),
                        .value = add(name + "value", projected, w, unit),
                        .output = add(name + "output", projected, w, last),
                        .own = add(name + op.name, op.own.rows, op.own.columns, op.own.deviation),
                        .gamma_2 = add(name + "gamma_2", 1, w, 0, 1),
                        .beta_2 = add(name + "beta_2", 1, w, 0),
                        .up = add(name + "up", 4 * w, w, unit),
                        .down = add(name + "down", w, 4 * w, last / 2)});
    }
  }
  model(const model&) = delete;

  parameter& embedding() { return parameters[0]; }
  parameter& positions() { return parameters[1]; }
  attn::layer_norm_weights<float> norm() { return {parameters[2].value.row(0), parameters[3].value.row(0)}; }
  attn::project_weights<float> to_logits() { return {.weight = embedding().value.topRows(byte_count)}; }
  sequence last(activations& a) const { return s.reversible ? a.sum : a.x.back(); }
  // What a step of training needs, as far as it is counted: products with weights, and scores of queries and keys.
  double operations(idx_t batch) const {
    double products = double(byte_count * s.width);
    for (const block& b : blocks)
      for (const parameter* p : {&b.query, &b.key, &b.value, &b.output, &b.up, &b.down})
        products += double(p->value.size());
    return 6 * double(batch) * (double(s.context) * products + 2 * double(s.layers * s.width) * op.scores);
  }
  double bytes() const {
    double numbers = 0;
    for (const parameter& p : parameters) numbers += 4 * double(p.value.size());
    return sizeof(float) * numbers;
  }

  // The logits of what follows each token, or of what is masked there. The first token is at position `first`; streams,
  // if given, are one for each block, and have seen what is before it.
  void forward(activations& a, const list<int>& tokens, execution& exec, idx_t first = 0,
               const list<operation>& streams = {}) {
    {
      const stopwatch watch(spent.embedding);
      auto x = rows_of(a.x[0]);
      for (idx_t n = 0; n < x.rows(); ++n) {
        x.row(n).head(s.width) = embedding().value.row(tokens[n]) + positions().value.row(first + n % a.length);
        if (s.reversible) x.row(n).tail(s.width) = x.row(n).head(s.width);
      }
      if (s.reversible) rows_of(a.remainder).setZero();
    }
    {
      const stopwatch watch(spent.blocks);
      for (idx_t n = 0; n < s.layers; ++n)
        working_block{s, op, streams.empty() ? op.forward : streams[n], a, blocks[n], n}.forward(exec);
      if (s.reversible) rows_of(a.sum) = rows_of(a.x[0]).leftCols(s.width) + rows_of(a.x[0]).rightCols(s.width);
    }
    const stopwatch watch(spent.logits);
    attn::layer_norm(last(a), a.normed, norm(), {}, exec);
    attn::project(a.normed, a.logits, to_logits(), exec);
  }

  // The gradients of all parameters from that of the logits, which is in their place.
  void backward(activations& a, const list<int>& tokens, execution& exec) {
    matrix &d_embedding = embedding().gradient, &d_positions = positions().gradient;
    auto dx = rows_of(a.dx);
    {
      const stopwatch watch(spent.logits);
      d_embedding.row(mask).setZero();
      attn::project_backward(a.normed, to_logits(), a.logits,
                             {.x = a.d_normed, .weight = d_embedding.topRows(byte_count)}, exec);
      attn::layer_norm_backward(last(a), norm(), a.d_normed,
                                {.x = a.dx.view().slice(2, 0, s.width),
                                 .gamma = parameters[2].gradient.row(0),
                                 .beta = parameters[3].gradient.row(0)},
                                {}, exec);
      if (s.reversible) dx.rightCols(s.width) = dx.leftCols(s.width);
    }
    {
      const stopwatch watch(spent.blocks);
      for (idx_t n = s.layers; n-- > 0;) working_block{s, op, op.forward, a, blocks[n], n}.backward(exec);
      if (s.reversible) dx.leftCols(s.width) += dx.rightCols(s.width);
    }
    const stopwatch watch(spent.embedding);
    d_positions.setZero();
    for (idx_t n = 0; n < dx.rows(); ++n) {
      d_embedding.row(tokens[n]) += dx.row(n).head(s.width);
      d_positions.row(n % a.length) += dx.row(n).head(s.width);
    }
  }

  // A step of Adam (Kingma & Ba 2015), with the gradient clipped to norm 1.
  void update(double rate, execution& exec) {
    const stopwatch watch(spent.update);
    double square = 0;
    for (const parameter& p : parameters) square += p.gradient.squaredNorm();
    const float b1 = 0.9f, b2 = 0.99f, clip = float(1 / std::max(1., std::sqrt(square)));
    ++updates;
    const float by = float(rate / (1 - std::pow(b1, updates))), unbiased = float(1 / (1 - std::pow(b2, updates)));
    exec.for_each(std::ssize(parameters), [&](idx_t n, int) {
      parameter& p = parameters.begin()[n];
      p.mean = b1 * p.mean + (1 - b1) * clip * p.gradient;
      p.square.array() = b2 * p.square.array() + (1 - b2) * (clip * p.gradient.array()).square();
      p.value.array() -= by * p.mean.array() / ((unbiased * p.square.array()).sqrt() + 1e-8f);
    });
  }
};

}  // namespace byte_model
