// attn: what the steps of the attention-free family share: checks, the state, sums of one row at a time.
#pragma once

#include <attn/aft/aft_step_options.hpp>
#include <attn/aft/detail/aft_tensors.hpp>
#include <attn/core/detail/item_state.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// A call of a step over a state of element type S, checked against it too; w may be the null view.
template <class Options, class S, class Q, class K, class V, class O, class W, class Given>
auto checked_aft_step(const char* name, const state_extents& state, bool one_key, const Q& q, const K& k, const V& v,
                      O& out, const W& w, Given& options, execution_ref& exec) {
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the state and q must have one element type");
  auto call = unchecked_aft<Options>(name, q, k, v, out, w, options, exec);
  call.x.one_key = one_key;
  check_aft(call.views, call.x);
  call.views.extents({{"query batch = state batch", state.batch, call.x.batch},
                      {"query heads = state heads", state.heads, call.x.heads},
                      {"query dim = state dim", state.dim, call.x.dim}});
  return call;
}

/// Tokens k, v to append, checked, as views of a call without queries. `one_key`: k may have one channel for all.
template <class S>
aft_tensors<compute_type<S>> tokens_of(const char* name, const state_extents& state, bool one_key,
                                       const tensor_view<const S>& keys, const tensor_view<const S>& values,
                                       const aft_append_options& options) {
  const validator check{name};
  memory_layout k = keys, v = values, none = tensor_view<const S>();
  if (one_key && k.extents[3] == 1) k.extents[3] = state.dim, k.strides[3] = 0;
  check_tokens(check, state.batch, state.heads, state.dim, state.dim, k, v);
  check_length_list(check, "lengths", options.lengths, state.batch, k.extents[2]);
  const aft_tensors<compute_type<S>> x{
      .q = none, .k = k, .v = v, .out = none, .w = none, .elements = &elements_of<S>, .lengths = options.lengths,
      .key_mask = options.key_mask, .batch = state.batch, .heads = state.heads, .length = k.extents[2],
      .dim = state.dim};
  call_views views(name);
  x.key_mask.validate(views, x.batch, x.length);
  return x;
}

/// Adds `count` keys to the sums of a row. keys(p) gives those of packet p; w points to their biases, `stride` elements
/// apart.
template <class T, class Keys>
void add_to_row(const aft_tensors<T>& x, const void* w, idx_t stride, idx_t count, const split_biases<T>& biases,
                key_sums<T>* sums, Keys&& keys) {
  x.elements->numbers.load(w, stride, count, biases.factor);
  biases.split(count);
  for (idx_t p = 0; p < x.parts(); ++p) add_keys(sums[p], keys(p), biases, count);
}

/// Sums become row t of the output.
template <class T>
void write_row(const aft_tensors<T>& x, const aft_head& head, idx_t t, const key_sums<T>* sums) {
  for (idx_t p = 0; p < x.parts(); ++p) x.elements->write(head, x.gate, p * width<T>, t, 1, sums + p);
}

/// The inside of the states: for each packet of channels the sums over a stream, and room for `window` of its tokens.
template <class S>
class aft_items : public item_state<aft_items<S>, key_sums<compute_type<S>>> {
  using T = compute_type<S>;
  using base = item_state<aft_items<S>, key_sums<T>>;

 public:
  aft_items(const char* name, const state_extents& extents, idx_t window)
      : base(name, extents.batch, 0), extents_(check_state_extents(validator(name), extents)), window_(window) {
    const validator check{name};
    check.equal("value_dim = dim", extents_.dim, extents_.value_dim);
    check.fits("window", {window, 2});
    check.fits("state", {extents_.batch, heads(), parts(), sizeof(key_sums<T>), window + 1});  // also for no channels
    base::allocate(extents_.batch, heads() * parts() * (window + 1));
  }

  idx_t heads() const { return extents_.heads; }
  idx_t dim() const { return extents_.dim; }
  idx_t window() const { return window_; }
  const state_extents& extents() const { return extents_; }

