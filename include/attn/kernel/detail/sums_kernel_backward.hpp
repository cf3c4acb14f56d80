// attn: the backward pass of kernel attention for blocks of queries and chunks of keys, from the sums before and after
// them.
#pragma once

#include <attn/kernel/detail/kernel_backward_call.hpp>
#include <attn/kernel/detail/features_backward.hpp>
#include <attn/kernel/detail/sums_kernel.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// One backward call by sums of features.
template <class T>
struct sums_kernel_backward : kernel_backward_call<T> {
  using base = kernel_backward_call<T>;
  using base::accumulate, base::d_features, base::d_gate, base::d_out, base::dk, base::dq, base::dv, base::map;
  using scratch_type = kernel_backward_scratch<T>;
  using sums_type = kernel_sums<T>;

  const kernel_call<T>& call = this->forward;
  const sums_kernel<T> kernel{call};

  // Which intermediate results the wanted gradients need.
  bool of_queries() const { return dq || d_features; }
  bool of_keys() const { return dk || d_features; }
  bool of_gates() const { return bool(d_gate); }
  bool of_scores() const { return of_queries() || of_keys() || of_gates(); }
  bool reverse() const { return of_keys() || dv || of_gates(); }
  const exponential_scaling<T>* exponential() const { return map->exponential; }
  /// Whether logarithms of features are differentiated.
  bool logarithms() const { return exponential() && !exponential()->is_signed; }

  /// A block of queries: rows origin + [first, count) of `head`, at the positions of the keys of the chunk if `keys` >
  /// 0.
  struct block {
    idx_t b, h, head, origin, first, count, keys;
  };

  // Queries -----------------------------------------------------------------------------------------------------------

  void load_queries(const block& at, const scratch_type& x, bool& finite_d) const {
    const auto& s = x.forward;
    const auto from = d_out.head(at.b, at.head);
    const auto rows = call.q.head(at.b, at.head).block(at.origin, at.count, at.first, call.filled_lanes());
    call.map->queries(rows, at.b * call.heads + at.h, exponential() ? s.q_raw : s.q_own, s.q_shift, s.map);
    from.access->pack_columns(from.block(at.origin, at.count, at.first), call.shape.dim_v, x.d_columns);
    if (!reverse()) return;
    constexpr idx_t wide = panel_width<T>;
    for (idx_t col = 0; at.first > 0 && col < call.shape.dim_v; col += wide)
      std::fill_n(x.d_panels + col * kernel_chunk, at.first * wide, T(0));
    finite_d = from.access->pack_panels(from, at.origin + at.first, at.count - at.first, x.d_panels + at.first * wide);
  }

  /// Prefetches the rows of x that are read after those from `begin` on; in causal calls those of the chunk before.
  void fetch_next(row_prefetcher<>& to, const stored_matrix<T>& x, idx_t begin) const {
    begin += call.causal ? -kernel_chunk : kernel_chunk;
    kernel_call<T>::fetch(to, x, (std::max)(begin, idx_t(0)), (std::min)(begin + kernel_chunk, x.rows));
  }
  row_prefetcher<> prefetch_queries(const block& at) const {
    row_prefetcher<> prefetch;
    fetch_next(prefetch, call.q.head(at.b, at.head), at.origin);
    fetch_next(prefetch, d_out.head(at.b, at.head), at.origin);
    if (dq) fetch_next(prefetch, dq.head(at.b, at.head), at.origin);
    return prefetch;
  }
  row_prefetcher<> prefetch_keys(idx_t b, idx_t h, idx_t begin, const stored_gradient_head<T>& to_k,
                                 const stored_gradient_head<T>& to_v) const {
    row_prefetcher<> prefetch;
    fetch_next(prefetch, call.k.head(b, call.kv_head(h)), begin);
    fetch_next(prefetch, call.v.head(b, call.kv_head(h)), begin);
    if (to_k) fetch_next(prefetch, to_k, begin);
    if (to_v) fetch_next(prefetch, to_v, begin);
    return prefetch;
  }

