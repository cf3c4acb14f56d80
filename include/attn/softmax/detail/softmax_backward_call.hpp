// attn: the backward call of an operator of exact softmax attention: its checks, and the data that
// run_NAME_backward(call) takes:
//     softmax_backward_work work(call, operations);
//     if (work.needs_lse()) /* write call.forward.lse */;
//     /* the driver */
//     work.store_parameters();
#pragma once

#include <attn/core/detail/gradients.hpp>
#include <attn/softmax/detail/backward_terms.hpp>
#include <attn/softmax/detail/blockwise_backward.hpp>
#include <attn/softmax/detail/softmax_call.hpp>
#include <attn/softmax/softmax_gradients.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// A backward call after the checks that all operators share. The gradients of q, k and v have elements G: S, or the
/// compute type where they are added up further.
template <class S, class Score, class ScoreBackward, class G = S>
struct softmax_backward_call {
  using T = compute_type<S>;

  softmax_call<S, Score> forward;  // the forward call without values, which computes lse where it is not given
  tensor_view<const S> q, k, v, out, d_out;
  attention_shape shape;
  tensor_view<G> dq{}, dk{}, dv{};
  tensor_view<T, 1> d_slopes{}, d_sinks{};
  tensor_view<T> d_bias{};
  tensor_view<T, 2> d_relative_bias{};
  tensor_view<T, 3> d_log_decay{}, d_relative_keys{}, d_position_queries{};
  tensor_view<G> d_relative_queries{};
  tensor_view<const T, 3> d_lse{};
  bool accumulate;
  ScoreBackward* score_backward;

  idx_t furthest = 0;       // no query sees a key further away
  list_view<idx_t> steps{};  // of distances, as in distance_range
  bool sum_rows = false;     // of weights without a softmax: whether the gradients of rows' factors are summed
  idx_t left = (std::numeric_limits<idx_t>::max)(), right = left;  // of the driver of full_softmax_backward: a window
  // Of a softmax_backward_work:
  T *slope_sums = nullptr, *sinks = nullptr;  // [batch * heads]: the gradients of each head's slope and sink
  double* head_sums = nullptr;                // [batch * heads][head_entries()]: those of the relative bias and of decays
  T* table_sums = nullptr;                    // [batch * heads][table_size()]: those of relative keys
                                              // and of position queries, by slot

  const sequence_lengths& lengths() const { return forward.lengths; }
  const score_terms<T, Score>& terms() const { return forward.terms; }
  /// The backward terms of one head; they refer to `one`.
  auto back(const score_terms<T, Score>& one) const {
    return backward_terms<T, Score, ScoreBackward>{
        .terms = one, .score_backward = score_backward, .d_bias = d_bias, .sum_slope = bool(d_slopes)};
  }
  /// Entries of the relative bias of a head whose gradients are summed: those of distances that there are.
  idx_t relative_reach() const {
    return (std::min)(d_relative_bias.extent(1) / 2, furthest);
  }
  idx_t relative_entries() const { return d_relative_bias ? 2 * relative_reach() + 1 : 0; }
  /// The entries of list n of `sums`, for the terms of a task.
  relative_sums relative_list(double* sums, idx_t n) const {
    if (!d_relative_bias) return {};
    return {sums + n * relative_entries() + relative_reach(), relative_reach()};
  }
  /// Entries of a head: of the relative bias, then of the gradients of scores by query and by key.
  idx_t head_entries() const {
    return relative_entries() + (sum_rows ? shape.queries : 0) + (d_log_decay ? shape.queries + shape.keys : 0);
  }
  /// Those by query of the gradients of rows' factors, in the place of decays.
  double* row_list(double* sums) const { return sum_rows ? sums + relative_entries() : nullptr; }
  /// Those by query and by key, in the list of a head.
  decay_gradients decay_list(double* sums) const {
    if (!d_log_decay) return {};
    double* const queries = sums + relative_entries();
    return {.queries = queries, .keys = queries + shape.queries, .end = shape.keys};
  }
  /// Numbers of a head's sums of the gradients of relative keys, and of position queries, which follow.
  idx_t relative_size() const { return sums_size(d_relative_keys, terms().by_distance); }
  idx_t table_size() const { return relative_size() + sums_size(d_position_queries, terms().by_position); }
  /// What a task adds to for a block of rows: its sums by slot, and those of the queries of relative keys, which are
  /// rows of `relative` where these are others than q, else of `of_q`.
  relative_key_sums<T> distance_sums(T* by_slot, T* of_q, T* relative, idx_t stride) const {
    if (!terms().by_distance) return {};
    return {forward.relative_queries ? relative : of_q, stride, d_relative_keys ? by_slot : nullptr};
  }
  /// Those of position queries.
  T* position_sums(T* by_slot) const { return d_position_queries ? by_slot + relative_size() : nullptr; }
  /// Adds a task's sums by slot.
  void add_table(idx_t head, const T* sums) const {
    T* const to = table_sums + head * table_size();
    for (idx_t x = 0, size = table_size(); x < size; ++x) to[x] += sums[x];
  }
  /// The keys that the query at position p sees, of so many.
  key_range seen_by(idx_t p, idx_t keys) const {
    if constexpr (!makes_weights<Score>) return {0, forward.limit().end(p, keys)};
    const idx_t end = std::clamp(p + (forward.causal ? idx_t(0) : right) + 1, idx_t(0), keys);
    return {std::clamp(p - left, idx_t(0), end), end};
  }
  double* sums_of(idx_t head) const { return head_sums + head * head_entries(); }
  /// Adds the first `count` entries of what a task has summed for query head `head` of all batch items.
  void add_sums(idx_t head, const double* sums, idx_t count) const {
    for (idx_t e = 0; e < count; ++e) sums_of(head)[e] += sums[e];
  }
  template <class P = product_type<S>>
  backward_scratch<P> layout_scratch(arena& memory) const {
    auto s = backward_scratch<P>::layout(memory, shape.dim, shape.dim_v, back(terms()).need_raw(),
                                         bool(terms().by_distance), bool(terms().by_position));
    s.fixed = forward.exec.invariant();
    return s;
  }

