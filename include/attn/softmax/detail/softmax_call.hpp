// attn: the call of an operator of exact softmax attention: its checks, and the data that run_NAME(call) takes:
//     auto call = detail::checked_call<NAME_options>("NAME", q, k, v, out, options, score, exec);
//     /* own checks, by call.views, call.shape and call.options */
//     detail::run_NAME(call);
#pragma once

#include <attn/core/detail/attention_call.hpp>
#include <attn/core/detail/cache_rows.hpp>
#include <attn/core/detail/product_choice.hpp>
#include <attn/softmax/detail/blockwise.hpp>
#include <attn/softmax/detail/key_span.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The views of a call, and the options that all its kernels use.
template <class S, class C = S>
struct softmax_inputs : attention_views<S, C> {
  using T = compute_type<S>;
  using attention_views<S, C>::shape, attention_views<S, C>::lengths;

  bool causal = false;
  idx_t span = 1;  // tokens that a key stands for
  first_positions first_position{};
  list_view<T> sinks{};
  tensor_view<T, 3> lse{};
  tensor_view<T, 3> maximum{};  // where given, lse and this are in base 2: the log of the sum beside the maximum
  page_tables pages{};    // in steps with pages, where k and v are [pages, Hkv, page rows, ..]
  bool rotated_keys = false;  // of a cache: queries are to be rotated as well
  tensor_view<const S> relative_queries{};  // q unless given
  tensor_view<T> out_sums{};  // receives the results in place of out, not rounded, where they are added up further

  /// The position of the first query, and the one after the last query's.
  idx_t shift(idx_t b) const {
    return first_position ? first_position.of(b) : lengths.keys(b) - lengths.queries(b);
  }
  idx_t last_shift(idx_t b) const { return shift(b) + lengths.queries(b); }
  key_limit limit() const { return {causal, span}; }
  /// Query i sees the keys below.
  idx_t end_of(idx_t b, idx_t i) const { return limit().end(i + shift(b), lengths.keys(b)); }
  /// Number of keys that any query sees, which are the first ones.
  idx_t visible_keys(idx_t b) const { return limit().end(last_shift(b) - 1, lengths.keys(b)); }

  /// The rows of a key head, also of a cache.
  cache_rows<const C> key_rows(idx_t b, idx_t kv) const { return {this->k, b, kv, shape.dim, true, pages}; }
  cache_rows<const C> value_rows(idx_t b, idx_t kv) const {
    return {this->v, b, kv, shape.dim_v, this->v.data() == this->k.data(), pages};
  }

  /// lse in base 2, in two parts: one number loses the digits of the sum where scores are large. Given as one number,
  /// it counts as the maximum.
  struct row_lse {
    T maximum, log_sum;
    bool sees() const {
      constexpr T none = -std::numeric_limits<T>::infinity();
      return log_sum != none && maximum != none;
    }
  };
  row_lse lse_of(idx_t b, idx_t h, idx_t i) const {
    if (maximum) return {maximum(b, h, i), lse(b, h, i)};
    return {to_base_2(lse(b, h, i)), T(0)};
  }
  /// Whether relative keys are multiplied with other numbers than those of the queries' products with keys.
  bool own_relative() const { return bool(relative_queries) || rotated_keys; }
  /// Memory for lse in two parts, where it is not given and therefore computed again.
  struct lse_memory {
    T *lse, *maximum;
  };
  lse_memory layout_lse(arena& memory) const {
    const idx_t rows = lse ? 0 : shape.batch * shape.heads * shape.queries;
    return {memory.allocate<T>(rows), memory.allocate<T>(rows)};
  }
  /// Whether lse is to be computed, into this memory.
  bool needs_lse(const lse_memory& memory) {
    if (lse) return false;
    lse = {memory.lse, {shape.batch, shape.heads, shape.queries}};
    maximum = {memory.maximum, {shape.batch, shape.heads, shape.queries}};
    return true;
  }

