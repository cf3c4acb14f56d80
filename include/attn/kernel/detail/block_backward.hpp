// attn: blocks of queries and chunks of keys of kernel attention on the way back, from the sums before and after them.
#pragma once

#include <attn/kernel/detail/chunk_backward.hpp>
#include <attn/kernel/detail/engine.hpp>
#include <attn/kernel/detail/features_backward.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Scratch memory of one worker beside the forward pass's; one number per token of a chunk where nothing is said.
template <class T>
struct backward_scratch {
  kernel_scratch<T> forward;
  T *q_d, *k_d;              // gradients of features
  T *rho, *psi;              // features of queries for R, n_i included; those of keys for R
  T *v_columns, *d_columns;  // values and d_out [value dim][chunk]
  T* d_panels;               // d_out as panels
  T *pairs, *products, *turned, *factors;  // [key][query], [key][query], [query][key], [key][query]
  T *dv, *dx;                // rows [chunk][stride], columns [dim][chunk]
  T *dot, *normal, *of_sums, *of_own, *delta, *minus_delta, *log_scale, *row_normal, *key_factor;
  T *gate_pairs, *gate_queries, *gate_keys;  // for the gradient of gates: see gate_gradients.hpp

  static backward_scratch layout(arena& memory, const kernel_scratch<T>& forward, const attention_shape& shape,
                                 index features, bool log_scaled, bool gated) {
    backward_scratch x;
    x.forward = forward;
    const index phi = (features + tile_rows) * kernel_chunk, square = kernel_chunk * kernel_chunk;
    const auto allocate = [&](index count, std::initializer_list<T**> arrays) {
      for (T** each : arrays) *each = memory.allocate<T>(count);
    };
    allocate(phi, {&x.q_d, &x.k_d});
    x.rho = forward.q_phi, x.psi = forward.k_phi;  // not needed any more when these are made
    if (!log_scaled) allocate(phi, {&x.rho});
    if (gated) allocate(phi, {&x.psi});
    allocate((shape.dim_v + tile_rows) * kernel_chunk, {&x.v_columns, &x.d_columns});
    allocate(kernel_chunk * forward.stride, {&x.d_panels, &x.dv});
    allocate(square, {&x.pairs, &x.products, &x.turned, &x.factors});
    allocate((shape.dim + tile_rows) * kernel_chunk, {&x.dx});
    allocate(kernel_chunk, {&x.dot, &x.normal, &x.of_sums, &x.of_own, &x.delta, &x.minus_delta, &x.log_scale,
                            &x.row_normal, &x.key_factor, &x.gate_queries, &x.gate_keys});
    allocate(gated ? square : 0, {&x.gate_pairs});
    return x;
  }
};

/// One backward call, after its checks; `call` is the forward call without out.
template <class T>
struct kernel_backward {
  kernel_call<T>& call;
  feature_map_backward<T>& map;
  stored_tensor<T> d_out;
  stored_gradient<T> dq, dk, dv;
  tensor_view<T, 3> d_gate{};
  bool d_features = false;  // those of performer and rfa
  bool accumulate = false;

  using scratch_type = backward_scratch<T>;
  using sums_type = kernel_sums<T>;

  // What is needed for what is asked for.
  bool of_queries() const { return dq || d_features; }
  bool of_keys() const { return dk || d_features; }
  bool of_gates() const { return bool(d_gate); }
  bool of_scores() const { return of_queries() || of_keys() || of_gates(); }
  bool reverse() const { return of_keys() || dv || of_gates(); }
  const exponential_scaling<T>* exponential() const { return map.exponential; }
  /// Logarithms of features are differentiated.
  bool logarithms() const { return exponential() && !exponential()->is_signed; }

  /// A block of queries: rows origin + [first, count) of `head`, at the positions of the keys of the chunk if `keys` > 0.
  struct block {
    index b, h, head, origin, first, count, keys;
  };

  static void each_packet(index rows, index lanes, const auto& body) {
    for (index r = 0; r < rows; ++r)
      for (index t = 0; t < lanes; t += width<T>) body(r, t, r * kernel_chunk + t);
  }