  /// Packs `count` rows which[...] of head h, from `query`, with their lse and D, into one block, which they fill
  /// alone.
  template <class P>
  void pack_rows(const backward_rows<P>& to, idx_t b, idx_t h, const matrix_view<const S>& query,
                 const index_map& which, idx_t count) const {
    const auto o = head_of(out, b, h), d = head_of(d_out, b, h);
    to.pack(query, d, which, count, terms().query_factor());
    if (terms().by_distance)
      to.pack_relative(forward.relative_queries ? head_of(forward.relative_queries, b, h) : query, which, count);
    if constexpr (makes_weights<Score>) {
      for (idx_t r = 0; r < count; ++r) to.maximum[r] = terms().score->factor(b, which[r]);
      return;
    }
    for (idx_t r = 0; r < count; ++r) {
      const idx_t i = which[r];
      const auto of = forward.lse_of(b, h, i);
      const bool sees = of.sees();
      to.maximum[r] = sees ? of.maximum : T(0);
      to.log_sum[r] = sees ? of.log_sum : T(0);
      to.delta[r] = sees ? delta(o, d, b, h, i) : T(0);
    }
    for (T* x : {to.maximum, to.log_sum, to.delta}) std::fill(x + count, x + max_rows, T(0));
  }
  T delta(const matrix_view<const S>& o, const matrix_view<const S>& d, idx_t b, idx_t h, idx_t i) const {
    const T dot = row_dot<T>(o.row(i), o.col_stride, d.row(i), d.col_stride, shape.dim_v);
    return d_lse ? dot - d_lse(b, h, i) : dot;
  }

  /// Stores the gradients of the parameters of heads, from their sums.
  void store_parameters() const {
    execution& exec = forward.exec;
    const idx_t heads = shape.batch * shape.heads;
    if (d_slopes) store_per_head(slope_sums, d_slopes);
    if (d_relative_bias) store_relative_bias();
    if constexpr (makes_weights<Score>) return;  // which has no other parameters
    if (d_log_decay)
      exec.for_each(heads, [&](idx_t n, int) { store_log_decay(n / shape.heads, n % shape.heads); });
    if (d_relative_keys) store_table(d_relative_keys, terms().by_distance, 0);
    if (d_position_queries) store_table(d_position_queries, terms().by_position, relative_size());
    if (!d_sinks) return;
    exec.for_each(heads, [&](idx_t n, int) { sinks[n] = sink_gradient(n / shape.heads, n % shape.heads); });
    store_per_head(sinks, d_sinks);
  }