  /// Scores and products of the chunk, with zeros where a query does not see a key, and their part of den and dot.
  void weigh_scores(const block& at, const scratch_type& x, T* den, T* dot) const {
    const auto& s = x.forward;
    constexpr idx_t wide = panel_width<T>;
    const idx_t count = at.count, lanes = round_up(count, width<T>);
    const bool weighed = call.gated() || exponential();
    key_scores(s.k_own, s.q_own, call.map->features, count, x.scores, x.operands);
    if (of_scores()) key_scores(x.v_columns, x.d_columns, call.shape.dim_v, count, x.products, x.operands);
    std::fill_n(den, kernel_chunk, T(0));
    std::fill_n(dot, kernel_chunk, T(0));
    for (idx_t j = 0; j < count; ++j) {
      T *const a = x.scores + j * kernel_chunk, *const g = x.products + j * kernel_chunk;
      const T* const f = x.factors + j * kernel_chunk;
      const idx_t begin = j / tile_rows * tile_rows / wide * wide;
      std::fill(a + begin, a + j, T(0));
      if (of_scores()) std::fill(g + begin, g + j, T(0));
      for (idx_t t = j / width<T> * width<T>; t < lanes; t += width<T>) {
        packet<T> weight = load<T>(a + t);
        if (weighed) weight = mul(weight, load<T>(f + t));
        store<T>(den + t, add(load<T>(den + t), weight));
        if (of_scores()) store<T>(dot + t, fma(weight, load<T>(g + t), load<T>(dot + t)));
      }
    }
  }

  /// n_i and D_i, and the factors of n_i for the sums and for the chunk.
  void normalise(const block& at, const sums_type* sums, const T* own_den, const T* own_dot,
                 const scratch_type& x) const {
    const auto& s = x.forward;
    if (!exponential()) return normalise_plain(at, sums, own_den, own_dot, x);
    if (logarithms() && reverse()) row_sizes(x.d_columns, call.shape.dim_v, x.d_sizes);
    for (idx_t t = 0; t < kernel_chunk; ++t) {
      const T before = sums ? s.q_max[t] : no_log_scale<T>;
      const T own = at.keys > 0 ? s.own_max[t] + s.running_max[t] : no_log_scale<T>;
      const T larger = (std::max)(before, own);
      x.log_scale[t] = larger;
      s.state_factor[t] = before - larger, s.own_factor[t] = own - larger, s.eps[t] = call.eps;
    }
    map_packets(s.state_factor, s.state_factor, kernel_chunk, [](const auto& p) { return exp2_weight<T>(p); });
    map_packets(s.own_factor, s.own_factor, kernel_chunk, [](const auto& p) { return exp2_weight<T>(p); });
    for (idx_t t = 0; t < kernel_chunk; ++t) {
      const bool real = t >= at.first && t < at.count;
      const T a = sums ? s.state_factor[t] : T(0), b = at.keys > 0 ? s.own_factor[t] : T(0);
      T den = T(0), dot = T(0);
      if (real && sums) den += a * s.den[t], dot += a * x.dot[t];
      if (real && at.keys > 0) den += b * own_den[t], dot += b * own_dot[t];
      if (real && call.eps > T(0)) s.eps[t] = exponential()->eps_over(call.eps, x.log_scale[t], s.q_shift[t]);
      set_normal(x, t, den, dot, real, a, b);
    }
  }

  /// The same without log scales.
  void normalise_plain(const block& at, const sums_type* sums, const T* own_den, const T* own_dot,
                       const scratch_type& x) const {
    const auto& s = x.forward;
    const packet<T> none = zero<T>(), one = broadcast<T>(T(1));
    alignas(64) T position[width<T>];
    for (int t = 0; t < width<T>; ++t) position[t] = static_cast<T>(t);
    for (idx_t t = 0; t < kernel_chunk; t += width<T>) {
      const packet<T> factor = call.gated() && at.keys > 0 ? load<T>(s.decay + t) : one;
      packet<T> den = at.keys > 0 ? load<T>(own_den + t) : none, dot = at.keys > 0 ? load<T>(own_dot + t) : none;
      if (sums) den = fma(factor, load<T>(s.den + t), den), dot = fma(factor, load<T>(x.dot + t), dot);
      const packet<T> whole = add(den, broadcast<T>(call.eps));
      packet<T> n = one;
      if (call.normalise) n = if_less(abs(whole), broadcast<T>(least_denominator<T>), none, div(one, whole));
      const packet<T> lane = add(load<T>(position), broadcast<T>(static_cast<T>(t)));  // lanes without a row have 0
      n = if_less(lane, broadcast<T>(static_cast<T>(at.first)), none, n);
      n = if_less(lane, broadcast<T>(static_cast<T>(at.count)), n, none);
      packet<T> delta = none;
      if (call.normalise)
        delta = if_less(abs(n), broadcast<T>(std::numeric_limits<T>::denorm_min()), none, mul(dot, n));
      store<T>(x.delta + t, delta);
      store<T>(x.minus_delta + t, sub(none, delta));
      store<T>(x.normal + t, mul(factor, n));
      store<T>(x.sums_normal + t, sums ? mul(factor, n) : none);
      store<T>(x.own_normal + t, at.keys > 0 ? n : none);
    }
  }

