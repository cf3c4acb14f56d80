// attn: the features of performer, as the engine asks for them.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/kernel/detail/features.hpp>
#include <attn/kernel/detail/log_scales.hpp>
#include <attn/kernel/detail/projection.hpp>

namespace attn::inline ATTN_ISA {

/// What the features are made of; x~ = x sqrt(scale), m features W.
enum class performer_kernel {
  positive,       // m^-1/2 exp(W x~ - |x~|^2 / 2)
  hyperbolic,     // (2m)^-1/2 exp(+-W x~ - |x~|^2 / 2)
  trigonometric,  // m^-1/2 exp(|x~|^2 / 2) [sin W x~, cos W x~]
  relu,           // max(W x~, 0) + feature_eps
};

namespace detail {

template <class S>
struct performer_features final : kernel_features<S> {
  using T = compute_type<S>;

  tensor_view<const T, 3> w;
  performer_kernel kernel;
  T scale;
  T added;         // feature_eps
  bool published;  // positive features with feature_eps: over the maximum of W
                   // x~ per query, and over all keys
  index heads;     // of sums
  // Where keys are centred or maxima over all of them are needed:
  tensor_view<const S> k{};
  const sequence_lengths* lengths = nullptr;
  bool centred = false;

  packed_projection<T> packed{};
  T *centres = nullptr,
    *peaks = nullptr;  // [batch * heads][dim], [batch * heads]

  performer_features(const tensor_view<const T, 3>& features, performer_kernel phi, T s, T eps, bool as_published,
                     index sum_heads)
      : w(features), kernel(phi), scale(s), added(eps), published(as_published), heads(sum_heads) {}

  bool leveled() const override { return kernel != performer_kernel::relu && !published; }
  bool is_signed() const { return kernel == performer_kernel::trigonometric; }
  bool shared() const override { return w.extent(0) == 1; }
  index dim() const { return w.extent(2); }
  index features() const override {
    const bool twice = kernel == performer_kernel::hyperbolic || is_signed();
    return w.extent(1) * (twice ? 2 : 1);
  }
  index raw_size() const { return (features() + tile_rows) * kernel_chunk; }
  index work() const override { return (dim() + 1) * kernel_chunk + (leveled() ? 2 * raw_size() : 0); }

  static constexpr T log2_e = T(1.442695040888963407359924681);
  bool exponential() const { return kernel == performer_kernel::positive || kernel == performer_kernel::hyperbolic; }
  index matrix_of(index pair) const { return pair % heads / (heads / w.extent(0)); }

  void layout(arena& memory, index pairs) override {
    packed = packed_projection<T>::layout(memory, w);
    centres = memory.allocate<T>(centred ? pairs * dim() : 0);
    peaks = memory.allocate<T>(published ? pairs : 0);
  }

  void prepare(execution& exec) override {
    packed.pack(w, std::sqrt(scale) * (exponential() ? log2_e : T(1)));
    if (!centred && !published) return;
    exec.for_each(k.extent(0) * heads, [&](index pair, int worker) {
      const index b = pair / heads, count = lengths->keys(b);
      const auto keys = head_of(k, b, pair % heads / (heads / k.extent(1)));
      double* sums;
      T *columns, *raw;
      exec.scratch(worker, [&](arena& memory) {
        sums = memory.allocate<double>(centred ? dim() : 0);
        columns = memory.allocate<T>(published ? dim() * kernel_chunk : 0);
        return raw = memory.allocate<T>(published ? raw_size() : 0);
      });
      if (centred) {
        std::fill_n(sums, dim(), 0.0);
        for (index j = 0; j < count; ++j) {
          const S* const row = keys.row(j);
          for (index d = 0; d < dim(); ++d) sums[d] += static_cast<double>(row[d * keys.col_stride]);
        }
        for (index d = 0; d < dim(); ++d)
          centres[pair * dim() + d] = static_cast<T>(sums[d] / static_cast<double>(std::max<index>(count, 1)));
      }
      if (!published) return;
      peaks[pair] = -std::numeric_limits<T>::infinity();
      for (index begin = 0; begin < count; begin += kernel_chunk) {
        columns_of(token_rows<S>(keys, begin, std::min<index>(kernel_chunk, count - begin)), centre_of(pair), columns);
        packed.apply(matrix_of(pair), columns, kernel_chunk, raw);
        for (index n = 0; n < features() * kernel_chunk; n += width<T>)
          peaks[pair] = std::max(peaks[pair], max_lanes(load<T>(raw + n)));
      }
    });
  }