 private:
  template <class Table>
  static idx_t sums_size(const tensor_view<T, 3>& wanted, const Table& table) {
    idx_t most = 0;
    for (idx_t n = 0; wanted && n < table.count; ++n) most = (std::max)(most, Table::sums_size(table.heads[n]));
    return most;
  }
  /// The gradient of the sink of one head: - sum_i e^(sink - lse_i) D_i. A weight is at most 1, however lse is rounded.
  T sink_gradient(idx_t b, idx_t h) const {
    const auto o = head_of(out, b, h), d = head_of(d_out, b, h);
    const T sink = forward.sinks[static_cast<std::size_t>(h)];
    double sum = 0;
    for (idx_t i = 0; i < lengths().queries(b); ++i)
      if (const auto of = forward.lse_of(b, h, i); of.sees())
        sum -= static_cast<double>(std::exp2((std::min)(to_base_2(sink) - of.maximum - of.log_sum, T(0))) *
                                   delta(o, d, b, h, i));
    return static_cast<T>(sum);
  }
  /// Summed over batch items, and over heads where one table serves all; distances that there are not have gradient 0.
  void store_relative_bias() const {
    const idx_t rows = d_relative_bias.extent(0), size = relative_entries(), next = head_entries(),
                outside = d_relative_bias.extent(1) / 2 - relative_reach();
    for (idx_t h = 0; h < rows; ++h)
      for (idx_t e = 0; e < d_relative_bias.extent(1); ++e) {
        double sum = 0;
        for (idx_t n = h; n < shape.batch * shape.heads && e >= outside && e < outside + size; n += rows)
          sum += head_sums[n * next + e - outside];
        store_gradient(d_relative_bias(h, e), static_cast<T>(sum), accumulate);
      }
  }
  /// A table by distance, summed over batch items, and over heads where one serves all; its sums are from number
  /// `first` of a head's on.
  template <class Table>
  void store_table(const tensor_view<T, 3>& to, const Table& of, idx_t first) const {
    forward.exec.for_each(to.extent(1), [&](idx_t entry, int) {
      const idx_t tables = to.extent(0), size = table_size(), stride = sums_stride<T>(shape.dim);
      for (idx_t h = 0; h < tables; ++h)
        for (idx_t d = 0; d < shape.dim; ++d) {
          double sum = 0;
          for (idx_t n = h; n < shape.batch * shape.heads; n += tables) {
            const key_range at = of.slots_of_entry(of.head(n % shape.heads), entry);
            const T* const sums = table_sums + n * size + first;
            for (idx_t slot = at.begin; slot < at.end; ++slot) sum += static_cast<double>(sums[slot * stride + d]);
          }
          store_gradient(to(h, entry, d), static_cast<T>(sum) * terms().scale, accumulate);
        }
    });
  }
  /// The gradients of a head's log decays: a token's is in c of the queries and keys at its position and after it.
  void store_log_decay(idx_t b, idx_t h) const {
    const decay_gradients of = decay_list(sums_of(b * shape.heads + h));
    const idx_t shift = forward.shift(b), keys = lengths().keys(b);
    idx_t i = lengths().queries(b) - 1;
    double sum = 0;
    for (idx_t t = shape.keys - 1; t >= 0; --t) {
      if (t < keys) {
        for (; i >= 0 && i + shift >= t; --i) sum += of.queries[i];
        sum -= of.keys[t];
      }
      store_gradient(d_log_decay(b, h, t), t < keys ? static_cast<T>(sum) : T(0), accumulate);
    }
  }
  void store_per_head(const T* sums, const tensor_view<T, 1>& to) const {
    for (idx_t h = 0; h < shape.heads; ++h) {
      T sum = 0;
      for (idx_t b = 0; b < shape.batch; ++b) sum += sums[b * shape.heads + h];
      store_gradient(to(h), sum, accumulate);
    }
  }
};

/// What a backward pass has while it runs: its threads and kind of products; in the call the terms, memory for lse
/// where the forward pass did not save it with the same products, and sums of the gradients of the parameters, which
/// are 0.
template <class S, class Score, class ScoreBackward, class G>
class softmax_backward_work {
  using T = compute_type<S>;
  using call_type = softmax_backward_call<S, Score, ScoreBackward, G>;