  void set_normal(const scratch_type& x, idx_t t, T den, T dot, bool real, T a, T b) const {
    const T whole = den + x.forward.eps[t];
    T n = !real ? T(0) : !call.normalise ? T(1) : std::abs(whole) < least_denominator<T> ? T(0) : T(1) / whole;
    const T delta = n == T(0) || !call.normalise ? T(0) : dot * n;
    x.delta[t] = delta, x.minus_delta[t] = -delta;
    x.sums_normal[t] = a * n, x.own_normal[t] = b * n;
    // A row whose d_out is 0 has no part in R, nor in its log scales: rows of the future change no bit.
    if (n == T(0) || (logarithms() && reverse() && x.d_sizes[t] == T(0))) {
      n = T(0);
      x.log_scale[t] = -no_log_scale<T>;
    } else if (!exponential()->is_signed) {  // so that R has the magnitude of weights
      int exponent = 0;
      n = T(1) / std::frexp(whole, &exponent);
      x.log_scale[t] += static_cast<T>(exponent);
    }
    x.normal[t] = n;
  }

  /// n_i and D_i of a row whose scores underflowed; own_normal is 0.
  [[gnu::noinline]] void recompute_row(const sums_type* sums, idx_t i, const scratch_type& x) const {
    const auto& s = x.forward;
    const idx_t m = call.map->features;
    const T sums_max = sums ? s.q_max[i] : no_log_scale<T>, largest = weigh_row(s.q_raw + i, i, m, sums_max, s);
    const T a = sums ? std::exp2(sums_max - largest) : T(0);
    T den = sums ? a * s.den[i] : T(0), dot = sums ? a * x.dot[i] : T(0);
    for (idx_t j = 0; j <= i; ++j) {
      den += s.log_weights[j];
      if (of_scores()) dot += s.log_weights[j] * x.products[j * kernel_chunk + i];
    }
    x.log_scale[i] = largest;
    s.eps[i] = exponential()->eps_over(call.eps, largest, s.q_shift[i]);
    set_normal(x, i, den, dot, den != T(0), a, T(0));
    x.row_normal[i] = den == T(0) || x.normal[i] == T(0) ? T(0) : T(1) / (den + s.eps[i]);
  }

  /// The contribution of the chunk to the gradients of such a row and its keys.
  [[gnu::noinline]] void add_row(const sums_type* sums, idx_t i, const scratch_type& x) const {
    const auto& s = x.forward;
    const idx_t m = call.map->features;
    const T n = x.row_normal[i], largest = weigh_row(s.q_raw + i, i, m, sums ? s.q_max[i] : no_log_scale<T>, s);
    const idx_t dim_v = call.shape.dim_v;
    T* const scores = x.gate_keys;  // features with log scales have no gates
    for (idx_t j = 0; j <= i; ++j) {
      T product = T(0);
      for (idx_t d = 0; d < dim_v; ++d)
        product += x.v_columns[d * kernel_chunk + j] * x.d_columns[d * kernel_chunk + i];
      scores[j] = n * (product - x.delta[i]);
      for (idx_t d = 0; d < dim_v && dv; ++d)
        x.dv[j * s.stride + d] += n * s.log_weights[j] * x.d_columns[d * kernel_chunk + i];
    }
    for (idx_t r = 0; r < m && of_scores(); ++r)
      for (idx_t j = 0; j <= i; ++j) {
        const T log = s.q_raw[r * kernel_chunk + i] + s.k_raw[r * kernel_chunk + j] + s.k_shift[j] - largest;
        const T part = scores[j] * std::exp2((std::min)(log, T(2)));
        x.q_d[r * kernel_chunk + i] += part;
        if (of_keys()) x.k_d[r * kernel_chunk + j] += part;
      }
  }