  /// Stores row r of the state as the result of query i.
  void finish_row(const online_softmax<T>& state, idx_t r, idx_t b, idx_t h, idx_t i) const {
    const auto at = [&](const tensor_view<T, 3>& x) {
      T* const row = row_of(x, b, h);
      return row ? row + i * x.stride(2) : nullptr;
    };
    T *const log_sum = at(lse), *const highest = at(maximum);
    const auto finish_in = [&](const auto& to) {
      state.finish_row(r, per_head(sinks, h), to.row(i), to.col_stride, log_sum, highest);
    };
    if constexpr (std::same_as<S, T>) return finish_in(out_sums ? head_of(out_sums, b, h) : this->result(b, h));
    if (out_sums) return finish_in(head_of(out_sums, b, h));
    finish_in(this->result(b, h));
  }
  /// Clears the rows of padding in [begin, end).
  void clear_padding(idx_t b, idx_t h, idx_t begin = 0, idx_t end = (std::numeric_limits<idx_t>::max)()) const {
    const idx_t from = (std::max)(begin, lengths.queries(b)), to = (std::min)(end, shape.queries);
    if (out_sums) return clear_rows(head_of(out_sums, b, h), from, to, row_of(lse, b, h), lse.stride(2));
    clear_rows(this->result(b, h), from, to, row_of(lse, b, h), lse.stride(2));
  }
};

/// A call after the checks that all operators share.
template <class S, class Score, class C = S>
struct softmax_call : softmax_inputs<S, C> {
  using T = compute_type<S>;

  validator check;
  score_terms<T, Score> terms;
  execution& exec;

  /// What terms have in memory: the sums of log decays, and packed relative keys and position queries.
  struct term_memory {
    decay_sums<T> decay;
    relative_keys<T> by_distance;
    position_queries<T> by_position;
  };
  /// Memory for them, where they are given and not there yet. Without a range relative keys are not packed: the
  /// streaming kernel reads them in place.
  term_memory layout_terms(arena& memory, const std::optional<distance_range>& range) const {
    const tensor_view<const T, 3> none;
    const distance_range of = range.value_or(distance_range{});
    const auto packed = [&]<class Term>(const Term& term) {
      return Term::layout(memory, range && !term.packed() ? term.table : none, this->shape.heads, of);
    };
    return {decay_sums<T>::layout(memory, terms.decay.summed() ? none : terms.decay.log_decay),
            packed(terms.by_distance), packed(terms.by_position)};
  }
  /// No query and key are further apart.
  idx_t furthest() const {
    idx_t first = 0;
    for (idx_t b = 0; this->first_position && b < this->shape.batch; ++b)
      first = (std::max)(first, std::abs(this->first_position.of(b)));
    return this->shape.queries + this->shape.keys + first;
  }
  /// Fills them; item b has keys_of(b) keys.
  template <class Keys>
  void prepare_terms(const term_memory& memory, const Keys& keys_of) {
    terms.prepared = true;
    if (memory.decay) {
      const idx_t heads = memory.decay.log_decay.extent(1);
      terms.decay = memory.decay;
      exec.for_each(memory.decay.log_decay.extent(0) * heads,
                    [&](idx_t n, int) { memory.decay.add_up(n / heads, n % heads, keys_of(n / heads)); });
    }
    if (memory.by_distance) {
      terms.by_distance = memory.by_distance;
      exec.for_each(memory.by_distance.count, [&](idx_t n, int) { memory.by_distance.pack(n); });
    }
    if (memory.by_position) {
      terms.by_position = memory.by_position;
      exec.for_each(memory.by_position.count, [&](idx_t n, int) { memory.by_position.pack(n, terms.query_factor()); });
    }
  }
  void prepare_terms(const term_memory& memory) {
    prepare_terms(memory, [&](idx_t b) { return this->lengths.keys(b); });
  }