 public:
  /// `operations` are those of the backward pass.
  softmax_backward_work(call_type& call, double operations)
      : call_(call),
        limit_(call.forward.exec.limit_threads({.operations = operations})),
        standard_(drop_fast_lse(call)),
        terms_(call.forward.exec.workspace([&](arena& m) {
          return call.forward.layout_terms(m, distance_range{call.furthest, call.steps, true});
        })),
        sums_(prepare_terms().workspace([&](arena& m) {
          return sums{makes_weights<Score> ? lse_memory() : call.forward.layout_lse(m),
                      m.allocate<T>(call.d_slopes ? heads() : 0),
                      m.allocate<T>(call.d_sinks ? heads() : 0), m.allocate<double>(heads() * call.head_entries()),
                      m.allocate<T>(heads() * call.table_size())};
        })) {
    call.slope_sums = sums_->slopes, call.sinks = sums_->sinks, call.head_sums = sums_->by_head;
    call.table_sums = sums_->tables;
    std::fill_n(call.slope_sums, call.d_slopes ? heads() : 0, T(0));
    std::fill_n(call.head_sums, heads() * call.head_entries(), 0.0);
    std::fill_n(call.table_sums, heads() * call.table_size(), T(0));
    needs_lse_ = !makes_weights<Score> && call.forward.needs_lse(sums_->lse);
  }
  /// Whether the forward call has to be computed again, which writes lse.
  bool needs_lse() const { return needs_lse_; }
  void store_parameters() const { call_.store_parameters(); }

 private:
  using lse_memory = typename softmax_call<S, Score>::lse_memory;
  struct sums {
    lse_memory lse;
    T *slopes, *sinks;
    double* by_head;
    T* tables;
  };
  using term_memory = typename softmax_call<S, Score>::term_memory;

  idx_t heads() const { return call_.shape.batch * call_.shape.heads; }
  /// Weights are e^(score - lse): lse must come from the same kind of products as the scores. What is left out is
  /// decided by the maxima of rows, which lse does not tell.
  static execution& drop_fast_lse(call_type& call) {
    if (uses_fast_products<S>(call.forward.exec) || call.forward.terms.skip.of_item(1).leaves_out())
      call.forward.lse = {};
    return call.forward.exec;
  }
  execution& prepare_terms() {
    call_.forward.prepare_terms(*terms_);
    return call_.forward.exec;
  }

  call_type& call_;
  // In the order in which they are made: each needs what is above it.
  execution::thread_limit limit_;
  standard_products standard_;
  execution::persistent_workspace<term_memory> terms_;
  execution::persistent_workspace<sums> sums_;
  bool needs_lse_;
};

/// A backward call with its table of views and its options, for the checks of one operator.
template <class S, class Score, class ScoreBackward, class Options, class Gradients, class G>
struct checked_softmax_backward : softmax_backward_call<S, Score, ScoreBackward, G> {
  call_views views;
  const Options& options;
  const softmax_parameters<S> given = parameters_of<S>(options);
  const Gradients& gradients;

  checked_softmax_backward(const char* name, softmax_backward_call<S, Score, ScoreBackward, G>&& call,
                           const Options& all, const Gradients& wanted)
      : softmax_backward_call<S, Score, ScoreBackward, G>(call), views(name), options(all), gradients(wanted) {}
};

/// The arguments of a call, whose types are checked here.
template <template <class> class Options, invariant_form Form = invariant_form::none, class Q, class K, class V,
          class O, class D, class Gradients, class Given, class Score, class ScoreBackward>
auto unchecked_backward_call(const char* name, const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                             const Gradients& gradients, Given& options, Score& score, ScoreBackward& score_backward,
                             execution_ref& exec) {
  using S = element_of<const Q&>;
  using T = compute_type<S>;
  require_one_element_type<const Q&, const K&, const V&, tensor_view<S>>();
  require_one_element_type<const Q&, const O&, const D&, tensor_view<S>>();
  using function = std::remove_reference_t<decltype(callable_or_default<no_score>(score))>;
  using derivative = std::remove_reference_t<decltype(callable_or_default<no_score_backward>(score_backward))>;
  require_score<function, T>();
  require_score_backward<function, derivative, T>();
  using gradient_element = typename decltype(gradients.v)::value_type;
  checked_softmax_backward<S, function, derivative, Options<S>, Gradients, gradient_element> call(
      name,
      {.forward = {{}, validator(name), {.score = score_in<function>(score)},
                   execution_of(exec, options, score, score_backward)},
       .q = as_view(q), .k = as_view(k), .v = as_view(v), .out = as_view(out), .d_out = as_view(d_out), .shape = {},
       .accumulate = gradients.accumulate, .score_backward = score_in<derivative>(score_backward)},
      options_or_default<Options<S>>(options), gradients);
  if constexpr (Form == invariant_form::none) check_invariant(call.forward.check, call.forward.exec);
  return call;
}

