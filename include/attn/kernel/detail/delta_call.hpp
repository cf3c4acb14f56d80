// attn: a call of the delta rule: its checks, and its heads one by one.
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/item_state.hpp>
#include <attn/kernel/detail/delta_chunk.hpp>

#include <atomic>
#include <optional>
#include <thread>

namespace attn::inline ATTN_ISA::detail {

/// The extents of a call; q has as many heads as k.
struct delta_shape {
  idx_t batch = 0, key_heads = 0, heads = 0, length = 0, dim = 0, dim_v = 0;
};

/// The views of a call. Tokens that are appended to a state have neither q nor out.
template <class S>
struct delta_views {
  tensor_view<const S> q, k, v;
  tensor_view<S> out;
  bool queries = true;
};

/// One call, after its checks.
template <class T>
struct delta_call {
  stored_tensor<T> q, k, v, out;
  bool queries = true;
  delta_shape shape{};
  sequence_lengths lengths{};
  tensor_view<const T, 3> beta{};
  tensor_view<const T> log_decay{}, initial_state{};
  tensor_view<T> final_state{};
  T scale = T(1), unit_norm_eps = T(-1);
  item_memory<T> state{};  // in place of these two views: the memory of a state object, head after head

  decay_kind decay() const {
    return !log_decay ? decay_kind::none : log_decay.extent(3) == 1 ? decay_kind::token : decay_kind::channel;
  }
  idx_t key_head(idx_t h) const { return h * shape.key_heads / shape.heads; }
  delta_head<T> head(idx_t b, idx_t h) const {
    delta_head<T> x{.k = k.head(b, key_head(h)), .v = v.head(b, h), .b = b, .h = h, .beta = beta,
                    .log_decay = log_decay, .scale = scale, .unit_norm_eps = unit_norm_eps};
    if (queries) x.q = q.head(b, key_head(h)), x.out = out.head(b, h);
    return x;
  }

  static idx_t state_size(idx_t dim, idx_t dim_v) {
    return round_up(dim, panel_width<T>) * round_up(dim_v, panel_width<T>);
  }
  /// The state of head h at a place of its item.
  panels<T> state_at(T* place, idx_t h) const {
    return {place + h * state_size(shape.dim, shape.dim_v), round_up(shape.dim, panel_width<T>)};
  }

  struct scratch {
    delta_scratch<T> chunk;
    panels<T> state;
  };
  scratch layout(arena& memory) const {
    return {delta_scratch<T>::layout(memory, shape.dim, shape.dim_v, decay()),
            panels<T>::layout(memory, shape.dim, shape.dim_v)};
  }

  /// Returns whether the state before the call is 0; `to` is then not written.
  bool begin(idx_t b, idx_t h, const panels<T>& to) const {
    if (!initial_state) return true;
    for (idx_t d = 0; d < shape.dim; ++d)
      for (idx_t e = 0; e < round_up(shape.dim_v, panel_width<T>); ++e)
        *to.at(d, e) = e < shape.dim_v ? initial_state(b, h, d, e) : T(0);
    return false;
  }
  void end(idx_t b, idx_t h, const panels<T>& from, bool empty) const {
    if (!final_state) return;
    for (idx_t d = 0; d < shape.dim; ++d)
      for (idx_t e = 0; e < shape.dim_v; ++e) final_state(b, h, d, e) = empty ? T(0) : *from.at(d, e);
  }

  void run_head(idx_t b, idx_t h, const scratch& s) const {
    const delta_head<T> x = head(b, h);
    const idx_t length = lengths.keys(b);
    const panels<T> sums = state ? state_at(state.at(b), h) : s.state;
    bool empty = state ? state.empty(b) : begin(b, h, sums);
    for (idx_t first = 0; first < length; first += kernel_chunk) {
      delta_chunk<T>{x, s.chunk, first, std::min<idx_t>(kernel_chunk, length - first)}.run(sums, empty);
      empty = false;
    }
    finish_head(x, sums, empty);
  }
  void finish_head(const delta_head<T>& x, const panels<T>& sums, bool empty) const {
    if (state) return;
    end(x.b, x.h, sums, empty);
    if (queries) x.out.clear_rows(lengths.keys(x.b), shape.length);
  }

  /// Memory of the threads that share a head: its state, and how many chunks each panel of its columns has passed.
  struct sharing {
    panels<T> state;
    std::atomic<idx_t>* done;
  };
  idx_t value_panels() const { return ceil_div(shape.dim_v, panel_width<T>); }

