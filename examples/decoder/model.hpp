// The layers of the decoder over several sequences, each with its caches.
#pragma once

#include <attn/layers/feed_forward.hpp>
#include <attn/layers/multi_head.hpp>
#include <attn/layers/project.hpp>
#include <attn/layers/rms_norm.hpp>

#include <numeric>

#include "attention.hpp"

namespace decoder {

// A model and the sequences in progress, its batch items.
class model {
 public:
  // `tokens`: of an item, without drafts, in the end.
  model(const weights& w, const std::string& operator_name, const std::string& cache, idx_t items, idx_t tokens)
      : weights_(w), items_(items), tokens_(items, 0),
        attentions_(make_attentions(operator_name, cache, w.sizes, items, tokens + most_drafts)) {}

  // Item b takes fed[b], if any; gives the logits after each of those.
  std::vector<matrix> feed(const std::vector<fed_tokens>& fed) {
    const shape& s = weights_.sizes;
    std::vector<idx_t> lengths;
    for (const fed_tokens& x : fed) lengths.push_back(x.size());
    const idx_t length = *std::max_element(lengths.begin(), lengths.end()), rows = items_ * length;
    const tree_options trees(fed, tokens_, length);
    matrix x = matrix::Zero(rows, s.width()), normed(rows, s.width()), mixed(rows, s.width());
    for (idx_t b = 0; b < items_; ++b)
      for (idx_t t = 0; t < lengths[b]; ++t) x.row(b * length + t) = weights_.embedding.row(fed[b].tokens[t]);
    const auto by_item = [&](matrix& m) {  // [batch, length, width]
      return attn::tensor_view<float, 3>(m.data(), {items_, length, m.cols()});
    };

    for (std::size_t n = 0; n < weights_.layers.size(); ++n) {
      const layer_weights& w = weights_.layers[n];
      const auto attend = [&](auto q, auto k, auto v, auto out, attn::execution& exec) {
        attentions_.layers[n].step(q, k, v, out, lengths, trees, exec);
      };
      attn::rms_norm(x, normed, {.gamma = w.attention_norm});
      attn::multi_head(by_item(normed), by_item(mixed),
                       {.query = w.query, .key = w.key, .value = w.value, .output = w.output}, attend,
                       {.heads = s.heads, .kv_heads = s.kv_heads}, exec_);
      x += mixed;
      attn::rms_norm(x, normed, {.gamma = w.feed_norm});
      attn::feed_forward(normed, mixed, {.up = w.up, .down = w.down, .gate = w.gate},
                         {.activation = attn::activation::silu}, exec_);
      x += mixed;
    }

    matrix logits(rows, s.vocabulary);
    attn::rms_norm(x, normed, {.gamma = weights_.last_norm});
    attn::project(normed, logits, {.weight = weights_.classifier()}, exec_);
    std::vector<matrix> after;
    for (idx_t b = 0; b < items_; ++b) {
      after.push_back(logits.middleRows(b * length, lengths[b]));
      tokens_[b] += lengths[b];
    }
    return after;
  }
  void copy_item(idx_t from, idx_t to) {
    for (attention& layer : attentions_.layers) layer.copy_item(from, to);
    tokens_[to] = tokens_[from];
  }
  // Item n becomes what item order[n] was.
  void reorder(const std::vector<idx_t>& order) {
    for (attention& layer : attentions_.layers) layer.reorder(order);
    const std::vector<idx_t> before = tokens_;
    for (idx_t n = 0; n < items_; ++n) tokens_[n] = before[order[n]];
  }
  void reset(idx_t item) {
    for (attention& layer : attentions_.layers) layer.reset(item);
    tokens_[item] = 0;
  }
  // Of the `count` tokens that an item took last only those of a branch remain.
  void keep(idx_t item, idx_t count, const std::vector<idx_t>& branch) {
    std::vector<idx_t> kept(tokens_[item] - count);
    std::iota(kept.begin(), kept.end(), 0);
    for (idx_t n : branch) kept.push_back(tokens_[item] - count + n);
    for (attention& layer : attentions_.layers) layer.keep(item, kept);
    tokens_[item] = std::ssize(kept);
  }
  idx_t pages() const { return attentions_.pages(); }

 private:
  const weights& weights_;
  idx_t items_;
  std::vector<idx_t> tokens_;  // of the items
  attentions attentions_;
  attn::execution exec_;
};

inline int likeliest(const matrix& logits, idx_t row) {
  int token = 0;
  logits.row(row).maxCoeff(&token);
  return token;
}

inline Eigen::ArrayXd log_probabilities(const matrix& logits, idx_t row) {
  const Eigen::ArrayXd x = logits.row(row).transpose().cast<double>().array() - double(logits.row(row).maxCoeff());
  return x - std::log(x.exp().sum());
}

}  // namespace decoder