  // Queries -----------------------------------------------------------------------------------------------------------

  void load_queries(const block& at, const scratch_type& x, bool& finite_d) const {
    const auto& s = x.forward;
    const auto from = d_out.head(at.b, at.head);
    const auto rows = call.q.head(at.b, at.head).block(at.origin, at.count, at.first, call.filled_lanes());
    call.map->queries(rows, at.b * call.heads + at.h, exponential() ? s.q_raw : s.q_own, s.q_shift, s.map);
    from.access->pack_columns(from.block(at.origin, at.count, at.first), call.shape.dim_v, x.d_columns);
    if (!reverse()) return;
    constexpr index wide = panel_width<T>;
    for (index col = 0; at.first > 0 && col < call.shape.dim_v; col += wide)
      std::fill_n(x.d_panels + col * kernel_chunk, at.first * wide, T(0));
    finite_d = from.access->pack_panels(from, at.origin + at.first, at.count - at.first, x.d_panels + at.first * wide);
  }

  /// The queries' features for the sums, and for the chunk.
  void scale_queries(const block& at, const sums_type* sums, const scratch_type& x) const {
    const auto& s = x.forward;
    const exponential_scaling<T>& e = *exponential();
    const index m = call.map->features;
    if (e.is_signed) {
      if (sums) std::copy_n(s.q_raw, m * kernel_chunk, s.q_phi), std::fill_n(s.q_max, kernel_chunk, sums->log_scale[0]);
      if (at.keys > 0) std::copy_n(s.q_raw, m * kernel_chunk, s.q_own), std::fill_n(s.own_max, kernel_chunk, T(0));
      return;
    }
    if (sums) {
      largest_of<T>(s.q_raw, m, sums->log_scale, s.q_max);
      exp2_below<T>(s.q_raw, m, sums->log_scale, s.q_max, s.q_phi);
    }
    if (at.keys > 0) {
      largest_of<T>(s.q_raw, m, nullptr, s.own_max);
      exp2_below<T>(s.q_raw, m, nullptr, s.own_max, s.q_own);
    }
  }

  /// pairs and products of the chunk, with zeros where a query does not see a key, and their part of den and dot.
  void weigh_pairs(const block& at, const scratch_type& x, T* den, T* dot) const {
    const auto& s = x.forward;
    constexpr index wide = panel_width<T>;
    const index count = at.count, lanes = round_up(count, width<T>);
    const bool weighed = call.gated() || exponential();
    pair_sums(s.k_own, s.q_own, call.map->features, count, x.pairs);
    if (of_scores()) pair_sums(x.v_columns, x.d_columns, call.shape.dim_v, count, x.products);
    std::fill_n(den, kernel_chunk, T(0));
    std::fill_n(dot, kernel_chunk, T(0));
    for (index j = 0; j < count; ++j) {
      T *const a = x.pairs + j * kernel_chunk, *const g = x.products + j * kernel_chunk;
      const T* const f = x.factors + j * kernel_chunk;
      const index begin = j / tile_rows * tile_rows / wide * wide;
      std::fill(a + begin, a + j, T(0));
      if (of_scores()) std::fill(g + begin, g + j, T(0));
      for (index t = j / width<T> * width<T>; t < lanes; t += width<T>) {
        packet<T> weight = load<T>(a + t);
        if (weighed) weight = mul(weight, load<T>(f + t));
        store<T>(den + t, add(load<T>(den + t), weight));
        if (of_scores()) store<T>(dot + t, fma(weight, load<T>(g + t), load<T>(dot + t)));
      }
    }
  }