  /// One head by all threads, with the same bits. A chunk is a task: first the part that does not need the state, then
  /// the panels of value columns, which are independent of one another, each as soon as the chunk before is done with
  /// it. Chunks are claimed in ascending order, so that no chunk waits for one that was not claimed.
  void share_head(idx_t b, idx_t h, execution& exec, const sharing& all) const {
    const delta_head<T> x = head(b, h);
    const idx_t length = lengths.keys(b), wide = panel_width<T>;
    const panels<T> sums = state ? state_at(state.at(b), h) : all.state;
    const bool empty = state ? state.empty(b) : begin(b, h, sums);
    for (idx_t panel = 0; panel < value_panels(); ++panel) new (all.done + panel) std::atomic<idx_t>(0);
    const auto scratch_of = [&](int worker) {
      return exec.scratch(worker, [&](arena& memory) {
        return delta_scratch<T>::layout(memory, shape.dim, shape.dim_v, decay());
      });
    };
    for (int worker = 0; worker < exec.threads(); ++worker) scratch_of(worker);  // tasks must not throw: others wait
    exec.for_each(ceil_div(length, kernel_chunk), [&](idx_t n, int worker) {
      const delta_scratch<T> s = scratch_of(worker);
      delta_chunk<T> chunk{x, s, n * kernel_chunk, std::min<idx_t>(kernel_chunk, length - n * kernel_chunk)};
      chunk.load();
      for (idx_t panel = 0; panel < value_panels(); ++panel) {
        std::atomic<idx_t>& done = all.done[panel];
        while (done.load(std::memory_order_acquire) < n) std::this_thread::yield();
        chunk.col = panel * wide, chunk.cols = std::min(wide, shape.dim_v - chunk.col);
        chunk.run_columns({sums.panel(chunk.col), sums.capacity}, empty && n == 0);
        done.store(n + 1, std::memory_order_release);
      }
    });
    finish_head(x, sums, empty && length == 0);
  }

  work_estimate work() const {
    const auto tokens = static_cast<double>(shape.batch * shape.heads * shape.length);
    const auto d = static_cast<double>(shape.dim), e = static_cast<double>(shape.dim_v);
    return {.operations = tokens * (6 * d * e + kernel_chunk * (4 * d + 2 * e)),
            .bytes = tokens * (2 * d + 2 * e) * static_cast<double>(k.access->size)};
  }

