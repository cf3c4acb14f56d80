#pragma once
// Runs a problem through the library in float, double, Eigen::half or Eigen::bfloat16.
#include <attn/core/mask_view.hpp>

#include "support/call.hpp"
#include "support/measure.hpp"
#include "support/problem.hpp"

namespace testing {

// The result is rounded once to the storage type, which changes each element by at most its unit
// roundoff; all arithmetic before is that of float, and so is lse.
template <>
struct tolerance<Eigen::half> {
  static constexpr double out = 0x1p-11 + 2e-6, lse = 2e-6;
};
template <>
struct tolerance<Eigen::bfloat16> {
  // where products of bf16 numbers are the machine's own, exponentials err by 1.02e-4 of themselves, lse by as much
  static constexpr bool paired = attn::detail::bf16_products != attn::detail::bf16_make::none;
  static constexpr double out = 0x1p-8 + 2e-6, lse = paired ? 1.5e-4 : 2e-6;
};

// Of operators whose keys and values are made of the caller's: such products round those as well, which changes lse by
// as much as rounding the caller's keys would, and the result by at most twice what rounding q, k, v and the result
// does, 2 * 1.75 * 0.43 of the unit roundoff.
template <class S>
struct made_keys_tolerance : tolerance<S> {};
template <>
struct made_keys_tolerance<Eigen::bfloat16> {
  static constexpr bool paired = tolerance<Eigen::bfloat16>::paired;
  static constexpr double out = paired ? 1.5 * 0x1p-8 : tolerance<Eigen::bfloat16>::out,
                          lse = paired ? 0x1p-8 : tolerance<Eigen::bfloat16>::lse;
};

// The same of gradients. Sums run in the compute type and are rounded once to the element type, whose unit roundoff
// bounds what that changes; out, where the library reads it rounded, adds to it in proportion to its own rounding.
template <class S>
struct gradient_tolerance {
  static constexpr double value = tolerance<S>::out - tolerance<float>::out + 5e-6;
};
template <>
struct gradient_tolerance<double> {
  static constexpr double value = 1e-12;
};

// Of operators with products of bf16 numbers: weights and gradients of scores, features and their sums, or the slopes
// of a hidden layer, are rounded too.
template <class S>
inline constexpr double product_gradient_tolerance = gradient_tolerance<S>::value;
template <>
inline constexpr double product_gradient_tolerance<Eigen::bfloat16> =
    (tolerance<Eigen::bfloat16>::paired ? 2 : 1) * gradient_tolerance<Eigen::bfloat16>::value;

// [1, 1, rows, cols] as [rows, cols].
template <class T>
attn::tensor_view<const T, 2> table_view(const tensor<T>& x) {
  if (x.empty()) return {};
  return {x.data.data(), {x.length(), x.dim()}};
}
template <class T>
in_view<T> view(const tensor<T>& x) {
  return {x.data.data(), x.extents};
}
template <class T>
out_view<T> view(tensor<T>& x) {
  return {x.data.data(), x.extents};
}
// [batch, head, length, 1] as [batch, head, length].
template <class T>
attn::tensor_view<T, 3> row_view(tensor<T>& x) {
  return {x.data.data(), {x.batch(), x.heads(), x.length()}};
}

// The inputs as the storage type holds them, parameters as the compute type does.
template <class S>
void round_options(reference::softmax_options& options) {
  if (options.scale) options.scale = static_cast<double>(static_cast<real<S>>(*options.scale));
  if (options.softcap) options.softcap = static_cast<double>(static_cast<real<S>>(*options.softcap));
  options.alibi_slopes = cast<double>(cast<real<S>>(options.alibi_slopes));
  options.sinks = cast<double>(cast<real<S>>(options.sinks));
  options.relative_bias = cast<double>(cast<real<S>>(options.relative_bias));
  options.log_decay = cast<double>(cast<real<S>>(options.log_decay));
  options.relative_keys = cast<double>(cast<real<S>>(options.relative_keys));
  options.position_queries = cast<double>(cast<real<S>>(options.position_queries));
  options.relative_queries = cast<double>(cast<S>(options.relative_queries));
}
template <class S>
tensor<double> rounded(const tensor<double>& x) {
  return cast<double>(cast<S>(x));
}
template <class S>
full_softmax_problem rounded(full_softmax_problem p) {
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  p.options.bias = rounded<real<S>>(p.options.bias);
  round_options<S>(p.options);
  return p;
}
template <class S>
sliding_window_problem rounded(sliding_window_problem p) {
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  p.options.q_global = rounded<S>(p.options.q_global);
  p.options.k_global = rounded<S>(p.options.k_global);
  p.options.v_global = rounded<S>(p.options.v_global);
  round_options<S>(p.options);
  return p;
}

// A mask of keys, of which a chunk is hidden whole.
inline tensor<double> random_key_mask(std::uint64_t seed, idx_t batch, idx_t length) {
  random_source random(seed);
  tensor<double> mask(batch, 1, 1, length);
  for (idx_t b = 0; b < batch; ++b)
    for (idx_t t = 0; t < length; ++t) mask(b, 0, 0, t) = t / 64 != 1 && random.below(3) != 0;
  return mask;
}

// Another, of which adjacent keys are hidden at the begin and in the middle, and all of item `hidden`.
inline tensor<double> gapped_key_mask(idx_t batch, idx_t length, idx_t hidden = -1) {
  tensor<double> mask(batch, 1, 1, length);
  for (idx_t b = 0; b < batch; ++b)
    for (idx_t t = 0; t < length; ++t)
      mask(b, 0, 0, t) = b != hidden && t >= b && (t < length / 3 || t >= length / 2) && (2 * t + b) % 5 != 0;
  return mask;
}

// A problem with other numbers in what its key_mask hides: NaN and infinity.
template <class Problem>
Problem poisoned(Problem p) {
  std::vector<tensor<double>*> rows{&p.k, &p.v};
  if constexpr (requires { p.options.logits; }) rows.push_back(&p.options.logits);
  for (tensor<double>* x : rows)
    for (idx_t b = 0; b < x->batch(); ++b)
      for (idx_t h = 0; h < x->heads(); ++h)
        for (idx_t j = 0; j < x->length(); ++j)
          for (idx_t d = 0; d < x->dim() && reference::key_hidden(p.options.key_mask, b, j); ++d)
            (*x)(b, h, j, d) = (j + d) % 2 ? reference::infinity : std::numeric_limits<double>::quiet_NaN();
  return p;
}

// A mask of keys [B|1, 1, 1, Lk], or none, as bytes.
class key_mask_bytes {
 public:
  key_mask_bytes() = default;
  explicit key_mask_bytes(const tensor<double>& mask) : batch_(mask.batch()), keys_(mask.dim()) {
    for (double x : mask.data) seen_.push_back(x != 0);
  }
  // Of tokens [begin, begin + count).
  attn::key_mask_view view(idx_t begin, idx_t count) const {
    if (seen_.empty()) return {};
    return attn::tensor_view<const std::uint8_t, 2>(seen_.data(), {batch_, keys_}).slice(1, begin, count);
  }
  attn::key_mask_view view() const { return view(0, keys_); }

