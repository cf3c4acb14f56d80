// attn: the driver of aft_simple_backward: the sums of each chunk, then the gradients of its rows.
#pragma once

#include <attn/aft/detail/aft_gradients.hpp>
#include <attn/aft/detail/aft_simple_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Rows [begin, end) of one head.
struct simple_backward_rows {
  aft_head head;
  bool gate, accumulate;
  idx_t begin, end;
};

/// Whether dq can hold numbers of the compute type between the two passes. It then gets d_out sigma'(q) in the first
/// one, and q and d_out are read once.
template <class T, class S>
bool stores_slopes(const simple_backward_rows& rows) {
  return std::same_as<T, S> && rows.gate && !rows.accumulate && rows.head.dq.data;
}

/// Adds dy of the rows to the sums of C packets.
template <class T, class S, int C>
void add_gated(const simple_backward_rows& rows, idx_t c, packet<T>* total) {
  const gradient_writer<T, S> dq{typed<S>(rows.head.dq), c, false};
  const bool store_slopes = stores_slopes<T, S>(rows);
  read_channels<T, S, C>(c, [&](const auto& q, const auto& d_out) {
    packet<T> sum[array_size<C>];
    unroll<C>([&](auto n) { sum[n] = total[n]; });
    for (idx_t t = rows.begin; t < rows.end; ++t)
      unroll<C>([&](auto n) {
        const packet<T> d = d_out(t, n);
        if (!rows.gate) {
          sum[n] = add(d, sum[n]);
          return;
        }
        const gate_slopes<T> factors(q(t, n));
        sum[n] = fma(d, factors.value, sum[n]);
        if (store_slopes) dq(t, n, mul(d, factors.slope));
      });
    unroll<C>([&](auto n) { total[n] = sum[n]; });
  }, rows.head.q, rows.head.out);
}

/// The gradients of rows that all have the same mean, from the sums of all keys and of all dy.
template <class T, class S, int C>
void simple_backward_shared(const simple_backward_rows& rows, idx_t c, const key_sums<T>* sums,
                            const packet<T>* gated) {
  const gradient_writer<T, S> dq{typed<S>(rows.head.dq), c, rows.accumulate},
      dk{typed<S>(rows.head.dk), c, rows.accumulate}, dv{typed<S>(rows.head.dv), c, rows.accumulate};
  packet<T> mean[array_size<C>], share[array_size<C>], negated[array_size<C>];
  unroll<C>([&](auto n) {
    const packet<T> den = sums[n].den;
    mean[n] = if_less(zero<T>(), den, div(sums[n].num, den), den);
    share[n] = if_less(zero<T>(), den, div(gated[n], den), den);
    negated[n] = sub(zero<T>(), key_sums<T>::finite(sums[n].exponent));
  });
  read_channels<T, S, C>(c, [&](const auto& q, const auto& k, const auto& v, const auto& d_out) {
    if (dk || dv)
      for (idx_t t = rows.begin; t < rows.end; ++t)
        unroll<C>([&](auto n) {
          const packet<T> weight = weight_beside(k(t, n), negated[n]);
          const packet<T> d = if_less(zero<T>(), weight, mul(weight, share[n]), weight);
          if (dv) dv(t, n, d);
          if (dk) dk(t, n, if_less(zero<T>(), weight, mul(d, sub(v(t, n), mean[n])), d));
        });
    if (!dq) return;
    const bool stored = stores_slopes<T, S>(rows);
    const channel_reader<T, S, false> kept_slopes{typed<const S>(rows.head.dq), c};
    const bool whole = dq.to.col_stride == 1 && c + C * width<T> <= dq.to.cols;
    for (idx_t t = rows.begin; t < rows.end; ++t)
      unroll<C>([&](auto n) {
        packet<T> slope = zero<T>();
        if (stored)
          slope = whole ? load_as<T>(dq.to.row(t) + c + n * width<T>) : kept_slopes(t, n);
        else if (rows.gate)
          slope = mul(d_out(t, n), gate_slopes<T>(q(t, n)).slope);
        dq(t, n, rows.gate ? mul(slope, mean[n]) : zero<T>());
      });
  }, rows.head.q, rows.head.k, rows.head.v, rows.head.out);
}

/// The contribution of a row of a causal call to the keys it sees: p_tt' dy_t = weight_t' 2^(exponent_t' - exponent_t)
/// g.
template <class T>
struct causal_row {
  packet<T> g, h;  // dy / den, and that times the mean
  packet<T> weight, exponent;
};

