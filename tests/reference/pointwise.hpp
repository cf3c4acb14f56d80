#pragma once
// out_i = a_i Σ_j f(score_ij + shift) v_j over every key that is seen: weights without a softmax.
#include "reference/softmax.hpp"

namespace reference {

enum class pointwise_kind { sigmoid, silu, relu, squared_relu };

template <class N>
struct basic_pointwise_options : basic_softmax_options<N> {
  tensor<N> bias;         // [B|1, H|1, Lq|1, Lk]
  tensor<N> row_weights;  // [1, 1, B|1, Lq]
  pointwise_kind kind = pointwise_kind::sigmoid;
  idx_t left = -1, right = -1;  // none: unlimited
  double weight = 1, shift = 0;
};
using pointwise_options = basic_pointwise_options<double>;

template <class N>
void copy_choices(const pointwise_options& from, basic_pointwise_options<N>& to) {
  copy_choices(static_cast<const softmax_options&>(from), static_cast<basic_softmax_options<N>&>(to));
  to.kind = from.kind, to.left = from.left, to.right = from.right, to.weight = from.weight, to.shift = from.shift;
}

template <class N>
N pointwise_weight(pointwise_kind kind, const N& s) {
  using std::exp;
  const N positive = s > N(0) ? s : N(0);
  if (kind == pointwise_kind::relu) return positive;
  if (kind == pointwise_kind::squared_relu) return positive * positive;
  const N sigmoid = N(1) / (N(1) + exp(-s));
  return kind == pointwise_kind::silu ? s * sigmoid : sigmoid;
}

template <class N>
basic_result<N> pointwise(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                          const basic_pointwise_options<N>& o) {
  basic_result<N> into{tensor<N>(q.batch(), q.heads(), q.length(), v.dim()), {}};
  for (idx_t b = 0; b < q.batch(); ++b) {
    const idx_t queries = true_length(o.lengths, o.query_lengths, b, q.length());
    const idx_t keys = true_length(o.lengths, o.key_lengths, b, k.length());
    for (idx_t h = 0; h < q.heads(); ++h)
      for (idx_t i = 0; i < queries; ++i) {
        const idx_t position = i + o.first_position.value_or(keys - queries);
        N factor = o.weight;
        if (const tensor<N>& a = o.row_weights; !a.empty()) factor *= a(0, 0, a.length() == 1 ? 0 : b, i);
        for (idx_t j = 0; j < keys; ++j) {
          if (o.causal && j > position) continue;
          if ((o.left >= 0 && position - j > o.left) || (o.right >= 0 && j - position > o.right)) continue;
          const N bias = o.bias.empty() ? N(0) : o.bias.broadcast(b, h, i, j);
          N score = plain_score(o, q, k, b, h, i, j, position - j);
          if (o.score) score = o.score(score, b, h, position, j);
          if (bias == -infinity || score == -infinity) continue;
          const N weight = factor * pointwise_weight(o.kind, score + bias + o.shift);
          for (idx_t d = 0; d < v.dim(); ++d) into.out(b, h, i, d) += weight * v(b, h / (q.heads() / k.heads()), j, d);
        }
      }
  }
  return into;
}

}  // namespace reference