 private:
  idx_t batch_ = 0, keys_ = 0;
  std::vector<std::uint8_t> seen_;
};

// The library's options for a problem, and the memory they point to.
template <class S, class Options>
class stored_options {
 public:
  explicit stored_options(const Options& from)
      : from_(from), slopes_(cast<real<S>>(from.alibi_slopes)), sinks_(cast<real<S>>(from.sinks)),
        relative_(cast<real<S>>(from.relative_bias)), decay_(cast<real<S>>(from.log_decay)),
        relative_keys_(cast<real<S>>(from.relative_keys)), position_queries_(cast<real<S>>(from.position_queries)),
        relative_queries_(cast<S>(from.relative_queries)) {
    if (from_.scale) options.scale = static_cast<real<S>>(*from_.scale);
    if (from_.softcap) options.softcap = static_cast<real<S>>(*from_.softcap);
    options.causal = from_.causal;
    options.lengths = from_.lengths;
    options.query_lengths = from_.query_lengths;
    options.key_lengths = from_.key_lengths;
    options.first_position = from_.first_position;
    if constexpr (requires { options.span; }) {
      options.span = from_.span;
      if (!from_.first_positions.empty()) options.first_position = from_.first_positions;
    }
    options.alibi_slopes = slopes_;
    options.sinks = sinks_;
    options.relative_bias = table_view(relative_);
    const auto by_distance = [](const tensor<real<S>>& r) {
      return attn::tensor_view<const real<S>, 3>(r.data.data(), {r.heads(), r.length(), r.dim()});
    };
    if (!relative_keys_.empty()) options.relative_keys = by_distance(relative_keys_);
    if (!position_queries_.empty()) options.position_queries = by_distance(position_queries_);
    if (!relative_queries_.empty()) options.relative_queries = view(std::as_const(relative_queries_));
    if (!decay_.empty()) options.log_decay = row_view(decay_);
    options.key_mask = seen_.view();
    options.dropout = {from_.dropout_rate, from_.dropout_seed};
    if (from_.score)
      score = [f = from_.score](real<S> s, idx_t b, idx_t h, idx_t i, idx_t j) {
        return static_cast<real<S>>(f(static_cast<double>(s), b, h, i, j));
      };
    if constexpr (windowed) {
      options.left = from_.left, options.right = from_.right;
      options.dilation = from_.dilation;
      options.global_positions = from_.global_positions, options.global_counts = from_.global_counts;
      const tensor<double>* given[3] = {&from_.q_global, &from_.k_global, &from_.v_global};
      attn::tensor_view<const S>* views[3] = {&options.q_global, &options.k_global, &options.v_global};
      for (int n = 0; n < 3; ++n)
        if (!given[n]->empty()) *views[n] = view(std::as_const(global_[n] = cast<S>(*given[n])));
    } else if (!from_.bias.empty()) {
      bias_ = cast<real<S>>(from_.bias);
      options.bias = view(std::as_const(bias_));
    }
  }
  stored_options(const stored_options&) = delete;