/// The gradients that are asked for.
template <class S, class Score, class ScoreBackward, class G, class Gradients>
void set_gradients(softmax_backward_call<S, Score, ScoreBackward, G>& call, const Gradients& x) {
  constexpr auto has = [](unsigned field) { return (Gradients::shared & field) != 0; };
  call.dq = x.q, call.dv = x.v;
  if constexpr (!makes_weights<Score>) call.d_sinks = x.sinks, call.d_lse = x.d_lse;
  if constexpr (has(fields::k)) call.dk = x.k;
  if constexpr (has(fields::bias)) call.d_bias = x.bias;
  if constexpr (has(fields::relative_bias)) call.d_relative_bias = x.relative_bias;
  if constexpr (has(fields::relative_keys))
    call.d_relative_keys = x.relative_keys, call.d_relative_queries = x.relative_queries,
    call.d_position_queries = x.position_queries;
  if constexpr (has(fields::log_decay)) call.d_log_decay = x.log_decay;
  if constexpr (has(fields::alibi_slopes)) call.d_slopes = x.alibi_slopes;
}

/// Checks what the options of all operators have in common, and fills in what follows from them.
template <class S, class Score, class ScoreBackward, class G>
void check_backward_call(softmax_backward_call<S, Score, ScoreBackward, G>& call, call_views& views,
                         const softmax_parameters<S>& given) {
  const attention_shape s = call.shape = check_attention_extents(views, call.q, call.k, call.v, call.out);
  views.read("q", call.q), views.read("k", call.k), views.read("v", call.v);
  if constexpr (makes_weights<Score>) {  // `out` is not needed: it has a shape alone
    views.read_like("d_out", call.d_out, "the result", call.out);
  } else {
    views.read("out", call.out);
    read_gradient_of_out(views, s, call.out, call.d_out, *given.lse, call.d_lse);
  }
  check_softmax_numbers(views, s, given);
  check_key_options(views, s, given);
  const auto name_gradient = [&](const char* name, const auto& gradient, const memory_layout& of) {
    if (gradient) views.gradient(name, gradient, of);
  };
  name_gradient("q", call.dq, call.q), name_gradient("k", call.dk, call.k), name_gradient("v", call.dv, call.v);
  name_gradient("bias", call.d_bias, *given.bias);
  name_gradient("relative_bias", call.d_relative_bias, *given.relative_bias);
  name_gradient("relative_keys", call.d_relative_keys, *given.relative_keys);
  name_gradient("relative_queries", call.d_relative_queries, *given.relative_queries);
  name_gradient("position_queries", call.d_position_queries, *given.position_queries);
  name_gradient("log_decay", call.d_log_decay, *given.log_decay);
  name_gradient("alibi_slopes", call.d_slopes, list_layout(given.alibi_slopes));
  name_gradient("sinks", call.d_sinks, list_layout(given.sinks));
  auto& forward = call.forward;
  static_cast<attention_views<S>&>(forward) = {
      call.q, call.k, call.v.slice(3, 0, 0), {nullptr, {s.batch, s.heads, s.queries, 0}}};
  set_options(forward, s, given);
  forward.terms.skip.counts = nullptr;
  if (forward.terms.skip.given() && forward.exec.invariant())
    views.fail("an execution that is not invariant, since tiles are left out", "one");
  check_decays(views, *given.log_decay, forward.lengths, forward.exec);
  forward.shape.dim_v = 0;
  call.furthest = forward.furthest();
}
template <class S, class Score, class ScoreBackward, class Options, class Gradients, class G>
void check_backward_call(checked_softmax_backward<S, Score, ScoreBackward, Options, Gradients, G>& call) {
  set_gradients(call, call.gradients);
  check_backward_call(call, call.views, call.given);
}

template <template <class> class Options, invariant_form Form = invariant_form::none, class Q, class K, class V,
          class O, class D, class Gradients, class Given, class Score, class ScoreBackward>
auto checked_backward_call(const char* name, const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                           const Gradients& gradients, Given& options, Score& score, ScoreBackward& score_backward,
                           execution_ref& exec) {
  auto call = unchecked_backward_call<Options, Form>(name, q, k, v, out, d_out, gradients, options, score,
                                                     score_backward, exec);
  check_backward_call(call);
  return call;
}

}}}  // namespace attn::ATTN_ISA::detail
