// attn: the delta rule token by token.
//
//   attn::delta_rule_state<float> state({.heads = 16, .dim = 128, .value_dim = 128});
//   attn::delta_rule_step(state, q_t, k_t, v_t, out_t, {.beta = beta_t, .log_decay = g_t});   // one token or many
//   state.append(k, v, {.beta = beta});                        // the same without queries
//   auto branch = state;                                       // a copy: another continuation of the same sequence
//   state.write(file); state.read(file);                       // detail/state_stream.hpp
//
//   attn::delta_rule_state<float> draft({.heads = 16, .dim = 128, .value_dim = 128, .keep = 4});
//   draft.rollback(2);                                         // the last two tokens were never fed
//
// A million tokens in constant memory: S [dim, value dim] for every batch item and head, dims rounded up to two vectors,
// and keep times that again; bytes() is exact.
//
// There is no merge: what a part of a sequence does to the state is S -> M S + B with a matrix M, not an addition.
#pragma once

#include <attn/kernel/delta_rule.hpp>
#include <attn/kernel/detail/delta_step.hpp>
#include <attn/kernel/detail/state_stream.hpp>
#include <attn/kernel/detail/step_ring.hpp>

#include <vector>

namespace attn::inline ATTN_ISA {

/// Extents of a delta_rule_state.
struct delta_rule_state_extents {
  index batch = 1;
  /// Of values; those of keys divide them.
  index heads = 1;
  /// Of keys, and of values.
  index dim = 0, value_dim = 0;
  /// Tokens that rollback can undo.
  index keep = 0;
};

/// Options of delta_rule_step: those of delta_rule that make sense for tokens as they come.
template <class S>
struct delta_rule_step_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  std::optional<real> scale{};
  tensor_view<const real, 3> beta{};    // [B, Hv, n]
  tensor_view<const real> log_decay{};  // [B, Hv, n, 1 or D]
  std::optional<real> unit_norm_eps{};
};

/// The state of the delta rule for elements of type S. Throws std::invalid_argument for negative extents or sizes no
/// memory can hold. One that was moved from may only be assigned to or destroyed.
template <element S>
class delta_rule_state {
  using T = compute_type<S>;
  static constexpr const char* name = "delta_rule_state";

 public:
  explicit delta_rule_state(const delta_rule_state_extents& e) : extents_(e), ring_(name, e.keep) {
    const detail::validator check(name);
    check.at_least("batch", 0, e.batch);
    check.at_least("heads", 0, e.heads);
    check.at_least("dim", 0, e.dim);
    check.at_least("value dim", 0, e.value_dim);
    // More than the numbers of one, whose paddings at most double the larger of an extent and 64.
    const index most = check.fits("the state of a head", {std::max<index>(e.dim, 64), std::max<index>(e.value_dim, 64), 4});
    check.fits("states", {ring_.places(), e.batch, e.heads, most});
    memory_.assign(static_cast<std::size_t>(ring_.places() * place_size()), T(0));
  }

  index batch() const { return extents_.batch; }
  index heads() const { return extents_.heads; }
  index dim() const { return extents_.dim; }
  index value_dim() const { return extents_.value_dim; }
  /// Fed so far.
  index tokens() const { return tokens_; }
  std::size_t bytes() const { return memory_.size() * sizeof(T); }

  /// Element (d, e) of the state of one head.
  T value(index b, index h, index d, index e) const { return *of(b * heads() + h).at(d, e); }

  /// Back to the start of a sequence.
  void reset() {
    tokens_ = 0;
    ring_.forget();
    std::fill_n(current(), place_size(), T(0));
  }

  /// How many of the last tokens can be undone: at most `keep`, none of those before a reset or a read.
  index kept() const { return ring_.kept(); }
  /// Undoes the last m tokens, to the last bit. Throws std::invalid_argument for more than kept().
  void rollback(index m) {
    ring_.rollback("delta_rule_state::rollback", m);
    tokens_ -= m;
  }

  /// Throws std::runtime_error if the stream does not take it.
  void write(std::ostream& stream) const {
    this->stream().write(stream, tokens_, [&](auto&& visit) { each_number(visit); });
  }
  /// Becomes what was written from a state of the same shape. Throws std::runtime_error for what is no such stream,
  /// another version, or damaged, std::invalid_argument for a state of another kind or shape; *this is then as it was.
  void read(std::istream& stream) {
    tokens_ = this->stream().read(stream, batch() * heads() * dim() * value_dim(),
                                  [&](auto&& visit) { each_number(visit); });
    ring_.forget();
  }