  /// n_i and D_i, and what of n_i the sums and the chunk have.
  void normalise(const block& at, const sums_type* sums, const T* own_den, const T* own_dot,
                 const scratch_type& x) const {
    const auto& s = x.forward;
    const exponential_scaling<T>* const e = exponential();
    for (index t = 0; t < kernel_chunk; ++t) {
      T of_sums = T(1), of_own = T(1), eps = call.eps;
      if (e) {
        const T before = sums ? s.q_max[t] : no_log_scale<T>;
        const T own = at.keys > 0 ? s.own_max[t] + s.running_max[t] : no_log_scale<T>;
        const T larger = std::max(before, own);
        x.log_scale[t] = larger;
        of_sums = before - larger, of_own = own - larger;
      } else if (call.gated() && at.keys > 0) {
        of_sums = s.decay[t];
      }
      s.state_factor[t] = of_sums, s.own_factor[t] = of_own, s.eps[t] = eps;
    }
    if (e) {
      map_packets(s.state_factor, s.state_factor, kernel_chunk, [](const auto& p) { return exp2_weight<T>(p); });
      map_packets(s.own_factor, s.own_factor, kernel_chunk, [](const auto& p) { return exp2_weight<T>(p); });
    }
    for (index t = 0; t < kernel_chunk; ++t) {
      const bool real = t >= at.first && t < at.count;
      const T a = sums ? s.state_factor[t] : T(0), b = at.keys > 0 ? s.own_factor[t] : T(0);
      T den = T(0), dot = T(0);
      if (real && sums) den += a * s.den[t], dot += a * x.dot[t];
      if (real && at.keys > 0) den += b * own_den[t], dot += b * own_dot[t];
      if (e && real && call.eps > T(0)) s.eps[t] = e->eps_over(call.eps, x.log_scale[t], s.q_shift[t]);
      set_normal(x, t, den, dot, real, a, b);
    }
  }

  void set_normal(const scratch_type& x, index t, T den, T dot, bool real, T a, T b) const {
    const T whole = den + x.forward.eps[t];
    T n = !real ? T(0) : !call.normalise ? T(1) : std::abs(whole) < least_denominator<T> ? T(0) : T(1) / whole;
    const T delta = n == T(0) || !call.normalise ? T(0) : dot * n;
    x.delta[t] = delta, x.minus_delta[t] = -delta;
    x.of_sums[t] = a * n, x.of_own[t] = b * n;
    x.normal[t] = x.forward.state_factor[t] * n;
    if (!exponential()) return;
    if (n == T(0)) {
      x.log_scale[t] = -no_log_scale<T>;
    } else if (!exponential()->is_signed) {  // so that R is of the size of weights
      int exponent = 0;
      n = T(1) / std::frexp(whole, &exponent);
      x.log_scale[t] += static_cast<T>(exponent);
    }
    x.normal[t] = n;
  }

  /// Of row i, whose pairs underflowed: weights of its keys over the largest one, by logarithms, whose logarithm it
  /// returns.
  T weigh_row(index i, T sums_max, const scratch_type& x) const {
    const auto& s = x.forward;
    T *const weights = s.log_weights, largest = sums_max;
    weigh_logarithms(s.q_raw + i, s.k_raw, s.k_shift, call.map->features, weights);
    for (index j = 0; j <= i; ++j) largest = std::max(largest, weights[j]);
    for (index j = 0; j <= i; ++j) weights[j] = std::exp2(weights[j] - largest);
    return largest;
  }

  /// n_i and D_i of such a row; of_own is 0.
  [[gnu::noinline]] void recompute_row(const sums_type* sums, index i, const scratch_type& x) const {
    const auto& s = x.forward;
    const T sums_max = sums ? s.q_max[i] : no_log_scale<T>, largest = weigh_row(i, sums_max, x);
    const T a = sums ? std::exp2(sums_max - largest) : T(0);
    T den = sums ? a * s.den[i] : T(0), dot = sums ? a * x.dot[i] : T(0);
    for (index j = 0; j <= i; ++j) {
      den += s.log_weights[j];
      if (of_scores()) dot += s.log_weights[j] * x.products[j * kernel_chunk + i];
    }
    x.log_scale[i] = largest;
    s.eps[i] = exponential()->eps_over(call.eps, largest, s.q_shift[i]);
    set_normal(x, i, den, dot, den != T(0), a, T(0));
    x.row_normal[i] = den == T(0) || x.normal[i] == T(0) ? T(0) : T(1) / (den + s.eps[i]);
  }

