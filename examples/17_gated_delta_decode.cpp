// Decoding with a hybrid stack, three layers of gated delta rule to one of full attention, and speculation: a smaller
// model drafts tokens, the whole model checks them in one step, and states and cache are rolled back over those it
// rejects.
#include <attn/kernel/delta_rule_step.hpp>
#include <attn/layers/feed_forward.hpp>
#include <attn/layers/layer_norm.hpp>
#include <attn/layers/project.hpp>
#include <attn/layers/rms_norm.hpp>
#include <attn/layers/short_convolution_step.hpp>
#include <attn/softmax/full_softmax_step.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;  // a row for every token

constexpr attn::idx_t vocabulary = 256, heads = 4, head_dim = 32, width = heads * head_dim, hidden = 4 * width;
constexpr attn::idx_t taps = 4;    // of the filters before the delta rule
constexpr attn::idx_t drafts = 3;  // tokens that may be rejected at once

std::mt19937 source(2);
matrix random_weight(attn::idx_t rows, attn::idx_t cols, float size) {
  std::normal_distribution<float> normal(0, size / std::sqrt(float(cols)));
  return matrix::NullaryExpr(rows, cols, [&] { return normal(source); });
}

// Columns [first, first + heads * head_dim) of all tokens as [1, heads, tokens, head_dim].
template <class M>
auto by_head(M& x, attn::idx_t first = 0) {
  using element = std::remove_pointer_t<decltype(x.data())>;
  return attn::tensor_view<element>(x.data() + first, {1, heads, x.rows(), head_dim}, {0, head_dim, x.cols(), 1});
}

// The common part of both kinds of layers: x += mix(norm(x)), x += feed_forward(norm(x)). States are separate from
// weights, so that two models may share the weights.
struct weights {
  matrix q = random_weight(width, width, 1), k = random_weight(width, width, 1), v = random_weight(width, width, 1),
         mixed = random_weight(width, width, 0.5f), up = random_weight(hidden, width, 1),
         down = random_weight(width, hidden, 0.5f), rates = random_weight(2 * heads, width, 1),
         filters = random_weight(3 * width, taps, 1), gate = random_weight(width, width, 1);
};

struct layer {
  virtual ~layer() = default;
  virtual void mix(const matrix& q, const matrix& k, const matrix& v, const matrix& x, matrix& out) = 0;
  virtual void rollback(attn::idx_t tokens) = 0;
  virtual std::size_t bytes() const = 0;

  explicit layer(const weights& all) : w(all) {}
  const weights& w;

  void run(matrix& x) {
    const attn::idx_t n = x.rows();
    matrix normed(n, width), q(n, width), k(n, width), v(n, width), mixed(n, width), out(n, width);
    attn::layer_norm(x, normed);
    attn::project(normed, q, {.weight = w.q});
    attn::project(normed, k, {.weight = w.k});
    attn::project(normed, v, {.weight = w.v});
    mix(q, k, v, normed, mixed);
    attn::project(mixed, out, {.weight = w.mixed});
    x += out;
    attn::layer_norm(x, normed);
    attn::feed_forward(normed, out, {.up = w.up, .down = w.down});
    x += out;
  }
};

// Gated DeltaNet, 2025: filters over the last tokens of q, k and v, the delta rule, a norm of each head, a gate.
struct delta_layer final : layer {
  attn::delta_rule_state<float> state{
      {.heads = heads, .dim = head_dim, .value_dim = head_dim, .keep = drafts + 1}};
  attn::short_convolution_state<float> recent{{.channels = 3 * width, .width = taps}};
  matrix last{0, 3 * width};  // the filters' latest inputs: what they see when as many tokens as possible are undone

  using layer::layer;
  void mix(const matrix& q, const matrix& k, const matrix& v, const matrix& x, matrix& out) override {
    const attn::idx_t n = x.rows(), before = last.rows();
    matrix all(before + n, 3 * width), filtered(n, 3 * width);
    all.topRows(before) = last;
    all.bottomRows(n) << q, k, v;
    attn::short_convolution_step(recent, all.bottomRows(n), filtered, {.weight = w.filters},
                                 {.activation = attn::activation::silu});
    last = all.bottomRows(std::min(all.rows(), taps - 1 + drafts + 1));

    // Of every head: how much of the difference is written, and how much of the past is kept.
    matrix rates(n, 2 * heads);
    attn::project(x, rates, {.weight = w.rates});
    matrix beta(heads, n), log_decay(heads, n);
    for (attn::idx_t h = 0; h < heads; ++h)
      for (attn::idx_t t = 0; t < n; ++t) {
        beta(h, t) = 1 / (1 + std::exp(-rates(t, h)));
        log_decay(h, t) = -0.1f * std::log1p(std::exp(rates(t, heads + h)));
      }
    attn::delta_rule_step(state, by_head(filtered), by_head(filtered, width), by_head(filtered, 2 * width),
                          by_head(out),
                          {.beta = {beta.data(), {1, heads, n}},
                           .log_decay = {log_decay.data(), {1, heads, n, 1}},
                           .unit_norm_eps = 1e-6f});

    Eigen::Map<matrix> each_head(out.data(), n * heads, head_dim);
    attn::rms_norm(each_head, each_head);
    matrix gates(n, width);
    attn::project(x, gates, {.weight = w.gate});
    out.array() *= gates.array() / (1 + (-gates.array()).exp());
  }
  void rollback(attn::idx_t tokens) override {
    state.rollback(tokens);
    last.conservativeResize(last.rows() - tokens, Eigen::NoChange);
    recent.reset();
    recent.append(last);
  }
  std::size_t bytes() const override {
    return state.bytes() + recent.bytes() + sizeof(float) * static_cast<std::size_t>(last.size());
  }
};

