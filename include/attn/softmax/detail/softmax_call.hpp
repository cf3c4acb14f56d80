// attn: the arguments of the operators of exact softmax attention: their checks, and the form in which kernels see
// them.
//
//   template <viewable Q, ..., class Options = NAME_options<element_of<const Q&>>, class Score = detail::no_score>
//   void NAME(const Q& q, ..., O&& out, Options&& options = {}, Score&& score = {}, execution_ref exec = {}) {
//     detail::call_softmax<NAME_options>("NAME", q, k, v, out, options, score, exec,
//                                        [](auto& call, const auto& given) { /* own checks; attend */ });
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/kv_memory.hpp>
#include <attn/core/detail/product_choice.hpp>
#include <attn/softmax/detail/blockwise.hpp>

namespace attn::inline ATTN_ISA::detail {

/// The views of a call, and the options that all its kernels use. Keys and values of a cache may have another element
/// type, C.
template <class S, class C = S>
struct softmax_inputs {
  using T = compute_type<S>;

  tensor_view<const S> q;
  tensor_view<const C> k, v;
  tensor_view<S> out;
  attention_shape shape{};
  sequence_lengths lengths{};
  bool causal = false;
  std::optional<idx_t> first_position{};
  list_view<T> sinks{};
  tensor_view<T, 3> lse{};
  tensor_view<T, 3> maximum{};  // where given, lse and this are in base 2: the log of the sum beside the maximum
  page_tables pages{};    // in steps with pages, where k and v are [pages, Hkv, page rows, ..]
  tensor_view<T> sums{};  // receives the results in place of out, not rounded, where they are added up further

  /// The rows that query head h reads and writes.
  matrix_view<const S> query(idx_t b, idx_t h) const { return head_of(q, b, h); }
  matrix_view<const C> key(idx_t b, idx_t h) const { return head_of(k, b, h / shape.group()); }
  matrix_view<const C> value(idx_t b, idx_t h) const { return head_of(v, b, h / shape.group()); }
  matrix_view<S> result(idx_t b, idx_t h) const { return head_of(out, b, h); }

  /// The position of the first query, and the one after the last query's.
  idx_t shift(idx_t b) const { return first_position.value_or(lengths.keys(b) - lengths.queries(b)); }
  idx_t last_shift(idx_t b) const { return shift(b) + lengths.queries(b); }
  /// Number of keys that any query sees, which are the first ones.
  idx_t visible_keys(idx_t b) const {
    return causal ? std::clamp(last_shift(b), idx_t(0), lengths.keys(b)) : lengths.keys(b);
  }

  /// Stores row r of the state as the result of query i.
  template <int Lanes>
  void finish_row(const online_softmax<T, Lanes>& state, idx_t r, idx_t b, idx_t h, idx_t i) const {
    const auto at = [&](const tensor_view<T, 3>& x) {
      T* const row = row_of(x, b, h);
      return row ? row + i * x.stride(2) : nullptr;
    };
    T *const log_sum = at(lse), *const highest = at(maximum);
    const auto finish_in = [&](const auto& to) {
      state.finish_row(r, per_head(sinks, h), to.row(i), to.col_stride, log_sum, highest);
    };
    if (sums) return finish_in(head_of(sums, b, h));
    finish_in(result(b, h));
  }
  template <class P>
  void finish(const row_block<P>& block, idx_t b, idx_t h) const {
    for (idx_t r = 0; r < block.rows; ++r) finish_row(block.state, r, b, h, block.positions[r]);
  }
  /// Clears the rows of padding in [begin, end).
  void clear_padding(idx_t b, idx_t h, idx_t begin = 0, idx_t end = std::numeric_limits<idx_t>::max()) const {
    const idx_t from = std::max(begin, lengths.queries(b)), to = std::min(end, shape.queries);
    if (sums) return clear_rows(head_of(sums, b, h), from, to, row_of(lse, b, h), lse.stride(2));
    clear_rows(result(b, h), from, to, row_of(lse, b, h), lse.stride(2));
  }
};

/// A call after the checks that all operators share.
template <class S, class Score, class C = S>
struct softmax_call : softmax_inputs<S, C> {
  validator check;
  score_terms<compute_type<S>, Score> terms;
  execution& exec;

  /// The same over the keys and values of a cache.
  template <class Cached>
  softmax_call<S, Score, Cached> over(const tensor_view<const Cached>& keys, const tensor_view<const Cached>& values,
                                      const page_tables& tables) const {
    return {{.q = this->q, .k = keys, .v = values, .out = this->out, .shape = this->shape, .lengths = this->lengths,
             .causal = this->causal, .first_position = this->first_position, .sinks = this->sinks, .lse = this->lse,
             .pages = tables, .sums = this->sums},
            check, terms, exec};
  }

  /// Checks views of the operator's own options: they can be read, and no written view overlaps them.
  void check_read(const char* name, const memory_layout& view) const {
    check.memory({{"out", this->out}, {"lse", this->lse}}, {{name, view}});
  }
  /// The work of queries that see `seen` keys each, where `read` keys of every key head are read.
  [[nodiscard]] auto limit_threads(idx_t seen, double read) const {
    const attention_shape& s = this->shape;
    const double queries = static_cast<double>(s.queries), per_key = static_cast<double>(s.dim + s.dim_v) * sizeof(S);
    return exec.limit_threads({.operations = s.operations_per_score() * queries * static_cast<double>(seen),
                               .bytes = static_cast<double>(s.batch * s.kv_heads) * per_key * read});
  }
};

/// Checks the arguments and what all options have in common, then calls body(softmax_call, options).
template <template <class> class Options, class Q, class K, class V, class O, class Given, class Score, class Body>
void call_softmax(const char* name, const Q& q, const K& k, const V& v, O&& out, Given& options, Score& score,
                  execution_ref& exec, const Body& body) {
  require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  using T = compute_type<S>;
  const Options<S>& given = options_or_default<Options<S>>(options);
  auto&& function = callable_or_default<no_score>(score);
  require_score<decltype(function), T>();
  softmax_call<S, std::remove_reference_t<decltype(function)>> call{
      {.q = as_view(q), .k = as_view(k), .v = as_view(v), .out = as_view(out), .sinks = given.sinks, .lse = given.lse},
      validator(name), {}, execution_of(exec, options, score)};
  call.shape = check_attention(call.check, call.q, call.k, call.v, call.out);
  call.lengths = {.full_queries = call.shape.queries, .full_keys = call.shape.keys};
  if constexpr (requires { given.key_lengths; }) call.lengths = check_lengths(call.check, call.shape, given);
  if constexpr (requires { given.causal; }) call.causal = given.causal;
  if constexpr (requires { given.first_position; })
    call.first_position = checked_position(call.check, given.first_position);
  if constexpr (requires { given.sums; }) call.sums = given.sums;
  check_softmax_options(call.check, call.shape, given, call.q, call.k, call.v, call.out);
  if constexpr (!requires { given.rotary; }) check_mask(call.check, call.shape, given);  // a step's keys are the cache's
  call.terms = terms_of<T>(given, call.shape.dim, &function);
  body(call, given);
}

}  // namespace attn::inline ATTN_ISA::detail