  /// The factors of the scores: n_i A_ji, and n_i (G_ji - D_i).
  void finish_scores(idx_t count, const scratch_type& x) const {
    const bool weighed = call.gated() || exponential();
    const idx_t lanes = round_up(count, width<T>);
    for (idx_t j = 0; j < count; ++j) {
      T *const a = x.scores + j * kernel_chunk, *const g = x.products + j * kernel_chunk;
      const T* const f = x.factors + j * kernel_chunk;
      for (idx_t t = j / width<T> * width<T>; t < lanes; t += width<T>) {
        packet<T> n = load<T>(x.own_normal + t);
        if (weighed) n = mul(n, load<T>(f + t));
        if (dv) store<T>(a + t, mul(n, load<T>(a + t)));
        if (of_scores()) store<T>(g + t, mul(n, sub(load<T>(g + t), load<T>(x.delta + t))));
      }
      if (of_scores()) std::fill(g + j / width<T> * width<T>, g + j, T(0));  // D_i was taken from them
      if (dv) std::fill(a + j / width<T> * width<T>, a + j, T(0));           // which may be NaN
    }
  }

  /// A block of queries. `sums`: of the keys before, or null. With `keys`, those of the chunk in s.k_own; k_d and dv
  /// become their gradients or, where the head is not the first one of its group, are added to. `own`, where given,
  /// becomes `decay` times itself plus the sums of the queries; `sums_only`: nothing else is computed.
  void attend_block(const block& at, const sums_type* sums, sums_type* own, T decay, const scratch_type& x,
                    kernel_sums<T>* dw, bool sums_only = false) const {
    const auto& s = x.forward;
    const idx_t m = call.map->features, count = at.count, lanes = round_up(count, width<T>);
    alignas(64) T own_den[kernel_chunk], own_dot[kernel_chunk];
    bool finite_d = true;
    load_queries(at, x, finite_d);
    row_prefetcher<> prefetch = prefetch_queries(at);
    if (exponential() && sums) exponential()->queries_for_sums(s.q_raw, sums->log_scale, s);
    if (exponential() && at.keys > 0) exponential()->below_own(s.q_raw, s.q_own, s.own_max);
    if (sums) {
      read_weights(s.q_phi, sums->weights, m, lanes, s.den);
      if (of_scores()) {
        of_sums(*sums, x.d_columns, lanes, x.q_d, prefetch, x.operands);
        dot_features(s.q_phi, x.q_d, m, lanes, x.dot);
      }
    }
    if (!of_scores()) std::fill_n(x.dot, kernel_chunk, T(0));
    if (at.keys > 0) weigh_scores(at, x, own_den, own_dot);
    normalise(at, sums, own_den, own_dot, x);
    bool underflowed = false;
    if (exponential() && at.keys > 0)
      for (idx_t t = 0; t < count; ++t) {
        x.row_normal[t] = T(0);
        const T den = (sums ? s.state_factor[t] * s.den[t] : T(0)) + s.own_factor[t] * own_den[t];
        if (t < at.first || !exponential()->underflowed(den) || s.running_max[t] == no_log_scale<T>) continue;
        recompute_row(sums, t, x);
        underflowed = true;
      }
    if (sums_only) return add_queries(at, *own, decay, prefetch, x);
    if (of_gates() && at.keys > 0) add_gate_scores(sums, at, x);
    if (of_queries() && sums)
      each_packet<T>(m, lanes, [&, z = sums->weights, log = logarithms()](idx_t r, idx_t t, idx_t n) {
        packet<T> d = fma(load<T>(x.minus_delta + t), broadcast<T>(z[r]), load<T>(x.q_d + n));
        d = mul(d, load<T>(x.sums_normal + t));
        store<T>(x.q_d + n, log ? mul(d, load<T>(s.q_phi + n)) : d);
      });
    else if (of_queries())
      std::fill_n(x.q_d, m * kernel_chunk, T(0));
    if (at.keys > 0) {
      finish_scores(count, x);
      attend_scores(at, finite_d, x);
      for (idx_t t = at.first; underflowed && t < count; ++t)
        if (x.row_normal[t] != T(0)) add_row(sums, t, x);
    }
    if (own) add_queries(at, *own, decay, prefetch, x);
    if (!of_queries()) return;
    const auto rows = call.q.head(at.b, at.head).block(at.origin, count, at.first, call.filled_lanes());
    map->back_to({rows, at.b * call.heads + at.h, false, at.first, at.origin, exponential() ? s.q_raw : s.q_own, x.q_d},
                dq.head(at.b, at.head), x.dx, dw, s.map);
  }