struct attention_layer final : layer {
  attn::kv_cache<float> cache{{.heads = heads, .dim = head_dim}};

  using layer::layer;
  void mix(const matrix& q, const matrix& k, const matrix& v, const matrix&, matrix& out) override {
    attn::full_softmax_step(cache, by_head(q), by_head(k), by_head(v), by_head(out));
  }
  void rollback(attn::idx_t tokens) override { cache.truncate(cache.tokens() - tokens); }
  std::size_t bytes() const override { return cache.bytes(); }
};

struct model {
  const matrix& embedding;
  std::vector<std::unique_ptr<layer>> layers;

  // Feeds tokens and gives, for each, the likeliest next one.
  std::vector<int> feed(const std::vector<int>& tokens) {
    matrix x(std::ssize(tokens), width), logits(x.rows(), vocabulary);
    for (attn::idx_t t = 0; t < x.rows(); ++t) x.row(t) = embedding.row(tokens[t]);
    for (auto& each : layers) each->run(x);
    attn::layer_norm(x, x);
    attn::project(x, logits, {.weight = embedding});
    std::vector<int> next(tokens.size());
    for (attn::idx_t t = 0; t < x.rows(); ++t) logits.row(t).maxCoeff(&next[t]);
    return next;
  }
  void rollback(attn::idx_t tokens) {
    for (auto& each : layers) each->rollback(tokens);
  }
};

int main() {
  const matrix embedding = random_weight(vocabulary, width, 1);
  const weights all[4];
  const auto whole = [&] {
    model m{embedding, {}};
    for (int n = 0; n < 3; ++n) m.layers.push_back(std::make_unique<delta_layer>(all[n]));
    m.layers.push_back(std::make_unique<attention_layer>(all[3]));
    return m;
  };
  const attn::idx_t length = 400;

  model plain = whole();
  std::vector<int> one_by_one{7};
  while (std::ssize(one_by_one) < length) one_by_one.push_back(plain.feed({one_by_one.back()})[0]);

  // The draft is the first layer alone, with a state of its own.
  model checked = whole(), draft{embedding, {}};
  draft.layers.push_back(std::make_unique<delta_layer>(all[0]));
  std::vector<int> tokens{7};
  attn::idx_t steps = 0, drafted = 0, accepted = 0;
  while (std::ssize(tokens) < length) {
    // The last token and its drafts; the draft model also sees the last of them, so that both have seen the same.
    std::vector<int> proposal{tokens.back()};
    for (attn::idx_t n = 0; n < drafts; ++n) proposal.push_back(draft.feed({proposal.back()})[0]);
    draft.feed({proposal.back()});
    const std::vector<int> next = checked.feed(proposal);  // one step over the whole model
    attn::idx_t right = 0;
    while (right < drafts && proposal[right + 1] == next[right]) ++right;
    tokens.insert(tokens.end(), next.begin(), next.begin() + right + 1);
    checked.rollback(drafts - right);
    draft.rollback(drafts - right);
    ++steps, drafted += drafts, accepted += right;
  }
  tokens.resize(length);

  std::printf("%td tokens in %td steps of the whole model: %td of %td drafts accepted\n", length, steps, accepted,
              drafted);
  std::printf("the same tokens as one by one: %s\n", tokens == one_by_one ? "yes" : "no");
  std::printf("memory after %td tokens: delta layer %.0f KiB, whatever the length and with the last %td states;\n",
              length, double(checked.layers[0]->bytes()) / 1024, drafts + 1);
  std::printf("attention layer %.0f KiB, and it grows\n", double(checked.layers[3]->bytes()) / 1024);
  return tokens == one_by_one && accepted > 0 ? 0 : 1;
}
