#pragma once
// Runs a problem of an operator that attends by a pattern through the library.
#include "reference/bigbird.hpp"
#include "reference/block.hpp"
#include "reference/strided.hpp"
#include "support/call_patterns.hpp"
#include "support/run.hpp"

namespace testing {

template <class S, class Options>
struct library_form;  // how the library calls what the reference's options stand for

template <class S>
struct library_form<S, reference::block_options> : compiled_block<S> {
  static void set(const reference::block_options& from, attn::block_options<S>& to) {
    to.size = from.size, to.neighbours = from.neighbours;
    if (const auto& table = from.permutation; !table.empty())
      to.permutation = {table.data.data(), {table.heads(), table.length()}};
  }
};

template <class S>
struct library_form<S, reference::strided_options> : compiled_strided<S> {
  static void set(const reference::strided_options& from, attn::strided_options<S>& to) {
    to.kind = from.fixed ? attn::strided_kind::fixed : attn::strided_kind::strided;
    to.stride = from.stride, to.summary = from.summary;
  }
};

template <class S>
struct library_form<S, reference::bigbird_options> : compiled_bigbird<S> {
  static void set(const reference::bigbird_options& from, attn::bigbird_options<S>& to) {
    to.size = from.size, to.window_blocks = from.window_blocks, to.global_blocks = from.global_blocks;
    if (const auto& table = from.random; !table.empty())
      to.random = {table.data.data(), {table.heads(), table.length(), table.dim()}};
  }
};

// What every pattern operator has, and the memory it points to.
template <class S, class LibraryOptions>
class common_softmax_options {
 public:
  explicit common_softmax_options(const reference::softmax_options& from)
      : from_(from), slopes_(cast<real<S>>(from.alibi_slopes)), sinks_(cast<real<S>>(from.sinks)),
        relative_(cast<real<S>>(from.relative_bias)) {
    if (from_.scale) options.scale = static_cast<real<S>>(*from_.scale);
    if (from_.softcap) options.softcap = static_cast<real<S>>(*from_.softcap);
    if constexpr (requires { options.causal; }) options.causal = from_.causal;
    if constexpr (requires { options.lengths; }) options.lengths = from_.lengths;
    if constexpr (requires { options.relative_bias; }) options.relative_bias = table_view(relative_);
    if constexpr (requires { options.key_lengths; })
      options.query_lengths = from_.query_lengths, options.key_lengths = from_.key_lengths;
    if constexpr (requires { options.alibi_slopes; }) options.alibi_slopes = slopes_;
    options.sinks = sinks_;
    if constexpr (requires { options.dropout; }) options.dropout = {from_.dropout_rate, from_.dropout_seed};
    if constexpr (requires { options.key_mask; }) options.key_mask = seen_.view();
    if (from_.score)
      score = [f = from_.score](real<S> s, idx_t b, idx_t h, idx_t i, idx_t j) {
        return static_cast<real<S>>(f(static_cast<double>(s), b, h, i, j));
      };
  }
  common_softmax_options(const common_softmax_options&) = delete;

 private:
  reference::softmax_options from_;
  std::vector<real<S>> slopes_, sinks_;
  tensor<real<S>> relative_;
  key_mask_bytes seen_{from_.key_mask};

 public:
  LibraryOptions options;
  score_of<S> score;
};

// out and lse start with poison values: rows that should be zero must have been written.
template <class S, class Options>
reference::result run_pattern(const problem<Options>& p, attn::execution& execution) {
  using form = library_form<S, Options>;
  common_softmax_options<S, typename form::options> stored(p.options);
  form::set(p.options, stored.options);
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  tensor<real<S>> lse(q.batch(), q.heads(), q.length(), 1, real<S>(7));
  stored.options.lse = row_view(lse);
  form::call(view(q), view(k), view(v), view(out), stored.options, stored.score, execution);
  return {cast<double>(out), cast<double>(lse)};
}
template <class S, class Options>
reference::result run_pattern(const problem<Options>& p) {
  attn::execution serial;
  return run_pattern<S>(p, serial);
}

// Against the reference on the same rounded inputs.
template <class S, class Options>
errors pattern_errors(problem<Options> p) {
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  round_options<S>(p.options);
  const reference::result actual = run_pattern<S>(p), wanted = reference::by_pattern(p.q, p.k, p.v, p.options);
  return {relative_error(actual.out, wanted.out), relative_error(actual.lse, wanted.lse)};
}

// The options all of them share, each alone and all together: choice 0 to 63.
inline void choose(reference::softmax_options& o, int choice, idx_t queries, idx_t keys) {
  o.causal = choice & 1;
  if (choice & 2) o.softcap = 1.5;
  if (choice & 4) o.sinks = {0.3, -1, 2, 0};
  if (choice & 8) o.alibi_slopes = {0.5, 0.25, 0.125, 0};
  if (choice & 16)
    o.score = [](double s, idx_t b, idx_t h, idx_t i, idx_t j) {
      return (i * 3 + j * 5 + h) % 11 == 0 ? -reference::infinity : s * 0.5 + 0.01 * static_cast<double>(b + i - j);
    };
  if (choice & 32) {
    o.scale = 0.4;
    o.query_lengths = {queries, queries > 9 ? queries - 9 : 0}, o.key_lengths = {keys > 6 ? keys - 6 : 0, keys};
  }
}

// And what only patterns have.
inline void choose_of_pattern(reference::softmax_options& o, int choice, idx_t queries, idx_t keys) {
  choose(o, choice, queries, keys);
  if (choice & 8) o.relative_bias = random_normal(17, 1, 1, 4, 2 * 9 + 1);
}

// A table of blocks [1, heads, blocks, columns]: entries from -1 to blocks - 1 that depend on their indices only, so
// that a shorter sequence's table is the longer one's without what lies beyond.
inline tensor<idx_t> block_table(idx_t first_head, idx_t heads, idx_t blocks, idx_t columns) {
  tensor<idx_t> table(1, heads, blocks, columns);
  for (idx_t h = 0; h < heads; ++h)
    for (idx_t a = 0; a < blocks; ++a)
      for (idx_t n = 0; n < columns; ++n) {
        random_source random(static_cast<std::uint64_t>(((first_head + h) * 1000 + a) * 10 + n));
        const idx_t drawn = random.below(a + 9) - 1;
        table(0, h, a, n) = drawn < blocks ? drawn : -1;
      }
  return table;
}

}  // namespace testing