  /// What the chunk adds to the gradients of such a row and its keys.
  [[gnu::noinline]] void add_row(const sums_type* sums, index i, const scratch_type& x) const {
    const auto& s = x.forward;
    const T n = x.row_normal[i], largest = weigh_row(i, sums ? s.q_max[i] : no_log_scale<T>, x);
    const index dim_v = call.shape.dim_v;
    T* const scores = x.gate_keys;  // features with log scales have no gates
    for (index j = 0; j <= i; ++j) {
      T product = T(0);
      for (index d = 0; d < dim_v; ++d) product += x.v_columns[d * kernel_chunk + j] * x.d_columns[d * kernel_chunk + i];
      scores[j] = n * (product - x.delta[i]);
      for (index d = 0; d < dim_v && dv; ++d)
        x.dv[j * s.stride + d] += n * s.log_weights[j] * x.d_columns[d * kernel_chunk + i];
    }
    for (index r = 0; r < call.map->features && of_scores(); ++r)
      for (index j = 0; j <= i; ++j) {
        const T log = s.q_raw[r * kernel_chunk + i] + s.k_raw[r * kernel_chunk + j] + s.k_shift[j] - largest;
        const T part = scores[j] * std::exp2(std::min(log, T(2)));
        x.q_d[r * kernel_chunk + i] += part;
        x.k_d[r * kernel_chunk + j] += part;
      }
  }

  /// The factors of the pairs: n_i A_ji, and n_i (G_ji - D_i).
  void finish_pairs(index count, const scratch_type& x) const {
    const bool weighed = call.gated() || exponential();
    const index lanes = round_up(count, width<T>);
    for (index j = 0; j < count; ++j) {
      T *const a = x.pairs + j * kernel_chunk, *const g = x.products + j * kernel_chunk;
      const T* const f = x.factors + j * kernel_chunk;
      for (index t = j / width<T> * width<T>; t < lanes; t += width<T>) {
        packet<T> n = load<T>(x.of_own + t);
        if (weighed) n = mul(n, load<T>(f + t));
        if (dv) store<T>(a + t, mul(n, load<T>(a + t)));
        if (of_scores()) store<T>(g + t, mul(n, sub(load<T>(g + t), load<T>(x.delta + t))));
      }
      if (of_scores()) std::fill(g + j / width<T> * width<T>, g + j, T(0));  // D_i was taken from them
      if (dv) std::fill(a + j / width<T> * width<T>, a + j, T(0));           // which may be NaN
    }
  }