  /// The sums of packet p of a head, the window behind them.
  key_sums<T>* sums(idx_t head, idx_t p = 0) {
    return base::items().data + (head * parts() + p) * (window_ + 1);
  }
  /// Of the window behind the sums only what tokens have written is read, and costs anything.
  void clear(idx_t b) {
    for (idx_t n = 0; n < heads() * parts(); ++n) *sums(b * heads(), n) = {};
  }
  void copy(idx_t from, idx_t to) {
    const idx_t entries = 1 + (std::min)(window_, this->length(from));
    for (idx_t n = 0; n < heads() * parts(); ++n)
      std::copy_n(sums(from * heads(), n), entries, sums(to * heads(), n));
  }
  void exchange(idx_t a, idx_t b) {
    const idx_t entries = 1 + (std::min)(window_, (std::max)(this->length(a), this->length(b)));
    for (idx_t n = 0; n < heads() * parts(); ++n)
      std::swap_ranges(sums(a * heads(), n), sums(a * heads(), n) + entries, sums(b * heads(), n));
  }

  /// Row t of a chunk enters the window at its position; the token that leaves it is added to the sums.
  void put(const aft_tensors<T>& x, const aft_head& from, idx_t position, idx_t t) {
    for (idx_t p = 0; p < x.parts(); ++p) {
      key_sums<T>*const past = sums(from.number, p), *const entry = past + 1 + position % window_;
      if (position >= window_) past->merge(*entry);
      x.elements->split(from, p * width<T>, t, 1, entry);
    }
  }
  /// Feeds the tokens of a call and writes its rows. For want of memory the state is reset.
  void step(const aft_tensors<T>& x, aft_window_layout layout, execution& exec) {
    const auto limit = exec.limit_threads(x.work(4 * static_cast<double>(x.length * (window_ + 10))));
    const auto feed = [&] {
      exec.for_each(x.batch * x.heads, [&](idx_t task, int worker) {
        const auto head = x.head(task);
        key_sums<T>* row = nullptr;
        const auto biases = exec.scratch(worker, [&](arena& memory) {
          row = memory.allocate<key_sums<T>>(x.parts());
          return split_biases<T>::layout(memory, 1);
        });
        for (idx_t t = 0; t < head.length; ++t) {
          const idx_t position = this->length(task / x.heads) + t;
          put(x, head, position, t);
          for (idx_t p = 0; p < x.parts(); ++p) row[p] = *sums(task, p);
          for (idx_t from = std::max<idx_t>(0, position - window_ + 1), count; from <= position; from += count) {
            const idx_t entry = from % window_;  // the ring's end cuts the window
            count = (std::min)({position + 1 - from, window_ - entry, key_chunk});
            const idx_t column = layout == aft_window_layout::square ? from : from - position + window_ - 1;
            const void* const w = x.elements->at(head.w, layout == aft_window_layout::kernel ? 0 : position, column);
            add_to_row(x, w, head.w.col_stride, count, biases, row,
                       [&](idx_t p) { return sums(task, p) + 1 + entry; });
          }
          write_row(x, head, t, row);
        }
        x.clear_padding(head, head.length, x.length);
      });
    };
    do_or_undo(feed, [&] {  // the ring may have lost tokens that the chunk replaced
      for (idx_t b = 0; b < x.batch; ++b) this->reset(b);
    });
    this->advance(x.length, x.lengths);
  }

 private:
  idx_t parts() const { return (dim() + width<T> - 1) / width<T>; }

  state_extents extents_;
  idx_t window_;
};