  /// The terms of the gradients of gates from the scores and queries of a chunk, without gates; see gate_gradients.hpp.
  void add_gate_scores(const sums_type* sums, const block& at, const scratch_type& x) const {
    const idx_t lanes = round_up(at.count, width<T>);
    for (idx_t j = 0; j < at.count; ++j) {
      T* const to = x.gate_scores + j * kernel_chunk;
      for (idx_t t = j / width<T> * width<T>; t < lanes; t += width<T>) {
        const idx_t n = j * kernel_chunk + t;
        const packet<T> weight = mul(load<T>(x.scores + n), load<T>(x.own_normal + t));
        store<T>(to + t, fma(weight, sub(load<T>(x.products + n), load<T>(x.delta + t)), load<T>(to + t)));
      }
      std::fill(to + j / width<T> * width<T>, to + j, T(0));
    }
    for (idx_t t = at.first; t < at.count && sums; ++t)
      x.gate_queries[t] += x.own_normal[t] * (x.dot[t] - x.delta[t] * x.forward.den[t]);
  }

  /// The products over the scores of the chunk.
  void attend_scores(const block& at, bool finite_d, const scratch_type& x) const {
    const auto& s = x.forward;
    const idx_t m = call.map->features, count = at.count, lanes = round_up(count, width<T>);
    const bool added = at.head % call.group() > 0;
    if (of_queries())
      weighted_features<triangle_side::keys_before>(s.k_own, m, x.products, count, all_finite(s.k_own, m, lanes),
                                           logarithms() ? s.q_own : nullptr, true, x.q_d, x.operands);
    if (of_keys()) {
      transpose_scores(x.products, count, x.products_t);
      weighted_features<triangle_side::queries_after>(s.q_own, m, x.products_t, count, all_finite(s.q_own, m, lanes),
                                             logarithms() ? s.k_own : nullptr, added, x.k_d, x.operands);
    }
    if (dv) add_score_rows(x.scores, x.d_panels, call.shape.dim_v, count, finite_d, added, x.dv, s.stride, x.operands);
  }

  /// own = decay own + the block of queries.
  void add_queries(const block& at, sums_type& own, T decay, row_prefetcher<>& prefetch, const scratch_type& x) const {
    const auto& s = x.forward;
    const idx_t m = call.map->features, lanes = round_up(at.count, width<T>);
    const T* from = s.q_own;
    if (exponential()) {
      for (idx_t t = 0; t < kernel_chunk; ++t) x.log_scale[t] = -x.log_scale[t];
      kernel_scratch<T> as_keys = s;
      as_keys.k_shift = x.log_scale, as_keys.k_phi = x.q_later;
      exponential()->keys_for_sums(s.q_raw, own.log_scale, as_keys);
      from = x.q_later;
    } else {
      std::fill_n(s.row_decay, sums_type::lanes(m), decay);
    }
    each_packet<T>(m, lanes, [&](idx_t, idx_t t, idx_t n) {
      store<T>(x.q_later + n, mul(load<T>(from + n), load<T>(x.normal + t)));
    });
    add_weights<T>(own, x.q_later, x.minus_delta, at.count, s.row_decay);
    add_to_sums(own, x.q_later, x.d_panels, at.count, s.row_decay, prefetch, x.operands);
  }

  // Keys --------------------------------------------------------------------------------------------------------------