  const T* centre_of(index pair) const { return centred ? centres + pair * dim() : nullptr; }

  void columns_of(const token_rows<S>& x, const T* centre, T* columns) const {
    pack_columns(x, x.count, dim(), x.col_stride, columns);
    for (index d = 0; centre && d < dim(); ++d)
      for (index t = 0; t < kernel_chunk; t += width<T>)
        store<T>(columns + d * kernel_chunk + t, sub(load<T>(columns + d * kernel_chunk + t), broadcast<T>(centre[d])));
  }

  /// Logarithms or numbers as levels.hpp takes them, or plain features, of a block of tokens.
  void raw_of(const token_rows<S>& x, index pair, const T* centre, T* phi, T* shift, T* columns) const {
    const index m = w.extent(1);
    columns_of(x, centre, columns);
    packed.apply(matrix_of(pair), columns, x.lanes, phi);
    sum_squares(columns, dim(), kernel_chunk, shift);
    const T half = (is_signed() ? T(0.5) : T(-0.5)) * scale * log2_e;
    for (index t = 0; t < kernel_chunk; t += width<T>) store<T>(shift + t, mul(load<T>(shift + t), broadcast<T>(half)));
    if (kernel == performer_kernel::relu)
      for (index n = 0; n < m * kernel_chunk; n += width<T>)
        store<T>(phi + n, add(if_less(load<T>(phi + n), zero<T>(), zero<T>(), load<T>(phi + n)), broadcast<T>(added)));
    if (kernel == performer_kernel::hyperbolic)
      for (index n = 0; n < m * kernel_chunk; n += width<T>)
        store<T>(phi + m * kernel_chunk + n, sub(zero<T>(), load<T>(phi + n)));
    if (is_signed())
      for (index r = 0; r < m; ++r)
        for (index t = 0; t < x.lanes; t += width<T>) {
          T* const at = phi + r * kernel_chunk + t;
          packet<T> sine, cosine;
          sin_cos<T>(load<T>(at), sine, cosine);
          store<T>(at, sine), store<T>(at + m * kernel_chunk, cosine);
        }
  }

  /// As the original has it: 2^(raw + shift - top) + feature_eps.
  void publish(T* phi, T* shift, const T* top) const {
    for (index t = 0; t < kernel_chunk; t += width<T>) store<T>(shift + t, sub(load<T>(top + t), load<T>(shift + t)));
    exp2_below<T>(phi, features(), nullptr, shift, phi);
    for (index n = 0; n < features() * kernel_chunk; n += width<T>)
      store<T>(phi + n, add(load<T>(phi + n), broadcast<T>(added)));
  }

  void keys(const token_rows<S>& x, index pair, T* phi, T* shift, T* work) const override {
    raw_of(x, pair, centre_of(pair), phi, shift, work);
    if (!published) return;
    T* const top = work + dim() * kernel_chunk;
    std::fill_n(top, kernel_chunk, peaks[pair]);
    publish(phi, shift, top);
  }
  void queries(const token_rows<S>& x, index pair, T* phi, T* shift, T* work) const override {
    raw_of(x, pair, nullptr, phi, shift, work);
    if (!published) return;
    T* const top = work + dim() * kernel_chunk;
    largest_of<T>(phi, features(), nullptr, top);
    publish(phi, shift, top);
  }

  // Where features have levels ----------------------------------------------------------------------------------------

  void key_state(const T* raw, const T* shift, T* level, T* keep, T* phi) const override {
    level_keys(raw, shift, features(), is_signed(), level, keep, phi);
  }
  void key_own(T* raw, const T* shift, T* top, index count, T* peak, T* mix) const override {
    if (is_signed()) {
      std::copy_n(shift, kernel_chunk, top);
    } else {
      largest_of<T>(raw, features(), nullptr, top);
      exp2_below<T>(raw, features(), nullptr, top, raw);
      for (index t = 0; t < kernel_chunk; ++t) top[t] += shift[t];
    }
    mix_by_tops(top, count, peak, mix);
  }
  void query_state(const T* raw, const T* level, T* phi, T* top) const override {
    if (is_signed()) {
      std::copy_n(raw, features() * kernel_chunk, phi);
      std::fill_n(top, kernel_chunk, level[0]);
    } else {
      largest_of<T>(raw, features(), level, top);
      exp2_below<T>(raw, features(), level, top, phi);
    }
  }
  void query_own(T* raw, T* top) const override {
    if (is_signed()) {
      std::fill_n(top, kernel_chunk, T(0));
    } else {
      largest_of<T>(raw, features(), nullptr, top);
      exp2_below<T>(raw, features(), nullptr, top, raw);
    }
  }