  score_terms<T, Score> terms_for(idx_t b, idx_t h) const {
    score_terms<T, Score> one = terms.for_head(b, h, this->shift(b));
    one.skip = terms.skip.of_item(this->lengths.keys(b));
    return one;
  }
  /// In base 2 what the rows of an item leave out lies so far below their maxima; negative where they leave out nothing.
  T skip_limit(idx_t b) const { return terms.skip.of_item(this->lengths.keys(b)).limit; }

  /// Begins a block with the rows `which` of `query`, of head h.
  template <class P>
  void begin(row_block<P>& block, idx_t b, idx_t h, const matrix_view<const S>& query, const index_map& which,
             idx_t count) const {
    block.fixed = exec.invariant();
    block.begin(query, which, count, terms.query_factor());
    if (terms.by_distance)
      block.begin_relative(this->relative_queries ? head_of(this->relative_queries, b, h) : query,
                           terms.query_factor());
  }

  /// Stores row r of the state as the result of query i.
  [[gnu::noinline]] void finish_row(const online_softmax<T>& state, idx_t r, idx_t b, idx_t h, idx_t i) const {
    if (exec.invariant()) state.clear_signs(r);
    if constexpr (makes_weights<Score>)
      state.store_row(r, state.sum[r] == T(0) ? T(0) : terms.score->factor(b, i), this->result(b, h).row(i),
                      this->out.stride(3));
    else
      softmax_inputs<S, C>::finish_row(state, r, b, h, i);
  }
  template <int Lanes>
  void finish_row(const online_softmax<T, Lanes>& state, idx_t r, idx_t b, idx_t h, idx_t i) const {
    T sum = state.row_sum(r);
    finish_row(online_softmax<T>{1, state.cols, state.stride, state.maximum + r, &sum, state.row(r)}, 0, b, h, i);
  }
  template <class P>
  void finish(const row_block<P>& block, idx_t b, idx_t h) const {
    for (idx_t r = 0; r < block.rows; ++r) finish_row(block.state, r, b, h, block.positions[r]);
  }

  /// The same over the keys and values of a cache.
  template <class Cache>
  softmax_call<S, Score, typename Cache::value_type> over(const Cache& cache) const {
    softmax_inputs<S, typename Cache::value_type> in;
    static_cast<attention_views<S, typename Cache::value_type>&>(in) = {
        this->q, cache.keys(), cache.values(), this->out, this->shape, this->lengths};
    in.causal = this->causal, in.span = this->span, in.first_position = this->first_position;
    in.sinks = this->sinks, in.lse = this->lse;
    in.pages = cache.pages(), in.out_sums = this->out_sums, in.relative_queries = this->relative_queries;
    in.rotated_keys = cache.rotated();
    return {in, check, terms, exec};
  }

  /// The work of queries that see `seen` keys each, where `read` keys of every key head are read.
  [[nodiscard]] auto limit_threads(idx_t seen, double read) const {
    const attention_shape& s = this->shape;
    const double queries = static_cast<double>(s.queries), per_key = static_cast<double>(s.dim + s.dim_v) * sizeof(S);
    return exec.limit_threads({.operations = s.operations_per_score() * queries * static_cast<double>(seen),
                               .bytes = static_cast<double>(s.batch * s.kv_heads) * per_key * read});
  }
};

/// Whether one tile of rows with products of operands P may read keys and values where they lie (keys_in_place.hpp).
template <class P, class S, class Score, class C>
bool in_rows(const softmax_call<S, Score, C>& in) {
  if constexpr (std::same_as<C, typename row_keys<P>::number> && may_be_rows<row_keys<P>>)
    return in.k.stride(3) == 1 && in.v.stride(3) == 1 && in.shape.dim_v % width<sum_type<P>> == 0 &&
           !in.terms.by_position;
  return false;
}

/// A call with its table of views and its options, for the checks of one operator.
template <class S, class Score, class Options>
struct checked_softmax : softmax_call<S, Score> {
  call_views views;
  const Options& options;
  const softmax_parameters<S> given = parameters_of<S>(options);