  /// delta_rule_step without queries: feeds k [B, Hk, n, D] and v [B, heads, n, Dv].
  template <viewable K, viewable V, class Options = delta_rule_step_options<S>>
  void append(const K& k, const V& v, Options&& options = {}, execution_ref exec = {}) {
    static_assert(std::same_as<S, element_of<const K&>> && std::same_as<S, element_of<const V&>>,
                  "attn: the state, k and v must have one element type");
    feed("delta_rule_state::append", {{}, as_view(k), as_view(v), {}, false},
         detail::options_or_default<delta_rule_step_options<S>>(options), detail::execution_of(exec, options));
  }

  // For the step ------------------------------------------------------------------------------------------------------

  void feed(const char* caller, const detail::delta_views<S>& x, const delta_rule_step_options<S>& options,
            execution& exec) {
    const detail::validator check(caller);
    detail::delta_call<T> call = detail::check_delta_rule<S>(check, x, options, {}, {}, {});
    check.extents({{"batch = batch of the state", batch(), call.shape.batch},
                   {"value heads = heads of the state", heads(), call.shape.heads},
                   {"key dim = dim of the state", dim(), call.shape.dim},
                   {"value dim = value dim of the state", value_dim(), call.shape.dim_v}});
    const tensor_view<const T> memory(memory_.data(), {1, 1, 1, static_cast<index>(memory_.size())});
    check.memory({}, {{"the state", memory}});
    for (const auto& view : {detail::validator::named_view{"q", x.q}, {"k", x.k}, {"v", x.v}, {"out", x.out},
                             {"beta", options.beta}, {"log_decay", options.log_decay}})
      check.no_alias("the state", memory, view.name, view.view);
    try {
      run(call, exec);
    } catch (...) {  // want of memory
      reset();
      throw;
    }
  }

 private:
  /// All but the last `keep` tokens at once, those one by one, each at a place of its own.
  void run(detail::delta_call<T>& call, execution& exec) {
    const auto limit = exec.limit_threads(call.work());
    const index count = call.shape.length, first = ring_.beyond(count);
    const auto steps = [&](T* before, index begin, index end) {
      call.state = current();
      detail::delta_steps(call, before, begin, end, exec);
    };
    if (first > 0) ring_.forget();
    if (first > few) {
      call.state = current(), call.state_empty = tokens_ == 0;
      call.lengths.full_keys = first;
      call.run_heads(exec);
    } else {
      steps(current(), 0, first);
    }
    for (index t = first; t < count; ++t) {
      T* const before = current();
      ring_.advance();
      steps(before, t, t + 1);
    }
    tokens_ += count;
  }

  /// Tokens up to which a step takes them one by one; more are worth a chunk.
  static constexpr index few = 3;

  index head_size() const { return detail::delta_call<T>::state_size(dim(), value_dim()); }
  index place_size() const { return batch() * heads() * head_size(); }
  T* current() { return memory_.data() + ring_.place() * place_size(); }
  detail::panels<T> of(index pair) const {
    return {const_cast<delta_rule_state*>(this)->current() + pair * head_size(),
            detail::round_up(dim(), detail::panel_width<T>)};
  }

  detail::state_stream<T> stream() const { return {name, 4, 0, batch(), heads(), dim(), value_dim()}; }
  template <class Visit>
  void each_number(Visit&& visit) const {
    for (index n = 0; n < batch() * heads(); ++n)
      for (index d = 0; d < dim(); ++d)
        for (index e = 0; e < value_dim(); ++e) visit(*of(n).at(d, e));
  }

  delta_rule_state_extents extents_;
  detail::step_ring ring_;
  index tokens_ = 0;
  std::vector<T, Eigen::aligned_allocator<T>> memory_;
};

/// Feeds n tokens and answers their queries q [B, Hk, n, D]: the next n rows of one delta_rule over the whole stream.
/// One to three tokens are a pass over the state each; more go through chunks. Throws std::invalid_argument before
/// anything, the state included, changes.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Options = delta_rule_step_options<S>>
void delta_rule_step(delta_rule_state<S>& state, const Q& q, const K& k, const V& v, O&& out, Options&& options = {},
                     execution_ref exec = {}) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the state and q must have one element type");
  state.feed("delta_rule_step", {as_view(q), as_view(k), as_view(v), as_view(out)},
             detail::options_or_default<delta_rule_step_options<S>>(options), detail::execution_of(exec, options));
}

}  // namespace attn::inline ATTN_ISA