  /// eps, in the measure of a denominator over 2^top: features here leave out their factor 1 / sqrt(m) and the query's
  /// shift.
  T eps_over(T eps, T top, T shift) const {
    const index count = is_signed() ? w.extent(1) : features();
    return eps > T(0) ? eps * static_cast<T>(count) * std::exp2(-(top + shift)) : T(0);
  }

  /// The two parts of a row in one measure, the larger one's.
  void join(const T* state_top, const T* own_top, const T* peak, const T* shift, T eps, T* state_factor, T* own_factor,
            T* eps_of) const override {
    for (index t = 0; t < kernel_chunk; t += width<T>) {
      const packet<T> none = broadcast<T>(no_level<T>);
      const packet<T> state = state_top ? load<T>(state_top + t) : none;
      const packet<T> own = own_top ? add(load<T>(own_top + t), load<T>(peak + t)) : none;
      const packet<T> top = max(state, own);
      store<T>(state_factor + t, exp2_weight<T>(sub(state, top)));
      store<T>(own_factor + t, exp2_weight<T>(sub(own, top)));
      store<T>(eps_of + t, top);
    }
    for (index t = 0; t < kernel_chunk; ++t) eps_of[t] = eps_over(eps, eps_of[t], shift[t]);
  }

  /// So small a denominator, of positive weights the largest of which could be 1, may have lost all that was in it.
  bool doubtful(T den) const override {
    return !is_signed() && den < std::numeric_limits<T>::min() * T(std::uint64_t(1) << 45);
  }

  void weigh_carefully(const token_rows<S>& query, const token_rows<S>& keys, index pair, T* work) const override {
    T *const columns = work, *const log_weights = columns + dim() * kernel_chunk,
             *const raw = log_weights + kernel_chunk;
    alignas(64) T shift[kernel_chunk];
    raw_of(query, pair, nullptr, raw + raw_size(), shift, columns);
    raw_of(keys, pair, nullptr, raw, shift, columns);
    weigh_logarithms(raw + raw_size(), raw, shift, features(), log_weights);
  }

  void finish_carefully(const chunk_view<T>& c, index i, T state_top, T state_den, T shift, T eps, T* work,
                        T* out) const override {
    T* const weights = work + dim() * kernel_chunk;
    T top = state_top;
    for (index j = 0; j <= i; ++j) top = std::max(top, weights[j]);
    const T state = c.sums ? std::exp2(state_top - top) : T(0);
    T den = state * state_den;
    for (index j = 0; j <= i; ++j) den += weights[j] = std::exp2(weights[j] - top);
    // den >= 1/2, or 0 where every logarithm lies below no_level, or NaN
    const T whole = den + eps_over(eps, top, shift), normal = den == T(0) ? T(0) : T(1) / whole;
    for (index d = 0; d < c.dim_v; ++d) {
      const index col = d / panel_width<T> * panel_width<T>, lane = d % panel_width<T>;
      T sum = T(0);
      for (index r = 0; c.sums && r < c.features; ++r)
        sum += c.q_state[r * kernel_chunk + i] * c.sums->panel(col)[r * panel_width<T> + lane];
      sum *= state;
      for (index j = 0; j <= i; ++j) sum += weights[j] * c.values[col * kernel_chunk + j * panel_width<T> + lane];
      out[d] = sum * normal;
    }
  }

  void step_key(T* raw, T shift, T* level, T* keep) const override {
    level_key(raw, shift, features(), is_signed(), level, keep);
  }
  T step_query(T* raw, const T* level, T shift, T eps) const override {
    return eps_over(eps, level_query(raw, features(), is_signed(), level), shift);
  }
};

}  // namespace detail
}  // namespace attn