  void run(execution& exec) const {
    const auto limit = exec.limit_threads(work());
    run_heads(exec);
  }
  void run_heads(execution& exec) const {
    const idx_t item_heads = shape.batch * shape.heads, threads = exec.active_threads();
    if (threads > 1 && item_heads < 2 * threads && item_heads % threads != 0 && shape.length >= 4 * kernel_chunk) {
      const sharing all = exec.shared_scratch([&](arena& memory) {
        return sharing{panels<T>::layout(memory, shape.dim, shape.dim_v),
                       memory.allocate<std::atomic<idx_t>>(value_panels())};
      });
      for (idx_t n = 0; n < item_heads; ++n) share_head(n / shape.heads, n % shape.heads, exec, all);
      return;
    }
    exec.for_each(item_heads, [&](idx_t item_head, int worker) {
      const scratch s = exec.scratch(worker, [&](arena& memory) { return layout(memory); });
      run_head(item_head / shape.heads, item_head % shape.heads, s);
    });
  }
};

/// Checks the views of a call, without memory that is written.
[[gnu::noinline]] inline delta_shape check_delta_extents(const validator& check, const memory_layout& k,
                                                         const memory_layout& v) {
  const delta_shape s{k.extents[0], k.extents[1], v.extents[1], k.extents[2], k.extents[3], v.extents[3]};
  if (s.heads > 0 && (s.key_heads == 0 || s.heads % s.key_heads != 0))
    check.fail(text({"key heads that divide the value heads ", s.heads}), s.key_heads);
  check.extents({{"value batch = key batch", s.batch, v.extents[0]},
                 {"value length = key length", s.length, v.extents[2]}});
  return s;
}

/// Checks q, and out or its gradient.
[[gnu::noinline]] inline void check_delta_queries(const validator& check, const delta_shape& s,
                                                  const memory_layout& q, const memory_layout& out,
                                                  bool gradient = false) {
  check.extents({{"query batch = key batch", s.batch, q.extents[0]},
                 {"query heads = key heads", s.key_heads, q.extents[1]},
                 {"query length = key length", s.length, q.extents[2]},
                 {"query dim = key dim", s.dim, q.extents[3]},
                 {gradient ? "d_out batch = key batch" : "out batch = key batch", s.batch, out.extents[0]},
                 {gradient ? "d_out heads = value heads" : "out heads = value heads", s.heads, out.extents[1]},
                 {gradient ? "d_out length = key length" : "out length = key length", s.length, out.extents[2]},
                 {gradient ? "d_out dim = value dim" : "out dim = value dim", s.dim_v, out.extents[3]}});
}

/// Checks beta, log decays and views of the shape of the state, of a call or of its gradients.
template <class T>
void check_delta_parameters(const validator& check, const delta_shape& s, const sequence_lengths& lengths,
                            const tensor_view<const T, 3>& beta, const tensor_view<const T>& log_decay) {
  if (beta)
    check.extents({{"beta batch = key batch", s.batch, beta.extent(0)},
                   {"beta heads = value heads", s.heads, beta.extent(1)},
                   {"beta length = key length", s.length, beta.extent(2)}});
  if (log_decay) {
    check.extents({{"log_decay batch = key batch", s.batch, log_decay.extent(0)},
                   {"log_decay heads = value heads", s.heads, log_decay.extent(1)},
                   {"log_decay length = key length", s.length, log_decay.extent(2)}});
    check.broadcasts("log_decay channels =", s.dim, log_decay.extent(3));
  }
  for (idx_t b = 0; beta && b < s.batch; ++b)
    for (idx_t h = 0; h < s.heads; ++h)
      for (idx_t t = 0; t < lengths.keys(b); ++t)
        if (!std::isfinite(beta(b, h, t))) check.fail("a finite beta", static_cast<double>(beta(b, h, t)));
  if (log_decay) check_log_decays(check, log_decay, lengths);
}

[[gnu::noinline]] inline void check_delta_state(const validator& check, const char* name, const delta_shape& s,
                                                const memory_layout& state) {
  if (!state.given()) return;
  const idx_t wanted[4] = {s.batch, s.heads, s.dim, s.dim_v};
  if (!std::equal(wanted, wanted + 4, state.extents))
    check.fail(text({name, " of shape [batch, value heads, key dim, value dim] = ", list_text(wanted, 4)}),
               list_text(state.extents, 4));
}

/// Checks a number that must be finite, and with `positive` greater than 0.
template <class T>
T check_delta_number(const validator& check, const char* name, const std::optional<T>& given, T otherwise,
                     bool positive = false) {
  if (!given) return otherwise;
  if (!std::isfinite(*given) || (positive && *given <= T(0)))
    check.fail(text({"a finite ", name, positive ? " > 0" : ""}), static_cast<double>(*given));
  return *given;
}

/// 1 / sqrt(D).
template <class T>
T delta_scale(idx_t dim) {
  return T(1) / std::sqrt(static_cast<T>(std::max<idx_t>(1, dim)));
}

/// The checks of a call and of a step, whose options these are.
template <class S, class Options, class T = compute_type<S>>
delta_call<T> check_delta_rule(call_views& check, const delta_views<S>& x, const Options& options,
                               std::span<const idx_t> lengths, const tensor_view<const T>& initial_state,
                               const tensor_view<T>& final_state) {
  check.read("q", x.q), check.read("k", x.k), check.read("v", x.v);
  check.read("beta", options.beta), check.read("log_decay", options.log_decay);
  check.read("initial_state", initial_state);
  check.write("out", x.out), check.write("final_state", final_state);
  delta_call<T> call{.q = x.q, .k = x.k, .v = x.v, .out = x.out, .queries = x.queries, .beta = options.beta,
                     .log_decay = options.log_decay, .initial_state = initial_state, .final_state = final_state};
  const delta_shape s = call.shape = check_delta_extents(check, x.k, x.v);
  if (x.queries) check_delta_queries(check, s, x.q, x.out);
  check_length_list(check, "lengths", lengths, s.batch, s.length);
  call.lengths = {s.length, s.length, lengths, lengths};
  check_delta_parameters(check, s, call.lengths, options.beta, options.log_decay);
  check_delta_state(check, "initial_state", s, initial_state);
  check_delta_state(check, "final_state", s, final_state);
  call.scale = check_delta_number(check, "scale", options.scale, delta_scale<T>(s.dim));
  call.unit_norm_eps = check_delta_number(check, "unit_norm_eps", options.unit_norm_eps, T(-1), true);
  return call;
}

}  // namespace attn::inline ATTN_ISA::detail