/// The rows of a chunk; k and v of x are those of the cache, which has tokens[b] of item b, the chunk included.
template <class T>
void full_step_rows(const aft_tensors<T>& x, std::span<const idx_t> tokens, execution& exec) {
  const auto limit = exec.limit_threads(x.work(16 * static_cast<double>(x.length * x.k.extents[2])));
  exec.for_each(x.batch * x.heads * x.length, [&](idx_t task, int worker) {
    const aft_head head = x.head(task / x.length);
    const idx_t t = task % x.length, b = task / (x.length * x.heads);
    const idx_t row = tokens[static_cast<std::size_t>(b)] - head.length + t;
    if (t >= head.length) return x.clear_padding(head, t, t + 1);
    constexpr idx_t keys_together = 64 * key_chunk;
    key_sums<T>*sums = nullptr, *keys = nullptr;
    const auto biases = exec.scratch(worker, [&](arena& memory) {
      sums = memory.allocate<key_sums<T>>(2 * x.parts());
      keys = memory.allocate<key_sums<T>>(key_chunk);
      return split_biases<T>::layout(memory, 1);
    });
    std::fill_n(sums, 2 * x.parts(), key_sums<T>{});
    key_sums<T>* const all = sums + x.parts();  // of keys before the last keys_together
    for (idx_t j = 0, count; j <= row; j += count) {
      count = (std::min)(key_chunk, row + 1 - j);
      if (j % keys_together == 0)
        for (idx_t p = 0; p < x.parts(); ++p) all[p].merge(std::exchange(sums[p], {}));
      add_to_row(x, x.elements->at(head.w, row, j), head.w.col_stride, count, biases, sums, [&](idx_t p) {
        x.elements->split(head, p * width<T>, j, count, keys);
        return keys;
      });
    }
    for (idx_t p = 0; p < x.parts(); ++p) all[p].merge(sums[p]);
    write_row(x, head, t, all);
  });
}

template <class S, class Cache>
void run_aft_full_step(aft_tensors<compute_type<S>>& call, Cache& cache, const tensor_view<const S>& k,
                       const tensor_view<const S>& v, execution& exec) {
  append_and(step_access::of(cache), k, v, call.lengths, [&] {
    call.k = cache.keys(), call.v = cache.values();
    full_step_rows(call, cache.lengths(), exec);
  });
}

template <class S>
void run_aft_window_step(const aft_tensors<compute_type<S>>& call, aft_window_layout layout, aft_items<S>& state,
                         execution& exec) {
  state.step(call, layout, exec);
}

/// The states: sums over a stream, which are only ever added to; of aft_local and aft_conv over the tokens before the
/// last `window`, which lie in a ring, position t in entry t % window. OneKey: k may have one channel for all of one
/// head.
template <class S, bool OneKey = false>
class aft_state : public item_sequences<aft_items<S>> {
  using base = item_sequences<aft_items<S>>;

 public:
  /// window(): tokens with a bias of their own.
  using base::heads, base::dim, base::window, base::bytes;

  /// Feeds tokens without attending: k, v [B, H, n, D].
  template <viewable K, viewable V>
  void append(const K& k, const V& v, const aft_append_options& options = {}) {
    const auto x = tokens_of<S>(base::name_, base::extents(), OneKey, as_view(k), as_view(v), options);
    for (idx_t n = 0; n < x.batch * x.heads; ++n) {
      const auto head = x.head(n);
      if (window() == 0) x.elements->add_rows(head, 0, head.length, x.parts(), base::sums(n));
      for (idx_t t = 0; window() > 0 && t < head.length; ++t) this->put(x, head, this->length(n / x.heads) + t, t);
    }
    this->advance(x.length, x.lengths);
  }

 protected:
  aft_state(const char* name, const state_extents& extents) : base(name, extents, 0) {}
  aft_state(const char* name, const state_extents& extents, idx_t tokens)
      : base(name, extents, (validator(name).at_least("window", 1, tokens), tokens)) {}
};

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void full_step_rows(const aft_tensors<T>&, std::span<const idx_t>, execution&)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN(S) void run_aft_window_step<S>(const aft_tensors<compute_type<S>>&, aft_window_layout, aft_items<S>&, \
  execution&)
#include <attn/core/detail/compiled.hpp>
