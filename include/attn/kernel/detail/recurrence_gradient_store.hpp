// attn: how the gradients of one chunk of a recurrence are stored.
#pragma once

#include <attn/kernel/detail/recurrence_backward_scratch.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Of one head of the states.
template <rule R, class T>
struct recurrence_gradient_store {
  const kernel_backward_call<T>& in;
  const recurrence_backward_scratch<R, T>& s;
  idx_t b, h;
  const kernel_call<T>& call = in.call;
  const recurrence_parameters<T>& parameters = in.parameters();

  idx_t features() const { return in.features(); }
  idx_t dim_v() const { return in.dim_v(); }
  idx_t columns() const { return in.columns(); }

  void store_rows(const panels<T>& x, const stored_gradient_head<T>& to, idx_t begin, idx_t count) const {
    const idx_t cols = to.cols;
    for (idx_t t = 0; t < count; ++t)
      for (idx_t col = 0; col < cols; col += panel_width<T>)
        std::copy_n(x.at(t, col), std::min<idx_t>(panel_width<T>, cols - col), s.rows + t * cols + col);
    to.store_rows(s.rows, cols, begin, count);
  }
  /// The same through the norm of the rows x, where these are of unit norm.
  void store_unit_rows(const panels<T>& d, const panels<T>& x, const T* norm, const stored_gradient_head<T>& to,
                       idx_t begin, idx_t count) const {
    for (idx_t t = 0; parameters.unit_norm_eps >= T(0) && t < count; ++t) {
      const packet<T> along = broadcast<T>(-dot_rows(d, x, t, features())), factor = broadcast<T>(norm[t]);
      for (idx_t col = 0; col < features(); col += width<T>)
        store<T>(d.at(t, col), mul(factor, fma(along, load<T>(x.at(t, col)), load<T>(d.at(t, col)))));
    }
    store_rows(d, to, begin, count);
  }
  /// The same through the map, which takes features by columns.
  void store_features(const panels<T>& phi, const panels<T>& d, const token_rows<T>& rows, bool keys, idx_t first,
                      idx_t position, const stored_gradient_head<T>& to) const {
    for (const auto& [from, columns] : {std::pair{&phi, s.phi}, std::pair{&d, s.d_phi}})
      for (idx_t f = 0; f < features(); f += width<T>)
        for (idx_t t = 0; t < rows.count; t += width<T>) {
          packet<T> square[width<T>];
          for (int i = 0; i < width<T>; ++i) square[i] = load<T>(from->at(t + i, f));
          transpose<T>(square);
          for (int i = 0; i < width<T>; ++i) store<T>(columns + (f + i) * kernel_chunk + t, square[i]);
        }
    in.map->back_to({rows, b * call.heads + h, keys, first, position, s.phi, s.d_phi}, to, s.dx, nullptr, s.map);
  }

  /// The sums of a chunk run from its last token to its first; the gradient of a log decay of -infinity is 0.
  void store_decays(idx_t begin, idx_t count) const {
    const idx_t m = features(), head = in.at(in.d_log_decay, h);
    const bool channel = s.decay.kind == decay_kind::channel, adds = in.adds(in.d_log_decay, h);
    const matrix_view<T> to = head_of(in.d_log_decay, b, head);
    if constexpr (!reads_state<R>)
      each_packet(
          count, m,
          [](idx_t, idx_t, const auto& sum, const auto& k, const auto& dk) { return sub(sum, mul(k, dk)); }, s.d_gamma,
          s.d_gamma, s.k, s.dk);
    for (idx_t t = count - 1; t >= 0; --t) {
      for (idx_t r = 0; r < m; r += width<T>)
        store<T>(s.d_last + r, add(load<T>(s.d_last + r), load<T>(s.d_gamma.at(t, r))));
      for (idx_t col = 0; channel && col < m; col += panel_width<T>) {
        const T* const gates = s.decay.gate.at(t, col);
        for (idx_t r = 0; r < std::min<idx_t>(panel_width<T>, m - col); ++r)
          s.rows[col + r] = gates[r] > T(0) ? s.d_last[col + r] : T(0);
      }
      if (!channel) s.rows[0] = s.decay.gates[t] > T(0) ? sum_of(s.d_last, m) : T(0);
      store_gradient_row(s.rows, T(1), to, begin + t, adds);
    }
  }

 private:
  static T sum_of(const T* x, idx_t count) {
    const idx_t whole = count / width<T> * width<T>;
    packet<T> sums = zero<T>();
    for (idx_t n = 0; n < whole; n += width<T>) sums = add(sums, load<T>(x + n));
    T sum = sum_lanes(sums);
    for (idx_t n = whole; n < count; ++n) sum += x[n];
    return sum;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