  /// A block of queries. `sums`: of the keys before, or null. With `keys`, those of the chunk in s.k_own; adds to their
  /// gradients k_d and dv. `own`, where given, takes the queries, after `decay` times what it has.
  void attend_block(const block& at, const sums_type* sums, sums_type* own, T decay, const scratch_type& x,
                    kernel_sums<T>* dw) const {
    const auto& s = x.forward;
    const index m = call.map->features, count = at.count, lanes = round_up(count, width<T>);
    alignas(64) T own_den[kernel_chunk], own_dot[kernel_chunk];
    bool finite_d = true;
    load_queries(at, x, finite_d);
    if (exponential()) scale_queries(at, sums, x);
    if (sums) {
      read_weights(s.q_phi, sums->weights, m, lanes, s.den);
      if (of_scores()) {
        of_sums(*sums, x.d_columns, lanes, x.q_d);
        dot_features(s.q_phi, x.q_d, m, lanes, x.dot);
      }
    }
    if (!of_scores()) std::fill_n(x.dot, kernel_chunk, T(0));
    if (at.keys > 0) weigh_pairs(at, x, own_den, own_dot);
    normalise(at, sums, own_den, own_dot, x);
    bool underflowed = false;
    if (exponential() && at.keys > 0)
      for (index t = 0; t < count; ++t) {
        x.row_normal[t] = T(0);
        const T den = (sums ? s.state_factor[t] * s.den[t] : T(0)) + s.own_factor[t] * own_den[t];
        if (t < at.first || !exponential()->underflowed(den)) continue;
        recompute_row(sums, t, x);
        underflowed = true;
      }
    if (of_gates() && at.keys > 0) add_gate_pairs(sums, at, x);
    if (of_queries() && sums)
      each_packet(m, lanes, [&, z = sums->weights, log = logarithms()](index r, index t, index n) {
        packet<T> d = fma(load<T>(x.minus_delta + t), broadcast<T>(z[r]), load<T>(x.q_d + n));
        d = mul(d, load<T>(x.of_sums + t));
        store<T>(x.q_d + n, log ? mul(d, load<T>(s.q_phi + n)) : d);
      });
    else if (of_queries())
      std::fill_n(x.q_d, m * kernel_chunk, T(0));
    if (at.keys > 0) {
      finish_pairs(count, x);
      attend_pairs(at, finite_d, x);
      for (index t = at.first; underflowed && t < count; ++t)
        if (x.row_normal[t] != T(0)) add_row(sums, t, x);
    }
    if (own) add_queries(at, *own, decay, x);
    if (!of_queries()) return;
    const auto rows = call.q.head(at.b, at.head).block(at.origin, count, at.first, call.filled_lanes());
    map.back({rows, at.b * call.heads + at.h, false, at.first, at.origin, exponential() ? s.q_raw : s.q_own, x.q_d},
             dq ? x.dx : nullptr, dw, s.map);
    if (dq) dq.head(at.b, at.head).store_columns(x.dx, at.origin, at.first, count);
  }

  /// dot[t] = sum over r of features[r][t] d[r][t].
  static void dot_features(const T* features, const T* d, index m, index lanes, T* dot) {
    for (index t = 0; t < lanes; t += width<T>) {
      packet<T> sum = zero<T>(), other = zero<T>();
      const auto term = [&](index r, const packet<T>& to) {
        return fma(load<T>(features + r * kernel_chunk + t), load<T>(d + r * kernel_chunk + t), to);
      };
      for (index r = 0; r + 1 < m; r += 2) sum = term(r, sum), other = term(r + 1, other);
      if (m % 2) sum = term(m - 1, sum);
      store<T>(dot + t, add(sum, other));
    }
  }

  /// What the gradients of gates take of the pairs and queries of a chunk, without gates; see gate_gradients.hpp.
  void add_gate_pairs(const sums_type* sums, const block& at, const scratch_type& x) const {
    const index lanes = round_up(at.count, width<T>);
    for (index j = 0; j < at.count; ++j) {
      T* const to = x.gate_pairs + j * kernel_chunk;
      for (index t = j / width<T> * width<T>; t < lanes; t += width<T>) {
        const index n = j * kernel_chunk + t;
        const packet<T> weight = mul(load<T>(x.pairs + n), load<T>(x.of_own + t));
        store<T>(to + t, fma(weight, sub(load<T>(x.products + n), load<T>(x.delta + t)), load<T>(to + t)));
      }
      std::fill(to + j / width<T> * width<T>, to + j, T(0));
    }
    for (index t = at.first; t < at.count && sums; ++t)
      x.gate_queries[t] += x.of_own[t] * (x.dot[t] - x.delta[t] * x.forward.den[t]);
  }

  /// The products over the pairs of the chunk.
  void attend_pairs(const block& at, bool finite_d, const scratch_type& x) const {
    const auto& s = x.forward;
    const index m = call.map->features, count = at.count, lanes = round_up(count, width<T>);
    if (of_queries())
      pair_product<pair_side::keys_before>(s.k_own, m, x.products, count, all_finite(s.k_own, m, lanes),
                                           logarithms() ? s.q_own : nullptr, x.q_d);
    if (of_keys()) {
      transpose_pairs(x.products, count, x.turned);
      pair_product<pair_side::queries_after>(s.q_own, m, x.turned, count, all_finite(s.q_own, m, lanes),
                                             logarithms() ? s.k_own : nullptr, x.k_d);
    }
    if (dv) add_pair_rows(x.pairs, x.d_panels, call.shape.dim_v, count, finite_d, x.dv, s.stride);
  }