  // As an aggregate GCC would clear all of it first, and the table is 10 KB.
  template <class... Views>
  checked_softmax(const char* name, Score* function, execution& threads, const Options& all, Views&&... qkv_out)
      : softmax_call<S, Score>{{{view_in(qkv_out)...}}, validator(name), {.score = function}, threads}, views(name),
        options(all) {}
};

/// The score function of a call, or null where there is none.
template <class Function, class Given>
Function* score_in(Given& score) {
  if constexpr (std::same_as<Function, Given>)
    return &score;
  else
    return nullptr;
}

/// What follows from the shape of a call and its options.
template <class S, class Score>
void set_options(softmax_call<S, Score>& call, const attention_shape& shape, const softmax_parameters<S>& given) {
  call.shape = shape, call.lengths = check_lengths(call.check, shape, given);
  call.causal = given.causal, call.first_position = given.first_position, call.span = given.span;
  call.sinks = given.sinks;
  if (*given.lse) call.lse = *given.lse;
  if (*given.sums) call.out_sums = *given.sums;
  if (*given.relative_queries) call.relative_queries = *given.relative_queries;
  set_terms(call.terms, given, shape.dim);
  check_span(call.check, call.first_position, call.limit(), shape.batch);
  const auto& t = call.terms;
  if (call.span > 1 && (t.relative || t.by_distance || t.by_position || t.decay || !t.slopes.empty()))
    call.check.fail("no term of the distance, no log_decay and no alibi_slopes, since span is given", "one");
}

/// The arguments of a call, whose types are checked here.
template <template <class> class Options, invariant_form Form = invariant_form::none, class Q, class K, class V,
          class O, class Given, class Score>
auto unchecked_call(const char* name, const Q& q, const K& k, const V& v, O& out, Given& options, Score& score,
                    execution_ref& exec) {
  require_one_element_type<const Q&, const K&, const V&, O&>();
  using S = element_of<const Q&>;
  using T = compute_type<S>;
  using function = std::remove_reference_t<decltype(callable_or_default<no_score>(score))>;
  require_score<function, T>();
  checked_softmax<S, function, Options<S>> call(name, score_in<function>(score), execution_of(exec, options, score),
                                                options_or_default<Options<S>>(options), q, k, v, out);
  if constexpr (Form == invariant_form::none) check_invariant(call.check, call.exec);
  return call;
}

/// Checks the log decays of the real keys, lengths.keys(b) of item b, where the operator has any. A step checks those of
/// all its tokens: they are memory of the caller, who may have changed it since the last step, and all are added up anew
/// once the cache has changed, in thirty times the time (4096 tokens: 0.7 us of a step of 185).
template <class T, class Lengths>
void check_decays(const validator& check, const tensor_view<const T, 3>& x, const Lengths& lengths, execution& exec) {
  if (!x) return;
  check_log_decays(check, tensor_view<const T>(x.data(), {x.extent(0), x.extent(1), x.extent(2), 1},
                                               {x.stride(0), x.stride(1), x.stride(2), 1}),
                   lengths, &exec);
}

/// Checks what the options of all operators have in common, and fills in what follows from them.
template <class S, class Score, class Options>
void check_call(checked_softmax<S, Score, Options>& call) {
  const softmax_parameters<S>& given = call.given;
  set_options(call, check_attention(call.views, call.q, call.k, call.v, call.out, *given.lse), given);
  check_softmax_options(call.views, call.shape, given);
  if (call.terms.skip.given() && call.exec.invariant())
    call.check.fail("an execution that is not invariant, since tiles are left out", "one");
  if (!given.of_cache) check_decays(call.check, *given.log_decay, call.lengths, call.exec);
}

template <template <class> class Options, invariant_form Form = invariant_form::none, class Q, class K, class V,
          class O, class Given, class Score>
auto checked_call(const char* name, const Q& q, const K& k, const V& v, O& out, Given& options, Score& score,
                  execution_ref& exec) {
  auto call = unchecked_call<Options, Form>(name, q, k, v, out, options, score, exec);
  check_call(call);
  return call;
}

}}}  // namespace attn::ATTN_ISA::detail