 private:
  static constexpr bool windowed = std::is_same_v<Options, reference::sliding_window_options>;
  Options from_;
  std::vector<real<S>> slopes_, sinks_;
  tensor<real<S>> relative_, decay_, relative_keys_, position_queries_, bias_;
  tensor<S> relative_queries_;
  key_mask_bytes seen_{from_.key_mask};
  tensor<S> global_[3];

 public:
  std::conditional_t<windowed, attn::sliding_window_options<S>, attn::full_softmax_options<S>> options;
  score_of<S> score;
};

template <class S, class Options>
using compiled = std::conditional_t<std::is_same_v<Options, reference::sliding_window_options>,
                                    compiled_sliding_window<S>, compiled_full_softmax<S>>;

// out and lse start as rubbish: rows that should be zero must have been written.
template <class S, class Options>
reference::result run(const problem<Options>& p, attn::execution& execution) {
  stored_options<S, Options> stored(p.options);
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  tensor<real<S>> lse(q.batch(), q.heads(), q.length(), 1, real<S>(7));
  stored.options.lse = row_view(lse);
  compiled<S, Options>::call(view(q), view(k), view(v), view(out), stored.options, stored.score, execution);
  return {cast<double>(out), cast<double>(lse)};
}
template <class S, class Options>
reference::result run(const problem<Options>& p) {
  attn::execution serial;
  return run<S>(p, serial);
}

struct errors {
  double out, lse;
};

// Against the reference on the same rounded inputs.
template <class S, class Options>
errors errors_of(const problem<Options>& p) {
  const problem<Options> given = rounded<S>(p);
  const reference::result actual = run<S>(given), wanted = expected(given);
  return {relative_error(actual.out, wanted.out), relative_error(actual.lse, wanted.lse)};
}

}  // namespace testing