  /// own = decay own + the block of queries.
  void add_queries(const block& at, sums_type& own, T decay, const scratch_type& x) const {
    const auto& s = x.forward;
    const index m = call.map->features, lanes = round_up(at.count, width<T>);
    const T* from = s.q_own;
    if (exponential()) {
      for (index t = 0; t < kernel_chunk; ++t) x.log_scale[t] = -x.log_scale[t];
      kernel_scratch<T> as_keys = s;
      as_keys.k_shift = x.log_scale, as_keys.k_phi = x.rho;
      exponential()->keys_for_sums(s.q_raw, own.log_scale, as_keys);
      from = x.rho;
    } else {
      std::fill_n(s.row_decay, sums_type::lanes(m), decay);
    }
    each_packet(m, lanes, [&](index, index t, index n) {
      store<T>(x.rho + n, mul(load<T>(from + n), load<T>(x.normal + t)));
    });
    row_prefetcher<> prefetch;
    add_weights<T>(own, x.rho, x.minus_delta, at.count, s.row_decay);
    add_values(own, x.rho, x.d_panels, at.count, s.row_decay, prefetch);
  }

  // Keys --------------------------------------------------------------------------------------------------------------

  /// Keys [begin, begin + count): their features for the chunk, with `queries` in it, and their values.
  void load_chunk(index b, index h, index begin, index count, bool queries, const scratch_type& x) const {
    const auto& s = x.forward;
    const auto rows = call.k.head(b, call.kv_head(h)).block(begin, count, 0, call.filled_lanes());
    const auto values = call.v.head(b, call.kv_head(h));
    call.map->keys(rows, b * call.heads + h, exponential() ? s.k_raw : s.k_own, s.k_shift, s.map);
    values.access->pack_columns(values.block(begin, count), call.shape.dim_v, x.v_columns);
    if (call.gated()) {
      call.prepare_gates(b, h, begin, count, s);
      turn_factors(count, x);
    }
    if (exponential() && queries) scale_keys(count, x);
  }

  /// factors[j][i] = pair_factor[i][j]
  static void turn_factors(index count, const scratch_type& x) {
    constexpr index w = width<T>;
    for (index i = 0; i < count; i += w)
      for (index j = 0; j <= i; j += w) {
        packet<T> square[w];
        for (index n = 0; n < w; ++n) square[n] = load<T>(x.forward.pair_factor + (i + n) * kernel_chunk + j);
        transpose<T>(square);
        for (index n = 0; n < w; ++n) store<T>(x.factors + (j + n) * kernel_chunk + i, square[n]);
      }
  }

  /// As exponential_scaling::keys_for_chunk, of s.k_raw.
  void scale_keys(index count, const scratch_type& x) const {
    const auto& s = x.forward;
    const index m = call.map->features;
    if (exponential()->is_signed) {
      std::copy_n(s.k_raw, m * kernel_chunk, s.k_own);
      std::copy_n(s.k_shift, kernel_chunk, s.k_max);
    } else {
      largest_of<T>(s.k_raw, m, nullptr, s.k_max);
      exp2_below<T>(s.k_raw, m, nullptr, s.k_max, s.k_own);
      for (index t = 0; t < kernel_chunk; ++t) s.k_max[t] += s.k_shift[t];
    }
    T highest = no_log_scale<T>;
    for (index t = 0; t < kernel_chunk; ++t)
      s.running_max[t] = highest = std::max(highest, t < count ? s.k_max[t] : highest);
    for (index j = 0; j < count; ++j)
      for (index t = j / width<T> * width<T>; t < count; t += width<T>)
        store<T>(x.factors + j * kernel_chunk + t,
                 exp2_weight<T>(sub(broadcast<T>(s.k_max[j]), load<T>(s.running_max + t))));
    for (index j = 0; j < count; ++j) {  // what is masked must be a number
      T* const row = x.factors + j * kernel_chunk;
      std::fill(row + j / width<T> * width<T>, row + j, T(0));
    }
  }