  /// Loads keys [begin, begin + count): their features, also for the chunk where it has `queries`, and their values.
  [[gnu::noinline]] void load_chunk(idx_t b, idx_t h, idx_t begin, idx_t count, bool queries,
                                    const scratch_type& x) const {
    const auto& s = x.forward;
    const auto values = call.v.head(b, call.kv_head(h));
    kernel.load_features(b, h, begin, count, s, exponential() ? s.k_raw : s.k_own);
    values.access->pack_columns(values.block(begin, count), call.shape.dim_v, x.v_columns);
    call.fill_hidden(b, begin, count, x.v_columns, call.shape.dim_v, T(0));
    if (call.gated()) {
      kernel.prepare_gates(b, h, begin, count, s);
      transpose_factors(s.score_factor, count, x.factors);
    }
    if (exponential() && queries) scale_keys(*exponential(), count, s, x.factors);
  }

  /// k_d and dv of a chunk without queries.
  void clear_gradients(const scratch_type& x) const {
    if (of_keys()) std::fill_n(x.k_d, call.map->features * kernel_chunk, T(0));
    if (dv) std::fill_n(x.dv, kernel_chunk * x.forward.stride, T(0));
  }

  /// k_d and dv become what the queries after the chunk give its keys, or are added to. `later`: their sums. Not
  /// inlined, nor is load_chunk: compiled twice, products and sums might be contracted in one place only.
  [[gnu::noinline]] void from_later(const sums_type& later, idx_t count, bool added, row_prefetcher<>& prefetch,
                                    const scratch_type& x) const {
    const auto& s = x.forward;
    const idx_t m = call.map->features, lanes = round_up(count, width<T>);
    const T *weighed = s.k_own, *factor = nullptr;
    if (exponential()) {
      weigh_keys(*exponential(), later.log_scale, lanes, s, x.k_later, x.key_factor);
      weighed = x.k_later, factor = x.key_factor;
    } else if (call.gated()) {
      factor = s.score_factor + (count - 1) * kernel_chunk;
      each_packet<T>(m, lanes, [&](idx_t, idx_t t, idx_t n) {
        store<T>(x.k_later + n, mul(load<T>(s.k_own + n), load<T>(factor + t)));
      });
      weighed = x.k_later;
    }
    if (of_keys() || of_gates()) {
      T* const d = x.q_d;  // no longer needed
      of_sums(later, x.v_columns, lanes, d, prefetch, x.operands);
      each_packet<T>(m, lanes, [&, y = later.weights](idx_t r, idx_t, idx_t n) {
        store<T>(d + n, add(load<T>(d + n), broadcast<T>(y[r])));
      });
      if (of_gates()) dot_features(s.k_own, d, m, lanes, x.gate_keys);
      each_packet<T>(m, lanes, [&, log = logarithms()](idx_t, idx_t t, idx_t n) {
        packet<T> part = load<T>(d + n);
        if (factor) part = mul(part, log ? load<T>(weighed + n) : load<T>(factor + t));
        if (of_keys()) store<T>(x.k_d + n, added ? add(load<T>(x.k_d + n), part) : part);
      });
    }
    if (dv) rows_of_sums(later, weighed, count, added, x.dv, s.stride, prefetch, x.operands);
  }

  /// From k_d and dv to the gradients of keys and values.
  [[gnu::noinline]] void store_chunk(idx_t b, idx_t h, idx_t begin, idx_t count, const stored_gradient_head<T>& to_k,
                   const stored_gradient_head<T>& to_v, kernel_sums<T>* dw, const scratch_type& x) const {
    const auto& s = x.forward;
    if (of_keys()) {
      auto rows = call.k.head(b, call.kv_head(h)).block(begin, count, 0, call.filled_lanes());
      const bool seen = !call.key_mask || call.replace_hidden(b, begin, rows);
      const tokens_back<T> keys{rows, b * call.heads + h, true, 0, begin, exponential() ? s.k_raw : s.k_own, x.k_d};
      if (!call.key_mask) {
        map->back_to(keys, to_k, x.dx, dw, s.map);
      } else {
        call.fill_hidden(b, begin, count, x.k_d, call.map->features, T(0));
        if (seen) map->back(keys, to_k ? x.dx : nullptr, dw, s.map);
        call.fill_hidden(b, begin, count, x.dx, call.shape.dim, T(0));
        if (to_k) to_k.store_columns(x.dx, begin, 0, count);
      }
    }
    if (dv) call.each_hidden(b, begin, count, [&](idx_t t) { std::fill_n(x.dv + t * s.stride, s.stride, T(0)); });
    if (to_v) to_v.store_rows(x.dv, s.stride, begin, count);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