/// Rows of C packets of a causal call. `before` are the sums of the keys before them. `after` are the sums of g, h and
/// -exponent of the rows after them; without, dk and dv are left out, otherwise dq. `total` becomes the sums of g and h
/// of these rows alone.
template <class T, class S, int C>
void simple_backward_causal(const simple_backward_rows& rows, idx_t c, const key_sums<T>* before,
                            const key_sums<T>* after, key_sums<T>* total, causal_row<T>* scratch) {
  const gradient_writer<T, S> dq{typed<S>(rows.head.dq), c, rows.accumulate},
      dk{typed<S>(rows.head.dk), c, rows.accumulate}, dv{typed<S>(rows.head.dv), c, rows.accumulate};
  const packet<T> none = broadcast<T>(-std::numeric_limits<T>::infinity());
  const seen_range keys = rows.head.keys;
  if (rows.begin == rows.end) return;
  read_channels<T, S, C>(c, [&](const auto& q, const auto& k, const auto& v, const auto& d_out) {
    key_sums<T> s[array_size<C>];
    unroll<C>([&](auto n) { s[n] = before[n]; });
    for (idx_t t = rows.begin; t < rows.end; ++t) {
      const bool hidden = keys.hides(t);
      unroll<C>([&](auto n) {
        const packet<T> key = hidden ? none : k(t, n);
        s[n].raise(lower_large<T>(nearest_power<T>(key)));
        const packet<T> exponent = key_sums<T>::finite(s[n].exponent);
        const packet<T> weight = weight_beside(key, sub(zero<T>(), exponent));
        const packet<T> value = fma(key, zero<T>(), v(t, n));  // an infinite key makes it NaN
        s[n].num = fma(weight, if_less(zero<T>(), weight, value, zero<T>()), s[n].num);
        s[n].den = add(s[n].den, weight);
        const auto factors = rows.gate ? gate_slopes<T>(q(t, n)) : gate_slopes<T>();
        const packet<T> d = d_out(t, n), inverse = div(broadcast<T>(T(1)), s[n].den);
        const packet<T> mean = if_less(zero<T>(), s[n].den, mul(s[n].num, inverse), s[n].den);
        const packet<T> g = if_less(zero<T>(), s[n].den, mul(mul(d, factors.value), inverse), s[n].den);
        if (dq && total) dq(t, n, rows.gate ? mul(mul(d, mean), factors.slope) : zero<T>());
        scratch[(t - rows.begin) * C + n] = {g, mul(g, mean), weight, exponent};
      });
    }
    // From the last row to the first, exponents decrease: every sum is scaled down to the larger exponent it came from.
    key_sums<T> later[array_size<C>], own[array_size<C>];
    unroll<C>([&](auto n) {
      later[n] = after ? after[n] : key_sums<T>{};
      own[n].exponent = scratch[(rows.end - 1 - rows.begin) * C + n].exponent;
      later[n].raise(sub(zero<T>(), own[n].exponent));
    });
    for (idx_t t = rows.end - 1; t >= rows.begin; --t)
      unroll<C>([&](auto n) {
        const causal_row<T>& row = scratch[(t - rows.begin) * C + n];
        const packet<T> factor = power_of_two<T>(sub(row.exponent, own[n].exponent));
        own[n] = {fma(own[n].num, factor, row.g), fma(own[n].den, factor, row.h), row.exponent};
        if (!after) return;
        later[n].num = mul(later[n].num, factor), later[n].den = mul(later[n].den, factor);
        const packet<T> g = add(own[n].num, later[n].num), h = add(own[n].den, later[n].den);
        if (dv) dv(t, n, if_less(zero<T>(), row.weight, mul(row.weight, g), row.weight));
        if (dk) dk(t, n, if_less(zero<T>(), row.weight, mul(row.weight, sub(mul(v(t, n), g), h)), row.weight));
      });
    if (total) unroll<C>([&](auto n) { total[n] = {own[n].num, own[n].den, sub(zero<T>(), own[n].exponent)}; });
  }, rows.head.q, rows.head.k, rows.head.v, rows.head.out);
}

template <class S>
struct aft_simple_backward_driver {
  using T = compute_type<S>;

  const aft_tensors<T>& x;
  idx_t parts = x.parts(), chunks = ceil_div(x.length, simple_chunk);
  // Per chunk: sums of its keys, then of what its rows see before it; of g and h of its rows; of the rows after them;
  // of dy.
  sums_array<T> keys{}, rows{}, later{};
  packet<T>* gated = nullptr;

  idx_t heads() const { return x.batch * x.heads; }
  auto limit_threads(execution& exec) const { return exec.limit_threads(x.work(30 * static_cast<double>(x.length))); }
  void allocate(arena& memory) {
    keys = sums_array<T>::layout(memory, heads() * chunks, parts);
    rows = sums_array<T>::layout(memory, x.causal ? heads() * chunks : 0, parts);
    later = sums_array<T>::layout(memory, x.causal ? heads() * chunks : 0, parts);
    gated = memory.allocate<packet<T>>(x.causal ? 0 : heads() * chunks * parts);
  }

  simple_backward_rows rows_of(idx_t task) const {
    const idx_t begin = task % chunks * simple_chunk;
    const aft_head head = x.head(task / chunks);
    return {head, x.gate, x.accumulate, begin, std::clamp(head.length, begin, begin + simple_chunk)};
  }