  /// The gradients k_d and dv that the queries after the chunk give its keys. `later`: their sums, or null.
  void from_later(const sums_type* later, index count, const scratch_type& x) const {
    const auto& s = x.forward;
    const index m = call.map->features, lanes = round_up(count, width<T>);
    const bool scores = of_keys() || of_gates();
    if (!later) {
      std::fill_n(x.k_d, m * kernel_chunk, T(0));
      std::fill_n(x.dv, kernel_chunk * s.stride, T(0));
      std::fill_n(x.gate_keys, kernel_chunk, T(0));
      return;
    }
    const T *psi = s.k_own, *factor = nullptr;
    if (exponential()) {
      weigh_keys(*later, lanes, x);
      psi = x.psi, factor = x.key_factor;
    } else if (call.gated()) {
      factor = s.pair_factor + (count - 1) * kernel_chunk;
      each_packet(m, lanes, [&](index, index t, index n) {
        store<T>(x.psi + n, mul(load<T>(s.k_own + n), load<T>(factor + t)));
      });
      psi = x.psi;
    }
    if (scores) {
      of_sums(*later, x.v_columns, lanes, x.k_d);
      each_packet(m, lanes, [&, y = later->weights](index r, index, index n) {
        store<T>(x.k_d + n, add(load<T>(x.k_d + n), broadcast<T>(y[r])));
      });
      if (of_gates()) dot_features(s.k_own, x.k_d, m, lanes, x.gate_keys);
      if (factor)
        each_packet(m, lanes, [&, log = logarithms()](index, index t, index n) {
          store<T>(x.k_d + n, mul(load<T>(x.k_d + n), log ? load<T>(psi + n) : load<T>(factor + t)));
        });
    }
    if (dv) rows_of_sums(*later, psi, count, x.dv, s.stride);
  }

  /// psi and key_factor over the log scales of R: 2^log_scale[r] phi_r(k_j). A key has a part in the denominator of every
  /// query that sees it, so that these are at most about 1; what rounding adds to logarithms of thousands is cut off.
  void weigh_keys(const sums_type& later, index lanes, const scratch_type& x) const {
    const auto& s = x.forward;
    const packet<T> most = broadcast<T>(T(2));
    if (exponential()->is_signed) {
      map_packets(s.k_shift, x.key_factor, kernel_chunk, [&](const auto& p) {
        return exp2_weight<T>(min(add(p, broadcast<T>(later.log_scale[0])), most));
      });
      each_packet(call.map->features, lanes, [&](index, index t, index n) {
        store<T>(x.psi + n, mul(load<T>(s.k_raw + n), load<T>(x.key_factor + t)));
      });
    } else {
      each_packet(call.map->features, lanes, [&](index r, index t, index n) {
        const packet<T> log = add(add(load<T>(s.k_raw + n), load<T>(s.k_shift + t)), broadcast<T>(later.log_scale[r]));
        store<T>(x.psi + n, exp2_weight<T>(min(log, most)));
      });
    }
  }

  /// From k_d and dv to the gradients of keys and values.
  void store_chunk(index b, index h, index begin, index count, const stored_gradient_head<T>& to_k,
                   const stored_gradient_head<T>& to_v, kernel_sums<T>* dw, const scratch_type& x) const {
    const auto& s = x.forward;
    if (of_keys()) {
      const auto rows = call.k.head(b, call.kv_head(h)).block(begin, count, 0, call.filled_lanes());
      map.back({rows, b * call.heads + h, true, 0, begin, exponential() ? s.k_raw : s.k_own, x.k_d},
               to_k ? x.dx : nullptr, dw, s.map);
      if (to_k) to_k.store_columns(x.dx, begin, 0, count);
    }
    if (to_v) to_v.store_rows(x.dv, s.stride, begin, count);
  }
};

}  // namespace attn::inline ATTN_ISA::detail