  /// Pass 1: the sums of each chunk.
  void sum(idx_t task) const {
    const auto own = rows_of(task);
    keys.clear(task);
    x.elements->add_rows(own.head, own.begin, own.end, parts, keys.at(task));
    if (x.causal) return;
    packet<T>* const total = gated + task * parts;
    std::fill_n(total, parts, zero<T>());
    for_columns(parts, [&](auto C, idx_t p) { add_gated<T, S, C.value>(own, p * width<T>, total + p); });
  }
  /// Every chunk gets the sum of the chunks before it; not causal, of all, and the first one gets that of dy.
  void combine(idx_t head) const {
    const idx_t first = head * chunks, end = first + chunks;
    share_sums(keys, first, chunks, x.causal);
    for (idx_t p = 0; !x.causal && chunks > 0 && p < parts; ++p) {
      packet<T> sum = zero<T>(), error = zero<T>();
      for (idx_t n = first; n < end; ++n) add_compensated(sum, error, gated[n * parts + p]);
      gated[first * parts + p] = compensated_sum<T>(sum, error);
    }
  }
  /// Causal: what lies after chunk n, whose own sums are rows.at(n), is added to what chunk n - 1 gets.
  void hand_on(idx_t n) const {
    later.merge(n - 1, later.at(n));
    later.merge(n - 1, rows.at(n));
  }
  /// Pass 2: all gradients, or where `totals`, dq and the sums of g and h; else dk and dv.
  void write(idx_t task, bool totals, bool keys_too, execution& exec, int worker) const {
    const auto own = rows_of(task);
    if (x.causal) {
      const auto scratch =
          exec.scratch(worker, [&](arena& memory) { return memory.allocate<causal_row<T>>(simple_chunk * 4); });
      if (totals) rows.clear(task);
      for_columns(parts, [&](auto C, idx_t p) {
        simple_backward_causal<T, S, C.value>(own, p * width<T>, keys.at(task) + p,
                                              keys_too ? later.at(task) + p : nullptr,
                                              totals ? rows.at(task) + p : nullptr, scratch);
      });
    } else {
      write_shared(own, keys.at(task / chunks * chunks), gated + task / chunks * chunks * parts);
    }
    if (keys_too) x.clear_padding(own.head, own.end, (std::min)(own.begin + simple_chunk, x.length));
  }
  void write_shared(const simple_backward_rows& own, const key_sums<T>* sums, const packet<T>* all_gated) const {
    own.head.keys.runs(own.begin, own.end, [&](idx_t first, idx_t last, bool hidden) {
      simple_backward_rows run = own;
      run.begin = first, run.end = last;
      if (hidden) {  // its keys have no gradients
        run.head.dq = {};
        x.clear_padding(run.head, first, last);
        run.head.dq = own.head.dq, run.head.dk = run.head.dv = {};
      }
      for_columns(parts, [&](auto C, idx_t p) {
        simple_backward_shared<T, S, C.value>(run, p * width<T>, sums + p, all_gated + p);
      });
    });
  }

  void run(execution& exec) {
    const auto limit = limit_threads(exec);
    exec.shared_scratch([&](arena& memory) { return allocate(memory), 0; });
    if (chunks == 0) return;
    if (heads() % exec.active_threads() == 0 || heads() >= 4 * exec.active_threads()) {
      // One head at a time, so that the second pass mostly reads from the cache.
      exec.for_each(heads(), [&](idx_t head, int worker) {
        const idx_t first = head * chunks, end = first + chunks;
        for (idx_t n = first; n < end; ++n) sum(n);
        combine(head);
        if (x.causal) later.clear(end - 1);
        for (idx_t n = end - 1; n >= first; --n) {
          write(n, x.causal, true, exec, worker);
          if (!x.causal || n == first) continue;
          later.clear(n - 1);
          hand_on(n);
        }
      });
      return;
    }
    exec.for_each(heads() * chunks, [&](idx_t task, int) { sum(task); });
    exec.for_each(heads(), [&](idx_t head, int) { combine(head); });
    if (x.causal) {
      exec.for_each(heads() * chunks, [&](idx_t task, int worker) { write(task, true, false, exec, worker); });
      exec.for_each(heads(), [&](idx_t head, int) {
        const idx_t first = head * chunks;
        for (idx_t n = first + chunks - 1; n >= first; --n) {
          later.clear(n);
          if (n + 1 < first + chunks) hand_on(n + 1);
        }
      });
    }
    exec.for_each(heads() * chunks, [&](idx_t task, int worker) { write(task, false, true, exec, worker); });
  }
};

template <class S>
void run_aft_simple_backward(const aft_tensors<compute_type<S>>& call, execution& exec) {
  aft_simple_backward_driver<S>{call}.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_aft_simple_backward<S>(const aft_tensors<compute_type<S>>&, execution&)
#include <attn/core/detail/compiled.hpp>
